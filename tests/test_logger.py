"""What a run writes between steps: csv files that survive a kill, progress, trackers, answers."""

import json
import math
import os
import re
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, Started, rows_of, train

import kto
from evaluation import format_before_after, wilson_interval
from infra import console
from infra.checkpoint import RunState
from infra.console import BadInput, advance, progress
from infra.logger import Logger, add_row, cut_rows, peak_memory, speed_of
from infra.optimizer import Plan
from infra.settings import Data
from trainer import Trainer


def run_settings(out: Path, **kw) -> kto.Settings:
    return kto.Settings("m", Data("t"), out_dir=str(out), **kw)


# ---- metrics.csv ---------------------------------------------------------------------------------


def write(path, *rows, last: int = -1) -> None:
    cut_rows(path, last)
    for row in rows:
        add_row(path, row)


@pytest.mark.parametrize("torn", ["", "3,0.", "3", '3,"', "3,0.3\n4,0.4\n5"])
def test_a_resume_cuts_the_rows_after_its_checkpoints_step_and_a_torn_one(torn, tmp_path):
    path = tmp_path / "m.csv"
    write(path, *({"step": i, "loss": i / 7} for i in range(3)))
    path.write_text(path.read_text() + torn)
    write(path, {"step": 2, "loss": 0.5}, last=1)
    assert path.read_text() == f"step,loss\n0,0.0\n1,{1 / 7}\n2,0.5\n"
    write(path, {"step": 1, "other": 0.5})
    assert path.read_text() == "step,other\n1,0.5\n", "a new run begins anew, with its own columns"


@pytest.mark.parametrize("unvalidated, left", [(False, 3), (True, 2)])
def test_where_a_validation_is_owed_its_row_of_val_csv_is_cut_too(unvalidated, left, tmp_path):
    for name in ("metrics.csv", "val.csv"):
        write(tmp_path / name, *({"step": i, "loss": 0.5} for i in range(5)))
    Logger(run_settings(tmp_path), 2, unvalidated)
    assert [len(rows_of(tmp_path / name)) for name in ("metrics.csv", "val.csv")] == [3, left]


def test_columns_stay_where_the_first_row_put_them_and_a_row_is_on_disk_at_once(tmp_path):
    path = tmp_path / "m.csv"
    write(path, {"step": 1, "loss": None, "kl": 0.0}, {"kl": 2.0, "step": 2, "loss": 3.0})
    write(path, {"step": 3, "kl": 4.0, "new": 1.0}, last=2)
    content = "step,loss,kl\n1,,0.0\n2,3.0,2.0\n3,,4.0\n"
    assert path.read_text() == content, "0.0 is a value, None is an empty cell"


# ---- progress ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher, and a run in this process may have switched progress off."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(console, "shows_progress", True)


@pytest.fixture
def step_lines(tmp_path, capsys, monkeypatch):
    """step_lines(total, ...) -> the lines of a run whose steps take as long, and have the same numbers."""

    def lines(total, start=0, seconds=1.0, on=True, **row) -> list[str]:
        monkeypatch.setattr(console, "shows_progress", on)
        own = Logger(run_settings(tmp_path, progress=on), -1, False)
        own.begin(Plan(total, total, 0, total, total), total)
        assert f"{total:,} steps of 64 examples" in capsys.readouterr().out
        row = {"loss": 0.25, "kl": None, "rewards/margins": 1.5, "tokens/s": 1234.5} | row
        for step in range(start + 1, total + 1):
            # of a clock that the steps alone move
            now = 1e9 + step * seconds
            monkeypatch.setattr("infra.logger.time.time", lambda now=now: now)
            own.step(step, row | {"auc": 0.5, "accuracy": 0.5}, seconds)
        return capsys.readouterr().out.splitlines()

    return lines


def test_a_run_prints_about_twenty_lines_or_one_a_minute(step_lines):
    lines = step_lines(1000)
    assert lines[:2] == [
        "step 1/1000: loss 0.2500 margins 1.5000 tok/s 1,234 ETA 0:16:39",
        "step 51/1000: loss 0.2500 margins 1.5000 tok/s 1,234 ETA 0:15:49",
    ]
    assert len(lines) == 20 and len(step_lines(100_000, start=99_000, seconds=6.0)) == 100
    ends = [(line.split("/")[0], line[-5:]) for line in step_lines(1000, start=900)]
    resumed = [("step 901", "01:39"), ("step 951", "00:49")]
    assert ends == resumed, "its first step too, and an ETA by its own steps"
    assert step_lines(100, on=False) == []


