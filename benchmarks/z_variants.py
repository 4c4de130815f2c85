"""Does z matter? KTO with z as we have it, as other libraries have it, and without it.

    python benchmarks/z_variants.py demo                  # every variant on the demo, seeds 1 to 5: an hour and a half
    python benchmarks/z_variants.py kto trl4 --seed 3     # one run: program, variant, and the program's settings
    python benchmarks/z_variants.py online nemo4 --config config/<file>.yaml
    python benchmarks/z_variants.py table                 # the table of what z_variants.jsonl has

`demo` appends a line to benchmarks/z_variants.jsonl for each finished run, and skips the runs that it has.

What the other libraries do is in docs/beside.md. Here it is computed from the log-ratios of all pairs of the step, so
it needs neither their micro-batches nor their ranks. A variant is a subclass of Trainer:

- its `fit` may give each example a second completion, mismatched as TRL does it: the previous one of a block of
  consecutive examples;
- its `micro_batch_loss` gives each example the z of its own group in place of the step's;
- its `log` adds how far these are from the step's z: z/bias, their mean difference, and z/rmse.
"""

import csv
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import kto  # noqa: E402
import online  # noqa: E402
from runs.console import run_cli  # noqa: E402
from train import Trainer  # noqa: E402

RESULTS = HERE / "z_variants.jsonl"
SEEDS = [1, 2, 3, 4, 5]


class VariantTrainer(Trainer):
    """z of an example from the pairs of its group: `group` consecutive examples of the step, a
    micro-batch over all ranks. rank: the examples of one rank among them, whose mean is clamped before
    it is averaged."""

    group: int | None = None  # None: the whole step
    rank: int | None = None  # None: one rank
    neighbours: int | None = None  # pairs as TRL makes them, in blocks of so many examples
    by_prompt = (
        False  # with --data.shuffle false: prompts in a seeded order, each with all its ratings
    )

    def fit(self, examples=None, plan=None):
        examples = self.run.examples["train"] if examples is None else examples
        if self.by_prompt:
            examples = shuffled_prompts(examples, self.run.cfg.seed)
        if self.neighbours:
            examples = with_neighbours(list(examples), self.neighbours)
        return super().fit(examples, plan)

    def micro_batch_loss(self, batch, micro, packed, scores, before, columns):
        objective, logps = self.run.objective, scores.logps
        if not logps.requires_grad:  # validation keeps one z for the whole split
            return super().micro_batch_loss(batch, micro, packed, scores, before, columns)
        r_G = before.kl.logratio
        if self.neighbours:
            r_BK = objective.logratio(logps.detach(), before.ref_logps[packed.index_B], 1)
            r_G = torch.zeros(len(r_BK), dtype=r_BK.dtype)
            r_G[packed.index_B] = r_BK[:, 1]
        assert len(r_G) == len(batch.examples), "each example has a pair, the step one micro-batch"
        z_G = z_by_groups(r_G, self.group, self.rank).to(logps.dtype)
        columns["z"] = z_G.double()
        before = before._replace(kl=before.kl._replace(z=z_G))
        return super().micro_batch_loss(batch, micro, packed, scores, before, columns)

    def log(self, batch, columns, kl, row, plan, began):
        error_G = columns.pop("z") - kl.z  # the row has z/bias and z/rmse in its place
        row |= {"z/bias": error_G.mean().item(), "z/rmse": error_G.square().mean().sqrt().item()}
        super().log(batch, columns, kl, row, plan, began)


def shuffled_prompts(examples, seed: int) -> list:
    """The prompts in a random order; the examples of one prompt stay side by side."""
    of_prompt: dict[bytes, list] = {}
    for example in examples:
        of_prompt.setdefault(example.prompt.tobytes(), []).append(example)
    groups = list(of_prompt.values())
    random.Random(seed).shuffle(groups)
    return [example for group in groups for example in group]


def with_neighbours(examples, size: int) -> list:
    """Examples with a second completion: the one of the example before it in its block of `size`; the
    first of a block takes the last one's."""
    paired = []
    for start in range(0, len(examples), size):
        block = examples[start : start + size]
        mismatched = block[-1:] + block[:-1]
        paired += [
            e._replace(completions=(*e.completions, b.completions[0]))
            for e, b in zip(block, mismatched)
        ]
    return paired


def z_by_groups(r_G, group: int | None, rank: int | None):
    """z (G,) of each example. A last group that is smaller is a group too."""
    z_G = torch.empty_like(r_G)
    for z_g, r_g in zip(z_G.split(group or len(r_G)), r_G.split(group or len(r_G))):
        means = [r.mean().clamp(min=0) for r in r_g.split(rank or len(r_g))]
        z_g[:] = torch.stack(means).mean()
    return z_G


