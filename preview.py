"""`python data.py FILE` shows a file as a run would see it. `python -m convert FILE` shows records too.

Reading order: main; parse_preview (its command line); show_record.
"""

import sys
import textwrap
from dataclasses import dataclass, fields, replace
from itertools import islice

from infra.parse import parse_command
from infra.settings import Data, split_commas
from records.forms import Kind, Record, as_turns, content_of, understand_record
from records.sources import decoded_records, files_of, split_sources

UNLIMITED = 10**9  # tokens
LINES = 8  # of a turn, at most


@dataclass(frozen=True)
class PreviewSettings:
    """A file to show, and a model."""

    data: Data
    model: str | None = None
    """The model that gives tokenizer, chat template and context. Default: the demo's tokenizer, and no text is cut
    unless a limit is given."""
    kind: Kind = "rated"
    """The kind of its records: rated (kto.py), paired (dpo.py), demonstrations (spin.py), prompts (online.py)."""


def main() -> None:
    """Shows a data file as a run would see it: python data.py FILE [--kind paired] [--model M]."""
    # python -m convert, which needs show_record, starts without torch
    from models.hub import context_of, find_model, read_config
    from records.examples import load_splits, with_limits
    from records.tokenizer import Tokenizer

    settings = parse_preview(sys.argv[1:])
    data = settings.data
    source = find_model(settings.model or "demo/base", weights=False)
    if settings.model:
        data = with_limits(data, context_of(read_config(source)))
    else:
        print("tokens are those of the demo's tokenizer: give --model, the one that you train")
        data = replace(
            data,
            max_prompt=data.max_prompt or UNLIMITED,
            max_completion=data.max_completion or UNLIMITED,
        )
    tokenizer = Tokenizer(source, data.chat_template, data.date, data.chat_template_kwargs)
    first = load_splits(data, tokenizer, settings.kind)["train"][0]
    show_first_record(data, settings.kind)
    print()
    for ids in (first.prompt, *first.completions):
        print(repr(tokenizer.hf.decode(ids)), ids.tolist(), sep="\n")


def parse_preview(words: list[str]) -> PreviewSettings:
    """The settings of a command line. --split there is --data.split. Raises BadInput."""
    if words and not words[0].startswith("--"):
        words = ["--train", *words]
    names = {setting.name for setting in fields(Data)}
    long_words = []
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        is_short = word.startswith("--") and name in names
        long_words.append(word.replace("--", "--data.", 1) if is_short else word)
    return parse_command(PreviewSettings, main.__doc__, long_words)


def show_first_record(data: Data, kind: Kind) -> None:
    """Print the first record of the first file as turns."""
    file = files_of(split_sources(data.train)[0])[0]
    for where, raw in islice(decoded_records(file, []), 1):
        show_record(where, understand_record(raw, kind, split_commas(data.extra)))


# ---- a record as turns ---------------------------------------------------------------------------


def show_record(where: str, record: Record) -> None:
    """Print a record as turns, at most 80 columns wide."""
    title = {
        True: "up",
        False: "down",
        None: "a pair" if len(record.completions) == 2 else "unrated",
    }
    print(f"\n{title[record.label]} ({where}):")
    if isinstance(record.prompt, str) and not record.instruct:
        show_turn("prompt", record.prompt)
    else:
        for turn in as_turns(record.prompt):
            show_turn(turn["role"], words_of(turn))
    names = ["chosen", "rejected"] if len(record.completions) == 2 else ["answer"]
    for name, completion in zip(names, record.completions):
        show_turn(name, words_of(completion))


def words_of(turn: str | dict) -> str:
    """The text of a turn, or a word for its tool calls."""
    calls = isinstance(turn, dict) and turn.get("tool_calls")
    return content_of(turn) or ("(a call of tools)" if calls else "(empty)")


def show_turn(name: str, text: str) -> None:
    lines = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, 68, replace_whitespace=False) or [""]
    if len(lines) > LINES:
        lines[LINES:] = [f"[{len(lines) - LINES:,} more lines]"]
    for line in lines or [""]:
        letters = "".join(map(printable, line))
        print(f"  {name:10}{letters}".rstrip())
        name = ""  # only before the first line


def printable(letter: str) -> str:
    return letter if letter.isprintable() else "?"
