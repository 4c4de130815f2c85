"""What a value means: the words of --where and --labels, and one label of several ratings.

Reading order: pairs_of and named (a setting); Values (`4|5`, `>=4`, `>=2026-11-24`); Labels (what the ratings of an
answer say together).
"""

import functools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone

from infra.console import BadInput
from infra.settings import split_commas
from records.forms import LABELS, as_text, unique_keys


class Skipped(Exception):
    """Nothing can be learned from this record or answer. The text says why; the table counts it."""


def is_there(value: object) -> bool:
    if value:
        return True
    return value is not None and value not in ("", [], {})


def number(value: object) -> float | None:
    with suppress(ValueError):
        if not isinstance(value, bool):
            return float(str(value))
    return None


def pairs_of(setting: str, text: str | None) -> list[tuple[str, str, str]]:
    """[("type", "=", "GENERATION")] of `type=GENERATION`; also `!=`. Raises BadInput."""
    pairs = []
    for part in split_commas(text):
        match = re.fullmatch(r"((?:\[[^]]*\]|[^=\[])+?)(!?=)(.*)", part)
        if not match:
            raise BadInput(f"{setting}: {text}: expected name=name, separated by commas")
        pairs.append(match.groups())
    return pairs


def named(setting: str, text: str | None) -> dict[str, str]:
    """{"prompt": "question"} of `prompt=question`. Raises BadInput."""
    try:
        return unique_keys([(name, value) for name, _, value in pairs_of(setting, text)])
    except ValueError as e:
        raise BadInput(f"{setting}: {e}") from None


# ---- which values a setting names ----------------------------------------------------------------


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


COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def time_limit(wanted: str) -> Callable[[str], bool] | None:
    """Whether a time is one of those that `>=2026-11-24` or `<2026-11-24T10:00+01:00` names, as a function; None for
    a text that is no such limit. The function raises BadInput for a text that is no time."""
    match = re.fullmatch(r"([<>]=?)(\d{4}-\d\d-\d\d)(.*)", wanted)
    if not match:
        return None
    sign, day, hour = match.groups()
    edge = moment(wanted, day + hour)
    if not hour and sign in (">", "<="):  # such a limit is the end of its day
        edge += timedelta(days=1)
        sign = {">": ">=", "<=": "<"}[sign]
    return lambda text: COMPARE[sign](moment(wanted, text), edge)


def moment(wanted: str, text: str) -> datetime:
    """The moment of a day or a time in ISO 8601; one without a zone is in UTC. Raises BadInput."""
    try:
        time = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
    except ValueError:
        raise BadInput(
            f"--where: {wanted}: {text:.40} is no day or time such as 2026-11-24T10:00"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


class Values:
    """Those that `4|5`, `>=4`, `-3..-1`, `>=2026-11-24`, `*...` (an end) and `null` name. `null`, also written as
    nothing, is what is not there or empty: a csv file has only empty texts."""

    def __init__(self, wanted: str):
        self.texts = [text or "null" for text in wanted.split("|")]
        self.ends = tuple(text[1:] for text in self.texts if text[0] == "*")
        self.intervals = [x for x in map(interval, self.texts) if x]
        self.times = [x for x in map(time_limit, self.texts) if x]

    def has(self, value: object) -> bool:
        """Whether a value is one of these. Raises BadInput for a text that is compared with a time and is none."""
        is_empty = not is_there(value) or value == "[]"  # a csv file's empty list
        text = as_text(None if is_empty else value)
        if text in self.texts or str(value) in self.texts:  # true, and Python's True
            return True
        x = number(value) if self.intervals else None
        if x is not None and any(low <= x <= high for low, high in self.intervals):
            return True
        if not is_empty and any(is_within(text) for is_within in self.times):
            return True
        return bool(self.ends) and isinstance(value, str) and value.endswith(self.ends)


@functools.cache
def values_of(wanted: str) -> Values:
    return Values(wanted)


# ---- what ratings mean ---------------------------------------------------------------------------


class Labels:
    """What the ratings mean: --labels, and --raters where one answer has several."""

    def __init__(self, text: str | None, raters: str | None):
        self.majority = raters == "majority"
        # what our own label, or a verdict (a, b, both, neither), is called in the file
        self.wanted: dict[bool | str, str] = {}
        for name, value in named("--labels", text).items():
            meaning = LABELS.get(name, name)
            if meaning not in (True, False, "a", "b", "both", "neither") or not value:
                raise BadInput(
                    f"--labels: {text}: expected name=name, separated by commas: {name} is none of "
                    "up, down; a, b, both, neither"
                )
            before = self.wanted.get(meaning)
            self.wanted[meaning] = f"{before}|{value}" if before else value
        values = "|".join(self.wanted.values()).split("|")
        # a=1+0+0: several numbers, one verdict
        self.are_sums = any("+" in value for value in values)
        if len(set(values)) < len(values):
            raise BadInput(f"--labels: {text}: expected name=name: a value is named twice")

    def meaning(self, rating: object) -> bool | str | None:
        """Up (True), down, a, ... of one rating; None where --labels does not name it. Without --labels, of our own
        labels. Raises BadInput."""
        for meaning, wanted in self.wanted.items():
            if values_of(wanted).has(rating):
                return meaning
        text = as_text(rating)
        if self.wanted or text in LABELS:
            return None if self.wanted else LABELS[text]
        raise BadInput(
            f"label: expected true, false, 1, 0, up, down, ...; got {rating!r:.50} (see --labels)"
        )

    def agreed(self, votes: list) -> bool | str | None:
        """The vote of all raters, or with --raters majority that of more than half. Raises Skipped."""
        if len(set(votes)) == 1:
            return votes[0]
        vote, count = Counter(votes).most_common(1)[0]
        if not self.majority or 2 * count <= len(votes):
            raise Skipped("whose raters disagree")
        return vote

    def of(self, ratings: list) -> bool | str:
        """What the ratings of one answer, or the verdicts on two, say together. Raises Skipped, BadInput."""
        if not any(map(is_there, ratings)):
            raise Skipped("not rated")
        if self.are_sums:
            ratings = ["+".join(map(as_text, ratings))]
        ratings = [rating for rating in ratings if is_there(rating)]
        meaning = self.agreed([self.meaning(rating) for rating in ratings])
        if meaning is None:
            is_verdict = not self.wanted.keys() <= {True, False}
            if is_verdict and not re.fullmatch(r"[-+.\d]+", as_text(ratings[0])):
                raise BadInput(
                    f"verdict: {ratings[0]!r:.50}: --labels does not name it; there is "
                    f"{', '.join(self.wanted.values())} (--where leaves records out)"
                )
            raise Skipped("by --labels")
        return meaning

    def middles(self, meaning: bool) -> list[float]:
        """The middles of the numbers that have a label."""
        values = values_of(self.wanted.get(meaning, ""))
        numbers = [x for x in map(number, values.texts) if x is not None]
        for low, high in values.intervals:
            numbers.append((max(low, -1e30) + min(high, 1e30)) / 2)
        return numbers

    @property
    def higher_is_better(self) -> bool:
        """Whether `up` names the larger numbers (scores), or the smaller ones (ranks)."""
        up = self.middles(True)
        down = self.middles(False)
        return not up or not down or max(up) > max(down)

    @property
    def are_cuts(self) -> bool:
        """Whether `up` names a range of numbers: these are scores. A single number is a code, as 1 for a thumb up."""
        return bool(values_of(self.wanted.get(True, "")).intervals)
