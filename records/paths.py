"""Where a field of a foreign record lies, and what its values mean.

Reading order: find and Column (a path of data.columns); nearest (names for messages); matches (a value of
data.where or data.labels); Labels (data.labels and data.raters).
"""

import difflib
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from infra.console import BadInput
from infra.settings import split_commas
from records.forms import LABELS, as_text, unique_keys

MESSAGES = re.compile(r"""\s*\[?\s*\{\s*["'](role|from|content|value|messages|type)["']""")


class Skipped(Exception):
    """Nothing can be learned from this record or answer. The text says why; the table counts it."""


# ---- paths ---------------------------------------------------------------------------------------


def find(value: object, steps: list[str], index: tuple = ()) -> Iterator[tuple[tuple, object]]:
    """(index, value) of all that a path leads to: none where it is not there, several after a star. The
    index has the place that each star stands for."""
    if not steps or value is None:
        yield index, value
        return
    if isinstance(value, str) and not steps[0].startswith("*;"):
        value = opened(value)
    if isinstance(value, dict):
        if len(steps) == 1 and steps[0] in value:
            yield index, value[steps[0]]
            return
        for n in range(len(steps), 0, -1):  # a field whose own name has dots
            name = ".".join(steps[:n])
            if name in value:
                yield from find(value[name], steps[n:], index)
                return
    step, *rest = steps
    if step.startswith("["):
        name, _, wanted = step[1:-1].partition("=")
        is_row = isinstance(value, dict) and name in value and not isinstance(value[name], list)
        for row in [value] if is_row else rows(value):
            if matches(next(find(row, [name]), (None, None))[1], wanted):
                yield from find(row, rest, index)
    elif step.startswith("*"):
        for i, element in enumerate(elements(value, step[1:])):
            yield from find(element, rest, (*index, i))
    elif isinstance(value, list):
        with suppress(ValueError, IndexError):
            yield from find(value[int(step)], rest, index)


