"""Which records belong to one conversation, and which held-out answers are in a training prompt.

Reading order: Wording, the compared form; digests_of_conversations for data.split; standing_in for the table.
"""

import hashlib
import json
import re
from bisect import bisect_left
from typing import NamedTuple

from records.forms import Record, as_answer, as_turns


class Wording(NamedTuple):
    """The words of a record, without blanks, so that two records can be compared."""

    beginning: str
    """How the conversation begins: all turns up to the user's first one, or the whole prompt of a plain record."""
    digest: bytes
    """The hash of the beginning, or of the prompt's token ids if the record is plain."""
    in_prompt: list[str]
    """Each answer in the prompt, together with the turn before it, or the whole prompt of a plain record."""
    answers: list[str]
    """The record's own answers, together with the turn before them, or with the prompt of a plain record. An empty
    answer is an empty text."""
    links: list[str]
    """Two records with one of these in common are of one conversation: the conversation_id, and the user's first
    question with its answer, because a system prompt may change from answer to answer."""


def wording_of(record: Record, by_template: bool, prompt_ids: bytes) -> Wording:
    """by_template: whether the record is written as messages. prompt_ids: the token ids of the prompt."""
    links = [record.conversation_id] if record.conversation_id else []
    if by_template:
        return wording_of_messages(record, links)
    prompt = words(record.prompt)
    answers = []
    for completion in record.completions:
        answer = words(completion)
        answers.append(prompt + answer if answer else "")
    digest = hashlib.sha256(prompt_ids).digest()
    return Wording(prompt, digest, [prompt], answers, links)


def wording_of_messages(record: Record, links: list[str]) -> Wording:
    turns = as_turns(record.prompt)
    texts = [words_of_turn(turn) for turn in turns]
    in_prompt = []
    for i, turn in enumerate(turns):
        if i > 0 and turn["role"] == "assistant":
            in_prompt.append(hash_of([texts[i - 1], texts[i]]))
    answers = []
    for completion in record.completions:
        answer = words_of_turn(as_answer(completion))
        answers.append(hash_of([*texts[-1:], answer]) if answer else "")
    roles = [turn["role"] for turn in turns] + ["user"]
    n = roles.index("user") + 1  # turns up to the first question
    if len(turns) == n:
        links += filter(None, answers)
    elif len(turns) > n:
        links.append(hash_of(texts[n - 1 : n + 1]))
    beginning = hash_of(texts[:n])
    digest = hashlib.sha256(beginning.encode()).digest()
    return Wording(beginning, digest, in_prompt, answers, links)


def words(text: str) -> str:
    """The words and signs of a text, each followed by a blank. Then `In` does not begin with `I`, but `I am` does."""
    return "".join(f"{word} " for word in re.findall(r"\w+|[^\w\s]", text))


def words_of_turn(turn: dict) -> str:
    """The words of a turn and its calls of tools. Thinking does not count: most prompts have earlier answers without
    it."""
    content = turn.get("content") or ""
    if turn["role"] == "assistant":
        content = content.rpartition("</think>")[2]
    calls = ""
    if turn.get("tool_calls"):
        calls = json.dumps(turn["tool_calls"], sort_keys=True, default=str)
    return words(content) + calls


def hash_of(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


# ---- one conversation ----------------------------------------------------------------------------


def digests_of_conversations(records: list[Wording]) -> list[bytes]:
    """A digest for each record, equal for all records of a conversation. The digest depends on no other conversation.

    Records are of one conversation if they have the same beginning or a link in common, or if the plain prompt of one
    record begins with the prompt of the other.
    """
    digests = [b""] * len(records)
    first = None
    # In alphabetical order all prompts that begin with a shorter one directly follow it.
    for i in sorted(range(len(records)), key=lambda i: records[i].beginning):
        beginning = records[i].beginning
        if first is None or not first.beginning or not beginning.startswith(first.beginning):
            first = records[i]
        digests[i] = first.digest
    smaller: dict[bytes, bytes] = {}  # a digest -> a smaller one of the same conversation

    def smallest(digest: bytes) -> bytes:
        while digest in smaller:
            digest = smaller[digest]
        return digest

    digest_of_link: dict[str, bytes] = {}
    for record, digest in zip(records, digests):
        for link in record.links:
            other = digest_of_link.setdefault(link, digest)
            low, high = sorted((smallest(digest), smallest(other)))
            if low != high:
                smaller[high] = low
    # The smallest of several digests is a small number more often than not; its hash is not.
    joined = {digest: hashlib.sha256(smallest(digest)).digest() for digest in smaller}
    joined |= {smallest(digest): new for digest, new in joined.items()}
    return [joined.get(digest, digest) for digest in digests]


# ---- answers in prompts --------------------------------------------------------------------------


def standing_in(prompts: list[Wording], records: list[Wording]) -> int:
    """How many records have an answer that one of the prompts has behind the same question."""
    distinct: set[str] = set()
    for record in prompts:
        distinct.update(record.in_prompt)
    texts = sorted(distinct)
    n = 0
    for record in records:
        for answer in filter(None, record.answers):
            i = bisect_left(texts, answer)
            if i < len(texts) and texts[i].startswith(answer):
                n += 1
                break
    return n
