"""Sampling beside another library's batched generate: the same weights and prompts, useful tokens a second.

    python benchmarks/sampling.py                            # a small random model, beside litgpt
    python benchmarks/sampling.py --model out/smollm2-135m   # a real one in bfloat16 and float32, beside transformers

- Small: 64 prompts of 8 to 128 tokens. An answer ends at EOS, or after 256 tokens; each token is EOS with probability
  1/64. litgpt wants prompts of one length in a batch, so its prompts are padded to the longest. Its answers to the
  shorter ones are then not the model's; only its speed counts here. It continues all rows until the last one has ended.
- Real: 32 prompts of 40 to 70 tokens, of random words, and answers of exactly 40 tokens. transformers pads on the left.
- Useful tokens are those of each row up to its EOS.
- The two run in one process, in turns: A B B A.
"""

import argparse
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
import load  # noqa: E402
import model  # noqa: E402
from records.tokenizer import Tokenizer  # noqa: E402
from runs.settings import Sampling  # noqa: E402

ROWS, VOCAB, EOS = 64, 64, 0
NEW = 256  # longest answer
REAL_ROWS, REAL_NEW = 32, 40


def rate(work, seconds: float = 0.5) -> float:
    """Calls of work() a second, after one call as warm-up."""
    work()
    n = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        work()
        n += 1
    return n / (time.perf_counter() - began)


def roofline(gpt, prompts: list[int], tokens: float, steps: int, dtype=torch.float32) -> float:
    """An upper bound of useful tokens a second, for prompts of these lengths and so many sampled tokens in so many
    decode steps.

    The prompts cost their products. The sampling costs its products, or its reads of memory if these take longer: in
    each step the weights once, and for each token the keys and values of its row once. Products and reads have the
    rate of large ones."""
    x, w = torch.randn(2048, 1024, dtype=dtype), torch.randn(1024, 1024, dtype=dtype)
    flops = 2 * 2048 * 1024 * 1024 * rate(lambda: x @ w)
    block = torch.randn(2**25)
    bandwidth = 4 * len(block) * rate(block.sum)
    print(f"a product runs at {flops / 1e9:.0f} GFLOP/s, a read at {bandwidth / 1e9:.1f} GB/s")
    config = gpt.config
    embedding = gpt.transformer.wte.weight
    n_weights = sum(p.numel() for p in gpt.parameters())
    if not gpt.tied:
        n_weights -= embedding.numel()  # it is looked up
    # on average, when a token is sampled, its row has its prompt and half of its answer
    mean_length = sum(prompts) / len(prompts) + tokens / len(prompts) / 2
    kv_width = config.n_query_groups * config.head_size
    cache_bytes = tokens * mean_length * 2 * config.n_layer * kv_width * dtype.itemsize
    weight_bytes = steps * n_weights * dtype.itemsize
    # of a prompt only the last token goes through the head
    prompt_products = 2 * (n_weights - embedding.numel()) * sum(prompts)
    products = 2 * n_weights * tokens / flops
    reads = (weight_bytes + cache_bytes) / bandwidth
    return tokens / (prompt_products / flops + max(products, reads))


def compare(samplers: dict, title: str, rounds: int = 3) -> float:
    """Time two samplers, functions of a seed that return the number of useful tokens. Prints their speeds. -> useful
    tokens of a call, the median"""
    ours, theirs = samplers
    speeds, useful = {name: [] for name in samplers}, []
    turns = [ours, theirs, *[ours, theirs, theirs, ours] * rounds]
    for i, name in enumerate(turns):
        began = time.perf_counter()
        tokens = samplers[name](i)
        if i > 1:  # the first turn of each is a warm-up
            speeds[name].append(tokens / (time.perf_counter() - began))
            useful.append(tokens)
    print(title)
    for name, values in speeds.items():
        median, low, high = statistics.median(values), min(values), max(values)
        print(f"{name:<12} {median:8,.0f} useful tokens/s  ({low:,.0f} to {high:,.0f})")
    ratio = statistics.median(speeds[ours]) / statistics.median(speeds[theirs])
    print(f"ratio        {ratio:8.2f}")
    return statistics.median(useful)


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
        return sum(map(len, generate.generate(fabric, ours, prompts, tokenizer, args, NEW, seed)))

    @torch.inference_mode()
    def sample_litgpt(seed):
        torch.manual_seed(seed)
        theirs.set_kv_cache(ROWS, width + NEW)
        steps = batched_generate_fn(
            theirs, padded, width + NEW, sample_args=dict(temperature=1.0, top_p=1.0), stop_tokens=([EOS],),
            include_prompt=False, include_eos=True,
        )  # fmt: skip
        return sum(token is not None for step in steps for token in step)

    useful = compare({"ours": sample_ours, "litgpt": sample_litgpt}, "float32")
    bound = roofline(ours, [len(p) for p in prompts], useful, NEW)
    print(f"bound        {bound:8,.0f} useful tokens/s")


def real(folder: str, precision: str) -> None:
    """precision: one of Fabric's."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    ours = load.load_model(folder, dtype=dtype)
    policy = fabric.setup_module(ours)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = Tokenizer(Path(folder))
    rng = np.random.default_rng(1)
    lengths = rng.integers(40, 71, REAL_ROWS)
    prompts = [rng.integers(1000, 40_000, n).astype("int32") for n in lengths]
    padded = torch.zeros(REAL_ROWS, max(lengths), dtype=torch.long)
    for row, p in zip(padded, prompts):
        row[-len(p) :] = torch.from_numpy(p.astype("int64"))
    is_token = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    args = Sampling(batch_size=REAL_ROWS, min_new_tokens=REAL_NEW)

    def sample_ours(seed):
        answers = generate.generate(fabric, policy, prompts, tokenizer, args, REAL_NEW, seed)
        return sum(map(len, answers))

    @torch.inference_mode()
    def sample_transformers(seed):
        torch.manual_seed(seed)
        ids = theirs.generate(
            padded, attention_mask=is_token.long(), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=REAL_NEW, min_new_tokens=REAL_NEW, pad_token_id=0,
        )  # fmt: skip
        return ids[:, max(lengths) :].numel()

    useful = compare({"ours": sample_ours, "transformers": sample_transformers}, precision, 2)
    bound = roofline(ours, [int(n) for n in lengths], useful, REAL_NEW - 1, dtype)
    print(f"bound        {bound:8,.0f} useful tokens/s")


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
