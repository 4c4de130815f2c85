"""Sampling: the cache against a plain forward, chances, independence of the batch and of the
ranks, where it ends."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from conftest import refused
from lightning.fabric import Fabric
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA, gpt_of, logits
from tokens import user, write
from torch import nn

import generate
import sampler
from infra.files import read_lines
from infra.settings import Sampling
from models import load
from models.hub import Source
from records.tokenizer import Tokenizer
from sampler import read_answer

FABRIC = Fabric(accelerator="cpu", devices=1)
EOS = 0
SHAPES = {"gpt2": None, "llama": LLAMA, "window": LLAMA | dict(sliding_window_size=4)}
SHAPES["one window"] = SHAPES["window"] | dict(sliding_window_indices=[1, 0])


def policy_of(shape, tiny, dtype=torch.float32):
    if SHAPES[shape] is None:
        return load.load_model(tiny, dtype=dtype).eval()
    gpt = gpt_of(SHAPES[shape])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in gpt.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.5 if p.dim() > 1 else 1.0))
    return gpt.to(dtype).eval()


def prompts_of(lengths, vocabulary=61, seed=0):
    r = np.random.default_rng(seed)
    return [r.integers(1, vocabulary, size=n).astype("int32") for n in lengths]


def letters(eos=EOS):
    """A tokenizer that says abc... for 0, 1, 2, .... texts: what it was asked for."""
    stops = eos if isinstance(eos, tuple) else (eos,)

    def decode(ids, special_tokens=False, is_answer=False):
        texts.append("".join(chr(97 + i) for i in ids))
        return texts[-1]

    texts = []
    return SimpleNamespace(stops=stops, decode=decode, texts=texts)


def answers(
    policy,
    prompts,
    max_new=12,
    context=48,
    seed=3,
    eos=EOS,
    tokenizer=None,
    **settings,
):
    policy.max_seq_length = context
    args = Sampling(**settings)
    tokenizer = tokenizer or letters(eos)
    return sampler.generate(FABRIC, policy, prompts, tokenizer, args, max_new, seed)


# ---- the cache -----------------------------------------------------------------------------------


@torch.no_grad()
def greedily(policy, prompt, max_new, context, eos=EOS) -> list[int]:
    """Argmax of a whole forward for each token."""
    ids = [int(i) for i in prompt]
    while len(ids) < min(context, len(prompt) + max_new) and eos not in ids[len(prompt) :]:
        ids.append(int(logits(policy, ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_answers_are_the_argmax_of_whole_forwards(shape, tiny):
    policy, prompts = policy_of(shape, tiny), prompts_of([7, 1, 12, 3, 40, 45, 5])
    expected = [greedily(policy, p, 12, 48, eos=-2) for p in prompts]
    tokens = [i for e in expected for i in e]
    assert [len(e) for e in expected] == [12, 12, 12, 12, 8, 3, 12] and len(set(tokens)) > 10
    assert answers(policy, prompts, eos=-2, temperature=0) == expected
    assert answers(policy, prompts, eos=-2, temperature=0, batch_size=2) == expected
    assert answers(policy, prompts, eos=-2, temperature=1.0, top_p=1e-9) == expected
    assert answers(policy, prompts, 1, eos=-2, temperature=0) == [e[:1] for e in expected]
    assert answers(policy, []) == []
    # now rows end at different times and leave, and the others go on from their slots
    eos = max(set(tokens), key=tokens.count)
    ended = [greedily(policy, p, 12, 48, eos) for p in prompts]
    assert len({len(e) for e in ended}) > 3
    rows = []
    policy.register_forward_pre_hook(lambda _, args: rows.append(len(args[0].last_B)))
    assert answers(policy, prompts, temperature=0, eos=eos) == ended
    assert rows == [sum(len(e) > i for e in ended) for i in range(max(map(len, ended)))]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_that_is_answered_several_times_is_read_once(shape, tiny):
    policy = policy_of(shape, tiny, torch.float64)
    a, b, c = prompts_of([7, 12, 1])
    prompts = [a, b, a, c, a, b]
    read = []
    policy.transformer.wte.register_forward_hook(lambda m, args, y: read.append(args[0].numel()))
    together = answers(policy, prompts, eos=-2)
    assert read[0] == 7 + 12 + 1 and len({tuple(x) for x in together}) == 6
    read.clear()
    assert answers(policy, prompts, eos=-2, batch_size=1) == together
    assert read[0] == 7


# ---- chances -------------------------------------------------------------------------------------

P = torch.tensor([0.05, 0.4, 0.0, 0.25, 0.2, 0.1, 0.0])
N = 10_000  # draws, evenly spread, so frequencies are chances to 1 / N
U = (torch.arange(N, dtype=torch.float64) + 0.5) / N
ALL = {0, 1, 3, 4, 5}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "settings, tokens",
    [
        ({}, ALL),
        ({"temperature": 0.5}, ALL),
        ({"temperature": 3.0}, ALL),
        ({"temperature": 0}, {1}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.8}, {1, 3, 4}),
    ],
)
def test_tokens_are_chosen_with_their_probability_and_top_p_cuts_the_tail(
    settings, tokens, deterministic
):
    torch.use_deterministic_algorithms(deterministic)
    try:
        token = sampler.choose_token(P.log().expand(N, -1), U, Sampling(**settings))
    finally:
        torch.use_deterministic_algorithms(False)
    found = torch.bincount(token, minlength=len(P)) / N
    assert set(found.nonzero()[:, 0].tolist()) == tokens
    p = P ** (1 / (settings.get("temperature") or 1.0))
    kept = torch.tensor([x * (i in tokens) for i, x in enumerate(p.tolist())])
    assert (found - kept / kept.sum()).abs().max() <= 1 / N


class Says(nn.Module):
    """In place of a model: the logits of each token are these."""

    def __init__(self, *logits):
        super().__init__()
        self.logits_V = torch.tensor(logits)
        self.config = SimpleNamespace(padded_vocab_size=len(logits))

    def cache_bytes(self, slots):
        return slots

    def forward(self, cache):
        return self.logits_V.repeat(len(cache.last_B), 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_depends_on_the_seed_and_its_place_only(shape, tiny):
    policy, lengths = policy_of(shape, tiny), [4, 1, 9, 2, 30, 6, 3]
    prompts = prompts_of(lengths)
    base = answers(policy, prompts)
    assert len({tuple(a) for a in base}) == 7
    for batch_size in (1, 2, 3, 7):
        assert answers(policy, prompts, batch_size=batch_size) == base
    assert answers(policy, prompts, seed=4) != base
    assert answers(policy, prompts[::-1]) != base[::-1]


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_a_cache_of_few_bytes_answers_the_same_prompts_in_waves(shape, tiny, monkeypatch):
    policy, prompts = policy_of(shape, tiny), prompts_of([4, 1, 9, 2, 30])
    whole = answers(policy, prompts)
    rows, real = [], sampler.KVCache.attend

    def attend(self, *args):
        out = real(self, *args)
        rows.extend(len(k) for k, _ in self.tensors.values())
        return out

    monkeypatch.setattr(sampler.KVCache, "attend", attend)
    c = policy.config
    slots = 42  # the longest prompt and 12 new tokens
    row = 2 * c.n_layer * c.n_query_groups * c.head_size * slots * 4
    for n in (1, 2, 5):
        rows.clear()
        monkeypatch.setattr(sampler, "CPU_MEMORY", 8 * (n + 0.5) * row)  # an eighth is the cache's
        assert answers(policy, prompts) == whole
        assert max(rows) == n, "as many rows as fit"


def test_rows_that_leave_the_cache_cost_no_copy_of_those_that_stay(tiny, monkeypatch):
    """A copy of the whole cache for each answer that ends took 30 times as long."""
    policy, places = policy_of("gpt2", tiny), []
    real = sampler.KVCache.keep

    def keep(self, rows):
        before = [k.data_ptr() for k, _ in self.tensors.values()]
        order = real(self, rows)
        places.append(before == [k.data_ptr() for k, _ in self.tensors.values()])
        return order

    monkeypatch.setattr(sampler.KVCache, "keep", keep)
    answers(policy, prompts_of([4, 1, 9, 2, 30]), context=34)  # the longest prompt gets 4 tokens
    assert places and all(places)


# ---- what is asked for ---------------------------------------------------------------------------


def until_stop(ids: list[int], stop: list[str]) -> list[int]:
    """The ids up to the first one with which a stop text is there."""
    for n in range(len(ids)):
        text = letters().decode(ids[: n + 1])
        if any(x in text for x in stop):
            return ids[: n + 1]
    return ids


@pytest.mark.parametrize("eos", [-2, 4])
def test_a_stop_text_that_is_searched_for_now_and_then_changes_no_token(eos):
    """Each answer has a random generator of its own, so it is the beginning of the answer without stop texts."""
    model, prompts, stop = Says(*[0.0] * 4, -1.0), prompts_of([3]) * 60, ["bc", "dd", "aba"]
    given = dict(max_new=23, context=30, eos=eos)
    expected = [until_stop(ids, stop) for ids in answers(model, prompts, **given)]
    assert len({len(ids) for ids in expected}) > 10
    tokenizer = letters(eos)
    assert answers(model, prompts, tokenizer=tokenizer, stop=stop, **given) == expected
    for ids in expected:
        said, (shown, cut) = letters().decode(ids), read_answer(letters(eos), ids, stop)
        assert said.startswith(shown) and not any(text in shown for text in stop), "it is not shown"
        assert cut == (len(ids) == 23 and shown == said)
    assert len(tokenizer.texts) < sum(map(len, expected)), "a text is not looked at with each token"


ABC = np.array([66, 67, 68], "int32")  # "abc"


# ---- the program ---------------------------------------------------------------------------------


# None: the model's generation_config.json names it
@pytest.mark.parametrize("stop", [None, '["<|pad|>"]', '["zzz", "<|pad|>"]', '["]esh"]'])
def test_every_end_of_the_model_and_every_stop_text_ends_an_answer_and_is_not_shown(
    stop, tiny, tmp_path, capsys
):
    """A stop text may be a special token, and special tokens before it are not shown either."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    pad, tokenizer = 1, Tokenizer(Source(tiny))
    (whole,) = answers(load.load_model(tiny), [ABC], eos=-2, temperature=0)
    before, fourth, after = whole[:3], whole[3], whole[4:]
    assert fourth not in (*ABC, *before) and tokenizer.decode(after).startswith("]esh")
    # the head is the embedding: with these rows exchanged the model says <|pad|> as its fourth token
    weights = load_file(tmp_path / "model.safetensors")
    (embedding,) = (x for name, x in weights.items() if "wte" in name)
    embedding[[pad, fourth]] = embedding[[fourth, pad]]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    argv = [f"--model={tmp_path}", "--temperature=0", "--max_new_tokens=12", "--prompt=abc"]
    if stop:
        argv.append(f"--stop={stop}")
    else:
        ends = json.dumps({"eos_token_id": [0, pad]})
        (tmp_path / "generation_config.json").write_text(ends)
    generate.main(argv)
    assert capsys.readouterr().out == tokenizer.decode(before) + "\n"


