"""Objective, what an algorithm is; and Trainer, THE loop.

An algorithm is a subclass of Objective, in a file of its own: a loss, and what it
logs. The Trainer owns what lives and changes during a run. Reading order:
Objective, Trainer.fit, forward_backward, no_gradient_pass (z), evaluate. What
happens before the first step and after the last one is in lifecycle.py.

The cut is free: micro-batches, devices and sharding change memory and speed, never
the loss, the baseline z or the gradient. So z is one number for the whole step, and
the loss is a sum over the step's G examples, divided by G once.

Shape letters: G examples of a step, B of a micro-batch, K completions of a prompt.
"""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

import model
from data import (
    Batch,
    Micro,
    MicroBatch,
    cut_micro_batches,
    epoch_order,
    mismatched,
    split_over_ranks,
    to_device,
)
from lifecycle import Lifecycle
from reference import CachedReference
from runs.devices import all_reduce
from runs.errors import Failed
from runs.metrics import mean
from runs.optimizer import Plan, clip_gradient, is_due, lr_at, make_plan, steps_of
from runs.settings import DEFAULT_TOKENS


class KL(NamedTuple):
    """A step's mismatched pairs, of all ranks: their log-ratios (n,) in nats, n at
    most G; and z."""

    logratio: torch.Tensor
    z: torch.Tensor


class Objective:
    """An algorithm. Only `loss` must be given; all else has a default."""

    records = "rated"  # what it learns from: rated, paired or demonstrations
    kl_pairs = False  # whether a step also scores mismatched pairs (x_i, y_j), without gradient
    needs_reference = True  # False: none is loaded or run, and ref_logps is None
    average_logps = False  # divide log-ratios by the number of scored tokens

    @property
    def runs_reference(self) -> bool:
        """Whether a step has a no-gradient pass."""
        return self.needs_reference or self.kl_pairs

    def loss(self, logps, ref_logps, batch: MicroBatch, z):
        """Log-probs (B, K) of policy and reference in nats, the step's baseline z
        -> loss (B,), of each example, not their mean; and {column: (B,)}. Columns,
        with the loss among them, reach `metrics`. Validation calls it too."""
        raise NotImplementedError

    def metrics(self, columns: dict, kl: KL) -> dict:
        """Columns of all G examples, on the CPU -> a row of metrics.csv; None is an
        empty cell."""
        return {name: mean(column_G) for name, column_G in columns.items()}

    def logratio(self, logps, ref_logps, lengths):
        """r = log pi - log ref: what the loss, z and the rewards are made of."""
        r = logps - ref_logps
        return r / lengths if self.average_logps else r

    def baseline(self, kl_n):
        """z of a step, a number or tensor, from the log-ratios (n,) of its mismatched
        pairs: the mean, then the clamp. n may be 0. Validation and precomputing call
        it too: it must not update what the objective remembers."""
        return (kl_n.sum() / max(1, len(kl_n))).clamp(min=0)

    def after_step(self, columns: dict, kl: KL) -> None:
        """Called once a training step with the columns of all G examples, on the
        device, equal on all ranks: the place to update what the objective remembers.
        Validation never gets here."""

    def state_dict(self) -> dict:
        """What it remembers, {attribute: number, text or list}, tensors by .item() or
        .tolist(). Saved with every checkpoint; what is left out starts anew."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state)


class NoGrad(NamedTuple):
    """What a step's no-gradient pass found."""

    ref_logps: torch.Tensor | None  # (G, K), this rank's rows filled
    kl: KL


