"""A run on disk: its folder and lock, what a resume compares, and checkpoints.

| in the run's folder | holds |
| --- | --- |
| checkpoints/step-N/*.safetensors | trained weights, a moving reference, optimizer, random states |
| checkpoints/step-N/state.json | RunState; the optimizer's numbers that are no tensors |
| settings.yaml, also in step-N/ | the settings; on top the commit and versions of the last start |
| metrics.csv, val.csv | rows; a resume removes those after its checkpoint's step |
| iterations/ | SPIN and online KTO: answers and ratings (rollout.py) |
| wandb_id | under which id the run goes on at wandb |
| .lock | which process writes into the folder |

A checkpoint is written beside its final name and then renamed: it is whole or not there. In it every rank
writes and reads its own part, by torch.distributed.checkpoint, and nothing is gathered. Its tensors are
named `kind|parameter` or `optimizer|parameter|moment`; the kinds are weights, reference and optimizer.
"""

import contextlib
import fcntl
import hashlib
import inspect
import json
import math
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import lightning
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

    program: str = ""
    """The file that was started."""
    chat_template: str = ""
    """The text of data.chat_template, if one was given."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Of model, reference, tokenizer and data: a resume must find the same."""
    step: int = 0
    """Optimizer steps done."""
    unvalidated: bool = False
    """Whether the validation of this step has begun but not ended: a resume does it first."""
    iteration: int = 0
    """Of SPIN and online KTO, from 1."""
    moving_reference: bool = False
    """Whether the reference is the policy as it was when the iteration began."""
    started_from: str = ""
    """Hash of the policy's weights when the iteration began."""
    best_step: int | None = None
    """By keep_best."""
    best_value: float | None = None
    objective: dict = field(default_factory=dict)
    """Objective.state_dict()."""

    @property
    def reference_has_moved(self) -> bool:
        """Whether the reference is no longer the model that the run began with. With LoRA the adapters of
        earlier iterations are then merged into the base."""
        return self.moving_reference and self.iteration > 1

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


def program_file(objective: type) -> Path:
    """The file that was started; where there is none (a notebook), the objective's own."""
    started = Path(sys.argv[0])
    if hasattr(sys.modules["__main__"], "__file__") and started.suffix == ".py":
        return started
    return Path(inspect.getfile(objective))


# ---- files that are whole or not there -----------------------------------------------------------


@contextlib.contextmanager
def disk_error(path: Path):
    """Raise Failed with the path and the reason if the disk is full or gone."""
    try:
        yield
    except CheckpointException as e:
        error, _ = next(iter(e.failures.values()))
        raise Failed(f"{path}: not saved: {getattr(error, 'strerror', None) or error}") from None
    except (OSError, SafetensorError) as e:
        raise Failed(f"{path}: not saved: {getattr(e, 'strerror', None) or e}") from None


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
        with disk_error(out):
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)

    def end():
        with disk_error(out):
            for path in new.iterdir():
                with open(path, "rb") as f:
                    os.fsync(f.fileno())
            shutil.rmtree(out, ignore_errors=True)
            new.rename(out)

    on_rank_0(fabric, begin)
    if on_every_rank or fabric.global_rank == 0:
        try:
            with disk_error(out):
                write(new)
        except Failed:
            shutil.rmtree(new, ignore_errors=True)  # on a full disk it is in the way
            raise
    fabric.barrier()
    on_rank_0(fabric, end)


# ---- the run's folder ----------------------------------------------------------------------------


def weights_hash(weights: Mapping[str, torch.Tensor]) -> str:
    """A hash of weights with their names, shapes and dtypes; their order does not matter."""
    h = hashlib.sha256()
    for name in sorted(weights):
        x = weights[name].detach().cpu().contiguous()
        h.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        h.update(x.flatten().view(torch.uint8).numpy())
    return h.hexdigest()


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


def refuse_held_folder(cfg: RunSettings) -> None:
    """Raise BadInput if out_dir holds a run that these settings would not go on with."""
    out = Path(cfg.out_dir or "")
    rows = out / "metrics.csv"  # empty where a run was refused before its first step
    has_rows = rows.exists() and rows.stat().st_size > 0
    held = cfg.out_dir and (has_rows or checkpoints_by_step(out))
    refuse_unless(
        cfg.resume or not held,
        f"out_dir: {out} holds a run already: --resume auto goes on with it, another folder starts "
        "anew",
    )


