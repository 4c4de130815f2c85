"""Where a step's time and memory go, how much of the machine's rate it reaches, and how its cost grows.

    python benchmarks/step.py                       # everything, about half an hour on two cores
    python benchmarks/step.py where                 # or: share, tokens, completion, vocabulary, records
    python benchmarks/step.py where kto 30M 200/120 bf16

The loop is kto.py's own. Useful FLOPs are the least that the algorithm needs (runs/metrics.py counts them:
no padding, nothing twice, the head on completion tokens, attention scores left out); the GEMM rate is that of
products of 2048 x 2048 matrices, before and after. Each measurement of memory is a process of its own: the maximum
resident set, libraries included.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parent), str(HERE)]

import vs_trl  # noqa: E402
from vs_trl import OUT, SIZES, once  # noqa: E402

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def gemm(precision: str) -> float:
    """FLOP/s of a large product."""
    import torch

    a, b = (torch.randn(2048, 2048, dtype=getattr(torch, DTYPES[precision])) for _ in range(2))
    times = []
    for _ in range(12):
        began = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - began)
    return 2 * 2048**3 / statistics.median(times[2:])


def written(name: str, n: int, x: int, y: int, vocab: int) -> str:
    """A file of n ratings, prompts of x tokens, completions of y with their EOS."""
    rng, file = random.Random(1), OUT / f"{name}.jsonl"
    words = [f"w{i}" for i in range(1, vocab)]
    with file.open("w") as f:
        for i in range(n):
            p, c = " ".join(rng.choices(words, k=x)), " ".join(rng.choices(words, k=y - 1))
            f.write(json.dumps({"prompt": p, "completion": c, "label": bool(i % 2)}) + "\n")
    return str(file)


def measured(
    name: str,
    shape,
    n: int,
    x: int,
    y: int,
    batch: int,
    precision="fp32",
    positions=1024,
    **settings,
) -> dict:
    """An epoch of kto.py, its first step a warm-up, in a process of its own."""
    settings = {"batch_size": batch, "data.max_prompt": x, "data.max_completion": y, **settings}
    spec = {"kind": "kto", "precision": precision, "ours": settings}
    spec |= {
        "model": str(vs_trl.model_folder(name, shape, positions)),
        "records": written(name, n, x, y, shape[3]),
    }
    return once(
        sys.executable, "ours", spec | {"began": time.time()}
    )  # the files above are not part of its start


# ---- where ----------------------------------------------------------------------------------------------------------


OPS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn"),
    "attention": ("scaled_dot_product",),
    "softmax and its loss": ("softmax", "nll_loss", "cross_entropy"),
    "activations and norms": ("gelu", "silu", "layer_norm", "rms"),
    "copies, casts, zeros": ("copy_", "cat", "fill_", "index", "zero_"),
    "optimizer": ("Optimizer.step", "addcdiv", "lerp", "sqrt", "addcmul", "foreach", "vector_norm"),
}


def where(kind="kto", size="8M", profile="200/120", precision="fp32") -> None:
    """Phases by the wall and operations by self time, over three steps after one."""
    from importlib import import_module

    import torch
    from lightning.fabric import Fabric
    from torch.profiler import ProfilerActivity, record_function
    from torch.profiler import profile as profiler

    import model
    import train
    from data import Batch
    from reference import Reference
    from runs.logger import Logger

    program, rows = import_module(kind), vs_trl.records(kind, size, profile)
    file = OUT / "where.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows[: 4 * vs_trl.BATCH]))
    within: list[str] = []

    def named(owner, attribute, name):
        real = getattr(owner, attribute)

        def wrapped(*args, **kwargs):
            label = name if isinstance(name, str) else name()
            if (
                within and label != "head"
            ):  # the policy's forward inside the reference's is the reference's
                return real(*args, **kwargs)
            within.append(label)
            try:
                with record_function(f"phase {label}"):
                    return real(*args, **kwargs)
            finally:
                within.pop()

        setattr(owner, attribute, wrapped)

    def forward() -> str:
        return "forward" if torch.is_grad_enabled() else "no-gradient pass: policy"

    named(Batch, "pack", "packing")
    named(Reference, "__call__", "no-gradient pass: reference")
    named(model.GPT, "forward", forward)
    named(model.GPT, "logp", "head")
    named(Fabric, "backward", "backward")
    named(train, "clip_gradient", "clip")
    named(torch.optim.AdamW, "step", "optimizer")
    step, state = Logger.step, {}

    def noted(self, n, row):
        if n == 1:
            state["profiler"] = profiler(activities=[ProfilerActivity.CPU])
            state["profiler"].__enter__()
            state["began"] = time.perf_counter()
        if n == self.progress.total:
            state["wall"] = time.perf_counter() - state["began"]
            state["profiler"].__exit__(None, None, None)
            raise StopIteration
        step(self, n, row)

    Logger.step = noted
    spec = {
        "model": vs_trl.model_folder(size, SIZES[size]),
        "records": file,
        "precision": precision,
    }
    with tempfile.TemporaryDirectory() as out:
        try:
            program.main(vs_trl.arguments(spec | {"ours": vs_trl.limits(profile)}, out))
        except StopIteration:
            pass
    events, wall = state["profiler"].key_averages(), state["wall"]
    print(
        f"\n{kind} {size} {profile} {precision}, per step {wall / 3:.3f} s, {torch.get_num_threads()} threads\n"
    )
    print("| phase | share of the wall |\n| --- | --- |")
    phases = {e.key[6:]: e.cpu_time_total / 1e6 for e in events if e.key.startswith("phase ")}
    for name, seconds in sorted(phases.items(), key=lambda item: -item[1]):
        print(
            f"| {name}{' forward, within the above' if name == 'head' else ''} | {seconds / wall:.1%} |"
        )
    print(f"| the rest | {1 - sum(v for k, v in phases.items() if k != 'head') / wall:.1%} |")
    print("\n| operations | share of self time |\n| --- | --- |")
    total = sum(e.self_cpu_time_total for e in events)
    left = total
    for name, parts in OPS.items():
        own = sum(e.self_cpu_time_total for e in events if any(p in e.key for p in parts))
        left -= own
        print(f"| {name} | {own / total:.1%} |")
    print(f"| the rest | {left / total:.1%} |")


# ---- how much of the machine's rate ---------------------------------------------------------------------------------


def rate() -> None:
    """Useful FLOP/s of whole steps, unprofiled, over the GEMM rate."""
    print("\n| | useful TFLOP/s | GEMM TFLOP/s | ratio |\n| --- | --- | --- | --- |")
    for size in SIZES:
        for precision in DTYPES:
            shape, x, y = SIZES[size], 200, 120
            before, n = gemm(precision), 8 * (3 if size == "124M" else 8)
            one = measured(size, shape, n, x, y, 8, precision)
            peak, useful = (before + gemm(precision)) / 2, statistics.median(one["flops"][1:])
            print(
                f"| {size} {precision} | {useful:.3f} | {peak / 1e12:.3f} | {useful * 1e12 / peak:.2f} |",
                flush=True,
            )


# ---- sharing --------------------------------------------------------------------------------------------------------


def share() -> None:
    """A step's passes with prompts shared and without, in turns, against the ratio of their FLOPs."""
    import numpy as np
    import torch

    import model
    from data import pack

    print(
        "\n| pass | size | prompt/completion | speed-up | ceiling by FLOPs | reached |\n"
        + "| --- " * 6
        + "|"
    )
    rng = np.random.default_rng(1)
    for size, x, y in [("8M", 200, 120), ("8M", 400, 60), ("30M", 400, 60)]:
        gpt = model.load_model(vs_trl.model_folder(size, SIZES[size]))
        layers, width, _, vocab = SIZES[size]
        body, head = 12 * layers * width**2, width * vocab
        prompts = [rng.integers(1, vocab, x) for _ in range(8)]
        first, second = ([(rng.integers(1, vocab, y),) for _ in range(8)] for _ in range(2))
        one, two = pack(prompts, first), pack(prompts, second)
        both = pack(prompts, [a + b for a, b in zip(first, second)])

        def kto(shared: bool):
            kept = model.PromptCache() if shared else None
            logp = gpt(one, kept)
            with torch.no_grad():
                gpt(two, kept)
                [gpt(rows) for rows in ([both] if shared else [one, two])]
            logp.sum().backward()
            gpt.zero_grad()

        def dpo(shared: bool):
            rows = [both] if shared else [one, two]
            with torch.no_grad():
                [gpt(r) for r in rows]
            sum(gpt(r).sum() for r in rows).backward()
            gpt.zero_grad()

        heads = head * y
        flops = {
            kto: (body * (4 * x + 6 * y) + 6 * heads, body * (6 * x + 6 * y) + 6 * heads),
            dpo: (body * (4 * x + 8 * y) + 8 * heads, body * (8 * x + 8 * y) + 8 * heads),
        }
        for f, (on, off) in flops.items():
            times: dict[bool, list[float]] = {True: [], False: []}
            for shared in [True, False, *[True, False, False, True] * 4]:
                began = time.perf_counter()
                f(shared)
                times[shared].append(time.perf_counter() - began)
            ratio = statistics.median(times[False][1:]) / statistics.median(times[True][1:])
            print(
                f"| {f.__name__} | {size} | {x}/{y} | {ratio:.2f} | {off / on:.2f} | {ratio / (off / on):.0%} |",
                flush=True,
            )


