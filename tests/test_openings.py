"""What only some papers need of the loop: log-probs of more tokens than the answer's own. Each example's steps equal a
loop by hand in transformers, in float64."""

import sys
from importlib import import_module
from itertools import chain

import pytest
import torch
import transformers
from conftest import ROOT, checkpoint_tensors, train
from test_forks import HANDED
from test_model import chunked, pair
from test_optim import run_settings
from tiny_models import ragged

import attention
import kto
from checks import check_settings
from infra.checkpoint import checkpoint_folder
from infra.console import BadInput
from packing import pack
from trainer import Trainer

sys.path.append(str(ROOT / "examples"))


# ---- log-probs of more tokens --------------------------------------------------------------------


def top_by_hand(model, prompts, completions, targets, longest: int, k: int) -> torch.Tensor:
    """(B, K, L, 1 + k) log-probs by plain forwards; `targets` is asked for the tokens at each place."""
    rows = []
    for p, c in chain(*([(p, c) for c in cs] for p, cs in zip(prompts, completions))):
        ids = torch.tensor([*p, *c])
        logp_LV = model(ids[None]).logits[0].log_softmax(-1)[len(p) - 1 : -1]
        target = torch.cat([ids[len(p) :, None], targets(p, c)], dim=1)
        row = logp_LV.new_zeros(longest, 1 + k)
        rows.append(torch.cat([logp_LV.gather(1, target), row[len(c) :]]))
    return torch.stack(rows).view(len(prompts), -1, longest, 1 + k)


@pytest.mark.parametrize("K", [1, 2])
def test_log_probs_of_the_references_likeliest_tokens_and_gradients_are_those_of_plain_forwards(
    K, tiny, parity_ref, monkeypatch
):
    k = 4
    gpt, other, gradients = pair("gpt2", tiny, torch.float64)
    reference, plain_reference, _ = pair("gpt2", parity_ref, torch.float64)

    def likeliest(p, c):
        ids = torch.tensor([*p, *c])
        logits_LV = plain_reference(ids[None]).logits[0, len(p) - 1 : -1]
        return logits_LV.topk(k).indices

    for seed, tokens in enumerate((1000, 3)):
        monkeypatch.setattr(attention, "TILE_TOKENS", (25, 128)[seed])
        prompts, completions = ragged(K, gpt.config.padded_vocab_size, seed)
        calls = chunked(monkeypatch, gpt.config.padded_vocab_size, tokens)
        batch = pack(prompts, completions)
        with torch.no_grad():
            of_reference = reference(batch._replace(top_k=k), by_token=True)
        ours = gpt(batch.with_targets(of_reference.targets), by_token=True, entropy=True)
        args = (prompts, completions, likeliest, batch.longest, k)
        theirs = top_by_hand(other, *args)
        assert max(calls) <= tokens, "no (N, V) logits"
        assert ours.logps.shape == (5, K, batch.longest, 1 + k)
        assert (ours.logps - theirs).abs().max() < 1e-10
        assert (of_reference.logps - top_by_hand(plain_reference, *args)).abs().max() < 1e-10
        assert (ours.entropy - gpt(batch, entropy=True).entropy).abs().max() < 1e-10
        weights = torch.randn(
            theirs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        gpt.zero_grad()
        other.zero_grad()
        (weights * ours.logps).sum().backward()
        (weights * theirs).sum().backward()
        by_hand = gradients()
        for name, p in gpt.unique_parameters().items():
            assert (p.grad - by_hand[name]).abs().max() < 1e-10, name


NO_REFERENCE = {"by_token": True, "needs_reference": False}
WITH_PAIRS = {"by_token": True, "needs_mismatched_pairs": True}


@pytest.mark.parametrize("own", [{}, NO_REFERENCE, WITH_PAIRS])
def test_top_k_is_refused_where_it_would_have_no_tokens_or_no_reference(own):
    objective = type("Mine", (kto.Objective,), {"top_k": 2, **own})()
    with pytest.raises(
        BadInput, match="^Mine.top_k: it needs by_token and a reference, and no mismatched pairs"
    ):
        check_settings(objective, run_settings())


# ---- the examples, step by step, by hand ----------------------------------------------------------


def plain(model, prompt, completion) -> torch.Tensor:
    """(L, V) log-probs at the tokens of a completion."""
    ids = torch.tensor([*prompt, *completion])
    return model(ids[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]


def kl_by_hand(policy, reference, example):
    (completion,) = example.completions
    logp_LV, ref_LV = (plain(m, example.prompt, completion) for m in (policy, reference))
    top = ref_LV.topk(3).indices
    p, q = logp_LV.exp().gather(1, top), ref_LV.exp().gather(1, top)
    p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], dim=1) for x in (p, q))
    return (p * (p / q).log()).sum() / len(completion)


BY_HAND = {"distill": kl_by_hand}


@pytest.mark.parametrize("name", BY_HAND)
def test_three_steps_of_an_example_are_those_of_a_loop_by_hand(
    name, tiny, parity_ref, ratings, tmp_path, monkeypatch
):
    steps, real = [], Trainer.train_step
    spied = lambda self, step, *rest: steps.append(step.examples) or real(self, step, *rest)  # noqa: E731
    monkeypatch.setattr(Trainer, "train_step", spied)
    program, names, own = HANDED[name]
    handed = {key: getattr(import_module(name), value) for key, value in names.items()}
    own = [word.format(teacher=parity_ref) for word in own]
    argv = ("--precision=64-true", "--batch_size=4", "--micro_batch_size=3", "--max_steps=3", "--optim.lr=1e-3",
            "--optim.schedule=constant", "--optim.clip=null", "--eval.samples=0", *own)  # fmt: skip
    rows = train(tiny, ratings, tmp_path, *argv, program=program.__name__, **handed)["rows"]

    def loaded(folder):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    policy, reference = loaded(tiny), loaded(parity_ref).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    for examples, row in zip(steps, rows, strict=True):
        loss = sum(BY_HAND[name](policy, reference, e) for e in examples) / len(examples)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-9)
    assert len(steps) == 3 and rows[0]["loss"] != pytest.approx(rows[2]["loss"], abs=1e-6)
    ours = checkpoint_tensors(checkpoint_folder(tmp_path, 3), "weights")
    embedding = ours["transformer.wte.weight"]
    assert (embedding - policy.transformer.wte.weight).abs().max() < 1e-9
