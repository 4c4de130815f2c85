"""Files that a user gave, and files that are either whole or not there."""

import hashlib
import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from runs.devices import on_rank_0
from runs.errors import BadInput, Failed, disk_error, parse_file, printable

ROOT = Path(__file__).parent.parent  # of the project


def find_path(source: str) -> Path:
    """A path as given; the demo's own files also from elsewhere."""
    path = Path(source).expanduser()
    demo = source.startswith("demo/") and not path.exists()
    return ROOT / source if demo else path


def read_object(file: Path, parse) -> dict:
    """A model's config. Raises BadInput."""
    found = parse_file(None, file, parse)
    if not isinstance(found, dict):
        raise BadInput(f"{file}: expected an object, got {printable(found)}")
    return found


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


def verify_folder(folder: Path, needs) -> str | None:
    """None if whole, else what is wrong."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name in needs:
            if name not in manifest:
                return f"manifest.json names no {name}"
        for name, known in manifest.items():
            if file_hash(folder / name) not in (known, known[-1]):  # it was [size, hash] once
                return f"{name} is damaged"
    except (OSError, ValueError, AttributeError, TypeError, LookupError) as e:
        return f"{type(e).__name__}: {e}"
    return None
