"""litgpt's LoRA layers: which layers get adapters; create, disable and reset them; add them to
their matrices, also for as long as a model samples.

An adapter of rank r is two matrices, A (r, inputs) and B (outputs, r). It adds scale * B @ A to the
matrix W (outputs, inputs) of its layer. PEFT's files of adapters are in peft.py.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import litgpt
import torch
from litgpt.lora import LoRALayer, LoRALinear, LoRAQKVLinear, mark_only_lora_as_trainable
from torch import nn

from runs.console import say
from runs.errors import BadInput
from runs.settings import Lora
from runs.tensors import LazyTensors, rename_tensors

# litgpt's parts of a model that can have adapters: the group of lora.targets that each belongs to
GROUPS = {
    "attn.q": "query",
    "attn.k": "key",
    "attn.v": "value",
    "attn.proj": "projection",
    "mlp.fc": "mlp",
    "mlp.fc_1": "mlp",
    "mlp.fc_2": "mlp",
    "mlp.proj": "mlp",
    "lm_head": "head",
}


# ---- which layers get adapters -------------------------------------------------------------------


def adapter_arguments(lora: Lora | None, names: dict[str, str] | None) -> dict:
    """Arguments of litgpt's lora.Config; an empty dict if there are to be no adapters.

    lora.targets holds groups (query, mlp, ...) or names of layers as PEFT takes them (q_proj,
    all-linear, ...), which `names` translates (see families.py). Raises BadInput.
    """
    if lora is None or not lora.rank:
        return {}
    arguments = {"lora_r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    if names == {}:  # transformers' own class: see add_adapter_layers
        return arguments
    if names:
        parts = {part: names[part] for part in GROUPS if part in names}
    else:  # a litgpt folder: Hugging Face's names are not known
        parts = dict.fromkeys(GROUPS, "")
    targets = [target.strip() for target in lora.targets.split(",")]
    chosen = set()
    for target in targets:
        chosen |= _target_parts(target, parts)
    groups = {GROUPS[part] for part in chosen}
    if names:
        _refuse_half_groups(parts, chosen, groups)
    for group in groups:
        arguments[f"lora_{group}"] = True
    return arguments


def config_with_adapters(
    arguments: dict, lora: Lora | None, names: dict[str, str] | None
) -> litgpt.Config:
    """litgpt's Config of a model: litgpt.lora's if there are to be adapters. Raises BadInput."""
    adapters = adapter_arguments(lora, names)
    if not adapters:
        return litgpt.Config(**arguments)
    config = litgpt.lora.Config(**arguments, **adapters)
    config.lora_targets = lora.targets  # names, for transformers' own classes
    return config


def without_missing_targets(lora: Lora, names: dict[str, str]) -> Lora:
    """The default of lora.targets without the groups that the model lacks: a mixture of experts has
    no mlp that takes adapters. `names`: see families.py. Targets that the user chose stay."""
    if not lora.rank or lora.targets != Lora.targets or not names:
        return lora
    groups = {GROUPS[part] for part in names if part in GROUPS}
    targets = ",".join(target for target in lora.targets.split(",") if target in groups)
    if targets != lora.targets:
        say(f"lora.targets: {targets}; the experts of this model stay frozen")
    return replace(lora, targets=targets)


def _target_parts(target: str, parts: dict[str, str]) -> set[str]:
    """The parts that one entry of lora.targets means."""
    found = set()
    for part, name in parts.items():
        if target == "all-linear" and part != "lm_head":  # as in PEFT, the head is left out
            found.add(part)
        # q_proj and self_attn.q_proj mean self_attn.q_proj; proj does not
        elif target == GROUPS[part] or (name and f".{name}".endswith(f".{target}")):
            found.add(part)
    if not found:
        known = {GROUPS[part] for part in parts} | {name.split(".")[-1] for name in parts.values()}
        known = ", ".join(sorted(known - {""}))
        raise BadInput(f"lora.targets: expected some of all-linear, {known}; got {target}")
    return found


def _refuse_half_groups(parts: dict[str, str], chosen: set[str], groups: set[str]) -> None:
    """litgpt has one switch a group: it cannot give adapters to some layers of an MLP only."""
    missing = {
        name for part, name in parts.items() if GROUPS[part] in groups and part not in chosen
    }
    if missing:
        missing = ", ".join(sorted(missing))
        raise BadInput(f"lora.targets: the mlp's layers get adapters together: add {missing}")


def add_adapter_layers(model: nn.Module) -> None:
    """For a model of transformers' own class: put litgpt's LoRA layers in place of all linear layers of blocks and
    head; those that config.lora_targets names get adapters. Raises BadInput."""
    config = model.config
    if any(".linear." in f".{name}" for name, _ in model.named_parameters()):
        raise BadInput(f"model: {config.name}: no adapters: a layer of it has the name linear")
    linears = {m for m in model.blocks.modules() if type(m) is nn.Linear}
    names = {name: m for name, m in model.named_modules() if m in linears}
    chosen = _adapted_names(config.lora_targets, list(names))
    names["lm_head"] = model.lm_head
    for name, old in names.items():
        parent, _, attribute = name.rpartition(".")
        with torch.device("meta"):
            new = LoRALinear(
                old.in_features,
                old.out_features,
                r=config.lora_r if name in chosen else 0,
                lora_alpha=config.lora_alpha,
                lora_dropout=config.lora_dropout,
                bias=old.bias is not None,
            )
        new.linear = old
        setattr(model.get_submodule(parent), attribute, new)


def _adapted_names(targets: str, names: list[str]) -> set[str]:
    """The layers that lora.targets means: all of them by its default or all-linear, else by PEFT's rule those whose
    names end so; head is lm_head. Raises BadInput."""
    if targets == Lora.targets:
        targets = "all-linear"
    chosen = set()
    for target in (word.strip() for word in targets.split(",")):
        if target in ("head", "lm_head"):
            found = {"lm_head"}
        else:
            found = {n for n in names if target == "all-linear" or f".{n}".endswith(f".{target}")}
        if not found:
            known = ", ".join(sorted({n.split(".")[-1] for n in names}))
            raise BadInput(
                f"lora.targets: expected some of all-linear, head, {known}; got {target}"
            )
        chosen |= found
    return chosen


# ---- create, disable, reset ----------------------------------------------------------------------


def create_adapters(model: nn.Module, dtype: torch.dtype) -> None:
    """Give real tensors to a model whose adapters are on the meta device: A random (by torch's
    global seed), B zero. From then on the adapters alone are trained.

    `dtype` is that of the weights; the adapters are at least float32, because in bfloat16 the small
    steps of AdamW would round to nothing.
    """
    wide = torch.promote_types(dtype, torch.float32)
    for layer in _adapted_layers(model):
        a = torch.empty_like(layer.lora_A, device="cpu", dtype=wide)
        b = torch.empty_like(layer.lora_B, device="cpu", dtype=wide)
        layer.lora_A = nn.Parameter(a)
        layer.lora_B = nn.Parameter(b)
        layer.reset_parameters()
    mark_only_lora_as_trainable(model)


def _adapted_layers(model: nn.Module) -> list[LoRALinear]:
    """litgpt makes every linear layer a LoRALinear; those that are not chosen have no adapter."""
    layers = [m for m in model.modules() if isinstance(m, LoRALinear)]
    return [layer for layer in layers if hasattr(layer, "lora_A")]


@contextlib.contextmanager
def disable_adapters(model: nn.Module):
    """Within this context the model computes what it would without adapters, to the bit."""
    layers = [m for m in model.modules() if isinstance(m, LoRALayer)]
    assert layers, "no LoRA layers here: the reference would be the policy itself"
    for layer in layers:
        layer.merged = True  # litgpt's layer then takes its matrix alone
    try:
        yield
    finally:
        for layer in layers:
            layer.merged = False


@contextlib.contextmanager
@torch.no_grad()
def merge_for_sampling(model: nn.Module, dtype: torch.dtype):
    """Within this context the adapters are added to their matrices, which are held in `dtype`: a decode
    step then has one product a layer instead of three, and casts no matrix. Afterwards the layers have
    the very tensors that they had. It leaves alone what is sharded or quantised."""
    if hasattr(model, "reshard"):  # FSDP2 has sharded it
        yield
        return
    layers = [m for m in model.modules() if isinstance(m, LoRALinear)]
    layers = [layer for layer in layers if type(layer.linear) is nn.Linear]
    weights = [layer.linear.weight for layer in layers]
    try:
        for layer, w in zip(layers, weights):
            if hasattr(layer, "lora_A"):
                delta = layer.get_lora_AB()
                w = w.to(delta.dtype) + delta
                layer.merged = True  # litgpt's layer then takes its matrix alone
            layer.linear.weight = nn.Parameter(w.to(dtype), requires_grad=False)
        yield
    finally:
        for layer, w in zip(layers, weights):
            layer.linear.weight = w
            layer.merged = False


@torch.no_grad()
def reset_adapters(
    model: nn.Module, seed: int, place: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Set the adapters back to a start: A random by this seed, the same on all ranks, B zero.
    place(x, like) puts x on the device, and into the shards, of `like`."""
    generator = torch.Generator().manual_seed(seed)
    for layer in _adapted_layers(model):
        bound = 1 / math.sqrt(layer.lora_A.shape[1])  # litgpt's kaiming_uniform_ with a = sqrt(5)
        a = torch.rand(layer.lora_A.shape, generator=generator, dtype=torch.float32)
        a = a * 2 * bound - bound
        layer.lora_A.copy_(place(a.to(layer.lora_A.dtype), layer.lora_A))
        layer.lora_B.zero_()


