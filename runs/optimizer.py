"""How far and how fast: the steps of a run, the learning rate, AdamW, clipping."""

import math
from typing import NamedTuple

import torch

from runs.errors import BadInput
from runs.settings import Optim, RunSettings


class Plan(NamedTuple):
    """How long a run is and what happens when, in optimizer steps."""

    per_epoch: int
    total: int  # of the whole run: what the learning rate's schedule spans
    val: int | None
    save: int | None
    check: int | None = None
    begin: int = 0  # an iteration's steps are begin + 1 to end; KTO and DPO have one iteration
    end: int = 0


def steps_of(interval: int | float | None, per_epoch: int) -> int | None:
    """An int is steps, a float a fraction of an epoch."""
    return max(1, round(interval * per_epoch)) if isinstance(interval, float) else interval


def is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


def lr_at(step: int, plan: Plan, o: Optim) -> float:
    """The learning rate of step 1, 2, ...: warmup, constant, decay."""
    warmup, constant = ((steps_of(x, plan.per_epoch) if x else 0) for x in (o.warmup, o.constant))
    if step <= warmup:
        return o.lr * step / warmup
    done = max(0, step - 1 - warmup - constant) / max(1, plan.total - warmup - constant)
    if o.schedule == "constant":
        return o.lr
    shape = (1 + math.cos(math.pi * done)) / 2 if o.schedule == "cosine" else 1 - done
    return o.min_lr + (o.lr - o.min_lr) * shape


def make_plan(cfg: RunSettings, n: int) -> Plan:
    """The plan of `epochs` passes over n examples; a remainder below batch_size is left out."""
    per_epoch = n // cfg.batch_size
    if not per_epoch:
        few = f"{n} examples are fewer than batch_size={cfg.batch_size}"
        raise BadInput(f"{cfg.data.train}: {few}")
    if cfg.limit_train:
        per_epoch = min(per_epoch, steps_of(cfg.limit_train, per_epoch))
    total = min(cfg.epochs * per_epoch, cfg.max_steps or math.inf)
    intervals = cfg.val_interval, cfg.save_interval, cfg.eval.check_interval
    return Plan(per_epoch, total, *(steps_of(x, per_epoch) for x in intervals), 0, total)


def iteration_plans(cfg: RunSettings, sizes: list[int]) -> list[Plan]:
    """A plan for each iteration over so many examples, end to end. All have the whole total."""
    plans, begin = [], 0
    for n in sizes:
        p = make_plan(cfg, n)
        end = min(begin + cfg.epochs * p.per_epoch, cfg.max_steps or math.inf)
        plans.append(p._replace(begin=begin, end=end))
        begin = end
    return [p._replace(total=begin) for p in plans if p.end > p.begin]


def make_optimizer(o: Optim, module):
    """AdamW. Weight decay skips biases, norms (one dimension) and embeddings."""
    skipped = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    decayed, plain = [], []
    for p in module.parameters():
        if p.requires_grad:
            (plain if p.ndim < 2 or id(p) in skipped else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": o.weight_decay}]
    groups += [{"params": plain, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    kw = dict(lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps)
    if o.name == "adamw8bit":
        import bitsandbytes  # slow to import

        return bitsandbytes.optim.AdamW8bit(groups, **kw)
    return torch.optim.AdamW(groups, **kw, fused=True)


def clip_gradient(fabric, policy, optimizer, max_norm: float) -> torch.Tensor:
    """Scale the gradient to at most max_norm (0: leave it); its norm before, on the device."""
    most = max_norm or math.inf
    norm = fabric.clip_gradients(policy, optimizer, max_norm=most, error_if_nonfinite=False)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