def test_a_line_says_where_the_clamp_made_z_zero(step_lines):
    for clamped, shown in ((1.0, "kl 0 (clamped)"), (0.0, "kl 0.0000")):
        (line,) = step_lines(1, kl=0.0, **{"kl/clamped": clamped})
        assert f"loss 0.2500 {shown} margins 1.5000" in line


# ---- trackers, through whole runs ----------------------------------------------------------------

TINY = "--batch_size=4 --epochs=2 --max_steps=3 --val_interval=null --save_interval=null"
TINY += " --eval.samples=2 --eval.max_new_tokens=3 --optim.lr=1e-3"
SPIN = "--spin.max_iterations=1 --spin.max_new_tokens=3"


def note_what_wandb_gets(out: Path) -> None:
    """In a program's process: what it hands to wandb becomes a line of a file."""
    for name in [x for x in os.environ if x.startswith("WANDB_")]:  # this machine's own settings
        del os.environ[name]
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(out)}
    os.environ["WANDB_NAME"] = "mine"
    warnings.simplefilter("ignore")  # wandb leaves files open
    import wandb

    real = wandb.Run.log

    def noted(self, numbers, step):
        with open(out / "calls", "a") as f:
            f.write(json.dumps([numbers, step]) + "\n")
        assert self.name == "mine"
        return real(self, numbers, step=step)

    wandb.Run.log = noted


@pytest.fixture(scope="module")
def tracked(tiny, ratings, pairs, demos, tmp_path_factory) -> dict[str, Path]:
    """The folder of a run of each program, which was stopped and resumed."""
    runs = {}
    for program, tracker, data in (
        ("kto", "tensorboard", ratings),
        ("dpo", "csv", pairs),
        ("spin", "wandb", demos),
    ):
        out = runs[program] = tmp_path_factory.mktemp(program)
        argv = [f"--model={tiny}", f"--out_dir={out}", f"--logger={tracker}", *TINY.split()]
        argv += [f"--data.train={data}", f"--data.val={data}"]
        argv += SPIN.split() if program == "spin" else []
        for more in ("--stop_at=2", "--resume=auto"):
            first = partial(note_what_wandb_gets, out)
            code, _, stderr = Started(out, program, [*argv, more], first).ended()
            assert code == 0, stderr
    return runs


def logged(out: Path) -> dict[tuple[str, int], float]:
    """What a tracker should have: all cells of metrics.csv and val.csv."""
    expected = {}
    for file, prefix in (("metrics.csv", ""), ("val.csv", "val/")):
        for row in rows_of(out / file):
            for name, cell in row.items():
                if cell and name != "step":
                    key = f"{prefix}{name}", int(row["step"])
                    expected[key] = pytest.approx(float(cell), rel=1e-6)
    assert {("loss", 1), ("loss", 3), ("val/loss", 0), ("val/loss", 3)} <= expected.keys()
    return expected


def test_tensorboard_gets_every_value_at_its_step_and_a_resume_drops_what_came_after(tracked):
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    values = {}
    starts = []
    files = sorted((tracked["kto"] / "tensorboard").iterdir())
    for file in files:
        data = file.read_bytes()
        while data:  # a record: its length and a checksum, the event, a checksum
            end = 12 + int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12:end])
            data = data[end + 4 :]
            if event.session_log.status == SessionLog.START:
                starts.append(event.step)
            for value in event.summary.value:
                values[value.tag, event.step] = value.simple_value
    assert values == logged(tracked["kto"])
    assert len(files) == 2, "a resume adds a file"
    assert starts == [3], "of the second process, which goes on after step 2"


def test_wandb_gets_every_value_at_its_step_and_a_resume_goes_on_in_the_same_run(tracked):
    out = tracked["spin"]
    calls = [json.loads(line) for line in (out / "calls").read_text().splitlines()]
    values = {(name, step): x for numbers, step in calls for name, x in numbers.items()}
    assert values == logged(out)
    files = list((out / "wandb").glob("offline-run-*/*.wandb"))
    assert [f.stem for f in files] == [f"run-{(out / 'wandb_id').read_text()}"] * 2


def test_the_docs_name_every_column(tracked):
    text = (ROOT / "docs" / "columns.md").read_text()
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    named = {name.strip() for cell in first_cells for name in cell.split(",")} - {"column", "---"}
    seen = {"checker_accuracy", "kl/own", "engine/gap"}  # no run here has a checker or an engine
    for out in tracked.values():
        seen |= rows_of(out / "metrics.csv")[0].keys() | rows_of(out / "val.csv")[0].keys()
    assert named == seen


# ---- tables --------------------------------------------------------------------------------------


