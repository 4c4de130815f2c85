"""Settings that every program shares, and how they are read: files, the command line, the demo's defaults.

A field's type says what it may be, the sentence under it is its --help, null means off. jsonargparse reads
and checks the values; ours is the order of files and options, the nearest name, and one line for an error.
"""

import dataclasses
import difflib
import json
import re
import sys
import typing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import docstring_parser
import jsonargparse
import yaml
from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    restricted_number_type,
)

from runs.console import BadInput, say

ROOT = Path(__file__).parent.parent  # of the project

UpToOne = restricted_number_type("UpToOne", float, [(">", 0), ("<=", 1)])


def find_path(source: str) -> Path:
    """A path as given. The demo's own files are also found from another working directory."""
    path = Path(source).expanduser()
    if source.startswith("demo/") and not path.exists():
        return ROOT / source
    return path


def refuse_unless(ok, message: str) -> None:
    """Raise BadInput with this message unless `ok`."""
    if not ok:
        raise BadInput(message)


# ---- groups --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Which records to learn from, and how they become tokens."""

    train: str
    """Rated or paired records: a .jsonl, .json, .csv or .parquet file, a folder of save_to_disk or a
    Hub id (id, id:split or id:config:split). Several by commas or a pattern (more/*.jsonl)."""
    val: str | None = None
    """Records to validate on, in the same forms."""
    test: str | None = None
    """Records evaluated once at the end, with the final weights and with the best ones."""
    split: str | None = None
    """Cut data.train into train,val,test, e.g. 980,10,10; all ratings of a prompt stay together."""
    shuffle: bool = True
    """A new order in each epoch, which depends on the seed and the epoch only. False: file order."""
    group_by_prompt: bool = False
    """The examples of one prompt stay side by side in each epoch's order: a step has most or all of
    them, and computes their prompt once."""
    max_prompt: PositiveInt | None = None
    """Longest prompt in tokens; a longer one loses its beginning. Default: 1024, or half the
    context, or less where data.max_completion leaves less."""
    max_completion: PositiveInt | None = None
    """Longest completion in tokens; a longer one loses its end and its EOS. Default: 1024, or
    what fits into the context beside data.max_prompt."""
    chat_template: str | None = None
    """A jinja file in place of the tokenizer's own chat template, or where it has none."""
    left_out: Literal["refuse", "drop"] = "refuse"
    """Records of which the chat template does not write all, such as turns of a role that it does not
    know: refuse, with file, line and text; or drop them and count them."""
    score_prompt: bool = False
    """Add the log-probs of the prompt's tokens, from the second on, to those of each completion."""
    date: str | None = None
    """The day that chat templates print: 2026-01-31. The real day would make two runs differ."""
    columns: str | None = None
    """Names of the records' fields where they are not ours: prompt=question,label=good."""
    labels: str | None = None
    """What the values of the label mean where they are not ours: up=positive,down=negative, or
    up=4|5,down=1|2. Records with other values are dropped and counted."""
    extra: str | None = None
    """More fields that every record must have, which a loss reads by batch.extra, and a checker by answer.fields:
    source,score."""


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685). The reference is then the model with its adapters off."""

    rank: PositiveInt | None = None
    """Rank of the adapters. null: no adapters, every weight is trained."""
    alpha: PositiveInt = 16
    """The adapters' output is multiplied by alpha / rank."""
    dropout: ClosedUnitInterval = 0.0
    """Dropout before the adapters. Above 0 policy and reference differ even at step 0."""
    targets: str = "all-linear"
    """Which linear layers get adapters, by commas, as PEFT names them: q_proj, self_attn.o_proj, c_attn,
    lm_head, ...; all-linear: all but the head."""
    quantize: Literal["nf4"] | None = None
    """nf4: hold the frozen matrices of all blocks in 4 bits (QLoRA, by bitsandbytes). The export has
    them as they were. null: not quantised."""


