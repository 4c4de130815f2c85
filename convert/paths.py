"""Where a field of a foreign record lies: one path, such as `choices.0.text` or `answers.*.score`.

Reading order: find (a path in a record); Column (a path of --columns); names_in and nearest (for messages).
"""

import difflib
import functools
import json
import re
from collections.abc import Iterator
from contextlib import suppress

from convert.values import is_there, values_of
from infra.console import BadInput
from records.forms import unique_keys

MESSAGES = re.compile(r"""\s*\[?\s*\{\s*["'](role|from|content|value|messages|type)["']""")
# (the place that each star of a path stands for, what lies there)
Found = tuple[tuple, object]


@functools.cache
def splits(steps: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
    """(name of a field, the steps from there on) for each way to read a path: a field whose own name has dots comes
    first."""
    return [(".".join(steps[:n]), steps[n:]) for n in range(len(steps), 0, -1)]


def field_of(value: dict, steps: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """The field of an object in which a path goes on, and the steps from there on; None: there is none."""
    for name, rest in splits(steps):
        if name in value:
            return name, rest
    return None, steps


def find(value: object, steps: tuple[str, ...], index: tuple = ()) -> list[Found]:
    """All that a path leads to: nothing where it is not there, several after a star."""
    while steps and value is not None:
        step = steps[0]
        if isinstance(value, str) and not step.startswith("*;"):
            value = opened(value)
        if isinstance(value, dict):
            name, steps_from_there = field_of(value, steps)
            if name is not None:
                value = value[name]
                steps = steps_from_there
                continue
        inner: list[Found] = []
        if step.startswith("["):
            name, _, wanted = step[1:-1].partition("=")
            inner = [(index, row) for row in rows_with(value, name, wanted)]
        elif step.startswith("*"):
            inner = [((*index, i), x) for i, x in enumerate(elements(value, step[1:]))]
        elif isinstance(value, list) and step.removeprefix("-").isdigit():
            inner = [(index, x) for x in value[int(step) :][:1]]
        result = []
        for place, element in inner:
            result += find(element, steps[1:], place)
        return result
    return [(index, value)]


def opened(text: str) -> object:
    """What a text of JSON holds, if it is an object or a list; else the text. Raises BadInput for half of one."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text, object_pairs_hook=unique_keys)
        except ValueError as e:
            if MESSAGES.match(text):
                raise BadInput(f"{text[:40]!r}: begins like messages in JSON, but: {e}") from None
    return text


def elements(value: object, separator: str = "") -> list:
    """What a star stands for: the elements of a list, the values of an object; with a separator (`*;`)
    the parts of a text."""
    if separator and isinstance(value, str):
        return [part.strip() for part in value.split(separator)]
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def rows_with(value: object, name: str, wanted: str) -> list[dict]:
    """The objects of a list whose field `name` has a value. The datasets library may hold a list of objects as an
    object of lists, a list for each field."""
    rows = elements(value)
    if isinstance(value, dict) and name in value:
        rows = [value]
        if isinstance(value[name], list):
            rows = [dict(zip(value, row)) for row in zip(*value.values())]
    result = []
    for row in rows:
        if isinstance(row, dict):
            there = find(row, (name,))
            if values_of(wanted).has(there[0][1] if there else None):
                result.append(row)
    return result


class Column:
    """Where a field lies: `data.rating`, `.text|.content` (the first that is there; inside each message),
    `answer_0+answer_1` (both)."""

    def __init__(self, text: str):
        self.text = text
        self.inner = text.startswith(".")
        self.parts = []
        for part in text.split("+"):
            alternatives = [x.removeprefix(".") for x in part.split("|")]
            self.parts.append([tuple(re.findall(r"\[[^]]*\]|[^.\[]+", x)) for x in alternatives])
        self.is_name = not re.search(r"[.+*\[]", text)
        self.is_several = "+" in text or "*" in re.sub(r"\[[^]]*\]", "", text)
        # a shortcut, for what is read hundred thousands of times: fields of the record itself that are tried first
        self.names_first = []
        for steps in self.parts[0]:
            if len(steps) != 1 or self.is_several or steps[0][0] == "[":
                break
            self.names_first.append(steps[0])
        self.was_asked = False
        self.was_found = False

    def all(self, record: object) -> list[Found]:
        """All that is there in a record, and the place that each star, and each part of a sum, stands for."""
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
            first: list[Found] = []
            for steps in alternatives:
                there = find(record, steps, index)
                self.was_found |= bool(there)
                first = first or there
                if any(is_there(value) for _, value in there):
                    first = there
                    break
            result += first
        return result

    def one(self, record: object) -> object:
        """The value in a record; of several a list; None where there is none."""
        if isinstance(record, dict):
            for name in self.names_first:
                value = record.get(name)
                if value or is_there(value):
                    self.was_asked = self.was_found = True
                    return value
        values = [value for _, value in self.all(record)]
        if self.is_several:
            return values
        return values[0] if values else None

    def names(self) -> set[str]:
        """The fields of the record in which its paths begin."""
        names = {self.text}
        for alternatives in self.parts:
            names |= {steps[0] for steps in alternatives if steps}
        return names


def names_in(value: object, before: str = "", depth: int = 6) -> Iterator[str]:
    """All paths that a value has, for a message."""
    with suppress(BadInput):
        value = opened(value) if isinstance(value, str) else value
    if isinstance(value, dict) and depth:
        for name, inner in value.items():
            yield before + name
            yield from names_in(inner, f"{before}{name}.", depth - 1)
    elif isinstance(value, list) and depth:
        for element in value[:5]:
            yield from names_in(element, f"{before}*.", depth - 1)


def nearest(name: str, names: list[str]) -> str:
    """The names that are there and whose last steps look most like that of this one, for a message."""
    paths: dict[str, list[str]] = {}
    for path in dict.fromkeys(names):
        paths.setdefault(path.split(".")[-1].lower(), []).append(path)
    near = []
    for last in difflib.get_close_matches(name.split(".")[-1].lower(), paths, 4, 0.5):
        near += paths[last]
    return ", ".join((near or names)[:4])
