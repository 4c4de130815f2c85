"""Records are understood or refused, never guessed; tokens end where they should; a step's pairs and cuts are exact."""

import contextlib
import gc
import json
import random
import re
import shutil
import socket
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch

import data
from data import BadInput, Batch, Data, Example, Fault, Micro, Record, Tokenizer

FILES = Path(__file__).parent / "parity" / "tokenizer"
EOS = 0  # <|endoftext|> there; "a", "b", ... are 66, 67, ...; " best" is 262
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


# ---- what the tests build -------------------------------------------------------------------------------------------


def folder(path: Path, special: tuple[str, ...] = (), before: str = "", after: str = "", change=None, **config) -> Path:
    """A copy of the tokenizer; `before` and `after` are what its post-processor puts around a text."""
    shutil.copytree(FILES, path, dirs_exist_ok=True)
    t = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    t.add_special_tokens(list(special))
    if before or after:
        around = [s for s in (before, after) if s]
        t.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{before} $A {after}".strip(), special_tokens=[(s, t.token_to_id(s)) for s in around]
        )
    if change:
        change(t)
    t.save(str(path / "tokenizer.json"))
    old = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(old | config))
    return path


@pytest.fixture(scope="session")
def plain() -> Tokenizer:
    """EOS is 0, no BOS, no chat template."""
    return Tokenizer(FILES)


@pytest.fixture(scope="session")
def chat(tmp_path_factory) -> Tokenizer:
    """The same with ChatML."""
    path = tmp_path_factory.mktemp("chat")
    return Tokenizer(folder(path, ("<|im_start|>", "<|im_end|>"), chat_template=CHATML))


@pytest.fixture(scope="session")
def bos(tmp_path_factory) -> Tokenizer:
    """Its post-processor puts <s> (512) in front, and its template writes <s> as well."""
    path = tmp_path_factory.mktemp("bos")
    template = "{{ bos_token }}" + CHATML
    return Tokenizer(folder(path, ("<s>",), "<s>", bos_token="<s>", chat_template=template))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The oracle: the tokenizers package, with nothing added."""
    return tokenizer.processor.encode(text, add_special_tokens=False).ids


def write(path: Path, *records) -> str:
    """A .jsonl file of records (or of raw lines)."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return str(path)


def load(source, tokenizer, kind="rated", max_prompt=64, max_completion=64) -> list[Example]:
    return data.load(str(source), tokenizer, kind, max_prompt, max_completion)[0]


def refusal(*args, **kwargs) -> list[str]:
    """The lines that load refuses with."""
    with pytest.raises(BadInput) as e:
        load(*args, **kwargs)
    return str(e.value).splitlines()


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def bot(text: str) -> dict:
    return {"role": "assistant", "content": text}


def rated(prompt="p", completion="c", label=True) -> dict:
    return {"prompt": prompt, "completion": completion, "label": label}


def example(prompt, *completions, label=True) -> Example:
    arrays = [np.array(x, dtype=np.int32) for x in (prompt, *completions)]
    return Example(arrays[0], tuple(arrays[1:]), label, (None, None), "made")


# ---- records --------------------------------------------------------------------------------------------------------


RATED = {
    "KTO, strings": (rated("p", "c"), Record("p", ["c"], True)),
    "KTO, messages": (rated([user("p")], [bot("c")], False), Record([user("p")], [bot("c")], False)),
    "KTO, messages and a string": (rated([user("p")], "c"), Record([user("p")], ["c"], True)),
    "KTO, a system turn": (
        rated([{"role": "system", "content": "s"}, user("p")], bot("c")),
        Record([{"role": "system", "content": "s"}, user("p")], [bot("c")], True),
    ),
    "NeMo, up": ({"prompt": "p", "response": "c", "preference": "chosen"}, Record("p", ["c"], True)),
    "NeMo, down": ({"prompt": "p", "response": "c", "preference": "rejected"}, Record("p", ["c"], False)),
    "ColossalAI": (
        {
            "prompt": [{"from": "human", "content": "p"}, {"from": "assistant", "content": "q"}],
            "completion": {"from": "assistant", "content": "c"},
            "label": False,
        },
        Record([user("p"), bot("q")], [bot("c")], False),
    ),
}


@pytest.mark.parametrize("form", RATED)
def test_every_form_of_a_rated_record_is_understood(form):
    record, meant = RATED[form]
    assert data.understand(record, "rated") == meant


TWO = Record([user("p")], [bot("good"), bot("bad")], None)
PAIRS = {
    "strings": ({"prompt": "p", "chosen": "good", "rejected": "bad"}, Record("p", ["good", "bad"], None)),
    "other names": (
        {"prompt": "p", "chosen_response": "good", "rejected_response": "bad"},
        Record("p", ["good", "bad"], None),
    ),
    "rewards": (
        {"prompt": "p", "chosen": "good", "rejected": "bad", "chosen_reward": 4, "rejected_reward": -0.5},
        Record("p", ["good", "bad"], None, (4.0, -0.5)),
    ),
    "null rewards": (
        {"prompt": "p", "chosen": "good", "rejected": "bad", "chosen_reward": None, "rejected_reward": None},
        Record("p", ["good", "bad"], None, (None, None)),
    ),
    "messages": ({"prompt": [user("p")], "chosen": [bot("good")], "rejected": bot("bad")}, TWO),
    "implicit prompt": ({"chosen": [user("p"), bot("good")], "rejected": [user("p"), bot("bad")]}, TWO),
    "prompt repeated": (
        {"prompt": [user("p")], "chosen": [user("p"), bot("good")], "rejected": [user("p"), bot("bad")]},
        TWO,
    ),
    "prompt repeated, and a string": (
        {"prompt": "p", "chosen": [user("p"), bot("good")], "rejected": [user("p"), bot("bad")]},
        Record("p", [bot("good"), bot("bad")], None),
    ),
}


@pytest.mark.parametrize("form", PAIRS)
def test_every_form_of_a_pair_is_understood(form):
    record, meant = PAIRS[form]
    assert data.understand(record, "paired") == meant
    assert data.understand(record, "rated") == meant


def test_a_pair_stays_a_pair_for_dpo_and_becomes_two_rated_examples_for_kto(tmp_path, plain):
    record = {"prompt": "p", "chosen": "good", "rejected": "bad", "chosen_reward": 3, "rejected_reward": 2}
    source = write(tmp_path / "pairs.jsonl", record)
    good, bad = ids_of(plain, "good") + [EOS], ids_of(plain, "bad") + [EOS]
    (pair,) = load(source, plain, "paired")
    assert [c.tolist() for c in pair.completions] == [good, bad] and pair.rewards == (3.0, 2.0)
    up, down = load(source, plain, "rated")
    assert [c.tolist() for c in up.completions + down.completions] == [good, bad]
    assert (up.label, down.label) == (True, False)
    assert up.prompt.tolist() == down.prompt.tolist() == ids_of(plain, "p")
    assert up.where == down.where == f"{source}:1"
    assert up.rewards == down.rewards == (None, None), "a rating has no second completion to be worth less"


DEMOS = {
    "messages": ({"messages": [user("p"), bot("c")]}, Record([user("p")], [bot("c")], None)),
    "prompt and completion": ({"prompt": "p", "completion": "c"}, Record("p", ["c"], None)),
    "prompt and response": ({"prompt": [user("p")], "response": [bot("c")]}, Record([user("p")], [bot("c")], None)),
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
        Record([{"role": "system", "content": "s"}, user("p"), bot("q"), user("r")], [bot("c")], None),
    ),
    "conversations, no system": (
        {"system": "", "conversations": [{"from": "User", "value": "p"}, {"from": "Assistant", "value": "c"}]},
        Record([user("p")], [bot("c")], None),
    ),
    "a completion rated good": (rated("p", "c", True), Record("p", ["c"], None)),
}


@pytest.mark.parametrize("form", DEMOS)
def test_every_form_of_a_demonstration_is_understood(form):
    record, meant = DEMOS[form]
    assert data.understand(record, "demos") == meant


