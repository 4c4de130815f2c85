"""Where a step's time and memory go, how much of the machine's rate it reaches, and how its cost grows.

    python benchmarks/step.py                                # everything, about half an hour on two cores
    python benchmarks/step.py where                          # one section: where, rate, share, tokens, completion,
                                                             #   vocabulary or records
    python benchmarks/step.py where kto 30M 200/120 bf16     # where: program, size, lengths and precision

The loop is kto.py's own. Useful FLOPs are the least that the algorithm needs: no padding, nothing twice, the head on
completion tokens only, attention scores left out (runs/metrics.py counts them). The GEMM rate is that of a product of
two 2048 x 2048 matrices, measured before and after. Each measurement of memory runs in its own process: it is the
maximum resident set, libraries included.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parent), str(HERE)]

import vs_trl  # noqa: E402
from vs_trl import OUT, SIZES, once  # noqa: E402

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def table_head(columns: str) -> str:
    """The first two lines of a table with these columns, given as `| a | b |`."""
    return f"\n{columns}\n" + "| --- " * (columns.count("|") - 1) + "|"


def gemm(precision: str) -> float:
    """FLOP/s of a large product."""
    import torch

    dtype = getattr(torch, DTYPES[precision])
    a = torch.randn(2048, 2048, dtype=dtype)
    b = torch.randn(2048, 2048, dtype=dtype)
    times = []
    for _ in range(12):
        began = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - began)
    return 2 * 2048**3 / statistics.median(times[2:])


def write_ratings(name: str, n: int, x: int, y: int, vocab: int) -> str:
    """Write a file of n ratings: prompts of x tokens, completions of y tokens with their EOS. -> its path"""
    rng = random.Random(1)
    file = OUT / f"{name}.jsonl"
    words = [f"w{i}" for i in range(1, vocab)]
    with file.open("w") as f:
        for i in range(n):
            prompt = " ".join(rng.choices(words, k=x))
            completion = " ".join(rng.choices(words, k=y - 1))
            record = {"prompt": prompt, "completion": completion, "label": bool(i % 2)}
            f.write(json.dumps(record) + "\n")
    return str(file)


def run_epoch(
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
    """Run an epoch of kto.py in a process of its own, on n ratings (see write_ratings). The first step is a warm-up.
    -> what the process reports (see vs_trl.report)"""
    limits = {"batch_size": batch, "data.max_prompt": x, "data.max_completion": y}
    spec = {
        "kind": "kto",
        "precision": precision,
        "ours": limits | settings,
        "model": str(vs_trl.model_folder(name, shape, positions)),
        "records": write_ratings(name, n, x, y, shape[3]),
    }
    spec["began"] = time.time()  # only now: making these files is not part of the program's start
    return once(sys.executable, "ours", spec)


# ---- where ----------------------------------------------------------------------------------------------------------


OPS = {  # a row of the table -> parts of the names of torch's operations
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn"),
    "attention": ("scaled_dot_product",),
    "softmax and its loss": ("softmax", "nll_loss", "cross_entropy"),
    "activations and norms": ("gelu", "silu", "layer_norm", "rms"),
    "copies, casts, zeros": ("copy_", "cat", "fill_", "index", "zero_"),
    "optimizer": ("Optimizer.step", "addcdiv", "lerp", "sqrt", "addcmul", "foreach", "vector_norm"),
}


def where(kind="kto", size="8M", profile="200/120", precision="fp32") -> None:
    """Print each phase's share of the wall time and each kind of operation's share of self time, over three steps
    after one step of warm-up."""
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

    program = import_module(kind)
    records_of_4_steps = vs_trl.records(kind, size, profile)[: 4 * vs_trl.BATCH]
    file = OUT / "where.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in records_of_4_steps))
    open_phases: list[str] = []

    def record_phase(owner, attribute, name):
        """Record calls of a function as a phase with this name, or with the name that name() returns."""
        real = getattr(owner, attribute)

        def wrapped(*args, **kwargs):
            # the next batch is packed in another thread: that is not a part of this step
            if threading.current_thread() is not threading.main_thread():
                return real(*args, **kwargs)
            label = name if isinstance(name, str) else name()
            # the policy's forward inside of the reference counts as the reference's
            if open_phases and label != "head":
                return real(*args, **kwargs)
            open_phases.append(label)
            try:
                with record_function(f"phase {label}"):
                    return real(*args, **kwargs)
            finally:
                open_phases.pop()

        setattr(owner, attribute, wrapped)

    def forward_name() -> str:
        return "forward" if torch.is_grad_enabled() else "no-gradient pass: policy"

    record_phase(Batch, "pack", "packing")
    record_phase(Reference, "__call__", "no-gradient pass: reference")
    record_phase(model.GPT, "forward", forward_name)
    record_phase(model, "_logp", "head")
    record_phase(Fabric, "backward", "backward")
    record_phase(train, "clip_gradient", "clip")
    record_phase(torch.optim.AdamW, "step", "optimizer")
    real_step, state = Logger.step, {}

    def step_and_profile(self, step, row, seconds):
        """Start the profiler after the first step; after the last one stop it and leave the program."""
        if step == 1:
            state["profiler"] = profiler(activities=[ProfilerActivity.CPU])
            state["profiler"].__enter__()
            state["began"] = time.perf_counter()
        if step == self.bar.total:
            state["wall"] = time.perf_counter() - state["began"]
            state["profiler"].__exit__(None, None, None)
            raise StopIteration
        real_step(self, step, row, seconds)

    Logger.step = step_and_profile
    spec = {
        "model": vs_trl.model_folder(size, SIZES[size]),
        "records": file,
        "precision": precision,
        "ours": vs_trl.limits(profile),
    }
    with tempfile.TemporaryDirectory() as out:
        try:
            program.main(vs_trl.arguments(spec, out))
        except StopIteration:
            pass
    events = state["profiler"].key_averages()
    wall = state["wall"]
    threads = torch.get_num_threads()
    print(f"\n{kind} {size} {profile} {precision}, per step {wall / 3:.3f} s, {threads} threads")
    print_phases(events, wall)
    print_operations(events)


def print_phases(events, wall: float) -> None:
    """The table of phases; events: the profiler's, wall: seconds of all profiled steps."""
    print(table_head("| phase | share of the wall |"))
    phases = {e.key[6:]: e.cpu_time_total / 1e6 for e in events if e.key.startswith("phase ")}
    for name, seconds in sorted(phases.items(), key=lambda item: -item[1]):
        # the head runs inside of the forward phases
        note = " forward, within the above" if name == "head" else ""
        print(f"| {name}{note} | {seconds / wall:.1%} |")
    counted = sum(seconds for name, seconds in phases.items() if name != "head")
    print(f"| the rest | {1 - counted / wall:.1%} |")


