"""What a run can be told: settings that every program here shares, and how YAML, overrides and mistakes are read."""

import argparse
import dataclasses
import difflib
import math
import os
import re
import sys
import typing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import yaml

from data import BadInput, Data
from generate import Eval
from model import Lora

DEFAULT_TOKENS = 16384  # per forward, where neither micro_batch_size nor micro_batch_tokens is given


@dataclass
class Optim:
    """AdamW and its learning rate: warmup, constant, then decay to min_lr. Norms, biases, embeddings do not decay."""

    name: str = "adamw"
    """adamw, or adamw8bit: its states in 8 bits, through bitsandbytes."""
    lr: float = 1e-6
    """Peak learning rate; 0 is a dry evaluation."""
    min_lr: float = 0.0
    """Where the schedule ends."""
    schedule: str = "cosine"
    """cosine, linear, or constant (after the warmup)."""
    warmup: int | float = 0
    """Steps of linear warmup from 0; a float is a fraction of an epoch."""
    constant: int | float = 0
    """Steps at peak between warmup and decay; a float is a fraction of an epoch."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    beta1: float = 0.9
    """Decay of the gradient's running mean."""
    beta2: float = 0.999
    """Decay of the squared gradient's running mean."""
    eps: float = 1e-8
    """Added to the denominator."""
    clip: float = 1.0
    """Gradient norm above which the gradient is scaled down; 0 is never."""


