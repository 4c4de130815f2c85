"""Foreign ratings become records of ours, as `python -m convert` is typed: every form, every shape, every refusal."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from foreign import COFFEE, COFFEES, MATH, PRESETS, THOUGHT, nested
from test_data import load
from tokens import CHATML, bot, chat, folder, rated, user, write

from convert.program import main
from infra.console import BadInput
from models.hub import Source
from records.examples import Example
from records.tokenizer import Tokenizer

FORMS = ROOT / "convert" / "forms"
ROOM = dict(max_prompt=9999, max_completion=9999)
UP_DOWN = "up=1,down=0"


def convert(source, kind="rated", **settings) -> str:
    """The file that is written."""
    out = f"{source}.{kind}.jsonl"
    options = [f"--{name}={value}" for name, value in settings.items()]
    main([str(source), f"--out={out}", f"--kind={kind}", *options])
    return out


def records_of(file) -> list[dict]:
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


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


def learned(source, kind="rated", **settings) -> list[str]:
    """What is learned from the converted file."""
    examples, _ = load(convert(source, kind, **settings), chat(), kind, **ROOM)
    return [told(e, kind) for e in examples]


def dropped(capsys) -> dict[str, int]:
    """What the printed table says of it."""
    lines = re.findall(r"^  ([\d,]+) (dropped.*)$", capsys.readouterr().out, re.M)
    return {what: int(n) for n, what in lines}


def refusal(source, **settings) -> list[str]:
    with pytest.raises(BadInput) as e:
        convert(source, **settings)
    return str(e.value).splitlines()


def saved(folder, name: str, records) -> str:
    path = folder / name
    if name.endswith(".jsonl"):
        return write(path, *records)
    path.write_text(records if isinstance(records, str) else json.dumps(records), encoding="utf-8")
    return str(path)


# ---- every form of convert/forms -----------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_form_reads_its_ratings_example_by_example(tmp_path, capsys, name):
    file, records, ratings, pairs, left_out = PRESETS[name]
    source = saved(tmp_path, file, records)
    form = {} if name.startswith("none") else {"form": name}
    assert learned(source, **form) == ratings
    assert dropped(capsys) == left_out
    if pairs is not None:
        assert learned(source, "paired", **form) == pairs


def test_every_form_has_rows_here_says_when_it_was_tried_and_is_the_one_that_fits(tmp_path, capsys):
    names = {file.stem for file in FORMS.glob("*.yaml")}
    assert names == {name for name in PRESETS if not name.startswith("none")} | {"math_step"}
    rows = PRESETS | {"math_step": ("pairs.jsonl", [MATH])}
    for name in names:
        header = [x for x in (FORMS / f"{name}.yaml").read_text().splitlines() if x.startswith("#")]
        assert re.search(r"[Tt]ried 20\d\d-\d\d-\d\d with", " ".join(header)), name
        source = saved(tmp_path, rows[name][0], rows[name][1])
        main([source, "--kind", "paired" if name.endswith("_pairs") else "rated"])
        assert f"--form {name} fits" in capsys.readouterr().out
    source = write(tmp_path / "d.jsonl", rated(), rated(label=False))
    main([source])
    assert "fits" not in capsys.readouterr().out, "these are records of ours"


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
    source = convert(write(tmp_path / "d.jsonl", record), form=name)
    ((e,), _) = load(source, t, "rated", **ROOM)
    assert t.decode(e.prompt).startswith(str(tools) + "<|im_start|>user\nWet?")


@pytest.mark.parametrize("columns", ["a=a,b=b,verdict=w", "completion=a+b,label=w+l"])
def test_a_call_of_tools_without_a_word_is_an_answer_in_lists_and_in_pairs_too(tmp_path, columns):
    template = CHATML.replace("m['content']", "(m['content'] or m['tool_calls']|string)")
    t = Tokenizer(Source(folder(tmp_path / "t", chat_template=template)))
    call = bot(None) | {"tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    record = {"prompt": [user("Wet?")], "a": call, "b": [bot("No.")], "w": 1, "l": 0}
    labels = UP_DOWN if "label" in columns else "a=1,b=2"
    source = convert(write(tmp_path / "d.jsonl", record), columns=columns, labels=labels)
    examples, _ = load(source, t, "rated", **ROOM)
    assert [e.label for e in examples] == [True, False]
    assert "weather" in t.decode(examples[0].completions[0])


def test_a_given_beginning_of_the_answer_ends_the_prompt_in_the_assistants_turn(tmp_path):
    source = write(tmp_path / "d.jsonl", MATH)
    (record,) = records_of(convert(source, form="math_step"))
    assert record["prompt"] == [user("2 + 2?"), bot("Step 1:")]
    assert (record["chosen"], record["rejected"]) == (" Add: 4.", " Add: 5.")


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
        dict(form="librechat"),
        [x.removeprefix("S: Barista. | ") for x in COFFEES],
        {
            "dropped: not rated": 1,
            "dropped by --where": 1,
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
            for x in (1, 3)
        ],
        dict(columns="messages=messages,rated=at,label=r", labels=UP_DOWN),
        ["U: Hi || Ho +", "U: Hi | A: Ho | U: Rain? || Drip. +"],
        {},
    ),
    "ties and draws": (
        [{"q": "Q", "x": "A", "y": "B", "w": w} for w in ("l", "both", "none", "other")],
        dict(columns="prompt=q,a=x,b=y,verdict=w", labels="a=l,b=r,both=both,neither=none"),
        ["Q || A +", "Q || B -", "Q || A +", "Q || B +", "Q || A -", "Q || B -"],
        {"dropped by --labels": 1},
    ),
    "a cut": (
        [{"q": "Q", "a": f"{x}", "s": x} for x in (5, 4.5, 3, "2", None)],
        dict(columns="prompt=q,completion=a,label=s", labels="up=4..5,down=<3"),
        ["Q || 5 +", "Q || 4.5 +", "Q || 2 -"],
        {"dropped by --labels": 1, "dropped: not rated": 1},
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
        {"dropped by --labels": 1},
    ),
    "records inside": (
        {"date": "x", "feedback": [{"q": "Q", "a": "A", "l": 1}, {"q": "Q", "a": "B", "l": 0}]},
        dict(columns="prompt=q,completion=a,label=l", records="feedback"),
        ["Q || A +", "Q || B -"],
        {},
    ),
    "earlier turns in history, also as a text of JSON in a table": (
        [
            {"instruction": "Q", "output": "A", "label": True, "history": history}
            for history in (EARLIER, json.dumps(EARLIER), [], "[]")
        ],
        {},
        ["U: P | A: O | U: Q || A +"] * 2 + ["U: Q || A +"] * 2,
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
        {"dropped by --where": 3},
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
        {"dropped by --where": 1},
    ),
    "where all values of a list are wanted": (
        [
            {"prompt": "P", "completion": "A", "label": True, "s": ["sent", "draft"]},
            {"prompt": "Q", "completion": "B", "label": True, "s": ["sent", "sent"]},
            {"prompt": "R", "completion": "C", "label": True, "s": []},
        ],
        dict(where="s.*=sent"),
        ["Q || B +"],
        {"dropped by --where": 2},
    ),
    "where a value is missing, null or an empty text": (
        [rated("Q", x, kind=k) for x, k in (("A", "x"), ("B", ""), ("C", None))]
        + [rated("Q", "D")],
        dict(where="kind=null"),
        ["Q || B +", "Q || C +", "Q || D +"],
        {"dropped by --where": 1},
    ),
    "where a record has no image, in a list or in a cell of a csv file": (
        [
            rated("Q", x, images=i)
            for x, i in (("A", []), ("B", "[]"), ("C", '["x"]'), ("D", ["x"]))
        ],
        dict(where="images=null"),
        ["Q || A +", "Q || B +"],
        {"dropped by --where": 2},
    ),
    "where a value is an empty text": (
        [rated("Q", x, kind=k) for x, k in (("A", "x"), ("B", ""), ("C", "y"))],
        dict(where="kind!=y|z,kind=x|"),
        ["Q || A +", "Q || B +"],
        {"dropped by --where": 1},
    ),
    "where a value is no empty text": (
        [rated("Q", x, kind=k) for x, k in (("A", "x"), ("B", ""))],
        dict(where="kind!="),
        ["Q || A +"],
        {"dropped by --where": 1},
    ),
    "days": (
        [rated("Q", x, day=f"2026-11-{n}") for x, n in (("A", 23), ("B", 24), ("C", 25))]
        + [rated("Q", "D", day="2026-11-24T23:59:59Z"), rated("Q", "E", day=None)],
        dict(where="day=>=2026-11-24,day=<2026-11-25"),
        ["Q || B +", "Q || D +"],
        {"dropped by --where": 3},
    ),
    "times, with a T or a blank before the hour": (
        [rated("Q", x, at=f"2026-11-24{x}10:30:00") for x in "T "],
        dict(where="at=>=2026-11-24T10:00|<2026-11-24 09:00"),
        ["Q || T +", "Q ||   +"],
        {},
    ),
    "times of several zones, which are compared as times": (
        [
            rated("Q", x, at=at)
            for x, at in (
                ("A", "2026-11-25T00:30:00+02:00"),
                ("B", "2026-11-24T20:30:00-05:00"),
                ("C", "2026-11-25T12:00:00Z"),
                ("D", "2026-11-25 00:00:00.000"),
                ("E", "2026-11-24T23:59:59.999+00:00"),
            )
        ],
        dict(where="at=>=2026-11-25T00:00:00Z"),
        ["Q || B +", "Q || C +", "Q || D +"],
        {"dropped by --where": 2},
    ),
    "days, which end with the day in UTC": (
        [rated("Q", x, at=f"2026-11-{at}") for x, at in (("A", "24T23:30:00-01:00"), ("B", "24"))],
        dict(where="at=<=2026-11-24"),
        ["Q || B +"],
        {"dropped by --where": 1},
    ),
    "two answers of which one cannot be read, which drops both": (
        [
            {"q": "Q", "x": x, "y": [bot("B")], "w": "l"}
            for x in ([bot("A")], [bot([{"type": "image"}])], [], None, [user("A")])
        ],
        dict(columns="prompt=q,a=x,b=y,verdict=w", labels="a=l,b=r"),
        ["U: Q || A +", "U: Q || B -"],
        {
            "dropped: with a part of a message that is no text (image)": 1,
            "dropped: with an empty answer": 2,
            "dropped: whose last turn is not the assistant's": 1,
        },
    ),
    "names of roles that LangChain, Gemini and others have for the assistant": (
        [
            {"m": [user("Hi"), {"role": role, "content": role}], "l": 1}
            for role in ("ai", "model", "Bot")
        ],
        dict(columns="messages=m,label=l"),
        ["U: Hi || ai +", "U: Hi || model +", "U: Hi || Bot +"],
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
    "a label again": (
        [{"prompt": "Q", "response": "A", "preference": "chosen", "mine": 0}],
        dict(columns="label=mine"),
        ["Q || A -"],
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
def test_a_record_of_any_shape_is_read_by_settings_alone(tmp_path, capsys, shape):
    records, settings, examples, left_out = SHAPES[shape]
    name = "d.json" if isinstance(records, dict) else "d.jsonl"
    assert learned(saved(tmp_path, name, records), **settings) == examples
    assert dropped(capsys) == left_out


Q = {"prompt": "Q", "completion": "A", "data": {"rating": 1, "ranking": 2}, "winner": "x"}
TALK = [user("Hi"), bot("Ho") | {"rating": 1}]
BY_ID = "messages=ms,id=.id,parent=.up,rated=at,label=l"
REFUSED = {  # records, settings, the line
    "a typo in a path": (
        [Q],
        dict(columns="label=data.ratin", labels=UP_DOWN),
        "--columns: label=data.ratin: found in no record; there is data.rating, data.ranking",
    ),
    "a typo inside messages": (
        [{"ms": TALK}],
        dict(columns="messages=ms,label=.ratng", labels=UP_DOWN),
        "--columns: label=.ratng: found in no record; there is ms.*.rating",
    ),
    "a typo in where": (
        [rated(kind="x")],
        dict(where="kid=x"),
        "--where: kid: found in no record; there is kind",
    ),
    "a where for messages in a rated answer": (
        [rated(kind="x")],
        dict(where=".kind=x"),
        "--where: .kind: a leading dot stands for messages, and none are rated here",
    ),
    "a where for messages in a tree of messages": (
        [dict(id=1, parent=None, role="user", content="Q")],
        dict(columns="id=id,parent=parent,label=s", labels=UP_DOWN, where=".kind=x"),
        "--where: .kind: a leading dot stands for messages",
    ),
    "seconds since 1970 beside a day": (
        [rated(at="2025-01-01"), rated(at=1763942400)],
        dict(where="at=<2026-11-24"),
        ":2: --where: <2026-11-24: 1763942400 is no day or time such as 2026-11-24T10:00",
    ),
    "a day in another form": (
        [rated(at="11/24/2026")],
        dict(where="at=<2026-11-24"),
        ":1: --where: <2026-11-24: 11/24/2026 is no day or time such as 2026-11-24T10:00",
    ),
    "an answer to an image": (
        [rated(images=[]), rated(images=["x.png"])],
        {},
        ":2: images: its answer is to more than the text; python -m convert --where images=null leaves",
    ),
    "an answer to an image, whose rating lies deeper": (
        [{"q": "Q", "a": "A", "meta": {"l": 1}, "images": ["x.png"]}],
        dict(columns="prompt=q,completion=a,label=meta.l", labels=UP_DOWN),
        ":1: images: its answer is to more than the text",
    ),
    "a label that nobody named": (
        [Q],
        dict(columns="label=data.rating"),
        "--labels: missing: what do the values of data.rating mean?",
    ),
    "no field of ours": (
        [Q],
        dict(columns="lable=winner"),
        "--columns: lable: no field of ours; there is label",
    ),
    "no role": (
        [Q],
        dict(columns="label=winner", roles="usr=human"),
        "--roles: usr: no role; there is system, developer, user",
    ),
    "an unknown role": (
        [{"ms": [{"role": "me", "content": "x", "r": 1}]}],
        dict(columns="messages=ms,label=.r", labels=UP_DOWN),
        ":1: role: 'me': not one of system",
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
        "--columns: chosen: a list of answers needs rejected, too",
    ),
    "a verdict beside ratings of messages": (
        [{"ms": TALK, "x": "A", "y": "B", "w": 1}],
        dict(columns="messages=ms,label=.rating,a=x,b=y,verdict=w", labels="a=1,b=0"),
        "--columns: label: there is a verdict, too: which rating is meant?",
    ),
    "a verdict that is a thumb": (
        [{"q": "Q", "x": "A", "y": "B", "w": 2}],
        dict(columns="prompt=q,a=x,b=y,verdict=w", labels="a=1,b=0,up=2"),
        "--labels: with --columns verdict=... a, b, both and neither have values",
    ),
    "a pair without messages": (
        [{"messages": [], "chosen": "x", "rejected": "y"}],
        {},
        ":1: prompt: missing; there is messages, chosen, rejected",
    ),
    "a value with two meanings": ([Q], dict(labels="up=1,down=1"), "--labels: up=1,down=1: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_one_line_with_the_nearest_names_that_are_there(tmp_path, case):
    records, settings, line = REFUSED[case]
    source = write(tmp_path / "d.jsonl", *records)
    said, *more = refusal(source, **settings)
    assert line in said
    assert not settings or not more
    assert not Path(f"{source}.rated.jsonl").exists()


# ---- an answer that was edited, a copy of one, and what the user wrote next ----------------------


def chat_with(*answers: dict) -> dict:
    """Open WebUI's export of a chat."""
    first = {"id": "u", "parentId": None, "role": "user", "content": "Tea?"}
    rest = [{"parentId": "u", "role": "assistant", **answer} for answer in answers]
    return {"chat": {"history": {"messages": {x["id"]: x for x in (first, *rest)}}}}


