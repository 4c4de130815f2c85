"""The path of a field of a foreign record, such as `choices.0.text` or `answers.*.score`.

Reading order: find (a path in a record); Column (a path of --columns); paths_in (for messages).
"""

import re
from collections.abc import Iterator
from contextlib import suppress

from convert.values import is_there, values_of
from infra.console import BadInput
from records.forms import parse_json

MESSAGES = re.compile(r"""\s*\[?\s*\{\s*["'](role|from|content|value|messages|type)["']""")
# (the index of each star of a path, the value)
Found = tuple[tuple, object]


def find(value: object, steps: list[str], index: tuple = ()) -> list[Found]:
    """All values of a path: none if it does not exist, several after a star."""
    if not steps or value is None:
        return [(index, value)]
    step = steps[0]
    if isinstance(value, str) and not step.startswith("*;"):
        value = opened(value)
    if isinstance(value, dict):
        for n in range(len(steps), 0, -1):  # a field whose name has dots comes first
            name = ".".join(steps[:n])
            if name in value:
                return find(value[name], steps[n:], index)
    inner: list[Found] = []
    if step.startswith("["):
        name, _, wanted = step[1:-1].partition("=")
        inner = [(index, row) for row in rows_with(value, name, wanted)]
    elif step.startswith("*"):
        inner = [((*index, i), x) for i, x in enumerate(elements(value, step[1:]))]
    elif isinstance(value, list) and step.removeprefix("-").isdigit():
        inner = [(index, x) for x in value[int(step) :][:1]]
    return [found for place, element in inner for found in find(element, steps[1:], place)]


def opened(text: object) -> object:
    """The object or list in a text of JSON, or the value itself. Raises BadInput for torn JSON."""
    if isinstance(text, str) and text.lstrip()[:1] in ("{", "["):
        try:
            return parse_json(text)
        except ValueError as e:
            if MESSAGES.match(text):
                raise BadInput(f"{text[:40]!r}: begins like messages in JSON, but: {e}") from None
    return text


def elements(value: object, separator: str = "") -> list:
    """The elements that a star means: those of a list, the values of an object; with a separator (`*;`) the parts of a
    text."""
    if separator and isinstance(value, str):
        return [part.strip() for part in value.split(separator)]
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def rows_with(value: object, name: str, wanted: str) -> list[dict]:
    """The objects of a list with a wanted value in the field `name`. The datasets library may hold a list of objects
    as an object of lists, a list for each field."""
    rows = elements(value)
    if isinstance(value, dict) and name in value:
        rows = [value]
        if all(isinstance(field, list) for field in value.values()):
            rows = [dict(zip(value, row)) for row in zip(*value.values())]
    values = values_of(wanted)
    return [row for row in rows if isinstance(row, dict) and values.has(row.get(name))]


class Column:
    """The path of a field: `data.rating`, `.text|.content` (the first that exists; inside each message),
    `answer_0+answer_1` (both)."""

    def __init__(self, text: str):
        self.text = text
        self.inner = text.startswith(".")
        self.parts = []
        for part in text.split("+"):
            alternatives = [x.removeprefix(".") for x in part.split("|")]
            self.parts.append([re.findall(r"\[[^]]*\]|[^.\[]+", x) for x in alternatives])
        self.is_name = not re.search(r"[.+*\[]", text)
        self.is_several = "+" in text or "*" in re.sub(r"\[[^]]*\]", "", text)
        # a shortcut, because messages are read hundreds of thousands of times: fields that need no path
        names = [name.removeprefix(".") for name in text.split("|")]
        self.fields = [] if re.search(r"[.+*\[]|^$", "".join(names)) else names
        self.was_asked = False
        self.was_found = not text  # weight= names no field

    def all(self, record: object) -> list[Found]:
        """All values in a record, each with the index of every star and of its part of a sum."""
        self.was_asked = True
        if self.text and isinstance(record, dict) and self.text in record:  # also a name with dots
            self.was_found = True
            return [((), record[self.text])]
        if len(self.parts) == 1:
            return self._first(self.parts[0], record, ())
        result = []
        for i, alternatives in enumerate(self.parts):
            result += self._first(alternatives, record, (i,))
        return result

    def _first(self, alternatives: list[list[str]], record: object, index: tuple) -> list[Found]:
        """The first alternative with a value, or the last."""
        values: list[Found] = []
        for steps in filter(None, alternatives):
            values = find(record, steps, index)
            for _, value in values:
                self.was_found = True
                if is_there(value):
                    return values
        return values

    def one(self, record: object) -> object:
        """The value in a record, a list if there are several, or None."""
        if isinstance(record, dict):
            for name in self.fields:
                value = record.get(name)
                if is_there(value):
                    self.was_asked = self.was_found = True
                    return value
        found = self.all(record)
        if self.is_several:
            return [value for _, value in found]
        return found[0][1] if found else None

    def names(self) -> set[str]:
        """The fields of the record at the beginning of its paths."""
        return {self.text} | {steps[0] for part in self.parts for steps in part if steps}


def paths_in(value: object, before: str = "") -> Iterator[str]:
    """All paths that a value has, for a message."""
    with suppress(BadInput):
        value = opened(value)
    if isinstance(value, dict):
        for name, inner in value.items():
            yield before + name
            yield from paths_in(inner, f"{before}{name}.")
    elif isinstance(value, list):
        for element in value[:5]:
            yield from paths_in(element, f"{before}*.")
