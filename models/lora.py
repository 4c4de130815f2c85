"""Adapters (LoRA): made, disabled, merged, reset.

An adapter of rank r is two matrices, A (r, inputs) and B (outputs, r). It adds scale * B @ A to the
matrix W (outputs, inputs) of its layer. This file knows no model class: a model has blocks,
lm_head, config, rows and has_experts (see model.Packed)."""

import contextlib
import itertools
import math
from collections.abc import Mapping

import torch
from litgpt.lora import LoRALinear, LoRAQKVLinear
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from infra.console import BadInput, rank
from infra.devices import gather_tensor, place_like
from infra.random_numbers import round_at_random
from infra.settings import Lora

Adapter = tuple[Tensor, Tensor, float]  # A, B, scale, as PEFT has them
# {transformers' name of a layer: its adapter}, whole and on the CPU
Adapters = dict[str, Adapter]

# ---- the layers ----------------------------------------------------------------------------------


class AdaptedLinear(LoRALinear):
    """litgpt's layer, with the product with B, the scale and the sum in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)"""
        y = self.linear(x)
        if self.merged:  # or disabled
            return y
        after_A = nn.functional.linear(self.lora_dropout(x), self.lora_A)
        rows = y.flatten(0, -2)
        sums = torch.addmm(rows, after_A.flatten(0, -2), self.outputs().T, alpha=self.scaling)
        return sums.view_as(y)

    def outputs(self) -> Tensor:
        """B (outputs, r)"""
        return self.lora_B


class AdaptedQKV(AdaptedLinear, LoRAQKVLinear):
    """AdaptedLinear for q, k and v in one matrix: each of the three has a separate adapter, or none."""

    def outputs(self) -> Tensor:
        """(outputs, r * adapters): the matrices B along a diagonal, as their A lie one below the other."""
        parts = iter(self.lora_B.split(self.qkv_shapes))
        blocks = []
        for n, enabled in zip(
            (self.n_head, self.n_query_groups, self.n_query_groups), self.enable_lora
        ):
            if enabled:
                blocks.append(next(parts))
            else:
                blocks.append(self.lora_B.new_zeros(self.head_size * n, 0))
        return torch.block_diag(*blocks)


# ---- make ----------------------------------------------------------------------------------------


def add_adapters(model: nn.Module, lora: Lora | None) -> None:
    """Put adapters at the layers that lora.targets names, unless the rank is null, and freeze all else.
    Adapters start at zero: the model computes the same as before, to the bit. Raises BadInput."""
    if not lora or not lora.rank:
        return
    model.requires_grad_(False)
    for name, chosen in _chosen_layers(model, lora.targets).items():
        old = model.get_submodule(name)
        kind = AdaptedLinear
        options = dict(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout)
        if len(chosen) == 3:  # q, k and v
            kind = AdaptedQKV
            c = model.config
            options |= dict(
                n_head=c.n_head,
                n_query_groups=c.n_query_groups,
                head_size=c.head_size,
                enable_lora=chosen,
            )
        with torch.device("meta"):
            new = kind(old.in_features, old.out_features, **options)
        new.linear = None  # to_empty must touch the adapters alone
        w = old.weight
        # at least float32: in bfloat16 the small steps of AdamW would round to nothing
        new.to_empty(device=w.device).to(torch.promote_types(w.dtype, torch.float32))
        new.linear = old
        new.reset_parameters()  # A random, B zero; `linear` stays
        model.set_submodule(name, new)


def _chosen_layers(model: nn.Module, targets: str) -> dict[str, tuple[bool, ...]]:
    """The layers that lora.targets names by PEFT's rule: `o_proj` is all layers with this end of the name.
    {layer: (True,)}; for litgpt's layer for q, k and v: which of the three get an adapter."""
    wanted = {target.strip() for target in targets.split(",")}
    used = set()
    layers = {}
    # not for a mixture: PEFT puts adapters of these names at joined experts, too (0.21)
    unfit = ("gate_proj", "up_proj", "down_proj") if model.has_experts else ()
    for name, layer in model.named_modules():
        if type(layer) is not nn.Linear or name.endswith(unfit):
            continue
        hits = []  # for each name the targets that fit it
        for hf_name in _hf_names(model, name):
            fitting = {target for target in wanted if f".{hf_name}".endswith(f".{target}")}
            if name != "lm_head":
                fitting |= wanted & {"all-linear"}
            hits.append(fitting)
        if name.endswith("attn.qkv") and len(hits) == 1:
            hits = hits * 3  # GPT-2 has one name for all three
        if any(hits):
            layers[name] = tuple(map(bool, hits))
            used.update(*hits)
    unused = wanted - used
    if unused:
        raise BadInput(
            "lora.targets: expected all-linear or names of linear layers, such as q_proj or "
            f"self_attn.o_proj; got {', '.join(unused)}"
        )
    if "lm_head" in layers and model.tied:
        raise BadInput("lora.targets: lm_head: it is tied to the embedding, so it takes no adapter")
    return layers


def _hf_names(model: nn.Module, layer: str) -> list[str]:
    """transformers' names of a layer of our model: litgpt's layer for q, k and v may have three."""
    weight = f"{layer}.weight"
    return [x.removesuffix(".weight") for x, rows in model.rows.items() if rows.name == weight]


