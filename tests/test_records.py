"""Records are understood or refused, never guessed, whatever file they come from."""

import gzip
import json
import socket
import sys
from pathlib import Path

import pytest
from tokens import bot, rated, user, write

import records.readers
from records.forms import Dropped, Fault, Record, understand_record
from records.readers import read_records, split_sources
from runs.errors import BadInput


def understood(source, kind="rated", extra=()) -> list[Record]:
    return [understand_record(raw, kind, extra) for _, raw in read_records(str(source), extra)]


def refusals(source, kind="rated", extra=()) -> list[str]:
    """`where: field: reason` of the bad records of a source, or the one line that refuses it."""
    out = []
    try:
        for where, raw in read_records(str(source), extra):
            try:
                if isinstance(raw, Fault):
                    raise raw
                understand_record(raw, kind, extra)
            except Fault as e:
                out.append(f"{where}: {e}")
    except BadInput as e:
        return str(e).splitlines()
    return out


def fields(refused: list[str]) -> list[list[str]]:
    """[place, field] of each line."""
    return [line.split(": ")[:2] for line in refused]


# ---- forms ---------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "s"}
RATED = {
    "KTO, strings": (rated("p", "c"), Record("p", ["c"], True)),
    "KTO, messages": (
        rated([user("p")], [bot("c")], False),
        Record([user("p")], [bot("c")], False),
    ),
    "KTO, messages and a string": (rated([user("p")], "c"), Record([user("p")], ["c"], True)),
    "KTO, a system turn": (
        rated([SYSTEM, user("p")], bot("c")),
        Record([SYSTEM, user("p")], [bot("c")], True),
    ),
    "NeMo, up": (
        {"prompt": "p", "response": "c", "preference": "chosen"},
        Record("p", ["c"], True),
    ),
    "NeMo, down": (
        {"prompt": "p", "response": "c", "preference": "rejected"},
        Record("p", ["c"], False),
    ),
    "ColossalAI": (
        {
            "prompt": [{"from": "human", "content": "p"}, {"from": "assistant", "content": "q"}],
            "completion": {"from": "assistant", "content": "c"},
            "label": False,
        },
        Record([user("p"), bot("q")], [bot("c")], False),
    ),
}


FULL = {"messages": [user("p"), bot("c")]}
RATED |= {
    "LLaMA-Factory": (FULL | {"kto_tag": False}, Record([user("p")], [bot("c")], False)),
    "LLaMA-Factory, label": (FULL | {"label": 1.0}, Record([user("p")], [bot("c")], True)),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "c"}]}
        | {"kto_tag": True, "system": ""},
        Record([user("p")], [bot("c")], True),
    ),
    "Axolotl, argilla": (
        {"system": "s", "instruction": "p", "completion": "c", "label": True},
        Record([SYSTEM, user("p")], ["c"], True, instruct=True),
    ),
    "Axolotl, argilla chat": (
        rated([user("p")], [user("p"), bot("c")]),
        Record([user("p")], [bot("c")], True),
    ),
    "Axolotl, intel": (
        {"question": "p", "completion": "c", "label": False},
        Record("p", ["c"], False, instruct=True),
    ),
    "Alpaca, rated": (
        {"instruction": "p", "input": "", "output": "c", "kto_tag": True},
        Record("p", ["c"], True, instruct=True),
    ),
    "LLaMA-Factory, instruction and input": (
        {"instruction": "p", "input": "q", "output": "c", "kto_tag": True},
        Record("p\nq", ["c"], True, instruct=True),
    ),
    "LLaMA-Factory, input alone": (
        {"instruction": "", "input": "q", "output": "c", "kto_tag": True},
        Record("q", ["c"], True, instruct=True),
    ),
    "content as parts": (
        rated(
            [user([{"type": "text", "text": "p"}, {"type": "text", "text": "q"}])],
            [bot([{"type": "text", "text": "c", "image": None}])],
        ),
        Record([user("pq")], [bot("c")], True),
    ),
}


@pytest.mark.parametrize("form", RATED)
def test_every_form_of_a_rated_record_is_understood(form):
    record, meant = RATED[form]
    assert understand_record(record, "rated") == meant


def pair(good="good", bad="bad", **more) -> dict:
    return {"prompt": "p", "chosen": good, "rejected": bad, **more}


