"""The result on a real model: SmolLM2-135M learns instructions that a program can check, by each method.

    python examples/smollm2.py                  # the model, once
    python benchmarks/methods.py run            # what is missing, one run after the other: half a day
    python benchmarks/methods.py run online-first kto --seeds 1,2
    python benchmarks/methods.py table          # the table for RESULTS.md
    python benchmarks/methods.py picture        # benchmarks/methods.svg, accuracy against KL
    python benchmarks/methods.py seeds          # how many seeds show a difference

A finished run is a line in benchmarks/methods.jsonl and is not run again; a run that was stopped goes on
where it was saved. Each run has a folder under out/methods/.

Every method learns from 576 sampled answers of at most 96 tokens, in 36 steps of 16 completions, with
LoRA of rank 16. All answers, also those of the last check, are sampled at temperature 0.7: at 1 the base
is right half as often, and a method may gain by nothing but sharper distributions.

- online KTO (config/smollm2_online.yaml) answers each of 6 times 96 prompts once, by the policy as it
  is then;
- GRPO samples 6 times 4 answers to 24 prompts: it needs groups of answers to one prompt;
- offline KTO learns from 4 answers of the base to each of 144 prompts, sampled once a seed and rated by
  the checker. Class weights make right and wrong ones count alike, as online.balance does;
- DPO learns from all pairs of a right and a wrong one of them that answer one prompt, 8 pairs a step;
- SPIN's demonstrations are the first right ones of them, at most 96. The answers rated to find them and
  its own, one to each demonstration in 3 iterations, are 576 together, or one or two more.

`run kto --seeds 0 --lr 1e-4` is a run at another learning rate; seed 0 is for tuning, and no table
counts it. The rate is 4e-4, but 1e-4 for SPIN, which ends below the base at 4e-4.

Afterwards each final model answers the same held-out prompts: 360 of trained kinds of instructions, 96
of kinds that training never has, all of them about topics that training never has. kl is the mean of
log pi - log base over these answers, both at this temperature, in nats an answer: an estimate of
KL(policy || base) of what is sampled, for each method by the same function.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from vs_trl import environment

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "methods.jsonl"
OUT = HERE.parent / "out" / "methods"
PROMPTS, ANSWERS, TOKENS = 144, 4, 96  # of training; answers to a prompt; tokens of an answer
TEMPERATURE = 0.7
ITERATIONS, BATCH = 6, 16
STEPS = PROMPTS * ANSWERS // BATCH
HELD_OUT = {"val": 30, "new_kinds": 32}  # prompts of the last check, of each kind of instruction
DEMONSTRATIONS, SPIN_ITERATIONS = 96, 3
FIELDS = "kind,group,n,words"  # of a record, for the checker

COMMON = {
    "precision": "bf16-mixed",
    "lora.rank": 16,
    "lora.alpha": 32,
    "optim.lr": 4e-4,
    "batch_size": BATCH,
    "optim.warmup": 4,
    "data.max_prompt": 160,
    "data.max_completion": 128,  # 96 sampled tokens may be more when their text is encoded again
    "data.val": "null",
    "val_interval": "null",
    "eval.samples": 0,
    "progress": "false",
}
BETA = {"kto.beta": 0.5}
SPIN = {
    "optim.lr": 1e-4,
    "batch_size": BATCH // 2,
    "spin.max_iterations": SPIN_ITERATIONS,
    "spin.max_new_tokens": TOKENS,
    "spin.temperature": TEMPERATURE,
}
# name -> (its name in the picture, program, what it learns from, settings)
METHODS = {
    "base": ("base", None, None, {}),
    "online-first": ("online KTO, reference first", "examples/instructions", "task", {}),
    "online-last": (
        "online KTO, reference last",
        "examples/instructions",
        "task",
        {"online.reference": "last"},
    ),
    "kto": ("offline KTO", "kto", "rated", BETA),
    "apo_zero_unpaired": (
        "offline KTO, z = 0",
        "kto",
        "rated",
        BETA | {"kto.loss": "apo_zero_unpaired"},
    ),
    "dpo": (
        "DPO",
        "dpo",
        "pairs",
        {"batch_size": BATCH // 2, "epochs": STEPS, "max_steps": STEPS},
    ),
    "spin": ("SPIN", "spin", "demonstrations", SPIN),
    "grpo": ("GRPO (TRL)", "grpo_trl", "prompts", {"lr": 4e-4}),
}
# docs/z.md, "On a real model": 144 of offline KTO's ratings, of which this share is thumbs up
REGIMES = {
    "up10": {"kto.up": 0.1},
    "up10-weighed": {"kto.up": 0.1, "kto.weigh": "true"},
    "up50": {"kto.up": 0.5},
    "up50-free": {"kto.up": 0.5, "kto.z": "free"},
    "up90": {"kto.up": 0.9},
    "up90-zero": {"kto.up": 0.9, "kto.z": "zero"},
}
for name, regime in REGIMES.items():
    regime |= BETA | {"kto.other": 0, "kto.ratings": 144, "epochs": 2}
    METHODS[name] = ("", "benchmarks/regimes", "rated", regime)


# ---- what the methods learn from -----------------------------------------------------------------


def write_records(file: Path, records: list[dict]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


def read_records(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def task_file(name: str) -> Path:
    """train, val or new_kinds of examples/instructions.py."""
    from examples.instructions import write_data

    if not (OUT / "task" / f"{name}.jsonl").exists():
        write_data(OUT / "task", *HELD_OUT.values())
    return OUT / "task" / f"{name}.jsonl"


def data_file(kind: str, seed: int, model: str) -> Path:
    """What a method learns from."""
    if kind == "task":
        return task_file("train")
    file = OUT / f"data-{seed}" / f"{kind}.jsonl"
    if kind == "prompts":  # as many of each kind of instruction
        task = read_records(task_file("train"))
        records = [task[(seed * PROMPTS + i) % len(task)] for i in range(PROMPTS)]
    elif kind == "rated":
        if file.exists():  # its answers take minutes
            return file
        records = sample_rated(data_file("prompts", seed, model), seed, model)
    else:
        makers = {"pairs": make_pairs, "demonstrations": find_demonstrations, "right": find_right}
        records = makers[kind](read_records(data_file("rated", seed, model)))
    return write_records(file, records)


def sample_rated(prompts: Path, seed: int, model: str) -> list[dict]:
    """Answers of the base, rated. Their cost goes to cost.json, beside the prompts."""
    began = time.process_time()
    rows, _ = Sampler(model).answer([prompts], ANSWERS, seed)
    cost = {"cpu_seconds": time.process_time() - began}
    write_records(prompts.with_name("cost.json"), [cost])
    for row in rows:
        row["completion"] = [{"role": "assistant", "content": row["completion"]}]
    return rows


def make_pairs(rated: list[dict]) -> list[dict]:
    """A right and a wrong answer to one prompt: all such pairs of a prompt's answers."""
    pairs = []
    for start in range(0, len(rated), ANSWERS):
        answers = rated[start : start + ANSWERS]
        wrong = [r["completion"] for r in answers if not r["label"]]
        pairs += [
            {"prompt": r["prompt"], "chosen": r["completion"], "rejected": rejected}
            for r in answers
            if r["label"]
            for rejected in wrong
        ]
    return pairs


