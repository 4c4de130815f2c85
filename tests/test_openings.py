"""What only some papers need: log-probs of more tokens than the answer's own, and of an answer under another
prompt. Each example's steps equal a loop by hand in transformers, in float64."""

import math
import re
from itertools import chain

import numpy as np
import pytest
import tokens
import torch
import transformers
from conftest import refused
from test_forks import places, saved, train_example  # noqa: F401
from test_model import by_the_others_names, chunked, exact_norms, pair  # noqa: F401
from test_optim import run_settings
from tiny_models import plain_logps, plain_token_logps, ragged, same

import attention
import kto
from checks import check_settings
from models.hub import Source
from packing import pack
from records.tokenizer import Tokenizer
from trainer import Trainer

# ---- log-probs of more tokens --------------------------------------------------------------------


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("shape, K", [("gpt2", 1), ("gpt2", 2), ("llama", 2)])
def test_log_probs_of_the_references_likeliest_tokens_and_gradients_are_those_of_plain_forwards(
    shape, K, tiny, parity_ref, monkeypatch
):
    k = 4
    gpt, other = pair(shape, tiny, torch.float64)
    reference, plain_reference = pair(shape, parity_ref, torch.float64)
    V = gpt.config.padded_vocab_size

    def by_hand(model, prompts, completions, longest: int) -> torch.Tensor:
        """(B, K, L, 1 + k) log-probs."""
        rows = []
        for p, c in chain(*([(p, c) for c in cs] for p, cs in zip(prompts, completions))):
            likeliest = plain_logps(plain_reference, p, c).topk(k).indices
            target = torch.cat([torch.tensor(c)[:, None], likeliest], dim=1)
            logp_LV = plain_logps(model, p, c)
            beyond = logp_LV.new_zeros(longest - len(c), 1 + k)
            rows.append(torch.cat([logp_LV.gather(1, target), beyond]))
        return torch.stack(rows).view(len(prompts), K, longest, 1 + k)

    for seed, size in enumerate((1000, 3)):
        monkeypatch.setattr(attention, "TILE_TOKENS", (25, 128)[seed])
        prompts, completions = ragged(K, V, seed)
        calls = chunked(monkeypatch, V, size)
        batch = pack(prompts, completions)
        with torch.no_grad():
            of_reference = reference(batch, by_token=True, top_k=k)
        ours = gpt(batch._replace(target_T=of_reference.targets), by_token=True, entropy=True)
        args = (prompts, completions, batch.longest)
        theirs = by_hand(other, *args)
        assert max(calls) <= size, "no (N, V) logits"
        assert same(ours.logps, theirs, 1e-10)
        assert same(of_reference.logps, by_hand(plain_reference, *args), 1e-10)
        assert same(ours.entropy, gpt(batch, entropy=True).entropy, 1e-10)
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(theirs.shape, dtype=torch.float64, generator=generator)
        gpt.zero_grad()
        other.zero_grad()
        (weights * ours.logps).sum().backward()
        (weights * theirs).sum().backward()
        ours_by_name = by_the_others_names(gpt)
        theirs_by_name = {n: p.grad for n, p in other.named_parameters()}
        assert all(same(ours_by_name[n], grad, 1e-10) for n, grad in theirs_by_name.items())


NO_REFERENCE = {"by_token": True, "needs_reference": False}
WITH_PAIRS = {"by_token": True, "needs_mismatched_pairs": True}


@pytest.mark.parametrize("own", [{}, NO_REFERENCE, WITH_PAIRS])
def test_top_k_is_refused_where_it_would_have_no_tokens_or_no_reference(own):
    objective = type("Mine", (kto.Objective,), {"top_k": 2, **own})()
    match = "^Mine.top_k: it needs by_token and a reference, and no mismatched pairs"
    refused(match, check_settings, objective, run_settings())


# ---- marked parts of a completion ----------------------------------------------------------------


@pytest.mark.parametrize("text", ["Hello there, dear friend!", "Grüße 🦊 an 你好 alle"])
@pytest.mark.parametrize("kind", ["plain", "qwen3", "llama-2", "gemma"])
def test_a_marked_part_is_the_tokens_that_it_touches_also_through_a_chat_template(
    kind, text, tiny, tmp_path
):
    tokenizer = Tokenizer(Source(tiny if kind == "plain" else tokens.real(kind, tmp_path)))
    turns = ("Q", text) if kind == "plain" else ([tokens.user("Q")], [tokens.bot(text)])
    n = len(text)
    # a part that begins at a character of several tokens, too
    for start, end, label in [(0, 1, True), (6, 8, False), (n - 1, n, True), (0, n, False)]:
        marks = [{"start": start, "end": end, "label": label}]
        file = tokens.write(tmp_path / "marked.jsonl", tokens.rated(*turns, spans=marks))
        (asked,), _ = tokens.load(file, tokenizer, "prompts")
        assert not asked.completions
        (example,), _ = tokens.load(file, tokenizer)
        marked = np.flatnonzero(example.token_label)
        first, last = marked[0], marked[-1]
        assert {*example.token_label[first : last + 1]} == {1 if label else -1}, "without a gap"

        def decoded(a: int, b: int) -> str:
            return tokenizer.decode(example.completions[0][a:b], special_tokens=True)  # noqa: B023

        part = text[start:end]
        assert part in decoded(first, last + 1) and text[: start + 1] not in decoded(0, first)
        for a, b in ((first + 1, last + 1), (first, last)):
            assert part not in decoded(a, b), "no token too many"


