"""How YAML files, overrides and mistakes are read, and how settings are written back."""

import argparse
import dataclasses
import difflib
import json
import re
import sys
import typing
from pathlib import Path

import yaml

from runs import errors
from runs.errors import BadInput, parse_file, printable, rank
from runs.settings import SECTIONS, Optim, RunSettings, flatten

RENAMED = {"look_tokens": "no_grad_tokens"}
# as TRL's users write them
ELSEWHERE = dict(learning_rate="optim.lr", num_train_epochs="epochs", output_dir="out_dir",
                 per_device_train_batch_size="micro_batch_size", warmup_ratio="optim.warmup",
                 model_name_or_path="model", lora_r="lora.rank",
                 gradient_checkpointing="activation_checkpointing")  # fmt: skip
ROOT = Path(__file__).parent.parent


class _Dumper(yaml.SafeDumper):
    """Quotes a text like 1e3, which jsonargparse would read back as a number (YAML 1.2), and PyYAML
    (1.1) would not."""


_NUMBER = re.compile(r"[-+]?[\d._]+[eE][-+]?\d+")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def dump_yaml(settings) -> str:
    """YAML that parses back into equal settings."""
    return yaml.dump(dataclasses.asdict(settings), Dumper=_Dumper, sort_keys=False)


def _check_names(names, cls, where: str = "") -> None:
    known = flatten(cls)
    for name in names:
        if name in RENAMED:
            raise BadInput(f"{where}{name}: renamed, use {RENAMED[name]}")
        if name in known:
            continue
        name = printable(name)
        inside = [k for k in known if k.startswith(f"{name}.")]
        if inside:
            raise BadInput(f"{where}{name}: a group: expected a setting in it, such as {inside[0]}")
        near = [k for k in known if k.endswith("." + name)]
        near = near or [x for x in (ELSEWHERE.get(name),) if x in known]
        near = near or difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadInput(f"{where}{name}: no such setting{hint}")


