"""Objective, what an algorithm is; and Trainer, THE loop.

An algorithm is a subclass of Objective, in a file of its own: a loss, and what it logs. A Trainer
runs the loop over a Run (run.py), which owns all that lives during a run. Reading order:
Objective, Trainer.fit, forward_backward, no_gradient_pass (z), evaluate.

How a step is split into micro-batches, devices and shards changes memory and speed, never the loss,
the baseline z or the gradient. So z is one number for the whole step, and the loss is a sum over the
step's G examples, divided by G once.

Shape letters: G examples of a step, B of a micro-batch, K completions of a prompt, n mismatched
pairs of a step (n <= G).
"""

import inspect
import math
import time
import traceback
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat

from attention import PromptCache
from data import (
    Batch,
    LossView,
    MicroBatch,
    StepView,
    made_ahead,
    make_batch,
    mismatched_pairs,
    step_batches,
)
from model import Scores
from records.examples import Example
from reference import CachedReference
from run import Run, saved_state
from runs.checkpoint import checkpoint_folder
from runs.console import BadInput, Failed, Interrupted, advance, progress, say
from runs.devices import all_reduce
from runs.logger import write_json
from runs.optimizer import Plan, clip_gradient, is_due, iteration_plans, lr_at, steps_of
from runs.settings import refuse_unless

CHECKED = 4  # examples of the start check: more would make the first step wait
OWN_ANSWERS = 64  # that own_kl scores at least: all would take as long as sampling them