class Trainer(Lifecycle):
    """Owns a run: cfg, fabric, objective, validation (the objective of val.csv), state,
    logger and evaluator (see lifecycle.py), policy, reference, optimizer (policy.py)."""

    def fit(self, examples=None, plan: Plan | None = None) -> bool:
        """Train on `examples` until plan.end (default: data.train, as the settings
        say). -> False if a signal, stop_at or max_time ended it early."""
        examples = self.examples["train"] if examples is None else examples
        plan = plan or make_plan(self.cfg, len(examples))
        self.before_first_step(examples, plan)
        for batch in self.batches(examples, plan):
            began = time.perf_counter()
            columns, kl = self.forward_backward(batch)
            grad_norm = clip_gradient(self.fabric, self.policy, self.optimizer, self.cfg.optim.clip)
            grad_norm = self.check_finite(batch, columns, kl, grad_norm)  # before any weight moves
            lr = self.optimizer_step(plan)
            self.objective.after_step(columns, kl)
            self.log(batch, columns, kl, {"grad_norm": grad_norm, "lr": lr}, plan, began)
            step, last = self.state.step, self.state.step == plan.end
            checked = self.evaluator.checker and is_due(step, plan.check)
            is_best = self.evaluate(plan) if last or checked or is_due(step, plan.val) else False
            if last or is_best or is_due(step, plan.save):
                self.save()
            if self.stop_requested() and step < plan.total:
                self.save_and_say_how_to_go_on(plan)
                return False
        return True

    def forward_backward(self, batch: Batch) -> tuple[dict, KL]:
        """The step's gradient, left in the policy. -> {column: (G,)} and KL, of all
        ranks."""
        micros, policy, first = self.micro_batches(batch), self.policy, None
        alone = len(micros) == len(self.micro_batches(batch, no_grad=True)) == 1
        if alone and self.objective.kl_pairs:
            # The policy's gradient pass goes first, and the no-gradient pass reads the keys and
            # values that it leaves of the prompts: each prompt is computed once.
            packed, cache = self.pack(batch, micros[0].index), model.PromptCache()
            first = packed, self.policy(packed, cache)
            policy = partial(self.policy, prompt_cache=cache)
        columns, no_grad = {}, self.no_gradient_pass(batch, policy, self.objective)
        for i, micro in enumerate(micros):
            more = i < len(micros) - 1 and self.cfg.strategy != "fsdp"  # that keeps gradients whole
            with self.fabric.no_backward_sync(self.policy, enabled=more):
                forward = first or self.forward(batch, micro)
                loss_B = self.loss(self.objective, batch, micro, forward, no_grad, columns)
                # DDP and FSDP2 average gradients over ranks
                weight = 0.0 if micro.filler else self.fabric.world_size / len(batch.examples)
                self.fabric.backward(loss_B.sum() * weight)
        return self.gather(columns), no_grad.kl

    @torch.no_grad()
    def no_gradient_pass(self, batch: Batch, policy, objective: Objective) -> NoGrad:
        """The reference's log-probs of this rank's completions, and z from the
        log-ratios of all mismatched pairs of the step, on all ranks."""
        G, device, pairs = len(batch.examples), self.fabric.device, batch.partners is not None
        kl_G, ref_logps = torch.zeros(G, device=device, dtype=torch.float64), None
        for micro in self.micro_batches(batch, no_grad=True) if objective.runs_reference else ():
            packed = self.pack(batch, micro.index, borrowed=pairs)
            ref_BK = self.reference(packed)  # with pairs, the borrowed completion is the last of K
            if ref_logps is None:
                ref_logps = torch.zeros(G, ref_BK.shape[1] - pairs, device=device)
            if pairs:
                logps = policy(self.pack(batch, micro.index, own=False, borrowed=True))
                lengths = packed.length_BK[:, -1]
                kl_B = objective.logratio(logps[:, 0], ref_BK[:, -1], lengths)
            if not micro.filler:
                ref_logps[packed.index_B] = ref_BK[:, : ref_logps.shape[1]]
                if pairs:
                    kl_G[packed.index_B] = kl_B.double()
        kl_n = kl_G[:0]
        if pairs:  # an example without a partner leaves the mean
            paired = [i for i, j in enumerate(batch.partners) if j >= 0]
            kl_n = all_reduce(kl_G)[to_device(torch.tensor(paired, dtype=torch.long), device)]
        z = objective.baseline(kl_n)
        z = z if isinstance(z, torch.Tensor) else torch.full((), z, device=device)
        return NoGrad(ref_logps, KL(kl_n, z.to(torch.get_default_dtype())))

    def check_finite(self, batch: Batch, columns: dict, kl: KL, grad_norm) -> float:
        """Norm and z are of all ranks; a loss that is not finite shows in one of
        them. The step's one wait for the device, in which ranks also agree on
        whether to stop. -> the norm"""
        asked = torch.full_like(grad_norm, self.stop.code(), dtype=torch.float64)
        numbers = torch.stack([grad_norm.double(), kl.z.double(), asked])
        grad_norm, z, self.stop.agreed = all_reduce(numbers, "max").tolist()
        if math.isfinite(grad_norm) and math.isfinite(z):
            return grad_norm
        self.logger.examples(self.state.step + 1, batch, columns)
        bad = (~columns["loss"].isfinite()).nonzero()[:, 0].tolist()
        names = ", ".join(batch.examples[i].where for i in bad[:8])
        raise Failed(
            f"step {self.state.step + 1}: not finite (gradient norm {grad_norm}): "
            f"{names or 'no single loss, only the gradient'}; the weights are untouched"
        )

    def optimizer_step(self, plan: Plan) -> float:
        """-> the learning rate of the step"""
        lr = lr_at(self.state.step + 1, plan, self.cfg.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.step += 1
        return lr

    def log(self, batch: Batch, columns: dict, kl: KL, row: dict, plan: Plan, began: float):
        """A row of metrics.csv where one is due; it describes its own step."""
        step, metrics = self.state.step, None
        if step == plan.end or is_due(step, self.cfg.log_interval):
            epoch = (step - plan.begin) / plan.per_epoch
            metrics = self.objective.metrics(*columns_to_cpu(columns, kl)) | row
            metrics |= {"epoch": epoch, "samples": step * len(batch.examples)}
        self.throughput.add(batch.examples, time.perf_counter() - began)
        self.logger.step(step, metrics and metrics | self.throughput.read())
        if step == self.cfg.examples_at:
            self.logger.examples(step, batch, columns)

    def stop_requested(self) -> bool:
        """After the same step on all ranks."""
        if self.state.step == self.cfg.stop_at:
            self.stop.why = "stop_at"
            return True
        return self.stop.requested()

    # ---- parts of a step ------------------------------------------------------------------------

    def batches(self, examples, plan: Plan):
        """The batches of the steps to come. While one is trained on, a thread packs
        the next."""

        def ahead(step):
            batch = self.batch_of(examples, plan, step)
            for no_grad in (False, True)[: 1 + self.objective.runs_reference]:
                batch.pack_ahead(no_grad, self.micro_batches(batch, no_grad))
            return batch

        steps = range(self.state.step + 1, plan.end + 1)
        if self.cfg.debug:  # a breakpoint wants the main thread
            yield from map(ahead, steps)
            return
        with ThreadPoolExecutor(1) as thread:
            packing = [thread.submit(ahead, step) for step in steps[:1]]
            for step in steps:
                batch = packing.pop().result()
                if step < plan.end:
                    packing.append(thread.submit(ahead, step + 1))
                yield batch

    def batch_of(self, examples, plan: Plan, step: int) -> Batch:
        """The G examples of a step: a slice of its epoch's order, the same on every
        rank."""
        epoch, i = divmod(step - 1 - plan.begin, plan.per_epoch)
        shuffle, G = self.cfg.data.shuffle, self.cfg.batch_size
        order = epoch_order(len(examples), plan.begin + epoch, self.cfg.seed, shuffle)
        return self.make_batch([examples[j] for j in order[i * G : (i + 1) * G]], self.objective)

    def make_batch(self, examples, objective: Objective) -> Batch:
        partners = mismatched(examples) if objective.kl_pairs else None
        return Batch(examples, partners, self.cfg.data.score_prompt, self.tokenizer)

    def micro_batches(self, batch: Batch, no_grad: bool = False) -> list[Micro]:
        """This rank's part of a batch, cut to the budget. Both passes cut the same
        part, and all ranks have equally many."""
        if no_grad in batch.micro:
            return batch.micro[no_grad]
        cfg, fabric, sizes = self.cfg, self.fabric, batch.sizes()
        tokens = cfg.micro_batch_tokens or (None if cfg.micro_batch_size else DEFAULT_TOKENS)
        parts = split_over_ranks(sizes, fabric.world_size, by_tokens=tokens is not None)
        if no_grad:
            sizes = batch.sizes(borrowed=True)
            tokens = cfg.no_grad_tokens or (tokens and 2 * tokens)
        return cut_micro_batches(sizes, parts, cfg.micro_batch_size, tokens)[fabric.global_rank]

    def pack(self, batch: Batch, index, own: bool = True, borrowed: bool = False):
        return batch.pack(index, own, borrowed).to(self.fabric.device)

    def forward(self, batch: Batch, micro: Micro):
        """-> the packed micro-batch, and the policy's log-probs (B, K)"""
        packed = self.pack(batch, micro.index)
        return packed, self.policy(packed)

    def loss(self, objective, batch: Batch, micro: Micro, forward, no_grad: NoGrad, columns: dict):
        """A micro-batch's losses (B,). Its columns go to their places among the
        step's G; a filler only makes the columns, so that all ranks have the same."""
        (packed, logps), ref_logps = forward, no_grad.ref_logps
        ref_logps = None if ref_logps is None else ref_logps[packed.index_B]
        view = batch.micro_batch(micro.index, packed.length_BK)
        loss_B, values = objective.loss(logps, ref_logps, view, no_grad.kl.z)
        for name, value_B in {"loss": loss_B, **values}.items():
            if value_B.shape != logps.shape[:1]:  # a mean here would scale the gradient, silently
                shape, B = tuple(value_B.shape), len(logps)
                raise Failed(f"loss: {name}: one number an example, shape ({B},), not {shape}")
            value_B = value_B.detach().double()
            column_G = columns.setdefault(name, value_B.new_zeros(len(batch.examples)))
            if not micro.filler:
                column_G[packed.index_B] = value_B
        return loss_B

    def gather(self, columns: dict) -> dict:
        """Columns of which each rank has filled its part, made whole."""
        return dict(zip(columns, all_reduce(torch.stack(list(columns.values())))))

    # ---- between steps --------------------------------------------------------------------------

    def held_out(self, name: str) -> list:
        """The first limit_val examples of val, or test."""
        examples = self.examples[name]
        limit = self.cfg.limit_val if name == "val" else None
        return examples[: steps_of(limit, len(examples))]

    @torch.no_grad()
    def score(self, examples) -> dict:
        """A step without a gradient over a whole split, in file order: one z for
        all of it, so the row depends on neither batch size nor ranks."""
        if not examples[0].completions:  # prompts alone: only a checker has something to say
            return {}
        self.policy.eval()
        batch, columns = self.make_batch(examples, self.validation), {}
        no_grad = self.no_gradient_pass(batch, self.policy, self.validation)
        for micro in self.micro_batches(batch):
            forward = self.forward(batch, micro)
            self.loss(self.validation, batch, micro, forward, no_grad, columns)
        self.policy.train()
        return self.validation.metrics(*columns_to_cpu(self.gather(columns), no_grad.kl))

    def evaluate(self, plan: Plan) -> bool:
        """A row of val.csv, samples, a checker's verdict. -> best so far by
        keep_best?"""
        cfg, step, val = self.cfg, self.state.step, self.held_out("val")
        if not val or cfg.debug:
            return False
        row = self.score(val)
        if self.evaluator.checker:
            asked = step in (0, plan.end) or is_due(step, plan.check)
            row["checker_accuracy"] = self.evaluator.accuracy(step) if asked else None
        is_best = self.state.is_best(row, cfg.keep_best)
        own_start = self.validation.needs_reference and not cfg.reference
        if step == 0 and own_start:  # r is 0: these would compare rounding errors
            row |= dict.fromkeys(n for n in row if n.startswith(("accuracy", "auc")))
        self.logger.validation(step, row, self.evaluator.samples())
        return is_best

    # ---- before the first step ------------------------------------------------------------------

    def before_first_step(self, examples, plan: Plan) -> None:
        """Of a run, or of an iteration: check the start, precompute, evaluate at
        step 0."""
        step, cfg = self.state.step, self.cfg
        self.logger.begin(plan, len(examples), cfg.batch_size, step)
        equal = step == self.reference_step and not cfg.reference
        if equal and self.objective.needs_reference and not cfg.debug:
            self.check_start(self.make_batch(examples[: cfg.batch_size], self.objective))
        if cfg.reference_cache and not isinstance(self.reference, CachedReference):
            self.precompute(examples, plan)
        if step == 0:
            self.evaluate(plan)
        self.policy.train()


def columns_to_cpu(columns: dict, kl: KL) -> tuple[dict, KL]:
    """In one copy, which waits for the device once."""
    parts = [*columns.values(), kl.logratio, kl.z.double()[None]]
    *values, logratio, z = torch.cat(parts).cpu().split([len(x) for x in parts])
    return dict(zip(columns, values)), KL(logratio, z[0].to(kl.z.dtype))
