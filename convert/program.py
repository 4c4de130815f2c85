"""Foreign data to our own records, before training: python -m convert FILE [--form NAME] [--out FILE.jsonl].

Without --form and --columns it says which form fits. Without --out it shows three records as they would come out.
"""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

from convert.layout import Conversion
from convert.paths import nearest, paths_in
from convert.reader import Reader
from infra.console import BadInput, user_error
from infra.parse import parse_command, read_config_file
from infra.settings import find_path, split_commas
from preview import show_record
from records.forms import as_text, parse_json, understand_record
from records.sources import decoded_records, files_of, split_sources

FORMS = Path(__file__).parent / "forms"


def main(words: list[str]) -> None:
    """Raises BadInput."""
    settings = settings_of(words)
    if settings == Conversion(settings.file, kind=settings.kind, out=settings.out):
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
        is_the_source = out.exists() and any(x.exists() and x.samefile(out) for x in files)
        if out.suffix != ".jsonl" or is_the_source:
            raise BadInput(f"--out: {out}: expected another file, whose name ends in .jsonl")
    return settings


def form_file(name: str) -> str:
    """The file of a form: its name in convert/forms, or a file. Raises BadInput."""
    file = find_path(name) if name.endswith((".yaml", ".yml")) else FORMS / f"{name}.yaml"
    if not file.exists():
        names = [form.stem for form in sorted(FORMS.glob("*.yaml"))]
        raise BadInput(f"--form: {name}: no such form; there is {nearest(name, names)}")
    return str(file)


def write(lines: Iterable[str], settings: Conversion, counts: Counter) -> None:
    """Write the lines, so that the file is whole or not there. Raises BadInput."""
    out = Path(settings.out)
    unfinished = out.with_name(f".{out.name}.tmp")
    try:
        with user_error("--out"):
            opened = open(unfinished, "w", encoding="utf-8")
        with opened as file:
            for line in lines:
                file.write(line + "\n")
            if not file.tell():
                dropped = [f"; {n:,} {what}" for what, n in counts.items() if what != "read"]
                raise BadInput(f"{settings.file}: no records{''.join(dropped)}")
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
    """The settings, with the form that fits where it is only to be shown. Raises BadInput if it must be given, and if
    no form fits and these are no records of ours."""
    file = files_of(split_sources(settings.file)[0])[0]
    sample = list(islice(decoded_records(file, []), 200))
    form = fitting_form(settings, sample)
    n_ours, fault = try_settings(settings, sample)
    if form and settings.out and not n_ours:
        raise BadInput(f"{settings.file}: --form {form} fits: give it with --out {settings.out}")
    if form and not settings.out:
        more = "; without it these are records of ours" if n_ours else ""
        print(f"--form {form} fits{more}", flush=True)
        return replace(settings, **read_config_file(form_file(form)))
    if n_ours or not sample:
        return settings
    lines = [fault, "no form of convert/forms fits; say where the fields are (docs/convert.md):"]
    for path, value in list(dict(paths_in(sample[0][1])).items())[:30]:
        lines.append(f"  {path} = {as_text(value)[:60]!r}")
    raise BadInput("\n".join(lines))


def fitting_form(settings: Conversion, sample: list) -> str | None:
    """The form of convert/forms that fits: all its paths are in these records, and no fitting form has more paths."""
    ranks = {}
    for file in sorted(FORMS.glob("*.yaml")):
        form = read_config_file(str(file))
        is_for_pairs = file.stem.endswith("_pairs")
        if is_for_pairs and settings.kind != "paired":
            continue
        n_records, fault = try_settings(replace(settings, **form), sample)
        if n_records and not fault:
            ranks[file.stem] = (is_for_pairs, len(split_commas(form["columns"])))
    return max(ranks, key=ranks.get, default=None)


def try_settings(settings: Conversion, sample: list) -> tuple[int, str]:
    """The number of records of ours that the settings make of a sample; and a fault, if there is one."""
    n_records = 0
    try:
        reader = Reader(settings, Counter())
        for _ in reader.read([sample]):
            n_records += 1
    except BadInput as e:
        return n_records, str(e).splitlines()[0]
    has_marks = reader.layout.was_marked or not reader.layout.marks
    return n_records, "" if has_marks else "no text has the marks of --turns"
