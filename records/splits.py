"""The setting data.split: which conversations are held out."""

import hashlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from infra.console import user_error
from infra.settings import split_commas
from records.forms import Record, as_turns

if TYPE_CHECKING:
    from records.examples import Example


def split_by_conversation(examples: "list[Example]", proportions: str) -> "list[list[Example]]":
    """[train, val, test], in the proportions of data.split: `980,10,10` or `990,10`.

    A conversation's split is a function of its words: it depends neither on the order nor on the other
    conversations, and the ratings of a conversation stay together. Raises BadInput.
    """
    with user_error("data.split", f"{proportions}: expected two or three numbers like 980,10,10"):
        sizes = np.array(split_commas(proportions), float)
        if len(sizes) not in (2, 3) or not sizes[0] > 0 or not (sizes >= 0).all():
            raise ValueError
    upper_edges = sizes.cumsum() / sizes.sum()
    split: list[list[Example]] = [[], [], []]
    beginnings = beginnings_of([example.conversation for example in examples])
    for example in examples:
        digest = hashlib.sha256(beginnings[example.conversation].encode()).digest()
        position = int.from_bytes(digest[:8], "big") / 2**64  # in [0, 1)
        split[(upper_edges <= position).sum()].append(example)
    return split


def conversation_of(record: Record, by_template: bool) -> str:
    """The words of the user's first turn, or of a plain prompt. Two examples are of one conversation if one of these
    texts begins with the other."""
    turns = as_turns(record.prompt)
    of_user = [turn for turn in turns if turn["role"] == "user"]
    words = re.findall(r"\w+|[^\w\s]", str((of_user or turns)[0]["content"]))
    # a blank after each word: `In` does not begin with `I`, but `I am` does
    text = "".join(f"{word} " for word in words)
    return f"{text}\n" if by_template else text  # with its end, a turn begins with no other turn


def beginnings_of(texts: Iterable[str]) -> dict[str, str]:
    """For each text the shortest one with which it begins."""
    beginnings = {}
    beginning = ""
    for text in sorted(set(texts)):  # all that begin with a text directly follow it
        if not beginning or not text.startswith(beginning):
            beginning = text
        beginnings[text] = beginning
    return beginnings
