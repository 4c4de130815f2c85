"""The same run, cut five ways, by TRL and by us: does it matter how a step is split into micro-batches?

    python benchmarks/cuts.py run                       # the missing runs, one after the other
    python benchmarks/cuts.py run --sides trl --seeds 1 --orders file
    python benchmarks/cuts.py table                     # the table for RESULTS.md
    python benchmarks/cuts.py picture                   # benchmarks/cuts.svg

A step of 64 examples is cut as 64x1, 16x4, 8x8, 4x16 or 2x32: micro-batch size x micro-batches per step
(TRL: per_device_train_batch_size x gradient_accumulation_steps). TRL computes z, the KL baseline, per
micro-batch, from mismatched pairs inside the micro-batch. Ours is computed once for the whole step.

Both sides have the same start, records, order, steps, learning rates, AdamW, clipping and precision
(32-true). The seed sets the order of the records; nothing else in training is random. `shuffled` shuffles all
ratings. `file` keeps the ratings of one prompt together, as the demo's file does. TRL's mismatched pairs take the
previous completion, ours take the next one. Therefore TRL gets the records of each step in reverse order, and the
two sides' uncut, shuffled runs are the same run.

The sides are `ours`, `trl`, and the control `trl-zero`: TRL without z (apo_zero_unpaired). If the cuts of `trl-zero`
agree, z is all that a cut changes.

A finished run is a line in benchmarks/cuts.jsonl and is not run again. Other files are in out/cuts/. TRL
runs in its own environment (vs_trl.py makes it). Our functions check the models of both sides:

- right: held-out answers that the demo's checker accepts, sampled by our generate with one seed;
- sign, margin: the share of held-out ratings whose log-ratio has the label's sign, and beta times the difference
  of the mean log-ratios of thumbs up and thumbs down;
- distance: |w - w of the uncut run| / |w of the uncut run - start|, over all weights;
- z: its mean over micro-batches (ours: over steps) in nats; z_zero: the share of them in which z is 0.
"""

import argparse
import csv
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
from importlib.metadata import version
from itertools import product
from pathlib import Path

from vs_trl import environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "cuts.jsonl"
OUT = ROOT / "out" / "cuts"
SIDES = ("ours", "trl", "trl-zero")
START = 51.0  # % of the demo's held-out answers that are right before training (RESULTS.md)
MODEL = ROOT / "demo" / "base"
RECORDS = ROOT / "demo" / "train.jsonl"
HELD_OUT = ROOT / "demo" / "val.jsonl"
ORDERS = ("shuffled", "file")
CUTS = (64, 16, 8, 4, 2)
SETTINGS = {
    "batch_size": 64,
    "epochs": 2,
    "optim.lr": 7e-4,
    "optim.warmup": 10,
    "kto.beta": 0.5,
    "data.max_prompt": 32,
    "data.max_completion": 32,
}


