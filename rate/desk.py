"""The requests of the page: its state, an answer, a new thumb.

A request has the fields of a record, or the record as the text of JSON that the page got with a card or an answer. A
browser would round whole numbers of more than 53 bits, so it does not read this text.
"""

import json
import os
import secrets
import shlex
import threading
from dataclasses import dataclass, field
from pathlib import Path

from generate import AskedModel
from infra.console import Failed, user_error
from infra.settings import ROOT, Sampling, refuse_unless
from rate.ratings import Ratings
from records.forms import (
    Record,
    answer_fields,
    content_of,
    fields_of_prompt,
    prompt_key,
    understand_record,
)

FEWEST = 8  # ratings that config/thumbs.yaml trains on: one batch


@dataclass
class Desk:
    name: str
    """The model's, as its user gave it."""
    model: AskedModel
    sampling: Sampling
    ratings: Ratings
    prompts: list[Record]
    answering: threading.Lock = field(default_factory=threading.Lock)
    """One answer at a time."""
    is_closed: bool = False

    def state(self) -> dict:
        """The state of the page: the mode (chat or cards), whether the model has a chat template (chat), the prompts
        without a rating as cards, and the counts."""
        rated = set()
        for thumb in self.ratings.read().values():
            rated |= {prompt_key(thumb.record), key_of_any_day(thumb.record)}
        cards = []
        for i, record in enumerate(self.prompts):
            # the file of prompts may name the day; otherwise a thumb of yesterday counts
            key = prompt_key(record) if "date" in record.beside else key_of_any_day(record)
            if key not in rated:
                text = json.dumps(fields_of_prompt(record))
                cards.append({"id": i, "prompt": record.prompt, "record": text})
        return {
            "mode": "cards" if self.prompts else "chat",
            "model": self.name,
            "chat": self.model.by_template,
            "cards": cards,
            **self.counts(),
        }

    def counts(self) -> dict:
        """The numbers of thumbs, and the command that trains on them, once there are enough."""
        labels = [thumb.record.label for thumb in self.ratings.read().values()]
        up, down = labels.count(True), labels.count(False)
        command = ""
        if up and down and up + down >= FEWEST:
            command = shlex.join(training_command(self.name, self.ratings.file))
        return {"up": up, "down": down, "command": command}

    def answer(self, request: dict) -> dict:
        """One more answer, the model's name, and the record. Raises BadInput for a prompt that does not fit, and
        Failed when the program ends."""
        record = self.model.asked(understand_record(fields_of(request), "prompts"))
        ids = self.model.encode(record, advice=": begin a new chat")
        seed = secrets.randbelow(2**31)
        with self.answering:
            answers = self.model.answers([ids], self.sampling, seed, self.check_open)
        text, cut = answers[0]
        line = json.dumps(fields_of_prompt(record) | answer_fields(text, cut))
        return {"text": text, "cut": cut, "model": self.name, "record": line}

    def check_open(self) -> None:
        if self.is_closed:
            raise Failed("python -m rate was stopped.")

    def close(self) -> None:
        """End the answer that the model is writing."""
        self.is_closed = True
        with self.answering:
            pass

    def rate(self, request: dict) -> dict:
        """A new thumb on an answer; null withdraws it. Raises BadInput."""
        label = request.get("label", "missing")
        refuse_unless(
            label in (True, False, None), f"label: expected true, false or null, got {label!r:.50}"
        )
        record = understand_record(fields_of(request) | {"label": True}, "rated")
        answer = answer_fields(content_of(record.completions[0]), bool(record.cut))
        marks = {"spans": request["spans"]} if record.spans else {}
        self.ratings.set(fields_of_prompt(self.model.asked(record)) | answer | marks, label)
        return self.counts()


def fields_of(request: dict) -> dict:
    with user_error("record", "expected the fields of a record as a text of JSON"):
        fields = json.loads(request.get("record", "{}")) | request
    return {name: value for name, value in fields.items() if name != "record"}


def key_of_any_day(record: Record) -> str:
    fields = json.loads(prompt_key(record))
    fields.pop("date", None)
    return json.dumps(fields)


# ---- the command that trains -----------------------------------------------------------------------


def training_command(model: str, file: Path) -> list[str]:
    """The words of the command that trains on a file of thumbs."""
    n = 1
    while Path(f"out/thumbs-{n}").exists():
        n += 1
    words = ["python", os.path.relpath(ROOT / "kto.py")]
    words += ["--config", os.path.relpath(ROOT / "config/thumbs.yaml"), "--model", model]
    return [*words, "--data.train", str(file), "--out_dir", f"out/thumbs-{n}"]
