"""Sampling beside litgpt's batched generate: the same weights, 64 prompts, useful tokens a second.

    python benchmarks/sampling.py

Prompts have 8 to 128 tokens; answers end at EOS, which each token is with probability 1/64, or after 256. litgpt takes
one prompt length a batch, so its prompts are padded to the longest (its answers to shorter ones are then not what the
model would say; only its speed counts here), and it goes on with all rows until the last has ended. Useful tokens: up
to a row's EOS. In turns, A B B A, one process.
"""

import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import litgpt
import numpy as np
import torch
from lightning.fabric import Fabric
from litgpt.generate.base import batched_generate_fn

sys.path.insert(0, str(Path(__file__).parent.parent))

import generate  # noqa: E402
import model  # noqa: E402
from runs.settings import Sampling  # noqa: E402

ROWS, NEW, EOS, VOCAB = 64, 256, 0, 64


def rate(work, seconds: float = 0.5) -> float:
    """Calls of work() a second."""
    work()
    n, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        work()
        n += 1
    return n / (time.perf_counter() - began)


def roofline(gpt, prompts: list[int], tokens: float) -> float:
    """Tokens a second if nothing cost anything but the products at the rate of a large product or, after the prompts,
    each step's one read of the weights and each token's one read of its row's keys and values at the rate of a large
    read, whichever takes longer."""
    x, w = torch.randn(2048, 1024), torch.randn(1024, 1024)
    flops, block = 2 * 2048 * 1024 * 1024 * rate(lambda: x @ w), torch.randn(2**25)
    bandwidth = 4 * len(block) * rate(block.sum)
    size, config = sum(p.numel() for p in gpt.parameters()), gpt.config
    mean = sum(prompts) / len(prompts) + tokens / len(prompts) / 2
    cache = tokens * mean * 2 * config.n_layer * config.n_embd * 4
    print(f"a product runs at {flops / 1e9:.0f} GFLOP/s, a read at {bandwidth / 1e9:.1f} GB/s")
    steps = max(2 * size * tokens / flops, (NEW * size * 4 + cache) / bandwidth)
    return tokens / (2 * size * sum(prompts) / flops + steps)


def main() -> None:
    torch.manual_seed(1)
    config = litgpt.Config(
        block_size=512, n_layer=8, n_embd=256, n_head=8, vocab_size=VOCAB, padded_vocab_size=VOCAB,
        rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", intermediate_size=704,
    )  # fmt: skip
    theirs = litgpt.GPT(config).eval()
    theirs.apply(theirs._init_weights)
    ours = model.GPT(config).eval()
    ours.load_state_dict(theirs.state_dict())
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, VOCAB, n).astype("int32") for n in rng.integers(8, 129, ROWS)]
    width = max(map(len, prompts))
    padded = torch.zeros(ROWS, width, dtype=torch.long)
    for row, p in zip(padded, prompts):
        row[: len(p)] = torch.from_numpy(p.astype("int64"))
    fabric, tokenizer = Fabric(accelerator="cpu", devices=1), SimpleNamespace(stops=(EOS,))
    args = Sampling(batch_size=ROWS)

    def a(seed):
        return sum(map(len, generate.generate(fabric, ours, prompts, tokenizer, args, NEW, seed)))

    @torch.inference_mode()
    def b(seed):
        torch.manual_seed(seed)
        theirs.set_kv_cache(ROWS, width + NEW)
        steps = batched_generate_fn(
            theirs, padded, width + NEW, sample_args=dict(temperature=1.0, top_p=1.0), stop_tokens=([EOS],),
            include_prompt=False, include_eos=True,
        )  # fmt: skip
        return sum(token is not None for step in steps for token in step)

    speeds, useful = {a: [], b: []}, []
    for i, f in enumerate([a, b, *[a, b, b, a] * 3]):
        began = time.perf_counter()
        tokens = f(i)
        if i > 1:  # the first of each is a warm-up
            speeds[f].append(tokens / (time.perf_counter() - began))
            useful.append(tokens)
    for name, f in (("ours", a), ("litgpt", b)):
        v = sorted(speeds[f])
        print(
            f"{name:<7} {statistics.median(v):8,.0f} useful tokens/s  ({v[0]:,.0f} to {v[-1]:,.0f})"
        )
    print(f"ratio   {statistics.median(speeds[a]) / statistics.median(speeds[b]):8.2f}")
    print(
        f"bound   {roofline(ours, [len(p) for p in prompts], statistics.median(useful)):8,.0f} useful tokens/s"
    )
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")


if __name__ == "__main__":
    main()
