"""Models that litgpt does not know, by transformers' own classes: what they compute is transformers', and they train,
resume, sample and go out like all others."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import PARITY, assert_same, numbers, ranks, train
from models import check_docs_table, logits, made, refused, same
from safetensors.torch import load_file

import generate
import hub.transformers_models
import model
from data import pack
from hub.folders import fetch_model
from records.tokenizer import Tokenizer

BASE = dict(vocab_size=512, hidden_size=48, num_hidden_layers=2, num_attention_heads=6)
BASE |= dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=0, eos_token_id=0)
BASE |= dict(intermediate_size=80)
GQA = BASE | dict(num_key_value_heads=2)
WIDE = GQA | dict(head_dim=16)
NEAR = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_local_experts=3, num_experts_per_tok=2)
GPT = dict(vocab_size=512, n_embd=48, n_layer=2, n_head=6, n_positions=64)
MLA = dict(q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12)
# name -> (fields of config.json, models of this kind)
CASES = {
    "afmoe": (
        WIDE | NEAR | dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24), "Trinity"
    ),
    "apertus": (WIDE, "Apertus"),
    "arcee": (WIDE, "AFM 4.5B"),
    "bitnet": (GQA, "BitNet, not quantised"),
    "code_llama": (WIDE, "Code Llama"),
    "cohere": (WIDE | dict(logit_scale=0.3), "Command R, Aya 23"),
    "cohere2": (WIDE | NEAR | dict(logit_scale=0.3), "Command R7B, Command A"),
    "cwm": (WIDE | dict(sliding_window=5), "Code World Model"),
    "ernie4_5": (WIDE, "ERNIE 4.5 0.3B"),
    "exaone4": (WIDE | NEAR, "EXAONE 4"),
    "glm": (WIDE, "GLM-4 9B, GLM-Edge"),
    "glm4": (WIDE, "GLM-4-0414, GLM-Z1"),
    "gpt_bigcode": (GPT, "StarCoder, SantaCoder"),
    "granitemoe": (GQA | EXPERTS | dict(logits_scaling=3.0), "Granite 3 MoE"),
    "granitemoehybrid": (
        GQA | EXPERTS
        | dict(shared_intermediate_size=24, layer_types=["attention"] * 2, mamba_n_heads=4)
        | dict(mamba_d_head=24),
        "Granite 4 with attention in all layers",
    ),
    "granitemoeshared": (GQA | EXPERTS | dict(shared_intermediate_size=24), "Granite MoE, shared"),
    "helium": (GQA | dict(head_dim=8), "Helium 1"),
    "hunyuan_v1_dense": (WIDE, "Hunyuan 0.5B to 7B"),
    "jais2": (WIDE, "Jais 2"),
    "jetmoe": (
        dict(vocab_size=512, hidden_size=48, num_hidden_layers=2, num_key_value_heads=2)
        | dict(kv_channels=16, intermediate_size=32, max_position_embeddings=64) | EXPERTS,
        "JetMoE",
    ),
    "ministral": (WIDE | dict(sliding_window=5), "Ministral 8B"),
    "nanochat": (GQA, "nanochat"),
    "olmo": (GQA, "OLMo 1"),
    "olmo3": (GQA | NEAR, "OLMo 3"),
    "opt": (
        dict(vocab_size=512, hidden_size=48, num_hidden_layers=2, num_attention_heads=6)
        | dict(ffn_dim=80, max_position_embeddings=64, word_embed_proj_dim=48),
        "OPT",
    ),
    "persimmon": (BASE, "Persimmon"),
    "seed_oss": (WIDE, "Seed-OSS"),
    "starcoder2": (GQA | dict(sliding_window=5), "StarCoder 2"),
    "vaultgemma": (
        WIDE | NEAR
        | dict(query_pre_attn_scalar=20, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
        "VaultGemma",
    ),
    # of a tied embedding transformers' from_pretrained sets this model's row of the padding token to 0
    "youtu": (
        BASE | MLA | dict(num_key_value_heads=6, pad_token_id=None), "Youtu-LLM: latent attention"
    ),
}  # fmt: skip
QUICK = ("apertus", "cohere2")  # the ordinary tests; olmo3 has tests of its own
STEPS = ("--batch_size=4", "--max_steps=2", "--optim.lr=1e-2", "--val_interval=null")
STEPS += ("--save_interval=null", "--data.max_prompt=24", "--data.max_completion=24")
LORA = ("--lora.rank=2",)
IDS = torch.randint(512, (40,), generator=torch.Generator().manual_seed(1))


def folder_of(name: str, folder: Path, fields: dict | None = None):
    """Save a model and a tokenizer into the folder; -> transformers' model."""
    config = transformers.CONFIG_MAPPING[name].from_dict(
        CASES[name][0] if fields is None else fields
    )
    torch.manual_seed(0)
    hf = made(config, folder)
    shutil.copytree(PARITY / "tokenizer", folder, dirs_exist_ok=True)
    return hf


