"""Save, verify, resume: a checkpoint is either whole or not there.

A checkpoint is a folder: weights.safetensors (what trains), optimizer.safetensors, rng.safetensors (every rank's),
state.json and settings.yaml. It is written beside its final name, fsynced, gets a manifest of hashes last, and is then
renamed. (Fabric's own save moves a file out of the temporary directory and can leave half of it under the final name.)
"""

import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from data import BadInput, Failed
from settings import Run, changes, dotted, dump, flat


def full(x: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, a copy on the CPU. A collective where it is sharded."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().to("cpu", copy=True)


def place(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor laid out as `like` is."""
    x = x.to(like.device)
    return distribute_tensor(x, like.device_mesh, like.placements) if isinstance(like, DTensor) else x


def whole(fabric, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gathered from their shards one by one, and kept on rank 0 only: a node's ranks share its memory. Collective."""
    gathered = ((name, full(x)) for name, x in tensors.items())
    return {name: x for name, x in gathered if fabric.global_rank == 0}


@torch.no_grad()
def set_weights(module, state: dict[str, torch.Tensor]) -> None:
    for name, p in module.named().items():
        if name in state:
            p.copy_(place(state[name], p))


def sync(path: Path) -> None:
    """Down to the disk: a file's bytes, or a folder's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, text: str | bytes) -> None:
    """Whole or not at all, and on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_suffix(".tmp")
    tmp.write_bytes(text.encode() if isinstance(text, str) else text)
    sync(tmp)
    tmp.replace(path)


def digest(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(2**22):
            h.update(block)
    return h.hexdigest()


def publish(fabric, write, out: Path) -> None:
    """Rank 0 calls write(folder) on a folder beside `out`, hashes it, and moves it there. Fails on all ranks alike."""
    error = None
    if fabric.global_rank == 0:
        tmp = out.parent / f".{out.name}.tmp"
        try:
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir(parents=True)
            write(tmp)
            files = sorted(p for p in tmp.iterdir())
            (tmp / "manifest.json").write_text(json.dumps({p.name: digest(p) for p in files}, indent=1))
            for p in [*tmp.iterdir(), tmp]:
                sync(p)
            old = out.parent / f".{out.name}.old"
            shutil.rmtree(old, ignore_errors=True)
            if out.exists():
                out.rename(old)
            tmp.rename(out)
            sync(out.parent)
            shutil.rmtree(old, ignore_errors=True)
        except (OSError, SafetensorError) as e:  # safetensors has an error of its own for a full disk
            shutil.rmtree(tmp, ignore_errors=True)
            error = f"{out}: not saved: {getattr(e, 'strerror', None) or e}"
    if error := fabric.broadcast(error):
        raise Failed(error)


def save(fabric, out: Path, policy, optimizer, state: dict, settings: str) -> None:
    """Everything a bit-identical continuation needs. Collective."""
    named = policy.named()
    names = {id(p): name for name, p in named.items()}
    model = whole(fabric, {name: p for name, p in named.items() if p.requires_grad})
    slots = {f"{names[id(p)]}|{key}": x for p, s in optimizer.optimizer.state.items() for key, x in s.items()}
    optim = whole(fabric, {key: x for key, x in slots.items() if isinstance(x, torch.Tensor)})
    state = state | {"optimizer": {key: x for key, x in slots.items() if not isinstance(x, torch.Tensor)}}
    rng = torch.get_rng_state() if fabric.device.type != "cuda" else torch.cuda.get_rng_state(fabric.device)
    rng_R = torch.zeros(fabric.world_size, len(rng), dtype=torch.uint8, device=fabric.device)
    rng_R[fabric.global_rank] = rng.to(fabric.device)
    rng_R = fabric.all_reduce(rng_R, reduce_op="sum").cpu()

    def write(folder: Path):
        save_file({k: x.contiguous() for k, x in model.items()}, folder / "weights.safetensors")
        save_file({k: x.contiguous() for k, x in optim.items()}, folder / "optimizer.safetensors")
        save_file({"rng": rng_R.contiguous()}, folder / "rng.safetensors")
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "settings.yaml").write_text(settings)

    publish(fabric, write, out)


def load(fabric, folder: Path, policy, optimizer) -> dict:
    """Put a checkpoint's weights, optimizer state and RNG in place; returns its state."""
    set_weights(policy, load_file(folder / "weights.safetensors"))
    params = policy.named()
    state = json.loads((folder / "state.json").read_text())
    fused = optimizer.optimizer.defaults.get("fused")
    for key, x in (load_file(folder / "optimizer.safetensors") | state["optimizer"]).items():
        name, kind = key.rsplit("|", 1)
        p = params[name]
        if isinstance(x, torch.Tensor) and (fused or kind != "step"):  # an unfused AdamW counts its steps on the CPU
            x = place(x, p) if x.shape == p.shape else x.to(p.device)
        optimizer.optimizer.state[p][kind] = x
    rng_R = load_file(folder / "rng.safetensors")["rng"]
    if len(rng_R) == fabric.world_size:
        mine = rng_R[fabric.global_rank].clone()  # a view is read from its storage's start
        torch.set_rng_state(mine) if fabric.device.type != "cuda" else torch.cuda.set_rng_state(mine, fabric.device)
    return state


def verify(folder: Path) -> str | None:
    """None if whole, else what is wrong."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, expected in manifest.items():
            if digest(folder / name) != expected:
                return f"{name} is damaged"
        return None if "weights.safetensors" in manifest else "manifest.json names no weights"
    except (OSError, ValueError, AttributeError) as e:
        return f"{type(e).__name__}: {e}"


def steps(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, in order."""
    found = {int(m[1]): p for p in folder.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name))}
    return dict(sorted(found.items()))


