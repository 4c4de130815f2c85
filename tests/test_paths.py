"""Ratings are read where they are given: every file of config/data, every shape of a record, every refusal."""

import json
import random
import re
import shutil
import sys
import time
from collections import Counter

import pytest
import yaml
from conftest import ROOT, train
from foreign import COFFEE, COFFEES, MATH, PRESETS, THOUGHT, nested
from test_data import load, refusal
from tokens import CHATML, bot, chat, folder, plain, rated, user, write

from infra.console import BadInput
from infra.settings import Data, find_path
from models.hub import Source
from records.examples import Example
from records.foreign import Reader
from records.page import PageSettings, page
from records.show import fitting_preset
from records.sources import decoded_records
from records.tokenizer import Tokenizer

FILES = ROOT / "config" / "data"
ROOM = dict(max_prompt=9999, max_completion=9999)


def turns_of(text: str) -> list[str]:
    turn = r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n|$)"
    return [f"{role[0].upper()}: {words}" for role, words in re.findall(turn, text, re.DOTALL)]


def told(e: Example, kind: str) -> str:
    """An example as tests/foreign.py writes it."""
    prompt, *answers = (chat().hf.decode(ids) for ids in (e.prompt, *e.completions))
    answers = [re.sub(r"<\|im_end\|>\n|<\|endoftext\|>", "", answer) for answer in answers]
    turns = turns_of(prompt)[:-1] or [prompt]
    end = " >> ".join(answers)
    if kind == "rated":
        end += " +" if e.label else " -"
    return f"{' | '.join(turns)} || {end}"


def read(source, kind="rated", **settings) -> tuple[list[str], dict]:
    """What is learned from, and what was dropped."""
    examples, counts = load(source, chat(), kind, **ROOM | settings)
    dropped = {what: n for what, n in counts.items() if what.startswith("dropped")}
    return [told(e, kind) for e in examples], dropped


def saved(folder, name: str, records) -> str:
    path = folder / name
    if name.endswith(".jsonl"):
        return write(path, *records)
    path.write_text(records if isinstance(records, str) else json.dumps(records), encoding="utf-8")
    return str(path)


def preset(name: str) -> dict:
    return (
        {}
        if name.startswith("none")
        else yaml.safe_load((FILES / f"{name}.yaml").read_text())["data"]
    )


# ---- every file of config/data -------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_file_of_settings_reads_its_ratings_example_by_example(tmp_path, name):
    file, records, ratings, pairs, dropped = PRESETS[name]
    source = saved(tmp_path, file, records)
    assert read(source, **preset(name)) == (ratings, dropped)
    if pairs is not None:
        assert read(source, "paired", **preset(name))[0] == pairs
    prompts = {x.split(" || ")[0] for x in (*ratings, *(pairs or []))}
    assert {x.split(" || ")[0] for x in read(source, "prompts", **preset(name))[0]} >= prompts


def test_every_file_of_settings_has_rows_here_says_when_it_was_tried_and_is_the_one_that_is_suggested(
    tmp_path, monkeypatch, capsys
):
    names = {file.stem for file in FILES.glob("*.yaml")}
    assert names == {name for name in PRESETS if not name.startswith("none")} | {"math_step"}
    for name in names:
        header = [x for x in (FILES / f"{name}.yaml").read_text().splitlines() if x.startswith("#")]
        assert re.search(r"[Tt]ried 20\d\d-\d\d-\d\d with", " ".join(header)), name
    rows = PRESETS | {"math_step": ("pairs.jsonl", [MATH])}
    for name in names:
        source = saved(tmp_path, rows[name][0], rows[name][1])
        records = [raw for _, raw in decoded_records(source, [])]
        kind = "paired" if name.endswith("_pairs") else "rated"
        asked = PageSettings(source, kind=kind)
        assert fitting_preset(records, asked) == f"config/data/{name}.yaml"
        if kind == "rated":
            assert not asked.columns and not fitting_preset(
                [rated(), {"chosen": "a", "rejected": "b"}], asked
            )
    for name in (
        "openwebui",
        "ultrafeedback_scores",
    ):  # without them one is refused, one is read otherwise
        source = saved(tmp_path, rows[name][0], rows[name][1])
        assert f"--config config/data/{name}.yaml" in shown(tmp_path, monkeypatch, capsys, source)
    assert "\nup (" in shown(tmp_path, monkeypatch, capsys, source, f"--config={FILES / name}.yaml")


@pytest.mark.parametrize("name", ["langfuse", "langsmith"])
def test_tools_that_stand_beside_the_messages_are_in_the_prompt_as_the_model_had_them(
    tmp_path, name
):
    """Langfuse's input is an object, not a list of messages, where there are tools."""
    template = "{{ tools }}" + CHATML
    t = Tokenizer(Source(folder(tmp_path / "t", chat_template=template)))
    tools = [{"type": "function", "function": {"name": "weather", "description": "Rain?"}}]
    asked = {"messages": [user("Wet?")], "tools": tools}
    record = {
        "langfuse": {"type": "GENERATION", "input": asked, "output": "No.", "user-feedback": [1]},
        "langsmith": {
            "inputs": asked,
            "outputs": {"choices": [{"message": bot("No.")}]},
            "feedback_stats": {"user_score": {"n": 1, "avg": 1.0}},
        },
    }[name]
    source = write(tmp_path / "d.jsonl", record)
    ((e,), _) = load(source, t, "rated", **ROOM | preset(name))
    assert t.decode(e.prompt).startswith(str(tools) + "<|im_start|>user\nWet?")


