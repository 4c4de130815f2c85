"""Log-probs on packed batches against a plain forward of each text; prompts that are shared."""

import math
from pathlib import Path
from unittest import mock

import litgpt
import numpy as np
import pytest
import torch
import transformers
from tiny_models import (
    LLAMA,
    gpt_of,
    made,
    plain_token_logps,
    ragged,
    same,
    shaken,
)

import attention
import head
import model
from models import load
from packing import pack

# ---- packed, against a plain forward of each (prompt, completion) --------------------------------

SHAPES = {
    "gpt2": None,
    "llama": LLAMA,
    "window": LLAMA | dict(sliding_window_size=4),
    "one window": LLAMA | dict(sliding_window_size=4, sliding_window_indices=[1, 0]),
    "qwen 3": LLAMA | dict(norm_qk=True),
    "bias of the head": LLAMA | dict(lm_head_bias=True),
}


def pair(shape: str, tiny: Path, dtype):
    """Our model, and another library's with the same weights."""
    if shape == "gpt2":
        hf = transformers.GPT2LMHeadModel.from_pretrained(tiny).eval()
        return load.load_model(tiny, dtype=dtype), hf.to(dtype)
    gpt, plain = gpt_of(SHAPES[shape]), shaken(litgpt.GPT(litgpt.Config(**SHAPES[shape])))
    gpt.load_state_dict(plain.state_dict())
    return gpt.to(dtype), plain.to(dtype)


def by_the_others_names(gpt) -> dict:
    """Our gradients by the names that the other model has."""
    mine = {n: p.grad for n, p in gpt.named_parameters(remove_duplicate=False)}
    if "wpe" in gpt.transformer:
        return {n: rows.of(mine[rows.name]) for n, rows in gpt.rows.items()}
    return mine


def plainly(other, prompts, completions) -> torch.Tensor:
    """(B, K) log-probs, each (prompt, completion) alone in a forward of its own."""
    out = []
    for p, cs in zip(prompts, completions):
        for c in cs:
            out.append(plain_token_logps(other, p, c).sum())
    return torch.stack(out).view(len(prompts), -1)


@pytest.fixture
def exact_norms(monkeypatch):
    """The RMSNorm of litgpt's own model rounds float64 to float32; without that, equality can be
    seen at 1e-10."""

    def norm(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight

    monkeypatch.setattr(litgpt.model.RMSNorm, "forward", norm)


def chunked(monkeypatch, vocabulary: int, tokens: int) -> list:
    """The head takes so many targets at a time, and saves two such chunks. -> a list of the targets
    of every chunk that it makes, or makes again."""
    calls, real = [], head.logp_of

    def counted(logits, target, *rest):
        calls.append(len(target))
        return real(logits, target, *rest)

    monkeypatch.setattr(head, "HEAD_LOGITS", vocabulary * tokens)
    monkeypatch.setattr(head, "CPU_SAVED", 2 * vocabulary * tokens)
    monkeypatch.setattr(head, "logp_of", counted)
    monkeypatch.setattr(model, "logp_of", counted)
    return calls


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_batches_and_cached_prompts_give_what_plain_forwards_give(
    shape, tiny, monkeypatch, exact_norms
):
    dtype = torch.float64
    gpt, other = pair(shape, tiny, dtype)
    V = gpt.config.padded_vocab_size
    tolerance = 1e-10
    # each example alone, all or some in one attention call
    for seed, (K, tile, tokens) in enumerate(
        [(1, 1, 1000), (2, 128, 1000), (1, 25, 3), (2, 40, 4)]
    ):
        monkeypatch.setattr(attention, "TILE_TOKENS", tile)
        prompts, completions = ragged(K, V, seed)
        batch = pack(prompts, completions)
        calls = chunked(monkeypatch, V, tokens)
        theirs = plainly(other, prompts, completions)
        scores = gpt(batch, keeps_prompts=True)
        ours = scores.logps
        assert sum(calls) == len(batch.target_T) and max(calls) <= tokens, "no (N, V) logits"
        lengths = [[len(y) for y in ys] for ys in completions]
        assert batch.length_BK.tolist() == lengths
        assert ours.dtype == dtype and ours.shape == (5, K)
        assert ((ours - theirs) / theirs).abs().max() <= tolerance
        w_BK = torch.randn(5, K, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        gpt.zero_grad()
        other.zero_grad()
        (w_BK * ours).sum().backward()
        (w_BK * theirs).sum().backward()
        mine = by_the_others_names(gpt)
        reference = {n: p.grad for n, p in other.named_parameters()}
        assert len(gpt.unique_parameters()) <= len(reference) <= len(mine)
        whole = torch.stack([x.norm() for x in reference.values()]).norm()
        # some gradients, like that of a key's bias, are 0 but for rounding
        for name, x in reference.items():
            assert (mine[name] - x).norm() <= tolerance * (x.norm() + 0.01 * whole), name
        # other completions after the same prompts; of those of one token none is an input
        others = ragged(2, V, seed + 1)[1]
        for later in (others, [tuple(y[:1] for y in ys) for ys in others]):
            with torch.no_grad():
                logps = gpt(pack(prompts, later), scores.prompts).logps
                exact = plainly(other, prompts, later)
            assert ((logps - exact) / exact).abs().max() <= tolerance


# ---- the parts of a block ------------------------------------------------------------------------


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape)))


