"""People as judges: does log pi - log ref follow what people said of answers to prompts that training never had?

    python examples/smollm2.py                                   # the model, once
    python benchmarks/people.py run --pandalm testset-v1.json --truthfulqa TruthfulQA.csv
    python benchmarks/people.py run kto dpo --seeds 2 --pandalm testset-v1.json
    python benchmarks/people.py compare --pandalm ... --truthfulqa ...    # each method beside KTO
    python benchmarks/people.py table                            # the tables for RESULTS.md

Two public files, which are not part of this project:

- pandalm: data/testset-v1.json of WeOpenML/PandaLM (Apache-2.0, arXiv 2306.05087). Two answers to an instruction,
  and which one each of three annotators found better, or a tie. Counted are pairs for which two or three of them name
  the same answer, where neither answer is empty: the better one is a thumb up, the other one a thumb down. Many answers
  stand in several pairs, in some as the better one and in others not.
- truthfulqa: TruthfulQA.csv of sylinrl/TruthfulQA (Apache-2.0, arXiv 2109.07958). Questions with true and false
  answers, unequal numbers of them for each question: single ratings, the form that KTO is made for.

A seed is a split and an order. Held out are whole instructions (with all their inputs) or questions. Each method learns
from the same prompts, and sees the same number of completions, with LoRA of rank 16 and one learning rate, which
was not tuned:

- KTO, KTO with z = 0 and BCO see each rating once;
- DPO sees the same answers of PandaLM as pairs. For TruthfulQA a question with n answers gives n / 2 pairs of a true
  and a false one, in which answers of the rarer kind come again;
- SFT sees the good answers alone, so about twice each. It is kto.py with the weights of its two losses at 0 and 1:
  the mean over a step's answers of -log pi(y|x).

Then each answer to the held-out prompts is scored: r = log pi - log ref. A row of people.jsonl has, each with a 95%
interval (a bootstrap over prompts, for the model and the split as they are):

- pairs: how often r of the better answer is above that of the worse one (a tie is one half). PandaLM's pairs;
  all pairs of a true and a false answer to one question;
- auc: the same for any good and any bad answer, of different prompts too; sign: how often r > 0 is the label;
- better_shorter, better_longer: pairs, where the better answer has fewer or more tokens; length: the correlation of r
  with the number of tokens. A judge who only counts tokens has 0, 1 and 1;
- alike: pairs, where both answers or none have a negation. Of TruthfulQA's pairs the true answer alone says "no" or
  "not" far more often than the false one alone, and this is easily learned;
- above_longer: pairs minus what "the longer one is better" has on the same pairs.

Floors are "the longer one is better", "the one with a negation is better", and the base's own log-prob, of the
answer and a token. The ceiling is an
annotator: how often one agrees with the other two, where these agree.

A finished run is a line of people.jsonl and is not run again. Its folder under out/people/ has the scores; the model
itself (540 MB) is deleted.
"""

import argparse
import csv
import json
import random
import re
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from methods import read_records, run_logged, write_records

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "people.jsonl"
OUT = HERE.parent / "out" / "people"
# completions that a method sees; pandalm-all: nearly all that are not held out
RATINGS = {"pandalm": 160, "pandalm-all": 1264, "truthfulqa": 480}
BATCH = {"pandalm": 8, "pandalm-all": 8, "truthfulqa": 16}  # completions in a step
HELD_OUT = {"pandalm": 30, "pandalm-all": 30, "truthfulqa": 60}  # prompts
MAX_PROMPT, MAX_COMPLETION = 512, 128  # tokens; a longer answer loses its end
RESAMPLES = 1000
PACKED = 16  # answers that are scored at once
NEGATION = re.compile(
    r"\b(no|not|nothing|never|none|nobody|neither|nor|cannot)\b|n['’]t\b", re.IGNORECASE
)
CHECKED = 3  # scores that transformers computes, too

