"""What is in a data file, as a run would see it: python data.py FILE [--val FILE] [--model M]."""

import contextlib
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from records.examples import (
    Example,
    Examples,
    column_names,
    load_splits,
    suggest_class_weights,
)
from records.forms import (
    CHOSEN_FIELDS,
    COMPLETION_FIELDS,
    DIALOGUE_FIELDS,
    PROMPT_FIELDS,
    REJECTED_FIELDS,
    Fault,
    kind_of,
    named_fields,
)
from records.readers import count_lines, read_records, split_sources
from records.tokenizer import Tokenizer
from runs.cli import parse_command
from runs.console import Wait, advance
from runs.settings import Data, check_fields, path_setting, with_limits

BINS = 8  # of a histogram
# Of a long text, so many tokens of its beginning and of its end are shown.
FIRST_TOKENS, LAST_TOKENS = 200, 100
# A file is read as the first of these kinds that any of its records has.
READ_AS = {
    "rated": "ratings, for kto.py",
    "paired": "pairs, for dpo.py or kto.py",
    "demonstrations": "demonstrations, for spin.py",
    "prompts": "prompts, for online.py",
}
TEXT_FIELDS = (
    *PROMPT_FIELDS,
    *COMPLETION_FIELDS,
    *CHOSEN_FIELDS,
    *REJECTED_FIELDS,
    *DIALOGUE_FIELDS,
)
HTML_ENTITY = re.compile(r"&(amp|lt|gt|quot|apos|nbsp|#\d{1,6}|#x[0-9a-fA-F]{1,6});")
QUOTED = re.compile(r"""\s*(".*"|'.*'|“.*”)\s*""", re.DOTALL)
LARGE_SHARE = 0.2  # of texts in quotation marks


@dataclass(frozen=True)
class PreviewSettings(Data):
    """Which file to show, and for which model."""

    model: str = path_setting("demo/base")
    """Whose tokenizer, chat template and context to take."""


def main() -> None:
    """Print the table of a file's examples, histograms of their lengths, and the first one token by
    token."""
    first, *rest = sys.argv[1:] or ["--help"]
    if not first.startswith("-"):
        first = f"--train={first}"
    data = parse_command(PreviewSettings, __doc__, [first, *rest])
    check_fields(data)

    from hub.folders import fetch_model  # slow to import
    from hub.weights import read_source

    folder = fetch_model(data.model, weights=False)
    data = with_limits(data, read_source(folder).arguments["block_size"])
    tokenizer = Tokenizer(folder, data.chat_template, data.date)

    looks = {name: look_at(getattr(data, name), data) for name in ("train", "val", "test")}
    kind = next((kind for kind in READ_AS if looks["train"].kinds[kind]), "rated")
    print(f"read as {READ_AS[kind]}")
    parts = load_splits(data, tokenizer, kind, print)
    examples = parts["train"]
    if suggestion := suggest_class_weights(examples):
        print(suggestion)
    warnings = warnings_of_sharing(parts)
    for name, look in looks.items():
        warnings += warnings_of_texts(name, look)
    for warning in warnings:
        print(f"  warning: {warning}")

    width = shutil.get_terminal_size().columns
    length = examples.rows["length"]
    print("prompt tokens", *histogram(length[:, 0], width), sep="\n")
    if examples.n_segments > 1:
        print("completion tokens", *histogram(length[:, 1:], width), sep="\n")
    print("an example by tokens, those after > scored")
    print(*token_lines(examples[0], tokenizer, data.score_prompt, width), sep="\n")


# ---- the records as they stand in the file -------------------------------------------------------


@dataclass
class Look:
    """What was counted in the records of one part of the data, before anything is refused."""

    kinds: Counter = field(default_factory=Counter)  # Kind -> records
    entities: int = 0  # records with HTML entities
    first_entity: str = ""  # where the first of them is
    texts: Counter = field(default_factory=Counter)  # field, or role of a message -> texts
    quoted: Counter = field(default_factory=Counter)  # the same: those in quotation marks


def look_at(source: str | None, data: Data) -> Look:
    """Look at all records of a source. What cannot be read is left to load_splits, which refuses it as
    a run does."""
    look = Look()
    columns = column_names(data)
    for files, _ in split_sources(source) if source else ():
        for file in files:
            with Wait(f"looking at {file}", count_lines(file), "records"):
                for where, raw in read_records(file, data.extra_fields, columns):
                    with contextlib.suppress(Fault):
                        _, fields = named_fields(raw, columns)
                        look.kinds[kind_of(fields)] += 1
                        _look_at_texts(where, fields, look)
                    advance()
    return look


