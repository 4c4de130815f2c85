"""Paths and small files that the user gave; and files that are either whole or not there."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from runs.devices import all_reduce, on_rank_0
from runs.errors import BadInput, Failed, disk_error, printable
from runs.small_files import read_object

ROOT = Path(__file__).parent.parent  # of the project


def find_path(source: str) -> Path:
    """A path as given. The demo's own files are also found from another working directory."""
    path = Path(source).expanduser()
    if source.startswith("demo/") and not path.exists():
        return ROOT / source
    return path


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(2**22):
            h.update(block)
    return h.hexdigest()


# ---- one file ------------------------------------------------------------------------------------


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_no_link(path, flags: int) -> int:
    """An opener for open(): it fails where a link stands at `path`. A file in a run's folder is
    never written through a link; a folder in it may be one (a larger disk)."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a link: remove it", str(path)) from None
        raise


def remove(path: Path) -> None:
    """Remove a file, a link (not what it points at) or a folder with all that is in it. What cannot
    be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that it is whole or not there, also after a power cut. Creates its parent
    folder, but no folder above that. Raises Failed."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two runs may write the same file
    with disk_error(path):
        path.parent.mkdir(exist_ok=True)
        remove(tmp)  # of a killed process with this number, or a link to elsewhere
        try:
            with open(tmp, "xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            sync(tmp)
            tmp.replace(path)
        finally:
            remove(tmp)


def write_json(path: Path, value) -> None:
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


# ---- a folder with a manifest --------------------------------------------------------------------


def publish_folder(fabric, write, out: Path, on_every_rank: bool = False) -> None:
    """Make the folder `out` so that it is whole or not there.

    write(folder) makes the files, in a folder beside `out`: called on rank 0, or on_every_rank.
    Rank 0 then adds manifest.json (the files' hashes), waits for the disk, and renames the folder.
    A collective; it fails on all ranks if it fails on one. Raises Failed, BadInput.
    """
    new, old = out.with_name(f".{out.name}.tmp"), out.with_name(f".{out.name}.old")

    def begin():
        with disk_error(out):
            out.parent.mkdir(exist_ok=True)
            remove(new)
            new.mkdir()

    def finish():
        with disk_error(out):
            _write_manifest(new)
            remove(old)
            if out.exists() or out.is_symlink():
                out.rename(old)
            new.rename(out)
            sync(out.parent)
        remove(old)

    error = None
    try:
        on_rank_0(fabric, begin)
        if on_every_rank or fabric.global_rank == 0:
            try:
                with disk_error(out, SafetensorError):  # safetensors' own error for a full disk
                    write(new)
            except (BadInput, Failed) as e:
                error = e
        failed = torch.tensor(float(error is not None), device=fabric.device)
        if all_reduce(failed, "max").item():
            first = fabric.broadcast(error)  # most often rank 0's
            raise error or first or Failed(f"{out}: not saved: another rank could not write")
        on_rank_0(fabric, finish)
    finally:
        if fabric.global_rank == 0:
            remove(new)


def _write_manifest(folder: Path) -> None:
    hashes = {p.name: file_hash(p) for p in sorted(folder.iterdir())}
    (folder / "manifest.json").write_text(json.dumps(hashes, indent=1))
    for path in [*folder.iterdir(), folder]:
        sync(path)


def verify_folder(folder: Path, required=()) -> str | None:
    """What is wrong with a folder that publish_folder made; None if it is whole. `required`: names
    that its manifest must have."""
    try:
        hashes = read_object(folder / "manifest.json")
        for name in required:
            if name not in hashes:
                return f"manifest.json names no {name}"
        for name, known in hashes.items():
            if Path(name).name != name or not (folder / name).is_file():
                return f"{printable(name)}: named by manifest.json: no such file"
            if file_hash(folder / name) != known:
                return f"{name} is damaged"
    except (OSError, BadInput) as e:
        return str(e)
    return None
