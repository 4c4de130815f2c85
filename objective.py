"""What an algorithm is: its loss, its mismatched pairs, its z (their mean log-ratio, at least 0), its metrics.

An algorithm is a subclass of Objective, in a file of its own (kto.py, dpo.py, examples/). Only `loss` must be
given. Reading order: Objective, then PreferenceSettings, what kto.py and dpo.py share.

Shape letters: G examples of a step, B of a micro-batch, K completions of an example, L tokens of the longest
completion, T tokens of a micro-batch's completions, n mismatched pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat

from data import MicroBatch, Step, next_mismatched_completions
from infra.console import BadInput
from records.examples import Example


class Z(NamedTuple):
    """z, with which the log-ratios of a step's examples are compared, and what it was made of. Both tensors are equal
    on all ranks."""

    z_G: torch.Tensor
    """(G,) z of each example, in nats: the same number for all, unless `Objective.make_z` gives several. Its mean is
    the column `kl` of kto.py, its name in other libraries."""
    mismatched_logratio_n: torch.Tensor
    """(n,) the log-ratios of the mismatched pairs, in nats."""


class Objective:
    """An algorithm. Only `loss` must be given; all else has a default. The five attributes below are set in the class
    or in __init__ and do not change during a fit: another thread, which makes the next step, reads them too."""

    record_kind = "rated"
    """What it learns from: rated, paired, demonstrations or prompts."""
    needs_mismatched_pairs = False
    """Whether a step also scores mismatched pairs (x_i, y_j), without gradient, for z."""
    needs_reference = True
    """False: no reference model is loaded or run, ref_logps is None, and a log-ratio is log pi."""
    by_token = False
    """True: the models give the log-prob of each token, (B, K, L). Then `reduce_tokens` turns these into what the
    loss, z and `logratio` get."""
    average_logps = False
    """Whether a log-ratio is divided by the number of its scored tokens (MicroBatch.length)."""

    def loss(
        self,
        logps: torch.Tensor,
        ref_logps: torch.Tensor | None,
        batch: MicroBatch,
        z_B: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """logps, ref_logps: log-probs of policy and reference, in nats, (B, K) or what `reduce_tokens` gives.
        z_B: (B,) z of each example. -> the loss (B,) of each example, not their mean; and
        {column: (B,)}, which reach `metrics` for all examples of the step. The loop multiplies each loss by
        its record's weight, and the product is also the column `loss`. Validation calls it too.

        A micro-batch is any part of the step, so a loss must not mix its examples: sums over the step
        come from batch.step. The start check refuses nearly all that do: it compares the losses of a
        few examples together with the loss of each alone, at z = 0."""
        raise NotImplementedError

    def reduce_tokens(
        self, logps: torch.Tensor, ref_logps: torch.Tensor | None, length_BK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """From the log-probs of the models to those that the loss, z and `logratio` get. Here nothing changes.

        The models give (B, K); with by_token (B, K, L), 0 beyond a completion's end. The result must be (B, K) if
        there are mismatched pairs, or with average_logps, which divides by length_BK."""
        return logps, ref_logps

    def mismatched_completions(
        self, examples: list[Example]
    ) -> Sequence[np.ndarray | list[int] | None]:
        """With needs_mismatched_pairs: for each example the completion, as token ids, with which its prompt
        makes a mismatched pair; None: it has no pair. Here it is the completion of the next example with
        another prompt and another completion (data.py). In training these are chosen in another thread, a step ahead.

        An override is not called ahead: it is called when its step begins, so it may use the policy (under
        torch.no_grad) and what after_step has changed. It is also called for all of val, all of test, and in the
        start check. All ranks use what it gives on rank 0. With reference_cache the run calls it for every step before
        training begins, and again in each step: it must then give the same."""
        return next_mismatched_completions(examples)

    def metrics(self, columns: dict[str, torch.Tensor], z: Z) -> dict:
        """columns: float64, of all G examples, on the CPU. -> a row of metrics.csv or val.csv; None: an empty cell."""
        return {name: mean(column_G) for name, column_G in columns.items()}

    def logratio(
        self, logps: torch.Tensor, ref_logps: torch.Tensor | None, length_BK: torch.Tensor
    ) -> torch.Tensor:
        """r = log pi - log ref in nats, of which the loss, z and the rewards are made. All arguments have the
        shape of the result, such as (B, K)."""
        r = logps if ref_logps is None else logps - ref_logps
        return r / length_BK if self.average_logps else r

    def make_z(self, logratio_n: torch.Tensor, step: Step) -> torch.Tensor | float:
        """z of a step from the log-ratios (n,) of its mismatched pairs: their mean, an estimate of a KL
        divergence, and 0 if it is negative. To clamp each log-ratio before the mean would make z too large.

        -> a number, or (G,): one for each example. Pair i is that of example step.mismatched_index[i]; n
        may be 0, and is 0 without needs_mismatched_pairs. Validation calls it too: it must not update what
        the objective remembers."""
        z = logratio_n.mean() if len(logratio_n) else logratio_n.new_zeros(())
        return z.clamp(min=0)

    def after_step(self, step: Step, columns: dict[str, torch.Tensor], z: Z) -> None:
        """Called once a training step, after `metrics` (where a row is due) and before the weights move, with the
        columns of all G examples, on the CPU and equal on all ranks. Here an objective updates what it
        remembers; what belongs to one example can be kept by step.examples[i].number, which is the same in
        each epoch. Validation never calls it."""

    def make_module(self, width: int) -> torch.nn.Module | None:
        """A module of the algorithm's own: it gets the policy's hidden states (T, width), one for each
        token of the completions, and gives (T, ...). The loss finds this in batch.outputs, as (B, K, L, ...).
        The state of a token is the one that predicts it, so it has read the prompt and the tokens before it.

        The module becomes a part of the policy: trained by the same optimizer (its learning rate times
        the module's `lr_scale`, if it has one), sharded, saved and resumed, but not exported. Between
        forwards its parameters are sharded, so the loss should use its outputs only."""
        return None

    def state_dict(self) -> dict:
        """What each checkpoint saves, {attribute: value}: numbers, texts, or lists of these (float(x),
        x.tolist()). A resume sets these attributes; the others start anew."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Set the attributes that state_dict has named."""
        vars(self).update(state)

    @classmethod
    def overrides(cls, method: str) -> bool:
        """Whether this algorithm has its own version of a method of Objective."""
        return getattr(cls, method) is not getattr(Objective, method)


def mean(x: torch.Tensor) -> float | None:
    """The mean of a 1-D tensor. None, which is an empty cell, when the tensor is empty."""
    return x.mean().item() if len(x) else None


def copied_to_cpu(
    columns: dict[str, torch.Tensor], z: Z, *others: torch.Tensor
) -> tuple[dict | Z | torch.Tensor, ...]:
    """-> columns, z and the other tensors, on the CPU. All numbers are copied as one float64 tensor: so a step waits
    for the device once, not once for each of them."""
    tensors = [*columns.values(), *z, *others]
    numbers = torch.cat([x.detach().double().flatten() for x in tensors]).cpu()
    parts = numbers.split([x.numel() for x in tensors])
    # float64 has every number of float32, and every bool, exactly
    copies = [part.view(x.shape).to(x.dtype) for part, x in zip(parts, tensors)]
    end = len(columns)
    return dict(zip(columns, copies)), Z(*copies[end : end + 2]), *copies[end + 2 :]


def join_columns(first: dict, second: dict) -> dict:
    """The columns of both. Raises BadInput if a name is in both: one column would silently replace the other."""
    shared = ", ".join(sorted(first.keys() & second.keys()))
    if shared:  # one of the two is the program's own, so this speaks to the author of the other
        raise BadInput(
            f"columns: {shared}: the program has a column of this name: rename yours, in loss or metrics"
        )
    return first | second


@dataclass(frozen=True)
class PreferenceSettings:
    """What the objectives of kto.py and dpo.py share."""

    beta: PositiveFloat = 0.1
    """Strength of the pull back to the reference; a larger one keeps the policy closer."""
    average_logps: bool = False
    """Divide log-ratios, in z too, and the log-likelihood of sft_loss_weight by the number of scored tokens."""
    sft_loss_weight: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of the desirable (chosen) completions."""
