"""cuts.py: one run does not depend on its cut, and a finished run is not run again. vs_trl.py, step.py and gpu.py fit
the program that they measure."""

import sys

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import cuts  # noqa: E402
import gpu  # noqa: E402
import step  # noqa: E402
import vs_trl  # noqa: E402


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
    few = tmp_path / "few.jsonl"
    lines = (ROOT / "demo" / "train.jsonl").read_text().splitlines(keepends=True)
    few.write_text("".join(lines[:24]))
    small = {"batch_size": 8, "epochs": 1, "optim.warmup": 1}
    for name, value in (
        ("SETTINGS", cuts.SETTINGS | small),
        ("RECORDS", few),
        ("HELD_OUT", few),
        ("CUTS", (8, 2)),
        ("OUT", tmp_path / "cuts"),
        ("RESULTS", tmp_path / "cuts.jsonl"),
    ):
        monkeypatch.setattr(cuts, name, value)
    argv = ["cuts.py", "run", "--seeds", "1", "--orders", "file", "--sides", "ours"]
    monkeypatch.setattr(sys, "argv", argv)
    cuts.main()
    uncut, cut = cuts.finished()
    assert uncut["distance"] == 0 < cut["distance"] < 0.01
    assert cut["margin"] == pytest.approx(uncut["margin"], abs=1e-3) and uncut["margin"] > 0
    assert uncut["right"][1] == 24 and uncut["sign"][1] == 24
    assert "ours, file, seed 1, 2 ..." in capsys.readouterr().out
    cuts.main()
    assert "..." not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["cuts.py", "table"])
    cuts.main()
    assert "| file, ours, 1 | " in capsys.readouterr().out
    cuts.draw(tmp_path / "cuts.svg")
    assert "shuffled" in (tmp_path / "cuts.svg").read_text()