# ---- adapters and the matrices below them --------------------------------------------------------


class OurAdapter(NamedTuple):
    """An adapter by litgpt's names: it adds scale * B @ A to the rows [first, end) of a weight."""

    name: str
    """The weight, by its plain name."""
    first: int
    end: int
    a: torch.Tensor
    """(r, inputs)"""
    b: torch.Tensor
    """(end - first, r)"""
    scale: float


def plain_names(weights: Mapping) -> LazyTensors:
    """Weights without the adapters, by the names that they have in a model without LoRA."""
    # a LoRALinear keeps its matrix in .linear: attn.qkv.linear.weight -> attn.qkv.weight
    names = {name.replace(".linear.", "."): name for name in weights if "lora_" not in name}
    return rename_tensors(weights, names)


def merge_adapters(weights: Mapping, model: nn.Module) -> LazyTensors:
    """Full weights by their plain names: each matrix with its adapters added.

    `weights` holds the weights of `model` by name; they may be gathered from shards one by one.
    """
    plain = plain_names(weights)
    adapters_of = {}
    for adapter in our_adapters(weights, model):
        adapters_of.setdefault(adapter.name, []).append(adapter)

    def merged(name):
        w = plain[name]
        for adapter in adapters_of.get(name, ()):
            delta = torch.zeros_like(w, dtype=adapter.a.dtype)
            delta[adapter.first : adapter.end] = adapter.b @ adapter.a * adapter.scale
            w = (w + delta).to(w.dtype)
        return w

    return LazyTensors(plain.like, merged)