UP = {"annotation": {"rating": 1}}
DOWN = {"annotation": {"rating": -1}}
CHATS = {  # answers, what is learned from, what is dropped
    "an answer that was edited after its thumb, or before": (
        [{"id": "a", "content": "Hot.", "originalContent": "Cold.", **DOWN}],
        [],
        {"dropped by --where": 1},
    ),
    "a copy, which has the thumb and the id of the first": (
        [
            {"id": "a", "content": "Cold.", "feedbackId": "f", **DOWN},
            {"id": "b", "content": "Hot.", "feedbackId": "f", **DOWN},
            {"id": "c", "content": "Warm.", "feedbackId": "g", **UP},
        ],
        ["U: Tea? || Cold. -", "U: Tea? || Warm. +"],
        {"dropped: a copy, with the rating of another answer": 1},
    ),
    "an edited answer that nobody rated, before a rated one": (
        [
            {"id": "a", "content": "Hot.", "originalContent": "Cold."},
            {"id": "v", "parentId": "a", "role": "user", "content": "And?"},
            {"id": "b", "parentId": "v", "content": "Wait.", **UP},
        ],
        ["U: Tea? | A: Hot. | U: And? || Wait. +"],
        {"dropped: not rated": 1},
    ),
}


@pytest.mark.parametrize("case", CHATS)
def test_a_rating_belongs_to_the_text_that_was_rated(tmp_path, capsys, case):
    answers, ratings, left_out = CHATS[case]
    other = chat_with({"id": "z", "content": "Green.", **UP})
    source = saved(tmp_path, "chats.json", [chat_with(*answers), other])
    assert learned(source, form="openwebui_chats") == [*ratings, "U: Tea? || Green. +"]
    assert dropped(capsys) == left_out


