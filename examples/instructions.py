"""Online KTO on a real model. A prompt is a topic and an instruction, and a program checks whether it was followed.

    python examples/smollm2.py                     # the model, once: out/smollm2-135m
    python examples/instructions.py                # the data, then the run of config/smollm2_online.yaml
    python examples/instructions.py --data_only    # the data alone, in out/instructions

Options are those of online.py. The topics of val.jsonl and new_kinds.jsonl are not in train.jsonl, and the three kinds
of instruction in new_kinds.jsonl are never trained. A record has `kind`, `n` and `words`, the
instruction's kind, number and words, which data.extra hands to the checker. eval/after.json has each answer with its
`kind`, its `group` (trained kinds or new ones) and its verdict.

The kinds are chosen so that the model already follows most of them now and then: from answers that are all wrong KTO
only learns what not to say. JSON, quotation marks, capital letters, small letters, headings and last sentences are left
out, because 0 of 36 answers were right.

An answer that follows its instruction is still wrong if it is a cheap way out: with fewer than fifteen different
words, or where it repeats four words in a row of the instruction. It is also wrong if it was cut at the longest length:
otherwise the policy could learn answers that never end.

In another program: from instructions import check, write_data; online.main(argv, checker=check).
"""

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from infra.console import run_cli, say
from infra.files import write_whole
from infra.settings import ROOT
from online import main

CONFIG = ROOT / "config" / "smollm2_online.yaml"
FOLDER = "out/instructions"
TRAIN_RECORDS = 1200
VAL_PER_KIND = 12
NEW_PER_KIND = 16
FEWEST_WORDS = 15  # different ones, of a right answer
LONGEST_COPY = 3  # words in a row that an answer may share with its instruction


# ---- the kinds of instruction --------------------------------------------------------------------


class Kind(NamedTuple):
    """One kind of instruction; {n}, {a} and {b} in it are a number and words of a record."""

    instruction: str
    follows: Callable[[str, int, list[str]], bool]  # (answer, n, words) -> whether it was followed
    n: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    new: bool = False  # held out of training


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def lines_with(pattern: str, text: str) -> int:
    """How many lines of the text begin with the pattern."""
    return len(re.findall(rf"^\s*{pattern}", text, re.M))


COMMON = ("and", "is", "of", "in", "that", "it", "are", "for", "with", "as")
PLAIN = ("people", "water", "light", "world", "children", "money", "small", "time", "new", "home")
OPENINGS = ("Imagine", "Today", "Many", "Although", "Sometimes", "Once")
LETTERS = ("j", "z", "q", "k", "x", "v")

KINDS = {
    "title": Kind(
        "Give it a title in double angle brackets, like <<a title>>.",
        lambda text, n, words: bool(re.search(r"<<[^<>\n]+>>", text)),
    ),
    "postscript": Kind(
        'At the end, add a postscript that starts with "P.S."',
        lambda text, n, words: bool(re.search(r"P\.S\.:?(\s+\S+){4}", text)),
    ),
    "no comma": Kind(
        "Do not use any commas in your answer.",
        lambda text, n, words: "," not in text,
    ),
    "bullets": Kind(
        'Write it as a list of at least {n} bullet points that start with "*".',
        lambda text, n, words: lines_with(r"[*•-] *\w", text) >= n,
        n=(2, 3),
    ),
    "numbered": Kind(
        "Write it as a numbered list of at least {n} items.",
        lambda text, n, words: lines_with(r"\d+[.)] \S", text) >= n,
        n=(2, 3),
    ),
    "forbidden words": Kind(
        'Do not use the words "{a}" and "{b}".',
        lambda text, n, words: not set(words) & set(words_of(text)),
        words=COMMON,
    ),
    "keywords": Kind(
        'Use the words "{a}" and "{b}".',
        lambda text, n, words: set(words) <= set(words_of(text)),
        words=PLAIN,
    ),
    "at most": Kind(
        "Use at most {n} words.",
        lambda text, n, words: len(words_of(text)) <= n,
        n=(30, 40, 50),
    ),
    "at least": Kind(
        "Use at least {n} words.",
        lambda text, n, words: len(words_of(text)) >= n,
        n=(40, 45, 50),
    ),
    "opening": Kind(
        'Begin your answer with the word "{a}".',
        lambda text, n, words: words_of(text)[0] == words[0].lower(),
        words=OPENINGS,
    ),
    "question": Kind(
        "Include a question in your answer.",
        lambda text, n, words: "?" in text,
    ),
    "letter": Kind(
        'Do not use the letter "{a}".',
        lambda text, n, words: words[0] not in text.lower(),
        words=LETTERS,
    ),
    "number": Kind(
        "Mention at least one number, written in digits.",
        lambda text, n, words: bool(re.search(r"\d", text)),
        new=True,
    ),
    "brackets": Kind(
        "Add a remark in round brackets.",
        lambda text, n, words: bool(re.search(r"\([^()]+\)", text)),
        new=True,
    ),
    "exclamation": Kind(
        "Use at least one exclamation mark.",
        lambda text, n, words: "!" in text,
        new=True,
    ),
}


# ---- the checker ---------------------------------------------------------------------------------


def instruction_of(fields: dict) -> str:
    """The instruction of a record."""
    a, b = fields["words"].split("|")
    return KINDS[fields["kind"]].instruction.format(n=int(fields["n"]), a=a, b=b)


