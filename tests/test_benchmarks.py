"""methods.py: a finished run is a line that the table is made of, and is not run again. vs_trl.py and step.py fit the
program that they measure. regimes.py draws the ratings that it was asked for."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from test_instructions import chatty  # noqa: F401

from examples import instructions as task

sys.path.append(str(ROOT / "benchmarks"))
import answers  # noqa: E402
import cuts  # noqa: E402
import gpu  # noqa: E402
import methods  # noqa: E402
import regimes  # noqa: E402
import step  # noqa: E402
import vs_trl  # noqa: E402

from infra.console import BadInput  # noqa: E402
from infra.settings import Data  # noqa: E402
from models.hub import Source
from records.examples import load_examples  # noqa: E402
from records.tokenizer import Tokenizer  # noqa: E402

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
    assert kto["cpu_seconds"] > kto["base's answers"]["cpu_seconds"] > 0
    rated = [json.loads(x) for x in (tmp_path / "data-1" / "rated.jsonl").read_text().splitlines()]
    assert [r["label"] for r in rated] == [True, False] * 4
    assert rated[0]["prompt"] == rated[1]["prompt"] != rated[2]["prompt"]
    methods.main()
    again = capsys.readouterr().out
    assert "kto, seed 1 ..." in first and "..." not in again
    table = [line for line in again.splitlines() if line.startswith("| kto | 1 | 50.0% ")]
    assert len(table) == 1 and table[0] in first


def test_a_step_and_a_cell_are_measured_in_the_program_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vs_trl, "OUT", tmp_path)
    monkeypatch.setattr(vs_trl, "SIZES", {"tiny": (1, 8, 1, 50)})
    monkeypatch.setattr(vs_trl, "STEPS", {"tiny": 1})
    monkeypatch.setattr(vs_trl, "PAIRS", {"tiny": 1})
    tree = str(vs_trl.HERE.parent)
    (row,) = vs_trl.run_cell("dpo", "tiny", "400/60", "fp32", [f"{tree}/."])
    assert row["loss_off"] < 1e-6 and row["ratio"] > 0 and min(row["peak_gib"]) > 0
    vs_trl.print_row(row)
    assert "| dpo tiny 400/60 fp32 | " in capsys.readouterr().out
    cells = step.growth("growth", (1, 8, 1, 50), 5, 4, 4)
    assert all(float(x) > 0 for x in cells.split(" | "))


def test_gpu_prints_a_row_of_the_measured_step_and_says_why_a_part_fails(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(gpu, "OUT", tmp_path / "gpu")
    monkeypatch.setattr(vs_trl, "OUT", tmp_path)
    monkeypatch.setattr(gpu.sys, "argv", ["gpu.py", "tiny", "gpt2-xl", "trl"])
    monkeypatch.setitem(gpu.PARTS, "gpt2-xl", lambda: vs_trl.run_process(["false"]))
    gpu.main()
    text = capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if line.startswith("| CPU | tiny | ")]
    ms, tokens_s, mfu, waits, memory = row.strip("| ").split(" | ")[2:]
    assert float(ms.replace(",", "")) > 0 and float(memory) > 0
    assert float(tokens_s.replace(",", "")) > 0 and (mfu, waits) == ("-", "0")
    assert "gpt2-xl\nfailed: ['false']" in text and "TRL is not installed" in text


def test_a_regime_draws_the_ratings_that_it_was_asked_for():
    tokenizer = Tokenizer(Source(ROOT / "demo" / "base"))
    file = str(ROOT / "demo" / "val.jsonl")
    rated, _ = load_examples(
        file, tokenizer, "rated", Data(train=file, max_prompt=32, max_completion=32)
    )

    def draw(ratings=60, **regime):
        args = regimes.Regime(ratings=ratings, **regime)
        cfg = SimpleNamespace(kto=args, seed=1)
        run = SimpleNamespace(cfg=cfg, tokenizer=tokenizer, examples={"train": rated})
        examples = regimes.draw_ratings(run)
        texts = [tokenizer.decode(e.completions[0]) for e in examples]
        right = [
            words.removeprefix(">").split() == sorted(tokenizer.decode(e.prompt)[5:-1].split())
            for e, words in zip(examples, texts)
        ]
        return examples, sum(text.startswith(">") for text in texts), right

    examples, others, right = draw(up=0.25)
    assert right == [e.label for e in examples] == [True] * 15 + [False] * 45
    assert 15 < others < 45
    assert draw(other=0)[1] == 0 and draw(other=1)[1] == 60
    examples, _, right = draw(flip=0.3)
    turned = sum(is_right != e.label for e, is_right in zip(examples, right))
    assert sum(right) == 30 and 8 < turned < 28
    examples, *_ = draw(up=0.25, weigh=True)
    sums = [sum(e.weight for e in examples if e.label == label) for label in (True, False)]
    assert np.allclose(sums, 30)
    with pytest.raises(BadInput, match="^kto.up: the data have"):
        draw(ratings=5000)


def test_an_order_of_records_is_a_seeds_and_keeps_a_prompts_ratings_together_where_asked():
    records = [{"prompt": f"p{i // 3}", "completion": f"c{i}"} for i in range(31)]
    shuffled = cuts.ordered(records, "shuffled", 1, 4)
    grouped = cuts.ordered(records, "file", 1, 4)
    assert len(shuffled) == len(grouped) == 28
    assert shuffled == cuts.ordered(records, "shuffled", 1, 4)
    assert shuffled != cuts.ordered(records, "shuffled", 2, 4)
    assert grouped != cuts.ordered(records, "file", 2, 4)

    def neighbours_of_one_prompt(rows):
        return sum(a["prompt"] == b["prompt"] for a, b in zip(rows, rows[1:]))

    assert neighbours_of_one_prompt(shuffled) < 8
    assert neighbours_of_one_prompt(grouped) >= 17
    assert cuts.reversed_steps([1, 2, 3, 4, 5, 6], 3) == [3, 2, 1, 6, 5, 4]


def test_our_run_does_not_depend_on_its_cut_and_makes_a_line_once(tmp_path, monkeypatch, capsys):
    small = {"batch_size": 8, "epochs": 1, "optim.warmup": 1}
    task = cuts.TASKS["demo"]
    few = tmp_path / "few.jsonl"
    lines = (ROOT / "demo" / "train.jsonl").read_text().splitlines(keepends=True)
    few.write_text("".join(lines[:24]))
    task = task | {"records": few, "held_out": few, "cuts": (8, 2), "measured": 2}
    monkeypatch.setattr(cuts, "TASKS", {"demo": task | {"settings": task["settings"] | small}})
    monkeypatch.setattr(cuts, "OUT", tmp_path / "cuts")
    monkeypatch.setattr(cuts, "RESULTS", tmp_path / "cuts.jsonl")
    cuts.held_out_of.cache_clear()
    argv = ["cuts.py", "run", "--seeds", "1", "--orders", "file", "--sides", "ours"]
    monkeypatch.setattr(sys, "argv", argv)
    cuts.main()
    cuts.held_out_of.cache_clear()  # its task is this test's
    uncut, cut = cuts.finished()
    assert uncut["distance"] == 0 < cut["distance"] < 0.01
    assert cut["margin"] == pytest.approx(uncut["margin"], abs=1e-3) and uncut["margin"] > 0
    assert uncut["right"][1] == 24 and uncut["sign"][1] == 24
    assert [point["step"] for point in uncut["curve"]] == [2]
    assert "demo, ours, file, seed 1, 2 ..." in capsys.readouterr().out
    cuts.main()
    assert "..." not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["cuts.py", "table"])
    cuts.main()
    assert "| file, ours, 1 | " in capsys.readouterr().out
    cuts.draw(tmp_path / "cuts.svg")
    assert "shuffled" in (tmp_path / "cuts.svg").read_text()


def test_answers_has_no_dpo_where_each_prompt_has_one_answer(tmp_path, monkeypatch, capsys):
    """Its 144 prompts with 4 answers are those of methods.py; runs at another learning rate are not counted."""
    monkeypatch.setattr(answers, "RESULTS", tmp_path / "answers.jsonl")
    rows = [{"method": "dpo", "seed": 1, "lr": lr, "val": [90, 360]} for lr in (None, 1e-4)]
    methods.write_records(tmp_path / "methods.jsonl", rows)
    monkeypatch.setattr(methods, "RESULTS", tmp_path / "methods.jsonl")
    shapes = []

    def run(name, seed, model, lr):
        shapes.append((methods.PROMPTS, methods.ANSWERS, name))
        return {"method": name, "seed": seed, "val": [90, 360]}

    for name in ("PROMPTS", "ANSWERS", "OUT"):  # put back at the end
        monkeypatch.setattr(methods, name, getattr(methods, name))
    monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))
    monkeypatch.setattr(methods, "run", run)
    monkeypatch.setattr(sys, "argv", ["answers.py", "run", "kto", "dpo", "--shapes", "1,8"])
    answers.main()
    assert shapes == [(576, 1, "kto"), (72, 8, "kto"), (72, 8, "dpo")]
    answers.main()
    assert len(shapes) == 3, "a finished run is not run again"
    text = capsys.readouterr().out
    assert "| dpo |  |  | 25.0; 25.0% (21 to 30) | 25.0; 25.0% (21 to 30) |" in text
