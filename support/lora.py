"""litgpt's LoRA layers: switch the adapters off, start them again, add them to their matrices."""

import contextlib
import math

import torch
from litgpt.lora import LoRALayer, LoRALinear, LoRAQKVLinear, mark_only_lora_as_trainable
from torch import nn

from support.settings import Lora


def adapter_arguments(lora: Lora | None) -> dict:
    """Arguments of litgpt's Config; none where there are to be no adapters."""
    if lora is None or not lora.rank:
        return {}
    targets = {f"lora_{target}": True for target in lora.targets}
    return targets | dict(lora_r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout)


def create_adapters(model: nn.Module, dtype: torch.dtype) -> None:
    """Put real adapters, which alone are trained, in place of those on the meta device. A starts
    random (torch's global seed), B zero."""
    # in bfloat16 AdamW's small steps would round to nothing
    wide = torch.promote_types(dtype, torch.float32)
    for m in model.modules():
        if isinstance(m, LoRALinear) and hasattr(m, "lora_A"):
            a, b = (torch.empty_like(x, device="cpu", dtype=wide) for x in (m.lora_A, m.lora_B))
            m.lora_A, m.lora_B = nn.Parameter(a), nn.Parameter(b)
            m.reset_parameters()
    mark_only_lora_as_trainable(model)


@contextlib.contextmanager
def disable_adapters(model: nn.Module):
    """The model without its adapters, to the bit: a layer that is told that it is merged runs its
    base matrix alone."""
    layers = [m for m in model.modules() if isinstance(m, LoRALayer)]
    assert layers, "no LoRA layers here: the reference would be the policy itself"
    for layer in layers:
        layer.merged = True
    try:
        yield
    finally:
        for layer in layers:
            layer.merged = False


@torch.no_grad()
def reset_adapters(model: nn.Module, seed: int, place) -> None:
    """Adapters as they start: A random, alike on all ranks, B zero. place(x, like) lays a tensor
    out as another, which may be sharded."""
    generator = torch.Generator().manual_seed(seed)
    for m in model.modules():
        if isinstance(m, LoRALinear) and hasattr(m, "lora_A"):
            bound = 1 / math.sqrt(m.lora_A.shape[1])  # litgpt's: kaiming_uniform, a = sqrt(5)
            a = torch.rand(m.lora_A.shape, generator=generator, dtype=torch.float32)
            a = a * 2 * bound - bound
            m.lora_A.copy_(place(a.to(m.lora_A.dtype), m.lora_A))
            m.lora_B.zero_()


def merge_adapters(state: dict, model: nn.Module) -> dict:
    """Full weights by their plain names: each adapter added to its base matrix. `state`, the
    model's weights by name, may be gathered from shards."""
    state = dict(state)
    for name, m in model.named_modules():
        if isinstance(m, LoRALinear):
            a, b = (state.pop(f"{name}.lora_{x}", None) for x in "AB")
            if a is not None:
                w = state[f"{name}.linear.weight"]
                state[f"{name}.linear.weight"] = (w + _delta(m, a, b)).to(w.dtype)
    return {name.replace(".linear.", "."): x for name, x in state.items()}


def _delta(m, a, b):
    """What the adapter (a, b) of layer m adds to its matrix."""
    if not isinstance(m, LoRAQKVLinear):
        return b @ a * m.scaling
    heads = m.n_head, m.n_query_groups, m.n_query_groups
    parts = [(m.head_size * n, on) for n, on in zip(heads, m.enable_lora)]
    rows = [size for size, on in parts if on]
    deltas = iter([y @ x for x, y in zip(a.chunk(len(rows)), b.split(rows))])  # an A for each
    zeros = [a.new_zeros(size, a.shape[1]) for size, _ in parts]
    return torch.cat([next(deltas) if on else z for (_, on), z in zip(parts, zeros)]) * m.scaling