def find_right(rated: list[dict]) -> list[dict]:
    return [record for record in rated if record["label"]]


def find_demonstrations(rated: list[dict]) -> list[dict]:
    """The first right answers, as many as the answers that SPIN may have allow: those that were rated, and
    its own."""
    found = []
    for n, r in enumerate(rated, start=1):
        used = n + SPIN_ITERATIONS * len(found)
        if len(found) == DEMONSTRATIONS or used >= PROMPTS * ANSWERS:
            break
        if r["label"]:
            found.append(r)
    return found


# ---- answers of a model, and their verdicts ------------------------------------------------------


class Sampler:
    """A model in a Hugging Face folder that answers prompts and scores answers at TEMPERATURE."""

    def __init__(self, folder):
        from lightning.fabric import Fabric

        from models.hub import find_model
        from models.load import load_model
        from records.tokenizer import Tokenizer

        self.fabric = Fabric(accelerator="cpu", devices=1, precision=COMMON["precision"])
        source = find_model(str(folder))
        self.tokenizer, model = Tokenizer(source), load_model(source)
        # the head is linear: this divides its logits, those of the scores too
        model.transformer.ln_f.register_forward_hook(lambda module, args, h: h / TEMPERATURE)
        self.policy = self.fabric.setup_module(model)

    def answer(self, files: list[Path], n: int, seed: int) -> tuple[list[dict], list]:
        """n answers to each record: -> the records with completion, tokens, cut and label, the checker's
        verdict; and (prompt, answer) as token ids."""
        from evaluation import as_answers, with_answers
        from examples import instructions
        from infra.settings import Data, Sampling
        from records.examples import load_examples
        from sampler import generate

        source = ",".join(map(str, files))
        limits = {"max_prompt": COMMON["data.max_prompt"], "max_completion": TOKENS}
        data = Data(train=source, extra=FIELDS, **limits)
        distinct, _ = load_examples(source, self.tokenizer, "prompts", data)
        examples = [e for e in distinct for _ in range(n)]
        records = [r for file in files for r in read_records(file) for _ in range(n)]
        assert len(records) == len(examples), "a prompt stands twice in the files"
        prompts = [e.prompt for e in examples]
        sampling = Sampling(batch_size=32)
        ids = generate(self.fabric, self.policy, prompts, self.tokenizer, sampling, TOKENS, seed)
        answers = as_answers(self.tokenizer, with_answers(examples, ids), [])
        verdicts = instructions.check(answers)
        rows = [
            r | {"completion": a.completion, "tokens": len(x), "cut": a.cut, "label": bool(right)}
            for r, a, x, right in zip(records, answers, ids, verdicts)
        ]
        return rows, list(zip(prompts, ids))

    def score(self, pairs: list) -> list[float]:
        """log-probs of (prompt, answer) pairs of token ids, in nats."""
        import numpy as np
        import torch

        from packing import pack

        scores = []
        self.policy.eval()
        with torch.no_grad():
            for i in range(0, len(pairs), BATCH):
                prompts, answers = zip(*pairs[i : i + BATCH])
                answers = [(np.array(ids, np.int32),) for ids in answers]
                scores += self.policy(pack(prompts, answers)).logps[:, 0].double().tolist()
        return scores


