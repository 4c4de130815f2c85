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
from tokens import bot, rated, user

from infra.console import BadInput
from records.forms import Record, understand_record
from records.sources import read_records


def raw_records(source) -> list:
    records = [raw for _, raw in read_records(str(source))]
    return [json.loads(raw) if isinstance(raw, bytes) else raw for raw in records]


# ---- forms ---------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "s"}
SHAREGPT = [{"from": "human", "value": "p"}, {"from": "gpt", "value": "c"}]
P, C = user("p"), bot("c")
RATED = {
    "strings": (rated("p", "c"), Record("p", ["c"], True)),
    "messages": (rated([P], [C], False), Record([P], [C], False)),
    "NeMo-Aligner": (
        {"prompt": "p", "response": "c", "preference": "rejected"},
        Record("p", ["c"], False),
    ),
    "ColossalAI": (
        {
            "prompt": [{"from": "human", "content": "p"}],
            "completion": {"from": "assistant", "content": "c"},
            "label": False,
        },
        Record([P], [C], False),
    ),
    "LLaMA-Factory": ({"messages": [P, C], "kto_tag": False}, Record([P], [C], False)),
    "ShareGPT": ({"conversations": SHAREGPT, "label": 1, "system": ""}, Record([P], [C], True)),
    "the prompt repeated": (rated([P], [P, C]), Record([P], [C], True)),
    "an instruction": (
        {"instruction": "p", "input": "q", "output": "c", "label": 1},
        Record("p\nq", ["c"], True, instruct=True),
    ),
    "a question with a system text": (
        {"system": "s", "question": "p", "completion": "c", "label": 1},
        Record([SYSTEM, P], ["c"], True, instruct=True),
    ),
    "a prompt beside an instruction": (
        {"prompt": "p", "instruction": "i", "input": "q", "completion": "c", "label": 1},
        Record("p", ["c"], True, beside={"instruction": "i", "input": "q"}),
    ),
}


def pair(good="good", bad="bad", **more) -> dict:
    return {"prompt": "p", "chosen": good, "rejected": bad, **more}


TWO = Record([P], [bot("good"), bot("bad")])
PAIRS = {
    "strings": (pair(), Record("p", ["good", "bad"])),
    "other names and rewards": (
        {"prompt": "p", "chosen_response": "good", "rejected_response": "bad"}
        | {"chosen_reward": 4, "rejected_reward": None},
        Record("p", ["good", "bad"], None, (4.0, None)),
    ),
    "messages": ({"prompt": [P], "chosen": [bot("good")], "rejected": bot("bad")}, TWO),
    "implicit prompt": ({"chosen": [P, bot("good")], "rejected": [P, bot("bad")]}, TWO),
    "LLaMA-Factory": (
        {"conversations": [{"from": "human", "value": "p"}]}
        | {x: {"from": "gpt", "value": y} for x, y in (("chosen", "good"), ("rejected", "bad"))},
        TWO,
    ),
    "the prompt is the last question of two dialogues": (
        pair(*([user("Hi"), bot("Ho"), P, bot(x)] for x in ("good", "bad"))),
        TWO._replace(prompt=[user("Hi"), bot("Ho"), P]),
    ),
    "prompt repeated, and a string": (
        pair([P, bot("good")], [P, bot("bad")]),
        TWO._replace(prompt="p"),
    ),
}


ROLES = "system developer user assistant tool tool function ipython".split()
NAMES = "system developer human gpt tool observation function ipython".split()
DIALOGUE = [*SHAREGPT, {"from": "User", "value": "r"}, {"from": "Assistant", "value": "d"}]
DEMOS = {
    "messages": ({"messages": [P, C]}, Record([P], [C])),
    "prompt and completion": ({"prompt": "p", "completion": "c"}, Record("p", ["c"])),
    "input and output": ({"input": "p", "output": "c"}, Record("p", ["c"])),
    "conversations": (
        {"system": "s", "conversations": DIALOGUE, "mask": "User"},
        Record([SYSTEM, P, C, user("r")], [bot("d")]),
    ),
    "every role": (
        {"messages": [{"role": name, "content": "x"} for name in NAMES] + [C]},
        Record([{"role": role, "content": "x"} for role in ROLES], [C]),
    ),
    "other names of the assistant": (
        {
            "messages": [
                P,
                bot("c") | {"role": "ai"},
                P,
                {"from": "model", "value": "d"},
                P,
                bot("e") | {"role": "Bot"},
            ]
        },
        Record([P, C, P, bot("d"), P], [bot("e")]),
    ),
    "messages beside a prompt": ({"prompt": "p", "messages": [P, C]}, Record([P], [C])),
    "messages beside both": (
        {"prompt": "p", "completion": "c", "messages": [P, bot("d")]},
        Record("p", ["c"]),
    ),
}


