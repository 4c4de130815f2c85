"""Settings from files, the command line and the demo's defaults.

jsonargparse checks the values and prints the help. The order of files and options, the nearest name, and one line for
each error are ours. A value in a file means the same as on the command line. The setting's type decides whether 0010 or
no is a text, a number or a boolean.
"""

import contextlib
import dataclasses
import difflib
import json
import re
import sys
import typing
from collections.abc import Mapping

import docstring_parser
import jsonargparse
import yaml

from infra.console import BadInput, say, user_error
from infra.settings import ROOT, Epochs, find_path, flatten, read_text, refuse_unless


def parse(cls, argv: list[str] | None, objective, demo: str):
    """Settings of type `cls` from the command line (or from argv). Command-line options override
    --config files, wherever they stand; a later file overrides an earlier one.

    Without --model and --config the run starts from `demo`, a file of config/. If --data.train is given, the demo's
    model stays, but its validation data and its checker do not. A run with --model or --config must name data.train.
    --help begins with the docstring of the objective's file, which may be a fork's. Raises BadInput.
    """
    words = sys.argv[1:] if argv is None else argv
    names = {word[2:].split("=")[0] for word in words if word.startswith("--")}
    defaults = {}
    if not {"model", "config"} & names:
        defaults = read_config_file(str(ROOT / "config" / demo))
        if "data.train" in names:
            if "print_config" not in names:  # what that prints is a file of settings
                say("your data.train: the demo's validation data and checker are not used")
            defaults = {x: value for x, value in defaults.items() if not x.startswith("eval.")}
            defaults["data.val"] = None
    doc = sys.modules[objective.__module__].__doc__ or ""
    settings = parse_command(cls, doc, words, defaults)
    settings.validate()
    return settings


def split_options(words: list[str]) -> list[list[str]]:
    """[["--seed", "1"], ["--debug"], ...]; words before the first option are one more list."""
    options: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            options.append([])
        options[-1].append(word)
    return options


def parse_command(
    cls: type, doc: str, words: list[str], defaults: Mapping[str, object] | None = None
) -> typing.Any:
    """The settings of a command. defaults: values by dotted names; `cls`, which may be a fork's, need not have all of
    these names. Raises BadInput."""
    settings = flatten(cls)
    defaults = {name: value for name, value in (defaults or {}).items() if name in settings}
    values, switches = read_command(words, settings)
    with_values = defaults | values
    texts = {name: argument_text(value, settings[name]) for name, value in with_values.items()}
    parser = jsonargparse.ArgumentParser(
        usage="python %(prog)s [--config FILE] [--SETTING VALUE ...]",
        description=doc.split("\n\n")[0],
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="A YAML file of these settings.")
    parser.add_class_arguments(cls, None, as_group=False)
    _add_help(parser, cls)
    try:
        parsed = parser.parse_args([*(f"--{name}={x}" for name, x in texts.items()), *switches])
    except (jsonargparse.ArgumentError, ValueError) as e:
        raise BadInput(one_line(str(e), texts, settings)) from None
    return build(cls, parsed)


def build(cls: type, parsed: Mapping[str, object]) -> typing.Any:
    """An object of a class of settings, with Python's own types instead of jsonargparse's restricted ones. These are
    subclasses, and not every library takes a subclass: Fabric takes a number of GPUs only as an int. Raises
    BadInput."""
    values = {}
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            try:
                values[name] = build(kind, parsed[name])
            except BadInput as e:  # by its __post_init__, which does not know the name of the group
                raise BadInput(f"{name}.{e}") from None
        else:
            values[name] = json.loads(json.dumps(parsed[name]))  # as plain types
    return cls(**values)