TWO = Record([user("p")], [bot("good"), bot("bad")], None)
REPEATED = pair([user("p"), bot("good")], [user("p"), bot("bad")])
PAIRS = {
    "strings": (pair(), Record("p", ["good", "bad"], None)),
    "other names": (
        {"prompt": "p", "chosen_response": "good", "rejected_response": "bad"},
        Record("p", ["good", "bad"], None),
    ),
    "rewards": (
        pair(chosen_reward=4, rejected_reward=-0.5),
        Record("p", ["good", "bad"], None, (4.0, -0.5)),
    ),
    "null rewards": (
        pair(chosen_reward=None, rejected_reward=None),
        Record("p", ["good", "bad"], None, (None, None)),
    ),
    "messages": ({"prompt": [user("p")], "chosen": [bot("good")], "rejected": bot("bad")}, TWO),
    "implicit prompt": (
        {"chosen": [user("p"), bot("good")], "rejected": [user("p"), bot("bad")]},
        TWO,
    ),
    "prompt repeated": (REPEATED | {"prompt": [user("p")]}, TWO),
    "prompt repeated, and a string": (REPEATED, Record("p", [bot("good"), bot("bad")], None)),
}


PAIRS |= {
    "Axolotl, chat template": (
        {"messages": [user("p")], "chosen": bot("good"), "rejected": bot("bad")},
        TWO,
    ),
    "Axolotl, intel": (
        {"system": "s", "question": "p", "chosen": "good", "rejected": "bad"},
        Record([SYSTEM, user("p")], ["good", "bad"], None, instruct=True),
    ),
    "Axolotl, ultra": (
        REPEATED | {"system": "s"},
        Record([SYSTEM, user("p")], [bot("good"), bot("bad")], None),
    ),
}
HH = "\n\nHuman: p\n\nAssistant: q\n\nHuman: r\n\nAssistant:"
REPEATED_WITH_SYSTEM = {k: [SYSTEM, *REPEATED[k]] for k in ("chosen", "rejected")}
PAIRS |= {
    "OpenAI": (
        {
            "input": {"messages": [user("p")], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [bot("good")],
            "non_preferred_output": [bot("bad")],
        },
        TWO._replace(ignored=("parallel_tool_calls",)),
    ),
    "TRL, implicit prompt of words": (
        {"chosen": "The sky is blue.", "rejected": "The sky is black."},
        Record("The sky is", [" blue.", " black."], None),
    ),
    "TRL, implicit prompt of lines": (
        {"chosen": "Q: 2 + 2?\nA: 4", "rejected": "Q: 2 + 2?\n5"},
        Record("Q: 2 + 2?\n", ["A: 4", "5"], None),
    ),
    "Anthropic HH": (  # both answers begin alike, which belongs to them
        {"chosen": HH + " I am good.", "rejected": HH + " I am bad."},
        Record(HH, [" I am good.", " I am bad."], None),
    ),
    "ultrafeedback, a system turn": (
        {"prompt": "p", **REPEATED_WITH_SYSTEM},
        Record([SYSTEM, user("p")], [bot("good"), bot("bad")], None),
    ),
}


@pytest.mark.parametrize("form", PAIRS)
def test_every_form_of_a_pair_is_understood(form):
    record, meant = PAIRS[form]
    assert understand_record(record, "paired") == meant
    assert understand_record(record, "rated") == meant


CONVERSATION = [{"from": "User", "value": "p"}, {"from": "Assistant", "value": "c"}]
DEMOS = {
    "messages": ({"messages": [user("p"), bot("c")]}, Record([user("p")], [bot("c")], None)),
    "prompt and completion": ({"prompt": "p", "completion": "c"}, Record("p", ["c"], None)),
    "prompt and response": (
        {"prompt": [user("p")], "response": [bot("c")]},
        Record([user("p")], [bot("c")], None),
    ),
    "input and output": ({"input": "p", "output": "c"}, Record("p", ["c"], None)),
    "conversations": (
        {
            "system": "s",
            "conversations": [
                {"from": "User", "value": "p"},
                {"from": "gpt", "value": "q"},
                {"from": "human", "value": "r"},
                {"from": "Assistant", "value": "c"},
            ],
            "mask": "User",
        },
        Record([SYSTEM, user("p"), bot("q"), user("r")], [bot("c")], None),
    ),
    "conversations, no system": (
        {"system": "", "conversations": CONVERSATION},
        Record([user("p")], [bot("c")], None),
    ),
    "a completion rated good": (rated("p", "c", True), Record("p", ["c"], None)),
}


@pytest.mark.parametrize("form", DEMOS)
def test_every_form_of_a_demonstration_is_understood(form):
    record, meant = DEMOS[form]
    assert understand_record(record, "demonstrations") == meant


def test_of_a_record_of_any_form_the_prompt_alone_can_be_asked_for():
    for record in (
        rated("p", 5, "?"),
        pair(weight=-1),
        {"prompt": "p"},
        {"prompt": "p", "input": 1},
    ):
        assert understand_record(record, "prompts") == Record("p", [], None)
    assert understand_record({"input": "p", "output": "c"}, "prompts") == Record("p", [], None)
    dialogues = (
        {"messages": [user("p")]},
        {"messages": [user("p"), bot("c")], "label": 5},
        {"chosen": [user("p"), bot("c")], "rejected": [user("p"), bot("d")]},
    )
    for record in dialogues:
        assert understand_record(record, "prompts") == Record([user("p")], [], None)
    with pytest.raises(Fault, match="^prompt: missing"):
        understand_record({"messages": [bot("c")]}, "prompts")


def test_keys_of_a_message_that_are_not_ours_reach_the_template():
    turn = {"role": "User", "content": "p", "name": "Ann", "from": "User", "tool_calls": None}
    record = understand_record(rated([turn], [bot("c")]), "rated")
    assert record.prompt == [{"role": "user", "content": "p", "name": "Ann"}]


REFUSED = [
    # kind, record, the field that is named, a word of the reason
    ("rated", [1, 2], "record", "object"),
    ("rated", "text", "record", "object"),
    ("rated", None, "record", "object"),
    ("rated", {"prompt": "p", "completion": "c"}, "label", "missing"),
    ("rated", {"prompt": "p", "liked": 1}, "label", "there is prompt, liked (see data.columns)"),
    ("rated", {"completion": "c", "label": True}, "prompt", "missing"),
    ("rated", {"prompt": "p", "label": True}, "completion", "missing"),
    ("rated", rated(preference="chosen"), "label and preference", "not both"),
    ("rated", rated(response="c"), "completion and response", "not both"),
    ("rated", rated(chosen="c"), "record", "which one"),
    ("rated", pair(preference="chosen"), "record", "which one"),
    ("rated", rated(prompt=5), "prompt", "string"),
    ("rated", rated(prompt=[]), "prompt", "string"),
    ("rated", rated(prompt=None), "prompt", "string"),
    ("rated", rated(prompt=["p"]), "prompt[0]", "message"),
    ("rated", rated(prompt=[user("p"), {"role": "user"}]), "prompt[1]", "content"),
    ("rated", rated(prompt=[user("p"), user(None)]), "prompt[1]", "content"),
    ("rated", rated(completion=None), "completion", "string"),
    ("rated", rated(completion=3.5), "completion", "string"),
    ("rated", rated(completion=[bot("c"), bot("d")]), "completion", "one assistant"),
    ("rated", rated(completion=user("c")), "completion", "one assistant"),
    ("rated", rated(instruction="i"), "prompt and instruction", "not both"),
    ("rated", rated([SYSTEM, user("p")], system="t"), "system", "which one"),
    ("rated", rated([{"role": "narrator", "content": "x"}]), "prompt[0]", "role: expected one of"),
    ("rated", rated([{"role": "", "content": "x"}]), "prompt[0]", "role: expected one of"),
    ("rated", rated([{"content": "x"}]), "prompt[0]", "role"),
    ("rated", rated([user("p") | {"from": "gpt"}]), "prompt[0]", "role and from differ"),
    ("rated", rated([user("p") | {"value": "q"}]), "prompt[0]", "content and value differ"),
    ("rated", {"messages": [user("p")], "label": 1}, "messages", "two"),
    ("rated", {"messages": [user("p"), user("q")], "label": 1}, "messages", "one assistant"),
    ("paired", {"prompt": "p"}, "chosen", "pairs are needed"),
    ("paired", rated(), "chosen", "rated record"),
    ("paired", {"prompt": "p", "chosen": "c"}, "rejected", "missing"),
    ("paired", {"prompt": "p", "rejected": "c"}, "chosen", "missing"),
    ("paired", pair(chosen_response="c"), "chosen and", "not both"),
    ("paired", {"chosen": "c", "rejected": "d"}, "prompt", "missing"),
    ("paired", {"chosen": [bot("c")], "rejected": [bot("d")]}, "prompt", "missing"),
    (
        "paired",
        {"chosen": [user("p"), bot("c")], "rejected": [user("q"), bot("d")]},
        "prompt",
        "missing",
    ),
    (
        "paired",
        {"chosen": [user("p"), bot("c")], "rejected": [user("p"), user("d")]},
        "rejected",
        "one assistant",
    ),
    (
        "paired",
        pair(bot("c"), [user("p"), bot("c"), bot("d")]) | {"prompt": [user("p")]},
        "rejected",
        "one assistant",
    ),
    (
        "paired",
        pair([bot("b"), user("q"), bot("c")], [bot("b"), user("other"), bot("d")]),
        "rejected",
        "its turns before the last one differ from those of chosen",
    ),
    (
        "paired",
        {"prompt": [user("p")], "chosen": [user("other"), bot("c")], "rejected": bot("d")},
        "chosen",
        "one assistant",
    ),
    ("demonstrations", {"input": "p"}, "output", "missing"),
    ("demonstrations", {"input": "p", "output": 1}, "output", "string"),
    ("demonstrations", {"input": [1], "instruction": "i", "output": "c"}, "input", "string"),
    ("paired", {"chosen": "Yes, it is.", "rejected": "No."}, "prompt", "same words"),
    ("rated", rated([user([{"type": "image_url"}])]), "prompt[0]", "only parts of text"),
    ("paired", {"input": {"messages": []}, "messages": []}, "messages", "given 2 times"),
    ("demonstrations", {"output": "c"}, "prompt", "missing"),
    ("demonstrations", {"prompt": "p"}, "completion", "missing"),
    ("demonstrations", {"messages": [bot("c")]}, "messages", "two"),
    ("demonstrations", {"messages": "p"}, "messages", "two"),
    ("demonstrations", {"messages": [user("p"), user("c")]}, "messages", "one assistant"),
    (
        "demonstrations",
        {"messages": [user("p"), bot("c")], "conversations": []},
        "messages and conversations",
        "not both",
    ),
    ("demonstrations", {"messages": [user("p"), bot("c")], "system": 7}, "system", "string"),
    (
        "demonstrations",
        {"conversations": CONVERSATION, "mask": "Assistant"},
        "conversations",
        "masked",
    ),
    ("demonstrations", rated(label=False), "label", "undesirable"),
    (
        "demonstrations",
        {"prompt": "p", "response": "c", "preference": "rejected"},
        "preference",
        "undesirable",
    ),
]


@pytest.mark.survive("R17")
@pytest.mark.parametrize("kind, record, field, word", REFUSED)
def test_a_record_of_no_known_form_is_refused_by_the_name_of_its_field(kind, record, field, word):
    with pytest.raises(Fault) as e:
        understand_record(record, kind)
    assert str(e.value).startswith(field) and word in str(e.value)


INFINITE = [float("nan"), float("inf"), -float("inf"), 10**400, -(10**400)]


@pytest.mark.parametrize("value", [*INFINITE, True, "1", [1]])
@pytest.mark.parametrize("field", ["chosen_reward", "rejected_reward"])
def test_a_reward_is_a_finite_number(field, value):
    with pytest.raises(Fault, match=f"^{field}: expected a finite number"):
        understand_record(pair("c", "d", **{field: value}), "paired")


# ---- labels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["label", "preference"])
def test_a_label_has_fourteen_spellings(field):
    spellings = {
        True: (True, 1, 1.0, "true", "True", "chosen", "desirable"),
        False: (False, 0, 0.0, "false", "False", "rejected", "undesirable"),
    }
    for good, values in spellings.items():
        for value in values:
            record = {"prompt": "p", "completion": "c", field: value}
            assert understand_record(record, "rated").label is good


WRONG = ["tRue", "1", "0", "", "good", "Chosen", " chosen", "yes"]
WRONG += [2, -1, 1.5, 0.5, None, [], [True], {}, {"label": 1}, float("nan"), 10**30]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("field", ["label", "preference"])
def test_a_label_is_never_guessed(field, value):
    with pytest.raises(Fault, match=f"^{field}: expected true, false"):
        understand_record({"prompt": "p", "completion": "c", field: value}, "rated")


def test_data_labels_says_what_other_labels_mean_and_drops_those_that_it_does_not_name():
    labels = {"4": True, "5": True, "1": False, "positive": True, "true": False}
    for value, good in ((4, True), (5.0, True), ("4", True), (1, False), ("positive", True)):
        record = {"prompt": "p", "completion": "c", "preference": value}
        assert understand_record(record, "rated", labels=labels).label is good
    assert understand_record(rated(label=True), "rated", labels=labels).label is False
    for value, text in ((3, "3"), (None, "null"), (False, "false"), (4.5, "4.5"), ("up", "up")):
        with pytest.raises(Dropped, match=f"^{text}$"):
            understand_record(rated(label=value), "rated", labels=labels)
    assert understand_record(rated(label=3), "prompts", labels=labels).prompt == "p"


def test_a_key_given_twice_is_refused_since_one_of_the_two_would_win_silently(tmp_path):
    source = write(
        tmp_path / "d.jsonl",
        '{"prompt": "p", "completion": "c", "label": true, "label": false}',
        '{"prompt": [{"role": "user", "role": "user", "content": "p"}], "completion": "c"}',
    )
    assert refusals(source) == [
        f"{source}:1: label: given 2 times",
        f"{source}:2: role: given 2 times",
    ]


# ---- weights, fields of one's own, and ignored ones ----------------------------------------------

KINDS = {
    "rated": rated(),
    "paired": pair(),
    "demonstrations": {"messages": [user("p"), bot("c")]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_records_own_weight_is_taken_and_is_1_where_there_is_none(kind):
    assert understand_record(KINDS[kind], kind).weight == 1
    for weight in (0, 2, 0.25):
        record = understand_record(KINDS[kind] | {"weight": weight}, kind)
        assert record.weight == weight and type(record.weight) is float
        assert record.ignored == () and record.extra == {}


@pytest.mark.parametrize("value", [*INFINITE, True, False, "1", None, [1], -1, -1e-9], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_a_finite_number_and_at_least_0(kind, value):
    with pytest.raises(Fault, match="^weight: expected a finite number, at least 0, got ."):
        understand_record(KINDS[kind] | {"weight": value}, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_fields_that_data_extra_names_are_kept(kind):
    more = {"source": "web", "score": 3, "margin": -0.5, "other": [1]}
    record = understand_record(KINDS[kind] | more, kind, ("score", "source", "margin"))
    assert record.extra == {"score": 3.0, "source": "web", "margin": -0.5}
    assert type(record.extra["score"]) is float and record.ignored == ("other",)


def test_a_field_that_has_a_meaning_of_its_own_may_be_kept_too():
    record = understand_record(rated(weight=2), "rated", ("weight", "prompt"))
    assert record.extra == {"weight": 2.0, "prompt": "p"} and record.weight == 2
    assert record.prompt == "p" and record.ignored == ()


@pytest.mark.parametrize("value", [*INFINITE, True, None, [1], {"a": 1}], ids=repr)
def test_a_kept_field_is_a_text_or_a_finite_number(value):
    with pytest.raises(Fault, match="^source: expected a text or a finite number, got ."):
        understand_record(rated(source=value), "rated", ("source",))


def test_a_kept_field_must_be_there():
    with pytest.raises(Fault, match=r"^source: missing \(data.extra names it\)$"):
        understand_record(rated(), "rated", ("source",))


@pytest.mark.parametrize(
    "kind, record, ignored",
    [
        ("rated", rated(), ()),
        (
            "rated",
            rated(rewards=1, chosen_reward=2, messages=[]),
            ("rewards", "chosen_reward", "messages"),
        ),
        ("rated", pair(id=7, chosen_reward=1, completion="c"), ("id", "completion")),
        ("paired", pair(messages=[], score_chosen=1), ("messages", "score_chosen")),
        (
            "paired",
            {"chosen": [user("p"), bot("c")], "rejected": [user("p"), bot("d")], "n": 0},
            ("n",),
        ),
        ("demonstrations", rated(source="s"), ("source",)),
        ("demonstrations", {"input": "p", "output": "c", "mask": "User"}, ("mask",)),
        (
            "demonstrations",
            {"conversations": CONVERSATION, "mask": "User", "system": "s", "prompt": "p"},
            ("prompt",),
        ),
    ],
)
def test_the_fields_that_nothing_reads_are_named(kind, record, ignored):
    before = dict(record)
    assert understand_record(record, kind).ignored == ignored
    assert record == before, "the record is the caller's"


def test_weights_and_kept_fields_of_a_csv_are_numbers_where_they_look_like_it(tmp_path):
    path = tmp_path / "d.csv"
    head = "prompt,completion,label,weight,source,note\n"
    path.write_text(head + "1,2,1,0.5,7,3\np,c,0,1E1,007,4\np,c,0,0,,5\np,c,1,1,true,6\n")
    records = understood(path, extra=("source",))
    assert [r.weight for r in records] == [0.5, 10, 0, 1]
    assert [r.extra["source"] for r in records] == [7, "007", "", "true"]
    assert {r.ignored for r in records} == {("note",)}
    assert records[0].prompt == "1" and records[0].completions == ["2"], "other cells are text"
    path.write_text(head + "p,c,1,,a,b\np,c,1,nan,a,b\np,c,1,-1,a,b\np,c,1,true,a,b\n")
    assert fields(refusals(path)) == [[f"{path}:{i}", "weight"] for i in (2, 3, 4, 5)]
    path.write_text(head + "p,c,1,1,1e999,b\n")
    (line,) = refusals(path, extra=("source",))
    assert line.startswith(f"{path}:2: source: expected a text or a finite number")


# ---- files ---------------------------------------------------------------------------------------


def test_marks_and_line_ends_of_other_systems_are_fine(tmp_path):
    path = tmp_path / "d.jsonl"
    a, b = (json.dumps(rated(p)).encode() for p in "ab")
    for blob in (
        a + b"\n" + b + b"\n",
        a + b"\n" + b,
        a + b"\r\n" + b + b"\r\n",
        b"\xef\xbb\xbf" + a + b"\n" + b,
        b"\n" + a + b"\n  \n\t\n" + b + b"\n\n",
    ):
        path.write_bytes(blob)
        assert [r.prompt for r in understood(path)] == ["a", "b"]
    path.write_bytes(b"\n\r\n" + a + b"\n\n" + b)
    places = [where for where, _ in read_records(str(path))]
    assert places == [f"{path}:3", f"{path}:5"], "blank lines count as lines"


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path):
    path = tmp_path / "d.jsonl"
    text = "a\u2028b\x85c"
    path.write_text(json.dumps(rated(text), ensure_ascii=False), encoding="utf-8")
    assert [r.prompt for r in understood(path)] == [text]


@pytest.mark.parametrize("name", ["no.jsonl", "no.json", "no.csv", "no.parquet", "no.txt", "no"])
def test_a_missing_file_is_one_line(tmp_path, name):
    (line,) = refusals(tmp_path / name)
    assert line.startswith(f"{tmp_path / name}: no such ") and line.endswith("file")


def test_a_file_of_a_kind_that_is_not_read_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data.txt").write_text("x")
    assert refusals("data.txt") == ["data.txt: not a .jsonl, .json, .csv, .tsv or .parquet file"]


def test_a_json_array_is_a_file_of_records(tmp_path):
    path = tmp_path / "d.json"
    records = json.dumps([rated("a"), rated("b", label=0)], indent=1)
    path.write_bytes(b"\xef\xbb\xbf \n" + records.encode())
    assert [(r.prompt, r.label) for r in understood(path)] == [("a", True), ("b", False)]
    path.write_text(json.dumps([rated("a"), 5, rated(label="yes")]))
    places = [[f"{path}:record 2", "record"], [f"{path}:record 3", "label"]]
    assert fields(refusals(path)) == places


def test_a_json_file_may_also_hold_a_record_per_line(tmp_path):
    assert len(understood(write(tmp_path / "d.json", rated("a"), rated("b")))) == 2


@pytest.mark.parametrize(
    "blob, reason",
    [
        (b'[\n{"prompt": "p",\n "label"}]', ":3: json: Expecting ':'"),
        (b'[{"prompt": "\xff"}]', ": json: 'utf-8' codec"),
        (b'[{"label": 1, "label": 0}]', ": json: label: given 2 times"),
        (b"[" * 10**5 + b"]" * 10**5, ": json: maximum recursion"),
    ],
)
def test_a_json_array_that_cannot_be_read_is_one_line(tmp_path, blob, reason):
    (tmp_path / "d.json").write_bytes(blob)
    (line,) = refusals(tmp_path / "d.json")
    assert line.startswith(f"{tmp_path / 'd.json'}{reason}")


def test_a_csv_cell_is_text_and_a_csv_label_is_read_as_json_reads_it(tmp_path):
    """A csv has no types, and a reader that guesses them from the column makes nulls of NA and
    numbers of 007."""
    path = tmp_path / "d.csv"
    head = "prompt,completion,label\n"
    up, down = ["true", "True", "1", "1.0", "chosen"], ["false", "FALSE", "0", "0.0"]
    down += ["undesirable"]
    mixed = [cell for two in zip(up, down) for cell in two]
    path.write_text(head + "".join(f"p,c,{text}\n" for text in mixed))
    assert [r.label for r in understood(path)] == [True, False] * 5, "any mixture of spellings"
    path.write_text(head + "007,NA,1\nnull,None,0\ntrue,1.0,1\n1e5,,0\n")
    texts = [(r.prompt, *r.completions) for r in understood(path)]
    assert texts == [("007", "NA"), ("null", "None"), ("true", "1.0"), ("1e5", "")]


def test_a_csv_label_is_never_guessed(tmp_path):
    path = tmp_path / "d.csv"
    wrong = ["1.5", "1.0.", "01", "+1", "2", "-1", "yes", "t", "good", "Chosen", "", "null", "NaN"]
    wrong.append("[1]")
    lines = "".join(f"p,c,{text}\n" for text in wrong)
    path.write_text("prompt,completion,label\np,c,1\n" + lines)
    places = [[f"{path}:{i}", "label"] for i in range(3, 3 + len(wrong))]
    assert fields(refusals(path)) == places


def test_a_csv_pair_has_rewards_or_leaves_them_open(tmp_path):
    path = tmp_path / "d.csv"
    head = "prompt,chosen,rejected,chosen_reward,rejected_reward\n"
    path.write_text(head + "p,c,d,2,-0.5\np,c,d,,\n")
    assert [r.rewards for r in understood(path, "paired")] == [(2.0, -0.5), (None, None)]
    path.write_text(head + "p,c,d,nan,0\np,c,d,1,Infinity\np,c,d,high,0\np,c,d,true,0\n")
    named = [field for _, field in fields(refusals(path, "paired"))]
    assert named == ["chosen_reward", "rejected_reward", "chosen_reward", "chosen_reward"]


def test_a_csv_is_told_by_line_also_behind_quoted_line_ends(tmp_path):
    path = tmp_path / "d.csv"
    head = b"\xef\xbb\xbfprompt,completion,label\r\n"
    good = b'"two\r\nlines, ""so""",c,1'
    path.write_bytes(head + good + b"\r\n\r\np,c,maybe\r\np,c\r\n")
    assert fields(refusals(path)) == [[f"{path}:5", "label"], [f"{path}:6", "record"]]
    path.write_bytes(head + good)
    assert understood(path)[0].prompt == 'two\r\nlines, "so"'


def test_a_csv_whose_columns_do_not_fit_is_refused(tmp_path):
    path = tmp_path / "d.csv"
    for text, reason in (
        ("prompt,completion,label\na,b,c,1\n", ":2: record: 4 fields, but 3 column names"),
        ("prompt,completion,label,label\na,b,1,0\n", ":1: csv: label: given 2 times"),
        ('prompt,completion,label\n"a,b,1\n', ":2: csv: unexpected end of data"),
        ('prompt,completion,label\n"a"x,b,1\n', ":2: csv: "),
        ('"prompt,completion,label\n', ":1: csv: unexpected end of data"),
    ):
        path.write_text(text)
        (line,) = refusals(path)
        assert line.startswith(f"{path}{reason}")
    path.write_bytes(b"prompt,completion,label\na,b,1\n\xff,b,1\n")
    assert refusals(path) == [f"{path}:3: csv: not UTF-8"]


def test_a_long_document_in_a_csv_is_no_fault(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text("prompt,completion,label\n" + "a " * 100_000 + ",b,1\n")
    assert len(understood(path)[0].prompt) == 200_000


def gz(path: Path) -> Path:
    (path.parent / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    return path.parent / f"{path.name}.gz"


def test_a_file_may_be_compressed_or_have_tabs(tmp_path):
    jsonl = Path(write(tmp_path / "d.jsonl", rated("a"), rated("b")))
    array, csv, tsv = (tmp_path / f"d.{kind}" for kind in ("json", "csv", "tsv"))
    array.write_text(json.dumps([rated("a"), rated("b")]))
    csv.write_text("prompt,completion,label\na,c,1\nb,c,1.0\n")
    tsv.write_text('prompt\tcompletion\tlabel\na\t"c"\t1\nb\tc\ttrue\n')
    for path in (jsonl, array, csv, tsv):
        assert understood(gz(path)) == understood(path) == understood(jsonl)
    half = gz(jsonl)
    half.write_bytes(half.read_bytes()[:-9])
    (line,) = refusals(half)
    assert line == f"{half}: Compressed file ended before the end-of-stream marker was reached"
    half.write_text("no gzip")
    (line,) = refusals(half)
    assert line.startswith(f"{half}: Not a gzipped file")


def test_a_file_that_may_not_be_read_is_one_line(tmp_path, monkeypatch):
    path = write(tmp_path / "d.jsonl", rated())

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(records.readers, "_open", refuse)
    assert refusals(path) == [f"{path}: Permission denied"]


def test_several_sources_are_given_by_commas_patterns_and_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "c.csv", "x[1].jsonl", "y:0.5"):
        Path(name).write_text("")
    assert split_sources("a.jsonl") == [(["a.jsonl"], None)]
    assert split_sources("a.jsonl, ?.jsonl") == [
        (["a.jsonl"], None),
        (["a.jsonl", "b.jsonl"], None),
    ]
    assert split_sources("a.jsonl:0.7,*.csv:3") == [(["a.jsonl"], 0.7), (["c.csv"], 3.0)]
    assert split_sources("org/set:en:val") == [(["org/set:en:val"], None)], "a split is no weight"
    assert len(split_sources(",".join(["a.jsonl"] * 99))) == 99, (
        "longer than any file's name may be"
    )
    for path in ("x[1].jsonl", "y:0.5"):
        assert split_sources(path) == [([path], None)], "a path that is there is no pattern"
    for given in ("a.jsonl:0.5", "a.jsonl:0.5,b.jsonl", "a.jsonl:0,b.jsonl:1", "none*.jsonl"):
        with pytest.raises(BadInput, match="weight|no file has such a name"):
            split_sources(given)


def test_columns_of_other_names_are_ours_and_a_name_is_given_once(tmp_path):
    names = {"question": "prompt", "good": "label", "prompt": "title"}
    record = {"question": "q", "completion": "c", "good": 1, "prompt": "t"}
    meant = Record("q", ["c"], True, ignored=("title",), renamed=("question", "good", "prompt"))
    assert understand_record(record, "rated", columns=names) == meant
    (tmp_path / "d.csv").write_text("question,completion,good,prompt\nq,c,1.0,t\n")
    (row,) = (raw for _, raw in read_records(str(tmp_path / "d.csv"), columns=names))
    assert understand_record(row, "rated", columns=names) == meant, "its label is read as JSON"
    with pytest.raises(Fault, match="^prompt: given 2 times"):
        understand_record(record, "rated", columns={"question": "prompt"})


# ---- through the datasets package ----------------------------------------------------------------


@pytest.fixture
def no_network(tmp_path, monkeypatch):
    """Nothing waits on a network, and the caches of the datasets package are the test's own."""
    import datasets
    import huggingface_hub

    def refuse(*_, **__):
        raise OSError("no network in tests")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # read at import
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)


def parquet(path: Path, **columns) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_files_hold_records_with_types(tmp_path, no_network):
    columns = dict(prompt=["a", "b"], completion=["c", "d"])
    for i, labels in enumerate(([True, False], [1, 0], ["chosen", "rejected"])):
        path = parquet(tmp_path / f"{i}.parquet", **columns, label=labels)
        assert [(r.prompt, r.label) for r in understood(path)] == [("a", True), ("b", False)]
    path = parquet(tmp_path / "float.parquet", **columns, label=[1.0, None])
    assert fields(refusals(path)) == [[f"{path}:2", "label"]]
    chosen, rejected = ([[user("a"), bot(text)]] for text in "cd")
    path = parquet(tmp_path / "chat.parquet", chosen=chosen, rejected=rejected)
    assert understood(path) == [Record([user("a")], [bot("c"), bot("d")], None)]


def test_a_local_parquet_file_with_brackets_is_read_without_the_datasets_package(
    tmp_path, no_network, monkeypatch
):
    """It asks the network for a usage counter, and takes brackets for a pattern."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    columns = dict(prompt=["a"] * 5000, completion=["c"] * 5000, label=[True] * 5000)
    path = parquet(tmp_path / "x[1].parquet", **columns)
    assert [where for where, _ in read_records(str(path))][-1] == f"{path}:5000"
    chat = [[user("p"), {"role": "assistant", "content": None, "tool_calls": ["x"]}]]
    path = parquet(tmp_path / "chat.parquet", messages=chat, label=[1.0])
    (record,) = understood(path)
    assert record.prompt == [user("p")], "no key that a row has only for another's sake"


def test_a_folder_of_save_to_disk_is_a_source(tmp_path, no_network):
    import datasets

    part = datasets.Dataset.from_list([rated("a"), rated("b")])
    part.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": part, "val": part.select([1])}).save_to_disk(tmp_path / "two")
    for source in ("one", "two", "two:train"):
        assert [r.prompt for r in understood(tmp_path / source)] == ["a", "b"]
    assert [r.prompt for r in understood(tmp_path / "two:val")] == ["b"]
    (tmp_path / "none").mkdir()
    for source in ("two:test", "none"):
        (line,) = refusals(tmp_path / source)
        assert ": no folder of save_to_disk with this split" in line


def test_a_broken_parquet_file_is_not_called_missing(tmp_path, no_network):
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no")
    (line,) = refusals(tmp_path / "d.parquet")
    assert line.startswith(f"{tmp_path / 'd.parquet'}: not a parquet file")


IDS = ["someone/ratings", "someone/ratings-2.5", "someone/ratings:train", "ratings:en:test"]


@pytest.mark.parametrize("name", IDS)
def test_a_hub_id_without_network_is_one_line_that_says_what_to_do(no_network, name):
    (line,) = refusals(name)
    assert line.startswith(f"{name}: ") and "not fetched from huggingface.co" in line
    assert ".jsonl" in line and "give its path" in line


@pytest.mark.parametrize(
    "source, asked",
    [
        ("someone/ratings", ("someone/ratings", "train")),
        ("someone/ratings:val", ("someone/ratings", "val")),
        ("someone/ratings:en:test", ("someone/ratings", "en", "test")),
    ],
)
def test_a_hub_id_may_name_a_config_and_a_split(no_network, monkeypatch, source, asked):
    import datasets

    def load_dataset(*names, split):
        assert (*names, split) == asked
        return iter([rated("a"), rated("b", label="good")])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (line,) = refusals(source)
    assert line.startswith(f"{source}:2: label: ")
