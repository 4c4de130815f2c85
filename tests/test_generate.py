"""Sampling: the cache against a plain forward, chances, independence of the batch and of the
ranks, where it ends."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ranks
from lightning.fabric import Fabric
from models import LLAMA, gpt_of
from torch import nn

import attention
import generate
import load
from generate import read_answer
from packing import pack
from records.tokenizer import Tokenizer
from runs.console import BadInput
from runs.settings import Sampling

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
    """A tokenizer that says abc... for 0, 1, 2, ..."""
    stops = eos if isinstance(eos, tuple) else (eos,)
    return SimpleNamespace(stops=stops, decode=lambda ids: "".join(chr(97 + i) for i in ids))


def answers(
    policy,
    prompts,
    max_new=12,
    context=48,
    seed=3,
    fabric=FABRIC,
    eos=EOS,
    before_token=lambda: None,
    **settings,
):
    policy.max_seq_length = context
    args = Sampling(**settings)
    return generate.generate(
        fabric, policy, prompts, letters(eos), args, max_new, seed, before_token
    )


# ---- the cache -----------------------------------------------------------------------------------


def whole_forward(policy, ids):
    """The logits of the next token, without a cache."""
    rows = pack([np.array(ids)], [(np.array([1]),)])
    packed = attention.PackedAttention(rows)
    return policy.head(policy.hidden(rows.token_N[None], rows.position_N[None], packed)[0, -1])


@torch.no_grad()
def greedily(policy, prompt, max_new, context, eos=EOS) -> list[int]:
    """Argmax of a whole forward for each token."""
    ids = [int(i) for i in prompt]
    while len(ids) < min(context, len(prompt) + max_new) and eos not in ids[len(prompt) :]:
        ids.append(int(whole_forward(policy, ids).argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_answers_are_the_argmax_of_whole_forwards(shape, tiny):
    policy, prompts = policy_of(shape, tiny), prompts_of([7, 1, 12, 3, 40, 45, 5])
    expected = [greedily(policy, p, 12, 48, eos=-2) for p in prompts]
    tokens = [i for e in expected for i in e]
    assert [len(e) for e in expected] == [12, 12, 12, 12, 8, 3, 12] and len(set(tokens)) > 10
    assert answers(policy, prompts, eos=-2, temperature=0) == expected
    assert answers(policy, prompts, eos=-2, temperature=0, batch_size=2) == expected
    assert answers(policy, prompts, eos=-2, temperature=1.0, top_k=1) == expected
    # now rows end at different times, and the others go on from their slots
    eos = max(set(tokens), key=tokens.count)
    ended = [greedily(policy, p, 12, 48, eos) for p in prompts]
    assert len({len(e) for e in ended}) > 3
    assert answers(policy, prompts, temperature=0, eos=eos) == ended


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


def frequencies(u=U, **settings):
    token = generate.choose_token(P.log().expand(len(u), -1), u, Sampling(**settings))
    return torch.bincount(token, minlength=len(P)) / len(u)


def support(**settings):
    return set(frequencies(**settings).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_are_chosen_with_their_probability(temperature):
    p = P ** (1 / temperature)
    assert (frequencies(temperature=temperature) - p / p.sum()).abs().max() <= 1 / N
    u = torch.rand(N, generator=torch.Generator().manual_seed(0)).double()
    sigma = (p / p.sum() * (1 - p / p.sum()) / N).sqrt()
    assert ((frequencies(u, temperature=temperature) - p / p.sum()).abs() <= 4 * sigma).all()


def test_top_k_and_top_p_cut_the_tail_and_leave_the_rest_in_proportion():
    assert support() == {0, 1, 3, 4, 5}
    for one in (dict(top_k=1), dict(top_p=0.01), dict(top_p=0.39), dict(temperature=0)):
        assert support(**one) == {1}
    assert support(top_k=3) == support(top_p=0.8) == {1, 3, 4}
    assert support(top_k=100) == support(top_k=None) == support(top_p=1.0) == {0, 1, 3, 4, 5}
    assert support(top_p=0.41) == {1, 3}
    assert support(top_k=3, top_p=0.7) == {1, 3}, "top_p is of what top_k left: 0.4 + 0.25 of 0.85"
    for settings in (dict(top_k=2), dict(top_p=0.5)):
        kept = torch.tensor([0, 0.4, 0, 0.25, 0, 0, 0]) / 0.65
        assert (frequencies(**settings) - kept).abs().max() <= 1 / N
    tied = torch.zeros(1, 4).expand(N, -1)
    chosen = set(generate.choose_token(tied, U, Sampling(top_k=2)).tolist())
    assert len(chosen) == 2, "k tokens, not all that tie with the k-th"


@pytest.mark.parametrize("settings", [{}, dict(top_p=0.9), dict(top_k=40)])
def test_chances_added_as_whole_numbers_choose_the_same_tokens(settings):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, 5000, generator=generator)
    u_B = torch.rand(200, generator=generator).double()
    plain = generate.choose_token(logits, u_B, Sampling(**settings))
    torch.use_deterministic_algorithms(True)
    try:
        whole = generate.choose_token(logits, u_B, Sampling(**settings))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(whole, plain) and len(set(whole.tolist())) > 100


class Alphabet(nn.Module):
    """Says the next number; records how many rows each forward had and in which mode."""

    def __init__(self, logits_V=None):
        super().__init__()
        self.logits_V, self.rows = logits_V, []

    def cache_bytes(self, slots):
        return slots

    def forward(self, cache):
        B = len(cache.last_B)
        self.rows.append(B)
        if self.logits_V is not None:
            return self.logits_V.expand(B, -1)
        return 100.0 * nn.functional.one_hot(cache.token_RQ.flatten()[cache.last_B] + 1, 100)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_depends_on_the_seed_and_its_place_only(shape, tiny):
    policy, lengths = policy_of(shape, tiny), [4, 1, 9, 2, 30, 6, 3]
    prompts = prompts_of(lengths)
    base = answers(policy, prompts)
    assert len({tuple(a) for a in base}) == 7
    for batch_size in (1, 2, 3, 7):
        assert answers(policy, prompts, batch_size=batch_size) == base
    others = prompts_of([11, 5, 2, 1, 3, 40, 8], seed=1)
    for i in range(7):  # all others replaced, or gone
        company = others[:i] + [prompts[i]] + others[i + 1 :]
        assert answers(policy, company)[i] == base[i]
        assert answers(policy, company[: i + 1], batch_size=3)[i] == base[i]
    assert answers(policy, prompts, seed=4) != base
    assert answers(policy, prompts[::-1]) != base[::-1]
    begins = answers(policy, prompts, max_new=5)
    assert begins == [a[:5] for a in base], "a longer answer begins like a shorter one"


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_a_cache_of_few_bytes_answers_the_same_prompts_in_waves(shape, tiny, monkeypatch):
    policy, prompts = policy_of(shape, tiny), prompts_of([4, 1, 9, 2, 30])
    whole, sizes, real = answers(policy, prompts), [], attention.KVCache.attend

    def attend(self, *args):
        out = real(self, *args)
        sizes.append(sum(x.nbytes for kv in self.tensors.values() for x in kv))
        return out

    monkeypatch.setattr(attention.KVCache, "attend", attend)
    row = policy.cache_bytes(42)  # the longest prompt and 12 new tokens
    for rows in (1, 2, 5):
        sizes.clear()
        assert answers(policy, prompts, cache_gb=(rows + 0.5) * row / 1e9) == whole
        assert max(sizes) <= rows * row and max(sizes) > row / 2


# ---- where it ends -------------------------------------------------------------------------------


def count(start, end):
    return list(range(start, end + 1))


def test_an_answer_ends_with_its_eos_at_the_limit_or_at_the_context():
    prompts = [[3], [9, 9, 15], [17, 18, 19], [20, 20, 20, 2], [30] * 8, [40] * 9]
    prompts = [np.array(p, "int32") for p in prompts]
    expected = [count(4, 9), count(16, 20), [20], count(3, 8), [31, 32], [41]]
    policy, given = Alphabet(), dict(context=10, eos=20, temperature=0)
    assert answers(policy, prompts, max_new=6, **given) == expected
    assert policy.rows == [6, 4, 3, 3, 3, 2], "finished rows leave"
    assert answers(policy, prompts, max_new=6, batch_size=2, **given) == expected
    assert answers(policy, prompts, max_new=1, **given) == [e[:1] for e in expected]
    assert answers(policy, [], max_new=6) == []


# ---- stopped from outside ------------------------------------------------------------------------


class Stopped(Exception):
    pass


def stop_at(n: int, calls: list, look=lambda: 0):
    """A before_token that raises when it is called for the n-th time. `calls` gets what look() says."""

    def before_token():
        calls.append(look())
        if len(calls) == n:
            raise Stopped

    return before_token


def test_before_token_is_called_before_each_token_and_what_it_raises_ends_sampling():
    policy, calls = Alphabet(), []
    before_token = stop_at(4, calls, lambda: len(policy.rows))
    with pytest.raises(Stopped):
        answers(policy, prompts_of([2, 3, 4]), max_new=9, eos=-2, before_token=before_token)
    assert calls == [0, 1, 2, 3], "called before every forward"
    assert len(policy.rows) == 3, "no forward after it"


# ---- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, batch_size", [(7, 2), (5, 1), (1, 4)])
def test_two_ranks_give_the_answers_of_one(n, batch_size, tiny):
    policy = policy_of("gpt2", tiny)
    prompts = prompts_of([30, 1, 9, 2, 4, 6, 3][:n], vocabulary=512)
    given = dict(batch_size=batch_size, context=34, eos=5)
    alone, longest = answers(policy, prompts, **given), "the first row waits for a longer one"
    assert len(alone[0]) == 4 and len(alone[-1]) in (4, 12), longest

    def work(rank):
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        calls = []
        policy.register_forward_hook(lambda *_: calls.append(0))
        return answers(policy, prompts, fabric=fabric, **given), len(calls)

    (zero, calls_0), (one, calls_1) = ranks(2, work)
    assert zero == one == alone
    assert calls_0 == calls_1 > 0, "a sharded policy would hang"


# ---- what is asked for ---------------------------------------------------------------------------


class Fixed(torch.nn.Module):
    """Logits that depend on nothing."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def cache_bytes(self, slots):
        return slots

    def forward(self, cache):
        return self.logits.repeat(len(cache.last_B), 1)


