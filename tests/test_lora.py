"""Adapters: disabled to the bit, the only weights that train, merged into an equal full model."""

import pytest
import torch
from models import HF, logits, made, ragged, refused, same, shaken, trained, with_adapters

import load
import lora
from hub import Source, export
from lora import disable_adapters, merge_for_sampling, merged_weights, reset_adapters
from packing import pack
from runs.settings import Lora


@pytest.fixture
def folders(tiny, tmp_path):
    made(HF["llama"], tmp_path / "llama")
    return {"gpt2": tiny, "llama": tmp_path / "llama"}


@pytest.mark.parametrize("chosen", [(1, 1, 1), (1, 0, 1), (0, 1, 0), ()])
def test_an_adapted_layer_is_its_formula_with_its_gradients(chosen):
    """Scale 13 / 4, four heads of 6 that share two key heads; (): a layer for one matrix."""
    r, alpha = 4, 13
    options = dict(r=r, lora_alpha=alpha, bias=True)
    if chosen:
        heads = dict(n_head=4, n_query_groups=2, head_size=6)
        layer = lora.AdaptedQKV(10, 48, enable_lora=tuple(map(bool, chosen)), **heads, **options)
    else:
        layer = lora.AdaptedLinear(10, 48, **options)
    layer = shaken(layer).double()
    x = torch.randn(1, 7, 10, dtype=torch.float64, requires_grad=True)

    def plain(x):
        y = x @ layer.linear.weight.T + layer.linear.bias
        columns, a, b = [], iter(layer.lora_A.split(r)), iter(layer.lora_B.split(sizes))
        for on, part in zip(chosen or [1], y.split([24, 12, 12] if chosen else [48], -1)):
            columns.append(part + x @ next(a).T @ next(b).T * alpha / r if on else part)
        return torch.cat(columns, -1)

    sizes = [n for n, on in zip([24, 12, 12], chosen) if on] or [48]
    g = torch.randn(1, 7, 48, dtype=torch.float64)
    inputs = [x, *layer.parameters()]
    a, b = ([y, *torch.autograd.grad(y, inputs, g)] for y in (layer(x), plain(x)))
    assert all(same(p, q, 1e-12) for p, q in zip(a, b))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_adapters_change_no_bit_under_autocast(name, dtype, folders):
    batch = pack(*ragged(2, 97, 0))
    base = load.load_model(folders[name], dtype)
    gpt = with_adapters(folders[name], Lora(rank=2, targets="all-linear"), dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gpt(batch).logps, base(batch).logps)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_adapters_begin_as_the_base_and_go_off_to_the_bit_even_when_trained(name, folders):
    folder, batch = folders[name], pack(*ragged(2, 97, 0))
    base = load.load_model(folder)(batch).logps
    gpt = with_adapters(folder, Lora(rank=2, dropout=0.5))
    gpt.eval()
    assert torch.equal(gpt(batch).logps, base)
    trainable = {n for n, p in gpt.named_parameters() if p.requires_grad}
    assert trainable == {n for n in gpt.unique_parameters() if "lora_" in n}
    gpt.train()
    trained(gpt, batch)
    assert not torch.equal(gpt(batch).logps, gpt(batch).logps), (
        "else there is no dropout to be switched off"
    )
    with disable_adapters(gpt):
        assert torch.equal(gpt(batch).logps, base)
    gpt.eval()
    assert not torch.isclose(gpt(batch).logps, base, atol=1e-3).all()


def test_adapters_are_in_float32_though_their_matrices_are_not(tiny):
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        for name, p in with_adapters(tiny, Lora(rank=2), dtype).named_parameters():
            assert p.dtype == (wide if "lora_" in name else dtype)


def test_adapters_start_again_as_the_base_and_by_the_seed_alone(tiny):
    batch, gpt = pack(*ragged(1, 97, 0)), with_adapters(tiny, Lora(rank=2))
    base = gpt(batch).logps

    def matrices(seed) -> torch.Tensor:
        reset_adapters(trained(gpt, batch), seed)
        assert torch.equal(gpt(batch).logps, base)
        a = [p.detach().flatten() for n, p in gpt.named_parameters() if "lora_A" in n]
        return torch.cat(a)

    first = matrices(1)
    torch.manual_seed(5)
    assert torch.equal(matrices(1), first) and not torch.equal(matrices(2), first)
    a = gpt.transformer.h[0].mlp.proj.lora_A  # litgpt's own start: uniform, by the width
    assert 0.9 * a.shape[1] ** -0.5 < a.abs().max() <= a.shape[1] ** -0.5
    assert a.min() < 0 < a.max()