@dataclass
class Run:
    """Settings shared by all programs."""

    model: str
    """What to start from: a Hugging Face id or folder, a litgpt checkpoint folder, or a run of ours."""
    data: Data
    reference: str | None = None
    """Another frozen model to compare with (same tokenizer and vocabulary). Default: the model we start from."""
    reference_cache: str | None = None
    """A folder that keeps the reference's log-probs, by content of weights, prompt and completion. A run asks for
    all that it will need before its first step, or finds it there, and the reference leaves memory."""
    out_dir: str | None = None
    """Folder of this run. Default: a fresh one under out/."""
    resume: str | None = None
    """auto: go on from out_dir's newest whole checkpoint, or start if there is none. Or a checkpoint's folder."""
    seed: int = 1
    """Seeds order, adapters, dropout and sampling."""
    deterministic: bool = False
    """Bit-identical reruns on a GPU too, at some cost in speed. On a CPU they always are."""

    accelerator: str = "auto"
    """auto, cpu or gpu."""
    devices: int = 1
    """Devices per node. Under torchrun, its own number."""
    num_nodes: int = 1
    """Nodes."""
    strategy: str = "auto"
    """auto (one device, else ddp), ddp, or fsdp (FSDP2: weights, gradients and optimizer state sharded)."""
    precision: str | None = None
    """32-true, bf16-mixed, 64-true, or bf16-true (LoRA only: the base in bf16, adapters and AdamW in fp32).
    Default: bf16-mixed on a GPU, 32-true on a CPU."""

    epochs: int = 1
    """Passes over data.train; the smaller of epochs and max_steps ends the run."""
    max_steps: int | None = None
    """Optimizer steps."""
    max_time: str | None = None
    """Stop, saved and resumable, after this long: HH:MM:SS or D-HH:MM:SS, in quotes in a YAML file."""
    limit_train: int | float | None = None
    """Use so many steps of each epoch; a float is a fraction of it."""
    limit_val: int | float | None = None
    """Validate on the first so many examples; a float is a fraction of them."""
    batch_size: int = 64
    """Examples per optimizer step over all devices. The only batch that the result depends on."""
    micro_batch_size: int | None = None
    """Examples per forward on a device. Memory and speed only."""
    micro_batch_tokens: int | None = None
    """Prompt + completion tokens per forward instead; an over-long example goes alone. Given neither: 16384 tokens."""
    look_tokens: int | None = None
    """The same budget for passes without gradient, which need less memory. Default: twice that of the others."""
    activation_checkpointing: bool = False
    """Compute each block again in the backward pass, not keep its activations: less memory, a quarter slower."""

    lora: Lora = field(default_factory=Lora)
    optim: Optim = field(default_factory=Optim)
    eval: Eval = field(default_factory=Eval)

    log_interval: int = 1
    """Steps between lines of metrics.csv. A line describes its own step, over all micro-batches and devices."""
    val_interval: int | float | None = 1.0
    """Steps between validations; a float is a fraction of an epoch. Also: before the first step and at the end."""
    save_interval: int | float | None = 1.0
    """Steps between checkpoints; a float is a fraction of an epoch. Also saved: at the end, or when stopped."""
    keep_last: int = 2
    """Checkpoints to keep."""
    keep_best: str | None = None
    """Keep the checkpoint with the best value of this val.csv column too: loss and kl low, all others high."""
    logger: str = "csv"
    """csv (always written), tensorboard or wandb (WANDB_MODE=offline works)."""
    project: str = "kto"
    """Project name for wandb."""
    progress: bool = True
    """A progress bar on a terminal, a line now and then elsewhere."""

    def refuse(self):
        """Raise BadInput for settings that cannot be meant."""
        values = flat(self)
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise BadInput(f"{name}: expected a finite number, got {value}")
        for name, choices in (
            ("strategy", ("auto", "ddp", "fsdp")),
            ("precision", (None, "32-true", "bf16-mixed", "bf16-true", "64-true")),
            ("accelerator", ("auto", "cpu", "gpu")),
            ("logger", ("csv", "tensorboard", "wandb")),
            ("optim.name", ("adamw", "adamw8bit")),
            ("optim.schedule", ("cosine", "linear", "constant")),
        ):
            if values[name] not in choices:
                raise BadInput(f"{name}: expected {', '.join(c for c in choices if c)}; got {values[name]}")
        for name in ("batch_size", "epochs", "devices", "num_nodes", "log_interval", "keep_last", "lora.alpha",
                     "data.max_prompt", "data.max_completion"):  # fmt: skip
            if (value := values[name]) is not None and value < 1:
                raise BadInput(f"{name}: expected at least 1, got {value}")
        for name in ("micro_batch_size", "micro_batch_tokens", "look_tokens", "max_steps", "limit_train", "limit_val",
                     "val_interval", "save_interval", "optim.eps"):  # fmt: skip
            if (value := values[name]) is not None and value <= 0:
                raise BadInput(f"{name}: expected more than 0, got {value}")
        for name in ("lora.rank", "lora.dropout", "optim.lr", "optim.min_lr", "optim.warmup", "optim.constant",
                     "optim.weight_decay", "optim.beta1", "optim.beta2", "optim.clip", "seed"):  # fmt: skip
            if values[name] < 0:
                raise BadInput(f"{name}: expected at least 0, got {values[name]}")
        for name, top in (("lora.dropout", 1), ("optim.beta1", 1), ("optim.beta2", 1), ("seed", 2**32)):
            if values[name] >= top:
                raise BadInput(f"{name}: expected less than {top}, got {values[name]}")
        if self.optim.min_lr > self.optim.lr:
            raise BadInput(f"optim.min_lr: {self.optim.min_lr} is above optim.lr, {self.optim.lr}")
        if self.micro_batch_size and self.micro_batch_tokens:
            raise BadInput("micro_batch_size and micro_batch_tokens: give one, not both")
        if unknown := [t for t in self.lora.targets if t not in LORA_TARGETS] or (not self.lora.targets and ["none"]):
            raise BadInput(f"lora.targets: expected some of {', '.join(LORA_TARGETS)}; got {unknown[0]}")
        if self.precision == "bf16-true" and not self.lora.rank:
            raise BadInput(
                "precision: bf16-true loses AdamW's updates in full fine-tuning (a step of 1e-6 moves no weight of "
                "0.02); use bf16-mixed, or LoRA"
            )
        if self.precision == "64-true" and self.strategy == "fsdp":
            raise BadInput("precision: 64-true does not work with strategy fsdp; use ddp")
        if self.optim.name == "adamw8bit" and self.strategy == "fsdp":
            raise BadInput("optim.name: adamw8bit does not work with strategy fsdp; use adamw, or ddp")
        if self.resume == "auto" and not self.out_dir:
            raise BadInput("resume: auto needs --out_dir, the run to go on with")
        if self.max_time is not None and not self.seconds():
            raise BadInput("max_time: expected more than 0")
        if self.keep_best and not (self.data.val or self.data.split):
            raise BadInput("keep_best: needs data.val or data.split")
        self.eval.refuse()

    def seconds(self) -> float:
        m = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", self.max_time or "")
        if not m:
            raise BadInput(f"max_time: expected HH:MM:SS or D-HH:MM:SS, got {self.max_time}")
        days, hours, minutes, seconds = (int(x or 0) for x in m.groups())
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()


