"""Records are understood or refused, never guessed, whatever file they come from."""

import json
import os
import re
from collections import Counter
from datetime import datetime
from decimal import Decimal

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import ROOT, refused
from tokens import bot, rated, user

from records.forms import Record, understand_record
from records.sources import read_records


def raw_records(source) -> list:
    records = [raw for _, raw in read_records(str(source))]
    return [json.loads(raw) if isinstance(raw, bytes) else raw for raw in records]


# ---- forms ---------------------------------------------------------------------------------------

P, C = user("p"), bot("c")
CASES = yaml.safe_load((ROOT / "tests" / "foreign" / "records.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES)
def test_a_record_of_any_form_is_understood_or_refused_by_the_name_of_its_field(case):
    for kind in case["kind"].split():
        if "refused" in case:
            field, word = case["refused"]
            with pytest.raises(ValueError, match=f"^{field}: .*{re.escape(word)}"):
                understand_record(case["record"], kind)
        else:
            meant = Record(**case["means"])
            meant = meant._replace(rewards=tuple(meant.rewards))
            found = understand_record(case["record"], kind)
            assert found == meant or found._replace(beside={}) == meant


# ---- labels, weights and fields of one's own -----------------------------------------------------

GOOD = [True, 1, 1.0, "1", "true", "True", "TRUE", "chosen", "desirable", "up"]
BAD = [False, 0, 0.0, "0.0", "false", "False", "FALSE", "rejected", "undesirable", "down"]
WRONG = ["tRue", "01", "", "good", " chosen", "yes", 2, -1, 0.5, [], [True], float("nan"), 10**30]


@pytest.mark.parametrize("field", ["label", "preference"])
def test_a_label_is_never_guessed(field):
    for value in GOOD + BAD:
        record = {"prompt": "p", "completion": "c", field: value}
        assert understand_record(record, "rated").label is (value in GOOD)
    for value in [*WRONG, 0.99999999, 1e-9]:
        match = "^label: expected true, false"
        refused(match, understand_record, {"prompt": "p", "completion": "c", field: value}, "rated")


INFINITE = [float("nan"), float("inf"), 10**400, 1e30, -1e31]  # the last two nearly so in float32


def test_a_weight_is_a_finite_number_from_0_on_and_1_where_there_is_none():
    weights = {None: 1, "": 1, 0.25: 0.25, "1E1": 10}
    assert {x: understand_record(rated(weight=x), "rated").weight for x in weights} == weights
    for value in [*INFINITE, True, "x", [1], -1e-9]:
        match = "^weight: expected a finite number from 0 on, got ."
        refused(match, understand_record, rated(weight=value), "rated")


def test_fields_that_data_extra_names_are_kept_and_others_that_nothing_reads_are_named():
    given = rated(source="web", score=3, other=[1])
    record = understand_record(given, "rated", ("score", "source"))
    assert record.extra == {"score": 3, "source": "web"} and record.beside == {"other": [1]}
    question = {"question": "q", "completion": "c", "label": 1}
    record = understand_record(question, "rated", ("question",))
    assert record.extra == {"question": "q"}, "by the record's own name, too"
    reason = "^source: (data.extra: expected|expected a finite|miss)"
    for value in [*INFINITE, [1], {"a": 1}, None]:
        refused(reason, understand_record, rated(source=value), "rated", ("source",))


# ---- files ---------------------------------------------------------------------------------------


def test_json_lines_are_counted_with_blank_ones_and_a_line_separator_ends_no_line(tmp_path):
    path = tmp_path / "d.ndjson"
    a, b = (json.dumps(rated(x), ensure_ascii=False).encode() for x in ("a\u2028b\x85", "b"))
    for blob in (a + b"\n\r\n" + b, b"\xef\xbb\xbf" + a + b"\r\n  \n" + b + b"\n"):
        path.write_bytes(blob)
        assert [place for place, _ in read_records(str(path))] == [1, 3]
        assert [raw["prompt"] for raw in raw_records(path)] == ["a\u2028b\x85", "b"]


def test_a_json_array_or_object_is_a_file_of_records(tmp_path):
    path = tmp_path / "d.json"
    path.write_bytes(b"\xef\xbb\xbf \n" + json.dumps([rated("a"), 5], indent=1).encode())
    assert list(read_records(str(path))) == [(1, rated("a")), (2, 5)]
    path.write_text(json.dumps(rated("a"), indent=1))  # an export of one conversation
    assert list(read_records(str(path))) == [(1, rated("a"))]


def test_a_csv_cell_is_text_and_the_text_of_a_label_or_number_is_read(tmp_path):
    """A csv has no types, and a reader that guesses them from the column makes nulls of NA and
    numbers of 007."""
    path = tmp_path / "d.csv"
    cells = ["007,NA,TRUE,0.5,x,", '"a\r\n""b""",,1.0,1,z,', "q,d,0"]
    header = "\ufeffprompt,completion,kto_tag,weight,source,tools\n"  # as Excel writes it
    path.write_bytes((header + "\n\n".join(cells) + "\n").encode())
    counts = Counter()
    places, records = zip(*read_records(str(path), counts))
    assert places == (2, 5, 7), "the lines on which they end"
    meant = Record("007", ["NA"], True, weight=0.5, extra={"source": "x"})
    assert understand_record(records[0], "rated", ("source",)) == meant
    _, quoted, short = (understand_record(record, "rated") for record in records)
    assert quoted[:3] == ('a\r\n"b"', [""], True)
    assert short[:3] == ("q", ["d"], False), "some tools leave out the empty cells at the end"
    assert counts == {"rows of a csv file with too few cells, the others read as empty": 1}
    for text, records in {"": [], "prompt\n" + "x" * 200_000: [{"prompt": "x" * 200_000}]}.items():
        path.write_text(text)
        assert raw_records(path) == records


HEADER = b"prompt,completion,label"


@pytest.mark.parametrize(
    "name, text, reason",
    [
        ("d.json", b'[\n{"prompt": "p",\n "label"}]', ": Expecting ':' delimiter: line 3 "),
        ("d.json", b"5", ": expected an array of records, got 5"),
        ("d.json", b'[{"label": 1, "label": 0}]', ": label: given twice"),
        ("d.csv", HEADER + b"\na,b,1\n\na,b,c,1\n", ":4: more cells than columns"),
        ("d.csv", HEADER + b",label\na,b,1,0\n", ":2: label: given twice"),
        ("d.csv", HEADER + b'\n"a,b,1\n', ":2: unexpected end of data"),
        ("d.csv", b'"prompt,completion\n', ":1: unexpected end of data"),
        # else its name would be sent to huggingface.co
        *((f"d.{x}", b"PK", ": expected a file that ends in .jsonl") for x in ("xlsx", "csv.gz")),
        # the datasets package would read NA and null of a csv file as nothing, and 007 as a number
        ("folder/a.csv", b"", ": expected a folder of save_to_disk or of parquet files; "),
        ("no*.jsonl", None, ": "),
        ("no.csv", None, ": "),
        ("someone/ratings:val", None, ": "),
    ],
)
def test_what_is_no_file_of_records_is_one_line(tmp_path, monkeypatch, name, text, reason):
    monkeypatch.chdir(tmp_path)
    source = name.removesuffix("/a.csv")
    if text is not None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    refused(f"^{re.escape(source + reason)}", raw_records, source)


# ---- through the datasets package ----------------------------------------------------------------


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder in which the datasets package keeps unpacked copies."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


LABELS_OF_TABLES = [
    pa.array([Decimal("1.00"), Decimal("0.00")]),
    pa.array([1, 0], pa.float32()),
    pa.array(pd.Categorical(["up", "down"])),
]


@pytest.mark.parametrize("label", LABELS_OF_TABLES)
def test_what_a_table_knows_of_its_columns_reaches_the_record(tmp_path, label):
    columns = {
        "prompt": pa.array(["p", "q"]).dictionary_encode(),
        "completion": pa.array(["a", "b"], pa.large_string()),
        "label": label,
        "weight": pa.array([Decimal("0.50"), None]),
        "at": pa.array([datetime(2026, 1, 31, 8)] * 2),
        "beside": pa.array([{"a": 1}, {"b": 2}]),
    }
    pq.write_table(pa.table(columns), tmp_path / "d.parquet")
    raws = raw_records(tmp_path / "d.parquet")
    a, b = (understand_record(x, "rated", ("at",)) for x in raws)
    assert (a.prompt, a.label, a.weight) == ("p", True, 0.5)
    assert (b.prompt, b.label, b.weight) == ("q", False, 1)
    assert a.extra == {"at": "2026-01-31T08:00:00"}
    assert a.beside == {"beside": {"a": 1}}, "no key that a row has only for another's sake"


def test_a_parquet_file_that_is_written_anew_with_its_old_time_gives_its_new_records(
    tmp_path, cache
):
    path = tmp_path / "d.parquet"
    for prompt in ("old", "new"):
        pq.write_table(pa.table({"prompt": [prompt]}), path)
        os.utime(path, (10**9, 10**9))  # as tar, cp -p and some network drives set it
        assert raw_records(path) == [{"prompt": prompt}]
    assert not cache.exists()


def test_a_hub_id_may_name_a_config_and_a_split(monkeypatch):
    def load_dataset(*names, split):
        return datasets.Dataset.from_list([rated("/".join([*names, split]))])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for source in ("a/b:train", "a/b:val", "a/b:en:val"):
        asked = source.replace(":", "/")
        assert list(read_records(source)) == [(1, rated(asked))]
    assert list(read_records("a/b")) == [(1, rated("a/b/train"))]
