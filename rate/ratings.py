"""A file of thumbs, which is read and written anew for each thumb.

Reading order: Ratings (the file); answer_key (what makes two ratings ratings of one answer).
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
from infra.files import as_lines, write_whole
from records.answer import prompt_key
from records.forms import Record, understand_record
from records.sources import collect, decoded_records

# (prompt, answer) of a rating, as texts of JSON
AnswerKey = tuple[str, str]


class Thumb(NamedTuple):
    line: dict
    """As it stands in the file."""
    record: Record


@dataclass(frozen=True)
class Ratings:
    """A jsonl file of ratings, at most one for each prompt and answer."""

    file: Path

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
                    raise BadInput("record: a pair has no thumb of its own")
                first = thumbs.setdefault(answer_key(record), Thumb(raw, record))
                if first.record.label != record.label:
                    raise BadInput("label: the same answer has the other label in an earlier line")
        if faults:
            raise BadInput("\n".join(faults[:20]))
        return thumbs

    def set(self, line: dict, label: bool | None) -> None:
        """Write a thumb on the answer of this line, or with None withdraw it. Raises BadInput."""
        thumb = rated(line, bool(label))
        key = answer_key(thumb.record)
        with self.locked():
            thumbs = self.read()
            if label is None:
                thumbs.pop(key, None)
            elif key not in thumbs or thumbs[key].record.label != label:
                thumbs[key] = thumb
            write_whole(self.file, as_lines([x.line for x in thumbs.values()]))

    def label(self, line: dict) -> bool | None:
        """The thumb that the answer of this line has."""
        thumb = self.read().get(answer_key(rated(line, True).record))
        return thumb.record.label if thumb else None

    def count(self) -> tuple[int, int]:
        """The numbers of thumbs up and down."""
        labels = [thumb.record.label for thumb in self.read().values()]
        return labels.count(True), labels.count(False)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep out other servers of files in this folder, while this one changes its file."""
        folder = os.open(self.file.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def rated(line: dict, label: bool) -> Thumb:
    line = line | {"label": label}
    return Thumb(line, understand_record(line, "rated"))


def answer_key(record: Record) -> AnswerKey:
    """What two ratings of one answer have in common, in whichever form the records are."""
    (answer,) = record.completions
    if isinstance(answer, str):
        answer = {"role": "assistant", "content": answer}
    return prompt_key(record), json.dumps(answer, sort_keys=True)