def _adapted_layers(model: nn.Module) -> dict[str, LoRALinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


@torch.no_grad()
def reset_adapters(model: nn.Module, seed: int) -> None:
    """Restart the adapters: A random by this seed, the same on all ranks, B zero."""
    generator = torch.Generator().manual_seed(seed)
    for layer in _adapted_layers(model).values():
        bound = 1 / math.sqrt(layer.lora_A.shape[1])  # litgpt's kaiming_uniform_ with a = sqrt(5)
        a = torch.rand(layer.lora_A.shape, generator=generator, dtype=torch.float32)
        layer.lora_A.copy_(place_like(a * 2 * bound - bound, layer.lora_A))
        layer.lora_B.zero_()


# ---- disable, merge ------------------------------------------------------------------------------


@contextlib.contextmanager
def disable_adapters(model: nn.Module):
    """Within this context the model computes as without adapters, to the bit."""
    layers = _adapted_layers(model).values()
    assert layers, "no LoRA layers here: the reference would be the policy itself"
    for layer in layers:
        layer.merged = True  # the layer then takes its matrix alone
    try:
        yield
    finally:
        for layer in layers:
            layer.merged = False


@contextlib.contextmanager
@torch.no_grad()
def merge_for_sampling(model: nn.Module, dtype: torch.dtype):
    """Within this context the adapters are added to their matrices, and all matrices of a model with
    adapters are held in `dtype`: a decode step then has one product a layer instead of three, and casts no
    matrix. Afterwards the layers have the same tensor objects as before. Sharded and quantised matrices
    stay as they are.

    The sums are rounded at random: see round_at_random."""
    layers = {layer.linear: layer for layer in _adapted_layers(model).values()}
    weights = {}
    names = {}
    if layers and not isinstance(model, FSDPModule):
        names = {m: name for name, m in model.named_modules() if type(m) is nn.Linear}
        weights = {m: m.weight for m in names}
    try:
        for linear, w in weights.items():
            if layer := layers.get(linear):
                delta = layer.get_lora_AB()
                # as in training, where autocast rounds the base to nearest
                w = round_at_random(w.to(dtype) + delta, dtype, names[linear])
                layer.merged = True  # the layer then takes its matrix alone
            linear.weight = nn.Parameter(w.to(dtype), requires_grad=False)
        yield
    finally:
        for linear, w in weights.items():
            linear.weight = w
        for layer in layers.values():
            layer.merged = False


def gather_adapters(model: nn.Module) -> Adapters:
    """A model's adapters. A collective if the model is sharded."""
    adapters = {}
    for name, layer in _adapted_layers(model).items():
        hf_names = _hf_names(model, name)
        a = gather_tensor(layer.lora_A)
        b = gather_tensor(layer.lora_B)
        parts = [(a, b)]
        if isinstance(layer, LoRAQKVLinear):  # one adapter each for q, k and v
            b_parts = b.split(layer.qkv_shapes)
            if len(hf_names) == 1:  # GPT-2 has one layer for all three: the adapters side by side
                parts = [(a, torch.block_diag(*b_parts))]
            else:
                hf_names = itertools.compress(hf_names, layer.enable_lora)
                parts = zip(a.chunk(len(b_parts)), b_parts)
        for hf_name, (a, b) in zip(hf_names, parts):
            adapters[hf_name] = (a, b, layer.scaling)
    return adapters


def merge_adapters(weights: Mapping, adapters: Adapters, model: nn.Module) -> None:
    """Add adapters to weights, given by their plain names (see plain_name). Raises KeyError for an adapter
    of a layer that the model does not have."""
    for layer, (a, b, scale) in adapters.items():
        rows = model.rows[f"{layer}.weight"]
        weights[rows.name][rows.span].add_(b @ a * scale)


def plain_name(name: str) -> str:
    """A weight's name in a model without adapters. A LoRA layer holds its matrix as .linear:
    attn.qkv.linear.weight -> attn.qkv.weight"""
    return name.replace(".linear.", ".")


@torch.no_grad()
def merged_weights(
    model: nn.Module,
    base: Mapping | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The weights of a model by their plain names, whole and on the CPU, with its adapters merged
    in. base: unrounded weights to use instead of the model's. dtype: the merged matrices are rounded to it at random
    by this seed; None: they stay in float32. A collective if the
    model is sharded: then rank 0 alone returns the values."""
    params = model.unique_parameters()
    is_sharded = any(isinstance(p, DTensor) for p in params.values())
    has_values = rank() == 0 or not is_sharded
    adapters = gather_adapters(model)
    if not has_values:
        adapters = {}
    weights = {}
    for name, p in params.items():
        if "lora_" in name or name.startswith("objective_module."):
            continue
        name = plain_name(name)
        w = gather_tensor(p) if base is None else base[name].detach()
        if not has_values:
            w = w.new_zeros(()).expand(w.shape)  # takes no memory
        if adapters:  # bfloat16 would round the merged weights
            w = w.to(torch.promote_types(w.dtype, torch.float32), copy=True)
        weights[name] = w
    merge_adapters(weights, adapters, model)
    if dtype:
        for name in {model.rows[f"{layer}.weight"].name for layer in adapters}:
            weights[name] = round_at_random(weights[name], dtype, name, seed)
    return weights


def take_out_adapters(model: nn.Module) -> Adapters:
    """Make a model with adapters a plain one again. -> what its adapters were"""
    adapters = gather_adapters(model)
    for name, layer in _adapted_layers(model).items():
        model.set_submodule(name, layer.linear)
    model.requires_grad_(True)
    return adapters
