"""Token ids on disk, so that a large file is tokenised once and not at every start.

A cached file is an .npz of arrays. Its name is a hash of all that the arrays depend on, so it never
has to be checked or updated.
"""

import contextlib
import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np

from records.forms import Kind
from records.tokenizer import Tokenizer
from runs.files import file_hash, find_path
from runs.settings import Data

LARGE = 2**24  # bytes: to tokenise a smaller file again takes seconds
# The code that turns a file into token ids: after a change in it, nothing old is found.
CODE = [
    Path(__file__).with_name(name)
    for name in ("readers.py", "forms.py", "tokenizer.py", "examples.py")
]
# The settings that the token ids depend on.
SETTINGS = ("max_prompt", "max_completion", "extra", "columns", "labels", "date")


def cache_file(source: str, tokenizer: Tokenizer, kind: Kind, data: Data) -> Path | None:
    """Where the token ids of a file are cached, or would be. None: they are not cached, since
    data.cache is off or the file is small (or a data set of the Hub)."""
    path = find_path(source)
    if not data.cache or not path.is_file() or path.stat().st_size < LARGE:
        return None
    hashes = [file_hash(file) for file in (path, *CODE)]
    settings = [getattr(data, name) for name in SETTINGS]
    all_inputs = [kind, path.suffixes, hashes, tokenizer.description(), settings]
    key = hashlib.sha256(repr(all_inputs).encode()).hexdigest()
    return Path(data.cache).expanduser() / f"{key}.npz"


def read_cached(file: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a cached file. None if it is not there or damaged."""
    try:
        with open(file, "rb") as f, np.load(f, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile):
        return None


def write_cached(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a cached file, whole or not at all if the process is killed. A full disk or a folder that
    may not be written is no error: the next start takes longer."""
    temporary = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as f:
            np.savez(f, **arrays)
        temporary.replace(file)
    with contextlib.suppress(OSError):
        temporary.unlink()  # part of a file, if the disk was full
