"""Families of models: config.json as arguments of litgpt's Config, and where each weight lies.

families.yaml is the table of the families that are known. Here are the rules that do not fit into
a table. Every field of config.json that changes what a model computes is read, or it must have the
one value that litgpt's block computes.

Reading order: read_config and the rules of single families; rotary positions; names of weights;
weight_layout.
"""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from runs.errors import BadInput, printable
from runs.files import read_object

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["families"]

# argument of litgpt's Config: the names that families have for this field of config.json
REQUIRED = {
    "block_size": ("max_position_embeddings", "n_positions"),
    "n_layer": ("num_hidden_layers", "n_layer"),
    "n_embd": ("hidden_size", "n_embd"),
    "n_head": ("num_attention_heads", "n_head"),
    "norm_eps": ("layer_norm_eps", "layer_norm_epsilon"),  # of a LayerNorm; see _common
    "vocab_size": ("vocab_size",),
}
OPTIONAL = {
    "n_query_groups": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "n_expert": ("num_experts", "num_local_experts"),
    "n_expert_per_token": ("num_experts_per_tok",),
}
ACTIVATION = ("hidden_activation", "hidden_act", "activation", "activation_function")
# GELU by Hugging Face's name: litgpt's gelu_approximate
GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
# a larger number in a config is a mistake, and building such a model would take all memory
LARGEST = dict(n_layer=10**4, n_head=10**5, n_embd=10**6, block_size=10**8, vocab_size=10**8)


class ModelConfig(NamedTuple):
    """What a model folder says about its model, before any weight is read."""

    arguments: dict
    """Arguments of litgpt's Config."""
    config: dict
    """The content of config.json, with tie_word_embeddings filled in."""
    names: dict[str, str] | None
    """litgpt's name of a part: Hugging Face's name (see families.yaml). None for a litgpt folder."""


class Unsupported(ValueError):
    """A field asks for something that is not computed here. The text begins with the field's name;
    who knows the file puts its path in front."""


def read_config(folder: Path) -> ModelConfig:
    """What the config.json of a Hugging Face folder says. Raises BadInput."""
    file = folder / "config.json"
    if not file.exists():
        raise BadInput(f"{file}: no such file, so this is not a model folder")
    config = read_object(file, json.loads)
    try:
        return _read_family(config, file)
    except Unsupported as e:
        raise BadInput(f"{file}: {e}") from None
    except (KeyError, TypeError, AttributeError, ArithmeticError) as e:
        raise BadInput(f"{file}: {e} is missing or broken") from None


def _read_family(config: dict, file: Path) -> ModelConfig:
    kind = config.get("model_type")
    family = TABLE.get(kind)
    if not family:
        raise Unsupported(f"model_type: {kind!r} is not supported")
    # a model with a vision tower keeps the fields of its language model in text_config
    fields = family.get("default", {}) | config | config.get("text_config", {})
    must_equal(fields, quantization_config=None, **family.get("must", {}))
    layer_types = {"full_attention"}
    if "gemma" in kind:
        layer_types.add("sliding_attention")
    for layer_type in fields.get("layer_types") or ():
        if layer_type not in layer_types:
            raise Unsupported(f"layer_types: {layer_type} is not supported for {kind}")

    arguments = _common(fields, family)
    if kind in RULES:
        arguments |= RULES[kind](fields)
    # litgpt's RMSNorm adds 1 to its weights where this name has Gemma in it, so the name comes
    # from the model_type and never from the folder, which may have any name
    arguments["name"] = "Gemma" if "gemma" in kind else kind
    check_sizes(arguments, file)

    names = dict(family["names"])
    if kind == "falcon" and not arguments["shared_attention_norm"]:
        names |= {"norm_1": "ln_attn", "norm_2": "ln_mlp"}
    config["tie_word_embeddings"] = fields.get("tie_word_embeddings", False)
    return ModelConfig(arguments, config, names)


def check_sizes(arguments: dict, file: Path) -> None:
    """Refuse impossible sizes before anything of such a size is made. Raises BadInput."""
    for name, largest in LARGEST.items():
        n = arguments.get(name)
        if type(n) is not int or not 1 <= n <= largest:
            raise BadInput(f"{file}: {name}: expected 1 to {largest}, got {printable(n)}")


