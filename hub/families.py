"""What config.json says, as litgpt's Config; where a weight lies. The table is families.yaml.

Every field that changes what a model computes is read, or must have the one value that litgpt's
block computes.
"""

import json
import math
import re
from pathlib import Path

import torch
import yaml

from runs.errors import BadInput, printable
from runs.files import read_object

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["families"]
# litgpt's argument: the field, by the names that families have for it
FIELDS = dict(
    block_size="max_position_embeddings n_positions",
    n_layer="num_hidden_layers n_layer",
    n_embd="hidden_size n_embd",
    n_head="num_attention_heads n_head",
    norm_eps="layer_norm_eps layer_norm_epsilon",  # of a LayerNorm
    vocab_size="vocab_size",
)
OPTIONAL = dict(
    n_query_groups="num_key_value_heads",
    head_size="head_dim",
    intermediate_size="intermediate_size n_inner ffn_hidden_size",
    n_expert="num_experts num_local_experts",
    n_expert_per_token="num_experts_per_tok",
)
ACTIVATIONS = "hidden_activation hidden_act activation activation_function"
MOST = dict(n_layer=10**4, n_head=10**5, n_embd=10**6, block_size=10**8, vocab_size=10**8)
GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


def read_config(folder: Path) -> tuple[dict, dict, dict]:
    """A Hugging Face folder's (litgpt Config arguments, config.json with tie_word_embeddings filled
    in, names of the weights). Raises BadInput."""
    file = folder / "config.json"
    if not file.exists():
        raise BadInput(f"{file}: no such file, so this is no model folder")
    try:
        config = read_object(file, json.loads)
        family = TABLE.get(kind := config.get("model_type"))
        if not family:
            raise BadInput(f"config.json: model_type: {kind!r} is not supported")
        c = family.get("default", {}) | config | config.get("text_config", {})
        must_equal(c, quantization_config=None, **family.get("must", {}))
        known = {"full_attention", "sliding_attention" if "gemma" in kind else ""}
        for other in set(c.get("layer_types") or ()) - known:
            raise BadInput(f"config.json: layer_types: {other} is not supported for {kind}")
        arguments = _common(c, family) | MORE.get(kind, lambda c: {})(c)
        # litgpt's norms add 1 to their weights by this name: never the folder's
        arguments["name"] = "Gemma" if "gemma" in kind else kind
        two = {"norm_1": "ln_attn", "norm_2": "ln_mlp"}
        two = two if kind == "falcon" and not arguments["shared_attention_norm"] else {}
        tied = c.get("tie_word_embeddings", False)
        config |= dict(tie_word_embeddings=tied)
        return check_sizes(arguments, file), config, family["names"] | two
    except (KeyError, TypeError, AttributeError, ArithmeticError) as e:
        raise BadInput(f"{file}: {e} is missing or broken") from None
    except BadInput as e:
        ours = str(e).startswith("config.json")
        raise BadInput(f"{folder}/{e}" if ours else str(e)) from None


def check_sizes(arguments: dict, file) -> dict:
    """The arguments, before anything of such a size is made."""
    for name, most in MOST.items():
        n = arguments.get(name)
        if type(n) is not int or not 1 <= n <= most:
            raise BadInput(f"{file}: {name}: expected 1 to {most}, got {printable(n)}")
    return arguments


def must_equal(c: dict, **fields) -> None:
    """Refuse a field that has another value than the one that we compute."""
    for name, value in fields.items():
        if c.get(name) not in (None, value):
            only = "" if value is None else f", only {value}"
            raise BadInput(f"config.json: {name}: {c[name]} is not supported{only}")


def _first(c: dict, names: str, default=None):
    """The value of the first field that the file sets."""
    return next((c[x] for x in names.split() if c.get(x) is not None), default)


def _common(c: dict, family: dict) -> dict:
    out, fields = dict(family["fixed"]), FIELDS | OPTIONAL
    if out["norm_class_name"] == "RMSNorm":
        fields["norm_eps"] = "rms_norm_eps"
    out |= {k: _first(c, names) for k, names in fields.items()}
    for missing in (k for k in FIELDS if out[k] is None):
        raise KeyError(" or ".join(fields[missing].split()))
    names = "hidden_act" if c["model_type"] == "gemma" else ACTIVATIONS
    act = _first(c, names, "silu")
    gated = out["mlp_class_name"].startswith("LLaMA")
    if act not in (["silu"] if gated else GELUS):
        field = next(x for x in names.split() if c.get(x))
        raise BadInput(f"config.json: {field}: {act} is not supported")
    out |= dict(padded_vocab_size=c["vocab_size"], gelu_approximate=GELUS.get(act, "none"))
    rope = _rope(c) if out["rotary_percentage"] else {}
    return out | rope | {k: c.get(field) for k, field in family.get("read", {}).items()}


def _biases(c: dict) -> dict:
    must_equal(c, attention_bias=bool(c.get("mlp_bias")))  # litgpt has one switch for both
    return dict(bias=bool(c.get("mlp_bias")))


def _granite(c: dict) -> dict:
    scales = {x: c[x] for x in ("embedding_multiplier", "residual_multiplier", "logits_scaling")}
    scalar = c["attention_multiplier"] ** -2
    return _biases(c) | dict(hf_config={"scales": scales}, attention_scores_scalar=scalar)


def _smollm3(c: dict) -> dict:
    n = c["num_hidden_layers"]
    every = c["no_rope_layer_interval"]
    turned = c.get("no_rope_layers") or [(i + 1) % every for i in range(n)]
    return _biases(c) | dict(rope_indices=[int(not x) for x in turned])