@dataclass(frozen=True)
class PreferenceSettings:
    """What the objectives of kto.py and dpo.py share."""

    beta: PositiveFloat = 0.1
    """Strength of the pull back to the reference; a larger one keeps the policy closer."""
    average_logps: bool = False
    """Divide log-ratios by the number of scored tokens, in z too."""
    preference_loss_weight: NonNegativeFloat = 1.0
    """Weight of the preference loss."""
    sft_loss_weight: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of the desirable (chosen) completions."""
    sft_average_logps: bool | None = None
    """Divide that log-likelihood by its number of tokens. Default: as average_logps."""

    @property
    def sft_average(self) -> bool:
        return self.average_logps if self.sft_average_logps is None else self.sft_average_logps

    def validate(self, group: str) -> None:
        both = f"{group}: preference_loss_weight and sft_loss_weight are both 0"
        losses = self.preference_loss_weight, self.sft_loss_weight
        refuse_unless(max(losses) > 0, f"{both}: nothing to learn")


class KL(NamedTuple):
    """The mismatched pairs of a step, of all ranks."""

    logratio: torch.Tensor
    """(n,), nats."""
    z: torch.Tensor
    """The baseline: one number, or (G,), one for each example."""


class Objective:
    """An algorithm. Only `loss` must be given; all else has a default. Its attributes below stay the same
    during a fit: a thread that makes batches reads them a step ahead."""

    records = "rated"
    """What it learns from: rated, paired, demonstrations or prompts."""
    needs_mismatched_pairs = False
    """Whether a step also scores mismatched pairs (x_i, y_j), without gradient, for z."""
    needs_reference = True
    """False: no reference model is loaded or run, ref_logps is None, and a log-ratio is log pi."""
    by_token = False
    """True: `reduce` gets the log-probs of each token."""
    average_logps = False
    """Whether a log-ratio is divided by the number of scored tokens."""

    @property
    def needs_no_gradient_pass(self) -> bool:
        return self.needs_reference or self.needs_mismatched_pairs

    def loss(self, logps, ref_logps, batch: LossView, z):
        """logps, ref_logps: log-probs of policy and reference, in nats, (B, K) or what `reduce` gives.
        z: the step's baseline, or (B,) the examples' own. -> the loss (B,) of each example, not their
        mean; and {column: (B,)}. The loop multiplies the loss by the examples' weights. These columns,
        with the loss among them, reach `metrics`. Validation calls it too.

        A micro-batch is any part of the step, so a loss must not mix its examples: sums over the step
        come from batch.step. The start check compares a loss with those of the halves of its examples,
        with made-up log-probs of the reference."""
        raise NotImplementedError

    def reduce(self, logps, ref_logps, lengths):
        """Only with by_token. Log-probs (B, K, L) of the completions' tokens, 0 beyond a completion's end
        -> what the loss, z and `logratio` get in their place, most often (B, K). lengths: (B, K). A program's
        SFT term and its columns logps/* come from this result; average_logps still divides by the full
        lengths."""
        return logps.sum(-1), None if ref_logps is None else ref_logps.sum(-1)

    def mismatched_pairs(self, examples: list[Example]) -> list[int | np.ndarray]:
        """With needs_mismatched_pairs: for each example the number of the one whose completion its
        mismatched pair has, -1 for no pair; or this completion itself, an array of token ids.

        An override is called as each step begins, so it may use the policy and what after_step has
        changed. It is also called in each validation with all of val, and in the start check. With
        reference_cache it is called for all steps before the first one, and must then give the same again. This
        one needs no policy: it is called a step ahead, in a thread."""
        return mismatched_pairs(examples)

    def metrics(self, columns: dict, kl: KL) -> dict:
        """columns: of all G examples, on the CPU. -> a row of metrics.csv; None is an empty cell."""
        return {name: mean(column_G) for name, column_G in columns.items()}

    def logratio(self, logps, ref_logps, lengths):
        """r = log pi - log ref, of which the loss, z and the rewards are made. Arguments and result
        have one shape."""
        r = logps if ref_logps is None else logps - ref_logps
        return r / lengths if self.average_logps else r

    def baseline(self, logratio_n, step: StepView):
        """z of a step from the log-ratios (n,) of its mismatched pairs: first the mean, then the clamp.
        -> a number, or (G,): one for each example. Pair i is that of example step.mismatched_index[i]; n
        may be 0. Validation and precomputing call it too: it must not update what the objective
        remembers."""
        return (logratio_n.sum() / max(1, len(logratio_n))).clamp(min=0)

    def after_step(self, columns: dict, kl: KL) -> None:
        """Called once a training step, after its row of metrics.csv, with the columns of all G examples,
        on the device, equal on all ranks: the place to update what the objective remembers. Validation
        never calls it."""

    def make_module(self, width: int) -> torch.nn.Module | None:
        """A module of the algorithm's own: it gets the policy's hidden states (T, width), one for each
        token of the completions, and gives (T, ...). The loss finds this in batch.outputs. A token's
        state is the one that predicts it: it has read the prompt and the tokens before.

        The module becomes a part of the policy: trained by the same optimizer (its learning rate times
        the module's `lr_scale`, if it has one), sharded, saved and resumed, but not exported. Between
        forwards its parameters are sharded, so the loss should use its outputs only."""
        return None

    def state_dict(self) -> dict:
        """What each checkpoint saves, {attribute: value}: numbers, texts, or lists of these (float(x),
        x.tolist()). A resume sets these attributes; the others start anew."""
        return {}

    @classmethod
    def overrides(cls, method: str) -> bool:
        """Whether this algorithm has its own version of a method of Objective."""
        return getattr(cls, method) is not getattr(Objective, method)

    def check(self) -> None:
        """Raise BadInput for what would do nothing without a word: a misspelt name, and parameters that
        nobody trains; and for a method that cannot be called as the loop calls it."""
        plain, kind = Objective(), type(self).__name__
        for name in dir(type(self)):
            own, expected = getattr(self, name), getattr(plain, name, None)
            if not hasattr(plain, name):
                like = get_close_matches(name, dir(plain), 1, cutoff=0.85)
                refuse_unless(not like, f"{kind}.{name}: not known: did you mean {like}?")
            elif callable(expected) and not name.startswith("__"):
                names = inspect.signature(expected).parameters
                try:
                    inspect.signature(own).bind(*names)
                except TypeError:
                    raise BadInput(f"{kind}.{name}: expected ({', '.join(names)})") from None
        for name, x in vars(self).items():
            parameters = x.parameters() if isinstance(x, torch.nn.Module) else [x]
            refuse_unless(
                not any(getattr(p, "requires_grad", False) for p in parameters),
                f"{kind}.{name}: nothing trains or saves it: make it in make_module",
            )


class BeforeGradient(NamedTuple):
    """What the no-gradient pass of a step found."""

    ref_logps: torch.Tensor | None
    """(G, K), or (G, K, L) by token, of which the rows of this rank's examples are filled; None
    without a reference."""
    kl: KL
    step: StepView


class Trainer:
    """The loop over a Run. A fork may override `forward` (the policy's log-probs: for the loss, for z,
    in validation and in the start check), `micro_batch_loss` or `optimizer_step`."""

    def __init__(self, run: Run):
        self.run = run
        self.has_fitted = False
        self.column_names = {}  # of each objective's loss, in training and in validation

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        """The end of a run, of whatever kind. Interrupted is no error: what there is is saved."""
        run, failed = self.run, kind not in (None, Interrupted)
        if kind is Interrupted:
            traceback.clear_frames(trace)  # they hold the model, which must be gone at the end
            run.save_and_say_how_to_go_on()
        run.close(failed)
        if not failed and run.stop.signal:
            raise SystemExit(128 + run.stop.signal) from None  # as a shell reports a signal
        return not failed

    def fit(self, examples=None, plan: Plan | None = None) -> bool:
        """Train on `examples` until plan.end. Defaults: data.train, and the plan of the whole run; so a
        second fit needs a plan of its own (optimizer.iteration_plans). -> False if a signal, stop_at
        or max_time ended it early."""
        run = self.run
        assert plan or not self.has_fitted, (
            "fit: the default plan has ended: give one that begins here"
        )
        self.has_fitted = True
        examples = run.examples["train"] if examples is None else examples
        plan = plan or iteration_plans(run.cfg, [len(examples)])[0]
        run.last_step = plan.total
        self.before_first_step(examples, plan)
        first = run.state.step + 1
        batches = step_batches(run, examples, plan)
        # pairs of its own may need what the last step has changed
        if not run.objective.overrides("mismatched_pairs"):
            batches = made_ahead(batches)
        for batch in batches:
            began, step = time.perf_counter(), run.state.step + 1
            silent = 5 if step == first else 60  # seconds
            with self.progress(f"step {step}", batch, silent):
                columns, kl = self.forward_backward(batch, is_due(step, run.cfg.log_interval, plan))
            grad_norm = clip_gradient(run.fabric, run.policy, run.optimizer, run.cfg.optim.clip)
            grad_norm = self.check_finite(batch, columns, kl, grad_norm)  # before any weight moves
            lr = self.optimizer_step(plan)
            if step == first:
                say(f"step {step}: {run.throughput.memory():.1f} GB of memory at its peak")
            # metrics see the objective as the loss saw it, so before after_step
            self.log(batch, columns, kl, {"grad_norm": grad_norm, "lr": lr}, plan, began)
            run.objective.after_step(columns, kl)
            if step == first:
                saved_state(run.objective)  # what it cannot save is refused before hours are spent
            is_best = False
            checks = run.evaluator.checker and is_due(step, run.cfg.eval.check_interval, plan)
            if checks or is_due(step, run.cfg.val_interval, plan):
                is_best = self.evaluate(plan)
            if step == plan.end or is_best or is_due(step, run.cfg.save_interval, plan):
                run.save()
            if run.stop.reason and step < plan.total:
                run.save_and_say_how_to_go_on()
                return False
        return True

    def progress(self, title: str, batch: Batch, silent: float = 5):
        """Of the passes over a batch, in examples of this rank."""
        passes = 1 + self.run.objective.needs_no_gradient_pass
        n = passes * len(batch.examples) // self.run.fabric.world_size
        return progress(title, n, silent)

    def forward_backward(self, batch: Batch, entropy: bool = False) -> tuple[dict, KL]:
        """Add the step's gradient to the policy's. entropy: whether to compute it, for a column.
        -> {column: (G,)} and KL, of all ranks"""
        run, columns = self.run, {}
        micros = batch.micro_batches
        cache = scores = None
        if run.objective.needs_mismatched_pairs and len(micros) == 1:
            # The gradient pass goes first and leaves the keys and values of the prompts in a cache;
            # the no-gradient pass reads them. So each prompt is computed once.
            cache = PromptCache()
            packed = self.pack(batch, micros[0].index)._replace(entropy=entropy)
            scores = self.forward(packed, cache)
        before = self.no_gradient_pass(batch, cache)
        for i, micro in enumerate(micros):
            # FSDP2 always synchronises: otherwise each rank would hold the whole, unsharded gradient
            # until the last micro-batch
            synchronises = i == len(micros) - 1 or run.cfg.strategy == "fsdp"
            with run.fabric.no_backward_sync(run.policy, enabled=not synchronises):
                if cache is None:
                    packed = self.pack(batch, micro.index)._replace(entropy=entropy)
                    scores = self.forward(packed)
                loss_B = self.micro_batch_loss(batch, micro, packed, scores, before, columns)
                # DDP and FSDP2 average gradients over ranks
                weight = 0.0 if micro.filler else run.fabric.world_size / len(batch.examples)
                run.fabric.backward(loss_B.sum() * weight)
                advance(len(micro.index))
        return self.sum_over_ranks(columns), before.kl

    @torch.no_grad()
    def no_gradient_pass(self, batch: Batch, policy_cache=None) -> BeforeGradient:
        """The reference's log-probs of this rank's completions, and z from the log-ratios of all
        mismatched pairs of the step, on all ranks. policy_cache: the policy's keys and values of the
        prompts, if they are known.

        The reference runs the micro-batches of the policy, first the own completions, then the
        mismatched ones. So both models round alike. Before the first update the log-ratio of an own
        completion is exactly 0; of a mismatched one, too, if the step is one micro-batch or the
        examples are long (else it may differ by rounding). Later the rounding of the two mostly
        cancels."""
        run, objective, device = self.run, self.run.objective, self.run.fabric.device
        G, has_pairs, ref_logps = len(batch.examples), batch.mismatched_pairs is not None, None
        logratio_G = torch.zeros(G, device=device, dtype=torch.float64)
        for micro in batch.micro_batches if objective.needs_no_gradient_pass else []:
            prompt_cache = PromptCache() if has_pairs else None
            if objective.needs_reference:
                packed = self.pack(batch, micro.index)
                ref_own = run.reference(packed, prompt_cache)
                if ref_logps is None:
                    ref_logps = torch.zeros(G, *ref_own.shape[1:], device=device)
                if not micro.filler:
                    ref_logps[packed.index_B] = ref_own
            if has_pairs:
                packed = self.pack(batch, micro.index, mismatched=True)
                logps, ref_pairs = self.forward(packed, policy_cache).logps, None
                if objective.needs_reference:
                    ref_pairs = run.reference(packed, prompt_cache)
                if objective.by_token:
                    logps, ref_pairs = objective.reduce(logps, ref_pairs, packed.length_BK)
                logratio_B = objective.logratio(logps, ref_pairs, packed.length_BK)[:, 0]
                if not micro.filler:
                    logratio_G[packed.index_B] = logratio_B.double()
            advance(len(micro.index))
            if not run.policy.training:  # a step is never left in its middle (devices.Stop)
                run.stop.check(device)
        step = StepView(batch, device)
        # an example without a pair is left out of the mean
        logratio_n = all_reduce(logratio_G)[step.mismatched_index] if has_pairs else logratio_G[:0]
        z = objective.baseline(logratio_n, step)
        z = torch.as_tensor(z, device=device, dtype=torch.get_default_dtype())
        if z.shape not in ((), (G,)):
            shape = tuple(z.shape)
            raise Failed(f"baseline: one number or ({G},), one for each example, not {shape}")
        return BeforeGradient(ref_logps, KL(logratio_n, z), step)

    def check_finite(self, batch: Batch, columns: dict, kl: KL, grad_norm) -> float:
        """Raise Failed if the norm, z or a loss is not finite: all three are of all ranks. This is the step's
        one wait for the device, in which the ranks also agree on whether to stop. -> the norm"""
        run = self.run
        step = run.state.step + 1
        stop_code = torch.full_like(grad_norm, run.stop.code(step), dtype=torch.float64)
        # a loss may be infinite where its gradient is not, as by a constant
        of_step = [grad_norm.double(), kl.z.double().sum(), columns["loss"].sum(), stop_code]
        grad_norm, z, loss, stop_code = all_reduce(torch.stack(of_step), "max").tolist()
        run.stop.set_agreed(stop_code)
        if all(map(math.isfinite, (grad_norm, z, loss))):
            return grad_norm
        bad = (~columns["loss"].isfinite()).nonzero()[:, 0].tolist()
        names = ", ".join(batch.examples[i].where for i in bad[:8])
        raise Failed(
            f"step {step}: not finite (gradient norm {grad_norm}, sum of z {z}): "
            f"{names or 'no loss of a single example'}; the weights are unchanged"
        )

    def optimizer_step(self, plan: Plan) -> float:
        """Change the weights. -> the learning rate of the step"""
        run = self.run
        lr = lr_at(run.state.step + 1, plan, run.cfg.optim)
        for group in run.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.state.step += 1
        return lr

    def log(self, batch: Batch, columns: dict, kl: KL, row: dict, plan: Plan, began: float) -> None:
        """Write a row of metrics.csv if one is due: of this step, but its speed since the last row."""
        run, step = self.run, self.run.state.step
        metrics = None
        if is_due(step, run.cfg.log_interval, plan):
            columns, kl = on_cpu(columns, kl)
            # a mean over tokens, from the means over each example's
            entropy_G, tokens_G = columns.pop("entropy"), columns.pop("scored_tokens")
            row["entropy"] = float(np.average(entropy_G, weights=tokens_G))
            metrics = self.metrics(columns, kl)
            row["epoch"] = (step - plan.begin) / plan.per_epoch
            row["samples"] = step * len(batch.examples)
        # only now: on a GPU the row has waited for the step's end
        seconds = time.perf_counter() - began
        run.throughput.add(batch.examples, seconds)
        if metrics is not None:
            metrics = join_columns(metrics, row | run.throughput.read())
        run.logger.step(step, metrics, seconds)

    def metrics(self, columns: dict, kl: KL) -> dict:
        """A row by the objective's metrics. Raises Failed for a column that they miss."""
        try:
            return self.run.objective.metrics(columns, kl)
        except KeyError as e:
            raise Failed(f"metrics: no column {e}: the loss must return it") from e

    # ---- parts of a step ------------------------------------------------------------------------

    def pack(self, batch: Batch, index, mismatched: bool = False):
        return batch.pack(index, mismatched).to(self.run.fabric.device)

    def forward(self, packed, prompt_cache=None) -> Scores:
        """The policy's log-probs of a packed batch, with gradient in training. prompt_cache: where to
        leave the prompts' keys and values, or from where to read them."""
        return self.run.policy(packed, prompt_cache)

    def micro_batch_loss(
        self, batch: Batch, micro: MicroBatch, packed, scores: Scores, before, columns
    ):
        """-> the losses (B,) of a micro-batch. before: what no_gradient_pass found. The columns are
        written to their places among the step's G. A filler only makes the columns, so that all ranks
        have the same ones."""
        objective, logps = self.run.objective, scores.logps
        ref_logps, z = before.ref_logps, before.kl.z
        if ref_logps is not None:
            # a filler is another rank's example: with log-ratios of 0 its loss, which counts for
            # nothing, is finite
            ref_logps = logps.detach() if micro.filler else ref_logps[packed.index_B]
        if objective.by_token:
            logps, ref_logps = objective.reduce(logps, ref_logps, packed.length_BK)
        if z.dim():
            z = z[packed.index_B]
        view = LossView(before.step, packed, scores.outputs)
        loss_B, values = check_loss(objective.loss(logps, ref_logps, view, z), len(packed.index))
        self.check_columns(values)
        loss_B = loss_B * before.step.weight[packed.index_B]
        values = join_columns({"loss": loss_B}, values)
        if scores.entropy is not None:
            n_B = packed.length_BK.sum(1)
            of_tokens = {"entropy": scores.entropy.sum(1) / n_B, "scored_tokens": n_B}
            values = join_columns(values, of_tokens)
        for name, value_B in values.items():
            value_B = value_B.detach().double()
            column_G = columns.setdefault(name, value_B.new_zeros(len(batch.examples)))
            if not micro.filler:
                column_G[packed.index_B] = value_B
        return loss_B

    def check_columns(self, columns: dict) -> None:
        """Raise Failed unless each micro-batch, of all ranks and steps, has the same columns: in a
        column that only some have, the examples of the others would count as 0. A collective at an
        objective's first micro-batch."""
        key = type(self.run.objective), self.run.policy.training
        if key not in self.column_names:
            self.column_names[key] = self.run.fabric.broadcast(list(columns))  # rank 0's
        if differ := set(columns) ^ set(self.column_names[key]):
            names = ", ".join(sorted(differ))
            raise Failed(
                f"loss: columns {names}: not of every micro-batch: return the same columns for each"
            )

    def sum_over_ranks(self, columns: dict) -> dict:
        """Columns of which each rank has filled its part, made whole."""
        # the columns of a loss may come in another order on another rank
        names = sorted(columns)
        whole = dict(zip(names, all_reduce(torch.stack([columns[name] for name in names]))))
        return {name: whole[name] for name in columns}

    # ---- between steps --------------------------------------------------------------------------

    @property
    def val(self) -> list:
        """The examples of val, the first limit_val of them."""
        examples = self.run.examples["val"]
        return examples[: steps_of(self.run.cfg.limit_val, len(examples))]

    def score(self, examples, title: str = "validation") -> dict:
        """-> a row of val.csv"""
        if not examples[0].completions:  # prompts alone: only a checker has something to say
            return {}
        return self.metrics(*self.score_examples(examples, title))

    @torch.no_grad()
    def score_examples(self, examples, title: str = "scoring") -> tuple[dict, KL]:
        """A step without a gradient over all these examples, in their order, with the policy as it is.
        One z for all of them, so the numbers depend on neither batch size nor ranks. -> what a loss
        gives of each, {column: (n,)}, and KL; of all ranks, on the CPU. A collective. title: of its
        progress."""
        run, columns = self.run, {}
        run.policy.eval()
        batch = make_batch(run, examples)
        with self.progress(title, batch):
            before = self.no_gradient_pass(batch)
            for micro in batch.micro_batches:
                packed = self.pack(batch, micro.index)
                self.micro_batch_loss(batch, micro, packed, self.forward(packed), before, columns)
                advance(len(micro.index))
                run.stop.check(run.fabric.device)
        run.policy.train()
        return on_cpu(self.sum_over_ranks(columns), before.kl)

    def evaluate(self, plan: Plan) -> bool:
        """Write a row of val.csv, samples, and the checker's accuracy. -> whether the row is the best
        so far by keep_best"""
        run, step, val = self.run, self.run.state.step, self.val
        if not val:
            return False
        run.state.unvalidated = True
        row = self.score(val)
        if run.evaluator.checker:
            share = own_kl = None
            if step == 0 or is_due(step, run.cfg.eval.check_interval, plan):
                share = run.evaluator.accuracy(step)
                own_kl = self.own_kl(run.evaluator.checked_answers)
            row = join_columns(row, {"checker_accuracy": share, "kl/own": own_kl})
        samples = run.evaluator.samples(step)
        run.state.unvalidated = False
        is_best = run.state.remember_if_best(row, run.cfg.keep_best)
        run.logger.validation(step, row, samples)
        return is_best

    @torch.no_grad()
    def own_kl(self, answers: list) -> float | None:
        """The mean of r, in nats an answer, over 64 to 127 of the check's answers (all if there are fewer).
        It estimates KL(policy || reference) if they are sampled from the policy as it is, at temperature 1
        without top_k, top_p or a penalty; else it may be negative. None without a reference in memory."""
        run, reference = self.run, self.run.reference
        if reference is None or getattr(reference, "released", False):
            return None
        answers = answers[:: max(1, len(answers) // OWN_ANSWERS)]  # of all kinds of prompts
        run.policy.eval()
        total = torch.zeros((), device=run.fabric.device, dtype=torch.float64)
        batch = Batch(answers, cut=run.cut)
        for micro in batch.micro_batches:
            packed = self.pack(batch, micro.index)
            r_B = (self.forward(packed).logps - reference.compute(packed))[:, 0]
            total += r_B.double().sum() * (not micro.filler)
            run.stop.check(run.fabric.device)
        run.policy.train()
        return all_reduce(total).item() / len(answers)

    # ---- before the first step, and after the last one ------------------------------------------

    def before_first_step(self, examples, plan: Plan) -> None:
        """Of a run, or of an iteration: check the start, precompute, evaluate at step 0."""
        run, step, cfg = self.run, self.run.state.step, self.run.cfg
        run.logger.begin(plan, len(examples))
        if step == run.reference_step:
            self.check_start(make_batch(run, examples[: cfg.batch_size]))
        if isinstance(run.reference, CachedReference) and not run.reference.released:
            self.precompute(examples, plan)
        if step == 0 or run.state.unvalidated:
            self.evaluate(plan)
        run.policy.train()

    @torch.no_grad()
    def check_start(self, batch: Batch) -> None:
        """On a few examples: raise Failed unless the reference is the model that the run starts from (r
        is exactly 0 on own completions and on mismatched ones), and for a loss that mixes examples.
        Say the log-prob a token."""
        run = self.run
        run.policy.eval()
        index = batch.micro_batches[0].index[:CHECKED]
        is_start = run.objective.needs_reference and not run.cfg.reference
        caches, differences = (PromptCache(), PromptCache()), []
        for mismatched in (False, True) if batch.mismatched_pairs is not None else (False,):
            packed = self.pack(batch, index, mismatched)
            scores = self.forward(packed, caches[0])
            if is_start:
                ref_logps = run.reference.compute(packed, caches[1])
                differences.append((scores.logps - ref_logps).abs().max())
            if not mismatched:
                own, n_tokens = scores, packed.length_BK.sum()
        agree = ""
        if is_start:
            largest = all_reduce(torch.stack(differences).max().double(), "max").item()
            reason = "the reference is not the model that the run starts from"
            if not math.isfinite(largest):
                reason = "the weights do not give finite log-probs"
            if largest != 0:
                raise Failed(
                    f"step {run.state.step}: policy and reference differ by {largest:.3g} nats: {reason}"
                )
            agree = "policy and reference agree to the bit; "
        run.policy.train()  # the loss may be another one in validation
        self.check_mixing(batch, index, own)
        sums = torch.stack([own.logps.double().sum(), n_tokens.double()])
        logp, n_tokens = all_reduce(sums).tolist()
        say(f"step {run.state.step}: {agree}{logp / n_tokens:.2f} nats a token")

    def check_mixing(self, batch: Batch, index: list[int], scores: Scores) -> None:
        """Raise Failed if an example's loss depends on the other examples of its micro-batch: another
        cut would then give another gradient. So the losses of `index` are compared with those of its
        halves. The reference's log-probs are made up, 0 for all examples but the first: if all
        log-ratios were 0, a mean over examples might not show."""
        step, logps, n = StepView(batch, self.run.fabric.device), scores.logps, len(index)
        ref_logps = None
        if self.run.objective.needs_reference:
            ref_logps = logps.new_zeros(step.size, *logps.shape[1:])
            ref_logps[index[0]] = logps[0]
        before = BeforeGradient(ref_logps, KL(logps.new_zeros(0), logps.new_zeros(())), step)
        losses = []
        for start, end in ((0, n), (0, n // 2), (n // 2, n)):
            if part := index[start:end]:
                outputs = None if scores.outputs is None else scores.outputs[start:end]
                given = self.pack(batch, part), Scores(logps[start:end], outputs), before, {}
                losses.append(self.micro_batch_loss(batch, MicroBatch(part), *given))
        # not to the bit: a fork's own model may round differently in a half
        if not torch.allclose(losses[0], torch.cat(losses[1:]), 0.02, 1e-6, equal_nan=True):
            raise Failed(
                "loss: an example's loss depends on the other examples of its micro-batch, so another "
                "cut would give another gradient: take sums over examples from batch.step"
            )

    @torch.no_grad()
    def precompute(self, examples, plan: Plan) -> None:
        """Compute all log-probs of the reference that the run will need, and release it."""
        run = self.run
        splits = [x for x in (self.val, run.examples["test"]) if x]
        batches = chain(step_batches(run, examples, plan), (make_batch(run, x) for x in splits))
        n = (plan.end - run.state.step) * run.cfg.batch_size + sum(map(len, splits))
        with progress("precomputing log-probs", n // run.fabric.world_size):
            for batch in batches:
                for micro in batch.micro_batches:
                    run.reference(self.pack(batch, micro.index))
                    if batch.mismatched_pairs is not None:
                        run.reference(self.pack(batch, micro.index, mismatched=True))
                    advance(len(micro.index))
                    run.stop.check(run.fabric.device)
        run.reference.release()

    def finish(self) -> None:
        """Of the last weights, and then of the best ones: export them and score the test split. Answers of
        the last ones are compared with those before the run."""
        run, test, scores = self.run, self.run.examples["test"], {}
        last = run.state.step
        if run.saved_step < last:  # a branch that has no step left
            run.save()
        for name, step in (("final", last), ("best", run.state.best_step)):
            if step is None:
                continue
            if step != last:
                run.load(checkpoint_folder(run.folder, step))
            run.export(name, step)
            if name == "final":
                if run.cfg.lora.rank:
                    run.export_adapters()
                run.evaluator.compare(step)
                say(f"\nexported to {run.folder / name}")
            if test and test[0].completions and (name == "final" or step != last):
                row = scores[name] = self.score(test, "the test split")
                cells = [f"{k} {row[k]:.6g}" for k in ("loss", "accuracy") if k in row]
                say(f"test, {name} weights: {', '.join(cells)}")
        if scores and run.fabric.global_rank == 0:
            write_json(run.folder / "eval" / "test.json", scores)


def mean(x: torch.Tensor) -> float | None:
    """The mean of a 1-D tensor. None, which is an empty cell, when the tensor is empty."""
    return x.mean().item() if len(x) else None


def join_columns(own: dict, programs: dict) -> dict:
    """The columns of a loss of one's own and those of the program. Raises Failed if both have a name:
    one would silently replace the other."""
    if shared := sorted(own.keys() & programs.keys()):
        raise Failed(
            f"loss: {', '.join(shared)}: the program has a column of this name: rename yours"
        )
    return own | programs


def check_loss(returned, B: int) -> tuple[torch.Tensor, dict]:
    """What a loss has returned: the losses (B,), and {column: (B,)}. Raises Failed if it is anything
    else: a mean, for one, would silently scale the gradient."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise Failed("loss: expected (losses, columns), a tensor and a dict of tensors")
    loss_B, columns = returned
    for name, x in {"losses": loss_B, **columns}.items():
        got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        if got != (B,):
            raise Failed(
                f"loss: {name}: expected a tensor ({B},), one number an example, got {got}"
            )
    if torch.is_grad_enabled() and not loss_B.requires_grad:
        raise Failed("loss: it has no gradient, so nothing would be learned")
    return loss_B, columns


def on_cpu(columns: dict, kl: KL) -> tuple[dict, KL]:
    return {name: x.cpu() for name, x in columns.items()}, KL(*(x.cpu() for x in kl))
