"""A record with one answer, with two and a verdict, or with lists of answers.

one_answer makes a record of ours; the others yield a Rating for each answer, or a text that says why an answer is
left out. foreign.py counts these texts, and makes records or pairs of the ratings.

Reading order: Rating; one_answer; two_answers; rated_answers and good_and_bad_answers (lists); the fields that the
answers of a record share; best_and_worst (pairs for dpo.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

from infra.console import BadInput
from records.dialogues import (
    ANSWERS,
    TEXTS,
    alternating,
    prompt_name,
    split_turns,
    turns_or_text,
    with_dialogue,
    with_its_prompt,
    with_lists_of_messages,
    with_split_turns,
)
from records.forms import ALIASES, LABELS, PROMPTS, as_turns
from records.layout import BESIDE, FOREIGN, PAIR, Layout
from records.paths import Column, Skipped, is_there, number


class Rating(NamedTuple):
    """A rated answer. `fields`: those of our record that make its prompt."""

    where: str
    fields: dict
    completion: object
    label: bool | None  # None: between the cuts of data.labels, and only of use in a pair
    value: object  # as it stands in the record: the best and the worst of a list


# ---- one answer: our own form, but for the names of its fields -----------------------------------


def one_answer(layout: Layout, raw: dict) -> dict:
    """The record of ours that this one is. Raises Skipped, BadInput."""
    if not layout.columns and not layout.labels.wanted and not layout.marks:
        return with_its_prompt(with_lists_of_messages(layout, raw))
    fields = fields_beside(layout, raw)
    for name, column in layout.columns.items():
        if name not in FOREIGN and name not in BESIDE:
            fields[name] = value_of_column(layout, name, column, raw)
    if layout.kind in ("rated", "demonstrations"):
        fields = with_label(layout, fields)
    fields = with_its_prompt(with_lists_of_messages(layout, fields))
    fields = with_prefix(layout, raw, fields)
    return with_split_turns(layout, fields)


def value_of_column(layout: Layout, name: str, column: Column, raw: dict) -> object:
    """What our field `name` is in this record. Raises Skipped where it is an empty answer."""
    if name == "label":
        ratings = [rating for _, rating in column.all(raw)]
        # several raters; or several elements that `ratings[status=submitted]` fits
        if column.is_several or len(ratings) > 1:
            return ratings or None
    value = column.one(raw)
    if name in TEXTS:
        value = turns_or_text(layout, name, value)
    if name in PROMPTS:
        value = alternating(value)
    if name in ANSWERS and not is_there(value) and layout.kind != "prompts":
        raise Skipped("with an empty answer")
    return value


def with_label(layout: Layout, fields: dict) -> dict:
    """The fields, with the label as data.labels reads it. With data.repeated a rating that says nothing stays, as
    the reason to skip it: a click that withdraws an earlier one. Raises Skipped, BadInput."""
    if not layout.labels.wanted:
        return fields
    our_names = {name: ALIASES.get(name, name) for name in fields}
    names = [name for name, our_name in our_names.items() if our_name == "label"]
    if len(names) > 1:
        raise BadInput("label: given twice")
    if not names:
        if not set(our_names.values()) & set(PAIR):
            raise Skipped("not rated")
        return fields
    ratings = fields[names[0]]
    if not isinstance(ratings, list):
        ratings = [ratings]
    try:
        label: bool | str = LABELS[layout.labels.of(ratings)]
    except Skipped as e:
        if not layout.repeated:
            raise
        label = str(e)
    others = {name: value for name, value in fields.items() if name != names[0]}
    return {**others, "label": label}


# ---- two answers and a verdict -------------------------------------------------------------------


def two_answers(layout: Layout, where: str, raw: dict) -> Iterator[Rating | str]:
    """Two answers and a verdict: a, b, both or neither. Raises Skipped, BadInput."""
    columns = layout.columns
    verdict = ""
    if layout.kind != "prompts":
        verdicts = [value for _, value in columns["verdict"].all(raw)]
        verdict = layout.labels.of(verdicts, "verdict")
    prompt = prompt_fields(layout, raw)
    turn = columns["turn"].one(raw) if "turn" in columns else None
    for name in ("a", "b"):
        fields, completion = answer_to(layout, prompt, name, columns[name].one(raw), turn)
        is_good = verdict in (name, "both")
        yield Rating(where, fields, completion, is_good, verdict)


# ---- lists of answers ----------------------------------------------------------------------------


def rated_answers(layout: Layout, where: str, raw: dict) -> Iterator[Rating | str]:
    """A list of answers and one of their ratings. Raises Skipped, BadInput."""
    prompt = prompt_fields(layout, raw)
    all_ratings = layout.columns["label"].all(raw)
    for index, answer in layout.columns["completion"].all(raw):
        ratings = ratings_of_answer(all_ratings, index)
        try:
            if not is_there(answer):
                raise Skipped("with an empty answer")
            name = layout.labels.of(ratings) if layout.kind != "prompts" else "up"
        except Skipped as e:
            is_between_cuts = str(e) == "by data.labels" and number(ratings[0]) is not None
            if layout.kind != "paired" or not is_between_cuts:
                yield str(e)
                continue
            name = None  # it may still be the best or the worst of the list
        try:  # the others may be learned from
            fields, completion = answer_to(layout, prompt, "completion", answer)
        except Skipped as e:
            yield str(e)
            continue
        value = ratings[0] if len(ratings) == 1 else name
        yield Rating(where, fields, completion, LABELS.get(name), value)


def ratings_of_answer(ratings: list[tuple[tuple, object]], index: tuple) -> list:
    """Those of the (index, rating) that belong to the answer at `index`: the stars of both paths stand for the same
    places. The ratings' path has one star more where there are several raters, and may have fewer."""
    found = []
    for place, rating in ratings:
        if place[: len(index)] == index[: len(place)]:
            found.append(rating)
    return found