TARGETS = [("llama", x) for x in ("q_proj", "k_proj,v_proj", "q_proj,v_proj", "o_proj")]
TARGETS += [("llama", "gate_proj,up_proj,down_proj"), ("llama", "all-linear")]
TARGETS += [("gpt2", x) for x in ("c_attn", "mlp.c_proj,c_fc", "attn.c_proj", "all-linear")]


@pytest.mark.parametrize("name, targets", TARGETS)
def test_merged_adapters_are_the_adapted_model(name, targets, folders, tmp_path):
    folder, ids = folders[name], list(range(20))
    gpt = with_adapters(folder, Lora(rank=3, alpha=12, targets=targets))
    trained(gpt, pack(*ragged(1, 97, 0)))
    full = merged_weights(gpt)
    export(Source(folder), gpt.rows, full, tmp_path / "out")
    with torch.no_grad():
        adapted, base = logits(gpt, ids), logits(load.load_model(folder), ids)
        assert not same(adapted, base, 1e-2), "else merging nothing would pass"
        assert same(logits(load.load_model(tmp_path / "out"), ids), adapted, 1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_adapters_are_merged_for_sampling_and_taken_out_to_the_bit(name, folders):
    ids = list(range(20))
    targets = {"gpt2": "c_attn,mlp.c_proj", "llama": "q_proj,v_proj,up_proj"}[name]
    gpt = with_adapters(folders[name], Lora(rank=3, alpha=12, targets=targets))
    trained(gpt, pack(*ragged(1, 97, 0)))
    before = {n: (p, p.detach().clone()) for n, p in gpt.named_parameters()}
    products = []
    for layer in gpt.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda m, args, y: products.append(m.weight.dtype))
    with torch.no_grad():
        adapted = logits(gpt, ids)
        with merge_for_sampling(gpt, torch.float32):
            assert same(logits(gpt, ids), adapted, 1e-4)
            assert not any(hasattr(m, "lora_A") and not m.merged for m in gpt.modules())
        assert same(logits(gpt, ids), adapted), "the same bits again"
        products.clear()
        with merge_for_sampling(gpt, torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
            logits(gpt, ids)
        assert set(products) == {torch.bfloat16}, "no matrix is cast at each token"
    for n, p in gpt.named_parameters():
        assert p is before[n][0] and torch.equal(p, before[n][1])


def test_an_adapter_on_the_head_needs_an_untied_head(folders):
    lora = Lora(rank=2, targets="lm_head")
    refused("^lora.targets: lm_head: .* tied", with_adapters, folders["gpt2"], lora)
    gpt, batch = with_adapters(folders["llama"], lora), pack(*ragged(1, 97, 0))
    base = gpt(batch).logps
    trained(gpt, batch)
    full = merged_weights(gpt)
    plain = load.load_model(folders["llama"])
    plain.load_state_dict(full)
    assert not same(gpt(batch).logps, base, 1e-2)
    assert same(plain(batch).logps, gpt(batch).logps, 1e-4)


def test_targets_are_named_as_peft_names_them(folders):
    def adapters(name, targets: str) -> dict:
        gpt = with_adapters(folders[name], Lora(rank=2, targets=targets))
        return {n: p.shape for n, p in gpt.named_parameters() if "lora_" in n}

    assert adapters("llama", "q_proj, v_proj") != adapters("llama", "q_proj")
    attention, mlp = "q_proj,k_proj,v_proj,self_attn.o_proj", "gate_proj,up_proj,mlp.down_proj"
    assert adapters("llama", f"{attention},{mlp}") == adapters("llama", "all-linear")
    assert adapters("llama", "lm_head").keys() == {"lm_head.lora_A", "lm_head.lora_B"}
    assert "lm_head.lora_A" not in adapters("llama", "all-linear")
    c_proj = adapters("gpt2", "attn.c_proj") | adapters("gpt2", "mlp.c_proj")
    assert adapters("gpt2", "c_proj") == c_proj != adapters("gpt2", "attn.c_proj")
    for name, target in (
        ("llama", "c_attn"),
        ("gpt2", "proj"),
        ("llama", "q_proj,"),
        ("llama", ""),
    ):
        lora = Lora(rank=2, targets=target)
        refused("^lora.targets: expected all-linear or .*", with_adapters, folders[name], lora)
