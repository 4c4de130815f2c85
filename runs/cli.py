"""From the command line and YAML files to settings, and from settings to YAML."""

import argparse
import dataclasses
import difflib
import inspect
import json
import re
import sys
import typing
from pathlib import Path

import yaml

from runs import console
from runs.console import say
from runs.errors import BadInput, parse_file, printable
from runs.files import ROOT
from runs.settings import Optim, flatten
from runs.small_files import compose_yaml, parse_yaml, type_name

# The names that users of TRL, transformers and PEFT type, and the nearest setting here, which may
# count otherwise: see its --help.
NAMES_ELSEWHERE = {
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.eps",
    "bf16": "precision",
    "dataset_name": "data.train",
    "dtype": "precision",
    "eval_steps": "val_interval",
    "eval_strategy": "val_interval",
    "fp16": "precision",
    "gradient_accumulation_steps": "batch_size",
    "gradient_checkpointing": "activation_checkpointing",
    "learning_rate": "optim.lr",
    "load_in_4bit": "lora.quantize",
    "logging_steps": "log_interval",
    "lora.base": "lora.quantize",  # its name in older settings.yaml
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_r": "lora.rank",
    "lora_target_modules": "lora.targets",
    "loss_type": "loss",
    "lr_scheduler_type": "optim.schedule",
    "max_completion_length": "data.max_completion",
    "max_grad_norm": "optim.clip",
    "max_length": "data.max_prompt",
    "max_prompt_length": "data.max_prompt",
    "max_seq_length": "data.max_prompt",
    "model_name_or_path": "model",
    "num_train_epochs": "epochs",
    "output_dir": "out_dir",
    "per_device_train_batch_size": "micro_batch_size",
    "precompute_ref_log_probs": "reference_cache",
    "ref_model": "reference",
    "report_to": "logger",
    "resume_from_checkpoint": "resume",
    "save_steps": "save_interval",
    "save_total_limit": "keep_last",
    "torch_dtype": "precision",
    "use_peft": "lora.rank",
    "warmup_ratio": "optim.warmup",
    "warmup_steps": "optim.warmup",
}


# What the started script was given besides settings: the command that continues its run repeats it.
script_arguments = []


# ---- from settings to YAML -----------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Puts a text like 1e3 in quotes: jsonargparse (YAML 1.2) would read it back as a number."""


_NUMBER = re.compile(r"[-+]?[\d._]+[eE][-+]?\d+")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def dump_yaml(settings) -> str:
    """YAML that parses back into equal settings."""
    return yaml.dump(dataclasses.asdict(settings), Dumper=_Dumper, sort_keys=False)


# ---- names of settings ---------------------------------------------------------------------------


def _check_names(names, cls, where: str = "") -> None:
    """Raise BadInput for a name that is no setting of `cls`, with the nearest one that is."""
    known = flatten(cls)
    for name in names:
        if name in known:
            continue
        name = printable(name)
        inside = [x for x in known if x.startswith(f"{name}.")]
        if inside:
            raise BadInput(f"{where}{name}: a group: expected a setting in it, such as {inside[0]}")
        nearest = _nearest_name(name, known)
        hint = f"; did you mean {nearest}?" if nearest else ""
        raise BadInput(f"{where}{name}: no such setting{hint}")


def _nearest_name(name: str, known) -> str | None:
    """The setting that was probably meant, or None."""
    name = name.replace("-", "_")
    name = NAMES_ELSEWHERE.get(name, name)
    if name in known:
        return name
    same_ending = [x for x in known if x.endswith(f".{name}")]
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return next(iter(same_ending + similar), None)


