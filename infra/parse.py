"""Settings from files, the command line and the demo's defaults.

jsonargparse reads and checks the values; ours is the order of files and options, the nearest name, and one line for
an error.
"""

import dataclasses
import difflib
import json
import sys
import typing
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import docstring_parser
import jsonargparse
import yaml

from infra.console import BadInput, command_line, say, user_error
from infra.settings import ROOT, Epochs, find_path, flatten


def parse(cls, argv: list[str] | None, objective, demo: str):
    """Settings of type `cls` from the command line (or from argv). Command-line options override
    --config files, wherever they stand; a later file overrides an earlier one.

    Without --model and --config the run starts from `demo`, a file of config/. With one of them it
    is the user's own run, which must name data.train. With data.train alone the demo's model stays,
    but neither its validation data nor its checker. --help begins with the docstring of the file that
    the objective stands in: a fork's own. Raises BadInput.
    """
    words = command_line()[1:] if argv is None else argv
    names = {word[2:].split("=")[0] for word in words if word.startswith("--")}
    defaults = {}
    if not {"model", "config"} & names:
        defaults = flatten(yaml.safe_load((ROOT / "config" / demo).read_text()))
        if "data.train" in names:
            if "print_config" not in names:  # what that prints is a file of settings
                say("your data.train: the demo's validation data and checker are left out")
            defaults |= {"data.val": None, "eval.check": None}
    elif "config" not in names and "print_config" not in names:
        say(f"your model: defaults, not config/{demo} (--print_config shows them)")
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
    """The settings of a command. defaults: values by dotted names, of which a fork's `cls` may lack some.
    Raises BadInput."""
    known = flatten(cls)
    defaults = {name: value for name, value in (defaults or {}).items() if name in known}
    values, switches = read_command(words, known)
    texts = {name: argument_text(value) for name, value in (defaults | values).items()}
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
        raise BadInput(first_fault(cls, texts) or " ".join(str(e).split())) from None
    del parsed["config"]
    # its name before jsonargparse 4.49 was instantiate_classes
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    return with_plain_types(cls(**instantiate(parsed)))


def with_plain_types(value: object) -> object:
    """The same value, a settings group or a list too, with Python's own types in place of jsonargparse's
    restricted ones. These are subclasses, which not every library takes: Fabric refuses a number of GPUs
    whose type is not int itself."""
    if dataclasses.is_dataclass(value):
        fields = {name: with_plain_types(x) for name, x in vars(value).items()}
        return dataclasses.replace(value, **fields)
    if isinstance(value, list | tuple):
        return type(value)(map(with_plain_types, value))
    if isinstance(value, dict):
        return {name: with_plain_types(x) for name, x in value.items()}
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain(value)
    return value


def read_command(
    words: list[str], known: Mapping[str, object]
) -> tuple[dict[str, object], list[str]]:
    """-> what --config files and options say, by dotted names; and options that take no value: --help,
    --print_config. An option overrides the files, a later file an earlier one. Raises BadInput for a
    name that is not known."""
    of_files: dict[str, object] = {}
    of_options: dict[str, object] = {}
    switches = []
    unknown = []  # all are said at once
    files = []
    stray, *options = split_options(words)
    if stray:
        raise BadInput(unknown_name(stray[0], known))
    for head, *values in options:
        name, has_value, value = head.removeprefix("--").partition("=")
        if name.split("=")[0] in ("help", "print_config"):
            switches.append(head)
            continue
        if has_value:
            values = [value, *values]
        if name != "config" and name not in known:
            unknown.append(unknown_name(name, known))
            continue
        if len(values) != 1:
            raise BadInput(f"{name}: expected one value, got {' '.join(values) or 'none'}")
        if name == "config":
            files.append(values[0])
            of_files |= read_config_file(values[0], known)
        else:
            of_options[name] = values[0]
    if unknown:
        raise BadInput("\n".join(unknown))
    if of_options.get("resume") and "out_dir" not in of_options:
        refuse_moved_run(files, of_files.get("out_dir"))
    return of_files | of_options, switches