FORMS = [("rated", *x) for x in [*RATED.values(), *PAIRS.values()]]
FORMS += [("paired", *x) for x in PAIRS.values()]
FORMS += [("demonstrations", *x) for x in DEMOS.values()]


@pytest.mark.parametrize("kind, record, meant", FORMS)
def test_every_form_of_a_record_is_understood(kind, record, meant):
    found = understand_record(record, kind)
    assert found == meant or found._replace(beside={}) == meant


def test_of_a_record_of_any_form_the_prompt_alone_can_be_asked_for():
    for record in (rated("p", 5, "?"), pair(), {"prompt": "p"}, {"input": "p", "output": "c"}):
        assert understand_record(record, "prompts") == Record("p", [])
    for record in ({"messages": [P]}, {"messages": [P, C]}, {"chosen": [P, C], "rejected": [P, C]}):
        assert understand_record(record, "prompts") == Record([P], [])


def test_of_several_turns_the_last_is_the_completion():
    call = {"role": "assistant", "content": None, "tool_calls": ["x"]}
    turns = [call, {"role": "tool", "content": "21"}, C]
    meant = Record([P, *turns[:-1]], [C])
    assert understand_record({"prompt": [P], "completion": turns}, "demonstrations") == meant
    assert understand_record({"messages": [P, *turns]}, "demonstrations") == meant
    two = {"prompt": [P], "chosen": turns, "rejected": [*turns[:-1], bot("d")]}
    assert understand_record(two, "paired") == meant._replace(completions=[C, bot("d")])
    with pytest.raises(BadInput, match="^rejected: its turns before the last one differ"):
        understand_record(two | {"rejected": bot("d")}, "paired")


REFUSED = [
    # kind, record, the field that is named, a word of the reason
    ("rated", [1, 2], "record", "object"),
    ("rated", {"prompt": "p", "liked": 1}, "label", "there is prompt, liked"),
    ("rated", {"completion": "c", "label": True}, "prompt", "missing"),
    ("rated", {"prompt": "p", "label": True}, "completion", "missing"),
    ("rated", rated(preference="chosen"), "label", "given twice"),
    ("rated", rated(chosen="c"), "record", "which one"),
    ("rated", rated(prompt=5), "prompt", "string"),
    ("rated", rated(prompt=[P, {"role": "user"}]), "prompt", "a text"),
    ("rated", rated([{"role": "narrator", "content": "x"}]), "prompt", "known role"),
    ("rated", rated(completion=user("c")), "completion", "an assistant's"),
    ("rated", rated(completion=[C, user("d")]), "completion", "an assistant's"),
    ("rated", rated(tools="{"), "tools", "Expecting"),
    ("rated", rated(system=["s"]), "system", "a text"),
    ("rated", rated([SYSTEM, P], system="t"), "system", "begins with a system message, too"),
    ("rated", rated(history="it rained"), "history", "Expecting"),
    ("rated", rated(history=[["q"]]), "history", "pairs of a question"),
    ("paired", rated(), "chosen", "missing"),
    ("paired", {"prompt": "p", "chosen": "c"}, "rejected", "missing"),
    ("paired", {"chosen": [P, C], "rejected": [user("q"), C]}, "rejected", "an assistant's"),
    ("paired", pair(chosen_reward="high"), "chosen_reward", "finite number"),
    ("demonstrations", {"messages": [P, user("c")]}, "messages", "an assistant's"),
    ("demonstrations", rated(label=False), "label", "undesirable"),
    ("demonstrations", pair(), "completion", "missing"),
    ("prompts", {"messages": [C]}, "prompt", "missing"),
    ("prompts", {"chosen": "an answer", "rejected": "another"}, "prompt", "missing"),
]


@pytest.mark.parametrize("kind, record, field, word", REFUSED)
def test_a_record_of_no_known_form_is_refused_by_the_name_of_its_field(kind, record, field, word):
    with pytest.raises(ValueError) as e:
        understand_record(record, kind)
    assert str(e.value).startswith(f"{field}: ") and word in str(e.value)


# ---- labels, weights and fields of one's own -----------------------------------------------------


@pytest.mark.parametrize("field", ["label", "preference"])
def test_a_label_is_never_guessed(field):
    good = [True, 1, 1.0, "1", "true", "True", "TRUE", "chosen", "desirable", "up"]
    bad = [False, 0, 0.0, "0.0", "false", "False", "FALSE", "rejected", "undesirable", "down"]
    for value in [*good, *bad]:
        record = {"prompt": "p", "completion": "c", field: value}
        assert understand_record(record, "rated").label is (value in good)
    wrong = [
        "tRue",
        "01",
        "",
        "good",
        " chosen",
        "yes",
        2,
        -1,
        0.5,
        [],
        [True],
        float("nan"),
        10**30,
    ]
    for value in [*wrong, 0.99999999, 1e-9]:
        with pytest.raises(BadInput, match="^label: expected true, false"):
            understand_record({"prompt": "p", "completion": "c", field: value}, "rated")


