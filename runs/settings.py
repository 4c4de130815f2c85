"""Settings that every program shares. The string under a field is its --help; `setting(...)` says what it may be. null
always means off."""

import dataclasses
import math
import re
import typing
from dataclasses import dataclass, field

from runs.errors import BadInput, printable

DEFAULT_TOKENS = 16384  # per forward, given neither micro_batch_size nor micro_batch_tokens
CPU_ACTIVATIONS = 4e9  # bytes
LORA_TARGETS = ("query", "key", "value", "projection", "mlp", "head")
MAX_INT, MAX_FLOAT = 10**12, 1e30  # of any number; float32 ends at 3e38

NO_BF16 = """precision: bf16-true loses AdamW's updates in full fine-tuning (a step of 1e-6 moves no \
weight of 0.02); use bf16-mixed, or LoRA"""


# ---- checks --------------------------------------------------------------------------------------


def setting(default, *, at_least=None, above=None, at_most=None, below=None, choices=None):
    """A field of a settings class with a default and the values that it may have. null is always
    allowed where the field's type has None."""
    limits = dict(at_least=at_least, above=above, at_most=at_most, below=below, choices=choices)
    return field(default=default, metadata=limits)


SOURCE = {"path": "source"}  # of a field: a path, several data files, or an id on the Hub
FOLDER = {"path": "folder"}  # a folder that the run may make
RUN = {"path": "run"}  # a run's folder, or a checkpoint in it


def path_setting(default: str | None = None):
    """A field that holds a path, or the id of something on the Hub."""
    return field(default=default, metadata=SOURCE)


def refuse_unless(ok, message: str) -> None:
    """Raise BadInput with this message unless `ok`."""
    if not ok:
        raise BadInput(message)


def check_fields(settings, prefix: str = "") -> None:
    """Raise BadInput for a field, also of a group, whose value its `setting` does not allow."""
    for f in dataclasses.fields(settings):
        name, value = prefix + f.name, getattr(settings, f.name)
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{name}.")
        elif value is not None:
            check_value(name, value, f.metadata)


def check_value(name: str, value, limits) -> None:
    """Raise BadInput for a value outside of its limits (see `setting`)."""
    got = f"got {printable(value)}"
    if choices := limits.get("choices"):
        refuse_unless(value in choices, f"{name}: expected {', '.join(choices)}; {got}")
    if limits.get("path"):
        control = re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", value)
        # safetensors opens only paths in UTF-8
        expected = f"{name}: expected a path in UTF-8 or an id"
        refuse_unless(value and not control, f"{expected}, got '{printable(value)}'")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    refuse_unless(math.isfinite(value), f"{name}: expected a finite number, {got}")
    for words, holds in (
        ("at_least", lambda limit: value >= limit),
        ("above", lambda limit: value > limit),
        ("at_most", lambda limit: value <= limit),
        ("below", lambda limit: value < limit),
    ):
        limit = limits.get(words)
        if limit is not None:
            refuse_unless(
                holds(limit), f"{name}: expected {words.replace('_', ' ')} {limit}, {got}"
            )
    most = MAX_FLOAT if isinstance(value, float) else MAX_INT
    refuse_unless(abs(value) < most, f"{name}: expected below {most}, {got}")


# ---- groups --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Which records to learn from, and how they become tokens."""

    train: str = field(metadata=SOURCE)
    """Rated or paired records: a .jsonl, .json, .csv, .tsv (also .gz) or .parquet file, a folder of
    save_to_disk or a Hub id (id, id:split or id:config:split). Several by commas, patterns
    (more/*.jsonl), shares of a mix: a.jsonl:0.7,b.jsonl:0.3."""
    val: str | None = path_setting()
    """Records to validate on, in the same forms."""
    test: str | None = path_setting()
    """Records evaluated once at the end, with the final weights and with the best ones."""
    split: str | None = None
    """Cut data.train into train,val,test, e.g. 980,10,10; all ratings of a prompt stay together."""
    shuffle: bool = True
    """A new order in each epoch, which depends on the seed and the epoch only. False: file order."""
    group_by_prompt: bool = False
    """The examples of one prompt stay side by side in each epoch's order: a step has most or all of
    them, and computes their prompt once."""
    max_prompt: int | None = setting(None, at_least=1)
    """Longest prompt in tokens; a longer one loses its beginning. Default: 1024, or half the
    context, or less where data.max_completion leaves less."""
    max_completion: int | None = setting(None, at_least=1)
    """Longest completion in tokens; a longer one loses its end and its EOS. Default: 1024, or
    what fits into the context beside data.max_prompt."""
    chat_template: str | None = path_setting()
    """A jinja file, for a tokenizer without a chat template. It is used in place of the tokenizer's
    own."""
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

    @property
    def extra_fields(self) -> tuple[str, ...]:
        names = (name.strip() for name in (self.extra or "").split(","))
        return tuple(name for name in names if name)


