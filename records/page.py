"""`python data.py FILE`: what is in a file, as a run would see it.

Reading order: page; parse_page (its command line); the first records as turns, which show.py prints.
"""

import sys
from dataclasses import dataclass, fields, replace
from itertools import islice

from infra.parse import parse_command
from infra.settings import Data, split_commas
from models.hub import context_of, find_model, read_config
from records.examples import load_splits, with_limits
from records.forms import Kind, understand_record
from records.show import show_record
from records.sources import decoded_records, files_of, split_sources
from records.tokenizer import Tokenizer

UNLIMITED = 10**9  # tokens


@dataclass(frozen=True)
class PageSettings:
    """Which file to show, and for which model."""

    data: Data
    model: str | None = None
    """Whose tokenizer, chat template and context to take. Default: the demo's tokenizer, and no text is cut
    unless a limit is given."""
    kind: Kind = "rated"
    """What is learned from: rated (kto.py), paired (dpo.py), demonstrations (spin.py), prompts (online.py)."""


def page() -> None:
    """What is in a data file, as a run would see it: python data.py FILE [--kind paired] [--model M]."""
    settings = parse_page(sys.argv[1:])
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
    show_first_of_each_kind(data, settings.kind)
    print()
    for ids in (first.prompt, *first.completions):
        print(repr(tokenizer.hf.decode(ids)), ids.tolist(), sep="\n")


def parse_page(words: list[str]) -> PageSettings:
    """The settings of a command line, in which --split is --data.split. Raises BadInput."""
    if words and not words[0].startswith("--"):
        words = ["--train", *words]
    names = {one.name for one in fields(Data)}
    long_words = []
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        is_short = word.startswith("--") and name in names
        long_words.append(word.replace("--", "--data.", 1) if is_short else word)
    return parse_command(PageSettings, page.__doc__, long_words)


def show_first_of_each_kind(data: Data, kind: Kind) -> None:
    """Print the first record of each kind (up, down, a pair, ...) as turns."""
    titles = set()
    for file in files_of(split_sources(data.train)[0]):
        for where, raw in islice(decoded_records(file, []), 10_000):
            record = understand_record(raw, kind, split_commas(data.extra))
            if record.label not in titles:
                titles.add(record.label)
                show_record(where, record)
            if len(titles) == 2 or kind != "rated":
                return