INFINITE = [float("nan"), float("inf"), 10**400, 1e30, -1e31]  # the last two nearly so in float32


def test_a_weight_is_a_finite_number_from_0_on_and_1_where_there_is_none():
    weights = {None: 1, "": 1, 0.25: 0.25, "1E1": 10}
    assert {x: understand_record(rated(weight=x), "rated").weight for x in weights} == weights
    for value in [*INFINITE, True, "x", [1], -1e-9]:
        with pytest.raises(BadInput, match="^weight: expected a finite number from 0 on, got ."):
            understand_record(pair(weight=value), "paired")


def test_fields_that_data_extra_names_are_kept_and_others_that_nothing_reads_are_named():
    record = understand_record(
        rated(source="web", score=3, other=[1]), "rated", ("score", "source")
    )
    assert record.extra == {"score": 3, "source": "web"} and record.beside == {"other": [1]}
    assert understand_record(pair(chosen_reward=1), "paired").beside == {}
    question = {"question": "q", "completion": "c", "label": 1}
    record = understand_record(question, "rated", ("question",))
    assert record.extra == {"question": "q"}, "by the record's own name, too"
    for value in [*INFINITE, [1], {"a": 1}, None]:
        with pytest.raises(
            BadInput, match="^source: (data.extra: expected|expected a finite|miss)"
        ):
            understand_record(rated(source=value), "rated", ("source",))


# ---- files ---------------------------------------------------------------------------------------


def test_json_lines_are_counted_with_blank_ones_and_a_line_separator_ends_no_line(tmp_path):
    path = tmp_path / "d.jsonl"
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
    for text, reason in (
        ('[\n{"prompt": "p",\n "label"}]', "Expecting ':' delimiter: line 3 "),
        ("5", "expected an array of records, got 5"),
        ('[{"label": 1, "label": 0}]', "label: given twice$"),
    ):
        path.write_text(text)
        with pytest.raises(BadInput, match=f"^{path}: {reason}"):
            raw_records(path)


def test_a_csv_cell_is_text_and_the_text_of_a_label_or_number_is_read(tmp_path):
    """A csv has no types, and a reader that guesses them from the column makes nulls of NA and
    numbers of 007."""
    path = tmp_path / "d.csv"
    cells = ["007,NA,TRUE,0.5,x,", '"a\r\n""b""",,1.0,1,z,']
    header = "\ufeffprompt,completion,kto_tag,weight,source,tools\n"  # as Excel writes it
    path.write_bytes((header + "\n\n".join(cells) + "\n").encode())
    places = [place for place, _ in read_records(str(path))]
    assert places == [2, 5], "the lines on which they end"
    a, b = raw_records(path)
    meant = Record("007", ["NA"], True, weight=0.5, extra={"source": "x"})
    assert understand_record(a, "rated", ("source",)) == meant
    assert understand_record(b, "rated")[:3] == ('a\r\n"b"', [""], True)
    empty = rated(label="1", weight="", tools="", system="")
    assert understand_record(empty, "rated") == Record("p", ["c"], True), "no fields"
    for text, records in {"": [], "prompt\n" + "x" * 200_000: [{"prompt": "x" * 200_000}]}.items():
        path.write_text(text)
        assert raw_records(path) == records


def test_a_row_of_a_csv_file_with_too_few_cells_has_empty_ones_and_is_counted(tmp_path):
    """Python's csv module reads such a row, and some tools leave out the empty cells at the end."""
    path = tmp_path / "d.csv"
    path.write_text("prompt,completion,label,system,tools\np,c,1\nq,d,0,s,\n")
    counts = Counter()
    records = [raw for _, raw in read_records(str(path), counts)]
    assert records[0] == {"prompt": "p", "completion": "c", "label": "1", "system": "", "tools": ""}
    assert [understand_record(x, "rated").label for x in records] == [True, False]
    assert counts == {"rows of a csv file with too few cells, the others read as empty": 1}


def test_a_csv_file_that_is_no_utf_8_is_refused_by_its_field(tmp_path):
    (tmp_path / "d.csv").write_bytes(b"prompt,completion,label\np,caf\xe9,1\n")
    (raw,) = raw_records(tmp_path / "d.csv")
    with pytest.raises(BadInput, match="^completion: .*half of a character, or no UTF-8.*caf"):
        understand_record(raw, "rated")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("prompt,completion,label\na,b,1\n\na,b,c,1\n", ":4: more cells than columns"),
        ("prompt,completion,label,label\na,b,1,0\n", ":2: label: given twice"),
        ('prompt,completion,label\n"a,b,1\n', ":2: unexpected end of data"),
        ('"prompt,completion\n', ":1: unexpected end of data"),
    ],
)
def test_a_csv_whose_columns_do_not_fit_is_refused(tmp_path, text, reason):
    path = tmp_path / "d.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadInput) as e:
        raw_records(path)
    assert str(e.value).startswith(f"{path}{reason}")