def _look_at_texts(where: str, fields: dict, look: Look) -> None:
    has_entity = False
    for name in TEXT_FIELDS:
        for role, text in _texts_of(fields.get(name)):
            what = f"messages of the {role}" if role else f"texts in {name}"
            look.texts[what] += 1
            look.quoted[what] += QUOTED.fullmatch(text) is not None
            has_entity = has_entity or HTML_ENTITY.search(text) is not None
    if has_entity:
        look.entities += 1
        look.first_entity = look.first_entity or where


def _texts_of(value) -> Iterator[tuple[str, str]]:
    """(role, text) of each message in a field, ("", text) of a text alone."""
    if isinstance(value, str):
        yield "", value
    for message in value if isinstance(value, list) else [value]:
        if isinstance(message, dict):
            role = message.get("role") or message.get("from")
            text = message.get("content") or message.get("value")
            if isinstance(text, str):
                yield str(role), text


# ---- what is said --------------------------------------------------------------------------------


def warnings_of_texts(name: str, look: Look) -> list[str]:
    """A line for each thing in the texts of a part that is seldom meant."""
    lines = []
    if look.entities:
        lines.append(
            f"{name}: {look.entities:,} records hold HTML entities such as &amp; "
            f"(the first: {look.first_entity})"
        )
    for what, count in look.quoted.items():
        if count >= LARGE_SHARE * look.texts[what]:
            lines.append(
                f"{name}: {count:,} of {look.texts[what]:,} {what} begin and end with "
                "quotation marks: are these part of the text?"
            )
    return lines


def warnings_of_sharing(parts: dict[str, Sequence[Example]]) -> list[str]:
    """A line for each part that has prompts, or prompts with completions, of data.train."""
    train = Examples.of(parts["train"])
    prompts, texts = set(train.ids_as_bytes(0)), set(_whole_texts(train))
    lines = []
    for name in ("val", "test"):
        if not parts[name]:
            continue
        part = Examples.of(parts[name])
        own_prompts = set(part.ids_as_bytes(0))
        n_prompts = len(own_prompts & prompts)
        n_texts = sum(text in texts for text in _whole_texts(part))
        if n_prompts:
            lines.append(
                f"{name}: {n_prompts:,} of its {len(own_prompts):,} prompts are in train too; "
                f"{n_texts:,} of its {len(part):,} examples are there with the same completions"
            )
    return lines


def _whole_texts(examples: Examples) -> Iterator[tuple[bytes, ...]]:
    return zip(*(examples.ids_as_bytes(k) for k in range(examples.n_segments)))


def histogram(lengths: np.ndarray, width: int) -> list[str]:
    """Lines such as `12 to 40 |##### 1,234`, as wide as a terminal of this width, for bins of equal
    size."""
    low, high = lengths.min(), lengths.max()
    bin_size = -(-(high + 1 - low) // BINS)  # rounded up
    edges = low + np.arange(BINS + 1) * bin_size
    counts, _ = np.histogram(lengths, edges)
    longest_bar = max(8, width - 30)
    lines = []
    for first, last, count in zip(edges, edges[1:] - 1, counts):
        bar = "#" * -(-count * longest_bar // max(counts))  # rounded up
        lines.append(f"{first:7} to {last:6} |{bar} {count:,}")
    return lines


def token_lines(
    example: Example, tokenizer: Tokenizer, score_prompt: bool, width: int
) -> list[str]:
    """An example token by token, in lines of this width: `>` is before lines of scored tokens."""
    token_text = tokenizer.processor.id_to_token
    lines = [f"{example.where}, {'desirable' if example.label else 'undesirable'}"]
    for k, ids in enumerate((example.prompt, *example.completions)):
        name = f"completion {k}" if k else "prompt"
        lines.append(f"  {name}, {len(ids)} tokens")
        tokens = [str(token_text(int(i))) for i in ids]
        n_left_out = len(ids) - FIRST_TOKENS - LAST_TOKENS
        if n_left_out > 0:
            tokens[FIRST_TOKENS:-LAST_TOKENS] = [f"... {n_left_out:,} more ..."]
        shown = "|".join(x if x.isprintable() else repr(x)[1:-1] for x in tokens)
        is_scored = k > 0 or score_prompt
        for line in textwrap.wrap(shown, width - 4):
            lines.append(f"  > {line}" if is_scored else f"    {line}")
    return lines
