"""From settings to a Run, in the order in which it happens; and what may happen to a Run later.

Reading order: Run (what lives during a run), setup (how it is made), then the parts of setup in the
order of their calls. Nobody needs this file to change an algorithm.
"""

import copy
import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from torch import nn

from data import Budget, most_tokens
from evaluate import Evaluator
from hub import Source, context_of, export, find_model, read_config, read_json
from load import load_model, put_on, shard_module, shard_over_ranks
from lora import (
    add_adapters,
    gather_adapters,
    merged_weights,
    plain_name,
    quantize_base,
    reset_adapters,
    write_peft,
)
from records.examples import (
    Example,
    absolute_sources,
    examples_hash,
    load_examples,
    load_splits,
    with_limits,
)
from records.tokenizer import Tokenizer
from reference import CachedReference, Reference, freeze
from runs import console
from runs.checkpoint import (
    RunState,
    begin_run,
    checkpoint_folder,
    find_checkpoint,
    load_checkpoint,
    publish_folder,
    read_settings,
    read_state,
    save_checkpoint,
    take_folder,
    unlock_folder,
)
from runs.console import say
from runs.devices import (
    Stop,
    all_reduce,
    launch,
    leave_process_group,
    on_rank_0,
    resolve_devices,
    set_weights,
)
from runs.logger import Logger, Throughput
from runs.optimizer import make_optimizer
from runs.settings import RunSettings, find_path, refuse_unless

# ---- what lives during a run ---------------------------------------------------------------------