def with_limits(data: Data, context: int) -> Data:
    """Fill in max_prompt and max_completion so that both together fit into a model's context (in
    tokens). Raises BadInput where the given ones do not."""
    max_prompt, max_completion = data.max_prompt, data.max_completion
    if max_prompt is None:
        max_prompt = max(1, min(1024, context // 2, context - (max_completion or 1)))
    if max_completion is None:
        max_completion = min(1024, context - max_prompt)
    if max_completion < 1 or max_prompt + max_completion > context:
        raise BadInput(
            f"data.max_prompt {max_prompt} + data.max_completion {max(1, max_completion)} exceed the "
            f"context of {context}"
        )
    return dataclasses.replace(data, max_prompt=max_prompt, max_completion=max_completion)


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685). The reference is then the model with its adapters off."""

    rank: int | None = setting(None, at_least=1, below=2**13)
    """Rank of the adapters. null: no adapters, every weight is trained."""
    alpha: int = setting(16, at_least=1, below=2**31)
    """The adapters' output is multiplied by alpha / rank."""
    dropout: float = setting(0.0, at_least=0, below=1)
    """Dropout before the adapters. Above 0 policy and reference differ even at step 0."""
    targets: str = ",".join(LORA_TARGETS[:-1])
    """Which linear layers get adapters, by commas: any of query, key, value, projection, mlp, head;
    or PEFT's names: q_proj, o_proj, all-linear, ..."""
    quantize: str | None = setting(None, choices=("nf4",))
    """Hold the frozen matrices of all blocks in nf4 (QLoRA, by bitsandbytes). The export has them
    as they were. null: not quantised."""


@dataclass(frozen=True)
class Optim:
    """AdamW. The learning rate: warmup, constant, decay to min_lr. Weight decay leaves out norms, biases
    and embeddings."""

    name: str = setting("adamw", choices=("adamw", "adamw8bit"))
    """adamw, or adamw8bit: optimizer states in 8 bits, through bitsandbytes."""
    lr: float = setting(1e-6, at_least=0)
    """Peak learning rate; at 0 the run only evaluates."""
    min_lr: float = setting(0.0, at_least=0)
    """Learning rate at the end of the schedule."""
    schedule: str = setting("cosine", choices=("cosine", "linear", "constant"))
    """How the learning rate falls after the warmup; constant: it does not."""
    warmup: int | float = setting(0, at_least=0)
    """Steps of linear warmup from 0; a float is a fraction of an epoch (SPIN, online KTO: of the first
    iteration's)."""
    constant: int | float = setting(0, at_least=0)
    """Steps at the peak between warmup and decay; a float as for warmup."""
    weight_decay: float = setting(0.0, at_least=0)
    """Decoupled weight decay."""
    beta1: float = setting(0.9, at_least=0, below=1)
    """Decay of the gradient's running mean."""
    beta2: float = setting(0.999, at_least=0, below=1)
    """Decay of the squared gradient's running mean."""
    eps: float = setting(1e-8, above=0)
    """Added to the denominator."""
    clip: float | None = setting(1.0, above=0)
    """Largest gradient norm; a larger gradient is scaled down to it. null: no clipping."""


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled from a policy."""

    temperature: float = setting(1.0, at_least=0)
    """Sampling temperature; 0 is greedy."""
    top_k: int | None = setting(None, at_least=1)
    """Sample among the k likeliest tokens only. null: among all."""
    top_p: float = setting(1.0, above=0, at_most=1)
    """Sample among the likeliest tokens that together have this probability; 1 is all."""
    repetition_penalty: float = setting(1.0, above=0)
    """Divides the positive logits of tokens that are there already, and multiplies negative ones; 1
    changes nothing."""
    stop: list[str] = field(default_factory=list)
    """A completion also ends at the first of these texts, not only at EOS. Its text ends before it; its token
    ids, from which spin.py and online.py learn, include it."""
    min_new_tokens: int = setting(0, at_least=0)
    """No EOS before this many tokens."""
    max_new_tokens: int | None = setting(None, at_least=1, below=2**24)
    """Longest sampled completion. Default: data.max_completion."""
    batch_size: int = setting(256, at_least=1)
    """Prompts answered at once on a device."""
    cache_gb: float | None = setting(None, above=0)
    """Memory for their keys and values on a device; prompts that do not fit are answered afterwards.
    Default: half of the free memory of a GPU (to a power of two), 8 on a CPU."""

    def validate(self, group: str) -> None:
        refuse_unless("" not in self.stop, f"{group}.stop: a stop text is not empty")


@dataclass(frozen=True)
class Eval(Sampling):
    """Completions of the policy: saved at each validation, checked before and after the run."""

    check: str | None = setting(None, choices=("demo",))
    """A checker that decides which answers are right: demo's. Your own is given in code,
    main(checker=...). null: no checker."""
    check_interval: int | float | None = setting(None, above=0)
    """Steps (a float: epochs) between checks of the answers; always at step 0 and at the end of the run, with a float
    or null also at the end of each iteration of SPIN and online KTO."""
    prompts: int = setting(100, at_least=0)
    """Number of distinct prompts of data.val that are answered and checked: the first ones. With 100
    the accuracy is known to 10 points or less, with 500 (the demo) to 4.5."""
    samples: int = setting(4, at_least=0)
    """Number of completions that are saved at each validation (eval/), and shown by tensorboard and wandb."""


@dataclass(frozen=True)
class PreferenceSettings:
    """What the objectives of kto.py and dpo.py share."""

    beta: float = setting(0.1, above=0)
    """Strength of the pull back to the reference; a larger one keeps the policy closer."""
    average_logps: bool = False
    """Divide log-ratios by the number of scored tokens, in z too."""
    preference_loss_weight: float = setting(1.0, at_least=0)
    """Weight of the preference loss."""
    sft_loss_weight: float = setting(0.0, at_least=0)
    """Weight of the negative log-likelihood of the desirable (chosen) completions."""
    sft_average_logps: bool | None = None
    """Divide that log-likelihood by its number of tokens. Default: as average_logps."""

    @property
    def sft_average(self) -> bool:
        return self.average_logps if self.sft_average_logps is None else self.sft_average_logps

    def validate(self, group: str) -> None:
        both = f"{group}: preference_loss_weight and sft_loss_weight are both 0"
        losses = self.preference_loss_weight, self.sft_loss_weight
        refuse_unless(max(losses) > 0, f"{both}: nothing to learn")


# ---- a run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSettings:
    """Settings shared by all programs. A program's own are a subclass with one more group."""

    model: str = field(metadata=SOURCE)
    """What to start from: a Hugging Face id or folder, a PEFT or litgpt checkpoint folder, a run of
    ours or one of its checkpoints."""
    data: Data
    reference: str | None = path_setting()
    """Another frozen model to compare with, of the same tokenizer. Default: the one we start from."""
    reference_cache: str | None = field(default=None, metadata=FOLDER)
    """A folder that keeps the reference's log-probs, by content of weights, prompt and completion.
    All log-probs that the run needs are computed before its first step, or found there; then the
    reference is released."""
    out_dir: str | None = field(default=None, metadata=RUN)
    """Folder of this run. Default: a new one under out/."""
    resume: str | None = field(default=None, metadata=RUN)
    """auto: from out_dir's newest whole checkpoint, if there is one. Or a checkpoint's folder."""
    seed: int = setting(1, at_least=0, below=2**32)
    """Seeds the order of the examples, adapters, dropout and sampling."""
    deterministic: bool = False
    """Bit-identical reruns on a GPU too, at some cost in speed. On a CPU they always are."""

    accelerator: str = setting("auto", choices=("auto", "cpu", "gpu"))
    """auto, cpu or gpu."""
    devices: int = setting(1, at_least=1, below=2**16)
    """Devices per node. Under torchrun: its number of processes."""
    num_nodes: int = setting(1, at_least=1, below=2**16)
    """Nodes."""
    strategy: str = setting("auto", choices=("auto", "ddp", "fsdp"))
    """auto (one device, else ddp), ddp, or fsdp (FSDP2: weights and optimizer state sharded)."""
    precision: str | None = setting(None, choices=("32-true", "bf16-mixed", "bf16-true", "64-true"))
    """32-true, bf16-mixed, 64-true, or bf16-true (LoRA only: the base in bf16, adapters and AdamW
    in fp32). Default: bf16-mixed on a GPU, 32-true on a CPU."""

    epochs: int = setting(1, at_least=1)
    """Passes over data.train; the smaller of epochs and max_steps ends the run."""
    max_steps: int | None = setting(None, above=0)
    """Optimizer steps."""
    max_time: str | None = None
    """Stop, saved and resumable, after this long: HH:MM:SS or D-HH:MM:SS, in quotes in a YAML file."""
    stop_at: int | None = setting(None, at_least=1)
    """Stop, saved and resumable, after this step; the learning rate's schedule does not change."""
    limit_train: int | float | None = setting(None, above=0)
    """Use this many steps of each epoch; a float is a fraction of it."""
    limit_val: int | float | None = setting(None, above=0)
    """Validate on the first examples only, this many; a float is a fraction of them."""
    batch_size: int = setting(64, at_least=1)
    """Examples per optimizer step over all devices. The only batch size that the gradient depends on."""
    micro_batch_size: int | None = setting(None, above=0)
    """Examples per forward on a device. It changes memory and speed only."""
    micro_batch_tokens: int | None = setting(None, above=0)
    """Tokens per forward instead, also without gradient; a longer example is computed alone. Default:
    16384; on a CPU fewer where they would need more than 4 GB."""
    activation_checkpointing: bool = False
    """Compute blocks again in the backward pass: less memory, a quarter slower."""

    lora: Lora = field(default_factory=Lora)
    optim: Optim = field(default_factory=Optim)
    eval: Eval = field(default_factory=Eval)

    log_interval: int = setting(1, at_least=1)
    """Steps between rows of metrics.csv. A row describes its own step, of all devices."""
    val_interval: int | float | None = setting(1.0, above=0)
    """Steps (a float: epochs) between validations; always at step 0 and at the end of the run, with a float or null
    also at the end of each iteration of SPIN and online KTO."""
    save_interval: int | float | None = setting(1.0, above=0)
    """Steps (a float: epochs) between checkpoints; also at the end of the run and of each iteration of SPIN and
    online KTO, at a new best by keep_best, or when stopped."""
    keep_last: int = setting(2, at_least=1)
    """Number of newest checkpoints to keep."""
    keep_best: str | None = None
    """Also keep the best checkpoint by this column of val.csv: the lowest of kl, of kl/..., and of columns whose
    name ends with loss, the highest of any other."""
    logger: str = setting("csv", choices=("csv", "tensorboard", "wandb"))
    """csv (always written), tensorboard or wandb (WANDB_MODE=offline works)."""
    project: str = "kto"
    """Project name for wandb."""
    progress: bool = True
    """A progress bar on a terminal, a line now and then elsewhere."""

    def validate(self) -> None:
        """Raise BadInput for values that a field does not allow, and for fields that do not go
        together."""
        check_fields(self)
        for name, group in vars(self).items():
            if hasattr(group, "validate"):
                group.validate(name)
        if self.max_time is not None:
            refuse_unless(self.seconds() > 0, "max_time: expected more than 0")
        self._validate_models()
        self._validate_together()

    def _validate_models(self) -> None:
        quantize, fsdp = self.lora.quantize, self.strategy == "fsdp"
        double = self.precision == "64-true"
        refuse_unless(
            self.lora.targets, f"lora.targets: expected some of {', '.join(LORA_TARGETS)}"
        )
        refuse_unless(
            self.lora.rank or not quantize,
            "lora.quantize: a quantised model cannot be trained itself; set lora.rank",
        )
        refuse_unless(
            not (quantize and fsdp),
            f"lora.quantize: {quantize} does not work with strategy fsdp; use ddp",
        )
        refuse_unless(
            not (quantize and double),
            f"lora.quantize: {quantize} does not work with precision 64-true",
        )
        refuse_unless(self.precision != "bf16-true" or self.lora.rank, NO_BF16)
        refuse_unless(
            not (double and fsdp), "precision: 64-true does not work with strategy fsdp; use ddp"
        )
        refuse_unless(
            not (self.optim.name == "adamw8bit" and fsdp),
            "optim.name: adamw8bit does not work with strategy fsdp; use adamw, or ddp",
        )

    def _validate_together(self) -> None:
        optim = self.optim
        refuse_unless(
            optim.min_lr <= optim.lr, f"optim.min_lr: {optim.min_lr} is above optim.lr, {optim.lr}"
        )
        refuse_unless(
            not (self.micro_batch_size and self.micro_batch_tokens),
            "micro_batch_size and micro_batch_tokens: give one, not both",
        )
        refuse_unless(
            self.resume != "auto" or self.out_dir, "resume: auto needs --out_dir, the run's own"
        )
        validated = self.data.val or self.data.split
        refuse_unless(validated or not self.keep_best, "keep_best: needs data.val or data.split")

    def seconds(self) -> float:
        """max_time in seconds."""
        pattern = r"(?:(\d{1,5})-)?(\d{1,6}):(\d\d):(\d\d)"  # D-HH:MM:SS
        m = re.fullmatch(pattern, self.max_time or "", re.ASCII)
        got = printable(self.max_time)
        refuse_unless(m, f"max_time: expected HH:MM:SS or D-HH:MM:SS, got {got}")
        days, hours, minutes, seconds = (int(x or 0) for x in m.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


def most_tokens(cfg: RunSettings, n_layer: int, n_embd: int) -> int | None:
    """Tokens of a micro-batch, at most; None where micro_batch_size counts its examples. On a CPU the
    default is smaller where the activations of so many tokens would take more than 4 GB, at 20 numbers
    of 4 bytes for a token, a layer and a unit of its width."""
    if cfg.micro_batch_tokens or cfg.micro_batch_size:
        return cfg.micro_batch_tokens
    if cfg.accelerator != "cpu":
        return DEFAULT_TOKENS
    tokens = int(CPU_ACTIVATIONS / (80 * n_layer * n_embd)) // 256 * 256
    return min(DEFAULT_TOKENS, max(256, tokens))


# ---- what a resume may change --------------------------------------------------------------------

# How a step is computed: on which devices, in which micro-batches, and where the reference's
# log-probs come from. After a change of one of these a resumed run is the same up to rounding only.
CUT_SETTINGS = {
    "accelerator", "devices", "num_nodes", "strategy",
    "micro_batch_size", "micro_batch_tokens", "reference_cache",
}  # fmt: skip
# What else a resume may change. A change of any other setting would make it another run.
FREE_SETTINGS = CUT_SETTINGS | {
    "resume", "out_dir", "log_interval", "val_interval", "save_interval", "keep_last",
    "logger", "project", "progress", "max_time", "stop_at",
    "eval.samples", "eval.batch_size",
    "eval.check_interval", "eval.cache_gb", "activation_checkpointing",
}  # fmt: skip

# Paths and ids. A resume compares the hashes of their contents, so that the files may have moved; of the setting
# itself it compares only whether it is given.
CONTENT_SETTINGS = {
    "model", "reference", "data.train", "data.val", "data.test", "data.chat_template",
}  # fmt: skip


def flatten(settings, prefix: str = "") -> dict[str, object]:
    """Dotted names and values: of a settings object, of a dict from YAML, or (types in place of
    values) of a settings class."""
    if isinstance(settings, type):
        settings = typing.get_type_hints(settings)
    out = {}
    items = settings if isinstance(settings, dict) else vars(settings)
    for name, value in items.items():
        if isinstance(value, dict) or dataclasses.is_dataclass(value):
            out |= flatten(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out


def changed_settings(old: dict, new: dict) -> tuple[list[str], list[str]]:
    """Compare the flat settings of a saved run with new ones. -> dotted names of the changed
    settings that a resume cannot change, and of the changed ones of CUT_SETTINGS. A setting that
    the saved run does not have counts as changed."""
    changed, kinds = [], flatten(RunSettings)
    for name, value in new.items():
        both_given = name in CONTENT_SETTINGS and None not in (value, old.get(name))
        if name not in old or not both_given and _differ(old[name], value, kinds.get(name)):
            changed.append(name)
    fixed = [name for name in changed if name not in FREE_SETTINGS]
    return fixed, [name for name in changed if name in CUT_SETTINGS]


def _differ(old, new, kind: type | None) -> bool:
    """Whether two values of a setting of this type mean different things."""
    if {int, float} <= set(typing.get_args(kind)):
        # 1 is a step or an example, 1.0 an epoch or all of them
        return (type(old), old) != (type(new), new)
    return old != new
