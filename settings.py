"""What a run can be told: settings that every program here shares, and how YAML, overrides and mistakes are read."""

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


@dataclass
class Optim:
    """AdamW and its learning rate: warmup, then constant, then decay to min_lr. Norms, biases, embeddings do not decay."""

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
    """32-true, bf16-mixed, bf16-true (LoRA only) or 64-true. Default: bf16-mixed on a GPU, 32-true on a CPU."""

    epochs: int = 1
    """Passes over data.train; the smaller of epochs and max_steps ends the run."""
    max_steps: int | None = None
    """Optimizer steps."""
    max_time: str | None = None
    """Stop, saved and resumable, after this long: HH:MM:SS or D-HH:MM:SS."""
    limit_train: int | float | None = None
    """Use so many steps of each epoch; a float is a fraction of it."""
    limit_val: int | float | None = None
    """Validate on the first so many examples; a float is a fraction of them."""
    batch_size: int = 64
    """Examples per optimizer step over all devices. The only batch that the result depends on."""
    micro_batch_size: int | None = None
    """Examples per forward on a device. Memory and speed only."""
    micro_batch_tokens: int | None = None
    """Prompt + completion tokens per forward instead; an over-long example goes alone. Default, given neither: 16384."""
    look_tokens: int | None = None
    """The same budget for passes without gradient, which need less memory. Default: as the passes with gradient."""

    lora: Lora = field(default_factory=Lora)
    optim: Optim = field(default_factory=Optim)
    eval: Eval = field(default_factory=Eval)

    log_interval: int = 1
    """Steps between lines of metrics.csv. A line describes its own step, over all micro-batches and devices."""
    val_interval: int | float | None = 1.0
    """Steps between validations; a float is a fraction of an epoch. Also validated: before the first step and at the end."""
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
        for name, choices in (
            ("strategy", ("auto", "ddp", "fsdp")),
            ("precision", (None, "32-true", "bf16-mixed", "bf16-true", "64-true")),
            ("accelerator", ("auto", "cpu", "gpu")),
            ("logger", ("csv", "tensorboard", "wandb")),
        ):
            if getattr(self, name) not in choices:
                raise BadInput(f"{name}: expected {', '.join(c for c in choices if c)}; got {getattr(self, name)}")
        if self.optim.name not in ("adamw", "adamw8bit") or self.optim.schedule not in ("cosine", "linear", "constant"):
            raise BadInput("optim: name is adamw or adamw8bit; schedule is cosine, linear or constant")
        for name in ("batch_size", "epochs", "devices", "num_nodes", "log_interval", "keep_last"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("micro_batch_size", "micro_batch_tokens", "look_tokens", "max_steps", "limit_train", "limit_val",
                     "val_interval", "save_interval"):  # fmt: skip
            if (value := getattr(self, name)) is not None and not value > 0:
                raise BadInput(f"{name}: expected more than 0 (or null), got {value}")
        for name in ("max_prompt", "max_completion"):
            if (value := getattr(self.data, name)) is not None and value < 1:
                raise BadInput(f"data.{name}: expected at least 1, got {value}")
        if self.micro_batch_size and self.micro_batch_tokens:
            raise BadInput("micro_batch_size and micro_batch_tokens: give one, not both")
        o = self.optim
        if not all(map(math.isfinite, (o.lr, o.min_lr, o.clip))) or min(o.lr, o.min_lr, o.clip, o.weight_decay) < 0:
            raise BadInput("optim: lr, min_lr, clip and weight_decay are finite and at least 0")
        if min(o.warmup, o.constant) < 0 or not 0 <= o.beta1 < 1 or not 0 <= o.beta2 < 1 or not o.eps > 0:
            raise BadInput("optim: warmup and constant are at least 0, beta1 and beta2 in [0, 1), eps above 0")
        known = [t.removeprefix("lora_") for t in LORA_TARGETS]
        if self.lora.rank < 0 or not 0 <= self.lora.dropout < 1 or not self.lora.targets:
            raise BadInput("lora: rank is at least 0, dropout in [0, 1), targets not empty")
        if unknown := [t for t in self.lora.targets if t not in known]:
            raise BadInput(f"lora.targets: {unknown[0]}: expected some of {', '.join(known)}")
        if self.precision == "bf16-true" and not self.lora.rank:
            raise BadInput(
                "precision: bf16-true loses AdamW's updates in full fine-tuning (a step of 1e-6 moves no weight of 0.02); "
                "use bf16-mixed, or LoRA"
            )
        if self.precision == "64-true" and self.strategy == "fsdp":
            raise BadInput("precision: 64-true does not work with strategy fsdp; use ddp")
        if self.resume == "auto" and not self.out_dir:
            raise BadInput("resume: auto needs --out_dir, the run to go on with")
        if self.max_time is not None:
            self.seconds()
        if self.keep_best and not (self.data.val or self.data.split):
            raise BadInput("keep_best: needs data.val or data.split")
        self.eval.refuse()

    def seconds(self) -> float:
        m = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", self.max_time or "")
        if not m:
            raise BadInput(f"max_time: expected HH:MM:SS or D-HH:MM:SS, got {self.max_time}")
        days, hours, minutes, seconds = (int(x or 0) for x in m.groups())
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()


LORA_TARGETS = ("lora_query", "lora_key", "lora_value", "lora_projection", "lora_mlp", "lora_head")

# A resume may change these; anything else would make it another run
FREE = {
    "resume", "out_dir", "devices", "num_nodes", "strategy", "accelerator", "micro_batch_size", "micro_batch_tokens",
    "look_tokens", "log_interval", "val_interval", "save_interval", "keep_last", "logger", "project", "progress",
    "max_time", "eval.samples", "eval.batch_size",
}  # fmt: skip
CUT = {"devices", "num_nodes", "strategy", "micro_batch_size", "micro_batch_tokens", "look_tokens"}


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


def dump(settings) -> str:
    """YAML that parses back into equal settings."""
    return yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False)