def test_wilsons_interval_by_hand():
    assert wilson_interval(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    z2 = 1.96**2
    assert wilson_interval(0, 10) == pytest.approx((0, z2 / (10 + z2)), abs=1e-12)
    assert wilson_interval(1, 10) == pytest.approx((0.0179, 0.4042), abs=1e-4)  # Newcombe's tables


def answers(*texts: str) -> list[dict]:
    return [{"prompt": f"p{i}", "completion": text} for i, text in enumerate(texts)]


VERDICTS = """
held-out accuracy by the checker (95% interval)
  before   25.0%  (7.1 to 59.1)  2 of 8, 2 without a verdict
  after    78.3%  (47.4 to 93.6)  7.8 of 10

  prompt  p1
  before  a b
  after   {}xx ... xx{}

  prompt  p0
  before  same
  after   same"""


def test_the_verdict_shows_both_accuracies_and_first_the_answers_that_changed():
    before = {"right": 2, "of": 8, "unjudged": 2, "answers": answers("same", "a\nb")}
    after = {"right": 7.83489, "of": 10, "unjudged": 0, "answers": answers("same", "x" * 99)}
    text = format_before_after(before, after)
    assert text == VERDICTS.format("x" * 23, "x" * 24)
    assert max(map(len, text.splitlines())) <= 80


# ---- the best step -------------------------------------------------------------------------------


def best_of(keep_best, values) -> list[int]:
    """The steps at which a validation is the best so far."""
    state, best_steps = RunState(), []
    for state.step, value in enumerate(values):
        row = {"loss": value, "rating_loss": value, "kl/own": value, "accuracy": value}
        if state.remember_if_best(row, keep_best):
            best_steps.append(state.step)
    assert state.best_step == (best_steps[-1] if best_steps else None)
    return best_steps


def test_the_best_is_the_lowest_loss_or_kl_and_the_highest_of_all_else():
    values = [0.5, 0.4, 0.6, 0.3, 0.7]
    for lowest in ("loss", "kl/own", "rating_loss"):
        assert best_of(lowest, values) == [1, 3]
    assert best_of("accuracy", values) == [1, 2, 4]
    assert best_of("accuracy", [0.5, math.nan, 0.4, math.inf, None]) == [2], "no values"
    assert best_of("loss", [0.1, 0.5, 0.5]) == [1], "step 0 has no checkpoint; a tie is no change"
    assert best_of(None, values) == []
    with pytest.raises(BadInput, match="^keep_best: los: not in val.csv, which has loss, "):
        best_of("los", [0.5])


# ---- speed ---------------------------------------------------------------------------------------


def test_a_steps_speed_and_the_peak_memory_of_a_gpu_a_cpu_and_a_mac(monkeypatch):
    example = SimpleNamespace(prompt=[0] * 5, completions=([0] * 3, [0] * 4))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2e9)
    on_gpu = speed_of([example] * 2, 0.5, torch.device("cuda"))
    assert on_gpu == {"tokens/s": 48, "seconds": 0.5, "memory_gb": 2}
    cpu = torch.device("cpu")
    peak_kib = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    assert peak_memory(cpu) == pytest.approx(peak_kib * 1024 / 1e9, rel=0.05)
    usage = SimpleNamespace(ru_maxrss=3 * 10**9)  # macOS gives bytes
    monkeypatch.setattr("infra.logger.resource.getrusage", lambda who: usage)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_memory(cpu) == 3


def test_a_rows_entropy_is_a_mean_over_tokens_and_its_samples_are_of_all_steps(
    tiny, ratings, tmp_path
):
    by_hand = []

    class Seen(Trainer):
        def loop_row(self, step, columns, plan):
            n = torch.tensor([len(e.completions[0]) for e in step.examples])
            by_hand.append(((columns["entropy"] * n).sum() / n.sum()).item())
            return super().loop_row(step, columns, plan)

    run = train(tiny, ratings, tmp_path, "--batch_size=6", "--max_steps=2", trainer=Seen)
    assert [row["entropy"] for row in run["rows"]] == pytest.approx(by_hand)
    assert 1 < by_hand[0] < 7, "a token's, not an example's"
    assert [row["samples"] for row in run["rows"]] == [6, 12]


def test_some_seconds_pass_from_one_line_about_work_to_the_next(capsys, monkeypatch):
    clock = iter([0, 15, 25, 40, 50, 60, 70, 90])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with progress("answers", 4):
        for n in (1, 1, 0, 1):  # 0: a token of a long answer
            advance(n)
        with progress("records", None):
            advance(1000)
            advance(234)
    assert capsys.readouterr().out.splitlines() == [
        "answers: 50%",
        "answers: 75%",
        "records: 1,234",
    ]
