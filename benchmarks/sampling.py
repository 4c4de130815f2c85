"""Sampling beside another library's batched generate: the same weights and prompts, useful tokens a
second.

    python benchmarks/sampling.py                           # a small random model, beside litgpt
    python benchmarks/sampling.py --model out/smollm2-135m  # a real one, bf16 and fp32, beside transformers

- Small: 64 prompts of 8 to 128 tokens. An answer ends at EOS, or after 256 tokens; each token is EOS
  with probability 1/64. litgpt wants prompts of one length in a batch, so its prompts are padded to the
  longest. Its answers to the shorter ones are then not the model's; only its speed counts here. It
  continues all rows until the last one has ended.
- Real: 32 prompts of 40 to 70 tokens, of random words, and answers of exactly 40 tokens. transformers
  pads on the left.
- Useful tokens are those of each row up to its EOS.
- The two run in one process, in turns: A B B A.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.append(f"{sys.path[0]}/..")

import litgpt
import numpy as np
import torch
from lightning.fabric import Fabric
from litgpt.generate.base import batched_generate_fn

import generate
import load
import model
from records.tokenizer import Tokenizer
from runs.settings import Sampling

ROWS, VOCAB, EOS = 64, 64, 0
NEW = 256  # longest answer
REAL_ROWS, REAL_NEW = 32, 40


def compare(samplers: dict, title: str, rounds: int) -> None:
    """Time two samplers, functions of a seed that return the number of useful tokens, and print their
    speeds."""
    ours, theirs = samplers
    speeds = {name: [] for name in samplers}
    turns = [ours, theirs, *[ours, theirs, theirs, ours] * rounds]
    for i, name in enumerate(turns):
        began = time.perf_counter()
        tokens = samplers[name](i)
        if i > 1:  # the first turn of each is a warm-up
            speeds[name].append(tokens / (time.perf_counter() - began))
    print(title)
    for name, values in speeds.items():
        median, low, high = statistics.median(values), min(values), max(values)
        print(f"{name:<12} {median:8,.0f} useful tokens/s  ({low:,.0f} to {high:,.0f})")
    ratio = statistics.median(speeds[ours]) / statistics.median(speeds[theirs])
    print(f"ratio        {ratio:8.2f}")


def make_prompts(lengths, low: int, high: int) -> list:
    rng = np.random.default_rng(1)
    return [rng.integers(low, high, n).astype("int32") for n in lengths(rng)]


def pad(prompts: list, left: bool) -> torch.Tensor:
    width = max(map(len, prompts))
    padded = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, p in zip(padded, prompts):
        (row[width - len(p) :] if left else row[: len(p)])[:] = torch.from_numpy(p)
    return padded


def small() -> None:
    config = litgpt.Config(
        block_size=512, n_layer=8, n_embd=256, n_head=8, vocab_size=VOCAB, padded_vocab_size=VOCAB,
        rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", intermediate_size=704,
    )  # fmt: skip
    theirs = litgpt.GPT(config).eval()
    theirs.apply(theirs._init_weights)
    ours = model.GPT(config).eval()
    ours.load_state_dict(theirs.state_dict())
    prompts = make_prompts(lambda rng: rng.integers(8, 129, ROWS), 1, VOCAB)
    padded = pad(prompts, left=False)
    longest = padded.shape[1] + NEW
    fabric = Fabric(accelerator="cpu", devices=1)
    tokenizer = SimpleNamespace(stops=(EOS,))
    args = Sampling(batch_size=ROWS)

    def sample_ours(seed):
        return sum(map(len, generate.generate(fabric, ours, prompts, tokenizer, args, NEW, seed)))

    @torch.inference_mode()
    def sample_litgpt(seed):
        torch.manual_seed(seed)
        theirs.set_kv_cache(ROWS, longest)
        steps = batched_generate_fn(
            theirs, padded, longest, sample_args=dict(temperature=1.0, top_p=1.0),
            stop_tokens=([EOS],), include_prompt=False, include_eos=True,
        )  # fmt: skip
        return sum(token is not None for step in steps for token in step)

    compare({"ours": sample_ours, "litgpt": sample_litgpt}, "float32", 3)


def real(folder: str, precision: str) -> None:
    """precision: one of Fabric's."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    policy = fabric.setup_module(load.load_model(folder, dtype=dtype))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = Tokenizer(Path(folder))
    prompts = make_prompts(lambda rng: rng.integers(40, 71, REAL_ROWS), 1000, 40_000)
    padded = pad(prompts, left=True)
    args = Sampling(batch_size=REAL_ROWS, min_new_tokens=REAL_NEW)

    def sample_ours(seed):
        answers = generate.generate(fabric, policy, prompts, tokenizer, args, REAL_NEW, seed)
        return sum(map(len, answers))

    @torch.inference_mode()
    def sample_transformers(seed):
        torch.manual_seed(seed)
        ids = theirs.generate(
            padded, attention_mask=(padded > 0).long(), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=REAL_NEW, min_new_tokens=REAL_NEW, pad_token_id=0,
        )  # fmt: skip
        return ids[:, padded.shape[1] :].numel()

    compare({"ours": sample_ours, "transformers": sample_transformers}, precision, 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Hugging Face folder")
    args = parser.parse_args()
    torch.manual_seed(1)
    if args.model:
        for precision in ("bf16-true", "32-true"):
            real(args.model, precision)
    else:
        small()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