def test_a_demonstration_is_one_example_of_one_completion(tmp_path, plain):
    (e,) = load(write(tmp_path / "d.jsonl", {"input": "p", "output": "c"}), plain, "demos")
    assert (e.prompt.tolist(), [c.tolist() for c in e.completions]) == (ids_of(plain, "p"), [[*ids_of(plain, "c"), 0]])
    assert e.label is True


def test_keys_of_a_message_that_are_not_ours_reach_the_template():
    turn = {"role": "User", "content": "p", "name": "Ann"}
    assert data.understand(rated([turn], [bot("c")]), "rated").prompt == [
        {"role": "user", "content": "p", "name": "Ann"}
    ]


REFUSED = [
    # kind, record, the field that is named, a word of the reason
    ("rated", [1, 2], "record", "object"),
    ("rated", "text", "record", "object"),
    ("rated", None, "record", "object"),
    ("rated", {"prompt": "p", "completion": "c"}, "label", "missing"),
    ("rated", {"completion": "c", "label": True}, "prompt", "missing"),
    ("rated", {"prompt": "p", "label": True}, "completion", "missing"),
    ("rated", rated() | {"preference": "chosen"}, "label and preference", "not both"),
    ("rated", rated() | {"response": "c"}, "completion and response", "not both"),
    ("rated", rated() | {"chosen": "c"}, "record", "which one"),
    ("rated", {"prompt": "p", "chosen": "c", "rejected": "d", "preference": "chosen"}, "record", "which one"),
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
    ("paired", {"prompt": "p"}, "chosen", "pairs are needed"),
    ("paired", rated(), "chosen", "rated record"),
    ("paired", {"prompt": "p", "chosen": "c"}, "rejected", "missing"),
    ("paired", {"prompt": "p", "rejected": "c"}, "chosen", "missing"),
    ("paired", {"prompt": "p", "chosen": "c", "chosen_response": "c", "rejected": "d"}, "chosen and", "not both"),
    ("paired", {"chosen": "c", "rejected": "d"}, "prompt", "missing"),
    ("paired", {"chosen": [bot("c")], "rejected": [bot("d")]}, "prompt", "missing"),
    ("paired", {"chosen": [user("p"), bot("c")], "rejected": [user("q"), bot("d")]}, "prompt", "missing"),
    ("paired", {"chosen": [user("p"), bot("c")], "rejected": [user("p"), user("d")]}, "rejected", "one assistant"),
    (
        "paired",
        {"prompt": [user("p")], "chosen": bot("c"), "rejected": [user("p"), bot("c"), bot("d")]},
        "rejected",
        "more than one turn",
    ),
    (
        "paired",
        {"prompt": [user("p")], "chosen": [user("other"), bot("c")], "rejected": bot("d")},
        "chosen",
        "one assistant",
    ),
    ("demos", {"input": "p"}, "output", "missing"),
    ("demos", {"input": "p", "output": 1}, "output", "string"),
    ("demos", {"output": "c"}, "prompt", "missing"),
    ("demos", {"prompt": "p"}, "completion", "missing"),
    ("demos", {"messages": [bot("c")]}, "messages", "two"),
    ("demos", {"messages": "p"}, "messages", "two"),
    ("demos", {"messages": [user("p"), user("c")]}, "messages", "one assistant"),
    ("demos", {"messages": [user("p"), bot("c")], "conversations": []}, "messages and conversations", "not both"),
    ("demos", {"messages": [user("p"), bot("c")], "system": 7}, "system", "string"),
    (
        "demos",
        {"conversations": [{"from": "User", "value": "p"}, {"from": "Assistant", "value": "c"}], "mask": "Assistant"},
        "conversations",
        "masked",
    ),
    ("demos", rated(label=False), "label", "undesirable"),
    ("demos", {"prompt": "p", "response": "c", "preference": "rejected"}, "preference", "undesirable"),
]


@pytest.mark.parametrize("kind, record, field, word", REFUSED)
def test_a_record_of_no_known_form_is_refused_by_the_name_of_its_field(kind, record, field, word):
    with pytest.raises(Fault) as e:
        data.understand(record, kind)
    assert str(e.value).startswith(field) and word in str(e.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), True, "1", [1], 10**400, -(10**400)])
@pytest.mark.parametrize("field", ["chosen_reward", "rejected_reward"])
def test_a_reward_is_a_finite_number(field, value):
    with pytest.raises(Fault, match=f"^{field}: expected a finite number"):
        data.understand({"prompt": "p", "chosen": "c", "rejected": "d", field: value}, "paired")


# ---- labels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["label", "preference"])
def test_a_label_has_eight_spellings(field):
    for good, values in ((True, (True, 1, "chosen", "desirable")), (False, (False, 0, "rejected", "undesirable"))):
        for value in values:
            record = {"prompt": "p", "completion": "c", field: value}
            assert data.understand(record, "rated").label is good


WRONG = [
    "true",
    "false",
    "True",
    "1",
    "0",
    "",
    "good",
    "Chosen",
    " chosen",
    "yes",
    2,
    -1,
    1.0,
    0.0,
    0.5,
    None,
    [],
    [True],
]
WRONG += [{}, {"label": 1}, float("nan"), 10**30]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("field", ["label", "preference"])
def test_a_label_is_never_guessed(field, value):
    with pytest.raises(Fault, match=f"^{field}: expected true, false"):
        data.understand({"prompt": "p", "completion": "c", field: value}, "rated")


def test_a_key_given_twice_is_refused_since_one_of_the_two_would_win_silently(tmp_path, plain):
    source = write(
        tmp_path / "d.jsonl",
        '{"prompt": "p", "completion": "c", "label": true, "label": false}',
        '{"prompt": [{"role": "user", "role": "user", "content": "p"}], "completion": "c", "label": 1}',
    )
    assert refusal(source, plain) == [f"{source}:1: label: given 2 times", f"{source}:2: role: given 2 times"]


# ---- files ----------------------------------------------------------------------------------------------------------


def test_each_bad_record_has_one_line_that_says_where_and_why(tmp_path, plain):
    path = tmp_path / "bad.jsonl"
    lines = [
        json.dumps(rated()).encode(),
        b"{not json",
        b'{"prompt": "\xff\xfe", "completion": "c", "label": 1}',
        b"[1, 2]",
        b"",
        b'{"prompt": "p", "completion": "c", "label": "yes"}',
        b'{"prompt": "p", "chosen": "c", "rejected": "d", "chosen_reward": NaN}',
        b'{"prompt": "p", "chosen": "c", "rejected": "d", "rejected_reward": -Infinity}',
        b'{"prompt": "p", "chosen": "c", "rejected": "d", "chosen_reward": 1e999}',
        rb'{"prompt": "p \ud83d", "completion": "c", "label": 1}',
        rb'{"prompt": "p", "completion": "\udc00 c", "label": 1}',
        rb'{"a\nb": 1, "a\nb": 2}',
        '{"prompt": ["one\u2028two"], "completion": "c", "label": 1}'.encode(),
        b"[" * 5000 + b"]" * 5000,
        b'{"prompt": ' + b"1" * 5000 + b', "completion": "c", "label": 1}',
        b'{"prompt": "p", "completion": "c"',
        b'{"prompt": "p", "completion": "half a li',
    ]
    path.write_bytes(b"\n".join(lines))
    wanted = {
        2: "json: .*property name.*column 2",
        3: "json: not UTF-8 at byte 12",
        4: "record: expected an object, got .1, 2.",
        6: 'label: expected .* got "yes"',
        7: "chosen_reward: .*finite number, got NaN",
        8: "rejected_reward: .*finite number, got -Infinity",
        9: "chosen_reward: .*finite number, got Infinity",
        10: "record: .*surrogate",
        11: "record: .*surrogate",
        12: "a b: given 2 times",
        13: "prompt.0.: expected a message",
        14: "json: .*recursion",
        15: "json: .*digits",
        16: "json: .*delimiter: column 34",
        17: "json: Unterminated string.*column",
    }
    got = refusal(path, plain)
    assert [int(re.match(rf"{re.escape(str(path))}:(\d+): ", g)[1]) for g in got] == list(wanted)
    for line, (number, pattern) in zip(got, wanted.items()):
        assert re.match(rf"{re.escape(str(path))}:{number}: {pattern}", line), line
        assert " line " not in line, "the number inside the line would contradict the file's"


