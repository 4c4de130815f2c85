"""What a run writes between two checkpoints: csv files, eval/*.json, a tracker.

metrics.csv (training) and val.csv (validation) survive a kill and a resume: a checkpoint claims
the rows written so far (Csv.sync), and a resume continues after them (read_claimed_rows).
"""

import contextlib
import csv
import errno
import hashlib
import os
import re
from dataclasses import asdict
from pathlib import Path

from runs.console import VALIDATION_CELLS, Progress, fit_80_columns, format_cells, say
from runs.errors import BadInput, disk_error, parse_file, printable, rank, read_regular
from runs.files import open_no_link, write_atomically, write_json
from runs.metrics import join_columns
from runs.optimizer import Plan
from runs.settings import RunSettings

TABLES = ("metrics.csv", "val.csv")  # the files whose rows a checkpoint claims


# ---- csv files ----------------------------------------------------------------------------------


class Csv:
    """A csv file to which rows are added; each row is in the file when row() returns.

    claimed_rows: the header and rows that a resumed run continues after (see read_claimed_rows);
    empty for a new file. An older file at `path` is replaced.
    """

    def __init__(self, path: Path, claimed_rows: bytes = b""):
        self.path = path
        self.names: list[str] | None = None  # the columns; None until the first row
        if claimed_rows:
            header = claimed_rows.decode().split("\n")[0]
            self.names = next(csv.reader([header]))
        write_atomically(path, claimed_rows)  # a new file, also where a link stood
        with disk_error(path):
            self.file = open(path, "a", encoding="utf-8", newline="", opener=open_no_link)

    @contextlib.contextmanager
    def _writing(self):
        """Raises Failed when a write fails, and when the open file no longer stands at `path`:
        somebody moved or deleted the run folder, and rows would be lost without a word."""
        with disk_error(self.path):
            if not os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.path)):
                raise FileNotFoundError(errno.ENOENT, "another file is there now")
            yield

    def row(self, values: dict) -> None:
        """Add a row. The names in the first row of the file are its columns: a later name that is
        not among them is dropped; a missing one, or None, is an empty cell. Raises Failed."""
        with self._writing():
            is_first = self.names is None
            if is_first:
                self.names = list(values)
            writer = csv.DictWriter(
                self.file, self.names, restval="", extrasaction="ignore", lineterminator="\n"
            )
            if is_first:
                writer.writeheader()
            writer.writerow(values)
            self.file.flush()

    def sync(self) -> list:
        """Wait until the file is on the disk, and return what a checkpoint claims of it:
        [number of lines with the header, SHA-256 of the lines]. Raises Failed."""
        with self._writing():
            os.fsync(self.file.fileno())
            content = self.path.read_bytes()
        return [content.count(b"\n"), hashlib.sha256(content).hexdigest()]


def read_claimed_rows(path: Path, claim: list | None, checkpoint: Path) -> bytes:
    """The header and the rows of a csv file that a checkpoint claims. Later rows are left out: the
    resumed run writes them again.

    claim: what Csv.sync returned when `checkpoint` was saved. With None, or a claim of 0 lines, the
    result is empty. Raises BadInput when the file does not begin with the claimed lines.
    """
    if claim is None or claim[0] == 0:
        return b""
    n_lines, claimed_hash = claim
    try:
        content = read_regular(path)
    except OSError:  # a file that cannot be read has none of the claimed rows
        content = b""
    claimed_rows = b"".join(content.splitlines(keepends=True)[:n_lines])
    if hashlib.sha256(claimed_rows).hexdigest() == claimed_hash:
        return claimed_rows
    steps = re.findall(rb"^(\d+),.*\n", content, re.M)
    listed = printable(", ".join(step.decode() for step in steps), 200) or "none"
    raise BadInput(
        f"resume: {path}: not the {n_lines - 1} rows that {checkpoint.name} was saved with (steps in "
        f"the file: {listed}); put the file back, or continue in a new folder: "
        f"--resume {checkpoint} --out_dir <a new folder>"
    )


# ---- trackers -----------------------------------------------------------------------------------


