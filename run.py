"""From settings to a Run, in the order of events, and the later changes of a Run.

Reading order: Run (the state of a run), setup (how it is made, on one screen), then the parts of setup in the
order of their calls. Nobody needs this file to change an algorithm.
"""

import hashlib
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.wrappers import _FabricOptimizer
from torch import Tensor, nn
from transformers import PretrainedConfig

from checks import (
    check_examples,
    check_files,
    check_new_reference,
    check_objective,
    check_optimizer,
    check_settings,
    check_state_dict,
)
from evaluation import Checker, Evaluator
from infra import console
from infra.checkpoint import (
    RunState,
    begin_run,
    check_resumed_settings,
    find_checkpoint,
    load_checkpoint,
    read_state,
    run_folder,
    save_checkpoint,
    save_state,
    take_folder,
)
from infra.console import BadInput, Interrupted, program_file, say
from infra.devices import (
    Stop,
    all_reduce,
    launch,
    leave_process_group,
    on_rank_0,
    resolve_devices,
)
from infra.logger import Logger
from infra.optimizer import make_optimizer, what_trains
from infra.program import program_hash
from infra.random_numbers import mixed
from infra.settings import RunSettings
from models.hub import Source, context_of, find_model, read_config, weights_hash
from models.load import load_model
from models.lora import merged_weights, reset_adapters
from objective import Objective
from packing import Budget, make_budget
from records.examples import (
    Example,
    examples_hash,
    load_splits,
    with_limits,
)
from records.sources import absolute_sources
from records.tokenizer import Tokenizer
from reference import AdaptersOff, load_policy_and_reference

if TYPE_CHECKING:
    from reference import Reference

# ---- what lives during a run ---------------------------------------------------------------------