def _refuse_doubled_keys(node, path: str, found: dict, prefix: str = "") -> None:
    """Raise BadInput for a key that stands twice: YAML would keep the last one silently."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        first = found.setdefault(name, key)
        if first is not key:
            line, before = key.start_mark.line + 1, first.start_mark.line + 1
            raise BadInput(f"{path}:{line}: {printable(name)}: given in line {before} already")
        _refuse_doubled_keys(value, path, found, f"{name}.")


def _names_in_yaml(path: str, cls) -> list[str]:
    """The names of the settings in a file, all of them known. Raises BadInput."""
    text = parse_file("config", path)
    try:
        _refuse_doubled_keys(compose_yaml(text), path, {})
        values = parse_yaml(text)
    except (yaml.YAMLError, RecursionError) as e:
        mark = getattr(e, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise BadInput(f"{path}:{line}: {getattr(e, 'problem', None) or 'not YAML'}") from None
    if not isinstance(values, dict):
        raise BadInput(f"{path}:1: expected settings as `name: value`")
    names = list(flatten(values))
    _check_names(names, cls, f"{path}: ")
    return names


def _split_arguments(argv: list[str], cls) -> tuple[list[str], list[str], list[str]]:
    """-> the --config files, the other arguments, and the names of the settings that these give. A
    bare --flag of a yes/no setting means true."""
    types = flatten(cls)
    flags = {f"--{name}" for name, t in types.items() if bool in (t, *typing.get_args(t))}
    configs, rest = [], []
    words = iter(zip(argv, [*argv[1:], None]))
    for word, following in words:
        if word == "--config" and following is not None:
            configs.append(following)
            next(words)
        elif word.startswith("--config="):
            configs.append(word.removeprefix("--config="))
        elif word in flags and (following is None or following.startswith("-")):
            rest.append(f"{word}=true")
        else:
            rest.append(word)
    given = {}
    for word, following in zip(rest, [*rest[1:], "nothing"]):
        if not word.startswith("--"):
            continue
        name, has_value, value = word[2:].partition("=")
        value = value if has_value else following
        if name.endswith("+"):  # adds to a list
            name = name.removesuffix("+")
        elif given.get(name, value) != value:
            both = f"{printable(given[name])} and {printable(value)}"
            raise BadInput(f"{printable(name)}: given twice, {both}: give it once")
        given[name] = value
    names = [name for name in given if name not in ("config", "print_config", "help")]
    _check_names(names, cls)
    return configs, rest, names


# ---- from the command line to settings -----------------------------------------------------------


def docstring_of(objective) -> str:
    """Of the file that an objective stands in: the --help of a fork shows its own."""
    return getattr(inspect.getmodule(objective), "__doc__", None) or ""


def parse(cls, argv: list[str] | None, doc: str, demo: str):
    """Settings of type `cls` from the command line (or from argv). Command-line options override
    --config files, in any order; a later file overrides an earlier one. An option that is given
    twice, with two values, is refused.

    Without --model and --config the run starts from `demo`, a file of config/. With one of them it
    is the user's own run, which must name data.train. With data.train alone the demo's model stays,
    but neither its validation data nor its checker. Raises BadInput.
    """
    configs, rest, names = _split_arguments(sys.argv[1:] if argv is None else argv, cls)
    in_files = {name for path in configs for name in _names_in_yaml(path, cls)}
    quiet = bool({"-h", "--help", "--print_config"} & {word.split("=")[0] for word in rest})
    if configs or "model" in names:
        if not quiet:
            _check_own_run(configs, names, in_files, demo)
    else:
        rest = [*_demo_arguments(cls, names, demo, quiet), *rest]
    settings = _parse_arguments(cls, configs, rest, doc)
    _refuse_null(settings, cls)
    settings.validate()
    if settings.lora.rank and settings.optim.lr == Optim().lr:
        say(f"optim.lr {Optim().lr:g} is for whole models: adapters often take 1e-5 to 1e-3")
    console.shows_progress = settings.progress
    script_arguments[:] = _own_arguments(sys.argv[1:], argv)
    return settings


def _own_arguments(typed: list[str], argv: list[str] | None) -> list[str]:
    """Those of the typed words that a script has not passed on in argv to main: its own options, each
    with the words that follow it."""
    if argv is None:
        return []
    passed_on = _split_options(argv)
    own = []
    for option in _split_options(typed):
        if option in passed_on:
            passed_on.remove(option)
        else:
            own += option
    return own


def _split_options(words: list[str]) -> list[list[str]]:
    """[["--seed", "1"], ["--deterministic"], ...]; words before the first option are one more list."""
    options = [[]]
    for word in map(str, words):
        if re.match("--?[a-zA-Z]", word):
            options.append([])
        options[-1].append(word)
    return options


def _check_own_run(configs: list[str], names: list[str], in_files: set[str], demo: str) -> None:
    if "data.train" not in in_files.union(names):
        raise BadInput("data.train: required: the records to learn from")
    if "data.train" in names and "data.val" in in_files.difference(names):
        say("your data.train: data.val stays what the configuration names")
    if not configs:
        say(f"your model: defaults, not config/{demo} (--print_config shows them)")


def _demo_arguments(cls, names: list[str], demo: str, quiet: bool) -> list[str]:
    """The demo's settings as arguments: those that `cls` has, since a fork may lack the others."""
    known, arguments = flatten(cls), []
    for name, value in flatten(yaml.safe_load((ROOT / "config" / demo).read_text())).items():
        if name in known:
            text = value if isinstance(value, str) else json.dumps(value)
            arguments.append(f"--{name}={text}")
    if "data.train" in names:
        arguments += ["--data.val=null", "--eval.check=null"]
        if not quiet and not {"data.val", "eval.check"} <= set(names):
            say("your data.train: the demo's validation data and checker are left out")
    return arguments


