"""A run on disk: its folder and lock, what a resume compares, and checkpoints.

| in the run's folder | holds |
| --- | --- |
| checkpoints/step-N/*.safetensors | trained weights, a moving reference, optimizer, random states |
| checkpoints/step-N/state.json | RunState |
| settings.yaml, also in step-N/ | the settings; on top the commit and versions of the last start |
| metrics.csv, val.csv | rows; a resume removes those after its checkpoint's step |
| iterations/ | SPIN and online KTO: answers and ratings (rollout.py) |
| wandb_id | under which id the run goes on at wandb |
| .lock | which process writes into the folder |

A checkpoint is written beside its final name and then renamed: it is whole or not there. In it every rank
writes and reads its own part, by torch.distributed.checkpoint, and nothing is gathered. Its tensors are
named `kind|parameter` (weights, reference), `kind|parameter|moment` (optimizer; number: of it what is no
tensor) and `random|rank`.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import subprocess
import warnings
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import lightning
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from runs.console import BadInput, Failed, say, user_error
from runs.devices import on_rank_0
from runs.settings import ROOT, RunSettings, changed_settings, dump_yaml, flatten, refuse_unless


@dataclass
class RunState:
    """What a checkpoint holds besides tensors: what the run is, and how far it has come."""

    chat_template: str = ""
    """The text of data.chat_template, if one was given."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Of model, reference, tokenizer and data, and the program's name: a resume must find the same."""
    step: int = 0
    """Optimizer steps done."""
    unvalidated: bool = False
    """Whether the validation of this step has begun but not ended: a resume does it first."""
    iteration: int = 0
    """Of SPIN and online KTO, from 1."""
    reference_has_moved: bool = False
    """Whether the reference is no longer the model that the run began with (Run.new_reference). With LoRA
    the adapters of earlier steps are then merged into the base."""
    started_from: str = ""
    """Hash of the policy's weights when the iteration began."""
    best_step: int | None = None
    """By keep_best."""
    best_value: float | None = None
    """Of its column; where the lowest is best, with the other sign."""
    objective: dict = field(default_factory=dict)
    """Objective.state_dict()."""

    def remember_if_best(self, row: dict, column: str | None) -> bool:
        """Remember a row of val.csv that is the best so far by this column. -> whether it is. Never
        at step 0, which has no checkpoint, nor where the cell is empty or not finite. Raises BadInput if
        val.csv has no such column."""
        if column is None:
            return False
        refuse_unless(
            column in row, f"keep_best: {column}: not in val.csv, which has {', '.join(row)}"
        )
        value = row[column]
        if value is None or not math.isfinite(value) or self.step == 0:
            return False
        if column.endswith("loss") or column.split("/")[0] == "kl":
            value = -value  # of these the lowest is best
        if self.best_value is not None and value <= self.best_value:
            return False
        self.best_step, self.best_value = self.step, value
        return True


# ---- files that are whole or not there -----------------------------------------------------------


@contextlib.contextmanager
def disk_error(path: Path):
    """Raise Failed with the path and the reason if the disk is full or gone."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as e:
        error = e
        if isinstance(e, CheckpointException):  # of each rank that failed
            error, _ = next(iter(e.failures.values()))
        raise Failed(f"{path}: not saved: {getattr(error, 'strerror', None) or error}") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is whole or not there, also after a kill. Raises Failed."""
    new = path.with_name(f".{path.name}.tmp")
    with disk_error(path):
        path.parent.mkdir(exist_ok=True)
        new.write_text(text, encoding="utf-8")
        new.replace(path)


def publish_folder(fabric, write, out: Path, on_every_rank: bool = False) -> None:
    """Make the folder `out` so that it is whole or not there: write(folder) makes the files in a folder
    beside it, which is then renamed. Rank 0 writes, or every rank. A collective. Raises Failed."""
    new = out.with_name(f".{out.name}.tmp")

    def begin():
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)

    def end():
        for path in new.iterdir():
            with open(path, "rb") as f:
                os.fsync(f.fileno())
        shutil.rmtree(out, ignore_errors=True)
        new.rename(out)

    with disk_error(out):
        on_rank_0(fabric, begin)
        if on_every_rank or fabric.global_rank == 0:
            write(new)
        fabric.barrier()
        on_rank_0(fabric, end)


# ---- the run's folder ----------------------------------------------------------------------------


