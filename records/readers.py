"""Files that hold records: from the text of data.train to one raw record after the other.

Reading order: split_sources (which files a setting names), read_records (the records of one file,
with their lines), then one reader for each format. What a record says is not looked at here: see
forms.py.
"""

import contextlib
import csv
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from records.forms import LABEL_FIELDS, Fault, unique_keys
from runs.errors import BadInput
from runs.files import find_path

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
# The columns of a csv file whose cells are read as JSON. All others are text.
CSV_JSON_COLUMNS = (*LABEL_FIELDS, "chosen_reward", "rejected_reward", "weight")


# ---- which files ---------------------------------------------------------------------------------


def split_sources(sources: str) -> list[tuple[list[str], float | None]]:
    """`a.jsonl:0.7,more/*.csv:0.3` -> [(["a.jsonl"], 0.7), (["more/b.csv", "more/c.csv"], 0.3)].

    The files of each source, and its weight: either all sources have one or none has (None). A path
    that exists is taken as a path, even if its name has commas, colons or brackets. Raises BadInput.
    """
    parts = [sources]
    if not _path_exists(sources):
        parts = [part.strip() for part in sources.split(",")]
    files_and_weights = [_split_weight(part) for part in parts]
    weights = [weight for _, weight in files_and_weights]
    if any(weights) and (None in weights or len(weights) == 1):
        raise BadInput(
            f"{sources}: weights are shares of a mix: give two or more sources, each with its weight"
        )
    return files_and_weights


def _split_weight(source: str) -> tuple[list[str], float | None]:
    """The files of one source, and its weight (None if it has none)."""
    name, weight = _name_and_weight(source)
    weight = float(weight) if weight else None
    if weight == 0:
        raise BadInput(f"{source}: a weight of 0: leave this source out")
    if not glob.has_magic(name) or _path_exists(name):
        return [name], weight
    files = sorted(glob.glob(str(find_path(name)), recursive=True))
    if not files:
        raise BadInput(f"{source}: no file has such a name")
    return files, weight


def _name_and_weight(source: str) -> tuple[str, str]:
    """`a.jsonl:0.7` as ("a.jsonl", "0.7"); without a weight, or of a path that exists, (source, "")."""
    match = re.fullmatch(r"(.+):(\d*\.?\d+)", source)
    if not match or _path_exists(source):
        return source, ""
    return match[1], match[2]


def absolute_sources(sources: str) -> str:
    """The same sources with absolute paths: of files, folders and patterns. Ids of the Hub stay as they
    are, and so does a list that would no longer be understood, in a folder whose name has a comma."""
    if _path_exists(sources):
        return os.path.abspath(find_path(sources))
    parts = []
    for part in sources.split(","):
        name, weight = _name_and_weight(part.strip())
        folder, colon, split = name.partition(":")
        if _path_exists(name):
            name = os.path.abspath(find_path(name))
        elif colon and os.path.isdir(find_path(folder)):  # a split of a saved data set
            name = f"{os.path.abspath(find_path(folder))}:{split}"
        elif glob.has_magic(name) and not os.path.isabs(find_path(name)):
            name = os.path.join(glob.escape(os.getcwd()), find_path(name))
        parts.append(f"{name}:{weight}" if weight else name)
    absolute = ",".join(parts)
    return absolute if len(absolute.split(",")) == len(parts) else sources


def _path_exists(name: str) -> bool:
    # os.path.exists says False where Path.exists raises: a long list of files is too long a name.
    return os.path.exists(find_path(name))


# ---- the records of one file ---------------------------------------------------------------------


def read_records(
    source: str, extra: tuple[str, ...] = (), columns: dict[str, str] | None = None
) -> Iterator[tuple[str, object]]:
    """(where, raw record) for each record of a file, a folder of save_to_disk or a Hub data set.

    `where` is `file:line` (`file:record 3` in a JSON array, `file:row` in a table). The raw record
    is what the line holds, or a Fault if it cannot be read; forms.understand_record takes either.
    `extra` and `columns` (as in understand_record) matter for csv only: they say which cells are
    numbers. Raises BadInput if the file itself cannot be read.
    """
    path = find_path(source)
    suffix = Path(path.name.removesuffix(".gz")).suffix
    try:
        if path.is_file() and suffix in (".jsonl", ".json"):
            yield from _read_json(source, path, may_be_array=suffix == ".json")
        elif path.is_file() and suffix in (".csv", ".tsv"):
            yield from _read_csv(source, path, extra, columns or {})
        else:
            for row, record in enumerate(_read_table(source, path), 1):
                yield f"{source}:{row}", record
    except (OSError, EOFError, zlib.error) as e:
        raise BadInput(f"{source}: {getattr(e, 'strerror', None) or e}") from None


def count_lines(source: str) -> int | None:
    """How many lines a .jsonl file has; None for all else, whose records are not counted so quickly."""
    path = find_path(source)
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    n = 0
    with contextlib.suppress(OSError), open(path, "rb") as file:  # read_records says what is wrong
        while block := file.read(2**22):
            n += block.count(b"\n")
    return n


def _open(path: Path):
    if path.suffix == ".gz":
        return gzip.open(path)
    return open(path, "rb")


# ---- json ----------------------------------------------------------------------------------------

DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)  # json.loads would make one for each line


def _read_json(source: str, path: Path, may_be_array: bool) -> Iterator[tuple[str, object]]:
    """A record per line; a .json file may hold one array of records instead."""
    with _open(path) as file:
        if may_be_array and file.peek(1).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
            for number, record in enumerate(_json_array(source, file.read()), 1):
                yield f"{source}:record {number}", record
        else:
            yield from _json_lines(source, file)