def variant(**attributes):
    """A subclass of VariantTrainer."""
    return type("Variant", (VariantTrainer,), attributes)


# name -> what it is, a Trainer, more settings
NOT_SHUFFLED = ["--data.shuffle", "false"]
VARIANTS = {
    "ours": ("one z per step", variant(), []),
    "zero": ("z = 0 (apo_zero_unpaired)", Trainer, ["--kto.loss", "apo_zero_unpaired"]),
    "trl16": ("TRL: a z per micro-batch of 16", variant(group=16), []),
    "trl4": ("TRL: a z per micro-batch of 4", variant(group=4), []),
    "nemo16": ("NeMo: ranks of 16, each clamped, then averaged", variant(rank=16), []),
    "nemo4": ("NeMo: ranks of 4, each clamped, then averaged", variant(rank=4), []),
    "pairs": ("one z per step, TRL's pairs in blocks of 4 of the file", variant(neighbours=4), []),
    "ours-by-prompt": (
        "one z per step, ratings of a prompt side by side",
        variant(by_prompt=True),
        NOT_SHUFFLED,
    ),
    "trl-by-prompt": (
        "TRL: its pairs and z, micro-batches of 4, ratings of a prompt side by side",
        variant(by_prompt=True, group=4, neighbours=4),
        NOT_SHUFFLED,
    ),
}


def run_variant(program: str, name: str, argv: list[str], checker=None) -> None:
    """The program's main with the Trainer of a variant."""
    module = {"kto": kto, "online": online}[program]
    _, trainer, settings = VARIANTS[name]
    module.main(settings + argv, checker=checker, trainer=trainer)


# ---- the demo ------------------------------------------------------------------------------------


def finished() -> list[dict]:
    """The lines of the results' file."""
    return [json.loads(x) for x in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def demo() -> None:
    """Run what the results' file does not have, seed by seed."""
    for seed in SEEDS:
        for name in VARIANTS:
            if not any((x["variant"], x["seed"]) == (name, seed) for x in finished()):
                line = json.dumps(demo_run(name, seed))
                with RESULTS.open("a") as f:
                    f.write(line + "\n")
                print(line, flush=True)


def demo_run(name: str, seed: int) -> dict:
    """One run of the demo in a process. -> its line of results"""
    with tempfile.TemporaryDirectory() as out:
        argv = ["--seed", f"{seed}", "--out_dir", f"{out}/run", "--progress", "false"]
        command = [sys.executable, __file__, "kto", name, *argv]
        began = time.time()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.time() - began
        run = Path(out) / "run"
        after = json.loads((run / "eval" / "after.json").read_text())
        with (run / "metrics.csv").open() as f:
            rows = list(csv.DictReader(f))
        with (run / "val.csv").open() as f:
            val = list(csv.DictReader(f))[-1]

    def column(key):
        return [float(row[key]) for row in rows if row.get(key)]

    z, bias, rmse = column("kl"), column("z/bias"), column("z/rmse")
    squares = [x * x for x in rmse]
    return {
        "variant": name,
        "seed": seed,
        "right": after["right"],
        "of": after["of"],
        "val_auc": float(val["auc"]),
        "z_mean": statistics.mean(z) if z else None,
        "bias": statistics.mean(bias) if bias else None,
        "rmse": statistics.mean(squares) ** 0.5 if squares else None,
        "seconds": round(seconds, 1),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def print_table() -> None:
    """Medians over seeds, and their ranges."""
    print("| z and its pairs | seeds | accuracy after | range | the step's z | bias | rmse |")
    print("| --- " * 7 + "|")
    for name, (text, _, _) in VARIANTS.items():
        lines = [x for x in finished() if x["variant"] == name]
        if not lines:
            continue
        accuracy = [100 * x["right"] / x["of"] for x in lines]
        cells = [text, f"{len(lines)}", f"{statistics.median(accuracy):.1f}%"]
        cells.append(f"{min(accuracy):.1f} to {max(accuracy):.1f}")
        for key in ("z_mean", "bias", "rmse"):
            values = [x[key] for x in lines if x[key] is not None]
            cells.append(f"{statistics.median(values):.2f}" if values else "")
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    what, *argv = sys.argv[1:] or ["demo"]
    if what == "demo":
        demo()
    if what in ("demo", "table"):
        print_table()
    elif argv:
        run_variant(what, argv[0], argv[1:])


if __name__ == "__main__":
    run_cli(main)
