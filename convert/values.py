"""The meaning of a value: the words of --where and --labels, and one label from several ratings.

Reading order: pairs_of and named (a setting); Values (`4|5`, `>=4`, `>=2026-11-24`); Labels (one label from the ratings
of an answer).
"""

import functools
import math
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone

from infra.console import BadInput, user_error
from infra.settings import split_commas
from records.forms import as_text, read_label, unique_keys


class Skipped(Exception):
    """Nothing can be learned from this record or answer. The text says why; the table counts it."""


def is_there(value: object) -> bool:
    if value:  # the fastest question; messages are read hundreds of thousands of times
        return True
    return value not in (None, "", [], {})


def number(value: object, default: float | None = None) -> float | None:
    """A finite number, also one that is written as a text."""
    with suppress(ValueError):
        x = float(str(value))
        if math.isfinite(x):
            return x
    return default


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
    with user_error(setting):
        return unique_keys([(name, value) for name, _, value in pairs_of(setting, text)])


# ---- which values a setting names ----------------------------------------------------------------

COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def test_of(wanted: str) -> Callable[[object], bool] | None:
    """`>=4`, `4..5`, `>=2026-11-24` or `*...` as a function of a value. None for a plain text. The
    function raises BadInput for a text that is compared with a time and is no time."""
    if wanted.startswith("*"):
        return lambda value: str(value).endswith(wanted[1:])
    low, _, high = map(number, wanted.partition(".."))
    if low is not None and high is not None:
        return lambda value: low <= number(value, math.nan) <= high
    limit = re.fullmatch(r"([<>]=?)(.+)", wanted)
    if limit is None:
        return None
    is_beyond = COMPARE[limit[1]]
    edge = number(limit[2])
    if edge is not None:
        return lambda value: is_beyond(number(value, math.nan), edge)
    time = moment(wanted, limit[2])
    return lambda value: is_beyond(moment(wanted, value), time)


def moment(wanted: str, value: object) -> datetime:
    """The moment of a day or a time in ISO 8601; one without a zone is in UTC. Raises BadInput."""
    try:
        time = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", str(value)))
    except ValueError:
        raise BadInput(
            f"--where: {wanted}: {value!s:.40} is no day or time such as 2026-11-24T10:00"
        ) from None
    return time.astimezone(timezone.utc) if time.tzinfo else time.replace(tzinfo=timezone.utc)


class Values:
    """The values that `4|5`, `>=4`, `-3..-1`, `>=2026-11-24`, `*...` (an end) and `null` name. `null`, or an empty
    text, is a value that is missing or empty, because a csv file has only empty texts."""

    def __init__(self, wanted: str):
        self.texts = [text or "null" for text in wanted.split("|")]
        self.tests = [test for test in map(test_of, self.texts) if test]

    def has(self, value: object) -> bool:
        """Whether a value is one of these. Raises BadInput for a text that is no time but is compared with one."""
        if not is_there(value) or value == "[]":  # a csv file's empty list
            return "null" in self.texts
        if as_text(value) in self.texts or str(value) in self.texts:  # true, and Python's True
            return True
        return any(test(value) for test in self.tests)


values_of = functools.cache(Values)


# ---- the meaning of ratings ----------------------------------------------------------------------

THUMBS = {"up": True, "down": False}
VERDICTS = {name: name for name in ("a", "b", "both", "neither")}


class Labels:
    """The meaning of ratings: --labels, and --raters if one answer has several."""

    def __init__(self, text: str | None, raters: str, is_verdict: bool):
        """is_verdict: the ratings compare two answers. Raises BadInput."""
        self.majority = raters == "majority"
        meanings = VERDICTS if is_verdict else THUMBS
        # what our own label, or a verdict, is called in the file
        self.wanted: dict[bool | str, str] = {}
        for name, value in named("--labels", text).items():
            if name not in meanings or not value:
                raise BadInput(
                    f"--labels: {text}: with --columns verdict=... a, b, both and neither have values; otherwise up "
                    "and down"
                )
            self.wanted[meanings[name]] = value
        values = "|".join(self.wanted.values()).split("|")
        # a=1+0+0: several numbers, one verdict
        self.are_sums = any("+" in value for value in values)

    def meaning(self, rating: object) -> bool | str | None:
        """Up (True), down, a, ... of one rating; None if --labels does not name it. Without --labels, of our own
        labels. Raises BadInput."""
        meanings = [name for name, wanted in self.wanted.items() if values_of(wanted).has(rating)]
        if len(meanings) > 1:
            raise BadInput(f"label: {rating!r:.50} has two meanings by --labels")
        if self.wanted:
            return meanings[0] if meanings else None
        return read_label({"label": rating})

    def of(self, ratings: list) -> bool | str:
        """One label from the ratings of an answer, or from the verdicts on two. Raises Skipped, BadInput."""
        there = [rating for rating in ratings if is_there(rating)]
        if not there:
            raise Skipped("not rated")
        if self.are_sums:
            there = ["+".join(map(as_text, ratings))]
        votes = [self.meaning(rating) for rating in there]
        meaning = max(votes, key=votes.count)
        share = votes.count(meaning) / len(votes)
        if share <= 1 / 2 or (share < 1 and not self.majority):
            raise Skipped("whose raters disagree")
        if meaning is None:
            raise Skipped("by --labels")
        return meaning

    @property
    def are_cuts(self) -> bool:
        """Whether `up` names a range of numbers: these are scores. A single number is a code, as 1 for a thumb up."""
        return bool(re.search(r"[<>]|\.\.", self.wanted.get(True, "")))

    @property
    def higher_is_better(self) -> bool:
        """Whether `up` names the larger numbers (scores), or the smaller ones (ranks)."""
        up, down = self.wanted.get(True, ""), self.wanted.get(False, "")
        if "<" in up or ">" in down:
            return False
        lowest = [number(text.split("|")[0].split("..")[0]) for text in (up, down)]
        return None in lowest or lowest[0] > lowest[1]
