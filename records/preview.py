"""What is in a data file, as a run would see it: python data.py FILE [--model M]."""

import contextlib
import shutil
import sys
import textwrap
from dataclasses import dataclass

import numpy as np

from records.examples import (
    Example,
    column_names,
    describe_examples,
    load_examples,
    suggest_class_weights,
)
from records.forms import Fault, Kind, understand_record
from records.readers import read_records, split_sources
from records.tokenizer import Tokenizer
from runs.cli import parse_command
from runs.settings import Data, check_fields, path_setting, with_limits

BINS = 8  # of a histogram
# Of a long text, so many tokens of its beginning and of its end are shown.
FIRST_TOKENS, LAST_TOKENS = 200, 100


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
    examples, cuts, ignored, _ = load_examples(data.train, tokenizer, _guess_kind(data), data)

    width = shutil.get_terminal_size().columns
    print(describe_examples(data.train, examples, cuts, ignored))
    if suggestion := suggest_class_weights(examples):
        print(suggestion)
    length = examples.rows["length"]
    print("prompt tokens", *histogram(length[:, 0], width), sep="\n")
    if examples.n_segments > 1:
        print("completion tokens", *histogram(length[:, 1:], width), sep="\n")
    print("an example by tokens, those after > scored")
    print(*token_lines(examples[0], tokenizer, data.score_prompt, width), sep="\n")


def _guess_kind(data: Data) -> Kind:
    """The kind that fits the first record."""
    extra, columns = data.extra_fields, column_names(data)
    (first_files, _), *_ = split_sources(data.train)
    _, raw = next(read_records(first_files[0], extra, columns), ("", None))
    for kind in ("paired", "rated", "demonstrations", "prompts"):
        with contextlib.suppress(Fault):
            understand_record(raw, kind, extra, columns)
            return kind
    return "rated"  # load_examples then says what is wrong


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
    processor = tokenizer.processor
    token_text = processor.id_to_token if tokenizer.fast else processor.id_to_piece
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