def must_equal(c: dict, **fields) -> None:
    """Raises Unsupported where a field is set to something else than the value that is computed
    here; None: the field must not be set."""
    for name, value in fields.items():
        if c.get(name) not in (None, value):
            only = "" if value is None else f", only {value}"
            raise Unsupported(f"{name}: {c[name]} is not supported{only}")


def _first_name(c: dict, names: tuple[str, ...]) -> str | None:
    """The first of these names that the file gives a value; None if it gives none of them a value."""
    return next((name for name in names if c.get(name) is not None), None)


def _first_value(c: dict, names: tuple[str, ...], default=None):
    """The value of the first of these fields that the file gives one; else `default`."""
    name = _first_name(c, names)
    return default if name is None else c[name]


# ---- the rules: fields of config.json -> arguments of litgpt's Config ----------------------------


def _common(c: dict, family: dict) -> dict:
    """The arguments that every family has."""
    arguments = dict(family["fixed"])
    fields = REQUIRED | OPTIONAL
    if arguments["norm_class_name"] == "RMSNorm":
        fields["norm_eps"] = ("rms_norm_eps",)
    for argument, names in fields.items():
        arguments[argument] = _first_value(c, names)
    for argument in REQUIRED:
        if arguments[argument] is None:
            raise KeyError(" or ".join(fields[argument]))
    arguments["padded_vocab_size"] = c["vocab_size"]
    arguments["gelu_approximate"] = _gelu_approximate(c, arguments["mlp_class_name"])
    if arguments["rotary_percentage"]:
        arguments |= _rope(c)
    for argument, field in family.get("read", {}).items():
        arguments[argument] = c.get(field)
    return arguments


def _gelu_approximate(c: dict, mlp_class_name: str) -> str:
    """litgpt's gelu_approximate. A LLaMAMLP computes silu, all others a GELU."""
    # transformers reads hidden_act for Gemma 1, and ignores a hidden_activation beside it
    names = ("hidden_act",) if c["model_type"] == "gemma" else ACTIVATION
    activation = _first_value(c, names, "silu")
    supported = ["silu"] if mlp_class_name.startswith("LLaMA") else GELUS
    if activation not in supported:
        raise Unsupported(f"{_first_name(c, names)}: {activation} is not supported")
    return GELUS.get(activation, "none")


def _llama(c: dict) -> dict:
    bias = bool(c.get("mlp_bias"))
    must_equal(c, attention_bias=bias)  # litgpt has one switch for both
    return {"bias": bias}


def _granite(c: dict) -> dict:
    scales = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    return {
        **_llama(c),
        # litgpt's Config has no place for these; model.py reads them from hf_config
        "hf_config": {"scales": {name: c[name] for name in scales}},
        # litgpt divides the scores by the square root of this number
        "attention_scores_scalar": c["attention_multiplier"] ** -2,
    }


def _smollm3(c: dict) -> dict:
    """Some layers have no positions: rope_indices is 0 for rotary positions, 1 for none."""
    n_layer = c["num_hidden_layers"]
    interval = c["no_rope_layer_interval"]
    # despite its name, no_rope_layers is 1 where a layer has rotary positions
    has_rope = c.get("no_rope_layers") or [(i + 1) % interval for i in range(n_layer)]
    return {**_llama(c), "rope_indices": [int(not x) for x in has_rope]}


def _gemma2(c: dict) -> dict:
    """Some layers attend within a window: sliding_window_indices is 1 for these, else 0."""
    n_layer = c["num_hidden_layers"]
    pattern = _first_value(c, ("_sliding_window_pattern", "sliding_window_pattern"))
    is_local = [x == "sliding_attention" for x in c.get("layer_types") or ()]
    if not is_local:  # every pattern-th layer attends to everything
        is_local = [(i + 1) % pattern != 0 for i in range(n_layer)]
    return {"sliding_window_indices": [int(x) for x in is_local]}