def opened(text: str) -> object:
    """What a text of JSON holds, if it is an object or a list; else the text. Raises BadInput for half of one."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text, object_pairs_hook=unique_keys)
        except ValueError as e:
            if MESSAGES.match(text):
                raise BadInput(f"{text[:40]!r}: begins like messages in JSON, but: {e}") from None
    return text


def elements(value: object, separator: str) -> list:
    """What a star stands for: the elements of a list, the values of an object; with a separator (`*;`)
    the parts of a text."""
    if separator and isinstance(value, str):
        return [part.strip() for part in value.split(separator)]
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def rows(value: object) -> list[dict]:
    """A list of objects. The datasets library may hold one as an object of lists, a list for each field."""
    if is_lists_by_key(value):
        return [dict(zip(value, row)) for row in zip(*value.values())]
    return [row for row in elements(value, "") if isinstance(row, dict)]


def is_lists_by_key(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(x, list) for x in value.values())


def is_there(value: object) -> bool:
    return value is not None and value not in ("", [], {})


class Column:
    """Where a field lies: `data.rating`, `.text|.content` (the first that is there; inside each message),
    `answer_0+answer_1` (both)."""

    def __init__(self, text: str):
        self.text = text
        self.inner = text.startswith(".")
        self.parts = []
        for part in text.split("+"):
            alternatives = [x.removeprefix(".") for x in part.split("|")]
            self.parts.append([re.findall(r"\[[^]]*\]|[^.\[]+", x) for x in alternatives])
        self.is_name = not re.search(r"[.+*\[]", text)
        self.is_several = len(self.parts) > 1 or any(
            step.startswith("*") for part in self.parts for steps in part for step in steps
        )
        self.was_asked = False
        self.was_found = False

    def all(self, record: object) -> list[tuple[tuple, object]]:
        """(index, value) of all that is there in a record."""
        self.was_asked = True
        if not self.text:  # weight= : the records' weights mean something else
            self.was_found = True
            return []
        if isinstance(record, dict) and self.text in record:
            self.was_found = True
            return [((), record[self.text])]
        result = []
        for i, alternatives in enumerate(self.parts):
            index = (i,) if len(self.parts) > 1 else ()
            first: list[tuple[tuple, object]] = []
            for steps in alternatives:
                there = list(find(record, steps, index))
                self.was_found |= bool(there)
                first = first or there
                if any(is_there(value) for _, value in there):
                    first = there
                    break
            result += first
        return result

    def one(self, record: object) -> object:
        """The value in a record; of several a list; None where there is none."""
        values = [value for _, value in self.all(record)]
        if self.is_several:
            return values
        return values[0] if values else None

    def names(self) -> set[str]:
        """The fields of the record in which its paths begin."""
        return {self.text, *(steps[0] for part in self.parts for steps in part if steps)}


def names_in(value: object, before: str = "", depth: int = 6) -> Iterator[str]:
    """All paths that a value has, for a message."""
    with suppress(BadInput):
        value = opened(value) if isinstance(value, str) else value
    if isinstance(value, dict) and depth:
        for name, inner in value.items():
            yield before + name
            yield from names_in(inner, f"{before}{name}.", depth - 1)
    elif isinstance(value, list) and value and depth:
        yield from names_in(value[0], f"{before}*.", depth - 1)


def nearest(name: str, names: list[str]) -> str:
    """The names that are there and look most like this one, for a message."""
    names = list(dict.fromkeys(names))
    last = name.split(".")[-1].lower()
    ends = [x for x in names if x.split(".")[-1].lower() == last]
    near = ends + difflib.get_close_matches(name, names, 4, 0.5)
    return ", ".join(list(dict.fromkeys(near or names))[:4])


# ---- settings and values -------------------------------------------------------------------------


def split_pairs(setting: str, text: str | None) -> list[tuple[str, str, str]]:
    """[("type", "=", "GENERATION")] of `type=GENERATION`; also `!=`. Raises BadInput."""
    pairs = []
    for part in split_commas(text):
        match = re.fullmatch(r"((?:\[[^]]*\]|[^=\[])+?)(!?=)(.*)", part)
        if not match:
            raise BadInput(f"{setting}: {text}: expected name=name, separated by commas")
        pairs.append(match.groups())
    return pairs


def interval(text: str) -> tuple[float, float] | None:
    """(lowest, highest) of `>=4`, `>4`, `<=2`, `<2` or `4..5`; None for a text that is none of these."""
    with suppress(ValueError):
        for sign, at in ((">=", 0), ("<=", 0), (">", math.inf), ("<", -math.inf)):
            if text.startswith(sign):
                edge = float(text.removeprefix(sign))
                edge = math.nextafter(edge, at) if at else edge
                return (edge, math.inf) if sign[0] == ">" else (-math.inf, edge)
        low, is_range, high = text.partition("..")
        if is_range:
            return float(low), float(high)
    return None


DAY = r"\d{4}-\d\d-\d\d.*"
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def is_in_days(text: str, wanted: str) -> bool:
    """Whether a day or a time is one of those that `>=2026-11-24` names. As ISO 8601 writes them, they have the order
    of time as texts, too. Raises BadInput for a text that is no day: another form has another order."""
    cut = re.fullmatch(f"([<>]=?)({DAY})", wanted)
    if not cut or text == "null":
        return False
    if not re.match(DAY, text):
        raise BadInput(
            f"data.where: {wanted}: {text:.40} is no day or time such as 2026-11-24T10:00"
        )
    # Python and SQL write a blank before the hour
    text, edge = (x.replace(" ", "T", 1) for x in (text, cut[2]))
    # 2026-11-24T10:00 is of the day 2026-11-24
    return COMPARE[cut[1]](text[: len(edge)], edge)


def number(value: object) -> float | None:
    with suppress(ValueError):
        if not isinstance(value, bool):
            return float(str(value))
    return None


def matches(value: object, wanted: str) -> bool:
    """Whether a value is one of those that `4|5`, `>=4`, `>=2026-11-24`, `-3..-1`, `null` (also written as
    nothing; what is empty, too: a csv file has only empty texts) or `*...` name. Raises BadInput: see is_in_days."""
    is_empty = not is_there(value) or value == "[]"  # a csv file's empty list
    text = as_text(None if is_empty else value)
    for one in wanted.split("|"):
        if (one or "null") == text or isinstance(value, bool) and one == str(value):
            return True
        limits = interval(one)
        if limits:
            x = number(value)
            if x is not None and limits[0] <= x <= limits[1]:
                return True
        elif is_in_days(text, one):
            return True
        elif one[:1] == "*" and isinstance(value, str) and value.endswith(one[1:]):
            return True
    return False


class Labels:
    """What the ratings mean: data.labels, and data.raters where one answer has several."""

    def __init__(self, text: str | None, raters: str | None):
        pairs = split_pairs("data.labels", text)
        self.wanted = unique_items("data.labels", [(name, value) for name, _, value in pairs])
        self.majority = raters == "majority"
        for name, value in self.wanted.items():
            if name not in LABELS and name not in ("a", "b", "both", "neither"):
                raise BadInput(
                    f"data.labels: {text}: expected name=name, separated by commas: {name} is none of "
                    "up, down; a, b, both, neither"
                )
            if not value:
                raise BadInput(f"data.labels: {text}: expected name=name, separated by commas")
        named = "|".join(self.wanted.values()).split("|")
        if len(set(named)) < len(named):
            raise BadInput(f"data.labels: {text}: expected name=name: a value is named twice")

    def name(self, value: object) -> str | None:
        """up, a, ... of one rating; None where data.labels does not name it."""
        for name, wanted in self.wanted.items():
            if matches(value, wanted):
                return name
        return None

    def agreed(self, votes: list) -> object:
        """The vote of all raters, or with data.raters majority that of more than half. Raises Skipped."""
        if len(set(votes)) == 1:
            return votes[0]
        vote, count = Counter(votes).most_common(1)[0]
        if not self.majority or 2 * count <= len(votes):
            raise Skipped("whose raters disagree")
        return vote

    def of(self, ratings: list, field: str = "label") -> str:
        """What the ratings of one answer, or the verdicts on two, say together. Raises Skipped, BadInput."""
        together = "+".join(map(as_text, ratings))  # a=1+0+0: several numbers, one verdict
        ratings = [rating for rating in ratings if is_there(rating)]
        if not ratings:
            raise Skipped("not rated")
        if any("+" in wanted for wanted in self.wanted.values()):
            ratings = [together]
        name = self.agreed([self.name(rating) for rating in ratings])
        if name is None:
            if field == "verdict" and not re.fullmatch(r"[-+.\d]+", as_text(ratings[0])):
                raise BadInput(
                    f"verdict: {ratings[0]!r:.50}: data.labels does not name it; there is "
                    f"{', '.join(self.wanted.values())} (data.where leaves records out)"
                )
            raise Skipped("by data.labels")
        return name

    @property
    def are_cuts(self) -> bool:
        """Whether `up` names a range of numbers: these are scores. A single number is a code, as 1 for a thumb up."""
        return any(map(interval, self.wanted.get("up", "").split("|")))

    @property
    def higher_is_better(self) -> bool:
        """Whether `up` names the larger numbers (scores), or the smaller ones (ranks)."""
        middles: dict[bool, list[float]] = {True: [], False: []}
        for name, wanted in self.wanted.items():
            for one in wanted.split("|"):
                low, high = interval(one) or (number(one), number(one))
                if name in LABELS and low is not None:
                    middles[LABELS[name]].append(max(low, -1e30) + min(high, 1e30))
        return not all(middles.values()) or max(middles[True]) > max(middles[False])


def unique_items(setting: str, items: list[tuple[str, object]]) -> dict:
    try:
        return unique_keys(items)
    except ValueError as e:
        raise BadInput(f"{setting}: {e}") from None