def test_without_a_prompt_the_program_holds_a_conversation(chatty, monkeypatch):
    lines = iter(["one", "two", ""])
    asked, real = [], generate.generate
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))

    def noted(fabric, policy, prompts, tokenizer, args, new, seed, before_token):
        asked.append((tokenizer.decode(list(prompts[0])), seed))
        return real(fabric, policy, prompts, tokenizer, args, new, seed, before_token)

    monkeypatch.setattr(generate, "generate", noted)
    argv = ["--model", str(chatty), "--max_new_tokens", "3"]
    generate.main(argv)
    generate.main([*argv, "--plain=true", "--prompt=three"])
    first, (second, seed), plain = asked
    assert first == ("<user>one", 1) and plain == ("three", 1)
    assert second.startswith("<user>one<assistant>") and second.endswith("<user>two")
    assert seed == 2


CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
ASKED = ["one two", "three four", "five"]


@pytest.fixture
def prompts(tiny, tmp_path, monkeypatch):
    """A file of three prompts, one of them twice, beside a copy of the tiny model. -> asks them with more options."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny, "model")
    records = [
        {"prompt": ASKED[0], "completion": "old", "label": True, "kind": "a"},
        {"instruction": ASKED[1], "kind": "b"},
        {"prompt": ASKED[0], "kind": "a"},
        {"prompt": ASKED[2], "kind": "c"},
    ]
    write(Path("prompts.jsonl"), *records)
    given = ["--model=model", "--prompts=prompts.jsonl", "--batch_size=4", "--max_new_tokens=7"]
    return lambda *words: generate.main([*given, "--extra=kind", *words])


@pytest.mark.parametrize("by_template", [True, False])
def test_a_file_of_prompts_is_answered_as_transformers_would(by_template, prompts, tiny):
    if by_template:
        Path("model/chat_template.jinja").write_text(CHAT)
    prompts("--temperature=0")
    rows = read_lines(Path("answers.jsonl"))
    hf = transformers.AutoModelForCausalLM.from_pretrained(tiny).eval()
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    for row, text, kind in zip(rows, ASKED, "abc", strict=True):
        ids = tokenizer.encode(f"[user] {text} " if by_template else text).ids
        said = hf.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=7, pad_token_id=0)
        answer = said[0, len(ids) :].tolist()
        expected = {
            "prompt": [user(text)] if by_template else text,
            "kind": kind,
            "generator": "model",
        }
        expected |= {"chat_template_kwargs": {}} if by_template else {}
        expected |= {"completion": tokenizer.decode(answer), "cut": 0 not in answer}
        assert row == expected, "a label of the file's is not one of the new answer"


def test_several_answers_to_a_prompt_differ_and_their_file_is_not_written_over(prompts):
    prompts("--num_generations=2")
    out = Path("answers.jsonl")
    whole = out.read_text()
    assert len(set(whole.splitlines())) == 6
    refused("^out: answers.jsonl: the file is there already", prompts, "--num_generations=2")
    assert out.read_text() == whole


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--prompt=x", "--prompts=p.jsonl"], "prompts: not with --prompt"),
        (["--prompts=nowhere.jsonl"], "nowhere.jsonl"),
        (["--prompts=p.jsonl"], "p.jsonl:2: prompt: from 1 to 127 tokens fit this model, got "),
        (["--prompts=q.jsonl"], "q.jsonl:1: prompt: the model has no chat template"),
        (["--prompts=q.jsonl", "--extra=kind"], "q.jsonl:1: kind: missing"),
    ],
)
def test_a_mistake_of_the_program_is_one_line(argv, message, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "p.jsonl", {"prompt": "x"}, {"prompt": "x " * 300})
    write(tmp_path / "q.jsonl", {"prompt": [user("x")]})
    refused(re.escape(message), generate.main, ["--model", str(tiny), *argv])
    assert not (tmp_path / "answers.jsonl").exists()
