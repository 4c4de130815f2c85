"""Small models with random weights, batches of random lengths, and checks that several test files share."""

import json
import re
import shutil
from pathlib import Path

import litgpt
import numpy as np
import peft
import torch
import transformers
from tokens import FILES
from torch import nn

import attention
import model
from infra.settings import Lora
from models import load
from models.lora import add_adapters
from packing import pack

SMALL = dict(vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=6)
GQA = dict(SMALL, max_position_embeddings=64, intermediate_size=80, num_key_value_heads=2)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=16, rope_theta=500.0)
LINEAR = dict(rope_type="linear", factor=4.0, rope_theta=300.0)
GPT2 = dict(vocab_size=97, n_embd=48, n_layer=2, n_head=6, n_positions=64)
# of a vision tower
EYES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
EYES |= dict(image_size=28, patch_size=14)
# of litgpt's Config
LLAMA = dict(block_size=48, n_layer=2, n_embd=24, n_head=4, intermediate_size=40)
LLAMA |= dict(vocab_size=61, padded_vocab_size=61, n_query_groups=2, rotary_percentage=1.0)
LLAMA |= dict(parallel_residual=False, bias=False, norm_class_name="RMSNorm")
LLAMA |= dict(mlp_class_name="LLaMAMLP")
HF = {
    "llama": transformers.LlamaConfig(**GQA),
    "llama, tied": transformers.LlamaConfig(**GQA, tie_word_embeddings=True),
    "llama, one key head, wide heads": transformers.LlamaConfig(
        **GQA | {"num_key_value_heads": 1}, head_dim=16
    ),
    "llama3 rope": transformers.LlamaConfig(**GQA, rope_parameters=LLAMA3),
    "linear rope": transformers.LlamaConfig(**GQA, rope_parameters=LINEAR),
    "qwen2": transformers.Qwen2Config(**GQA, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**GQA, head_dim=16),
    "mistral, window": transformers.MistralConfig(**GQA, sliding_window=5),
    "gpt2": transformers.GPT2Config(**GPT2, n_inner=100),
    "gpt2, untied": transformers.GPT2Config(**GPT2, tie_word_embeddings=False),
}


def shaken(module: nn.Module, seed: int = 0) -> nn.Module:
    """Add noise to every parameter of the module, biases and norms too, so that a test notices one that is lost. -> the
    module in eval mode"""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.add_(noise * (0.1 if p.dim() == 1 else p.shape[-1] ** -0.5))
    return module.eval()


def with_adapters(folder: Path, lora: Lora, dtype: torch.dtype = torch.float32) -> model.Packed:
    """The model in this folder with new adapters, in train mode."""
    gpt = load.load_model(folder, dtype)
    add_adapters(gpt, lora)
    return gpt.train()


def made(config, folder: Path) -> nn.Module:
    """A model of transformers with this config and random weights, the same ones each time. It is also saved in the
    folder, beside a tokenizer of 512 tokens."""
    kind = transformers.AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hf = shaken(kind.from_config(config, attn_implementation="eager"))
    hf.save_pretrained(folder)
    shutil.copytree(FILES, folder, dirs_exist_ok=True)
    return hf


GPT2_NAMES = {
    "wte": "transformer.wte", "wpe": "transformer.wpe",
    "ln_1": "norm_1", "ln_2": "norm_2",
    "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.proj",
    "mlp.c_fc": "mlp.fc", "mlp.c_proj": "mlp.proj",
    "ln_f": "transformer.ln_f", "lm_head": "lm_head",
}  # fmt: skip


def gpt2_from_hf(config, state, weights):
    """Put weights of GPT-2 in Hugging Face's form into `state`, by our names. It does not use the program's own code
    for this, so that it can test that code."""
    for name, x in weights.items():
        name = name.removeprefix("transformer.")
        layer, part, kind = re.fullmatch(r"(h\.\d+\.)?(.+)\.(weight|bias)", name).groups()
        prefix = f"transformer.{layer}" if layer else ""
        x = x.T.contiguous() if ".c_" in part and kind == "weight" else x
        state[f"{prefix}{GPT2_NAMES[part]}.{kind}"] = x
    state.setdefault("lm_head.weight", state["transformer.wte.weight"])


