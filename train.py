"""Objective, what an algorithm is; and Trainer, THE loop.

An algorithm is a subclass of Objective, in a file of its own: a loss, and what it logs. A Trainer
runs the loop over a Run (run.py), which owns all that lives during a run. Reading order:
Objective, Trainer.fit, forward_backward, no_gradient_pass (z), evaluate.

How a step is split into micro-batches, devices and shards never changes the loss, the baseline z or
the gradient. So z is one number for the whole step, and the loss is a sum over the step's G examples,
divided by G once.

Shape letters: G examples of a step, B of a micro-batch, K completions of a prompt, n mismatched pairs.
"""

import inspect
import math
import time
import traceback
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

import numpy as np
import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat

from attention import PromptCache
from data import Batch, LossView, StepView, made_ahead, make_batch, mismatched_pairs, step_batches
from model import Scores
from records.examples import Example
from run import Run, saved_state
from runs.checkpoint import checkpoint_folder
from runs.console import BadInput, Failed, Interrupted, advance, progress, say
from runs.devices import all_reduce
from runs.logger import format_cells, write_json
from runs.optimizer import Plan, clip_gradient, is_due, iteration_plans, lr_at, steps_of
from runs.settings import refuse_unless

CHECKED = 4  # examples of the start check: more would make the first step wait
OWN_ANSWERS = 64  # own_kl scores at least so many: scoring all would take as long as sampling them


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

    def __post_init__(self):
        refuse_unless(
            self.preference_loss_weight + self.sft_loss_weight > 0,
            "preference_loss_weight and sft_loss_weight: both are 0: nothing to learn",
        )


class KL(NamedTuple):
    """The mismatched pairs of a step, of all ranks."""

    logratio: torch.Tensor  # (n,), nats
    z: torch.Tensor  # the baseline: one number, or (G,), one for each example


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
    """True: log-probs are those of each token, (B, K, L), until `reduce` makes them (B, K)."""
    average_logps = False
    """Whether a log-ratio is divided by the number of scored tokens."""

    def loss(self, logps, ref_logps, batch: LossView, z):
        """logps, ref_logps: log-probs of policy and reference, in nats, (B, K) or what `reduce` gives.
        z: the step's baseline, or (B,) the examples' own. -> the loss (B,) of each example, not their
        mean; and {column: (B,)}. The loop multiplies the loss by the examples' weights. These columns,
        with the loss among them, reach `metrics`. Validation calls it too.

        A micro-batch is any part of the step, so a loss must not mix its examples: sums over the step
        come from batch.step. The start check compares the losses of a few examples with those of each
        alone, with made-up log-probs of the reference."""
        raise NotImplementedError

    def reduce(self, logps, ref_logps, lengths):
        """With by_token: log-probs (B, K, L) of the completions' tokens, 0 beyond a completion's end -> what
        the loss, z and `logratio` get in their place: (B, K) where there are mismatched pairs or
        average_logps, which divides by the full lengths; else anything. lengths: (B, K)."""
        return logps, ref_logps

    def mismatched_pairs(self, examples: list[Example]) -> list[int | np.ndarray]:
        """With needs_mismatched_pairs, an entry for each example: the number of the example whose completion
        it is paired with, -1 for no pair; or an array of token ids. Here: the next example with
        another prompt and another completion (data.py).

        An override is called as each step begins, so it may use the policy (under torch.no_grad) and what
        after_step has changed; also in each validation with all of val, and in the start check. Rank 0's
        pairs count. With reference_cache it is called for all steps before the first one, and must then
        give the same again."""
        return mismatched_pairs(examples)

    def metrics(self, columns: dict, kl: KL) -> dict:
        """columns: of all G examples, on the CPU. -> a row of metrics.csv; None is an empty cell."""
        return {name: mean(column_G) for name, column_G in columns.items()}

    def logratio(self, logps, ref_logps, lengths):
        """r = log pi - log ref, of which the loss, z and the rewards are made; all of one shape."""
        r = logps if ref_logps is None else logps - ref_logps
        return r / lengths if self.average_logps else r

    def baseline(self, logratio_n, step: StepView):
        """z of a step from the log-ratios (n,) of its mismatched pairs: first the mean, then the clamp.
        -> a number, or (G,): one for each example. Pair i is that of example step.mismatched_index[i]; n
        may be 0. Validation calls it too: it must not update what the objective remembers."""
        return (logratio_n.sum() / max(1, len(logratio_n))).clamp(min=0)

    def after_step(self, columns: dict, kl: KL) -> None:
        """Called once a training step, after its row of metrics.csv, with the columns of all G examples,
        equal on all ranks: the place to update what the objective remembers. Validation never calls it."""

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
        """Raise BadInput for what would silently have no effect: a misspelt name, and parameters that nobody
        trains; and for a method that cannot be called as the loop calls it."""
        kind = type(self).__name__
        for name in dir(type(self)):
            hook = getattr(Objective, name, None)
            if hook is None:
                like = get_close_matches(name, dir(Objective), 1, cutoff=0.85)
                refuse_unless(not like, f"{kind}.{name}: not known: did you mean {like}?")
            elif inspect.isfunction(hook):
                _, *names = inspect.signature(hook).parameters
                try:
                    inspect.signature(getattr(self, name)).bind(*names)
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

    # for each of this rank's micro-batches (B, K), by token (B, K, L), without a reference None
    ref_logps: list
    kl: KL
    step: StepView