@dataclass
class Run:
    """All that lives during a run: for each field a sentence, and who may change it."""

    cfg: RunSettings
    """The settings, resolved and frozen."""
    fabric: Fabric
    """Fabric, launched: this process's rank and device. Never changed."""
    budget: Budget
    """How a step is split into micro-batches. Never changed."""
    source: Source
    """The files of the model that the run starts from. Never changed."""
    tokenizer: Tokenizer
    """Never changed."""
    examples: dict[str, Sequence[Example]]
    """train, val and test, as token ids. Never changed."""
    objective: Objective
    """The algorithm. Changed by use_objective."""
    policy: nn.Module
    """The model that learns, as Fabric wraps it. It is in train mode only during a step's forward and backward. Its
    weights are changed by the optimizer's step; by new_reference, which merges adapters into the base; by load."""
    reference: "Reference | None"
    """The frozen model that the policy is compared with; None if the objective needs none. Its weights
    are changed by new_reference."""
    optimizer: _FabricOptimizer
    """As Fabric wraps it. new_reference clears its state when adapters restart."""
    state: RunState
    """The saved state besides tensors. `step` is changed by Trainer.train_step, the best step
    and `unvalidated` by evaluation.validate, the iteration's fields by begin_iteration,
    `reference_has_moved` by new_reference, all else by save."""
    folder: Path
    """The run's own folder. Never changed."""
    logger: Logger
    """Writes metrics.csv and val.csv, and to the terminal."""
    evaluator: Evaluator
    """Samples answers to held-out prompts and asks the checker."""
    stop: Stop
    """Whether a signal asks the run to end."""
    last_step: int = 0
    """The last step of the whole run. Changed by Trainer.fit and rollout.iterations."""
    rollout: Callable | None = None
    """An engine that answers prompts instead of our sampler (see rollout.py)."""
    saved_step: int = 0
    """The step of the last checkpoint in the run's own folder. Changed by save."""
    reference_step: int = 0
    """The step after which policy and reference are equal: 0, or the start of an iteration. Changed by
    begin_iteration."""

    # ---- what an outer loop may change

    def use_objective(self, objective: Objective) -> None:
        """Train with another objective from the next fit on. It takes over the state of the last one."""
        objective.load_state_dict(self.objective.state_dict())
        self.objective = objective

    def begin_iteration(self, i: int, moving_reference: bool) -> None:
        """Begin iteration i of an outer loop (SPIN, online KTO). If moving_reference, the present policy becomes the
        reference. By the hash of the policy a resume knows which answers of a killed process it may use."""
        self.state.iteration = i
        if moving_reference:
            self.new_reference()
            self.reference_step = self.state.step
        weights = self.merged_weights()
        self.state.started_from = on_rank_0(self.fabric, lambda: weights_hash(weights))

    def new_reference(self, share: float = 1.0) -> None:
        """The present policy becomes the reference; with a share below 1 the reference moves by that share towards it.
        LoRA's adapters are merged into the base, which is their reference. The adapters and the optimizer's state
        restart. A collective."""
        check_new_reference(self.cfg, self.reference is not None, share)
        seed = mixed(self.cfg.seed, self.state.step)
        multiplies_bfloat16 = self.cfg.precision.startswith("bf16")
        weights = self.merged_weights(torch.bfloat16 if multiplies_bfloat16 else None, seed)
        if isinstance(self.reference, AdaptersOff):
            self.reference.set_weights(weights)
            reset_adapters(self.policy.module, self.cfg.seed + 7919 * self.state.iteration)
            self.optimizer.optimizer.state.clear()
        else:
            self.reference.set_weights(weights, share, seed)
        self.state.reference_has_moved = True

    def merged_weights(self, dtype: torch.dtype | None = None, seed: int = 0) -> dict[str, Tensor]:
        """The policy's weights by their plain names, whole, with adapters merged in and without the objective's module;
        if the policy is sharded, only rank 0 has their values. dtype, seed: of the rounding of merged weights (see
        lora.merged_weights). A collective."""
        base = None
        if self.cfg.lora.quantize:  # a quantised base holds rounded numbers
            base = load_model(self.source, torch.get_default_dtype()).unique_parameters()
        return merged_weights(self.policy.module, base, dtype, seed)

    # ---- checkpoints, and the end

    def save(self) -> None:
        """Write a checkpoint of the step that was just done, unless there is one, and remove old ones."""
        if self.saved_step == self.state.step:
            return
        self.state.objective_state = check_state_dict(self.objective)
        save_checkpoint(self)
        self.saved_step = self.state.step

    def save_state(self) -> None:
        """Write state.json of the last checkpoint again, now that its step is validated. A collective."""
        on_rank_0(self.fabric, lambda: save_state(self))

    def stop_early(self, reason: str) -> None:
        """Save before the last step, and say how to continue."""
        self.save()
        self.say_how_to_continue(f"stopped by {reason}")

    def say_how_to_continue(self, why: str) -> None:
        """Name the step of the last checkpoint, and the command that continues from it."""
        say(f"{why}; saved up to step {self.saved_step} of {self.last_step}; continue with")
        settings = self.folder / "settings.yaml"
        command = ["python", sys.argv[0], "--config", str(settings), "--resume", "auto"]
        say(f"  {shlex.join(command)}")

    def load(self, folder: Path) -> None:
        """Load a checkpoint's tensors and the objective's state."""
        self.objective.load_state_dict(read_state(folder).objective_state)
        load_checkpoint(self, folder)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """End the run after its loop has ended. error: of the loop, or None. Returns whether the error is handled.

        A signal during a validation or a rollout (Interrupted) saves the run and ends it as usual. Any other error
        saves nothing, and a message names the last checkpoint."""
        failed = error is not None and not isinstance(error, Interrupted)
        if isinstance(error, Interrupted):
            # the frames hold the model, which is freed below
            traceback.clear_frames(error.__traceback__)
            self.stop_early(self.stop.reason)
        elif isinstance(error, Exception) and (self.saved_step or self.state.iteration):
            self.say_how_to_continue("stopped by an error")  # an iteration has saved its answers
        self.stop.close()
        if failed:
            return False
        self.policy = self.reference = self.optimizer = self.evaluator = None
        leave_process_group(self.fabric)
        # Only rank 0 reports the signal, as a shell does. Launchers kill all ranks after the first exit code that is
        # not 0, and rank 0 may still upload its logs.
        if self.stop.signal and self.fabric.global_rank == 0:
            raise SystemExit(128 + self.stop.signal) from None
        return True


# ---- how it is made ------------------------------------------------------------------------------