def test_the_users_next_message_after_a_rated_answer_stands_beside_it(tmp_path):
    later = [
        {"id": "v", "parentId": "a", "role": "user", "content": "Too hot!"},
        {"id": "w", "parentId": "a", "role": "user", "content": "Thanks."},
        {"id": "x", "parentId": "b", "role": "user", "content": "Hm", "files": ["x.png"]},
    ]
    answers = [{"id": "a", "content": "Hot.", **DOWN}, {"id": "b", "content": "Cold.", **UP}]
    source = saved(tmp_path, "chats.json", [chat_with(*answers, *later)])
    down, up = records_of(convert(source, form="openwebui_chats"))
    assert down["next"] == "Too hot!", "the first one; the others are later versions"
    assert "next" not in up, "it is no text"
    assert down["conversation_id"] == up["conversation_id"]
    (pair,) = records_of(convert(source, "paired", form="openwebui_chats"))
    assert (pair["chosen"]["content"], pair["rejected"]["content"]) == ("Cold.", "Hot.")


# ---- what is written, and what is said -----------------------------------------------------------


def test_each_line_has_its_source_and_the_fields_that_are_kept(tmp_path):
    clicks = [{"q": "Q", "a": "A", "l": 1, "n": 7, "big": 2**60 + 1, "other": 1}] * 2
    source = write(tmp_path / "d.jsonl", *clicks)
    settings = dict(columns="prompt=q,completion=a,label=l", extra="n,big", labels=UP_DOWN)
    first, second = records_of(convert(source, **settings))
    assert first == second | {"source": f"{source}:1"} and second["source"] == f"{source}:2"
    assert (first["n"], first["big"]) == (7, 2**60 + 1)


