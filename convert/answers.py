"""The answers of a record to one prompt: one answer, two answers and a verdict, or lists of answers.

Reading order: Judged (an answer and its judgement); judged_answers; answers_of; prompt_fields.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from convert.layout import ANSWERS, PAIR, Layout
from convert.messages import last_of_dialogue, split_turns, text_or_turns
from convert.paths import Found
from convert.values import Skipped, is_there, number
from infra.console import BadInput
from records.forms import ALIASES, PROMPTS, as_turns

# a label or the ratings of an answer; None: nothing was said of it
Judgement = bool | list | None


@dataclass
class Judged:
    """An answer and its judgement."""

    where: str
    fields: dict
    """Those of our record that make its prompt, or all of them."""
    answer: object = None
    """None: it cannot be read, or `fields` have it."""
    label: bool | None = None
    """None: it has none, or is between the cuts of --labels, and only of use in a pair."""
    score: float | None = None
    """A rating that is a number: the best and the worst of a list."""
    reason: str = ""
    """Why nothing can be learned from it; empty if it can."""
    fault: str = ""
    """What is wrong with the record; empty if nothing is."""
    next: str | None = None
    """The user's next message, if it is known."""

    @property
    def record(self) -> dict:
        """Our record of it, with its label."""
        record = {"completion": self.answer, "label": self.label, "next": self.next}
        return self.fields | {name: x for name, x in record.items() if x is not None}


def judged_answers(layout: Layout, where: str, raw: dict) -> Iterator[Judged]:
    """The answers of a record to one prompt. Raises Skipped, BadInput."""
    fields = prompt_fields(layout, raw)
    ratings = ratings_of(layout, raw, fields)
    for name, value, judgement in answers_of(layout, raw, ratings):
        judged = Judged(where, fields)
        try:
            if name:
                judged.fields, judged.answer = prompt_and_answer(layout, raw, fields, name, value)
            judge(layout, judged, judgement)
        except Skipped as e:
            if layout.has_two_answers:  # if one of them cannot be read, both are dropped
                raise
            judged.reason = str(e)
        yield judged


def ratings_of(layout: Layout, raw: dict, fields: dict) -> list[Found] | None:
    """The ratings of a record's answers, each with its place. The record's own label leaves the fields. None if the
    record has no label and needs none."""
    if "label" in layout.columns:
        return layout.columns["label"].all(raw)
    names = [name for name in fields if ALIASES.get(name, name) == "label"]
    if not names and (not layout.labels.wanted or layout.kind == "paired" or "chosen" in fields):
        return None
    return [((), fields.pop(name)) for name in names]


def answers_of(
    layout: Layout, raw: dict, ratings: list[Found] | None
) -> list[tuple[str, object, Judgement]]:
    """(column, answer, judgement) of each answer of a record. If no column leads to an answer, the record's own fields
    have the answer, and the column is an empty text. Raises Skipped, BadInput."""
    columns = layout.columns
    if "verdict" in columns:
        verdict = layout.labels.of([value for _, value in columns["verdict"].all(raw)])
        return [(name, columns[name].one(raw), verdict in (name, "both")) for name in ("a", "b")]
    answers: list[tuple[str, object, Judgement]] = []
    for name in ANSWERS:
        if name not in columns:
            continue
        for place, answer in columns[name].all(raw) or [((), None)]:
            judgement: Judgement = name == "chosen"
            if name not in PAIR:
                judgement = ratings and [x for at, x in ratings if is_same_place(at, place)]
            answers.append((name, answer, judgement))
    return answers or [("", None, ratings and [rating for _, rating in ratings])]


def is_same_place(place: tuple, other: tuple) -> bool:
    """Whether the stars of two paths are at the same places. The ratings' path has one star more than that of the
    answers if there are several raters, and it may have fewer."""
    n = min(len(place), len(other))
    return place[:n] == other[:n]


def prompt_and_answer(
    layout: Layout, raw: dict, fields: dict, name: str, value: object
) -> tuple[dict, object]:
    """The fields of the prompt, and the answer that the column `name` finds. Raises Skipped, BadInput."""
    columns = layout.columns
    beginning = columns["prefix"].one(raw) if "prefix" in columns else ""
    answer = text_or_turns(layout, name, value)
    if not is_there(answer):
        raise Skipped("with an empty answer")
    if isinstance(answer, list):
        if is_there(beginning):
            raise BadInput(f"prefix: {name} has messages, and a beginning is for texts")
        turn = columns["turn"].one(raw) if "turn" in columns else None
        return last_of_dialogue(fields, name, answer, turn)
    return fields, f"{beginning or ''}{answer}"


def judge(layout: Layout, judged: Judged, judgement: Judgement) -> None:
    """Label an answer by the judgement, or by what its ratings say. Raises Skipped, BadInput."""
    if isinstance(judgement, list):
        if layout.kind == "paired" and len(judgement) == 1:
            judged.score = number(judgement[0])
        try:
            judgement = layout.labels.of(judgement)
        except Skipped:
            # a score between the cuts ranks the answer in a pair
            if judged.score is None or not layout.labels.are_cuts:
                raise
            judgement = None
    judged.label = judgement
    if layout.kind == "demonstrations" and judgement is False:
        judged.reason = "down: not to be imitated"


def prompt_fields(layout: Layout, raw: dict) -> dict:
    """The fields of a record that make the prompt of its answers, and other fields. Raises Skipped, BadInput."""
    fields = layout.fields_beside(raw)
    for name in PROMPTS:
        if name in layout.columns:
            value = text_or_turns(layout, name, layout.columns[name].one(raw))
            if is_there(value):
                fields[name] = value
    if layout.marks:
        for name in fields:
            if ALIASES.get(name, name) in PROMPTS:
                fields[name] = as_turns(split_turns(layout, fields[name]))
    return fields
