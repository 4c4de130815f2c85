"""What the page may ask: its state, an answer, the thumb that an answer has, a new thumb.

A request has the fields of a record, or the record as the text of JSON that the page got with a card or an answer. A
browser would round whole numbers of more than 53 bits, so it does not read this text.
"""

import json
import os
import shlex
from pathlib import Path

from infra.settings import ROOT, refuse_unless
from rate.answering import OtherServer, OwnModel
from rate.ratings import Ratings
from records.answer import answer_fields, fields_of_prompt, prompt_key
from records.forms import Record, content_of, understand_record

FEWEST = 8  # ratings that config/thumbs.yaml trains on: one batch


class Desk:
    def __init__(self, model: OwnModel | OtherServer, ratings: Ratings, prompts: list[Record]):
        self.model = model
        self.ratings = ratings
        self.prompts = prompts

    def state(self) -> dict:
        """What the page shows: the mode (chat or cards), whether the model has a chat template (chat), the prompts
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
        mode = "cards" if self.prompts else "chat"
        about = {"mode": mode, "model": self.model.name, "chat": self.model.chat, "cards": cards}
        return about | self.counts()

    def counts(self) -> dict:
        up, down = self.ratings.count()
        note, command = training_advice(self.model.name, self.ratings.file, up, down)
        return {"up": up, "down": down, "note": note, "command": command}

    def answer(self, request: dict) -> dict:
        """One more answer, whose it is, its record, and its thumb if this very answer has one already."""
        record = self.model.asked(understand_record(fields_of(request), "prompts"))
        text, cut = self.model.answer(record)
        line = fields_of_prompt(record) | answer_fields(text, cut)
        label = self.ratings.label(line)
        about = {"text": text, "cut": cut, "label": label, "model": self.model.name}
        return about | {"record": json.dumps(line)}

    def label(self, request: dict) -> dict:
        """The thumb that this answer has; null: none."""
        return {"label": self.ratings.label(self.line_of(request))}

    def rate(self, request: dict) -> dict:
        label = request.get("label", "missing")
        refuse_unless(
            label in (True, False, None), f"label: expected true, false or null, got {label!r:.50}"
        )
        self.ratings.set(self.line_of(request), label)
        return self.counts()

    def line_of(self, request: dict) -> dict:
        """The line of an answer, without its label. Raises BadInput."""
        record = understand_record(fields_of(request) | {"label": True}, "rated")
        completion = content_of(record.completions[0])
        return fields_of_prompt(self.model.asked(record)) | answer_fields(
            completion, bool(record.cut)
        )


def fields_of(request: dict) -> dict:
    fields = json.loads(request.get("record", "{}")) | request
    return {name: value for name, value in fields.items() if name != "record"}


def key_of_any_day(record: Record) -> str:
    beside = {name: value for name, value in record.beside.items() if name != "date"}
    return prompt_key(record._replace(date=None, beside=beside))


# ---- the command that trains -----------------------------------------------------------------------


def training_command(model: str, file: Path, up: int, down: int, out_dir: str) -> list[str]:
    """The words of the command that trains on a file with so many thumbs. Where one kind is rare, its class weight
    makes both count alike, as the KTO paper advises."""
    words = ["python", os.path.relpath(ROOT / "kto.py")]
    words += ["--config", os.path.relpath(ROOT / "config/thumbs.yaml"), "--model", model]
    words += ["--data.train", str(file), "--out_dir", out_dir]
    if up < down * 3 / 4:
        words += ["--kto.desirable_weight", f"{down / up:.3g}"]
    if down < up * 3 / 4:
        words += ["--kto.undesirable_weight", f"{up / down:.3g}"]
    return words


def training_advice(model: str, file: Path, up: int, down: int) -> tuple[str, str]:
    """What the page says of training: a note, and the command once there are thumbs to learn from."""
    if up + down == 0:
        return "", ""
    if up + down < FEWEST or not up or not down:
        return f"It takes {FEWEST} thumbs, some up and some down; 40 or more are better.", ""
    n = 1
    while Path(f"out/thumbs-{n}").exists():
        n += 1
    out_dir = f"out/thumbs-{n}"
    note = (
        "Stop this program with Ctrl-C, run the command, and talk to the result with "
        f"python -m rate --model {out_dir}"
    )
    return note, shlex.join(training_command(model, file, up, down, out_dir))
