"""The result on a real model: SmolLM2-135M learns instructions that a program can check, by each method.

    python examples/smollm2.py                  # the model, once
    python benchmarks/methods.py run            # what is missing, one run after the other: half a day
    python benchmarks/methods.py run online-first kto --seeds 1,2
    python benchmarks/methods.py run grpo --trl <a Python that has TRL 1.16>
    python benchmarks/methods.py table          # the tables for RESULTS.md
    python benchmarks/methods.py picture        # benchmarks/methods.svg, accuracy against KL

A finished run is a line in benchmarks/methods.jsonl and is not run again; a run that was stopped goes on where it
was saved. Each run has a folder under out/methods/.

Every method learns from 576 sampled answers of at most 96 tokens, in 36 steps of 16 completions, with LoRA of rank 16.
All answers, also those of the last check, are sampled at temperature 0.7: at 1 the base is right half as often, and a
method may gain by nothing but sharper distributions ("base at temperature 1").

- online KTO answers each of 6 times 96 prompts once, by the policy as it is then. KTO needs no groups of answers;
- GRPO needs them: it samples 6 times 4 answers to 24 prompts, and so does "online-first 4 answers";
- offline KTO learns from 4 answers of the base to each of 144 prompts, sampled once a seed and rated by the checker.
  Class weights make right and wrong ones count alike, as online.balance does;
- DPO learns from all pairs of a right and a wrong one of them that answer one prompt, 8 pairs a step;
- SPIN's demonstrations are the first right ones of them, at most 96. The answers rated to find them and its own, one
  to each demonstration in 3 iterations, are 576 together, or one or two more.

`run kto --seeds 0 --lr 1e-4` is a run at another learning rate; seed 0 is for tuning, and no table counts it. The
rate is 4e-4, but 1e-4 for SPIN, which ends below the base at 4e-4.

Afterwards each final model answers the same held-out prompts: 360 of trained kinds of instructions, 96 of kinds that
training never has, all of them about topics that training never has. kl is the mean of log pi - log base over these
answers, both at this temperature, in nats an answer: an estimate of KL(policy || base) of what is sampled, for each
method by the same function. Seconds are of all processes of a run, sampling and rating included, but not of this last
check.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

RESULTS = HERE / "methods.jsonl"
OUT = HERE.parent / "out" / "methods"
PROMPTS, ANSWERS, TOKENS = 144, 4, 96  # of training; answers to a prompt; tokens of an answer
TEMPERATURE = 0.7
ITERATIONS, BATCH = 6, 16
STEPS = PROMPTS * ANSWERS // BATCH
PARTS = {"val": "held-out topics", "new_kinds": "held-out kinds and topics"}
HELD_OUT = {"val": 30, "new_kinds": 32}  # prompts of the last check, of each kind of instruction
DEMONSTRATIONS = 96
SEEDS = [1, 2, 3]

COMMON = {
    "precision": "bf16-mixed",
    "lora.rank": 16,
    "lora.alpha": 32,
    "optim.lr": 4e-4,
    "batch_size": BATCH,
    "optim.warmup": 4,
    "data.max_prompt": 160,
    "data.max_completion": 128,  # a text of 96 sampled tokens may have more when it is encoded again
    "data.val": "null",
    "val_interval": "null",
    "eval.samples": 0,
    "progress": "false",
}
BETA = {"kto.beta": 0.5}
ONLINE = BETA | {
    "online.reference": "first",
    "online.max_iterations": ITERATIONS,
    "online.prompts_per_iteration": PROMPTS * ANSWERS // ITERATIONS,
    "online.num_generations": 1,
    "online.max_new_tokens": TOKENS,
    "online.temperature": TEMPERATURE,
    "online.balance": "true",
}
GROUPS = {
    "online.prompts_per_iteration": PROMPTS // ITERATIONS,
    "online.num_generations": ANSWERS,
}
PAIRS = {"batch_size": BATCH // 2, "epochs": STEPS, "max_steps": STEPS}
SPIN = {"batch_size": BATCH // 2, "spin.max_iterations": 3, "spin.max_new_tokens": TOKENS}
SPIN |= {"spin.temperature": TEMPERATURE}

# name -> (program, what it learns from, settings). A program of two words is a variant of
# z_variants.py.
METHODS = {
    "base": (None, None, {}),
    "base at temperature 1": (None, None, {"temperature": 1.0}),
    "online-first": ("online", "many prompts", ONLINE),
    "online-last": ("online", "many prompts", ONLINE | {"online.reference": "last"}),
    "online-first 4 answers": ("online", "prompts", ONLINE | GROUPS),
    "kto": ("kto", "rated", BETA),
    "apo_zero_unpaired": ("kto", "rated", BETA | {"kto.loss": "apo_zero_unpaired"}),
    "dpo": ("dpo", "pairs", PAIRS),
    "spin": ("spin", "demonstrations", SPIN | {"optim.lr": 1e-4}),
    "grpo": ("grpo_trl", "prompts", {"lr": 4e-4, "temperature": TEMPERATURE}),
    # z of the best method as others have it
    "online-first z=0": ("online", "many prompts", ONLINE | {"kto.loss": "apo_zero_unpaired"}),
    "online-first z=trl4": ("online trl4", "many prompts", ONLINE),
    "online-first z=nemo4": ("online nemo4", "many prompts", ONLINE),
    # a step must be one micro-batch, and there an example has two completions
    "online-first z=pairs": (
        "online pairs",
        "many prompts",
        ONLINE | {"micro_batch_tokens": 16384},
    ),
}


# ---- what the methods learn from ---------------------------------------------------------------


def write_records(file: Path, records: list[dict]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".tmp")
    new.write_text("".join(json.dumps(r) + "\n" for r in records))
    new.replace(file)  # a file that is there is whole
    return file


def read_records(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def task_file(name: str) -> Path:
    """train, val or new_kinds of examples/instructions.py."""
    from examples.instructions import write_data

    if not (OUT / "task" / f"{name}.jsonl").exists():
        write_data(OUT / "task", *HELD_OUT.values())
    return OUT / "task" / f"{name}.jsonl"


def extra_fields(records: list[dict]) -> str:
    """data.extra for the checker: all fields of the task's records but the prompt."""
    return ",".join(name for name in records[0] if name != "prompt")