def good_and_bad_answers(layout: Layout, where: str, raw: dict) -> Iterator[Rating | str]:
    """A list of good and one of bad answers, which may differ in length. Raises Skipped, BadInput."""
    prompt = prompt_fields(layout, raw)
    for name in PAIR:
        for _, answer in layout.columns[name].all(raw):
            if is_there(answer):
                try:
                    fields, completion = answer_to(layout, prompt, name, answer)
                except Skipped as e:
                    yield str(e)
                    continue
                yield Rating(where, fields, completion, name == "chosen", name)


# ---- what the answers of a record share ----------------------------------------------------------


def prompt_fields(layout: Layout, raw: dict) -> dict:
    """The fields that make the prompt of all answers of a record."""
    fields = fields_beside(layout, raw)
    for name in PROMPTS:
        if name in layout.columns:
            value = turns_or_text(layout, name, layout.columns[name].one(raw))
            if is_there(value):
                fields[name] = value
    return with_prefix(layout, raw, with_split_turns(layout, fields))


def answer_to(
    layout: Layout, prompt: dict, name: str, value: object, turn: object = None
) -> tuple[dict, object]:
    """The fields of the prompt and the answer, from what the column `name` leads to. prompt: see prompt_fields;
    turn: see with_dialogue."""
    answer = split_turns(turns_or_text(layout, name, value), layout.marks)
    return with_dialogue(prompt, name, answer, turn)


def fields_beside(layout: Layout, raw: dict) -> dict:
    """The fields of a record that no column stands for: all of them, where columns are plain names; else those
    that stand beside any form."""
    fields = {}
    for name, value in raw.items():
        stays = name in layout.beside or not layout.is_foreign
        if name in layout.extra:
            fields[name] = value
        elif stays and name not in layout.sources:
            if ALIASES.get(name, name) not in layout.replaced:
                fields[name] = value
            else:
                # it has a name of ours and means something else
                layout.counts[f"with {name}, which nothing reads"] += 1
    for name in (*BESIDE, *layout.extra):
        column = layout.columns.get(name)
        if column is None or column.inner:
            continue
        value = column.one(raw)
        if is_there(value):
            fields[name] = value
    return fields


def with_prefix(layout: Layout, raw: dict, fields: dict) -> dict:
    """A given beginning of the answer ends the prompt, in the assistant's turn: it is not scored."""
    if "prefix" not in layout.columns:
        return fields
    beginning = layout.columns["prefix"].one(raw)
    name = prompt_name(fields)
    others = {x: y for x, y in fields.items() if x != name}
    turns = as_turns(fields.get(name, []))
    if is_there(beginning):
        turns = [*turns, {"role": "assistant", "content": beginning}]
    return {**others, "prompt": turns}


# ---- pairs ---------------------------------------------------------------------------------------


def best_and_worst(ratings: list[Rating], higher_is_better: bool) -> list[tuple[Rating, Rating]]:
    """The pairs of the answers to one prompt: by their numbers the best and the worst; else good against
    bad ones, of two lists one by one and of others the first."""
    numbers = [number(rating.value) for rating in ratings]
    if len(ratings) > 1 and all(x is not None for x in numbers):
        order = sorted(range(len(ratings)), key=lambda i: numbers[i], reverse=higher_is_better)
        best = order[0]
        worst = order[-1]
        return [(ratings[best], ratings[worst])] if numbers[best] != numbers[worst] else []
    good = [rating for rating in ratings if rating.label is True]
    bad = [rating for rating in ratings if rating.label is False]
    pairs = list(zip(good, bad))
    is_of_two_lists = len(ratings) > 0 and ratings[0].value in PAIR
    return pairs if is_of_two_lists else pairs[:1]