def _gemma3(c: dict) -> dict:
    """Gemma 2's layers; those with a window have a rope_theta of their own."""
    by_layer_type = c.get("rope_parameters") or {}
    full = by_layer_type.get("full_attention") or {}
    local = by_layer_type.get("sliding_attention") or {}
    must_equal(local, rope_type="default")
    windows = _gemma2(c)
    return {
        **windows,
        **_rope({"rope_theta": 1e6} | c | {"rope_parameters": full}),
        "rope_indices": windows["sliding_window_indices"],
        "rope_local_base_freq": local.get("rope_theta") or c["rope_local_base_freq"],
    }


def _falcon(c: dict) -> dict:
    new = c.get("new_decoder_architecture")
    n_head = c["num_attention_heads"]
    if new:
        groups = c.get("num_kv_heads") or n_head
    else:
        groups = 1 if c["multi_query"] else n_head
    two_norms = new and c.get("num_ln_in_parallel_attn") in (None, 2)
    return {"n_query_groups": groups, "shared_attention_norm": not two_norms}


RULES = {
    "llama": _llama,
    "granite": _granite,
    "smollm3": _smollm3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "falcon": _falcon,
}


# ---- rotary positions ----------------------------------------------------------------------------


def _rope(c: dict) -> dict:
    """litgpt's arguments of rotary positions.

    transformers 5 writes one field, rope_parameters; older files have rope_theta and rope_scaling.
    """
    parameters = c.get("rope_parameters") or {}
    scaling = c.get("rope_scaling") or parameters
    kind = _first_value(scaling, ("rope_type", "type"), "default")
    theta = _first_value(c | parameters | scaling, ("rope_theta", "rotary_emb_base"), 10000)
    arguments = {"rope_base": theta, "rope_adjustments": None}
    rotary = _first_value(c | parameters, ("partial_rotary_factor", "rotary_pct"))
    if rotary is not None:
        arguments["rotary_percentage"] = rotary
    if kind == "llama3":
        arguments["rope_adjustments"] = {
            "factor": scaling["factor"],
            "low_freq_factor": scaling["low_freq_factor"],
            "high_freq_factor": scaling["high_freq_factor"],
            "original_max_seq_len": scaling["original_max_position_embeddings"],
        }
    elif kind == "linear":
        arguments["rope_adjustments"] = {"factor": scaling["factor"]}
    elif kind in ("longrope", "su"):
        arguments |= _longrope(c, scaling)
    elif kind != "default":
        raise Unsupported(f"rope_scaling: {kind} is not supported")
    return arguments


def _longrope(c: dict, scaling: dict) -> dict:
    """longrope has a table for texts up to the original context and one for longer texts. Only
    the first table is read, so the context is the original one."""
    original = _first_value(scaling | c, ("original_max_position_embeddings",))
    factor = max(1.0, scaling.get("factor") or c["max_position_embeddings"] / original)
    attention_factor = scaling.get("attention_factor")
    if not attention_factor:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    adjustments = {"short_factor": scaling["short_factor"], "attention_factor": attention_factor}
    return {"rope_adjustments": adjustments, "block_size": original}


def rope_tables(gpt) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of a litgpt GPT, in float32: (positions, rotated elements), or with a last
    dimension of 2 where config.rope_indices says for each layer which of two tables it uses."""
    config = gpt.config
    cos, sin = gpt.rope_cache()
    adjustments = config.rope_adjustments or {}
    if adjustments.get("short_factor"):  # longrope, which litgpt does not know
        power = torch.arange(0, config.rope_n_elem, 2).float() / config.rope_n_elem
        theta = 1.0 / (torch.tensor(adjustments["short_factor"]) * config.rope_base**power)
        angle = torch.outer(torch.arange(config.block_size).float(), theta).repeat(1, 2)
        cos = torch.cos(angle) * adjustments["attention_factor"]
        sin = torch.sin(angle) * adjustments["attention_factor"]
    if config.rope_indices and cos.dim() == 2:  # SmolLM3: the second table rotates nothing
        cos = torch.stack((cos, cos**0), -1)
        sin = torch.stack((sin, sin * 0), -1)
    return cos, sin


# ---- names of weights ----------------------------------------------------------------------------

# A vision tower stays as it is: an export copies its tensors from the source.
# model.vision_tower.vision_model.post_layernorm.weight, multi_modal_projector.mm_soft_emb_norm.weight
VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")

# Tensors that a file may hold and that nobody reads.
IGNORED = re.compile(
    r".*\.rotary_emb\.inv_freq"  # old files: model.layers.0.self_attn.rotary_emb.inv_freq
    r"|.*\.(attn|attention)\.(masked_)?bias"  # old files, causal masks: h.0.attn.bias
    r"|(lm_head|embed_out)\.weight"  # where it is tied, it is a copy of the embedding
)


def canonical_name(name: str) -> str:
    """The name of a weight in a file, as families.yaml has it."""
    # Gemma 3 with a vision tower: language_model.model.layers.0.mlp.up_proj.weight or
    # model.language_model.layers.0.mlp.up_proj.weight -> model.layers.0.mlp.up_proj.weight
    name = re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name)
    # old GPT-2 files: h.0.attn.c_attn.weight -> transformer.h.0.attn.c_attn.weight
    return re.sub(r"^(?=(h|wte|wpe|ln_f)\.)", "transformer.", name)


def is_transposed(name: str) -> bool:
    """Whether this weight is stored as (inputs, outputs). GPT-2's are: h.0.attn.c_attn.weight."""
    return bool(re.search(r"\.c_\w+\.weight$", name))