def prompts_file(seed: int) -> Path:
    """The training prompts of a seed: as many of each kind."""
    records = read_records(task_file("train"))[seed * PROMPTS : (seed + 1) * PROMPTS]
    return write_records(OUT / f"data-{seed}" / "prompts.jsonl", records)


def rated_file(seed: int, model: str) -> Path:
    """Answers of the base to them, rated."""
    file = OUT / f"data-{seed}" / "rated.jsonl"
    if not file.exists():
        began, cpu = time.time(), time.process_time()
        asked = [r for r in read_records(prompts_file(seed)) for _ in range(ANSWERS)]
        sampler = Sampler(model)
        answers, _ = sampler.answer(asked, seed)
        cost = {
            "seconds": time.time() - began,
            "cpu_seconds": time.process_time() - cpu,
            "sampling_seconds": sampler.seconds,
            "tokens": sum(a["tokens"] for a in answers),
        }
        write_records(file.with_name("cost.json"), [cost])
        write_records(
            file,
            [
                r | {"completion": message("assistant", a["completion"]), "label": a["right"]}
                for r, a in zip(asked, answers)
            ],
        )
    return file


def weight_of_right(rated: list[dict]) -> float:
    """The class weight with which the right answers count as much as the wrong ones."""
    right = sum(r["label"] for r in rated)
    return (len(rated) - right) / right


def pairs_file(seed: int, model: str) -> Path:
    """A right and a wrong answer to one prompt: all such pairs of a prompt's answers."""
    pairs, rated = [], read_records(rated_file(seed, model))
    for start in range(0, len(rated), ANSWERS):
        answers = rated[start : start + ANSWERS]
        right = [r for r in answers if r["label"]]
        wrong = [r for r in answers if not r["label"]]
        pairs += [
            {"prompt": r["prompt"], "chosen": r["completion"], "rejected": w["completion"]}
            for r in right
            for w in wrong
        ]
    return write_records(OUT / f"data-{seed}" / "pairs.jsonl", pairs)


def demonstrations_file(seed: int, model: str) -> Path:
    """The first right answers, as many as the answers that SPIN may have allow."""
    found, rated = [], read_records(rated_file(seed, model))
    for n, r in enumerate(rated, start=1):
        if len(found) == DEMONSTRATIONS or spin_answers(n, len(found)) >= PROMPTS * ANSWERS:
            break
        if r["label"]:
            found.append(r | {"answers": spin_answers(n, len(found) + 1)})
    return write_records(OUT / f"data-{seed}" / "demonstrations.jsonl", found)


