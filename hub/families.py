"""Families of models: config.json as arguments of litgpt's Config, and where each weight lies.

families.yaml is the table of the families that are known: which fields of config.json each has, and
what transformers takes where a file leaves one out. Here are the rules that do not fit into a table.
Every field that changes what a model computes is read, or it must have the one value that litgpt's
block computes.

Reading order: read_config, the fields and their limits; the rules of single families; rotary
positions; names of weights; weight_layout.
"""

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from runs.errors import BadInput, printable
from runs.small_files import read_object

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["families"]

# argument of litgpt's Config: its field of config.json, which is the one of these that a family has
READ = {
    "block_size": ("max_position_embeddings", "n_positions"),
    "n_layer": ("num_hidden_layers", "n_layer"),
    "n_embd": ("hidden_size", "n_embd"),
    "n_head": ("num_attention_heads", "n_head"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "vocab_size": ("vocab_size",),
    "padded_vocab_size": ("vocab_size",),
    "n_query_groups": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "n_expert": ("num_experts", "num_local_experts"),
    "n_expert_per_token": ("num_experts_per_tok",),
}
ACTIVATION = ("hidden_activation", "hidden_act", "activation", "activation_function")
# GELU by Hugging Face's name: litgpt's gelu_approximate
GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
# fields that have a value by default, but may be null: as many keys as queries, no window, no cap
NULLABLE = {
    "num_key_value_heads",
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
}
# A larger number in a config is a mistake, and building such a model would take all time or memory.
LARGEST = dict(
    n_layer=10**4, n_head=10**5, n_embd=10**6, block_size=10**8, vocab_size=10**8, head_size=10**5,
    padded_vocab_size=10**8, n_query_groups=10**5, intermediate_size=10**7, n_expert=10**4,
    n_expert_per_token=10**4, moe_intermediate_size=10**7, sliding_window_size=10**8,
)  # fmt: skip
NUMBERS = ("norm_eps", "rope_base", "attention_scores_scalar", "attention_logit_softcapping",
           "final_logit_softcapping")  # fmt: skip
REQUIRED = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
LARGEST_MODULES = 10**5  # experts of all layers: each is a few Python objects
LARGEST_ROPE = 2**27  # positions x head size: the elements of each of two tables in float32
LARGEST_NUMBER = 1e18


class ModelConfig(NamedTuple):
    """What a model folder says about its model, before any weight is read."""

    arguments: dict
    """Arguments of litgpt's Config."""
    config: dict
    """The content of config.json, with tie_word_embeddings filled in."""
    names: dict[str, str] | None
    """litgpt's name of a part: Hugging Face's name (see families.yaml). Empty for a model of transformers'
    own class (transformers_models.py), which has Hugging Face's names itself. None for a litgpt folder."""


class Unsupported(ValueError):
    """A field asks for something that is not computed here. The text begins with the field's name;
    who knows the file puts its path in front."""


def read_config(folder: Path) -> ModelConfig:
    """What the config.json of a Hugging Face folder says. Raises BadInput."""
    file = folder / "config.json"
    if not file.exists():
        raise BadInput(f"{file}: no such file, so this is not a model folder")
    config = read_object(file)
    try:
        return _read_family(config, file)
    except Unsupported as e:
        raise BadInput(f"{file}: {e}") from None
    except (KeyError, TypeError, AttributeError, ArithmeticError) as e:
        raise BadInput(f"{file}: {e} is missing or broken") from None


def _read_family(config: dict, file: Path) -> ModelConfig:
    kind = config.get("model_type")
    family = TABLE.get(kind) if isinstance(kind, str) else None
    if not family:
        raise Unsupported(f"model_type: {printable(kind)!r} is not supported")
    c = _fields(config, kind, family)
    must_equal(c, quantization_config=None, **family.get("must", {}))

    field_of = _field_of_arguments(family)
    arguments = family["fixed"] | {argument: c[field] for argument, field in field_of.items()}
    check_sizes(arguments, file, field_of)  # first: the rules make lists of n_layer
    arguments |= _common(c, kind, arguments)
    if kind in RULES:
        arguments |= RULES[kind](c)
    check_sizes(arguments, file, field_of)
    # litgpt's RMSNorm adds 1 to its weights where this name has Gemma in it, so the name comes
    # from the model_type and never from the folder, which may have any name
    arguments["name"] = "Gemma" if "gemma" in kind else kind

    names = dict(family["names"])
    if kind == "falcon" and not arguments["shared_attention_norm"]:
        names |= {"norm_1": "ln_attn", "norm_2": "ln_mlp"}
    config["tie_word_embeddings"] = c["tie_word_embeddings"]
    return ModelConfig(arguments, config, names)


# ---- fields and their limits ---------------------------------------------------------------------


def _fields(config: dict, kind: str, family: dict) -> dict:
    """The fields that this family reads: as the file has them, else as transformers does."""
    given = config
    if kind == "gemma3":  # with a vision tower: the language model's own are in text_config
        outer = ("tie_word_embeddings", "quantization_config")
        given = {n: x for n, x in _object(config, "text_config").items() if n not in outer}
        given |= {n: config[n] for n in outer if n in config}
    other_names = family.get("also", {})
    given = given | {other_names[n]: x for n, x in given.items() if n in other_names}
    return {
        name: field_value(name, given[name], default) if name in given else default
        for name, default in family["fields"].items()
    }


def _object(c: dict, name: str) -> dict:
    """A field that holds fields itself; {} where it is null or left out. Raises Unsupported."""
    value = {} if c.get(name) is None else c[name]
    if not isinstance(value, dict):
        raise Unsupported(f"{name}: expected an object, got {printable(value)}")
    return value


def field_value(name: str, value, default):
    """A field's value, which must have the type of its default. Raises Unsupported."""
    if value is None and isinstance(default, bool):
        return False  # as transformers takes it, whatever the default is
    if default is None or (value is None and name in NULLABLE):
        return value
    if value is None:
        raise Unsupported(f"{name}: null is not supported")
    types = (int, float) if isinstance(default, float) else type(default)
    fits = isinstance(value, types) and isinstance(value, bool) == isinstance(default, bool)
    if not fits or (isinstance(default, float) and not abs(value) < LARGEST_NUMBER):
        raise Unsupported(f"{name}: expected a value like {default}, got {printable(value)}")
    return value


def _field_of_arguments(family: dict) -> dict[str, str]:
    """Argument of litgpt's Config: the field that gives its value."""
    fields = family["fields"]
    common = {a: name for a, names in READ.items() for name in names if name in fields}
    return common | family.get("read", {})


def check_sizes(arguments: dict, file: Path, field_of: dict[str, str]) -> None:
    """Refuse impossible sizes of a model before anything of such a size is made. `field_of`: see
    _field_of_arguments. Raises BadInput."""

    def refuse(name, expected):
        got = printable(arguments.get(name))
        raise BadInput(f"{file}: {field_of.get(name, name)}: expected {expected}, got {got}")

    for name, largest in LARGEST.items():
        n = arguments.get(name)
        if n is None and name not in REQUIRED:
            continue
        least = 0 if name.startswith("n_expert") else 1  # litgpt's file has 0 for no experts
        if type(n) is not int or not least <= n <= largest:
            refuse(name, f"{least} to {largest}")
    for name in NUMBERS:
        x = arguments.get(name)
        is_number = isinstance(x, (int, float)) and not isinstance(x, bool)
        if x is not None and not (is_number and 0 < x < LARGEST_NUMBER):
            refuse(name, "a number above 0")
    n_head, groups = arguments["n_head"], arguments.get("n_query_groups")
    width = arguments.get("head_size") or arguments["n_embd"] // n_head
    if not arguments.get("head_size") and arguments["n_embd"] % n_head:
        refuse("n_head", f"a divisor of the width {arguments['n_embd']}")
    if groups and n_head % groups:
        refuse("n_query_groups", f"a divisor of {n_head} heads")
    n_expert = arguments.get("n_expert") or 0
    if n_expert < (arguments.get("n_expert_per_token") or 0):
        refuse("n_expert_per_token", f"at most {n_expert}")
    if arguments["n_layer"] * n_expert > LARGEST_MODULES:
        refuse("n_expert", f"at most {LARGEST_MODULES} in all layers")
    if arguments["block_size"] * width > LARGEST_ROPE:
        refuse("block_size", f"at most {LARGEST_ROPE // width}")


def must_equal(c: dict, **fields) -> None:
    """Raises Unsupported where a field is set to something else than the value that is computed
    here; None: the field must not be set."""
    for name, value in fields.items():
        if c.get(name) not in (None, value):
            only = "" if value is None else f", only {value}"
            raise Unsupported(f"{name}: {printable(c[name])} is not supported{only}")


# ---- the rules: fields of config.json -> arguments of litgpt's Config ----------------------------


def _common(c: dict, kind: str, arguments: dict) -> dict:
    """What every family has besides its sizes, which are in `arguments`."""
    supported = {"full_attention", "sliding_attention"} if "gemma" in kind else {"full_attention"}
    for layer_type in _per_layer(c, "layer_types", arguments["n_layer"]):
        if layer_type not in supported:
            raise Unsupported(f"layer_types: {printable(layer_type)} is not supported for {kind}")
    common = {"gelu_approximate": _gelu_approximate(c, arguments["mlp_class_name"])}
    if "rope_scaling" in c and "rope_local_base_freq" not in c:  # see _gemma3
        rope = _object(c, "rope_scaling") or _object(c, "rope_parameters")
        common |= _rope(c, rope, arguments["rotary_percentage"])
    return common


def _per_layer(c: dict, field: str, n_layer: int) -> list:
    """A list with a value for each layer; an empty one where the field is null."""
    values = c[field]
    if values is None:
        return []
    if not isinstance(values, list) or len(values) != n_layer:
        raise Unsupported(f"{field}: expected a list with a value for each layer")
    return values


def _gelu_approximate(c: dict, mlp_class_name: str) -> str:
    """litgpt's gelu_approximate. A LLaMAMLP computes silu, all others a GELU."""
    field = next(name for name in ACTIVATION if name in c)
    supported = ["silu"] if mlp_class_name.startswith("LLaMA") else GELUS
    if c[field] not in supported:
        raise Unsupported(f"{field}: {printable(c[field])} is not supported")
    return GELUS.get(c[field], "none")


def _llama(c: dict) -> dict:
    must_equal(c, attention_bias=c["mlp_bias"])  # litgpt has one switch for both
    return {"bias": c["mlp_bias"]}


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
    has_rope = _per_layer(c, "no_rope_layers", n_layer)
    if not has_rope:
        has_rope = [(i + 1) % interval for i in range(n_layer)]
    return {**_llama(c), "rope_indices": [int(not x) for x in has_rope]}


def _gemma2(c: dict) -> dict:
    """Some layers attend within a window: sliding_window_indices is 1 for these, else 0."""
    if c["sliding_window"] is None:
        raise Unsupported("sliding_window: null is not supported")
    n_layer = c["num_hidden_layers"]
    is_local = [x == "sliding_attention" for x in _per_layer(c, "layer_types", n_layer)]
    if not is_local:  # every pattern-th layer attends to everything
        pattern = c.get("sliding_window_pattern", 2)  # Gemma 3 has this field
        is_local = [(i + 1) % pattern != 0 for i in range(n_layer)]
    return {"sliding_window_indices": [int(x) for x in is_local]}


def _gemma3(c: dict) -> dict:
    """Gemma 2's layers; those with a window have a rope_theta of their own."""
    by_layer_type = _object(c, "rope_parameters")
    full = _object(by_layer_type, "full_attention") or {"rope_type": "default"}
    full = full | _object(c, "rope_scaling")
    local = _object(by_layer_type, "sliding_attention")
    must_equal(local, rope_type="default", partial_rotary_factor=1.0)
    windows = _gemma2(c)
    return {
        **windows,
        **_rope(c, full),
        "rope_indices": windows["sliding_window_indices"],
        "rope_local_base_freq": _positive(
            "rope_theta", local.get("rope_theta", c["rope_local_base_freq"])
        ),
    }


def _falcon(c: dict) -> dict:
    new, n_head = c["new_decoder_architecture"], c["num_attention_heads"]
    if new:
        groups = n_head if c["num_kv_heads"] is None else c["num_kv_heads"]
    else:
        groups = 1 if c["multi_query"] else n_head
    two_norms = new and c["num_ln_in_parallel_attn"] in (None, 2)
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


def _rope(c: dict, rope: dict, fixed: float | None = 1.0) -> dict:
    """litgpt's arguments of rotary positions.

    `rope`: rope_parameters, which transformers 5 writes, or rope_scaling of older files; these have
    the rest beside it. `fixed`: see _rotary_percentage. Raises Unsupported.
    """
    if any(isinstance(value, dict) for value in rope.values()):
        raise Unsupported("rope_parameters: one for each type of layer is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = c["rotary_emb_base"] if "rotary_emb_base" in c else c["rope_theta"]
    rotary_percentage = _rotary_percentage(c, rope, kind, fixed)
    arguments = {
        "rope_base": _positive("rope_theta", rope.get("rope_theta", theta)),
        "rope_adjustments": None,
        "rotary_percentage": rotary_percentage,
    }
    if kind == "llama3":
        arguments["rope_adjustments"] = {
            "factor": _positive("factor", rope.get("factor")),
            "low_freq_factor": _positive("low_freq_factor", rope.get("low_freq_factor")),
            "high_freq_factor": _positive("high_freq_factor", rope.get("high_freq_factor")),
            "original_max_seq_len": _original_context(c, rope),
        }
    elif kind == "linear":
        arguments["rope_adjustments"] = {"factor": _positive("factor", rope.get("factor"))}
    elif kind in ("longrope", "su"):
        arguments |= _longrope(c, rope, rotary_percentage)
    elif kind != "default":
        raise Unsupported(f"rope_scaling: {printable(kind)} is not supported")
    return arguments


def _positive(field: str, x) -> float:
    """A number of rope_parameters or rope_scaling. Raises Unsupported."""
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 < x < LARGEST_NUMBER:
        raise Unsupported(f"rope_scaling: {field}: expected a number above 0, got {printable(x)}")
    return x


def _original_context(c: dict, rope: dict) -> int:
    """Tokens. As in transformers the field of the file counts more than the one in `rope`."""
    field = "original_max_position_embeddings"
    if c[field] is not None:
        return _positive(field, c[field])
    return _positive(field, rope.get(field, c["max_position_embeddings"]))


def _rotary_percentage(c: dict, rope: dict, kind: str, fixed: float | None) -> float:
    """The share of a head that is rotated. `fixed`: that of all models of the family, or None."""
    field = "rotary_pct" if "rotary_pct" in c else "partial_rotary_factor"
    outer, inner = c[field], rope.get("partial_rotary_factor")
    if fixed is not None:
        for share in (outer, inner):
            must_equal({field: share}, **{field: fixed})
        return fixed
    share = outer if inner is None else inner
    if share != outer and (kind != "default" or field == "rotary_pct"):
        # of two numbers transformers takes one here and the other there
        raise Unsupported(f"{field}: {outer}, but partial_rotary_factor is {printable(inner)}")
    if not 0 < share <= 1:
        raise Unsupported(f"{field}: expected more than 0, at most 1, got {printable(share)}")
    return share


def _longrope(c: dict, rope: dict, rotary_percentage: float) -> dict:
    """longrope has a table for texts up to the original context and one for longer texts. Only
    the first table is read, so the context is the original one."""
    original = _original_context(c, rope)
    head_size = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    factors = rope.get("short_factor")
    n = int(head_size * rotary_percentage) // 2
    if not isinstance(factors, list) or len(factors) != n:
        raise Unsupported(f"rope_scaling: short_factor: expected a list of {n} numbers")
    for x in factors:
        _positive("short_factor", x)
    factor = rope.get("factor")
    if factor is None:
        factor = c["max_position_embeddings"] / original
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(max(1.0, factor)) / math.log(original))
    adjustments = {"short_factor": factors, "attention_factor": attention_factor}
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
    r"|(lm_head|embed_out)\.weight"  # where it is tied, it is a copy of the embedding: see HEAD
)
HEAD = re.compile(r"(lm_head|embed_out)\.weight")


