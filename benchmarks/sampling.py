"""Sampling beside transformers' generate, in bf16 and fp32: the same model and prompts, useful tokens a second.

    python benchmarks/sampling.py --model out/smollm2-135m

- 32 prompts of 40 to 70 tokens, of random words, and answers of exactly 40 tokens. transformers pads on
  the left.
- The two run in one process, in turns: A B B A.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from lightning.fabric import Fabric

import sampler
from infra.settings import Sampling
from models import load
from models.hub import find_model
from records.tokenizer import Tokenizer

ROWS, NEW = 32, 40


def compare(samplers: dict) -> None:
    """Time two samplers, functions of a seed, and print their speeds."""
    ours, theirs = samplers
    speeds = {name: [] for name in samplers}
    turns = [ours, theirs, *[ours, theirs, theirs, ours] * 2]
    for i, name in enumerate(turns):
        began = time.perf_counter()
        samplers[name](i)
        if i > 1:  # the first turn of each is a warm-up
            speeds[name].append(ROWS * NEW / (time.perf_counter() - began))
    for name, values in speeds.items():
        median, low, high = statistics.median(values), min(values), max(values)
        print(f"{name:<12} {median:8,.0f} useful tokens/s  ({low:,.0f} to {high:,.0f})")
    ratio = statistics.median(speeds[ours]) / statistics.median(speeds[theirs])
    print(f"ratio        {ratio:8.2f}")


def run(folder: str, precision: str) -> None:
    """precision: one of Fabric's."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    fabric = Fabric(accelerator="auto", devices=1, precision=precision)
    policy = fabric.setup_module(load.load_model(folder, dtype=dtype))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(fabric.device)
    tokenizer = Tokenizer(find_model(folder))
    rng = np.random.default_rng(1)
    lengths = rng.integers(40, 71, ROWS)
    prompts = [rng.integers(1000, 40_000, n).astype("int32") for n in lengths]
    padded = torch.zeros(ROWS, max(lengths), dtype=torch.long)
    for row, prompt in zip(padded, prompts):
        row[-len(prompt) :] = torch.from_numpy(prompt)
    padded = padded.to(fabric.device)
    args = Sampling(batch_size=ROWS)
    tokenizer.stops = []  # every answer has NEW tokens

    def sample_ours(seed):
        sampler.generate(fabric, policy, prompts, tokenizer, args, NEW, seed)

    @torch.inference_mode()
    def sample_transformers(seed):
        torch.manual_seed(seed)
        answers = theirs.generate(
            padded, attention_mask=(padded > 0).long(), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0,
        )  # fmt: skip
        answers.tolist()  # a GPU is done only now

    print(precision)
    compare({"ours": sample_ours, "transformers": sample_transformers})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    args = parser.parse_args()
    torch.manual_seed(1)
    for precision in ("bf16-true", "32-true"):
        run(args.model, precision)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