COMMON = {
    "precision": "32-true",
    "lora.rank": 16,
    "lora.alpha": 32,
    "optim.lr": 2e-4,
    "optim.warmup": 4,
    "data.max_prompt": MAX_PROMPT,
    "data.max_completion": MAX_COMPLETION,
    "data.group_by_prompt": "true",  # a prompt is computed once for its answers
    "epochs": 4,  # max_steps ends the run
    "eval.samples": 0,
    "progress": "false",
    "val_interval": "null",
}
ZERO = {"kto.loss": "apo_zero_unpaired"}
SFT = {"kto.preference_loss_weight": 0, "kto.sft_loss_weight": 1}
# name -> (program, what it learns from, completions of an example, settings)
METHODS = {
    "kto": ("kto.py", "ratings", 1, {}),
    "dpo": ("dpo.py", "pairs", 2, {}),
    "sft": ("kto.py", "good", 1, ZERO | SFT),
    "bco": ("examples/bco.py", "ratings", 1, {}),
    "apo_zero_unpaired": ("kto.py", "ratings", 1, ZERO),
}


# ---- what people said ----------------------------------------------------------------------------


class Question(NamedTuple):
    """A prompt, and what people said of its answers."""

    prompt: str
    group: str  # prompts of one group are never on both sides of a split
    answers: list[str]
    good: list[bool]
    pairs: list[tuple[int, int]]  # the better and the worse answer, as places in `answers`
    votes: list[tuple[int, int, int]] = []  # PandaLM: of each pair, what the three annotators said


def read_pandalm(file: Path) -> list[Question]:
    """The pairs with a majority. Answer 2i is the better one of pair i, answer 2i + 1 the worse one."""
    questions = {}
    for row in json.loads(file.read_text(encoding="utf-8")):
        answers = row["response1"], row["response2"]
        votes = row["annotator1"], row["annotator2"], row["annotator3"]
        (winner, count), *_ = Counter(votes).most_common(1)
        # some answers are empty, and some are `true` in place of a text
        are_texts = all(isinstance(text, str) and text.strip() for text in answers)
        if winner == 0 or count < 2 or not are_texts:
            continue
        prompt = "\n\n".join(text for text in (row["instruction"], row["input"]) if text)
        new = Question(prompt, row["instruction"], [], [], [], [])
        question = questions.setdefault(prompt, new)
        n = len(question.answers)
        question.answers.extend([answers[winner - 1], answers[2 - winner]])
        question.good.extend([True, False])
        question.pairs.append((n, n + 1))
        question.votes.append(votes)
    return list(questions.values())


def read_truthfulqa(file: Path) -> list[Question]:
    """Every question with its true answers and then its false ones; all pairs of the two."""
    questions = []
    with file.open(encoding="utf-8-sig", newline="") as lines:
        for row in csv.DictReader(lines):
            right = split_answers(row["Correct Answers"])
            wrong = split_answers(row["Incorrect Answers"])
            good = [True] * len(right) + [False] * len(wrong)
            places = range(len(good))
            pairs = [(i, j) for i in places if good[i] for j in places if not good[j]]
            text = row["Question"]
            questions.append(Question(text, text, right + wrong, good, pairs))
    return questions


def split_answers(cell: str) -> list[str]:
    """The answers in a cell, without those that stand there twice."""
    answers = [text.strip() for text in cell.split(";")]
    return list(dict.fromkeys(text for text in answers if text))


READ = {"pandalm": read_pandalm, "pandalm-all": read_pandalm, "truthfulqa": read_truthfulqa}


def split(questions: list[Question], n: int, seed: int) -> tuple[list[Question], list[Question]]:
    """-> for training; held out: whole groups, until these are n questions or more."""
    groups = sorted({q.group for q in questions})
    random.Random(seed).shuffle(groups)
    held_out = []
    while len(held_out) < n:
        group = groups.pop()
        held_out += [q for q in questions if q.group == group]
    return [q for group in groups for q in questions if q.group == group], held_out


