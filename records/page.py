"""`python data.py FILE`: what is in a file, as a run would see it.

Reading order: page; parse_page (its command line); the first records, raw and as turns. show.py prints a record as
turns, and finds settings that may read a file.
"""

import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from infra.console import BadInput, user_error
from infra.parse import parse_command, read_yaml, split_options
from infra.settings import Data, find_path, read_text, split_commas
from models.hub import context_of, find_model, read_config
from records.examples import load_splits, with_limits
from records.foreign import Reader
from records.forms import Kind, understand_record
from records.show import fitting_preset, show_record, suggestion
from records.sources import decoded_records, files_of, split_share, split_sources
from records.tokenizer import Tokenizer

UNLIMITED = 10**9  # tokens


@dataclass(frozen=True)
class PageSettings(Data):
    """Which file to show, and for which model."""

    model: str | None = None
    """Whose tokenizer, chat template and context to take. Default: the demo's tokenizer, and no text is cut
    unless a limit is given."""
    kind: Kind = "rated"
    """What is learned from: rated (kto.py), paired (dpo.py), demonstrations (spin.py), prompts (online.py)."""


def page() -> None:
    """What is in a data file, as a run would see it: python data.py FILE [--kind paired] [--model M]."""
    data = parse_page(sys.argv[1:])
    source = find_model(data.model or "demo/base", weights=False)
    if data.model:
        data = with_limits(data, context_of(read_config(source)))
    else:
        print("tokens are those of the demo's tokenizer: give --model, the one that you train")
        data = replace(
            data,
            max_prompt=data.max_prompt or UNLIMITED,
            max_completion=data.max_completion or UNLIMITED,
        )
    tokenizer = Tokenizer(source, data.chat_template, data.date, data.chat_template_kwargs)
    try:
        first = load_splits(data, tokenizer, data.kind)["train"][0]
    except BadInput as e:
        hint = suggestion(first_records(data), data) if not data.columns else ""
        # the form is not known: one record tells as much as twenty
        raise BadInput(f"{str(e).splitlines()[0]}\n{hint}" if hint else str(e)) from None
    show_first_of_each_kind(data)
    print()
    for ids in (first.prompt, *first.completions):
        print(repr(tokenizer.hf.decode(ids)), ids.tolist(), sep="\n")
    if not data.columns and not data.turns:
        preset = fitting_preset(first_records(data), data)
        if preset:
            print(f"another way to read it: --config {preset}")


def parse_page(words: list[str]) -> PageSettings:
    """The settings of a command line. As in a run's, a --config may have a group `data` (config/data), and
    --data.columns is --columns."""
    if words and not words[0].startswith("--"):
        words = ["--train", *words]
    plain: list[str] = []
    presets: dict[str, object] = {}
    for head, *values in split_options(words)[1:]:
        name, has_value, value = head.partition("=")
        values = [value, *values] if has_value else values
        file = find_path(values[0]) if name == "--config" and values else None
        group = None
        if file and file.exists():
            with user_error("config", str(file)):
                group = read_yaml(read_text(file))
        if isinstance(group, dict) and isinstance(group.get("data"), dict):
            presets |= group["data"]
            if "model" in group:
                presets["model"] = group["model"]
        else:
            plain += [name.replace("--data.", "--"), *values]
    return parse_command(PageSettings, page.__doc__, plain, presets)


def first_records(data: Data, n: int = 200) -> list:
    """The first raw records of data.train; none if it cannot be read."""
    with suppress(BadInput):
        records = decoded_records(first_files(data)[0], [])
        return [raw for _, raw in islice(records, n)]
    return []


def show_first_of_each_kind(data: PageSettings) -> None:
    """Print the first record of each kind (up, down, a pair, ...) as turns."""
    reader = Reader(data, data.kind, Counter())
    kinds = set()
    files = first_files(data)
    for file in files:  # as in a run: a later file may take a rating back
        reader.settle(decoded_records(file, []))
    for file in files:
        for where, ours in islice(reader.read(decoded_records(file, []), []), 10_000):
            record = understand_record(ours, data.kind, split_commas(data.extra))
            kind = data.kind if record.label is None else record.label
            if kind not in kinds:
                kinds.add(kind)
                show_record(where, record)
            if len(kinds) == 2 or data.kind != "rated":
                return


def first_files(data: Data) -> list[str]:
    """The files of the first source of data.train."""
    name, _ = split_share(split_sources(data.train)[0])
    return files_of(name)
