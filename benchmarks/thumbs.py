"""How many thumbs until held-out answers follow? SmolLM2-135M and a stand-in person who wants short answers.

    python examples/smollm2.py                  # the model, once
    python benchmarks/thumbs.py run             # what is missing, one run after the other
    python benchmarks/thumbs.py run --thumbs 40 --seeds 0 --lr 4e-4    # another learning rate
    python benchmarks/thumbs.py table           # the table for RESULTS.md

A run is what a user of python -m rate does: the model answers so many questions about things, each answer gets a thumb,
and the command that the page shows trains on the thumbs (config/thumbs.yaml, with its class weights). The
person gives a thumb up to an answer of three words or more that ends within 48 tokens. Two of six questions ask for
a short answer; the other four are open, and the model nearly always goes on beyond 48 tokens there.

The trained model then answers the same six questions about things that no thumb was about. Fewer thumbs of a seed are
the first ones of more. A finished run is a line in benchmarks/thumbs.jsonl and is not run again; seed 0 is for
tuning, and no table counts it. There are 324 questions to rate. Everything else is in out/thumbs/. A step of 8
answers takes 13 s on one core that multiplies no bfloat16: 0 to 160 thumbs of one seed are 150 steps and 780 sampled
answers, about 45 minutes; 320 thumbs as long again.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "thumbs.jsonl"
OUT = HERE.parent / "out" / "thumbs"
TOKENS, TEMPERATURE = 48, 0.7
FEWEST_WORDS = 3
ASKED = ("In one sentence, what is {}?", "In a few words: what is {} for?")
OPEN = (
    "What is {}?",
    "Tell me one fact about {}.",
    "What are some uses of {}?",
    "Where would one find {}?",
)
TRAINED = """an
apple, a bridge, a candle, a carpet, a castle, a cat, cheese, chess, a clock, a cloud, a comet, copper, a
cow, a desert, a drum, a feather, a fern, a forest, a fox, a garden, glass, gold, a guitar, a harbour, a horse, an
island, jazz, a kite, a lamp, leather, a library, a magnet, a map, milk, a mirror, the moon, a mountain, a needle, an
onion, an orchestra, an owl, paper"""
# Asked only after all questions about the things above: the first 252 thumbs of a seed were given before these.
ADDED = """a pencil, pepper, a piano, a planet, rice, a river, a robot, a rose, a ship, snow, tea, a wheel"""
HELD_OUT = """bread, a violin, honey, a volcano, rust, a rainbow, coffee, a whale, a ladder, salt, a tulip, a harp, a
glacier, a coin, silk, a telescope"""


def questions(things: str) -> list[str]:
    """All six questions about each of the things."""
    names = " ".join(things.split()).split(", ")
    return [question.format(name) for name in names for question in ASKED + OPEN]


def thumb(answer: dict) -> bool:
    """What the person says of an answer."""
    return not answer["cut"] and len(answer["text"].split()) >= FEWEST_WORDS


def answers(folder: Path, prompts: list[str], seed: int) -> list[dict]:
    """One answer of the model in a Hugging Face folder to each prompt: {"prompt", "text", "cut"}."""
    import numpy as np
    import torch
    from lightning.fabric import Fabric

    from infra.settings import Sampling
    from models.hub import find_model
    from models.load import load_model
    from records.forms import Record
    from records.tokenizer import Tokenizer
    from sampler import generate, read_answer

    fabric = Fabric(accelerator="cpu", devices=1)
    source = find_model(str(folder))
    tokenizer = Tokenizer(source)
    policy = fabric.to_device(load_model(source, dtype=torch.float32))
    turns = [Record([{"role": "user", "content": prompt}], []) for prompt in prompts]
    encoded = tokenizer.encode_all([tokenizer.render(x) for x in turns], by_template=True)
    ids = [np.array(prompt) for prompt, _ in encoded]
    sampling = Sampling(temperature=TEMPERATURE, batch_size=48)
    rows = []
    for prompt, new in zip(
        prompts, generate(fabric, policy, ids, tokenizer, sampling, TOKENS, seed)
    ):
        text, cut = read_answer(tokenizer, new)
        rows.append({"prompt": prompt, "text": text, "cut": cut})
    return rows


def write_lines(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rated(model: Path, seed: int, n: int) -> Path:
    """A file of the first n ratings of a seed, as the page writes them."""
    prompts = []
    for things in (TRAINED, ADDED):
        some = questions(things)
        random.Random(seed).shuffle(some)
        prompts += some
    if n > len(prompts):
        raise SystemExit(f"--thumbs {n}: there are {len(prompts)} questions")
    file = OUT / f"ratings-{seed}-{n}.jsonl"
    rows = []
    for answer in answers(model, prompts[:n], seed):
        prompt = [{"role": "user", "content": answer["prompt"]}]
        rows.append({"prompt": prompt, "completion": answer["text"], "label": thumb(answer)})
    write_lines(file, rows)
    return file


def held_out(folder: Path, seed: int) -> dict:
    """How many held-out answers get a thumb up, and how long they are."""
    rows = answers(folder, questions(HELD_OUT), seed)
    counts = {"asked": [0, 0], "open": [0, 0]}
    for i, row in enumerate(rows):
        count = counts["asked" if i % len(ASKED + OPEN) < len(ASKED) else "open"]
        count[0] += thumb(row)
        count[1] += 1
    write_lines(OUT / f"held-out-{folder.parent.name}.jsonl", rows)
    words = statistics.mean(len(row["text"].split()) for row in rows)
    distinct = len({word for row in rows for word in row["text"].lower().split()})
    return counts | {"words": round(words, 1), "distinct_words": distinct}


def run(model: Path, seed: int, n: int, lr: float | None) -> dict:
    """Rate, train by the command that the page shows, and check. -> its line of results"""
    import torch
    import transformers

    from rate.desk import training_command

    began = time.time()
    row = {"thumbs": n, "seed": seed, "lr": lr}
    row |= {"torch": torch.__version__, "transformers": transformers.__version__}
    if n == 0:
        return row | held_out(model, seed)
    file = rated(model, seed, n)
    out = OUT / f"run-{seed}-{n}{f'-lr={lr}' if lr else ''}"
    command = [sys.executable, *training_command(str(model), file)[1:], "--out_dir", str(out)]
    command += ["--seed", str(seed), "--precision", "32-true", "--resume", "auto"]
    command += ["--progress", "false", "--val_interval", "null"]
    command += ["--optim.lr", str(lr)] if lr else []
    with (OUT / f"{out.name}.log").open("a") as log:
        code = subprocess.run(command, stdout=log, stderr=log).returncode
    if code:
        raise SystemExit(f"exit code {code}: see {log.name}")
    labels = [json.loads(line)["label"] for line in file.read_text().splitlines()]
    row |= {"up": sum(labels), "down": labels.count(False)} | held_out(out / "final", seed)
    return row | {"seconds": round(time.time() - began)}


def read_results() -> list[dict]:
    return (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )


def print_table() -> None:
    print(
        "| thumbs | seed | up, down | open questions | asked to be short | words | different words |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in sorted(read_results(), key=lambda row: (row["thumbs"], row["seed"])):
        if row["seed"] == 0 or row["lr"]:
            continue
        cells = [
            row["thumbs"],
            row["seed"],
            f"{row.get('up', '')}, {row.get('down', '')}".strip(", "),
        ]
        for right, of in (row["open"], row["asked"]):
            cells.append(f"{right} of {of} ({right / of:.0%})")
        cells += [row["words"], row["distinct_words"]]
        print("| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--model", type=Path, default=HERE.parent / "out" / "smollm2-135m")
    parser.add_argument("--thumbs", default="0,40,160,20,80,320", help="in this order")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--lr", type=float, help="default: that of config/thumbs.yaml")
    args = parser.parse_args()
    if args.what == "table":
        return print_table()
    for seed in map(int, args.seeds.split(",")):
        for n in map(int, args.thumbs.split(",")):
            is_done = (n, seed, args.lr) in [
                (r["thumbs"], r["seed"], r["lr"]) for r in read_results()
            ]
            if not is_done:
                row = run(args.model, seed, n, args.lr)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
