"""Families of models, by config.json's model_type: arguments of litgpt's Config, names of weights.

Every field that changes what a model computes is read, or must have the one value that litgpt's
block computes. What a file leaves out has transformers' default.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from support.errors import BadInput

# ---- names: litgpt's, in a block or of the whole model -> Hugging Face's -------------------------

GATED = {"fc_1": "gate", "fc_2": "up", "proj": "down"}
BLOCK = {
    "transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm",
    "lm_head": "lm_head", "layer": "model.layers",
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
    "attn.norm_q": "self_attn.q_norm", "attn.norm_k": "self_attn.k_norm",
    "attn.proj": "self_attn.o_proj",
}  # fmt: skip
LLAMA = BLOCK | {f"mlp.{k}": f"mlp.{v}_proj" for k, v in GATED.items()}
OLMO2 = LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
GEMMA2 = OLMO2 | {"norm_2": "pre_feedforward_layernorm"}
PHI = BLOCK | {
    "transformer.ln_f": "model.final_layernorm", "attn.proj": "self_attn.dense",
    "mlp.fc": "mlp.fc1", "mlp.proj": "mlp.fc2",
}  # fmt: skip
PHI3 = LLAMA | {f"attn.{x}": "self_attn.qkv_proj" for x in "qkv"}
PHI3 |= {f"mlp.fc_{i}": "mlp.gate_up_proj" for i in (1, 2)}
QWEN3_MOE = BLOCK | {"mlp.gate": "mlp.gate"}
QWEN3_MOE |= {f"mlp.experts.{{}}.{k}": f"mlp.experts.{{}}.{v}_proj" for k, v in GATED.items()}
MIXTRAL = BLOCK | {"mlp.gate": "block_sparse_moe.gate"} | {
    f"mlp.experts.{{}}.{k}": f"block_sparse_moe.experts.{{}}.w{i}"
    for k, i in (("fc_1", 1), ("fc_2", 3), ("proj", 2))
}  # fmt: skip
NEOX = {f"attn.{x}": "attention.query_key_value" for x in "qkv"} | {
    "transformer.wte": "gpt_neox.embed_in", "transformer.ln_f": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out", "layer": "gpt_neox.layers", "attn.proj": "attention.dense",
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
    "mlp.fc": "mlp.dense_h_to_4h", "mlp.proj": "mlp.dense_4h_to_h",
}  # fmt: skip
FALCON = NEOX | {f"attn.{x}": "self_attention.query_key_value" for x in "qkv"} | {
    "transformer.wte": "transformer.word_embeddings", "transformer.ln_f": "transformer.ln_f",
    "lm_head": "lm_head", "layer": "transformer.h", "attn.proj": "self_attention.dense",
}  # fmt: skip
GPT2 = {f"attn.{x}": "attn.c_attn" for x in "qkv"} | {
    "transformer.wte": "transformer.wte", "transformer.wpe": "transformer.wpe",
    "transformer.ln_f": "transformer.ln_f", "lm_head": "lm_head", "layer": "transformer.h",
    "norm_1": "ln_1", "norm_2": "ln_2", "attn.proj": "attn.c_proj",
    "mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj",
}  # fmt: skip

# ---- rotary positions ----------------------------------------------------------------------------


def _first(c: dict, names: str, default=None):
    """The value of the first field that the file sets."""
    return next((c[x] for x in names.split() if c.get(x) is not None), default)


def _rope(c: dict) -> dict:
    """transformers 5 moved rope_theta and rope_scaling into rope_parameters. longrope has two
    tables: the context becomes the original one, up to which the short one holds."""
    found = c.get("rope_parameters") or {}
    scaling = c.get("rope_scaling") or found
    kind, adjustments = _first(scaling, "rope_type type", "default"), None
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
        cos, sin = torch.stack((cos, cos**0), -1), torch.stack((sin, sin * 0), -1)
    return cos, sin


# ---- families ------------------------------------------------------------------------------------


class Family(NamedTuple):
    names: dict  # of the weights
    fixed: dict  # litgpt's arguments, alike in all models of the family
    must: dict = {}  # the one value that a field may have
    defaults: dict = {}  # of fields that a file may leave out
    read: dict = {}  # litgpt's arguments by the field that says them
    more: Callable = lambda c: {}  # litgpt's arguments that take a rule


def must(c: dict, **fields) -> None:
    """Refuse a field that has another value than the one that we compute."""
    for name, value in fields.items():
        if c.get(name) not in (None, value):
            raise BadInput(f"config.json: {name}: {c[name]} is not supported, only {value}")


def _biases(c: dict) -> dict:
    must(c, attention_bias=bool(c.get("mlp_bias")))  # litgpt has one switch for both
    return dict(bias=bool(c.get("mlp_bias")))


def _granite(c: dict) -> dict:
    scales = {x: c[x] for x in ("embedding_multiplier", "residual_multiplier", "logits_scaling")}
    return _biases(c) | dict(
        hf_config=scales, attention_scores_scalar=c["attention_multiplier"] ** -2
    )


def _smollm3(c: dict) -> dict:
    n, every = c["num_hidden_layers"], c["no_rope_layer_interval"]
    turned = c.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(n)]
    return _biases(c) | dict(rope_indices=[int(not x) for x in turned])


def _gemma2(c: dict) -> dict:
    every = _first(c, "_sliding_window_pattern sliding_window_pattern", 2)
    kinds, n = c.get("layer_types"), c["num_hidden_layers"]
    local = [x == "sliding_attention" for x in kinds or ()] or [(i + 1) % every for i in range(n)]
    return dict(sliding_window_indices=[int(bool(x)) for x in local])


def _gemma3(c: dict) -> dict:
    """Its local layers turn by another base."""
    both = c.get("rope_parameters") or {}
    whole, near = (both.get(f"{x}_attention") or {} for x in ("full", "sliding"))
    must(near, rope_type="default")
    base = near.get("rope_theta") or c.get("rope_local_base_freq") or 10000.0
    local = _gemma2(c)
    rope = _rope(c | {"rope_parameters": {"rope_theta": c.get("rope_theta") or 1e6} | whole})
    return (
        local | rope | dict(rope_indices=local["sliding_window_indices"], rope_local_base_freq=base)
    )


def _falcon(c: dict) -> dict:
    new, heads = c["new_decoder_architecture"], c["num_attention_heads"]
    groups = (c.get("num_kv_heads") or heads) if new else 1 if c["multi_query"] else heads
    return dict(n_query_groups=groups, shared_attention_norm=not _two_norms(c))


def _two_norms(c: dict) -> bool:
    return c["new_decoder_architecture"] and c.get("num_ln_in_parallel_attn") in (None, 2)


RMS = dict(norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", parallel_residual=False)
RMS |= dict(bias=False, attn_bias=False, rotary_percentage=1.0)
LAYER = RMS | dict(norm_class_name="LayerNorm", mlp_class_name="GptNeoxMLP")
ONE_NORM = dict(parallel_residual=True, shared_attention_norm=True)
AROUND = dict(post_attention_norm=True, post_mlp_norm=True)
NO_WINDOW, NO_BIAS = dict(use_sliding_window=False), dict(attention_bias=False)
WINDOW, TIED = dict(sliding_window_size="sliding_window"), dict(tie_word_embeddings=True)
MOE = RMS | dict(mlp_class_name="LLaMAMoE")
EXPERTS = dict(n_expert="num_local_experts", n_expert_per_token="num_experts_per_tok")
GEMMA = RMS | dict(mlp_class_name="GemmaMLP", scale_embeddings=True)
ONE_WAY = NO_BIAS | dict(use_bidirectional_attention=False)
CAPS = dict(
    attention_scores_scalar="query_pre_attn_scalar", sliding_window_size="sliding_window",
    attention_logit_softcapping="attn_logit_softcapping",
    final_logit_softcapping="final_logit_softcapping",
)  # fmt: skip
GEMMA3 = TIED | dict(
    vocab_size=262208, max_position_embeddings=131072, num_attention_heads=8, head_dim=256,
    num_key_value_heads=4, hidden_size=2304, num_hidden_layers=26, intermediate_size=9216,
    hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, rms_norm_eps=1e-6,
    sliding_window=4096, sliding_window_pattern=6, attn_logit_softcapping=None,
    final_logit_softcapping=None,
)  # fmt: skip
FAMILIES = {
    "llama": Family(LLAMA, RMS, more=_biases),
    "mistral": Family(LLAMA, RMS, {}, dict(sliding_window=4096), WINDOW),
    "mixtral": Family(
        MIXTRAL, MOE, {}, dict(sliding_window=None),
        WINDOW | EXPERTS | dict(moe_intermediate_size="intermediate_size"),
    ),
    "qwen2": Family(LLAMA, RMS | dict(attn_bias=True), NO_WINDOW),
    "qwen3": Family(LLAMA, RMS | dict(norm_qk=True), NO_WINDOW | NO_BIAS),
    "qwen3_moe": Family(
        QWEN3_MOE, MOE | dict(norm_qk=True),
        NO_WINDOW | NO_BIAS | dict(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
        dict(norm_topk_prob=False), EXPERTS | dict(moe_intermediate_size="moe_intermediate_size"),
    ),
    "olmo2": Family(
        OLMO2, RMS | AROUND | dict(norm_1=False, norm_2=False, norm_qk=True, norm_qk_type="olmo2"),
        NO_BIAS,
    ),
    "granite": Family(
        LLAMA, RMS, {}, dict(
            embedding_multiplier=1.0, residual_multiplier=1.0, attention_multiplier=1.0,
            logits_scaling=1.0,
        ), more=_granite,
    ),
    "smollm3": Family(
        LLAMA, RMS, NO_WINDOW, TIED | dict(rope_theta=2e6, no_rope_layer_interval=4), {}, _smollm3
    ),
    "gemma": Family(LLAMA, GEMMA, ONE_WAY, TIED),
    "gemma2": Family(GEMMA2, GEMMA | AROUND, ONE_WAY, TIED, CAPS, _gemma2),
    "gemma3_text": Family(
        GEMMA2, GEMMA | AROUND | dict(norm_qk=True), ONE_WAY, GEMMA3, CAPS, _gemma3
    ),
    "phi": Family(
        PHI, LAYER | ONE_NORM | dict(bias=True, lm_head_bias=True, rotary_percentage=0.5),
        dict(qk_layernorm=False),
    ),
    "phi3": Family(PHI3, RMS, {}, dict(sliding_window=None), WINDOW),
    "gpt_neox": Family(
        NEOX, LAYER | dict(bias=True, rotary_percentage=0.25), dict(attention_bias=True),
        dict(use_parallel_residual=True), dict(parallel_residual="use_parallel_residual"),
    ),
    "stablelm": Family(
        LLAMA, LAYER | dict(mlp_class_name="LLaMAMLP", rotary_percentage=0.25),
        dict(qk_layernorm=False), dict(use_qkv_bias=False, use_parallel_residual=False), dict(
            attn_bias="use_qkv_bias", parallel_residual="use_parallel_residual",
            shared_attention_norm="use_parallel_residual",
        ),
    ),
    "falcon": Family(
        FALCON, LAYER | ONE_NORM, dict(alibi=False, parallel_attn=True, bias=False), TIED | dict(
            activation="gelu", max_position_embeddings=2048, multi_query=True,
            new_decoder_architecture=False,
        ), more=_falcon,
    ),
    "gpt2": Family(
        GPT2, LAYER | dict(bias=True, rotary_percentage=0.0), dict(
            scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
            add_cross_attention=False,
        ), TIED | dict(activation_function="gelu_new"),
    ),
}  # fmt: skip
FAMILIES["gemma3"] = FAMILIES["gemma3_text"]  # its text_config; the vision tower stays aside
COMMON = dict(
    block_size="max_position_embeddings n_positions", n_layer="num_hidden_layers n_layer",
    n_embd="hidden_size n_embd", n_head="num_attention_heads n_head",
    norm_eps="rms_norm_eps layer_norm_eps layer_norm_epsilon",
)  # fmt: skip
OPTIONAL = dict(
    n_query_groups="num_key_value_heads", head_size="head_dim",
    intermediate_size="intermediate_size n_inner ffn_hidden_size",
)  # fmt: skip
ACTIVATIONS = "hidden_activation", "hidden_act", "activation", "activation_function"
GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


def _arguments(c: dict, family: Family) -> dict:
    """Of litgpt's Config, for a config.json."""
    must(c, quantization_config=None, **family.must)
    out = family.fixed | {k: _first(c, names) for k, names in (COMMON | OPTIONAL).items()}
    for missing in (k for k in COMMON if out[k] is None):
        raise KeyError(" or ".join(COMMON[missing].split()))
    fields = ["hidden_act"] if c["model_type"] == "gemma" else ACTIVATIONS
    field = next((x for x in fields if c.get(x)), "hidden_act")
    act = c.get(field, "silu")
    gated = family.fixed["mlp_class_name"].startswith("LLaMA")
    if act not in (["silu"] if gated else GELUS):
        raise BadInput(f"config.json: {field}: {act} is not supported")
    out |= dict(vocab_size=c["vocab_size"], padded_vocab_size=c["vocab_size"])
    out |= {} if gated else dict(gelu_approximate=GELUS[act])
    rope = {} if family.fixed["rotary_percentage"] == 0 else _rope(c)
    return out | rope | {k: c[field] for k, field in family.read.items()} | family.more(c)


