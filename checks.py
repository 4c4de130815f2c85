"""Checks that refuse a mistake before it can do harm, with the messages. The checks are called in setup (run.py)
and in the loop (trainer.py)."""

import json
import math
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from data import Step
from infra.console import BadInput, Failed, say, user_error
from infra.optimizer import steps_per_epoch
from infra.settings import (
    Data,
    RunSettings,
    Sampling,
    find_path,
    refuse_unless,
)
from model import Scores
from objective import Columns, Objective, Z
from packing import Part
from records.examples import Example
from records.sources import ENDINGS, files_of, split_sources

if TYPE_CHECKING:
    from trainer import Trainer


def check_objective(objective: Objective) -> None:
    """Refuse parts of an objective that would silently have no effect: a misspelt name, and parameters that nobody
    trains."""
    kind = type(objective).__name__
    for name in set(dir(type(objective))) - set(dir(Objective)):
        like = get_close_matches(name, dir(Objective), 1, cutoff=0.85)
        if like:
            raise BadInput(f"{kind}.{name}: not known: did you mean {like[0]}?")
    # a base that takes it from the settings, as kto.py does, has a property there
    is_forgotten = type(objective).needs_mismatched_pairs is False
    if objective.overrides("mismatched_completions") and is_forgotten:
        refuse_unless(
            objective.needs_mismatched_pairs,
            f"{kind}.mismatched_completions: it would not be called: needs_mismatched_pairs is False",
        )
    for name, value in vars(objective).items():
        parameters = value.parameters() if isinstance(value, torch.nn.Module) else [value]
        if any(getattr(p, "requires_grad", False) for p in parameters):
            raise BadInput(f"{kind}.{name}: nothing trains or saves it: make it in make_module")


def check_settings(objective: Objective, cfg: RunSettings) -> None:
    """Refuse settings that do not go with the algorithm."""
    kind = type(objective).__name__
    for name, value in {"reference": cfg.reference, "reference_cache": cfg.reference_cache}.items():
        if value and not objective.needs_reference:
            raise BadInput(f"{name}: {kind} has no reference")
    if objective.by_token and cfg.reference_cache:
        raise BadInput(
            f"reference_cache: {kind} takes log-probs of tokens, and the cache has only their sums"
        )
    can_have_top = objective.by_token and objective.needs_reference
    if objective.top_k and (objective.needs_mismatched_pairs or not can_have_top):
        raise BadInput(f"{kind}.top_k: it needs by_token and a reference, and no mismatched pairs")
    has_own_pairs = objective.overrides("mismatched_completions")
    if objective.needs_mismatched_pairs and not has_own_pairs and cfg.batch_size == 1:
        raise BadInput(
            f"batch_size: {kind} needs at least 2: a mismatched pair takes another's completion"
        )


def check_files(data: Data) -> None:
    """Refuse a file of records that is not there, before a model is fetched."""
    for split, sources in {"train": data.train, "val": data.val, "test": data.test}.items():
        for source in split_sources(sources):
            for file in files_of(source):
                path = find_path(file)
                is_file = path.suffix.lower() in ENDINGS
                refuse_unless(path.exists() or not is_file, f"data.{split}: {file}: no such file")


def check_examples(
    cfg: RunSettings,
    configs: dict[str, PretrainedConfig],
    objective: Objective,
    examples: dict[str, list[Example]],
) -> None:
    """Refuse records that do not fit the models or the settings. configs: text configs of the model and of the
    reference, by their names."""
    for name, config in configs.items():
        check_tokens(chain(*examples.values()), config.vocab_size, name)
    check_sampling(cfg, objective.needs_mismatched_pairs)
    if objective.record_kind != "prompts":
        # refuses a batch that is larger than the data
        steps_per_epoch(cfg, len(examples["train"]))


def check_tokens(examples: Iterable[Example], vocab_size: int, model: str) -> None:
    """Refuse an example with a token id beyond the model's embedding. Ids that no record has do not count:
    Gemma 3 1B's tokenizer has one more, for images."""
    for example in examples:
        largest = max(ids.max() for ids in (example.prompt, *example.completions))
        if largest >= vocab_size:
            raise BadInput(
                f"{example.where}: token: id {largest}, but the embedding of {model} has "
                f"{vocab_size} rows"
            )


def check_sampling(cfg: RunSettings, mismatched_pairs: bool) -> None:
    """Refuse answers that could not be scored after hours of sampling: a mismatched pair may have the longest prompt
    and the longest answer. mismatched_pairs: whether there are any. Raises BadInput."""
    longest = cfg.data.max_completion
    for name, args in vars(cfg).items():
        # online or spin: eval's answers do not become completions
        if isinstance(args, Sampling) and name != "eval" and mismatched_pairs:
            refuse_unless(
                (args.max_new_tokens or 0) <= longest,
                f"{name}.max_new_tokens: {args.max_new_tokens}: more than data.max_completion, {longest}, and "
                "these answers become completions",
            )