def _check_names(names, cls) -> None:
    known = flat(cls)
    groups = {k.rsplit(".", 1)[0] for k in known if "." in k}
    for name, where in names:
        if name not in known and name not in groups | {"config", "print_config", "help"}:
            near = difflib.get_close_matches(name, known, 1, 0.5) or [k for k in known if k.endswith("." + name)][:1]
            raise BadInput(f"{where}{name}: no such setting" + (f"; did you mean {near[0]}?" if near else ""))


def _keys(node, prefix=""):
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def _read_yaml(path: str, cls) -> dict:
    try:
        node = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        raise BadInput(f"{path}:{mark.line + 1 if mark else 1}: {getattr(e, 'problem', None) or 'not YAML'}") from None
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(f"config: {path}: {getattr(e, 'strerror', None) or 'not text'}") from None
    if not isinstance(node, dict):
        raise BadInput(f"{path}:1: expected settings as `name: value`")
    _check_names([(k, f"{path}: ") for k in _keys(node)], cls)
    return node


def parse(cls, argv: list[str], doc: str, demo: Path):
    """Settings of type `cls`. --config files are read first, in order, so an override wins wherever it stands.

    No arguments means the demo. Naming --model or --config means your own run, which must name data.train; naming
    data.train alone keeps the demo's model, but neither its validation data nor its checker.
    """
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
    names = [a[2:].split("=", 1)[0] for a in rest if a.startswith("--")]
    _check_names([(n, "") for n in names], cls)
    merged = {k for c in configs for k in _keys(_read_yaml(c, cls))}
    if not {"-h", "--help"} & set(rest) and "print_config" not in names:
        if (configs or "model" in names) and "data.train" not in names and "data.train" not in merged:
            raise BadInput("data.train: required: the rated records to learn from")
    if not configs and "model" not in names:
        configs = [str(demo)]
        if "data.train" in names:
            rest = ["--data.val=null", "--eval.check=none", *rest]

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(prog=Path(sys.argv[0]).name, description=doc, exit_on_error=False)
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile, help="A YAML file of these settings.")
    parser.add_class_arguments(cls, None, as_group=False)
    try:
        parsed = parser.parse_args([*(a for c in configs for a in ("--config", c)), *rest])
        parsed = parser.instantiate_classes(parsed)
    except (jsonargparse.ArgumentError, TypeError, ValueError) as e:
        raise BadInput(_one_line(str(e), cls)) from None
    settings = cls(**{f.name: parsed[f.name] for f in dataclasses.fields(cls)})
    settings.refuse()
    return settings


def _one_line(message: str, cls) -> str:
    """jsonargparse's message, as `name: reason`."""
    message = " ".join(message.split())
    if m := re.search(r'Key "([\w.]+)" is required', message):
        return f"{m[1]}: required"
    if m := re.search(r'key "([\w.]+)":? (.*)', message):
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
