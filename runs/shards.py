"""Sharded tensors on disk, by torch.distributed.checkpoint in safetensors
files (its usual ones are pickles): every rank writes and reads its own
part, and nothing is gathered. Names are kind|parameter|moment."""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.api import CheckpointException

from runs.errors import Failed
from runs.tensors import LazyTensors


def save_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """shard-...safetensors: of each rank a file for the weights and one for
    each of the optimizer's moments, one after the other, so that little is
    held twice. A collective. Raises Failed on all ranks alike."""
    moments = {n: "".join(n.split("|")[2:]) for n in tensors}
    files = sorted(set(moments.values()))
    where = {n: files.index(m) + 1 for n, m in moments.items()}
    Writer = hf_storage.HuggingFaceStorageWriter
    writer = Writer(str(folder), where, save_distributed=True)
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # what torch 2.10 itself calls
    try:
        dcp.save(tensors, storage_writer=writer)
    except CheckpointException as e:
        error, _ = next(iter(e.failures.values()))
        why = getattr(error, "strerror", None) or error
        raise Failed(f"{folder}: not saved: {why}") from None


class _Reader(hf_storage.HuggingFaceStorageReader):
    """Reads the headers of all files, which say what lies where, once."""

    known = None

    def read_metadata(self):
        self.known = self.known or super().read_metadata()
        return self.known

    def like(self, kind: str) -> dict[str, torch.Tensor]:
        """A kind's tensors by name, on the meta device."""
        out = {}
        for key, m in self.read_metadata().state_dict_metadata.items():
            found, _, name = key.partition("|")
            if found == kind:
                out[name] = torch.empty(m.size, dtype=m.properties.dtype, device="meta")
        return out

    def fill(self, kind: str, tensors: dict[str, torch.Tensor]) -> None:
        wanted = {f"{kind}|{n}": x for n, x in tensors.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no rank need wait for another is meant
            dcp.load(wanted, storage_reader=self, no_dist=True)


def load_shards(folder: Path, kind: str, make) -> dict[str, torch.Tensor]:
    """A kind's tensors by name, read into make(name, one like it): of
    shards each rank its own, however many ranks wrote them."""
    reader = _Reader(str(folder))
    tensors = {name: make(name, x) for name, x in reader.like(kind).items()}
    reader.fill(kind, tensors)
    return tensors


def open_shards(folder: Path, kind: str) -> LazyTensors:
    """The same, whole, each when it is asked for."""
    reader = _Reader(str(folder))
    like = reader.like(kind)

    def get(name):
        x = torch.empty_like(like[name], device="cpu")
        reader.fill(kind, {name: x})
        return x

    return LazyTensors(like, get)