def test_norms_and_positions_keep_the_dtype_that_autocast_gives_them_and_compute_in_float32():
    """Queries are in bfloat16, weights and tables in float32."""
    x, angle = random(2, 3, 5, 8).bfloat16(), random(2, 5, 4).float()
    cos, sin = (f(angle).repeat(1, 1, 2) for f in (torch.cos, torch.sin))
    with torch.autocast("cpu", torch.bfloat16):
        turned = model.Rotation.apply(x, cos, sin)
        exact = model.Rotation.apply(x.float(), cos, sin)
        assert turned.dtype == torch.bfloat16 and same(turned, exact.bfloat16(), 2**-7)
        for kind in ("RMSNorm", "LayerNorm"):
            norm = shaken(model.Norm(litgpt.Config(**LLAMA | dict(norm_class_name=kind)), 8))
            y, exact = norm(x), norm(x.float())
            assert y.dtype == torch.bfloat16 and torch.equal(y, exact.bfloat16())


def test_the_gradient_of_a_gathered_key_is_rounded_once_in_bfloat16():
    prompts, completions = ragged(2, 61, 0)
    prompts[2] = prompts[4] = prompts[0]  # six completions share it
    batch = pack(prompts, completions)
    grad_I = random(len(batch.key_I), 2, 8).bfloat16()
    leaf = random(len(batch.token_N), 2, 8).bfloat16().requires_grad_()
    attention.GatherKeys.apply(leaf, batch).backward(grad_I)
    exact = torch.zeros_like(leaf, dtype=torch.float64).index_add(0, batch.key_I, grad_I.double())
    assert torch.equal(leaf.grad, exact.bfloat16())


# ---- the path of a GPU ---------------------------------------------------------------------------


