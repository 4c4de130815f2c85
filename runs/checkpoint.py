"""Save, verify, resume: a checkpoint is a folder that is either whole or not there: written beside
its final name, fsynced, a manifest of hashes last, then renamed. (Fabric's own save moves a file
out of the temporary directory and can leave half of it under the final name.) Of a sharded run each
rank writes its part of weights and optimizer (see shards.py)."""

import contextlib
import fcntl
import hashlib
import inspect
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, distribute_tensor

from runs import shards
from runs.cli import dump_yaml
from runs.devices import all_reduce, say
from runs.errors import BadInput, Failed, disk_error, user_error
from runs.settings import RunSettings, changed_settings, flatten
from runs.tensors import LazyTensors, open_safetensors
from runs.tensors import write_safetensors as store

# what a folder of each kind must hold, and its manifest must name
SHARDED = ("weights.safetensors", "optimizer.safetensors")  # under fsdp: shard-*.safetensors
CHECKPOINT = (*SHARDED, "rng.safetensors", "state.json", "settings.yaml")


@dataclass
class RunState:
    """What changes during a run, besides weights, optimizer state and random numbers."""

    program: str = ""  # the file that was started
    source: str = ""  # a hash of it
    chat_template: str = ""  # the one that data.chat_template gave
    identity: dict[str, str] = field(default_factory=dict)  # hashes of model, tokenizer, data, ...
    step: int = 0  # optimizer steps done
    iteration: int = 0  # of SPIN and online KTO
    moved: bool = False  # the reference is the policy as it was when the iteration began
    started_from: str = ""  # fingerprint of the policy when the iteration began
    best_step: int | None = None  # by keep_best
    best_value: float | None = None
    objective: dict = field(default_factory=dict)  # Objective.state_dict()
    shards: int = 0  # files of a sharded checkpoint; 0: weights and optimizer lie there whole
    rows: dict = field(default_factory=dict)  # of metrics.csv and val.csv: [how many, their hash]

    def is_best(self, row: dict, name: str | None) -> bool:
        """Whether a row of val.csv is the best so far by this column; remembered if so. Step 0 has
        no checkpoint, and an empty cell of a checker is no value."""
        if name is None:
            return False
        value = row.get(name)
        if value is None and not (name == "checker_accuracy" and name in row):
            have = ", ".join(k for k, v in row.items() if v is not None)
            raise BadInput(f"keep_best: {name}: not in val.csv, which has {have}")
        if value is None or value != value or not self.step:  # NaN is above and below nothing
            return False
        low = name.split("/")[0] in ("loss", "preference_loss", "sft_loss", "kl")
        value = -value if low else value
        if self.best_value is not None and value <= self.best_value:
            return False
        self.best_step, self.best_value = self.step, value
        return True


def program_file(objective: type) -> Path:
    """The file that was started; where there is none (a notebook), the objective's own."""
    started = Path(sys.argv[0])
    script = hasattr(sys.modules["__main__"], "__file__")
    if script and started.suffix == ".py" and started.is_file():
        return started
    return Path(inspect.getfile(objective))


# ---- tensors and files --------------------------------------------------------------------------


def place_like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor on the device of another and, where it is whole and as large, in its shards."""
    x = x.to(like.device)
    if isinstance(like, DTensor) and not isinstance(x, DTensor) and x.shape == like.shape:
        return distribute_tensor(x, like.device_mesh, like.placements)
    return x


def gather_tensor(x: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, on the CPU. A collective where it is sharded."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu()


@torch.no_grad()
def set_weights(module, state: Mapping[str, torch.Tensor] | None) -> None:
    """Weights by name, those of rank 0; others may give None. A collective where it is sharded."""
    for name, p in module.unique_parameters().items():
        if state is None:
            p.copy_(place_like(torch.empty(p.shape, dtype=p.dtype), p))
        elif name in state:
            p.copy_(place_like(state[name].detach().to(p.dtype), p))


def sync(path: Path) -> None:
    """Down to the disk: a file's bytes, or a folder's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, text: str | bytes) -> None:
    """Whole or not at all, and on the disk. Its folder is made, but not one that held that."""
    tmp = path.with_suffix(".tmp")
    with disk_error(path):
        path.parent.mkdir(exist_ok=True)
        tmp.write_bytes(text.encode() if isinstance(text, str) else text)
        sync(tmp)
        tmp.replace(path)


def write_json(path: Path, value) -> None:
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def file_hash(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(2**22):
            h.update(block)
    return h.hexdigest()


def on_rank_0(fabric, work):
    """work() on rank 0; its answer, or its refusal, on all ranks. A collective."""
    answer = error = None
    if fabric.global_rank == 0:
        try:
            answer = work()
        except (BadInput, Failed) as e:
            error = e
    answer, error = fabric.broadcast((answer, error))
    if error:
        raise error
    return answer


def publish_folder(fabric, write, out: Path, each=None) -> None:
    """Rank 0 calls write(folder), if given, on a folder beside `out`, hashes it, and moves it there;
    before, every rank calls each(folder). Fails on all ranks alike, if not in a collective."""
    failed = None
    tmp, old = (out.with_name(f".{out.name}.{kind}") for kind in ("tmp", "old"))

    def begin():
        with disk_error(out):
            out.parent.mkdir(exist_ok=True)
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir()

    def finish():
        try:
            with disk_error(out, SafetensorError):  # safetensors has its own error for a full disk
                if failed:
                    raise failed
                if write:
                    write(tmp)
                manifest = {p.name: file_hash(p) for p in sorted(tmp.iterdir())}
                (tmp / "manifest.json").write_text(json.dumps(manifest, indent=1))
                for p in [*tmp.iterdir(), tmp]:
                    sync(p)
                shutil.rmtree(old, ignore_errors=True)
                if out.exists():
                    out.rename(old)
                tmp.rename(out)
                sync(out.parent)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)

    on_rank_0(fabric, begin)
    if each:
        try:
            with disk_error(out, SafetensorError):
                each(tmp)
        except Failed as e:  # maybe on this rank alone
            failed = e
    on_rank_0(fabric, finish)


