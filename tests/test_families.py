"""Every causal type of transformers that can be made tiny: equal to transformers' own, or refused
with the reason; and how types of each kind train, go out and come back."""

import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, numbers, ranks, refused, train
from safetensors.torch import load_file, save_file
from tiny_models import (
    EYES,
    IDS,
    LLAMA3,
    load_peft,
    load_transformers,
    logits,
    made,
    our_logits,
    same,
    same_weights,
    their_logits,
)
from tokens import edit_json
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import model
import sampler
from infra.console import BadInput
from models import load, other
from models.export import export
from models.hub import Source

BASE = dict(vocab_size=512, hidden_size=48, num_hidden_layers=2, num_attention_heads=6)
BASE |= dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=0, eos_token_id=0)
BASE |= dict(intermediate_size=80)
GQA = BASE | dict(num_key_value_heads=2)
WIDE = GQA | dict(head_dim=16)
NEAR = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_experts=3, num_local_experts=3, num_experts_per_tok=2, moe_intermediate_size=24)
ROUTED = EXPERTS | dict(n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1)
ROUTED |= dict(first_k_dense_replace=1, moe_num_experts=4, moe_k=2, moe_topk=2)
MLA = dict(q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12)
MLA |= dict(num_key_value_heads=6, head_dim=8)
OLD = dict(n_positions=64, n_embd=48, n_layer=2, n_head=6, n_ctx=64, ffn_dim=80, d_model=48)
OLD |= dict(n_heads=6, n_layers=2, num_layers=2, num_heads=6, attention_heads=6, rotary_dim=4)
OLD |= dict(dff=80, word_embed_proj_dim=48, ffn_hidden_size=80, is_decoder=True, decoder_layers=2)
OLD |= dict(decoder_attention_heads=6, decoder_ffn_dim=80)
TURNS = dict(sliding_attention=dict(rope_type="default", rope_theta=700.0))
TURNS |= dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=9000.0))
GEMMA3 = (
    WIDE | NEAR | dict(query_pre_attn_scalar=20, rope_parameters=TURNS, model_type="gemma3_text")
)
SHORT = dict(original_max_position_embeddings=48, rope_theta=1e4, partial_rotary_factor=0.75)
SHORT |= dict(rope_type="longrope", short_factor=[1.0, 1.3, 1.7], long_factor=[4.0, 5.0, 6.0])
CAPS = dict(query_pre_attn_scalar=20, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
LINEAR_ATTENTION = dict(layer_types=["linear_attention", "full_attention"])
LINEAR_ATTENTION |= dict(linear_num_key_heads=2, linear_num_value_heads=4)
LINEAR_ATTENTION |= dict(linear_key_head_dim=8, linear_value_head_dim=8)
# layers beside attention: a type that has them is published with both kinds
OTHER_LAYERS = re.compile("Mamba|ShortConv|DeltaNet|Lightning|Rglru")
# of the types that the common fields do not fit; a name may have more behind a comma
FIELDS = {
    "bitnet": GQA,
    "code_llama": WIDE,
    "cohere": WIDE | dict(logit_scale=0.3),
    "cohere2": WIDE | NEAR | dict(logit_scale=0.3),
    "codegen": OLD | dict(vocab_size=512, n_head=4),
    "deepseek_v2": BASE | ROUTED | MLA,
    "deepseek_v3": BASE | ROUTED | MLA,
    "exaone4": WIDE | NEAR,
    "falcon": BASE,
    "falcon_h1": GQA | dict(mamba_d_ssm=48, mamba_n_heads=4, mamba_d_head=12, mamba_d_state=8),
    "gemma2": WIDE | NEAR | CAPS,
    "gemma3": dict(text_config=GEMMA3, vision_config=EYES, mm_tokens_per_image=4),
    "gemma3_text": GEMMA3,
    "gpt_neox": BASE,
    "gpt-sw3": OLD | dict(vocab_size=512),
    "gpt2": OLD | dict(vocab_size=512),
    "gpt2, inverse scale": OLD | dict(vocab_size=512, scale_attn_by_inverse_layer_idx=True),
    "granite": GQA | dict(embedding_multiplier=12.0, residual_multiplier=0.2, logits_scaling=3.0),
    "granitemoehybrid": GQA | EXPERTS
    | dict(shared_intermediate_size=24, layer_types=["mamba", "attention"], mamba_n_heads=4, mamba_d_head=24),
    "helium": GQA | dict(head_dim=8),
    "lfm2": GQA | dict(layer_types=["conv", "full_attention"], block_multiple_of=8),
    "llama": GQA | dict(rope_parameters=LLAMA3, tie_word_embeddings=True),
    "llama, biases": GQA | dict(attention_bias=True, mlp_bias=True),
    "llama, biases of attention": GQA | dict(attention_bias=True),
    "llama, gelu": GQA | dict(hidden_act="gelu"),
    "llama, yarn": GQA | dict(rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=500.0)),
    "llama, dynamic": GQA | dict(rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1e4)),
    "mistral": GQA | dict(sliding_window=5),
    "olmo3": GQA | NEAR,
    "olmoe": BASE | EXPERTS,
    "persimmon": BASE,
    "phi3, longrope": GQA
    | dict(rope_parameters=SHORT, partial_rotary_factor=0.75, original_max_position_embeddings=48),
    "qwen2, window": GQA | NEAR | dict(use_sliding_window=True),
    "qwen3_5_text": WIDE | LINEAR_ATTENTION,
    "qwen3_next": WIDE | LINEAR_ATTENTION | EXPERTS | dict(shared_expert_intermediate_size=24),
    "qwen2_moe": GQA | EXPERTS | dict(shared_expert_intermediate_size=24),
    "stablelm": GQA,
    "vaultgemma": WIDE | NEAR | CAPS,
    "youtu": BASE | MLA | dict(pad_token_id=None),
}  # fmt: skip
# one of each kind: what the ordinary tests look at, beside the types of test_weights.py
QUICK = ["llama, biases of attention", "gemma3", "mixtral", "olmo3", "deepseek_v3", "gpt_oss", "bloom", "falcon",
         "gpt2, inverse scale", "llama, dynamic", "gemma2", "cohere", "lfm2", "qwen3_next"]  # fmt: skip
