"""The loop: steps, their gradients, and what happens between steps. A Trainer trains the policy of a Run (run.py) by an
Objective (objective.py). Validation and the end of a run are in evaluation.py.

The split of a step over micro-batches, devices and shards changes the loss, z and the gradient by rounding only (LoRA
dropout aside): z is computed once for the whole step, and every loss is divided by G, the number of its examples.

Shape letters: G examples of a step, B of a micro-batch, K completions of an example, n mismatched pairs.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

import checks
import evaluation
from attention import PromptCache
from data import MicroBatch, Step, made_ahead, step_examples
from infra.console import advance, progress, user_code
from infra.devices import all_reduce
from infra.logger import speed_of
from infra.optimizer import Plan, clip_gradient, is_due, lr_at, run_plan
from infra.random_numbers import seed_user_code
from model import Scores
from objective import Columns, Z, join_columns, on_cpu
from packing import PackedBatch
from records.examples import Example
from run import Run


class Trainer:
    """The loop over a Run. A fork may override `forward`, `micro_batch_loss`, `gradient` or `optimizer_step`."""

    def __init__(self, run: Run):
        self.run = run
        # whether the present step writes a row of metrics.csv; only such a step computes the entropy
        self.row_is_due = True
        self.column_names: dict[tuple, list[str]] = {}  # see columns_of_all_ranks

    def fit(self, examples: list[Example] | None = None, plan: Plan | None = None) -> bool:
        """Train on data.train. spin.py and online.py train in iterations: they call it for each one, with examples and
        a plan. A plan has the steps plan.begin + 1 to plan.end of the plan.total steps of the run, and plan.per_epoch
        steps make an epoch (infra/optimizer.py).

        Returns False if a signal or stop_at ended the run before its last step. A signal during a validation raises
        Interrupted instead."""
        run = self.run
        assert plan or run.last_step == 0, "fit: a second fit needs a plan"
        examples = run.examples["train"] if examples is None else examples
        plan = plan or run_plan(run.cfg, len(examples))
        run.last_step = plan.total
        self.before_first_step(examples, plan)
        for step, micro_batches in self.steps(examples, plan):
            self.train_step(step, micro_batches, plan)
            step_number = run.state.step
            val_is_due = is_due(step_number, run.cfg.val_interval, plan)
            if val_is_due or evaluation.checker_is_due(run, plan):
                evaluation.validate(self, plan)
            save_is_due = is_due(step_number, run.cfg.save_interval, plan)
            if save_is_due or step_number == plan.end:
                run.save()  # no-op if validate has saved this step
            if run.objective.needs_reference:  # prints a warning if the log-ratios look wrong
                run.logger.health(step_number, plan, len(run.examples["val"]))
            reason = run.stop.reason or ("stop_at" if step_number == run.cfg.stop_at else "")
            if reason and step_number < plan.total:
                run.stop_early(reason)
                return False
        return True

    def train_step(self, step: Step, micro_batches: list[MicroBatch], plan: Plan) -> None:
        """Make one optimizer step, and write its row of metrics.csv."""
        run = self.run
        began = time.perf_counter()
        run.state.step += 1
        step_number = run.state.step
        self.row_is_due = is_due(step_number, run.cfg.log_interval, plan)
        seed_user_code(run.fabric, run.cfg.seed, step_number)
        run.policy.train()  # elsewhere it is in eval mode
        columns, z = self.gradient(step, micro_batches)
        run.policy.eval()
        grad_norm = clip_gradient(run.fabric, run.policy, run.optimizer, run.cfg.optim.clip)
        # one copy, because the host waits for the device at each copy
        columns, z = on_cpu(columns | {"grad_norm": grad_norm}, z)
        grad_norm = columns.pop("grad_norm").item()
        # a signal to one rank stops all ranks
        run.stop.agree(run.fabric.device)
        checks.check_finite(step, columns["loss"], z, grad_norm, step_number)
        entropy_G = columns.pop("entropy", None)  # of the loop, not of the objective
        row = self.metrics_row(columns, z) if self.row_is_due else {}
        with user_code("after_step"):
            run.objective.after_step(step, columns, z)
        lr = self.optimizer_step(plan)
        seconds = time.perf_counter() - began
        if self.row_is_due:
            own_row = {"grad_norm": grad_norm, "lr": lr} | self.loop_row(step, entropy_G, plan)
            own_row |= speed_of(step.examples, seconds, run.fabric.device)
            row = join_columns(row, own_row)
            run.logger.step(step_number, row, seconds)
        # soon after a checkpoint, so that an error does not wait for the next one, hours later
        if step_number == run.saved_step + 1:
            checks.check_state_dict(run.objective)

    def steps(self, examples: list[Example], plan: Plan) -> Iterator[tuple[Step, list[MicroBatch]]]:
        """The remaining steps, with this rank's micro-batches. A thread packs the next step while a step runs, unless
        the objective's own `mismatched_completions` may depend on the step before."""
        run = self.run
        steps = map(self.make_step, step_examples(examples, run.cfg, plan, run.state.step))
        packed = ((step, list(step)) for step in steps)
        if run.objective.overrides("mismatched_completions"):
            return packed
        return made_ahead(packed)

    # ---- the gradient of a step, in two orders --------------------------------------------------------

    def gradient(self, step: Step, micro_batches: list[MicroBatch]) -> tuple[Columns, Z]:
        """Add the gradient of a step to the `grad` of the policy's weights. Returns the columns of all G examples, and
        z, the same on all ranks.

        The loss of every example needs z, and z needs the mismatched pairs of the whole step. Therefore z comes first,
        in a pass without gradient (z_first). With one micro-batch per rank the policy's forward may come before z
        (policy_forward_first). The mismatched pairs then reuse its prompts, which saves a pass over them. Several
        micro-batches would have to keep all activations until z is known. Both orders agree up to rounding. A step
        without mismatched pairs takes z_first, whose first pass then scores by the reference alone."""
        step.move_to(self.run.fabric.device)
        # all ranks take the same order, because they have equally many micro-batches
        if len(micro_batches) == 1 and step.mismatched_completions is not None:
            return self.policy_forward_first(step, micro_batches[0])
        return self.z_first(step, micro_batches)

    def z_first(self, step: Step, micro_batches: Iterable[MicroBatch]) -> tuple[Columns, Z]:
        """z from all micro-batches, then the forward, loss and backward of each micro-batch."""
        all_ref_scores = []
        mismatched_logratio_G = step.zeros()  # of each example's mismatched pair
        for micro in self.on_device(micro_batches):
            all_ref_scores.append(self.no_gradient_pass(micro, mismatched_logratio_G))
        z = self.z_of_step(step, mismatched_logratio_G)
        columns_G: Columns = {}
        for i, micro in enumerate(self.on_device(micro_batches)):
            with self.gradient_sync(is_last=i == len(step.parts) - 1):
                packed = micro.packed
                if self.run.objective.top_k:  # targets: (T, 1 + k), with the reference's tokens
                    packed = packed._replace(target_T=all_ref_scores[i].targets)
                scores = self.forward(packed)
                self.loss_and_backward(micro, scores, all_ref_scores[i].logps, z, columns_G)
        return self.columns_of_all_ranks(columns_G), z

    def policy_forward_first(self, step: Step, micro: MicroBatch) -> tuple[Columns, Z]:
        """The policy's forward of the only micro-batch; then z, by passes that reuse its prompts; then loss and
        backward."""
        micro = micro.to(self.run.fabric.device)
        scores = self.forward(micro.packed, keeps_prompts=True)
        mismatched_logratio_G = step.zeros()
        ref_logps = self.no_gradient_pass(micro, mismatched_logratio_G, scores.prompts).logps
        z = self.z_of_step(step, mismatched_logratio_G)
        columns_G: Columns = {}
        self.loss_and_backward(micro, scores, ref_logps, z, columns_G)
        return self.columns_of_all_ranks(columns_G), z

    @torch.no_grad()
    def score(self, step: Step) -> tuple[Columns, Z]:
        """Columns and z as by `gradient`, without gradient. The step may be a whole validation split, so each of the
        two passes packs its micro-batches one by one."""
        step.move_to(self.run.fabric.device)
        return self.z_first(step, micro_batches=step)

    def score_examples(self, examples: list[Example], title: str = "scoring") -> tuple[Columns, Z]:
        """Columns and z of all these examples, as one step, on the CPU. A collective."""
        step = self.make_step(examples)
        with progress(title, 2 * step.size // self.run.fabric.world_size):
            return on_cpu(*self.score(step))

    # ---- parts of a step -------------------------------------------------------------------------

    @torch.no_grad()
    def no_gradient_pass(
        self,
        micro: MicroBatch,
        mismatched_logratio_G: Tensor,
        prompts: PromptCache | None = None,
    ) -> Scores:
        """Score a micro-batch by the reference, and its mismatched pairs by both models. Returns the reference's
        scores. Writes the log-ratios of the pairs into mismatched_logratio_G, at the places of their examples. prompts:
        those of the policy's forward, if it came first."""
        objective = self.run.objective
        has_pairs = micro.mismatched is not None
        ref_scores = self.reference_forward(micro.packed, keeps_prompts=has_pairs)
        if has_pairs:
            packed = micro.mismatched.to(self.run.fabric.device)
            logps = self.forward(packed, prompts).logps
            ref_logps = self.reference_forward(packed, ref_scores.prompts).logps
            with user_code("reduce_tokens"):
                logps, ref_logps = objective.reduce_tokens(logps, ref_logps, packed.length_BK)
            r_BK = objective.logratio(logps, ref_logps, packed.length_BK)
            micro.put(r_BK[:, 0], mismatched_logratio_G)  # a pair has one completion
        return ref_scores._replace(prompts=None)  # frees the cached prompts

    @torch.no_grad()
    def z_of_step(self, step: Step, mismatched_logratio_G: Tensor) -> Z:
        """z from the log-ratios of the mismatched pairs of all ranks. mismatched_logratio_G: those of this rank, and 0
        for the examples of other ranks, so that the sum over ranks has all."""
        all_reduce(mismatched_logratio_G)
        mismatched_logratio_n = mismatched_logratio_G[step.mismatched_index]
        with user_code("make_z"):
            z = self.run.objective.make_z(mismatched_logratio_n, step)
            # in the dtype of the losses
            z = torch.as_tensor(z, device=step.label.device, dtype=torch.get_default_dtype())
            return Z(z.expand(step.size), mismatched_logratio_n)

    def forward(
        self,
        packed: PackedBatch,
        prompts: PromptCache | None = None,
        keeps_prompts: bool = False,
    ) -> Scores:
        """The policy's scores of a packed batch (class Scores in model.py). prompts: use these cached prompts.
        keeps_prompts: cache those of this forward. All scores of the policy come from here."""
        by_token = self.run.objective.by_token
        entropy = self.row_is_due and torch.is_grad_enabled()
        return self.run.policy(packed, prompts, keeps_prompts, by_token, entropy)

    def reference_forward(
        self, packed: PackedBatch, prompts: PromptCache | None = None, keeps_prompts: bool = False
    ) -> Scores:
        """The reference's scores of a packed batch; logps is None if the objective needs no reference."""
        objective = self.run.objective
        if not objective.needs_reference:
            return Scores(logps=None)
        return self.run.reference(
            packed,
            prompts=prompts,
            keeps_prompts=keeps_prompts,
            by_token=objective.by_token,
            top_k=objective.top_k,
        )

    def loss_and_backward(
        self,
        micro: MicroBatch,
        scores: Scores,
        ref_logps: Tensor | None,
        z: Z,
        columns_G: Columns,
    ) -> None:
        """Add the gradient of a micro-batch to the step's gradient, and write its columns into columns_G."""
        loss_B, columns = self.micro_batch_loss(micro, scores, ref_logps, z.z_G)
        if torch.is_grad_enabled():
            # DDP and FSDP2 average gradients over ranks, so multiply by their number. A filler (packing.Part) counts
            # nothing, but its backward runs, because that of a sharded model is a collective.
            factor = 0.0 if micro.part.filler else self.run.fabric.world_size / micro.step.size
            self.run.fabric.backward(loss_B.sum() * factor)
        if not columns_G:
            columns_G.update({name: micro.step.zeros() for name in columns})
        checks.check_same_columns(columns, columns_G)
        for name, column_B in columns.items():
            micro.put(column_B, columns_G[name])

    def micro_batch_loss(
        self,
        micro: MicroBatch,
        scores: Scores,
        ref_logps: Tensor | None,
        z_G: Tensor,
    ) -> tuple[Tensor, Columns]:
        """The losses (B,) of a micro-batch, multiplied by the weights of the records, and its columns."""
        objective = self.run.objective
        batch = replace(micro, outputs=scores.outputs)
        with user_code("loss"):
            logps, ref_logps = objective.reduce_tokens(scores.logps, ref_logps, micro.length)
            result = objective.loss(logps, ref_logps, batch, z_G[micro.index_B])
        loss_B, own_columns = checks.check_loss(result, B=len(micro.part.indices))
        loss_B = loss_B * micro.step.weight[micro.index_B]
        columns = {"loss": loss_B}
        if scores.entropy is not None:  # (B, K) sums over tokens; the column has means
            columns["entropy"] = scores.entropy.sum(1) / micro.length.sum(1)
        columns = join_columns(columns, own_columns)
        return loss_B, {name: x.detach().double() for name, x in columns.items()}

    def gradient_sync(self, is_last: bool) -> AbstractContextManager:
        """A context for the forward and backward of a micro-batch. DDP averages gradients over ranks in the last
        micro-batch only; FSDP2 in every one, because otherwise every rank would hold the whole gradient."""
        if is_last or self.run.cfg.strategy == "fsdp":
            return nullcontext()
        return self.run.fabric.no_backward_sync(self.run.policy)

    def columns_of_all_ranks(self, columns_G: Columns) -> Columns:
        """The columns of all examples. columns_G has those of this rank, and 0 for the examples of other ranks, so that
        the sum over ranks has all."""
        run = self.run
        # All ranks take the columns and their order from rank 0. The host waits for a broadcast, so there is only one
        # for each kind of step: in training or validation, with the entropy or without.
        kind = (type(run.objective), run.policy.training, "entropy" in columns_G)
        if kind not in self.column_names:
            self.column_names[kind] = run.fabric.broadcast(list(columns_G))
        names = self.column_names[kind]
        checks.check_same_columns(columns_G, names)
        matrix = torch.stack([columns_G[name] for name in names])
        all_reduce(matrix)
        return dict(zip(names, matrix))

    # ---- after the gradient ----------------------------------------------------------------------

    def metrics_row(self, columns: Columns, z: Z) -> dict[str, float | None]:
        """A row of the objective's metrics. Raises BadInput and Failed."""
        # copies, because metrics may change its arguments
        copies = {name: x.clone() for name, x in columns.items()}
        with user_code("metrics"):
            return checks.check_row(self.run.objective.metrics(copies, z))

    def optimizer_step(self, plan: Plan) -> float:
        """Update the weights, and clear the gradient. Returns the learning rate of the optimizer's first group."""
        run = self.run
        groups = run.optimizer.param_groups
        for group in groups:
            # as in torch.optim.lr_scheduler: the peak is the lr that the optimizer was made with
            peak = group.setdefault("initial_lr", group["lr"])
            group["lr"] = lr_at(run.state.step, plan, run.cfg.optim, peak)
        run.optimizer.step()
        run.optimizer.zero_grad()
        return groups[0]["lr"]

    def loop_row(self, step: Step, entropy_G: Tensor, plan: Plan) -> dict[str, float]:
        """The loop's own columns of metrics.csv."""
        run = self.run
        # from the means of the examples to the mean of all tokens
        n_tokens = [sum(map(len, example.completions)) for example in step.examples]
        entropy = np.average(entropy_G, weights=n_tokens)
        return {
            "entropy": float(entropy),
            "epoch": (run.state.step - plan.begin) / plan.per_epoch,
            "samples": run.state.step * step.size,
        }

    # ---- steps and micro-batches -----------------------------------------------------------------

    def make_step(self, examples: list[Example]) -> Step:
        """A step of these examples, with mismatched pairs if the objective needs them."""
        run = self.run
        completions = None
        if run.objective.needs_mismatched_pairs:
            overrides = run.objective.overrides("mismatched_completions")
            if overrides:
                seed_user_code(run.fabric, run.cfg.seed, run.state.step)
            with user_code("mismatched_completions"):
                completions = run.objective.mismatched_completions(examples)
            if overrides:  # torch draws other random numbers on each rank
                completions = run.fabric.broadcast(completions)
        return Step(examples, completions, run.budget)

    def on_device(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Move each micro-batch to the device. Raises Interrupted after a signal, but never in a training step."""
        run = self.run
        for micro in micro_batches:
            yield micro.to(run.fabric.device)
            advance(len(micro.part.indices))
            if not run.policy.training:
                run.stop.check(run.fabric.device)

    # ---- before the first step, and after the last one ------------------------------------------

    def before_first_step(self, examples: list[Example], plan: Plan) -> None:
        """Start a run or an iteration: check the start, fill the reference cache, validate at step 0."""
        run = self.run
        run.logger.begin(plan, len(examples))
        if run.state.step == run.reference_step:  # policy and reference are equal
            checks.check_start(self, examples)
        if run.cfg.reference_cache and not run.reference.released:  # once in a run
            from reference_cache import precompute

            precompute(self, examples, plan)
        # unvalidated: the run was stopped during the validation of this step
        if run.state.step == 0 or run.state.unvalidated:
            evaluation.validate(self, plan)

    def finish(self) -> None:
        """Compare answers before and after, export, score the test split."""
        from finish import finish

        finish(self)
