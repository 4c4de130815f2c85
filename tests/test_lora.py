"""Adapters: disabled to the bit, the only weights that train, merged into an equal full model; PEFT's folders."""

from pathlib import Path

import peft
import pytest
import torch
import transformers
from conftest import refused
from tiny_models import (
    EYES,
    GPT2,
    GQA,
    HF,
    IDS,
    load_peft,
    load_transformers,
    logits,
    made,
    our_logits,
    ragged,
    same,
    their_logits,
    trained,
    with_adapters,
)
from tokens import edit_json
from torch import nn

from infra.settings import Lora
from models import load
from models.export import export
from models.hub import Source
from models.lora import disable_adapters, merge_for_sampling, merged_weights, reset_adapters
from packing import pack

# what PEFT advises about layers that it saves as a whole
pytestmark = pytest.mark.filterwarnings("ignore:::peft")


@pytest.fixture
def folders(tiny, tmp_path):
    made(HF["llama"], tmp_path / "llama")
    return {"gpt2": tiny, "llama": tmp_path / "llama"}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_begin_as_the_base_and_go_off_to_the_bit_even_when_trained(name, dtype, folders):
    batch = pack(*ragged(2, 97, 0))
    lora = Lora(rank=2, dropout=0.5, targets="all-linear")
    plain = load.load_model(folders[name], dtype)
    gpt = with_adapters(folders[name], lora, dtype).eval()
    with torch.autocast("cpu", torch.bfloat16):
        base = plain(batch).logps
        assert torch.equal(gpt(batch).logps, base)
        trainable = {n for n, p in gpt.named_parameters() if p.requires_grad}
        assert trainable == {n for n in gpt.unique_parameters() if "lora_" in n}
        trained(gpt.train(), batch)
        with disable_adapters(gpt):
            assert torch.equal(gpt(batch).logps, base)
        assert not torch.equal(gpt(batch).logps, gpt(batch).logps), "else there is no dropout"
        assert not torch.isclose(gpt.eval()(batch).logps, base, atol=1e-3).all()


def test_adapters_start_again_as_the_base_and_by_the_seed_alone(tiny):
    batch, gpt = pack(*ragged(1, 97, 0)), with_adapters(tiny, Lora(rank=2))
    base, a = gpt(batch).logps, gpt.transformer.h[0].mlp.proj.lora_A
    seen = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(seen))
        reset_adapters(trained(gpt, batch), seed)
        assert torch.equal(gpt(batch).logps, base)
        seen.append(a.detach().clone())
    assert torch.equal(*seen[:2]) and not torch.equal(*seen[1:])
    # litgpt's own start: uniform, by the width
    bound = a.shape[1] ** -0.5
    assert 0.9 * bound < a.max() <= bound and -bound <= a.min() < -0.9 * bound


TARGETS = [("llama", x) for x in ("k_proj,v_proj", "q_proj,v_proj", "all-linear", "lm_head")]
TARGETS += [("gpt2", x) for x in ("c_attn", "mlp.c_proj,c_fc", "all-linear")]


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


@pytest.mark.parametrize(
    "name, targets", [("gpt2", "c_attn,mlp.c_proj"), ("llama", "q_proj,up_proj")]
)
def test_adapters_are_merged_for_sampling_and_taken_out_to_the_bit(name, targets, folders):
    ids = list(range(20))
    gpt = with_adapters(folders[name], Lora(rank=3, alpha=12, targets=targets))
    trained(gpt, pack(*ragged(1, 97, 0)))
    before = {n: (p, p.detach().clone()) for n, p in gpt.named_parameters()}
    with torch.no_grad():
        adapted = logits(gpt, ids)
        with merge_for_sampling(gpt, torch.float32):
            assert same(logits(gpt, ids), adapted, 1e-4)
            assert not any(hasattr(m, "lora_A") and not m.merged for m in gpt.modules())
        assert same(logits(gpt, ids), adapted), "the same bits again"
        with merge_for_sampling(gpt, torch.bfloat16):
            linears = [m for m in gpt.modules() if type(m) is nn.Linear]
            assert {m.weight.dtype for m in linears} == {torch.bfloat16}
    for n, p in gpt.named_parameters():
        assert p is before[n][0] and torch.equal(p, before[n][1])