def print_operations(events) -> None:
    """The table of operations; events: the profiler's."""
    print(table_head("| operations | share of self time |"))
    total = sum(e.self_cpu_time_total for e in events)
    rest = total
    for name, parts in OPS.items():
        matching = [e for e in events if any(part in e.key for part in parts)]
        self_time = sum(e.self_cpu_time_total for e in matching)
        rest -= self_time
        print(f"| {name} | {self_time / total:.1%} |")
    print(f"| the rest | {rest / total:.1%} |")


# ---- how much of the machine's rate ---------------------------------------------------------------------------------


def rate() -> None:
    """Useful FLOP/s of whole steps, without a profiler, over the GEMM rate."""
    print(table_head("| | useful TFLOP/s | GEMM TFLOP/s | ratio |"))
    for size, shape in SIZES.items():
        for precision in DTYPES:
            steps = 3 if size == "124M" else 8
            before = gemm(precision)
            result = run_epoch(size, shape, 8 * steps, 200, 120, 8, precision)
            peak = (before + gemm(precision)) / 2
            useful = statistics.median(result["flops"][1:])
            ratio = useful * 1e12 / peak
            cells = f"{size} {precision} | {useful:.3f} | {peak / 1e12:.3f} | {ratio:.2f}"
            print(f"| {cells} |", flush=True)


# ---- sharing --------------------------------------------------------------------------------------------------------