@dataclass
class Run:
    """All that lives during a run: a sentence each, and who may change it."""

    cfg: RunSettings
    """The settings, resolved and frozen."""
    fabric: object
    """Fabric, launched: this process's rank and device. Never changed."""
    budget: Budget
    """How a step is split into micro-batches. Never changed."""
    source: Source
    """Where the model lies that the run starts from. Never changed."""
    tokenizer: Tokenizer
    """Never changed."""
    examples: dict[str, Sequence[Example]]
    """train, val and test, as token ids. Never changed."""
    objective: object
    """The algorithm (train.Objective). Changed by use_objective."""
    policy: nn.Module
    """The model that learns, as Fabric wraps it; in eval mode but for a step's forward and backward. Its
    weights are changed by the optimizer's step and by new_reference, which merges adapters into the
    base; by load, at a resume and at the end."""
    reference: Reference | None
    """The frozen model that the policy is compared with; None if the objective needs none. Its weights
    are changed by new_reference."""
    optimizer: object
    """As Fabric wraps it. Its state is cleared by new_reference where adapters begin anew."""
    state: RunState
    """What a checkpoint saves besides tensors. `step` is changed by Trainer.optimizer_step, the best step
    and `unvalidated` by Trainer.evaluate, the iteration's fields by begin_iteration,
    `reference_has_moved` by new_reference, `hashes` by load_records, all else by save."""
    folder: Path
    """The run's own folder. Never changed."""
    logger: Logger
    """Writes metrics.csv and val.csv, and to the terminal."""
    evaluator: Evaluator
    """Samples answers to held-out prompts and asks the checker."""
    throughput: Throughput
    """Counts tokens and FLOPs between two rows of metrics.csv."""
    stop: Stop
    """Whether a signal or the time limit asks the run to end."""
    last_step: int = 0
    """The step with which the whole run ends. Changed by Trainer.fit and rollout.iterations."""
    rollout: Callable | None = None
    """An engine that answers prompts in place of our sampler (see rollout.py)."""
    saved_step: int = 0
    """The step of the last checkpoint in the run's own folder. Changed by save."""
    reference_step: int = 0
    """The last step after which policy and reference were equal, in this process. Changed by
    new_reference."""

    # ---- what an outer loop may change

    def use_objective(self, objective) -> None:
        """Train with another objective from the next fit on. It takes over what the last one remembers."""
        vars(objective).update(self.objective.state_dict())
        self.objective = objective

    def load_records(self, path) -> list[Example]:
        """Another file's records as examples, as data.train's are read. A resume refuses a file that has
        changed. Raises BadInput."""
        examples, _ = load_examples(
            str(path), self.tokenizer, self.objective.records, self.cfg.data
        )
        name, new = f"records of {path}", examples_hash({"": examples})
        is_same = self.state.hashes.setdefault(name, new) == new
        refuse_unless(is_same, f"resume: {name}: not what this run began with")
        return examples

    def begin_iteration(self, i: int, moving_reference: bool) -> None:
        """Begin iteration i of an outer loop (SPIN, online KTO). With a moving reference the
        policy, as it is now, becomes the reference."""
        self.state.iteration = i
        if moving_reference:
            self.new_reference()
        weights = self.merged_weights()
        self.state.started_from = on_rank_0(self.fabric, lambda: weights_hash(weights))

    def new_reference(self, share: float = 1.0) -> None:
        """The policy as it is becomes the reference; with a share below 1 the reference moves by that
        share towards it. LoRA's adapters are merged into the base, which is their reference; then they
        begin anew, and with them the optimizer's state. A collective."""
        frozen, weights = self.reference.frozen, self.merged_weights()
        if frozen:
            set_weights(frozen, weights, share)
        else:
            assert share == 1 and self.cfg.precision != "bf16-true", (
                "new_reference: adapters are merged as a whole, and into a float32 base"
            )
            self.set_base(weights)
            reset_adapters(self.policy.module, self.cfg.seed + 7919 * self.state.iteration)
            self.optimizer.optimizer.state.clear()
        # at step 0 they are equal already, unless the reference is another model
        self.state.reference_has_moved |= bool(self.state.step or self.cfg.reference)
        if share == 1:
            self.reference_step = self.state.step

    def set_base(self, weights: dict[str, torch.Tensor]) -> None:
        """Put weights by their plain names into the policy; its adapters stay."""
        names = self.policy.module.unique_parameters()
        set_weights(self.policy, {name: weights.get(plain_name(name)) for name in names})

    def first_weights(self, of_reference: bool = False) -> dict[str, torch.Tensor]:
        """The weights that the run, or its reference, started from, read again."""
        is_another = of_reference and self.cfg.reference
        source = find_model(self.cfg.reference) if is_another else self.source
        return load_model(source, dtype=torch.get_default_dtype()).unique_parameters()

    def merged_weights(self) -> dict[str, torch.Tensor]:
        """The policy's weights by their plain names, whole, with adapters merged in and without the
        objective's module; of a sharded policy rank 0 alone has their values. A collective."""
        # a quantised base holds rounded numbers: take the source's
        base = self.first_weights() if self.cfg.lora.quantize else None
        return merged_weights(self.policy.module, base)

    def publish_policy(self) -> Path:
        """The policy as it is now, as a Hugging Face folder. A collective."""
        folder = self.folder / "iterations" / "policy"
        write = partial(export, self.source, self.policy.module.rows, self.merged_weights())
        publish_folder(self.fabric, write, folder)
        return folder

    # ---- checkpoints, and the end

    def save(self) -> None:
        """Write a checkpoint of the step that was just done, unless there is one, and remove old ones."""
        if self.saved_step == self.state.step:
            return
        self.state.objective = saved_state(self.objective)
        save_checkpoint(self)
        self.saved_step = self.state.step

    def save_and_say_how_to_go_on(self) -> None:
        """For a run that stops before its end."""
        self.save()
        say(
            f"stopped by {self.stop.reason} at step {self.state.step} of {self.last_step}; go on with"
        )
        settings = str(self.folder / "settings.yaml")
        say(f"  {shlex.join(['python', sys.argv[0], '--config', settings, '--resume', 'auto'])}")

    def load(self, folder: Path) -> None:
        """Put a checkpoint's tensors in place, and what the objective remembers."""
        saved = read_state(folder)
        vars(self.objective).update(saved.objective)
        if self.state.reference_has_moved and not saved.reference_has_moved:
            if self.reference.frozen:
                set_weights(self.reference.frozen, self.first_weights(of_reference=True))
            else:  # the checkpoint's adapters were trained on the first base
                self.set_base(self.first_weights())
        load_checkpoint(self, folder)

    def export(self, name: str, step: int) -> None:
        """Make the folder `name`, final or best, of the checkpoint of this step. A collective."""
        # not the base that the checkpoint's settings name: the model's folder may be elsewhere now
        source = Source(checkpoint_folder(self.folder, step), self.source)
        publish_folder(self.fabric, partial(export_checkpoint, source), self.folder / name)

    def export_adapters(self) -> None:
        """Write final_adapter, in PEFT's format, if a model on disk is the base of the run's adapters and
        of those of the PEFT folders that it started from. A collective."""
        model, source = self.policy.module, self.source
        base = self.cfg.model  # its path or id
        while source.base and (file := source.folder / "adapter_config.json").exists():
            source, base = source.base, read_json(file)["base_model_name_or_path"]
        # a frozen reference moves without the base
        base_has_moved = self.state.reference_has_moved and not self.reference.frozen
        if source.base or base_has_moved:
            return say("no final_adapter: PEFT needs a folder of its base, and no folder holds it")
        if find_path(base).exists():
            base = str(source.root.resolve())
        write = partial(write_peft, gather_adapters(model), model, self.source, base, self.cfg.lora)
        publish_folder(self.fabric, write, self.folder / "final_adapter")

    def close(self, failed: bool) -> None:
        """Close the files and, unless the run has failed, end the processes together."""
        self.logger.close()
        unlock_folder(self.folder)
        self.stop.close()
        if not failed:
            self.policy = self.reference = self.optimizer = self.evaluator = None
            leave_process_group(self.fabric)