def last_check(folder: Path, model: str, seed: int) -> dict:
    """What a final model answers to the held-out prompts."""
    rows, pairs = (policy := Sampler(folder)).answer([*map(task_file, HELD_OUT)], 1, seed)
    differences = zip(policy.score(pairs), Sampler(model).score(pairs))
    write_records(folder.parent / f"held-out-{seed}.jsonl", rows)
    counts = {}  # {kind or group of instructions: [right, of]}
    for row in rows:
        for value in (row["kind"], row["group"]):
            right, of = counts.get(value, (0, 0))
            counts[value] = [right + row["label"], of + 1]
    return {
        "val": counts.pop("trained kinds"),
        "new_kinds": counts.pop("new kinds"),
        "by_kind": counts,
        "tokens": statistics.mean(row["tokens"] for row in rows),
        "distinct_words": len({w for row in rows for w in row["completion"].lower().split()}),
        "cut": sum(row["cut"] for row in rows),
        "kl": statistics.mean(p - base for p, base in differences),
    }


# ---- one run -------------------------------------------------------------------------------------


def run(name: str, seed: int, model: str, lr: float | None) -> dict:
    """Train and check by a method. -> its line of results"""
    import torch

    _, program, kind, settings = METHODS[name]
    row = {"method": name, "seed": seed, "lr": lr, "torch": torch.__version__}
    if program is None:
        folder = OUT / "base" / "final"  # a link: what the check writes lies beside it
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            folder.symlink_to(Path(model).resolve())
        return row | last_check(folder, model, seed)
    out = OUT / f"{name}-{seed}{f'-lr={lr}' if lr else ''}"
    data = data_file(kind, seed, model)
    if lr:
        settings = settings | {"lr" if program == "grpo_trl" else "optim.lr": lr}
    row |= {"resumed": out.exists(), "settings": settings}
    if program == "kto":  # right answers count as much as wrong ones
        labels = [r["label"] for r in read_records(data)]
        settings = settings | {"kto.desirable_weight": len(labels) / sum(labels) - 1}
    if program == "grpo_trl":
        spec = {"model": model, "prompts": data, "out": out, "seed": seed, "batch": BATCH}
        spec |= {"iterations": ITERATIONS, "generations": ANSWERS, "tokens": TOKENS}
        spec |= {"answers": PROMPTS * ANSWERS // ITERATIONS, "temperature": TEMPERATURE}
        spec |= {"judge": [sys.executable, __file__, "judge"]} | settings
        command = [environment(), HERE / "grpo_trl.py", json.dumps(spec, default=str)]
    else:
        settings = COMMON | settings | {"model": model, "data.train": data, "seed": seed}
        settings |= {"out_dir": out, "resume": "auto"}
        command = [sys.executable, HERE.parent / f"{program}.py"]
        command += [f"--{key}={x}" for key, x in settings.items()]
    row["cpu_seconds"] = run_logged(list(map(str, command)), OUT / f"{out.name}.log")
    if kind in ("rated", "pairs", "demonstrations", "right"):
        row["base's answers"] = read_records(data.with_name("cost.json"))[0]
        row["cpu_seconds"] += row["base's answers"]["cpu_seconds"]
    return row | last_check(out / "final", model, seed)


def run_logged(command: list[str], log: Path) -> float:
    """Run a command, its output appended to a log. -> its CPU seconds. SystemExit if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("a") as file:
        code = subprocess.run(command, stdout=file, stderr=file).returncode
    if code:
        raise SystemExit(f"exit code {code}: see {log}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def judge() -> None:
    """The checker for grpo_trl.py: reads a line of JSON, [[prompt, completion, fields, cut], ...], and
    writes a line, [verdict, ...]."""
    from evaluation import Answer
    from examples.instructions import check

    for line in sys.stdin:
        answers = [Answer(*row) for row in json.loads(line)]
        print(json.dumps(check(answers)), flush=True)


# ---- the table and the picture -------------------------------------------------------------------


def finished() -> list[dict]:
    return read_records(RESULTS) if RESULTS.exists() else []


def counted(name: str) -> list[dict]:
    """The lines of a method that the table counts."""
    return [r for r in finished() if r["method"] == name and r["seed"] > 0 and not r.get("lr")]


def print_table() -> None:
    """Shares over all seeds with their intervals; medians of the rest."""
    from evaluation import wilson_interval

    print("| method | seeds | held-out topics | held-out kinds ", end="")
    print("| KL, nats | tokens | distinct words | cut | CPU minutes |\n" + "| --- " * 9 + "|")
    for name in METHODS:
        rows = counted(name)
        if not rows:
            continue
        cells = [name, f"{len(rows)}"]
        for part in HELD_OUT:
            right, of = (sum(r[part][i] for r in rows) for i in (0, 1))
            low, high = wilson_interval(right, of)
            cells.append(f"{100 * right / of:.1f}% ({100 * low:.0f} to {100 * high:.0f})")
        for key in ("kl", "tokens", "distinct_words", "cut"):
            cells.append(f"{statistics.median(r[key] for r in rows):.4g}")
        # a resumed run has counted only its last part
        times = [r["cpu_seconds"] / 60 for r in rows if not r.get("resumed", True)]
        cells.append(f"{statistics.median(times):.1f}" if times else "")
        print(f"| {' | '.join(cells)} |")


def print_seeds() -> None:
    """How many seeds of each of two methods show a difference in 80% of all experiments, at a level of 5%: by the
    standard deviation of a run's share over seeds, on the held-out topics' 360 prompts."""
    print("| runs | standard deviation | 2 points | 5 points | 10 points |")
    print("| --- | --- | --- | --- | --- |")
    names = [name for name in METHODS if METHODS[name][0] and len(counted(name)) > 2]
    for of in ([name for name in names if name.startswith("online")], names[1:]):
        shares = [[100 * r["val"][0] / r["val"][1] for r in counted(name)] for name in of]
        # pooled over the methods, each around its own mean
        squares = sum(statistics.variance(x) * (len(x) - 1) for x in shares)
        deviation = (squares / sum(len(x) - 1 for x in shares)) ** 0.5
        needed = []
        for points in (2, 5, 10):
            # 1.96 and 0.84: quantiles of the normal distribution at 97.5% and 80%
            needed.append(str(math.ceil(2 * ((1.96 + 0.84) * deviation / points) ** 2)))
        print(f"| {', '.join(of)} | {deviation:.1f} | {' | '.join(needed)} |")


def draw(file: Path) -> None:
    """Accuracy on held-out topics, with its 95% interval, against KL: a point for each run."""
    from matplotlib.figure import Figure

    from evaluation import wilson_interval

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for i, (name, (label, *_)) in enumerate(METHODS.items()):
        for row in counted(name) if label else ():
            low, high = wilson_interval(*row["val"])
            axes.vlines(row["kl"], 100 * low, 100 * high, f"C{i}", linewidth=1)
            right, of = row["val"]
            axes.plot(row["kl"], 100 * right / of, "o", color=f"C{i}", label=label)
            label = None  # once in the legend
    axes.set(xlabel="KL to the base, nats an answer", ylabel="right answers, %", ylim=(0, 60))
    axes.legend(fontsize=7)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "table", "picture", "seeds", "judge"])
    parser.add_argument("methods", nargs="*", help=f"of {', '.join(METHODS)}; default: all")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--model", default=str(HERE.parent / "out" / "smollm2-135m"))
    parser.add_argument("--lr", type=float, help="another learning rate than the method's")
    args = parser.parse_args()
    if args.what == "judge":  # a process that grpo_trl.py started
        judge()
        return
    if args.what == "run":
        for seed in map(int, args.seeds.split(",")):
            for name in args.methods or METHODS:
                asked = (name, seed, args.lr)
                known = any((r["method"], r["seed"], r.get("lr")) == asked for r in finished())
                if known:
                    continue
                print(f"{name}, seed {seed} ...", flush=True)
                row = run(name, seed, args.model, args.lr)
                with RESULTS.open("a") as f:
                    f.write(json.dumps(row) + "\n")
    if args.what == "picture":
        draw(HERE / "methods.svg")
    elif args.what == "seeds":
        print_seeds()
    else:
        print_table()


if __name__ == "__main__":
    main()