def test_a_repetition_penalty_divides_and_multiplies_what_is_there_in_the_prompt_or_the_answer():
    model = Fixed([3.0, 2.9, -1.0, -1.05])
    assert answers(model, prompts_of([9]), max_new=2, eos=-2, temperature=0)[0] == [0, 0]
    prompt = [np.array([2, 2], "int32"), np.array([0], "int32")]
    penalty = dict(eos=-2, temperature=0, repetition_penalty=1.5)
    given = answers(model, prompt, max_new=4, **penalty)
    assert given == [[0, 1, 0, 0], [1, 0, 0, 0]], "2.0 and 1.93 are still above all others"
    low = Fixed([-9.0, -9.0, -1.0, -1.05])
    assert answers(low, prompt, max_new=2, **penalty) == [[3, 2], [2, 3]]


def test_a_stop_text_ends_an_answer_and_is_not_shown():
    model = Fixed([0.0, 0.0, 0.0, 0.0])
    given = answers(model, prompts_of([3]) * 40, max_new=12, eos=-2, stop=["bc", "dd"], seed=1)
    tokenizer = letters(eos=-2)
    assert {len(a) for a in given} > {2, 3, 4}
    for ids in given:
        said, (shown, cut) = tokenizer.decode(ids), read_answer(tokenizer, ids, ["bc", "dd"])
        assert said.startswith(shown) and "bc" not in shown and "dd" not in shown
        assert cut == (shown == said) and (not cut or len(ids) == 12)
        assert cut or said[-2:] in ("bc", "dd") and shown == said[:-2]