def test_a_file_is_whole_or_not_there_and_the_first_twenty_faults_are_said(tmp_path):
    bad = [{"q": "Q", "a": "A", "l": "x"}] * 30
    source = write(tmp_path / "d.jsonl", {"q": "Q", "a": "A", "l": 1}, *bad)
    out = tmp_path / "ratings.jsonl"
    out.write_text("before")
    command = [sys.executable, "-m", "convert", source, "--out", str(out)]
    command += ["--columns", "prompt=q,completion=a,label=l"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and out.read_text() == "before"
    lines = run.stderr.splitlines()
    assert len(lines) == 20 and lines[0].startswith(f"error: {source}:2: label: expected true")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "d.jsonl", out], "and nothing beside"
    half = write(tmp_path / "half.jsonl", rated("p", "\ud83d"))
    (line,) = refusal(half, where="label=true")
    assert line.startswith(f"{half}:1: completion: ") and "half of a character" in line
    (line,) = refusal(write(tmp_path / "e.jsonl", rated(kind="x")), where="kind=y|null")
    assert line.endswith("e.jsonl: no records; 1 dropped by --where")
    for name in ("ratings.csv", "d.jsonl"):
        with pytest.raises(BadInput, match="^--out: .*: expected another file, whose name ends in"):
            main([source, f"--out={tmp_path / name}"])


