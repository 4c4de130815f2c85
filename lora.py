"""Adapters (LoRA): made, disabled, merged and reset; PEFT's files; a base in 4 bits.

An adapter of rank r is two matrices, A (r, inputs) and B (outputs, r). It adds scale * B @ A to the
matrix W (outputs, inputs) of its layer. This file knows no model class: a model has blocks,
lm_head, config, rows and has_experts (see model.Packed)."""

import contextlib
import itertools
import json
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from litgpt.lora import LoRALinear, LoRAQKVLinear
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from head import autocast
from hub import Source, read_json
from runs.console import BadInput, rank, user_error
from runs.devices import gather_tensor, place_like
from runs.settings import Lora, refuse_unless

# {transformers' name of a layer: A, B, scale}, as PEFT has them, whole and on the CPU
Adapters = dict[str, tuple[torch.Tensor, torch.Tensor, float]]

# ---- the layers ----------------------------------------------------------------------------------


class AdaptedLinear(LoRALinear):
    """litgpt's layer. The product with B, the scale and the sum are one kernel here."""

    def forward(self, x):
        """(..., inputs) -> (..., outputs)"""
        y = self.linear(x)
        if self.merged:  # or disabled
            return y
        after_A = nn.functional.linear(self.lora_dropout(x), self.lora_A)
        rows = y.flatten(0, -2)
        sums = torch.addmm(rows, after_A.flatten(0, -2), self.outputs().T, alpha=self.scaling)
        return sums.view_as(y)

    def outputs(self) -> torch.Tensor:
        """B (outputs, r)"""
        return self.lora_B


class AdaptedQKV(AdaptedLinear, LoRAQKVLinear):
    """The same for q, k and v in one matrix: an adapter each, or none."""

    def outputs(self) -> torch.Tensor:
        """(outputs, r * adapters): the matrices B along a diagonal, as their A lie one below the other."""
        sizes = [
            self.head_size * n for n in (self.n_head, self.n_query_groups, self.n_query_groups)
        ]
        parts = iter(self.lora_B.split(self.qkv_shapes))
        blocks = [
            next(parts) if enabled else self.lora_B.new_zeros(size, 0)
            for size, enabled in zip(sizes, self.enable_lora)
        ]
        return torch.block_diag(*blocks)


# ---- make ----------------------------------------------------------------------------------------


def add_adapters(model: nn.Module, lora: Lora | None) -> None:
    """Put adapters at the layers that lora.targets names, unless the rank is null. They start at
    zero: the model computes what it did, to the bit. From then on they alone are trained. Raises
    BadInput."""
    if not lora or not lora.rank:
        return
    model.requires_grad_(False)
    for name, chosen in _chosen_layers(model, lora.targets).items():
        old = model.get_submodule(name)
        kind = AdaptedLinear
        options = dict(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout)
        if len(chosen) == 3:
            kind, c = AdaptedQKV, model.config
            options |= dict(
                n_head=c.n_head,
                n_query_groups=c.n_query_groups,
                head_size=c.head_size,
                enable_lora=chosen,
            )
        with torch.device("meta"):
            new = kind(old.in_features, old.out_features, **options)
        new.linear, w = None, old.weight  # to_empty and reset_parameters touch the adapters alone
        # at least float32: in bfloat16 the small steps of AdamW would round to nothing
        new.to_empty(device=w.device).to(torch.promote_types(w.dtype, torch.float32))
        new.linear = old
        new.reset_parameters()  # A random, B zero
        model.set_submodule(name, new)


def _chosen_layers(model: nn.Module, targets: str) -> dict[str, tuple[bool, ...]]:
    """The layers that lora.targets names by PEFT's rule: `o_proj` is for all whose names end so. Of
    litgpt's layer for q, k and v, which of the three."""
    targets, found, layers = {target.strip() for target in targets.split(",")}, set(), {}
    # PEFT puts adapters of these names at joined experts, too (0.21)
    unfit = ("gate_proj", "up_proj", "down_proj") if model.has_experts else ()
    for name, layer in model.named_modules():
        if type(layer) is not nn.Linear or name.endswith(unfit):
            continue
        everywhere = targets & {"all-linear"} if name != "lm_head" else set()
        hits = [
            everywhere | {t for t in targets if f".{x}".endswith(f".{t}")}
            for x in _their_names(model, name)
        ]
        if name.endswith("attn.qkv"):
            hits = (hits * 3)[:3]  # GPT-2 has one name for all three
        if any(hits):
            layers[name] = tuple(map(bool, hits))
            found.update(*hits)
    refuse_unless(
        targets <= found,
        "lora.targets: expected all-linear or names of linear layers, such as q_proj or "
        f"self_attn.o_proj; got {', '.join(targets - found)}",
    )
    refuse_unless(
        "lm_head" not in layers or not model.tied,
        "lora.targets: lm_head: it is tied to the embedding, so it takes no adapter",
    )
    return layers


