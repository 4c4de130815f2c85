"""metrics.csv and val.csv, which survive a kill and a resume; trackers; the progress line; tables.

Rank 0 writes; on the others every method does nothing.
"""

import contextlib
import csv
import errno
import hashlib
import math
import os
import re
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from tqdm import tqdm

from runs.console import format_table, say
from runs.errors import BadInput, disk_error, printable, rank
from runs.files import write_atomically, write_json
from runs.optimizer import Plan
from runs.settings import RunSettings

TABLES = ("metrics.csv", "val.csv")
# what the console shows of a row, and in which form
STEP = {"loss": "loss {:.4f}", "kl": "kl {:.4f}", "rewards/margins": "margins {:.4f}"}
STEP |= {"tokens/s": "tokens/s {:,.0f}"}
VALIDATION = {"loss": "loss {:.4f}", "kl": "kl {:.4f}", "accuracy": "accuracy {:.4f}"}
VALIDATION |= {"rewards/margins": "margins {:.4f}", "checker_accuracy": "checker {:.4f}"}


class Csv:
    """Rows by step, flushed a line at a time. `kept`: what a resume goes on from, see `claimed`."""

    def __init__(self, path: Path, kept: bytes = b""):
        self.path, self.names = path, None
        if kept:
            self.names = next(csv.reader(kept.decode().split("\n")[:1]))
            write_atomically(path, kept)
        with disk_error(path):
            self.file = open(path, "a" if kept else "w", encoding="utf-8", newline="")

    @contextlib.contextmanager
    def _writing(self):
        """Fails where the run's folder has been moved away or deleted, too."""
        with disk_error(self.path):
            if not os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.path)):
                raise FileNotFoundError(errno.ENOENT, "another file stands there now")
            yield

    def row(self, values: dict) -> None:
        """The first one's names are the columns. None, or no value, is an empty cell."""
        with self._writing():
            names = self.names or list(values)
            table = csv.DictWriter(self.file, names, "", "ignore", lineterminator="\n")
            if self.names is None:
                table.writeheader()
            self.names = names
            table.writerow(values)
            self.file.flush()

    def sync(self) -> list:
        """To the disk. -> [lines, their hash], which a checkpoint claims."""
        with self._writing():
            os.fsync(self.file.fileno())
            lines = self.path.read_bytes()
        return [lines.count(b"\n"), hashlib.sha256(lines).hexdigest()]


def read_claimed_rows(path: Path, claim: list | None, found: Path) -> bytes:
    """The lines of a file that a checkpoint claims: those after it are written again. Lines that
    stand twice or are no rows are left out. Raises BadInput where a claimed one is missing."""
    n, expected = claim or (0, "")
    try:
        lines = path.read_bytes().splitlines(keepends=True) if n else []
    except OSError:
        lines = []
    whole = (x for x in lines if x.endswith(b"\n") and b"\0" not in x)
    rows = dict.fromkeys(x for x in whole if x.count(b",") == lines[0].count(b","))
    for some in (lines, list(rows)):
        kept = b"".join(some[:n])
        if not n or hashlib.sha256(kept).hexdigest() == expected:
            if some is not lines:
                say(f"{path}: lines that stand twice or are no rows are left out")
            return kept
    here = re.findall(r"^(\d+),", b"".join(rows).decode(errors="replace"), re.M)
    here = printable(", ".join(here), 200) or "none"
    saved = f"not the {n - 1} rows that {found.name} was saved with (here are steps {here})"
    advice = f"put the file back, or go on elsewhere: --resume {found} --out_dir <a new folder>"
    raise BadInput(f"resume: {path}: {saved}; {advice}")


# ---- trackers -----------------------------------------------------------------------------------


class Tracker:
    """csv: nothing beside the files that are always written."""

    def scalars(self, *_) -> None: ...

    samples = close = scalars


class TensorBoard(Tracker):
    def __init__(self, out: Path):
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(out / "tensorboard"), flush_secs=5)

    def scalars(self, values, step):
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def samples(self, rows, step):
        text = "\n\n".join(f"{r['prompt']} **{r['completion']}**" for r in rows)
        self.writer.add_text("val/samples", text, step)

    def close(self):
        self.writer.close()  # flush does not wait for its own queue: the last lines would be lost


