"""The model: weights in and out against transformers, log-probs on Rows against a plain forward, LoRA, refusals."""

import copy
import json
import math
import shutil
from pathlib import Path

import huggingface_hub
import litgpt
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import model
from data import BadInput, pack
from model import Lora


@pytest.fixture(autouse=True)
def one_thread(torch_state):
    torch.set_num_threads(1)  # on a busy machine, two threads wait for each other ten times as long as they compute


def shaken(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter random, biases and norms included, so that none can be lost or swapped unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.add_(noise * (0.1 if p.dim() == 1 else p.shape[-1] ** -0.5))
    return module.eval()


def logits(gpt, ids) -> torch.Tensor:
    """Next-token logits at all positions; a completion of one token adds no input."""
    rows = pack([np.array(ids)], [(np.array(ids[:1]),)])
    return gpt.head(gpt.hidden(rows.token_N[None], rows.position_N[None], model.Packed(rows)))[0]


def same(a, b, tolerance=0.0) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance)


def same_weights(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def check_against_transformers(folder: Path, hf: nn.Module, tmp: Path, n=40) -> nn.Module:
    """Equal logits when loaded from `folder`; equal again in both libraries once exported."""
    ids = torch.randint(hf.config.vocab_size, (n,), generator=torch.Generator().manual_seed(1))
    gpt = model.load(folder)
    with torch.no_grad():
        theirs, ours = hf(ids[None]).logits[0], logits(gpt, ids.tolist())
        assert theirs.std() > 0.1, "else equal logits say little"
        assert same(ours, theirs, 1e-4)
        model.export(gpt.named(), folder, tmp / "out")
        back, info = transformers.AutoModelForCausalLM.from_pretrained(tmp / "out", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert json.loads((tmp / "out" / "config.json").read_text())["tie_word_embeddings"] == gpt.tied
        assert back.config.tie_word_embeddings == hf.config.tie_word_embeddings == gpt.tied
        assert same(back(ids[None]).logits[0], theirs, 1e-5)
        again = model.load(tmp / "out")
        assert same_weights(again.named(), gpt.named())
        assert same(logits(again, ids.tolist()), ours)
    return gpt


# ---- families, against transformers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2_124m(tmp_path_factory):
    """GPT-2 of the full size (random weights): its folder and transformers' own model. 500 MB, so deleted early."""
    folder = tmp_path_factory.mktemp("gpt2")
    hf = shaken(transformers.GPT2LMHeadModel(transformers.GPT2Config()))
    hf.save_pretrained(folder)
    yield folder, hf
    shutil.rmtree(folder)


def test_gpt2_of_full_size_computes_what_transformers_does_and_goes_back(gpt2_124m, tmp_path):
    folder, hf = gpt2_124m
    gpt = check_against_transformers(folder, hf, tmp_path)
    assert gpt.tied and sum(p.numel() for p in gpt.parameters()) == 124_439_808
    shutil.rmtree(tmp_path / "out")


SMALL = dict(vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=64)
GQA = dict(SMALL, intermediate_size=80, num_key_value_heads=2)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=16, rope_theta=500.0)
HF = {
    "llama": transformers.LlamaConfig(**GQA),
    "llama, tied": transformers.LlamaConfig(**GQA, tie_word_embeddings=True),
    "llama, one key head, wide heads": transformers.LlamaConfig(**GQA | {"num_key_value_heads": 1}, head_dim=16),
    "llama3 rope": transformers.LlamaConfig(**GQA, rope_parameters=LLAMA3),
    "linear rope": transformers.LlamaConfig(
        **GQA, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0}
    ),
    "qwen2": transformers.Qwen2Config(**GQA, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**GQA, head_dim=16),
    "mistral, window": transformers.MistralConfig(**GQA, sliding_window=5),
    "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=6, n_positions=64, n_inner=100),
    "gpt2, untied": transformers.GPT2Config(
        vocab_size=97, n_embd=48, n_layer=2, n_head=6, n_positions=64, tie_word_embeddings=False
    ),
}