STEPS = ("--batch_size=4", "--max_steps=2", "--optim.lr=1e-2", "--val_interval=null")
STEPS += ("--save_interval=null", "--data.max_prompt=24", "--data.max_completion=24")
LORA = ("--lora.rank=2",)


def folder_of(name: str, folder: Path):
    """Save a tiny model of this type and a tokenizer into the folder. -> transformers' model"""
    kind = name.split(",")[0]
    fields = FIELDS.get(name, OLD | WIDE | ROUTED | dict(sliding_window=5))
    config = transformers.CONFIG_MAPPING[kind].from_dict(dict(fields))
    with torch.device("meta"):
        size = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    assert size < 1e6, "not tiny"
    torch.manual_seed(0)
    hf = made(config, folder)
    classes = vars(sys.modules[type(hf).__module__]).values()
    layers = [c for c in classes if isinstance(c, type) and issubclass(c, torch.nn.Module)]
    others = [layer for layer in layers if OTHER_LAYERS.search(layer.__name__)]
    has_others = any(isinstance(module, tuple(others)) for module in hf.modules())
    assert has_others or not others, "no published model has attention alone"
    hf(input_ids=torch.tensor([IDS[:3]]))
    return hf


def outcome(name: str, folder: Path) -> str | None:
    """Whose code computes this type, or why it is refused; None if it cannot be made tiny. What is
    computed is compared once more, with a text longer than those of models/load.py."""

    def too_slow(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(60)
    try:
        folder_of(name, folder)
    except Exception:  # transformers' own: a size that does not fit another one, too slow, ...
        return None
    finally:
        signal.alarm(0)
    try:
        gpt = load.load_model(folder)
    except BadInput as e:
        reason = str(e).rpartition(f"{folder}")[2].partition(": ")[2]
        return re.sub(r" are up to .* nats from", " are not", reason).split(", expected at most")[0]
    with torch.no_grad():
        difference = (logits(gpt, IDS) - their_logits(load_transformers(folder))).abs().amax(1)
    # a mixture may choose another of two experts that are almost equal, for a few of the tokens
    assert difference.quantile(0.75 if gpt.has_experts else 1.0) <= 1e-4
    return "litgpt" if type(gpt) is model.GPT else "transformers"


EXPECTED = {
    "gpt_oss": "log-probs .* are not transformers' own",
    "bloom": "0 of 2 layers have an attention", "falcon": "0 of 2 layers have an attention",
    "gpt2, inverse scale": "log-probs .* are not transformers' own|^transformers$",
    "llama, dynamic": "rope_type.*dynamic",
    "lfm2": "1 of 2 layers have an attention", "qwen3_next": "1 of 2 layers have an attention",
}  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_a_type_is_computed_as_transformers_does_or_refused_with_the_reason(name, tmp_path):
    assert re.search(EXPECTED.get(name, "^transformers$"), outcome(name, tmp_path))


def test_a_type_that_is_no_language_model_is_refused_in_one_line(tmp_path):
    for kind in ("qwen3_vl", "voxtral"):
        config = transformers.CONFIG_MAPPING[kind]()
        config.save_pretrained(tmp_path / kind)
        (tmp_path / kind / "model.safetensors").touch()
        match = f"^{tmp_path / kind}: Unrecognized configuration class .*AutoModelForCausalLM"
        refused(match, load.load_model, tmp_path / kind)


def has_encoder(name: str) -> bool:
    """Whether the published models of a type read an encoder's output: they are no language models."""
    try:
        return transformers.CONFIG_MAPPING[name.split(",")[0]]().is_encoder_decoder
    except TypeError:  # musicgen's configs want those of their parts, one of which is an encoder
        return True


@pytest.mark.slow
def test_every_causal_type_is_one_of_the_two_and_the_docs_say_which(tmp_path):
    names = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FIELDS})
    names = [name for name in names if not has_encoder(name)]
    computed = {"litgpt": [], "transformers": []}
    for name in names:
        computed.get(outcome(name, tmp_path / name), []).append(name)
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    rows = ["| computed by | model_type |", "| --- | --- |"]
    rows += [f"| {who} | {'; '.join(types)} |" for who, types in computed.items()]
    file = ROOT / "docs" / "families.md"
    before, mark, after = file.read_text().partition("<!-- types -->\n")
    old, end, rest = after.partition("\n\n## What can be loaded")
    new = "\n".join(rows)
    file.write_text(before + mark + new + end + rest)
    assert old == new, "docs/families.md was another table, and is now this one"


