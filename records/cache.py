"""Token ids on disk by content, so that a million records are tokenised once."""

import contextlib
import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np

from runs.files import file_hash, find_path

LARGE = 2**24  # bytes of a file: below, tokenising it again takes seconds
CODE = [Path(__file__).with_name(f"{n}.py") for n in ("forms", "tokenizer", "examples")]


def cache_file(source: str, tokenizer, kind: str, limits) -> Path | None:
    """Where the examples of this content are kept, as this code makes them; None: nowhere."""
    path = find_path(source)
    if not limits.cache or not path.is_file() or path.stat().st_size < LARGE:
        return None
    names = ("max_prompt", "max_completion", "extra", "columns", "score_turns", "date")
    asked = [kind, path.suffixes, *map(file_hash, (path, *CODE)), tokenizer.identity()]
    asked += [getattr(limits, name) for name in names]
    key = hashlib.sha256(repr(asked).encode()).hexdigest()
    return Path(limits.cache).expanduser() / f"{key}.npz"


def read_cached(file: Path) -> dict[str, np.ndarray] | None:
    """None: not there, or damaged."""
    try:
        with open(file, "rb") as f, np.load(f, allow_pickle=False) as found:
            return dict(found)
    except (OSError, ValueError, zipfile.BadZipFile):
        return None


def write_cached(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Whole or not at all. Without room or right it is not: the next start takes longer."""
    tmp = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(tmp, "wb") as f:
            np.savez(f, **arrays)
        tmp.replace(file)
    with contextlib.suppress(OSError):
        tmp.unlink()  # what a full disk has left
