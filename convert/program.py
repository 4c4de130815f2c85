"""Foreign data to our own records, before training: python -m convert FILE [--form NAME] [--out FILE.jsonl].

Without --form and --columns it says which form fits. Without --out it shows three records as they would come out.
"""

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from convert.layout import Conversion
from convert.reader import Reader
from infra.console import BadInput
from infra.parse import parse_command, read_config_file
from infra.settings import find_path, split_commas
from preview import show_record
from records.forms import parse_json, understand_record
from records.sources import decoded_records, files_of, split_sources

FORMS = Path(__file__).parent / "forms"


def main(words: list[str]) -> None:
    """Raises BadInput."""
    settings = settings_of(words)
    if settings == Conversion(settings.file, kind=settings.kind):
        settings = with_fitting_form(settings)
    counts: Counter = Counter()
    lines = Reader(settings, counts).read_all()
    if settings.out:
        write(lines, settings, counts)
    else:
        for record in map(parse_json, list(lines)[:3]):
            show_record(record["source"], understand_record(record, settings.kind))
    print_table(settings, counts)


def settings_of(words: list[str]) -> Conversion:
    """The settings of a command line; options override those of the form. Raises BadInput."""
    if words and not words[0].startswith("--"):
        words = ["--file", *words]
    settings = parse_command(Conversion, __doc__, words)
    if settings.form:
        settings = parse_command(
            Conversion, __doc__, [*words, "--config", form_file(settings.form)]
        )
    if settings.out:
        out = Path(settings.out)
        files = [Path(file) for part in split_sources(settings.file) for file in files_of(part)]
        if out.suffix != ".jsonl" or out.resolve() in [file.resolve() for file in files]:
            raise BadInput(f"--out: {out}: expected another file, whose name ends in .jsonl")
    return settings


def form_file(name: str) -> str:
    """The file of a form: its name in convert/forms, or a file."""
    file = FORMS / f"{name}.yaml"
    return str(file if file.exists() else find_path(name))


def write(lines: Iterable[str], settings: Conversion, counts: Counter) -> None:
    """Write the lines, so that the file is whole or not there. Raises BadInput."""
    out = Path(settings.out)
    unfinished = out.with_name(f".{out.name}.tmp")
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            for line in lines:
                file.write(line + "\n")
            if not file.tell():
                print_table(settings, counts)
                raise BadInput(f"{settings.file}: no records to write")
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)


def print_table(settings: Conversion, counts: Counter) -> None:
    """Print how many records were read, written and dropped, and why."""
    names = ("up", "down", "pairs", "unrated")
    written_records = [f"{counts[name]:,} {name}" for name in names if counts[name]]
    where = settings.out or "would be written"
    print(f"\n{settings.file}: {counts['read']:,} records; {where}: {', '.join(written_records)}")
    for what, n in counts.items():
        if what not in ("read", *names):
            print(f"  {n:,} {what}")


# ---- which form fits -----------------------------------------------------------------------------


def with_fitting_form(settings: Conversion) -> Conversion:
    """The settings with the form of convert/forms that fits, if there is one: all its paths are in these records, and
    no other one has more paths."""
    file = files_of(split_sources(settings.file)[0])[0]
    sample = list(islice(decoded_records(file, []), 200))
    ranks = {}
    for form in sorted(FORMS.glob("*.yaml")):
        is_for_pairs = form.stem.endswith("_pairs")
        if is_for_pairs and settings.kind != "paired":
            continue
        tried = replace(settings, **read_config_file(str(form)))
        reader = Reader(tried, Counter())
        with suppress(BadInput):
            is_fit = any(list(reader.read([sample])))
            if is_fit and reader.layout.was_marked == bool(reader.layout.marks):
                ranks[form] = (is_for_pairs, len(split_commas(tried.columns)))
    if not ranks:
        return settings
    form = max(ranks, key=ranks.get)
    print(f"--form {form.stem} fits", flush=True)
    return replace(settings, **read_config_file(str(form)))
