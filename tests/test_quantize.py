"""QLoRA runs: trained, killed, resumed, exported; and what bitsandbytes' linear layers compute."""

from functools import partial

import bitsandbytes
import numpy as np
import pytest
import torch
import transformers
from conftest import (
    assert_same,
    checkpoint_tensors,
    killed,
    refused,
    train,
)
from tiny_models import GQA, made, same_weights, with_adapters

from infra.checkpoint import checkpoints_by_step
from infra.logger import Logger
from infra.optimizer import make_optimizer
from infra.settings import Lora
from models import load
from models.lora import merged_weights
from models.quantize import quantize_base

RUN = ("--batch_size=7", "--max_steps=6", "--optim.lr=1e-2", "--save_interval=2",
       "--lora.rank=4", "--precision=32-true")  # fmt: skip


def adapters_of(out) -> dict:
    *_, last = checkpoints_by_step(out).values()
    return checkpoint_tensors(last, "weights")


def test_a_quantised_run_is_killed_resumed_and_exported_onto_the_sources_own_weights(
    llama, ratings, tmp_path, capsys
):
    argv = (*RUN, "--lora.quantize=nf4", f"--data.val={ratings}", "--eval.max_new_tokens=4")
    whole = train(llama, ratings, tmp_path / "whole", *argv)
    said = capsys.readouterr()
    assert "step 0: policy and reference agree to the bit" in said.out and not said.err
    out = tmp_path / "run"
    killed((Logger, "step"), 4, lambda: train(llama, ratings, out, *argv))
    assert_same(train(llama, ratings, out, "--resume=auto", *argv), whole)
    assert "because the measured base is in 4 bits" in capsys.readouterr().out
    state = adapters_of(out)
    assert state and all("lora_" in n and x.dtype == torch.float32 for n, x in state.items())

    # the export is the source's weights + adapters, to the bit: nothing quantised is in it
    lora = with_adapters(llama, Lora(rank=4))
    plain = {n: p.detach().clone() for n, p in lora.unique_parameters().items()}
    with torch.no_grad():
        for name, x in state.items():
            lora.get_parameter(name).copy_(x)
    expected = merged_weights(lora)
    exported = load.load_model(out / "final").unique_parameters()
    assert same_weights(exported, expected)
    assert torch.equal(exported["lm_head.weight"], plain["lm_head.weight"])
    moved = "transformer.h.0.attn.qkv"
    assert not torch.equal(exported[f"{moved}.weight"], plain[f"{moved}.linear.weight"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_in_bf16_the_start_is_exact_too_and_training_goes_on(
    precision, llama, ratings, tmp_path, capsys
):
    argv = (*RUN[:-1], "--max_steps=2", f"--precision={precision}", "--lora.quantize=nf4")
    run = train(llama, ratings, tmp_path, *argv)
    assert "agree to the bit" in capsys.readouterr().out
    first, second = (row["rewards/mean"] for row in run["rows"])
    assert first == 0 != second, "evaluation and training compute alike"
    assert {x.dtype for x in adapters_of(tmp_path).values()} == {torch.float32}
    assert {x.dtype for x in run["weights"].values()} == {torch.float32}, "the source's"


def test_a_width_that_nf4_computes_wrong_on_a_cpu_is_refused(tiny):
    gpt = with_adapters(tiny, Lora(rank=2))
    refused("nf4 needs .* multiples of 64, this model has 32", quantize_base, gpt, "cpu")


def test_a_mixture_is_refused_because_its_experts_would_not_be_quantised(tmp_path):
    sizes = dict(GQA, vocab_size=512, hidden_size=64, intermediate_size=64, num_attention_heads=4)
    made(transformers.MixtralConfig(**sizes, num_local_experts=4), tmp_path)
    gpt = with_adapters(tmp_path, Lora(rank=2, targets="q_proj"))
    refused("^lora.quantize: nf4 .* experts of a mixture", quantize_base, gpt, "cpu")


def test_8_bit_adamw_is_killed_and_resumed_to_the_bit(tiny, ratings, tmp_path):
    def adamw_8bit(policy, cfg):  # the function of docs/forks.md, "An optimizer"
        return bitsandbytes.optim.AdamW8bit(make_optimizer(policy, cfg).param_groups)

    argv, out = (*RUN[:4], "--precision=32-true"), tmp_path / "run"
    trained = partial(train, tiny, ratings, optimizer=adamw_8bit)
    whole = trained(tmp_path / "whole", *argv)
    losses = [row["loss"] for row in whole["rows"]]
    assert losses[-1] != losses[0]
    killed((Logger, "step"), 4, lambda: trained(out, *argv))
    assert_same(trained(out, "--resume=auto", *argv), whole)
    last = list(checkpoints_by_step(out).values())[-1]
    state = checkpoint_tensors(last, "state1")["transformer.wte.weight"]
    assert state.dtype == torch.uint8 and np.prod(state.shape) == 512 * 32
