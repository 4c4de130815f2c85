"""Settings that every program shares, and which of them a resume may change.

A field's type gives the allowed values. The sentence under a field is its --help. null means off. `free` and `content`
as a default say how a resume treats the field. parse.py reads settings from files and the command line.
"""

import dataclasses
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml
from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    restricted_number_type,
    restricted_string_type,
)

from infra.console import BadInput

ROOT = Path(__file__).parent.parent  # of the project

# If the type were float, jsonargparse would read 10:30 as 630.
Number = restricted_number_type("Number", float, [(">", -math.inf), ("<", math.inf)])
UpToOne = restricted_number_type("UpToOne", float, [(">", 0), ("<=", 1)])
# An interval: a number of steps, or a part of an epoch.
Epochs = restricted_string_type("Epochs", "^([0-9]*[.])?[0-9]*[1-9][0-9]*([.][0-9]*)? epochs?$")
Interval = PositiveInt | Epochs
# s3://bucket would become a folder named `s3:` on this machine.
LocalPath = restricted_string_type("LocalPath", "(?s)^(?!.*://).*$")


def find_path(source: str) -> Path:
    """A path as given. The project's own files in demo/ and config/ are also found from another working
    directory."""
    path = Path(source).expanduser()
    if source.startswith(("demo/", "config/")) and not path.exists():
        return ROOT / source
    return path


def read_text(file: Path) -> str:
    """The text of a user's file, without the byte order mark that some editors of Windows put before it."""
    return file.read_text(encoding="utf-8-sig")


def split_commas(text: str | None) -> list[str]:
    """The parts of a setting that holds several: `a, b` gives ["a", "b"], and None gives []. Raises BadInput."""
    parts = [part.strip() for part in text.split(",")] if text else []
    refuse_unless(all(parts), f"{text}: expected something before and after each comma")
    return parts


def refuse_unless(ok, message: str) -> None:
    """Raise BadInput with this message unless `ok`."""
    if not ok:
        raise BadInput(message)


def refuse(faults: list[str]) -> None:
    """Raise BadInput with the first 20 faults, one on each line, if there are any."""
    if faults:
        raise BadInput("\n".join(faults[:20]))


# ---- what a resume may do with a setting ------------------------------------------------------------
#
# A change of a setting that says nothing here would make another run, and a resume refuses it.


def free(default: object) -> typing.Any:
    """A setting that a resume may change: the run stays the same, up to rounding."""
    return field(default=default, metadata={"resume": "free"})


def content(**default: object) -> typing.Any:
    """A path or an id. A resume compares the hash of what lies there, so that the files may have moved; of
    the setting itself it compares only whether it is given."""
    return field(**default, metadata={"resume": "content"})


# ---- groups --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Which records to learn from, and how they become tokens."""

    train: str = content()
    """Rated or paired records: a .jsonl, .json, .csv or .parquet file, a folder of save_to_disk or a
    Hub id (id, id:split or id:config:split). Several by commas or a pattern (more/*.jsonl)."""
    val: str | None = content(default=None)
    """Records to validate on, in the same forms."""
    test: str | None = content(default=None)
    """Records evaluated once at the end, with the final weights and with the best ones; a checker also gets answers to
    their prompts (of eval.prompts of them)."""
    split: str | None = None
    """Cut data.train into train,val,test, e.g. 980,10,10; all ratings of a conversation stay together."""
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
    the rest of the context after data.max_prompt."""
    chat_template: LocalPath | None = content(default=None)
    """A jinja file that replaces the tokenizer's chat template, if it has one."""
    chat_template_kwargs: str | None = None
    """Variables for the chat template, for records without chat_template_kwargs: enable_thinking=false."""
    # free, because a change of the records changes their hash
    left_out: Literal["refuse", "drop"] = free("refuse")
    """Records with a text that the chat template does not write, such as a turn of an unknown role: refuse them with
    file, line and text, or drop and count them."""
    date: str | None = None
    """The day that chat templates print for records without a date: 2026-01-31. Today would make two runs differ."""
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
    """Dropout before the adapters, in training only. Then the numbers depend on how a step is split."""
    targets: str = "all-linear"
    """Which linear layers get adapters, by commas, as PEFT names them: q_proj, self_attn.o_proj, c_attn,
    lm_head, ...; all-linear: all but the head."""
    quantize: Literal["nf4"] | None = None
    """nf4: hold the frozen matrices of all blocks in 4 bits (QLoRA, by bitsandbytes). The export has
    them as they were. null: not quantised."""


