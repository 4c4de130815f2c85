"""Every family of models computes what transformers does: as loaded, after training, and exported."""

import copy
import json
import shutil
from pathlib import Path

import litgpt
import numpy as np
import pytest
import torch
import transformers
import yaml
from conftest import PARITY, train
from models import check_docs_table, logits, made, refused, same, shaken
from safetensors.torch import load_file, save_file

import model
from data import pack
from hub.families import TABLE, read_config
from runs.errors import BadInput

BASE = dict(vocab_size=512, hidden_size=48, num_hidden_layers=2, num_attention_heads=6)
BASE |= dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=0, eos_token_id=0)
MHA = BASE | dict(intermediate_size=80)
GQA = MHA | dict(num_key_value_heads=2)
WIDE = GQA | dict(head_dim=16)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=16, rope_theta=500.0)
# the context of our model is the original one; transformers' tables change beyond it
SHORT = dict(original_max_position_embeddings=48, rope_theta=1e4, partial_rotary_factor=0.75)
SHORT |= dict(rope_type="longrope", short_factor=[1.0, 1.3, 1.7], long_factor=[4.0, 5.0, 6.0])
NEAR = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
TURNS = dict(sliding_attention=dict(rope_type="default", rope_theta=700.0))
TURNS |= dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=9000.0))
GEMMA3 = WIDE | NEAR | dict(query_pre_attn_scalar=20, rope_parameters=TURNS)
EYES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
EYES |= dict(image_size=28, patch_size=14)
SCALES = dict(embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=3.0)
EXPERTS = dict(num_experts_per_tok=2, sliding_window=None)
T = transformers
# name -> (config, models of this kind)
CASES = {
    "gpt2": (T.GPT2Config(vocab_size=512, n_embd=48, n_layer=2, n_head=6, n_positions=64), "GPT-2"),
    "llama": (
        T.LlamaConfig(**GQA, rope_parameters=LLAMA3, tie_word_embeddings=True),
        "Llama 2 to 3.3, TinyLlama, SmolLM2, Falcon 3",
    ),
    "llama, biases": (T.LlamaConfig(**GQA, attention_bias=True, mlp_bias=True), ""),
    "mistral": (T.MistralConfig(**GQA, sliding_window=5), "Mistral 7B, Zephyr"),
    "mixtral": (T.MixtralConfig(**GQA, **EXPERTS, num_local_experts=3), "Mixtral"),
    "qwen2": (T.Qwen2Config(**GQA, tie_word_embeddings=True), "Qwen 2, 2.5, QwQ, R1 distillations"),
    "qwen3": (T.Qwen3Config(**WIDE), "Qwen 3"),
    "qwen3_moe": (
        T.Qwen3MoeConfig(
            **WIDE, **EXPERTS, num_experts=3, moe_intermediate_size=24, norm_topk_prob=True
        ),
        "Qwen 3 30B-A3B, 235B-A22B",
    ),
    "gemma": (T.GemmaConfig(**WIDE, rms_norm_eps=1e-3), "Gemma 1"),
    "gemma2": (
        T.Gemma2Config(
            **WIDE | NEAR, query_pre_attn_scalar=20, rms_norm_eps=1e-3, attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        "Gemma 2",
    ),
    "gemma3_text": (T.Gemma3TextConfig(**GEMMA3, rms_norm_eps=1e-3), "Gemma 3 270M, 1B"),
    "gemma3": (
        T.Gemma3Config(text_config=GEMMA3, vision_config=EYES, mm_tokens_per_image=4),
        "Gemma 3 4B, 12B, 27B: their text, the vision tower unchanged",
    ),
    "phi": (T.PhiConfig(**GQA), "Phi 1, 1.5, 2"),
    "phi3": (T.Phi3Config(**GQA, sliding_window=9), "Phi 3 4k, 4"),
    "phi3, longrope": (
        T.Phi3Config(
            **GQA, rope_parameters=SHORT, partial_rotary_factor=0.75,
            original_max_position_embeddings=48,
        ),
        "Phi 3 128k, 3.5, 4-mini: up to the original 4,096 tokens",
    ),
    "gpt_neox": (T.GPTNeoXConfig(**MHA), "Pythia, GPT-NeoX-20B"),
    "gpt_neox, serial": (T.GPTNeoXConfig(**MHA, use_parallel_residual=False), "RedPajama-INCITE"),
    "olmo2": (T.Olmo2Config(**GQA), "OLMo 2"),
    "falcon": (T.FalconConfig(**BASE), "Falcon 7B"),
    "falcon, new": (
        T.FalconConfig(**BASE, new_decoder_architecture=True, num_kv_heads=2), "Falcon 40B, 180B"
    ),
    "falcon, one norm": (
        T.FalconConfig(
            **BASE, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
        ),
        "Falcon 2 11B",
    ),
    "stablelm": (T.StableLmConfig(**GQA, use_qkv_bias=True), "StableLM 3B, 2 1.6B, Zephyr"),
    "stablelm, parallel": (T.StableLmConfig(**GQA, use_parallel_residual=True), ""),
    "granite": (T.GraniteConfig(**GQA, **SCALES, attention_multiplier=0.2), "Granite 3"),
    "smollm3": (T.SmolLM3Config(**GQA, no_rope_layers=[1, 0]), "SmolLM3"),
}  # fmt: skip
MOE = ("mixtral", "qwen3_moe")
STEP = ("--batch_size=4", "--max_steps=1", "--optim.lr=1e-2", "--val_interval=null")
STEP += ("--save_interval=null", "--data.max_prompt=24", "--data.max_completion=24")


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Path:
    """Four ratings."""
    lines = (PARITY / "kto_data.jsonl").read_text().splitlines()[:4]
    file = tmp_path_factory.mktemp("four") / "four.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def folder_of(name: str, folder: Path):
    """Save a model and a tokenizer into the folder; -> transformers' model."""
    config = CASES[name][0]
    if name == "gemma3":
        hf = shaken(T.Gemma3ForConditionalGeneration(config))
        hf.save_pretrained(folder)
    else:
        hf = made(config, folder)
    shutil.copytree(PARITY / "tokenizer", folder, dirs_exist_ok=True)
    return hf


def load_transformers(folder: Path, like):
    """A model of the class of `like`, without a missing or an unknown key."""
    eager = dict(attn_implementation="eager")  # transformers' only attention with softcaps
    hf, info = type(like).from_pretrained(folder, output_loading_info=True, **eager)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return hf.eval()


IDS = torch.randint(512, (40,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def their_logits(hf) -> torch.Tensor:
    return hf(IDS[None]).logits[0]


@torch.no_grad()
def our_logits(folder: Path) -> torch.Tensor:
    return logits(model.load_model(folder), IDS.tolist())


def add_adapter(hf, folder: Path):
    """PEFT's rule by hand: each named matrix gains alpha / r * B @ A."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors, modules = load_file(folder / "adapter_model.safetensors"), dict(hf.named_modules())
    assert config["peft_type"] == "LORA" and tensors
    for key in [key for key in tensors if ".lora_A." in key]:
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        alpha, r = config["lora_alpha"], config["r"]
        for pattern in config["rank_pattern"]:
            if name.endswith("." + pattern):
                alpha, r = config["alpha_pattern"][pattern], config["rank_pattern"][pattern]
        assert len(a) == b.shape[1] == r and b.abs().max() > 0
        delta = b @ a * alpha / r
        weight = modules[name].weight
        weight.data += delta.T if config["fan_in_fan_out"] else delta
    return hf


@pytest.mark.parametrize("name", CASES)
def test_a_family_is_transformers_in_trained_and_out(name, four, tmp_path):
    source = tmp_path / "my-finetune"
    hf = folder_of(name, source)
    theirs = their_logits(hf)
    assert theirs.std() > 0.1, "else equal logits say little"
    assert same(our_logits(source), theirs, 1e-5)
    packed_is_single(model.load_model(source, dtype=torch.float64))

    final = tmp_path / "full" / "final"
    train(source, four, tmp_path / "full", *STEP)
    trained = their_logits(load_transformers(final, hf))
    assert not same(trained, theirs, 1e-2)
    assert same(our_logits(final), trained, 1e-5)

    final = tmp_path / "lora" / "final"
    lora = ("--lora.rank=2", "--lora.targets=all-linear")
    train(source, four, tmp_path / "lora", *STEP, *lora)
    merged = their_logits(load_transformers(final, hf))
    assert not same(merged, theirs, 1e-3)
    assert same(our_logits(final), merged, 1e-5)
    assert same(their_logits(add_adapter(hf, tmp_path / "lora" / "final_adapter")), merged, 1e-5)
    before, after = (load_file(p / "model.safetensors") for p in (source, final))
    assert before.keys() == after.keys()
    assert all(x.shape == after[n].shape for n, x in before.items())


@pytest.mark.parametrize("name", MOE)
def test_lora_s_default_leaves_the_experts_out_and_says_so(name, four, tmp_path, capsys):
    source, out = tmp_path / "source", tmp_path / "run"
    folder_of(name, source)
    train(source, four, out, *STEP, "--lora.rank=2")
    said = "lora.targets: query,key,value,projection; the experts of this model stay frozen"
    assert capsys.readouterr().out.count(said) == 1
    assert yaml.safe_load((out / "settings.yaml").read_text())["lora"]["targets"] in said
    train(source, four, out, *STEP, "--lora.rank=2", "--resume=auto")  # not another run
    before, after = (load_file(p / "model.safetensors") for p in (source, out / "final"))
    moved = {n.split(".")[-2] for n, x in before.items() if not torch.equal(x, after[n])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj"}
    chosen = (*STEP, "--lora.rank=2", "--lora.targets=query,mlp")
    refused("^lora.targets: .*; got mlp$", train, source, four, tmp_path / "chosen", *chosen)


def packed_is_single(gpt) -> None:
    r = np.random.default_rng(0)
    prompts = [r.integers(512, size=n) for n in (9, 1, 5)]
    answers = [tuple(r.integers(512, size=n) for n in pair) for pair in ((4, 7), (2, 1), (6, 3))]
    with torch.no_grad():
        together = gpt(pack(prompts, answers))
        alone = [[gpt(pack([p], [(c,)]))[0, 0] for c in pair] for p, pair in zip(prompts, answers)]
    torch.testing.assert_close(together, torch.tensor(alone, dtype=torch.float64))


# ---- every field is read, refused, or says nothing about what the model computes -----------------

NEUTRAL = set(transformers.PretrainedConfig().to_dict()) - {"tie_word_embeddings"}
NEUTRAL |= set(
    "use_cache initializer_range bos_token_id eos_token_id pad_token_id transformers_version dtype "
    "attention_dropout hidden_dropout classifier_dropout resid_pdrop embd_pdrop attn_pdrop "
    "router_aux_loss_coef output_router_logits router_jitter_noise pretraining_tp is_decoder "
    "ignore_keys_at_rope_validation reorder_and_upcast_attn max_window_layers "
    "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout "
    "vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index".split()
)  # of no layer, of training with dropout, of another task, of the vision tower
# read only together with another field
NEUTRAL_IN = {
    "falcon": {"num_kv_heads", "num_ln_in_parallel_attn"},
    "falcon, new": {"multi_query"},
    "falcon, one norm": {"multi_query", "num_ln_in_parallel_attn"},
    "smollm3": {"no_rope_layer_interval", "sliding_window"},
    "gemma3_text": {"_sliding_window_pattern"},
    "gemma3": {"_sliding_window_pattern", "tie_word_embeddings"},  # the outer one counts
    "phi3": {"original_max_position_embeddings", "partial_rotary_factor"},
    "phi3, longrope": {"partial_rotary_factor"},
    "phi": {"partial_rotary_factor"},
    "stablelm": {"partial_rotary_factor"},
    "stablelm, parallel": {"partial_rotary_factor"},
    "qwen2": {"sliding_window"},
    "qwen3": {"sliding_window"},
    "qwen3_moe": {"sliding_window", "intermediate_size"},
}


def another(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {k: another(v) for k, v in value.items()}
    if isinstance(value, list):
        return [another(x) for x in value] or [1]
    return f"not {value}" if isinstance(value, str) else 2 * (value or 1) + 1


def config_or_refusal(folder: Path, config: dict):
    """What read_config makes of this config.json: a tuple, or the text of its refusal."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        arguments, config, names = read_config(folder)
        return vars(litgpt.Config(**arguments)), config["tie_word_embeddings"], names
    except BadInput as e:
        return str(e)


@pytest.mark.parametrize("name", CASES)
def test_every_field_is_read_or_refused_or_changes_nothing(name, tmp_path):
    CASES[name][0].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    unchanged = config_or_refusal(tmp_path, config)
    assert not isinstance(unchanged, str), unchanged
    inner = config.get("text_config", config)
    unread = set()
    for field in inner.keys() - NEUTRAL - NEUTRAL_IN.get(name, set()) - {"model_type"}:
        changed = inner | {field: another(inner[field])}
        if name == "gemma3":
            changed = config | {"text_config": changed}
        if config_or_refusal(tmp_path, changed) == unchanged:
            unread.add(field)
    assert unread == set()


# ---- what a field means that is left out, null, or another family's -------------------------------


@torch.no_grad()
def logits_with(config: dict, hf) -> torch.Tensor | None:
    """Logits of transformers' model with another config.json; None if it cannot compute any."""
    config = copy.deepcopy(config)  # transformers writes into it
    try:
        other = type(hf)(type(hf.config).from_dict(config, attn_implementation="eager"))
        other.load_state_dict(hf.state_dict())
        return their_logits(other.eval())
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError):
        return None


class Edited:
    """A family's model, and the fields of its config.json: `with_fields` is that file with some of them changed, or
    left out (...)."""

    def __init__(self, name: str, folder: Path):
        self.folder = folder
        self.hf = folder_of(name, folder)
        self.config = json.loads((folder / "config.json").read_text())
        self.inner = self.config.get("text_config", self.config)
        self.names = self.inner.keys() - NEUTRAL - {"model_type"}

    def with_fields(self, **changes) -> dict:
        inner = {n: x for n, x in (self.inner | changes).items() if x is not ...}
        return self.config | {"text_config": inner} if self.inner is not self.config else inner

    def agrees(self, config: dict) -> bool:
        """Whether we compute what transformers does by this config.json, or refuse it."""
        (self.folder / "config.json").write_text(json.dumps(config))
        try:
            ours = our_logits(self.folder)
        except BadInput:
            return True
        theirs = logits_with(config, self.hf)
        return theirs is not None and same(ours, theirs, 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_field_that_is_left_out_has_transformers_own_default(name, tmp_path):
    """transformers writes all fields of a config that it has read, so we must read the same from its file."""
    CASES[name][0].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    inner = config.get("text_config", config)
    names = inner.keys() - NEUTRAL - {"model_type"}
    refused_by_them = 0
    for field in names:
        less = {n: x for n, x in inner.items() if n != field}
        try:
            theirs = type(CASES[name][0].get_text_config())(**copy.deepcopy(less))
            full = json.loads(theirs.to_json_string(use_diff=False))
        except ValueError:  # the default does not go with the other fields
            refused_by_them += 1
            continue
        if inner is not config:
            less, full = (config | {"text_config": c} for c in (less, full))
        ours = config_or_refusal(tmp_path, less)
        assert ours == config_or_refusal(tmp_path, full), field
    assert refused_by_them < 3


@pytest.mark.parametrize("name", CASES)
def test_a_field_that_is_null_is_what_transformers_makes_of_it_or_refused(name, tmp_path):
    edited = Edited(name, tmp_path)
    assert same(logits_with(edited.config, edited.hf), their_logits(edited.hf), 1e-5)
    for field in edited.names:
        assert edited.agrees(edited.with_fields(**{field: None})), field


@pytest.mark.parametrize("name", CASES)
def test_a_field_of_another_family_is_read_where_transformers_reads_it_or_refused(name, tmp_path):
    edited = Edited(name, tmp_path)
    unchanged = config_or_refusal(tmp_path, edited.config)
    foreign = dict(
        rope_theta=300.0, rotary_pct=0.5, rotary_emb_base=300.0, sliding_window_pattern=1
    )
    foreign |= dict(partial_rotary_factor=0.5, original_max_position_embeddings=32)
    for config, _ in CASES.values():
        config = config.get_text_config().to_dict()
        foreign |= {n: another(x) for n, x in config.items() if n not in NEUTRAL | {"model_type"}}
    ignored = {}
    for field in foreign.keys() - edited.names - {"layer_types", "rope_parameters"}:
        config = edited.with_fields(**{field: foreign[field]})
        if config_or_refusal(tmp_path, config) == unchanged:
            ignored[field] = foreign[field]
        else:
            assert edited.agrees(config), field
    theirs = logits_with(edited.with_fields(**ignored), edited.hf)
    assert same(theirs, their_logits(edited.hf), 1e-5), "what we ignore they ignore"


REFUSED = {
    "quantization_config: .* is not supported": ("llama", dict(quantization_config={"bits": 4})),
    "rope_scaling: yarn": ("llama", dict(rope_scaling={"type": "yarn", "factor": 4.0})),
    "rope_scaling: dynamic": ("llama", dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0})),
    "hidden_act: gelu is not supported": ("llama", dict(hidden_act="gelu")),
    "attention_bias: True is not supported, only False": ("llama", dict(attention_bias=True)),
    "hidden_activation: relu": ("gemma2", dict(hidden_activation="relu")),
    "hidden_act: silu": ("phi", dict(hidden_act="silu")),
    "use_sliding_window: True": ("qwen2", dict(use_sliding_window=True)),
    "layer_types: sliding_attention": ("qwen3", dict(layer_types=["sliding_attention"] * 2)),
    "layer_types: chunked_attention": ("gemma2", dict(layer_types=["chunked_attention"] * 2)),
    "use_bidirectional_attention: True": ("gemma3_text", dict(use_bidirectional_attention=True)),
    "alibi: True": ("falcon", dict(alibi=True)),
    "parallel_attn: False": ("falcon", dict(parallel_attn=False)),
    "qk_layernorm: True": ("stablelm", dict(qk_layernorm=True)),
    "norm_topk_prob: False is not supported, only True": ("qwen3_moe", dict(norm_topk_prob=False)),
    "mlp_only_layers: ": ("qwen3_moe", dict(mlp_only_layers=[1])),
    "scale_attn_weights: False": ("gpt2", dict(scale_attn_weights=False)),
    "partial_rotary_factor: 0.5 is not supported": ("qwen2", dict(partial_rotary_factor=0.5)),
    "attn_logit_softcapping: 50.0": ("gemma3_text", dict(attn_logit_softcapping=50.0)),
    "final_logit_softcapping: 30.0": (
        "gemma3",  # whose class ignores it, other than gemma3_text's
        dict(text_config=GEMMA3 | {"final_logit_softcapping": 30.0}),
    ),
    "final_logit_softcapping: expected a number above 0, got True": (
        "gemma3_text",
        dict(final_logit_softcapping=True),
    ),
    "rope_scaling: expected an object, got 3": ("llama", dict(rope_scaling=3)),
    "text_config: expected an object, got 3": ("gemma3", dict(text_config=3)),
    "rope_scaling: factor: expected": ("llama", dict(rope_scaling={"rope_type": "linear"})),
    "rope_scaling: short_factor: expected a list of 3 numbers": (
        "phi3, longrope",
        dict(rope_scaling=SHORT | {"short_factor": [1.0]}),
    ),
    "rotary_pct: 0.25, but partial": ("gpt_neox", dict(rope_scaling=dict(partial_rotary_factor=1))),
    "vocab_size: expected a value like 32000, got 512.0": ("llama", dict(vocab_size=512.0)),
    "rms_norm_eps: expected a value like 1e-06, got nan": (
        "llama",
        dict(rms_norm_eps=float("nan")),
    ),
    "head_dim: expected 1 to": ("llama", dict(head_dim=0)),
    "head_dim: expected 1 to .* got 8": ("llama", dict(head_dim="8")),
    "num_key_value_heads: expected a divisor of 6": ("llama", dict(num_key_value_heads=4)),
    "layer_types: expected a list": ("gemma2", dict(layer_types=["full_attention"])),
    "no_rope_layers: expected a list": ("smollm3", dict(no_rope_layers=3)),
    # sizes that would take all memory or no end of time
    "max_position_embeddings: expected at most": ("llama", dict(max_position_embeddings=10**8)),
    "num_hidden_layers: expected 1 to": ("gemma2", dict(num_hidden_layers=10**9)),
    "num_local_experts: expected 0 to": ("mixtral", dict(num_local_experts=10**9)),
    "num_local_experts: expected at most 100000 in all": (
        "mixtral",
        dict(num_local_experts=10**4, num_hidden_layers=99),
    ),
    "num_experts_per_tok: expected at most 3": ("mixtral", dict(num_experts_per_tok=4)),
    "scale_attn_by_inverse_layer_idx": ("gpt2", dict(scale_attn_by_inverse_layer_idx=True)),
}


@pytest.mark.parametrize("match", REFUSED)
def test_what_the_block_cannot_compute_is_refused_by_field_and_value(match, tmp_path):
    name, change = REFUSED[match]
    CASES[name][0].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(f"{tmp_path}/config.json: {match}", model.load_model, tmp_path)


def test_a_head_beside_a_tied_embedding_is_that_embedding_or_refused(tmp_path):
    """transformers 5 uses the head of the file then, older versions the embedding."""
    folder_of("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused("lm_head.weight: not the embedding", model.load_model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert our_logits(tmp_path).isfinite().all()


# ---- docs/families.md ----------------------------------------------------------------------------


def test_the_table_in_docs_has_a_line_for_each_of_these_cases():
    kinds = {}
    for name, (config, models) in CASES.items():
        kinds.setdefault(config.model_type, []).append((name, models))
    assert kinds.keys() == TABLE.keys(), "each family has a case"
    head = "| model_type | models | logits | packed | full step, out | LoRA, PEFT |\n"
    rows = [head + "| --- | --- | --- | --- | --- | --- |"]
    for kind, cases in kinds.items():
        models = "; ".join(m for _, m in cases if m)
        lora = "attention only" if kind in MOE else "yes"
        variants = [n.split(", ")[1] for n, _ in cases if ", " in n]
        more = f" (also: {', '.join(variants)})" if variants else ""
        rows.append(f"| {kind}{more} | {models} | yes | yes | yes | {lora} |")
    check_docs_table("table", rows, end="Every field")