class Wandb(Tracker):
    """A resumed run goes on with its own id. wandb's exit hook tells a crash from an end."""

    def __init__(self, out: Path, cfg: RunSettings, resumed: bool):
        import wandb

        self.wandb, file = wandb, out / "wandb_id"
        run_id = file.read_text() if resumed and file.exists() else None
        kw = dict(project=cfg.project, dir=out, config=asdict(cfg), name=out.name)
        try:
            self.run = wandb.init(**kw, id=run_id, resume="allow")
        except Exception as e:  # no key, no network: wandb has its own errors for each
            why = " ".join(str(e).split())
            advice = "WANDB_MODE=offline needs neither key nor network"
            raise BadInput(f"logger: wandb: {why}; {advice}") from None
        file.write_text(self.run.id)

    def scalars(self, values, step):
        self.run.log(values, step=step)

    def samples(self, rows, step):
        table = self.wandb.Table(["prompt", "completion"], [list(r.values()) for r in rows])
        self.run.log({"val/samples": table}, step=step)


def make_tracker(cfg: RunSettings, out: Path, resumed: bool) -> Tracker:
    if cfg.logger == "wandb":
        return Wandb(out, cfg, resumed)
    return TensorBoard(out) if cfg.logger == "tensorboard" else Tracker()


# ---- the console --------------------------------------------------------------------------------


def format_cells(row: dict, forms: dict[str, str]) -> list[str]:
    """The cells of a row that are not empty."""
    return [form.format(row[k]) for k, form in forms.items() if row.get(k) is not None]