def test_answers_in_bfloat16_are_sampled_with_all_that_was_learned_on_average(folders):
    """A change of a tenth of a weight's spacing: rounded to nearest, a few percent of it would be left."""
    gpt = with_adapters(folders["llama"], Lora(rank=3, alpha=3, targets="down_proj"))
    layer = gpt.transformer.h[0].mlp.proj
    with torch.no_grad():
        w = layer.linear.weight.copy_(layer.linear.weight.bfloat16()).double()
        layer.lora_B.normal_()
        layer.lora_B.mul_(0.1 * w.abs().median() * 2**-8 / layer.get_lora_AB().std())
        delta = layer.get_lora_AB().double()
        moved = []
        for _ in range(2):
            with merge_for_sampling(gpt, torch.bfloat16):
                moved.append(layer.linear.weight.double() - w)
    assert torch.equal(*moved), "the same each time"
    assert 0.8 < (moved[0] * delta).sum() / delta.square().sum() < 1.2


def test_targets_are_named_as_peft_names_them(folders):
    def adapters(name, targets: str) -> dict:
        gpt = with_adapters(folders[name], Lora(rank=2, targets=targets))
        return {n: p.shape for n, p in gpt.named_parameters() if "lora_" in n}

    assert adapters("llama", "q_proj, v_proj") != adapters("llama", "q_proj")
    every = adapters("llama", "all-linear")
    layers = "q_proj,k_proj,v_proj,self_attn.o_proj,gate_proj,up_proj,mlp.down_proj"
    assert adapters("llama", layers) == every and "lm_head.lora_A" not in every
    c_proj = adapters("gpt2", "attn.c_proj") | adapters("gpt2", "mlp.c_proj")
    assert adapters("gpt2", "c_proj") == c_proj != adapters("gpt2", "attn.c_proj")
    wrong = [("llama", "c_attn"), ("gpt2", "proj"), ("llama", "q_proj,"), ("llama", "")]
    for name, targets in wrong:
        refused("^lora.targets: expected all-linear or .*", adapters, name, targets)
    refused("^lora.targets: lm_head: .* tied", adapters, "gpt2", "lm_head")


# ---- PEFT's folders ------------------------------------------------------------------------------


def base_model(folder: Path, kind: str, tie: bool = False) -> Path:
    """A small model of random weights with 512 tokens, and its tokenizer."""
    sizes = GQA | dict(vocab_size=512, tie_word_embeddings=bool(tie))
    config = {
        "llama": lambda: transformers.LlamaConfig(**sizes),
        "gpt2": lambda: transformers.GPT2Config(**GPT2 | dict(vocab_size=512)),
        # it multiplies the embedding by a factor
        "gemma3": lambda: transformers.Gemma3TextConfig(head_dim=8, **sizes),
        "gemma3 with images": lambda: transformers.Gemma3Config(
            text_config=dict(head_dim=8, **sizes), vision_config=EYES, mm_tokens_per_image=4
        ),
        "mixtral": lambda: transformers.MixtralConfig(num_local_experts=4, **sizes),
    }[kind]()
    made(config, folder)
    return folder


def peft_adapter(base: Path, out: Path, vocabulary: int = 512, **options) -> Path:
    """An adapter of PEFT's on this model, every trainable weight moved, as PEFT saves it."""
    hf = load_transformers(base)
    if vocabulary != 512:
        hf.resize_token_embeddings(vocabulary)
    config = dict(r=4, lora_alpha=6, target_modules=["q_proj"], task_type="CAUSAL_LM") | options
    model = peft.get_peft_model(hf, peft.LoraConfig(**config))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
    model.save_pretrained(out)
    return out


