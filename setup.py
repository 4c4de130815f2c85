"""From settings to a Run, in the order in which it happens; and what may happen to a Run later.

Reading order: Run (what lives during a run), setup (how it is made), then the parts of setup in the
order of their calls. Nobody needs this file to change an algorithm.
"""

import copy
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import litgpt
import torch
from torch import nn

import model
from data import Cut
from evaluate import Evaluator
from hub.export import copy_tokenizer_files, export_weights, model_card
from hub.families import weight_layout
from hub.folders import fetch_model, folders_on_top, put_on_base, without_top
from hub.lora import merge_adapters, plain_names, reset_adapters, without_missing_targets
from hub.peft import base_and_adapters, export_adapter
from hub.quantize import quantize_base
from hub.transformers_models import read_model_config
from hub.weights import weights_hash
from records.examples import (
    Example,
    Examples,
    count_labels,
    examples_hash,
    load_splits,
    suggest_class_weights,
)
from records.readers import absolute_sources
from records.tokenizer import Tokenizer
from reference import CachedReference, Reference
from runs.checkpoint import (
    RunState,
    load_checkpoint,
    load_weights,
    program_file,
    read_settings,
    read_state,
    save_checkpoint,
)
from runs.cli import dump_yaml, script_arguments
from runs.console import Wait, say
from runs.devices import all_reduce, launch, leave_process_group, on_rank_0, resolve_devices
from runs.errors import BadInput, Failed, printable, user_error
from runs.files import file_hash, find_path, publish_folder, verify_folder
from runs.folder import (
    RunFolder,
    checkpoint_folder,
    prune_checkpoints,
    refuse_other_identity,
    refuse_taken_folder,
)
from runs.logger import TABLES, Logger, read_claimed_rows
from runs.metrics import Throughput, least_passes
from runs.optimizer import make_optimizer, make_plan
from runs.settings import Lora, RunSettings, most_tokens, refuse_unless, with_limits
from runs.stop import Stop
from runs.tensors import (
    LazyTensors,
    gather_tensor,
    open_safetensors,
    override_tensors,
    place_like,
    rename_tensors,
    set_weights,
    write_safetensors,
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
    source: Path
    """The Hugging Face folder of the model that the run starts from. Never changed."""
    tokenizer: Tokenizer
    """Never changed."""
    examples: dict[str, Sequence[Example]]
    """train, val and test, as token ids. Never changed."""
    objective: object
    """The algorithm (train.Objective). Changed by use_objective."""
    policy: nn.Module
    """The model that learns, as Fabric wraps it. Its weights are changed by the optimizer's step and
    by new_reference, which merges adapters into the base; at the end by load_best_weights."""
    reference: Reference | CachedReference | None
    """The frozen model that the policy is compared with; None if the objective needs none. Its weights
    are changed by new_reference."""
    optimizer: object
    """As Fabric wraps it. Its state is cleared by new_reference where adapters begin anew."""
    state: RunState
    """What a checkpoint saves besides tensors. `step` is changed by Trainer.optimizer_step, the
    iteration's fields by begin_iteration, the best step by Trainer.evaluate, `rows` and `objective`
    by save."""
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

    def begin_iteration(self, i: int, moving_reference: bool) -> None:
        """Begin iteration i of an outer loop (SPIN, online KTO). With a moving reference the policy,
        as it is now, becomes the reference."""
        state, before = self.state, self.state.started_from
        state.iteration, state.moving_reference = i, moving_reference
        if moving_reference:
            state.started_from = self.new_reference()
        else:
            state.started_from = weights_hash(self.merged_weights())
        if state.started_from == before and self.cfg.optim.lr:
            say(f"iteration {i}: the last iteration has not changed the policy")

    @property
    def reference_folder(self) -> Path:
        """Where a moving reference of the current iteration is written, for a resume."""
        return self.folder.path / "iterations" / f"{self.state.iteration}"

    def new_reference(self) -> str:
        """The policy becomes the iteration's reference, and is written to its reference_folder. LoRA's
        adapters are merged into the base, which is their reference; then they begin anew, and with
        them the optimizer's state. -> the hash of the new reference"""
        module, uses_adapters = self.policy.module, self.reference.frozen is None
        weights = self.merged_weights()
        if uses_adapters:
            params = module.unique_parameters(with_objective=False)
            base = (name for name in params if "lora_" not in name)
            # back from plain names to the policy's own: a LoRA layer holds its matrix as .linear
            weights = rename_tensors(weights, {n: n.replace(".linear.", ".") for n in base})
        self.publish(self.reference_folder, lambda new: write_safetensors(new, weights, "weights"))
        if uses_adapters:
            reset_adapters(module, self.cfg.seed + 7919 * self.state.iteration, place_like)
            self.optimizer.optimizer.state.clear()
        self.reference_step = self.state.step
        return self.restore_reference()

    def restore_reference(self) -> str:
        """Read the reference of the current iteration from the disk. -> its hash. Raises
        BadInput."""
        file = self.reference_folder / "weights.safetensors"
        if not file.exists():
            raise BadInput(f"resume: {file}: missing: give --out_dir, the run's own folder")
        if fault := verify_folder(file.parent, [file.name]):
            raise BadInput(f"resume: {file.parent}: {fault}")
        weights = open_safetensors(file)
        set_weights(self.reference.frozen or self.policy, weights)
        return weights_hash(weights)

    # ---- weights

    def weights(self, export: bool = False) -> LazyTensors:
        """The policy's weights by their plain names, adapters apart and without the objective's
        module, each gathered when it is asked for: of a sharded policy that is a collective. A
        quantised base is read from its source again, so that rounded numbers never leave; for an
        export a base in bfloat16, too."""
        params = self.policy.unique_parameters(with_objective=False)
        quantized = self.cfg.lora.quantize
        from_source = quantized or (export and self.cfg.precision == "bf16-true")
        if from_source:
            own = {name: p for name, p in params.items() if p.requires_grad}
        else:
            own = params
        weights = LazyTensors(own, lambda name: gather_tensor(own[name]))
        if from_source:
            base = [name for name in params if "lora_" not in name]
            weights = override_tensors(weights, self._source_weights(base, export))
        return weights

    def _source_weights(self, names: list[str], export: bool) -> LazyTensors:
        """Weights of a frozen base, read from its source again: in the type that the run holds them in,
        for an export at least in float32. Raises Failed if the source has changed."""
        held = dtype_of(self.cfg.precision)
        weights = read_base(self.source, names, held)
        if weights_hash(weights) != self.state.identity["model weights"]:
            raise Failed(f"{self.source}: not the weights that this run began with: put them back")
        if not export:
            return weights
        return read_base(self.source, names, torch.promote_types(held, torch.float32))

    def merged_weights(self) -> LazyTensors:
        """The same with the adapters merged in."""
        return merge_adapters(self.weights(), self.policy.module)

    def publish(self, out: Path, write) -> None:
        """publish_folder for a folder of the policy's weights: write(a new folder) on rank 0. Of a
        sharded policy the other ranks call write(None), since its weights are gathered."""
        is_rank_0 = self.fabric.global_rank == 0
        publish_folder(
            self.fabric,
            lambda new: write(new if is_rank_0 else None),
            out,
            on_every_rank=self.cfg.strategy == "fsdp",
        )

    # ---- checkpoints, and the end

    def save(self) -> None:
        """Write a checkpoint of the step that was just done, and remove old ones."""
        self.state.objective = saved_state(self.objective)
        self.state.rows = self.logger.sync()
        checkpoints = self.folder.path / "checkpoints"
        new = checkpoint_folder(checkpoints, self.state.step)
        with Wait(f"saving step {self.state.step}"):
            save_checkpoint(self.fabric, new, self.policy, self.optimizer, self.state, self.cfg)
        self.saved_step = self.state.step
        if self.fabric.global_rank == 0:
            prune_checkpoints(checkpoints, self.cfg.keep_last, self.state.best_step)

    def save_and_say_how_to_go_on(self) -> None:
        """For a run that stops before its end."""
        step = self.state.step
        if self.saved_step < step:
            self.save()
        saved = ", saved" if step else ""  # before the first step there is nothing to save
        say(f"stopped by {self.stop.reason} at step {step} of {self.last_step}{saved}; go on with")
        settings = str(self.folder.path / "settings.yaml")
        command = ["python", self.state.program, *script_arguments]
        say(f"  {shlex.join([*command, '--config', settings, '--resume', 'auto'])}")

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

    checker: judges answers (evaluate.Checker). optimizer: a function in place of make_optimizer.
    rollout: an engine that answers prompts (see rollout.py). Raises BadInput, Failed.
    """
    refuse_taken_folder(cfg)
    saved_state(objective)  # refused now, not at the first checkpoint
    say_what_is_forgotten(objective)
    refuse_settings_of_tokens(cfg, objective)
    for name in ("reference", "reference_cache"):
        refuse_unless(
            objective.needs_reference or not getattr(cfg, name),
            f"{name}: {type(objective).__name__} has no reference",
        )

    # the model's folder and its tokenizer
    source = fetch_model(cfg.model)
    arguments, _, names = read_model_config(source)  # refuses what could not be exported
    cfg = replace(cfg, lora=without_missing_targets(cfg.lora, names))
    tokenizer = Tokenizer(source, cfg.data.chat_template, cfg.data.date)
    data = with_limits(cfg.data, arguments["block_size"])
    precision_given = cfg.precision is not None
    cfg = with_absolute_paths(replace(cfg, data=data, **resolve_devices(cfg)))
    if cfg.accelerator == "cpu" and not precision_given and bfloat16_pays(arguments):
        say("this CPU multiplies bfloat16: --precision bf16-mixed is about 1.6 times as fast")

    # the records
    with user_error("data", cfg.data.train):
        examples = load_splits(cfg.data, tokenizer, objective.records, say)
    n_desirable, n_undesirable = count_labels(examples["train"])
    # with equal weights such a run mostly unlearns, first of all to end an answer
    if n_undesirable > n_desirable > 0:
        say(suggest_class_weights(examples["train"]))
    refuse_ids_beyond(arguments["padded_vocab_size"], cfg.model, tokenizer, examples)
    if cfg.keep_best and not examples["val"]:
        raise BadInput("keep_best: data.val: no examples")
    if cfg.keep_best in ("checker_accuracy", "kl/own") and not cfg.eval.prompts:
        raise BadInput(f"keep_best: {cfg.keep_best}: with eval.prompts 0 nothing is checked")
    if cfg.keep_best == "kl/own" and cfg.reference_cache:
        raise BadInput(
            "keep_best: kl/own: empty with reference_cache, which releases the reference"
        )
    if objective.records != "prompts":  # too few examples are refused before any work
        make_plan(cfg, len(examples["train"]))

    # the processes and the run's folder
    fabric = launch(cfg)
    data_hash = examples_hash(examples)
    refuse_other_examples(fabric, data_hash)
    program = program_file(type(objective))
    folder = RunFolder(fabric, cfg, program)
    # settings.yaml alone must find its run
    cfg = replace(cfg, out_dir=os.path.abspath(folder.path))

    # the models
    state = RunState(str(program), file_hash(program))
    if cfg.data.chat_template:
        state.chat_template = tokenizer.template_text
    make_module = partial(make_objective_module, objective, arguments["n_embd"])
    with Wait("loading the model"):
        policy, frozen, state.identity = load_models(
            cfg,
            fabric,
            source,
            tokenizer,
            data_hash,
            objective.needs_reference,
            make_module,
        )
    make = optimizer or make_optimizer
    optimizer = make(policy.module, cfg)
    got = type(optimizer).__name__
    refuse_unless(
        isinstance(optimizer, torch.optim.Optimizer),
        f"optimizer: expected a torch.optim.Optimizer, got {got}",
    )
    refuse_forgotten_weights(policy, optimizer)
    optimizer = fabric.setup_optimizers(optimizer)
    # a weight that a fork has added is refused now, not at the export
    exported = plain_names(policy.unique_parameters(with_objective=False))
    weight_layout(litgpt.Config(**arguments), names, exported.like)
    reference = Reference(fabric, policy, frozen) if objective.needs_reference else None
    if reference and cfg.reference_cache:
        reference = CachedReference(fabric, reference, cfg, state.identity)

    # a new run, or the one that it goes on from
    rows = begin_folder(fabric, folder, cfg, state, source)
    if folder.state:
        with Wait("reading the checkpoint"):
            load_checkpoint(fabric, folder.checkpoint, policy, optimizer)
        state = replace(folder.state, program_hash=state.program_hash)
        vars(objective).update(folder.state.objective)
        if not folder.is_own:  # the other run's best checkpoint is not in this folder
            state.best_step = state.best_value = None

    tokens = most_tokens(cfg, arguments["n_layer"], arguments["n_embd"])
    stop = Stop(cfg.seconds() if cfg.max_time else None, cfg.stop_at)
    runs_reference = objective.needs_reference and not cfg.reference_cache
    passes = least_passes(objective.kl_pairs, runs_reference, bool(cfg.lora.rank))
    return Run(
        cfg=cfg,
        fabric=fabric,
        cut=Cut(fabric.global_rank, fabric.world_size, cfg.micro_batch_size, tokens),
        source=source,
        tokenizer=tokenizer,
        examples=examples,
        objective=objective,
        policy=policy,
        reference=reference,
        optimizer=optimizer,
        state=state,
        folder=folder,
        logger=Logger(cfg, rows),
        evaluator=Evaluator(fabric, cfg, policy, tokenizer, examples["val"], checker, stop),
        throughput=Throughput(fabric, cfg.precision, policy.module, passes),
        stop=stop,
        rollout=rollout,
        saved_step=state.step if folder.is_own else 0,
    )


def with_absolute_paths(settings):
    """The same settings with absolute paths: settings.yaml, which is made of them, then means the same
    from any working directory. Ids of the Hub stay as they are."""
    changed = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            changed[field.name] = with_absolute_paths(value)
        elif value and field.metadata.get("path") == "source":
            changed[field.name] = absolute_sources(value)
        elif value and field.metadata.get("path") == "folder":
            changed[field.name] = os.path.abspath(Path(value).expanduser())
    return replace(settings, **changed)


def bfloat16_pays(arguments: dict) -> bool:
    """Whether this CPU multiplies bfloat16, and the model is large enough to gain from it: 1.6 to 1.7
    times at 135M weights (benchmarks/RESULTS.md)."""
    has_products = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    block_weights = 12 * arguments["n_layer"] * arguments["n_embd"] ** 2
    return has_products and block_weights > 50e6


def refuse_ids_beyond(n: int, name: str, tokenizer: Tokenizer, examples: dict) -> None:
    """Raise BadInput where a record has a token id that the model's embedding, of n rows, does not
    have. Tokens that no record has may lie beyond it: Gemma 3 1B has one, for images."""
    for part in examples.values():
        if not part or Examples.of(part).tokens.max(initial=0) < n:
            continue
        for example in part:
            for ids in (example.prompt, *example.completions):
                if (largest := ids.max(initial=0)) >= n:
                    token = "eos_token" if largest == tokenizer.eos else "token"
                    raise BadInput(
                        f"{example.where}: {token}: id {largest}, but the embedding of {name} "
                        f"has {n} rows"
                    )


def refuse_other_examples(fabric, data_hash: str) -> None:
    """Raise BadInput, on all ranks, if one of them has read other examples than rank 0: a file was changed
    in the meantime, or it is not the same on all nodes. A collective."""
    is_same = torch.tensor(float(data_hash == fabric.broadcast(data_hash)), device=fabric.device)
    refuse_unless(
        all_reduce(is_same, "min"),
        "data: the processes have read different records: all nodes need the same files",
    )


MISSING = object()


def saved_state(objective) -> dict:
    """An objective's state_dict, of which a resume gets every value as it is now. Raises BadInput for
    one that it would not get: called before the run, after its first step and at each checkpoint."""
    kind, state = type(objective).__name__, objective.state_dict()
    for name, value in state.items():
        try:
            loaded = json.loads(json.dumps({name: value}))[name]
        except (TypeError, ValueError) as e:
            advice = "a number, a text or a list of these is saved, as by float(x) or x.tolist()"
            raise BadInput(f"state_dict: {kind}: {name}: {e}: {advice}") from None
        attribute = getattr(objective, name, MISSING)
        if _is_same(attribute, loaded):
            continue
        if attribute is MISSING:
            reason = "no attribute of this name"
        else:
            reason = f"a resume would make {loaded!r} of it, and it is {attribute!r}"
        advice = "an attribute that is a number, a text or a list of these is saved"
        raise BadInput(f"state_dict: {kind}: {name}: {printable(reason, 200)}: {advice}")
    return state


def _is_same(attribute, loaded) -> bool:
    """Whether it is what json has loaded, nan too; a tensor of one number is not."""
    is_equal = isinstance(attribute, type(loaded)) and attribute == loaded
    return is_equal or repr(attribute) == repr(loaded)


def say_what_is_forgotten(objective) -> None:
    """Say so if an objective remembers something that no checkpoint saves."""
    if not objective.state_dict() and objective.overrides("after_step"):
        kind = type(objective).__name__
        say(f"{kind}: after_step without a state_dict: a resume forgets what it kept")


def refuse_settings_of_tokens(cfg: RunSettings, objective) -> None:
    """Raise BadInput for settings that an objective by token cannot have."""
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


def make_objective_module(objective, width: int) -> nn.Module | None:
    """The module of the objective's own, or None. Raises BadInput if it could not be saved or
    sharded."""
    module = objective.make_module(width)
    if module is None:
        return None
    got = type(module).__name__
    refuse_unless(
        isinstance(module, nn.Module), f"make_module: expected a torch.nn.Module, got {got}"
    )
    unsaved = [name for name, _ in module.named_buffers()]
    for name, p in module.named_parameters():
        refuse_unless(p.dim(), f"make_module: {name}: expected at least one dimension, as in (1,)")
        if not p.requires_grad:
            unsaved.append(name)
    refuse_unless(
        not unsaved,
        f"make_module: {', '.join(unsaved)}: only parameters that are trained are saved and sharded",
    )
    return module


def refuse_forgotten_weights(policy, optimizer) -> None:
    """Raise BadInput if an optimizer has not all weights that require a gradient."""
    in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
    params = policy.unique_parameters().items()
    forgotten = [name for name, p in params if p.requires_grad and id(p) not in in_groups]
    if forgotten:
        raise BadInput(
            f"optimizer: {len(forgotten)} weights are in none of its groups and would never change, "
            f'{forgotten[0]} first: a group with "lr_scale": 0 keeps weights as they are'
        )


def begin_folder(
    fabric, folder: RunFolder, cfg: RunSettings, state: RunState, source: Path
) -> list[bytes] | None:
    """Refuse what can still be refused, and only then write into the folder. -> the rows of
    metrics.csv and val.csv that a resume goes on from; None for a new run. Raises BadInput."""
    if folder.state:
        refuse_other_identity(folder.state.identity, state.identity)
    claims = folder.state.rows if folder.is_own else {}

    def work():
        rows = [
            read_claimed_rows(folder.path / name, claims.get(name), folder.checkpoint)
            for name in TABLES
        ]
        # A source whose tokenizer files cannot be copied is refused now, not at the export.
        with TemporaryDirectory(dir=folder.path, prefix=".", suffix=".tmp") as trial:
            copy_tokenizer_files(source, Path(trial))
        folder.begin(cfg)
        return rows

    rows = on_rank_0(fabric, work)
    return rows if folder.state else None


# ---- models --------------------------------------------------------------------------------------


def dtype_of(precision: str) -> torch.dtype:
    """Of the weights."""
    return {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)


def load_models(
    cfg: RunSettings,
    fabric,
    source: Path,
    tokenizer,
    data_hash: str,
    needs_reference: bool,
    make_module: Callable[[], nn.Module | None],
):
    """-> the policy, the frozen reference (None: there is none, or it is the policy with its
    adapters off), and the hashes by which a resume knows them again. Of a sharded run rank 0 alone
    reads the weights. make_module: gives the objective's module, which becomes a part of the policy
    after the reference was copied from it."""
    sharded, first = cfg.strategy == "fsdp", fabric.global_rank == 0
    has_copy = needs_reference and bool(cfg.reference or not cfg.lora.rank)
    policy = other = identity = frozen = None
    if first or not sharded:
        policy = model.load_model(source, cfg.lora, dtype_of(cfg.precision))
        if has_copy and cfg.reference:
            other = load_other_reference(cfg, policy, tokenizer)
    if first:
        reference = (other or policy) if has_copy else None
        identity = run_identity(cfg, source, tokenizer, data_hash, policy, reference)
    identity = fabric.broadcast(identity)
    if has_copy and sharded:
        frozen = model.shard_over_ranks(fabric, other or policy, cfg.precision, learns=False)
    elif has_copy:  # not wrapped: DDP refuses a module that never trains
        frozen = model.freeze(other or copy.deepcopy(policy), cfg.precision)
        frozen = fabric.to_device(frozen)
    if cfg.lora.quantize:  # only now: the hashes are of the source's own weights
        quantize_base(policy, fabric.device)
    objective_module = make_module()
    # from here on ranks may draw different random numbers (dropout)
    torch.manual_seed(cfg.seed + 1000003 * fabric.global_rank)
    if sharded:
        policy = model.shard_over_ranks(fabric, policy, cfg.precision, True, objective_module)
    else:
        policy.objective_module = objective_module
        policy = fabric.setup_module(policy)
    policy.module.activation_checkpointing = cfg.activation_checkpointing
    return policy, frozen, identity


def read_base(source: Path, names: list[str], dtype: torch.dtype) -> LazyTensors:
    """A folder's weights by the names of a policy with adapters."""
    stored = model.read_folder_weights(source, dtype)
    # a LoRA layer holds its matrix as .linear
    return rename_tensors(stored, {n: n.replace(".linear.", ".") for n in names})


def load_other_reference(cfg: RunSettings, policy, tokenizer: Tokenizer) -> nn.Module:
    """The model of --reference. Raises BadInput if its token ids mean something else."""
    folder = fetch_model(cfg.reference, "reference")
    reference = model.load_model(folder, None, dtype_of(cfg.precision))
    same_size = reference.config.padded_vocab_size == policy.config.padded_vocab_size
    if not same_size or not tokenizer.same(Tokenizer(folder)):
        raise BadInput(
            f"reference: {cfg.reference}: another tokenizer or vocabulary than {cfg.model}"
        )
    return reference


def run_identity(
    cfg: RunSettings, source: Path, tokenizer: Tokenizer, data_hash: str, policy, reference
) -> dict[str, str]:
    """Hashes of what a resume must find again, by the name that a refusal shows."""
    hashes = {"data (token ids and labels)": data_hash}
    hashes["ids of tokens that end an answer"] = str(sorted(tokenizer.stops))
    hashes |= model_hashes("model", policy)
    if reference is policy:
        hashes |= {f"reference {x}": hashes[f"model {x}"] for x in ("weights", "config")}
    elif reference is not None:
        hashes |= model_hashes("reference", reference)
    names = ["config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    files = {name: source / name for name in [*names, "chat_template.jinja"]}
    if cfg.data.chat_template:
        files["data.chat_template"] = Path(cfg.data.chat_template)
    return hashes | {name: file_hash(file) for name, file in files.items() if file.is_file()}


def model_hashes(name: str, gpt) -> dict[str, str]:
    """Of a model's weights and config, adapters left aside."""
    base = {n: p for n, p in gpt.unique_parameters().items() if "lora_" not in n}
    config = sorted((k, str(v)) for k, v in vars(gpt.config).items() if not k.startswith("lora_"))
    return {
        f"{name} weights": weights_hash(base),
        f"{name} config": hashlib.sha256(str(config).encode()).hexdigest(),
    }


# ---- a run's end: Hugging Face folders -----------------------------------------------------------


def export_models(run: Run) -> None:
    """Write final; with LoRA final_adapter, in PEFT's format; and best, if keep_best kept one."""
    cfg, fabric, out = run.cfg, run.fabric, run.folder.path
    weights = run.weights(export=True)
    merged = merge_adapters(weights, run.policy.module)

    def write_final(new):
        notes = notes_of(dump_yaml(cfg), run.state, out)
        export_weights(merged, run.source, new, notes)

    run.publish(out / "final", write_final)
    if cfg.lora.rank:
        from_run = any((x / "state.json").exists() for x in folders_on_top(run.source))
        if fabric.broadcast(run.state.has_merged_adapters or from_run):
            say("no final_adapter: PEFT needs a folder of its base, and no folder holds it")
        else:
            run.publish(out / "final_adapter", partial(write_adapter, run, weights))
    best = checkpoint_folder(out / "checkpoints", run.state.best_step or 0)
    if fabric.broadcast(best.is_dir()):
        # not the base that the checkpoint's settings name: the model may have moved since they were written
        on_base = put_on_base(best, run.source)
        write_best = partial(_export_on_base, best, on_base)
        publish_folder(fabric, write_best, out / "best")


def write_adapter(run: Run, weights: LazyTensors, new: Path | None) -> None:
    cfg, source = run.cfg, run.source
    if folders_on_top(source):
        base, adapters = base_and_adapters(source)
    else:
        base, adapters = cfg.model, []
    if find_path(base).exists():
        base = str(fetch_model(base).resolve())
    export_adapter(weights, new, run.policy.module, source, base, cfg.lora, adapters)


def export_checkpoint(checkpoint: Path, out: Path) -> None:
    """Write a checkpoint, or a PEFT folder, with its base as a Hugging Face folder. Raises
    BadInput."""
    folder = fetch_model(str(checkpoint), "export")
    if not folders_on_top(folder):
        raise BadInput(f"export: {checkpoint}: neither a checkpoint of a run nor a PEFT folder")
    if (checkpoint / "state.json").exists():
        refuse_other_base(checkpoint, without_top(folder))
    _export_on_base(checkpoint, folder, out)


def refuse_other_base(checkpoint: Path, base: Path) -> None:
    """Raise BadInput if adapters of a checkpoint would be merged into other weights than those they were
    trained on. base: the folder of these weights."""
    settings, state = read_settings(checkpoint), read_state(checkpoint)[0]
    if not settings["lora"]["rank"] or state.has_merged_adapters:
        return  # all its weights are in the checkpoint, or in the run's folder
    arguments, config, names = read_model_config(base)
    with torch.device("meta"):
        policy = model.make_model(arguments, Lora(**settings["lora"]), names)
    if config["tie_word_embeddings"]:
        policy.tie()
    own = [name for name in policy.unique_parameters() if "lora_" not in name]
    weights = read_base(base, own, dtype_of(settings["precision"]))
    if weights_hash(weights) != state.identity["model weights"]:
        source = settings["model"]
        raise BadInput(f"export: {source}: not the weights that {checkpoint} was trained on")


def _export_on_base(checkpoint: Path, folder: Path, out: Path) -> None:
    """Write a folder from hub.folders that has the checkpoint on top of its base."""
    notes, read_as = [], torch.float32
    if (checkpoint / "state.json").exists():
        own = dtype_of(read_settings(checkpoint)["precision"])
        settings = (checkpoint / "settings.yaml").read_text()
        notes = notes_of(settings, read_state(checkpoint)[0], checkpoint.parent.parent)
        read_as = torch.promote_types(own, torch.float32)
    export_weights(model.read_folder_weights(folder, read_as), folder, out, notes)


def notes_of(settings: str, state: RunState, run: Path) -> list[tuple[str, str]]:
    """More files of an exported model, as (name, text): its card, and the chat template if the run
    used another one than the model's."""
    notes = [("README.md", model_card(settings, state, run))]
    if state.chat_template:
        notes.append(("chat_template.jinja", state.chat_template))
    return notes


def load_best_weights(run: Run) -> bool:
    """Put the weights of the best checkpoint into the policy, if there is one that is not the last
    step and belongs on this base. -> whether that was done"""
    step = run.state.best_step
    if step is None or step == run.state.step:
        return False
    best = checkpoint_folder(run.folder.path / "checkpoints", step)
    if not best.is_dir():  # removed by hand
        return False
    # with a moving reference the adapters of an earlier iteration belong on another base
    if run.cfg.lora.rank and read_state(best)[0].iteration != run.state.iteration:
        return False
    params = run.policy.unique_parameters()
    load_weights(best, params)
    return True