def copies(completion: str, instruction: str) -> bool:
    """Whether an answer has more than LONGEST_COPY words in a row of the instruction. Words that the
    instruction quotes do not count, because the answer must have them."""
    quoted = set(words_of(" ".join(re.findall(r'"[^"]*"', instruction))))
    runs = []
    for text in (completion, instruction):
        words = [word for word in words_of(text) if word not in quoted]
        ends = range(LONGEST_COPY + 1, len(words) + 1)
        runs.append({tuple(words[end - LONGEST_COPY - 1 : end]) for end in ends})
    return bool(runs[0] & runs[1])


def is_right(completion: str, fields: dict) -> bool:
    """Whether an answer follows its instruction, and is no cheap way out."""
    if len(set(words_of(completion))) < FEWEST_WORDS:
        return False
    if copies(completion, instruction_of(fields)):
        return False
    words = fields["words"].split("|")
    return KINDS[fields["kind"]].follows(completion, fields["n"], words)


def check(answers) -> list[bool]:
    """The checker: answers are a list of evaluation.Answer."""
    return [not a.cut and is_right(a.completion, a.fields) for a in answers]


# ---- the data ------------------------------------------------------------------------------------

REQUESTS = ("Write a short text about {}.", "Tell me about {}.", "Explain {} in a few sentences.")
TRAIN_TOPICS = """
    bees|volcanoes|the moon|sea turtles|glaciers|rain forests|deserts|coral reefs|whales|owls|
    wolves|butterflies|mushrooms|oak trees|roses|the weather|rainbows|earthquakes|tides|caves|
    coffee|tea|chocolate|honey|bread|cheese|rice|soup|pizza|apples|olive oil|salt|breakfast|
    cooking|baking cakes|picnics|restaurants|spices|vegetables|ice cream|
    chess|football|tennis|swimming|running|hiking|cycling|skiing|dancing|yoga|sailing|fishing|
    board games|video games|puzzles|card games|climbing|camping|surfing|gardening|
    jazz music|the guitar|the piano|opera|poetry|novels|painting|photography|theatre|cinema|
    sculpture|museums|libraries|folk songs|drawing|pottery|architecture|fashion|comics|circuses|
    bicycles|trains|electric cars|airplanes|ships|bridges|tunnels|satellites|rockets|robots|
    computers|the internet|telephones|radio|television|batteries|solar power|wind turbines|
    microscopes|clocks|the printing press|paper|glass|steel|plastic|money|banks|markets|taxes|
    insurance|ancient Rome|ancient Egypt|the Vikings|castles|knights|pirates|explorers|maps|
    calendars|languages|alphabets|schools|universities|teachers|homework|exams|friendship|
    families|neighbours|birthdays|weddings|holidays|dreams|sleep|memory|laughter|kindness|
    patience|courage|hospitals|doctors|vaccines|teeth|the heart|the brain|exercise|stress|hiking boots
"""
VAL_TOPICS = """
    penguins|elephants|spiders|waterfalls|lightning|snow|the sun|rivers|tomatoes|bananas|lemonade|
    sandwiches|basketball|ice skating|kites|magic tricks|violins|choirs|fairy tales|newspapers|
    helicopters|subways|lighthouses|elevators|umbrellas|mirrors|keys|postcards|candles|windmills|
    the Olympic Games|the Silk Road|dinosaurs|fossils|astronauts|firefighters|farmers|zoos|
    playgrounds|honesty
"""


def topics_of(text: str) -> list[str]:
    return [topic.strip() for topic in text.split("|")]


def make_record(kind: str, topic: str, rng: random.Random) -> dict:
    how = KINDS[kind]
    n = rng.choice(how.n) if how.n else 0
    words = "|".join(rng.sample(how.words, 2)) if how.words else "|"
    group = "new kinds" if how.new else "trained kinds"
    fields = {"kind": kind, "group": group, "n": n, "words": words}
    text = f"{rng.choice(REQUESTS).format(topic)} {instruction_of(fields)}"
    return {"prompt": [{"role": "user", "content": text}], **fields}


def make_records(kinds: list[str], topics: list[str], n: int, seed: int) -> Iterator[dict]:
    """n records without a repeated pair of kind and topic; of each kind equally many, in turn."""
    rng = random.Random(seed)
    orders = {kind: rng.sample(topics, len(topics)) for kind in kinds}
    for i in range(n):
        round_, k = divmod(i, len(kinds))
        yield make_record(kinds[k], orders[kinds[k]][round_ % len(topics)], rng)


def write_data(
    folder: str | Path = FOLDER, val_per_kind: int = VAL_PER_KIND, new_per_kind: int = NEW_PER_KIND
) -> None:
    """Write train.jsonl, val.jsonl and new_kinds.jsonl; always the same ones. val_per_kind, new_per_kind: how many
    prompts each kind of instruction has in val and in new_kinds, at most one for each topic."""
    trained = [name for name, kind in KINDS.items() if not kind.new]
    new = [name for name, kind in KINDS.items() if kind.new]
    train_topics, val_topics = topics_of(TRAIN_TOPICS), topics_of(VAL_TOPICS)
    parts = {
        "train": make_records(trained, train_topics, TRAIN_RECORDS, 1),
        "val": make_records(trained, val_topics, val_per_kind * len(trained), 2),
        "new_kinds": make_records(new, val_topics, new_per_kind * len(new), 3),
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, records in parts.items():
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        write_whole(Path(folder) / f"{name}.jsonl", "\n".join([*lines, ""]))
        say(f"{folder}/{name}.jsonl: {len(lines):,} prompts")


def start() -> None:
    argv = sys.argv[1:]
    write_data()
    if argv == ["--data_only"]:
        return
    given = any(word.split("=")[0] == "--config" for word in argv)
    main(argv if given else ["--config", str(CONFIG), *argv], checker=check)


if __name__ == "__main__":
    run_cli(start)