@dataclass(frozen=True)
class Optim:
    """AdamW. The learning rate: warmup, constant, decay to min_lr. Weight decay leaves out norms, biases
    and embeddings."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw, or adamw8bit: optimizer states in 8 bits, through bitsandbytes."""
    lr: NonNegativeFloat = 1e-6
    """Peak learning rate; at 0 the run only evaluates."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the schedule."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warmup; constant: it does not."""
    warmup: int | float = 0
    """Steps of linear warmup from 0; a float is a fraction of an epoch (SPIN, online KTO: of the first
    iteration's)."""
    constant: int | float = 0
    """Steps at the peak between warmup and decay; a float as for warmup."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    beta1: ClosedUnitInterval = 0.9
    """Decay of the gradient's running mean."""
    beta2: ClosedUnitInterval = 0.999
    """Decay of the squared gradient's running mean."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    clip: PositiveFloat | None = 1.0
    """Largest gradient norm; a larger gradient is scaled down to it. null: no clipping."""


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled from a policy."""

    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""
    top_k: PositiveInt | None = None
    """Sample among the k likeliest tokens only. null: among all."""
    top_p: UpToOne = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 is all."""
    repetition_penalty: PositiveFloat = 1.0
    """Divides the positive logits of tokens that are there already, and multiplies negative ones; 1
    changes nothing."""
    stop: list[str] = field(default_factory=list)
    """A completion also ends at the first of these texts, not only at EOS. Its text ends before it; its token
    ids, from which spin.py and online.py learn, include it."""
    min_new_tokens: NonNegativeInt = 0
    """No EOS before this many tokens."""
    max_new_tokens: PositiveInt | None = None
    """Longest sampled completion. Default: data.max_completion."""
    batch_size: PositiveInt = 256
    """Prompts answered at once on a device."""
    cache_gb: PositiveFloat | None = None
    """Memory for their keys and values on a device; prompts that do not fit are answered afterwards.
    Default: an eighth of a GPU's memory, 8 on a CPU."""


@dataclass(frozen=True)
class Eval(Sampling):
    """Completions of the policy: saved at each validation, checked before and after the run."""

    check: Literal["demo"] | None = None
    """A checker that decides which answers are right: demo's. Your own is given in code,
    main(checker=...). null: no checker."""
    check_interval: int | float | None = None
    """Steps (a float: epochs) between checks of the answers; always at step 0 and at the end of the run, with a float
    or null also at the end of each iteration of SPIN and online KTO."""
    prompts: PositiveInt = 100
    """Number of distinct prompts of data.val that are answered and checked: the first ones. With 100
    the accuracy is known to 10 points or less, with 500 (the demo) to 4.5."""
    samples: NonNegativeInt = 4
    """Number of completions that are saved at each validation (eval/), and shown by tensorboard and wandb."""


