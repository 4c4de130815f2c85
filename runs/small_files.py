"""The one guarded read of the small files that a run trusts: settings, a checkpoint's state, a
manifest. Of each its kind and size (errors.parse_file), its form (read_object), and its fields
(require_fields) are checked; what is wrong is one line."""

import json
import math
import typing
from pathlib import Path

import yaml

from runs.errors import BadInput, parse_file, printable


def read_object(file: Path, parse=json.loads) -> dict:
    """What a small JSON or YAML file holds, by `parse`. Raises BadInput if it is no object."""
    value = parse_file(None, file, parse)
    if not isinstance(value, dict):
        raise BadInput(f"{file}: expected an object, got {printable(value)}")
    return value


def require_fields(where, value: dict, kinds: dict[str, object]) -> None:
    """Raise BadInput unless a value from JSON or YAML has all these fields, with values of these
    types, such as {"step": int, "best_step": int | None}. where: the file, for the message."""
    for name, kind in kinds.items():
        if name not in value:
            raise BadInput(f"{where}: {name}: missing")
        if not has_type(value[name], kind):
            got = printable(value[name])
            raise BadInput(f"{where}: {name}: expected {type_name(kind)}, got {got}")


def has_type(value, kind) -> bool:
    """Whether a value from JSON or YAML has this type: int, float | None, list[str], dict[str, str],
    tuple[int, str] (a list of two). A float is finite, and may be written as an int."""
    parts = typing.get_args(kind)
    container = typing.get_origin(kind)
    if container is tuple:
        is_list = isinstance(value, list) and len(value) == len(parts)
        return is_list and all(map(has_type, value, parts))
    if container is list:
        return isinstance(value, list) and all(has_type(x, parts[0]) for x in value)
    if container is dict:
        return isinstance(value, dict) and all(has_type(x, parts[1]) for x in value.values())
    if parts:  # a union
        return any(has_type(value, part) for part in parts)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)


def type_name(kind) -> str:
    if typing.get_args(kind):  # such as int | None, list[str]
        return str(kind).replace("None", "null")
    return kind.__name__


class _YAML(yaml.SafeLoader):
    """Refuses an alias (*name) of a list or a group: ten nested ones can stand for 10**9 values."""

    def compose_node(self, parent, index):
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias and not isinstance(node, yaml.ScalarNode):
            problem = "an alias of a list or a group is not supported"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        return node


def compose_yaml(text: str) -> yaml.Node | None:
    """The nodes of a YAML file, with their lines. Raises yaml.YAMLError."""
    return yaml.compose(text, _YAML)


def parse_yaml(text: str):
    """The value of a YAML file: numbers, texts, lists and dicts only. Raises yaml.YAMLError."""
    return yaml.load(text, _YAML)