def read_records(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def run_logged(command: list, log: Path) -> float:
    """Run a command and append its output to a log. -> its CPU seconds. SystemExit if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("a") as file:
        code = subprocess.run(list(map(str, command)), stdout=file, stderr=file).returncode
    if code:
        raise SystemExit(f"exit code {code}: see {log}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# ---- the records, in an order --------------------------------------------------------------------


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


def reversed_steps(records: list[dict], batch: int) -> list[dict]:
    """The same steps, each in reverse order."""
    rows = []
    for start in range(0, len(records), batch):
        rows += reversed(records[start : start + batch])
    return rows


# ---- the two sides -------------------------------------------------------------------------------


def folder_of(side: str, order: str, seed: int, cut: int) -> Path:
    return OUT / f"{side}-{order}-{seed}-{cut}"


def train_ours(records: Path, cut: int, seed: int, out: Path) -> dict:
    """-> losses, gradient norms and z of each step. The trained model is left in out/final."""
    settings = SETTINGS | {
        "model": MODEL,
        "data.train": records,
        "data.val": "null",
        "data.shuffle": "false",
        "micro_batch_size": cut,
        "precision": "32-true",
        "seed": seed,
        "out_dir": out / "run",
        "save_interval": "null",
        "eval.samples": 0,
        "progress": "false",
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    seconds = run_logged([sys.executable, ROOT / "kto.py", *options], out / "log.txt")
    with (out / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    (out / "run" / "final").rename(out / "final")
    return {
        "cpu_seconds": seconds,
        "losses": [float(row["loss"]) for row in rows],
        "grad_norms": [float(row["grad_norm"]) for row in rows],
        "z": [float(row["kl"]) for row in rows],
    }


def train_trl(
    side: str, records: Path, cut: int, seed: int, factors: list[float], out: Path
) -> dict:
    """As train_ours, with z per micro-batch. factors: multiply the learning rate, one per step."""
    loss = "kto" if side == "trl" else "apo_zero_unpaired"
    spec = {
        "records": records,
        "cut": cut,
        "seed": seed,
        "factors": factors,
        "out": out,
        "loss": loss,
    }
    command = [environment(), __file__, "--trl", json.dumps(spec, default=str)]
    seconds = run_logged(command, out / "log.txt")
    return {"cpu_seconds": seconds} | json.loads((out / "trl.json").read_text())


def trl(spec: dict) -> None:
    """Run TRL's trainer, in its environment. spec: see train_trl."""
    import datasets
    import torch
    import transformers
    from trl import KTOConfig, KTOTrainer

    datasets.disable_progress_bars()
    transformers.set_seed(spec["seed"])
    out, cut = Path(spec["out"]), spec["cut"]
    losses, norms, z = [], [], []

    class Recorder(KTOTrainer):
        def log(self, logs, *args, **kwargs):
            if "loss" in logs:
                losses.append(logs["loss"])
                norms.append(float(logs["grad_norm"]))
                z.extend(self._metrics["train"]["kl"])  # of each micro-batch
            super().log(logs, *args, **kwargs)

    def load():
        return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    policy = load()
    optimizer = torch.optim.AdamW(policy.parameters(), SETTINGS["optim.lr"], weight_decay=0.0)
    factors = [*spec["factors"], 0.0]  # the scheduler asks once more after the last step
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: factors[done])
    args = KTOConfig(
        output_dir=str(out / "trl"),
        bf16=False,
        use_cpu=True,
        seed=spec["seed"],
        beta=SETTINGS["kto.beta"],
        loss_type=spec["loss"],
        num_train_epochs=SETTINGS["epochs"],
        per_device_train_batch_size=cut,
        gradient_accumulation_steps=SETTINGS["batch_size"] // cut,
        train_sampling_strategy="sequential",
        precompute_ref_log_probs=True,  # once, not in each epoch: the same numbers up to rounding
        precompute_ref_batch_size=SETTINGS["batch_size"],
        max_length=SETTINGS["data.max_prompt"] + SETTINGS["data.max_completion"],
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    rows = [json.loads(line) for line in Path(spec["records"]).read_text().splitlines()]
    trainer = Recorder(
        model=policy,
        ref_model=load(),
        args=args,
        train_dataset=datasets.Dataset.from_list(reversed_steps(rows, SETTINGS["batch_size"])),
        processing_class=transformers.AutoTokenizer.from_pretrained(MODEL),
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    trainer.model.save_pretrained(out / "final")
    log = {"losses": losses, "grad_norms": norms, "z": z, "trl": version("trl")}
    (out / "trl.json").write_text(json.dumps(log))


# ---- what a model can do -------------------------------------------------------------------------


class HeldOut:
    """The held-out records, and their log-probs under the model that all runs start from."""

    def __init__(self):
        from lightning.fabric import Fabric

        from infra.settings import Data
        from models.hub import find_model
        from records.examples import load_examples
        from records.tokenizer import Tokenizer

        limits = {x: SETTINGS[f"data.{x}"] for x in ("max_prompt", "max_completion")}
        self.fabric = Fabric(accelerator="cpu", devices=1)
        self.tokenizer = Tokenizer(find_model(str(MODEL)))
        source = str(HELD_OUT)
        data = Data(train=source, **limits)
        self.examples, _ = load_examples(source, self.tokenizer, "rated", data)
        self.start = self.score(self.load(MODEL))

    def load(self, folder: Path):
        from models.load import load_model

        return self.fabric.setup_module(load_model(str(folder)))

    def score(self, policy) -> list[float]:
        """log-probs of the held-out completions, in nats."""
        import torch

        from packing import pack

        scores = []
        with torch.no_grad():
            for i in range(0, len(self.examples), 50):
                part = self.examples[i : i + 50]
                packed = pack([e.prompt for e in part], [e.completions for e in part])
                scores += policy(packed).logps[:, 0].double().tolist()
        return scores

    def measure(self, folder: Path) -> dict:
        """right, sign and margin (see above). right and sign are [count, total]."""
        policy = self.load(folder)
        policy.eval()
        logratios = [a - b for a, b in zip(self.score(policy), self.start)]
        labels = [e.label for e in self.examples]
        up = statistics.mean(r for r, label in zip(logratios, labels) if label)
        down = statistics.mean(r for r, label in zip(logratios, labels) if not label)
        agree = sum((r > 0) == label for r, label in zip(logratios, labels))
        return {
            "right": self.sample(policy),
            "sign": [agree, len(labels)],
            "margin": SETTINGS["kto.beta"] * (up - down),
        }

    def sample(self, policy) -> list[int]:
        from demo.check import check
        from evaluation import as_answers, with_answers
        from infra.settings import Sampling
        from sampler import generate

        prompts = [e.prompt for e in self.examples]
        ids = generate(
            self.fabric,
            policy,
            prompts,
            self.tokenizer,
            Sampling(),
            SETTINGS["data.max_completion"],
            1,
        )
        verdicts = check(as_answers(self.tokenizer, with_answers(self.examples, ids), []))
        return [sum(verdicts), len(verdicts)]


def weights_of(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def distance(a: dict, b: dict) -> float:
    """|a - b| over all weights of two models."""
    return sum((a[name] - b[name]).double().square().sum().item() for name in a) ** 0.5


# ---- one run -------------------------------------------------------------------------------------


def run(side: str, order: str, seed: int, cut: int, held_out: HeldOut) -> dict:
    """Train and check one run. -> its line of results"""
    import torch

    from infra.optimizer import Plan, lr_at
    from infra.settings import Optim

    batch = SETTINGS["batch_size"]
    out = folder_of(side, order, seed, cut)
    shutil.rmtree(out, ignore_errors=True)  # left by a run that was stopped
    out.mkdir(parents=True)
    rows = ordered(read_records(RECORDS), order, seed, batch)
    records = out / "train.jsonl"
    records.write_text("".join(json.dumps(row) + "\n" for row in rows))
    per_epoch = len(rows) // batch
    steps = SETTINGS["epochs"] * per_epoch
    if side == "ours":
        log = train_ours(records, cut, seed, out)
    else:
        plan = Plan(per_epoch, steps, 0, steps, per_epoch)
        optim = Optim(lr=1.0, warmup=SETTINGS["optim.warmup"])
        factors = [lr_at(step, plan, optim) for step in range(1, steps + 1)]
        log = train_trl(side, records, cut, seed, factors, out)
    assert len(log["losses"]) == steps
    final = weights_of(out / "final")
    of_uncut = weights_of(folder_of(side, order, seed, CUTS[0]) / "final")
    row = {"side": side, "seed": seed, "order": order, "cut": cut}
    row |= {"torch": torch.__version__, "trl": log.get("trl")}
    row |= held_out.measure(out / "final")
    return row | {
        "distance": distance(final, of_uncut) / distance(of_uncut, weights_of(MODEL)),
        "z": statistics.mean(log["z"]),
        "z_zero": statistics.mean(z == 0 for z in log["z"]),
        "cpu_seconds": round(log["cpu_seconds"], 1),
        "first_losses": log["losses"][:10],
        "first_grad_norm": log["grad_norms"][0],
    }


# ---- the table and the picture ------------------------------------------------------------------


def finished() -> list[dict]:
    return read_records(RESULTS) if RESULTS.exists() else []


def rows_of(**wanted) -> list[dict]:
    return [r for r in finished() if all(r[key] == value for key, value in wanted.items())]


def print_table() -> None:
    """A line per order, side and seed. Each cell lists the cuts, the uncut run first."""
    names = ", ".join(f"{cut}x{SETTINGS['batch_size'] // cut}" for cut in CUTS)
    print(f"| order, side, seed | right of {names}, % | margin | distance | z, nats |")
    print(f"{'| --- ' * 5}|")
    for order, side, seed in product(ORDERS, SIDES, (1, 2, 3)):
        rows = {row["cut"]: row for row in rows_of(order=order, side=side, seed=seed)}
        if not rows:
            continue
        lines = [rows[cut] for cut in CUTS if cut in rows]
        cells = [
            f"{order}, {side}, {seed}",
            ", ".join(f"{100 * row['right'][0] / row['right'][1]:.1f}" for row in lines),
            ", ".join(f"{row['margin']:.2f}" for row in lines),
            ", ".join(f"{row['distance']:.2g}" for row in lines),
            ", ".join(f"{row['z']:.2f}" for row in lines),
        ]
        print(f"| {' | '.join(cells)} |")


def draw(file: Path) -> None:
    """Right answers at the end of each run with their 95% interval, by cut: a line per seed, a panel per order."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    from evaluation import wilson_interval

    rcParams["svg.hashsalt"] = "cuts"  # the same file each time
    figure = Figure(figsize=(9, 3.8), layout="constrained", facecolor="white")
    titles = {"shuffled": "shuffled", "file": "ratings of a prompt side by side"}
    for axes, order in zip(figure.subplots(1, 2, sharey=True), ORDERS):
        axes.axhline(START, color="0.5", linestyle=":", label="before training")
        for side, color, name in (("trl", "C1", "TRL 1.16"), ("ours", "C0", "ours")):
            for seed, marker in zip((1, 2, 3), "osD"):
                counts = {
                    CUTS.index(r["cut"]): r["right"]
                    for r in rows_of(side=side, order=order, seed=seed)
                }
                at = sorted(counts)
                shares = [100 * counts[i][0] / counts[i][1] for i in at]
                label = f"{name}, seed {seed}"
                axes.plot(at, shares, f"{marker}-", color=color, label=label, markersize=4)
                for i in at:
                    low, high = wilson_interval(*counts[i])
                    axes.vlines(i, 100 * low, 100 * high, color, linewidth=1, alpha=0.4)
        axes.set_xticks(
            range(len(CUTS)), [f"{cut}×{SETTINGS['batch_size'] // cut}" for cut in CUTS]
        )
        axes.set(xlabel="micro-batch size × micro-batches per step", title=titles[order])
        axes.set_ylim(45, 100)
        axes.grid(axis="y", color="0.9")
    axes.legend(loc="lower left", fontsize=8, ncols=2)
    figure.axes[0].set_ylabel("right held-out answers, %")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "table", "picture"])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--orders", default="shuffled,file")
    parser.add_argument("--sides", default=",".join(SIDES))
    args = parser.parse_args()
    if args.what == "picture":
        draw(HERE / "cuts.svg")
    elif args.what == "table":
        print_table()
    else:
        run_missing(args.seeds.split(","), args.orders.split(","), args.sides.split(","))


def run_missing(seeds: list[str], orders: list[str], sides: list[str]) -> None:
    held_out = None
    for seed, order, side, cut in product(map(int, seeds), orders, sides, CUTS):
        if rows_of(side=side, seed=seed, order=order, cut=cut):
            continue
        print(f"{side}, {order}, seed {seed}, {cut} ...", flush=True)
        held_out = held_out or HeldOut()
        row = run(side, order, seed, cut, held_out)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:  # started by train_trl, in TRL's environment
        trl(json.loads(sys.argv[2]))
    else:
        main()