# ---- how it is made ------------------------------------------------------------------------------


def setup(cfg: RunSettings, objective, checker=None, optimizer=None, rollout=None) -> Run:
    """Make a Run of the settings: refuse what cannot work, read, launch, load, resume.

    checker: judges answers (evaluate.Checker). optimizer: a function in place of make_optimizer. rollout:
    an engine that answers prompts (see rollout.py). Raises BadInput, Failed.
    """
    console.shows_progress = cfg.progress
    program = Path(sys.argv[0])
    out = Path(cfg.out_dir or f"out/{program.stem}-{datetime.now():%Y%m%d-%H%M%S-%f}").resolve()
    find_checkpoint(out, cfg.resume)  # refuses a folder that holds another run
    objective.check()
    kind, by_token = type(objective).__name__, objective.by_token
    for name in ("reference", "reference_cache"):
        refuse_unless(
            objective.needs_reference or not getattr(cfg, name), f"{name}: {kind} has no reference"
        )
    refuse_unless(
        not (by_token and cfg.reference_cache),
        f"reference_cache: {kind} takes log-probs of tokens, and the cache has only their sums",
    )
    refuse_unless(
        not (cfg.data.score_prompt and (by_token or objective.overrides("make_module"))),
        f"data.score_prompt: {kind} takes the tokens of a completion, not of its prompt",
    )
    refuse_unless(
        cfg.batch_size > 1
        or not objective.needs_mismatched_pairs
        or objective.overrides("mismatched_pairs"),
        f"batch_size: {kind} needs at least 2: a mismatched pair takes another's completion",
    )

    # the model's folder and its tokenizer
    source = find_model(cfg.model)
    config = read_config(source).get_text_config()
    size = config.num_hidden_layers, config.hidden_size
    tokenizer = Tokenizer(source, cfg.data.chat_template, cfg.data.date)
    data = with_limits(cfg.data, context_of(config))
    data = with_absolute_paths(data, "train", "val", "test", "chat_template")
    cfg = replace(cfg, data=data, **resolve_devices(cfg, *size))
    cfg = with_absolute_paths(cfg, "model", "reference")

    # the records
    examples = load_splits(cfg.data, tokenizer, objective.records)
    for example in sum(examples.values(), []):
        # ids that no record has do not count: Gemma 3 1B's tokenizer has one more, for images
        largest = max(ids.max() for ids in (example.prompt, *example.completions))
        refuse_unless(
            largest < config.vocab_size,
            f"{example.where}: token: id {largest}, but the embedding of {cfg.model} has "
            f"{config.vocab_size} rows",
        )
    refuse_unless(not cfg.keep_best or examples["val"], "keep_best: data.val: no examples")

    # the processes and the run's folder
    fabric = launch(cfg, partial(shard_module, bf16=cfg.precision == "bf16-mixed"))
    contents = (tokenizer.template or "").encode() + b"".join(map(Path.read_bytes, source.files))
    contents += b"".join(b"%d" % i for i in tokenizer.stops_of_template)
    hashes = {
        "program": program.name,
        "records": examples_hash(examples),
        "config, tokenizer or chat template": hashlib.sha256(contents).hexdigest(),
    }
    is_same = torch.tensor(float(hashes == fabric.broadcast(hashes)), device=fabric.device)
    refuse_unless(
        all_reduce(is_same, "min"),
        "data: the processes have read different files: all nodes need the same ones",
    )
    out = fabric.broadcast(out)  # the first rank's
    checkpoint = on_rank_0(fabric, lambda: take_folder(out, cfg.resume))
    # for settings.yaml: --config RUN/settings.yaml --resume auto finds the run, in its newest step
    cfg = replace(cfg, out_dir=str(out), resume=None)

    # the models
    say(f"loading {cfg.model}")
    policy, frozen, of_weights = load_models(
        cfg, fabric, source, tokenizer, objective, config.hidden_size
    )
    hashes |= of_weights
    optimizer = (optimizer or make_optimizer)(policy.module, cfg)
    in_groups = {p for group in optimizer.param_groups for p in group["params"]}
    params = policy.unique_parameters().items()
    forgotten = [name for name, p in params if p.requires_grad and p not in in_groups]
    refuse_unless(
        not forgotten,
        f"optimizer: {len(forgotten)} weights are in none of its groups and would never change, "
        f'{forgotten[:1]} first: a group with "lr_scale": 0 keeps weights as they are',
    )
    optimizer = fabric.setup_optimizers(optimizer)
    reference = Reference(fabric, policy, frozen) if objective.needs_reference else None
    if cfg.reference_cache:
        reference = CachedReference(fabric, policy, frozen, cfg, hashes)

    # a new run, or the one that it goes on from
    state = on_rank_0(fabric, lambda: begin_run(out, checkpoint, cfg, hashes))
    # the folder of a branch has no checkpoint yet
    saved_step = state.step if checkpoint and checkpoint.parents[1] == out else 0
    stop = Stop(cfg.max_time)
    run = Run(
        cfg=cfg,
        fabric=fabric,
        budget=Budget(
            fabric.global_rank,
            fabric.world_size,
            room=cfg.micro_batch_size or most_tokens(cfg, *size),
            by_tokens=not cfg.micro_batch_size,
        ),
        source=source,
        tokenizer=tokenizer,
        examples=examples,
        objective=objective,
        policy=policy,
        reference=reference,
        optimizer=optimizer,
        state=state,
        folder=out,
        logger=Logger(cfg, saved_step or -1, state.unvalidated),
        evaluator=Evaluator(fabric, cfg, policy, tokenizer, examples["val"], checker, stop),
        throughput=Throughput(fabric, cfg, policy.module, objective),
        stop=stop,
        rollout=rollout,
        saved_step=saved_step,
    )
    if checkpoint:
        run.load(checkpoint)
        run.save()  # a branch begins with a checkpoint of its own
    return run