# ---- save and load ------------------------------------------------------------------------------


def save_checkpoint(
    fabric, out: Path, policy, optimizer, state: RunState, cfg: RunSettings
) -> None:
    """Everything a bit-identical continuation needs. A collective. Of a sharded run every rank
    writes its own part."""
    params = policy.unique_parameters()
    names = {id(p): name for name, p in params.items()}
    weights = {name: p.detach() for name, p in params.items() if p.requires_grad}
    tensors, numbers = {}, {}
    for p, states in optimizer.optimizer.state.items():
        for key, x in states.items():
            kind = tensors if isinstance(x, torch.Tensor) else numbers
            kind[f"{names[id(p)]}|{key}"] = x
    rng = _generator(fabric).get_state().to(fabric.device)
    rng_R = rng.new_zeros(fabric.world_size, len(rng))
    rng_R[fabric.global_rank] = rng
    whole, each = {"rng": {"rng": all_reduce(rng_R)}}, None
    kinds = {"weights": weights, "optimizer": tensors}
    if is_sharded(params):
        parts = {f"{kind}|{n}": x for kind, some in kinds.items() for n, x in some.items()}
        each = partial(shards.save_shards, tensors=parts)
    else:
        whole |= kinds

    def write(folder: Path):
        for name, some in whole.items():
            store(folder, LazyTensors(some, some.__getitem__), name)
        state.shards = len(list(folder.glob("shard-*")))
        (folder / "state.json").write_text(json.dumps({"run": asdict(state), "optimizer": numbers}))
        (folder / "settings.yaml").write_text(dump_yaml(cfg))

    publish_folder(fabric, write, out, each)


def is_sharded(params: dict) -> bool:
    return any(isinstance(p, DTensor) for p in params.values())


def _generator(fabric) -> torch.Generator:
    """What this rank's random numbers come from."""
    cuda = fabric.device.type == "cuda"
    return torch.cuda.default_generators[fabric.device.index] if cuda else torch.default_generator


def read_state(folder: Path) -> tuple[RunState, dict]:
    """(the run's state, the optimizer's numbers that are no tensors) of a checkpoint."""
    try:
        found = json.loads((folder / "state.json").read_text())
        found["run"]["rows"]  # as old as what is missing here would be the rest of it
        return RunState(**found["run"]), found["optimizer"]
    except (KeyError, TypeError):
        raise BadInput(f"resume: {folder}: written by another version of this program") from None


def read_checkpoint_tensors(folder: Path, kind: str) -> LazyTensors:
    """A checkpoint's weights, or its optimizer's state, whole."""
    file = folder / f"{kind}.safetensors"
    return open_safetensors(file) if file.exists() else shards.open_shards(folder, kind)


def load_checkpoint(fabric, folder: Path, policy, optimizer) -> None:
    """Put a checkpoint's weights, optimizer state and random numbers in place."""
    params, (state, numbers) = policy.unique_parameters(), read_state(folder)

    def like_its_weight(key: str, x):
        p = params[key.split("|")[0]]  # a moment is sharded as its weight is
        return torch.zeros_like(p if p.shape == x.shape else x, dtype=x.dtype, device=p.device)

    if state.shards and is_sharded(params):
        shards.load_shards(folder, "weights", lambda name, *_: params[name].detach())
        tensors = shards.load_shards(folder, "optimizer", like_its_weight)
    else:
        set_weights(policy, read_checkpoint_tensors(folder, "weights"))
        tensors = dict(read_checkpoint_tensors(folder, "optimizer"))
    for key, x in (tensors | numbers).items():
        name, kind = key.rsplit("|", 1)
        x = place_like(x, params[name]) if isinstance(x, torch.Tensor) else x
        optimizer.optimizer.state[params[name]][kind] = x
    rng_R = load_file(folder / "rng.safetensors")["rng"]
    if len(rng_R) == fabric.world_size:
        mine = rng_R[fabric.global_rank].clone()  # a view is read from its storage's start
        _generator(fabric).set_state(mine)


# ---- a run's folder -----------------------------------------------------------------------------


def verify_folder(folder: Path, needs=CHECKPOINT) -> str | None:
    """None if whole, else what is wrong."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        parts = sum(name.startswith("shard-") for name in manifest)
        if needs == CHECKPOINT and parts:
            needs = set(CHECKPOINT).difference(SHARDED)
            if parts != read_state(folder)[0].shards:
                return "manifest.json names not all shards"
        for name in needs:
            if name not in manifest:
                return f"manifest.json names no {name}"
        for name, known in manifest.items():
            if file_hash(folder / name) not in (known, known[-1]):  # it was [size, hash] once
                return f"{name} is damaged"
    except (OSError, ValueError, AttributeError, TypeError, LookupError) as e:
        return f"{type(e).__name__}: {e}"
    return None


def checkpoints_by_step(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, in order."""
    named = ((re.fullmatch(r"step-(\d+)", p.name), p) for p in folder.glob("step-*"))
    return dict(sorted((int(m[1]), p) for m, p in named if m))


def newest_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint of a run that verifies."""
    for path in reversed(checkpoints_by_step(out / "checkpoints").values()):
        if (fault := verify_folder(path)) is None:
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
            fault = verify_folder(found) if here else "no such checkpoint folder"
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