def _json_lines(source: str, lines: Iterable[bytes]) -> Iterator[tuple[str, object]]:
    """A line that is not JSON becomes a Fault, and the next line is read."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = DECODER.decode(line.removesuffix(b"\n").decode("utf-8-sig"))
        except Fault as e:
            record = e
        except UnicodeDecodeError as e:
            record = Fault(f"json: not UTF-8 at byte {e.start}")
        except (ValueError, RecursionError) as e:
            # The decoder sees one line and calls it line 1; `where` has the number in the file.
            record = Fault(f"json: {e}".replace("line 1 ", ""))
        yield f"{source}:{number}", record


def _json_array(source: str, content: bytes) -> list:
    try:
        return json.loads(content, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError, Fault) as e:
        line = f":{e.lineno}" if hasattr(e, "lineno") else ""
        raise BadInput(f"{source}{line}: json: {e}") from None


# ---- csv -----------------------------------------------------------------------------------------


def _read_csv(
    source: str, path: Path, extra: tuple[str, ...], columns: dict[str, str]
) -> Iterator[tuple[str, object]]:
    """A record per row, under the names of the first row.

    Python's csv, not one that guesses types: that makes 1 of 01 and nothing of NA, and shifts the
    columns of a row with a field too many.
    """
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB would refuse a long document
    with _open(path) as file:
        lines = io.TextIOWrapper(file, "utf-8-sig", newline="")
        try:
            yield from _csv_records(source, path, lines, extra, columns)
        except UnicodeDecodeError:
            raise BadInput(f"{source}:{_first_line_not_utf8(path)}: csv: not UTF-8") from None


def _first_line_not_utf8(path: Path) -> int:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _csv_records(
    source: str, path: Path, lines: Iterable[str], extra: tuple[str, ...], columns: dict[str, str]
) -> Iterator[tuple[str, object]]:
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    rows = csv.reader(lines, strict=True, delimiter=delimiter)
    try:
        names = next(rows, [])
        unique_keys([(name, None) for name in names])
    except (csv.Error, Fault) as e:
        raise BadInput(f"{source}:1: csv: {e}") from None
    our_names = [columns.get(name, name) for name in names]
    line = rows.line_num + 1  # a row may begin many lines after the last: cells hold line ends
    try:
        for cells in rows:
            if len(cells) == len(names):
                values = [_cell(name, cell, extra) for name, cell in zip(our_names, cells)]
                yield f"{source}:{line}", dict(zip(names, values))
            elif cells:
                fault = Fault(f"record: {len(cells)} fields, but {len(names)} column names")
                yield f"{source}:{line}", fault
            line = rows.line_num + 1
    except csv.Error as e:
        yield f"{source}:{line}", Fault(f"csv: {e}")


def _cell(name: str, text: str, extra: tuple[str, ...]) -> object:
    """What a cell holds: labels, rewards and weights are JSON (True and TRUE, too), a field of
    data.extra is a number if it looks like one, and all else is text."""
    if name not in CSV_JSON_COLUMNS and name not in extra:
        return text
    try:
        value = json.loads(text.lower() or "null")
    except (ValueError, RecursionError):
        return text
    if name in CSV_JSON_COLUMNS or type(value) in (int, float):
        return value
    return text


# ---- tables: parquet, save_to_disk, the Hub ------------------------------------------------------


def _read_table(source: str, path: Path) -> Iterator[dict]:
    """The rows of a parquet file, of a folder of save_to_disk or of a Hub data set."""
    if path.is_file() and path.suffix == ".parquet":
        return _read_parquet(source, path)
    name, *rest = source.split(":")
    if find_path(name).is_dir():
        return _load_from_disk(source, name, rest)
    # A name with another suffix may be a Hub id: org/set-2.5.
    looks_like_file = path.is_file() or path.suffix in SUFFIXES or source.startswith((".", "/"))
    if looks_like_file or name.count("/") > 1 or len(rest) > 2:
        problem = "not a" if path.is_file() else "no such"
        raise BadInput(f"{source}: {problem} .jsonl, .json, .csv, .tsv or .parquet file")
    return _load_from_hub(source, name, rest)


def _read_parquet(source: str, path: Path) -> Iterator[dict]:
    """With pyarrow: the datasets package would ask the network and keep a copy of the file."""
    import pyarrow
    import pyarrow.parquet  # slow to import

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(4096):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as e:
        raise BadInput(f"{source}: not a parquet file that can be read ({type(e).__name__})") from e


def _load_from_disk(source: str, name: str, rest: list[str]):
    """`folder` or `folder:split`; the split is train where none is given."""
    import datasets  # slow to import

    try:
        data = datasets.load_from_disk(str(find_path(name)))
        if isinstance(data, datasets.DatasetDict):
            return data[rest[-1] if rest else "train"]
        return data
    except Exception as e:  # the package raises a dozen kinds
        raise BadInput(
            f"{source}: no folder of save_to_disk with this split ({type(e).__name__}); "
            f"to read the files in it, write {name}/*.jsonl"
        ) from e


def _load_from_hub(source: str, name: str, rest: list[str]):
    """`id`, `id:split` or `id:config:split`; the split is train where none is given."""
    import datasets  # slow to import

    try:
        return datasets.load_dataset(name, *rest[:-1], split=rest[-1] if rest else "train")
    except Exception as e:  # the package raises a dozen kinds
        raise BadInput(
            f"{source}: no such file here, and not fetched from huggingface.co ({type(e).__name__}); "
            "without a network, save the set as a .jsonl or .parquet file elsewhere and give its path"
        ) from e
