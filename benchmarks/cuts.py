"""The same run, cut five ways, by TRL and by us: does it matter how a step is split into micro-batches?

    python benchmarks/cuts.py        # the table; missing runs run first, one after the other

A step of 64 examples is cut as 64x1, 16x4, 8x8, 4x16 or 2x32: micro-batch size x micro-batches per step (TRL:
per_device_train_batch_size x gradient_accumulation_steps). TRL computes z, the KL baseline, per micro-batch, from
mismatched pairs inside the micro-batch. Ours is computed once for the whole step.

Both sides have the same start, records, order, steps, learning rates, AdamW, clipping and precision (32-true). The
seed sets the order of the records; nothing else in training is random. `shuffled` shuffles all ratings. `file` keeps
the ratings of one prompt together, as the demo's file does. TRL's mismatched pairs take the previous completion, ours
take the next one. Therefore TRL gets the records of each step in reverse order, and the two sides' uncut, shuffled
runs are the same run.

The sides are `ours`, `trl`, and the control `trl-zero`: TRL without z (apo_zero_unpaired). If the cuts of `trl-zero`
agree, z is all that a cut changes.

A finished run is a row of benchmarks/cuts.jsonl and is not run again. Other files are in out/cuts/. A missing run needs
the files of the uncut runs of its side and of ours. A row has:

- right: held-out answers that the demo's checker accepts, sampled by generate.py with one seed, and their number;
- distance: |w - w of the uncut run| / |w of the uncut run - start|, over all weights.

Older rows have more fields and other draws. At a59be7f cuts.svg was drawn by `cuts.py picture`.
"""

import random
import shutil
import sys
from itertools import product
from pathlib import Path

import vs_trl

ROOT = vs_trl.HERE.parent
RESULTS = vs_trl.HERE / "cuts.jsonl"
OUT = ROOT / "out" / "cuts"
SIDES = {"ours": (1, 2, 3), "trl": (1, 2, 3), "trl-zero": (1,)}  # and their seeds
MODEL = ROOT / "demo" / "base"
MIXED = OUT / "mixed"  # ratings with another author's answers: without them z is 0
RECORDS = MIXED / "train.jsonl"
HELD_OUT = MIXED / "val.jsonl"
ORDERS = ("shuffled", "file")
CUTS = (64, 16, 8, 4, 2)
LONGEST = 32  # tokens of a prompt and of a completion
SETTINGS = {
    "batch_size": 64,
    "epochs": 2,
    "optim.lr": 7e-4,
    "optim.warmup": 10,
    "optim.schedule": "cosine",
    "kto.beta": 0.5,
}


def ordered(records: list[dict], order: str, seed: int, batch: int) -> list[dict]:
    """The records in the order of a seed, whole batches of them. `file`: those of one prompt side by side."""
    groups = {}
    for i, record in enumerate(records):
        key = record["prompt"] if order == "file" else i
        groups.setdefault(key, []).append(record)
    shuffled = list(groups.values())
    random.Random(seed).shuffle(shuffled)
    rows = [record for group in shuffled for record in group]
    return rows[: len(rows) // batch * batch]


def folder_of(side: str, order: str, seed: int, cut: int) -> Path:
    return OUT / f"{side}-{order}-{seed}-{cut}"


def train_trl(side: str, records: str, order: str, cut: int, seed: int, out: Path) -> None:
    """The trained model is left in out/final. The learning rates are those of our uncut run."""
    batch = SETTINGS["batch_size"]
    our_rows = vs_trl.read_csv(folder_of("ours", order, seed, CUTS[0]) / "metrics.csv")
    settings = {
        "seed": seed,
        "beta": SETTINGS["kto.beta"],
        "loss_type": "kto" if side == "trl" else "apo_zero_unpaired",
        "num_train_epochs": SETTINGS["epochs"],
        "per_device_train_batch_size": cut,
        "gradient_accumulation_steps": batch // cut,
        "max_length": 2 * LONGEST,
    }
    spec = {
        "side": "best",
        "kind": "kto",
        "precision": "fp32",
        "records": records,
        "model": str(MODEL),
        "batch": batch,
        "settings": settings,
        "lr": [row["lr"] for row in our_rows],
        "final": str(out / "final"),
    }
    vs_trl.run_trl(spec)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, out / "final")


def right_answers(model: Path) -> list[int]:
    """[right, all] sampled answers of a model to the held-out prompts."""
    from demo.check import is_sorted

    answers = model.parent / "answers.jsonl"
    options = f"--model {model} --prompts {HELD_OUT} --out {answers} --max_new_tokens {LONGEST}"
    vs_trl.run_process([sys.executable, str(ROOT / "generate.py"), *options.split()])
    rows = vs_trl.read_lines(answers)
    return [sum(is_sorted(row["prompt"], row["completion"]) for row in rows), len(rows)]


def distance(a: Path, b: Path) -> float:
    """|a - b| over all weights of two models."""
    from safetensors.torch import load_file

    a, b = (load_file(folder / "model.safetensors") for folder in (a, b))
    return sum((a[name] - b[name]).double().square().sum().item() for name in a) ** 0.5


def run(side: str, order: str, seed: int, cut: int) -> dict:
    """Train and check one run. -> its results"""
    out = folder_of(side, order, seed, cut)
    shutil.rmtree(out, ignore_errors=True)  # left by a run that was stopped
    out.mkdir(parents=True)
    if not RECORDS.exists():
        from demo import make

        make.make(make.SORT, MIXED, others=0.6, base=MODEL)
    rows = ordered(vs_trl.read_lines(RECORDS), order, seed, SETTINGS["batch_size"])
    records = vs_trl.write_records(f"cuts-{order}-{seed}", rows)
    if side == "ours":
        settings = {
            "model": MODEL,
            "data.train": records,
            "data.val": "null",
            "data.max_prompt": LONGEST,
            "data.max_completion": LONGEST,
            "micro_batch_size": cut,
            "seed": seed,
            "out_dir": out,
        }
        vs_trl.ours(ROOT, "kto", SETTINGS | settings)
    else:
        train_trl(side, records, order, cut, seed, out)
    uncut = folder_of(side, order, seed, CUTS[0]) / "final"
    off = distance(out / "final", uncut) / distance(uncut, MODEL)
    return {"right": right_answers(out / "final"), "distance": off}


def main() -> None:
    vs_trl.print_head("side", "seed", "order", "micro-batch size", "right, %", "distance")
    for side, seeds in SIDES.items():
        for seed, order, cut in product(seeds, ORDERS, CUTS):
            row = vs_trl.run_once(RESULTS, run, side=side, order=order, seed=seed, cut=cut)
            right, n = row["right"]
            cells = f"{100 * right / n:.1f}", f"{row['distance']:.2g}"
            vs_trl.print_cells(side, seed, order, cut, *cells)


if __name__ == "__main__":
    main()