def _gemma2(c: dict) -> dict:
    n = c["num_hidden_layers"]
    every = _first(c, "_sliding_window_pattern sliding_window_pattern")
    local = [x == "sliding_attention" for x in c.get("layer_types") or ()]
    local = local or [(i + 1) % every != 0 for i in range(n)]
    return dict(sliding_window_indices=[int(x) for x in local])


def _gemma3(c: dict) -> dict:
    """Its local layers turn by another base."""
    both = c.get("rope_parameters") or {}
    whole = both.get("full_attention") or {}
    near = both.get("sliding_attention") or {}
    must_equal(near, rope_type="default")
    base = near.get("rope_theta") or c["rope_local_base_freq"]
    rope = _rope({"rope_theta": 1e6} | c | {"rope_parameters": whole})
    local = _gemma2(c)
    indices = local["sliding_window_indices"]
    return local | rope | dict(rope_indices=indices, rope_local_base_freq=base)


def _falcon(c: dict) -> dict:
    heads = c["num_attention_heads"]
    groups = 1 if c["multi_query"] else heads
    if new := c.get("new_decoder_architecture"):
        groups = c.get("num_kv_heads") or heads
    two = new and c.get("num_ln_in_parallel_attn") in (None, 2)
    return dict(n_query_groups=groups, shared_attention_norm=not two)


# litgpt's arguments that take a rule
MORE = dict(llama=_biases, granite=_granite, smollm3=_smollm3, gemma2=_gemma2, falcon=_falcon)
MORE |= dict(gemma3=_gemma3, gemma3_text=_gemma3)


# ---- rotary positions ----------------------------------------------------------------------------


def _rope(c: dict) -> dict:
    """transformers 5 moved rope_theta and rope_scaling into rope_parameters. longrope has two
    tables: the context becomes the original one, up to which the short one holds."""
    found = c.get("rope_parameters") or {}
    scaling = c.get("rope_scaling") or found
    kind = _first(scaling, "rope_type type", "default")
    adjustments = None
    out = dict(rope_base=_first(c | found | scaling, "rope_theta rotary_emb_base", 10000))
    rotary = _first(c | found, "partial_rotary_factor rotary_pct")
    out |= {} if rotary is None else dict(rotary_percentage=rotary)
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        adjustments = {name: scaling[name] for name in names}
        adjustments["original_max_seq_len"] = scaling["original_max_position_embeddings"]
    elif kind == "linear":
        adjustments = {"factor": scaling["factor"]}
    elif kind in ("longrope", "su"):
        n = _first(scaling | c, "original_max_position_embeddings")
        factor = max(1.0, scaling.get("factor") or c["max_position_embeddings"] / n)
        grown = scaling.get("attention_factor") or math.sqrt(1 + math.log(factor) / math.log(n))
        adjustments = {"short_factor": scaling["short_factor"], "attention_factor": grown}
        out["block_size"] = n
    elif kind != "default":
        raise BadInput(f"config.json: rope_scaling: {kind} is not supported")
    return out | dict(rope_adjustments=adjustments)


def rope_tables(gpt) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), positions x rotated elements, x 2 where there are two kinds of layers."""
    config, (cos, sin) = gpt.config, gpt.rope_cache()
    if (more := config.rope_adjustments or {}).get("short_factor"):  # which litgpt lacks
        power = torch.arange(0, config.rope_n_elem, 2).float() / config.rope_n_elem
        theta = 1.0 / (torch.tensor(more["short_factor"]) * config.rope_base**power)
        angle = torch.outer(torch.arange(config.block_size).float(), theta).repeat(1, 2)
        cos, sin = (f(angle) * more["attention_factor"] for f in (torch.cos, torch.sin))
    if config.rope_indices and cos.dim() == 2:  # SmolLM3: layers without positions
        cos = torch.stack((cos, cos**0), -1)
        sin = torch.stack((sin, sin * 0), -1)
    return cos, sin


# ---- where a weight lies -------------------------------------------------------------------------


def weight_layout(config, names: dict, shapes: dict) -> dict[str, list[tuple[str, int, int]]]:
    """Hugging Face's name -> [(litgpt's name, first row, end)]: what it holds, one below the other.
    `shapes`: tensors by litgpt's names. GPT-NeoX and Falcon have q, k, v of a group together."""
    out = {}
    groups = config.n_query_groups
    q = config.n_head * config.head_size
    kv = groups * config.head_size
    heads = [("attn.q", 0, q), ("attn.k", q, kv), ("attn.v", q + kv, kv)]
    by_group = names["attn.q"].endswith("query_key_value")
    for name, x in shapes.items():
        found = re.fullmatch(r"(?:transformer\.h\.(\d+)\.)?(.+)\.(weight|bias)", name)
        layer, part, kind = found.groups()
        expert = re.search(r"(?<=experts\.)\d+", part)
        part = re.sub(r"(?<=experts\.)\d+", "{}", part)
        prefix = f"{names['layer']}.{layer}." if layer else ""
        turns = groups if by_group and part == "attn.qkv" else 1
        for turn in range(turns):
            for p, first, rows in heads if part == "attn.qkv" else [(part, 0, len(x))]:
                theirs = prefix + names[p].format(expert and expert[0]) + "." + kind
                at, rows = first + turn * rows // turns, rows // turns
                out.setdefault(theirs, []).append((name, at, at + rows))
    return out