class Progress:
    """A bar on a terminal; elsewhere about twenty lines a run."""

    def __init__(self, total: int, start: int, on: bool):
        self.total, self.start, self.on, self.bar = total, start, on, None
        self.every, self.began = max(1, round(total / 20)), time.monotonic()
        self.next = 0  # lines come each log_interval, so maybe later than at a multiple of `every`
        if on and sys.stderr.isatty():
            line = "{n}/{total} {desc}ETA {remaining} {bar}"  # the bar takes what width is left
            kw = dict(total=total, initial=start, dynamic_ncols=True, bar_format=line)
            self.bar = tqdm(**kw, leave=False)  # else it would be drawn below the last message

    def step(self, step: int, row: dict | None) -> None:
        row = row or {}
        # a bare 0.0000 would read like a bug
        clamped = {"kl": "kl 0 (clamped)"} if row.get("kl/clamped") else {}
        words = format_cells(row, STEP | clamped)
        if self.bar is not None:
            if words:
                self.bar.set_description_str(" ".join([*words, ""]), refresh=False)
            self.bar.update()
        elif self.on and words and (step >= self.next or step == self.total):
            self.next = step - step % self.every + self.every
            each = (time.monotonic() - self.began) / max(1, step - self.start)
            left = timedelta(seconds=round((self.total - step) * each))
            say("  ".join([f"step {step}/{self.total}", *words, f"ETA {left}"]))

    def say(self, line: str) -> None:
        if self.on:
            say(line)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Logger:
    """All that a run writes between steps, but for checkpoints."""

    def __init__(self, cfg: RunSettings, kept: list[bytes] | None = None):
        self.main, self.cfg, self.out = rank() == 0, cfg, Path(cfg.out_dir)
        self.progress = None
        if self.main:
            files = zip((self.out / name for name in TABLES), kept or (b"", b""))
            self.metrics, self.val = (Csv(path, lines) for path, lines in files)
            self.tracker = make_tracker(cfg, self.out, kept is not None)

    def begin(self, plan: Plan, n: int, batch_size: int, start: int) -> None:
        """Before the first step of the first iteration, which learns from n examples."""
        if not self.main or self.progress:
            return
        rest = n - plan.per_epoch * batch_size
        each = f"{plan.per_epoch:,} an epoch, which leaves out {rest:,} of {n:,}"
        say(f"{plan.total:,} steps of {batch_size}, {each}")
        self.progress = Progress(plan.total, start, self.cfg.progress and not self.cfg.debug)

    def step(self, step: int, row: dict | None) -> None:
        """After an optimizer step, with its row of metrics.csv or none."""
        if not self.main:
            return
        if row:
            self.metrics.row({"step": step, **row})
            self.tracker.scalars({k: v for k, v in row.items() if v is not None}, step)
        self.progress.step(step, row)

    def validation(self, step: int, row: dict, samples: list[dict]) -> None:
        """A row of val.csv, and eval/step-N.json with samples."""
        if not self.main:
            return
        self.val.row({"step": step, **row})
        words = format_cells(row, VALIDATION)
        if "accuracy" in row and row["accuracy"] is None:
            words += ["no accuracy (r is 0)" if step == 0 else "no accuracy"]
        line = f"validation at step {step}: {', '.join(words)}"
        self.progress.say(line if len(line) <= 80 else line.replace(": ", ":\n  ", 1))
        self.tracker.scalars({f"val/{k}": v for k, v in row.items() if v is not None}, step)
        if samples:
            self.tracker.samples(samples, step)
        content = {"step": step, "metrics": row, "samples": samples}
        write_json(self.out / "eval" / f"step-{step}.json", content)

    def examples(self, step: int, batch, columns: dict) -> None:
        """examples-N.csv: a row for each example of a step, largest loss first."""
        if not self.main:
            return
        decode, table = batch.tokenizer.decode, Csv(self.out / f"examples-{step}.csv")
        for i in columns["loss"].argsort(descending=True).tolist():
            e = batch.examples[i]
            row = {"where": e.where, "prompt": decode(e.prompt)}
            for k, y in enumerate(e.completions, 1):
                row |= {f"completion {k}": decode(y), f"tokens {k}": len(y)}
            row |= {"label": e.label, "weight": e.weight, **e.extra}
            table.row(row | {name: column[i].item() for name, column in columns.items()})
        table.file.close()
        self.progress.say(f"examples of step {step}, largest loss first: {table.path}")

    def sync(self) -> dict[str, list]:
        """To the disk, before a checkpoint claims these steps. -> what it claims"""
        files = (self.metrics, self.val) if self.main else ()
        return {file.path.name: file.sync() for file in files}

    def close(self) -> None:
        if self.main:
            for file in (self.metrics.file, self.val.file):
                with contextlib.suppress(OSError):  # a row that found no room is said already
                    file.close()
            self.tracker.close()
            if self.progress:
                self.progress.close()


# ---- tables -------------------------------------------------------------------------------------


def wilson_interval(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """A 95% confidence interval for k of n (Wilson 1927): honest near 0 and 1, where k/n +- 2
    sigma is not."""
    mid = (k + z * z / 2) / (n + z * z)
    width = z * math.sqrt(k * (n - k) / n + z * z / 4) / (n + z * z)
    return max(0.0, mid - width), min(1.0, mid + width)


def format_before_after(before: dict, after: dict, n: int = 5) -> str:
    """The checker's accuracy before and after with 95% intervals, and a few answers, first
    those that changed."""
    lines = ["", "held-out accuracy by the checker (95% interval)"]
    for name, v in (("before", before), ("after", after)):
        (low, high), share = wilson_interval(v["right"], v["of"]), v["right"] / v["of"]
        interval = f"({100 * low:.1f} to {100 * high:.1f})"
        counts = f"{v['right']} of {v['of']}"
        lines.append(f"  {name:<7} {100 * share:5.1f}%  {interval}  {counts}")
    gain = 100 * (after["right"] / after["of"] - before["right"] / before["of"])
    lines += [f"  gain    {gain:+5.1f} points", ""]
    pairs = zip(before["answers"], after["answers"])
    rows = [(a["prompt"], a["completion"], b["completion"]) for a, b in pairs]
    rows = sorted(rows, key=lambda row: row[1] == row[2])[:n]
    return "\n".join([*lines, format_table(("prompt", "before", "after"), rows)])
