"""Adapters (LoRA): made, disabled, merged and reset; PEFT's files.

An adapter of rank r is two matrices, A (r, inputs) and B (outputs, r). It adds scale * B @ A to the
matrix W (outputs, inputs) of its layer. This file knows no model class: a model has blocks,
lm_head, config, rows and has_experts (see model.Packed)."""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from litgpt.lora import LoRALinear, LoRAQKVLinear
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from infra.console import BadInput, rank, user_error
from infra.devices import gather_tensor, place_like
from infra.rounding import round_at_random
from infra.settings import Lora
from models.hub import Source, read_json, refuse_missing_weights

Adapter = tuple[torch.Tensor, torch.Tensor, float]  # A, B, scale, as PEFT has them
# {transformers' name of a layer: its adapter}, whole and on the CPU
Adapters = dict[str, Adapter]

# ---- the layers ----------------------------------------------------------------------------------


class AdaptedLinear(LoRALinear):
    """litgpt's layer, with the product with B, the scale and the sum in one kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
    """AdaptedLinear for q, k and v in one matrix: each of the three has an adapter of its own, or none."""

    def outputs(self) -> torch.Tensor:
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
    """The layers that lora.targets names by PEFT's rule: `o_proj` stands for all layers whose names end
    so. {layer: (True,)}; for litgpt's layer for q, k and v: which of the three get an adapter."""
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
    """Start the adapters anew: A random by this seed, the same on all ranks, B zero."""
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


def delta_of(adapter: Adapter) -> torch.Tensor:
    """What an adapter adds to its matrix (outputs, inputs): scale * B @ A."""
    a, b, scale = adapter
    return b @ a * scale


def merge_adapters(weights: Mapping, adapters: Adapters, model: nn.Module) -> None:
    """Add adapters to weights, given by their plain names (see plain_name). Raises KeyError for an adapter
    of a layer that the model does not have."""
    for layer, adapter in adapters.items():
        rows = model.rows[f"{layer}.weight"]
        weights[rows.name][rows.span].add_(delta_of(adapter))


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
) -> dict[str, torch.Tensor]:
    """The weights of a model by their plain names, whole and on the CPU, with its adapters merged
    in. base: weights to use in place of the model's own, if those are rounded. dtype: what the merged matrices are
    rounded to, at random by this seed; None: they stay in float32. A collective if the
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


# ---- PEFT's files --------------------------------------------------------------------------------


# Fields of PEFT's LoraConfig that are read here, or that change nothing in a trained adapter. Any other
# field with a value changes what the adapter computes, or may do so in a later version of PEFT.
PEFT_FIELDS = set(
    """
    alpha_pattern auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config
    exclude_modules fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform
    loftq_config lora_alpha lora_dropout lora_ga_config megatron_core modules_to_save peft_type
    peft_version qalora_group_size r rank_pattern revision runtime_config target_modules
    target_parameters task_type trainable_token_indices use_rslora
    """.split()
)
# The values that some of these fields may have. Other ways to initialise an adapter change the base.
PEFT_VALUES = {
    "peft_type": ["LORA"],
    "init_lora_weights": [True, "gaussian", "eva", "orthogonal"],
    "revision": ["main"],
}


class PeftFolder(NamedTuple):
    """What a PEFT folder changes in its base. All names are transformers'."""

    adapters: Adapters
    """Of linear layers, and of the embedding: its matrix is (tokens, width), B (tokens, r), A (r, width)."""
    weights: dict[str, torch.Tensor]
    """Weights that the folder holds as a whole: they take the place of the base's."""
    token_rows: dict[str, dict[int, torch.Tensor]]
    """For a layer the rows of single tokens: they take the place of the base's."""
    modules_to_save: list[str]
    """Ends of names of layers that have a weight of their own in PEFT, even if the base's is tied."""


def read_peft(folder: Path) -> PeftFolder:
    """Raises BadInput where the folder holds another method than LoRA, or a variant of it."""
    file = folder / "adapter_config.json"
    config = read_json(file)
    for name in ["peft_type", *config]:  # the type first: each type has fields of its own
        value = config.get(name)
        is_supported = name in PEFT_FIELDS and value in PEFT_VALUES.get(name, [value])
        if value and not is_supported:
            raise BadInput(f"{file}: {name}: {value} is not supported")
    file = folder / "adapter_model.safetensors"
    refuse_missing_weights(folder, [file])
    with user_error(None, file):
        tensors = load_file(file)
    peft = PeftFolder({}, {}, {}, config.get("modules_to_save") or [])
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix("base_model.model.")
        layer, _, kind = name.rpartition(".")
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            b = tensors[full_name.replace("lora_A", "lora_B")]
            scale = _peft_scale(config, layer, rank=len(tensor))
            peft.adapters[layer] = (tensor.float(), b.float(), scale)
        elif kind == "lora_embedding_A":
            # PEFT's A (r, tokens) and B (width, r) of an embedding are our B and A, transposed
            embedding_B = tensors[full_name.replace("embedding_A", "embedding_B")]
            scale = _peft_scale(config, layer, rank=len(tensor))
            peft.adapters[layer] = (embedding_B.T.float(), tensor.T.float(), scale)
        elif kind == "trainable_tokens_delta":
            layer = layer.removesuffix(".token_adapter")
            ids = config["trainable_token_indices"]
            if isinstance(ids, dict):
                ids = next(ids[end] for end in ids if layer.endswith(end))
            peft.token_rows[layer] = dict(zip(ids, tensor.float()))
        elif ".original_module." not in name and not re.search(r"\.lora_(B|embedding_B)\b", name):
            # original_module: what PEFT does not use while the adapter is on
            wrappers = r"\.(token_adapter\.base_layer|base_layer|modules_to_save)(?=\.\w+$)"
            peft.weights[re.sub(wrappers, "", name)] = tensor
    return peft


