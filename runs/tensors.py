"""Tensors by name that are read one at a time, when they are asked for, and written one at a time: a model need not
fit in memory to be converted. And sharded tensors (DTensor): placing and gathering them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

from runs.console import Wait, advance

# safetensors' names of dtypes
FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
INTEGER_DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
DTYPES = FLOAT_DTYPES | INTEGER_DTYPES
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


class LazyTensors(Mapping):
    """Tensors by name, made when they are asked for and not kept: each access calls make(name).

    `like` has tensors of the same names, shapes and dtypes, maybe on the meta device. If the tensors are gathered from
    a sharded model, an access is a collective.
    """

    def __init__(self, like: dict[str, torch.Tensor], make: Callable[[str], torch.Tensor]):
        self.like = like
        self.make = make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.like:
            raise KeyError(name)
        return self.make(name)

    def __contains__(self, name) -> bool:  # the one of Mapping would make the tensor
        return name in self.like

    def __iter__(self):
        return iter(self.like)

    def __len__(self):
        return len(self.like)


def shapes_of(tensors: Mapping) -> dict[str, torch.Tensor]:
    """Tensors of the same names, shapes and dtypes. Lazy tensors are not made for it."""
    return getattr(tensors, "like", tensors)


def rename_tensors(tensors: Mapping, names: dict[str, str]) -> LazyTensors:
    """The tensors that `names` = {new name: old name} lists, by their new names."""
    like = shapes_of(tensors)
    renamed = {new: like[old] for new, old in names.items()}
    return LazyTensors(renamed, lambda new: tensors[names[new]])


def override_tensors(tensors: LazyTensors, more: LazyTensors) -> LazyTensors:
    """All tensors of both; a name that is in both is taken from `more`."""
    return LazyTensors(
        tensors.like | more.like, lambda name: more[name] if name in more else tensors[name]
    )


def open_safetensors(file: Path) -> LazyTensors:
    """The tensors of a safetensors file, on the CPU."""

    def read(name):
        with safe_open(file, "pt") as f:
            return f.get_tensor(name).clone()  # a view would keep the whole file in memory

    like = {}
    with safe_open(file, "pt") as f:
        for name in f.keys():
            header = f.get_slice(name)
            dtype = DTYPES[header.get_dtype()]
            like[name] = torch.empty(header.get_shape(), dtype=dtype, device="meta")
    return LazyTensors(like, read)


def write_safetensors(
    folder: Path | None, tensors: LazyTensors, name: str = "model", most: int = 2**62
) -> None:
    """Write NAME.safetensors or, so that no file is larger than `most` bytes, several files and their index.

    One tensor is in memory at a time (safetensors' own save_file wants all of them). Without a folder the tensors are
    only asked for, in the same order: if they are gathered, all ranks must take part in what the writing rank does.
    For the same reason all tensors are asked for even if writing fails.
    """
    # wide dtypes first, as safetensors orders them: every tensor then begins at a multiple of its dtype's size
    by_width = sorted(tensors.like.items(), key=lambda item: -item[1].element_size())
    like = {n: torch.empty(x.shape, dtype=x.dtype, device="meta") for n, x in by_width}
    split = split_torch_state_dict_into_shards(
        like, filename_pattern=f"{name}{{suffix}}.safetensors", max_shard_size=most
    )
    names_by_file = split.filename_to_tensors
    not_yet_asked = iter([n for names in names_by_file.values() for n in names])

    def take(tensor_name):
        next(not_yet_asked)  # files ask in this order
        advance()
        return tensors[tensor_name]

    try:
        if folder:
            with Wait(f"writing {name}.safetensors", len(like), "tensors"):
                for file, names in names_by_file.items():
                    write_file(folder / file, LazyTensors({n: like[n] for n in names}, take))
            if split.is_sharded:
                index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                text = json.dumps(index, indent=2) + "\n"
                (folder / f"{name}.safetensors.index.json").write_text(text)
    finally:
        for tensor_name in not_yet_asked:
            tensors[tensor_name]


def write_file(file: Path, tensors: LazyTensors) -> None:
    """Write one safetensors file: the length of the header, the header (JSON), then the tensors' bytes."""
    header = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, x in tensors.like.items():
        end = start + x.numel() * x.element_size()
        header[name] = {
            "dtype": NAME_OF_DTYPE[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [start, end],
        }
        start = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the tensors begin at a multiple of 8
    with open(file, "wb") as f:
        f.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in tensors:
            f.write(_bytes(tensors[name]))


def _bytes(x: torch.Tensor):
    """The tensor's bytes as a numpy array. numpy has no bfloat16."""
    return x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def place_like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x on the device of `like`, and sharded like it if `like` is sharded and has x's shape. Sharding is a
    collective that takes the values of rank 0."""
    x = x.to(like.device)
    if isinstance(like, DTensor) and not isinstance(x, DTensor) and x.shape == like.shape:
        return distribute_tensor(x, like.device_mesh, like.placements)
    return x


def gather_tensor(x: torch.Tensor) -> torch.Tensor:
    """The full tensor on the CPU. A collective if x is sharded."""
    full = x.full_tensor() if isinstance(x, DTensor) else x
    return full.detach().cpu()


@torch.no_grad()
def set_weights(module, weights: Mapping[str, torch.Tensor] | None) -> None:
    """Copy weights into a module's parameters of the same names; parameters that `weights` lacks stay.

    A collective if the module is sharded: rank 0 gives the weights of all parameters, the other ranks may give None.
    """
    for name, p in module.unique_parameters().items():
        if weights is None:
            p.copy_(place_like(torch.empty(p.shape, dtype=p.dtype), p))
        elif name in weights:
            p.copy_(place_like(weights[name].detach().to(p.dtype), p))
