"""Save, verify, resume: a checkpoint is either whole or not there.

A checkpoint is a folder: weights.safetensors (what trains), optimizer.safetensors, rng.safetensors
(every rank's), state.json (RunState) and settings.yaml. It is written beside its final name,
fsynced, gets a manifest of hashes last, and is then renamed. (Fabric's own save moves a file out of
the temporary directory and can leave half of it under the final name.)
"""

import hashlib
import inspect
import json
import os
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from support.cli import dotted, dump
from support.devices import all_reduce, say
from support.errors import BadInput, Failed
from support.settings import Run, changes, flat


@dataclass
class RunState:
    """What changes during a run, besides weights, optimizer state and random numbers."""

    program: str = ""  # the file that was started
    source: str = ""  # a hash of it
    identity: dict[str, str] = field(default_factory=dict)  # hashes of model, tokenizer, data, ...
    step: int = 0  # optimizer steps done
    iteration: int = 0  # of SPIN and online KTO
    started_from: str = ""  # fingerprint of the policy when the iteration began
    best_step: int | None = None  # by keep_best
    best_value: float | None = None
    objective: dict = field(default_factory=dict)  # Objective.state_dict()

    def is_best(self, row: dict, name: str | None) -> bool:
        """Whether a row of val.csv is the best so far by this column; remembered if so. Step 0 has
        no checkpoint, and an empty cell of a checker is no value."""
        if name is None:
            return False
        value = row.get(name)
        if value is None and not (name == "checker_accuracy" and name in row):
            have = ", ".join(k for k, v in row.items() if v is not None)
            raise BadInput(f"keep_best: {name}: not in val.csv, which has {have}")
        if value is None or not self.step:
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