# ---- growth ---------------------------------------------------------------------------------------------------------


def tokens() -> None:
    """4k to 64k tokens a step, in micro-batches of 4k and of 16k."""
    print(
        "\n| tokens a step | micro-batch | ms a thousand tokens | peak GiB |\n| --- | --- | --- | --- |"
    )
    for budget in (4096, 16384):
        for batch in (12, 25, 51, 102, 204):
            one = measured(
                "tokens", SIZES["8M"], 3 * batch, 200, 120, batch, micro_batch_tokens=budget
            )
            ms = one["seconds"] / 2 / (batch * 320) * 1e6
            print(
                f"| {batch * 320:,} | {budget:,} | {ms:.0f} | {one['peak_gib']:.2f} |", flush=True
            )


def completion() -> None:
    """16 to 2,048 tokens a completion, the same number of tokens a step."""
    print("\n| completion | batch | ms a thousand tokens | peak GiB |\n| --- | --- | --- | --- |")
    for y in (16, 64, 256, 1024, 2048):
        batch = max(2, 8192 // (64 + y))
        one = measured("completion", SIZES["8M"], 3 * batch, 64, y, batch, positions=4096)
        ms = one["seconds"] / 2 / (batch * (64 + y)) * 1e6
        print(f"| {y:,} | {batch} | {ms:.0f} | {one['peak_gib']:.2f} |", flush=True)


def vocabulary() -> None:
    """8k to 256k words: peak memory less weights, reference, gradients and optimizer state (5 times the parameters)."""
    print(
        "\n| vocabulary | ms a thousand tokens | peak GiB | beyond weights, reference, gradients, states |"
    )
    print("| --- " * 4 + "|")
    layers, width, heads, _ = SIZES["8M"]
    for vocab in (8192, 32768, 131072, 262144):
        one = measured(f"vocabulary-{vocab}", (layers, width, heads, vocab), 72, 200, 120, 24)
        own = 4 * 5 * (12 * layers * width**2 + width * (vocab + 1024)) / 2**30
        ms, peak = one["seconds"] / 2 / (24 * 320) * 1e6, one["peak_gib"]
        print(f"| {vocab:,} | {ms:.0f} | {peak:.2f} | {peak - own:.2f} |", flush=True)


def records() -> None:
    """1k to 1M ratings of 20 + 20 tokens: from the command to the end of the first step."""
    print("\n| records | seconds to the end of the first step | peak GiB |\n| --- | --- | --- |")
    for n in (1000, 10_000, 100_000, 1_000_000):
        one = measured("records", (1, 64, 1, 4096), n, 20, 20, 8, max_steps=2)
        print(f"| {n:,} | {one['first']:.1f} | {one['peak_gib']:.2f} |", flush=True)


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    sections = {
        f.__name__: f for f in (where, rate, share, tokens, completion, vocabulary, records)
    }
    name, *args = sys.argv[1:] or [None]
    if name:
        return sections[name](*args)
    for precision in DTYPES:
        where(precision=precision)
    for name in list(sections)[1:]:
        sections[name]()


if __name__ == "__main__":
    main()
