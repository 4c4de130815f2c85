"""Sharded tensors on disk, by torch.distributed.checkpoint in safetensors
files (its usual ones are pickles): every rank writes and reads its own
part, and nothing is gathered."""

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
    kinds = {n: "".join(n.split("|")[2:]) for n in tensors}
    files = sorted(set(kinds.values()))
    where = {n: files.index(kind) + 1 for n, kind in kinds.items()}
    Writer = hf_storage.HuggingFaceStorageWriter
    writer = Writer(str(folder), where, save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer)
    except CheckpointException as e:
        error, _ = next(iter(e.failures.values()))
        why = getattr(error, "strerror", None) or error
        raise Failed(f"{folder}: not saved: {why}") from None


def load(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Into these tensors, of shards each rank its own, however many ranks
    wrote them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no rank need wait for another is meant
        reader = hf_storage.HuggingFaceStorageReader(str(folder))
        dcp.load(tensors, storage_reader=reader, no_dist=True)


def shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """What lies here, by name."""
    reader = hf_storage.HuggingFaceStorageReader(str(folder))
    known = reader.read_metadata().state_dict_metadata
    return {n: (m.size, m.properties.dtype) for n, m in known.items()}