def _peft_scale(config: dict, layer: str, rank: int) -> float:
    """The factor of B @ A."""
    parameters = tuple(f".{x}" for x in config.get("target_parameters") or [])
    if f".{layer}.weight".endswith(parameters):  # PEFT looks for the name of the matrix there
        layer = f"{layer}.weight"
    # the pattern self_attn.q_proj is for all layers whose names end so; the first that fits counts
    patterns = (config.get("alpha_pattern") or {}).items()
    alphas = (alpha for x, alpha in patterns if re.fullmatch(rf"(.*\.)?({x})", layer))
    alpha = next(alphas, config.get("lora_alpha", 8))
    if config.get("use_rslora"):
        return alpha / rank**0.5
    return alpha / rank


def merge_into_layer(adapter: Adapter, module: nn.Module) -> None:
    """Add an adapter to the matrix of one layer. A tied layer gets a matrix of its own, as in PEFT."""
    delta = delta_of(adapter)
    if isinstance(module, Conv1D):
        delta = delta.T
    module.weight = nn.Parameter(module.weight + delta)


def output_with_adapter(
    adapter: Adapter, module: nn.Module, inputs: tuple, output: torch.Tensor
) -> torch.Tensor:
    """A layer's output with an adapter beside its matrix: a hook of the layer's forward."""
    a, b, scale = adapter
    a = a.to(output.dtype)
    b = b.to(output.dtype)
    if isinstance(module, nn.Embedding):
        scale = scale * getattr(module, "embed_scale", 1)  # Gemma's factor of the embedding
        return output + nn.functional.embedding(inputs[0], b) @ a * scale
    return output + inputs[0] @ a.T @ b.T * scale


def write_peft(
    adapters: Adapters, model: nn.Module, source: Source, base: str, lora: Lora, out: Path
) -> None:
    """Write a model's adapters in PEFT's format. base: the name of their base model, for PEFT.
    If the source is made of PEFT folders, the file also holds all that these folders change: their adapters
    stand beside the model's adapters."""
    folders = []  # from the base outwards
    while source.base:
        folders.insert(0, read_peft(source.folder))
        source = source.base
    folders.append(PeftFolder(adapters, {}, {}, []))
    parts: dict[str, list] = {}
    weights: dict[str, torch.Tensor] = {}
    token_rows: dict[str, dict[int, torch.Tensor]] = {}
    for peft in folders:
        for name, weight in peft.weights.items():
            weights[name] = weight
            layer = name.removesuffix(".weight")
            parts.pop(layer, None)  # the whole weight replaces what inner folders added to it
            token_rows.pop(layer, None)
        for layer, rows in peft.token_rows.items():
            token_rows[layer] = token_rows.get(layer, {}) | rows
        for layer, adapter in peft.adapters.items():
            parts[layer] = [adapter, *parts.get(layer, [])]
    # All layers get one scale and one rank. PEFT's alpha_pattern and rank_pattern may give each its own, but other
    # programs (llama.cpp, vLLM) do not read them: they would scale the layers wrongly, or refuse the file.
    scale = lora.alpha / lora.rank
    tensors: dict[str, torch.Tensor] = {}
    rank = max(sum(len(a) for a, _, _ in adapters_of_layer) for adapters_of_layer in parts.values())
    modules = []
    matrices = []
    for layer, adapters_of_layer in parts.items():
        a = torch.cat([a for a, _, _ in adapters_of_layer])
        b = torch.cat([b * (b_scale / scale) for _, b, b_scale in adapters_of_layer], 1)
        n_missing = rank - len(a)
        a = nn.functional.pad(a, (0, 0, 0, n_missing))  # rows of zeros
        b = nn.functional.pad(b, (0, n_missing))  # columns
        module = model.get_submodule(model.rows[f"{layer}.weight"].name.removesuffix(".weight"))
        if isinstance(module, nn.Embedding):
            tensors[f"{layer}.lora_embedding_A"] = b.T.contiguous()
            tensors[f"{layer}.lora_embedding_B"] = a.T.contiguous()
        else:
            tensors[f"{layer}.lora_A.weight"] = a
            tensors[f"{layer}.lora_B.weight"] = b
        if not isinstance(module, nn.Embedding | nn.Linear | LoRALinear):
            matrices.append(f"{layer}.weight")  # outside a linear layer, such as a mixture's router
        else:
            modules.append(layer)
    for layer, rows in token_rows.items():
        tensors[f"{layer}.token_adapter.trainable_tokens_delta"] = torch.stack(list(rows.values()))
    for name, weight in weights.items():
        layer, _, kind = name.rpartition(".")
        # PEFT's layer has the layer of the model inside itself, as base_layer
        if layer in parts:
            name = f"{layer}.base_layer.{kind}"
        elif layer in token_rows:
            name = f"{layer}.token_adapter.base_layer.{kind}"
        tensors[name] = weight
    alpha = scale * rank
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha, "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        "fan_in_fan_out": any(rows.transposed for rows in model.rows.values()),
    }  # fmt: skip
    if matrices:
        config["target_parameters"] = matrices
    if token_rows:
        config["trainable_token_indices"] = {x: list(rows) for x, rows in token_rows.items()}
    tensors = {f"base_model.model.{name}": x for name, x in tensors.items()}
    save_file(tensors, out / "adapter_model.safetensors", {"format": "pt"})
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