def made(config, folder: Path) -> nn.Module:
    hf = shaken(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    hf.save_pretrained(folder)
    return hf


@pytest.mark.parametrize("name", HF)
def test_every_family_computes_what_transformers_does_and_goes_back(name, tmp_path):
    hf = made(HF[name], tmp_path / "in")
    check_against_transformers(tmp_path / "in", hf, tmp_path)


@pytest.mark.parametrize("name", ["llama3 rope", "linear rope"])
def test_rope_scaling_is_read_in_the_older_spelling_too(name, tmp_path):
    hf = made(HF[name], tmp_path / "in")
    file = tmp_path / "in" / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if name == "linear rope":
        rope["type"] = rope.pop("rope_type")  # the oldest
    file.write_text(json.dumps(config | {"rope_scaling": rope}))
    check_against_transformers(tmp_path / "in", hf, tmp_path)


def test_families_known_by_litgpts_names_are_found_in_a_download_and_after_an_export(tmp_path):
    folder = tmp_path / "models--EleutherAI--pythia-14m" / "snapshots" / "0123abcd"
    sizes = dict(hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512, vocab_size=50304)
    hf = made(transformers.GPTNeoXConfig(**sizes, max_position_embeddings=512), folder)
    check_against_transformers(folder, hf, tmp_path)


def test_the_name_of_a_folder_says_nothing_about_the_weights_in_it(tmp_path):
    # litgpt gives RMSNorm an offset of 1 where it reads Gemma in a name, and drops LayerNorm's weights at OLMo
    for folder, family in ((tmp_path / "Gemma-as-teacher", "llama"), (tmp_path / "OLMo-as-teacher", "gpt2")):
        hf = made(HF[family], folder)
        config = json.loads((folder / "config.json").read_text())
        config.pop("tie_word_embeddings")
        (folder / "config.json").write_text(json.dumps(config))
        check_against_transformers(folder, hf, folder)


def test_old_gpt2_files_load_without_prefix_and_with_mask_buffers(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "old")
    weights = {k.removeprefix("transformer."): x for k, x in load_file(tiny / "model.safetensors").items()}
    for i in range(2):
        weights[f"h.{i}.attn.bias"] = torch.ones(1, 1, 128, 128).tril()
        weights[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    assert "wte.weight" in weights
    save_file(weights, tmp_path / "old" / "model.safetensors")
    assert same_weights(model.load(tmp_path / "old").named(), model.load(tiny).named())


def test_a_litgpt_checkpoint_folder_loads_as_its_hugging_face_one(tmp_path):
    made(HF["llama"], tmp_path)
    gpt = model.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(gpt.state_dict(), tmp_path / "lit_model.pth")
    refused("no \\*.safetensors", model.load, tmp_path)
    litgpt.utils.save_config(gpt.config, tmp_path)
    assert same_weights(model.load(tmp_path).named(), gpt.named())


@pytest.mark.parametrize("name", ["gpt2", "llama, tied", "litgpt"])
def test_loaded_weights_have_nothing_to_do_with_their_file_any_more(name, tmp_path):
    made(HF[name] if name in HF else HF["llama"], tmp_path)
    file = tmp_path / "model.safetensors"
    if name not in HF:
        gpt, file = model.load(tmp_path), tmp_path / "lit_model.pth"
        torch.save(gpt.state_dict(), file)
        litgpt.utils.save_config(gpt.config, tmp_path)
    gpt = model.load(tmp_path)
    before = {n: x.detach().clone() for n, x in gpt.named().items()}
    with open(file, "r+b") as f:
        f.write(bytes(file.stat().st_size))
    assert same_weights(before, gpt.named())


def test_shards_are_joined_and_mistrals_second_copy_is_left_aside(tmp_path):
    hf = made(HF["llama"], tmp_path / "one")
    hf.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    save_file({"tok_embeddings.weight": torch.zeros(2, 2)}, tmp_path / "many" / "consolidated.safetensors")
    assert same_weights(model.load(tmp_path / "many").named(), model.load(tmp_path / "one").named())


@pytest.mark.parametrize("name", ["llama, tied", "gpt2", "llama", "gpt2, untied"])
@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_a_tied_head_stays_one_matrix_and_an_untied_one_two(name, lora, tmp_path):
    hf = made(HF[name], tmp_path / "in")
    tied = hf.config.tie_word_embeddings
    gpt = model.load(tmp_path / "in", lora)
    head = getattr(gpt.lm_head, "linear", gpt.lm_head)
    assert gpt.tied == tied == (head.weight is gpt.transformer.wte.weight)
    vocabulary = [n for n, p in gpt.named().items() if p.shape == (97, 48)]
    assert len(vocabulary) == len([p for p in gpt.parameters() if p.shape == (97, 48)]) == 2 - tied
    if not lora:  # trained once: one step moves both uses of it
        gpt(pack([np.array([1, 2])], [(np.array([3, 4]),)])).sum().backward()
        torch.optim.SGD(gpt.parameters(), lr=0.1).step()
        assert torch.equal(gpt.transformer.wte.weight, gpt.lm_head.weight) == tied
    out = tmp_path / "out"
    model.export(model.fold_lora(gpt.named(), gpt), tmp_path / "in", out)
    assert len([x for x in load_file(out / "model.safetensors").values() if x.shape == (97, 48)]) == 2 - tied
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] == tied


def test_an_export_brings_the_tokenizer_and_the_dtype_along(tiny, tmp_path):
    gpt = model.load(tiny, dtype=torch.bfloat16)
    model.export(gpt.named(), tiny, tmp_path / "out")
    assert {f.name for f in (tmp_path / "out").iterdir()} >= {"tokenizer.json", "tokenizer_config.json"}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644


# ---- Rows, against a plain forward of each (prompt, completion) -----------------------------------------------------

LLAMA = dict(block_size=32, n_layer=2, n_embd=24, n_head=4, vocab_size=61, padded_vocab_size=61, intermediate_size=40)
LLAMA |= dict(n_query_groups=2, rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm")
LLAMA |= dict(mlp_class_name="LLaMAMLP")
GEMMA = dict(mlp_class_name="GemmaMLP", scale_embeddings=True, attention_scores_scalar=9, post_attention_norm=True)
GEMMA |= dict(post_mlp_norm=True, sliding_window_size=4, sliding_window_indices=[1, 0], gelu_approximate="tanh")
GEMMA |= dict(final_logit_softcapping=2.0, attention_logit_softcapping=0.5)
SHAPES = {
    "gpt2": None,
    "llama": LLAMA,
    "window": LLAMA | dict(sliding_window_size=4),
    "gemma 2": LLAMA | GEMMA,
    "qwen 3": LLAMA | dict(norm_qk=True, rope_interleave=True),
    "olmo 2": LLAMA | dict(norm_qk=True, norm_qk_type="olmo2", lm_head_bias=True),
    "neox": LLAMA | dict(n_query_groups=4, rotary_percentage=0.5, parallel_residual=True, mlp_class_name="GptNeoxMLP"),
}


def pair(shape: str, tiny: Path, dtype):
    """Our model; someone else's with the same weights; that one's gradients by our names."""
    if shape == "gpt2":
        gpt = model.load(tiny, dtype=dtype)
        hf = transformers.GPT2LMHeadModel.from_pretrained(tiny).eval().to(dtype)

        def gradients():
            state = {}
            model.gpt2_from_hf(None, state, {n: p.grad for n, p in hf.named_parameters()})
            return {n: state[n] for n in gpt.named()}

        return gpt, hf, gradients
    config = litgpt.Config(**SHAPES[shape])
    gpt, plain = model.GPT(config), shaken(litgpt.GPT(config))
    gpt.load_state_dict(plain.state_dict())
    return gpt.to(dtype), plain.to(dtype), lambda: {n: p.grad for n, p in plain.named_parameters()}


def ragged(K: int, vocabulary: int, seed: int):
    """Prompts and completions of random lengths, one-token ones among them."""
    r = np.random.default_rng(seed)
    p_len, c_len = r.integers(1, 10, 5), r.integers(1, 8, (5, K))
    p_len[1] = p_len[3] = 1
    c_len[1] = c_len[2, 0] = c_len[4, -1] = 1
    prompts = [r.integers(vocabulary, size=n) for n in p_len]
    return prompts, [tuple(r.integers(vocabulary, size=n) for n in row) for row in c_len]


def plainly(other, prompts, completions, score_prompt) -> torch.Tensor:
    """(B, K) log-probs, each (prompt, completion) alone in a forward of its own."""
    out = []
    for p, cs in zip(prompts, completions):
        for c in cs:
            ids = torch.tensor([*p, *c])
            out_1TV = other(ids[None])
            logp_TV = getattr(out_1TV, "logits", out_1TV)[0].log_softmax(-1)
            first = 1 if score_prompt else len(p)
            out.append(logp_TV[:-1].gather(1, ids[1:, None])[first - 1 :].sum())
    return torch.stack(out).view(len(prompts), -1)


@pytest.fixture
def exact_norms(monkeypatch):
    """litgpt's RMSNorm and softcapped softmax round float64 to float32; without that, equality can be seen at 1e-10."""

    def norm(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight

    monkeypatch.setattr(litgpt.model.RMSNorm, "forward", norm)


def chunked(monkeypatch, vocabulary: int, tokens: int) -> list:
    """The head takes so many targets at a time, and keeps two such chunks. -> a list of the targets of every chunk
    that it makes, or makes again."""
    calls, real = [], model._logp
    monkeypatch.setattr(model, "HEAD_LOGITS", vocabulary * tokens)
    monkeypatch.setattr(model, "HEAD_KEPT", 2 * vocabulary * tokens)
    monkeypatch.setattr(model, "_logp", lambda logits, target: calls.append(len(target)) or real(logits, target))
    return calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_rows_give_the_log_probs_and_gradients_of_plain_forwards(
    shape, K, dtype, tiny, monkeypatch, exact_norms
):
    gpt, other, gradients = pair(shape, tiny, dtype)
    V = gpt.config.padded_vocab_size
    tolerance = 1e-4 if dtype == torch.float32 else 1e-6 if shape == "gemma 2" else 1e-10
    for seed, (score_prompt, tokens) in enumerate([(False, None), (True, None), (False, 3), (True, 4)]):
        monkeypatch.setattr(model, "TOGETHER", (1, 128, 25, 40)[seed])  # each alone, all or some in one attention call
        prompts, completions = ragged(K, V, seed)
        rows = pack(prompts, completions, score_prompt)
        calls = chunked(monkeypatch, V, tokens or 1000)
        theirs = plainly(other, prompts, completions, score_prompt)
        ours = gpt(rows)
        assert ours.dtype == dtype and ours.shape == (5, K)
        chunks = -(-len(rows.target_T) // (tokens or 1000))
        assert sum(calls) == len(rows.target_T) and len(calls) == chunks and max(calls) <= (tokens or 1000)
        assert ((ours - theirs) / theirs).abs().max() <= tolerance
        w_BK = torch.randn(5, K, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        gpt.zero_grad()
        other.zero_grad()
        (w_BK * ours).sum().backward()
        (w_BK * theirs).sum().backward()
        kept = 0 if gpt.lm_head.bias is not None else 2  # autograd's chunks are all made again
        assert len(calls) == chunks + max(0, chunks - kept)
        mine, reference = {n: p.grad for n, p in gpt.named().items()}, gradients()
        assert mine.keys() == reference.keys()
        whole = torch.stack([x.norm() for x in reference.values()]).norm()
        for name, x in reference.items():  # some gradients, like that of a key's bias, are 0 but for rounding
            assert (mine[name] - x).norm() <= tolerance * (x.norm() + 0.01 * whole), name


def test_recomputed_blocks_give_the_same_gradient_and_keep_less(tiny):
    rows, kept, grads = pack(*ragged(2, 97, 0)), [], []
    for recompute in (False, True):
        gpt, sizes = model.load(tiny), []
        gpt.recompute = recompute
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: s.append(x.numel()) or x, lambda x: x):
            loss = gpt(rows, model.Prompts()).sum()
        kept.append(sum(sizes))
        loss.backward()
        grads.append([p.grad for p in gpt.named().values()])
    assert all(torch.equal(a, b) for a, b in zip(*grads)) and kept[1] < kept[0] / 2


@pytest.mark.parametrize("shape", SHAPES)
def test_a_completion_never_sees_its_sibling(shape, tiny, exact_norms):
    gpt, *_ = pair(shape, tiny, torch.float64)
    (prompts, completions), (_, others) = ragged(2, 61, 0), ragged(2, 61, 1)
    with torch.no_grad():
        base = gpt(pack(prompts, completions))
        second = gpt(pack(prompts, [(c[0], d[1]) for c, d in zip(completions, others)]))
        first = gpt(pack(prompts, [(d[0], c[1]) for c, d in zip(completions, others)]))
    for moved, fixed, changed in ((second, 0, 1), (first, 1, 0)):
        assert not torch.isclose(moved[:, changed], base[:, changed]).any()
        assert same(moved[:, fixed], base[:, fixed], 1e-12)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gpu_attention_path_equals_the_cpu_path(shape, K, tiny, monkeypatch):
    gpt, *_ = pair(shape, tiny, torch.float32)
    rows = pack(*ragged(K, 61, 0))
    with torch.no_grad():
        cpu = gpt(rows)
        calls = []

        def tiled(self, *a):
            calls.append(a)
            return self.flex(*a, compiled=False)

        monkeypatch.setattr(model.Packed, "tiled", tiled)
        flex, prompts = gpt(rows), model.Prompts()
        again = [gpt(rows, prompts), gpt(rows, prompts)]
    assert len(calls) == 3 * gpt.config.n_layer and calls[-1][1].shape[2] < calls[-1][2].shape[2]
    assert all(((cpu - x) / cpu).abs().max() < 1e-5 for x in (flex, *again))


@pytest.mark.parametrize("score_prompt", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_computed_once_serve_other_completions_and_keep_their_gradient(
    shape, score_prompt, tiny, monkeypatch, exact_norms
):
    gpt, *_ = pair(shape, tiny, torch.float64)
    (prompts, completions), (_, others) = ragged(1, 61, 0), ragged(2, 61, 1)
    rows, other = pack(prompts, completions, score_prompt), pack(prompts, others, score_prompt)
    gpt(rows).sum().backward()
    gradients = {n: p.grad.clone() for n, p in gpt.named().items()}
    tolerance = 1e-4 if shape == "gemma 2" else 1e-10  # a softcapped softmax is in float32
    for together in (1, 30, 128):
        monkeypatch.setattr(model, "TOGETHER", together)
        gpt.zero_grad()
        kept, lengths, embed = model.Prompts(), [], gpt.transformer.wte.register_forward_hook
        hook = embed(lambda _m, args, _o: lengths.append(args[0].shape[1]))
        first = gpt(rows, kept)
        with torch.no_grad():
            second = gpt(other, kept)
            hook.remove()
            assert same(first.detach(), gpt(rows), tolerance) and same(second, gpt(other), tolerance)
        assert lengths == [len(rows.token_N), int((other.branch_N > 0).sum())], "the prompts were computed again"
        first.sum().backward()
        assert all(same(p.grad, gradients[n], tolerance) for n, p in gpt.named().items())


def test_prompts_serve_only_the_rows_that_they_were_computed_for(tiny):
    gpt, kept = model.load(tiny), model.Prompts()
    gpt(pack(*ragged(1, 61, 0)), kept)
    with pytest.raises(AssertionError, match="other prompts"):
        gpt(pack(*ragged(1, 61, 1)), kept)


@pytest.mark.parametrize("weights, out", [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_log_probs_are_float32_or_float64(weights, out, tiny):
    gpt = model.load(tiny, dtype=getattr(torch, weights))
    assert all(p.dtype == getattr(torch, weights) for p in gpt.parameters())
    logp = gpt(pack(*ragged(2, 512, 0)))
    assert logp.dtype == getattr(torch, out)
    with torch.no_grad():
        assert same(logp, model.load(tiny)(pack(*ragged(2, 512, 0))), 0.5)


def test_under_autocast_the_head_multiplies_in_bfloat16_backward_too(tiny, monkeypatch):
    dtypes, real = [], model.Head.chunk
    monkeypatch.setattr(model.Head, "chunk", lambda h, *rest: dtypes.append(h.dtype) or real(h, *rest))
    with torch.autocast("cpu", torch.bfloat16):
        logp_BK = model.load(tiny)(pack(*ragged(1, 512, 0)))
    assert dtypes == [torch.bfloat16] and logp_BK.dtype == torch.float32


@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_held_in_bfloat16_give_the_log_probs_of_autocast_to_the_bit(shape, tiny):
    gpt, *_ = pair(shape, tiny, torch.float32)
    rows, narrow = pack(*ragged(2, 61, 0)), copy.deepcopy(gpt)
    model.hold_in_bfloat16(narrow)
    assert next(narrow.transformer.h[0].mlp.parameters()).dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(narrow(rows), gpt(rows))


def test_bfloat16_log_probs_are_not_rounded_to_bfloat16(tiny):
    logp_T = model.load(tiny, dtype=torch.bfloat16)(pack(*ragged(1, 512, 0)))
    assert not torch.equal(logp_T, logp_T.bfloat16().float())


# ---- LoRA -----------------------------------------------------------------------------------------------------------


def trained(gpt, rows, steps=2):
    """A few large steps on what may be trained."""
    optimizer = torch.optim.SGD([p for p in gpt.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (-gpt(rows).mean()).backward()
        optimizer.step()
    return gpt


@pytest.fixture
def folders(tiny, tmp_path):
    made(HF["llama"], tmp_path / "llama")
    return {"gpt2": tiny, "llama": tmp_path / "llama"}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_adapters_begin_as_the_base_and_go_off_to_the_bit_even_when_trained(name, folders):
    folder, rows = folders[name], pack(*ragged(2, 97, 0))
    base = model.load(folder)(rows)
    gpt = model.load(folder, Lora(rank=2, dropout=0.5))
    gpt.eval()
    assert torch.equal(gpt(rows), base)
    assert {n for n, p in gpt.named_parameters() if p.requires_grad} == {n for n in gpt.named() if "lora_" in n}
    gpt.train()
    trained(gpt, rows)
    assert not torch.equal(gpt(rows), gpt(rows)), "else there is no dropout to be switched off"
    with model.lora_off(gpt):
        assert torch.equal(gpt(rows), base)
    gpt.eval()
    assert not torch.isclose(gpt(rows), base, atol=1e-3).all()


def test_lora_off_comes_back_on_after_an_error_and_refuses_a_model_without_adapters(tiny):
    rows, gpt = pack(*ragged(1, 97, 0)), model.load(tiny, Lora(rank=2))
    trained(gpt, rows)
    on = gpt(rows)
    with pytest.raises(KeyError), model.lora_off(gpt):
        assert not torch.equal(gpt(rows), on)
        raise KeyError
    assert torch.equal(gpt(rows), on)
    with pytest.raises(AssertionError, match="reference would be the policy"), model.lora_off(model.load(tiny)):
        pass


TARGETS = [["query"], ["key", "value"], ["query", "value"], ["mlp"], ["projection"], Lora().targets]


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_folded_adapters_are_the_adapted_model(name, targets, folders, tmp_path):
    folder, ids = folders[name], list(range(20))
    gpt = model.load(folder, Lora(rank=3, alpha=12, targets=targets))
    trained(gpt, pack(*ragged(1, 97, 0)))
    full = model.fold_lora(gpt.named(), gpt)
    model.export(full, folder, tmp_path / "out")
    with torch.no_grad():
        adapted, base = logits(gpt, ids), logits(model.load(folder), ids)
        assert not same(adapted, base, 1e-2), "else folding nothing would pass"
        assert same(logits(model.load(tmp_path / "out"), ids), adapted, 1e-5)
    plain = model.load(folder).named()
    assert full.keys() == plain.keys()
    assert {n.split(".")[-2] for n in full if not torch.equal(full[n], plain[n])} <= {
        "qkv",
        "proj",
        "fc",
        "fc_1",
        "fc_2",
    }


def test_an_adapter_on_the_head_needs_an_untied_head(folders):
    lora = Lora(rank=2, targets=["head"])
    with pytest.raises(BadInput, match="lora.targets: head: .* tied"):
        model.load(folders["gpt2"], lora)
    gpt, rows = model.load(folders["llama"], lora), pack(*ragged(1, 97, 0))
    base = gpt(rows)
    trained(gpt, rows)
    full = model.fold_lora(gpt.named(), gpt)
    plain = model.load(folders["llama"])
    plain.load_state_dict(full)
    assert not same(gpt(rows), base, 1e-2) and same(plain(rows), gpt(rows), 1e-4)


@pytest.mark.parametrize("shape", ["llama", "gemma 2"])
def test_a_frozen_head_passes_the_same_gradient_on_and_makes_no_chunk_again(shape, tiny, monkeypatch, exact_norms):
    gpt, *_ = pair(shape, tiny, torch.float64)
    rows, grads = pack(*ragged(2, 61, 0)), []
    weight_BK = torch.randn(5, 2, dtype=torch.float64)
    for frozen in (False, True):
        gpt.lm_head.weight.requires_grad_(not frozen)
        calls = chunked(monkeypatch, 61, 2)
        (weight_BK * gpt(rows)).sum().backward()
        chunks = -(-len(rows.target_T) // 2)
        assert len(calls) == chunks + (0 if frozen else chunks - 2)
        grads.append(gpt.transformer.h[0].mlp.proj.weight.grad)
        gpt.zero_grad()
    assert same(*grads, 1e-10)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_softmax_may_go_in_blocks_of_any_size(dtype, cap, monkeypatch):
    h_TC, w_VC = (torch.randn(n, 8, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (20, 61))
    target_T, seen = torch.arange(20) * 3, []
    for block in (2**22, 3 * 61, 1):
        monkeypatch.setattr(model, "HEAD_SOFT", block)
        h, w = (x.clone().requires_grad_() for x in (h_TC, w_VC))
        logp_T = model.Head.apply(h, w, target_T, cap, 7, 1)  # 7 targets at a time, of which the first are kept
        (logp_T * torch.arange(20)).sum().backward()
        seen.append((logp_T, h.grad, w.grad))
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other))


def test_a_nearly_certain_token_still_has_a_gradient_in_bfloat16():
    h_TC, w_VC = torch.tensor([[1.0, 0.0]]).bfloat16(), torch.tensor([[7.0, 0.0], [0.0, 0.0]]).bfloat16()
    h_TC.requires_grad_()
    model.Head.apply(h_TC, w_VC.requires_grad_(), torch.tensor([0]), None, 4, 4).sum().backward()
    miss = 1 - 1 / (1 + math.exp(-7))  # 9e-4: in bfloat16 the softmax would be 1 and the slope 0
    assert h_TC.grad[0, 0].item() == pytest.approx(7 * miss, rel=1e-2)
    assert w_VC.grad[:, 0].tolist() == pytest.approx([miss, -miss], rel=1e-2)


def test_a_recomputed_head_draws_the_same_dropout_again(folders, monkeypatch):
    gpt, rows = model.load(folders["llama"], Lora(rank=2, dropout=0.5, targets=["head"])), pack(*ragged(1, 97, 0))
    nn.init.normal_(gpt.lm_head.lora_B)
    grads = []
    for real in (model.checkpoint, lambda f, *a, **kw: f(*a)):
        monkeypatch.setattr(model, "checkpoint", real)
        calls = chunked(monkeypatch, 97, 1)
        torch.manual_seed(0)
        gpt(rows).sum().backward()
        assert len(calls) > 1
        grads.append(gpt.lm_head.lora_B.grad)
        gpt.lm_head.lora_B.grad = None
    assert same(*grads, 1e-5)


# ---- copies and fingerprints ----------------------------------------------------------------------------------------


def test_a_copys_attention_belongs_to_the_copy(tiny):
    gpt, rows = model.load(tiny), pack(*ragged(2, 97, 0))
    twin, base = copy.deepcopy(gpt), gpt(rows)
    assert torch.equal(twin(rows), base) and twin.tied
    for block in twin.transformer.h:
        block.attn.window = 2
    assert not torch.equal(twin(rows), base)
    assert torch.equal(gpt(rows), base)


def test_a_fingerprint_is_of_every_weight_shape_and_name_and_of_no_order(tiny):
    state = {n: p.detach().clone() for n, p in model.load(tiny).named().items()}
    mark = model.fingerprint(state)
    assert model.fingerprint(dict(reversed(state.items()))) == mark == model.fingerprint(model.load(tiny).named())
    others = {mark}
    for name, x in state.items():
        last = x.clone()
        last.view(-1)[-1] += 1e-3
        others.add(model.fingerprint(state | {name: last}))
    wte, rest = state["transformer.wte.weight"], dict(state)
    del rest["transformer.wte.weight"]
    others.add(model.fingerprint(state | {"transformer.wte.weight": wte.reshape(256, 64)}))
    others.add(model.fingerprint(rest | {"transformer.wtf.weight": wte}))
    others.add(model.fingerprint(state | {"transformer.wte.weight": wte.view(torch.int32)}))  # same bytes
    others.add(model.fingerprint(rest))
    assert len(others) == 1 + len(state) + 4


# ---- what is refused ------------------------------------------------------------------------------------------------


def refused(match: str, f, *args):
    with pytest.raises(BadInput, match=match) as e:
        f(*args)
    assert "\n" not in str(e.value) and len(str(e.value)) < 600, e.value
    return str(e.value)


def test_fetch_resolves_folders_and_finished_runs(tiny, tmp_path):
    assert model.fetch(str(tiny)) == tiny
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.yaml").touch()
    refused("model: .*run: a run without a `final` folder", model.fetch, str(run))
    shutil.copytree(tiny, run / "final")
    assert model.fetch(str(run)) == run / "final"
    assert (model.fetch("demo/base") / "config.json").exists()


def test_fetch_refuses_what_is_not_there(tmp_path, monkeypatch):
    refused("^reference: .*/nowhere: no such folder$", model.fetch, str(tmp_path / "nowhere"), "reference")
    (tmp_path / "file").touch()
    refused("no such folder$", model.fetch, str(tmp_path / "file"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # read at import
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for source in ("openai-community/not-here", "not-here"):
        message = refused(f"^model: {source}: .*huggingface.co", model.fetch, source)
        assert "without a network, download it elsewhere and give the folder" in message


def test_a_download_takes_what_is_needed_and_no_more(monkeypatch):
    files = "config.json tokenizer.json tokenizer.model chat_template.jinja model-00001-of-00002.safetensors".split()
    more = "consolidated.safetensors pytorch_model.bin onnx/model.safetensors original/params.json README.md".split()
    got = []

    def snapshot_download(source, **patterns):
        got.extend(huggingface_hub.utils.filter_repo_objects(files + more, **patterns))
        return "/somewhere"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert model.fetch("mistralai/a") == Path("/somewhere") and got == files


def edited(folder: Path, **changes) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


def unfit(change):
    """An edit of the weights file."""

    def edit(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return edit


BROKEN = {
    "config.json: no such file": lambda f: (f / "config.json").unlink(),
    "config.json: .* broken": lambda f: (f / "config.json").write_text('{"model_type": '),
    "config.json: 'n_head' is missing": lambda f: edited(f, n_head=...),
    "config.json: model_type 'llamba' and name .* are unknown": lambda f: edited(f, model_type="llamba"),
    "config.json: model_type 'stablelm' is not supported": lambda f: edited(
        f, model_type="stablelm", _name_or_path="stabilityai/stablelm-base-alpha-3b"
    ),
    "in/config.json: activation_function": lambda f: edited(f, activation_function="relu"),
    "config.json: .* scale_attn_": lambda f: edited(f, scale_attn_weights=False),
    "scale_attn_... ?: not GPT-2's": lambda f: edited(f, scale_attn_by_inverse_layer_idx=True),
    "no \\*.safetensors": lambda f: (f / "model.safetensors").unlink(),
    "model.safetensors: ": lambda f: (f / "model.safetensors").write_bytes(
        (f / "model.safetensors").read_bytes()[:50_000]
    ),
    "model.safetensors: .*header": lambda f: (f / "model.safetensors").write_bytes(b""),
    "do not fit config.json: .*size mismatch for transformer.wte": lambda f: edited(f, vocab_size=511),
    "do not fit config.json: .*wpe": lambda f: edited(f, n_positions=64),
    "do not fit config.json: .*h.1": lambda f: edited(f, n_layer=1),
    "do not fit config.json: .*h.2": lambda f: edited(f, n_layer=3),
    "do not fit config.json: AssertionError": lambda f: edited(f, n_head=5),
    "do not fit config.json: .*missing .*ln_f.bias": unfit(lambda w: w.pop("transformer.ln_f.bias")),
    "do not fit config.json: .*score": unfit(lambda w: w.update({"score.weight": torch.zeros(2, 32)})),
    "do not fit config.json: .*groups": unfit(lambda w: w.update(score=torch.zeros(2))),
}


@pytest.mark.parametrize("match", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(match, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "in")
    BROKEN[match](tmp_path / "in")
    refused(match, model.load, tmp_path / "in")


UNLIKE = {
    "rope_scaling: yarn is not supported": dict(rope_parameters={"rope_type": "yarn", "factor": 4.0}),
    "rope_scaling: dynamic is not supported": dict(rope_scaling={"type": "dynamic", "factor": 2.0}),
    "hidden_act: gelu is not supported": dict(hidden_act="gelu"),
    "use_sliding_window: not supported for qwen2": dict(model_type="qwen2", use_sliding_window=True),
    "use_sliding_window: not supported for qwen3": dict(model_type="qwen3", use_sliding_window=True),
    "do not fit config.json: .*(proj|qkv)": dict(attention_bias=True),
}


@pytest.mark.parametrize("match", UNLIKE)
def test_a_variant_that_we_do_not_compute_is_refused_in_one_line(match, folders):
    refused(match, model.load, edited(folders["llama"], **UNLIKE[match]))


def test_a_llama_with_biases_in_its_attention_is_refused(tmp_path):
    made(transformers.LlamaConfig(**GQA, attention_bias=True), tmp_path / "in")
    refused("do not fit config.json: .*bias", model.load, tmp_path / "in")


@pytest.mark.parametrize("window", [None, 5])
def test_the_blocks_that_the_gpu_path_visits_hold_all_that_may_be_seen(window):
    from torch.nn.attention.flex_attention import create_block_mask

    prompts, completions = ragged(2, 64, 3)
    kept, rows = model.Prompts(), pack(prompts * 4, completions * 4)
    n = len(rows.token_N)
    for packed, m in ((model.Packed(rows, kept), n), (model.Packed(rows, kept), int((rows.branch_N > 0).sum()))):
        ours = packed.block_mask(window, size=8)
        every = create_block_mask(ours.mask_mod, None, None, m, n, device="cpu", BLOCK_SIZE=8)
        visited, needed = ours.to_dense()[0, 0] > 0, every.to_dense()[0, 0] > 0
        assert visited.shape == needed.shape and (visited | ~needed).all()
        assert visited.sum() < visited.numel() / 4, "else nothing is skipped"