def full(x: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, a copy on the CPU. A collective where it is sharded."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().to("cpu", copy=True)


def place(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor on the device, and in the shards, of another."""
    x = x.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(x, like.device_mesh, like.placements)
    return x


def gather_whole(fabric, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gathered from their shards one by one, and kept on rank 0 only: a node's ranks share its
    memory. A collective."""
    gathered = ((name, full(x)) for name, x in tensors.items())
    return {name: x for name, x in gathered if fabric.global_rank == 0}


@torch.no_grad()
def set_weights(module, state: dict[str, torch.Tensor]) -> None:
    for name, p in module.unique_parameters().items():
        if name in state:
            p.copy_(place(state[name], p))


def sync(path: Path) -> None:
    """Down to the disk: a file's bytes, or a folder's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, text: str | bytes) -> None:
    """Whole or not at all, and on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_suffix(".tmp")
    tmp.write_bytes(text.encode() if isinstance(text, str) else text)
    sync(tmp)
    tmp.replace(path)


def write_json(path: Path, value) -> None:
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def digest(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(2**22):
            h.update(block)
    return h.hexdigest()


def publish(fabric, write, out: Path) -> None:
    """Rank 0 calls write(folder) on a folder beside `out`, hashes it, and moves it there. Fails on
    all ranks alike."""
    error = None
    if fabric.global_rank == 0:
        tmp, old = (out.parent / f".{out.name}.{kind}" for kind in ("tmp", "old"))
        try:
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir(parents=True)
            write(tmp)
            manifest = {p.name: digest(p) for p in sorted(tmp.iterdir())}
            (tmp / "manifest.json").write_text(json.dumps(manifest, indent=1))
            for p in [*tmp.iterdir(), tmp]:
                sync(p)
            shutil.rmtree(old, ignore_errors=True)
            if out.exists():
                out.rename(old)
            tmp.rename(out)
            sync(out.parent)
            shutil.rmtree(old, ignore_errors=True)
        except (OSError, SafetensorError) as e:  # safetensors has its own error for a full disk
            shutil.rmtree(tmp, ignore_errors=True)
            error = f"{out}: not saved: {getattr(e, 'strerror', None) or e}"
    if error := fabric.broadcast(error):
        raise Failed(error)


# ---- save and load ------------------------------------------------------------------------------


def save(fabric, out: Path, policy, optimizer, state: RunState, cfg: Run) -> None:
    """Everything a bit-identical continuation needs. A collective."""
    params = policy.unique_parameters()
    names = {id(p): name for name, p in params.items()}
    weights = gather_whole(fabric, {name: p for name, p in params.items() if p.requires_grad})
    states = {
        f"{names[id(p)]}|{key}": x
        for p, state_of_p in optimizer.optimizer.state.items()
        for key, x in state_of_p.items()
    }
    tensors = {key: x for key, x in states.items() if isinstance(x, torch.Tensor)}
    numbers = {key: x for key, x in states.items() if key not in tensors}
    tensors = gather_whole(fabric, tensors)
    rng = {"rng": _rng_of_all_ranks(fabric)}

    def write(folder: Path):
        for name, some in (("weights", weights), ("optimizer", tensors), ("rng", rng)):
            some = {k: x.contiguous() for k, x in some.items()}
            save_file(some, folder / f"{name}.safetensors")
        (folder / "state.json").write_text(json.dumps({"run": asdict(state), "optimizer": numbers}))
        (folder / "settings.yaml").write_text(dump(cfg))

    publish(fabric, write, out)


def _rng_of_all_ranks(fabric) -> torch.Tensor:
    cuda = fabric.device.type == "cuda"
    rng = torch.cuda.get_rng_state(fabric.device) if cuda else torch.get_rng_state()
    rng_R = torch.zeros(fabric.world_size, len(rng), dtype=torch.uint8, device=fabric.device)
    rng_R[fabric.global_rank] = rng.to(fabric.device)
    return all_reduce(rng_R).cpu()


def read_state(folder: Path) -> tuple[RunState, dict]:
    """(the run's state, the optimizer's numbers that are no tensors) of a checkpoint."""
    try:
        found = json.loads((folder / "state.json").read_text())
        return RunState(**found["run"]), found["optimizer"]
    except (KeyError, TypeError):
        raise BadInput(f"resume: {folder}: written by another version of this program") from None


def load(fabric, folder: Path, policy, optimizer) -> None:
    """Put a checkpoint's weights, optimizer state and random numbers in place."""
    set_weights(policy, load_file(folder / "weights.safetensors"))
    params, (_, numbers) = policy.unique_parameters(), read_state(folder)
    fused = optimizer.optimizer.defaults.get("fused")
    for key, x in (load_file(folder / "optimizer.safetensors") | numbers).items():
        name, kind = key.rsplit("|", 1)
        p = params[name]
        # an unfused AdamW counts its steps on the CPU
        if isinstance(x, torch.Tensor) and (fused or kind != "step"):
            x = place(x, p) if x.shape == p.shape else x.to(p.device)
        optimizer.optimizer.state[p][kind] = x
    rng_R = load_file(folder / "rng.safetensors")["rng"]
    if len(rng_R) == fabric.world_size:
        mine = rng_R[fabric.global_rank].clone()  # a view is read from its storage's start
        if fabric.device.type == "cuda":
            torch.cuda.set_rng_state(mine, fabric.device)
        else:
            torch.set_rng_state(mine)


# ---- a run's folder -----------------------------------------------------------------------------


def verify(folder: Path) -> str | None:
    """None if whole, else what is wrong."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, expected in manifest.items():
            if digest(folder / name) != expected:
                return f"{name} is damaged"
        whole = "weights.safetensors" in manifest
        return None if whole else "manifest.json names no weights"
    except (OSError, ValueError, AttributeError) as e:
        return f"{type(e).__name__}: {e}"


def steps(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, in order."""
    named = ((re.fullmatch(r"step-(\d+)", p.name), p) for p in folder.glob("step-*"))
    return dict(sorted((int(m[1]), p) for m, p in named if m))


def find(resume: str, out_dir: Path) -> Path | None:
    """What --resume means: auto, the newest checkpoint that verifies; or a checkpoint's folder."""
    if resume == "auto":
        for path in reversed(steps(out_dir / "checkpoints").values()):
            if (fault := verify(path)) is None:
                return path
            say(f"{path}: not used: {fault}")
        return None
    path = Path(resume)
    if not path.is_dir():
        raise BadInput(f"resume: {resume}: no such checkpoint folder")
    if fault := verify(path):
        raise BadInput(f"resume: {resume}: {fault}")
    return path


def prune(folder: Path, keep_last: int, best: int | None) -> None:
    """Remove old checkpoints, but neither the newest keep_last nor the best."""
    for step in list(steps(folder))[: -keep_last or None]:
        if step != best:
            shutil.rmtree(folder / f"step-{step:08d}", ignore_errors=True)


def open_run(fabric, cfg: Run, program: Path) -> tuple[Run, Path | None]:
    """(settings with the run's folder, the checkpoint to go on from), decided on rank 0 for all.
    Refuses to mix two runs."""
    answer = None
    if fabric.global_rank == 0:
        try:
            answer = _open_run(cfg, program)
        except BadInput as e:
            answer = str(e)
        except OSError as e:
            answer = f"out_dir: {e.filename}: {e.strerror}"
    answer = fabric.broadcast(answer)
    if isinstance(answer, str):
        raise BadInput(answer)
    out, found = answer
    return replace(cfg, out_dir=str(out)), found


def _open_run(cfg: Run, program: Path) -> tuple[Path, Path | None]:
    out = Path(cfg.out_dir) if cfg.out_dir else _fresh_folder(program)
    found = find(cfg.resume, out) if cfg.resume else None
    if found:
        moved = _refuse_another_run(found, cfg, program)
        why = f"; equal to rounding only, since {', '.join(moved)} changed" if moved else ""
        say(f"resumed from {found}{why}")
    elif (out / "metrics.csv").exists() and not cfg.resume:
        raise BadInput(
            f"out_dir: {out} holds a run already: --resume auto goes on with it, another folder "
            "starts anew"
        )
    elif cfg.resume:
        say(f"nothing to resume in {out}: starting")
    out.mkdir(parents=True, exist_ok=True)
    # settings.yaml finds its own run
    (out / "settings.yaml").write_text(dump(replace(cfg, out_dir=str(out))))
    say(f"run folder: {out}")
    return out, found


def _fresh_folder(program: Path) -> Path:
    stem, n = Path("out") / f"{program.stem}-{time.strftime('%Y%m%d-%H%M%S')}", 1
    while (out := stem if n == 1 else stem.with_name(f"{stem.name}-{n}")).exists():
        n += 1
    return out


def _refuse_another_run(found: Path, cfg: Run, program: Path) -> list[str]:
    """Raise BadInput where this is not the run that `found` belongs to. -> changes of the cut."""
    state, _ = read_state(found)
    if Path(state.program).name != program.name:
        raise BadInput(f"resume: {found}: a run of {state.program}, not of {program}")
    if state.source != digest(program):
        say(f"{program} has changed since {found} was written: it goes on with what it is now")
    old = dict(dotted(yaml.safe_load((found / "settings.yaml").read_text())))
    fixed, moved = changes(old, flat(cfg))
    if fixed:
        raise BadInput("\n".join(f"{name}: a resume cannot change it" for name in fixed))
    return moved


def put_newer_aside(folder: Path, found: Path) -> None:
    """Newer checkpoints are of a branch that this run now leaves."""
    for step, newer in steps(folder).items():
        same = found.resolve().parent == folder.resolve()
        if same and step > int(found.name.removeprefix("step-")):
            aside = newer.with_name(f"abandoned-{newer.name}")
            shutil.rmtree(aside, ignore_errors=True)
            newer.rename(aside)


def refuse_another_identity(old: dict[str, str], new: dict[str, str]) -> None:
    """Raise BadInput where a resume meets another model, tokenizer or data than the run began with."""
    names = sorted(old.keys() | new.keys())
    faults = [
        f"resume: {n}: not what this run began with" for n in names if old.get(n) != new.get(n)
    ]
    if faults:
        raise BadInput("\n".join(faults))