def spin_answers(rated: int, demonstrations: int) -> int:
    """How many sampled answers SPIN uses: those that were rated, and its own."""
    return rated + SPIN["spin.max_iterations"] * demonstrations


def message(role: str, text: str) -> list[dict]:
    return [{"role": role, "content": text}]


# ---- answers of a model, and their verdicts ----------------------------------------------------


class Sampler:
    """A model in a Hugging Face folder, at a temperature, that answers records and scores answers, as a run does it."""

    def __init__(self, folder, temperature: float = TEMPERATURE):
        from lightning.fabric import Fabric

        from load import load_model
        from records.tokenizer import Tokenizer

        self.fabric = Fabric(accelerator="cpu", devices=1, precision=COMMON["precision"])
        self.tokenizer = Tokenizer(Path(folder))
        model = load_model(Path(folder))
        # the head is linear: its logits, those of the scores too, are divided by the temperature
        model.transformer.ln_f.register_forward_hook(lambda module, args, h: h / temperature)
        self.policy = self.fabric.setup_module(model)
        self.seconds = 0.0  # of sampling alone

    def examples(self, records: list[dict]) -> list:
        """Records with different prompts as examples, by the way that a run reads them."""
        from records.examples import load_examples
        from runs.settings import Data

        limits = {"max_prompt": COMMON["data.max_prompt"], "max_completion": TOKENS}
        with tempfile.TemporaryDirectory() as folder:
            file = str(write_records(Path(folder) / "asked.jsonl", records))
            data = Data(train=file, extra=extra_fields(records), **limits)
            return load_examples(file, self.tokenizer, "prompts", data)[0]

    def answer(self, records: list[dict], seed: int) -> tuple[list[dict], list]:
        """-> for each record {"completion", "tokens", "cut", "right"}; and its (prompt, answer), token ids."""
        from evaluate import as_answer
        from examples.instructions import check
        from generate import generate
        from runs.settings import Sampling

        distinct = list({json.dumps(r["prompt"]): r for r in records}.values())
        example_of = {json.dumps(r["prompt"]): e for r, e in zip(distinct, self.examples(distinct))}
        examples = [example_of[json.dumps(r["prompt"])] for r in records]
        prompts = [e.prompt for e in examples]
        sampling = Sampling(batch_size=32)
        began = time.time()
        ids = generate(self.fabric, self.policy, prompts, self.tokenizer, sampling, TOKENS, seed)
        self.seconds += time.time() - began
        answers = [as_answer(self.tokenizer, e, x, []) for e, x in zip(examples, ids)]
        rows = [
            {"completion": a.completion, "tokens": len(x), "cut": a.cut, "right": bool(right)}
            for a, x, right in zip(answers, ids, check(answers))
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


def last_check(folder: Path, model: str, seed: int, temperature: float = TEMPERATURE) -> dict:
    """What a final model answers to the held-out prompts."""
    parts = {name: read_records(task_file(name)) for name in HELD_OUT}
    records = [r | {"part": name} for name, part in parts.items() for r in part]
    policy = Sampler(folder, temperature)
    answers, pairs = policy.answer(records, seed)
    policy_scores = policy.score(pairs)
    del policy
    base_scores = Sampler(model, temperature).score(pairs)
    words = [w for a in answers for w in a["completion"].lower().split()]
    by_kind = {}
    for r, a in zip(records, answers):
        counts = by_kind.setdefault(r["kind"], [0, 0])
        counts[0] += a["right"]
        counts[1] += 1
    result = {
        name: [sum(a["right"] for r, a in zip(records, answers) if r["part"] == name), len(part)]
        for name, part in parts.items()
    }
    result |= {
        "by_kind": by_kind,
        "tokens": statistics.mean(a["tokens"] for a in answers),
        "words": len(words) / len(answers),
        "distinct_words": len(set(words)),
        "cut": sum(a["cut"] for a in answers),
        "kl": statistics.mean(p - b for p, b in zip(policy_scores, base_scores)),
    }
    lines = [r | a for r, a in zip(records, answers)]
    write_records(folder.parent / f"held-out-{seed}.jsonl", lines)
    return result


# ---- one run -----------------------------------------------------------------------------------


def run(name: str, seed: int, model: str, trl: str | None, lr: float | None) -> dict:
    """Train and check by a method. -> its line of results"""
    program, source, settings = METHODS[name]
    row = {"method": name, "seed": seed, "lr": lr}
    if program is None:
        folder = OUT / "base" / "final"  # no such folder: only what the check writes lies beside it
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            folder.symlink_to(Path(model).resolve())
        return row | last_check(folder, model, seed, **settings) | versions()
    out = OUT / f"{name.replace(' ', '-')}-{seed}{f'-lr={lr}' if lr else ''}"
    files = {
        "prompts": lambda: prompts_file(seed),
        "rated": lambda: rated_file(seed, model),
        "pairs": lambda: pairs_file(seed, model),
        "demonstrations": lambda: demonstrations_file(seed, model),
        "many prompts": lambda: task_file("train"),
    }
    data = files[source]()
    if lr:
        settings = settings | {"lr" if program == "grpo_trl" else "optim.lr": lr}
    if source == "rated":
        settings = settings | {"kto.desirable_weight": weight_of_right(read_records(data))}
    n_answers = PROMPTS * ANSWERS
    if source == "demonstrations":
        n_answers = read_records(data)[-1]["answers"]
    if program == "grpo_trl":
        command = [trl, HERE / "grpo_trl.py", "--model", model, "--prompts", data, "--out", out]
        command += ["--seed", seed, "--iterations", ITERATIONS, "--generations", ANSWERS]
        command += ["--answers", PROMPTS * ANSWERS // ITERATIONS, "--batch", BATCH]
        command += ["--tokens", TOKENS, *flags(settings)]
        command += ["--judge", f"{sys.executable} {__file__} judge"]
    else:
        command = [sys.executable, __file__, "train", *program.split(), *flags(COMMON | settings)]
        command += ["--model", model, "--data.train", data, "--seed", seed]
        if program.startswith("online"):  # the others need no checker
            command += ["--data.extra", extra_fields(read_records(data))]
        command += ["--out_dir", out, "--resume", "auto"]
    row |= {"answers": n_answers, "resumed": out.exists()} | timed(command, out)
    if source in ("rated", "pairs", "demonstrations"):
        cost = read_records(data.with_name("cost.json"))[0]
        row["base's answers"] = cost
        for key in ("seconds", "cpu_seconds"):
            row[key] += cost[key]
    if program == "grpo_trl":
        row["trl"] = json.loads((out / "result.json").read_text())
    log = (OUT / f"{out.name}.log").read_text()
    shares = re.findall(r"^iteration \d+: .*right \(([\d.]+)%", log, re.MULTILINE)
    row["rollouts"] = [float(x) for x in shares]
    if program == "grpo_trl":
        row["rollouts"] = [100 * x for x in row["trl"]["right"]]
    row["settings"] = settings
    return row | last_check(out / "final", model, seed) | versions()


def flags(settings: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


def timed(command: list, out: Path) -> dict:
    """Run a command, its output appended to a log. -> its seconds of wall and CPU. SystemExit if it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / f"{out.name}.log").open("a") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
        while process.poll() is None:
            with contextlib.suppress(KeyboardInterrupt):  # the run saves itself and ends
                process.wait()
    if process.returncode:
        raise SystemExit(f"{out.name}: exit code {process.returncode}: see {log.name}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.time() - began, "cpu_seconds": cpu}


def versions() -> dict:
    import torch

    return {"torch": torch.__version__, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}


def train(program: str, *argv: str) -> None:
    """The program's own main with the checker of the task."""
    from examples.instructions import check

    if argv and not argv[0].startswith("--"):
        import z_variants

        z_variants.run_variant(program, argv[0], list(argv[1:]), checker=check)
    else:
        __import__(program).main(list(argv), checker=check)


def judge() -> None:
    """The checker for grpo_trl.py: reads a line of JSON, [[prompt, completion, fields, cut], ...], and
    writes a line, [verdict, ...]."""
    from evaluate import Answer
    from examples.instructions import check

    for line in sys.stdin:
        answers = [Answer(*row) for row in json.loads(line)]
        print(json.dumps([bool(x) for x in check(answers)]), flush=True)


# ---- tables ------------------------------------------------------------------------------------


def finished() -> list[dict]:
    return read_records(RESULTS) if RESULTS.exists() else []


def counted(name: str) -> list[dict]:
    """The lines of a method that tables count."""
    return [r for r in finished() if r["method"] == name and r["seed"] > 0 and not r.get("lr")]


def print_tables() -> None:
    """Shares over all seeds with their intervals; medians of the rest."""
    from evaluate import wilson_interval

    print(
        "| method | seeds | held-out topics | held-out kinds | KL, nats | tokens | distinct words | cut ",
        end="",
    )
    print("| minutes | CPU minutes |\n" + "| --- " * 10 + "|")
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
        for key in ("seconds", "cpu_seconds"):
            times = [r[key] / 60 for r in rows if key in r and not r.get("resumed")]
            cells.append(f"{statistics.median(times):.1f}" if times else "")
        print(f"| {' | '.join(cells)} |")
    print("\nRight answers in % in each iteration's rollout:\n")
    for r in finished():
        if r.get("rollouts"):
            shares = ", ".join(f"{x:.0f}" for x in r["rollouts"])
            print(f"- {r['method']}, seed {r['seed']}: {shares}")
    print("\nSampling alone, tokens a second:\n")
    for r in finished():
        for name, cost in (("TRL", r.get("trl")), ("ours", r.get("base's answers"))):
            if cost:
                speed = cost["tokens"] / cost["sampling_seconds"]
                print(f"- {name}, {r['method']}, seed {r['seed']}: {speed:.0f}")


LABELS = {  # of methods.svg, which leaves out the variants of z
    "base": "base",
    "online-first": "online KTO, reference first",
    "online-last": "online KTO, reference last",
    "online-first 4 answers": "online KTO, 4 answers a prompt",
    "kto": "offline KTO",
    "apo_zero_unpaired": "offline KTO, z = 0",
    "dpo": "DPO",
    "spin": "SPIN",
    "grpo": "GRPO (TRL)",
}


def draw(file: Path) -> None:
    """Accuracy, with its 95% interval, against KL: a point for each run."""
    from matplotlib.figure import Figure

    from evaluate import wilson_interval

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (part, title) in zip(panels, PARTS.items()):
        for i, name in enumerate(LABELS):
            rows = counted(name)
            if not rows:
                continue
            shares = [r[part][0] / r[part][1] for r in rows]
            intervals = [wilson_interval(*r[part]) for r in rows]
            below = [100 * (x - low) for x, (low, _) in zip(shares, intervals)]
            above = [100 * (high - x) for x, (_, high) in zip(shares, intervals)]
            axes.errorbar(
                [r["kl"] for r in rows],
                [100 * x for x in shares],
                yerr=[below, above],
                fmt="osv^"[i // 10],
                color=f"C{i % 10}",
                label=LABELS[name],
                elinewidth=1,
            )
        axes.set(title=title, xlabel="KL to the base, nats an answer", ylim=(0, 60))
    panels[0].set_ylabel("right answers, %")
    panels[1].legend(fontsize=7)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "table", "picture"])
    parser.add_argument("methods", nargs="*", help=f"of {', '.join(METHODS)}; default: all")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--model", default=str(HERE.parent / "out" / "smollm2-135m"))
    parser.add_argument(
        "--trl", help="Python of an environment with TRL; without it grpo is left out"
    )
    parser.add_argument("--lr", type=float, help="another learning rate than the method's")
    args = parser.parse_args()
    if args.what == "run":
        for seed in map(int, args.seeds.split(",")):
            for name in args.methods or METHODS:
                asked = (name, seed, args.lr)
                known = any((r["method"], r["seed"], r.get("lr")) == asked for r in finished())
                if known or (name == "grpo" and not args.trl):
                    continue
                print(f"{name}, seed {seed} ...", flush=True)
                line = json.dumps(run(name, seed, args.model, args.trl, args.lr))
                with RESULTS.open("a") as f:
                    f.write(line + "\n")
                print(line, flush=True)
    if args.what == "picture":
        draw(HERE / "methods.svg")
    else:
        print_tables()


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:  # a process that run() started
        from runs.console import run_cli

        run_cli(lambda: train(*sys.argv[2:]))
    elif sys.argv[1:2] == ["judge"]:  # a process that grpo_trl.py started
        judge()
    else:
        main()