# ---- a run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSettings:
    """Settings shared by all programs. A program's own are a subclass with one more group."""

    model: str
    """What to start from: a Hugging Face id or folder, a PEFT or litgpt checkpoint folder, a run of
    ours or one of its checkpoints."""
    data: Data
    reference: str | None = None
    """Another frozen model to compare with, of the same tokenizer. Default: the one we start from."""
    reference_cache: str | None = None
    """A folder that keeps the reference's log-probs, by content of weights, prompt and completion.
    All log-probs that the run needs are computed before its first step, or found there; then the
    reference is released."""
    out_dir: str | None = None
    """Folder of this run. Default: a new one under out/."""
    resume: str | None = None
    """auto: from out_dir's newest checkpoint, if there is one. Or a checkpoint's folder: in its own run's
    out_dir the newer checkpoints are put aside, in another out_dir the run is a branch."""
    seed: NonNegativeInt = 1
    """Seeds the order of the examples, adapters, dropout and sampling."""
    deterministic: bool = False
    """Bit-identical reruns on a GPU too, at some cost in speed. On a CPU they always are."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """auto, cpu or gpu."""
    devices: PositiveInt = 1
    """Devices per node. Under torchrun: its number of processes."""
    num_nodes: PositiveInt = 1
    """Nodes."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """auto (one device, else ddp), ddp, or fsdp (FSDP2: weights and optimizer state sharded)."""
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "64-true"] | None = None
    """32-true, bf16-mixed, 64-true, or bf16-true (LoRA only: the base in bf16, adapters and AdamW
    in fp32). Default: what this machine multiplies: bf16-mixed on a GPU, and on a CPU with AVX512-BF16 or
    AMX where the model is large enough to gain; else 32-true."""

    epochs: PositiveInt = 1
    """Passes over data.train; the smaller of epochs and max_steps ends the run."""
    max_steps: PositiveInt | None = None
    """Optimizer steps."""
    max_time: timedelta | None = None
    """Stop, saved and resumable, after this long: HH:MM:SS, in quotes in a YAML file."""
    stop_at: PositiveInt | None = None
    """Stop, saved and resumable, after this step; the learning rate's schedule does not change."""
    limit_train: int | float | None = None
    """Use this many steps of each epoch; a float is a fraction of it."""
    limit_val: int | float | None = None
    """Validate on the first examples only, this many; a float is a fraction of them."""
    batch_size: PositiveInt = 64
    """Examples per optimizer step over all devices. The only batch size that the gradient depends on."""
    micro_batch_size: PositiveInt | None = None
    """Examples per forward on a device. It changes memory and speed only."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens per forward instead, also without gradient; a longer example is computed alone. Default:
    16384; on a CPU fewer where they would need more than 4 GB."""
    activation_checkpointing: bool = False
    """Compute blocks again in the backward pass: less memory, a quarter slower."""

    lora: Lora = Lora()
    optim: Optim = Optim()
    eval: Eval = Eval()

    log_interval: PositiveInt = 1
    """Steps between rows of metrics.csv. A row describes its own step, of all devices."""
    val_interval: int | float | None = 1.0
    """Steps (a float: epochs) between validations; always at step 0 and at the end of the run, with a float or null
    also at the end of each iteration of SPIN and online KTO."""
    save_interval: int | float | None = 1.0
    """Steps (a float: epochs) between checkpoints; also at the end of the run and of each iteration of SPIN and
    online KTO, at a new best by keep_best, or when stopped. A step is validated before it is saved."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_best: str | None = None
    """Also keep the best checkpoint by this column of val.csv: the lowest of kl, of kl/..., and of columns whose
    name ends with loss, the highest of any other."""
    logger: Literal["csv", "tensorboard", "wandb"] = "csv"
    """csv (always written), tensorboard or wandb (WANDB_PROJECT names its project; WANDB_MODE=offline works)."""
    progress: bool = True
    """A progress bar on a terminal, a line now and then elsewhere."""

    def validate(self) -> None:
        """Raise BadInput for fields that do not go together. jsonargparse has checked each field by its
        type."""
        for name, value in flatten(self).items():
            if value is not None and re.search("interval$|^limit_", name):
                refuse_unless(value > 0, f"{name}: expected above 0, got {value}")
            if name in ("optim.warmup", "optim.constant"):
                refuse_unless(value >= 0, f"{name}: expected 0 or above, got {value}")
            refuse_unless(
                self.strategy != "fsdp" or value not in ("nf4", "64-true", "adamw8bit"),
                f"{name}: {value} does not work with strategy fsdp; use ddp",
            )
        refuse_unless(
            self.lora.rank or not self.lora.quantize,
            "lora.quantize: a quantised model cannot be trained itself; set lora.rank",
        )
        refuse_unless(
            self.lora.rank or self.precision != "bf16-true",
            "precision: bf16-true loses AdamW's updates in full fine-tuning (a step of 1e-6 moves no "
            "weight of 0.02); use bf16-mixed, or LoRA",
        )
        refuse_unless(
            not (self.micro_batch_size and self.micro_batch_tokens),
            "micro_batch_size and micro_batch_tokens: give one, not both",
        )
        refuse_unless(
            self.out_dir or self.resume != "auto", "resume: auto needs --out_dir, the run's own"
        )


# ---- what a resume may change --------------------------------------------------------------------

# How a step is computed: on which devices, in which micro-batches, where the reference's log-probs
# come from, how many answers are sampled at once. After a change of one of these a resumed run is the
# same up to rounding only.
ROUNDING_SETTINGS = set(
    """
    accelerator devices num_nodes strategy micro_batch_size micro_batch_tokens reference_cache
    spin.batch_size spin.cache_gb online.batch_size online.cache_gb
    """.split()
)
# What else a resume may change (what data.left_out drops, the hash of the records shows). A change of
# any other setting would make it another run.
FREE_SETTINGS = ROUNDING_SETTINGS | set(
    """
    resume out_dir max_time stop_at activation_checkpointing
    log_interval val_interval save_interval keep_last logger progress
    eval.samples eval.batch_size eval.check_interval eval.cache_gb
    data.left_out
    """.split()
)
# Paths and ids. A resume compares the hashes of their contents, so that the files may have moved; of the
# setting itself it compares only whether it is given.
CONTENT_SETTINGS = set("model reference data.train data.val data.test data.chat_template".split())


def changed_settings(old: dict, new: dict) -> tuple[list[str], list[str]]:
    """Compare the flat settings of a saved run with new ones. -> names of the changed settings that a
    resume cannot change, and of the changed ones of ROUNDING_SETTINGS."""
    changed = set()
    for name, value in new.items():
        before = old.get(name)
        both_given = name in CONTENT_SETTINGS and None not in (value, before)
        # as text, for 1 and 1.0 differ: a step and an epoch
        if not both_given and repr(before) != repr(value):
            changed.add(name)
    return sorted(changed - FREE_SETTINGS), sorted(changed & ROUNDING_SETTINGS)


def flatten(settings, prefix: str = "") -> dict[str, object]:
    """Dotted names and values: of a settings object, of a dict from YAML, or (types in place of
    values) of a settings class."""
    if isinstance(settings, type):
        settings = typing.get_type_hints(settings)
    out = {}
    for name, value in (settings if isinstance(settings, dict) else vars(settings)).items():
        if isinstance(value, dict) or dataclasses.is_dataclass(value):
            out |= flatten(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out


def dump_yaml(settings) -> str:
    """YAML that parses back into equal settings. Through JSON: yaml does not know jsonargparse's types."""
    return yaml.safe_dump(
        json.loads(json.dumps(dataclasses.asdict(settings), default=str)), sort_keys=False
    )