class Trainer:
    """The loop over a Run. A fork may override `forward` (the policy's log-probs: for the loss, for z,
    in validation and in the start check), `micro_batch_loss` or `optimizer_step`."""

    def __init__(self, run: Run):
        self.run, val = run, run.examples["val"]
        self.val = val[: steps_of(run.cfg.limit_val, len(val))]
        self.column_names = {}  # of each objective's loss, in training and in validation

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        """The end of a run, of whatever kind. Interrupted is no error: the state so far is saved."""
        run, failed = self.run, kind not in (None, Interrupted)
        if kind is Interrupted:
            traceback.clear_frames(trace)  # these hold the model, which must be gone at the end
            run.save_and_say_how_to_go_on()
        run.close(failed)
        if not failed and run.stop.signal:
            raise SystemExit(128 + run.stop.signal) from None  # as a shell reports a signal
        return not failed

    def fit(self, examples=None, plan: Plan | None = None) -> bool:
        """Train on `examples` until plan.end. Defaults: data.train, and the plan of the whole run; so a second
        fit needs a plan of its own. -> False if a signal, stop_at or max_time ended it early."""
        run = self.run
        assert plan or not run.last_step, "fit: the default plan has ended: give another one"
        examples = run.examples["train"] if examples is None else examples
        plan = plan or iteration_plans(run.cfg, [len(examples)])[0]
        run.last_step = plan.total
        self.before_first_step(examples, plan)
        first = run.state.step + 1
        batches = step_batches(run, examples, plan)
        # pairs of a fork's own may need what the last step has changed
        if not run.objective.overrides("mismatched_pairs"):
            batches = made_ahead(batches)
        for batch in batches:
            began, step = time.perf_counter(), run.state.step + 1
            needs_row = is_due(step, run.cfg.log_interval, plan)
            silent = 5 if step == first else 60  # seconds
            run.policy.train()  # everywhere else it is in eval mode
            columns, kl = self.forward_backward(batch, f"step {step}", silent, needs_row)
            run.policy.eval()
            grad_norm = clip_gradient(run.fabric, run.policy, run.optimizer, run.cfg.optim.clip)
            grad_norm = self.check_finite(batch, columns, kl, grad_norm)  # before any weight moves
            lr = self.optimizer_step(plan)
            # metrics see the objective as the loss saw it, so before after_step
            self.log(batch, columns, kl, {"grad_norm": grad_norm, "lr": lr}, plan, began)
            run.objective.after_step(columns, kl)
            if step == first:
                say(f"step {step}: {run.throughput.memory():.1f} GB of memory at its peak")
                saved_state(run.objective)  # what it cannot save is refused before hours are spent
            is_best = False
            checks = run.evaluator.checker and is_due(step, run.cfg.eval.check_interval, plan)
            if checks or is_due(step, run.cfg.val_interval, plan):
                is_best = self.evaluate(plan)
            if step == plan.end or is_best or is_due(step, run.cfg.save_interval, plan):
                run.save()
            if step == run.cfg.stop_at:
                run.stop.reason = run.stop.reason or "stop_at"
            if run.stop.reason and step < plan.total:
                run.save_and_say_how_to_go_on()
                return False
        return True

    def forward_backward(self, batch: Batch, title="", silent=5, entropy=False) -> tuple[dict, KL]:
        """Add the step's gradient to the policy's; in validation compute the same without a gradient.
        title, silent: of its progress. entropy: whether to compute it, for a column. -> {column: (G,)}
        and KL, of all ranks"""
        run, n, scored, policy_cache = self.run, len(batch.micro_batches), [], None
        trains = run.policy.training
        with progress(title, 2 * len(batch.examples) // run.fabric.world_size, silent):
            if trains and run.objective.needs_mismatched_pairs and n == 1:
                policy_cache = PromptCache()  # z comes after the forward, see below
            else:
                before = self.no_gradient_pass(batch)
            for i, (micro, packed) in enumerate(self.micro_batches(batch)):
                # FSDP2 always synchronises: otherwise each rank would hold the whole, unsharded gradient
                # until the last micro-batch
                synchronises = i == n - 1 or run.cfg.strategy == "fsdp"
                with run.fabric.no_backward_sync(run.policy, enabled=not synchronises):
                    scores = self.forward(packed._replace(entropy=entropy), policy_cache)
                    if policy_cache:
                        # The gradient pass has left the keys and values of the prompts in the cache.
                        # The no-gradient pass reads them, so each prompt is computed once.
                        before = self.no_gradient_pass(batch, policy_cache)
                    loss_B, columns = self.micro_batch_loss(
                        packed, scores, before.ref_logps[i], before
                    )
                    if trains:
                        # DDP and FSDP2 average gradients over ranks
                        weight = run.fabric.world_size / len(batch.examples)
                        run.fabric.backward(loss_B.sum() * (0.0 if micro.filler else weight))
                scored.append((micro, packed, columns))
        return self.gather_columns(scored, before.step), before.kl

    @torch.no_grad()
    def no_gradient_pass(self, batch: Batch, policy_cache=None) -> BeforeGradient:
        """The reference's log-probs of this rank's completions, and z from the log-ratios of all
        mismatched pairs of the step, on all ranks. policy_cache: the policy's keys and values of the
        prompts, if they are known.

        The reference runs the micro-batches of the policy, first the own completions, then the
        mismatched ones. So both models round alike. Before the first update the log-ratio of an own
        completion is exactly 0; of a mismatched one, too, if each device has one micro-batch, else it may
        differ by rounding. In a training step the policy is in train mode here, too: lora.dropout
        acts on z."""
        run, objective, step = self.run, self.run.objective, StepView(batch, self.run.fabric.device)
        has_pairs = batch.mismatched_pairs is not None
        reference = run.reference if objective.needs_reference else lambda *given: None
        ref_logps, logratio_G = [], torch.zeros_like(step.weight, dtype=torch.float64)
        for micro, packed in self.micro_batches(batch):
            ref_cache = PromptCache() if has_pairs else None
            ref_logps.append(reference(packed, ref_cache))
            if has_pairs:
                packed = self.pack(batch, micro.index, mismatched=True)
                pairs = self.forward(packed, policy_cache).logps, reference(packed, ref_cache)
                pairs = objective.reduce(*pairs, packed.length_BK)
                logratio_B = objective.logratio(*pairs, packed.length_BK)[:, 0]
                if not micro.filler:
                    logratio_G[packed.index_B] = logratio_B.double()
        # an example without a pair is left out of the mean
        logratio_n = all_reduce(logratio_G)[step.mismatched_index]
        z = objective.baseline(logratio_n, step)
        z = torch.as_tensor(z, device=logratio_n.device, dtype=torch.get_default_dtype())
        refuse_unless(
            z.shape in ((), (step.size,)),
            f"baseline: one number or ({step.size},), one for each example, not {tuple(z.shape)}",
        )
        return BeforeGradient(ref_logps, KL(logratio_n, z), step)

    def check_finite(self, batch: Batch, columns: dict, kl: KL, grad_norm) -> float:
        """Raise Failed if the norm, z or a loss is not finite: all three are of all ranks. This is the step's
        one wait for the device, in which the ranks also agree on whether to stop. -> the norm"""
        run, step, losses = self.run, self.run.state.step + 1, columns["loss"]
        stop_code = losses.new_full((), run.stop.code())
        # a loss may be infinite where its gradient is not, as by a constant
        of_step = [grad_norm.double(), kl.z.double().sum(), losses.sum(), stop_code]
        *numbers, stop_code = all_reduce(torch.stack(of_step), "max").tolist()
        run.stop.set_agreed(stop_code)
        if not all(map(math.isfinite, numbers)):
            bad = [e.where for e, x in zip(batch.examples, losses.tolist()) if not math.isfinite(x)]
            raise Failed(
                f"step {step}: not finite (gradient norm, sum of z, of losses: {numbers}): "
                f"{', '.join(bad[:8]) or 'no loss of a single example'}; the weights are unchanged"
            )
        return numbers[0]

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
        """Write a row of metrics.csv if one is due. It is of this step; the speed alone is of all steps since
        the last row."""
        run, step = self.run, self.run.state.step
        if needs_row := "entropy" in columns:
            # a mean over tokens, from the means over each example's
            entropy_G, tokens_G = columns.pop("entropy").cpu(), columns.pop("scored_tokens").cpu()
            row |= {
                "entropy": float(np.average(entropy_G, weights=tokens_G)),
                "epoch": (step - plan.begin) / plan.per_epoch,
                "samples": step * len(batch.examples),
            }
            metrics = self.metrics(columns, kl)
        # only now: on a GPU the row has waited for the step's end
        seconds = time.perf_counter() - began
        run.throughput.add(batch.examples, seconds)
        if needs_row:
            row = join_columns(metrics, row | run.throughput.read())
            run.logger.step(step, row, seconds)

    def metrics(self, columns: dict, kl: KL) -> dict:
        """A row by the objective's metrics. Raises Failed for a column that they miss."""
        columns = {name: x.cpu() for name, x in columns.items()}
        try:
            return self.run.objective.metrics(columns, KL(*(x.cpu() for x in kl)))
        except KeyError as e:
            raise Failed(f"metrics: no column {e}: the loss must return it") from e

    # ---- parts of a step ------------------------------------------------------------------------

    def pack(self, batch: Batch, index, mismatched: bool = False):
        return batch.pack(index, mismatched).to(self.run.fabric.device)

    def forward(self, packed, prompt_cache=None) -> Scores:
        """The policy's log-probs of a packed batch, with gradient in training. prompt_cache: where to
        leave the prompts' keys and values, or from where to read them."""
        return self.run.policy(packed, prompt_cache)

    def micro_batches(self, batch: Batch):
        """Yield each micro-batch of this rank with its packed batch, and count it in the progress bar. Where
        nothing is trained a signal may end the work between two; a step is never left in its middle
        (devices.Stop)."""
        run = self.run
        for micro in batch.micro_batches:
            yield micro, self.pack(batch, micro.index)
            advance(len(micro.index))
            if not run.policy.training:
                run.stop.check(run.fabric.device)

    def micro_batch_loss(self, packed, scores: Scores, ref_logps, before: BeforeGradient):
        """-> the losses (B,) of a micro-batch, and its columns {name: (B,)}. ref_logps: of its completions."""
        objective, z = self.run.objective, before.kl.z
        logps, ref_logps = objective.reduce(scores.logps, ref_logps, packed.length_BK)
        if z.dim():
            z = z[packed.index_B]
        view = LossView(before.step, packed, scores.outputs)
        loss_B, own = objective.loss(logps, ref_logps, view, z)
        B = len(packed.index)
        for name, x in {"losses": loss_B, **own}.items():
            got = tuple(getattr(x, "shape", ()))
            refuse_unless(  # a mean, for one, would silently scale the gradient
                got == (B,),
                f"loss: {name}: expected a tensor ({B},), one number an example, got {got}",
            )
        loss_B = loss_B * before.step.weight[packed.index_B]
        columns = {"loss": loss_B}
        if scores.entropy is not None:
            n_B = packed.length_BK.sum(1)
            columns |= {"entropy": scores.entropy.sum(1) / n_B, "scored_tokens": n_B}
        columns = join_columns(columns, own)
        return loss_B, {name: x.detach().double() for name, x in columns.items()}

    def gather_columns(self, scored: list, step: StepView) -> dict:
        """The columns of a step's examples, {name: (G,)}, of all ranks. scored: this rank's micro-batches, each
        with its packed batch and its columns. Raises BadInput unless each micro-batch, of all ranks and
        steps, has the same ones: in a column that only some have, the others' examples would count as 0."""
        run, (_, _, columns) = self.run, scored[0]
        key = type(run.objective), run.policy.training, "entropy" in columns
        if key not in self.column_names:
            self.column_names[key] = run.fabric.broadcast(list(columns))  # rank 0's, in its order
        names = self.column_names[key]
        whole = columns["loss"].new_zeros(len(names), step.size)
        for micro, packed, columns in scored:
            differ = ", ".join(sorted(set(columns) ^ set(names)))
            refuse_unless(
                not differ,
                f"loss: columns {differ}: not of every micro-batch: return the same columns for each",
            )
            if not micro.filler:
                whole[:, packed.index_B] = torch.stack([columns[name] for name in names])
        return dict(zip(names, all_reduce(whole)))

    # ---- between steps --------------------------------------------------------------------------

    @torch.no_grad()
    def score_examples(self, examples, title: str = "scoring") -> tuple[dict, KL]:
        """A step without a gradient over all these examples, with one z for all of them: the numbers depend on
        neither batch size nor ranks. -> {column: (n,)} and KL, of all ranks. A collective."""
        return self.forward_backward(make_batch(self.run, examples), title)

    def evaluate(self, plan: Plan) -> bool:
        """Write a row of val.csv, samples, and the checker's accuracy. -> whether the row is the best
        so far by keep_best"""
        run, step, val = self.run, self.run.state.step, self.val
        if not val:
            return False
        run.state.unvalidated = True
        # the numbers of the last step are of the weights that are exported
        is_exported = step == plan.total and run.export_rounds
        if is_exported:
            run.save()  # as not validated: a resume in the middle of this begins it again
            run.export("final", step)
            trained = self.metrics_of(val, "validation")
            with run.exported_weights("final"):
                row, samples = self.validation_row(plan)
            say_what_is_left("validation", trained, row)
        else:
            row, samples = self.validation_row(plan)
        run.state.unvalidated = False
        is_best = run.state.remember_if_best(row, run.cfg.keep_best)
        run.logger.validation(step, row, samples)
        if is_exported:
            run.save_state()
        return is_best

    def metrics_of(self, examples: list[Example], title: str) -> dict:
        """A row by the objective's metrics, of all these examples. Empty for prompts alone, of which only a
        checker has something to say. A collective."""
        if not examples[0].completions:
            return {}
        return self.metrics(*self.score_examples(examples, title))

    def validation_row(self, plan: Plan) -> tuple[dict, list[dict]]:
        """-> a row of val.csv, and samples. A collective."""
        run, step, answered = self.run, self.run.state.step, []
        row = self.metrics_of(self.val, "validation")
        if run.evaluator.checker:
            share = own_kl = None
            if step == 0 or is_due(step, run.cfg.eval.check_interval, plan):
                share, answered = run.evaluator.accuracy(step)
                own_kl = self.own_kl(answered)
            row = join_columns(row, {"checker_accuracy": share, "kl/own": own_kl})
        return row, run.evaluator.samples(answered)

    @torch.no_grad()
    def own_kl(self, answered: list[Example]) -> float | None:
        """The mean of r, in nats an answer, over 64 to 127 of the check's answers (all if there are fewer). It
        estimates KL(policy || reference) if they were sampled at temperature 1 without top_k, top_p or
        a penalty; else it may even be negative. None without a reference in memory."""
        run = self.run
        if run.reference is None or run.cfg.reference_cache:
            return None
        answered = answered[:: max(1, len(answered) // OWN_ANSWERS)]  # of all kinds of prompts
        sums = []
        for micro, packed in self.micro_batches(Batch(answered, budget=run.budget)):
            r_B = (self.forward(packed).logps - run.reference(packed))[:, 0]
            sums.append(r_B.double().sum() * (not micro.filler))
        return all_reduce(sum(sums)).item() / len(answered)

    # ---- before the first step, and after the last one ------------------------------------------

    def before_first_step(self, examples, plan: Plan) -> None:
        """Of a run, or of an iteration: check the start, precompute, evaluate at step 0."""
        run, step = self.run, self.run.state.step
        run.logger.begin(plan, len(examples))
        if step == run.reference_step:
            self.check_start(make_batch(run, examples[: run.cfg.batch_size]))
        if run.cfg.reference_cache and not run.reference.released:
            self.precompute(examples, plan)
        if step == 0 or run.state.unvalidated:
            self.evaluate(plan)

    @torch.no_grad()
    def check_start(self, batch: Batch) -> None:
        """On a few examples of each rank: raise Failed unless the reference is the model that the run starts
        from (r is exactly 0 on own completions and on mismatched ones); refuse a loss that mixes
        examples. Say the log-prob a token."""
        run, index = self.run, batch.micro_batches[0].index[:CHECKED]
        packed = self.pack(batch, index)
        scores, agree = self.forward(packed), ""
        if run.objective.needs_reference and not run.cfg.reference:
            r = [scores.logps - run.reference.compute(packed)]  # never from the cache
            if batch.mismatched_pairs is not None:
                pairs = self.pack(batch, index, mismatched=True)
                r.append(self.forward(pairs).logps - run.reference.compute(pairs))
            largest = torch.cat(r, dim=1).abs().max().item()
            if largest != 0:
                raise Failed(
                    f"step {run.state.step}: policy and reference differ by {largest:.3g} nats: the "
                    "reference is not the model that the run starts from, or gives no finite log-probs"
                )
            agree = "policy and reference agree to the bit; "
        self.check_mixing(batch, index, scores)
        nats = scores.logps.double().sum() / packed.length_BK.sum()
        say(f"step {run.state.step}: {agree}{nats:.2f} nats a token (-1 to -4 is usual)")

    def check_mixing(self, batch: Batch, index: list[int], scores: Scores) -> None:
        """Refuse a loss of an example that depends on the other examples of its micro-batch: another
        split would then give another gradient. So the losses of `index` are compared with those of each
        example alone. The reference's log-probs are made up, 0 for all examples but the first: if all
        log-ratios were 0, a mean over examples might not show."""
        logps, ref_logps, losses = scores.logps, None, []
        if self.run.objective.needs_reference:
            ref_logps = torch.zeros_like(logps)
            ref_logps[0] = logps[0]
        kl = KL(logps.new_zeros(0), logps.new_zeros(()))
        before = BeforeGradient([], kl, StepView(batch, logps.device))
        for at in slice(None), *(slice(i, i + 1) for i in range(len(index))):
            part = [None if x is None else x[at] for x in (logps, scores.outputs, ref_logps)]
            packed = self.pack(batch, index[at])
            losses.append(self.micro_batch_loss(packed, Scores(*part[:2]), part[2], before)[0])
        # not to the bit: a fork's own micro_batch_loss may run a model, which rounds differently
        refuse_unless(
            torch.allclose(losses[0], torch.cat(losses[1:]), 0.02, 1e-6, equal_nan=True),
            "loss: an example's loss depends on the other examples of its micro-batch, so another "
            "split would give another gradient: take sums over examples from batch.step",
        )

    @torch.no_grad()
    def precompute(self, examples, plan: Plan) -> None:
        """Compute all log-probs of the reference that the run will need, and release it."""
        run = self.run
        batches = list(step_batches(run, examples, plan))
        batches += [make_batch(run, x) for x in (self.val, run.examples["test"]) if x]
        n = sum(len(batch.examples) for batch in batches)
        with progress("precomputing log-probs", n // run.fabric.world_size):
            for batch in batches:
                for micro, packed in self.micro_batches(batch):
                    run.reference(packed)
                    if batch.mismatched_pairs is not None:
                        run.reference(self.pack(batch, micro.index, mismatched=True))
        run.reference.release()

    def finish(self) -> None:
        """Compare the answers of the last weights with those before the run; export the last weights, and then
        the best ones, and score the test split with each."""
        run, test, scores, last = self.run, self.run.examples["test"], {}, self.run.state.step
        run.evaluator.compare(last)
        if run.cfg.lora.rank:
            run.export_adapters()
        for name, step in (("final", last), ("best", run.state.best_step)):
            if step is None:
                continue
            run.export(name, step)
            say(f"\nexported to {run.folder / name}")
            if test and test[0].completions:
                run.load(checkpoint_folder(run.folder, step))  # what moved after it goes back, too
                row = self.metrics_of(test, "the test split")
                if run.export_rounds:
                    trained = row
                    with run.exported_weights(name):
                        row = self.metrics_of(test, "the test split")
                    say_what_is_left(f"test, {name} weights", trained, row)
                scores[name] = row
                say(f"test, {name} weights: {', '.join(format_cells(row))}")
        if scores and run.fabric.global_rank == 0:
            write_json(run.folder / "eval" / "test.json", scores)


def say_what_is_left(what: str, trained: dict, exported: dict) -> None:
    """Say how much of the margin, or where there is none of the loss, the rounding of an export has left, if
    it is less than nine tenths. trained, exported: rows of the same examples."""
    name = "rewards/margins" if (trained.get("rewards/margins") or 0) > 0 else "loss"
    before, after = trained.get(name), exported.get(name)
    if before is None or after is None or before <= 0:
        return
    share = after / before if name != "loss" else before / max(after, before)
    if share < 0.9:
        say(
            f"{what}: {name} is {after:.4g} for the exported weights and {before:.4g} for the trained ones, "
            f"before they were rounded ({share:.0%}); --export.dtype float32 exports those"
        )


def mean(x: torch.Tensor) -> float | None:
    """The mean of a 1-D tensor. None, which is an empty cell, when the tensor is empty."""
    return x.mean().item() if len(x) else None


def join_columns(own: dict, programs: dict) -> dict:
    """The columns of a loss of one's own and those of the program, refused if both have a name: one would
    silently replace the other."""
    shared = ", ".join(sorted(own.keys() & programs.keys()))
    refuse_unless(
        not shared, f"loss: {shared}: the program has a column of this name: rename yours"
    )
    return own | programs
