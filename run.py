"""From settings to a Run, in the order in which it happens; and what may happen to a Run later.

Reading order: Run (what lives during a run), setup (how it is made), then the parts of setup in the
order of their calls. Nobody needs this file to change an algorithm.
"""

import copy
import hashlib
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from data import Cut, most_tokens
from evaluate import Evaluator
from hub import Source, context_of, export, find_model, read_config, read_json
from load import load_model, put_on, shard_module, shard_over_ranks
from lora import (
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
    RunFolder,
    RunState,
    checkpoint_folder,
    find_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    publish_folder,
    read_settings,
    read_state,
    save_checkpoint,
)
from runs.console import say, user_error
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
from runs.settings import (
    CONTENT_SETTINGS,
    RunSettings,
    find_path,
    refuse_unless,
    split_options,
)

# ---- what lives during a run ---------------------------------------------------------------------


@dataclass
class Run:
    """All that lives during a run: a sentence each, and who may change it."""

    cfg: RunSettings
    """The settings, resolved and frozen."""
    fabric: object
    """Fabric, launched: this process's rank and device. Never changed."""
    cut: Cut
    """How a step is cut into micro-batches. Never changed."""
    source: Source
    """Where the model lies that the run starts from. Never changed."""
    tokenizer: Tokenizer
    """Never changed."""
    examples: dict[str, Sequence[Example]]
    """train, val and test, as token ids. Never changed."""
    objective: object
    """The algorithm (train.Objective). Changed by use_objective."""
    policy: nn.Module
    """The model that learns, as Fabric wraps it. Its weights are changed by the optimizer's step
    and by new_reference, which merges adapters into the base; at the end by load."""
    reference: Reference | CachedReference | None
    """The frozen model that the policy is compared with; None if the objective needs none. Its weights
    are changed by new_reference."""
    optimizer: object
    """As Fabric wraps it. Its state is cleared by new_reference where adapters begin anew."""
    state: RunState
    """What a checkpoint saves besides tensors. `step` is changed by Trainer.optimizer_step, the
    iteration's fields by begin_iteration, the best step by Trainer.evaluate, `objective` by save."""
    folder: RunFolder
    """The folder of the run and its lock."""
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
    """The step of the last checkpoint. Changed by save."""
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
        with user_error("data", path):
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
        state, before = self.state, self.state.started_from
        state.iteration = i
        weights = self.merged_weights()
        state.started_from = on_rank_0(self.fabric, lambda: weights_hash(weights))
        if moving_reference:
            self.new_reference(weights=weights)
        if state.started_from == before and self.cfg.optim.lr:
            say(f"iteration {i}: the last iteration has not changed the policy")

    def new_reference(self, share: float = 1.0, weights: dict | None = None) -> None:
        """The policy as it is becomes the reference; with a share below 1 the reference moves by that
        share towards it. LoRA's adapters are merged into the base, which is their reference; then they
        begin anew, and with them the optimizer's state. weights: the policy's merged ones, if they are
        known. A collective."""
        frozen, weights = self.reference.frozen, weights or self.merged_weights()
        if frozen is not None:
            set_weights(frozen, weights, share)
        else:
            fits = share == 1 and self.cfg.precision != "bf16-true"
            assert fits, "new_reference: adapters are merged as a whole, and into a float32 base"
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
        own = {plain_name(name): name for name in names}
        set_weights(self.policy, {own[name]: x for name, x in weights.items()})

    def merged_weights(self) -> dict[str, torch.Tensor]:
        """The policy's weights by their plain names, whole, with adapters merged in and without the
        objective's module; of a sharded policy rank 0 alone has their values. A collective."""
        base = None
        if self.cfg.lora.quantize:  # read again, so that rounded numbers never leave
            base = load_model(self.source, dtype=dtype_of(self.cfg.precision)).unique_parameters()
        return merged_weights(self.policy.module, base)

    def publish_policy(self) -> Path:
        """The policy as it is now, as a Hugging Face folder. A collective."""
        folder, weights = self.folder.path / "iterations" / "policy", self.merged_weights()
        rows = self.policy.module.rows
        publish_folder(self.fabric, lambda new: export(self.source, rows, weights, new), folder)
        return folder

    # ---- checkpoints, and the end

    def save(self) -> None:
        """Write a checkpoint of the step that was just done, and remove old ones."""
        self.state.objective = saved_state(self.objective)
        new = checkpoint_folder(self.folder.path, self.state.step)
        tensors = self.policy, self.optimizer, self.moved_reference
        save_checkpoint(self.fabric, new, *tensors, self.state, self.cfg)
        self.saved_step = self.state.step
        if self.fabric.global_rank == 0:
            prune_checkpoints(self.folder.path, self.cfg.keep_last, self.state.best_step)

    def save_and_say_how_to_go_on(self) -> None:
        """For a run that stops before its end: the command that was typed, to be typed again."""
        step = self.state.step
        if self.saved_step < step:
            self.save()
        saved = ", saved" if step else ""  # before the first step there is nothing to save
        say(f"stopped by {self.stop.reason} at step {step} of {self.last_step}{saved}; go on with")
        gone = ("--out_dir", "--resume", "--stop_at")
        typed = [x for x in split_options(sys.argv[1:]) if x and x[0].split("=")[0] not in gone]
        command = ["python", sys.argv[0], *sum(typed, []), "--out_dir", self.cfg.out_dir]
        say(f"  {shlex.join([*command, '--resume', 'auto'])}")

    @property
    def moved_reference(self) -> dict[str, torch.Tensor]:
        """The weights of a reference that has moved, by name; with LoRA the policy's own base. Else empty."""
        if not self.state.reference_has_moved:
            return {}
        if self.reference.frozen is not None:
            return self.reference.frozen.unique_parameters()
        params = self.policy.unique_parameters().items()
        return {name: p for name, p in params if not p.requires_grad}

    def load(self, folder: Path) -> None:
        """Put the tensors of a checkpoint in place."""
        moved = self.moved_reference
        if moved and self.cfg.lora.rank and not read_state(folder).reference_has_moved:
            # its adapters belong on the base that the run began with
            dtype = dtype_of(self.cfg.precision)
            self.set_base(load_model(self.source, dtype=dtype).unique_parameters())
        load_checkpoint(self.fabric, folder, self.policy, self.optimizer, moved)

    def export(self, name: str, step: int) -> None:
        """Make the folder `name`, final or best, of the checkpoint of this step. A collective."""
        # not the base that the checkpoint's settings name: the model may have moved since
        source = Source(checkpoint_folder(self.folder.path, step), self.source)
        write = partial(export_checkpoint, source)
        publish_folder(self.fabric, write, self.folder.path / name)

    def export_adapters(self) -> None:
        """Write final_adapter, in PEFT's format. A collective."""
        base, adapters = base_for_peft(self), gather_adapters(self.policy.module)
        if base is None:
            say("no final_adapter: PEFT needs a folder of its base, and no folder holds it")
            return
        given = adapters, self.policy.module, self.source, base, self.cfg.lora
        write = partial(write_peft, *given)
        publish_folder(self.fabric, write, self.folder.path / "final_adapter")

    def close(self, failed: bool) -> None:
        """Close the files and, unless the run has failed, end the processes together."""
        self.logger.close()
        self.folder.close()
        self.stop.close()
        torch.set_default_dtype(torch.float32)  # precision 64-true has changed it
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
    find_checkpoint(cfg)  # refuses a folder that holds another run
    objective.check()
    refuse_settings_of_objective(cfg, objective)
    saved_state(objective)  # refused now, not at the first checkpoint

    # the model's folder and its tokenizer
    source = find_model(cfg.model)
    config = read_config(source).get_text_config()
    size = config.num_hidden_layers, config.hidden_size
    template = cfg.data.chat_template or source.chat_template
    tokenizer = Tokenizer(source.tokenizer, template, cfg.data.date)
    data = with_limits(cfg.data, context_of(config))
    cfg = with_absolute_paths(replace(cfg, data=data, **resolve_devices(cfg, *size)))

    # the records
    with user_error("data", cfg.data.train):
        examples = load_splits(cfg.data, tokenizer, objective.records, say)
    refuse_ids_beyond(config.vocab_size, cfg.model, examples)
    refuse_unless(not cfg.keep_best or examples["val"], "keep_best: data.val: no examples")

    # the processes and the run's folder
    fabric = launch(cfg, partial(shard_module, bf16=cfg.precision == "bf16-mixed"))
    hashes = {
        "records": examples_hash(examples),
        "config and tokenizer": files_hash(source, tokenizer),
    }
    is_same = torch.tensor(float(hashes == fabric.broadcast(hashes)), device=fabric.device)
    refuse_unless(
        all_reduce(is_same, "min"),
        "data: the processes have read different files: all nodes need the same ones",
    )
    program = Path(sys.argv[0])
    if program.suffix != ".py":  # a notebook
        program = Path(inspect.getfile(type(objective)))
    folder = RunFolder(fabric, cfg, program)
    cfg = replace(cfg, out_dir=str(folder.path))  # settings.yaml alone must find its run

    # the models
    say(f"loading {cfg.model}")
    policy, frozen, of_weights = load_models(
        cfg, fabric, source, tokenizer, objective, config.hidden_size
    )
    hashes |= of_weights
    optimizer = (optimizer or make_optimizer)(policy.module, cfg)
    refuse_forgotten_weights(policy, optimizer)
    optimizer = fabric.setup_optimizers(optimizer)
    reference = Reference(fabric, policy, frozen) if objective.needs_reference else None
    if reference and cfg.reference_cache:
        reference = CachedReference(fabric, reference, cfg, hashes)
    hashes = {"program": program.name, **hashes}

    # a new run, or the one that it goes on from
    on_rank_0(fabric, lambda: folder.begin(cfg, hashes))
    state = folder.state or RunState(hashes=hashes)
    if cfg.data.chat_template:
        state.chat_template = tokenizer.template
    vars(objective).update(state.objective)
    stop = Stop(cfg.max_time, cfg.stop_at)
    if not folder.is_own:  # the other run's best checkpoint is not in this folder
        state.best_step = state.best_value = None
    run = Run(
        cfg=cfg,
        fabric=fabric,
        cut=Cut(
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
        folder=folder,
        logger=Logger(cfg, state.step if folder.is_own else -1, state.unvalidated),
        evaluator=Evaluator(fabric, cfg, policy, tokenizer, examples["val"], checker, stop),
        throughput=Throughput(fabric, cfg, policy.module, objective),
        stop=stop,
        rollout=rollout,
        saved_step=state.step if folder.is_own else 0,
    )
    if folder.checkpoint:
        run.load(folder.checkpoint)
    return run


def refuse_settings_of_objective(cfg: RunSettings, objective) -> None:
    """Raise BadInput for settings that an objective cannot have."""
    for name in ("reference", "reference_cache"):
        refuse_unless(
            objective.needs_reference or not getattr(cfg, name),
            f"{name}: {type(objective).__name__} has no reference",
        )
    refuse_unless(
        not objective.by_token or not (cfg.data.score_prompt or cfg.reference_cache),
        "data.score_prompt, reference_cache: this objective takes the log-probs of each token of a "
        "completion: the cache has only their sums, and a prompt's tokens are no part of it",
    )
    refuse_unless(
        not (objective.overrides("make_module") and cfg.data.score_prompt),
        "data.score_prompt: this objective's module gets the hidden states of a completion's tokens, "
        "not of the prompt's",
    )
    if not objective.state_dict() and objective.overrides("after_step"):
        kind = type(objective).__name__
        say(f"{kind}: after_step without a state_dict: a resume forgets what it kept")


def with_absolute_paths(settings, prefix: str = ""):
    """The same settings with absolute paths of what is read: settings.yaml, which is made of them, then
    means the same from any working directory. Ids of the Hub stay as they are."""
    changed = {}
    for name, value in vars(settings).items():
        if is_dataclass(value):
            changed[name] = with_absolute_paths(value, f"{name}.")
        elif value and prefix + name in CONTENT_SETTINGS:
            changed[name] = absolute_sources(value)
    return replace(settings, **changed)


def refuse_ids_beyond(n: int, name: str, examples: dict) -> None:
    """Raise BadInput where a record has a token id that the model's embedding, of n rows, does not
    have. Tokens that no record has may lie beyond it: Gemma 3 1B has one, for images."""
    for example in sum(examples.values(), []):
        largest = max(ids.max() for ids in (example.prompt, *example.completions))
        refuse_unless(
            largest < n,
            f"{example.where}: token: id {largest}, but the embedding of {name} has {n} rows",
        )


def files_hash(source: Source, tokenizer: Tokenizer) -> str:
    """Of what says how a model computes and how its tokenizer works."""
    h = hashlib.sha256((tokenizer.template or "").encode())
    for folder in (source.root, source.tokenizer):
        for file in sorted(folder.glob("*.json")):
            h.update(file.read_bytes())
    return h.hexdigest()


def saved_state(objective) -> dict:
    """An objective's state_dict, of which a resume gets every value as it is now. Raises BadInput for one
    that it would not get: called before the run, after its first step and at each checkpoint."""
    state, kind = objective.state_dict(), type(objective).__name__
    refuse_unless(
        repr(json.loads(json.dumps(state, default=str))) == repr(state)
        and all(hasattr(objective, name) for name in state),
        f"state_dict: {kind}: expected attributes that are numbers, texts or lists of these, as by "
        f"float(x) or x.tolist(); got {state}",
    )
    return state


def refuse_forgotten_weights(policy, optimizer) -> None:
    """Raise BadInput if an optimizer has not all weights that require a gradient."""
    in_groups = {p for group in optimizer.param_groups for p in group["params"]}
    params = policy.unique_parameters().items()
    forgotten = [name for name, p in params if p.requires_grad and p not in in_groups]
    refuse_unless(
        not forgotten,
        f"optimizer: {len(forgotten)} weights are in none of its groups and would never change, "
        f'{forgotten[:1]} first: a group with "lr_scale": 0 keeps weights as they are',
    )


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
    policy = other = None
    frozen, other_source = None, source
    if cfg.reference:
        other_source = find_model(cfg.reference, "reference")
        refuse_unless(
            tokenizer.hf.get_vocab() == Tokenizer(other_source.tokenizer).hf.get_vocab(),
            f"reference: {cfg.reference}: another tokenizer than {cfg.model}",
        )
    if fabric.global_rank == 0 or not sharded:
        policy = load_model(source, cfg.lora, dtype)
        other = load_model(other_source, None, dtype) if cfg.reference else None
    hashes = on_rank_0(fabric, lambda: hash_models({"model": policy, "reference": other}))
    if objective.needs_reference and (cfg.reference or not cfg.lora.rank):
        if sharded:
            whole = other or policy
            frozen = shard_over_ranks(fabric, whole, other_source, cfg.precision)
        else:  # not wrapped: DDP refuses a module that never trains
            frozen = freeze(other or copy.deepcopy(policy), cfg.precision)
            frozen = fabric.to_device(frozen)
    if cfg.lora.quantize:  # only now: the hashes are of the source's own weights
        quantize_base(policy, fabric.device)
    objective_module = objective.make_module(width)
    # from here on ranks may draw different random numbers (dropout)
    torch.manual_seed(cfg.seed + 1000003 * fabric.global_rank)
    if sharded:
        given = source, cfg.precision, cfg.lora, objective_module
        policy = shard_over_ranks(fabric, policy, *given)
    else:
        policy.objective_module = objective_module
        policy = fabric.setup_module(policy)
    policy.module.activation_checkpointing = cfg.activation_checkpointing
    return policy, frozen, hashes


def weights_hash(weights: Mapping[str, torch.Tensor]) -> str:
    """A hash of weights with their names, shapes and dtypes; their order does not matter."""
    h = hashlib.sha256()
    for name in sorted(weights):
        x = weights[name].detach().cpu().contiguous()
        h.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        h.update(x.flatten().view(torch.uint8).numpy())
    return h.hexdigest()


def hash_models(models: dict) -> dict[str, str]:
    """Of the weights of those that there are, without new adapters."""
    hashes = {}
    for name, model in models.items():
        if model:
            params = model.unique_parameters().items()
            base = {plain_name(n): p for n, p in params if "lora_" not in n}
            hashes[f"{name} weights"] = weights_hash(base)
    return hashes


# ---- Hugging Face folders ------------------------------------------------------------------------


def base_for_peft(run: Run) -> str | None:
    """The path or id of the model that the run's adapters, and those of the PEFT folders that it
    started from, belong to; None if it is no whole model of its own."""
    source, name = run.source, run.cfg.model
    while source.base:
        file = source.folder / "adapter_config.json"
        if not file.exists():
            return None
        source, name = source.base, read_json(file)["base_model_name_or_path"]
    if run.state.reference_has_moved:
        return None
    return str(source.root.resolve()) if find_path(name).exists() else name


def export_checkpoint(source: Source, out: Path) -> None:
    """Write the model of a checkpoint as a Hugging Face folder. Raises BadInput if adapters would be merged
    into other weights than those they were trained on."""
    settings, state = read_settings(source.folder), read_state(source.folder)
    dtype = dtype_of(settings["precision"])
    # at least float32: a run in bfloat16 holds its base rounded, which the export does not
    gpt = load_model(source.base, dtype=torch.promote_types(dtype, torch.float32))
    if settings["lora"]["rank"] and not state.reference_has_moved:
        base = {name: p.to(dtype) for name, p in gpt.unique_parameters().items()}
        refuse_unless(
            weights_hash(base) == state.hashes["model weights"],
            f"export: {source.base.folder}: not the weights that {source.folder} was trained on",
        )
    put_on(gpt, source.folder)
    notes = notes_of((source.folder / "settings.yaml").read_text(), state)
    export(source, gpt.rows, gpt.unique_parameters(), out, notes)


def notes_of(settings: str, state: RunState) -> dict[str, str]:
    """More files of an exported model, {name: text}: its card, and the chat template if the run used
    another one than the model's. settings: the text of settings.yaml."""
    program = Path(state.hashes["program"]).stem
    card = f"""---
library_name: transformers
tags: [{program}, preference-tuning]
---

Trained by {program}.py for {state.step} steps, on data whose token ids and labels have the hash
`{state.hashes["records"]}`, with these settings:

```yaml
{settings}```
"""
    notes = {"README.md": card}
    if state.chat_template:
        notes["chat_template.jinja"] = state.chat_template
    return notes
