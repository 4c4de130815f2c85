"""What a run writes between steps: csv files that survive a kill, progress, trackers, answers."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, refused, rows_of, train

import kto
from finish import format_before_after
from infra import console
from infra.checkpoint import RunState
from infra.logger import Logger, add_row, cut_rows
from infra.optimizer import Plan
from infra.settings import Data


def run_settings(out: Path, **kw) -> kto.Settings:
    return kto.Settings("m", Data("t"), out_dir=str(out), **kw)


# ---- metrics.csv ---------------------------------------------------------------------------------


def write(path: Path, *rows: dict) -> None:
    for row in rows:
        add_row(path, row)


@pytest.mark.parametrize("torn", ["", "3,0.", "3", '3,"', "3,0.3\n4,0.4\n5"])
def test_a_resume_cuts_the_rows_after_its_checkpoints_step_and_a_torn_one(torn, tmp_path):
    path = tmp_path / "metrics.csv"
    write(path, *({"step": i, "loss": i / 7} for i in range(3)))
    path.write_text(path.read_text() + torn)
    (tmp_path / "val.csv").write_text(path.read_text())
    Logger(run_settings(tmp_path), last_step=1, unvalidated=True)
    assert path.read_text() == f"step,loss\n0,0.0\n1,{1 / 7}\n"
    assert (tmp_path / "val.csv").read_text() == "step,loss\n0,0.0\n", "this validation is owed"
    cut_rows(path, -1)
    assert not path.exists(), "a new run begins anew, with its own columns"


def test_columns_stay_where_the_first_row_put_them_and_a_row_is_on_disk_at_once(tmp_path):
    path = tmp_path / "m.csv"
    write(path, {"step": 1, "loss": None, "kl": 0.0}, {"kl": 2.0, "step": 2, "loss": 3.0})
    write(path, {"step": 3, "kl": 4.0, "new": 1.0})
    content = "step,loss,kl\n1,,0.0\n2,3.0,2.0\n3,,4.0\n"
    assert path.read_text() == content, "0.0 is a value, None is an empty cell"


# ---- progress ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher, and a run in this process may have switched progress off."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(console, "shows_progress", True)


@pytest.mark.parametrize(
    "total, start, seconds, shown, last",
    [
        (1000, 0, 1.0, [*range(1, 1000, 50)], "ETA 0:00:49"),
        (100_000, 99_000, 6.0, [*range(99_001, 100_000, 10)], "ETA 0:00:54"),
        # resumed: its first step too, and an ETA by its own steps
        (1000, 900, 1.0, [901, 951], "ETA 0:00:49"),
    ],
)
def test_a_run_prints_about_twenty_lines_or_one_a_minute(
    total, start, seconds, shown, last, tmp_path, capsys, monkeypatch
):
    logger = Logger(run_settings(tmp_path), -1, False)
    logger.begin(Plan(total, total, 0, total, total), total)
    capsys.readouterr()
    row = {"loss": 0.25, "kl": 0.0, "kl/clamped": 1.0, "rewards/margins": 11.0904}
    row |= {"tokens/s": 1234.5, "memory_gb": 0.5}
    for step in range(start + 1, total + 1):
        # of a clock that the steps alone move
        monkeypatch.setattr("infra.logger.time.time", lambda now=1e9 + step * seconds: now)
        logger.step(step, row, seconds)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[0] for line in lines] == [f"step {step}" for step in shown]
    assert lines[-1].endswith(f": loss 0.2500 kl 0.0000 margins 11.09 tok/s 1,234 {last}")
    assert total > 1000 or max(map(len, lines)) <= 80


# ---- trackers, through whole runs ----------------------------------------------------------------

TINY = "--batch_size=4 --epochs=2 --max_steps=3 --val_interval=null --save_interval=null"
TINY += " --eval.samples=2 --eval.max_new_tokens=3 --optim.lr=1e-3"


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


@pytest.fixture
def trackers(monkeypatch):
    """Mocks of Fabric's logger and of wandb. -> the values that they get, and what each is begun with"""
    values, starts = {}, []

    class Fabrics:
        def __init__(self, out, name, purge_step, **_):
            starts.append([name, purge_step])

        def log_metrics(self, numbers, step):
            values.update({(name, step): x for name, x in numbers.items()})

    class Run:
        id = "abc"

        def log(self, numbers, step):
            Fabrics.log_metrics(self, numbers, step)

    def init(**given):
        starts.append([given[name] for name in ("id", "resume", "name")])
        return Run()

    monkeypatch.setattr("lightning.fabric.loggers.TensorBoardLogger", Fabrics)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setenv("WANDB_NAME", "mine")
    return values, starts


