"""The loop: steps, their gradients, when z is computed; validations, checkpoints and stops between steps.

A Trainer trains the policy of a Run (run.py, which owns all that lives during a run) by an Objective (objective.py).

Reading order: Trainer.fit; gradient, with its two orders; the parts of a step, where `z_of_step` makes z. Validation
and the end of a run are in evaluation.py.

How a step is split into micro-batches, devices and shards must change the loss, z and the gradient by rounding at
most (with lora.dropout, by its random draws too). To this end z is made once for the whole step, and the loss is a
sum over the step's G examples, divided by G once.

Shape letters: G examples of a step, B of a micro-batch, K completions of an example, n mismatched pairs.
"""

import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np
import torch

import checks
import evaluation
from attention import PromptCache
from data import MicroBatch, Part, Step, made_ahead, step_examples
from infra.console import BadInput, Interrupted, advance, progress, say, user_code
from infra.devices import all_reduce
from infra.optimizer import Plan, clip_gradient, is_due, lr_at, run_plan
from infra.seeds import seed_for_forks
from model import Scores
from objective import Z, copied_to_cpu, join_columns
from packing import PackedBatch
from records.examples import Example
from reference import precompute
from run import Run

Columns = dict[str, torch.Tensor]  # name: (B,) of a micro-batch, (G,) after gather_columns
LOOP_COLUMNS = ("entropy", "scored_tokens")  # of the loop itself: no objective sees them