# ---- from the command line to settings -----------------------------------------------------------

# The names that users of TRL, transformers and PEFT type, and the nearest setting here, which may
# count otherwise: see its --help.
NAMES_ELSEWHERE = dict(
    line.split()
    for line in """
    dataset_name                 data.train
    eval_steps                   val_interval
    gradient_accumulation_steps  batch_size
    gradient_checkpointing       activation_checkpointing
    learning_rate                optim.lr
    load_in_4bit                 lora.quantize
    logging_steps                log_interval
    lora_r                       lora.rank
    lora_target_modules          lora.targets
    loss_type                    loss
    max_completion_length        data.max_completion
    max_grad_norm                optim.clip
    max_length                   data.max_prompt
    model_name_or_path           model
    num_train_epochs             epochs
    output_dir                   out_dir
    per_device_train_batch_size  micro_batch_size
    ref_model                    reference
    report_to                    logger
    save_steps                   save_interval
    save_total_limit             keep_last
    torch_dtype                  precision
    use_peft                     lora.rank
    warmup_ratio                 optim.warmup
    """.strip().splitlines()
)


def parse(cls, argv: list[str] | None, objective, demo: str):
    """Settings of type `cls` from the command line (or from argv). Command-line options override
    --config files, wherever they stand; a later file overrides an earlier one.

    Without --model and --config the run starts from `demo`, a file of config/. With one of them it
    is the user's own run, which must name data.train. With data.train alone the demo's model stays,
    but neither its validation data nor its checker. --help begins with the docstring of the file that
    the objective stands in: a fork's own. Raises BadInput.
    """
    words = sys.argv[1:] if argv is None else argv
    names = {word[2:].split("=")[0] for word in words if word.startswith("--")}
    defaults = {}
    if not {"model", "config"} & names:
        defaults = flatten(yaml.safe_load((ROOT / "config" / demo).read_text()))
        if "data.train" in names:
            say("your data.train: the demo's validation data and checker are left out")
            defaults |= {"data.val": None, "eval.check": None}
    elif "config" not in names:
        say(f"your model: defaults, not config/{demo} (--print_config shows them)")
    doc = sys.modules[objective.__module__].__doc__ or ""
    settings = parse_command(cls, doc, words, defaults)
    settings.validate()
    return settings


