"""Token ids on disk by content, so that a million records are tokenised once."""

import contextlib
import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np

from support.records import local

LARGE = 2**24  # bytes of a file: below, tokenising it again takes seconds
CODE = [Path(__file__).with_name(f"{n}.py") for n in ("records", "tokenizer", "examples")]


def file_for(source: str, tokenizer, kind: str, limits) -> Path | None:
    """Where the examples of this content are kept, as this code makes them; None: nowhere."""
    path = local(source)
    if not limits.cache or not path.is_file() or path.stat().st_size < LARGE:
        return None
    h = hashlib.sha256()
    for part in (path, *CODE):
        with open(part, "rb") as f:
            while block := f.read(2**22):
                h.update(block)
    names = ("max_prompt", "max_completion", "extra", "columns", "score_turns", "date")
    asked = [kind, path.suffixes, *(getattr(limits, name) for name in names)]
    h.update(repr([asked, tokenizer.identity()]).encode())
    return Path(limits.cache).expanduser() / f"{h.hexdigest()}.npz"


def read(file: Path) -> dict[str, np.ndarray] | None:
    """None: not there, or damaged."""
    try:
        with open(file, "rb") as f, np.load(f, allow_pickle=False) as found:
            return dict(found)
    except (OSError, ValueError, zipfile.BadZipFile):
        return None


def write(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Whole or not at all. Without room or right it is not: the next start takes longer."""
    tmp = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(tmp, "wb") as f:
            np.savez(f, **arrays)
        tmp.replace(file)
    with contextlib.suppress(OSError):
        tmp.unlink()  # what a full disk has left
