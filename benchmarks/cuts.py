"""The same run, cut five ways, by TRL and by us: does it matter how a step is split into micro-batches?

    python benchmarks/cuts.py run                       # what is missing, one run after the other
    python benchmarks/cuts.py run --sides trl --seeds 1 --orders file
    python benchmarks/cuts.py run --task smollm2        # a real model; python examples/smollm2.py makes it
    python benchmarks/cuts.py table                     # the tables for RESULTS.md
    python benchmarks/cuts.py picture                   # benchmarks/cuts.svg

A step of 64 examples is 64x1, 16x4, 8x8, 4x16 or 2x32: examples of a micro-batch x micro-batches of a step
(TRL: per_device_train_batch_size x gradient_accumulation_steps). TRL computes z, the KL baseline, in each
micro-batch, from mismatched pairs inside of it. Ours is computed once for the whole step.

Both sides have the same start, records, order, steps, learning rates, AdamW, clipping and precision
(32-true). A seed is an order of the records; nothing else is random in training, but the first adapters of
a real model. `shuffled`: each rating has a place of its own. `file`: ratings of one prompt stand side by
side, as in the demo's file and in many others. TRL's mismatched pairs take the completion before, ours the
one after, so TRL gets the records of each step in reverse order: uncut and shuffled, the two are one run.

The sides are `ours`, `trl`, and `trl-zero`: TRL without z (apo_zero_unpaired). That one is a control: if its cuts
agree, then z is all that a cut changes.

A finished run is a line in benchmarks/cuts.jsonl and is not run again. Everything else is in out/cuts/. TRL
runs in an environment of its own (vs_trl.py makes it). Models of both sides are checked by our functions:

- right: held-out answers, sampled by our generate with one seed for all, that the demo's checker accepts;
- sign, margin: of the held-out ratings' log-ratios the share on its label's side of 0, and beta times the mean
  of the right ones minus that of the wrong ones;
- distance: |w - w of the uncut run| / |w of the uncut run - start|, over all weights;
- z: its mean over micro-batches (ours: over steps) in nats; z_zero: the share where it is 0.
"""

import argparse
import csv
import json
import random
import shutil
import statistics
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from itertools import combinations, product
from pathlib import Path

from methods import read_records, run_logged, write_records
from vs_trl import environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "cuts.jsonl"
OUT = ROOT / "out" / "cuts"
SIDES = ("ours", "trl", "trl-zero")
START = 51.0  # % of the demo's held-out answers that are right before training (RESULTS.md)
TASKS = {
    "demo": {
        "model": ROOT / "demo" / "base",
        "records": ROOT / "demo" / "train.jsonl",
        "held_out": ROOT / "demo" / "val.jsonl",
        "orders": ("shuffled", "file"),
        "cuts": (64, 16, 8, 4, 2),
        "measured": 31,  # steps between two points of a curve
        "settings": {
            "batch_size": 64,
            "epochs": 2,
            "optim.lr": 7e-4,
            "optim.warmup": 10,
            "kto.beta": 0.5,
            "data.max_prompt": 32,
            "data.max_completion": 32,
        },
    },
    "smollm2": {  # rated sentences, as in benchmarks/rounding.py
        "model": ROOT / "out" / "smollm2-135m",
        "records": OUT / "train.jsonl",
        "held_out": OUT / "val.jsonl",
        "orders": ("shuffled",),
        "cuts": (16, 8, 4, 2),
        "measured": None,  # at the end alone
        "settings": {
            "batch_size": 16,
            "epochs": 1,
            "optim.lr": 2e-4,
            "optim.warmup": 2,
            "kto.beta": 0.1,
            "data.max_prompt": 64,
            "data.max_completion": 32,
            "lora.rank": 16,
            "lora.alpha": 32,
        },
    },
}


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


def folder_of(task: str, side: str, order: str, seed: int, cut: int) -> Path:
    return OUT / f"{task}-{side}-{order}-{seed}-{cut}"