BEGUN = {  # of a run that is stopped after step 2, and of the one that continues it
    "tensorboard": [["tensorboard", None], ["tensorboard", 3]],
    "wandb": [[None, "allow", "mine"], ["abc", "allow", "mine"]],
}


@pytest.mark.parametrize("tracker", BEGUN)
def test_a_tracker_gets_every_value_at_its_step_and_a_resume_goes_on_in_the_same_run(
    tracker, trackers, tiny, ratings, tmp_path
):
    words = [*TINY.split(), f"--data.val={ratings}", f"--logger={tracker}"]
    for more in ("--stop_at=2", "--resume=auto"):
        train(tiny, ratings, tmp_path, *words, more)
    values, starts = trackers
    assert values == logged(tmp_path) and starts == BEGUN[tracker]


def test_the_docs_name_every_column(tiny, ratings, pairs, demos, tmp_path):
    text = (ROOT / "docs" / "columns.md").read_text()
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    named = {name.strip() for cell in first_cells for name in cell.split(",")} - {"column", "---"}
    seen = {"checker_accuracy", "kl/own"}  # no run here has a checker
    for program, data in {"kto": ratings, "dpo": pairs, "spin": demos}.items():
        argv = [*TINY.split(), "--max_steps=1", f"--data.val={data}"]
        argv += ["--spin.max_iterations=1", "--spin.max_new_tokens=3"] * (program == "spin")
        out = tmp_path / program
        train(tiny, data, out, *argv, program=program)
        seen |= rows_of(out / "metrics.csv")[0].keys() | rows_of(out / "val.csv")[0].keys()
    assert named == seen


# ---- tables --------------------------------------------------------------------------------------


def answers(*texts: str) -> list[dict]:
    return [{"prompt": f"p{i}", "completion": text} for i, text in enumerate(texts)]


VERDICTS = """
held-out accuracy by the checker (95% interval)
  before   25.0%  (7.1 to 59.1)  2 of 8
  after    78.3%  (47.4 to 93.6)  7.8 of 10

  prompt  p1
  before  a b
  after   {}xx ... xx{}

  prompt  p0
  before  same
  after   same"""


def test_the_verdict_shows_both_accuracies_and_first_the_answers_that_changed():
    before = {"right": 2, "of": 8, "answers": answers("same", "a\nb")}
    after = {"right": 7.83489, "of": 10, "answers": answers("same", "x" * 99)}
    text = format_before_after(before, after)
    assert text == VERDICTS.format("x" * 23, "x" * 24)
    assert max(map(len, text.splitlines())) <= 80


# ---- the best step -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "column, values, best",
    [
        *((lowest, [0.5, 0.4, 0.6, 0.3, 0.7], [1, 3]) for lowest in ("loss", "kl/own", "rating_loss")),
        ("accuracy", [0.5, 0.4, 0.6, 0.3, 0.7], [1, 2, 4]),
        ("accuracy", [0.5, math.nan, 0.4, math.inf, None], [2]),
        ("loss", [0.1, 0.5, 0.5], [1]),  # step 0 has no checkpoint; a tie is no change
        (None, [0.5, 0.4], []),
    ],
)  # fmt: skip
def test_the_best_is_the_lowest_loss_or_kl_and_the_highest_of_all_else(column, values, best):
    state, steps = RunState(), []
    for state.step, value in enumerate(values):
        if state.remember_if_best({column: value}, column):
            steps.append(state.step)
    assert steps == best and state.best_step == max(best, default=None)
    match = "^keep_best: los: not in val.csv, which has loss, kl$"
    refused(match, state.remember_if_best, {"loss": 0.5, "kl": 0.1}, "los")
