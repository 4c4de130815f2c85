"""A file of thumbs that is read and written anew for each one: what rate.py keeps.

Reading order: Ratings (the file); what makes two ratings ratings of one answer (answer_key).
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from infra.console import BadInput
from infra.files import write_whole
from records.forms import Record, Turns, understand_record
from records.sources import collect, decoded_records

# (prompt, answer) of a rating, as texts of JSON
AnswerKey = tuple[str, str]


class Thumb(NamedTuple):
    record: dict
    """As it stands in the file."""
    label: bool


@dataclass(frozen=True)
class Ratings:
    """A jsonl file of ratings, at most one for each prompt and answer."""

    file: Path

    def read(self) -> dict[AnswerKey, Thumb]:
        """The thumbs by answer_key, in the order of the file. Raises BadInput, with the line."""
        thumbs: dict[AnswerKey, Thumb] = {}
        first_lines: dict[AnswerKey, str] = {}
        faults: list[str] = []
        if not self.file.exists():
            return thumbs
        for where, raw in decoded_records(str(self.file), faults):
            with collect(faults, where):
                record = understand_record(raw, "rated")
                if record.label is None:
                    raise BadInput("record: a pair has no thumb of its own")
                key = answer_key(record)
                first = thumbs.setdefault(key, Thumb(raw, record.label))
                line = first_lines.setdefault(key, where.rpartition(":")[2])
                if first.label != record.label:
                    raise BadInput(f"label: the same answer has the other label in line {line}")
        if faults:
            raise BadInput("\n".join(faults[:20]))
        return thumbs

    def set(self, prompt: Turns, completion: str, label: bool | None) -> tuple[int, int]:
        """Write a thumb, or with None withdraw it. -> numbers of thumbs up and down. Raises BadInput."""
        key = shown_key(prompt, completion)
        with self.locked():
            thumbs = self.read()
            if label is None:
                thumbs.pop(key, None)
            elif key not in thumbs or thumbs[key].label != label:
                thumbs[key] = Thumb(page_record(prompt, completion, label), label)
            rows = [json.dumps(x.record, ensure_ascii=False) + "\n" for x in thumbs.values()]
            write_whole(self.file, "".join(rows))
        return count_labels(thumbs)

    def label(self, prompt: Turns, completion: str) -> bool | None:
        """The thumb that this answer has."""
        thumb = self.read().get(shown_key(prompt, completion))
        return thumb.label if thumb else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep out other servers of files in this folder, while this one changes its file."""
        folder = os.open(self.file.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def count_labels(thumbs: dict[AnswerKey, Thumb]) -> tuple[int, int]:
    """The numbers of thumbs up and down."""
    up = sum(thumb.label for thumb in thumbs.values())
    return up, len(thumbs) - up


def prompt_key(prompt: Turns) -> str:
    return json.dumps(prompt, sort_keys=True)


def answer_key(record: Record) -> AnswerKey:
    """What two ratings of one answer have in common, in whichever form the records are."""
    (answer,) = record.completions
    if isinstance(answer, str):
        answer = {"role": "assistant", "content": answer}
    return prompt_key(record.prompt), json.dumps(answer, sort_keys=True)


def page_record(prompt: Turns, completion: str, label: bool) -> dict:
    """The record that is written for a thumb: of messages, or of texts."""
    is_dialogue = isinstance(prompt, list)
    answer = [{"role": "assistant", "content": completion}] if is_dialogue else completion
    return {"prompt": prompt, "completion": answer, "label": label}


def shown_key(prompt: Turns, completion: str) -> AnswerKey:
    """The answer_key of an answer that the page shows. Raises BadInput."""
    record = page_record(prompt, completion, True)  # any label: the key does not depend on it
    return answer_key(understand_record(record, "rated"))