def split_options(words: list[str]) -> list[list[str]]:
    """[["--seed", "1"], ["--debug"], ...]; words before the first option are one more list."""
    options = [[]]
    for word in words:
        if word.startswith("--"):
            options.append([])
        options[-1].append(word)
    return options


def parse_command(cls, doc: str, words: list[str], defaults: dict | None = None):
    """The settings of a command. defaults: values by dotted names, of which a fork's `cls` may lack some.
    Raises BadInput."""
    parser = jsonargparse.ArgumentParser(
        usage="python %(prog)s [--config FILE] [--SETTING VALUE ...]",
        description=doc.split("\n\n")[0],
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="A YAML file of these settings.")
    parser.add_class_arguments(cls, None, as_group=False)
    _add_help(parser, cls)
    known = flatten(cls)
    parser.set_defaults({name: defaults[name] for name in known if name in (defaults or ())})
    # files first: an option overrides them wherever it stands
    options = split_options(words)
    options.sort(key=lambda option: not " ".join(option).startswith("--config"))
    try:
        parsed = parser.parse_args(sum(options, []))
    except (jsonargparse.ArgumentError, ValueError) as e:
        raise BadInput(_one_line(str(e), known)) from None
    for name, kind in known.items():
        # jsonargparse lets null in a file pass, and a value in place of a group
        is_right = parsed.get(name) is not None or type(None) in typing.get_args(kind)
        refuse_unless(is_right, f"{name}: expected {_type_name(kind)}, got null")
    del parsed["config"]
    return cls(**parser.instantiate_classes(parsed))


def _add_help(parser, cls, prefix: str = "") -> None:
    """The sentences under the fields: jsonargparse does not read inherited ones."""
    for base in cls.__mro__[:-1]:
        for one in docstring_parser.parse_from_object(base).params:
            option = parser._option_string_actions[f"--{prefix}{one.arg_name}"]
            option.help = one.description
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            _add_help(parser, kind, f"{name}.")


def _type_name(kind) -> str:
    """What a setting may be, in words: PositiveInt; kto or apo_zero_unpaired; str or null."""
    if typing.get_origin(kind) not in (None, list):  # a union, or a Literal
        return " or ".join(map(_type_name, typing.get_args(kind)))
    words = {type(None): "null", timedelta: "HH:MM:SS"}
    return words.get(kind) or getattr(kind, "__name__", str(kind))


def _one_line(message: str, known: dict) -> str:
    """jsonargparse's message (4.41) as `name: reason`. known: the settings that there are."""
    # Unrecognized arguments: --bta 1
    # Validation failed: Key 'bta' is not expected
    # Validation failed: Group 'kto' does not accept nested key 'bta'
    # Parser key "epochs": Not of type PositiveInt: 0 does not conform to restriction v>0
    # Parser key "lora.rank": Does not validate against any of the Union subtypes ... Given value: 0
    m = re.search(
        r"arguments: -*([\w.-]+)|Key '(.+)' is not|Group '(.+)' does not accept nested key '(.+)'"
        r'|key "([\w.]+)":',
        message,
    )
    name = ".".join(filter(None, m.groups())) if m else ""
    if name in known:
        value = re.search(r"value: (.*)|'(.*)'$|: (\S+) does not", message)
        got = f", got {value[value.lastindex]}" if value else ""
        return f"{name}: expected {_type_name(known[name])}{got}"
    if not name or name == "config":  # an option without a value; a file that is none
        return " ".join(message.split())
    wanted = name.replace("-", "_")
    wanted = NAMES_ELSEWHERE.get(wanted, wanted)
    similar = [x for x in known if wanted in (x, *x.split("."))]
    similar = similar or difflib.get_close_matches(wanted, known, n=1, cutoff=0.7)
    return f"{name}: no such setting" + (f"; did you mean {similar[0]}?" if similar else "")