def setup(
    cfg: RunSettings,
    objective: Objective,
    checker: Checker | None = None,
    optimizer: Callable | None = None,
    rollout: Callable | None = None,
    make_records: Callable | None = None,
) -> Run:
    """Make a Run of the settings: refuse what cannot work, read, launch, load, resume.

    checker: judges answers (evaluation.Checker). optimizer: a function that replaces make_optimizer. rollout:
    an engine that answers prompts (see rollout.py). make_records: as for main. Raises BadInput, Failed.
    """
    console.shows_progress = cfg.progress
    check_objective(objective)
    check_settings(objective, cfg)
    folder = run_folder(cfg)
    checkpoint = find_checkpoint(folder, cfg.resume)  # refuses a folder that holds another run
    check_files(cfg.data)

    # the model that the settings name, its tokenizer, and the records
    source = find_model(cfg.model)
    configs = text_configs(cfg, source)
    config = configs[cfg.model]
    # where one model ends, so do records and answers for both
    context = min(map(context_of, configs.values()))
    cfg = resolve(cfg, config, context)
    program = program_file().name
    data = cfg.data
    tokenizer = Tokenizer(source, data.chat_template, data.date, data.chat_template_kwargs)
    examples = load_splits(data, tokenizer, objective.record_kind, make_records)
    cfg = objective.resolve(cfg, examples["train"])
    check_resumed_settings(checkpoint, cfg)
    check_examples(cfg, configs, objective, examples)

    # the processes, and the run's folder, which the first of them locks
    fabric = launch(cfg, sharding_of(cfg))
    hashes = {"program": program} | hash_inputs(fabric, source, tokenizer, examples)
    folder = fabric.broadcast(folder)  # its default name has the clock of each rank
    # once more, now that no other run can write there
    checkpoint = on_rank_0(fabric, lambda: take_folder(folder, cfg.resume))
    # for settings.yaml: --config RUN/settings.yaml --resume auto finds the run, in its newest step
    cfg = replace(cfg, out_dir=str(folder), resume=None)

    # the models, and what trains the policy
    say(f"loading {cfg.model}")
    policy, reference, hashes = load_policy_and_reference(
        cfg, fabric, source, tokenizer, objective, config.hidden_size, hashes
    )
    policy.module.max_seq_length = min(policy.module.max_seq_length, context)
    say(what_trains(policy))
    trained_by = (optimizer or make_optimizer)(policy.module, cfg)
    check_optimizer(trained_by, policy.unique_parameters())

    # a new run, or one that continues from a checkpoint
    code = program_hash(program_file())
    state = on_rank_0(fabric, lambda: begin_run(folder, checkpoint, cfg, hashes, code))
    stop = Stop()
    run = Run(
        cfg=cfg,
        fabric=fabric,
        budget=make_budget(cfg, fabric, config),
        source=source,
        tokenizer=tokenizer,
        examples=examples,
        objective=objective,
        policy=policy,
        reference=reference,
        optimizer=fabric.setup_optimizers(trained_by),
        state=state,
        folder=folder,
        logger=Logger(cfg, state.step or -1, state.unvalidated),
        evaluator=Evaluator(fabric, cfg, policy, tokenizer, examples["val"], checker, stop),
        stop=stop,
        rollout=rollout,
        saved_step=state.step,
    )
    if checkpoint:
        run.load(checkpoint)
    return run


def sharding_of(cfg: RunSettings) -> Callable | None:
    """The function that shards a model, if the strategy is fsdp."""
    if cfg.strategy != "fsdp":
        return None
    from models.shard import shard_module

    return partial(shard_module, bf16=cfg.precision == "bf16-mixed")


def text_configs(cfg: RunSettings, source: Source) -> dict[str, PretrainedConfig]:
    """transformers' text configs of the model and of the reference, by their names."""
    sources = {cfg.model: source}
    if cfg.reference:
        sources[cfg.reference] = find_model(cfg.reference, "reference")
    return {name: read_config(one).get_text_config() for name, one in sources.items()}


def resolve(cfg: RunSettings, config: PretrainedConfig, context: int) -> RunSettings:
    """The settings with all that depends on the model and the machine filled in, and with absolute paths.
    config: transformers' text config. context: what a record may fill, in tokens."""
    data = with_limits(cfg.data, context)
    data = with_absolute_paths(data, "train", "val", "test", "chat_template")
    devices = resolve_devices(cfg, config.num_hidden_layers, config.hidden_size)
    cfg = replace(cfg, data=data, **devices)
    return with_absolute_paths(cfg, "model", "reference")


def with_absolute_paths(settings: Any, *names: str) -> Any:
    """The same settings, of any class, with absolute paths in the fields `names`. Then settings.yaml means the same
    from any working directory. Ids of the Hub stay as they are."""
    return replace(settings, **{name: absolute_sources(getattr(settings, name)) for name in names})


def hash_inputs(
    fabric: Fabric, source: Source, tokenizer: Tokenizer, examples: dict[str, list[Example]]
) -> dict[str, str]:
    """Hashes of the run's inputs by name, without those of weights. Refuses processes that have
    read different files."""
    contents = (tokenizer.template or "").encode() + b"".join(map(Path.read_bytes, source.files))
    hashes = {
        "records": examples_hash(examples),
        "config, tokenizer or chat template": hashlib.sha256(contents).hexdigest(),
    }
    is_same = torch.tensor(float(hashes == fabric.broadcast(hashes)), device=fabric.device)
    if all_reduce(is_same, "min") == 0:
        raise BadInput("data: the processes have read different files: give all nodes the same")
    return hashes