def test_without_out_three_records_are_shown_and_a_form_that_fits_must_be_given(tmp_path, capsys):
    file, records, *_ = PRESETS["openwebui"]
    source = saved(tmp_path, file, records)
    main([source])
    said = capsys.readouterr().out
    assert said.startswith("--form openwebui fits\n\nup (") and said.count("\n  answer ") == 3
    assert ": 8 records; would be written: 4 up, 2 down\n  1 dropped: not rated\n" in said
    with pytest.raises(BadInput, match="--form openwebui fits: give it with --out x.jsonl"):
        main([source, "--out=x.jsonl"])
    with pytest.raises(BadInput, match="--form: openwebu: no such form; there is openwebui"):
        main([source, "--form=openwebu"])
    own = tmp_path / "mine.yaml"
    own.write_text((FORMS / "openwebui.yaml").read_text())
    assert learned(source, form=own) == PRESETS["openwebui"][2]


def test_where_no_form_fits_the_paths_of_the_first_record_are_shown(tmp_path):
    record = {"in": {"question": "Why?"}, "reply": "So.", "stars": 4}
    with pytest.raises(BadInput) as e:
        main([write(tmp_path / "d.jsonl", record)])
    lines = str(e.value).splitlines()
    assert "d.jsonl:1: label: missing; there is in, reply, stars; " in lines[0]
    assert lines[-4:] == [
        "  in = \"{'question': 'Why?'}\"",
        "  in.question = 'Why?'",
        "  reply = 'So.'",
        "  stars = '4'",
    ]