def run_kto(task: dict, records: Path, cut: int, seed: int, out: Path, **more) -> float:
    """kto.py, in the folder out/run. -> CPU seconds"""
    settings = {
        "model": task["model"],
        "data.train": records,
        "data.shuffle": "false",
        "micro_batch_size": cut,
        "precision": "32-true",
        "seed": seed,
        "out_dir": out / "run",
        "val_interval": "null",
        "save_interval": task["measured"] or "null",
        "keep_last": 1000,
        "eval.samples": 0,
        "progress": "false",
    } | task["settings"]
    command = [sys.executable, ROOT / "kto.py"]
    command += [f"--{name}={value}" for name, value in (settings | more).items()]
    return run_logged(list(map(str, command)), out / "log.txt")


def train_ours(task: dict, records: Path, cut: int, seed: int, out: Path) -> dict:
    """-> losses, norms of the gradient and z of each step; models are left in `out`."""
    seconds = run_kto(task, records, cut, seed, out)
    with (out / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for checkpoint in (out / "run" / "checkpoints").iterdir():
        if task["measured"]:
            checkpoint.rename(out / f"step-{int(checkpoint.name.split('-')[1])}")
    (out / "run" / "final").rename(out / "final")
    return {
        "cpu_seconds": seconds,
        "losses": [float(row["loss"]) for row in rows],
        "grad_norms": [float(row["grad_norm"]) for row in rows],
        "z": [float(row["kl"]) for row in rows],
    }


def train_trl(
    task: dict, side: str, records: Path, cut: int, seed: int, factors: list[float], out: Path
) -> dict:
    """As train_ours; z of each micro-batch. factors: of the learning rate at each step."""
    spec = {"model": task["model"], "records": records, "cut": cut, "seed": seed, "out": out}
    spec |= {"loss": "kto" if side == "trl" else "apo_zero_unpaired", "factors": factors}
    spec |= {"measured": task["measured"], "settings": task["settings"], "adapters": None}
    if "lora.rank" in task["settings"]:  # ours, before their first step
        spec["adapters"] = out / "run" / "final_adapter"
        run_kto(task, records, cut, seed, out, **{"optim.lr": 0, "max_steps": 1})
    command = [environment(), __file__, "--trl", json.dumps(spec, default=str)]
    seconds = run_logged(list(map(str, command)), out / "log.txt")
    return {"cpu_seconds": seconds} | json.loads((out / "trl.json").read_text())


def trl(spec: dict) -> None:
    """Run TRL's trainer, in its environment. spec: what train_trl hands over."""
    import datasets
    import peft
    import torch
    import transformers
    from trl import KTOConfig, KTOTrainer

    datasets.disable_progress_bars()
    transformers.set_seed(spec["seed"])
    settings = spec["settings"]
    out, cut = Path(spec["out"]), spec["cut"]
    losses, norms, z = [], [], []

    class Recorder(KTOTrainer):
        def log(self, logs, *args, **kwargs):
            if "loss" in logs:
                losses.append(logs["loss"])
                norms.append(float(logs["grad_norm"]))
                z.extend(self._metrics["train"]["kl"])  # of each micro-batch
            super().log(logs, *args, **kwargs)

    class Saver(transformers.TrainerCallback):
        def on_step_end(self, _args, state, _control, model=None, **_):
            if spec["measured"] and state.global_step % spec["measured"] == 0:
                model.save_pretrained(out / f"step-{state.global_step}")

    def load():
        return transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)

    policy, reference = load(), None
    if spec["adapters"]:  # the reference is the policy with its adapters off
        policy = peft.PeftModel.from_pretrained(policy, spec["adapters"], is_trainable=True)
    else:
        reference = load()
    weights = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, settings["optim.lr"], weight_decay=0.0)
    factors = [*spec["factors"], 0.0]  # the schedule asks once more after the last step
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: factors[done])
    args = KTOConfig(
        output_dir=str(out / "trl"),
        bf16=False,
        use_cpu=True,
        seed=spec["seed"],
        beta=settings["kto.beta"],
        loss_type=spec["loss"],
        num_train_epochs=settings["epochs"],
        per_device_train_batch_size=cut,
        gradient_accumulation_steps=settings["batch_size"] // cut,
        train_sampling_strategy="sequential",
        precompute_ref_log_probs=True,  # once, not in each epoch: the same numbers up to rounding
        precompute_ref_batch_size=settings["batch_size"],
        max_length=settings["data.max_prompt"] + settings["data.max_completion"],
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
        ref_model=reference,
        args=args,
        callbacks=[Saver()],
        train_dataset=datasets.Dataset.from_list(reversed_steps(rows, settings["batch_size"])),
        processing_class=transformers.AutoTokenizer.from_pretrained(spec["model"]),
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    final = trainer.model.merge_and_unload() if spec["adapters"] else trainer.model
    final.save_pretrained(out / "final")
    log = {"losses": losses, "grad_norms": norms, "z": z, "trl": version("trl")}
    (out / "trl.json").write_text(json.dumps(log))


# ---- what a model can do -------------------------------------------------------------------------


class HeldOut:
    """The held-out records of a task, and the scores of the model that all runs start from."""

    def __init__(self, task: dict):
        from lightning.fabric import Fabric

        from infra.settings import Data
        from models.hub import find_model
        from records.examples import load_examples
        from records.tokenizer import Tokenizer

        self.beta = task["settings"]["kto.beta"]
        limits = {x: task["settings"][f"data.{x}"] for x in ("max_prompt", "max_completion")}
        self.longest = limits["max_completion"]
        self.fabric = Fabric(accelerator="cpu", devices=1)
        self.tokenizer = Tokenizer(find_model(str(task["model"])))
        source = str(task["held_out"])
        data = Data(train=source, **limits)
        self.examples, _ = load_examples(source, self.tokenizer, "rated", data)
        self.start = self.score(self.load(task["model"]))

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

    def measure(self, folder: Path, samples: bool) -> dict:
        """sign, margin and (samples) right, see above; of sign and right a count, and of how many."""
        policy = self.load(folder)
        policy.eval()
        logratios = [a - b for a, b in zip(self.score(policy), self.start)]
        labels = [e.label for e in self.examples]
        by_label = [[r for r, x in zip(logratios, labels) if x == label] for label in (True, False)]
        up, down = map(statistics.mean, by_label)
        agree = sum((r > 0) == label for r, label in zip(logratios, labels))
        row = {"sign": [agree, len(labels)], "margin": self.beta * (up - down)}
        if samples:
            row["right"] = self.sample(policy)
        return row

    def sample(self, policy) -> list[int]:
        from demo.check import check
        from evaluation import as_answers, with_answers
        from infra.settings import Sampling
        from sampler import generate

        prompts = [e.prompt for e in self.examples]
        ids = generate(self.fabric, policy, prompts, self.tokenizer, Sampling(), self.longest, 1)
        verdicts = check(as_answers(self.tokenizer, with_answers(self.examples, ids), []))
        return [sum(verdicts), len(verdicts)]


def weights_of(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def distance(a: dict, b: dict) -> float:
    """|a - b| over all weights of two models."""
    return sum((a[name] - b[name]).double().square().sum().item() for name in a) ** 0.5


# ---- one run -------------------------------------------------------------------------------------


@cache
def held_out_of(task: str) -> HeldOut:
    return HeldOut(TASKS[task])


def run(name: str, side: str, order: str, seed: int, cut: int) -> dict:
    """Train and check. -> its line of results"""
    import torch

    from infra.optimizer import Plan, lr_at
    from infra.settings import Optim

    task = TASKS[name]
    settings = task["settings"]
    batch = settings["batch_size"]
    if name == "smollm2" and not task["records"].exists():
        from rounding import write_data

        write_data(OUT)
    out = folder_of(name, side, order, seed, cut)
    shutil.rmtree(out, ignore_errors=True)  # of a run that was stopped
    out.mkdir(parents=True)
    rows = ordered(read_records(task["records"]), order, seed, batch)
    records = write_records(out / "train.jsonl", rows)
    per_epoch = len(rows) // batch
    steps = settings["epochs"] * per_epoch
    if side == "ours":
        log = train_ours(task, records, cut, seed, out)
    else:
        plan = Plan(per_epoch, steps, 0, steps, per_epoch)
        optim = Optim(lr=1.0, warmup=settings["optim.warmup"])
        factors = [lr_at(step, plan, optim) for step in range(1, steps + 1)]
        log = train_trl(task, side, records, cut, seed, factors, out)
    assert len(log["losses"]) == steps
    uncut = task["cuts"][0]
    final = weights_of(out / "final")
    of_uncut = weights_of(folder_of(name, side, order, seed, uncut) / "final")
    start = weights_of(task["model"])
    held_out = held_out_of(name)
    row = {"task": name, "side": side, "seed": seed, "order": order, "cut": cut}
    row |= {"torch": torch.__version__, "trl": log.get("trl")}
    row |= held_out.measure(out / "final", bool(task["measured"]))
    row |= {
        "distance": distance(final, of_uncut) / distance(of_uncut, start),
        "z": statistics.mean(log["z"]),
        "z_zero": statistics.mean(z == 0 for z in log["z"]),
        "cpu_seconds": round(log["cpu_seconds"], 1),
        "first_losses": log["losses"][:10],
        "first_grad_norm": log["grad_norms"][0],
    }
    if task["measured"]:
        points = range(task["measured"], steps, task["measured"])
        row["curve"] = [
            {"step": step} | held_out.measure(out / f"step-{step}", True) for step in points
        ]
    for old in out.iterdir():
        is_needed = old.name == "final" and cut == uncut
        if old.is_dir() and not is_needed:
            shutil.rmtree(old)
    return row


# ---- the tables and the picture ------------------------------------------------------------------


def finished() -> list[dict]:
    return read_records(RESULTS) if RESULTS.exists() else []


def rows_of(**wanted) -> list[dict]:
    return [r for r in finished() if all(r[key] == value for key, value in wanted.items())]


def percent(counts: list[int]) -> str:
    return f"{100 * counts[0] / counts[1]:.1f}"


def print_table() -> None:
    """A line for each task, order, side and seed; in its cells the cuts, the uncut run first."""
    for name, task in TASKS.items():
        cuts = task["cuts"]
        batch = task["settings"]["batch_size"]
        what = "right" if task["measured"] else "sign"
        names = ", ".join(f"{cut}x{batch // cut}" for cut in cuts)
        head = f"{name}: order, side, seed | {what} of {names}, %"
        print(f"\n| {head} | margin | distance | z, nats | z = 0, % |\n{'| --- ' * 6}|")
        for order, side in product(task["orders"], SIDES):
            for seed in sorted({r["seed"] for r in rows_of(task=name, side=side, order=order)}):
                rows = {r["cut"]: r for r in rows_of(task=name, side=side, order=order, seed=seed)}

                def cell(text: Callable[[dict], str]) -> str:
                    return ", ".join(text(rows[cut]) if cut in rows else "-" for cut in cuts)

                cells = [
                    f"{order}, {side}, {seed}",
                    cell(lambda r: percent(r[what])),
                    cell(lambda r: f"{r['margin']:.2f}"),
                    cell(lambda r: f"{r['distance']:.2g}"),
                    cell(lambda r: f"{r['z']:.2f}"),
                    cell(lambda r: f"{100 * r['z_zero']:.0f}"),
                ]
                print(f"| {' | '.join(cells)} |")
        print_agreement(name)
        print_scale(name)


def print_agreement(task: str) -> None:
    """How far apart the two sides' uncut, shuffled runs are in the losses of their first ten steps."""
    uncut = TASKS[task]["cuts"][0]
    for row in rows_of(task=task, side="trl", order="shuffled", cut=uncut):
        for ours in rows_of(task=task, side="ours", order="shuffled", cut=uncut, seed=row["seed"]):
            pairs = zip(ours["first_losses"], row["first_losses"])
            off = ", ".join(f"{abs(a - b) / b:.0e}" for a, b in pairs)
            print(f"\nseed {row['seed']}, uncut: losses of steps 1 to 10 differ by {off}")


def print_scale(task: str) -> None:
    """How far apart two seeds' uncut runs end, where their weights are still in out/cuts/."""
    uncut = TASKS[task]["cuts"][0]
    for order, side in product(TASKS[task]["orders"], SIDES):
        folders = [folder_of(task, side, order, seed, uncut) / "final" for seed in (1, 2, 3)]
        for a, b in combinations([folder for folder in folders if folder.exists()], 2):
            start, end = weights_of(TASKS[task]["model"]), weights_of(a)
            apart = distance(weights_of(b), end) / distance(end, start)
            print(f"\n{a.parent.name} and {b.parent.name}: {apart:.2f} apart")


def draw(file: Path) -> None:
    """The demo: right answers at the end of each run with their 95% interval, against its cut. A line is a
    seed; a panel for each order."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    from evaluation import wilson_interval

    rcParams["svg.hashsalt"] = "cuts"  # the same file each time
    task = TASKS["demo"]
    cuts, batch = task["cuts"], task["settings"]["batch_size"]
    figure = Figure(figsize=(9, 3.8), layout="constrained", facecolor="white")
    titles = {"shuffled": "shuffled", "file": "ratings of a prompt side by side"}
    for axes, order in zip(figure.subplots(1, 2, sharey=True), task["orders"]):
        axes.axhline(START, color="0.5", linestyle=":", label="before training")
        for side, color, name in (("trl", "C1", "TRL 1.16"), ("ours", "C0", "ours")):
            for seed, marker in zip((1, 2, 3), "osD"):
                counts = {
                    cuts.index(r["cut"]): r["right"]
                    for r in rows_of(task="demo", side=side, order=order, seed=seed)
                }
                at = sorted(counts)
                shares = [100 * counts[i][0] / counts[i][1] for i in at]
                label = f"{name}, seed {seed}"
                axes.plot(at, shares, f"{marker}-", color=color, label=label, markersize=4)
                for i in at:
                    low, high = wilson_interval(*counts[i])
                    axes.vlines(i, 100 * low, 100 * high, color, linewidth=1, alpha=0.4)
        axes.set_xticks(range(len(cuts)), [f"{cut}×{batch // cut}" for cut in cuts])
        axes.set(xlabel="examples of a micro-batch × micro-batches of a step", title=titles[order])
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
    parser.add_argument("--task", choices=list(TASKS), default="demo")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--orders", default="shuffled,file")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--cuts", help="examples of a micro-batch, as 64,2; default: all")
    parser.add_argument("--model", type=Path, help="where SmolLM2 lies")
    args = parser.parse_args()
    if args.model:
        TASKS["smollm2"]["model"] = args.model
    if args.what == "picture":
        draw(HERE / "cuts.svg")
    elif args.what == "table":
        print_table()
    else:
        run_missing(args)


def run_missing(args: argparse.Namespace) -> None:
    task = TASKS[args.task]
    orders = [order for order in task["orders"] if order in args.orders.split(",")]
    cuts = task["cuts"]
    if args.cuts:
        cuts = [cut for cut in cuts if str(cut) in args.cuts.split(",")]
    runs = product(map(int, args.seeds.split(",")), orders, args.sides.split(","), cuts)
    for seed, order, side, cut in runs:
        if rows_of(task=args.task, side=side, seed=seed, order=order, cut=cut):
            continue
        print(f"{args.task}, {side}, {order}, seed {seed}, {cut} ...", flush=True)
        row = run(args.task, side, order, seed, cut)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:  # a process that train_trl started, in TRL's environment
        trl(json.loads(sys.argv[2]))
    else:
        main()