def test_the_first_twenty_faults_are_told_and_no_more(tmp_path, plain):
    source = write(tmp_path / "d.jsonl", rated(), *[rated(label="yes")] * 19)
    assert len(refusal(source, plain)) == 19
    source = write(tmp_path / "d.jsonl", rated(), *[rated(label="yes")] * 50)
    assert [line.split(": ")[0] for line in refusal(source, plain)] == [f"{source}:{i}" for i in range(2, 22)]


def test_a_record_too_deep_to_be_shown_is_refused_like_any_other(tmp_path, plain):
    """Near the recursion limit there are depths that can be read but not printed: all of them are tried."""
    deep = [f'{{"prompt": {"[" * d}{"]" * d}, "completion": "c", "label": 1}}' for d in range(sys.getrecursionlimit())]
    shown = 0
    for d in range(800, len(deep), 19):  # windows of 20 lines, or the first 20 faults would hide the rest
        lines = refusal(write(tmp_path / "deep.jsonl", *deep[d : d + 19]), plain)
        assert [int(line.split(":")[1]) for line in lines] == list(range(1, len(deep[d : d + 19]) + 1))
        shown += len(lines)
    assert shown == len(deep) - 800


def test_marks_and_line_ends_of_other_systems_are_fine(tmp_path, plain):
    path = tmp_path / "d.jsonl"
    a, b = (json.dumps(rated(p)).encode() for p in "ab")
    path.write_bytes(a + b"\n" + b + b"\n")
    meant = [e.prompt.tolist() for e in load(path, plain)]
    assert meant == [[66], [67]]
    for blob in (
        a + b"\n" + b,
        a + b"\r\n" + b + b"\r\n",
        b"\xef\xbb\xbf" + a + b"\n" + b,
        b"\n" + a + b"\n  \n\t\n" + b + b"\n\n",
    ):
        path.write_bytes(blob)
        assert [e.prompt.tolist() for e in load(path, plain)] == meant
    path.write_bytes(b"\n\r\n" + a + b"\n\n" + b)
    assert [e.where for e in load(path, plain)] == [f"{path}:3", f"{path}:5"], "blank lines count as lines"


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path, plain):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(rated("a\u2028b\x85c"), ensure_ascii=False), encoding="utf-8")
    assert plain.decode(load(path, plain)[0].prompt) == "a\u2028b\x85c"


@pytest.mark.parametrize("name, blob", [("d.jsonl", b""), ("d.jsonl", b"\n\n"), ("d.json", b"[]"), ("d.csv", b"")])
def test_a_file_without_records_is_refused(tmp_path, plain, name, blob):
    (tmp_path / name).write_bytes(blob)
    assert refusal(tmp_path / name, plain) == [f"{tmp_path / name}: no records"]


@pytest.mark.parametrize("name", ["no.jsonl", "no.json", "no.csv", "no.parquet", "no.txt", "no"])
def test_a_missing_file_is_one_line(tmp_path, plain, name):
    (line,) = refusal(tmp_path / name, plain)
    assert line.startswith(f"{tmp_path / name}: no such ") and line.endswith("file")


def test_a_file_of_a_kind_that_is_not_read_is_not_looked_for_on_the_hub(tmp_path, plain, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data.txt").write_text("x")
    assert refusal("data.txt", plain) == ["data.txt: no such .jsonl, .json, .csv or .parquet file"]


def test_a_json_array_is_a_file_of_records(tmp_path, plain):
    path = tmp_path / "d.json"
    path.write_bytes(b"\xef\xbb\xbf \n" + json.dumps([rated("a"), rated("b", label=0)], indent=1).encode())
    assert [(e.prompt.tolist(), e.label) for e in load(path, plain)] == [([66], True), ([67], False)]
    path.write_text(json.dumps([rated("a"), 5, rated(label="yes")]))
    got = refusal(path, plain)
    assert [g.split(": ")[:2] for g in got] == [[f"{path}:record 2", "record"], [f"{path}:record 3", "label"]]


def test_a_json_file_may_also_hold_a_record_per_line(tmp_path, plain):
    assert len(load(write(tmp_path / "d.json", rated("a"), rated("b")), plain)) == 2


@pytest.mark.parametrize(
    "blob, reason",
    [
        (b'[\n{"prompt": "p",\n "label"}]', ":3: json: Expecting ':'"),
        (b'[{"prompt": "\xff"}]', ": json: 'utf-8' codec"),
        (b'[{"label": 1, "label": 0}]', ": json: label: given 2 times"),
        (b"[" * 5000 + b"]" * 5000, ": json: maximum recursion"),
    ],
)
def test_a_json_array_that_cannot_be_read_is_one_line(tmp_path, plain, blob, reason):
    (tmp_path / "d.json").write_bytes(blob)
    (line,) = refusal(tmp_path / "d.json", plain)
    assert line.startswith(f"{tmp_path / 'd.json'}{reason}")


def test_a_csv_cell_is_text_and_a_csv_label_is_read_as_json_reads_it(tmp_path, plain):
    """A csv has no types, and a reader that guesses them from the column makes nulls of NA and numbers of 007."""
    path = tmp_path / "d.csv"
    cells = [("true", True), ("false", False), ("True", True), ("FALSE", False), ("1", True), ("0", False)]
    cells += [("chosen", True), ("rejected", False), ("desirable", True), ("undesirable", False)]
    path.write_text("prompt,completion,label\n" + "".join(f"p,c,{text}\n" for text, _ in cells))
    assert [e.label for e in load(path, plain)] == [good for _, good in cells], "any mixture of spellings"
    path.write_text("prompt,completion,label\n007,NA,1\nnull,None,0\ntrue,1.0,1\n1e5,,0\n")
    got = [(plain.decode(e.prompt), plain.decode(e.completions[0])) for e in load(path, plain)]
    assert got == [("007", "NA"), ("null", "None"), ("true", "1.0"), ("1e5", "")]


def test_a_csv_label_is_never_guessed(tmp_path, plain):
    path = tmp_path / "d.csv"
    wrong = ["1.0", "0.0", "01", "+1", "2", "-1", "yes", "t", "good", "Chosen", "", "null", "NaN", "[1]"]
    path.write_text("prompt,completion,label\np,c,1\n" + "".join(f"p,c,{text}\n" for text in wrong))
    got = refusal(path, plain)
    assert [g.split(": ")[:2] for g in got] == [[f"{path}:{i}", "label"] for i in range(3, 3 + len(wrong))]


def test_a_csv_pair_has_rewards_or_leaves_them_open(tmp_path, plain):
    path = tmp_path / "d.csv"
    head = "prompt,chosen,rejected,chosen_reward,rejected_reward\n"
    path.write_text(head + "p,c,d,2,-0.5\np,c,d,,\n")
    assert [e.rewards for e in load(path, plain, "paired")] == [(2.0, -0.5), (None, None)]
    path.write_text(head + "p,c,d,nan,0\np,c,d,1,Infinity\np,c,d,high,0\np,c,d,true,0\n")
    fields = [g.split(": ")[1] for g in refusal(path, plain, "paired")]
    assert fields == ["chosen_reward", "rejected_reward", "chosen_reward", "chosen_reward"]


def test_a_csv_is_told_by_line_also_behind_quoted_line_ends(tmp_path, plain):
    path = tmp_path / "d.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,completion,label\r\n"two\r\nlines, ""so""",c,1\r\n\r\np,c,maybe\r\np,c\r\n')
    got = refusal(path, plain)
    assert [g.split(": ")[:2] for g in got] == [[f"{path}:5", "label"], [f"{path}:6", "record"]]
    path.write_bytes(path.read_bytes().split(b"\r\n\r\n")[0])
    assert plain.decode(load(path, plain)[0].prompt) == 'two\r\nlines, "so"'


def test_a_csv_whose_columns_do_not_fit_is_refused(tmp_path, plain):
    path = tmp_path / "d.csv"
    for text, reason in (
        ("prompt,completion,label\na,b,c,1\n", ":2: record: 4 fields, but 3 column names"),
        ("prompt,completion,label,label\na,b,1,0\n", ":1: csv: label: given 2 times"),
        ('prompt,completion,label\n"a,b,1\n', ":2: csv: unexpected end of data"),
        ('prompt,completion,label\n"a"x,b,1\n', ":2: csv: "),
        ('"prompt,completion,label\n', ":1: csv: unexpected end of data"),
    ):
        path.write_text(text)
        (line,) = refusal(path, plain)
        assert line.startswith(f"{path}{reason}")
    path.write_bytes(b"prompt,completion,label\na,b,1\n\xff,b,1\n")
    assert refusal(path, plain) == [f"{path}:3: csv: not UTF-8"]


def test_a_long_document_in_a_csv_is_no_fault(tmp_path, plain):
    path = tmp_path / "d.csv"
    path.write_text("prompt,completion,label\n" + "a " * 100_000 + ",b,1\n")
    assert len(load(path, plain)[0].prompt) == 64


@pytest.fixture
def no_network(tmp_path, monkeypatch):
    """Nothing waits on a network, and the caches of the datasets package are the test's own."""
    import datasets
    import huggingface_hub

    def refuse(*_, **__):
        raise OSError("no network in tests")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # read from the environment once, at import
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)


