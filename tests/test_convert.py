"""Foreign ratings become records of ours, as `python -m convert` is typed: every form, every shape, every refusal."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from test_data import load
from tokens import bot, chat, rated, user, write

from convert.program import main
from infra.console import BadInput
from records.examples import Example

FORMS = ROOT / "convert" / "forms"
ROWS = ROOT / "tests" / "foreign"
ROOM = dict(max_prompt=9999, max_completion=9999)
UP_DOWN = "up=1,down=0"


def table(name: str) -> dict[str, dict]:
    return yaml.safe_load((ROWS / name).read_text(encoding="utf-8"))


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
    """An example as tests/foreign/forms.yaml writes it."""
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


def counted(capsys) -> dict[str, int]:
    """The lines of the printed table."""
    lines = re.findall(r"^  ([\d,]+) (.*)$", capsys.readouterr().out, re.M)
    return {what: int(n) for n, what in lines}


def refusal(source, **settings) -> list[str]:
    with pytest.raises(BadInput) as e:
        convert(source, **settings)
    return str(e.value).splitlines()


def copied(folder: Path, name: str) -> Path:
    """A copy of a file of tests/foreign; what is written beside it stays in the test's folder."""
    return Path(shutil.copy(ROWS / name, folder))


def saved(folder: Path, records) -> str:
    """A file with records: a list is jsonl, an object json, a text csv."""
    if isinstance(records, list):
        return write(folder / "d.jsonl", *map(json.dumps, records))
    is_text = isinstance(records, str)
    path = folder / ("d.csv" if is_text else "d.json")
    path.write_text(records if is_text else json.dumps(records))
    return str(path)


# ---- every form of convert/forms, every shape, every refusal -------------------------------------

FILES = table("forms.yaml")
SHAPES = table("shapes.yaml")
REFUSED = table("refused.yaml")


@pytest.mark.parametrize("name", FILES)
def test_a_form_reads_its_ratings_example_by_example(tmp_path, capsys, name):
    expected = FILES[name]
    source = copied(tmp_path, name)
    form = expected.get("form", source.stem)
    options = {"form": form} if form else {}
    assert learned(source, **options) == expected["rated"]
    assert counted(capsys) == expected["counts"]
    if "paired" in expected:
        assert learned(source, "paired", **options) == expected["paired"]
    if form:
        main([str(source), "--kind", "paired" if form.endswith("_pairs") else "rated"])
        assert f"--form {form} fits" in capsys.readouterr().out


def test_every_form_has_a_file_here_says_when_it_was_tried_and_is_in_the_document():
    names = sorted(file.stem for file in FORMS.glob("*.yaml"))
    forms = {expected.get("form", Path(name).stem) for name, expected in FILES.items()}
    assert names == sorted(forms - {None})
    page = (ROOT / "docs" / "convert.md").read_text()
    assert sorted(re.findall(r"^\| .* \| `(\w+)` \|$", page, re.M)) == names
    for name in names:
        header = re.findall("^#.*", (FORMS / f"{name}.yaml").read_text(), re.M)
        assert re.search(r"[Tt]ried 20\d\d-\d\d-\d\d with", " ".join(header)), name