@pytest.fixture(scope="module")
def olmo3(tmp_path_factory) -> Path:
    """OLMo 3, with a window in one of its two layers."""
    folder = tmp_path_factory.mktemp("olmo3")
    folder_of("olmo3", folder)
    return folder


@torch.no_grad()
def their_logits(folder: Path) -> torch.Tensor:
    """transformers' logits, from a folder without a missing or an unknown weight."""
    kind = transformers.AutoModelForCausalLM
    hf, info = kind.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return hf.eval()(IDS[None]).logits[0]


@torch.no_grad()
def our_logits(folder: Path) -> torch.Tensor:
    return logits(model.load_model(folder), IDS.tolist())


# ---- each type -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_a_type_is_transformers_in_trained_sampled_and_out(name, ratings, tmp_path):
    source = tmp_path / "source"
    folder_of(name, source)
    before = their_logits(source)
    assert before.std() > 0.1, "else equal logits say little"
    assert same(our_logits(source), before, 1e-5)
    gpt = model.load_model(source)
    packed_is_single(gpt)
    samples_are_greedy(source, gpt)
    for kind, options in {"full": (), "lora": LORA}.items():
        run = train(source, ratings, tmp_path / kind, *STEPS, *options)
        final = tmp_path / kind / "final"
        trained = their_logits(final)
        assert not same(trained, before, 1e-3)
        assert same(our_logits(final), trained, 1e-5)
        stored = load_file(source / "model.safetensors")
        assert {n: x.shape for n, x in stored.items()} == {
            n: x.shape for n, x in run["weights"].items()
        }
        moved = {n for n, x in stored.items() if not torch.equal(x, run["weights"][n])}
        if options:
            assert all(stored[n].dim() == 2 for n in moved) and "lm_head.weight" not in moved
            assert not any("embed" in n or "wte" in n for n in moved)


@torch.no_grad()
def packed_is_single(gpt) -> None:
    """Log-probs of K completions that share a prompt are those of each sequence alone."""
    gpt.eval()
    r = np.random.default_rng(0)
    for K in (1, 2, 3):
        prompts = [r.integers(512, size=n) for n in (9, 1, 15)]
        answers = [tuple(r.integers(512, size=n) for n in r.integers(1, 9, K)) for _ in prompts]
        together = gpt(pack(prompts, answers))
        alone = [[gpt(pack([p], [(c,)]))[0, 0] for c in row] for p, row in zip(prompts, answers)]
        assert same(together, torch.tensor(alone), 1e-4)


@torch.no_grad()
def samples_are_greedy(folder: Path, gpt) -> None:
    """20 tokens of each of three prompts, sampled together at temperature 0, are those of transformers' generate."""
    from lightning.fabric import Fabric

    from runs.settings import Sampling

    tokenizer = Tokenizer(folder)
    prompts = [IDS[:n].numpy() for n in (3, 11, 7)]
    fabric = Fabric(accelerator="cpu", devices=1)
    args = Sampling(temperature=0.0)
    ours = generate.generate(fabric, gpt, prompts, tokenizer, args, 20, seed=1)
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for prompt, answer in zip(prompts, ours):
        ids = torch.from_numpy(prompt)[None]
        options = dict(do_sample=False, eos_token_id=tokenizer.stops, pad_token_id=0)
        mask = torch.ones_like(ids)
        theirs = hf.generate(ids, attention_mask=mask, max_new_tokens=20, **options)
        assert answer == theirs[0, len(prompt) :].tolist()


def test_every_row_of_the_embedding_has_a_gradient(olmo3):
    """Also that of the padding token, which transformers' class would leave out."""
    gpt = model.load_model(olmo3)
    gpt(pack([np.array([0, 3])], [(np.array([0, 5]),)])).sum().backward()
    has_gradient = gpt.embedding.weight.grad.abs().sum(1) > 0
    assert has_gradient.nonzero()[:, 0].tolist() == [0, 3]


# ---- a run ---------------------------------------------------------------------------------------


def test_in_mixed_precision_attention_gets_bfloat16(tmp_path, monkeypatch):
    """transformers rotates queries and keys in float32; flash attention is chosen only where all three are bfloat16."""
    seen, real = set(), model.PackedAttention.attend

    def attend(self, attn, q, k, v):
        seen.update((q.dtype, k.dtype, v.dtype))
        return real(self, attn, q, k, v)

    monkeypatch.setattr(model.PackedAttention, "attend", attend)
    folder_of("arcee", tmp_path)
    gpt = model.load_model(tmp_path)
    batch = pack([np.array([0, 3])], [(np.array([0, 5]),)])
    gpt(batch)
    assert seen == {torch.float32}
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        gpt(batch)
    assert seen == {torch.bfloat16}


