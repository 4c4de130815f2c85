"""How the time and memory of a run grow with its records: kto.py with one step of a tiny model.

    python benchmarks/step.py                # ten minutes on two cores

Each row is a process, from the command through one step to the exported model. Peak memory is the maximum resident set
of the process, libraries included.
"""

import resource

from vs_trl import HERE, make_records, model_folder, ours, print_cells, print_head, write_records

SHAPE = (1, 64, 1, 4096)  # layers, width, heads, vocabulary
TOKENS = 20  # of a prompt, and of a completion with its EOS


def measure(n: int) -> tuple[float, float]:
    """A run on n ratings of random words. -> its CPU seconds and its peak memory in GiB"""
    records = make_records("kto", n, SHAPE[3], TOKENS, TOKENS - 1, spread=0)
    settings = {
        "model": model_folder("records", SHAPE),
        "data.train": write_records("records", records),
        "data.max_prompt": TOKENS,
        "data.max_completion": TOKENS,
        "max_steps": 1,
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    (row,) = ours(HERE.parent, "kto", settings)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, row["memory_gb"] * 1e9 / 2**30


if __name__ == "__main__":
    print_head("records of 20 + 20 tokens", "CPU seconds", "peak GiB")
    for n in (1000, 10_000, 100_000, 1_000_000):
        seconds, peak = measure(n)
        print_cells(f"{n:,}", f"{seconds:.1f}", f"{peak:.2f}")