def refuse_moved_run(files: list[str], out_dir: object) -> None:
    """Raise BadInput if a file is the settings.yaml of a run that has been moved or copied: out_dir, which it says, is
    where the run was, and a resume would begin anew there, or go on with the original."""
    for file in map(find_path, files):
        folder = file.resolve().parent
        if file.name == "settings.yaml" and out_dir and (folder / "checkpoints").is_dir():
            was = Path(str(out_dir)).expanduser()
            if not (was.exists() and was.samefile(folder)):
                raise BadInput(
                    f"out_dir: {file} says {was}: the run was moved or copied; --out_dir {folder} goes on here"
                )


class UniqueKeys(yaml.SafeLoader):
    """YAML in which no key stands twice: PyYAML would take the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key) for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            line = node.start_mark.line + 1
            raise ValueError(f"{twice[0]}: given twice in the settings that begin in line {line}")
        return super().construct_mapping(node, deep)


def read_config_file(file: str, known: Mapping[str, object]) -> dict[str, object]:
    """The settings of a YAML file by dotted names. Raises BadInput."""
    with user_error("config", file):
        text = find_path(file).read_text(encoding="utf-8")
        groups = yaml.load(text, Loader=UniqueKeys)  # a SafeLoader
    if not isinstance(groups, dict):
        raise BadInput(f"config: {file}: expected settings, `name: value`")
    values = flatten(groups)
    for name in values:
        group = [x for x in known if x.startswith(f"{name}.")]
        if group:
            raise BadInput(f"{file}: {name}: expected a group of settings, such as {group[0]}")
    unknown = [f"{file}: {unknown_name(name, known)}" for name in values if name not in known]
    if unknown:
        raise BadInput("\n".join(unknown))
    return values


def argument_text(value: object) -> str:
    """A value as one writes it on the command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, date):  # YAML reads 2026-01-31 as a day
        return value.isoformat()
    return json.dumps(value, default=str)


def first_fault(cls: type, texts: Mapping[str, str]) -> str:
    """What is wrong with the settings, by the first of them: a required one that is missing, or a value of
    another type. Empty if each is right alone."""
    kinds = flatten(cls)
    for name, kind in kinds.items():
        if name not in texts:
            if is_required(cls, name):
                return f"{name}: missing: --{name} {_type_name(kind)}"
            continue
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        parser.add_argument("--value", type=kind)
        try:
            parser.parse_args([f"--value={texts[name]}"])
        except (jsonargparse.ArgumentError, ValueError):
            return f"{name}: expected {_type_name(kind)}, got {texts[name]}"
    return ""


def is_required(cls: type, name: str) -> bool:
    """Whether a setting, by its dotted name, has no default."""
    group, _, inner = name.partition(".")
    (one,) = (x for x in dataclasses.fields(cls) if x.name == group)
    if inner:
        return is_required(typing.get_type_hints(cls)[group], inner)
    return one.default is one.default_factory is dataclasses.MISSING


def unknown_name(name: str, known: Mapping[str, object]) -> str:
    """The sentence for a setting that there is not, with the nearest one."""
    wanted = name.replace("-", "_")
    similar = [x for x in known if wanted in (x, *x.split("."))]
    similar = similar or difflib.get_close_matches(wanted, known, n=1, cutoff=0.7)
    if not similar:
        return f"{name}: no such setting"
    return f"{name}: no such setting; did you mean {similar[0]}?"


def _add_help(parser: jsonargparse.ArgumentParser, cls: type, prefix: str = "") -> None:
    """The sentences under the fields: jsonargparse does not read inherited ones."""
    for base in cls.__mro__[:-1]:
        for one in docstring_parser.parse_from_object(base).params:
            option = parser._option_string_actions[f"--{prefix}{one.arg_name}"]
            option.help = one.description
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            _add_help(parser, kind, f"{name}.")


def _type_name(kind: typing.Any) -> str:
    """What a setting may be, in words: PositiveInt; kto or apo_zero_unpaired; str or null."""
    if typing.get_origin(kind) not in (None, list):  # a union, or a Literal
        return " or ".join(map(_type_name, typing.get_args(kind)))
    words = {type(None): "null", Epochs: "0.5 epochs"}
    return words.get(kind) or getattr(kind, "__name__", str(kind))