def parquet(path: Path, **columns) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_files_hold_records_with_types(tmp_path, chat, no_network):
    columns = dict(prompt=["a", "b"], completion=["c", "d"])
    for i, labels in enumerate(([True, False], [1, 0], ["chosen", "rejected"])):
        path = parquet(tmp_path / f"{i}.parquet", **columns, label=labels)
        assert [(e.prompt.tolist(), e.label) for e in load(path, chat)] == [([66], True), ([67], False)]
    path = parquet(tmp_path / "float.parquet", **columns, label=[1.0, None])
    assert [g.split(": ")[:2] for g in refusal(path, chat)] == [[f"{path}:{i}", "label"] for i in (1, 2)]
    path = parquet(tmp_path / "chat.parquet", chosen=[[user("a"), bot("c")]], rejected=[[user("a"), bot("d")]])
    assert [e.label for e in load(path, chat)] == [True, False]


def test_a_broken_parquet_file_is_not_called_missing(tmp_path, plain, no_network):
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no")
    (line,) = refusal(tmp_path / "d.parquet", plain)
    assert line.startswith(f"{tmp_path / 'd.parquet'}: not a parquet file")


@pytest.mark.parametrize("name", ["someone/ratings", "someone/ratings-2.5", "someone/ratings:train", "ratings:en:test"])
def test_a_hub_id_without_network_is_one_line_that_says_what_to_do(plain, no_network, name):
    (line,) = refusal(name, plain)
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
def test_a_hub_id_may_name_a_config_and_a_split(plain, no_network, monkeypatch, source, asked):
    import datasets

    def load_dataset(*names, split):
        assert (*names, split) == asked
        return iter([rated("a"), rated("b", label="good")])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (line,) = refusal(source, plain)
    assert line.startswith(f"{source}:2: label: ")


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_a_plain_completion_ends_with_one_eos(tmp_path, plain):
    (e,) = load(write(tmp_path / "d.jsonl", rated("ab", " best")), plain)
    assert e.prompt.tolist() == ids_of(plain, "ab") and EOS not in e.prompt
    assert e.completions[0].tolist() == [262, EOS]
    assert (e.prompt.dtype, e.completions[0].dtype) == (np.int32, np.int32)


def test_an_empty_completion_is_eos_alone(tmp_path, plain):
    assert load(write(tmp_path / "d.jsonl", rated("p", "")), plain)[0].completions[0].tolist() == [EOS]


def test_prompt_and_completion_are_tokenised_apart(tmp_path, plain):
    (e,) = load(write(tmp_path / "d.jsonl", rated("be", "st")), plain)
    together, apart = ids_of(plain, "best"), ids_of(plain, "be") + ids_of(plain, "st")
    assert together != apart, "else this shows nothing"
    assert [*e.prompt, *e.completions[0]] == [*apart, EOS]


def test_a_post_processor_that_adds_eos_does_not_end_a_completion_twice_nor_a_prompt_at_all(tmp_path):
    """<|endoftext|> as BOS and EOS, put behind a text only: that is no BOS."""
    path = folder(tmp_path / "t", after="<|endoftext|>", bos_token="<|endoftext|>")
    (e,) = load(write(tmp_path / "d.jsonl", rated("a", "b")), Tokenizer(path))
    assert (e.prompt.tolist(), e.completions[0].tolist()) == ([66], [67, EOS])


def test_padding_and_truncation_left_in_the_tokenizer_file_do_nothing(tmp_path):
    def change(t):
        t.enable_padding(length=40)
        t.enable_truncation(3)

    tokenizer = Tokenizer(folder(tmp_path / "t", change=change))
    (e,) = load(write(tmp_path / "d.jsonl", rated("a b c d f g", "a")), tokenizer)
    assert e.prompt.tolist() == [66, *ids_of(tokenizer, " b c d f g")] and len(e.prompt) == 6
    assert e.completions[0].tolist() == [66, EOS]


def test_a_text_whose_first_token_is_unknown_is_not_taken_for_bos(tmp_path):
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, pre_tokenizers

    words = Fast(models.WordLevel({"<eos>": 0, "w1": 1}, unk_token="<eos>"))  # one token for unknown, BOS and EOS
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>", "bos_token": "<eos>"}')
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.adds_bos and tokenizer.prompt(*tokenizer.encode(["w1"])) == [1]


def test_texts_are_encoded_some_at_a_time_and_in_their_order(plain, monkeypatch):
    sizes, real = [], plain.processor

    def encode_batch(texts, **kw):
        sizes.append(len(texts))
        return real.encode_batch(texts, **kw)

    monkeypatch.setattr(data, "TEXTS", 3)
    monkeypatch.setattr(plain, "processor", SimpleNamespace(encode_batch=encode_batch))
    texts = [f"w{i}" for i in range(1, 8)]
    assert list(plain.encode(texts)) == [real.encode(t, add_special_tokens=False).ids for t in texts]
    assert sizes == [3, 3, 1]


def test_reading_leaves_the_garbage_collector_on(plain, tmp_path):
    good, bad = write(tmp_path / "a.jsonl", rated()), write(tmp_path / "b.jsonl", "{}")
    for file in (good, bad):
        with contextlib.suppress(BadInput):
            data.splits(Data(file), plain, "rated", 64, lambda text: None)
        assert gc.isenabled()


def test_a_tokenizer_that_adds_bos_gets_it_once(tmp_path, bos):
    assert bos.bos == 512 and bos.adds_bos
    source = write(tmp_path / "d.jsonl", rated("ab", "c"), rated("<s>ab", "c"), rated("", "c"))
    a, b, empty = load(source, bos)
    assert a.prompt.tolist() == b.prompt.tolist() == [512, 66, 67]
    assert empty.prompt.tolist() == [512]
    assert all(e.completions[0].tolist() == [68, EOS] for e in (a, b, empty)), "a completion has no BOS"