class Tracker:
    """logger csv: nothing besides the files that are always written."""

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Log the numbers of a step by their names."""

    def samples(self, rows: list[dict], step: int) -> None:
        """Log answers of the policy: [{"prompt": ..., "completion": ...}, ...]."""

    def close(self) -> None:
        """Write what is not written yet."""


class TensorBoard(Tracker):
    """logger tensorboard: event files in RUN/tensorboard."""

    def __init__(self, out: Path):
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(out / "tensorboard"), flush_secs=5)

    def scalars(self, values, step):
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def samples(self, rows, step):
        text = "\n\n".join(f"{row['prompt']} **{row['completion']}**" for row in rows)
        self.writer.add_text("val/samples", text, step)

    def close(self):
        # Not flush(): it does not wait for the writer's own queue, and the last values would be lost.
        self.writer.close()


class Wandb(Tracker):
    """logger wandb. A resumed run continues the same wandb run, whose id is in RUN/wandb_id.

    There is no close(): wandb ends its run when Python exits, and marks it as crashed after an
    exception. Raises BadInput when wandb cannot start, as without a key or a network.
    """

    def __init__(self, out: Path, cfg: RunSettings, resumed: bool):
        import wandb

        self.wandb = wandb
        id_file = out / "wandb_id"
        run_id = None
        if resumed and id_file.exists():
            run_id = parse_file(None, id_file)
        try:
            self.run = wandb.init(
                project=cfg.project,
                dir=out,
                config=asdict(cfg),
                name=out.name,
                id=run_id,
                resume="allow",
            )
        except Exception as e:  # wandb raises different classes for a missing key, no network, ...
            reason = " ".join(str(e).split())
            raise BadInput(
                f"logger: wandb: {reason}; WANDB_MODE=offline needs neither a key nor a network"
            ) from None
        write_atomically(id_file, self.run.id)

    def scalars(self, values, step):
        self.run.log(values, step=step)

    def samples(self, rows, step):
        table = self.wandb.Table(["prompt", "completion"], [list(row.values()) for row in rows])
        self.run.log({"val/samples": table}, step=step)


def make_tracker(cfg: RunSettings, out: Path, resumed: bool) -> Tracker:
    """The tracker that cfg.logger names, for the run folder `out`."""
    if cfg.logger == "wandb":
        return Wandb(out, cfg, resumed)
    if cfg.logger == "tensorboard":
        return TensorBoard(out)
    return Tracker()


# ---- all of them --------------------------------------------------------------------------------


class Logger:
    """All that a run writes between two checkpoints. On ranks other than 0 every method does nothing.

    claimed_rows: in a resumed run, the claimed rows of each file of TABLES; None in a new run.
    """

    def __init__(self, cfg: RunSettings, claimed_rows: list[bytes] | None = None):
        self.main = rank() == 0
        self.cfg = cfg
        self.out = Path(cfg.out_dir)
        self.progress: Progress | None = None  # begin() makes it
        if self.main:
            metrics_rows, val_rows = claimed_rows or (b"", b"")
            self.metrics = Csv(self.out / "metrics.csv", metrics_rows)
            self.val = Csv(self.out / "val.csv", val_rows)
            self.tracker = make_tracker(cfg, self.out, resumed=claimed_rows is not None)

    def begin(self, plan: Plan, n: int, batch_size: int, start: int) -> None:
        """Say how long the run is, and start the progress display. Later calls (of the later
        iterations of SPIN or online.py) do nothing.

        n: the number of training examples. start: the step that a resumed run continues after.
        """
        if not self.main or self.progress is not None:
            return
        left_out = n - plan.per_epoch * batch_size
        say(f"{plan.total:,} steps of {batch_size:,} examples")
        say(f"{plan.per_epoch:,} steps per epoch, which leaves out {left_out:,} of {n:,} examples")
        self.progress = Progress(plan.total, start, self.cfg.progress)

    def step(self, step: int, row: dict | None, seconds: float) -> None:
        """After an optimizer step, which took so many seconds. row: its row of metrics.csv, or None where no row is
        due."""
        if not self.main:
            return
        if row:
            self.metrics.row(join_columns({"step": step}, row))
            numbers = {name: value for name, value in row.items() if value is not None}
            self.tracker.scalars(numbers, step)
        self.progress.step(step, row, seconds)

    def validation(self, step: int, row: dict, samples: list[dict]) -> None:
        """Write a row of val.csv, and eval/step-N.json with the row and the samples."""
        if not self.main:
            return
        self.val.row(join_columns({"step": step}, row))
        cells = format_cells(row, VALIDATION_CELLS)
        if "accuracy" in row and row["accuracy"] is None:
            cells.append("no accuracy (r is 0)" if step == 0 else "no accuracy")
        shown = ", ".join(cells) or "samples only"
        self.progress.say(fit_80_columns(f"validation at step {step}", shown))
        numbers = {f"val/{name}": value for name, value in row.items() if value is not None}
        self.tracker.scalars(numbers, step)
        if samples:
            self.tracker.samples(samples, step)
        content = {"step": step, "metrics": row, "samples": samples}
        write_json(self.out / "eval" / f"step-{step}.json", content)

    def sync(self) -> dict[str, list]:
        """Wait until all rows are on the disk. Returns what a checkpoint claims: file name -> what
        Csv.sync returns; nothing on ranks other than 0. Raises Failed."""
        if not self.main:
            return {}
        return {"metrics.csv": self.metrics.sync(), "val.csv": self.val.sync()}

    def close(self) -> None:
        """Close the files, the tracker and the progress bar."""
        if not self.main:
            return
        for table in (self.metrics, self.val):
            # Closing flushes. An error there is a row that did not fit on the disk, and the error
            # of that row has been raised already.
            with contextlib.suppress(OSError):
                table.file.close()
        self.tracker.close()
        if self.progress is not None:
            self.progress.close()
