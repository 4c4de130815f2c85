"""The sources of records: files, folders and data sets of the Hub, and the settings that name them.

Reading order: split_sources and files_of (the files of `a.jsonl,more/*.csv`); decoded_records and
read_records (a file); read_table (tables with typed columns).
"""

import csv
import glob
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import date, time
from decimal import Decimal
from pathlib import Path

from infra.console import BadInput, user_error
from infra.settings import find_path, split_commas
from records.forms import parse_json, unique_keys

# ---- what a setting names ------------------------------------------------------------------------


def split_sources(sources: str | None) -> list[str]:
    """The parts of a setting that names several files, `a.jsonl,more/*.csv`. An existing name is taken
    unchanged: it may have a comma, as those of sweep.py do."""
    if sources and find_path(sources).exists():
        return [sources]
    return split_commas(sources)


def files_of(name: str) -> list[str]:
    """The files of a pattern, or the file, folder or id itself. An existing name may have brackets."""
    path = find_path(name)
    if path.exists():
        return [str(path)]
    return sorted(glob.glob(str(path))) or [name]


def absolute_sources(sources: str | None) -> str | None:
    """The same sources with absolute paths of files, folders and patterns, but ids of the Hub as they
    are: settings.yaml then means the same from any folder."""
    if not sources:
        return None
    absolute = []
    for part in split_sources(sources):
        path = find_path(split_name(part)[0])
        is_here = path.exists() or glob.glob(str(path))
        absolute.append(os.path.abspath(find_path(part)) if is_here else part)
    return ",".join(absolute)


# ---- the records of a file -----------------------------------------------------------------------


def decoded_records(
    file: str, faults: list[str], counts: Counter | None = None
) -> Iterator[tuple[str, object]]:
    """(file:place, record) of each record of a file. Invalid JSON is added to `faults`."""
    for place, raw in read_records(file, counts):
        where = f"{file}:{place}"
        try:
            record = parse_json(raw) if isinstance(raw, bytes) else raw
        except ValueError as e:
            faults.append(fault_of(where, e))
        else:
            yield where, record


@contextmanager
def collect(faults: list[str], where: str):
    """Adds the fault of a record to `faults`."""
    try:
        yield
    except ValueError as e:  # BadInput, or Python's own for a text that is no JSON or no Unicode
        faults.append(fault_of(where, e))


def fault_of(where: str, error: ValueError) -> str:
    # json counts lines within the line that it gets
    return f"{where}: {error}".replace("line 1 ", "")


def read_records(source: str, counts: Counter | None = None) -> Iterator[tuple[int | str, object]]:
    """(place, raw record) for each record of a file, a folder of save_to_disk or a Hub data set.

    The place is the number of a line (in a csv file the last line of the row), or of the record in a JSON array or a
    table. The raw record is one line of JSON as bytes, or its value. Raises BadInput.
    """
    path = find_path(source)
    suffix = path.suffix.lower()
    counts = Counter() if counts is None else counts
    with user_error(None, source):
        if suffix in (".jsonl", ".ndjson") or (suffix == ".json" and has_lines(path)):
            with open(path, "rb") as lines:
                yield from ((n, line) for n, line in enumerate(lines, 1) if line.strip())
        elif suffix == ".json":
            records = parse_json(path.read_bytes())
            if isinstance(records, dict):  # an export of one conversation
                records = [records]
            if not isinstance(records, list):
                raise BadInput(f"{source}: expected an array of records, got {records!r:.50}")
            yield from enumerate(records, 1)
        elif suffix in (".csv", ".tsv"):
            yield from read_csv(source, path, counts)
        else:
            yield from read_table(source)


def read_csv(source: str, path: Path, counts: Counter) -> Iterator[tuple[int, dict]]:
    """As read_records. No library that guesses types is used, because it would read 01 as 1 and drop NA."""
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB would refuse a long document
    # understand_record refuses what is no UTF-8, and names its line, which a decoder does not know
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        # spreadsheets of some countries write semicolons
        delimiter = max(",;\t", key=file.readline().count)
        file.seek(0)
        rows = csv.reader(file, strict=True, delimiter=delimiter)
        try:
            names = next(rows, [])
            for cells in filter(None, rows):  # a blank line has no cells
                missing = len(names) - len(cells)
                if missing < 0:
                    raise ValueError("more cells than columns")
                if missing:  # some tools do not write the empty cells at the end
                    counts["rows of a csv file with too few cells, the others read as empty"] += 1
                yield rows.line_num, unique_keys(list(zip(names, cells + [""] * missing)))
        except (csv.Error, ValueError) as e:
            raise BadInput(f"{source}:{rows.line_num}: {e}") from None


