"""The files of a run besides checkpoints: metrics.csv, val.csv and eval/step-N.json. Also the lines on the
terminal, and a step's speed and memory.

metrics.csv (training) and val.csv (validation) survive a kill. A resume removes the rows after its checkpoint's step
and writes them again.
"""

import csv
import resource
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from infra import health
from infra.console import rank, say
from infra.files import write_json, write_whole
from infra.optimizer import Plan
from infra.settings import RunSettings

# Column of a row -> how the console shows its value; other columns are only in the files.
CELLS = {
    "loss": "loss {:.4f}",
    "kl": "kl {:.4f}",
    "accuracy": "accuracy {:.4f}",
    "rewards/margins": "margins {:.2f}",
    "checker_accuracy": "checker {:.4f}",
    "tokens/s": "tok/s {:,.0f}",
}


# ---- speed and memory ------------------------------------------------------------------------


def speed_of(examples: Sequence[Any], seconds: float, device: torch.device) -> dict:
    """The columns of an optimizer step about its speed and memory. examples: the step's Examples on all ranks."""
    tokens = sum(len(e.prompt) + sum(map(len, e.completions)) for e in examples)
    return {"tokens/s": tokens / seconds, "seconds": seconds, "memory_gb": peak_memory(device)}


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process so far, in GB: of PyTorch's allocator on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes, Linux in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


# ---- files and trackers --------------------------------------------------------------------------


def cut_rows(path: Path, last: int) -> None:
    """Remove the rows of a csv file after step `last`, and half a row of a killed process. -1 removes all rows."""
    *lines, _torn = path.read_text().split("\n") if path.exists() else [""]
    rows = [line for line in lines[1:] if int(line.split(",")[0]) <= last]
    if rows:
        write_whole(path, "\n".join([lines[0], *rows, ""]))
    else:
        path.unlink(missing_ok=True)


def add_row(path: Path, row: dict) -> None:
    """Add a row to a csv file. The file's first row names its columns. A name that is not a column is dropped. A
    missing name, or None, is an empty cell."""
    with open(path, "a+", encoding="utf-8", newline="") as file:
        file.seek(0)
        names = csv.DictReader(file).fieldnames
        writer = csv.DictWriter(file, names or row, extrasaction="ignore", lineterminator="\n")
        if not names:
            writer.writeheader()
        writer.writerow(row)


class Logger:
    """Rows, samples and progress of a run. A new Logger removes the rows after last_step. On ranks other than 0 every
    method is a no-op.

    last_step: the step of the checkpoint that a run resumes from, or -1 for a new run.
    unvalidated: whether the validation of that step is not done yet.
    """

    def __init__(self, cfg: RunSettings, last_step: int, unvalidated: bool):
        self.main = rank() == 0
        self.cfg = cfg
        self.out = Path(cfg.out_dir)
        self.total = self.track = self.first = self.shown = None
        if self.main:
            cut_rows(self.out / "metrics.csv", last_step)
            cut_rows(self.out / "val.csv", last_step - unvalidated)
            if cfg.logger != "csv":
                from infra.trackers import open_tracker

                self.track = open_tracker(cfg, last_step + 1)

    def begin(self, plan: Plan, n: int) -> None:
        """Say how long the run is, on n training examples. Later calls, of later iterations, do nothing."""
        if self.total:
            return
        self.total = plan.total
        batch_size = self.cfg.batch_size
        say(f"{plan.total:,} steps of {batch_size:,} examples, {plan.per_epoch:,} per epoch")
        say(f"{n - plan.per_epoch * batch_size:,} of {n:,} examples are left out of each epoch")

    def step(self, step: int, row: dict, seconds: float) -> None:
        """Write a step's row of metrics.csv. About twenty rows a run, or one a minute, are shown. seconds: how long the
        step took."""
        if not self.main:
            return
        self._write("metrics.csv", step, row)
        now = time.time()
        if self.first is None:
            self.first = step
            self.began = now - seconds
        elif step - self.shown < min(self.total / 20, 60 / seconds):
            return
        self.shown = step
        if self.cfg.progress:
            # the ETA does not count the time of loading before the first step
            seconds_left = (now - self.began) / (step - self.first + 1) * (self.total - step)
            # without accuracy, which needs more than one step
            cells = " ".join(format_cells(row | {"accuracy": None}))
            eta = timedelta(seconds=round(seconds_left))
            say(f"step {step}/{self.total}: {cells} ETA {eta}")

    def validation(self, step: int, row: dict, samples: list[dict]) -> None:
        """Write a row of val.csv, and eval/step-N.json with the row and the samples."""
        if not self.main:
            return
        self._write("val.csv", step, row, "val/")
        if self.cfg.progress:
            say(f"validation at step {step}: {', '.join(format_cells(row)) or 'samples only'}")
        content = {"step": step, "metrics": row, "samples": samples}
        write_json(self.out / "eval" / f"step-{step}.json", content)

    def health(self, step: int, plan: Plan, n_held_out: int) -> None:
        """At a tenth, at half and at the end of a run: say the first sign that it is sick. A run of several
        iterations is not checked, because the log-ratios restart at 0 in each."""
        is_whole = plan.begin == 0 and plan.end == plan.total
        if not self.main or not is_whole or not health.signs_are_due(step, plan.total):
            return
        rows = health.read_rows(self.out / "metrics.csv")
        validations = health.read_rows(self.out / "val.csv")
        sign = health.find_sign(rows, validations, self.cfg.optim.clip, n_held_out, plan.total)
        if sign:
            say(f"health at step {step}: {sign}: see docs/health.md")

    def _write(self, file: str, step: int, row: dict, prefix: str = "") -> None:
        """Add a row to a csv file, and hand its numbers to the tracker, with a prefix to their names."""
        add_row(self.out / file, {"step": step} | row)
        if self.track:
            numbers = {prefix + name: value for name, value in row.items() if value is not None}
            self.track(step, numbers)


def format_cells(row: dict) -> list[str]:
    """The values of `row` that the console shows, as texts. A missing column or None has no text."""
    return [text.format(row[name]) for name, text in CELLS.items() if row.get(name) is not None]