def read_command(
    words: list[str], known: Mapping[str, object]
) -> tuple[dict[str, object], list[str]]:
    """-> the values of --config files and options, by dotted names; and the options without a value, --help and
    --print_config. An option overrides the files, and a later file an earlier one. Raises BadInput."""
    of_options = {}
    switches = []
    unknown = []
    files = []
    stray, *options = split_options(words)
    if stray:
        raise BadInput(unknown_name(stray[0], known))
    for head, *values in options:
        name, has_value, value = head.removeprefix("--").partition("=")
        if has_value:
            values = [value, *values]
        if name in ("help", "print_config"):
            switches.append(head)
        elif name != "config" and name not in known:
            unknown.append(unknown_name(name, known))
        elif len(values) != 1:
            raise BadInput(f"{name}: expected one value, got {' '.join(values) or 'none'}")
        elif name == "config":
            files.append(values[0])
        else:
            of_options[name] = values[0]
    of_files = {}
    for file in files:
        of_file = read_config_file(file)
        unknown += [f"{file}: {unknown_name(name, known)}" for name in of_file if name not in known]
        of_files |= of_file
    if unknown:
        raise BadInput("\n".join(unknown))
    return of_files | of_options, switches


class Texts(yaml.SafeLoader):
    """YAML that keeps plain values as texts, except null. A key that is given twice is an error. PyYAML alone would
    read `no` as False, 0010 as 8, 10:30 as 630 and 2026-01-31 as a date, and would take the last of two equal keys."""

    yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key) for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise ValueError(f"{twice[0]}: given twice")
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> typing.Any:
    """YAML as texts, lists, dicts and None: see Texts."""
    return yaml.load(text, Loader=Texts)  # a SafeLoader


def read_config_file(file: str) -> dict[str, object]:
    """The settings of a YAML file by dotted names: texts, lists or None. Raises BadInput."""
    path = find_path(file)
    with user_error("config", file):
        groups = read_yaml(read_text(path))
    refuse_unless(isinstance(groups, dict), f"config: {file}: expected settings, `name: value`")
    settings = flatten(groups)
    folder = path.resolve().parent
    if path.name == "settings.yaml" and (folder / "checkpoints").is_dir():
        # a run's own file; the folder may have been moved or copied
        settings["out_dir"] = str(folder)
    return settings


def argument_text(value: object, kind: typing.Any) -> str:
    """A value as jsonargparse reads it for a setting of this type. The elements of a list are quoted, so that [no, 10]
    holds two texts if the type wants texts."""
    kinds = (kind, *typing.get_args(kind))
    if isinstance(value, str) and list in map(typing.get_origin, kinds):
        with contextlib.suppress(yaml.YAMLError):  # jsonargparse refuses it
            elements = read_yaml(value)
            value = elements if isinstance(elements, list) else value
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def one_line(message: str, texts: Mapping[str, str], known: Mapping[str, object]) -> str:
    """jsonargparse's message about a setting, in one line."""
    # jsonargparse 4.41: Key "data.train" is required; 4.53: arguments are required: data.train
    match = re.search(r'([Kk]ey "|required: )([\w.]+)', message)
    if not match or match[2] not in known:
        return " ".join(message.split())
    name = match[2]
    return f"{name}: expected {_type_name(known[name])}, got {texts.get(name, 'nothing')}"


def unknown_name(name: str, known: Mapping[str, object]) -> str:
    """The sentence for a name that is no setting, with the nearest setting."""
    # a user may leave out the group, or give another one
    names = {x.split(".")[-1]: x for x in list(known)[::-1]}
    similar = difflib.get_close_matches(name.split(".")[-1], names, n=1, cutoff=0.7)
    if similar:
        return f"{name}: no such setting; did you mean {names[similar[0]]}?"
    return f"{name}: no such setting"


def _add_help(parser: jsonargparse.ArgumentParser, cls: type, prefix: str = "") -> None:
    """The sentences under the fields: jsonargparse does not read inherited ones."""
    for base in cls.__mro__[:-1]:
        for parameter in docstring_parser.parse_from_object(base).params:
            option = parser._option_string_actions[f"--{prefix}{parameter.arg_name}"]
            option.help = parameter.description
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            _add_help(parser, kind, f"{name}.")


def _type_name(kind: typing.Any) -> str:
    """The type of a setting, in words: PositiveInt; kto or apo_zero_unpaired; str or null."""
    if typing.get_origin(kind) not in (None, list):  # a union, or a Literal
        return " or ".join(map(_type_name, typing.get_args(kind)))
    words = {type(None): "null", Epochs: "0.5 epochs"}
    return words.get(kind) or getattr(kind, "__name__", str(kind))