def test_final_adapter_is_peft_s(olmo3, ratings, tmp_path):
    from peft import PeftModel

    train(olmo3, ratings, tmp_path / "run", *STEPS, *LORA)
    base = transformers.AutoModelForCausalLM.from_pretrained(olmo3)
    adapted = PeftModel.from_pretrained(base, tmp_path / "run" / "final_adapter").eval()
    with torch.no_grad():
        merged = their_logits(tmp_path / "run" / "final")
        assert same(adapted(IDS[None]).logits[0], merged, 1e-5)
    read = fetch_model(str(tmp_path / "run" / "final_adapter"))  # --model takes it, too
    assert same(logits(model.load_model(read), IDS.tolist()), merged, 1e-5)


@pytest.mark.parametrize("lora", [(), LORA], ids=["full", "lora"])
def test_a_stopped_run_goes_on_to_the_bit(lora, olmo3, ratings, tmp_path):
    """Also with activation checkpointing, which changes no number."""
    whole = train(olmo3, ratings, tmp_path / "whole", *STEPS, *lora)
    options = (*STEPS, *lora, "--activation_checkpointing=true")
    train(olmo3, ratings, tmp_path / "run", *options, "--stop_at=1")
    resumed = train(olmo3, ratings, tmp_path / "run", *options, "--resume=auto")
    assert_same(whole, resumed)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_do_what_one_does(strategy, ratings, tmp_path):
    """Apertus has constants in its files: every rank needs them."""
    source = tmp_path / "source"
    hf = folder_of("apertus", source)
    for name, x in hf.named_buffers():
        if name.endswith("act_fn.beta"):
            x.fill_(0.75)
    hf.save_pretrained(source)
    one = train(source, ratings, tmp_path / "one", *STEPS, *LORA)
    argv = (*STEPS, *LORA, f"--strategy={strategy}")
    two = ranks(2, lambda _: train(source, ratings, tmp_path / "two", *argv))[0]
    for a, b in zip(numbers(one), numbers(two)):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    assert all(same(x, two["weights"][n], 1e-4) for n, x in one["weights"].items())


def test_generate_asks_a_run_of_it(olmo3, ratings, tmp_path, capsys):
    train(olmo3, ratings, tmp_path / "run", *STEPS, *LORA)
    capsys.readouterr()
    checkpoint = next((tmp_path / "run" / "checkpoints").iterdir())
    said = []
    for folder in (tmp_path / "run", checkpoint):
        generate.main([f"--model={folder}", "--prompt=the cat", "--temperature=0"])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


# ---- both ways, and refusals ---------------------------------------------------------------------


def test_both_codes_train_one_model_alike(ratings, tmp_path, monkeypatch):
    source = tmp_path / "source"
    folder_of("qwen3", source, WIDE)
    # all weights, because the two draw other adapters
    argv = (*STEPS, "--max_steps=10", "--epochs=2", "--optim.lr=1e-3")
    a = train(source, ratings, tmp_path / "litgpt", *argv)
    monkeypatch.setattr(hub.transformers_models, "TABLE", {})  # of the types that litgpt knows
    b = train(source, ratings, tmp_path / "transformers", *argv)
    losses = [[row["loss"] for row in run["rows"]] for run in (a, b)]
    assert len(losses[0]) == 10 and losses[0] == pytest.approx(losses[1], abs=1e-5)


