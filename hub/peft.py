"""PEFT's adapter files: read an adapter, and write the adapters of a run.

A PEFT folder holds adapter_config.json and adapter_model.safetensors: for each adapted layer the
matrices A (r, inputs) and B (outputs, r), under Hugging Face's names.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from hub.families import (
    Piece,
    Unsupported,
    canonical_name,
    field_value,
    must_equal,
    weight_layout,
)
from hub.folders import folders_on_top, name_of_base
from hub.lora import OurAdapter, our_adapters, plain_names
from hub.transformers_models import read_model_config
from runs.errors import BadInput, printable
from runs.settings import Lora
from runs.small_files import read_object

# Fields of adapter_config.json that are read, with the values that PEFT takes for those that a file
# leaves out.
FIELDS = dict(lora_alpha=8.0, use_rslora=False, alpha_pattern=None)
# Fields that turn LoRA into another method where they are set: use_dora, eva_config,
# layer_replication, alora_invocation_tokens, modules_to_save, lora_bias.
OTHER_METHODS = re.compile(
    "use_(?!rslora)|.*_config$|layer_replication|alora_|modules_to_save|lora_bias"
)
# A pattern in alpha_pattern that repeats a group, or has many repetitions, may take forever to match.
REPEATED_GROUP, REPEAT = re.compile(r"\)[*+{]"), re.compile(r"[*+{]|(?<!\()\?")
# base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight:
# A of the layer model.layers.0.self_attn.q_proj
TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")


class PeftAdapter(NamedTuple):
    """One layer's adapter in a PEFT folder: it adds scale * B @ A to the layer's weight."""

    name: str
    """The weight, by Hugging Face's name."""
    a: torch.Tensor
    """(r, inputs), float32"""
    b: torch.Tensor
    """(outputs, r), float32"""
    scale: float


# ---- read ----------------------------------------------------------------------------------------


def read_adapter(folder: Path) -> list[PeftAdapter]:
    """The adapters of a PEFT folder, by the names in its file. Raises BadInput, also where the
    folder holds another method than plain LoRA."""
    try:
        config = _read_adapter_config(folder)
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as e:
        raise BadInput(f"{folder}: no usable PEFT adapter: {e}") from None
    file = folder / "adapter_model.safetensors"
    layers = {}  # layer: {"A": its matrix A, "B": its matrix B}
    for key, x in tensors.items():
        match = TENSOR.fullmatch(key)
        if not match:
            raise BadInput(f"{file}: {key}: only LoRA's A and B are supported")
        layer, kind = match.groups()
        if kind in layers.setdefault(layer, {}):
            raise BadInput(f"{file}: {key}: there under another name too")
        layers[layer][kind] = x
    adapters = []
    for layer, matrices in layers.items():
        if len(matrices) < 2:
            raise BadInput(f"{file}: {layer}: lora_{next(iter(matrices))} alone")
        a, b = matrices["A"].float(), matrices["B"].float()
        if a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1] or len(a) == 0:
            shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise BadInput(f"{file}: {layer}: lora_A and lora_B of shapes {shapes}")
        scale = _alpha(config, layer) / (len(a) ** 0.5 if config["use_rslora"] else len(a))
        adapters.append(PeftAdapter(f"{layer}.weight", a, b, scale))
    return adapters


def _read_adapter_config(folder: Path) -> dict:
    """FIELDS of adapter_config.json. Raises BadInput, also for another method than plain LoRA."""
    file = folder / "adapter_config.json"
    given = read_object(file)
    try:
        _refuse_other_methods(given)
        config = FIELDS | {n: field_value(n, given[n], FIELDS[n]) for n in FIELDS if n in given}
        patterns = config["alpha_pattern"] or {}
        if not isinstance(patterns, dict):
            raise Unsupported(f"alpha_pattern: expected an object, got {printable(patterns)}")
        for pattern, alpha in patterns.items():
            field_value(f"alpha_pattern: {pattern}", alpha, 8.0)
            re.compile(pattern)
            if REPEATED_GROUP.search(pattern) or len(REPEAT.findall(pattern)) > 3:
                raise Unsupported(
                    f"alpha_pattern: {printable(pattern)}: a group that is repeated, or more than three "
                    "repetitions: matching it may never end"
                )
    except (Unsupported, re.error) as e:
        raise BadInput(f"{file}: {e}") from None
    return config | {"alpha_pattern": patterns}


def _refuse_other_methods(config: dict) -> None:
    """Raises Unsupported where the folder holds something else than plain LoRA."""
    must_equal(config, peft_type="LORA", bias="none")
    start = config.get("init_lora_weights")
    if start not in (None, True, False, "gaussian"):  # pissa, olora, ...: these change the base
        raise Unsupported(f"init_lora_weights: {printable(start)} is not supported")
    for field, value in config.items():
        if value and OTHER_METHODS.match(field):
            raise Unsupported(f"{field}: {printable(value)} is not supported")


