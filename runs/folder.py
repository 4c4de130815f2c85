"""A run's folder: which process holds it, which checkpoint a resume starts from, what is refused."""

import contextlib
import fcntl
import os
import platform
import re
import socket
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runs.checkpoint import read_settings, read_state, verify_checkpoint
from runs.cli import dump_yaml
from runs.console import say
from runs.devices import on_rank_0
from runs.errors import BadInput, disk_error, printable, user_error
from runs.files import ROOT, file_hash, open_no_link, remove, write_atomically
from runs.settings import RunSettings, changed_settings, flatten

# ---- the folder checkpoints/ ---------------------------------------------------------------------


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def checkpoints_by_step(checkpoints: Path) -> dict[int, Path]:
    """The checkpoints in a folder by step, in order."""
    found = {}
    for path in checkpoints.glob("step-*"):
        if match := re.fullmatch(r"step-(\d+)", path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def newest_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint of a run that is whole. Says which ones are not."""
    for path in reversed(checkpoints_by_step(out / "checkpoints").values()):
        fault = verify_checkpoint(path)
        if fault is None:
            return path
        say(f"{path}: not used: {fault}")
    return None


def prune_checkpoints(checkpoints: Path, keep_last: int, best_step: int | None) -> None:
    """Remove old checkpoints, but neither the newest `keep_last` nor the best one."""
    for step, path in list(checkpoints_by_step(checkpoints).items())[:-keep_last]:
        if step != best_step:
            # renamed first: a checkpoint that is half removed must not look like one
            removed = path.with_name(f".{path.name}.tmp")
            with contextlib.suppress(OSError):
                path.rename(removed)
            remove(removed)


def belongs_to_run(checkpoint: Path, out: Path) -> bool:
    """Whether a checkpoint lies in the folder of this run. checkpoints/ may be a link."""
    return checkpoint.absolute().parent.parent.resolve() == out.resolve()


# ---- what is refused -----------------------------------------------------------------------------


def take_lock(out: Path) -> int:
    """Lock the run's folder for this process, until the returned file descriptor is closed or the
    process ends, in whatever way. Raises BadInput if another process holds it."""
    fd = open_no_link(out / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = printable(os.read(fd, 200).decode(errors="replace")) or "another process"
        os.close(fd)
        raise BadInput(f"out_dir: {out}: in use by {holder}") from None
    except OSError as e:
        say(f"{out}: no locks on this file system ({e.strerror}): a second run is not kept out")
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    if os.fstat(fd).st_nlink > 1:  # of a copy by links (cp -al): the file is another run's, too
        return fd
    os.ftruncate(fd, 0)
    os.write(fd, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode())
    return fd


def refuse_taken_folder(cfg: RunSettings) -> None:
    """Raise BadInput if out_dir holds another run, or another process writes into it. Called before
    any data is read; changes nothing but .lock. RunFolder looks again when it takes the folder."""
    if not cfg.out_dir:
        return
    with user_error("out_dir", cfg.out_dir):
        out = Path(cfg.out_dir)
        is_alone = not {"RANK", "LOCAL_RANK", "SLURM_PROCID"}.intersection(os.environ)
        if is_alone and (out / ".lock").exists():
            os.close(take_lock(out))
        # on every rank: if rank 0 alone ended here, the others would wait for it
        if not cfg.resume:
            _refuse_held_folder(out)


def _holds_a_run(out: Path) -> bool:
    rows = out / "metrics.csv"
    has_rows = rows.exists() and rows.stat().st_size > 0
    return has_rows or bool(checkpoints_by_step(out / "checkpoints"))


def _refuse_held_folder(out: Path) -> None:
    if _holds_a_run(out):
        raise BadInput(
            f"out_dir: {out} holds a run already: --resume auto goes on with it, another folder "
            "starts anew"
        )


def _compare_settings(checkpoint: Path, cfg: RunSettings, program: Path) -> list[str]:
    """Raise BadInput if this program with these settings is not the run of the checkpoint. -> lines
    to say"""
    state, _ = read_state(checkpoint)
    if Path(state.program).name != program.name:
        raise BadInput(f"resume: {checkpoint}: a run of {state.program}, not of {program}")
    lines = []
    if state.program_hash != file_hash(program):
        lines.append(
            f"{program} has changed since {checkpoint} was written: the run goes on with it as it "
            "is now"
        )
    saved = flatten(read_settings(checkpoint))
    new = flatten(cfg)
    fixed, cut = changed_settings(saved, new)
    if fixed:
        file = checkpoint.parent.parent / "settings.yaml"  # the run's
        file = file if file.exists() else checkpoint / "settings.yaml"
        faults = [f"{name}: the run has {saved.get(name)}, you gave {new[name]}" for name in fixed]
        advice = f"a resume uses the run's own settings (--config {file})"
        raise BadInput("\n".join(faults) + f"; {advice}")
    rounding = f"; the same run up to rounding, since {', '.join(cut)} changed" if cut else ""
    return [*lines, f"resumed from {checkpoint}{rounding}"]


def refuse_other_identity(saved: dict[str, str], new: dict[str, str]) -> None:
    """Raise BadInput if a resume meets another model, tokenizer or data than the run began with."""
    names = sorted(name for name, value in new.items() if saved.get(name) != value)
    if names:
        raise BadInput("\n".join(f"resume: {n}: not what this run began with" for n in names))


# ---- the folder ----------------------------------------------------------------------------------


class RunFolder:
    """The folder of a run, locked for this process. Rank 0 decides for all ranks. In an
    existing folder nothing but .lock and empty folders is made before `begin`.

    path: the folder. checkpoint: the folder of the checkpoint that this start goes on from, or None;
    state: its RunState; is_own: whether that checkpoint is of the run in `path` (else this run
    branches off another one). Raises BadInput if two runs would be mixed.
    """

    def __init__(self, fabric, cfg: RunSettings, program: Path):
        self.lock, self.program = None, program
        self.path, self.checkpoint, self.lines = on_rank_0(fabric, lambda: self._take(cfg, program))
        self.state = read_state(self.checkpoint)[0] if self.checkpoint else None
        self.is_own = self.checkpoint is not None and belongs_to_run(self.checkpoint, self.path)

    def _take(self, cfg: RunSettings, program: Path) -> tuple[Path, Path | None, list[str]]:
        """Create and lock the folder, find the checkpoint. -> path, checkpoint, lines to say"""
        checkpoint = None
        if cfg.resume not in (None, "auto"):
            checkpoint = Path(cfg.resume)
            exists = (checkpoint / "manifest.json").is_file()
            fault = verify_checkpoint(checkpoint) if exists else "no such checkpoint folder"
            if fault:
                raise BadInput(f"resume: {cfg.resume}: {fault}")
        with user_error("out_dir", cfg.out_dir):
            out = Path(cfg.out_dir) if cfg.out_dir else _new_folder(program)
            out.mkdir(parents=True, exist_ok=True)
            self.lock = take_lock(out)
            for name in ("checkpoints", "eval"):
                (out / name).mkdir(exist_ok=True)
        if not cfg.resume:
            _refuse_held_folder(out)
        if cfg.resume == "auto":
            checkpoint = newest_checkpoint(out)
        # Rows without a checkpoint are allowed here: a branch that was killed before its first
        # checkpoint begins again by the same command.
        has_checkpoints = bool(checkpoints_by_step(out / "checkpoints"))
        if checkpoint and has_checkpoints and not belongs_to_run(checkpoint, out):
            raise BadInput(
                f"out_dir: {out} holds another run: a run that branches off {checkpoint} needs a "
                "folder of its own"
            )
        if checkpoint:
            return out, checkpoint, _compare_settings(checkpoint, cfg, program)
        if has_checkpoints:
            advice = "move it away, or give another --out_dir"
            raise BadInput(f"resume: {out}: none of its checkpoints is whole: {advice}")
        lines = [f"nothing to resume in {out}: starting"] if cfg.resume else []
        return out, None, lines

    def begin(self, cfg: RunSettings) -> None:
        """On rank 0, once nothing can be refused any more: clean up after an earlier process, put
        aside newer checkpoints that this start leaves behind, write the settings, say so."""
        with disk_error(self.path):
            for name in ("", "checkpoints", "eval", "iterations"):
                _clear_litter(self.path / name)
            if self.is_own:
                _put_newer_aside(self.path / "checkpoints", self.state.step)
        text = made_by(self.program) + dump_yaml(cfg)
        write_atomically(self.path / "settings.yaml", text)
        for line in (*self.lines, f"run folder: {self.path}"):
            say(line)

    def close(self) -> None:
        """Give the lock back."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    __del__ = close


def made_by(program: Path) -> str:
    """The comment at the top of settings.yaml: which program started last, of which commit, and the
    versions of its libraries."""
    parts = [program.name, f"commit {commit_of(ROOT)}", f"python {platform.python_version()}"]
    for name in ("torch", "lightning", "litgpt"):
        with contextlib.suppress(PackageNotFoundError):
            parts.append(f"{name} {version(name)}")
    return f"# {', '.join(parts)}\n"


def commit_of(folder: Path) -> str | None:
    """The commit of a git clone, with -dirty behind it if its files have been changed. None if this is
    no clone, or git does not answer."""
    if not (folder / ".git").exists():  # git would look for one in the folders above
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return said.stdout.strip()
    return None


def _new_folder(program: Path) -> Path:
    """out/PROGRAM-DATE, with a number behind it if two runs begin in the same second."""
    first = Path("out") / f"{program.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    out, n = first, 1
    while True:
        try:
            out.mkdir(parents=True)
            return out
        except FileExistsError:
            n += 1
            out = first.with_name(f"{first.name}-{n}")


def _clear_litter(folder: Path) -> None:
    """Remove what a killed process was writing or removing."""
    for old in folder.glob(".*.old"):  # publish_folder was about to replace it
        published = folder / old.name[1:-4]
        if published.exists():
            remove(old)
        else:
            old.rename(published)
    for tmp in folder.glob("*.tmp"):
        remove(tmp)


def _put_newer_aside(checkpoints: Path, step: int) -> None:
    """Checkpoints after `step` are of a continuation that this start leaves behind."""
    for newer_step, path in checkpoints_by_step(checkpoints).items():
        if newer_step > step:
            aside = path.with_name(f"abandoned-{path.name}")
            remove(aside)
            path.rename(aside)
