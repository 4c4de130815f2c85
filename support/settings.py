"""Settings that every program shares. The sentence under a field is its --help."""

import dataclasses
import math
import re
import typing
from dataclasses import dataclass, field
from datetime import timedelta

from support.errors import BadInput

DEFAULT_TOKENS = (
    16384  # per forward, where neither micro_batch_size nor micro_batch_tokens is given
)
LORA_TARGETS = ("query", "key", "value", "projection", "mlp", "head")
CHECKERS = ("none", "demo")
EXPORT_DTYPES = ("source", "float32")
POSITIVE, NOT_NEGATIVE, AT_LEAST_1 = "more than 0", "at least 0", "at least 1"


def refuse_unless(ok: bool, message: str) -> None:
    """BadInput with this message where a condition does not hold."""
    if not ok:
        raise BadInput(message)


@dataclass(frozen=True)
class Data:
    """Which records to learn from, and how they become tokens."""

    train: str
    """Rated or paired records: a .jsonl, .json, .csv or .parquet file, or a Hub id: id, id:split
    or id:config:split."""
    val: str | None = None
    """Records to validate on, in the same forms."""
    test: str | None = None
    """Records evaluated once at the end, with the final weights and with the best ones."""
    split: str | None = None
    """Cut data.train into train,val,test by these parts, e.g. 980,10,10. All ratings of one prompt
    stay together."""
    shuffle: bool = True
    """A new order each epoch, a function of seed and epoch only. False: file order."""
    max_prompt: int | None = None
    """Longest prompt in tokens; what is longer loses its head, BOS stays. Default: 1024, or half
    the context."""
    max_completion: int | None = None
    """Longest completion in tokens; what is longer loses its tail and its EOS. Default: likewise."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template (it wins over one that has)."""
    score_prompt: bool = False
    """Count the prompt's tokens, from the second on, in the log-probs of both completions."""
    extra: str | None = None
    """More fields of a record that a loss or metric may read, numbers or texts: weight,source.
    Every record must have them."""

    @property
    def extra_fields(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in (self.extra or "").split(",") if name.strip())


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685). With rank > 0 the reference is the model with its
    adapters off."""

    rank: int = 0
    """Rank of the adapters; 0 trains every weight."""
    alpha: int = 16
    """The adapters' output is scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout before the adapters. Above 0, policy and reference differ by design, even at step 0."""
    targets: list[str] | str = field(default_factory=lambda: list(LORA_TARGETS[:-1]))
    """Which linear layers get adapters: any of query, key, value, projection, mlp, head; or as PEFT
    names the model's own: q_proj, o_proj, all-linear, ..."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732)."""


@dataclass(frozen=True)
class Optim:
    """AdamW and its learning rate: warmup, constant, then decay to min_lr. Norms, biases and
    embeddings do not decay."""

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


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled from a policy."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_k: int = 0
    """Sample among the k likeliest tokens only; 0 is all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 is all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that are there already, and multiplies the negative
    ones; 1 is none."""
    stop: list[str] = field(default_factory=list)
    """A completion ends before the first of these texts too, not only at EOS."""
    min_new_tokens: int = 0
    """No EOS before so many tokens."""
    max_new_tokens: int | None = None
    """Longest sampled completion. Default: data.max_completion."""
    batch_size: int = 256
    """Prompts answered at once on a device."""

    def validate(self, group: str) -> None:
        low = min(self.temperature, self.top_k, self.min_new_tokens)
        refuse_unless(
            low >= 0 and 0 < self.top_p <= 1,
            f"{group}: temperature, top_k and min_new_tokens are at least 0, top_p is in (0, 1]",
        )
        longest = 1 if self.max_new_tokens is None else self.max_new_tokens
        refuse_unless(
            min(self.batch_size, longest) >= 1,
            f"{group}: batch_size and max_new_tokens are at least 1",
        )
        refuse_unless(
            self.repetition_penalty > 0 and "" not in self.stop,
            f"{group}: repetition_penalty is above 0, a stop text is not empty",
        )


@dataclass(frozen=True)
class Eval(Sampling):
    """Completions sampled from the policy: shown at each validation, and checked before and after
    the run."""

    check: str = "none"
    """Which program says whether an answer is right: none, or demo (the demo's own). One of your
    own is given in code: main(checker=...)."""
    check_interval: int | float | None = None
    """Steps between checks of the answers, a column of val.csv; a float is a fraction of an epoch.
    Also: before the first step and at the end."""
    prompts: int = 500
    """At most this many distinct prompts of data.val are answered and checked, the first ones."""
    samples: int = 4
    """So many completions are shown and saved at each validation; 0 turns it off."""

    def validate(self, group: str = "eval") -> None:
        super().validate(group)
        expected = f"{group}.check: expected {' or '.join(CHECKERS)}, got {self.check}"
        refuse_unless(self.check in CHECKERS, expected)
        refuse_unless(
            min(self.prompts, self.samples) >= 0, f"{group}: prompts and samples are at least 0"
        )