def check_new_reference(cfg: RunSettings, has_reference: bool, share: float) -> None:
    """Refuse a move of the reference that cannot be, before anything has changed (Run.new_reference)."""
    refuse_unless(has_reference, "new_reference: this objective has no reference")
    refuse_unless(0 < share <= 1, f"new_reference: share: expected above 0, at most 1, got {share}")
    if cfg.reference_cache:
        raise BadInput(
            "reference_cache: it has the log-probs of a reference that stays, and this one moves"
        )
    if cfg.lora.rank and not cfg.reference:
        refuse_unless(
            share == 1 and not cfg.lora.quantize,
            "new_reference: adapters are merged into the base, which is their reference: not by a share, and not into "
            "4 bits; give --reference, too, the model itself",
        )


def check_optimizer(
    optimizer: torch.optim.Optimizer, weights: dict[str, torch.nn.Parameter]
) -> None:
    """Refuse an optimizer that lacks a trained weight, which would never change."""
    in_groups = set()
    for group in optimizer.param_groups:
        in_groups.update(group["params"])
    forgotten = [name for name, p in weights.items() if p.requires_grad and p not in in_groups]
    if forgotten:
        raise BadInput(
            f"optimizer: {len(forgotten)} weights are in none of its groups and would never change, "
            f"{forgotten[:1]} first: a group with lr 0 keeps weights as they are"
        )


def check_state_dict(objective: Objective) -> dict:
    """An objective's state_dict, refused where JSON would not give it back unchanged, or where it names no
    attribute. Called at each checkpoint, and after the first step since the last one, before hours are spent."""
    state = objective.state_dict()
    survives = repr(json.loads(json.dumps(state, default=str))) == repr(state)
    if not survives or not all(hasattr(objective, name) for name in state):
        raise BadInput(
            f"state_dict: {type(objective).__name__}: expected attributes that are numbers, texts or "
            f"lists of these, as by float(x) or x.tolist(); got {state}"
        )
    return state


def as_python(x: Any) -> Any:
    """A number of torch or numpy, also one in a tensor or array, as Python's own; all else as it is."""
    n = x.numel() if isinstance(x, Tensor) else getattr(x, "size", None)
    return x.item() if n == 1 else x


def check_loss(given: object, B: int) -> tuple[Tensor, Columns]:
    """The losses and columns that an objective's loss has returned for a micro-batch. Refuse losses or columns
    that are not one number an example: a mean, for one, would silently scale the gradient."""
    with user_error("loss", "expected the losses and {column: numbers}"):
        loss_B, columns = given
        named = [("losses", loss_B), *columns.items()]
    for name, x in named:
        shape = tuple(getattr(x, "shape", ()))
        if shape != (B,):
            raise BadInput(
                f"loss: {name}: expected a tensor ({B},), one number an example, got {shape}"
            )
    if torch.is_grad_enabled() and not loss_B.requires_grad:
        raise BadInput("loss: the losses have no gradient: they must be computed from logps")
    return loss_B, columns


def check_same_columns(columns: Iterable[str], expected: Iterable[str]) -> None:
    """Refuse micro-batches that differ in their columns: a missing column would silently count as 0."""
    differ = ", ".join(sorted(set(columns) ^ set(expected)))
    if differ:
        raise BadInput(
            f"loss: columns {differ}: not of every micro-batch: return the same columns for each"
        )


def check_row(row: dict[str, Any]) -> dict[str, float | None]:
    """The row that an objective's metrics has returned, with numbers of torch or numpy as Python's.
    Raises BadInput."""
    numbers = {name: as_python(x) for name, x in row.items()}
    for name, x in numbers.items():
        if not isinstance(x, int | float | None):
            raise BadInput(f"metrics: {name}: expected a number or None, got {x!r:.60}")
    return numbers


def check_finite(
    step: Step,
    loss_G: Tensor,
    z: Z,
    grad_norm: float,
    step_number: int,
) -> None:
    """Raise Failed if the norm, z or a loss of a step is not finite. All tensors are on the CPU, and equal on all
    ranks."""
    losses = loss_G.tolist()
    # a loss may be infinite where its gradient is not, as by a constant
    numbers = [grad_norm, z.z_G.double().sum().item(), sum(losses)]
    if all(map(math.isfinite, numbers)):
        return
    pairs = zip(step.examples, losses)
    bad = [example.where for example, loss in pairs if not math.isfinite(loss)]
    which = ", ".join(bad[:8]) or "not the loss of any one example"
    raise Failed(
        f"step {step_number}: not finite (gradient norm, sum of z, of losses: {numbers}): {which}; the "
        "weights are unchanged, and a resume does this step again: start a new run with a smaller optim.lr, or, at "
        "step 1, look for the fault in the loss, where no update has been made and log-ratios are still 0"
    )