@dataclass(frozen=True)
class Optim:
    """AdamW. The learning rate: warmup, then decay to 0. Weight decay skips norms, biases and embeddings."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate; at 0 the run only evaluates."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warmup; constant: it does not."""
    warmup: NonNegativeInt | Epochs = 0
    """Steps of a linear warmup from 0, or 0.1 epochs (SPIN, online KTO: of the first iteration's)."""
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
    top_p: UpToOne = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 is all."""
    stop: list[str] = field(default_factory=list)
    """A completion also ends at the first of these texts, which may be special tokens, not only at EOS. The text
    ends before it. The token ids include it, and spin.py and online.py learn from them."""
    max_new_tokens: PositiveInt | None = None
    """Longest sampled completion. Default: data.max_completion."""
    batch_size: PositiveInt = free(256)
    """Prompts answered together on a device. Their keys and values may have an eighth of a GPU's memory (8 GB on a
    CPU); prompts that do not fit are answered afterwards."""

    def __post_init__(self) -> None:
        refuse_unless(
            "" not in self.stop,
            f"stop: {self.stop}: an empty text would end each answer after its first token",
        )
        refuse_unless(
            not any(re.match(r"\\[nrt](?![a-z])", text) for text in self.stop),
            f"stop: {self.stop}: a backslash and a letter is no line break; use double quotes",
        )


@dataclass(frozen=True)
class Eval(Sampling):
    """Completions of the policy: saved at each validation, checked before and after the run."""

    check: Literal["demo"] | None = None
    """demo: the demo's checker decides which answers are right. null: no checker. Give your own checker in code,
    main(checker=...)."""
    check_interval: Interval | None = free(None)
    """Steps between checks of the answers, or 0.5 epochs. Answers are always checked at step 0 and at the end of the
    run. In SPIN and online KTO an interval in epochs, or null, adds the end of each iteration."""
    prompts: PositiveInt = 100
    """Number of distinct prompts of data.val that are answered and checked: the first ones. The 95% interval of the
    accuracy is 10 points or less to each side for 100 prompts, 4.5 for 500 (the demo)."""
    samples: NonNegativeInt = free(4)
    """Number of completions that are saved at each validation (eval/step-N.json)."""


# ---- a run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSettings:
    """Settings shared by all programs. A program's own are a subclass with one more group."""

    model: str = content()
    """The model to start from: a Hugging Face id or folder, a PEFT folder, a run of
    ours or one of its checkpoints."""
    data: Data
    reference: str | None = content(default=None)
    """Another frozen model to compare with, of the same tokenizer. Default: the one we start from."""
    reference_cache: LocalPath | None = free(None)
    """A folder that keeps the reference's log-probs, by content of weights, prompt and completion.
    All log-probs that the run needs are computed before its first step, or found there; then the
    reference is released."""
    out_dir: LocalPath | None = free(None)
    """Folder of this run. Default: a new one under out/."""
    resume: LocalPath | None = free(None)
    """auto: from out_dir's newest checkpoint, if there is one. Or the folder of one of out_dir's checkpoints; later
    checkpoints are then renamed."""
    seed: NonNegativeInt = 1
    """Seeds the order of the examples, adapters, dropout and sampling."""
    deterministic: bool = False
    """Bit-identical reruns on a GPU too, at some cost in speed. On a CPU they always are."""

    accelerator: Literal["auto", "cpu", "gpu"] = free("auto")
    """auto, cpu or gpu."""
    devices: PositiveInt = free(1)
    """Devices per node. Under torchrun and srun: the number of processes on a node."""
    strategy: Literal["auto", "ddp", "fsdp"] = free("auto")
    """auto (one device, else ddp), ddp, or fsdp (FSDP2: weights and optimizer state sharded)."""
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "64-true"] | None = None
    """32-true, bf16-mixed, 64-true, or bf16-true (LoRA only: the base in bf16, adapters and AdamW
    in fp32). Default: bf16-mixed on a GPU of capability 8.0 (Ampere) or later, and on a CPU with
    AVX512-BF16 or AMX if the model is large enough to gain; otherwise 32-true."""

    epochs: PositiveInt = 1
    """Passes over data.train, of SPIN and online KTO in each iteration. max_steps overrides it."""
    max_steps: PositiveInt | None = None
    """Optimizer steps of the run; data.train is read as often as they need. Default: as many as the epochs have. SPIN
    and online KTO keep the epochs of an iteration, and end after this number of steps in all."""
    stop_at: PositiveInt | None = free(None)
    """Stop, saved and resumable, after this step; the learning rate's schedule does not change."""
    batch_size: PositiveInt = 64
    """Examples per optimizer step over all devices. The only batch size that the gradient depends on."""
    micro_batch_size: PositiveInt | None = free(None)
    """Examples per forward on a device. It changes memory and speed only. It overrides micro_batch_tokens."""
    micro_batch_tokens: PositiveInt | None = free(None)
    """Tokens per forward instead, also without gradient; a longer example is computed alone. Default:
    16384; on a CPU fewer where they would need more than 4 GB."""
    activation_checkpointing: bool = free(False)
    """Compute blocks again in the backward pass: less memory, a quarter slower."""

    lora: Lora = Lora()
    optim: Optim = Optim()
    eval: Eval = Eval()

    log_interval: PositiveInt = free(1)
    """Steps between rows of metrics.csv. A row describes its own step, of all devices."""
    val_interval: Interval | None = free("1 epoch")
    """Steps between validations, or 0.5 epochs. Step 0 and the end of the run are always validated. In SPIN and online
    KTO an interval in epochs, or null, adds the end of each iteration."""
    save_interval: Interval | None = free("1 epoch")
    """Steps between checkpoints, or 0.5 epochs. A run also saves at its end, when it is stopped, and at the end of each
    iteration of SPIN and online KTO. A step is saved before it is validated, so an error in a validation loses
    nothing. A new best by keep_best is saved after its validation."""
    keep_last: PositiveInt = free(2)
    """Number of newest checkpoints to keep."""
    keep_best: str | None = None
    """Also keep the best checkpoint by this column of val.csv: the lowest of kl, kl/... and columns that end with
    loss, the highest of any other."""
    logger: Literal["csv", "tensorboard", "wandb"] = free("csv")
    """csv (always written), tensorboard, or wandb, which reads WANDB_PROJECT, WANDB_NAME and WANDB_MODE=offline."""
    progress: bool = free(True)
    """Print now and then how far the run is."""

    def validate(self) -> None:
        """Raise BadInput for fields that do not go together. jsonargparse has checked each field by its
        type."""
        for name, value in flatten(self).items():
            # an empty text comes from a variable of the shell that is not set
            refuse_unless(
                value not in ("", math.inf),
                f"{name}: expected a finite number or a text that is not empty, got {value!r}",
            )
        refuse_unless(
            not self.lora.quantize or (self.lora.rank and self.strategy != "fsdp"),
            "lora.quantize: it needs lora.rank, and does not work with strategy fsdp",
        )
        refuse_unless(
            self.lora.rank or self.precision != "bf16-true",
            "precision: bf16-true loses AdamW's updates in full fine-tuning (a step of 1e-6 moves no "
            "weight of 0.02); use bf16-mixed, or LoRA",
        )
        refuse_unless(
            self.out_dir or self.resume != "auto", "resume: auto needs --out_dir, the run's own"
        )
        refuse_unless(self.seed < 2**32, f"seed: expected less than 2^32, got {self.seed}")


# ---- names, and what a resume has changed --------------------------------------------------------------


def resume_rules(cls: type) -> dict[str, str]:
    """Dotted names of settings with a rule for a resume: free or content."""
    rules = {}
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            rules |= {f"{name}.{inner}": rule for inner, rule in resume_rules(kind).items()}
    for setting in dataclasses.fields(cls):
        if "resume" in setting.metadata:
            rules[setting.name] = setting.metadata["resume"]
    return rules


def changed_settings(
    old: Mapping[str, object], new: Mapping[str, object], rules: Mapping[str, str]
) -> list[str]:
    """The names of new flat settings that a resume of a run with the old ones cannot take."""
    changed = []
    for name, value in new.items():
        before = old.get(name)
        rule = rules.get(name)
        is_moved = rule == "content" and None not in (value, before)
        if value != before and rule != "free" and not is_moved:
            changed.append(name)
    return sorted(changed)


def flatten(settings, prefix: str = "") -> dict[str, object]:
    """Dotted names and values: of a settings object, of a dict from YAML, or of a settings class
    (with types instead of values)."""
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
    """YAML that parses back into equal settings."""
    return yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False)