def test_a_bos_written_by_the_template_is_not_doubled(tmp_path, bos):
    (e,) = load(write(tmp_path / "d.jsonl", rated([user("hi")], [bot("c")])), bos)
    assert e.prompt.tolist() == [512, *ids_of(bos, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")]
    assert 512 not in e.completions[0]


def test_bos_stays_when_the_head_of_a_prompt_goes(tmp_path, bos):
    source = write(tmp_path / "d.jsonl", rated("abcdef"), rated([user("hi")], [bot("c")]), rated("abc"))
    cut, dialogue, fits = load(source, bos, max_prompt=4)
    assert cut.prompt.tolist() == [512, *ids_of(bos, "abcdef")[-3:]]
    assert dialogue.prompt.tolist() == [512, *ids_of(bos, "<|im_start|>assistant\n")[-3:]]
    assert fits.prompt.tolist() == [512, 66, 67, 68]
    assert [len(e.prompt) for e in load(source, bos, max_prompt=1)] == [1, 1, 1]


def test_a_bos_that_only_the_template_writes_stays_as_well(tmp_path):
    path = folder(tmp_path / "t", ("<s>",), bos_token="<s>", chat_template="{{ bos_token }}" + CHATML)
    tokenizer = Tokenizer(path)
    assert not tokenizer.adds_bos
    source = write(tmp_path / "d.jsonl", rated([user("hi")], [bot("c")]), rated("abcdef"))
    dialogue, text = load(source, tokenizer, max_prompt=4)
    assert dialogue.prompt.tolist() == [512, *ids_of(tokenizer, "assistant\n")[-3:]]
    assert text.prompt.tolist() == ids_of(tokenizer, "abcdef")[-4:]


def test_bos_depends_on_the_tokenizer_and_not_on_the_name_of_its_folder(tmp_path):
    for name in ("SmolLM2-135M-Instruct", "Llama-3-8B", "run"):
        assert not Tokenizer(folder(tmp_path / name, ("<s>",), bos_token="<s>")).adds_bos, name
    assert Tokenizer(folder(tmp_path / "says", ("<s>",), bos_token="<s>", add_bos_token=True)).adds_bos
    assert not Tokenizer(folder(tmp_path / "without", add_bos_token=True)).adds_bos, "there is no BOS to add"


def test_an_empty_prompt_needs_a_bos(tmp_path, plain):
    source = write(tmp_path / "d.jsonl", rated("", "c"))
    (line,) = refusal(source, plain)
    assert line.startswith(f"{source}:1: prompt: empty")


def test_a_text_of_which_no_token_is_left_is_refused_since_its_first_token_would_have_no_source(tmp_path, plain):
    def strip(t):
        t.normalizer = tokenizers.normalizers.Strip()

    stripped = Tokenizer(folder(tmp_path / "t", change=strip, chat_template="{{ messages[-1].content }}"))
    (line,) = refusal(write(tmp_path / "d.jsonl", rated("a"), rated("  ")), stripped)
    assert line.startswith(f"{tmp_path / 'd.jsonl'}:2: prompt: ")
    template = "{% if add_generation_prompt %}a{% else %}a {% endif %}"
    stripped = Tokenizer(folder(tmp_path / "t", change=strip, chat_template=template))
    (line,) = refusal(write(tmp_path / "d.jsonl", rated([user("a")], [bot("c")])), stripped)
    assert line.startswith(f"{tmp_path / 'd.jsonl'}:1: completion: ")
    assert load(write(tmp_path / "d.jsonl", rated("  ")), plain)[0].prompt.tolist() == [222, 222], (
        "a blank is a token there"
    )


def test_a_cut_takes_the_head_of_the_prompt_and_the_tail_of_the_completion_with_its_eos(tmp_path, plain):
    text = "a b c d f g"
    ids = ids_of(plain, text)
    assert len(ids) == 6 and len(set(ids)) == 6
    source = write(tmp_path / "d.jsonl", rated(text, text), rated(text[:7], text[:5]), rated("a", "a"))
    (long, fits, short), cuts = data.load(source, plain, "rated", 4, 4)
    assert (long.prompt.tolist(), long.completions[0].tolist()) == (ids[-4:], ids[:4])
    assert (fits.prompt.tolist(), fits.completions[0].tolist()) == (ids[:4], [*ids[:3], EOS])
    assert (short.prompt.tolist(), short.completions[0].tolist()) == ([66], [66, EOS])
    assert cuts == {"prompts cut": 1, "completions cut": 1}
    (e, *_), cuts = data.load(source, plain, "rated", 6, 6)
    assert e.completions[0].tolist() == ids and cuts["completions cut"] == 1, "its EOS alone is over the limit"
    assert not sum(data.load(source, plain, "rated", 6, 7)[1].values())


def test_a_prompt_never_depends_on_its_completion(tmp_path, plain):
    source = write(tmp_path / "d.jsonl", *[rated("a b c d f g", "x" * n) for n in (0, 1, 50)])
    assert len({e.prompt.tobytes() for e in load(source, plain, max_prompt=3, max_completion=5)}) == 1


def test_both_completions_of_a_pair_are_cut_alike(tmp_path, plain):
    source = write(tmp_path / "d.jsonl", {"prompt": "p", "chosen": "abcdef", "rejected": "ghijkl"})
    ((e,), cuts) = data.load(source, plain, "paired", 9, 3)
    assert [c.tolist() for c in e.completions] == [[66, 67, 68], [72, 73, 74]] and cuts["completions cut"] == 2


def test_a_chat_completion_ends_as_the_template_ends_the_turn(tmp_path, chat):
    turns = [{"role": "system", "content": "s"}, user("hi")]
    (e,) = load(write(tmp_path / "d.jsonl", rated(turns, [bot("hello")])), chat)
    head = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert e.prompt.tolist() == ids_of(chat, head)
    assert e.completions[0].tolist() == ids_of(chat, "hello<|im_end|>\n")
    assert EOS not in e.completions[0], "the template ends the turn; a second end would never be sampled"


def test_a_string_beside_a_message_is_a_turn_too(tmp_path, chat):
    source = write(
        tmp_path / "d.jsonl", rated("hi", bot("c")), rated([user("hi")], "c"), rated([user("hi")], [bot("c")])
    )
    a, b, c = load(source, chat)
    assert a.keys == b.keys == c.keys


def test_two_strings_stay_plain_text_though_there_is_a_template(tmp_path, chat):
    (e,) = load(write(tmp_path / "d.jsonl", rated("a", "b")), chat)
    assert (e.prompt.tolist(), e.completions[0].tolist()) == ([66], [67, EOS])


def test_messages_without_a_template_are_refused(tmp_path, plain):
    (line,) = refusal(write(tmp_path / "d.jsonl", rated([user("hi")], [bot("c")])), plain)
    assert line.startswith(f"{tmp_path / 'd.jsonl'}:1: prompt: ") and "data.chat_template" in line


def test_a_template_is_laid_out_as_the_field_lays_it_out(tmp_path):
    """Blocks swallow the blanks before and the line end after them, as in transformers; loops may break.
    There is no date: it would make runs differ."""
    template = """
    {%- for m in messages %}
        {% if m.role == "end" %}
            {% break %}
        {% endif %}
[{{ m.role }}] {{ {"é": m.content} | tojson }}{{ "" if strftime_now is defined else "!" }}{{ eos_token }}
    {% endfor %}"""
    tokenizer = Tokenizer(folder(tmp_path / "t", chat_template=template, eos_token={"content": "<|endoftext|>"}))
    prompt, (completion,), was_chat = tokenizer.render(Record([user("p")], [bot("c")], True))
    assert was_chat and prompt == '[user] {"é": "p"}!<|endoftext|>\n' and tokenizer.eos == EOS
    assert completion == '[assistant] {"é": "c"}!<|endoftext|>\n'


def test_the_nearest_template_wins(tmp_path):
    def said(path, given=None):
        return Tokenizer(path, given).render(Record([user("p")], [bot("c")], True))[0]

    path = folder(
        tmp_path / "t", chat_template=[{"name": "tools", "template": "0"}, {"name": "default", "template": "1"}]
    )
    assert said(path) == "1"
    (path / "chat_template.jinja").write_text("2")
    assert said(path) == "2"
    (tmp_path / "mine.jinja").write_text("é", encoding="utf-8")
    assert said(path, str(tmp_path / "mine.jinja")) == "é"


@pytest.mark.parametrize("name", ["none.jinja", "./none.jinja", "/none/none.jinja", "."])
def test_a_template_that_is_not_there_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=rf"^data.chat_template: {re.escape(name)}: no such file$"):
        Tokenizer(folder(tmp_path / "t", chat_template="1"), name)


def test_a_template_that_is_no_jinja_is_refused(tmp_path):
    with pytest.raises(BadInput, match="^[^\n]*: chat template: [^\n]*$"):
        Tokenizer(folder(tmp_path / "t", chat_template="a\n{% for %}\n"))


EVIL = [
    "{{ messages.__class__ }}",
    "{{ ''.__class__ }}",
    "{{ messages['__class__'] }}",
    "{{ messages|attr('__class__') }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch touched') }}",
    "{{ lipsum.__globals__['os'].system('touch touched') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__closure__ }}",
    "{{ __import__('os').system('touch touched') }}",
    "{{ self.__init__.__globals__.__builtins__.open('touched', 'w') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ messages.append(messages[0]) }}",
    "{{ messages.pop() }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update(content='other') }}",
    "{% for i in range(10 ** 12) %}x{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]


@pytest.mark.parametrize("template", EVIL)
def test_a_template_runs_in_a_sandbox(tmp_path, monkeypatch, template):
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer(folder(tmp_path / "t", chat_template=template + CHATML))
    messages = [user("hi")]
    with pytest.raises(Fault, match="^chat template: [^\n]+$"):
        tokenizer.render(Record(messages, [bot("c")], True))
    assert messages == [user("hi")] and not Path("touched").exists()


def test_an_exception_raised_by_a_template_is_one_line_with_its_place(tmp_path):
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with\nthe user') }}{% endif %}" + CHATML
    tokenizer = Tokenizer(folder(tmp_path / "t", chat_template=template))
    source = write(tmp_path / "d.jsonl", rated([user("hi")], [bot("c")]), rated([bot("hi")], [bot("c")]))
    assert refusal(source, tokenizer) == [f"{source}:2: chat template: begin with"]


def test_a_template_that_does_not_continue_its_prompt_or_says_nothing_is_refused(tmp_path):
    source = write(tmp_path / "d.jsonl", rated([user("hi")], [bot("c")]))
    for template, reason in (
        ("{{ messages | length }}", "chat template: the rendered dialogue does not begin with"),
        ("always the same", "completion: the chat template renders it as nothing"),
        ("{% if not add_generation_prompt %}c{% endif %}", "prompt: empty"),
    ):
        tokenizer = Tokenizer(folder(tmp_path / "t", chat_template=template))
        (line,) = refusal(source, tokenizer)
        assert line.startswith(f"{source}:1: {reason}")


def test_a_folder_without_a_usable_tokenizer_is_refused_in_one_line(tmp_path):
    def refused(path) -> str:
        with pytest.raises(BadInput) as e:
            Tokenizer(path)
        assert len(str(e.value).splitlines()) == 1
        return str(e.value)

    assert "no usable tokenizer" in refused(tmp_path / "nothing")
    path = folder(tmp_path / "a")
    (path / "tokenizer.json").unlink()
    assert "no usable tokenizer" in refused(path)
    (path / "tokenizer.json").write_text("{}")
    assert "no usable tokenizer" in refused(path)
    assert "eos_token: missing" in refused(folder(tmp_path / "b", eos_token=None))
    assert "eos_token: '<none>' is no token" in refused(folder(tmp_path / "c", eos_token="<none>"))
    path = folder(tmp_path / "d")
    (path / "tokenizer_config.json").write_text('{"eos_token"')
    assert refused(path).startswith(f"{path}/tokenizer_config.json: ")
    (path / "tokenizer_config.json").write_text("[1]")
    assert refused(path) == f"{path}/tokenizer_config.json: expected an object, got [1]"
    (path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert Tokenizer(path).eos == 0, "what else transformers writes there is not needed"


def test_special_tokens_that_only_the_model_names_are_found_there_as_gpt2_has_it_on_the_hub(tmp_path):
    path = folder(tmp_path / "t")
    (path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    (path / "config.json").write_text('{"eos_token_id": [7, 8]}')
    assert (Tokenizer(path).eos, Tokenizer(path).bos) == (7, None)
    (path / "generation_config.json").write_text('{"eos_token_id": 5, "bos_token_id": 5}')
    tokenizer = Tokenizer(path)
    assert (tokenizer.eos, tokenizer.bos, tokenizer.adds_bos) == (5, 5, False)


def test_tokenizers_are_the_same_if_they_turn_text_into_the_same_ids(tmp_path, plain, chat):
    assert plain.same(Tokenizer(folder(tmp_path / "t", chat_template=CHATML)))
    assert not plain.same(chat), "<|im_end|> is one token there"
    assert (plain.n_vocab, chat.n_vocab) == (512, 514)


# ---- split and table ------------------------------------------------------------------------------------------------


def many(n_prompts: int, ratings: int) -> list[Example]:
    return [example([7, p], [p, r], label=r == 0) for r in range(ratings) for p in range(n_prompts)]


def test_all_ratings_of_a_prompt_land_in_one_part():
    examples = many(300, 3)
    parts = data.split(examples, "6,3,1")
    prompts = [{e.keys[0] for e in part} for part in parts]
    assert sum(map(len, parts)) == 900 and sum(map(len, prompts)) == 300, "each prompt in one part"
    assert all(abs(len(p) - n) < 40 for p, n in zip(prompts, (180, 90, 30))), "four standard deviations"


def test_the_part_of_a_prompt_depends_on_nothing_but_the_prompt_and_the_parts():
    examples = many(200, 2)
    where = {e.keys: i for i, part in enumerate(data.split(examples, "2,1,1")) for e in part}
    assert len(where) == 400 and set(where.values()) == {0, 1, 2}
    shuffled = random.Random(0).sample(examples, 100)
    again = {e.keys: i for i, part in enumerate(data.split(shuffled, "0.5, 0.25, 0.25")) for e in part}
    assert again == {key: where[key] for key in again}


def test_a_part_of_zero_is_empty_and_two_parts_leave_no_test():
    assert [len(p) > 0 for p in data.split(many(50, 1), "1,0,1")] == [True, False, True]
    assert [len(p) > 0 for p in data.split(many(50, 1), "1,1")] == [True, True, False]


@pytest.mark.parametrize("parts", ["", "1", "a,b", "1,2,3,4", "0,1,1", "0,0", "-1,2", "2,-1", "nan,1", "1,inf", "1,,1"])
def test_parts_that_cannot_be_meant_are_refused(parts):
    with pytest.raises(BadInput, match="^data.split: expected two or three parts"):
        data.split(many(3, 1), parts)


def table_of(tmp_path, tokenizer, *records, kind="rated", limits=(64, 64)) -> str:
    examples, cuts = data.load(write(tmp_path / "d.jsonl", *records), tokenizer, kind, *limits)
    return data.table("train", examples, cuts)


def test_the_table_counts_what_was_read(tmp_path, plain):
    records = [
        rated("a", "x"),
        rated("a", "x"),  # a duplicate
        rated("a", "x", 0),  # contradicts both: one contradiction
        rated("a", "y", 0),
        rated("b", "x", 0),  # the same answer to another prompt is neither
        rated("abcdef", "x"),  # prompt cut
        rated("b", "abcdef"),  # completion cut
        rated("b", "abcde"),  # completion cut, now a duplicate of the one before
    ]
    text = table_of(tmp_path, plain, *records, limits=(4, 4))
    assert text.splitlines() == [
        "train: 8 examples of 3 prompts, 5 desirable, 3 undesirable",
        "  prompt tokens: median 1, 95% below 2, longest 4",
        "  completion tokens: median 2, 95% below 4, longest 4",
        "  2 duplicates, 1 contradictions, 2 completions cut, 1 prompts cut",
        "  the paper's rule for this balance gives weights: desirable 1, undesirable 1.25 to 1.67",
    ]


def test_the_table_of_pairs_counts_pairs(tmp_path, plain):
    pair = {"prompt": "a", "chosen": "x", "rejected": "y"}
    text = table_of(tmp_path, plain, pair, pair, pair | {"rejected": "z"}, kind="paired")
    assert text.startswith("train: 3 pairs of 1 prompts\n") and "1 duplicates, 0 contradictions" in text
    assert "weights" not in text
    text = table_of(tmp_path, plain, pair, pair | {"rejected": "z"}, kind="rated")
    assert text.startswith("train: 4 examples of 1 prompts, 2 desirable, 2 undesirable\n")
    assert "1 duplicates, 0 contradictions" in text, "x was chosen twice"


WEIGHTS = {  # (n_D, n_U) -> weights by hand; arXiv 2402.01306 eq. 8: w_D n_D / (w_U n_U) in [1, 4/3]
    (1, 4): "desirable 4.00 to 5.33, undesirable 1",
    (2, 5): "desirable 2.50 to 3.33, undesirable 1",
    (4, 4): "desirable 1.00 to 1.33, undesirable 1",
    (6, 5): "desirable 1.00 to 1.11, undesirable 1",
    (4, 3): "desirable 1.00 to 1.00, undesirable 1",
    (3, 2): "desirable 1, undesirable 1.12 to 1.50",
    (8, 2): "desirable 1, undesirable 3.00 to 4.00",
}


@pytest.mark.parametrize("n_d, n_u", WEIGHTS)
def test_the_table_advises_the_weights_of_the_paper(n_d, n_u):
    examples = [example([i], [i], label=i < n_d) for i in range(n_d + n_u)]
    advice = data.table("train", examples, Counter()).splitlines()[-1].split("weights: ")[1]
    assert advice == WEIGHTS[n_d, n_u]
    sides = [[float(x) for x in re.findall(r"[\d.]+", side)] for side in advice.split(",")]
    assert min(*sides[0], *sides[1]) == 1, "the smaller weight is 1"
    for w_d in sides[0]:
        for w_u in sides[1]:
            assert 1 - 0.01 <= w_d * n_d / (w_u * n_u) <= 4 / 3 + 0.01


@pytest.mark.parametrize("label", [True, False])
def test_one_class_alone_gets_no_advice(label):
    assert "weights" not in data.table("train", [example([1], [2], label=label)] * 3, Counter())


def test_splits_reads_each_part_and_says_what_it_holds(tmp_path, plain):
    d = Data(train=write(tmp_path / "t.jsonl", rated("a"), rated("b")), val=write(tmp_path / "v.jsonl", rated("c")))
    said = []
    parts = data.splits(d, plain, "rated", 128, said.append)
    assert {name: len(part) for name, part in parts.items()} == {"train": 2, "val": 1, "test": 0}
    assert [s.split(",")[0] for s in said] == ["train: 2 examples of 2 prompts", "val: 1 examples of 1 prompts"]


def test_one_file_is_split_by_prompt(tmp_path, plain):
    prompts = [f"{p} {q}" for p in range(10) for q in range(10)]
    train = write(tmp_path / "t.jsonl", *[rated(p, c) for c in "xyz" for p in prompts])
    said = []
    parts = data.splits(Data(train=train, split="2,1,1"), plain, "rated", 128, said.append)
    kept = [{e.keys[0] for e in part} for part in parts.values()]
    assert [*parts] == ["train", "val", "test"] and len(said) == 3
    assert sum(map(len, parts.values())) == 300 and sum(map(len, kept)) == 100 and all(kept)
    with pytest.raises(BadInput, match="^data.split: .*not both$"):
        data.splits(Data(train=train, val=train, split="2,1,1"), plain, "rated", 128, said.append)


@pytest.mark.parametrize(
    "given, context, limits",
    [
        ((None, None), 128, (64, 64)),
        ((None, None), 101, (50, 51)),
        ((None, None), 100_000, (1024, 1024)),
        ((100, None), 128, (100, 28)),
        ((None, 100), 128, (28, 100)),
        ((3, 4), 128, (3, 4)),
        ((64, 64), 128, (64, 64)),
    ],
)
def test_the_limits_fill_the_context_by_default_and_never_exceed_it(tmp_path, plain, given, context, limits):
    d = Data(write(tmp_path / "t.jsonl", rated()), None, None, None, True, *given)
    data.splits(d, plain, "rated", context, lambda _: None)
    assert (d.max_prompt, d.max_completion) == limits


@pytest.mark.parametrize("given", [(65, 64), (128, None), (None, 128), (1, 128)])
def test_limits_beyond_the_context_are_refused(tmp_path, plain, given):
    d = Data(write(tmp_path / "t.jsonl", rated()), None, None, None, True, *given)
    with pytest.raises(BadInput, match="exceed the context of 128$"):
        data.splits(d, plain, "rated", 128, lambda _: None)


# ---- a step's batch -------------------------------------------------------------------------------------------------


def letters(*pairs: str) -> list[Example]:
    """ "ax" is prompt a with completion x."""
    return [example([ord(p)], [ord(c)]) for p, c in pairs]


@pytest.mark.parametrize(
    "pairs, partners",
    [
        (["ax", "by", "cz"], [1, 2, 0]),  # the plain shift, and the last takes the first's
        (["ax", "by"], [1, 0]),
        (["ax", "ay", "bz"], [2, 2, 0]),  # two ratings of a prompt, side by side
        (["ax", "ay", "bx", "by"], [3, 2, 1, 0]),  # two pairs with the same two answers
        (["ax", "ay", "bu", "bv"], [2, 2, 0, 0]),  # two pairs, split into ratings
        (["ax", "bx", "cy"], [2, 2, 0]),  # the same answer to two prompts
        (["ax", "bx", "cx", "dy", "ex"], [3, 3, 3, 4, 3]),
        (["ax", "ax", "by"], [2, 2, 0]),  # a record twice
        (["ax", "ay", "az"], [-1, -1, -1]),
        (["ax", "bx", "cx"], [-1, -1, -1]),
        (["ax", "ax", "ax"], [-1, -1, -1]),
        (["ax", "ay", "bx"], [-1, 2, 1]),  # for ax there is none, though both others have one
        (["ax"], [-1]),
        ([], []),
    ],
)
def test_a_mismatched_pair_takes_the_next_completion_of_another_prompt_and_another_text(pairs, partners):
    assert data.mismatched(letters(*pairs)) == partners


def test_mismatched_agrees_with_its_definition_on_small_alphabets():
    rng, without = random.Random(0), 0
    for _ in range(400):
        n, size = rng.randint(1, 9), rng.randint(1, 4)
        pairs = ["".join((rng.choice("abcd"[:size]), rng.choice("wxyz"[:size]))) for _ in range(n)]
        for i, got in enumerate(data.mismatched(letters(*pairs))):
            allowed = {(j - i) % n: j for j in range(n) if pairs[j][0] != pairs[i][0] and pairs[j][1] != pairs[i][1]}
            assert got == (allowed[min(allowed)] if allowed else -1) and got != i
            without += not allowed
    assert without > 100, "else the case without a partner was not met"


def test_completions_are_compared_after_cutting(tmp_path, plain):
    source = write(tmp_path / "d.jsonl", rated("a", "xyz1"), rated("b", "xyz2"), rated("c", "z"))
    assert data.mismatched(load(source, plain)) == [1, 2, 0]
    assert data.mismatched(load(source, plain, max_completion=3)) == [2, 2, 0], "a and b now say the same"


def test_a_batch_hands_out_own_and_borrowed_completions():
    examples = [example([1, 2], [3, 4]), example([5], [6, 7, 8]), example([9], [3, 4])]
    batch = Batch(examples, data.mismatched(examples), torch.ones(3), False)
    assert batch.partners == [1, 2, 1]
    own, lent, both = batch.rows([0, 2]), batch.rows([2], own=False, borrowed=True), batch.rows([1], borrowed=True)
    assert own.target_T.tolist() == [3, 4, 3, 4] and own.length_BK.tolist() == [[2], [2]]
    assert lent.token_N.tolist() == [9, 6, 7] and lent.target_T.tolist() == [6, 7, 8]
    assert both.length_BK.tolist() == [[3, 2]] and both.target_T.tolist() == [6, 7, 8, 3, 4]
    assert [batch.size(s) for s in range(3)] == [4, 4, 3]
    assert [batch.size(s, borrowed=True) for s in range(3)] == [4 + 3, 4 + 2, 3 + 3]
    scored = Batch(examples, None, torch.ones(3), True)
    assert scored.rows([0]).length_BK.tolist() == [[3]] and scored.size(0, borrowed=True) == scored.size(0) == 4
    alone = Batch(examples[:1], [-1], torch.ones(1), False)
    assert alone.rows([0], borrowed=True).length_BK.tolist() == [[2, 2]], "any will do, it is left out of the mean"


# ---- cut ------------------------------------------------------------------------------------------------------------


def steps():
    """Steps of many shapes: fewer examples than ranks, sizes that ranks do not divide, over-long examples."""
    rng = random.Random(1)
    for n in (1, 2, 3, 5, 8, 13, 32):
        for ranks in (1, 2, 3, 5):
            sizes = [rng.randint(1, 40) for _ in range(n)]
            for size, tokens in ((1, None), (3, None), (100, None), (None, 10), (None, 50), (None, 10_000)):
                yield sizes, ranks, size, tokens, data.cut(sizes, ranks, size, tokens)


def test_every_example_is_learned_once_whatever_the_cut():
    for sizes, _, _, _, micros in steps():
        learned = [s for mine in micros for m in mine if m.weight for s in m.slots]
        assert sorted(learned) == list(range(len(sizes)))


def test_all_ranks_run_equally_many_micros_and_fillers_weigh_nothing():
    fillers = 0
    for sizes, ranks, _, _, micros in steps():
        assert len(micros) == ranks and len({len(mine) for mine in micros}) == 1
        assert all(m.slots and m.weight in (0.0, 1.0) for mine in micros for m in mine)
        assert all(s in range(len(sizes)) for mine in micros for m in mine for s in m.slots)
        assert min(sum(m.weight == 1 for m in mine) < len(mine) for mine in micros) == 0, "a round of fillers only"
        fillers += sum(m.weight == 0 for mine in micros for m in mine)
    assert fillers > 50


def test_a_micro_batch_keeps_its_budget_and_an_over_long_example_goes_alone():
    alone = 0
    for sizes, _, size, tokens, micros in steps():
        for m in (m for mine in micros for m in mine if m.weight):
            if size:
                assert len(m.slots) <= size
            else:
                over = sum(sizes[s] for s in m.slots) > tokens
                assert not over or len(m.slots) == 1
                alone += over
    assert alone > 50


def test_a_micro_batch_is_as_full_as_its_budget_lets_it():
    for sizes, _, size, tokens, micros in steps():
        for mine in micros:
            real = [m.slots for m in mine if m.weight]
            if size:
                assert all(len(m) == size for m in real[:-1])
            else:
                used = sorted(sum(sizes[s] for s in m) for m in real)
                assert len(used) < 2 or used[0] + used[1] > tokens, "two of them would have fitted in one"


def test_ranks_carry_alike():
    for sizes, _, size, _, micros in steps():
        slots = [[s for m in mine if m.weight for s in m.slots] for mine in micros]
        if size:
            assert max(map(len, slots)) - min(map(len, slots)) <= 1
        else:
            tokens = [sum(sizes[s] for s in share) for share in slots]
            assert max(tokens) - min(tokens) <= max(sizes)
    assert data.cut([1, 1, 1, 1, 1, 5], 2, None, 5) == [[Micro([5], 1.0)], [Micro([0, 1, 2, 3, 4], 1.0)]]


def test_a_cut_by_hand():
    assert data.cut([9] * 5, 2, 2, None) == [
        [Micro([0, 2], 1.0), Micro([4], 1.0)],
        [Micro([1, 3], 1.0), Micro([0], 0.0)],
    ]
    assert data.cut([3, 9, 4, 2], 1, None, 6) == [[Micro([1], 1.0), Micro([2, 3], 1.0), Micro([0], 1.0)]]
    assert data.cut([7], 3, 1, None) == [[Micro([0], 1.0)], [Micro([0], 0.0)], [Micro([0], 0.0)]]
    assert data.cut([3, 3], 1, None, 6) == [[Micro([0, 1], 1.0)]], "a budget may be used up"
    assert data.cut([3, 3], 1, None, 5) == [[Micro([0], 1.0), Micro([1], 1.0)]]


# ---- order ----------------------------------------------------------------------------------------------------------


def test_an_epochs_order_is_a_permutation_and_a_function_of_epoch_and_seed_only():
    first = list(data.order(50, 3, 7, True))
    assert sorted(first) == list(range(50)) and first != list(range(50))
    data.order(50, 0, 0, True)
    torch.manual_seed(99)  # somebody draws in between
    torch.rand(3)
    data.order.cache_clear() if hasattr(data.order, "cache_clear") else None
    assert list(data.order(50, 3, 7, True)) == first
    assert len({tuple(data.order(50, epoch, 7, True)) for epoch in range(10)}) == 10, "another order each epoch"
    assert list(data.order(50, 3, 8, True)) != first
    assert data.order(50, 2, 8, True) != first, "or the runs of two seeds would repeat each other, an epoch apart"


def test_drawing_an_order_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    data.order(17, 1, 2, True)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_shuffling_the_order_is_the_files():
    assert list(data.order(5, 3, 7, False)) == list(data.order(5, 4, 1, False)) == [0, 1, 2, 3, 4]


# ---- Rows -----------------------------------------------------------------------------------------------------------

PROMPTS = [np.array([10, 11, 12]), np.array([13])]
COMPLETIONS = [(np.array([20, 21]), np.array([30, 31, 32])), (np.array([22]), np.array([33, 34]))]


def test_packed_rows_by_hand():
    r = data.pack(PROMPTS, COMPLETIONS)
    # prompt 10 11 12, then 20 (21 is never an input), then 30 31; prompt 13, then nothing, then 33
    assert r.token_N.tolist() == [10, 11, 12, 20, 30, 31, 13, 33]
    assert r.position_N.tolist() == [0, 1, 2, 3, 3, 4, 0, 1]
    assert r.example_N.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert r.branch_N.tolist() == [0, 0, 0, 1, 2, 2, 0, 2]
    # (place that predicts, token it should predict, for whom); 12 is at place 2 and begins both completions
    by_hand = [(2, 20, 0), (3, 21, 0), (2, 30, 1), (4, 31, 1), (5, 32, 1), (6, 22, 3), (6, 33, 4), (7, 34, 4)]
    assert sorted(zip(r.source_T.tolist(), r.target_T.tolist(), r.segment_T.tolist())) == sorted(by_hand)
    assert r.length_BK.tolist() == [[2, 3], [1, 2]]
    assert r.sizes == (6, 2)
    assert {x.dtype for x in r[:-1]} == {torch.int64}


def test_a_scored_prompt_adds_its_tokens_from_the_second_on_to_both_completions():
    r, bare = data.pack(PROMPTS, COMPLETIONS, score_prompt=True), data.pack(PROMPTS, COMPLETIONS)
    triples, without = (list(zip(x.source_T.tolist(), x.target_T.tolist(), x.segment_T.tolist())) for x in (r, bare))
    # segment (K + 1) * 0 + K = 2 is the first prompt; the second has one token, and nothing before it
    assert sorted(set(triples) - set(without)) == [(0, 11, 2), (1, 12, 2)] and len(triples) == len(without) + 2
    assert r.length_BK.tolist() == [[4, 5], [1, 2]]
    for name in ("token_N", "position_N", "example_N", "branch_N"):
        assert torch.equal(getattr(r, name), getattr(bare, name))


def test_every_target_is_what_follows_its_source():
    """On random rows: walking an example's own branch token by token gives its text back, whatever K is."""
    rng = np.random.default_rng(0)
    for K in (1, 2, 3):
        prompts = [rng.integers(0, 99, rng.integers(1, 5)) for _ in range(4)]
        completions = [tuple(rng.integers(0, 99, rng.integers(1, 5)) for _ in range(K)) for _ in range(4)]
        r = data.pack(prompts, completions, score_prompt=True)
        for b, (p, cs) in enumerate(zip(prompts, completions)):
            for k, c in enumerate(cs):
                mine = r.segment_T == (K + 1) * b + k
                assert r.target_T[mine].tolist() == c.tolist()
                at = r.source_T[mine]
                assert r.position_N[at].tolist() == list(range(len(p) - 1, len(p) + len(c) - 1))
                assert r.token_N[at].tolist() == [p[-1], *c[:-1]]
                assert set(r.example_N[at].tolist()) == {b} and set(r.branch_N[at[1:]].tolist()) <= {k + 1}
                assert r.branch_N[at[0]] == 0
                assert r.length_BK[b, k] == len(c) + len(p) - 1
            mine = r.segment_T == (K + 1) * b + K
            assert (r.target_T[mine].tolist(), r.token_N[r.source_T[mine]].tolist()) == (
                p[1:].tolist(),
                p[:-1].tolist(),
            )
        assert sum(r.sizes) == len(r.token_N)


def test_rows_move_as_one():
    r = data.pack(PROMPTS, COMPLETIONS)
    moved = r.to("meta")
    assert all(x.device.type == "meta" for x in moved[:-1]) and moved.sizes == r.sizes
