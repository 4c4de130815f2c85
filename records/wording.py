"""Which records belong to one conversation.

Reading order: Wording, which is what is compared; digests_of_conversations, for data.split.
"""

import hashlib
import json
import re
from typing import NamedTuple

from records.forms import Record, as_turns, content_of


class Wording(NamedTuple):
    """The words of a record, without blanks, so that two records can be compared."""

    beginning: str
    """How the conversation begins: all turns up to the user's first one, or the whole prompt of a plain record."""
    digest: bytes
    """The hash of the beginning, or of the prompt's token ids if the record is plain."""
    links: list[str]
    """Two records with one of these in common are of one conversation: the conversation_id, and the user's first
    question with its answer, because a system prompt may change from answer to answer."""


def wording_of(record: Record, by_template: bool, prompt_ids: bytes) -> Wording:
    """by_template: whether the record is written as messages. prompt_ids: the token ids of the prompt."""
    links = [record.conversation_id] if record.conversation_id else []
    if not by_template:
        return Wording(words(record.prompt), hashlib.sha256(prompt_ids).digest(), links)
    turns = as_turns(record.prompt)
    begun = ""
    if record.continues:
        begun = turns[-1]["content"]
        turns = turns[:-1]
    texts = [words_of_turn(turn) for turn in turns]
    roles = [turn["role"] for turn in turns] + ["user"]
    n = roles.index("user") + 1  # turns up to the first question
    answers = texts[n : n + 1]
    if len(turns) == n:
        answers = [words_of_answer(begun, completion) for completion in record.completions]
    for answer in filter(None, answers):
        links.append(hash_of([texts[n - 1], answer]))
    beginning = hash_of(texts[:n])
    return Wording(beginning, hashlib.sha256(beginning.encode()).digest(), links)


def words(text: str) -> str:
    """The words and signs of a text, each followed by a blank. So `In` does not begin with `I`, but `I am` does."""
    return "".join(f"{word} " for word in re.findall(r"\w+|[^\w\s]", text))


def words_of_answer(begun: str, completion: str | dict) -> str:
    """The words of a completion. begun: the beginning of its turn, which is in the prompt."""
    turn = {"content": completion} if isinstance(completion, str) else completion
    content = begun + (content_of(completion) or "")
    return words_of_turn({**turn, "role": "assistant", "content": content})


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
