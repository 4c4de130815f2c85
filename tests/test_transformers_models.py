"""Models that litgpt does not know, by transformers' own classes: what they compute is transformers', and they train,
resume, sample and go out like all others."""

import contextlib
import importlib.util
import io
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import PARITY, assert_same, numbers, ranks, result, start, train
from models import made, refused, same
from safetensors.torch import load_file

import generate
import hub.transformers_models
import model

BASE = dict(vocab_size=512, hidden_size=48, num_hidden_layers=2, num_attention_heads=6)
BASE |= dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=0, eos_token_id=0)
BASE |= dict(intermediate_size=80)
GQA = BASE | dict(num_key_value_heads=2)
WIDE = GQA | dict(head_dim=16)
NEAR = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
STEPS = ("--batch_size=4", "--max_steps=2", "--optim.lr=1e-2", "--val_interval=null")
STEPS += ("--save_interval=null", "--data.max_prompt=24", "--data.max_completion=24")
LORA = ("--lora.rank=2", "--lora.rslora")


def folder_of(kind: str, fields: dict, folder: Path):
    """Save a model of this model_type and a tokenizer into the folder; -> transformers' model."""
    hf = made(transformers.CONFIG_MAPPING[kind].from_dict(fields | {"model_type": kind}), folder)
    shutil.copytree(PARITY / "tokenizer", folder, dirs_exist_ok=True)
    return hf


@pytest.fixture(scope="module")
def olmo3(tmp_path_factory) -> Path:
    """OLMo 3, with a window in one of its two layers."""
    folder = tmp_path_factory.mktemp("olmo3")
    folder_of("olmo3", GQA | NEAR, folder)
    return folder


IDS = torch.randint(512, (40,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def their_logits(folder: Path) -> torch.Tensor:
    """transformers' logits, from a folder without a missing or an unknown weight."""
    kind = transformers.AutoModelForCausalLM
    hf, info = kind.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return hf.eval()(IDS[None]).logits[0]


@torch.no_grad()
def our_logits(folder: Path) -> torch.Tensor:
    from models import logits

    return logits(model.load_model(folder), IDS.tolist())


@pytest.mark.parametrize("lora", [(), LORA], ids=["full", "lora"])
def test_a_model_that_litgpt_does_not_know_trains_and_goes_out(lora, olmo3, ratings, tmp_path):
    before = their_logits(olmo3)
    assert before.std() > 0.1, "else equal logits say little"
    run = train(olmo3, ratings, tmp_path / "run", *STEPS, *lora)
    final = tmp_path / "run" / "final"
    trained = their_logits(final)
    assert not same(trained, before, 1e-3)
    assert same(our_logits(final), trained, 1e-5)
    assert run["weights"].keys() == load_file(olmo3 / "model.safetensors").keys()
    if lora:
        from peft import PeftModel

        base = transformers.AutoModelForCausalLM.from_pretrained(olmo3)
        adapted = PeftModel.from_pretrained(base, tmp_path / "run" / "final_adapter").eval()
        with torch.no_grad():
            assert same(adapted(IDS[None]).logits[0], trained, 1e-5)


@pytest.mark.parametrize("lora", [(), LORA], ids=["full", "lora"])
def test_a_stopped_run_goes_on_to_the_bit(lora, olmo3, ratings, tmp_path):
    options = (*STEPS, *lora, "--activation_checkpointing=true")
    whole = train(olmo3, ratings, tmp_path / "whole", *STEPS, *lora)
    train(olmo3, ratings, tmp_path / "run", *options, "--stop_at=1")
    resumed = train(olmo3, ratings, tmp_path / "run", *options, "--resume=auto")
    assert_same(whole, resumed)


def test_its_samples_are_transformers_own(olmo3, capsys):
    from records.tokenizer import Tokenizer

    generate.main([f"--model={olmo3}", "--prompt=the cat", "--temperature=0", "--max_new_tokens=20"])
    ours = capsys.readouterr().out.strip()
    tokenizer = Tokenizer(olmo3)
    (ids,) = tokenizer.encode(["the cat"])
    hf = transformers.AutoModelForCausalLM.from_pretrained(olmo3).eval()
    ids = torch.tensor([list(tokenizer.with_bos(ids))])
    theirs = hf.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
    assert ours == generate.completion_text(tokenizer, theirs).strip() and len(theirs) > 5
