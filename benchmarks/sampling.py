"""Sampling beside litgpt's batched generate: the same weights, 64 prompts, useful tokens a second.

    python benchmarks/sampling.py

- Prompts have 8 to 128 tokens. An answer ends at EOS, or after 256 tokens; each token is EOS with probability 1/64.
- litgpt wants prompts of one length in a batch, so its prompts are padded to the longest. Its answers to the
  shorter ones are then not the model's; only its speed counts here. It continues all rows until the last one has ended.
- Useful tokens are those of each row up to its EOS.
- The two run in one process, in turns: A B B A.
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

ROWS, VOCAB, EOS = 64, 64, 0
NEW = 256  # longest answer


def rate(work, seconds: float = 0.5) -> float:
    """Calls of work() a second, after one call as warm-up."""
    work()
    n = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        work()
        n += 1
    return n / (time.perf_counter() - began)


def roofline(gpt, prompts: list[int], tokens: float) -> float:
    """An upper bound of useful tokens a second, for prompts of these lengths and so many sampled tokens.

    The prompts cost their products. The sampling costs its products, or its reads of memory if these take longer: in
    each step the weights once, and for each token the keys and values of its row once. Products and reads have the
    rate of large ones."""
    x, w = torch.randn(2048, 1024), torch.randn(1024, 1024)
    flops = 2 * 2048 * 1024 * 1024 * rate(lambda: x @ w)
    block = torch.randn(2**25)
    bandwidth = 4 * len(block) * rate(block.sum)
    print(f"a product runs at {flops / 1e9:.0f} GFLOP/s, a read at {bandwidth / 1e9:.1f} GB/s")
    config = gpt.config
    n_weights = sum(p.numel() for p in gpt.parameters())
    # on average, when a token is sampled, its row has its prompt and half of its answer
    mean_length = sum(prompts) / len(prompts) + tokens / len(prompts) / 2
    cache_bytes = tokens * mean_length * 2 * config.n_layer * config.n_embd * 4
    weight_bytes = NEW * n_weights * 4
    prompt_seconds = 2 * n_weights * sum(prompts) / flops
    products = 2 * n_weights * tokens / flops
    reads = (weight_bytes + cache_bytes) / bandwidth
    return tokens / (prompt_seconds + max(products, reads))


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
    fabric = Fabric(accelerator="cpu", devices=1)
    tokenizer = SimpleNamespace(stops=(EOS,))
    args = Sampling(batch_size=ROWS)

    def sample_ours(seed):
        """-> the number of useful tokens"""
        return sum(map(len, generate.generate(fabric, ours, prompts, tokenizer, args, NEW, seed)))

    @torch.inference_mode()
    def sample_litgpt(seed):
        """-> the number of useful tokens"""
        torch.manual_seed(seed)
        theirs.set_kv_cache(ROWS, width + NEW)
        steps = batched_generate_fn(
            theirs, padded, width + NEW, sample_args=dict(temperature=1.0, top_p=1.0), stop_tokens=([EOS],),
            include_prompt=False, include_eos=True,
        )  # fmt: skip
        return sum(token is not None for step in steps for token in step)

    samplers = {"ours": sample_ours, "litgpt": sample_litgpt}
    speeds, useful = {"ours": [], "litgpt": []}, []
    turns = ["ours", "litgpt", *["ours", "litgpt", "litgpt", "ours"] * 3]
    for i, name in enumerate(turns):
        began = time.perf_counter()
        tokens = samplers[name](i)
        if i > 1:  # the first turn of each is a warm-up
            speeds[name].append(tokens / (time.perf_counter() - began))
            useful.append(tokens)
    for name, values in speeds.items():
        median, low, high = statistics.median(values), min(values), max(values)
        print(f"{name:<7} {median:8,.0f} useful tokens/s  ({low:,.0f} to {high:,.0f})")
    ratio = statistics.median(speeds["ours"]) / statistics.median(speeds["litgpt"])
    print(f"ratio   {ratio:8.2f}")
    bound = roofline(ours, [len(p) for p in prompts], statistics.median(useful))
    print(f"bound   {bound:8,.0f} useful tokens/s")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")


if __name__ == "__main__":
    main()
