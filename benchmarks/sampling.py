"""Our sampling and transformers' generate, in bf16 and fp32: the same model and prompts, useful tokens per second.

    python benchmarks/sampling.py --model out/smollm2-135m
    python benchmarks/sampling.py --model out/smollm2-135m --rows 64 --new 100 --turns 2

- Prompts have 40 to 70 tokens, of random words, and each answer has exactly --new tokens. transformers
  pads on the left.
- The two run in one process, alternating: A B B A.
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


def run(folder: str, precision: str, rows: int, new: int, turns: int) -> dict[str, float]:
    """Time both, with one turn of each as a warm-up. precision: one of Fabric's. Print and return the median speeds of
    "ours" and of "transformers" in tokens a second."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    fabric = Fabric(accelerator="auto", devices=1, precision=precision)
    policy = fabric.setup_module(load.load_model(folder, dtype=dtype))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(fabric.device)
    tokenizer = Tokenizer(find_model(folder))
    rng = np.random.default_rng(1)
    lengths = rng.integers(40, 71, rows)
    prompts = [rng.integers(1000, 40_000, n).astype("int32") for n in lengths]
    padded = torch.zeros(rows, max(lengths), dtype=torch.long)
    for row, prompt in zip(padded, prompts):
        row[-len(prompt) :] = torch.from_numpy(prompt)
    padded = padded.to(fabric.device)
    args = Sampling(batch_size=rows)
    tokenizer.stops = []  # every answer has `new` tokens

    def sample_ours(seed):
        sampler.generate(fabric, policy, prompts, tokenizer, args, new, seed)

    @torch.inference_mode()
    def sample_transformers(seed):
        torch.manual_seed(seed)
        answers = theirs.generate(
            padded, attention_mask=(padded > 0).long(), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=new, min_new_tokens=new, pad_token_id=0,
        )  # fmt: skip
        answers.tolist()  # a GPU is done only now

    print(f"{precision}, {rows} answers of {new} tokens", flush=True)
    samplers = {"ours": sample_ours, "transformers": sample_transformers}
    speeds = {name: [] for name in samplers}
    for i in range(turns + 1):
        for name in list(samplers) if i % 2 == 0 else reversed(samplers):
            began = time.perf_counter()
            samplers[name](i)
            speeds[name].append(rows * new / (time.perf_counter() - began))
    medians = {}
    for name, (_, *timed) in speeds.items():
        medians[name] = statistics.median(timed)
        span = f"({min(timed):,.0f} to {max(timed):,.0f})"
        print(f"{name:<12} {medians[name]:8,.0f} useful tokens/s  {span}", flush=True)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--rows", type=int, default=32, help="answers at once")
    parser.add_argument("--new", type=int, default=40, help="tokens of an answer")
    parser.add_argument("--turns", type=int, default=5, help="timed turns of each side")
    args = parser.parse_args()
    for precision in ("bf16-true", "32-true"):
        run(args.model, precision, args.rows, args.new, args.turns)


if __name__ == "__main__":
    main()