def gpt_of(sizes: dict) -> model.GPT:
    """Our GPT from arguments of litgpt's Config, with the windows that they name."""
    return model.GPT(litgpt.Config(**sizes))


def logits(gpt, ids) -> torch.Tensor:
    """Next-token logits (tokens, V) at all positions. The pack's completion has one token, which is a target only, so
    the input is `ids` alone."""
    batch = pack([np.array(ids)], [(np.array(ids[:1]),)])
    seen = attention.PackedAttention(batch)
    return gpt.head(gpt.hidden(batch.token_N[None], batch.position_N[None], seen))[0]


# a text for the models whose vocabulary has 512 tokens
IDS = torch.randint(512, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def load_transformers(folder: Path):
    """transformers' model, without a missing or an unknown weight."""
    kind = transformers.AutoModelForCausalLM
    hf, info = kind.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return hf.eval()


def load_peft(base: Path, adapter: Path) -> nn.Module:
    """PEFT's model in float32."""
    return peft.PeftModel.from_pretrained(load_transformers(base).float(), adapter).eval()


@torch.no_grad()
def their_logits(hf) -> torch.Tensor:
    return hf(input_ids=torch.tensor([IDS])).logits[0]


def plain_logps(model, prompt, completion) -> torch.Tensor:
    """(L, V) log-probs at the tokens of a completion, by a forward of this text alone."""
    out = model(torch.tensor([[*prompt, *completion]]))
    return getattr(out, "logits", out)[0].log_softmax(-1)[len(prompt) - 1 : -1]


def plain_token_logps(model, prompt, completion) -> torch.Tensor:
    """(L,) log-probs of the tokens of a completion."""
    ids = torch.tensor(completion, dtype=torch.long)
    return plain_logps(model, prompt, completion).gather(1, ids[:, None])[:, 0]


@torch.no_grad()
def our_logits(source) -> torch.Tensor:
    """Logits of what find_model finds there: a folder, a run, a checkpoint, an adapter."""
    return logits(load.load_model(source), IDS)


# the good answers have an odd number
SENTENCES = [
    {"prompt": f"question {i}", "completion": f" answer {i} {'yes' if i % 2 else 'no'}"}
    for i in range(32)
]


def write_sentences(file: Path, n: int) -> Path:
    rows = [record | {"label": i % 2 == 1} for i, record in enumerate(SENTENCES[:n])]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@torch.no_grad()
def margin(logits_of, folder: Path, n: int) -> float:
    """Mean log-prob of the good completions of n SENTENCES minus that of the bad ones. logits_of: token ids -> logits
    (T, V). folder: has the tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sums = [0.0, 0.0]
    for i, record in enumerate(SENTENCES[:n]):
        prompt, completion = (tokenizer.encode(x) for x in record.values())
        ids = [*prompt, *completion, tokenizer.eos_token_id]
        logp_TV = logits_of(ids).double().log_softmax(-1)
        for t in range(len(prompt), len(ids)):
            sums[i % 2] += logp_TV[t - 1, ids[t]].item()
    return 2 * (sums[1] - sums[0]) / n


def their_margin(hf, folder: Path, n: int) -> float:
    """margin, computed by a model of transformers or PEFT in float32."""
    hf = hf.float().eval()
    return margin(lambda ids: hf(input_ids=torch.tensor([ids])).logits[0], folder, n)


def same(a, b, tolerance=0.0) -> bool:
    """Whether two tensors have one shape and differ by at most the tolerance."""
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance)


def same_weights(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def ragged(K: int, vocabulary: int, seed: int):
    """5 prompts with K completions each, of random lengths; some of them have one token only. -> what pack() takes"""
    r = np.random.default_rng(seed)
    p_len, c_len = r.integers(1, 10, 5), r.integers(1, 8, (5, K))
    p_len[1] = p_len[3] = 1
    c_len[1] = c_len[2, 0] = c_len[4, -1] = 1
    prompts = [r.integers(vocabulary, size=n) for n in p_len]
    return prompts, [tuple(r.integers(vocabulary, size=n) for n in row) for row in c_len]


def trained(gpt, batch, steps=2):
    """Take a few large SGD steps with the trainable parameters. -> the model"""
    optimizer = torch.optim.SGD([p for p in gpt.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (-gpt(batch).logps.mean()).backward()
        optimizer.step()
    return gpt