def newest(folder: Path, say) -> Path | None:
    """The newest checkpoint that verifies; says which ones do not, and why."""
    for path in reversed(steps(folder).values()):
        if (fault := verify(path)) is None:
            return path
        say(f"{path}: not used: {fault}")
    return None


def find(resume: str, out_dir: Path, say) -> Path | None:
    """What --resume means: auto, or a checkpoint's folder."""
    if resume == "auto":
        return newest(out_dir / "checkpoints", say)
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


def open_run(fabric, s: Run, program: str, say) -> tuple[Path, Path | None]:
    """(the run's folder, the checkpoint to go on from), decided on rank 0 for all. Refuses to mix two runs."""
    answer = None
    if fabric.global_rank == 0:
        try:
            answer = _open_run(s, program, say)
        except BadInput as e:
            answer = str(e)
        except OSError as e:
            answer = f"out_dir: {e.filename}: {e.strerror}"
    answer = fabric.broadcast(answer)
    if isinstance(answer, str):
        raise BadInput(answer)
    s.out_dir = str(answer[0])
    return answer


def _open_run(s: Run, program: str, say) -> tuple[Path, Path | None]:
    if s.out_dir is None:
        stem, n = Path("out") / f"{program}-{time.strftime('%Y%m%d-%H%M%S')}", 1
        while (out := stem if n == 1 else stem.with_name(f"{stem.name}-{n}")).exists():
            n += 1
    else:
        out = Path(s.out_dir)
    found = find(s.resume, out, say) if s.resume else None
    if found:
        fixed, moved = changes(dict(dotted(yaml.safe_load((found / "settings.yaml").read_text()))), flat(s))
        if fixed:
            raise BadInput("\n".join(f"{name}: a resume cannot change it" for name in fixed))
        for step, newer in steps(out / "checkpoints").items():  # of a branch that this run now leaves
            if found.parent == out / "checkpoints" and step > int(found.name.removeprefix("step-")):
                aside = newer.with_name(f"abandoned-{newer.name}")
                shutil.rmtree(aside, ignore_errors=True)
                newer.rename(aside)
        say(f"resumed from {found}" + (f"; equal to rounding only, since {', '.join(moved)} changed" if moved else ""))
    elif (out / "metrics.csv").exists() and not s.resume:
        raise BadInput(f"out_dir: {out} holds a run already: --resume auto goes on with it, another folder starts anew")
    elif s.resume:
        say(f"nothing to resume in {out}: starting")
    out.mkdir(parents=True, exist_ok=True)
    s.out_dir = str(out)  # so that settings.yaml finds its own run
    (out / "settings.yaml").write_text(dump(s))
    say(f"run folder: {out}")
    return out, found