def _alpha(config: dict, layer: str) -> float:
    """lora_alpha, or what the first matching pattern of alpha_pattern says for this layer."""
    for pattern, alpha in config["alpha_pattern"].items():
        # the pattern self_attn.q_proj is for all layers whose names end so
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):
            return alpha
    return config["lora_alpha"]


def base_and_adapters(folder: Path) -> tuple[str, list[PeftAdapter]]:
    """For a folder that fetch_model made of PEFT folders only: the name or path of the base model,
    and the adapters to add to it, in order, by the names of families.yaml. Raises BadInput."""
    folders = folders_on_top(folder)
    adapters = []
    for top in folders:
        for adapter in read_adapter(top):
            adapters.append(adapter._replace(name=canonical_name(adapter.name)))
    return name_of_base(folders[0] / "adapter_config.json"), adapters


# ---- write ---------------------------------------------------------------------------------------


def export_adapter(
    weights: Mapping,
    out: Path | None,
    model: nn.Module,
    source: Path,
    base: str,
    lora: Lora,
    below: Sequence[PeftAdapter] = (),
) -> None:
    """Write the adapters of a run in PEFT's format.

    `weights`: the weights and adapters of `model` by name. `out`: an existing folder, or None on a
    rank that only takes part in gathering `weights`. `source`: the model's Hugging Face folder.
    `base`: the base model that adapter_config.json names. `below`: adapters that the run started
    from (see base_and_adapters): the file then holds these and ours together.
    """
    _, hf_config, names = read_model_config(source)
    adapters = our_adapters(weights, model)
    layout = weight_layout(model.config, names, plain_names(weights).like)
    factors = {}  # Hugging Face's name of a weight: (A, B)
    for name, pieces in layout.items():
        joined = _join(pieces, adapters)
        if joined:
            factors[name] = joined
    scale = adapters[0].scale  # the same in all our layers
    if below:
        factors = _add_below(factors, scale, below)
        # all scales are now within B, so that alpha / rank is 1
        scale = 1
        rank = max(len(a) for a, _ in factors.values())
        lora = Lora(rank=rank, alpha=rank, dropout=lora.dropout)

    # transformers has Gemma 3's language model at another place than its weights file
    vision = hf_config["model_type"] == "gemma3"
    tensors = {}
    ranks = {}  # target module: rank
    for name, (a, b) in factors.items():
        layer = name.removesuffix(".weight")
        path = layer.replace("model.", "model.language_model.", 1) if vision else layer
        tensors[f"base_model.model.{path}.lora_A.weight"] = a
        tensors[f"base_model.model.{path}.lora_B.weight"] = b.contiguous()
        # ours are the same in all layers of the model (self_attn.q_proj); those below may be in
        # some of the layers only
        target = path if below else ".".join(layer.split(".")[-2:])
        ranks[target] = len(a)
    targets = sorted(ranks)
    if vision and not below:  # the vision tower has layers of the same names
        targets = rf".*language_model.*({'|'.join(targets)})"
    # a fused tensor, such as Phi 3's qkv_proj, has a larger rank than the others
    other_ranks = {target: rank for target, rank in ranks.items() if rank != lora.rank}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": False,
        "bias": "none",
        "target_modules": targets,
        "rank_pattern": other_ranks,
        "alpha_pattern": {target: scale * rank for target, rank in other_ranks.items()},
        "fan_in_fan_out": hf_config["model_type"] == "gpt2",
        "inference_mode": True,
    }
    if out is None:
        return
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _join(
    pieces: list[Piece], adapters: list[OurAdapter]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(A, B) of one Hugging Face tensor; None if it has no adapter.

    A fused tensor (q, k and v in one) may hold rows of several adapters of ours. PEFT has one
    adapter for it: we put the A's one below the other and the B's side by side, with zeros where
    an adapter does not change a row.
    """
    used = []
    for piece in pieces:
        for adapter in adapters:
            if _covers(adapter, piece) and not any(adapter is other for other in used):
                used.append(adapter)
    if not used:
        return None
    b_rows = []
    for piece in pieces:
        columns = []
        for adapter in used:
            if _covers(adapter, piece):
                columns.append(adapter.b[piece.first - adapter.first : piece.end - adapter.first])
            else:
                columns.append(adapter.b.new_zeros(piece.end - piece.first, len(adapter.a)))
        b_rows.append(torch.cat(columns, dim=1))
    return torch.cat([adapter.a for adapter in used]), torch.cat(b_rows)


def _covers(adapter: OurAdapter, piece: Piece) -> bool:
    """Whether an adapter changes these rows."""
    return adapter.name == piece.name and adapter.first <= piece.first < adapter.end


def _add_below(
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]],
    scale: float,
    below: Sequence[PeftAdapter],
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(A, B) of our adapters and those below them together, with every scale multiplied into B."""
    factors = {name: (a, b * scale) for name, (a, b) in factors.items()}
    for adapter in below:
        a_parts = [adapter.a]
        b_parts = [adapter.b * adapter.scale]
        if adapter.name in factors:
            a, b = factors[adapter.name]
            a_parts.append(a)
            b_parts.append(b)
        factors[adapter.name] = torch.cat(a_parts), torch.cat(b_parts, dim=1)
    return factors
