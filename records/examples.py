"""From files of records to a list of examples of token ids, and what a run does with them before it trains.

Reading order: Example (what comes out); load_examples and load_file (the whole way of a record); the
files (read_records); the parts of the data and their table (load_splits); the hash of the data; the
page of `python data.py FILE`.
"""

import csv
import glob
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hub import context_of, find_model, read_config
from records.forms import ALIASES, Dropped, Kind, understand_record, unique_keys
from records.tokenizer import Tokenizer
from runs.console import BadInput, user_error
from runs.settings import Data, find_path, parse_command, refuse_unless

MOST_FAULTS = 20  # bad records that are reported before reading stops


class Example(NamedTuple):
    """A prompt with its completion (rated or demonstrated), its two (chosen, rejected) or none, as
    arrays of int32 token ids."""

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    label: bool  # desirable; True where nothing was rated
    rewards: tuple[float | None, ...] = (None, None)  # of chosen and rejected
    where: str = ""  # file:line
    weight: float = 1.0
    extra: dict[str, str | float] = {}  # the fields that data.extra names

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The prompt and each completion as bytes, to see which examples have equal ones."""
        return tuple(ids.tobytes() for ids in (self.prompt, *self.completions))


# ---- from a file to examples ---------------------------------------------------------------------


def load_examples(
    source: str, tokenizer: Tokenizer, kind: Kind, data: Data
) -> tuple[list[Example], Counter]:
    """All examples of one or more sources (`a.jsonl,more/*.csv`), such as data.train names; and counts of
    what was cut, dropped, ...

    `kind` is what the caller learns from. For `rated`, a pair becomes two examples; for `prompts`,
    each distinct prompt is one example without completions. `data`: the settings, with
    max_prompt and max_completion filled in (with_limits).

    Raises BadInput with a line for each of the first 20 bad records; a label is never guessed.
    """
    counts, examples = Counter(), []
    for name in map(str.strip, source.split(",")):
        for file in sorted(glob.glob(str(find_path(name)))) or [name]:
            examples += load_file(file, tokenizer, kind, data, counts)
    if kind == "prompts":
        first = {}
        for example in examples:
            first.setdefault(example.prompt.tobytes(), example)
        examples = list(first.values())
    return examples, counts


def load_file(file: str, tokenizer: Tokenizer, kind: Kind, data: Data, counts: Counter) -> list:
    """The examples of one file; adds to the counts. Raises BadInput."""
    columns = ALIASES | names_given("data.columns", data.columns)
    labels = names_given("data.labels", data.labels)
    records, texts, examples, faults = {}, [], [], []
    # 1. understand: what a line of the file holds becomes a Record
    for place, raw in read_records(file):
        where = f"{file}:{place}"
        with collect(faults, where):
            if isinstance(raw, bytes):
                raw = json.loads(raw, object_pairs_hook=unique_keys)
            try:
                record = understand_record(raw, kind, data.extra_fields, columns, labels)
            except Dropped:
                counts["dropped by data.labels"] += 1
                continue
            records[where] = record
            counts.update(f"with {name}, which nothing reads" for name in record.ignored)
    # 2. render: messages become texts. All records of a file are rendered in one way: by the chat
    # template if any of them needs it.
    by_template = any(
        record.has_messages or record.instruct and tokenizer.template for record in records.values()
    )
    counts["by the chat template" if by_template else "plain"] += len(records)
    for where, record in records.items():
        with collect(faults, where):
            texts.append(tokenizer.render(record, by_template))
    if faults or not records:
        raise BadInput("\n".join(faults) or f"{file}: no records")
    # 3. encode: texts become token ids, with BOS and EOS
    encoded = zip(records.items(), tokenizer.encode_all(texts))
    for (where, record), (prompt, completions) in encoded:
        if not prompt or not all(completions):
            raise BadInput(f"{where}: {'completion' if prompt else 'prompt'}: it has no tokens")
        # 4. cut a prompt's beginning, where a BOS stays if there is room for more, and completions' ends
        too_many = max(0, len(prompt) - data.max_prompt)
        n_bos = int(prompt[0] == tokenizer.bos and data.max_prompt > 1)
        del prompt[n_bos : n_bos + too_many]
        counts["prompts cut"] += too_many > 0
        counts["completions cut"] += sum(len(ids) > data.max_completion for ids in completions)
        completions = tuple(np.array(ids[: data.max_completion], np.int32) for ids in completions)
        example = Example(
            np.array(prompt, np.int32),
            completions,
            record.label is not False,
            record.rewards,
            where,
            record.weight,
            record.extra,
        )
        if kind != "rated" or record.label is not None:
            examples.append(example)
            continue
        for y, label, reward in zip(completions, (True, False), record.rewards):
            # the two ratings of a pair share its prompt
            examples.append(example._replace(completions=(y,), label=label, rewards=(reward, None)))
    return examples


@contextmanager
def collect(faults: list[str], where: str):
    """What is wrong with a record becomes a line in `faults`. Raises BadInput at the twentieth."""
    try:
        yield
    except ValueError as e:  # BadInput, or Python's own for a text that is no JSON or no Unicode
        # json counts lines within the line that it gets
        faults.append(f"{where}: {e}".replace("line 1 ", ""))
        if len(faults) == MOST_FAULTS:
            raise BadInput("\n".join(faults)) from None


def names_given(setting: str, text: str | None) -> dict[str, str]:
    """The records' names -> ours: `up=4|5,down=1` gives {"4": "up", "5": "up", "1": "down"}. Raises
    BadInput."""
    with user_error(setting, f"{text}: expected name=name, separated by commas"):
        pairs = [pair.split("=") for pair in text.split(",")] if text else []
        return unique_keys((x, ours) for ours, theirs in pairs for x in theirs.split("|"))


# ---- files ---------------------------------------------------------------------------------------


def absolute_sources(sources: str) -> str:
    """The same sources with absolute paths of files, folders and patterns, but ids of the Hub as they
    are: settings.yaml then means the same from any folder."""
    parts = [part.strip() for part in sources.split(",")]
    for i, part in enumerate(parts):
        if glob.glob(str(find_path(part.partition(":")[0]))):
            parts[i] = os.path.abspath(find_path(part))
    return ",".join(parts)


def read_records(source: str) -> Iterator[tuple[int, object]]:
    """(place, raw record) for each record of a file, a folder of save_to_disk or a Hub data set.

    The place is a line (in a csv file that on which the row ends), or the record's number in a JSON
    array or a table. The raw record is a line of JSON as bytes, or what it holds. Raises BadInput.
    """
    path = find_path(source)
    with user_error(None, source):
        if path.suffix == ".jsonl":
            with open(path, "rb") as lines:
                yield from ((n, line) for n, line in enumerate(lines, 1) if line.strip())
        elif path.suffix == ".json":
            yield from enumerate(json.loads(path.read_bytes(), object_pairs_hook=unique_keys), 1)
        elif path.suffix == ".csv":
            # Python's csv, not one that guesses types: that makes 1 of 01 and nothing of NA
            csv.field_size_limit(2**31 - 1)  # the default of 128 KiB would refuse a long document
            with open(path, encoding="utf-8-sig", newline="") as file:
                rows = csv.reader(file, strict=True)
                try:
                    names = next(rows, [])
                    for cells in filter(None, rows):  # a blank line has no cells
                        if len(cells) != len(names):
                            raise ValueError("not as many cells as columns")
                        yield rows.line_num, unique_keys(zip(names, cells))
                except (csv.Error, ValueError) as e:
                    raise BadInput(f"{source}:{rows.line_num}: {e}") from None
        else:
            yield from enumerate(table(source, path), 1)


def table(source: str, path: Path):
    """The rows of a parquet file, of a folder of save_to_disk (`folder` or `folder:split`) or of a Hub
    data set (`id`, `id:split` or `id:config:split`)."""
    import datasets  # slow to import

    name, *rest = source.split(":")
    *config, split = rest or ["train"]
    nothing = "no file of a known form, no folder of save_to_disk, not found on huggingface.co"
    with user_error(f"{source}: {nothing}", name, Exception):  # the package raises a dozen kinds
        if path.suffix == ".parquet":
            return datasets.Dataset.from_parquet(str(path))
        if not find_path(name).is_dir():
            return datasets.load_dataset(name, *config, split=split)
        rows = datasets.load_from_disk(find_path(name))
        return rows[split] if isinstance(rows, dict) else rows


# ---- the parts of the data -----------------------------------------------------------------------


def with_limits(data: Data, context: int) -> Data:
    """Fill in max_prompt and max_completion so that both together fit into a model's context (in
    tokens). Raises BadInput where the given ones do not."""
    room = context - (data.max_completion or 1)
    max_prompt = data.max_prompt or max(1, min(1024, context // 2, room))
    max_completion = data.max_completion or min(1024, context - max_prompt)
    refuse_unless(
        max_completion >= 1 and max_prompt + max_completion <= context,
        f"data.max_prompt {max_prompt} + data.max_completion {max_completion} exceed the "
        f"context of {context}",
    )
    return replace(data, max_prompt=max_prompt, max_completion=max_completion)


def load_splits(
    data: Data, tokenizer: Tokenizer, kind: Kind, say: Callable[[str], None]
) -> dict[str, list[Example]]:
    """{"train", "val", "test": examples}, each described by say(table). A part that the settings do
    not name is empty. `data` as in load_examples. Raises BadInput."""
    parts, counts = {}, {}
    for name in ("train", "val", "test"):
        source = getattr(data, name)
        parts[name], counts[name] = (
            load_examples(source, tokenizer, kind, data) if source else ([], {})
        )
    if data.split:
        if data.val or data.test:
            raise BadInput("data.split: it cuts data.train; give it, or data.val and data.test")
        parts = dict(zip(parts, split_by_prompt(parts["train"], data.split)))
    for name, examples in parts.items():
        if examples:
            say(describe(name, examples, counts[name]))
    return parts


def split_by_prompt(examples: list[Example], parts: str) -> list[list[Example]]:
    """[train, val, test], in the proportions of data.split: `980,10,10` or `990,10`.

    A prompt's part is a function of a hash of its ids: it depends neither on the order nor on the
    other prompts, and ratings of one prompt stay together. Raises BadInput.
    """
    with user_error("data.split", parts):
        sizes = np.array(parts.split(","), float)
    if len(sizes) not in (2, 3) or not sizes[0] > 0 <= min(sizes):
        raise BadInput(f"data.split: expected two or three parts like 980,10,10; got {parts}")
    upper_edges, split = sizes.cumsum() / sizes.sum(), ([], [], [])
    for example in examples:
        digest = hashlib.sha256(example.prompt.tobytes()).digest()
        position = int.from_bytes(digest[:8], "big") / 2**64  # in [0, 1)
        split[np.searchsorted(upper_edges, position, side="right")].append(example)
    return list(split)


def describe(name: str, examples: list[Example], counts: dict[str, int]) -> str:
    """A table, as text, of what is about to be learned from, for a person to check before it starts."""
    keys = [e.keys for e in examples]
    head = f"{name}: {len(keys):,} examples of {len({prompt for prompt, *_ in keys}):,} prompts"
    if any(classes := count_labels(examples)):
        head += ", {:,} desirable, {:,} undesirable".format(*classes)
    lines = [head]
    for what, lengths in {
        "prompt": [len(e.prompt) for e in examples],
        "completion": [len(ids) for e in examples for ids in e.completions],
    }.items():
        if lengths:
            numbers = np.percentile(lengths, [50, 95, 100]).astype(int)
            lines.append("  {} tokens: median {}, 95% below {}, longest {}".format(what, *numbers))
    # duplicates repeat prompt, completions and label; contradictions repeat all but the label
    distinct = len(set(keys))
    with_label = len({(key, e.label) for key, e in zip(keys, examples)})
    found = {"duplicates": len(keys) - with_label, "contradictions": with_label - distinct} | counts
    lines.append("  " + ", ".join(f"{count:,} {what}" for what, count in found.items()))
    return "\n".join(lines)


def count_labels(examples: list[Example]) -> tuple[int, int]:
    """How many ratings are desirable and undesirable. (0, 0) of anything but ratings."""
    labels = [e.label for e in examples if len(e.completions) == 1]
    return sum(labels), len(labels) - sum(labels)


def suggest_class_weights(examples: list[Example]) -> str | None:
    """A line with the class weights that arXiv 2402.01306 suggests for train: w_D n_D / (w_U n_U) is to
    lie in [1, 4/3]. The smaller of the two weights is 1. None where there are not two classes."""
    up, down = count_labels(examples)
    if not up or not down:
        return None
    weights = "1", f"{3 / 4 * up / down:.2f} to {up / down:.2f}"
    if down / up >= 3 / 4:
        weights = f"{max(1, down / up):.2f} to {4 / 3 * down / up:.2f}", "1"
    return (
        "train: class weights that the KTO paper suggests for this balance:\n"
        "  kto.desirable_weight {}, kto.undesirable_weight {}".format(*weights)
    )


def examples_hash(parts: dict[str, list[Example]]) -> str:
    """A hash of all that is learned from, in its order; the names of the files are no part of it."""
    h = hashlib.sha256()
    for name, examples in parts.items():
        for e in examples:
            keys = e.keys
            # the lengths say where a text ends
            rest = name, *map(len, keys), e.label, e.rewards, e.weight, e.extra
            h.update(repr(rest).encode())
            h.update(b"".join(keys))
    return h.hexdigest()


# ---- python data.py FILE -------------------------------------------------------------------------


@dataclass(frozen=True)
class PageSettings(Data):
    """Which file to show, and for which model."""

    model: str = "demo/base"
    """Whose tokenizer, chat template and context to take."""
    kind: Kind = "rated"
    """What is learned from: rated (kto.py), paired (dpo.py), demonstrations (spin.py), prompts (online.py)."""


def page() -> None:
    """What is in a data file, as a run would see it: python data.py FILE [--kind paired] [--model M]."""
    data = parse_command(PageSettings, page.__doc__, ["--train", *sys.argv[1:]])
    source = find_model(data.model, weights=False)
    data = with_limits(data, context_of(read_config(source).get_text_config()))
    template = data.chat_template or source.chat_template
    tokenizer = Tokenizer(source.tokenizer, template, data.date)
    examples = load_splits(data, tokenizer, data.kind, print)["train"]
    print(suggest_class_weights(examples) or "")
    for ids in (examples[0].prompt, *examples[0].completions):
        print(repr(tokenizer.hf.decode(ids)), ids.tolist(), sep="\n")
