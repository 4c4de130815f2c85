"""A file of thumbs, which is read and rewritten for each thumb.

Reading order: Ratings (the file); answer_key (equal for two ratings of one answer).
"""

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from infra.console import BadInput
from infra.files import as_lines, write_whole
from infra.settings import refuse
from records.forms import Record, prompt_key, understand_record
from records.sources import collect, decoded_records

# (prompt, answer) of a rating, as texts of JSON
AnswerKey = tuple[str, str]


class Thumb(NamedTuple):
    line: dict
    """The record in the file."""
    record: Record


@dataclass(frozen=True)
class Ratings:
    """A jsonl file of ratings, at most one for each prompt and answer."""

    file: Path
    lock: threading.Lock = field(default_factory=threading.Lock)
    """The page's requests run in several threads."""

    def read(self) -> dict[AnswerKey, Thumb]:
        """The thumbs by answer_key, in the order of the file. Raises BadInput, with the line."""
        thumbs: dict[AnswerKey, Thumb] = {}
        faults: list[str] = []
        if not self.file.exists():
            return thumbs
        for where, raw in decoded_records(str(self.file), faults):
            with collect(faults, where):
                record = understand_record(raw, "rated")
                if record.label is None:
                    raise BadInput("record: a pair has no thumb")
                first = thumbs.setdefault(answer_key(record), Thumb(raw, record))
                if first.record.label != record.label:
                    raise BadInput("label: the same answer has the other label in an earlier line")
        refuse(faults)
        return thumbs

    def set(self, line: dict, label: bool | None) -> None:
        """Write a thumb on the answer of this line. None withdraws the thumb. Raises BadInput."""
        line = line | {"label": bool(label)}
        record = understand_record(line, "rated")
        key = answer_key(record)
        with self.lock:
            thumbs = self.read()
            old = thumbs.get(key)
            if label is None:
                thumbs.pop(key, None)
            elif not old or (old.record.label, old.record.spans) != (label, record.spans):
                thumbs[key] = Thumb(line, record)
            write_whole(self.file, as_lines([x.line for x in thumbs.values()]))


def answer_key(record: Record) -> AnswerKey:
    """A key that is equal for two ratings of one answer, in any form of record."""
    (answer,) = record.completions
    if isinstance(answer, str):
        answer = {"role": "assistant", "content": answer}
    return prompt_key(record), json.dumps(answer, sort_keys=True)
