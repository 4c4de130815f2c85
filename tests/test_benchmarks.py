"""methods.py: a finished run is a line that the table is made of, and is not run again. vs_trl.py, on which gpu.py
stands, still fits the loop that it measures."""

import json
import sys

import pytest
from conftest import ROOT
from test_instructions import chatty  # noqa: F401

from examples import instructions as task

sys.path.append(str(ROOT / "benchmarks"))
import methods  # noqa: E402
import vs_trl  # noqa: E402

SMALL = {"batch_size": 4, "data.max_prompt": 100, "data.max_completion": 20, "lora.rank": 2}


def test_methods_are_run_once_and_make_a_table(chatty, tmp_path, monkeypatch, capsys):  # noqa: F811
    for name, value in (
        ("OUT", tmp_path),
        ("RESULTS", tmp_path / "methods.jsonl"),
        ("COMMON", methods.COMMON | SMALL),
        ("PROMPTS", 4),
        ("ANSWERS", 2),
        ("TOKENS", 6),
        ("HELD_OUT", {"val": 1, "new_kinds": 2}),
    ):
        monkeypatch.setattr(methods, name, value)
    monkeypatch.setattr(task, "check", lambda answers: [i % 2 == 0 for i in range(len(answers))])
    argv = ["methods.py", "run", "base", "kto", "--seeds", "1", "--model", str(chatty)]
    monkeypatch.setattr(sys, "argv", argv)
    methods.main()
    first = capsys.readouterr().out
    base, kto = map(json.loads, (tmp_path / "methods.jsonl").read_text().splitlines())
    assert (base["method"], kto["method"]) == ("base", "kto")
    assert base["kl"] == 0 and kto["kl"] != 0
    assert base["val"] == kto["val"] == [6, 12] and kto["new_kinds"] == [3, 6]
    assert kto["answers"] == 8 and kto["cpu_seconds"] > kto["base's answers"]["cpu_seconds"] > 0
    rated = [json.loads(x) for x in (tmp_path / "data-1" / "rated.jsonl").read_text().splitlines()]
    assert [r["label"] for r in rated] == [True, False] * 4
    assert rated[0]["prompt"] == rated[1]["prompt"] != rated[2]["prompt"]
    methods.main()
    again = capsys.readouterr().out
    assert "kto, seed 1 ..." in first and "..." not in again
    table = [line for line in again.splitlines() if line.startswith("| kto | 1 | 50.0% ")]
    assert len(table) == 1 and table[0] in first


@pytest.mark.parametrize("kind", ["kto", "dpo"])
def test_our_side_of_the_comparison_with_trl_reports_the_steps_that_it_ran(
    kind, tiny, ratings, pairs
):
    settings = {"batch_size": 2, "epochs": 1, "data.max_completion": 40, "data.max_prompt": 40}
    spec = {"kind": kind, "precision": "fp32", "model": str(tiny), "ours": settings}
    spec["records"] = str(ratings if kind == "kto" else pairs)
    result = vs_trl.once(sys.executable, "ours", spec | {"profile": 1})
    assert len(result["losses"]) == (12 if kind == "kto" else 4)
    assert result["seconds"] > 0 and result["peak_gib"] > 0