def with_absolute_paths(settings, *names: str):
    """The same settings with absolute paths of what is read: settings.yaml, which is made of them, then
    means the same from any working directory. Ids of the Hub stay as they are."""
    return replace(settings, **{name: absolute_sources(getattr(settings, name)) for name in names})


def saved_state(objective) -> dict:
    """An objective's state_dict. Raises BadInput for a value that JSON would not give back unchanged, or
    that is no attribute. Called at each checkpoint, and after the first step, before hours are spent."""
    state, kind = objective.state_dict(), type(objective).__name__
    refuse_unless(
        repr(json.loads(json.dumps(state, default=str))) == repr(state)
        and all(hasattr(objective, name) for name in state),
        f"state_dict: {kind}: expected attributes that are numbers, texts or lists of these, as by "
        f"float(x) or x.tolist(); got {state}",
    )
    return state


# ---- models --------------------------------------------------------------------------------------


def dtype_of(precision: str) -> torch.dtype:
    """Of the weights."""
    return {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)


def load_models(
    cfg: RunSettings, fabric, source: Source, tokenizer: Tokenizer, objective, width: int
):
    """-> the policy, the frozen reference (None: there is none, or it is the policy with its
    adapters off), and the hashes of their weights. Of a sharded run rank 0 alone reads the weights.
    The objective's module, for hidden states of this width, becomes a part of the policy after the
    reference was copied from it. Raises BadInput."""
    sharded, dtype = cfg.strategy == "fsdp", dtype_of(cfg.precision)
    policy = other = frozen = None
    other_source = source
    if cfg.reference:
        other_source = find_model(cfg.reference, "reference")
        refuse_unless(
            # the records' ids are made once, by the policy's tokenizer
            tokenizer.hf.get_vocab() == Tokenizer(other_source).hf.get_vocab(),
            f"reference: {cfg.reference}: another tokenizer than {cfg.model}",
        )
    if fabric.global_rank == 0 or not sharded:
        policy = load_model(source, dtype=dtype)
        other = load_model(other_source, dtype=dtype) if cfg.reference else None
    models = {"model weights": policy, "reference weights": other}.items()
    hashes = on_rank_0(
        fabric, lambda: {name: weights_hash(x.unique_parameters()) for name, x in models if x}
    )
    if cfg.reference:  # how it computes is no weight
        config = (other_source.root / "config.json").read_bytes()
        hashes["reference config"] = hashlib.sha256(config).hexdigest()
    if policy:
        add_adapters(policy, cfg.lora)
    if objective.needs_reference and (cfg.reference or not cfg.lora.rank):
        if sharded:
            whole = other or policy
            frozen = shard_over_ranks(fabric, whole, other_source, cfg.precision)
        else:  # not wrapped: DDP refuses a module that never trains
            frozen = fabric.to_device(freeze(other or copy.deepcopy(policy), cfg.precision))
    if cfg.lora.quantize:  # only now: the hashes are of the source's own weights
        quantize_base(policy, fabric.device)
    objective_module = objective.make_module(width)
    # from here on ranks may draw different random numbers (dropout)
    torch.manual_seed(cfg.seed + 1000003 * fabric.global_rank)
    if sharded:
        policy = shard_over_ranks(fabric, policy, source, cfg.precision, cfg.lora, objective_module)
    else:
        policy.objective_module = objective_module
        policy = fabric.setup_module(policy)
    policy.module.activation_checkpointing = cfg.activation_checkpointing
    return policy.eval(), frozen, hashes