def _refuse_twice(node, path: str, found: dict, prefix="") -> None:
    """YAML keeps the last of two equal keys silently."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = f"{prefix}{key.value}"
        if (first := found.setdefault(name, key)) is not key:
            line, before = key.start_mark.line + 1, first.start_mark.line + 1
            raise BadInput(f"{path}:{line}: {printable(name)}: given in line {before} already")
        _refuse_twice(value, path, found, f"{name}.")


def _read_yaml(path: str, cls) -> list[str]:
    """The names of the settings in a file, all known."""
    text = parse_file("config", path)
    try:
        _refuse_twice(yaml.compose(text, yaml.SafeLoader), path, {})
        node = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as e:
        mark = getattr(e, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise BadInput(f"{path}:{line}: {getattr(e, 'problem', None) or 'not YAML'}") from None
    if not isinstance(node, dict):
        raise BadInput(f"{path}:1: expected settings as `name: value`")
    _check_names(flatten(node), cls, f"{path}: ")
    return list(flatten(node))


def _arguments(argv: list[str], cls) -> tuple[list[str], list[str], list[str]]:
    """(--config files, the rest, the settings that it names). A bare --flag of a yes/no setting
    means true."""
    flags = {f"--{n}" for n, k in flatten(cls).items() if bool in (k, *typing.get_args(k))}
    pairs, configs, rest = zip(argv, [*argv[1:], None]), [], []
    for word, following in pairs:
        if word == "--config" and following is not None:
            configs.append(following)
            next(pairs)
        elif word.startswith("--config="):
            configs.append(word.removeprefix("--config="))
        elif word in flags and (following or "-")[0] == "-":
            rest.append(f"{word}=true")
        else:
            rest.append(word)
    names = [a[2:].split("=", 1)[0].removesuffix("+") for a in rest if a.startswith("--")]
    names = [name for name in names if name not in ("config", "print_config", "help")]
    _check_names(names, cls)
    return configs, rest, names


def parse(cls, argv: list[str] | None, doc: str, demo: str):
    """Settings of type `cls` from the command line, or from argv where it is given. --config files
    are read first, in order, so an override wins wherever it stands.

    No arguments means `demo`, a file of config/. Naming --model or --config means your own run,
    which must name data.train; naming data.train alone keeps the demo's model, but neither its
    validation data nor its checker.
    """
    configs, rest, names = _arguments(sys.argv[1:] if argv is None else argv, cls)
    merged = {name for c in configs for name in _read_yaml(c, cls)}
    asks = {"-h", "--help", "--print_config"} & {word.split("=")[0] for word in rest}
    if configs or "model" in names:
        if not asks and "data.train" not in merged.union(names):
            raise BadInput("data.train: required: the records to learn from")
        stays = "data.train" in names and "data.val" in merged.difference(names)
        if stays and not (asks or rank()):
            print("your data.train: data.val stays what the configuration names")
        if not (asks or configs or rank()):
            print(f"your model: defaults, not config/{demo} (--print_config shows them)")
    else:
        known = flatten(cls)  # a fork may lack what the demo sets of another algorithm
        here = flatten(yaml.safe_load((ROOT / "config" / demo).read_text())).items()
        here = {n: x if isinstance(x, str) else json.dumps(x) for n, x in here if n in known}
        here = [f"--{name}={value}" for name, value in here.items()]
        if "data.train" in names:
            here += ["--data.val=null", "--eval.check=none"]
            if not asks and rank() == 0:
                print("your data.train: the demo's validation data and checker are left out")
        rest = [*here, *rest]
    settings = _parse(cls, configs, rest, doc)
    for name, value in flatten(settings).items():  # jsonargparse lets null pass for every type
        if value is None and type(None) not in typing.get_args(flatten(cls)[name]):
            raise BadInput(f"{name}: expected {_type_name(name, cls)}, got null")
    settings.validate()
    if settings.lora.rank and settings.optim.lr == Optim().lr and rank() == 0:
        print(f"optim.lr {Optim().lr:g} is for whole models: adapters often take 1e-5 to 1e-3")
    errors.debug = settings.debug
    return settings


def parse_command(cls, doc: str, argv: list[str]):
    """The settings of a command that is no run. Raises BadInput."""
    configs, rest, _ = _arguments(argv, cls)
    return _parse(cls, configs, rest, doc)


def _parse(cls, configs: list[str], rest: list[str], doc: str):
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    usage = "python %(prog)s [--config FILE] [--SETTING VALUE ...]"
    program = Path(sys.argv[0]).name
    doc = doc.split("\n\n")[0]
    parser = jsonargparse.ArgumentParser(program, usage, description=doc, exit_on_error=False)
    about = "A YAML file of these settings."
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile, help=about)
    parser.add_class_arguments(cls, None, as_group=False)
    _add_help(parser, cls)
    try:
        parsed = parser.parse_args([*(a for c in configs for a in ("--config", c)), *rest])
        parsed = parser.instantiate_classes(parsed)
    except (jsonargparse.ArgumentError, TypeError, ValueError) as e:
        raise BadInput(_one_line(str(e), cls)) from None
    return cls(**{f.name: parsed[f.name] for f in dataclasses.fields(cls)})


def _add_help(parser, cls) -> None:
    """jsonargparse reads the sentences of a class itself only, not of its bases."""
    import docstring_parser

    options = parser._option_string_actions
    kinds = typing.get_type_hints(cls).items()
    groups = {f"{name}.": kind for name, kind in kinds if dataclasses.is_dataclass(kind)}
    for prefix, group in {"": cls, **groups}.items():
        for base in group.__mro__[1:-1]:
            for x in docstring_parser.parse_from_object(base).params:
                options[f"--{prefix}{x.arg_name}"].help = " ".join(x.description.split())
    for group in {k.rsplit(".", 1)[0] for k in flatten(cls) if "." in k}:
        options[f"--{group}"].help = argparse.SUPPRESS  # a file for a group: not among ours
    if issubclass(cls, RunSettings):
        _add_sections(parser)


def _add_sections(parser) -> None:
    """argparse lists options by group, in the order of its groups' lists."""
    options = [a for group in parser._action_groups for a in group._group_actions]
    for group in parser._action_groups:
        group._group_actions.clear()
    first = ("options", "", "help config print_config")
    named = [(*section, names.split()) for *section, names in (first, *SECTIONS)]
    known = {name for *_, names in named for name in names}
    own = {a.dest.split(".")[0] for a in options} - known
    for title, sentence, names in (named[0], ("algorithm", "What is learnt.", own), *named[1:]):
        group = parser.add_argument_group(title, sentence)
        group._group_actions += [a for a in options if a.dest.split(".")[0] in names]


def _type_name(name: str, cls) -> str:
    kind = flatten(cls)[name]
    # to Python 3.10 list[str] is a type too
    return str(kind).replace("None", "null") if typing.get_args(kind) else kind.__name__


def _one_line(message: str, cls) -> str:
    """jsonargparse's message, as `name: reason`."""
    message = " ".join(message.split())
    if m := re.search(r'[Kk]ey "([\w.]+)" is required', message):
        return f"{m[1]}: required"
    if m := re.search(r'key "([\w.]+)":.*(?:Got value|Given value): ?(.*)', message):
        return f"{m[1]}: expected {_type_name(m[1], cls)}, got {printable(m[2] or 'nothing')}"
    if m := re.search(r'(?:key "|argument --)([\w.]+)"?:? (.*)', message):
        return f"{m[1]}: {printable(m[2], 200)}"
    return printable(message, 200)
