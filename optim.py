"""How far and how fast: the steps of a run, the learning rate, AdamW, clipping."""

import math
from typing import NamedTuple

import torch

from settings import Optim, Run


class Plan(NamedTuple):
    """How long the run is and what happens when, in optimizer steps."""

    per_epoch: int
    total: int  # of the whole run: what the learning rate's schedule spans
    val: int | None
    save: int | None
    begin: int = 0  # a round's steps are begin + 1 to end; KTO and DPO have one round
    end: int = 0


def steps_of(interval: int | float | None, per_epoch: int) -> int | None:
    """An int is steps, a float a fraction of an epoch."""
    return max(1, round(interval * per_epoch)) if isinstance(interval, float) else interval


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


def make_plan(s: Run, n: int) -> Plan:
    per_epoch = n // s.batch_size
    if s.limit_train:
        per_epoch = min(per_epoch, steps_of(s.limit_train, per_epoch))
    total = min(s.epochs * per_epoch, s.max_steps or math.inf)
    return Plan(per_epoch, total, steps_of(s.val_interval, per_epoch), steps_of(s.save_interval, per_epoch), 0, total)


def make_optimizer(s: Run, policy):
    """AdamW. Weight decay skips biases, norms (one dimension) and embeddings."""
    o, module = s.optim, policy.module
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    params = [p for p in module.parameters() if p.requires_grad]
    skip = [p.ndim < 2 or id(p) in embeddings for p in params]
    groups = [
        {"params": [p for p, out in zip(params, skip) if not out], "weight_decay": o.weight_decay},
        {"params": [p for p, out in zip(params, skip) if out], "weight_decay": 0.0},
    ]
    groups, kw = [g for g in groups if g["params"]], dict(lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps)
    if o.name == "adamw8bit":
        import bitsandbytes  # slow to import

        return bitsandbytes.optim.AdamW8bit(groups, **kw)
    return torch.optim.AdamW(groups, **kw, fused=True)


def clip(fabric, policy, optimizer, max_norm: float) -> float:
    """Scale the gradient to at most max_norm (0: leave it); its norm before."""
    norm = fabric.clip_gradients(policy, optimizer, max_norm=max_norm or math.inf, error_if_nonfinite=False)
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
