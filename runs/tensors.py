"""Tensors by name, one at a time: read when they are asked for, written as they come. A model need
not fit in memory to be converted."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)
FLOATS = frozenset(DTYPES)
DTYPES |= dict(I64=torch.int64, I32=torch.int32, I16=torch.int16, I8=torch.int8, U8=torch.uint8)
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class LazyTensors(Mapping):
    """`like`: tensors of the same shapes and dtypes, maybe on the meta device. `make(name)` is
    called at each access; of a sharded model it is a collective."""

    def __init__(self, like: dict[str, torch.Tensor], make: Callable[[str], torch.Tensor]):
        self.like, self.make = like, make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.like:
            raise KeyError(name)
        return self.make(name)

    def __contains__(self, name) -> bool:  # Mapping's would make it
        return name in self.like

    def __iter__(self):
        return iter(self.like)

    def __len__(self):
        return len(self.like)


def shapes_of(tensors: Mapping) -> dict[str, torch.Tensor]:
    """Their shapes and dtypes by name; nothing is read for it."""
    return getattr(tensors, "like", tensors)


def rename_tensors(tensors: Mapping, names: dict[str, str]) -> LazyTensors:
    """By other names: {new: old}."""
    like = shapes_of(tensors)
    return LazyTensors(
        {new: like[old] for new, old in names.items()}, lambda new: tensors[names[new]]
    )


def override_tensors(tensors: LazyTensors, more: LazyTensors) -> LazyTensors:
    """Both; where a name is in both, the second's."""
    return LazyTensors(tensors.like | more.like, lambda n: (more if n in more else tensors)[n])


def open_safetensors(file: Path) -> LazyTensors:
    """The tensors of a safetensors file."""

    def get(name):
        with safe_open(file, "pt") as f:
            return f.get_tensor(name).clone()  # a view would keep the whole file in memory

    with safe_open(file, "pt") as f:
        slices = {name: f.get_slice(name) for name in f.keys()}
        meta = {n: (x.get_shape(), DTYPES[x.get_dtype()]) for n, x in slices.items()}
    like = {n: torch.empty(shape, dtype=kind, device="meta") for n, (shape, kind) in meta.items()}
    return LazyTensors(like, get)


def write_safetensors(
    folder: Path | None, tensors: LazyTensors, name: str = "model", most: int = 2**62
) -> None:
    """NAME.safetensors, or as many files of at most `most` bytes as it takes and their index, one
    tensor at a time (save_file wants all at once). Without a folder they are only asked for, as the
    rank that writes does; it does so to the end, whatever fails."""
    # wide ones first, as safetensors has them: all stay aligned
    sizes = sorted(tensors.like.items(), key=lambda x: -x[1].element_size())
    like = {n: torch.empty(x.shape, dtype=x.dtype, device="meta") for n, x in sizes}
    pattern = f"{name}{{suffix}}.safetensors"
    split = split_torch_state_dict_into_shards(like, filename_pattern=pattern, max_shard_size=most)
    files = split.filename_to_tensors
    rest = iter([name for names in files.values() for name in names])

    def take(name):
        next(rest)
        return tensors[name]

    try:
        for file, names in files.items() if folder else ():
            write_file(folder / file, LazyTensors({n: like[n] for n in names}, take))
        if folder and split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2) + "\n"
            (folder / f"{name}.safetensors.index.json").write_text(text)
    finally:
        for missed in rest:
            tensors[missed]


def write_file(file: Path, tensors: LazyTensors) -> None:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, x in tensors.like.items():
        end = at + x.numel() * x.element_size()
        cell = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [at, end]}
        header[name], at = cell, end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(file, "wb") as f:
        f.write(len(head).to_bytes(8, "little") + head)
        for name in tensors:
            f.write(_bytes(tensors[name]))


def _bytes(x: torch.Tensor):
    return x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def place_like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor on the device of another and, where it is whole and as large, in its shards."""
    x = x.to(like.device)
    if isinstance(like, DTensor) and not isinstance(x, DTensor) and x.shape == like.shape:
        return distribute_tensor(x, like.device_mesh, like.placements)
    return x


def gather_tensor(x: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, on the CPU. A collective where it is sharded."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu()


@torch.no_grad()
def set_weights(module, state: Mapping[str, torch.Tensor] | None) -> None:
    """Weights by name, those of rank 0; others may give None. A collective where it is sharded."""
    for name, p in module.unique_parameters().items():
        if state is None:
            p.copy_(place_like(torch.empty(p.shape, dtype=p.dtype), p))
        elif name in state:
            p.copy_(place_like(state[name].detach().to(p.dtype), p))


def is_sharded(params: dict) -> bool:
    return any(isinstance(p, DTensor) for p in params.values())
