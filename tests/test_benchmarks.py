"""vs_trl.py, step.py and gpu.py fit the program that they measure. A part of gpu.py that fails ends alone."""

import json
from pathlib import Path

import pytest
from conftest import Started

import gpu
import step
import vs_trl


def test_a_step_and_a_cell_are_measured_in_the_program_itself(tmp_path, monkeypatch, capsys):
    def run_process(command: list[str]) -> str:
        code, said, stderr = Started(tmp_path, command[1], command[2:]).ended()
        assert code == 0, stderr
        return said

    monkeypatch.setattr(vs_trl, "run_process", run_process)
    monkeypatch.setattr(vs_trl, "OUT", tmp_path)
    monkeypatch.setattr(vs_trl, "SIZES", {"tiny": (1, 8, 1, 50)})
    monkeypatch.setattr(vs_trl, "STEPS", {"tiny": 1})
    monkeypatch.setattr(vs_trl, "PAIRS", {"tiny": 1})
    row = vs_trl.run_cell(["dpo", "tiny", "400/60", "fp32"], f"{vs_trl.HERE.parent}/.")
    assert row["loss_off"] < 1e-6 and row["ratio"] > 0 and min(row["peak_gib"]) > 0
    vs_trl.print_result(row)
    assert "| dpo tiny 400/60 fp32 | " in capsys.readouterr().out
    assert min(step.measure(8)) > 0


def measure(out: Path, *words: str) -> tuple[int, list[dict]]:
    """gpu.py as a user types it. -> its exit code and the rows of its results"""
    argv = ["--tiny", "--out", out, *words]
    code, *_ = Started(out, gpu.__file__, argv).ended(within=4000)
    return code, [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_gpu_measures_a_step_and_leaves_out_a_part_for_which_too_little_time_is_left(tmp_path):
    code, (step, profile, gpt2, trl) = measure(tmp_path, "--limit", "49", "gpt2", "trl")
    assert code == 1
    assert (step["part"], step["device"]) == ("gpt2", "CPU")
    assert all(step[name] > 0 for name in ("seconds", "tokens/s", "memory_gb", "share_of_product"))
    assert 0 < profile["busy"] < 1 and profile["launches"] > 100
    assert "aten::" in (tmp_path / "log.txt").read_text(), "no table of kernels"
    assert (gpt2["status"], trl["status"]) == ("ok", "skipped: too little time")


def test_a_part_of_gpu_that_fails_or_takes_too_long_ends_alone(tmp_path):
    assert gpu.run_part("machine", tmp_path, True, 0.5) == "killed after 0.5 s"
    assert gpu.run_part("nothing", tmp_path, True, 60) == "failed: exit code 1"
    assert (tmp_path / "log.txt").read_text().endswith("KeyError: 'nothing'\n")


@pytest.mark.slow
def test_every_part_of_gpu_runs_with_models_of_a_few_weights(tmp_path):
    code, rows = measure(tmp_path, "--limit", "3600")
    assert code == 0, rows
    assert [row["part"] for row in rows if row.get("status") == "ok"] == [*gpu.PARTS]
    heads = [row for row in rows if "loss" in row]
    assert all(abs(row["loss"] / heads[0]["loss"] - 1) < 1e-2 for row in heads)
    assert all(abs(row["gradient"] / heads[0]["gradient"] - 1) < 1e-2 for row in heads)