SPANS = "spans: expected a list of {start, end, label} of one text: "
BAD_SPANS = {
    "spans: the text has 5 characters, and no part from 2 to 9": [{"start": 2, "end": 9, "label": True}],
    "spans: the text has 5 characters, and no part from 3 to 3": [{"start": 3, "end": 3, "label": True}],
    "spans: the text has 5 characters, and no part from -1 to 2": [{"start": -1, "end": 2, "label": 1}],
    f"{SPANS}label": [{"start": 0, "end": 2}],
    "label: expected true, false": [{"start": 0, "end": 2, "label": "maybe"}],
    f"{SPANS}list indices": [[0, 2]],
}  # fmt: skip


@pytest.mark.parametrize("said", BAD_SPANS)
def test_a_mark_outside_of_the_text_is_refused_with_its_line(said, tiny, tmp_path):
    good = tokens.rated("Q", "Hello")
    file = tokens.write(tmp_path / "marked.jsonl", good, good | {"spans": BAD_SPANS[said]})
    refused(f"^{file}:2: {re.escape(said)}", tokens.load, file, Tokenizer(Source(tiny)))


# ---- the examples, step by step, by hand ----------------------------------------------------------


def distill(policy, reference, example, *_):
    (completion,) = example.completions
    logp_LV, ref_LV = (plain_logps(m, example.prompt, completion) for m in (policy, reference))
    top = ref_LV.topk(3).indices
    p, q = logp_LV.exp().gather(1, top), ref_LV.exp().gather(1, top)
    p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], dim=1) for x in (p, q))
    return (p * (p / q).log()).sum() / len(completion)


def oapl(policy, reference, example, answers, _):
    (completion,) = example.completions
    logratio = (plain_token_logps(m, example.prompt, completion).sum() for m in (policy, reference))
    rights = [a.label for a in answers if a.prompt_key == example.prompt_key]
    assert len(rights) == 4
    value = 0.5 * math.log(sum(math.exp(right / 0.5) for right in rights) / 4)
    return (0.05 * (next(logratio) - next(logratio)) - (example.label - value)) ** 2


def next_message(policy, reference, example, _, tokenizer):
    (completion,) = example.completions
    text = f"(My next message will be: {example.extra['next']})\n{example.asked['prompt']}"
    logp_L = plain_token_logps(policy, example.prompt, completion)
    with_next_L = plain_token_logps(policy, tokenizer(text).input_ids, completion)
    advantage_L = (with_next_L - logp_L).detach().clamp(-5, 5)
    return -(advantage_L * logp_L).mean()


def token_kto(policy, reference, example, *_):
    (completion,) = example.completions
    logp_L, ref_L = (plain_token_logps(m, example.prompt, completion) for m in (policy, reference))
    signs = list(example.token_label) or [2 * example.label - 1] * len(completion)
    return 1 - torch.sigmoid(0.1 * sum(sign * r for sign, r in zip(signs, logp_L - ref_L)))


# example: (the loss of an answer, whether the teacher is the reference)
BY_HAND = {"distill": (distill, True), "oapl": (oapl, False), "next_message": (next_message, False),
           "token_kto": (token_kto, False)}  # fmt: skip


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("name", BY_HAND)
def test_three_steps_of_an_example_are_those_of_a_loop_by_hand(
    name, tiny, parity_ref, ratings, tmp_path, monkeypatch
):
    steps = []
    real = Trainer.train_step

    def spied(self, step, *rest):
        steps.append(step.examples)
        return real(self, step, *rest)

    monkeypatch.setattr(Trainer, "train_step", spied)
    monkeypatch.setattr(attention, "TILE_TOKENS", 25)
    sizes = chunked(monkeypatch, 512, 3)
    argv = ("--precision=64-true", "--batch_size=4", "--micro_batch_size=3", "--max_steps=3", "--optim.lr=1e-3",
            "--optim.schedule=constant", "--optim.clip=null", "--eval.samples=0")  # fmt: skip
    rows = train_example(name, tiny, ratings, tmp_path / "run", *argv)["rows"]
    assert max(sizes) <= 3, "no logits of all tokens"
    loss_of, has_teacher = BY_HAND[name]

    def loaded(folder):
        dtype = torch.float64
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    policy = loaded(tiny)
    reference = loaded(parity_ref if has_teacher else tiny).requires_grad_(False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    answers = list(chain(*steps))
    for examples, row in zip(steps, rows, strict=True):
        losses = [loss_of(policy, reference, e, answers, tokenizer) for e in examples]
        optimizer.zero_grad()
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        assert row["loss"] == pytest.approx(sum(losses).item() / len(losses), abs=1e-9)
    assert len(steps) == 3 and any(rows[0]["loss"] != row["loss"] for row in rows)
    ours = saved(tmp_path / "run", 3, "weights")["transformer.wte.weight"]
    assert (ours - policy.transformer.wte.weight).abs().max() < 1e-9