def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=None):
    """torch's varlen_attn as documented: each sequence by itself, bottom-right causal."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and min(max_q, max_k) >= 2
    grouped = k.shape[1] < q.shape[1]
    assert enable_gqa == (grouped if "enable_gqa" in attention.VARLEN else None)
    outs, (left, right) = [], window_size
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    queries, keys = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert max(queries) <= max_q and max(keys) <= max_k and sum(queries) == len(q)
    for q_s, k_s, v_s in zip(q.split(queries), k.split(keys), v.split(keys)):
        i = torch.arange(len(q_s))[:, None] + len(k_s) - len(q_s)
        back = i - torch.arange(len(k_s))
        mask = (back >= -right) & ((back <= left) | (left < 0))
        score = torch.einsum("qhd,khd->hqk", q_s, k_s) * scale
        p = score.masked_fill(~mask, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", p, v_s))
    return torch.cat(outs)


@pytest.fixture(params=[("scale", "enable_gqa"), ("scale",)], ids=["torch 2.12", "torch 2.11"])
def use_flash(request, monkeypatch):
    """A function: after its call attention takes the path of a GPU, with the stand-in."""
    calls = []
    monkeypatch.setattr(attention, "VARLEN", request.param)

    def counted(*args, **options):
        calls.append(args)
        return kernel(*args, **options)

    def switch():
        monkeypatch.setattr(attention, "varlen_attn", counted)
        monkeypatch.setattr(attention, "flash_fits", lambda attn, q, v: True)
        return calls

    return switch


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_call_of_flash_attention_gives_what_the_tiles_give(shape, K, tiny, use_flash):
    gpt, _ = pair(shape, tiny, torch.float64)
    (prompts, completions), (_, others) = ragged(K, 61, 0), ragged(K, 61, 1)
    batch, other = pack(prompts, completions), pack(prompts, others)
    # none of their tokens is an input
    ones = pack(prompts, [tuple(y[:1] for y in ys) for ys in others])

    def run():
        gpt.zero_grad()
        scores = gpt(batch, keeps_prompts=True)
        first = scores.logps
        with torch.no_grad():
            later = torch.stack([gpt(x, scores.prompts).logps for x in (other, ones)])
        (first * torch.arange(1, K + 1)).sum().backward()
        return first.detach(), later, [p.grad for p in gpt.unique_parameters().values()]

    tiles = run()
    calls = use_flash()
    flash = run()
    assert len(calls) == 3 * gpt.config.n_layer
    assert same(tiles[0], flash[0], 1e-10) and same(tiles[1], flash[1], 1e-10)
    assert all(same(a, b, 1e-10) for a, b in zip(tiles[2], flash[2]))


@pytest.mark.parametrize(
    "fits, options",
    [
        (True, {}),
        (True, dict(dtype=torch.float16)),
        (True, dict(D=256)),
        (False, dict(dtype=torch.float32)),
        (False, dict(D=264)),
        (False, dict(D=20)),
        (False, dict(D=192, of_values=128)),  # DeepSeek V3
        (False, dict(cap=9.0)),
        (False, dict(capability=(7, 5))),
        (False, dict(arguments=())),  # torch 2.10
    ],
)
def test_flash_attention_is_chosen_where_torch_has_a_kernel(fits, options, monkeypatch):
    usual = dict(dtype=torch.bfloat16, D=64, of_values=None, cap=None, capability=(9, 0))
    o = mock.Mock(**usual | dict(arguments=("scale", "window_size")) | options)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: o.capability)
    monkeypatch.setattr(attention, "VARLEN", o.arguments)
    q = mock.Mock(dtype=o.dtype, shape=(1, 4, 9, o.D), device=torch.device("cuda"))
    v = mock.Mock(shape=(1, 4, 9, o.of_values or o.D))
    assert attention.flash_fits(o, q, v) == fits


# ---- precision -----------------------------------------------------------------------------------


def test_bfloat16_log_probs_are_not_rounded_to_bfloat16(tiny):
    logp_T = load.load_model(tiny, dtype=torch.bfloat16)(pack(*ragged(1, 512, 0))).logps
    assert not torch.equal(logp_T, logp_T.bfloat16().float())


# ---- the head ------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("saved", [0, 2])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_the_head_gives_the_log_probs_entropy_and_gradients_of_plain_torch(cap, saved, gpu, frozen):
    h_TC, w_VC, target_T, seen = random(20, 8), random(61, 8) * 2, torch.arange(20) * 3, []

    def plain(h, w):
        logits = h @ w.T if cap is None else cap * (h @ w.T / cap).tanh()
        tokens = torch.distributions.Categorical(logits=logits)
        return tokens.log_prob(target_T), tokens.entropy()

    def chunked(h, w):
        return head.Head.apply(h, w, target_T, cap, head.Chunks(7, saved, 3, gpu, entropy=True))

    for both in (plain, chunked):
        h, w = h_TC.clone().requires_grad_(), w_VC.clone().requires_grad_(not frozen)
        logp_T, entropy_T = both(h, w)
        (logp_T * torch.arange(20)).sum().backward()
        seen.append((logp_T.detach(), entropy_T.detach(), h.grad, w.grad))
    assert all(x is y is None or same(x, y, 1e-10) for x, y in zip(*seen))


@pytest.mark.parametrize("never", [slice(500, 512), slice(0, 256)], ids=["few", "half"])
def test_tokens_of_probability_0_leave_log_probs_entropy_and_gradients_finite(never, tmp_path):
    """Some models forbid tokens by a bias of minus infinity in the head. The check at loading meets them, too."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    hf = made(transformers.PhiConfig(vocab_size=512, **sizes), tmp_path)
    with torch.no_grad():
        hf.lm_head.bias[never] = -math.inf
    hf.save_pretrained(tmp_path)
    prompt, completion = [300, 301, 302], [303, 304, 305]
    gpt = load.load_model(tmp_path)
    scores = gpt(pack([np.array(prompt)], [(np.array(completion),)]), entropy=True)
    logits_LV = hf(input_ids=torch.tensor([prompt + completion])).logits[0, 2:5]
    tokens = torch.distributions.Categorical(logits=logits_LV)
    logp = tokens.log_prob(torch.tensor(completion)).sum()
    assert same(scores.logps[0, 0], logp, 1e-4)
    assert same(scores.entropy[0, 0], tokens.entropy().sum(), 1e-4)
    scores.logps.sum().backward()
    logp.backward()
    assert same(gpt.lm_head.weight.grad, hf.lm_head.weight.grad, 1e-4)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_have_the_same_bits_without_a_gradient_and_no_entropy_is_rounded(dtype, gpu):
    """Else policy and reference differ before the first update."""
    h_TC, w_VC = random(300, 8, dtype=dtype), random(4096, 8, dtype=dtype)
    logits_TV, target_T = (h_TC @ w_VC.T).double(), torch.arange(300)
    chunks = head.Chunks(70, None, 30, gpu)
    without, _ = head.Head.apply(h_TC, w_VC, target_T, None, chunks)
    chunks = chunks._replace(n_saved=2, entropy=True)
    h_TC.requires_grad_()
    w_VC.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        logp_T, entropy_T = head.Head.apply(h_TC, w_VC, target_T, None, chunks)
    assert torch.equal(logp_T, without)
    exact_T = torch.distributions.Categorical(logits=logits_TV).entropy()
    assert entropy_T.dtype == torch.float32 and same(entropy_T.double(), exact_T, 1e-4)