# ---- through the datasets package ----------------------------------------------------------------


def test_a_folder_of_text_files_is_refused_with_the_cause(tmp_path):
    """The datasets package would read NA and null of a csv file as nothing, and 007 as a number."""
    (tmp_path / "folder").mkdir()
    for name in ("train.csv", "train.jsonl"):
        (tmp_path / "folder" / name).write_text("")
        with pytest.raises(
            BadInput, match="folder: expected .* name the files, .* guess the types"
        ):
            raw_records(tmp_path / "folder")


def test_parquet_files_and_folders_of_save_to_disk_hold_records(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    turns = [[P | {"tool_calls": None}, C | {"tool_calls": ["x"]}]] * 2
    columns = {"messages": turns, "label": [1.0, None], "weight": [0.5, None]}
    table = datasets.Dataset.from_dict(columns)
    table.to_parquet(tmp_path / "d.parquet")
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "val": table}).save_to_disk(tmp_path / "two")
    for source in ("d.parquet", "one", "two", "two:val"):
        (place, first), (_, second) = read_records(str(tmp_path / source))
        record = understand_record(first, "rated")
        assert (place, record.label, record.weight) == (1, True, 0.5)
        assert record.prompt == [P], "no key that a row has only for another's sake"
        with pytest.raises(BadInput, match="^label: missing"):
            understand_record(second, "rated")


def test_what_a_table_knows_of_its_columns_reaches_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    day = datetime(2026, 1, 31, 8)
    columns = {
        "completion": pa.array(["a", "b"], pa.large_string()),
        "weight": pa.array([Decimal("0.50"), None]),
        "day": pa.array([day.date()] * 2),
        "at": pa.array([day] * 2),
        "prompt": pa.array(["p", "q"]).dictionary_encode(),
    }
    for label in (
        pa.array([Decimal("1.00"), Decimal("0.00")]),
        pa.array([1, 0], pa.float32()),
        pa.array([1, 0], pa.uint8()),
        pa.array([True, False]),
        pa.array(pd.Categorical(["up", "down"])),
        pa.array(pd.Categorical([1, 0])),
    ):
        path = tmp_path / "d.parquet"
        pq.write_table(pa.table(columns | {"label": label}), path)
        a, b = (understand_record(x, "rated", ("day", "at")) for x in raw_records(path))
        assert [(x.prompt, x.label, x.weight) for x in (a, b)] == [
            ("p", True, 0.5),
            ("q", False, 1),
        ]
        assert a.extra == {"day": "2026-01-31", "at": "2026-01-31T08:00:00"}


def test_a_parquet_file_that_is_written_anew_with_its_old_time_gives_its_new_records(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "d.parquet"
    for prompt in ("old", "new"):
        pq.write_table(pa.table({"prompt": [prompt]}), path)
        os.utime(path, (10**9, 10**9))  # as tar, cp -p and some network drives set it
        assert raw_records(path) == [{"prompt": prompt}]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", "no*.jsonl no.csv folder folder:test someone/ratings:val".split())
def test_what_is_no_source_is_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput) as e:
        raw_records(name)
    (line,) = str(e.value).splitlines()
    assert line.startswith(f"{name}: ")


def test_a_hub_id_may_name_a_config_and_a_split(monkeypatch):
    def load_dataset(*names, split):
        return datasets.Dataset.from_list([rated("/".join([*names, split]))])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for source, asked in (
        ("a/b", "a/b/train"),
        ("a/b:val", "a/b/val"),
        ("a/b:en:val", "a/b/en/val"),
    ):
        assert list(read_records(source)) == [(1, rated(asked))]


def test_a_file_of_another_kind_is_no_data_set_of_the_hub(tmp_path):
    """Its name would be sent to huggingface.co, and the advice would be to download it."""
    for name in ("thumbs.xlsx", "thumbs.db", "thumbs.csv.gz"):
        (tmp_path / name).write_bytes(b"PK")
        expected = f"{name}: expected a file that ends in .jsonl, .ndjson, .json, "
        with pytest.raises(BadInput, match=re.escape(expected)):
            raw_records(tmp_path / name)
    (tmp_path / "a.ndjson").write_text('{"prompt": "p"}\n{"prompt": "q"}\n')
    assert raw_records(tmp_path / "a.ndjson") == [{"prompt": "p"}, {"prompt": "q"}]