# ---- where a weight lies -------------------------------------------------------------------------


class Piece(NamedTuple):
    """Rows of one of litgpt's weights, as a part of one Hugging Face tensor (or all of it)."""

    name: str
    """litgpt's name of the weight."""
    first: int
    """The first of its rows."""
    end: int
    """The row after the last one."""
    at: int
    """The row of the Hugging Face tensor where these rows begin."""

    @property
    def ours(self) -> slice:
        """The rows in litgpt's weight."""
        return slice(self.first, self.end)

    @property
    def theirs(self) -> slice:
        """The same rows in the Hugging Face tensor."""
        return slice(self.at, self.at + self.end - self.first)


def weight_layout(config, names: dict[str, str], shapes: dict) -> dict[str, list[Piece]]:
    """Hugging Face's name of each tensor: the pieces of litgpt's weights in it, from its first row
    to its last.

    `config` is litgpt's, `names` as in families.yaml; `shapes` are litgpt's weights by name, of
    which only the shapes are used. litgpt has one matrix for q, k and v. Most families have one
    tensor for each of these; Phi 3 and GPT-2 have one for all three; GPT-NeoX and Falcon too, but
    there q, k and v of a group of heads come before those of the next group.
    """
    layout = {}
    by_group = names["attn.q"].endswith("query_key_value")
    qkv = _qkv_rows(config, by_group)
    for name, x in shapes.items():
        # transformer.h.7.attn.qkv.bias: layer 7, part attn.qkv, kind bias
        # lm_head.weight: no layer, part lm_head, kind weight
        pattern = r"(?:transformer\.h\.(\d+)\.)?(.+)\.(weight|bias)"
        layer, part, kind = re.fullmatch(pattern, name).groups()
        prefix = f"{names['layer']}.{layer}." if layer else ""
        # mlp.experts.5.fc_1: expert 5, part mlp.experts.{}.fc_1
        expert = re.search(r"(?<=experts\.)\d+", part)
        part = re.sub(r"(?<=experts\.)\d+", "{}", part)
        rows = qkv if part == "attn.qkv" else [(part, 0, len(x))]
        for own_part, first, end in rows:
            theirs = names[own_part].format(expert[0] if expert else None)
            pieces = layout.setdefault(f"{prefix}{theirs}.{kind}", [])
            at = pieces[-1].theirs.stop if pieces else 0
            pieces.append(Piece(name, first, end, at))
    return layout


def _qkv_rows(config, by_group: bool) -> list[tuple[str, int, int]]:
    """(part, first row, end) of q, k and v in litgpt's matrix; by_group: of each group's q, k, v."""
    q = config.n_head * config.head_size
    kv = config.n_query_groups * config.head_size
    parts = [("attn.q", 0, q), ("attn.k", q, kv), ("attn.v", q + kv, kv)]
    groups = config.n_query_groups if by_group else 1
    rows = []
    for group in range(groups):
        for part, start, n in parts:
            first = start + group * n // groups
            rows.append((part, first, first + n // groups))
    return rows