def our_adapters(weights: Mapping, model: nn.Module) -> list[OurAdapter]:
    """All adapters in `weights`. litgpt has one A and one B for the qkv matrix; here they are cut
    into the adapters of q, k and v."""
    adapters = []
    for name, layer in model.named_modules():
        if not isinstance(layer, LoRALinear):
            continue
        a = weights.get(f"{name}.lora_A")
        b = weights.get(f"{name}.lora_B")
        if a is None:
            continue
        rows = [(0, len(b))]
        if isinstance(layer, LoRAQKVLinear):
            rows = _adapted_rows(layer)
        a_parts = a.chunk(len(rows))
        b_parts = b.split([end - first for first, end in rows])
        for (first, end), a_part, b_part in zip(rows, a_parts, b_parts):
            adapter = OurAdapter(f"{name}.weight", first, end, a_part, b_part, layer.scaling)
            adapters.append(adapter)
    return adapters


def _adapted_rows(layer: LoRAQKVLinear) -> list[tuple[int, int]]:
    """(first row, end) of those of q, k and v that have an adapter."""
    rows = []
    first = 0
    heads = (layer.n_head, layer.n_query_groups, layer.n_query_groups)
    for n, enabled in zip(heads, layer.enable_lora):
        end = first + n * layer.head_size
        if enabled:
            rows.append((first, end))
        first = end
    return rows