@pytest.mark.parametrize("columns", ["a=a,b=b,verdict=w", "completion=a+b,label=w+l"])
def test_a_call_of_tools_without_a_word_is_an_answer_in_lists_and_in_pairs_too(tmp_path, columns):
    template = CHATML.replace("m['content']", "(m['content'] or m['tool_calls']|string)")
    t = Tokenizer(Source(folder(tmp_path / "t", chat_template=template)))
    call = bot(None) | {"tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    record = {"prompt": [user("Wet?")], "a": call, "b": [bot("No.")], "w": 1, "l": 0}
    source = write(tmp_path / "d.jsonl", record)
    labels = UP_DOWN if "label" in columns else "a=1,b=2"
    examples, counts = load(source, t, "rated", **ROOM, columns=columns, labels=labels)
    assert [e.label for e in examples] == [True, False]
    assert "weather" in t.decode(examples[0].completions[0])


def test_a_given_beginning_of_the_answer_ends_the_prompt_in_the_assistants_turn():
    reader = Reader(Data("x", **preset("math_step")), "paired", Counter())
    ((_, ours),) = reader.read(iter([("x:1", MATH)]), [])
    assert ours["prompt"] == [user("2 + 2?"), bot("Step 1:")]
    assert (ours["chosen"], ours["rejected"]) == (" Add: 4.", " Add: 5.")


# ---- every shape, by settings alone --------------------------------------------------------------

THUMBS = [
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Ho", "vote": "good"},
    {"from": "human", "value": "Rain?"},
    {"from": "gpt", "value": "Drip.", "vote": None},
    {"from": "human", "value": "More."},
    {"from": "gpt", "value": "Drop.", "vote": "bad"},
]
IN_ORDER = ["U: Hi || Ho +", "U: Hi | A: Ho | U: Rain? | A: Drip. | U: More. || Drop. -"]
GPT = {  # a tree of nodes around messages, whose root is none
    "r": {"id": "r", "message": None, "parent": None},
    "u": {
        "id": "u",
        "message": {"author": {"role": "user"}, "content": {"parts": ["Tea?"]}},
        "parent": "r",
    },
    "a": {
        "id": "a",
        "message": {"author": {"role": "assistant"}, "content": {"parts": ["Hot."]}},
        "parent": "u",
    },
    "b": {
        "id": "b",
        "message": {"author": {"role": "assistant"}, "content": {"parts": ["Not."]}},
        "parent": "u",
    },
}
UP_DOWN = "up=1,down=0"
EARLIER = [["P", "O"]]
SHAPES = {  # records, settings, what is learned from, what is dropped
    "a path": (
        [{"in": {"q": "Q"}, "out": [{"t": "A"}], "f": {"r": 1}}],
        dict(columns="prompt=in.q,completion=out.0.t,label=f.r", labels=UP_DOWN),
        ["Q || A +"],
        {},
    ),
    "the last of a list": (
        [{"q": ["P", "Q"], "a": "A", "l": 1}],
        dict(columns="prompt=q.-1,completion=a,label=l"),
        ["Q || A +"],
        {},
    ),
    "names with dots": (
        [{"in.q": "Q", "x": {"a.b": {"c": "A"}}, "v.w": 0}],
        dict(columns="prompt=in.q,completion=x.a.b.c,label=v.w", labels=UP_DOWN),
        ["Q || A -"],
        {},
    ),
    "the first that is there": (
        [{"q": "", "p": "P", "a": None, "b": {"c": "C"}, "l": 1}, {"q": "Q", "a": "A", "l": 1}],
        dict(columns="prompt=q|p,completion=a|b.c,label=l"),
        ["P || C +", "Q || A +"],
        {},
    ),
    "texts of JSON": (
        [{"x": '{"q": "Q", "a": {"t": "A"}}', "l": "[1]"}],
        dict(columns="prompt=x.q,completion=x.a.t,label=l.0", labels=UP_DOWN),
        ["Q || A +"],
        {},
    ),
    "one of a list by its name": (
        [{"q": "Q", "a": "A", "s": [{"n": "x", "v": 1}, {"n": "y", "v": 0}]}],
        dict(columns="prompt=q,completion=a,label=s[n=y].v", labels=UP_DOWN),
        ["Q || A -"],
        {},
    ),
    "ratings in a conversation": (
        [{"c": THUMBS}],
        dict(columns="messages=c,label=.vote", labels="up=good,down=bad"),
        IN_ORDER,
        {"dropped: not rated": 1},
    ),
    "a nested tree": (
        [{"options": {}, "messagesTree": nested(COFFEE, "0" * 8 + "-0000-0000-0000-" + "0" * 12)}],
        preset("librechat"),
        [x.removeprefix("S: Barista. | ") for x in COFFEES],
        {
            "dropped: not rated": 1,
            "dropped by data.where": 1,
            "dropped: with a file beside a message": 1,
        },
    ),
    "a tree of nodes": (
        [{"mapping": GPT, "vote": "down", "at": "b"}],
        dict(
            columns="messages=mapping,id=.id,parent=.parent,role=.message.author.role,"
            "content=.message.content.parts,rated=at,label=vote",
            labels="up=up,down=down",
        ),
        ["U: Tea? || Not. -"],
        {},
    ),
    "a place in a conversation": (
        [
            {"messages": [user("Hi"), bot("Ho"), user("Rain?"), bot("Drip.")], "at": x, "r": 1}
            for x in (1, -1)
        ],
        dict(columns="messages=messages,rated=at,label=r", labels=UP_DOWN),
        ["U: Hi || Ho +", "U: Hi | A: Ho | U: Rain? || Drip. +"],
        {},
    ),
    "ties and draws": (
        [{"q": "Q", "x": "A", "y": "B", "w": w} for w in ("l", "both", "none")],
        dict(columns="prompt=q,a=x,b=y,verdict=w", labels="a=l,b=r,both=both,neither=none"),
        ["Q || A +", "Q || B -", "Q || A +", "Q || B +", "Q || A -", "Q || B -"],
        {},
    ),
    "a cut": (
        [{"q": "Q", "a": f"{x}", "s": x} for x in (5, 4.5, 3, "2", None)],
        dict(columns="prompt=q,completion=a,label=s", labels="up=4..5,down=<3"),
        ["Q || 5 +", "Q || 4.5 +", "Q || 2 -"],
        {"dropped by data.labels": 1, "dropped: not rated": 1},
    ),
    "several raters of each answer of a list": (
        [
            {
                "q": "Q",
                "as": [{"t": "A", "v": [1, 1]}, {"t": "B", "v": [0, 1, 0]}, {"t": "C", "v": []}],
            }
        ],
        dict(
            columns="prompt=q,completion=as.*.t,label=as.*.v.*", labels=UP_DOWN, raters="majority"
        ),
        ["Q || A +", "Q || B -"],
        {"dropped: not rated": 1},
    ),
    "two columns of thumbs": (
        [
            {"q": "Q", "a": f"{x}{y}", "up": x, "down": y}
            for x, y in ((1, 0), (0, 1), (0, 0), (None, 1))
        ],
        dict(columns="prompt=q,completion=a,label=up+down", labels="up=1+0,down=0+1|null+1"),
        ["Q || 10 +", "Q || 01 -", "Q || None1 -"],
        {"dropped by data.labels": 1},
    ),
    "records inside": (
        {"date": "x", "feedback": [{"q": "Q", "a": "A", "l": 1}, {"q": "Q", "a": "B", "l": 0}]},
        dict(columns="prompt=q,completion=a,label=l", records="feedback"),
        ["Q || A +", "Q || B -"],
        {},
    ),
    "earlier turns in history, also as a text of JSON in a table, or as words": (
        [
            {"instruction": "Q", "output": "A", "label": True, "history": history}
            for history in (EARLIER, json.dumps(EARLIER), [], "[]", "it rained")
        ],
        {},
        ["U: P | A: O | U: Q || A +"] * 2 + ["U: Q || A +"] * 3,
        {},
    ),
    "earlier turns beside a rating that lies deeper": (
        [{"instruction": "Q", "output": "A", "history": EARLIER, "meta": {"l": 1}, "images": "[]"}],
        dict(columns="completion=output,label=meta.l", labels=UP_DOWN),
        ["U: P | A: O | U: Q || A +"],
        {},
    ),
    "one object": (rated("Q", "A"), {}, ["Q || A +"], {}),
    "where": (
        [rated("Q", x, kind=x, n=i) for i, x in enumerate("ABCD")],
        dict(where="kind=A|B|D,n=<3,kind!=B"),
        ["Q || A +"],
        {"dropped by data.where": 3},
    ),
    "where a list has a value that is not wanted": (
        [
            {
                "prompt": "P",
                "completion": "A",
                "label": True,
                "by": [{"s": "sent"}, {"s": "draft"}],
            },
            {"prompt": "Q", "completion": "B", "label": True, "by": [{"s": "sent"}]},
        ],
        dict(where="by.*.s!=draft"),
        ["Q || B +"],
        {"dropped by data.where": 1},
    ),
    "where all values of a list are wanted": (
        [
            {"prompt": "P", "completion": "A", "label": True, "s": ["sent", "draft"]},
            {"prompt": "Q", "completion": "B", "label": True, "s": ["sent", "sent"]},
            {"prompt": "R", "completion": "C", "label": True, "s": []},
        ],
        dict(where="s.*=sent"),
        ["Q || B +"],
        {"dropped by data.where": 2},
    ),
    "where a value is missing, null or an empty text": (
        [rated("Q", x, kind=k) for x, k in (("A", "x"), ("B", ""), ("C", None))]
        + [rated("Q", "D")],
        dict(where="kind=null"),
        ["Q || B +", "Q || C +", "Q || D +"],
        {"dropped by data.where": 1},
    ),
    "where a record has no image, in a list or in a cell of a csv file": (
        [
            rated("Q", x, images=i)
            for x, i in (("A", []), ("B", "[]"), ("C", '["x"]'), ("D", ["x"]))
        ],
        dict(where="images=null"),
        ["Q || A +", "Q || B +"],
        {"dropped by data.where": 2},
    ),
    "where a value is an empty text": (
        [rated("Q", x, kind=k) for x, k in (("A", "x"), ("B", ""), ("C", "y"))],
        dict(where="kind!=y|z,kind=x|"),
        ["Q || A +", "Q || B +"],
        {"dropped by data.where": 1},
    ),
    "where a value is no empty text": (
        [rated("Q", x, kind=k) for x, k in (("A", "x"), ("B", ""))],
        dict(where="kind!="),
        ["Q || A +"],
        {"dropped by data.where": 1},
    ),
    "days": (
        [rated("Q", x, day=f"2026-11-{n}") for x, n in (("A", 23), ("B", 24), ("C", 25))]
        + [rated("Q", "D", day="2026-11-24T23:59:59Z"), rated("Q", "E", day=None)],
        dict(where="day=>=2026-11-24,day=<2026-11-25"),
        ["Q || B +", "Q || D +"],
        {"dropped by data.where": 3},
    ),
    "times, with a T or a blank before the hour": (
        [rated("Q", x, at=f"2026-11-24{x}10:30:00") for x in "T "],
        dict(where="at=>=2026-11-24T10:00|<2026-11-24 09:00"),
        ["Q || T +", "Q ||   +"],
        {},
    ),
    "the last click counts": (
        [
            rated("Q", "A", "up"),
            rated("Q", "B", "up"),
            rated("P", "A", ""),
            rated("Q", "B", None),
            rated("Q", "A", "down"),
        ],
        dict(columns="label=label", labels="up=up,down=down", repeated="last"),
        ["Q || A -"],
        {"dropped: rated again": 2, "dropped: not rated": 2},
    ),
    "the first click counts": (
        [rated("Q", "A", "up"), rated("Q", "A", "down")],
        dict(labels="up=up,down=down", repeated="first"),
        ["Q || A +"],
        {"dropped: rated again": 1},
    ),
    "raters in several records": (
        [
            rated("Q", "A", 1),
            rated("Q", "A", 1),
            rated("Q", "B", 1),
            rated("Q", "B", 0),
            rated("P", "B", 0),
        ],
        dict(labels=UP_DOWN, raters="agree"),
        ["Q || A +", "P || B -"],
        {"dropped: rated again": 1, "dropped: whose raters disagree": 2},
    ),
    "a label again": (
        [{"prompt": "Q", "response": "A", "preference": "chosen", "mine": 0}],
        dict(columns="label=mine"),
        ["Q || A -"],
        {},
    ),
    "texts that alternate": (
        [{"context": ["Hi", "Ho", "Rain?"], "a": "Drip.", "l": 1}],
        dict(columns="prompt=context,completion=a,label=l"),
        ["U: Hi | A: Ho | U: Rain? || Drip. +"],
        {},
    ),
    "marks": (
        [{"p": "<u>Hi<b>Ho<u>Rain?<b>", "a": "Drip.", "l": 1}],
        dict(columns="prompt=p,completion=a,label=l", turns="user=<u>,assistant=<b>"),
        ["U: Hi | A: Ho | U: Rain? || Drip. +"],
        {},
    ),
    "names of classes": (
        [
            {
                "ms": [{"id": ["x", "HumanMessage"], "kwargs": {"content": "Hi"}}],
                "a": [{"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "Ho"}],
                "l": 1,
            }
        ],
        dict(
            columns="prompt=ms,completion=a.1.text,label=l,role=.id.-1,content=.kwargs.content",
            roles="user=HumanMessage",
            labels=UP_DOWN,
        ),
        ["U: Hi || Ho +"],
        {},
    ),
    "thoughts of Gemini, which are no answer": (
        [
            {
                "contents": [{"role": "user", "parts": [{"text": "Hi"}]}],
                "content": {
                    "role": "model",
                    "parts": [{"text": "A greeting.", "thought": True}, {"text": "Ho"}],
                },
                "l": 1,
            }
        ],
        dict(
            columns="prompt=contents,completion=content,content=.parts,label=l",
            roles="assistant=model",
            labels=UP_DOWN,
        ),
        ["U: Hi || Ho +"],
        {},
    ),
    "parts of the AI SDK, of which some only mark a step": (
        [
            {
                "messages": [
                    {"role": "user", "parts": [{"type": "text", "text": "Rain?"}]},
                    {
                        "role": "assistant",
                        "parts": [
                            {"type": "step-start"},
                            {"type": "tool-weather", "toolCallId": "x", "output": {}},
                            {"type": "step-start"},
                            {"type": "text", "text": "Drip.", "state": "done"},
                        ],
                        "vote": 1,
                    },
                ]
            }
        ],
        dict(columns="messages=messages,content=.parts,label=.vote", labels=UP_DOWN),
        ["U: Rain? || Drip. +"],
        {},
    ),
    "an empty system message, which stays one, as in a record of ours": (
        [
            {
                "messages": [
                    {"from": "system", "content": ""},
                    {"from": "user", "content": "Rain?"},
                    {"from": "assistant", "content": "Drip.", "score": -1},
                ]
            }
        ],
        dict(columns="messages=messages,label=.score", labels="up=1,down=-1"),
        ["S:  | U: Rain? || Drip. -"],
        {},
    ),
    "a list in which one answer has an image, which drops this answer alone": (
        [
            {
                "prompt": "Q",
                "as": [
                    {"t": [bot([{"type": "image_url", "image_url": "x"}])], "s": 5},
                    {"t": "A", "s": 5},
                    {"t": "B", "s": 1},
                ],
            }
        ],
        dict(columns="completion=as.*.t,label=as.*.s", labels="up=>=4,down=<=2"),
        ["Q || A +", "Q || B -"],
        {"dropped: with a part of a message that is no text (image_url)": 1},
    ),
    "a given beginning beside a question": (
        [{"question": "Add?", "begun": "It is", "a": " 4.", "l": 1}],
        dict(columns="prefix=begun,completion=a,label=l"),
        ["U: Add? ||  4. +"],
        {},
    ),
    "a dialogue beside a prompt that is not its own": (
        [
            {"p": p, "x": [user("Rain?"), bot("Drip.")], "y": [user("Rain?"), bot("Dry.")], "w": 1}
            for p in (" Rain?", "Snow?")
        ],
        dict(columns="prompt=p,a=x,b=y,verdict=w", labels="a=1,b=2"),
        ["U: Rain? || Drip. +", "U: Rain? || Dry. -"],
        {"dropped: whose dialogue does not have the prompt": 1},
    ),
    "reasoning within a part": (
        [
            {
                "m": [user("Hi"), bot([{"type": "text", "text": f"{THOUGHT}"}]) | {"rating": 1}],
            }
        ],
        dict(columns="messages=m,label=.rating", labels="up=1"),
        ["U: Hi || Mint. +"],
        {},
    ),
    "several elements that a path fits": (
        [
            {"q": "Up?", "a": "A", "l": [{"by": "x", "v": 1}, {"by": "x", "v": 1}, {"by": "y"}]},
            {"q": "Both?", "a": "A", "l": [{"by": "x", "v": 1}, {"by": "x", "v": 0}]},
            {"q": "Down?", "a": "A", "l": [{"by": "y", "v": 1}, {"by": "x", "v": 0}]},
        ],
        dict(columns="prompt=q,completion=a,label=l[by=x].v", labels="up=1,down=0"),
        ["Up? || A +", "Down? || A -"],
        {"dropped: whose raters disagree": 1},
    ),
    "an image": (
        [
            {
                "m": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
                "a": "A",
                "l": 1,
            },
            {
                "m": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
                "a": "A",
                "l": 1,
            },
        ],
        dict(columns="prompt=m,completion=a,label=l"),
        ["U: Hi || A +"],
        {"dropped: with a part of a message that is no text (image_url)": 1},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_record_of_any_shape_is_read_by_settings_alone(tmp_path, shape):
    records, settings, examples, dropped = SHAPES[shape]
    name = "d.json" if isinstance(records, dict) else "d.jsonl"
    assert read(saved(tmp_path, name, records), **settings) == (examples, dropped)


Q = {"prompt": "Q", "completion": "A", "data": {"rating": 1, "ranking": 2}, "winner": "x"}
TALK = [user("Hi"), bot("Ho") | {"rating": 1}]
BY_ID = "messages=ms,id=.id,parent=.up,rated=at,label=l"
REFUSED = {  # records, settings, the line
    "a typo in a path": (
        [Q],
        dict(columns="label=data.ratin", labels=UP_DOWN),
        ": data.columns: label=data.ratin: found in no record; there is data.rating, data.ranking",
    ),
    "a typo inside messages": (
        [{"ms": TALK}],
        dict(columns="messages=ms,label=.ratng", labels=UP_DOWN),
        ": data.columns: label=.ratng: found in no record; there is .rating",
    ),
    "a typo in where": (
        [rated(kind="x")],
        dict(where="kid=x"),
        ": data.where: kid: found in no record; there is kind",
    ),
    "a where for messages in a rated answer": (
        [rated(kind="x")],
        dict(where=".kind=x"),
        "data.where: .kind: a leading dot stands for messages, and none are rated here; the record's own field is kind",
    ),
    "a where for messages in a tree of messages": (
        [dict(id=1, parent=None, role="user", content="Q")],
        dict(columns="id=id,parent=parent,label=s", labels=UP_DOWN, where=".kind=x"),
        "data.where: .kind: a leading dot stands for messages",
    ),
    "seconds since 1970 beside a day": (
        [rated(at="2025-01-01"), rated(at=1763942400)],
        dict(where="at=<2026-11-24"),
        ":2: data.where: <2026-11-24: 1763942400 is no day or time such as 2026-11-24T10:00",
    ),
    "a day in another form": (
        [rated(at="11/24/2026")],
        dict(where="at=<2026-11-24"),
        ":1: data.where: <2026-11-24: 11/24/2026 is no day or time such as 2026-11-24T10:00",
    ),
    "the last click of most raters": (
        [rated("Q", "A", 1)],
        dict(labels=UP_DOWN, repeated="last", raters="majority"),
        "data.raters: data.repeated is given, too: of several ratings of one answer, does one count, or most of them?",
    ),
    "an answer to an image": (
        [rated(images=[]), rated(images=["x.png"])],
        {},
        ":2: images: its answer is to more than the text; --data.where images=null leaves such records out",
    ),
    "an answer to an image, whose rating lies deeper": (
        [{"q": "Q", "a": "A", "meta": {"l": 1}, "images": ["x.png"]}],
        dict(columns="prompt=q,completion=a,label=meta.l", labels=UP_DOWN),
        ":1: images: its answer is to more than the text",
    ),
    "a label that nobody named": (
        [Q],
        dict(columns="label=data.rating"),
        "data.labels: missing: what do the values of data.rating mean?",
    ),
    "no field of ours": (
        [Q],
        dict(columns="lable=winner"),
        "data.columns: lable: no field of ours; there is label",
    ),
    "no role": ([Q], dict(roles="usr=human"), "data.roles: usr: no role; there is user"),
    "an unknown verdict": (
        [Q],
        dict(columns="a=prompt,b=completion,verdict=winner", labels="a=a,b=b"),
        ":1: verdict: 'x': data.labels does not name it; there is a, b",
    ),
    "an unknown role": (
        [{"ms": [{"role": "bot", "content": "x", "r": 1}]}],
        dict(columns="messages=ms,label=.r", labels=UP_DOWN),
        ":1: role: 'bot': not one of system",
    ),
    "a rated question": (
        [{"ms": [user("Hi") | {"r": 1}]}],
        dict(columns="messages=ms,label=.r", labels=UP_DOWN),
        ":1: rated: message 0 is not the assistant's, but user's",
    ),
    "a loop": (
        [{"ms": [user("a") | {"id": 1, "up": 2}, bot("b") | {"id": 2, "up": 1}], "at": 2, "l": 1}],
        dict(columns=BY_ID, labels=UP_DOWN),
        ":1: parent: 2: a loop",
    ),
    "a lost parent": (
        [{"ms": [bot("b") | {"id": 2, "up": 7}], "at": 2, "l": 1}],
        dict(columns=BY_ID, labels=UP_DOWN),
        ":1: parent: 7: message 2 answers it, but it is not in",
    ),
    "a lost message": (
        [{"ms": [bot("b") | {"id": 2, "up": None}], "at": "3", "l": 1}],
        dict(columns=BY_ID, labels=UP_DOWN),
        ":1: rated: 3: no such message; there is 2",
    ),
    "one id twice": (
        [{"ms": [user("b") | {"id": 2, "up": None}] * 2, "at": "2", "l": 1}],
        dict(columns=BY_ID, labels=UP_DOWN),
        ":1: id: 2: two messages have it",
    ),
    "half of a JSON": (
        [{"q": '[{"role": "user", "content": "x', "a": "A", "l": 1}],
        dict(columns="prompt=q,completion=a,label=l"),
        ":1: prompt: '[{",
    ),
    "two meanings": (
        [rated(label=1, chosen="x")],
        dict(labels=UP_DOWN),
        ":1: record: both a rating and a pair",
    ),
    "a text among messages": (
        [{"q": "Q", "x": [user("Q"), "A"], "y": "A", "w": "x"}],
        dict(columns="prompt=q,a=x,b=y,verdict=w", labels="a=x,b=y"),
        ":1: a: expected a text, texts or messages; got [{",
    ),
    "numbers as messages": (
        [{"q": "Q", "x": "A", "y": [1, 2], "w": "x"}],
        dict(columns="prompt=q,a=x,b=y,verdict=w", labels="a=x,b=y"),
        ":1: b: expected a text, texts or messages; got [1, 2]",
    ),
    "numbers as messages of a pair": (
        [{"prompt": "Q", "chosen": [1, 2], "rejected": "A"}],
        dict(turns="hh"),
        ":1: chosen: expected a string, or messages with a known role and a text; got 1",
    ),
    "parts of a message in a pair": (
        [
            dict.fromkeys(("chosen", "rejected"), [user("P"), bot("A"), user(["Q"]), bot("B")])
            | {"prompt": "Q"}
        ],
        {},
        ":1: chosen: expected a string, or messages with a known role and a text; got {",
    ),
    "good answers without bad ones": (
        [{"q": "Q", "x": ["A", "B"]}],
        dict(columns="prompt=q,chosen=x.*"),
        "data.columns: chosen: a list of answers needs rejected, too",
    ),
    "a verdict beside ratings of messages": (
        [{"ms": TALK, "x": "A", "y": "B", "w": 1}],
        dict(columns="messages=ms,label=.rating,a=x,b=y,verdict=w", labels="a=1,b=0"),
        "data.columns: label: there is a verdict, too: which rating is meant?",
    ),
    "a verdict that is a thumb": (
        [{"q": "Q", "x": "A", "y": "B", "w": 2}],
        dict(columns="prompt=q,a=x,b=y,verdict=w", labels="a=1,b=0,up=2"),
        "data.labels: up: a verdict is a, b, both or neither",
    ),
    "a pair without messages": (
        [{"messages": [], "chosen": "x", "rejected": "y"}],
        {},
        ":1: prompt: missing; there is messages, chosen, rejected",
    ),
    "a value with two meanings": ([Q], dict(labels="up=1,down=1"), "data.labels: up=1,down=1: "),
    "too many": ([rated()], {}, "1 records, but #2 asks for 2", "#2"),
    "no share": (
        [rated()],
        {},
        "expected a number of records after #, or a part such as 0.3",
        "#x",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_one_line_with_the_nearest_names_that_are_there(tmp_path, case):
    records, settings, line, *share = REFUSED[case]
    (said,) = refusal(write(tmp_path / "d.jsonl", *records) + "".join(share), chat(), **settings)
    assert line in said


# ---- what a user sees ----------------------------------------------------------------------------


def shown(tmp_path, monkeypatch, capsys, *words: str) -> str:
    """What `python data.py ...` prints, or the lines that it refuses with."""
    model = folder(tmp_path / "t", ("<|im_start|>", "<|im_end|>"), chat_template=CHATML)
    shutil.copy(ROOT / "tests" / "parity" / "policy" / "config.json", model)
    monkeypatch.setattr(sys, "argv", ["data.py", *words, "--model", str(model)])
    try:
        page()
    except BadInput as e:
        return str(e)
    return capsys.readouterr().out


def test_data_py_shows_the_first_record_of_each_kind_as_turns_within_80_columns(
    tmp_path, monkeypatch, capsys
):
    long = rated([user("word " * 300)], [bot("日本語" * 60)])
    source = write(tmp_path / "d.jsonl", long, long, rated([user("Q\n\nR")], [bot("A")], False))
    out = shown(tmp_path, monkeypatch, capsys, source)
    turns = out[out.index("\nup (") : out.index("\n\n'")]
    assert f"\nup ({source}:1):\n  user      word word" in turns and "more lines]" in turns
    assert f"\ndown ({source}:3):\n  user      Q\n\n            R\n  answer    A" in turns
    lines = [
        line for line in turns.splitlines() if line.startswith("  ")
    ]  # not that with pytest's long path
    assert max(len(line) + len(re.findall("[日本語]", line)) for line in lines) <= 80


def test_where_no_file_of_settings_fits_data_py_suggests_columns(tmp_path, monkeypatch, capsys):
    cases = {
        "--data.columns instruction=in.question,completion=answer,label=meta.rating --data.labels up=1,down=-1 "
        "(values of meta.rating: 1, -1)": [
            {"in": {"question": "Q"}, "answer": "A", "meta": {"rating": x}} for x in (1, 1, -1)
        ],
        "instruction=ask.question,completion=reply,label=rating --data.labels up=good|Great,down=bad (": [
            {"ask": {"question": "Q"}, "reply": "4", "rating": x}
            for x in ("good", "bad", "good", "Great")
        ],
        "--data.columns instruction=ask.question,completion=reply,label=rating --data.labels up=?,down=? (": [
            {"ask": {"question": "Q"}, "reply": "A", "rating": x} for x in (1, 0)
        ],
        "--data.columns completion=output,label=feedback --data.labels up=good,down=bad (": [
            {"instruction": "Q", "input": "ctx", "output": "A", "feedback": x}
            for x in ("good", "bad")
        ],
        "--data.columns instruction=query,a=reply_a,b=reply_b,verdict=winner --data.labels a=?,b=?": [
            {"query": "Q", "reply_a": "A", "reply_b": "B", "winner": "a"}
        ],
        "--data.columns messages=log,role=.author,content=.text,label=.vote --data.labels up=?,down=?": [
            {"log": [{"author": "me", "text": "Q"}, {"author": "ai", "text": "A", "vote": "+"}]}
        ],
    }
    for line, records in cases.items():
        source = write(tmp_path / "d.jsonl", *records)
        assert line in shown(tmp_path, monkeypatch, capsys, source)


def test_of_a_prompt_with_scored_answers_data_py_suggests_the_best_and_the_worst(
    tmp_path, monkeypatch, capsys
):
    scored = [("fair", 0.2), ("best", 0.9), ("worst", -0.5)]
    answers = [{"text": text, "score": score} for text, score in scored]
    source = write(tmp_path / "d.jsonl", *({"prompt": x, "answers": answers} for x in "PQ"))
    said = shown(tmp_path, monkeypatch, capsys, source, "--kind", "paired")
    found = re.search(r"Perhaps: (--data.columns .*) (--data.labels) '(.*)' \(", said)
    columns, labels = found[1].split(), found.groups()[1:]
    assert labels == ("--data.labels", "up=>=0")
    said = shown(tmp_path, monkeypatch, capsys, source, "--kind", "paired", *columns, *labels)
    assert "chosen    best" in said and "rejected  worst" in said


def test_a_long_run_of_blanks_in_a_text_is_read_at_once():
    for text in (" " * 300_000 + "x", "<details " * 30_000 + "x"):
        record = {"q": text, "a": text}
        reader = Reader(Data("x", columns="prompt=q,completion=a"), "demonstrations", Counter())
        began = time.monotonic()
        ((_, ours),) = reader.read(iter([("x:1", record)]), [])
        assert (ours["prompt"], ours["completion"]) == (text, text)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("line", ["[1, 2]", "3", '"text"', "null"])
def test_of_a_record_that_is_no_object_data_py_says_only_this(tmp_path, monkeypatch, capsys, line):
    source = saved(tmp_path, "d.jsonl", [line, rated()])
    said = shown(tmp_path, monkeypatch, capsys, source)
    assert said == f"{source}:1: record: expected an object, got {json.loads(line)!r}"


def test_data_py_tries_its_files_of_settings_on_a_pair_of_messages(tmp_path, monkeypatch, capsys):
    sides = {name: [{"from": "gpt", "value": name}] for name in ("chosen", "rejected")}
    source = write(tmp_path / "d.jsonl", {"prompt": "Q"} | sides)
    said = shown(tmp_path, monkeypatch, capsys, source, "--kind=paired")
    assert "train: 1 examples of 1 prompts" in said and "another way" not in said


def test_the_table_points_at_what_an_export_has_damaged(tmp_path, monkeypatch, capsys):
    whole = [rated(f"p{i}", f"answer {i}") for i in range(6)]
    cases = {
        "2 answers have the greatest length of all and end in '...'": [
            rated("q", "x" * 50 + "..."),
            rated("r", "y" * 50 + "..."),
        ],
        "1 answers begin with markup of reasoning": [rated("q", "<think>x</think>y")],
        "12 answers are one and the same text": [rated(f"q{i}", "No.") for i in range(12)],
        "": [rated("q", "x" * 50 + "..."), rated("r", "Wait...")],
    }
    for warning, records in cases.items():
        source = write(tmp_path / "d.jsonl", *whole, *records)
        out = shown(tmp_path, monkeypatch, capsys, source)
        assert ("look at them" in out) == bool(warning) and warning in out


def test_the_scores_of_a_list_of_answers_are_the_true_rewards_of_its_pair(tmp_path):
    answers = [{"text": " a", "score": 3}, {"text": " b", "score": 9}, {"text": " c", "score": 1.5}]
    source = saved(tmp_path, "lists.jsonl", [{"prompt": "p", "answers": answers}])
    columns = "prompt=prompt,completion=answers.*.text,label=answers.*.score"
    cases = {"up=>=0": (9, 1.5), "up=<=5,down=>5": (None, None), "up=9,down=3|1.5": (None, None)}
    for labels, rewards in cases.items():
        settings = ROOM | {"columns": columns, "labels": labels}
        examples, _ = load(source, chat(), "paired", **settings)
        assert [e.rewards for e in examples] == [rewards], labels


def test_a_share_of_a_source_is_the_same_each_time_and_in_the_order_of_the_file(tmp_path):
    source = write(tmp_path / "d.jsonl", *(rated(f"p{i}", f"c{i}") for i in range(100)))
    every, _ = read(source)
    first, again = read(f"{source}#30")[0], read(f"{source}#0.3")[0]
    assert first == again and len(first) == 30 and first != every[:30]
    assert first == [x for x in every if x in set(first)]
    assert read(f"{source}#10,{source}#0.5")[0][:10] == read(f"{source}#10")[0]
    pairs = write(
        tmp_path / "e.jsonl",
        *({"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(9)),
    )
    assert len(read(f"{pairs}#4")[0]) == 8, "records, not ratings"
    odd = write(tmp_path / "f#3.jsonl", rated())
    assert len(read(odd)[0]) == 1


def test_of_a_share_the_table_counts_only_what_is_taken(tmp_path):
    odd = [rated("p", "", i, weight=2, note=1) for i in (0, 1)] * 10
    source = write(tmp_path / "d.jsonl", *odd)
    for taken in (20, 4):
        _, counts = load(f"{source}#{taken}", plain(), **ROOM)
        names = (
            "with note, which nothing reads",
            "with an empty completion",
            "with a weight other than 1",
        )
        assert [counts[name] for name in names] == [taken] * 3


@pytest.mark.parametrize("settings", [{}, dict(repeated="last"), dict(raters="agree")])
def test_records_without_a_field_are_counted_over_all_sources(tmp_path, settings):
    clicks = [{"q": f"q{i}", "a": f"a{i}", "l": i % 2} for i in range(8)]
    first = write(tmp_path / "d.jsonl", *clicks[:5])
    second = write(tmp_path / "e.jsonl", *clicks[5:])
    columns = "prompt=q,completion=a,label=l,system=s"
    settings = dict(columns=columns, labels=UP_DOWN) | settings
    _, counts = load(f"{first},{second}", chat(), **ROOM, **settings)
    assert counts["records without system=s"] == 8


def test_a_fork_makes_records_of_a_raw_one_and_a_resume_compares_them(tiny, tmp_path):
    texts = {f"{i}": f"answer {i}" for i in range(8)}
    source = write(tmp_path / "clicks.jsonl", *({"of": f"{i}", "up": i % 2} for i in range(9)))

    def joined(click: dict) -> list[dict]:
        answer = texts.get(click["of"])
        return (
            [{"prompt": click["of"], "completion": answer, "label": click["up"]}] if answer else []
        )

    argv = ["--batch_size=4", "--max_steps=2", "--data.max_prompt=16", "--data.max_completion=32"]
    out = tmp_path / "out"
    run = train(tiny, source, out, *argv, make_records=joined)
    assert [row["step"] for row in run["rows"]] == [1, 2]
    again = ["--resume=auto", "--max_steps=3", *argv[:1], *argv[2:]]
    texts["0"] = "another answer"
    with pytest.raises(BadInput, match="records"):
        train(tiny, source, out, *again, make_records=joined)


def test_settings_of_a_run_and_of_its_ratings_are_two_files(tiny, tmp_path):
    file, records, ratings, *_ = PRESETS["pku_saferlhf"]
    source = saved(tmp_path, file, records)
    config = tmp_path / "run.yaml"
    config.write_text(
        "batch_size: 2\nmax_steps: 1\ndata:\n  max_prompt: 16\n  max_completion: 16\n"
    )
    argv = [f"--config={config}", f"--config={FILES / 'pku_saferlhf.yaml'}"]
    assert len(train(tiny, source, tmp_path / "out", *argv)["rows"]) == 1


def test_a_hundred_thousand_records_are_read_by_paths_within_thirty_seconds():
    r = random.Random(0)
    settings = Data("x", **preset("langfuse"))
    records = [
        (
            f"x:{i}",
            {
                "type": "GENERATION",
                "input": [user("Q" * 50)],
                "output": bot(f"{i}"),
                "user-feedback": [i % 2],
            },
        )
        for i in range(20_000)
    ]
    r.shuffle(records)
    began = time.process_time()
    assert len(list(Reader(settings, "rated", Counter()).read(iter(records), []))) == 20_000
    assert time.process_time() - began < 6


def test_the_table_of_the_document_reads_every_file_by_the_command_that_it_gives(
    tmp_path, monkeypatch, capsys
):
    rows = re.findall(
        r"^\| .* \| `python data.py FILE(.*)` \|$", (ROOT / "docs" / "data.md").read_text(), re.M
    )
    names = [row.removeprefix(" --config config/data/").removesuffix(".yaml") for row in rows]
    assert sorted(filter(None, names)) == sorted(file.stem for file in FILES.glob("*.yaml"))
    monkeypatch.chdir(ROOT)
    for name in (
        "openwebui",
        "pku_saferlhf",
        "hh_rlhf",
    ):  # all of them: the first test of this file
        source = saved(tmp_path, *PRESETS[name][:2])
        out = shown(tmp_path, monkeypatch, capsys, source, *rows[names.index(name)].split())
        assert f"train: {len(PRESETS[name][2])} examples" in out


def test_without_a_model_data_py_cuts_nothing_and_says_whose_tokens_it_counts(
    tmp_path, monkeypatch, capsys
):
    """The demo's model has room for 64 tokens: texts of a user's own model are longer."""
    records = [rated("one prompt " * 40 + str(i), "an answer " * 40) for i in range(3)]
    file = write(tmp_path / "d.jsonl", *records)
    monkeypatch.setattr(sys, "argv", ["data.py", str(file)])
    page()
    out = capsys.readouterr().out
    assert "3 examples of 3 prompts" in out and "0 prompts cut, 0 completions cut" in out
    assert out.startswith("tokens are those of the demo's tokenizer: give --model")
    assert "no thumbs down" in out, "and that only one kind of thumb is there"


def test_files_of_the_project_that_a_config_names_are_found_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_path("config/dialogue.jinja").exists()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "dialogue.jinja").write_text("mine")
    assert find_path("config/dialogue.jinja").read_text() == "mine"