def test_the_head_of_a_gpu_adds_its_matrix_gradient_up_in_float32():
    h_TC, w_VC = random(640, 8).bfloat16(), random(61, 8).bfloat16()

    def gradient(w_dtype, h_dtype, gpu) -> torch.Tensor:
        w = w_VC.to(w_dtype).requires_grad_()
        chunks = head.Chunks(8, 9, 8, gpu)
        head.Head.apply(h_TC.to(h_dtype), w, torch.arange(640) % 61, None, chunks)[
            0
        ].sum().backward()
        return w.grad.double()

    exact = gradient(torch.float64, torch.float64, False)
    cpu, gpu = (gradient(torch.float32, torch.bfloat16, gpu) - exact for gpu in (False, True))
    assert gpu.norm() < cpu.norm() / 2


def test_a_nearly_certain_token_still_has_a_gradient_in_bfloat16():
    h_TC = torch.tensor([[1.0, 0.0]]).bfloat16().requires_grad_()
    w_VC = torch.tensor([[7.0, 0.0], [0.0, 0.0]]).bfloat16()
    chunks = head.Chunks(4, 4, 4, False)
    head.Head.apply(h_TC, w_VC, torch.tensor([0]), None, chunks)[0].sum().backward()
    miss = 1 - 1 / (1 + math.exp(-7))  # 9e-4: the softmax would be 1 in bfloat16, the gradient 0
    assert h_TC.grad[0, 0].item() == pytest.approx(7 * miss, rel=1e-2)
