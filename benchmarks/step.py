"""How a step's time and memory grow: kto.py on models of random weights, each measurement a process of its own.

    python benchmarks/step.py                # both tables, ten minutes on two cores
    python benchmarks/step.py records        # one: tokens or records

Peak memory is the maximum resident set of the process, libraries included.
"""

import random
import resource
import statistics
import sys

from vs_trl import HERE, SIZES, model_folder, ours, write_records


def run_steps(name: str, shape, n: int, x: int, y: int, **settings) -> list[dict]:
    """kto.py for an epoch of n ratings of random words, prompts of x tokens and completions of y with
    their EOS. -> its rows of metrics.csv"""
    rng = random.Random(1)
    words = [f"w{i}" for i in range(1, shape[3])]
    records = [
        {
            "prompt": " ".join(rng.choices(words, k=x)),
            "completion": " ".join(rng.choices(words, k=y - 1)),
            "label": bool(i % 2),
        }
        for i in range(n)
    ]
    data = {"data.train": write_records(name, records), "data.max_prompt": x}
    data |= {"data.max_completion": y, "model": model_folder(name, shape)}
    return ours(HERE.parent, "kto", data | settings)


def growth(name: str, shape, x: int, y: int, batch: int, **settings) -> str:
    """Cells of a table, of two steps after one of warm-up."""
    rows = run_steps(name, shape, 3 * batch, x, y, batch_size=batch, **settings)
    tokens_per_s = statistics.mean(row["tokens/s"] for row in rows[1:])
    return f"{1e6 / tokens_per_s:.0f} | {rows[-1]['memory_gb'] * 1e9 / 2**30:.2f}"


def tokens() -> None:
    print_head("tokens a step", "tokens of a micro-batch", "ms a thousand tokens", "peak GiB")
    for budget in (4096, 16384):
        for batch in (12, 25, 51, 102, 204):
            cells = growth("tokens", SIZES["8M"], 200, 120, batch, micro_batch_tokens=budget)
            print(f"| {batch * 320:,} | {budget:,} | {cells} |", flush=True)


def records() -> None:
    """Whole processes, from the command through one step to the exported model."""
    print_head("records of 20 + 20 tokens", "CPU seconds", "peak GiB")
    for n in (1000, 10_000, 100_000, 1_000_000):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        rows = run_steps("records", (1, 64, 1, 4096), n, 20, 20, max_steps=1)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"| {n:,} | {seconds:.1f} | {rows[-1]['memory_gb'] * 1e9 / 2**30:.2f} |", flush=True)


def print_head(*columns: str) -> None:
    print(f"\n| {' | '.join(columns)} |\n" + "| --- " * len(columns) + "|", flush=True)


TABLES = {f.__name__: f for f in (tokens, records)}

if __name__ == "__main__":
    for table in sys.argv[1:] or TABLES:
        TABLES[table]()
