"""How many thumbs until held-out answers follow? SmolLM2-135M and a stand-in person who wants short answers.

    python examples/smollm2.py                  # the model, once
    python benchmarks/thumbs.py                 # the table; missing runs run first, one after the other

A run does as a user of python -m rate: the model answers questions about things, each answer gets a thumb, and the
command that the page shows trains on the thumbs (config/thumbs.yaml, with its class weights). The person gives a thumb
up to an answer of three words or more that ends within 48 tokens. Two of six questions ask for a short answer; the
other four are open, and nearly all answers to them have more than 48 tokens.

The trained model then answers the same six questions about things that no thumb was about. Fewer thumbs of a seed are
the first ones of more. There are 324 questions to rate. A finished run is a row of benchmarks/thumbs.jsonl and is not
run again. Everything else is in out/thumbs/. A step of 8 answers takes 13 s on one core that multiplies no bfloat16.
All runs of one seed take about 90 minutes, half of them for 320 thumbs.
"""

import random
import statistics
import sys
from itertools import product
from pathlib import Path

from vs_trl import (
    HERE,
    print_cells,
    print_head,
    read_lines,
    run_once,
    run_process,
    write_records,
)

RESULTS = HERE / "thumbs.jsonl"
OUT = HERE.parent / "out" / "thumbs"
MODEL = HERE.parent / "out" / "smollm2-135m"
SEEDS = (1, 2, 3, 4, 5)
THUMBS = (0, 20, 40, 80, 160, 320)
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
    """Whether the person gives an answer a thumb up."""
    return not answer["cut"] and len(answer["completion"].split()) >= FEWEST_WORDS


def answers(folder: Path, prompts: list[str], seed: int, out: Path) -> list[dict]:
    """Write one answer of a model to each prompt into the file `out`. -> its records"""
    out.unlink(missing_ok=True)  # left by a run that was stopped
    asked = write_records(out.stem, [{"prompt": prompt} for prompt in prompts])
    command = f"generate.py --model {folder} --prompts {asked} --out {out} --seed {seed}"
    command += f" --max_new_tokens {TOKENS} --temperature {TEMPERATURE} --batch_size 48"
    run_process([sys.executable, *command.split()])
    return read_lines(out)


def rated(seed: int, n: int) -> list[dict]:
    """The first n ratings of a seed."""
    prompts = []
    for things in (TRAINED, ADDED):
        some = questions(things)
        random.Random(seed).shuffle(some)
        prompts += some
    rows = answers(MODEL, prompts[:n], seed, OUT / f"answers-{seed}-{n}.jsonl")
    return [row | {"label": thumb(row)} for row in rows]


def held_out(folder: Path, seed: int, name: str) -> dict:
    """How many held-out answers get a thumb up, and how long they are."""
    rows = answers(folder, questions(HELD_OUT), seed, OUT / f"held-out-{name}.jsonl")
    counts = {"asked": [0, 0], "open": [0, 0]}
    for i, row in enumerate(rows):
        count = counts["asked" if i % len(ASKED + OPEN) < len(ASKED) else "open"]
        count[0] += thumb(row)
        count[1] += 1
    words = statistics.mean(len(row["completion"].split()) for row in rows)
    return counts | {"words": round(words, 1)}


def run(thumbs: int, seed: int) -> dict:
    """Rate, train by the command that the page shows, and check. -> its results"""
    from rate.desk import training_command

    OUT.mkdir(parents=True, exist_ok=True)
    name = f"{seed}-{thumbs}"
    if thumbs == 0:
        return held_out(MODEL, seed, name)
    rows = rated(seed, thumbs)
    file = Path(write_records(f"ratings-{name}", rows))
    out = OUT / f"run-{name}"
    command = [sys.executable, *training_command(str(MODEL), file)[1:], f"--out_dir={out}"]
    command += [f"--seed={seed}", "--precision=32-true", "--resume=auto", "--val_interval=null"]
    run_process(command)
    return held_out(out / "final", seed, name)


def main() -> None:
    print_head("seed", "thumbs", "open questions", "asked to be short", "words")
    for seed, n in product(SEEDS, THUMBS):
        row = run_once(RESULTS, run, thumbs=n, seed=seed)
        shares = [f"{up} of {n} ({up / n:.0%})" for up, n in (row["open"], row["asked"])]
        print_cells(seed, row["thumbs"], *shares, row["words"])


if __name__ == "__main__":
    main()