def _refuse_null(settings, cls) -> None:
    """jsonargparse lets null pass for every type."""
    types = flatten(cls)
    for name, value in flatten(settings).items():
        if value is None and type(None) not in typing.get_args(types[name]):
            raise BadInput(f"{name}: expected {type_name(types[name])}, got null")


def parse_command(cls, doc: str, argv: list[str]):
    """The settings of a command that is no training run. Raises BadInput."""
    configs, rest, _ = _split_arguments(argv, cls)
    return _parse_arguments(cls, configs, rest, doc)


def _parse_arguments(cls, configs: list[str], rest: list[str], doc: str):
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=Path(sys.argv[0]).name,
        usage="python %(prog)s [--config FILE] [--SETTING VALUE ...]",
        description=doc.split("\n\n")[0],
        exit_on_error=False,
    )
    about = "A YAML file of these settings."
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile, help=about)
    parser.add_class_arguments(cls, None, as_group=False)
    _add_help(parser, cls)
    files_first = [word for path in configs for word in ("--config", path)]
    try:
        parsed = parser.instantiate_classes(parser.parse_args([*files_first, *rest]))
    except (jsonargparse.ArgumentError, TypeError, ValueError) as e:
        raise BadInput(_one_line(str(e), cls)) from None
    return cls(**{f.name: parsed[f.name] for f in dataclasses.fields(cls)})


# ---- --help and messages -------------------------------------------------------------------------


def _add_help(parser, cls) -> None:
    """The sentences under inherited fields: jsonargparse reads those of the class itself only."""
    import docstring_parser

    options = parser._option_string_actions
    groups = {"": cls}
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            groups[f"{name}."] = kind
            options[f"--{name}"].help = argparse.SUPPRESS  # a file for one group: not among ours
    for prefix, group in groups.items():
        for base in group.__mro__[1:-1]:
            for field in docstring_parser.parse_from_object(base).params:
                sentence = " ".join(field.description.split())
                options[f"--{prefix}{field.arg_name}"].help = sentence


def _one_line(message: str, cls) -> str:
    """jsonargparse's message, as `name: reason`. The examples are of jsonargparse 4.41."""
    message = " ".join(message.split())
    # Key "data.train" is required but not included in config object or its value is None.
    if m := re.search(r'[Kk]ey "([\w.]+)" is required', message):
        return f"{m[1]}: required"
    # Parser key "epochs": Expected a <class 'int'>. Got value: x
    if m := re.search(r'key "([\w.]+)":.*(?:Got value|Given value): ?(.*)', message):
        expected = type_name(flatten(cls)[m[1]])
        return f"{m[1]}: expected {expected}, got {printable(m[2] or 'nothing')}"
    # argument --epochs: expected one argument
    if m := re.search(r'(?:key "|argument --)([\w.]+)"?:? (.*)', message):
        return f"{m[1]}: {printable(m[2], 200)}"
    return printable(message, 200)