# endings of files that read_records reads; another name may be an id of the Hub
ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
NOTHING = (
    "no file of a known form, no folder of save_to_disk, not fetched from huggingface.co; without a network "
    "download it elsewhere (hf download --repo-type dataset) and give its folder"
)


def has_lines(path: Path) -> bool:
    """Whether the first line of a .json file is an object: Dataset.to_json writes one per line."""
    with open(path, "rb") as file, suppress(ValueError):
        return isinstance(json.loads(file.readline()), dict)
    return False


# ---- tables --------------------------------------------------------------------------------------


def read_table(source: str) -> Iterator[tuple[int, dict]]:
    """(number, record) for each row of a table. The record equals one from a line of JSON, as far as the
    table knows it. Raises BadInput."""
    features, rows = open_table(source)
    for number, row in enumerate(rows, 1):
        yield number, {column: as_in_json(x, features[column]) for column, x in row.items()}


def as_in_json(value: object, feature: object) -> object:
    """A value of a table, as in JSON. `feature`: the datasets package's description of its column.

    A class is its name, not the number of its name. A decimal is a number, and a day or a time is a text. A struct
    has the keys of all rows, and null where a row has not this key: the key goes.
    """
    names = getattr(feature, "names", None)
    if names and value is not None:  # ClassLabel
        return names[value] if value >= 0 else None  # -1: no class
    if isinstance(value, Decimal):
        return json.loads(str(value))
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, dict) and isinstance(feature, dict):
        return {key: as_in_json(x, feature[key]) for key, x in value.items() if x is not None}
    if isinstance(value, list):
        item = getattr(feature, "feature", None)
        return [as_in_json(x, item) for x in value]
    return value


def split_name(source: str) -> tuple[str, list[str], str]:
    """(name, config, split) of `id`, `id:split` or `id:config:split`."""
    name, *rest = [source] if find_path(source).exists() else source.split(":")
    *config, split = rest or ["train"]
    return name, config, split


def is_saved_to_disk(path: Path) -> bool:
    return any((path / file).exists() for file in ("dataset_info.json", "dataset_dict.json"))


def open_table(source: str) -> tuple[dict, Iterable[dict]]:
    """The features of the columns (datasets package) and the rows: of a parquet file, of a folder of save_to_disk
    (`folder` or `folder:split`), or of a Hub data set or a copy of its parquet files (`id`, `id:split` or
    `id:config:split`).

    The package guesses the types of csv and JSON files: the texts NA and null would be missing, 007 a number. A
    folder of such files is therefore refused."""
    import datasets  # slow to import

    name, config, split = split_name(source)
    path = find_path(name)
    if path.suffix.lower() == ".parquet":
        return open_parquet(path)
    if path.is_file():
        raise BadInput(f"{source}: expected a file that ends in {', '.join(ENDINGS)}")
    if path.is_dir() and not is_saved_to_disk(path) and not any(path.glob("**/*.parquet")):
        raise BadInput(
            f"{source}: expected a folder of save_to_disk or of parquet files; of others name the files, such as "
            f"{source}/*.csv, because the datasets package would guess the types of their texts"
        )
    with user_error(f"{source}: {NOTHING}", name):
        if is_saved_to_disk(path):
            rows = datasets.load_from_disk(path)
            rows = rows[split] if isinstance(rows, dict) else rows
        else:
            id_or_copy = str(path) if path.is_dir() else name
            rows = datasets.load_dataset(id_or_copy, *config, split=split)
    return rows.features, rows.with_format(None)  # a folder of save_to_disk may name a format


def open_parquet(path: Path) -> tuple[dict, Iterator[dict]]:
    """As open_table, of a parquet file. The datasets package is not used, because its cache knows a file only by path
    and time of change. It gives the old rows of a file that was rewritten with its old time, as by tar or cp -p. It
    also keeps an unpacked copy of each version."""
    import datasets
    from pyarrow import parquet

    file = parquet.ParquetFile(path)

    def rows() -> Iterator[dict]:
        for batch in file.iter_batches(1000):
            yield from batch.to_pylist()

    return datasets.Features.from_arrow_schema(file.schema_arrow), rows()