SMALL = dict(vocab_size=512, hidden_size=48, num_hidden_layers=2)
MOE = WIDE | dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24)
MOE |= dict(n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1)
MOE |= dict(first_k_dense_replace=1, moe_num_experts=4, moe_k=2, moe_topk=2)
# name -> (fields of config.json, a part of the refusal)
REFUSED = {
    "biogpt": (BASE, "its head is not one layer named lm_head"),
    "bloom": (dict(vocab_size=512, hidden_size=48, n_layer=2, n_head=6), "max_position_embeddings"),
    "codegen": (
        GPT | dict(n_head=4, rotary_dim=4),
        "0 of 2 layers have an attention that can be replaced",
    ),
    "ctrl": (GPT | dict(dff=80), "0 of 2 layers have an attention that can be replaced"),
    "deepseek_v2": (MOE, "missing .*experts.*, unknown .*experts"),
    "deepseek_v3": (MOE, "missing .*experts.*, unknown .*experts"),
    "diffllama": (GQA, "its class has an attention that cannot be replaced"),
    "doge": (WIDE, "attention: a mask of its own is not supported"),
    "dots1": (MOE, "missing .*experts.*, unknown .*experts"),
    "ernie4_5_moe": (MOE, "missing .*experts.*, unknown .*experts"),
    "falcon_mamba": (SMALL, "max_position_embeddings: expected a number"),
    "gpt_neo": (
        dict(vocab_size=512, hidden_size=48, num_layers=2, num_heads=6)
        | dict(attention_types=[[["global", "local"], 1]], max_position_embeddings=64),
        "its class has an attention that cannot be replaced",
    ),
    "gpt_oss": (WIDE | EXPERTS, "attention: s_aux is not supported"),
    "gptj": (GPT | dict(rotary_dim=4), "its class has an attention that cannot be replaced"),
    "glm4_moe": (MOE, "missing .*experts.*, unknown .*experts"),
    "hunyuan_v1_moe": (MOE, "missing .*experts.*, unknown .*experts"),
    "lfm2": (GQA | dict(layer_types=["conv", "full_attention"]), "layer_types: conv"),
    "llama4_text": (WIDE, "attn_temperature_tuning: True is not supported"),
    "ministral3": (WIDE, "llama_4_scaling_beta: 0.1 is not supported"),
    "mpt": (dict(vocab_size=512, d_model=48, n_heads=6, n_layers=2), "max_position_embeddings"),
    "nemotron": (GQA, "its class has an attention that cannot be replaced"),
    "olmo_hybrid": (GQA, "layer_types: linear_attention is not supported"),
    "olmoe": (MOE, "missing .*experts.*, unknown .*experts"),
    "phimoe": (GQA | EXPERTS, "missing .*experts.*, unknown .*experts"),
    "qwen2_moe": (MOE, "missing .*experts.*, unknown .*experts"),
    "qwen3_next": (MOE, "layer_types: linear_attention is not supported"),
    "recurrent_gemma": (GQA, "0 of 2 layers have an attention that can be replaced"),
    "xglm": (
        dict(vocab_size=512, d_model=48, ffn_dim=80, num_layers=2, attention_heads=6),
        "0 of 2 layers have an attention that can be replaced",
    ),
}
FEW = ("gpt_oss", "lfm2", "codegen", "olmoe")


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in REFUSED]
)
def test_what_cannot_be_exact_is_refused_by_name(name, tmp_path):
    fields, match = REFUSED[name]
    try:
        folder_of(name, tmp_path, fields)
    except Exception:  # a config alone is enough where it is refused before its weights are read
        (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": name}))
    refused(match, model.load_model, tmp_path)


def test_a_wrong_attention_is_seen_before_the_first_step(olmo3, monkeypatch):
    """The window of one layer is left out: only sequences longer than it show that."""
    window = hub.transformers_models._mask
    monkeypatch.setattr(hub.transformers_models, "_mask", lambda **options: None)
    refused(
        r"olmo3: log-probs with shared prompts are up to \d\.\d nats from", model.load_model, olmo3
    )
    monkeypatch.setattr(hub.transformers_models, "_mask", window)
    model.load_model(olmo3)


def test_an_unknown_type_and_a_missing_extra_are_one_line(olmo3, ratings, tmp_path, monkeypatch):
    argv = (olmo3, ratings, tmp_path / "run", *STEPS)
    refused("^lora.targets: .* q_proj, .*; got w1$", train, *argv, *LORA, "--lora.targets=w1")
    real = importlib.util.find_spec
    hidden = lambda name, *more: None if name == "transformers" else real(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    refused(r"model_type: 'olmo3' is not supported; pip install '\.\[transformers\]'", train, *argv)


def test_the_base_may_be_quantised(ratings, tmp_path):
    """nf4 by the same layers: rounding moves the log-probs, and the export has the base as it was."""
    source = tmp_path / "source"
    folder_of(
        "olmo3",
        source,
        GQA | NEAR | dict(hidden_size=64, intermediate_size=128, num_attention_heads=4),
    )
    argv = (source, ratings, tmp_path / "run", *STEPS, *LORA, "--lora.quantize=nf4", "--optim.lr=0")
    run = train(*argv)
    stored = load_file(source / "model.safetensors")
    assert all(torch.equal(x, run["weights"][n]) for n, x in stored.items())


# ---- docs/families.md ----------------------------------------------------------------------------


def test_the_table_in_docs_has_a_line_for_each_type():
    rows = ["| model_type | models |", "| --- | --- |"]
    rows += [f"| {name} | {models} |" for name, (_, models) in CASES.items()]
    rows += ["", "Refused:", "", "| model_type | because |", "| --- | --- |"]
    rows += [f"| {name} | {match.replace('.*', '...')} |" for name, (_, match) in REFUSED.items()]
    check_docs_table("transformers", rows, end="## What can be loaded")