class RunFolder:
    """The folder of a run, locked for this process. Rank 0 decides for all ranks.

    path: the folder. checkpoint: the folder of the checkpoint that this start goes on from, or None;
    state: its RunState; is_own: whether that checkpoint is of the run in `path` (else this run
    branches off another one). Raises BadInput if two runs would be mixed.
    """

    def __init__(self, fabric, cfg: RunSettings, program: Path):
        self.lock, self.program = None, program
        self.path, self.checkpoint = on_rank_0(fabric, lambda: self._take(cfg))
        self.state = read_state(self.checkpoint)[0] if self.checkpoint else None
        self.is_own = self.checkpoint in checkpoints_by_step(self.path).values()

    def _take(self, cfg: RunSettings) -> tuple[Path, Path | None]:
        """Create and lock the folder, find the checkpoint. -> both"""
        refuse_held_folder(cfg)
        name = f"out/{self.program.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        same_second = len(list(Path().glob(f"{name}*")))
        out = Path(cfg.out_dir or (f"{name}-{same_second + 1}" if same_second else name))
        with user_error("out_dir", out):
            out.mkdir(parents=True, exist_ok=True)
            self.lock = os.open(out / ".lock", os.O_RDWR | os.O_CREAT)
            try:  # until the file is closed or this process ends, in whatever way
                fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInput(f"out_dir: {out}: in use by another process") from None
        own = checkpoints_by_step(out)
        if cfg.resume == "auto":
            if not own:
                say(f"nothing to resume in {out}: starting")
            return out, own[max(own)] if own else None
        if not cfg.resume:
            return out, None
        checkpoint = Path(cfg.resume)
        exists = (checkpoint / "state.json").is_file()
        refuse_unless(exists, f"resume: {cfg.resume}: no such checkpoint folder")
        is_own = checkpoint.resolve().parent.parent == out.resolve()
        refuse_unless(
            is_own or not own,
            f"out_dir: {out} holds another run: a run that branches off {checkpoint} needs a folder "
            "of its own",
        )
        return out, out / "checkpoints" / checkpoint.name if is_own else checkpoint

    def begin(self, cfg: RunSettings, hashes: dict[str, str]) -> None:
        """Compare with the checkpoint, and only then write into the folder: put newer checkpoints aside,
        and write the settings. Raises BadInput."""
        if self.state:
            say(_compare(self.checkpoint, self.state, cfg, self.program, hashes))
        for old in (self.path / "checkpoints").glob(".*.tmp"):  # of a killed process
            shutil.rmtree(old, ignore_errors=True)
        for step, path in checkpoints_by_step(self.path).items():
            if self.is_own and step > self.state.step:  # of a continuation that is left behind
                aside = path.with_name(f"abandoned-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
        write_whole(
            self.path / "settings.yaml", f"# {self.program}, {versions()}\n{dump_yaml(cfg)}"
        )
        say(f"run folder: {self.path}")

    def close(self) -> None:
        """Give the lock back."""
        if self.lock is not None:
            os.close(self.lock)


def _compare(checkpoint: Path, state: RunState, cfg, program: Path, hashes: dict) -> str:
    """Raise BadInput if this program with these settings, models and records is not the run of the
    checkpoint. -> a line to say"""
    refuse_unless(
        Path(state.program).name == program.name,
        f"resume: {checkpoint}: a run of {state.program}, not of {program}",
    )
    saved, new = flatten(read_settings(checkpoint)), flatten(cfg)
    fixed, cut = changed_settings(saved, new)
    faults = [f"{name}: the run has {saved.get(name)}, you gave {new[name]}" for name in fixed]
    file = checkpoint.parent.parent / "settings.yaml"
    advice = f"; a resume uses the run's own settings (--config {file})"
    refuse_unless(not faults, "\n".join(faults) + advice)
    other = [name for name in hashes if hashes[name] != state.hashes.get(name)]
    refuse_unless(
        not other, "\n".join(f"resume: {name}: not what this run began with" for name in other)
    )
    rounding = f"; the same run up to rounding, since {', '.join(cut)} changed" if cut else ""
    return f"resumed from {checkpoint}{rounding}"


def versions() -> str:
    """The project's commit, if this is a git clone, and the versions of what computes."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    commit = "unknown"
    if (ROOT / ".git").exists():
        with contextlib.suppress(OSError):
            commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return f"commit {commit}, torch {torch.__version__}, lightning {lightning.__version__}"


# ---- save ----------------------------------------------------------------------------------------


def save_checkpoint(
    fabric, folder: Path, policy, optimizer, reference: dict, state: RunState, cfg: RunSettings
) -> None:
    """Write a checkpoint. reference: the weights of a moving reference by name, else empty. A collective.
    Raises Failed."""
    params = policy.unique_parameters()
    tensors = {f"weights|{n}": p.detach() for n, p in params.items() if p.requires_grad}
    tensors |= {f"reference|{n}": p.detach() for n, p in reference.items()}
    name_of = {id(p): name for name, p in params.items()}
    numbers = {}
    for p, moments in optimizer.optimizer.state.items():
        for moment, x in moments.items():
            key = f"{name_of[id(p)]}|{moment}"
            if moment in ("qmap1", "qmap2"):
                # 8-bit AdamW has one table for all weights, and safetensors refuses shared memory
                x = x.clone()
            if isinstance(x, torch.Tensor):
                tensors[f"optimizer|{key}"] = x
            else:
                numbers[key] = x
    tensors[f"random|{fabric.global_rank}"] = _generator(fabric).get_state()
    # a file for each kind and moment: a rank holds only one file's bytes at once
    names = [*tensors, *(f"random|{r}" for r in range(fabric.world_size))]  # of all ranks
    part_of = {name: (name.split("|")[0], *name.split("|")[2:]) for name in names}
    parts = sorted(set(part_of.values()))
    file_of = {name: parts.index(part) + 1 for name, part in part_of.items()}

    def write(new: Path):
        writer = HuggingFaceStorageWriter(str(new), file_of, save_distributed=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that a single process saves alone
            dcp.save(tensors, storage_writer=writer)
        if fabric.global_rank == 0:
            content = {"run": asdict(state), "optimizer": numbers}
            (new / "state.json").write_text(json.dumps(content))
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


def read_state(folder: Path) -> tuple[RunState, dict]:
    """-> the run's state and the optimizer's numbers that are no tensors. Raises BadInput."""
    with user_error("resume", folder, (OSError, KeyError, TypeError)):
        content = json.loads((folder / "state.json").read_text())
        return RunState(**content["run"]), content["optimizer"]


def read_settings(folder: Path) -> dict:
    """settings.yaml of a run or a checkpoint, as groups of settings."""
    return yaml.safe_load((folder / "settings.yaml").read_text())


def _read_tensors(folder: Path, place) -> dict[str, torch.Tensor]:
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


def read_checkpoint_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, whole, by the policy's names: the trained ones, and with LoRA a base into
    which adapters were merged. Without those of the objective's module."""
    has_moved = read_state(folder)[0].reference_has_moved and read_settings(folder)["lora"]["rank"]
    kinds = ("weights", "reference") if has_moved else ("weights",)

    def place(kind, name, size, dtype):
        if kind in kinds and not name.startswith("objective_module."):
            return torch.empty(size, dtype=dtype)

    return {key.partition("|")[2]: x for key, x in _read_tensors(folder, place).items()}


def load_weights(folder: Path, params: dict[str, torch.Tensor]) -> None:
    """Put a checkpoint's trained weights into `params`, sharded or not."""
    # it shares the weight's memory, so the shards are read into the weight itself
    _read_tensors(
        folder, lambda kind, name, *_: params[name].detach() if kind == "weights" else None
    )


def load_checkpoint(fabric, folder: Path, policy, optimizer, reference: dict) -> None:
    """Put a checkpoint's weights, optimizer state and random state in place, and those of a moving
    reference into `reference`, its weights by name."""
    params, moments = policy.unique_parameters(), optimizer.optimizer.state
    weights = {"weights": params, "reference": reference}

    def place(kind, name, size, dtype):
        if kind in weights:
            refuse_unless(name in weights[kind], f"{folder}: {name}: not of this model")
            return weights[kind][name].detach()
        if kind == "random":  # at a larger number of ranks the others keep their own
            return torch.empty(size, dtype=dtype) if name == str(fabric.global_rank) else None
        owner, _, moment = name.rpartition("|")
        refuse_unless(owner in params, f"{folder}: {owner}: not of this model")
        p = params[owner]
        if p.shape == size:  # sharded as the weight is
            x = torch.zeros_like(p, dtype=dtype)
        else:
            x = torch.zeros(size, dtype=dtype, device=p.device)
        moments[p][moment] = x
        return x

    read = _read_tensors(folder, place)
    missing = [n for n, p in params.items() if p.requires_grad and f"weights|{n}" not in read]
    refuse_unless(not missing, f"{folder}: holds no {', '.join(missing[:1])}: not of this model")
    random = read.get(f"random|{fabric.global_rank}")
    for key, x in read_state(folder)[1].items():
        name, _, moment = key.rpartition("|")
        moments[params[name]][moment] = x
    if random is not None:
        _generator(fabric).set_state(random)