# ---- the start of a run, or of an iteration --------------------------------------------------------

N_CHECKED = 4  # examples: more would make the first step wait


@torch.no_grad()
def check_start(loop: "Trainer", examples: list[Example]) -> None:
    """On a few examples: refuse a reference that is not the model that the run starts from (r must be exactly 0 on
    own completions and on mismatched ones), and a loss that mixes examples. Say the log-prob a token."""
    run = loop.run
    # a few examples of both labels, because a loss may compare the two
    up = [e for e in examples if e.label]
    down = [e for e in examples if not e.label]
    n = N_CHECKED // 2
    # within a whole step, so the mismatched pairs are those of a real one
    checked = up[:n] + down[:n] + up[n:] + down[n:]
    step = loop.make_step(checked[: run.cfg.batch_size])
    step.move_to(run.fabric.device)
    few = Part(list(range(min(N_CHECKED, step.size))))
    micro = step.micro_batch(few).to(run.fabric.device)
    packed = micro.packed
    scores = loop.forward(packed)
    nats = scores.logps.double().sum() / micro.length.sum()
    if run.objective.top_k:  # a loss needs the log-probs of these tokens, too
        packed = packed._replace(target_T=loop.reference_forward(packed).targets)
        scores = loop.forward(packed)
    agree = ""
    if run.objective.needs_reference and not run.cfg.reference:
        logps = [scores.logps]
        # by compute, because a reference with a cache might read its folder
        by_token = run.objective.by_token
        ref_logps = [run.reference.compute(packed, by_token=by_token).logps]
        if micro.mismatched is not None:
            mismatched = micro.mismatched.to(run.fabric.device)
            logps.append(loop.forward(mismatched).logps)
            ref_logps.append(run.reference.compute(mismatched, by_token=by_token).logps)
        check_same(logps, ref_logps, run.state.step)
        agree = "policy and reference agree to the bit; "
    check_mixing(step, few, scores, run.objective.needs_reference, loop.micro_batch_loss)
    say(f"step {run.state.step}: {agree}{nats:.2f} nats a token (text: usually -1 to -4)")


def check_same(logps: list[Tensor], ref_logps: list[Tensor], step_number: int) -> None:
    """Raise Failed unless policy and reference give the same log-probs, to the bit."""
    r = [policy - reference for policy, reference in zip(logps, ref_logps)]
    largest = torch.cat(r, dim=1).abs().max().item()
    if largest != 0:
        raise Failed(
            f"step {step_number}: policy and reference differ by {largest:.3g} nats: the reference is not the model "
            "that the run starts from, or gives no finite log-probs (docs/families.md)"
        )


def check_mixing(
    step: Step,
    part: Part,
    scores: Scores,
    needs_reference: bool,
    micro_batch_loss: Callable[..., tuple[Tensor, dict]],
) -> None:
    """Refuse a loss of an example that depends on the other examples of its micro-batch: another split
    would then give another gradient. Therefore the losses of a few examples with given scores
    are compared with those of each alone. micro_batch_loss: Trainer's.

    The reference's log-probs are made up: the policy's own for the first example (r = 0), 0 for all others
    (r = log pi). If all log-ratios were equal, a mean over examples might not show."""
    device = scores.logps.device
    ref_logps = None
    if needs_reference:
        ref_logps = torch.zeros_like(scores.logps)
        ref_logps[0] = scores.logps[0]
    z_G = scores.logps.new_zeros(step.size)

    def losses_of(rows: slice) -> Tensor:
        micro = step.micro_batch(Part(part.indices[rows])).to(device)
        # copies, because a loss may change its arguments in place
        logps = scores.logps[rows].clone()
        outputs = None if scores.outputs is None else scores.outputs[rows].clone()
        reference = None if ref_logps is None else ref_logps[rows].clone()
        loss_B, _ = micro_batch_loss(micro, Scores(logps, outputs), reference, z_G)
        return loss_B

    together = losses_of(slice(None))
    alone = [losses_of(slice(i, i + 1)) for i in range(len(part.indices))]
    # not to the bit: a fork's own micro_batch_loss may run a model, which rounds differently
    if not torch.allclose(together, torch.cat(alone), rtol=0.02, atol=1e-6, equal_nan=True):
        raise BadInput(
            "loss: an example's loss depends on the other examples of its micro-batch, so another "
            "split would give another gradient: take sums over examples from batch.step (or it draws random "
            "numbers, and is not the same twice)"
        )