def _their_names(model: nn.Module, layer: str) -> list[str]:
    """transformers' names of a layer of ours: litgpt's layer for q, k and v may have three."""
    weight = f"{layer}.weight"
    return [x.removesuffix(".weight") for x, rows in model.rows.items() if rows.name == weight]


def _adapted_layers(model: nn.Module) -> dict[str, LoRALinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


@torch.no_grad()
def reset_adapters(model: nn.Module, seed: int) -> None:
    """Set the adapters back to a start: A random by this seed, the same on all ranks, B zero."""
    generator = torch.Generator().manual_seed(seed)
    for layer in _adapted_layers(model).values():
        bound = 1 / math.sqrt(layer.lora_A.shape[1])  # litgpt's kaiming_uniform_ with a = sqrt(5)
        a = torch.rand(layer.lora_A.shape, generator=generator, dtype=torch.float32)
        layer.lora_A.copy_(place_like(a * 2 * bound - bound, layer.lora_A))
        layer.lora_B.zero_()


# ---- disable, merge ------------------------------------------------------------------------------


@contextlib.contextmanager
def disable_adapters(model: nn.Module):
    """Within this context the model computes what it would without adapters, to the bit."""
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
    """Within this context the adapters are added to their matrices, and these and all other
    matrices of a model with adapters are held in `dtype`: a decode step then has one product a
    layer instead of three, and casts no matrix. Afterwards the layers have the very tensors that
    they had. It leaves alone what is sharded or quantised."""
    layers = {layer.linear: layer for layer in _adapted_layers(model).values()}
    weights = {}
    if layers and not hasattr(model, "reshard"):  # FSDP2 has not sharded it
        weights = {m: m.weight for m in model.modules() if type(m) is nn.Linear}
    try:
        for linear, w in weights.items():
            if layer := layers.get(linear):
                delta = layer.get_lora_AB()
                w = w.to(delta.dtype) + delta
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
        theirs = _their_names(model, name)
        a, b = gather_tensor(layer.lora_A), gather_tensor(layer.lora_B)
        parts = [(a, b)]
        if isinstance(layer, LoRAQKVLinear):  # one adapter each for q, k and v
            b = b.split(layer.qkv_shapes)
            if len(theirs) == 1:  # GPT-2 has one layer for all three: the adapters side by side
                parts = [(a, torch.block_diag(*b))]
            else:
                theirs = itertools.compress(theirs, layer.enable_lora)
                parts = zip(a.chunk(len(b)), b)
        adapters |= {x: (*part, layer.scaling) for x, part in zip(theirs, parts)}
    return adapters


def merge_adapters(weights: Mapping, adapters: Adapters, model: nn.Module) -> None:
    """Add adapters to weights, which have the plain names of the model's. Raises
    KeyError for an adapter of a layer that the model does not have."""
    for layer, (a, b, scale) in adapters.items():
        rows = model.rows[f"{layer}.weight"]
        weights[rows.name][rows.span].add_(b @ a * scale)


def plain_name(name: str) -> str:
    """A weight's name in a model without adapters. A LoRA layer holds its matrix as .linear:
    attn.qkv.linear.weight -> attn.qkv.weight"""
    return name.replace(".linear.", ".")


@torch.no_grad()
def merged_weights(model: nn.Module, base: Mapping | None = None) -> dict[str, torch.Tensor]:
    """The weights of a model by their plain names, whole and on the CPU, with its adapters merged
    in. base: weights in place of the model's own, where these are rounded. A collective if the
    model is sharded: then rank 0 alone has their values."""
    adapters, weights = gather_adapters(model), {}
    for name, p in model.unique_parameters().items():
        if "lora_" in name or name.startswith("objective_module."):
            continue
        name = plain_name(name)
        w = gather_tensor(p) if base is None else base[name].detach()
        if rank() and isinstance(p, DTensor):  # rank 0's counts; this one takes no memory
            w, adapters = w.new_zeros(()).expand(w.shape), {}
        if adapters:  # bfloat16 would round the merged weights
            w = w.to(torch.promote_types(w.dtype, torch.float32), copy=True)
        weights[name] = w
    merge_adapters(weights, adapters, model)
    return weights


@torch.no_grad()
def fold_adapters(model: nn.Module, adapters: Adapters | None = None) -> None:
    """Merge adapters, by default the model's own, for good: the model is then a plain one. Raises
    KeyError."""
    adapters = adapters or gather_adapters(model)
    for name, layer in _adapted_layers(model).items():
        model.set_submodule(name, layer.linear)
    merge_adapters(model.state_dict(), adapters, model)
    model.requires_grad_(True)


# ---- PEFT's files --------------------------------------------------------------------------------


def read_peft(folder: Path) -> Adapters:
    """The adapters of a PEFT folder. Raises BadInput where it holds another method than plain LoRA."""
    config = read_json(folder / "adapter_config.json")
    # what plain LoRA says there: pissa, olora and the like change the base
    plain = {"peft_type": ["LORA"], "bias": ["none"], "init_lora_weights": [True, "gaussian"]}
    others = "use_(?!rslora)|.*_config$|layer_replication|alora_|modules_to_save|lora_bias"
    for name, value in config.items():
        if value and (re.match(others, name) or value not in plain.get(name, [value])):
            raise BadInput(f"{folder}/adapter_config.json: {name}: {value} is not supported")
    adapters, patterns = {}, (config.get("alpha_pattern") or {}).items()
    with user_error(None, folder):
        tensors = load_file(folder / "adapter_model.safetensors")
        for name, a in tensors.items():
            # base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight: of
            # model.layers.0.self_attn.q_proj
            pattern = r"(?:base_model\.model\.)?(.+)\.(lora_[AB])\.weight"
            layer, kind = re.fullmatch(pattern, name).groups()
            if kind == "lora_B":
                continue
            # the pattern self_attn.q_proj is for all layers whose names end so; the first that
            # fits counts
            own = (x for pattern, x in patterns if re.fullmatch(rf"(.*\.)?({pattern})", layer))
            alpha = next(own, config.get("lora_alpha", 8))
            b = tensors[name.replace("lora_A", "lora_B")]
            scale = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
            adapters[layer] = a.float(), b.float(), scale
    return adapters


def write_peft(
    adapters: Adapters, model: nn.Module, source: Source, base: str, lora: Lora, out: Path
) -> None:
    """Write a model's adapters in PEFT's format. base: the model that they belong to.
    If the source is made of PEFT folders, the file holds their adapters and ours side by side."""
    scale, sets = lora.alpha / lora.rank, [adapters]
    while source.base:
        sets.append(read_peft(source.folder))
        source = source.base
    tensors, ranks = {}, {}
    for layer in dict.fromkeys(itertools.chain(*sets)):
        parts = [adapters[layer] for adapters in sets if layer in adapters]
        # PEFT has one scale for a layer: the scales of those before go into their B
        a, b = [a for a, _, _ in parts], [b * (own / scale) for _, b, own in parts]
        tensors[f"base_model.model.{layer}.lora_A.weight"] = torch.cat(a)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = torch.cat(b, 1)
        ranks[layer] = sum(map(len, a))
    others = {layer: rank for layer, rank in ranks.items() if rank != lora.rank}
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout,
        "target_modules": sorted(ranks), "rank_pattern": others,
        "alpha_pattern": {layer: scale * rank for layer, rank in others.items()},
        "fan_in_fan_out": any(rows.transposed for rows in model.rows.values()),
    }  # fmt: skip
    save_file(tensors, out / "adapter_model.safetensors", {"format": "pt"})
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


