"""Files and folders that are whole or not there, and lines of JSON."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from infra.console import Failed
from infra.devices import on_rank_0


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is whole or not there, also after a kill. A link stays, and its target is written."""
    path = path.resolve()
    new = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(exist_ok=True)
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_lines(file: Path) -> list[dict]:
    """The lines of a jsonl file; none if there is no file."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def as_lines(rows: list[dict]) -> str:
    """jsonl; arrays become lists."""
    lines = (json.dumps(row, default=lambda x: x.tolist(), ensure_ascii=False) for row in rows)
    return "".join(f"{line}\n" for line in lines)


def publish_folder(
    fabric: Fabric, write: Callable[[Path], Any], out: Path, on_every_rank: bool = False
) -> None:
    """Make the folder `out` so that it is complete or does not exist. write(folder) makes the files in a temporary
    folder with the same parent. Then the temporary folder is renamed. Rank 0 writes, or every rank. A collective.
    Raises Failed."""
    new = out.with_name(f".{out.name}.tmp")
    old = out.with_name(f".{out.name}.old.tmp")

    def begin():
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)

    def end():
        for path in new.rglob("*"):
            if path.is_file():
                with contextlib.suppress(OSError):  # a share or a bucket refuses it
                    # safetensors lets the owner alone read; others are to load the model, too
                    path.chmod(new.stat().st_mode & 0o666)
                with open(path, "rb") as f:
                    os.fsync(f.fileno())
        # renamed before it is removed: a half is never there, and on NFS a file that another program has open keeps
        # its folder
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
            out.rename(old)
        new.rename(out)
        shutil.rmtree(old, ignore_errors=True)

    try:
        on_rank_0(fabric, begin)
        if on_every_rank or fabric.global_rank == 0:
            write(new)
        fabric.barrier()
        on_rank_0(fabric, end)
    except (OSError, SafetensorError, CheckpointException) as e:  # the disk is full or gone
        error = e
        if isinstance(e, CheckpointException):  # it holds the error of each rank that failed
            error, _ = next(iter(e.failures.values()))
        reason = getattr(error, "strerror", None) or error
        raise Failed(f"{out}: not saved: {reason}") from None
