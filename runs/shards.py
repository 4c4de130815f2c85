"""Sharded tensors on disk, by torch.distributed.checkpoint (DCP) in safetensors files; its usual files are pickles.
Every rank writes and reads its own part, and nothing is gathered.

A tensor's name on disk is kind|parameter or kind|parameter|moment, as in optimizer|lm_head.weight|exp_avg.
"""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.api import CheckpointException

from runs.errors import Failed
from runs.tensors import LazyTensors


def save_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write files shard-...safetensors into the folder. A collective; if it fails, all ranks raise Failed.

    Each rank writes one file for the weights and one for each moment of the optimizer. DCP writes file by file, so
    only one of them is held in memory a second time.
    """
    moments = {name: "".join(name.split("|")[2:]) for name in tensors}  # "" for weights
    files = sorted(set(moments.values()))
    file_numbers = {name: files.index(moment) + 1 for name, moment in moments.items()}
    writer = hf_storage.HuggingFaceStorageWriter(str(folder), file_numbers, save_distributed=True)
    # torch 2.10 itself uses what it warns of
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")
    try:
        dcp.save(tensors, storage_writer=writer)
    except CheckpointException as e:
        error, _ = next(iter(e.failures.values()))
        reason = getattr(error, "strerror", None) or error
        raise Failed(f"{folder}: not saved: {reason}") from None


class _Reader(hf_storage.HuggingFaceStorageReader):
    """DCP's reader of a folder. It reads the headers of the files, which say where each tensor lies, only once."""

    headers = None

    def read_metadata(self):
        if self.headers is None:
            self.headers = super().read_metadata()
        return self.headers

    def like(self, kind: str) -> dict[str, torch.Tensor]:
        """The tensors of a kind by name, on the meta device."""
        out = {}
        for key, stored in self.read_metadata().state_dict_metadata.items():
            stored_kind, _, name = key.partition("|")
            if stored_kind == kind:
                dtype = stored.properties.dtype
                out[name] = torch.empty(stored.size, dtype=dtype, device="meta")
        return out

    def fill(self, kind: str, tensors: dict[str, torch.Tensor]) -> None:
        """Read the values of these tensors of a kind into them; of a sharded tensor, this rank's shard."""
        by_key = {f"{kind}|{name}": x for name, x in tensors.items()}
        with warnings.catch_warnings():
            # DCP warns that no_dist reads without the other ranks; that is what we want
            warnings.simplefilter("ignore")
            dcp.load(by_key, storage_reader=self, no_dist=True)


def load_shards(folder: Path, kind: str, make) -> dict[str, torch.Tensor]:
    """The tensors of a kind ("weights", "optimizer", ...) by name.

    make(name, a meta tensor of its shape and dtype) returns the tensor to read into. If it is sharded, each rank reads
    its own shard; the number of ranks that wrote the files does not matter.
    """
    reader = _Reader(str(folder))
    tensors = {name: make(name, x) for name, x in reader.like(kind).items()}
    reader.fill(kind, tensors)
    return tensors


def open_shards(folder: Path, kind: str) -> LazyTensors:
    """The tensors of a kind by name, unsharded and on the CPU. Each is read when it is asked for."""
    reader = _Reader(str(folder))
    like = reader.like(kind)

    def read(name):
        x = torch.empty_like(like[name], device="cpu")
        reader.fill(kind, {name: x})
        return x

    return LazyTensors(like, read)