@dataclass(frozen=True)
class Run:
    """Settings shared by all programs."""

    model: str
    """What to start from: a Hugging Face id or folder, a PEFT or litgpt checkpoint folder, a run of
    ours or one of its checkpoints."""
    data: Data
    reference: str | None = None
    """Another frozen model to compare with (same tokenizer and vocabulary). Default: the model we
    start from."""
    reference_cache: str | None = None
    """A folder that keeps the reference's log-probs, by content of weights, prompt and completion.
    All that the run will need is computed before its first step, or found there, and the reference
    is released."""
    out_dir: str | None = None
    """Folder of this run. Default: a fresh one under out/."""
    resume: str | None = None
    """auto: go on from out_dir's newest whole checkpoint, or start if there is none. Or a
    checkpoint's folder."""
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
    """auto (one device, else ddp), ddp, or fsdp (FSDP2: weights, gradients and optimizer state
    sharded)."""
    precision: str | None = None
    """32-true, bf16-mixed, 64-true, or bf16-true (LoRA only: the base in bf16, adapters and AdamW
    in fp32). Default: bf16-mixed on a GPU, 32-true on a CPU."""

    epochs: int = 1
    """Passes over data.train; the smaller of epochs and max_steps ends the run."""
    max_steps: int | None = None
    """Optimizer steps."""
    max_time: str | None = None
    """Stop, saved and resumable, after this long: HH:MM:SS or D-HH:MM:SS, in quotes in a YAML file."""
    stop_at: int | None = None
    """Stop, saved and resumable, after this step; the learning rate's schedule does not change."""
    limit_train: int | float | None = None
    """Use so many steps of each epoch; a float is a fraction of it."""
    limit_val: int | float | None = None
    """Validate on the first so many examples; a float is a fraction of them."""
    batch_size: int = 64
    """Examples per optimizer step over all devices. The only batch that the result depends on."""
    micro_batch_size: int | None = None
    """Examples per forward on a device. Memory and speed only."""
    micro_batch_tokens: int | None = None
    """Prompt + completion tokens per forward instead; an over-long example goes alone. Given
    neither: 16384 tokens."""
    no_grad_tokens: int | None = None
    """The same budget for the no-gradient pass, which needs less memory. Default: twice the other."""
    activation_checkpointing: bool = False
    """Compute each block again in the backward pass instead of keeping its activations: less
    memory, a quarter slower."""

    lora: Lora = field(default_factory=Lora)
    optim: Optim = field(default_factory=Optim)
    eval: Eval = field(default_factory=Eval)

    log_interval: int = 1
    """Steps between lines of metrics.csv. A line describes its own step, over all micro-batches
    and devices."""
    val_interval: int | float | None = 1.0
    """Steps between validations; a float is a fraction of an epoch. Also: before the first step
    and at the end."""
    save_interval: int | float | None = 1.0
    """Steps between checkpoints; a float is a fraction of an epoch. Also saved: at the end, or
    when stopped."""
    keep_last: int = 2
    """Checkpoints to keep."""
    keep_best: str | None = None
    """Keep the checkpoint with the best value of this val.csv column too: loss and kl low, all
    others high."""
    export_dtype: str = "source"
    """Of the exported weights: source (as the model that we start from), or float32."""
    examples_at: int | None = None
    """Write a table of this step's examples, largest loss first: where each stands, its texts,
    label, length and every column of the loss."""
    debug: bool = False
    """Let exceptions through to pdb, and skip the start check, validation and progress: the first
    breakpoint in a loss is then the first training micro-batch."""
    logger: str = "csv"
    """csv (always written), tensorboard or wandb (WANDB_MODE=offline works)."""
    project: str = "kto"
    """Project name for wandb."""
    progress: bool = True
    """A progress bar on a terminal, a line now and then elsewhere."""

    def validate(self) -> None:
        """Raise BadInput for settings that cannot be meant."""
        values = flat(self)
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise BadInput(f"{name}: expected a finite number, got {value}")
        for name, choices in CHOICES.items():
            allowed = ", ".join(c for c in choices if c)
            refuse_unless(
                values[name] in choices, f"{name}: expected {allowed}; got {values[name]}"
            )
        for names, lowest, words in RANGES:
            for name in names.split():
                value = values[name]
                if value is not None and not (value > 0 if words == POSITIVE else value >= lowest):
                    raise BadInput(f"{name}: expected {words}, got {value}")
        for name, top in UPPER.items():
            refuse_unless(
                values[name] < top, f"{name}: expected less than {top}, got {values[name]}"
            )
        self._validate_together()
        self.eval.validate()

    def _validate_together(self) -> None:
        lr, targets = self.optim.lr, ", ".join(LORA_TARGETS)
        for ok, message in (
            (self.optim.min_lr <= lr, f"optim.min_lr: {self.optim.min_lr} is above optim.lr, {lr}"),
            (
                not (self.micro_batch_size and self.micro_batch_tokens),
                "micro_batch_size and micro_batch_tokens: give one, not both",
            ),
            (self.lora.targets, f"lora.targets: expected some of {targets}; got none"),
            (
                self.precision != "bf16-true" or self.lora.rank,
                "precision: bf16-true loses AdamW's updates in full fine-tuning (a step of 1e-6 "
                "moves no weight of 0.02); use bf16-mixed, or LoRA",
            ),
            (
                self.precision != "64-true" or self.strategy != "fsdp",
                "precision: 64-true does not work with strategy fsdp; use ddp",
            ),
            (
                self.optim.name != "adamw8bit" or self.strategy != "fsdp",
                "optim.name: adamw8bit does not work with strategy fsdp; use adamw, or ddp",
            ),
            (
                self.resume != "auto" or self.out_dir,
                "resume: auto needs --out_dir, the run to go on with",
            ),
            (self.max_time is None or self.seconds(), "max_time: expected more than 0"),
            (
                not self.keep_best or self.data.val or self.data.split,
                "keep_best: needs data.val or data.split",
            ),
        ):
            refuse_unless(ok, message)

    def seconds(self) -> float:
        """max_time in seconds."""
        m = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", self.max_time or "", re.ASCII)
        refuse_unless(m, f"max_time: expected HH:MM:SS or D-HH:MM:SS, got {self.max_time}")
        days, hours, minutes, seconds = (int(x or 0) for x in m.groups())
        span = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        return span.total_seconds()