def choose(data: str, questions: list[Question]) -> tuple[list, list]:
    """-> ratings (prompt, answer, good), and pairs (prompt, better, worse) of the same questions. PandaLM: one pair of
    each prompt, then a second one, and so on. TruthfulQA: all answers of a question, so that a step computes its
    prompt once."""
    n = RATINGS[data]
    pairs = []
    if READ[data] is read_pandalm:
        for i in range(max(len(q.pairs) for q in questions)):
            pairs += [pair_texts(q, *q.pairs[i]) for q in questions if i < len(q.pairs)]
        pairs = pairs[: n // 2]
        ratings = []
        for prompt, better, worse in pairs:
            ratings += [(prompt, better, True), (prompt, worse, False)]
        return ratings, pairs
    ratings = []
    for q in questions:
        if len(ratings) >= n:
            break
        ratings += [(q.prompt, text, good) for text, good in zip(q.answers, q.good)]
        right = [i for i, good in enumerate(q.good) if good]
        wrong = [i for i, good in enumerate(q.good) if not good]
        for i in range((len(q.answers) + 1) // 2):
            pairs.append(pair_texts(q, right[i % len(right)], wrong[i % len(wrong)]))
    return ratings[:n], pairs[: n // 2]


def pair_texts(q: Question, better: int, worse: int) -> tuple[str, str, str]:
    return q.prompt, q.answers[better], q.answers[worse]


def turn(role: str, text: str) -> list[dict]:
    return [{"role": role, "content": text}]


def write_data(data: str, questions: list[Question], seed: int) -> list[Question]:
    """Write what the methods learn from, and the held-out answers, each once. -> the held-out questions"""
    folder = OUT / f"{data}-{seed}"
    training, held_out = split(questions, HELD_OUT[data], seed)
    ratings, pairs = choose(data, training)
    records = {"ratings": [], "good": [], "pairs": [], "held-out": []}
    for prompt, answer, good in ratings:
        record = {"prompt": turn("user", prompt), "completion": turn("assistant", answer)}
        records["ratings"].append(record | {"label": good})
        if good:
            records["good"].append(record | {"label": True})
    for prompt, better, worse in pairs:
        answers = {"chosen": turn("assistant", better), "rejected": turn("assistant", worse)}
        records["pairs"].append({"prompt": turn("user", prompt)} | answers)
    for prompt, answer in distinct(held_out):
        # the label is not used: an answer may be good in one pair and bad in another one
        record = {"prompt": turn("user", prompt), "completion": turn("assistant", answer)}
        records["held-out"].append(record | {"label": True})
    for name, lines in records.items():
        write_records(folder / f"{name}.jsonl", lines)
    return held_out


def distinct(questions: list[Question]) -> list[tuple[str, str]]:
    """Each prompt with each of its answers, once."""
    return list(dict.fromkeys((q.prompt, text) for q in questions for text in q.answers))


# ---- scores --------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """Of each answer of a file."""

    logps: list[float]  # nats, summed over its tokens
    tokens: list[int]  # EOS included
    off: float  # nats: how far the first few are from transformers' own


def score(folder: Path, file: Path) -> Scores:
    """The model in a Hugging Face folder scores the answers of a file."""
    from lightning.fabric import Fabric

    from infra.settings import Data
    from models.hub import find_model
    from models.load import load_model
    from packing import pack
    from records.examples import load_examples
    from records.tokenizer import Tokenizer

    fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
    source = find_model(str(folder))
    limits = Data(train=str(file), max_prompt=MAX_PROMPT, max_completion=MAX_COMPLETION)
    examples, _ = load_examples(str(file), Tokenizer(source), "rated", limits)
    policy = fabric.setup_module(load_model(source)).eval()
    logps = []
    with torch.no_grad():
        for i in range(0, len(examples), PACKED):
            part = examples[i : i + PACKED]
            packed = pack([e.prompt for e in part], [e.completions for e in part])
            logps += policy(packed).logps[:, 0].double().tolist()
    tokens = [len(e.completions[0]) for e in examples]
    records = read_records(file)
    assert len(records) == len(examples)
    short = [i for i, n in enumerate(tokens) if n < MAX_COMPLETION][:CHECKED]
    theirs = score_by_transformers(folder, [records[i] for i in short])
    off = max(abs(logps[i] - x) for i, x in zip(short, theirs))
    return Scores(logps, tokens, off)


@torch.no_grad()
def score_by_transformers(folder: Path, records: list[dict]) -> list[float]:
    """The same log-probs by transformers alone: its tokenizer, chat template and model."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    logps = []
    for record in records:
        turns = record["prompt"] + record["completion"]
        prompt = tokenizer.apply_chat_template(
            record["prompt"], add_generation_prompt=True, return_dict=False
        )
        answer = tokenizer.apply_chat_template(turns, return_dict=False)[len(prompt) :]
        logits_LV = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logp_LV = logits_LV.double().log_softmax(-1)
        logps.append(logp_LV[torch.arange(len(answer)), torch.tensor(answer)].sum().item())
    return logps


# ---- how well numbers follow the people ----------------------------------------------------------


class Judged(NamedTuple):
    """The answers to a held-out question, and a judge's number for each: arrays."""

    value: np.ndarray
    tokens: np.ndarray
    negates: np.ndarray
    good: np.ndarray
    pairs: np.ndarray  # (pairs, 2)


def judge(questions: list[Question], of_answer: dict, tokens: dict) -> list[Judged]:
    """of_answer, tokens: {(prompt, answer): a number}."""
    judged = []
    for q in questions:
        value = np.array([of_answer[q.prompt, text] for text in q.answers], float)
        length = np.array([tokens[q.prompt, text] for text in q.answers], float)
        negates = np.array([has_negation(text) for text in q.answers])
        pairs = np.array(q.pairs).reshape(-1, 2)
        judged.append(Judged(value, length, negates, np.array(q.good), pairs))
    return judged


def has_negation(text: str) -> bool:
    return bool(NEGATION.search(text))


def judge_by_r(questions: list[Question], scores: Scores, base: Scores) -> list[Judged]:
    """The judge r = log pi - log ref, of a trained model's scores and the base's."""
    keys = distinct(questions)
    r = {key: x - ref for key, x, ref in zip(keys, scores.logps, base.logps)}
    return judge(questions, r, dict(zip(keys, base.tokens)))


def wins(value: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Of each pair 1 where the better answer has the larger number, 1/2 where both have the same, else 0."""
    better, worse = value[pairs[:, 0]], value[pairs[:, 1]]
    return (better > worse) + 0.5 * (better == worse)


def measure(judged: list[Judged]) -> dict[str, float]:
    """What the docstring of this file lists; nan where there is nothing to measure."""
    from kto import auc

    value = np.concatenate([j.value for j in judged])
    tokens = np.concatenate([j.tokens for j in judged])
    good = np.concatenate([j.good for j in judged])
    won = np.concatenate([wins(j.value, j.pairs) for j in judged])
    longer_won = np.concatenate([wins(j.tokens, j.pairs) for j in judged])
    negation_won = np.concatenate([wins(j.negates, j.pairs) for j in judged])
    return {
        "pairs": won.mean(),
        "auc": auc(torch.tensor(value), torch.tensor(good)),
        "sign": ((value > 0) == good).mean(),
        "better_shorter": mean(won[longer_won == 0]),
        "better_longer": mean(won[longer_won == 1]),
        "alike": mean(won[negation_won == 0.5]),
        "above_longer": (won - longer_won).mean(),
        "length": correlation(value, tokens),
        "r_good": value[good].mean(),
        "r_bad": value[~good].mean(),
    }


def mean(x: np.ndarray) -> float:
    return x.mean() if len(x) else float("nan")


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    if x.std() == 0 or y.std() == 0:
        return float("nan")
    return np.corrcoef(x, y)[0, 1]


def agreement(votes: list[list[tuple[int, int, int]]]) -> dict[str, float]:
    """How often an annotator names the answer that the other two name; a tie is one half. votes: of each prompt, of
    each of its pairs, which has a majority for one answer."""
    agreed = []
    for pair in (pair for prompt in votes for pair in prompt):
        for i in range(3):
            one = pair[i]
            other, another = pair[:i] + pair[i + 1 :]
            if other == another:
                agreed.append(0.5 if one == 0 else float(one == other))
    return {"pairs": mean(np.array(agreed))}


def with_intervals(measured, prompts: list) -> dict[str, list[float]]:
    """{name: [value, low, high]} of a function of a list with something of each prompt: 95% intervals, by drawing
    prompts with replacement. What is nan is left out."""
    rng = np.random.default_rng(1)
    n = len(prompts)
    draws = [measured([prompts[i] for i in rng.integers(n, size=n)]) for _ in range(RESAMPLES)]
    result = {}
    for name, value in measured(prompts).items():
        if np.isnan(value):
            continue
        drawn = np.array([draw[name] for draw in draws])
        low, high = np.nanpercentile(drawn, [2.5, 97.5])
        result[name] = [round(float(x), 4) for x in (value, low, high)]
    return result


# ---- one run -------------------------------------------------------------------------------------


def score_base(data: str, held_out: list[Question], seed: int, model: Path) -> Scores:
    """The base's scores, computed once for a split."""
    file = OUT / f"{data}-{seed}" / "base.json"
    if not file.exists():
        scores = score(model, file.with_name("held-out.jsonl"))
        file.write_text(json.dumps(scores))
    return Scores(*json.loads(file.read_text()))


def floors(data: str, held_out: list[Question], base: Scores) -> dict[str, dict]:
    """Judges that have learned nothing, and the annotators. -> {name: measures}"""
    keys = distinct(held_out)
    tokens = dict(zip(keys, base.tokens))
    judges = {
        "longer": tokens,
        "has a negation": {(prompt, text): has_negation(text) for prompt, text in keys},
        "base's log-prob": dict(zip(keys, base.logps)),
        "base's log-prob a token": {k: x / tokens[k] for k, x in zip(keys, base.logps)},
    }
    rows = {
        name: with_intervals(measure, judge(held_out, of_answer, tokens))
        for name, of_answer in judges.items()
    }
    if READ[data] is read_pandalm:
        rows["an annotator"] = with_intervals(agreement, [q.votes for q in held_out])
    return rows


def train(data: str, method: str, seed: int, model: Path) -> tuple[Path, float]:
    """-> the run's folder, CPU seconds"""
    program, kind, completions, settings = METHODS[method]
    out = OUT / f"{data}-{seed}" / method
    settings = COMMON | settings | {
        "model": model,
        "data.train": out.with_name(f"{kind}.jsonl"),
        "reference_cache": OUT / "reference",  # the methods share most of it
        "batch_size": BATCH[data] // completions,
        "max_steps": RATINGS[data] // BATCH[data],
        "seed": seed,
        "out_dir": out,
        "resume": "auto",
    }  # fmt: skip
    command = [sys.executable, HERE.parent / program]
    command += [f"--{name}={value}" for name, value in settings.items()]
    return out, run_logged(list(map(str, command)), out.with_name(f"{method}.log"))


def run(data: str, method: str, seed: int, held_out: list[Question], model: Path) -> dict:
    """Train, score the held-out answers, compare with the people. -> its line of results"""
    began = time.time()
    base = score_base(data, held_out, seed, model)
    out, cpu_seconds = train(data, method, seed, model)
    scores = score(out / "final", out.with_name("held-out.jsonl"))
    out.with_name(f"{method}.json").write_text(json.dumps(scores))
    shutil.rmtree(out / "final")
    return {
        "measures": with_intervals(measure, judge_by_r(held_out, scores, base)),
        "off": scores.off,
        "cpu_seconds": round(cpu_seconds),
        "seconds": round(time.time() - began),
    }


def read_results() -> list[dict]:
    return read_records(RESULTS) if RESULTS.exists() else []


def add_row(data: str, method: str, seed: int, held_out: list[Question], row: dict) -> None:
    import transformers

    sizes = {"prompts": len(held_out)}
    sizes["answers"] = len(distinct(held_out))
    sizes["pairs"] = sum(len(q.pairs) for q in held_out)
    row = {"data": data, "method": method, "seed": seed, "held_out": sizes} | row
    row |= {"torch": torch.__version__, "transformers": transformers.__version__}
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def run_missing(files: dict[str, Path], methods: list[str], seeds: list[int], model: Path) -> None:
    """Every run that is no line of the results yet: one seed after the other."""
    for seed in seeds:
        for data, file in files.items():
            held_out = write_data(data, READ[data](file), seed)
            done = {r["method"] for r in read_results() if (r["data"], r["seed"]) == (data, seed)}
            if "longer" not in done:
                base = score_base(data, held_out, seed, model)
                for name, measures in floors(data, held_out, base).items():
                    add_row(data, name, seed, held_out, {"measures": measures, "off": base.off})
        for method in methods:
            for data, file in files.items():
                known = [(r["data"], r["method"], r["seed"]) for r in read_results()]
                if (data, method, seed) not in known:
                    _, held_out = split(READ[data](file), HELD_OUT[data], seed)
                    row = run(data, method, seed, held_out, model)
                    add_row(data, method, seed, held_out, row)


# ---- two methods, and the table -----------------------------------------------------------------------------------


def compare(files: dict[str, Path], seeds: list[int]) -> None:
    """How far each method is above KTO with z = 0, and above the floor of negations, on the same held-out answers:
    intervals draw the same prompts for both. Without files of KTO with z = 0: above KTO."""
    columns = ["data", "seed", "method", "pairs: above KTO", "auc: above KTO"]
    columns += ["pairs: above negations", "auc: above negations"]
    print(f"| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|")
    for seed in seeds:
        for data, file in files.items():
            _, held_out = split(READ[data](file), HELD_OUT[data], seed)
            negates = {key: has_negation(key[1]) for key in distinct(held_out)}
            floor = judge(held_out, negates, negates)
            kto = read_judged(data, "apo_zero_unpaired", seed, held_out)
            kto = kto or read_judged(data, "kto", seed, held_out)
            for method in METHODS:
                judged = read_judged(data, method, seed, held_out)
                if not judged or not kto:
                    continue
                cells = [data, str(seed), method]
                for other in (kto, floor):
                    measures = with_intervals(measure_above, list(zip(judged, other)))
                    cells += [cell(measures, name) for name in ("pairs", "auc")]
                print(f"| {' | '.join(cells)} |")


def read_judged(data: str, method: str, seed: int, held_out: list[Question]) -> list[Judged]:
    """r of the held-out answers, from the files of a finished run; [] if there is none."""
    folder = OUT / f"{data}-{seed}"
    if not (folder / f"{method}.json").exists():
        return []
    base, scores = (
        Scores(*json.loads((folder / f"{name}.json").read_text())) for name in ("base", method)
    )
    return judge_by_r(held_out, scores, base)


def measure_above(both: list[tuple[Judged, Judged]]) -> dict[str, float]:
    """How far the first of two judges is above the second one."""
    one, other = (measure(list(judged)) for judged in zip(*both))
    return {name: one[name] - other[name] for name in ("pairs", "auc")}


SHARES = ("pairs", "auc", "sign", "better_shorter", "better_longer", "alike", "above_longer")
# the table's columns
COLUMNS = {
    "pairs": "pairs",
    "above_longer": "above longer",
    "auc": "auc",
    "sign": "sign",
    "better_shorter": "better is shorter",
    "better_longer": "better is longer",
    "alike": "alike",
    "length": "length",
}


def cell(measures: dict, name: str) -> str:
    """A share in %, with its interval; a correlation as it is."""
    if name not in measures:
        return ""
    value, low, high = measures[name]
    if name in SHARES:
        return f"{100 * value:.1f}% ({100 * low:.0f} to {100 * high:.0f})"
    return f"{value:.2f}"


def print_table() -> None:
    for data in READ:
        names = [data, "seed", *COLUMNS.values(), "r of good, of bad"]
        print(f"\n| {' | '.join(names)} |\n{'| --- ' * len(names)}|")
        for row in sorted(read_results(), key=lambda row: row["seed"]):
            if row["data"] != data:
                continue
            measures = row["measures"]
            r = ""
            if row["method"] in METHODS:
                r = f"{measures['r_good'][0]:.1f}, {measures['r_bad'][0]:.1f}"
            else:  # its numbers are no log-ratios, so 0 says nothing
                measures.pop("sign", None)
            cells = [row["method"], str(row["seed"])]
            cells += [cell(measures, name) for name in COLUMNS] + [r]
            print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "compare", "table"])
    parser.add_argument("methods", nargs="*", help=f"of {', '.join(METHODS)}; default: all")
    parser.add_argument("--pandalm", type=Path, help="testset-v1.json")
    parser.add_argument("--pandalm-all", type=Path, help="the same file: eight times the ratings")
    parser.add_argument("--truthfulqa", type=Path, help="TruthfulQA.csv")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--model", type=Path, default=HERE.parent / "out" / "smollm2-135m")
    args = parser.parse_args()
    given = {"truthfulqa": args.truthfulqa, "pandalm": args.pandalm}
    given["pandalm-all"] = args.pandalm_all
    files = {data: file for data, file in given.items() if file}
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if args.what == "compare":
        compare(files, seeds)
        return
    if args.what == "run":
        run_missing(files, args.methods or list(METHODS), seeds, args.model)
    print_table()


if __name__ == "__main__":
    main()
