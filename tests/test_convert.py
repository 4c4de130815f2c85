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
from infra.files import read_lines
from records.examples import Example

FORMS = ROOT / "convert" / "forms"
ROWS = ROOT / "tests" / "foreign"
ROOM = dict(max_prompt=9999, max_completion=9999)


def table(name: str) -> dict[str, dict]:
    return yaml.safe_load((ROWS / name).read_text(encoding="utf-8"))


def convert(source, kind="rated", **settings) -> Path:
    """The file that is written."""
    out = Path(f"{source}.{kind}.jsonl")
    options = [f"--{name}={value}" for name, value in settings.items()]
    main([str(source), f"--out={out}", f"--kind={kind}", *options])
    return out


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
    source = saved(tmp_path, shape["records"])
    if "rated" in shape:
        assert learned(source, **shape["options"]) == shape["rated"]
    if "counts" in shape:
        assert counted(capsys) == shape["counts"]
    for kind, fields in shape.get("written", {}).items():
        records = read_lines(convert(source, kind, **shape["options"]))
        found = [
            {x: r.get(x) for x in expected} for r, expected in zip(records, fields, strict=True)
        ]
        assert found == fields
        assert records[0]["source"].startswith(f"{source}:")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_one_line_with_the_nearest_names_that_are_there(tmp_path, name):
    case = REFUSED[name]
    source = saved(tmp_path, case["records"])
    said, *more = refusal(source, **case["options"])
    assert case["line"] in said and not re.search(r"(--\w+: )\1", said)
    assert not case["options"] or not more
    assert not Path(f"{source}.rated.jsonl").exists()


# ---- what is written -----------------------------------------------------------------------------


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


def test_an_output_file_that_is_read_or_no_jsonl_is_refused(tmp_path):
    source = write(tmp_path / "d.jsonl", rated())
    for name in ("ratings.csv", "d.jsonl"):
        with pytest.raises(BadInput, match="^--out: .*: expected another file, whose name ends in"):
            main([source, f"--out={tmp_path / name}"])
    write(tmp_path / "a.jsonl", rated())
    for sources in (f"{tmp_path}/?.jsonl", f"{tmp_path}/a.jsonl,{source}"):
        for _ in range(2):
            main([sources, f"--out={tmp_path}/ratings.jsonl"])
        with pytest.raises(BadInput, match="^--out: .*: expected another file"):
            main([sources, f"--out={source}"])


def test_without_out_three_records_are_shown_in_the_form_that_fits(tmp_path, capsys):
    source = str(copied(tmp_path, "openwebui.json"))
    main([source])
    said = capsys.readouterr().out
    assert said.startswith("--form openwebui fits\n\nup (") and said.count("\n  answer ") == 3
    assert ": 8 records; would be written: 4 up, 2 down\n  1 dropped: not rated\n" in said
    with pytest.raises(BadInput, match="label: missing"):
        main([source, "--out=x.jsonl"])
    with pytest.raises(BadInput, match="openwebu: No such file"):
        main([source, "--form=openwebu"])
    own = tmp_path / "mine.yaml"
    own.write_text((FORMS / "openwebui.yaml").read_text())
    assert learned(source, form=own) == FILES["openwebui.json"]["rated"]
    for text, fault in (("- a", "expected settings"), ("colums: a=b", "did you mean columns")):
        own.write_text(text)
        with pytest.raises(BadInput, match=f"mine.yaml: .*{fault}"):
            main([source, f"--form={own}"])
    main([write(tmp_path / "d.jsonl", rated(), rated(label=False))])
    assert "fits" not in capsys.readouterr().out, "these are records of ours"


def test_a_run_says_how_to_convert_a_foreign_file():
    with pytest.raises(BadInput) as e:
        load(str(ROWS / "openwebui.json"), chat(), **ROOM)
    expected = "openwebui.json:1: label: missing; there is type, data, meta, snapshot; other forms: docs/convert.md"
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
    assert len(read_lines(tmp_path / "o.jsonl")) == 10_000
    assert float(run.stderr) < 2, "no module but ours; some seconds for 100,000 records"


def test_lists_that_are_nested_too_deeply_are_one_line(tmp_path):
    source = tmp_path / "d.jsonl"
    source.write_text('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    for options in ({}, dict(columns="label=x.y", labels="up=1,down=0")):
        assert refusal(source, **options)[0].endswith(
            "d.jsonl:1: lists or objects are nested too deeply"
        )


def test_a_long_run_of_blanks_in_a_text_is_read_at_once(tmp_path):
    for text in (" " * 300_000 + "x", "<details " * 30_000 + "x"):
        source = write(tmp_path / "d.jsonl", {"q": text, "a": text})
        began = time.monotonic()
        (record,) = read_lines(convert(source, "demonstrations", columns="prompt=q,completion=a"))
        assert (record["prompt"], record["completion"]) == (text, text)
        assert time.monotonic() - began < 5