@dataclass(frozen=True)
class Preference:
    """What the objectives of kto.py and dpo.py share."""

    beta: float = 0.1
    """Strength of the pull back to the reference; larger keeps the policy closer."""
    average_logps: bool = False
    """Divide log-probabilities by the number of scored tokens, in z too."""
    preference_loss_weight: float = 1.0
    """Weight of the loss itself."""
    sft_loss_weight: float = 0.0
    """Weight of the negative log-likelihood of the desirable (chosen) completions."""
    sft_average_logps: bool | None = None
    """Divide that by its tokens. Default: as average_logps."""

    @property
    def sft_average(self) -> bool:
        own = self.sft_average_logps
        return self.average_logps if own is None else own

    def validate(self, group: str) -> None:
        losses = self.preference_loss_weight, self.sft_loss_weight
        refuse_unless(self.beta > 0, f"{group}.beta: expected more than 0, got {self.beta}")
        both = f"{group}: preference_loss_weight and sft_loss_weight are"
        refuse_unless(min(losses) >= 0, f"{both} at least 0")
        refuse_unless(max(losses) > 0, f"{both} both 0: nothing to learn")


CHOICES = {
    "strategy": ("auto", "ddp", "fsdp"),
    "precision": (None, "32-true", "bf16-mixed", "bf16-true", "64-true"),
    "accelerator": ("auto", "cpu", "gpu"),
    "export_dtype": EXPORT_DTYPES,
    "logger": ("csv", "tensorboard", "wandb"),
    "optim.name": ("adamw", "adamw8bit"),
    "optim.schedule": ("cosine", "linear", "constant"),
}
RANGES = (
    (
        "batch_size epochs devices num_nodes log_interval keep_last lora.alpha data.max_prompt "
        "data.max_completion examples_at stop_at",
        1,
        AT_LEAST_1,
    ),
    (
        "micro_batch_size micro_batch_tokens no_grad_tokens max_steps limit_train limit_val "
        "val_interval save_interval eval.check_interval optim.eps",
        0,
        POSITIVE,
    ),
    (
        "lora.rank lora.dropout optim.lr optim.min_lr optim.warmup optim.constant "
        "optim.weight_decay optim.beta1 optim.beta2 optim.clip seed",
        0,
        NOT_NEGATIVE,
    ),
)
UPPER = {"lora.dropout": 1, "optim.beta1": 1, "optim.beta2": 1, "seed": 2**32}

# How a step is cut: a resume may change it, and is then equal to rounding only
CUT = {
    "accelerator", "devices", "num_nodes", "strategy", "micro_batch_size", "micro_batch_tokens",
    "no_grad_tokens", "reference_cache",
}  # fmt: skip
# What else a resume may change; anything beyond would make it another run
FREE = CUT | {
    "resume", "out_dir", "log_interval", "val_interval", "save_interval", "keep_last", "logger",
    "project", "progress", "max_time", "stop_at", "examples_at", "debug", "eval.samples",
    "eval.batch_size", "eval.check_interval", "activation_checkpointing", "export_dtype",
}  # fmt: skip


def flat(settings, prefix: str = "") -> dict[str, object]:
    """Dotted names and values, of a dataclass or (types for values) of a dataclass type."""
    names, out = [f.name for f in dataclasses.fields(settings)], {}
    hints = typing.get_type_hints(settings) if isinstance(settings, type) else None
    for name in names:
        value = hints[name] if hints else getattr(settings, name)
        if dataclasses.is_dataclass(value):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out


def changes(old: dict, new: dict) -> tuple[list[str], list[str]]:
    """(changed settings that a resume cannot change, changed settings of the cut), by dotted name.
    A setting that the old run did not have is a change too."""
    moved = [k for k in new if k not in old or old[k] != new[k]]
    return [k for k in moved if k not in FREE], [k for k in moved if k in CUT]