def test_the_scores_of_a_list_of_answers_are_the_true_rewards_of_its_pair(tmp_path):
    answers = [{"text": " a", "score": 3}, {"text": " b", "score": 9}, {"text": " c", "score": 1.5}]
    source = saved(tmp_path, "lists.jsonl", [{"prompt": "p", "answers": answers}])
    columns = "prompt=prompt,completion=answers.*.text,label=answers.*.score"
    cases = {"up=>=0": (9, 1.5), "up=<=5,down=>5": (None, None), "up=9,down=3|1.5": (None, None)}
    for labels, rewards in cases.items():
        examples, _ = load(
            convert(source, "paired", columns=columns, labels=labels), chat(), "paired", **ROOM
        )
        assert [e.rewards for e in examples] == [rewards], labels


def test_csv_rows_with_too_few_cells_are_read_and_counted(tmp_path, capsys):
    source = saved(tmp_path, "log.csv", "q,a,flag,note\nQ,A,good\nP,B,bad,x\n")
    columns = "prompt=q,completion=a,label=flag"
    assert learned(source, columns=columns, labels="up=good,down=bad") == ["Q || A +", "P || B -"]
    assert "  1 rows of a csv file with too few cells" in capsys.readouterr().out


def test_a_record_is_counted_where_it_has_no_field_that_may_be_missing(tmp_path, capsys):
    clicks = [{"q": f"q{i}", "a": f"a{i}", "l": i % 2} for i in range(8)]
    first = write(tmp_path / "d.jsonl", *clicks[:5])
    second = write(tmp_path / "e.jsonl", *clicks[5:])
    columns = "prompt=q,completion=a,label=l,system=s"
    main([f"{first},{second}", f"--columns={columns}", f"--labels={UP_DOWN}"])
    assert "  8 without system=s\n" in capsys.readouterr().out


def test_a_run_says_how_to_convert_a_foreign_file(tmp_path):
    file, records, *_ = PRESETS["openwebui"]
    source = saved(tmp_path, file, records)
    with pytest.raises(BadInput) as e:
        load(source, chat(), **ROOM)
    expected = (
        "feedback.json:1: label: missing; there is type, data, meta, snapshot; python -m conv"
    )
    assert expected in str(e.value).splitlines()[0]


def test_a_conversion_knows_no_torch_and_reads_records_fast(tmp_path):
    turns = [{"role": "system", "content": "Sew."}, user("Q" * 50)]
    span = {"id": "x", "type": "GENERATION", "input": turns, "output": bot("A"), "model": "m"}
    records = [{**span, "user-feedback": [i % 2]} for i in range(10_000)]
    source = write(tmp_path / "d.jsonl", *records)
    command = ["convert", source, "--form=langfuse", f"--out={tmp_path / 'o.jsonl'}"]
    code = f"""
import resource, runpy, sys
sys.argv = {command}
try:
    runpy.run_module("convert", run_name="__main__")
finally:
    time = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    print(*{{"torch", "transformers", "datasets", "numpy"}} & set(sys.modules), time, file=sys.stderr)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert len(records_of(tmp_path / "o.jsonl")) == 10_000
    assert float(run.stderr) < 2, "no module but ours; some seconds for 100,000 records"


def test_a_long_run_of_blanks_in_a_text_is_read_at_once(tmp_path):
    for text in (" " * 300_000 + "x", "<details " * 30_000 + "x"):
        source = write(tmp_path / "d.jsonl", {"q": text, "a": text})
        began = time.monotonic()
        (record,) = records_of(convert(source, "demonstrations", columns="prompt=q,completion=a"))
        assert (record["prompt"], record["completion"]) == (text, text)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("line", ["[1, 2]", "3", '"text"', "null"])
def test_of_a_record_that_is_no_object_only_this_is_said(tmp_path, line):
    source = write(tmp_path / "d.jsonl", line, rated())
    (said,) = refusal(source)
    assert said == f"{source}:1: record: expected an object, got {json.loads(line)!r}"


def test_the_table_of_the_document_has_every_form():
    page = (ROOT / "docs" / "convert.md").read_text()
    rows = re.findall(r"^\| .* \| `(\w+)` \|$", page, re.M)
    assert sorted(rows) == sorted(file.stem for file in FORMS.glob("*.yaml"))