HEADS = ["q_proj", "embed_tokens", "lm_head"]
TOKENS = sorted(set(IDS))[:5]
SCALES = dict(
    use_rslora=True, rank_pattern={"lm_head": 6, "down_proj": 6}, alpha_pattern={"q_proj": 3}
)
SAVED_BY_PEFT = {
    "each layer of its scale": ("llama", dict(target_modules=HEADS, **SCALES)),
    "an embedding with a factor": ("gemma3", dict(target_modules=HEADS)),
    "whole layers": ("llama", dict(modules_to_save=["lm_head", "embed_tokens", "norm"])),
    "a mixture's experts and router": (
        "mixtral",
        dict(target_modules=["q_proj", "gate"], target_parameters=["experts.down_proj"]),
    ),
    "tied adapters": ("tied", dict(target_modules=["embed_tokens"], ensure_weight_tying=True)),
    "tied whole layers": ("tied", dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "tokens": ("llama", dict(trainable_token_indices={"embed_tokens": TOKENS, "lm_head": [7, 3]})),
    "tokens of a tied head": (
        "gpt2",
        dict(target_modules=["c_attn"], trainable_token_indices={"wte": TOKENS[::-1]}),
    ),
    "biases": ("gpt2", dict(target_modules=["c_attn", "c_proj"], bias="all")),
    "DoRA": ("llama", dict(use_dora=True)),
}


@pytest.mark.parametrize("name", SAVED_BY_PEFT)
def test_a_peft_folder_is_read_as_peft_computes_it(name, tmp_path):
    kind, options = SAVED_BY_PEFT[name]
    is_tied = kind == "tied"
    base = base_model(tmp_path / "base", "llama" if is_tied else kind, is_tied)
    folder = peft_adapter(base, tmp_path / "adapter", **options)
    expected = their_logits(load_peft(base, folder))
    assert not same(expected, their_logits(load_transformers(base)), 1e-2)
    assert same(our_logits(folder), expected, 1e-4)


@pytest.mark.parametrize(
    "options", [dict(target_modules=["q_proj", "lm_head"]), dict(modules_to_save=["lm_head"])]
)
def test_an_adapter_that_unties_the_head_is_refused_and_read_on_an_untied_base(options, tmp_path):
    base = base_model(tmp_path / "base", "llama", tie=True)
    folder = peft_adapter(base, tmp_path / "adapter", **options)
    refused(f"^{folder}: lm_head and the embedding differ .* copy of the base", our_logits, folder)

    # what the message says
    hf = load_transformers(base)
    hf.config.tie_word_embeddings = False
    hf.lm_head.weight = nn.Parameter(hf.lm_head.weight.detach().clone())
    hf.save_pretrained(tmp_path / "untied")
    edit_json(folder / "adapter_config.json", base_model_name_or_path=str(tmp_path / "untied"))
    expected = their_logits(load_peft(tmp_path / "untied", folder))
    assert same(our_logits(folder), expected, 1e-4)


def make_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


# the message, what edits the folder or the config, and how the adapter is made
REFUSED = [
    ("config.json: a_new_variant: 0.5 is not supported", dict(a_new_variant=0.5), {}),
    ("config.json: revision: v2 is not supported", dict(revision="v2"), {}),
    ("config.json: init_lora_weights: pissa is not", dict(init_lora_weights="pissa"), {}),
    ("config.json: peft_type: PREFIX_TUNING is not", dict(peft_type="PREFIX_TUNING"), {}),
    ("config.json: megatron_config: .* is not", dict(megatron_config=dict(a=1)), {}),
    ("config.json: layer_replication: .* is not", dict(layer_replication=[[0, 1]]), {}),
    ("no place for .*q_proj.lora_A", dict(target_modules=["k_proj"]), {}),
    ("weights are missing: no adapter_model.safetensors; .*no other format", make_pickle, {}),
    ("size mismatch .*520, 48.*512, 48", {}, dict(vocabulary=520)),
]


@pytest.mark.parametrize("match, edit, options", REFUSED)
def test_a_peft_folder_of_which_a_part_would_be_lost_is_refused_by_name(
    match, edit, options, tmp_path
):
    folder = peft_adapter(base_model(tmp_path / "base", "llama"), tmp_path / "adapter", **options)
    edit(folder) if callable(edit) else edit_json(folder / "adapter_config.json", **edit)
    refused(f"^{folder}.*{match}", our_logits, folder)


def test_adapters_of_a_vision_tower_are_refused_because_it_is_not_computed(tmp_path):
    base = base_model(tmp_path / "base", "gemma3 with images")
    folder = peft_adapter(base, tmp_path / "adapter")
    refused(f"^{folder}: .*no place for .*vision_tower.*q_proj", our_logits, folder)


def test_a_peft_folder_that_is_not_merged_as_peft_computes_it_is_refused(tmp_path, monkeypatch):
    folder = peft_adapter(base_model(tmp_path / "base", "llama"), tmp_path / "adapter")
    our_logits(folder)
    layer = peft.tuners.lora.Linear
    monkeypatch.setattr(layer, "get_delta_weight", lambda self, name: torch.tensor(0.0))
    refused(f"^{folder}: .* merged are up to .* nats from PEFT's own", our_logits, folder)