class Trainer:
    """The loop over a Run. A fork may override `forward` (the policy's log-probs: for the loss, for z,
    in validation and in the start check), `micro_batch_loss` or `optimizer_step`."""

    def __init__(self, run: Run):
        self.run = run
        self.val = run.examples["val"]  # for evaluation.validate
        # the names of a loss's columns; for the keys see gather_columns
        self.column_names: dict[tuple, list[str]] = {}
        self.is_first_step = True  # whether the present fit has made no step yet

    def __enter__(self):
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None):
        """End the run. After a signal in a validation or a rollout (Interrupted) the run is saved and ends as usual.
        After an error nothing is saved: a line names the last checkpoint, and the error is re-raised."""
        run = self.run
        failed = kind not in (None, Interrupted)
        if kind is Interrupted:
            traceback.clear_frames(trace)  # they hold the model, which close must be able to free
            run.stop_early(run.stop.reason)
        elif isinstance(error, Exception) and (run.saved_step or run.state.iteration):
            run.say_how_to_continue("stopped by an error")  # in an iteration answers are saved too
        run.close(failed)
        # Launchers kill the other processes once one has failed, and rank 0 may still upload its logs.
        if not failed and run.stop.signal and run.fabric.global_rank == 0:
            raise SystemExit(128 + run.stop.signal) from None  # as a shell reports a signal
        return not failed

    def fit(self, examples: list[Example] | None = None, plan: Plan | None = None) -> bool:
        """Train on `examples` until plan.end, the last step of this iteration (plan.total: of the run). Defaults:
        data.train, and the plan of the whole run; so a second fit needs a plan of its own. -> False if a signal,
        stop_at ended it early. A signal in the middle of a validation raises Interrupted instead."""
        run = self.run
        assert plan or run.last_step == 0, "fit: the default plan has ended: give another one"
        examples = run.examples["train"] if examples is None else examples
        plan = plan or run_plan(run.cfg, len(examples))
        run.last_step = plan.total
        self.before_first_step(examples, plan)
        self.is_first_step = True
        for step, micro_batches in self.steps(examples, plan):
            self.train_step(step, micro_batches, plan)
            number = run.state.step
            is_best = False
            checks_answers = evaluation.check_is_due(run, plan)
            if checks_answers or is_due(number, run.cfg.val_interval, plan):
                is_best = evaluation.validate(self, plan)
            # does nothing where validate has saved this step already, before it spent time on it
            if number == plan.end or is_best or is_due(number, run.cfg.save_interval, plan):
                run.save()
            if number == run.cfg.stop_at and number < plan.total:
                run.stop.reason = run.stop.reason or "stop_at"
            if run.stop.reason and number < plan.total:
                run.stop_early(run.stop.reason)
                return False
        return True

    def train_step(self, step: Step, micro_batches: list[MicroBatch], plan: Plan) -> None:
        """An optimizer step, and its row of metrics.csv if one is due."""
        run = self.run
        began = time.perf_counter()
        run.state.step += 1  # from here on the number of this step
        number = run.state.step
        needs_row = is_due(number, run.cfg.log_interval, plan)
        seed_for_forks(run.fabric, run.cfg.seed, number)
        run.policy.train()  # everywhere else it is in eval mode
        # the first step, which is slow and comes before any row, shows sooner that the run is alive
        with self.progress(f"step {number}", step, silent=5 if self.is_first_step else 60):
            columns, z = self.gradient(step, micro_batches, entropy=needs_row)
        run.policy.eval()
        if self.is_first_step:
            checks.say_without_gradient(run.policy.module.unique_parameters())
        grad_norm = clip_gradient(run.fabric, run.policy, run.optimizer, run.cfg.optim.clip)
        columns, z, grad_norm = copied_to_cpu(columns, z, grad_norm)
        run.stop.agree(run.fabric.device)  # here, because the device has no work queued now
        checks.check_finite(step, columns["loss"], z, grad_norm, number)
        visible = {name: x for name, x in columns.items() if name not in LOOP_COLUMNS}
        objective_row = self.metrics_row(visible, z) if needs_row else {}
        with user_code("after_step"):
            run.objective.after_step(step, visible, z)
        lr = self.optimizer_step(plan)
        # On a GPU the optimizer may still run. The next step waits for it, and its time counts there.
        seconds = time.perf_counter() - began
        run.throughput.add(step.examples, seconds)
        if needs_row:
            # throughput.read() is of all steps since the last row, all else of this step
            of_step = {"grad_norm": grad_norm.item(), "lr": lr}
            of_step |= self.loop_row(step, columns, plan) | run.throughput.read()
            run.logger.step(number, join_columns(objective_row, of_step), seconds)
        if self.is_first_step:
            say(f"step {number}: {run.throughput.memory():.1f} GB of memory at its peak")
            checks.check_state_dict(run.objective)  # before hours are spent
        self.is_first_step = False

    def steps(self, examples: list[Example], plan: Plan) -> Iterator[tuple[Step, list[MicroBatch]]]:
        """The steps to come with this rank's micro-batches, packed. A thread makes and packs the next one while a step
        runs, unless the objective chooses mismatched pairs by what the last step has changed."""
        run = self.run
        steps = map(self.make_step, step_examples(examples, run.cfg, plan, run.state.step))
        made = ((step, list(step.micro_batches())) for step in steps)
        if run.objective.overrides("mismatched_completions"):
            return made
        return made_ahead(made)

    # ---- a step's gradient: z before the policy's forwards, or after ---------------------------------

    def gradient(
        self, step: Step, micro_batches: list[MicroBatch], entropy: bool = False
    ) -> tuple[Columns, Z]:
        """Add the step's gradient to the policy's. entropy: whether to compute it, for a column.
        -> the columns of all G examples, and z; both are the same on all ranks.

        A loss may need z, and z needs the mismatched pairs of the whole step. With several micro-batches z is
        made first: to keep the graphs of all forwards until z is known would take too much memory. With one
        micro-batch and pairs the policy's forward comes first: it leaves the keys and values of its prompts, the
        pairs read them, and no prompt is computed twice. Both orders give the same numbers, up to rounding (and
        dropout).
        """
        step.move_to(self.run.fabric.device)
        # all ranks have equally many micro-batches, so they take the same way
        if step.mismatched_completions is not None and len(micro_batches) == 1:
            return self.policy_forward_first(step, micro_batches[0], entropy)
        return self.z_first(step, micro_batches, entropy)

    def z_first(
        self, step: Step, micro_batches: list[MicroBatch], entropy: bool
    ) -> tuple[Columns, Z]:
        """Reference and z of all micro-batches, then forward and backward of each."""
        ref_logps, z = self.reference_and_z(step, micro_batches)
        scored = []
        for i, micro in enumerate(self.on_device(micro_batches)):
            with self.synchronised(i == len(micro_batches) - 1):
                by_token = self.run.objective.by_token
                scores = self.forward(micro.packed, by_token=by_token, entropy=entropy)
                loss_B, columns = self.micro_batch_loss(micro, scores, ref_logps[i], z.z_G)
                self.backward(loss_B, micro)
            # not the micro-batch: its tokens would stay on the device
            scored.append((micro.part, micro.index_B, columns))
        return self.gather_columns(step, scored), z

    def policy_forward_first(
        self, step: Step, micro: MicroBatch, entropy: bool
    ) -> tuple[Columns, Z]:
        """One micro-batch: the forward with gradient, z from its prompts, then the backward. Other forwards run in
        between. They do not disturb DDP and FSDP2, which prepare a backward only in forwards with gradient."""
        micro = micro.to(self.run.fabric.device)
        with self.synchronised(True):
            by_token = self.run.objective.by_token
            scores = self.forward(
                micro.packed, keeps_prompts=True, by_token=by_token, entropy=entropy
            )
            advance(len(micro.part.index))  # of two for each example: see progress
            ref_logps, mismatched_logratio_B = self.reference_and_pairs(micro, scores.prompts)
            z = self.z_of_step(step, [(micro.part, micro.index_B, mismatched_logratio_B)])
            loss_B, columns = self.micro_batch_loss(micro, scores, ref_logps, z.z_G)
            self.backward(loss_B, micro)
        advance(len(micro.part.index))
        return self.gather_columns(step, [(micro.part, micro.index_B, columns)]), z

    @torch.no_grad()
    def score(self, step: Step) -> tuple[Columns, Z]:
        """What `gradient` returns, without a gradient. A step may be a whole validation split: its
        micro-batches are packed one by one, and only one is on the device at a time."""
        step.move_to(self.run.fabric.device)
        ref_logps, z = self.reference_and_z(step, step.micro_batches())
        scored = []
        for i, micro in enumerate(self.on_device(step.micro_batches())):
            scores = self.forward(micro.packed, by_token=self.run.objective.by_token)
            _, columns = self.micro_batch_loss(micro, scores, ref_logps[i], z.z_G)
            scored.append((micro.part, micro.index_B, columns))
        return self.gather_columns(step, scored), z

    def score_examples(self, examples: list[Example], title: str = "scoring") -> tuple[Columns, Z]:
        """Score all these examples as one step, with one z for all of them: but for rounding the numbers
        depend on neither batch size nor ranks. -> columns and z, of all ranks. A collective."""
        step = self.make_step(examples)
        with self.progress(title, step):
            return self.score(step)

    # ---- parts of a step -------------------------------------------------------------------------

    def reference_and_z(
        self, step: Step, micro_batches: Iterable[MicroBatch]
    ) -> tuple[list[torch.Tensor | None], Z]:
        """-> the reference's log-probs of each micro-batch's completions, and z. In a training step lora.dropout acts
        on z as on the loss."""
        all_ref_logps = []
        pairs = []
        for micro in self.on_device(micro_batches):
            ref_logps, mismatched_logratio_B = self.reference_and_pairs(micro)
            all_ref_logps.append(ref_logps)
            pairs.append((micro.part, micro.index_B, mismatched_logratio_B))
        return all_ref_logps, self.z_of_step(step, pairs)

    @torch.no_grad()
    def reference_and_pairs(
        self, micro: MicroBatch, prompts: PromptCache | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """-> the reference's log-probs of a micro-batch's completions, and the log-ratios (B,) of its mismatched pairs,
        in nats; None if it has none. prompts: the policy's keys and values of the prompts, if they are known.

        The reference runs the same micro-batches as the policy, so equal models give exactly r = 0 for the examples'
        own completions. For mismatched ones they do so in policy_forward_first, where both go on from kept prompts.
        In z_first the policy computes the prompts anew, and the reference does not: r is 0 up to rounding."""
        objective = self.run.objective
        has_pairs = micro.mismatched is not None
        ref_scores = self.reference_forward(micro.packed, keeps_prompts=has_pairs)
        if not has_pairs:
            return ref_scores.logps, None
        packed = micro.mismatched.to(self.run.fabric.device)
        logps = self.forward(packed, prompts, by_token=objective.by_token).logps
        ref_logps = self.reference_forward(packed, ref_scores.prompts).logps
        logps, ref_logps = objective.reduce_tokens(logps, ref_logps, packed.length_BK)
        mismatched_logratio_BK = objective.logratio(logps, ref_logps, packed.length_BK)
        return ref_scores.logps, mismatched_logratio_BK[:, 0]  # one completion each: K is 1

    @torch.no_grad()
    def z_of_step(
        self, step: Step, pairs: list[tuple[Part, torch.Tensor, torch.Tensor | None]]
    ) -> Z:
        """z from the log-ratios of the mismatched pairs of all ranks. pairs: of each of this rank's micro-batches its
        part, its examples' indices and the log-ratios (B,) of its mismatched pairs."""
        device = self.run.fabric.device
        # 0 at the examples of other ranks, so a sum over ranks puts them together
        mismatched_logratio_G = torch.zeros(step.size, dtype=torch.float64, device=device)
        for part, index_B, mismatched_logratio_B in pairs:
            if mismatched_logratio_B is not None and not part.filler:
                mismatched_logratio_G[index_B] = mismatched_logratio_B.double()
        all_reduce(mismatched_logratio_G)
        # without the examples that have no pair
        mismatched_logratio_n = mismatched_logratio_G[step.mismatched_index]
        with user_code("make_z"):
            z = self.run.objective.make_z(mismatched_logratio_n, step)  # a number, or (G,)
        # in the type in which the losses are computed
        z = torch.as_tensor(z, device=device, dtype=torch.get_default_dtype())
        checks.check_z(z, step)
        return Z(z.expand(step.size), mismatched_logratio_n)

    def forward(
        self,
        packed: PackedBatch,
        prompts: PromptCache | None = None,
        keeps_prompts: bool = False,
        by_token: bool = False,
        entropy: bool = False,
    ) -> Scores:
        """The policy's log-probs of a packed batch, with gradient in training: see model.Packed.forward."""
        return self.run.policy(packed, prompts, keeps_prompts, by_token, entropy)

    def reference_forward(
        self, packed: PackedBatch, prompts: PromptCache | None = None, keeps_prompts: bool = False
    ) -> Scores:
        """The reference's log-probs of a packed batch; none if the objective needs no reference."""
        objective = self.run.objective
        if not objective.needs_reference:
            return Scores(None)
        return self.run.reference(packed, prompts, keeps_prompts, objective.by_token)

    def micro_batch_loss(
        self,
        micro: MicroBatch,
        scores: Scores,
        ref_logps: torch.Tensor | None,
        z_G: torch.Tensor,
    ) -> tuple[torch.Tensor, Columns]:
        """-> the weighted losses (B,) of a micro-batch, and its columns (B,). ref_logps: of its completions."""
        objective = self.run.objective
        batch = micro.with_outputs(scores.outputs)
        with user_code("loss"):
            logps, ref_logps = objective.reduce_tokens(scores.logps, ref_logps, micro.length)
            given = objective.loss(logps, ref_logps, batch, z_G[micro.index_B])
        loss_B, own_columns = checks.check_loss(given, B=len(micro.part.index))
        loss_B = loss_B * micro.step.weight[micro.index_B]
        columns = {"loss": loss_B}
        if scores.entropy is not None:
            # the scored tokens, as in the sums of entropies (B, K)
            tokens_B = micro.length.sum(1)
            columns["entropy"] = scores.entropy.sum(1) / tokens_B
            columns["scored_tokens"] = tokens_B
        columns = join_columns(columns, own_columns)
        # as float64, labels too: they become rows of one matrix
        return loss_B, {name: x.detach().double() for name, x in columns.items()}

    def backward(self, loss_B: torch.Tensor, micro: MicroBatch) -> None:
        """Add a micro-batch's share of the step's gradient."""
        # DDP and FSDP2 average gradients over ranks
        share = self.run.fabric.world_size / micro.step.size
        if micro.part.filler:
            share = 0.0  # a sharded backward is a collective, so it runs for a filler too
        self.run.fabric.backward(loss_B.sum() * share)

    def synchronised(self, is_last: bool) -> AbstractContextManager:
        """A context for forward and backward of a micro-batch: ranks average their gradients at the last one.
        FSDP2 does so at each: otherwise each rank would hold the whole, unsharded gradient until the last."""
        waits = not is_last and self.run.cfg.strategy != "fsdp"
        return self.run.fabric.no_backward_sync(self.run.policy, enabled=waits)

    def gather_columns(
        self, step: Step, scored: list[tuple[Part, torch.Tensor, Columns]]
    ) -> Columns:
        """The columns (G,) of a step's examples, of all ranks. scored: of each of this rank's micro-batches
        its part, its examples' indices and its columns. Raises BadInput if the micro-batches of training (or
        of validation) differ in their columns: where one has none, its examples would count as 0."""
        run = self.run
        _, _, first_columns = scored[0]
        # What may change the columns of a loss: asked for once, and on all ranks together.
        key = (type(run.objective), run.policy.training, "entropy" in first_columns)
        if key not in self.column_names:  # in rank 0's order, for the sum over ranks
            self.column_names[key] = run.fabric.broadcast(list(first_columns))
        names = self.column_names[key]
        columns_G = first_columns["loss"].new_zeros(len(names), step.size)
        for part, index_B, columns in scored:
            differ = ", ".join(sorted(set(columns) ^ set(names)))
            if differ:
                raise BadInput(
                    f"loss: columns {differ}: not of every micro-batch: return the same columns for each"
                )
            if not part.filler:
                columns_G[:, index_B] = torch.stack([columns[name] for name in names])
        all_reduce(columns_G)
        return dict(zip(names, columns_G))  # its rows

    # ---- after the gradient ----------------------------------------------------------------------

    def optimizer_step(self, plan: Plan) -> float:
        """Change the weights by the learning rate of the step, and clear the gradient. -> the rate"""
        run = self.run
        lr = lr_at(run.state.step, plan, run.cfg.optim)
        for group in run.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        return lr

    def loop_row(self, step: Step, columns: Columns, plan: Plan) -> dict[str, float | None]:
        """The loop's own columns of metrics.csv, of the step that was just done."""
        done = self.run.state.step
        # of each example it is the mean over its tokens: weighed by these, the mean over all tokens of the step
        entropy = np.average(columns["entropy"], weights=columns["scored_tokens"])
        row = {
            "entropy": float(entropy),
            "epoch": (done - plan.begin) / plan.per_epoch,
            "samples": done * step.size,
        }
        if self.run.engine_gap is not None:  # answers come from an engine (rollout.py)
            row["engine/gap"] = self.run.engine_gap
        return row

    def metrics_row(self, columns: Columns, z: Z) -> dict[str, float | None]:
        """A row by the objective's metrics. All tensors are on the CPU. Raises BadInput and Failed."""
        with user_code("metrics"):
            copies = {
                name: x.clone() for name, x in columns.items()
            }  # metrics may change them in place
            return checks.check_row(self.run.objective.metrics(copies, z))

    # ---- steps and micro-batches -----------------------------------------------------------------

    def make_step(self, examples: list[Example]) -> Step:
        """These examples as a step, with mismatched pairs if the objective asks for them."""
        run = self.run
        completions = None
        if run.objective.needs_mismatched_pairs:
            is_own = run.objective.overrides("mismatched_completions")
            if is_own:
                seed_for_forks(run.fabric, run.cfg.seed, run.state.step)
            with user_code("mismatched_completions"):
                completions = run.objective.mismatched_completions(examples)
            if is_own:  # ranks may have drawn different random numbers: rank 0's count
                completions = run.fabric.broadcast(completions)
        return Step(examples, completions, run.budget)

    def on_device(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Each micro-batch on the device, while it is worked on; then count it as progress. In a
        validation a signal may end the work between two; a training step is never left in its middle
        (devices.Stop)."""
        run = self.run
        for micro in micro_batches:
            yield micro.to(run.fabric.device)
            advance(len(micro.part.index))
            if not run.policy.training:
                run.stop.check(run.fabric.device)

    def progress(self, title: str, step: Step, silent: float = 5) -> AbstractContextManager:
        """Shows how far the two passes over a step are; nothing in the first `silent` seconds."""
        return progress(title, 2 * step.size // self.run.fabric.world_size, silent)

    # ---- before the first step, and after the last one ------------------------------------------

    def before_first_step(self, examples: list[Example], plan: Plan) -> None:
        """At the start of a run or of an iteration: check it, fill the reference cache, evaluate at step 0."""
        run = self.run
        run.logger.begin(plan, len(examples))
        if run.state.step == run.reference_step:  # at the start, or the reference is new
            checks.check_start(self, examples)
        if run.cfg.reference_cache and not run.reference.released:
            precompute(self, examples, plan)
        if run.state.step == 0 or run.state.unvalidated:  # a validation was interrupted
            evaluation.validate(self, plan)

    def finish(self) -> None:
        """Compare answers before and after; export; score the test split: see evaluation.finish."""
        evaluation.finish(self)
