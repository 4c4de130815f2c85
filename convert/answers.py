"""A record that holds one answer, two answers and a verdict, or lists of answers.

Reading order: Judged (an answer, and what was said of it); judged_answers; own_record (our own form, but for the names
of its fields).
"""

from collections.abc import Iterator
from typing import NamedTuple

from convert.layout import PAIR, TEXTS, Layout
from convert.messages import (
    alternating,
    split_turns,
    text_or_turns,
    with_dialogue,
    with_joined_parts,
)
from convert.values import Skipped, is_there, number
from infra.console import BadInput
from records.forms import ALIASES, PROMPTS, as_turns


class Judged(NamedTuple):
    """An answer, and what was said of it."""

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
    next: str | None = None
    """What the user wrote next, if it is known."""

    @property
    def record(self) -> dict:
        """Our record of it, with its label."""
        record = {"completion": self.answer, "label": self.label, "next": self.next}
        return self.fields | {name: x for name, x in record.items() if x is not None}


def judge(layout: Layout, judged: Judged, ratings: list) -> Judged:
    """The answer, judged by these ratings. Raises BadInput."""
    score = number(ratings[0]) if len(ratings) == 1 else None
    label = None
    reason = ""
    try:
        label = layout.labels.of(ratings)
    except Skipped as e:
        reason = str(e)
    return judged._replace(label=label, score=score, reason=reason)


def judge_by_own_label(layout: Layout, judged: Judged) -> Judged:
    """The answer, judged by the field of its record that is the label. Raises BadInput."""
    names = [name for name in judged.fields if ALIASES.get(name, name) == "label"]
    has_none = not layout.labels.wanted or layout.kind == "paired" or "chosen" in judged.fields
    if len(names) > 1:
        raise BadInput("label: given twice")
    if not names and has_none:
        return judged
    ratings = [judged.fields[name] for name in names]
    fields = {name: value for name, value in judged.fields.items() if name not in names}
    return judge(layout, judged._replace(fields=fields), ratings)


def judged_answers(layout: Layout, where: str, raw: dict) -> Iterator[Judged]:
    """The answers of a record to one prompt. Raises Skipped, BadInput."""
    columns = layout.columns
    prompt = prompt_fields(layout, raw)
    turn = columns["turn"].one(raw) if "turn" in columns else None
    for name, value, judgement in answers_of(layout, raw):
        try:
            answer = split_turns(text_or_turns(layout, name, value), layout.marks)
            fields, answer = with_dialogue(prompt, name, answer, turn)
            if not is_there(answer):
                raise Skipped("with an empty answer")
        except Skipped as e:
            if layout.has_two_answers:  # if one of them cannot be read, both are dropped
                raise
            yield Judged(where, prompt, reason=str(e))
            continue
        judged = Judged(where, fields, answer)
        if isinstance(judgement, list):
            yield judge(layout, judged, judgement)
        elif judgement is None:
            yield judge_by_own_label(layout, judged)
        else:
            yield judged._replace(label=judgement)


def answers_of(layout: Layout, raw: dict) -> Iterator[tuple[str, object, bool | list | None]]:
    """(column, answer, its label or its ratings) of each answer of a record; None: its own field is the label. Raises
    Skipped, BadInput."""
    columns = layout.columns
    if "verdict" in columns:
        verdict = layout.labels.of([value for _, value in columns["verdict"].all(raw)])
        for name in ("a", "b"):
            yield name, columns[name].one(raw), verdict in (name, "both")
        return
    for name in PAIR:
        if name in columns:
            for _, answer in columns[name].all(raw) or [((), None)]:
                yield name, answer, name == "chosen"
    all_ratings = columns["label"].all(raw) if "label" in columns else None
    for name in ("completion", "messages"):
        if name not in columns:
            continue
        for index, answer in columns[name].all(raw) or [((), None)]:
            ratings = None
            if all_ratings is not None:
                # The stars of both paths stand for the same places. The ratings' path has one star more where there
                # are several raters, and may have fewer.
                ratings = [x for at, x in all_ratings if at[: len(index)] == index[: len(at)]]
            yield name, answer, ratings


def prompt_fields(layout: Layout, raw: dict) -> dict:
    """The fields of a record that make the prompt of its answers, and those beside. Raises Skipped, BadInput."""
    fields = layout.fields_beside(raw)
    for name in PROMPTS:
        if name in layout.columns:
            value = text_or_turns(layout, name, layout.columns[name].one(raw))
            if is_there(value):
                fields[name] = value
    for name, value in fields.items():
        our_name = ALIASES.get(name, name)
        if our_name in TEXTS:
            fields[name] = split_turns(with_joined_parts(value), layout.marks)
        if our_name in PROMPTS and layout.marks:
            fields[name] = as_turns(fields[name])
    if "prefix" in layout.columns:  # it ends the prompt, in the assistant's turn, and is not scored
        beginning = layout.columns["prefix"].one(raw)
        name = next((x for x in fields if ALIASES.get(x, x) in PROMPTS), "prompt")
        turns = as_turns(fields.pop(name, []))
        if is_there(beginning):
            turns = [*turns, {"role": "assistant", "content": beginning}]
        fields["prompt"] = turns
    return fields


def own_record(layout: Layout, where: str, raw: dict) -> Judged:
    """The record of ours that this one is. Raises Skipped, BadInput."""
    fields = prompt_fields(layout, raw)
    for name in layout.columns.keys() & fields.keys() & set(PROMPTS):
        fields[name] = alternating(fields[name])
    judged = Judged(where, fields)
    if "label" in layout.columns:
        return judge(layout, judged, [rating for _, rating in layout.columns["label"].all(raw)])
    return judge_by_own_label(layout, judged)
