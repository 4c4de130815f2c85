"""The steps of a run and of its iterations, the learning rate, AdamW, clipping."""

import math
from typing import NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor

from infra.settings import Optim, RunSettings, refuse_unless


class Plan(NamedTuple):
    """How long an iteration is and what happens when. Every number counts optimizer steps.

    KTO and DPO have one iteration; SPIN and online.py have several, with a plan for each.
    """

    per_epoch: int
    """Steps of an epoch of this iteration."""
    total: int
    """Steps of the whole run, all iterations together: the length of the learning rate's schedule."""
    begin: int
    """Steps before this iteration, which has the steps begin + 1, ..., end."""
    end: int
    """The last step of this iteration."""
    warmup_epoch: int
    """Steps of the first iteration's epoch: a warmup of '0.1 epochs' is a fraction of this one."""


# ---- steps --------------------------------------------------------------------------------------


def steps_of(interval: int | str, per_epoch: int) -> int:
    """An interval (settings.Interval) in steps. One in epochs is at least 1 step; 0 steps stay 0."""
    if isinstance(interval, str):  # 0.5 epochs
        return max(1, round(float(interval.split()[0]) * per_epoch))
    return int(interval)


def is_due(step: int, interval: int | str | None, plan: Plan) -> bool:
    """Whether what happens every `interval` happens after this step.

    An interval in steps: counted over the whole run; and after the run's last step.
    An interval in epochs: counted from the beginning of the iteration; and after the iteration's last step.
    None: after the iteration's last step alone."""
    if interval is None:
        return step == plan.end
    every = steps_of(interval, plan.per_epoch)
    if isinstance(interval, str):
        return step == plan.end or (step - plan.begin) % every == 0
    return step == plan.total or step % every == 0


def steps_per_epoch(cfg: RunSettings, n: int) -> int:
    """The number of full batches in an epoch of n examples. Raises BadInput if there is none."""
    steps = n // cfg.batch_size
    refuse_unless(
        steps,
        f"{cfg.data.train}: {n} examples are fewer than batch_size={cfg.batch_size}; "
        "give more examples or a smaller batch_size",
    )
    return steps


def run_plan(cfg: RunSettings, n: int) -> Plan:
    """The plan of a run without iterations on n examples. max_steps overrides epochs. Raises BadInput."""
    per_epoch = steps_per_epoch(cfg, n)
    total = cfg.max_steps or cfg.epochs * per_epoch
    return Plan(per_epoch, total, 0, total, per_epoch)


def iteration_plans(cfg: RunSettings, sizes: list[int]) -> list[Plan]:
    """A plan for each iteration, one after the other. Iteration i has cfg.epochs passes over sizes[i] examples, and no
    step if these are fewer than batch_size. max_steps ends the run earlier; iterations after it have no step. All
    plans have one schedule: the total of all iterations, and the first one's epoch."""
    lengths = [n // cfg.batch_size for n in sizes]
    ends = [0]
    for per_epoch in lengths:
        ends.append(ends[-1] + cfg.epochs * per_epoch)
    total = min(cfg.max_steps or ends[-1], ends[-1])
    ends = [min(end, total) for end in ends]
    return [
        Plan(per_epoch, total, begin, end, lengths[0])
        for per_epoch, begin, end in zip(lengths, ends, ends[1:])
    ]


def check_iterations(cfg: RunSettings, sizes: list[int]) -> None:
    """Refuse iterations of these sizes that are too small, or too few for max_steps. Raises BadInput."""
    n_steps = sum(cfg.epochs * steps_per_epoch(cfg, n) for n in sizes)
    refuse_unless(
        (cfg.max_steps or 0) <= n_steps,
        f"max_steps: {cfg.max_steps}, but the iterations have {n_steps} steps, and max_steps can only end them early: "
        "give more iterations or epochs",
    )


# ---- the learning rate --------------------------------------------------------------------------


def lr_at(step: int, plan: Plan, optim: Optim, peak: float) -> float:
    """The learning rate of step 1, 2, ..., plan.total: a linear warmup to the peak, then a decay that would reach 0 one
    step after the last. optim: the warmup and the schedule."""
    warmup = steps_of(optim.warmup, plan.warmup_epoch)
    if step <= warmup:
        return peak * step / warmup
    if optim.schedule == "constant":
        return peak
    decay_steps = max(1, plan.total - warmup)
    progress = (step - 1 - warmup) / decay_steps  # 0 to 1
    scale = 1 - progress
    if optim.schedule == "cosine":
        scale = (1 + math.cos(math.pi * progress)) / 2
    return peak * scale


# ---- AdamW --------------------------------------------------------------------------------------


def what_trains(policy: torch.nn.Module) -> str:
    """A line with the number of weights that are trained."""
    n = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    return f"training {n:,} weights"


def make_optimizer(policy: torch.nn.Module, cfg: RunSettings) -> torch.optim.Optimizer:
    """AdamW of the parameters that require a gradient. Weight decay skips biases, norms and embeddings.

    A fork hands over another function of this form. The lr of each group is the peak of its learning rate. The loop
    applies warmup and schedule to it. The optimizer's `state` is saved and resumed. Of cfg.optim the loop uses
    warmup, schedule and clip. This function uses the rest."""
    o = cfg.optim
    undecayed = set()
    for m in policy.modules():
        # Cohere's norms of queries and keys have two dimensions: (heads, head size)
        if isinstance(m, torch.nn.Embedding) or "norm" in type(m).__name__.lower():
            undecayed.update(m.parameters(recurse=False))
    trained = [p for p in policy.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and p not in undecayed]
    undecayed_params = [p for p in trained if p.ndim < 2 or p in undecayed]
    groups = [{"params": decayed, "weight_decay": o.weight_decay}]
    if undecayed_params:
        groups.append({"params": undecayed_params, "weight_decay": 0.0})
    betas = (o.beta1, o.beta2)
    return torch.optim.AdamW(groups, lr=o.lr, betas=betas, eps=o.eps, fused=True)


# ---- clipping -----------------------------------------------------------------------------------


def clip_gradient(
    fabric: Fabric,
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    max_norm: float | None,
) -> Tensor:
    """Scale the gradient to a norm of at most max_norm; None leaves it as it is.

    Returns the norm before, as a scalar tensor on the device. The norm may be nan or inf: the loop
    refuses the step then.
    """
    limit = max_norm or math.inf
    norm = fabric.clip_gradients(policy, optimizer, max_norm=limit, error_if_nonfinite=False)
    if hasattr(norm, "full_tensor"):  # with FSDP2 it is a sharded DTensor
        return norm.full_tensor()
    return norm