def checkpoints_by_step(out: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, in order."""
    paths = sorted((out / "checkpoints").glob("step-*"))
    return {int(path.name.removeprefix("step-")): path for path in paths}


def checkpoint_folder(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


def prune_checkpoints(out: Path, keep_last: int, best_step: int | None) -> None:
    """Remove old checkpoints, but neither the newest `keep_last` nor the best one."""
    for step, path in list(checkpoints_by_step(out).items())[:-keep_last]:
        if step != best_step:
            # renamed first: a checkpoint that is half removed must not look like one
            removed = path.rename(path.with_name(f".{path.name}.tmp"))
            shutil.rmtree(removed, ignore_errors=True)


def find_checkpoint(cfg: RunSettings) -> Path | None:
    """The checkpoint that a run goes on from. Raises BadInput where two runs would be mixed."""
    out = Path(cfg.out_dir or "").resolve()
    own = checkpoints_by_step(out) if cfg.out_dir else {}
    if not cfg.resume:
        refuse_unless(
            not cfg.out_dir or not (own or (out / "metrics.csv").exists()),
            f"out_dir: {out} holds a run already: --resume auto goes on with it, another folder "
            "starts anew",
        )
        return None
    if cfg.resume == "auto":
        return own[max(own)] if own else None
    checkpoint = Path(cfg.resume).resolve()
    exists = (checkpoint / "state.json").exists()
    refuse_unless(exists, f"resume: {cfg.resume}: no such checkpoint folder")
    refuse_unless(
        not own or checkpoint in own.values(),
        f"out_dir: {out} holds another run: a run that branches off {checkpoint} needs a folder of "
        "its own",
    )
    return checkpoint


class RunFolder:
    """The folder of a run, locked for this process: the first rank decides for all ranks.

    path: the folder. checkpoint: the folder of the checkpoint that this start goes on from, or None;
    state: its RunState; is_own: whether that checkpoint is of the run in `path` (else this run
    branches off another one). Raises BadInput if two runs would be mixed.
    """

    def __init__(self, fabric, cfg: RunSettings, program: Path):
        self.lock, self.program = None, program
        self.path, self.checkpoint = on_rank_0(fabric, lambda: self._take(cfg))
        self.state = read_state(self.checkpoint) if self.checkpoint else None
        self.is_own = self.checkpoint in checkpoints_by_step(self.path).values()

    def _take(self, cfg: RunSettings) -> tuple[Path, Path | None]:
        """Create and lock the folder, find the checkpoint. -> both"""
        now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"
        out = Path(cfg.out_dir or f"out/{self.program.stem}-{now}").resolve()
        with user_error("out_dir", out):
            out.mkdir(parents=True, exist_ok=True)
            self.lock = os.open(out / ".lock", os.O_RDWR | os.O_CREAT)
            try:  # until the file is closed or this process ends, in whatever way
                fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInput(f"out_dir: {out}: in use by another process") from None
        return out, find_checkpoint(cfg)

    def begin(self, cfg: RunSettings, hashes: dict[str, str]) -> None:
        """Compare with the checkpoint, and only then write into the folder: put newer checkpoints aside,
        and write the settings. Raises BadInput."""
        if self.state:
            self._compare(cfg, hashes)
        elif cfg.resume:
            say(f"nothing to resume in {self.path}: starting")
        for old in (self.path / "checkpoints").glob(".*.tmp"):  # of a killed process
            shutil.rmtree(old, ignore_errors=True)
        for step, path in checkpoints_by_step(self.path).items():
            if self.is_own and step > self.state.step:  # of a continuation that is left behind
                aside = path.with_name(f"abandoned-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
        head = f"# {self.program}, {versions()}\n"
        write_whole(self.path / "settings.yaml", head + dump_yaml(cfg))
        say(f"run folder: {self.path}")

    def _compare(self, cfg: RunSettings, hashes: dict[str, str]) -> None:
        """Raise BadInput if this program with these settings, models and records is not the run of the
        checkpoint."""
        saved, new = flatten(read_settings(self.checkpoint)), flatten(cfg)
        fixed, cut = changed_settings(saved, new)
        other = [name for name in hashes if hashes[name] != self.state.hashes.get(name)]
        faults = [f"{name}: not what this run began with" for name in other]
        faults += [f"{name}: the run has {saved.get(name)}, you gave {new[name]}" for name in fixed]
        file = self.checkpoint.parent.parent / "settings.yaml"
        advice = f"; a resume uses the run's own settings (--config {file})"
        refuse_unless(not faults, "\n".join(faults) + advice)
        rounding = f"; the same run up to rounding, since {', '.join(cut)} changed" if cut else ""
        say(f"resumed from {self.checkpoint}{rounding}")

    def close(self) -> None:
        """Give the lock back."""
        if self.lock is not None:
            os.close(self.lock)


def versions() -> str:
    """The project's commit, if this is a git clone, and the versions of what computes."""
    git, commit = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"], ""
    with contextlib.suppress(OSError):  # no git here
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return f"commit {commit or 'unknown'}, torch {torch.__version__}, lightning {lightning.__version__}"


# ---- save ----------------------------------------------------------------------------------------


def save_checkpoint(
    fabric, folder: Path, policy, optimizer, reference: dict, state: RunState, cfg: RunSettings
) -> None:
    """Write a checkpoint. reference: the weights of a moving reference by name, else empty. A collective.
    Raises Failed."""
    params = policy.unique_parameters()
    tensors = {f"weights|{n}": p.detach() for n, p in params.items() if p.requires_grad}
    tensors |= {f"reference|{n}": p.detach() for n, p in reference.items()}
    name_of = {p: name for name, p in params.items()}
    for p, moments in optimizer.optimizer.state.items():
        for moment, x in moments.items():
            kind = "optimizer"
            if not isinstance(x, torch.Tensor):
                kind, x = "number", torch.from_numpy(np.array(x))
            if moment in ("qmap1", "qmap2"):
                # 8-bit AdamW has one table for all weights, and safetensors refuses shared memory
                x = x.clone()
            tensors[f"{kind}|{name_of[p]}|{moment}"] = x
    tensors[f"random|{fabric.global_rank}"] = _generator(fabric).get_state()
    # a file for each kind and moment: a rank holds only one file's bytes at once
    names = [*tensors, *(f"random|{r}" for r in range(fabric.world_size))]  # of all ranks
    part_of = {name: re.sub(r"\|[^|]*", "", name, count=1) for name in names}
    parts = sorted(set(part_of.values()))
    file_of = {name: parts.index(part) + 1 for name, part in part_of.items()}

    def write(new: Path):
        writer = HuggingFaceStorageWriter(str(new), file_of, save_distributed=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that a single process saves alone
            dcp.save(tensors, storage_writer=writer)
        if fabric.global_rank == 0:
            (new / "state.json").write_text(json.dumps(asdict(state)))
            (new / "settings.yaml").write_text(dump_yaml(cfg))
            if state.chat_template:  # for hub.find_model
                (new / "chat_template.jinja").write_text(state.chat_template)

    publish_folder(fabric, write, folder, on_every_rank=True)


def _generator(fabric) -> torch.Generator:
    """The source of this rank's random numbers."""
    if fabric.device.type == "cuda":
        return torch.cuda.default_generators[fabric.device.index]
    return torch.default_generator


# ---- read ----------------------------------------------------------------------------------------


def read_state(folder: Path) -> RunState:
    return RunState(**json.loads((folder / "state.json").read_text()))


def read_settings(folder: Path) -> dict:
    """settings.yaml of a run or a checkpoint, as groups of settings."""
    return yaml.safe_load((folder / "settings.yaml").read_text())


def read_tensors(folder: Path, place) -> dict[str, torch.Tensor]:
    """Read those tensors of a checkpoint for which place(kind, name, size, dtype) gives one to read into:
    a rank reads the shards that it holds, however many ranks wrote them. -> them by `kind|name`"""
    reader = HuggingFaceStorageReader(str(folder))
    tensors = {}
    for key, found in reader.read_metadata().state_dict_metadata.items():
        kind, _, name = key.partition("|")
        x = place(kind, name, found.size, found.properties.dtype)
        if x is not None:
            tensors[key] = x
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that no rank waits for another, as we want
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def load_checkpoint(fabric, folder: Path, policy, optimizer, reference: dict) -> None:
    """Put a checkpoint's weights, optimizer state and random state in place, and those of a moving
    reference into `reference`, its weights by name."""
    params, moments = policy.unique_parameters(), optimizer.optimizer.state

    def place(kind, name, size, dtype):
        if kind == "random":  # at a larger number of ranks the others keep their own
            return torch.empty(size, dtype=dtype) if name == str(fabric.global_rank) else None
        owner, _, moment = name.partition("|")
        known = reference if kind == "reference" else params
        refuse_unless(owner in known, f"{folder}: {owner}: not of this model")
        p = known[owner]
        if not moment:
            return p.detach()  # it shares the weight's memory, so the weight itself is read into
        if p.shape == size:  # sharded as the weight is
            x = torch.zeros_like(p, dtype=dtype)
        else:
            x = torch.zeros(size, dtype=dtype, device=p.device)
        moments[p][moment] = x
        return x

    read = read_tensors(folder, place)
    missing = [n for n, p in params.items() if p.requires_grad and f"weights|{n}" not in read]
    refuse_unless(not missing, f"{folder}: holds no {', '.join(missing[:1])}: not of this model")
    for key, x in read.items():
        kind, name, *moment = key.split("|")
        if kind == "number":
            moments[params[name]][moment[0]] = x.item()
        elif kind == "random":
            _generator(fabric).set_state(x)