LORA_TARGETS = ("query", "key", "value", "projection", "mlp", "head")

# A resume may change these; anything else would make it another run
FREE = {
    "resume", "out_dir", "devices", "num_nodes", "strategy", "accelerator", "micro_batch_size", "micro_batch_tokens",
    "look_tokens", "log_interval", "val_interval", "save_interval", "keep_last", "logger", "project", "progress",
    "max_time", "eval.samples", "eval.batch_size", "reference_cache", "activation_checkpointing",
}  # fmt: skip
CUT = {
    "accelerator", "devices", "num_nodes", "strategy", "micro_batch_size", "micro_batch_tokens", "look_tokens",
    "reference_cache",
}  # fmt: skip


def flat(settings, prefix: str = "") -> dict[str, object]:
    """Dotted names and values, of a dataclass or (types for values) of a dataclass type."""
    if isinstance(settings, type):
        hints = typing.get_type_hints(settings)
        pairs = [(f.name, hints[f.name]) for f in dataclasses.fields(settings)]
    else:
        pairs = [(f.name, getattr(settings, f.name)) for f in dataclasses.fields(settings)]
    out = {}
    for name, value in pairs:
        out |= flat(value, f"{prefix}{name}.") if dataclasses.is_dataclass(value) else {prefix + name: value}
    return out


class _Dumper(yaml.SafeDumper):
    """Quotes a text like 1e3, which jsonargparse would read back as a number (YAML 1.2), and PyYAML (1.1) would not."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[\d._]+[eE][-+]?\d+"), list("-+.0123456789"))


def dump(settings) -> str:
    """YAML that parses back into equal settings."""
    return yaml.dump(dataclasses.asdict(settings), Dumper=_Dumper, sort_keys=False)


def _check_names(names, cls, where: str = "") -> None:
    known = flat(cls)
    for name in names:
        if name not in known:
            inside = [k for k in known if k.startswith(f"{name}.")]
            near = [k for k in known if k.endswith("." + name)] or difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            what = f"a group: expected a setting in it, such as {inside[0]}" if inside else "no such setting" + hint
            raise BadInput(f"{where}{name}: {what}")


def dotted(node: dict, prefix=""):
    """Dotted names of what YAML sets, with their values: groups only where they are none."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_yaml(path: str, cls) -> list[str]:
    """The names of the settings in a file, all known."""
    try:
        node = yaml.safe_load(Path(path).read_text())
        names = [name for name, _ in dotted(node)] if isinstance(node, dict) else None
    except (yaml.YAMLError, RecursionError) as e:
        mark = getattr(e, "problem_mark", None)
        raise BadInput(f"{path}:{mark.line + 1 if mark else 1}: {getattr(e, 'problem', None) or 'not YAML'}") from None
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(f"config: {path}: {getattr(e, 'strerror', None) or 'not text'}") from None
    if names is None:
        raise BadInput(f"{path}:1: expected settings as `name: value`")
    _check_names(names, cls, f"{path}: ")
    return names