@pytest.mark.parametrize("name", SHAPES)
def test_a_record_of_any_shape_is_read_by_settings_alone(tmp_path, capsys, name):
    shape = SHAPES[name]
    assert learned(saved(tmp_path, shape["records"]), **shape["options"]) == shape["rated"]
    assert counted(capsys) == shape["counts"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_one_line_with_the_nearest_names_that_are_there(tmp_path, name):
    case = REFUSED[name]
    source = saved(tmp_path, case["records"])
    said, *more = refusal(source, **case["options"])
    assert case["line"] in said
    assert not case["options"] or not more
    assert not Path(f"{source}.rated.jsonl").exists()


# ---- what is written -----------------------------------------------------------------------------


def test_tools_that_stand_beside_the_messages_are_in_the_record(tmp_path):
    """Langfuse's input is an object, not a list of messages, if there are tools."""
    tools = [{"type": "function", "function": {"name": "weather", "description": "Rain?"}}]
    asked = {"messages": [user("Wet?")], "tools": tools}
    record = {"type": "GENERATION", "input": asked, "output": "No.", "user-feedback": [1]}
    (converted,) = records_of(convert(write(tmp_path / "d.jsonl", record), form="langfuse"))
    assert (converted["prompt"], converted["tools"]) == ([user("Wet?")], tools)


@pytest.mark.parametrize("columns", ["a=a,b=b,verdict=w", "completion=a+b,label=w+l"])
def test_a_call_of_tools_without_a_word_is_an_answer_in_lists_and_in_pairs_too(tmp_path, columns):
    call = bot(None) | {"tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    record = {"prompt": [user("Wet?")], "a": call, "b": [bot("No.")], "w": 1, "l": 0}
    labels = UP_DOWN if "label" in columns else "a=1,b=2"
    source = write(tmp_path / "d.jsonl", record)
    first, second = records_of(convert(source, columns=columns, labels=labels))
    assert (first["completion"], first["label"]) == (call, True)
    assert (second["completion"], second["label"]) == (bot("No."), False)


def test_the_users_next_message_after_a_rated_answer_stands_beside_it(tmp_path):
    def node(name: str, parent: str | None, content: str, rating=None, **more) -> tuple[str, dict]:
        role = "assistant" if rating else "user"
        node = {"id": name, "parentId": parent, "role": role, "content": content, **more}
        return name, node | ({"annotation": {"rating": rating}} if rating else {})

    nodes = [
        node("u", None, "Tea?"),
        node("a", "u", "Hot.", -1),
        node("b", "u", "Cold.", 1),
        node("v", "a", "Too hot!"),
        node("w", "a", "Thanks."),
        node("x", "b", "Hm", files=["x.png"]),
    ]
    source = saved(tmp_path, {"chat": {"history": {"messages": dict(nodes)}}})
    down, up = records_of(convert(source, form="openwebui_chats"))
    assert down["next"] == "Too hot!", "the first one; the others are later versions"
    assert "next" not in up, "it is no text"
    (pair,) = records_of(convert(source, "paired", form="openwebui_chats"))
    assert (pair["chosen"]["content"], pair["rejected"]["content"]) == ("Cold.", "Hot.")


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


def test_what_is_known_of_a_sampled_answer_stays_beside_a_rating_that_lies_deeper(tmp_path):
    asked = {"chat_template_kwargs": {"x": 1}, "date": "2026-01-31", "cut": True}
    asked["spans"] = [{"start": 0, "end": 1, "label": False}]
    record = {**rated(), **asked, "label": None, "meta": {"vote": 1}}
    source = write(tmp_path / "d.jsonl", record)
    columns = "completion=completion,label=meta.vote"
    (converted,) = records_of(convert(source, columns=columns, labels=UP_DOWN))
    assert converted == {**rated(), **asked, "source": f"{source}:1"}


def test_a_setting_that_names_no_field_reads_no_column_without_a_name(tmp_path):
    source = saved(tmp_path, ",prompt,completion,label,weight\n7,Q,A,1,kg\n")  # as pandas writes it
    (converted,) = records_of(convert(source, columns="weight="))
    assert converted.keys() == {"prompt", "completion", "label", "source"}


def test_a_pattern_of_files_is_converted_again_but_not_into_one_of_them(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", rated())
    for source in (f"{tmp_path}/?.jsonl", f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"):
        for _ in range(2):
            main([source, f"--out={tmp_path}/ratings.jsonl"])
        with pytest.raises(BadInput, match="^--out: .*: expected another file"):
            main([source, f"--out={tmp_path}/b.jsonl"])


def test_nothing_to_write_and_a_wrong_name_are_refused(tmp_path):
    source = write(tmp_path / "d.jsonl", rated(kind="x"))
    (line,) = refusal(source, where="kind=y|null")
    assert line.endswith("d.jsonl: no records; 1 dropped by --where")
    for name in ("ratings.csv", "d.jsonl"):
        with pytest.raises(BadInput, match="^--out: .*: expected another file, whose name ends in"):
            main([source, f"--out={tmp_path / name}"])
    # half of an emoji, also in a text of JSON inside the record
    for answer in ("\ud83d", json.dumps({"role": "assistant", "content": "\ud83d"})):
        (line,) = refusal(
            write(tmp_path / "e.jsonl", rated("p", answer)), columns="completion=completion"
        )
        assert ":1: completion: " in line and "half of a character" in line


def test_without_out_three_records_are_shown_and_a_form_that_fits_must_be_given(tmp_path, capsys):
    source = str(copied(tmp_path, "openwebui.json"))
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
    assert learned(source, form=own) == FILES["openwebui.json"]["rated"]
    main([write(tmp_path / "d.jsonl", rated(), rated(label=False))])
    assert "fits" not in capsys.readouterr().out, "these are records of ours"


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
    source = saved(tmp_path, [{"prompt": "p", "answers": answers}])
    columns = "prompt=prompt,completion=answers.*.text,label=answers.*.score"
    cases = {"up=>=0": (9, 1.5), "up=<=5,down=>5": (None, None), "up=9,down=3|1.5": (None, None)}
    for labels, rewards in cases.items():
        examples, _ = load(
            convert(source, "paired", columns=columns, labels=labels), chat(), "paired", **ROOM
        )
        assert [e.rewards for e in examples] == [rewards], labels


def test_a_run_says_how_to_convert_a_foreign_file():
    with pytest.raises(BadInput) as e:
        load(str(ROWS / "openwebui.json"), chat(), **ROOM)
    expected = (
        "openwebui.json:1: label: missing; there is type, data, meta, snapshot; python -m conv"
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


def test_lists_that_are_nested_too_deeply_are_one_line(tmp_path):
    source = tmp_path / "d.jsonl"
    source.write_text('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    for options in ({}, dict(columns="label=x.y", labels=UP_DOWN)):
        assert refusal(source, **options)[0].endswith(
            "d.jsonl:1: lists or objects are nested too deeply"
        )


def test_a_long_run_of_blanks_in_a_text_is_read_at_once(tmp_path):
    for text in (" " * 300_000 + "x", "<details " * 30_000 + "x"):
        source = write(tmp_path / "d.jsonl", {"q": text, "a": text})
        began = time.monotonic()
        (record,) = records_of(convert(source, "demonstrations", columns="prompt=q,completion=a"))
        assert (record["prompt"], record["completion"]) == (text, text)
        assert time.monotonic() - began < 5
