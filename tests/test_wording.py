"""data.split keeps a conversation together, and the table counts held-out answers that stand in training prompts."""

import json

import pytest
from test_data import parts_of
from tokens import bos, bot, chat, plain, rated, user, write

from infra.settings import Data

COUNT = "whose answer is in a prompt of data.train"


def turns(*texts: str) -> list[dict]:
    """Messages of the user and the assistant in turn."""
    return [bot(text) if i % 2 else user(text) for i, text in enumerate(texts)]


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def again(i: int, texts: list) -> list:
    """The texts, or messages, of conversation number i."""
    return json.loads(json.dumps(texts).replace("#", str(i)))


# ---- data.split ----------------------------------------------------------------------------------

# prompts of one conversation
TOGETHER = {
    "each prompt goes on from the last one": [
        turns("q#"),
        turns("q#", "a", "why?"),
        turns("q#", "a", "why?", "b", "and?"),
    ],
    "the first answer was made anew": [turns("q#", "a", "why?"), turns("q#", "b", "why?")],
    "after a system prompt and a greeting": [
        [system("s"), bot("Hello"), *turns("q#")],
        [system("s"), bot("Hello"), *turns("q#", "a", "why?")],
    ],
    "the system prompt has the time of day": [
        [system("At ten"), *turns("q#")],
        [system("At noon"), *turns("q#", "#", "why?")],
        [system("At one"), *turns("q#", "#", "why?", "b", "and?")],
    ],
    "plain texts with line breaks": ["User: q#\nBot:", "User: q#\nBot: a\nUser: why?\nBot:"],
    "plain texts with marks": ["[INST] q# [/INST]", "[INST] q# [/INST]a</s>[INST] why? [/INST]"],
}


@pytest.mark.parametrize("prompts", TOGETHER.values(), ids=TOGETHER)
def test_data_split_keeps_a_conversation_together(prompts, tmp_path):
    # the first question was edited: nothing but the id says that it is the same conversation
    edited = json.loads(json.dumps(prompts[0]).replace("q#", "another q#"))
    records = []
    for i in range(60):
        with_id = dict(conversation_id=f"c{i}") if i % 2 else {}
        of_one = [*prompts, edited] if i % 2 else prompts
        records += [rated(prompt, f"{i}", **with_id) for prompt in again(i, of_one)]
    source = write(tmp_path / "d.jsonl", *records)
    tokenizer = plain() if isinstance(prompts[0], str) else chat()
    parts, _ = parts_of(Data(source, split="50,50"), tokenizer=tokenizer)
    answers = []  # of each part
    for name in ("train", "val"):
        ids = [e.completions[0] for e in parts[name]]
        answers.append({tokenizer.hf.decode(x, skip_special_tokens=True).strip() for x in ids})
    assert len(answers[0]) + len(answers[1]) == 60 and min(map(len, answers)) > 18
    assert sum(map(len, parts.values())) == len(records)


def test_prompts_that_only_look_alike_are_split_by_themselves(tmp_path):
    prompts = ["", "I", *(f"In {i}" for i in range(60))]
    source = write(tmp_path / "d.jsonl", *map(rated, prompts))
    parts, _ = parts_of(Data(source, split="50,50"), tokenizer=bos())  # for the empty prompt
    assert min(len(parts["train"]), len(parts["val"])) > 18


# ---- the table -----------------------------------------------------------------------------------

HELD_OUT = rated(turns("q"), "It is thyme.")
PLAIN = rated("User: q\nBot:", " It is thyme.")
STANDS = {  # a prompt of data.train, a held-out record, whether the answer stands there
    "behind its question": (turns("q", "It is thyme.", "why?"), HELD_OUT, True),
    "with other blanks": (turns("q", " It  is thyme.\n", "why?"), HELD_OUT, True),
    "under another system prompt": (
        [system("s"), *turns("q", "It is thyme.", "why?")],
        HELD_OUT,
        True,
    ),
    "without its thinking": (
        turns("q", "It is thyme.", "why?"),
        rated(turns("q"), "<think>Hm</think>It is thyme."),
        True,
    ),
    "as a chosen one": (
        turns("q", "It is thyme.", "why?"),
        {"prompt": turns("q"), "chosen": "It is thyme.", "rejected": "No."},
        True,
    ),
    "another answer": (turns("q", "It is sage.", "why?"), HELD_OUT, False),
    "behind another question": (turns("p", "It is thyme.", "why?"), HELD_OUT, False),
    "as a turn of the user": (turns("q", "a", "It is thyme."), HELD_OUT, False),
    "plain": ("User: q\nBot: It is thyme.\nUser: why?\nBot:", PLAIN, True),
    "plain, another answer": ("User: q\nBot: It is thymeless\nUser: why?\nBot:", PLAIN, False),
    "plain, an empty one": ("User: q\nBot: It is\nUser: why?\nBot:", rated("User: q\n", ""), False),
}


@pytest.mark.parametrize("prompt, record, stands", STANDS.values(), ids=STANDS)
def test_the_table_counts_held_out_answers_that_stand_in_a_training_prompt(
    prompt, record, stands, tmp_path
):
    train = write(tmp_path / "t.jsonl", rated("o", "n"), rated(prompt, "Because."))
    other = write(tmp_path / "v.jsonl", rated("k", "l"), record)
    tokenizer = plain() if isinstance(prompt, str) else chat()
    # prompts are compared before they are cut
    _, table = parts_of(Data(train, max_prompt=3, test=other), tokenizer=tokenizer)
    before, _, rest = " ".join(table).partition("test: ")
    assert (f", 1 {COUNT}" in rest) == stands and COUNT not in before
