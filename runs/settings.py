"""Settings that every program shares. The sentence under a field is its --help."""

import dataclasses
import math
import re
import typing
from dataclasses import dataclass, field

from runs.errors import BadInput, printable

DEFAULT_TOKENS = 16384  # per forward, given neither micro_batch_size nor micro_batch_tokens
LORA_TARGETS = ("query", "key", "value", "projection", "mlp", "head")
EXPORT_DTYPES = ("source", "float32")


def refuse_unless(ok: bool, message: str) -> None:
    """BadInput with this message where a condition does not hold."""
    if not ok:
        raise BadInput(message)


def refuse_out_of_range(values: dict[str, object]) -> None:
    """BadInput where a number, by the last part of its dotted name, cannot be meant."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        finite = f"{name}: expected a finite number, got {value}"
        refuse_unless(not isinstance(value, float) or math.isfinite(value), finite)
        leaf = name.split(".")[-1]
        for words, holds, names in RANGES:
            if leaf in names.split():
                refuse_unless(holds(value), f"{name}: expected {words}, got {printable(value)}")
        top = TOP.get(leaf, 1e30 if isinstance(value, float) else 10**12)  # float32 ends at 3e38
        less = f"{name}: expected less than {top}, got {printable(value)}"
        refuse_unless(abs(value) < top, less)


@dataclass(frozen=True)
class Data:
    """Which records to learn from, and how they become tokens."""

    train: str
    """Rated or paired records: a .jsonl, .json, .csv, .tsv (also .gz) or .parquet file, a folder of
    save_to_disk or a Hub id (id, id:split or id:config:split). Several by commas, patterns
    (more/*.jsonl), shares of a mix: a.jsonl:0.7,b.jsonl:0.3."""
    val: str | None = None
    """Records to validate on, in the same forms."""
    test: str | None = None
    """Records evaluated once at the end, with the final weights and with the best ones."""
    split: str | None = None
    """Cut data.train into train,val,test, e.g. 980,10,10; a prompt's ratings stay together."""
    shuffle: bool = True
    """A new order each epoch, a function of seed and epoch only. False: file order."""
    max_prompt: int | None = None
    """Longest prompt in tokens; a longer one loses its head. Default: 1024, or half the context."""
    max_completion: int | None = None
    """Longest completion in tokens; what is longer loses its tail and its EOS. Default: likewise."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template (it wins over one that has)."""
    score_prompt: bool = False
    """Count the prompt's tokens, from the second on, in the log-probs of both completions."""
    date: str | None = None
    """Today, for chat templates that ask for it: 2026-01-31. The real day would make runs differ."""
    columns: str | None = None
    """Where the source's names are not ours: prompt=question,label=good."""
    score_turns: str = "last"
    """last: of a completion (or dialogue) of several turns, the last is scored. all: each of the
    assistant's turns is an example of its own."""
    cache: str = "~/.cache/kto"
    """Folder for the token ids of large files, by content; an empty text is none."""
    extra: str | None = None
    """More fields, that every record must have, for a loss or metric to read: weight,source."""

    @property
    def extra_fields(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in (self.extra or "").split(",") if name.strip())


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685). The reference is then the model with them off."""

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
    base: str = ""
    """Hold the frozen matrices of all blocks in nf4 or int8 (QLoRA, by bitsandbytes); they are
    exported as they were. Default: as they are."""


@dataclass(frozen=True)
class Optim:
    """AdamW: warmup, constant, decay to min_lr. Norms, biases and embeddings do not decay."""

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
    """Divides positive logits of tokens that are there, multiplies negative ones; 1 is none."""
    stop: list[str] = field(default_factory=list)
    """A completion ends before the first of these texts too, not only at EOS."""
    min_new_tokens: int = 0
    """No EOS before so many tokens."""
    max_new_tokens: int | None = None
    """Longest sampled completion. Default: data.max_completion."""
    batch_size: int = 256
    """Prompts answered at once on a device."""
    cache_gb: float | None = None
    """Memory for their keys and values on a device; what needs more is answered in waves. Default:
    half of what is free on a GPU (to a power of two), 8 on a CPU."""

    def validate(self, group: str) -> None:
        refuse_out_of_range({f"{group}.{k}": v for k, v in flatten(self).items()})
        refuse_unless("" not in self.stop, f"{group}.stop: a stop text is not empty")


@dataclass(frozen=True)
class Eval(Sampling):
    """Completions of the policy: shown at each validation, checked before and after the run."""

    check: str = "none"
    """What says if an answer is right: none, or demo's; your own by code: main(checker=...)."""
    check_interval: int | float | None = None
    """Steps (a float: epochs) between checks of the answers; also at step 0 and at the end."""
    prompts: int = 500
    """At most this many distinct prompts of data.val are answered and checked, the first ones."""
    samples: int = 4
    """So many completions are shown and saved at each validation; 0 turns it off."""


@dataclass(frozen=True)
class RunSettings:
    """Settings shared by all programs."""

    model: str
    """What to start from: a Hugging Face id or folder, a PEFT or litgpt checkpoint folder, a run of
    ours or one of its checkpoints."""
    data: Data
    reference: str | None = None
    """Another frozen model to compare with, of the same tokenizer. Default: the one we start from."""
    reference_cache: str | None = None
    """A folder that keeps the reference's log-probs, by content of weights, prompt and completion.
    All that the run will need is computed before its first step, or found there, and the reference
    is released."""
    out_dir: str | None = None
    """Folder of this run. Default: a fresh one under out/."""
    resume: str | None = None
    """auto: from out_dir's newest whole checkpoint, if there is one. Or a checkpoint's folder."""
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
    """auto (one device, else ddp), ddp, or fsdp (FSDP2: weights and optimizer state sharded)."""
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
    """Tokens per forward instead; an over-long example goes alone. Given neither: 16384."""
    no_grad_tokens: int | None = None
    """The same budget for the no-gradient pass, which needs less memory. Default: twice the other."""
    activation_checkpointing: bool = False
    """Compute blocks again in the backward pass: less memory, a quarter slower."""

    lora: Lora = field(default_factory=Lora)
    optim: Optim = field(default_factory=Optim)
    eval: Eval = field(default_factory=Eval)

    log_interval: int = 1
    """Steps between lines of metrics.csv. A line describes its own step, of all devices."""
    val_interval: int | float | None = 1.0
    """Steps (a float: epochs) between validations; also at step 0 and at the end."""
    save_interval: int | float | None = 1.0
    """Steps (a float: epochs) between checkpoints; also at the end, or when stopped."""
    keep_last: int = 2
    """Checkpoints to keep."""
    keep_best: str | None = None
    """Keep the best by this column of val.csv too: loss and kl are low, all others high."""
    export_dtype: str = "source"
    """Of the exported weights: source (as the model that we start from), or float32."""
    examples_at: int | None = None
    """Write a table of this step's examples with their columns, largest loss first."""
    debug: bool = False
    """Let exceptions through to pdb, and skip the start check, validation and progress: the first
    breakpoint in a loss is then the first training micro-batch."""
    estimate: bool = False
    """Print how much memory a device would need, from config.json and these settings alone, and end.
    It is of a GPU, present or not, unless accelerator is cpu."""
    estimate_gb: float = 80.0
    """Memory of a device, for what fits it."""
    logger: str = "csv"
    """csv (always written), tensorboard or wandb (WANDB_MODE=offline works)."""
    project: str = "kto"
    """Project name for wandb."""
    progress: bool = True
    """A progress bar on a terminal, a line now and then elsewhere."""

    def validate(self) -> None:
        """Raise BadInput for settings that cannot be meant."""
        values = flatten(self)
        for name, choices in CHOICES.items():
            allowed, value = ", ".join(c for c in choices if c), values[name]
            expected = f"{name}: expected {allowed}; got {printable(value)}"
            refuse_unless(value in choices, expected)
        refuse_out_of_range(values)
        for name in PATHS.split():
            text = values[name]
            plain = text is None or text and not re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text)
            expected = f"{name}: expected a path in UTF-8 or an id"  # safetensors knows no other
            refuse_unless(plain, f"{expected}, got '{printable(text)}'")
        self._validate_together()
        self.eval.validate("eval")

    def _validate_together(self) -> None:
        o, two = self.optim, "does not work with strategy fsdp; use"
        fsdp, validated = self.strategy == "fsdp", self.data.val or self.data.split
        both = self.micro_batch_size and self.micro_batch_tokens
        base, double = self.lora.base, self.precision == "64-true"
        lost = self.resume == "auto" and not self.out_dir
        targets = f"lora.targets: expected some of {', '.join(LORA_TARGETS)}; got none"
        for wrong, message in (
            (o.min_lr > o.lr, f"optim.min_lr: {o.min_lr} is above optim.lr, {o.lr}"),
            (both, "micro_batch_size and micro_batch_tokens: give one, not both"),
            (not self.lora.targets, targets),
            (base and not self.lora.rank, "lora.base: needs lora.rank: it stays frozen"),
            (base and fsdp, f"lora.base: {base} {two} ddp"),
            (base and double, f"lora.base: {base} does not work with precision 64-true"),
            (self.precision == "bf16-true" and not self.lora.rank, NO_BF16),
            (double and fsdp, f"precision: 64-true {two} ddp"),
            (o.name == "adamw8bit" and fsdp, f"optim.name: adamw8bit {two} adamw, or ddp"),
            (lost, "resume: auto needs --out_dir, the run's own"),
            (self.max_time is not None and not self.seconds(), "max_time: expected more than 0"),
            (self.keep_best and not validated, "keep_best: needs data.val or data.split"),
        ):
            refuse_unless(not wrong, message)

    def seconds(self) -> float:
        """max_time in seconds."""
        m = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,6}):(\d\d):(\d\d)", self.max_time or "", re.ASCII)
        expected = "max_time: expected HH:MM:SS or D-HH:MM:SS"
        refuse_unless(m, f"{expected}, got {printable(self.max_time)}")
        days, hours, minutes, seconds = (int(x or 0) for x in m.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


@dataclass(frozen=True)
class PreferenceSettings:
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
        both = f"{group}: preference_loss_weight and sft_loss_weight are both 0"
        losses = self.preference_loss_weight, self.sft_loss_weight
        refuse_unless(max(losses) > 0, f"{both}: nothing to learn")


NO_BF16 = """precision: bf16-true loses AdamW's updates in full fine-tuning (a step of 1e-6 moves no \
weight of 0.02); use bf16-mixed, or LoRA"""
CHOICES = {
    "strategy": ("auto", "ddp", "fsdp"),
    "precision": (None, "32-true", "bf16-mixed", "bf16-true", "64-true"),
    "accelerator": ("auto", "cpu", "gpu"),
    "export_dtype": EXPORT_DTYPES,
    "eval.check": ("none", "demo"),
    "logger": ("csv", "tensorboard", "wandb"),
    "optim.name": ("adamw", "adamw8bit"),
    "lora.base": ("", "nf4", "int8"),
    "optim.schedule": ("cosine", "linear", "constant"),
}
RANGES = (
    ("at least 1", lambda x: x >= 1, "batch_size epochs devices num_nodes log_interval keep_last "
     "alpha max_prompt max_completion examples_at stop_at max_new_tokens"),
    ("more than 0", lambda x: x > 0, "micro_batch_size micro_batch_tokens no_grad_tokens max_steps "
     "limit_train limit_val val_interval save_interval check_interval eps top_p beta "
     "repetition_penalty cache_gb estimate_gb"),
    ("at least 0", lambda x: x >= 0, "rank dropout lr min_lr warmup constant weight_decay beta1 "
     "beta2 clip seed temperature top_k min_new_tokens prompts samples preference_loss_weight "
     "sft_loss_weight"),
    ("at most 1", lambda x: x <= 1, "top_p"),
)  # fmt: skip
TOP = {"dropout": 1, "beta1": 1, "beta2": 1, "seed": 2**32, "rank": 2**13, "alpha": 2**31}
TOP |= {"max_new_tokens": 2**24, "devices": 2**16, "num_nodes": 2**16}
PATHS = "model reference reference_cache out_dir resume data.train data.val data.test"

# Of --help: a section's title, its sentence, its settings; what is in none is the algorithm's own
SECTIONS = (
    ("model", "What is trained, and what it is compared with.",
     "model reference reference_cache lora"),
    ("data", "Which records, and how they become tokens.", "data"),
    ("step", "How long and how fast. Micro-batches are a matter of memory and speed: they never "
     "change the numbers.",
     "epochs max_steps max_time stop_at limit_train batch_size micro_batch_size "
     "micro_batch_tokens no_grad_tokens activation_checkpointing optim seed"),
    ("precision and devices", "The same run on a CPU, one GPU or many.",
     "accelerator devices num_nodes strategy precision deterministic estimate estimate_gb"),
    ("checkpoints", "Where a run lies, goes on and ends.",
     "out_dir resume save_interval keep_last keep_best export_dtype"),
    ("evaluation and logging", "What is measured, shown and written.",
     "val_interval limit_val eval log_interval logger project progress examples_at debug"),
)  # fmt: skip

# How a step is cut: a resume may change it, and is then equal to rounding only
CUT = """accelerator devices num_nodes strategy micro_batch_size micro_batch_tokens no_grad_tokens
reference_cache"""
# What else a resume may change; anything beyond would make it another run
FREE = """resume out_dir log_interval val_interval save_interval keep_last logger project progress
max_time stop_at examples_at debug estimate estimate_gb export_dtype data.cache eval.samples
eval.batch_size eval.check_interval eval.cache_gb activation_checkpointing"""
CUT, FREE = set(CUT.split()), set(f"{CUT} {FREE}".split())


def flatten(settings, prefix: str = "") -> dict[str, object]:
    """Dotted names and values: of settings, of what YAML sets, or (types for values) of a class."""
    if isinstance(settings, type):
        settings = typing.get_type_hints(settings)
    out = {}
    for name, value in (settings if isinstance(settings, dict) else vars(settings)).items():
        if isinstance(value, dict) or dataclasses.is_dataclass(value):
            out |= flatten(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out


def changed_settings(old: dict, new: dict) -> tuple[list[str], list[str]]:
    """(changed settings that a resume cannot change, changed settings of the cut), by dotted name.
    A setting that the old run did not have is a change too."""
    moved = [k for k in new if k not in old or old[k] != new[k]]
    return [k for k in moved if k not in FREE], [k for k in moved if k in CUT]


def with_limits(d: Data, context: int) -> Data:
    """max_prompt and max_completion filled in, so that both fit the model's context."""
    if d.score_turns not in ("last", "all"):
        raise BadInput(f"data.score_turns: expected last or all, got {d.score_turns}")
    longest = d.max_prompt or max(1, min(1024, context // 2, context - (d.max_completion or 1)))
    answer = d.max_completion or min(1024, context - longest)
    if longest + answer > context or answer < 1:
        both = f"{longest} + data.max_completion {d.max_completion or 'at least 1'}"
        raise BadInput(f"data.max_prompt {both} exceed the context of {context}")
    return dataclasses.replace(d, max_prompt=longest, max_completion=answer)