def share() -> None:
    """The passes of a step with shared prompts and without, in turns, beside the ratio of their FLOPs."""
    import numpy as np
    import torch

    import load
    from attention import PromptCache
    from packing import pack

    columns = "| pass | size | prompt/completion | speed-up | ceiling by FLOPs | reached |"
    print(table_head(columns))
    rng = np.random.default_rng(1)
    for size, x, y in [("8M", 200, 120), ("8M", 400, 60), ("30M", 400, 60)]:
        gpt = load.load_model(vs_trl.model_folder(size, SIZES[size]))
        layers, width, _, vocab = SIZES[size]
        prompts = [rng.integers(1, vocab, x) for _ in range(8)]
        first = [(rng.integers(1, vocab, y),) for _ in range(8)]
        second = [(rng.integers(1, vocab, y),) for _ in range(8)]
        pack_1, pack_2 = pack(prompts, first), pack(prompts, second)
        pack_both = pack(prompts, [a + b for a, b in zip(first, second)])

        def kto(shared: bool):
            cache = PromptCache() if shared else None
            logp = gpt(pack_1, cache).logps
            with torch.no_grad():
                gpt(pack_2, cache)
                for batch in [pack_both] if shared else [pack_1, pack_2]:  # the reference
                    gpt(batch)
            logp.sum().backward()
            gpt.zero_grad()

        def dpo(shared: bool):
            batches = [pack_both] if shared else [pack_1, pack_2]
            with torch.no_grad():
                for batch in batches:  # the reference
                    gpt(batch)
            sum(gpt(batch).logps.sum() for batch in batches).backward()
            gpt.zero_grad()

        # multiply-adds: of the body for a token, of the head for the y tokens of a completion
        body, head = 12 * layers * width**2, width * vocab * y
        flops = {  # shared, not shared
            kto: (body * (4 * x + 6 * y) + 6 * head, body * (6 * x + 6 * y) + 6 * head),
            dpo: (body * (4 * x + 8 * y) + 8 * head, body * (8 * x + 8 * y) + 8 * head),
        }
        for passes, (flops_shared, flops_alone) in flops.items():
            times: dict[bool, list[float]] = {True: [], False: []}
            for shared in [True, False, *[True, False, False, True] * 4]:
                began = time.perf_counter()
                passes(shared)
                times[shared].append(time.perf_counter() - began)
            speed_up = statistics.median(times[False][1:]) / statistics.median(times[True][1:])
            ceiling = flops_alone / flops_shared
            name = f"{passes.__name__} | {size} | {x}/{y}"
            cells = f"{name} | {speed_up:.2f} | {ceiling:.2f} | {speed_up / ceiling:.0%}"
            print(f"| {cells} |", flush=True)


# ---- growth ---------------------------------------------------------------------------------------------------------


def ms_per_thousand_tokens(result: dict, tokens_per_step: int) -> float:
    """Of the two steps that run_epoch timed."""
    return result["seconds"] / 2 / tokens_per_step * 1e6


def tokens() -> None:
    """4k to 64k tokens a step, in micro-batches of 4k and of 16k."""
    print(table_head("| tokens a step | micro-batch | ms a thousand tokens | peak GiB |"))
    for budget in (4096, 16384):
        for batch in (12, 25, 51, 102, 204):
            result = run_epoch(
                "tokens", SIZES["8M"], 3 * batch, 200, 120, batch, micro_batch_tokens=budget
            )
            ms = ms_per_thousand_tokens(result, batch * 320)
            cells = f"{batch * 320:,} | {budget:,} | {ms:.0f} | {result['peak_gib']:.2f}"
            print(f"| {cells} |", flush=True)


def completion() -> None:
    """16 to 2,048 tokens a completion, with about the same number of tokens a step."""
    print(table_head("| completion | batch | ms a thousand tokens | peak GiB |"))
    for y in (16, 64, 256, 1024, 2048):
        batch = max(2, 8192 // (64 + y))
        result = run_epoch("completion", SIZES["8M"], 3 * batch, 64, y, batch, positions=4096)
        ms = ms_per_thousand_tokens(result, batch * (64 + y))
        print(f"| {y:,} | {batch} | {ms:.0f} | {result['peak_gib']:.2f} |", flush=True)


def vocabulary() -> None:
    """8k to 256k words: peak memory less weights, reference, gradients and optimizer state (5 times the parameters)."""
    beyond = "beyond weights, reference, gradients, states"
    print(table_head(f"| vocabulary | ms a thousand tokens | peak GiB | {beyond} |"))
    layers, width, heads, _ = SIZES["8M"]
    for vocab in (8192, 32768, 131072, 262144):
        result = run_epoch(f"vocabulary-{vocab}", (layers, width, heads, vocab), 72, 200, 120, 24)
        parameters = 12 * layers * width**2 + width * (vocab + 1024)
        states = 4 * 5 * parameters / 2**30
        ms = ms_per_thousand_tokens(result, 24 * 320)
        peak = result["peak_gib"]
        print(f"| {vocab:,} | {ms:.0f} | {peak:.2f} | {peak - states:.2f} |", flush=True)


def records() -> None:
    """1k to 1M ratings of 20 + 20 tokens: from the command to the end of the first step."""
    print(table_head("| records | seconds to the end of the first step | peak GiB |"))
    for n in (1000, 10_000, 100_000, 1_000_000):
        result = run_epoch("records", (1, 64, 1, 4096), n, 20, 20, 8, max_steps=2)
        print(f"| {n:,} | {result['first']:.1f} | {result['peak_gib']:.2f} |", flush=True)


SECTIONS = {f.__name__: f for f in (where, rate, share, tokens, completion, vocabulary, records)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", nargs="?", choices=SECTIONS, help="default: all of them")
    parser.add_argument("arguments", nargs="*", help="of where: program, size, lengths, precision")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if args.section:
        SECTIONS[args.section](*args.arguments)
        return
    for precision in DTYPES:
        where(precision=precision)
    for name, section in SECTIONS.items():
        if name != "where":
            section()


if __name__ == "__main__":
    main()