def read_config(folder: Path) -> tuple[dict, dict, dict]:
    """A Hugging Face folder's (litgpt Config arguments, config.json with tie_word_embeddings filled
    in, names of the weights). Raises BadInput."""
    file = f"{folder}/config.json"
    try:
        config = json.loads(Path(file).read_text())
        kind = config.get("model_type")
        if kind not in FAMILIES:
            raise BadInput(f"config.json: model_type: {kind!r} is not supported")
        family = FAMILIES[kind]
        c = family.defaults | config | config.get("text_config", {})
        arguments, names = _arguments(c, family), family.names
        if kind == "falcon" and _two_norms(c):
            names = names | {"norm_1": "ln_attn", "norm_2": "ln_mlp"}
        # litgpt's norms add 1 to their weights by this name: never the folder's
        arguments["name"] = "Gemma" if "gemma" in kind else kind
        tied = c.get("tie_word_embeddings", False)
        return arguments, config | dict(tie_word_embeddings=tied), names
    except FileNotFoundError:
        raise BadInput(f"{file}: no such file, so this is no model folder") from None
    except (KeyError, json.JSONDecodeError) as e:
        raise BadInput(f"{file}: {e} is missing or broken") from None
    except BadInput as e:
        raise BadInput(f"{folder}/{e}") from None


# ---- where a weight lies -------------------------------------------------------------------------


def layout(config, names: dict, shapes: dict) -> dict[str, list[tuple[str, int, int]]]:
    """Hugging Face's name -> [(litgpt's name, first row, end)]: what it holds, one below the other.
    `shapes`: tensors by litgpt's names. GPT-NeoX and Falcon have q, k, v of a group together."""
    groups, out = config.n_query_groups, {}
    q, kv = config.n_head * config.head_size, groups * config.head_size
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