def canonical_name(name: str, known: Collection[str] = ()) -> str:
    """The name of a weight in a file, as families.yaml has it; names that are `known` stay."""
    if name in known:
        return name
    # Gemma 3 with a vision tower: language_model.model.layers.0.mlp.up_proj.weight or
    # model.language_model.layers.0.mlp.up_proj.weight -> model.layers.0.mlp.up_proj.weight
    name = re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name)
    # old GPT-2 files: h.0.attn.c_attn.weight -> transformer.h.0.attn.c_attn.weight
    return re.sub(r"^(?=(h|wte|wpe|ln_f)\.)", "transformer.", name)


def is_transposed(name: str, ours: str) -> bool:
    """Whether this weight is stored as (inputs, outputs). GPT-2's are: h.0.attn.c_attn.weight. `ours`: our
    name of the weight; transformers' own class has the same one, and the tensor as it is stored."""
    return ours not in (name, canonical_name(name)) and bool(re.search(r"\.c_\w+\.weight$", name))


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
    there q, k and v of a group of heads come before those of the next group. Without names (see
    ModelConfig) the tensors are the weights themselves. Raises BadInput for a weight that the family
    does not have.
    """
    if not names:
        return {name: [Piece(name, 0, len(x), 0)] for name, x in shapes.items()}
    layout = {}
    by_group = names["attn.q"].endswith("query_key_value")
    qkv = _qkv_rows(config, by_group)
    for name, x in shapes.items():
        # transformer.h.7.attn.qkv.bias: layer 7, part attn.qkv, kind bias
        # lm_head.weight: no layer, part lm_head, kind weight
        pattern = r"(?:transformer\.h\.(\d+)\.)?(.+)\.(weight|bias)"
        match = re.fullmatch(pattern, name)
        layer, part, kind = match.groups() if match else (None, name, None)
        prefix = f"{names['layer']}.{layer}." if layer else ""
        # mlp.experts.5.fc_1: expert 5, part mlp.experts.{}.fc_1
        expert = re.search(r"(?<=experts\.)\d+", part)
        part = re.sub(r"(?<=experts\.)\d+", "{}", part)
        rows = qkv if part == "attn.qkv" else [(part, 0, len(x))]
        if rows[0][0] not in names:
            raise BadInput(f"model: {name}: not a weight of this family: it could not be exported")
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