def test_the_program_answers_from_a_folder(tiny, capsys):
    argv = ["--model", str(tiny), "--temperature", "0", "--max_new_tokens", "5"]
    generate.main([*argv, "--prompt", "Best best?"])
    one = capsys.readouterr().out
    generate.main([*argv, "--plain=true", "--prompt=Best best?"])
    assert capsys.readouterr().out == one and one.strip()
    for bad in (["--temperature", "hot"], ["--prompt", "x " * 300], ["--modle", "x"]):
        with pytest.raises(BadInput):
            generate.main([*argv, *bad])


def test_without_a_prompt_the_program_holds_a_conversation(tiny, tmp_path, monkeypatch):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    lines = iter(["one", "two", ""])
    asked, seeds, real = [], [], generate.generate
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))

    def noted(fabric, policy, prompts, tokenizer, *args, **given):
        asked.append(tokenizer.decode(list(prompts[0])))
        seeds.append(args[-1])
        return real(fabric, policy, prompts, tokenizer, *args, **given)

    monkeypatch.setattr(generate, "generate", noted)
    generate.main(["--model", str(tmp_path), "--max_new_tokens", "3"])
    first, second = asked
    assert first == "[user] one "
    assert second.startswith(f"{first}[assistant] ") and second.endswith("[user] two ")
    assert seeds == [1, 2]


def test_every_end_that_the_model_names_ends_an_answer_as_in_transformers(
    tiny, tmp_path, monkeypatch, capsys
):
    """generation_config.json often names several; an answer's text is without the one it ended by."""
    transformers = pytest.importorskip("transformers")
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    asked = torch.tensor([[66, 67, 68]])
    whole = hf.generate(asked, do_sample=False, max_new_tokens=12, pad_token_id=1, eos_token_id=511)
    third = whole[0, 3 + 2].item()
    config = {"eos_token_id": [0, third]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = hf.generate(asked, do_sample=False, max_new_tokens=12, pad_token_id=1)[0, 3:]
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.stops == (0, third) and expected[-1] == third and len(expected) <= 3
    argv = ["generate.py", "--model", str(tmp_path), "--prompt", "abc", "--temperature", "0"]
    monkeypatch.setattr("sys.argv", [*argv, "--max_new_tokens", "12"])
    generate.main()
    said = capsys.readouterr().out.removesuffix("\n")
    assert said == tokenizer.decode(expected[:-1].tolist())


def test_no_end_comes_before_the_fewest_new_tokens():
    model, given = Fixed([1.0, 5.0, 2.0]), dict(max_new=5, temperature=0)
    assert answers(model, prompts_of([3]), eos=(1, 2), **given) == [[1]]
    assert answers(model, prompts_of([3]), eos=(1, 2), min_new_tokens=2, **given) == [[0, 0, 1]]