# ---- a base in 4 bits ----------------------------------------------------------------------------


def quantize_base(model: nn.Module, device: torch.device | str) -> None:
    """QLoRA (arXiv 2305.14314): put bitsandbytes' layers of 4 bits (nf4) in place of the frozen
    linear layers of all blocks, on `device`. Adapters, biases and everything outside the blocks
    stay as they are. Raises BadInput."""
    # bitsandbytes warns at every forward that it casts its inputs, which is what we want
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.nn as bnb  # slow to import

    for name, old in list(model.blocks.named_modules()):
        if type(old) is not nn.Linear:
            continue
        # on a CPU bitsandbytes computes other widths wrong, by 20 to 40%, without an error
        refuse_unless(
            old.in_features % 64 == 0,
            "lora.quantize: nf4 needs layer widths that are multiples of 64, "
            f"this model has {old.in_features}",
        )
        sizes = old.in_features, old.out_features
        new = bnb.Linear4bit(*sizes, quant_type="nf4", device="meta")
        new.weight = bnb.Params4bit(old.weight.data, quant_type="nf4", module=new).to(device)
        new.bias = old.bias
        # autocast casts the inputs of nn.Linear, but not of these
        new.register_forward_pre_hook(lambda _, inputs: autocast(inputs[0]))
        # On a CPU eval() would repack the weights for good, and these pass no gradient on.
        new.train = lambda mode=True, new=new: new
        model.blocks.set_submodule(name, new)