# ---- a run ---------------------------------------------------------------------------------------


def with_more_layers(name: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with those of a layer that predicts one more token, as DeepSeek-V3 and GLM-4.5 name them (a layer after
    the last one) or as EXAONE and Qwen3-Next do."""
    after = "mtp.layers.0." if name == "exaone_moe" else "model.layers.2."
    last = {x.replace("model.layers.1.", after): w * 2 for x, w in weights.items() if ".1." in x}
    return weights | last | {f"{after}eh_proj.weight": torch.ones(48, 96)}


GO_BACK = ["gemma3", "mixtral", "exaone_moe", "deepseek_v3", "ernie4_5_moe", "jetmoe"]
GO_BACK = [(name, "", "") for name in GO_BACK]
# as some programs name the weights
GO_BACK += [
    ("gpt2", "transformer.", ""),
    ("llama", "model.", ""),
    ("mixtral", "model.layers.0", "layers.0"),
    ("gemma3", "language_model.model.", "model.language_model."),
]


@pytest.mark.parametrize("name, usual, other", GO_BACK)
def test_each_weight_goes_back_by_its_name_in_its_type_also_one_that_is_not_computed(
    name, usual, other, tmp_path
):
    """transformers joins the experts of a layer in one tensor, and has no place for some layers."""
    folder_of(name, tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    weights = load_file(file)
    if name not in ("gpt2", "gemma3", "llama"):
        weights = with_more_layers(name, weights)
        edit_json(tmp_path / "in" / "config.json", num_nextn_predict_layers=1)
    weights = {n.replace(usual, other, 1): x for n, x in weights.items()}
    for i, (weight, x) in enumerate(weights.items()):
        weights[weight] = x.bfloat16() if i % 3 else x.bfloat16().float()
    save_file(weights, file, {"format": "pt"})
    gpt = load.load_model(tmp_path / "in")
    export(Source(tmp_path / "in"), gpt.rows, gpt.unique_parameters(), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {n: x.dtype for n, x in found.items()} == {n: x.dtype for n, x in weights.items()}
    assert same_weights(found, weights)
    assert same(our_logits(tmp_path / "out"), our_logits(tmp_path / "in"))


@pytest.mark.parametrize("name, options", [("gemma3", ()), ("deepseek_v3", LORA)])
def test_a_run_goes_out_to_transformers_and_peft(name, options, ratings, tmp_path):
    """An export has the names, shapes and types of its source."""
    source = tmp_path / "source"
    hf = folder_of(name, source)
    before, stored = their_logits(hf), load_file(source / "model.safetensors")
    found = train(source, ratings, tmp_path / "run", *STEPS, *options)["weights"]
    final = tmp_path / "run" / "final"
    ours = our_logits(final)
    assert not same(ours, before, 1e-3)
    assert same(their_logits(load_transformers(final)), ours, 1e-4)
    assert {n: (x.shape, x.dtype) for n, x in found.items()} == {
        n: (x.shape, x.dtype) for n, x in stored.items()
    }
    moved = {n for n, x in stored.items() if not torch.equal(x, found[n])}
    assert not any("vision" in n or "multi_modal" in n for n in moved)
    if options:  # experts, routers, norms and the embedding stay
        assert all(stored[n].dim() == 2 and "expert" not in n for n in moved)
        adapted = load_peft(source, tmp_path / "run" / "final_adapter")
        assert same(their_logits(adapted), ours, 1e-4)


def test_a_model_that_was_read_does_not_change_with_its_file(tmp_path):
    """A second save into the same folder, while a run trains. A router of deepseek_v3 has a buffer in the file."""
    folder_of("deepseek_v3", tmp_path)
    file = tmp_path / "model.safetensors"
    gpt = load.load_model(tmp_path)
    before = {name: x.clone() for name, x in gpt.state_dict().items()}
    # zeros of the same length over all of it, not a new file: what was mapped shows them
    with open(file, "r+b") as out:
        out.write(bytes(file.stat().st_size))
    assert same_weights(gpt.state_dict(), before)


RANKS = {"apertus": (*LORA, "--strategy=fsdp"), "ernie4_5_moe": ("--strategy=ddp",)}
CONSTANTS = ("act_fn.beta", "e_score_correction_bias", "expert_bias")


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_do_what_one_does_also_with_constants_in_the_files(name, ratings, tmp_path):
    """transformers' own class freezes a router's bias, and its from_pretrained lets it train."""
    source, argv = tmp_path / "source", (*STEPS, "--optim.weight_decay=0.1", *RANKS[name])
    hf = folder_of(name, source)
    for n, x in hf.state_dict().items():
        if n.endswith(CONSTANTS):
            x.fill_(0.75)
    hf.save_pretrained(source)
    one = train(source, ratings, tmp_path / "one", *argv[:-1])
    two = ranks(2, lambda _: train(source, ratings, tmp_path / "two", *argv))[0]
    for a, b in zip(numbers(one), numbers(two)):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    assert all(same(x, two["weights"][n], 1e-4) for n, x in one["weights"].items())
    kept = [x for n, x in two["weights"].items() if n.endswith(CONSTANTS)]
    assert kept and all((x == 0.75).all() for x in kept)


def without_windows(monkeypatch) -> str:
    """Only sequences longer than the window show this fault."""
    build = load.litgpt_model

    def built(hf):
        if gpt := build(hf):
            for block in gpt.blocks:
                block.attn.window = None
        return gpt

    monkeypatch.setattr(other, "_window_as_mask", lambda **options: None)
    monkeypatch.setattr(load, "litgpt_model", built)
    return "with shared prompts"


def without_mask(monkeypatch) -> str:
    monkeypatch.setattr(sampler.KVCache, "mask", lambda self, *_: torch.zeros(3, 1, 1, self.length))
    return "token by token"


@pytest.mark.parametrize("name", ["olmo3", "mistral"])
@pytest.mark.parametrize("fault", [without_windows, without_mask])
def test_a_wrong_attention_or_cache_is_seen_before_the_first_step(
    fault, name, tmp_path, monkeypatch
):
    folder_of(name, tmp_path)
    load.load_model(tmp_path)
    match = rf"{name}: .*log-probs {fault(monkeypatch)} are up to \d"
    refused(match, load.load_model, tmp_path)
