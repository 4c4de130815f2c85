"""Sharded tensors on disk, by torch.distributed.checkpoint in safetensors
files (its usual ones are pickles): every rank writes and reads its own
part, and nothing is gathered. Names are kind|parameter|moment."""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.api import CheckpointException

from support.errors import Failed


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """shard-...safetensors: of each rank a file for the weights and one for
    each of the optimizer's moments, one after the other, so that little is
    held twice. A collective. Raises Failed on all ranks alike."""
    moments = {n: "".join(n.split("|")[2:]) for n in tensors}
    files = sorted(set(moments.values()))
    where = {n: files.index(m) + 1 for n, m in moments.items()}
    Writer = hf_storage.HuggingFaceStorageWriter
    writer = Writer(str(folder), where, save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer)
    except CheckpointException as e:
        error, _ = next(iter(e.failures.values()))
        why = getattr(error, "strerror", None) or error
        raise Failed(f"{folder}: not saved: {why}") from None


def load(folder: Path, kind: str, make) -> dict[str, torch.Tensor]:
    """A kind's tensors by name, read into make(name, shape, dtype): of
    shards each rank its own, however many ranks wrote them."""
    reader, tensors = hf_storage.HuggingFaceStorageReader(str(folder)), {}
    for key, m in reader.read_metadata().state_dict_metadata.items():
        found, _, name = key.partition("|")
        if found == kind:
            tensors[name] = make(name, m.size, m.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no rank need wait for another is meant
        wanted = {f"{kind}|{n}": x for n, x in tensors.items()}
        dcp.load(wanted, storage_reader=reader, no_dist=True)
    return tensors
