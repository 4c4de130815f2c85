"""A run's folder: who holds it, which checkpoint a resume starts from, and what it refuses."""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path

import yaml

from runs.checkpoint import read_state, verify_checkpoint
from runs.cli import dump_yaml
from runs.console import say
from runs.devices import on_rank_0
from runs.errors import BadInput, disk_error, user_error
from runs.files import file_hash, write_atomically
from runs.settings import RunSettings, changed_settings, flatten


def checkpoints_by_step(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, in order."""
    named = ((re.fullmatch(r"step-(\d+)", p.name), p) for p in folder.glob("step-*"))
    return dict(sorted((int(m[1]), p) for m, p in named if m))


def newest_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint of a run that verifies."""
    for path in reversed(checkpoints_by_step(out / "checkpoints").values()):
        if (fault := verify_checkpoint(path)) is None:
            return path
        say(f"{path}: not used: {fault}")
    return None


def belongs_to_run(found: Path, out: Path) -> bool:
    """Whether a checkpoint is of the run in this folder."""
    return found.absolute().parent.parent.resolve() == out.resolve()  # checkpoints/ may be a link


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def prune_checkpoints(folder: Path, keep_last: int, best: int | None) -> None:
    """Remove old checkpoints, but neither the newest keep_last nor the best."""
    for step, path in list(checkpoints_by_step(folder).items())[: -keep_last or None]:
        if step != best:
            gone = path.with_name(f".{path.name}.tmp")  # half of it is litter, not a checkpoint
            with contextlib.suppress(OSError):
                path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def take_lock(out: Path) -> int:
    """The run's folder is this process's as long as this file stays open: the operating system's
    lock ends with the process, however that ends. Raises BadInput."""
    fd = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.read(fd, 200).decode() or "another process"
        os.close(fd)
        raise BadInput(f"out_dir: {out}: in use by {holder}") from None
    except OSError as e:
        say(f"{out}: no locks on this file system ({e.strerror}): a second run is not kept out")
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(fd, 0)
    os.write(fd, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode())
    return fd


class RunFolder:
    """A run's folder, decided on rank 0 for all ranks; nothing in it is changed before `begin`.
    Refuses to mix two runs."""

    def __init__(self, fabric, cfg: RunSettings, program: Path):
        self.lock = None
        out, self.found, self.said = on_rank_0(fabric, lambda: self._open(cfg, program))
        self.cfg = replace(cfg, out_dir=str(out))  # settings.yaml finds its own run
        self.out, self.old = out, read_state(self.found)[0] if self.found else None
        # else it is a branch of the run there
        self.own = self.found and belongs_to_run(self.found, out)

    def _open(self, cfg: RunSettings, program: Path) -> tuple[Path, Path | None, list[str]]:
        found = None
        if cfg.resume not in (None, "auto"):
            found = Path(cfg.resume)
            here = (found / "manifest.json").is_file()
            fault = verify_checkpoint(found) if here else "no such checkpoint folder"
            if fault:
                raise BadInput(f"resume: {cfg.resume}: {fault}")
        with user_error("out_dir", cfg.out_dir):
            out = Path(cfg.out_dir) if cfg.out_dir else _fresh_folder(program)
            out.mkdir(parents=True, exist_ok=True)
            self.lock = take_lock(out)
            for name in ("checkpoints", "eval"):
                (out / name).mkdir(exist_ok=True)
        if cfg.resume == "auto":
            found = newest_checkpoint(out)
        saved, rows = checkpoints_by_step(out / "checkpoints"), out / "metrics.csv"
        holds = saved or rows.exists() and rows.stat().st_size
        if holds and not cfg.resume or saved and found and not belongs_to_run(found, out):
            advice = "--resume auto goes on with it, another folder starts anew"
            raise BadInput(f"out_dir: {out} holds a run already: {advice}")
        if found:
            return out, found, _refuse_another_run(found, cfg, program)
        if saved:
            advice = "move it away, or give another --out_dir"
            raise BadInput(f"resume: {out}: none of its checkpoints is whole: {advice}")
        if cfg.resume:
            return out, None, [f"nothing to resume in {out}: starting"]
        return out, None, []

    def begin(self) -> None:
        """On rank 0. From here on the run is this one: what it goes on from is said, its settings
        are written, an earlier life's litter and newer checkpoints of a branch that it leaves are
        put away."""
        with disk_error(self.out):
            for name in ("", "checkpoints", "eval", "iterations"):
                _clear_litter(self.out / name)
            if self.own:
                _put_newer_aside(self.found.parent, self.old.step)
        write_atomically(self.out / "settings.yaml", dump_yaml(self.cfg))
        for line in (*self.said, f"run folder: {self.out}"):
            say(line)

    def close(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    __del__ = close


def _fresh_folder(program: Path) -> Path:
    stem, n = Path("out") / f"{program.stem}-{time.strftime('%Y%m%d-%H%M%S')}", 1
    while True:
        out, n = stem if n == 1 else stem.with_name(f"{stem.name}-{n}"), n + 1
        with contextlib.suppress(FileExistsError):
            out.mkdir(parents=True)
            return out


def _refuse_another_run(found: Path, cfg: RunSettings, program: Path) -> list[str]:
    """Raise BadInput where this is not the run that `found` belongs to. -> what to say"""
    (state, _), said = read_state(found), []
    if Path(state.program).name != program.name:
        raise BadInput(f"resume: {found}: a run of {state.program}, not of {program}")
    if state.source != file_hash(program):
        was = f"{program} has changed since {found} was written"
        said = [f"{was}: it goes on with what it is now"]
    old = flatten(yaml.safe_load((found / "settings.yaml").read_text()))
    fixed, moved = changed_settings(old, flatten(cfg))
    if fixed:
        raise BadInput("\n".join(f"{name}: a resume cannot change it" for name in fixed))
    why = f"; equal to rounding only, since {', '.join(moved)} changed" if moved else ""
    return [*said, f"resumed from {found}{why}"]


def _clear_litter(folder: Path) -> None:
    """What an earlier life was writing or removing when it was killed."""
    for old in folder.glob(".*.old"):  # it was about to be replaced
        whole = folder / old.name[1:-4]
        old.rename(whole) if not whole.exists() else shutil.rmtree(old, ignore_errors=True)
    for tmp in folder.glob("*.tmp"):
        shutil.rmtree(tmp, ignore_errors=True) if tmp.is_dir() else tmp.unlink()


def _put_newer_aside(folder: Path, found: int) -> None:
    """Newer checkpoints are of a branch that this run now leaves."""
    for step, newer in checkpoints_by_step(folder).items():
        if step > found:
            aside = newer.with_name(f"abandoned-{newer.name}")
            shutil.rmtree(aside, ignore_errors=True)
            newer.rename(aside)


def refuse_another_identity(old: dict[str, str], new: dict[str, str]) -> None:
    """Raise BadInput where a resume meets another model, tokenizer or data than the run began with.
    What only `old` has an algorithm adds, and compares, later."""
    names = sorted(name for name, value in new.items() if old.get(name) != value)
    if names:
        raise BadInput("\n".join(f"resume: {n}: not what this run began with" for n in names))