def parse(cls, argv: list[str], doc: str, demo: Path):
    """Settings of type `cls`. --config files are read first, in order, so an override wins wherever it stands.

    No arguments means the demo. Naming --model or --config means your own run, which must name data.train; naming
    data.train alone keeps the demo's model, but neither its validation data nor its checker.
    """
    import docstring_parser
    import jsonargparse

    configs, rest, i = [], [], 0
    while i < len(argv):
        if argv[i] == "--config" and i + 1 < len(argv):
            configs.append(argv[i + 1])
            i += 1
        elif argv[i].startswith("--config="):
            configs.append(argv[i].split("=", 1)[1])
        else:
            rest.append(argv[i])
        i += 1
    names = [a[2:].split("=", 1)[0].removesuffix("+") for a in rest if a.startswith("--")]
    _check_names([n for n in names if n not in ("config", "print_config", "help")], cls)
    merged = {name for c in configs for name in _read_yaml(c, cls)}
    if not {"-h", "--help"} & set(rest) and "print_config" not in names:
        if (configs or "model" in names) and "data.train" not in names and "data.train" not in merged:
            raise BadInput("data.train: required: the rated records to learn from")
    if not configs and "model" not in names:
        configs = [str(demo)]
        if "data.train" in names:
            rest = ["--data.val=null", "--eval.check=none", *rest]

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    usage = "python %(prog)s [--config FILE] [--SETTING VALUE ...]"
    parser = jsonargparse.ArgumentParser(Path(sys.argv[0]).name, usage, description=doc, exit_on_error=False)
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile, help="A YAML file of these settings.")
    parser.add_class_arguments(cls, None, as_group=False)
    options = parser._option_string_actions
    groups = {f"{name}.": kind for name, kind in typing.get_type_hints(cls).items() if dataclasses.is_dataclass(kind)}
    for prefix, group in {"": cls, **groups}.items():
        for base in group.__mro__[1:-1]:  # jsonargparse reads the sentences of the class itself only
            for x in docstring_parser.parse_from_object(base).params:
                options[f"--{prefix}{x.arg_name}"].help = x.description
    for group in {k.rsplit(".", 1)[0] for k in flat(cls) if "." in k}:  # a file for a group: not among ours
        options[f"--{group}"].help = argparse.SUPPRESS
    try:
        parsed = parser.parse_args([*(a for c in configs for a in ("--config", c)), *rest])
        parsed = parser.instantiate_classes(parsed)
    except (jsonargparse.ArgumentError, TypeError, ValueError) as e:
        raise BadInput(_one_line(str(e), cls)) from None
    settings = cls(**{f.name: parsed[f.name] for f in dataclasses.fields(cls)})
    for name, value in flat(settings).items():  # jsonargparse lets null pass for every type
        if value is None and type(None) not in typing.get_args(flat(cls)[name]):
            raise BadInput(f"{name}: expected {_kind(name, cls)}, got null")
    settings.refuse()
    return settings


def _kind(name: str, cls) -> str:
    kind = flat(cls)[name]
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("None", "null")


def _one_line(message: str, cls) -> str:
    """jsonargparse's message, as `name: reason`."""
    message = " ".join(message.split())
    if m := re.search(r'[Kk]ey "([\w.]+)" is required', message):
        return f"{m[1]}: required"
    if m := re.search(r'key "([\w.]+)":.*(?:Got value|Given value): ?(.*)', message):
        return f"{m[1]}: expected {_kind(m[1], cls)}, got {m[2] or 'nothing'}"
    if m := re.search(r'(?:key "|argument --)([\w.]+)"?:? (.*)', message):
        return f"{m[1]}: {m[2]}"
    return message


def torchrun(settings: Run) -> None:
    """torchrun and SLURM fix the number of processes; a run that ignores it would be several runs, silently."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if local and local != settings.devices:
        if settings.devices != 1:
            raise BadInput(f"devices: {settings.devices}, but the launcher started {local} processes on this node")
        settings.devices = local
    if local:
        settings.num_nodes = max(1, int(os.environ["WORLD_SIZE"]) // local)


def changes(old: dict, new: dict) -> tuple[list[str], list[str]]:
    """(settings that must not change on resume but did, changed settings of the cut), by dotted name."""
    moved = [k for k in new if old.get(k, new[k]) != new[k]]
    return [k for k in moved if k not in FREE], [k for k in moved if k in CUT]
