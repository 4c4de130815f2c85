"""A checkpoint's tensors on disk, by torch.distributed.checkpoint in safetensors files (its own files
are pickles): every rank writes and reads its own part, and nothing is gathered.

Names are `kind|parameter` or `kind|parameter|moment`, such as "weights|lm_head.weight" and
"optimizer|lm_head.weight|exp_avg".
"""

import json
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.api import CheckpointException

from runs.errors import Failed, user_error
from runs.tensors import LazyTensors

# What reading a damaged file raises: one whose manifest is as wrong as the file.
DAMAGED = (SafetensorError, CheckpointException, OSError, KeyError, ValueError, RuntimeError)


def save_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write shard-*.safetensors: of each rank one file for the weights, one for each average of them
    and one for each of the optimizer's moments, one after the other, so that little memory is needed.
    A collective. Raises Failed on all ranks."""
    part_of = {name: _part(*name.split("|")) for name in tensors}
    parts = sorted(set(part_of.values()))
    file_of = {name: parts.index(part) + 1 for name, part in part_of.items()}
    writer = hf_storage.HuggingFaceStorageWriter(str(folder), file_of, save_distributed=True)
    # The folder is there. The writer would also make its parents, and so a run's folder that has been
    # moved away.
    writer.fs.mkdir = lambda path: None
    try:
        with warnings.catch_warnings():
            # It warns that a single process saves alone; torch 2.10 also warns of a function of torch
            # that this one calls.
            warnings.simplefilter("ignore")
            dcp.save(dict(sorted(tensors.items())), storage_writer=writer)
    except CheckpointException as e:
        error, _ = next(iter(e.failures.values()))
        reason = getattr(error, "strerror", None) or error
        raise Failed(f"{folder}: not saved: {reason}") from None


def sort_metadata(file: Path) -> None:
    """Write the metadata of a safetensors file in order of their names: the library writes them in
    another order each time, and equal checkpoints are to be equal files."""
    with open(file, "r+b") as f:
        length = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:
            f.seek(8)
            f.write(text.ljust(length))


def _part(kind: str, _parameter: str, moment: str = "") -> str:
    """The part of a checkpoint that has a file of its own; the random state lies with the weights."""
    return "" if kind in ("weights", "random") else kind + moment


class _Reader(hf_storage.HuggingFaceStorageReader):
    """Reads the headers of all files, which say which tensor lies where, only once."""

    known_metadata = None

    def read_metadata(self):
        if self.known_metadata is None:
            with user_error(None, self.path, DAMAGED):
                self.known_metadata = super().read_metadata()
        return self.known_metadata

    def tensors_like(self, kind: str) -> dict[str, torch.Tensor]:
        """A kind's tensors by name, on the meta device: shapes and types only."""
        out = {}
        for key, found in self.read_metadata().state_dict_metadata.items():
            its_kind, _, name = key.partition("|")
            if its_kind == kind:
                dtype = found.properties.dtype
                out[name] = torch.empty(found.size, dtype=dtype, device="meta")
        return out

    def read_into(self, kind: str, tensors: dict[str, torch.Tensor]) -> None:
        wanted = {f"{kind}|{name}": x for name, x in tensors.items()}
        with warnings.catch_warnings(), user_error(None, self.path, DAMAGED):
            warnings.simplefilter("ignore")  # it warns that no rank waits for another, as we want
            dcp.load(wanted, storage_reader=self, no_dist=True)


def load_shards(folder: Path, kind: str, make) -> dict[str, torch.Tensor]:
    """Read all tensors of a kind into make(name, a meta tensor of its shape): a rank reads the shards
    that it holds, however many ranks wrote them. -> the tensors by name"""
    reader = _Reader(str(folder))
    tensors = {name: make(name, like) for name, like in reader.tensors_like(kind).items()}
    reader.read_into(kind, tensors)
    return tensors


def open_shards(folder: Path, kind: str) -> LazyTensors:
    """The tensors of a kind, whole, each read when it is asked for."""
    reader = _Reader(str(folder))
    like = reader.tensors_like(kind)

    def read(name):
        x = torch.empty_like(like[name], device="cpu")
        reader.read_into(kind, {name: x})
        return x

    return LazyTensors(like, read)
