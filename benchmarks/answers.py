"""With 576 ratings, is it better to rate one answer to each of many prompts, or many answers to few?

    python examples/smollm2.py                  # the model, once
    python benchmarks/answers.py run            # what is missing, one run after the other: a night
    python benchmarks/answers.py run kto dpo --seeds 1 --shapes 1,8 --precision 32-true
    python benchmarks/answers.py table          # the table for RESULTS.md
    python benchmarks/answers.py picture        # benchmarks/answers.svg

SmolLM2-135M answers 576 prompts once, 288 twice, 144 four times or 72 eight times; the checker of
examples/instructions.py rates all of it. Each method then learns from these 576 ratings in 36 steps of 16
completions, and its model answers the same held-out prompts. Sampling, settings and the last check are those of
benchmarks/methods.py; its runs of offline KTO and DPO, 144 prompts with 4 answers, are not repeated here.

- kto, apo_zero_unpaired (z = 0): all 576 ratings, weighed so that right and wrong ones count alike;
- dpo: all pairs of a right and a wrong answer to one prompt. With one answer to a prompt there is none;
- sft: the right answers alone, again and again.

A finished run is a line in benchmarks/answers.jsonl and is not run again. On a CPU that does not multiply
bfloat16 give --precision 32-true.
"""

import argparse
import json
from itertools import product
from pathlib import Path

import methods

RESULTS = Path(__file__).resolve().parent / "answers.jsonl"
OUT = methods.OUT.parent / "answers"
RATINGS = 576
SHAPES = (1, 2, 4, 8)  # answers to a prompt
SFT = {
    "kto.preference_loss_weight": 0,
    "kto.sft_loss_weight": 1,
    "kto.loss": "apo_zero_unpaired",  # no mismatched pairs: nothing would read z
    "epochs": methods.STEPS,
    "max_steps": methods.STEPS,
}
LABELS = {
    "kto": "KTO",
    "apo_zero_unpaired": "KTO, z = 0",
    "dpo": "DPO",
    "sft": "SFT on the right ones",
}
METHODS = tuple(LABELS)


def finished() -> list[dict]:
    """Rows of this benchmark, and those of methods.py that are the shape 144x4."""
    rows = methods.read_records(RESULTS) if RESULTS.exists() else []
    for row in methods.read_records(methods.RESULTS):
        if row["method"] in METHODS and row["lr"] is None:
            rows.append(row | {"answers": 4})
    return rows


def run_missing(names: list[str], seeds: list[int], shapes: list[int], model: str) -> None:
    for seed, n, name in product(seeds, shapes, names):
        has_no_pair = name == "dpo" and n == 1
        known = [(r["method"], r["seed"], r["answers"]) for r in finished()]
        if has_no_pair or (name, seed, n) in known:
            continue
        print(f"{name}, seed {seed}, {n} answers to a prompt ...", flush=True)
        methods.PROMPTS = RATINGS // n
        methods.ANSWERS = n
        methods.OUT = OUT / str(n)
        row = {"answers": n, "precision": methods.COMMON["precision"]}
        row |= methods.run(name, seed, model, None)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


def print_table() -> None:
    """Shares over all seeds with their intervals."""
    from evaluation import wilson_interval

    print(f"| method | {' | '.join(f'{RATINGS // n} prompts x {n}' for n in SHAPES)} |")
    print(f"{'| --- ' * (1 + len(SHAPES))}|")
    for name in METHODS:
        cells = [name]
        for n in SHAPES:
            rows = [r for r in finished() if (r["method"], r["answers"]) == (name, n)]
            right, of = (sum(r["val"][i] for r in rows) for i in (0, 1))
            if not rows:
                cells.append("")
                continue
            low, high = wilson_interval(right, of)
            seeds = ", ".join(f"{100 * r['val'][0] / r['val'][1]:.1f}" for r in rows)
            cells.append(f"{seeds}; {100 * right / of:.1f}% ({100 * low:.0f} to {100 * high:.0f})")
        print(f"| {' | '.join(cells)} |")


def draw(file: Path) -> None:
    """Right held-out answers against the number of answers to a prompt: a line for each method, all seeds together with
    their 95% interval; small marks are the seeds."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    from evaluation import wilson_interval

    rcParams["svg.hashsalt"] = "answers"  # the same file each time
    figure = Figure(figsize=(9, 3.8), layout="constrained", facecolor="white")
    axes = figure.subplots()
    before = [r["val"] for r in methods.read_records(methods.RESULTS) if r["method"] == "base"]
    share = 100 * sum(right for right, _ in before) / sum(of for _, of in before)
    axes.axhline(share, color="0.5", linestyle=":", label="before training")
    for i, (name, label) in enumerate(LABELS.items()):
        at, shares = [], []
        for n in SHAPES:
            counts = [r["val"] for r in finished() if (r["method"], r["answers"]) == (name, n)]
            if not counts:
                continue
            x = SHAPES.index(n) + 0.08 * (i - 1.5)  # side by side
            right, of = (sum(column) for column in zip(*counts))
            low, high = wilson_interval(right, of)
            axes.vlines(x, 100 * low, 100 * high, f"C{i}")
            seeds = [100 * right / of for right, of in counts]
            axes.plot([x] * len(seeds), seeds, ".", color=f"C{i}", markersize=4)
            at.append(x)
            shares.append(100 * right / of)
        axes.plot(at, shares, "o-", color=f"C{i}", label=label)
    axes.set_xticks(range(len(SHAPES)), [f"{RATINGS // n}×{n}" for n in SHAPES])
    axes.set(xlabel="prompts × answers to a prompt", ylabel="right held-out answers, %")
    axes.set_ylim(0, 60)
    axes.grid(axis="y", color="0.9")
    axes.legend(loc="lower left", fontsize=8, ncols=3)
    figure.savefig(file, metadata={"Date": None})


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "table", "picture"])
    parser.add_argument("methods", nargs="*", help=f"of {', '.join(METHODS)}; default: all")
    parser.add_argument("--seeds", type=numbers, default=[1])
    parser.add_argument("--shapes", type=numbers, default=list(SHAPES), help="answers to a prompt")
    parser.add_argument("--model", default=str(methods.HERE.parent / "out" / "smollm2-135m"))
    parser.add_argument("--precision", default=methods.COMMON["precision"])
    args = parser.parse_args()
    if args.what == "picture":
        return draw(RESULTS.with_suffix(".svg"))
    if args.what == "run":
        methods.COMMON["precision"] = args.precision
        methods.METHODS["sft"] = ("", "kto", "right", SFT)
        run_missing(args.methods or list(METHODS), args.seeds, args.shapes, args.model)
    print_table()


if __name__ == "__main__":
    main()