def weights_hash(weights: dict[str, torch.Tensor]) -> str:
    """A hash of weights with their names, shapes and dtypes; their order does not matter."""
    h = hashlib.sha256()
    for name, x in sorted(weights.items()):
        h.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        h.update(x.detach().flatten().view(torch.uint8).numpy())
    return h.hexdigest()


# ---- Hugging Face folders ------------------------------------------------------------------------


def export_checkpoint(source: Source, out: Path) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, with a card, and with the chat template
    of the run. Raises BadInput if adapters would be merged into other weights than those they were
    trained on."""
    settings, state = read_settings(source.folder), read_state(source.folder)
    dtype = dtype_of(settings["precision"])
    # at least float32: a run in bfloat16 computes with a rounded base, the export takes the unrounded one
    gpt = load_model(source.base, dtype=torch.promote_types(dtype, torch.float32))
    if settings["lora"]["rank"] and not state.reference_has_moved:
        base = {name: p.to(dtype) for name, p in gpt.unique_parameters().items()}
        refuse_unless(
            weights_hash(base) == state.hashes["model weights"],
            f"export: {source.base.folder}: not the weights that {source.folder} was trained on",
        )
    put_on(gpt, source.folder)
    card = f"""---
library_name: transformers
tags: [{Path(state.hashes["program"]).stem}, preference-tuning]
---

Trained by {state.hashes["program"]} for {state.step} steps, on data whose token ids and labels have
the hash `{state.hashes["records"]}`, with these settings:

```yaml
{(source.folder / "settings.yaml").read_text()}```
"""
    notes = {"README.md": card}
    if source.chat_template:
        notes["chat_template.jinja"] = source.chat_template.read_text()
    export(source, gpt.rows, gpt.unique_parameters(), out, notes)
