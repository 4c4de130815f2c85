"""The interface of an algorithm: a subclass of Objective, as in kto.py, dpo.py and examples/.

Shape letters: G examples of a step, B of a micro-batch, K completions of an example, L tokens of the longest
completion, T tokens of a micro-batch's completions, n mismatched pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat
from torch import Tensor

from data import MicroBatch, Step, next_mismatched_completions
from infra.console import BadInput
from infra.devices import copied_to_cpu
from infra.settings import RunSettings
from records.examples import Example

# {column: a number for each example}: (B,) of a micro-batch, or (G,) of a step
Columns = dict[str, Tensor]


class Z(NamedTuple):
    """The z of a step, and the log-ratios from which it was computed; the same on all ranks."""

    z_G: Tensor
    """(G,) z of each example, in nats. kto.py logs their mean as `kl`, as other libraries call it."""
    mismatched_logratio_n: Tensor
    """(n,) the log-ratios of the mismatched pairs, in nats."""


class Objective:
    """An algorithm. Only `loss` must be defined. The attributes below must not change during a fit, because the thread
    that packs the next step reads them, too."""

    record_kind = "rated"
    """The records that it learns from: rated, paired, demonstrations or prompts."""
    needs_mismatched_pairs = False
    """Whether a step also scores mismatched pairs, without gradient, to make z."""
    needs_reference = True
    """False: no reference model is loaded, ref_logps is None, and a log-ratio is the policy's log-prob."""
    by_token = False
    """True: `reduce_tokens` gets the log-probs of each token, (B, K, L)."""
    top_k = 0
    """For distillation. k > 0: log-probs are (B, K, L, 1 + k), of the completion's own token and of the reference's k
    most probable tokens. Only with by_token and a reference, without mismatched pairs."""
    average_logps = False
    """Whether a log-ratio is divided by the number of its tokens (MicroBatch.length)."""

    def resolve(self, cfg: RunSettings, train: Sequence[Example]) -> RunSettings:
        """Fill in settings that depend on data.train, and return all settings. Called once, on every rank."""
        return cfg

    def loss(
        self,
        logps: Tensor,
        ref_logps: Tensor | None,
        batch: MicroBatch,
        z_B: Tensor,
    ) -> tuple[Tensor, Columns]:
        """Returns the loss (B,) of each example, and columns (B,) for `metrics`. Validation calls this method, too. The
        loop multiplies each loss by the weight of its record, and logs the product as the column `loss`.

        logps, ref_logps: log-probs of policy and reference, in nats, (B, K) or what `reduce_tokens` returns. z_B: (B,).

        A step may be split into micro-batches in any way. Therefore the loss of an example must not depend on the other
        examples of its micro-batch: no mean over B (the start check refuses it). batch.step has numbers of the whole
        step, such as size and n_desirable, but no log-probs."""
        raise NotImplementedError

    def reduce_tokens(
        self, logps: Tensor, ref_logps: Tensor | None, length_BK: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Turns the models' log-probs into what `loss` and `logratio` receive. The models give (B, K), or with by_token
        (B, K, L) with 0 beyond the end of a completion. The result must be (B, K) if the objective has mismatched pairs
        or average_logps."""
        return logps, ref_logps

    def mismatched_completions(
        self, examples: list[Example]
    ) -> Sequence[np.ndarray | list[int] | None]:
        """For each example the token ids of a completion that forms a mismatched pair with its prompt, or None. By
        default: the completion of the next example that has another prompt and another completion.

        An override runs at the start of its step, also in validation. It may use what after_step has changed, but not
        with reference_cache, which calls it for all steps before the training. All ranks use the result of rank 0."""
        return next_mismatched_completions(examples)

    def metrics(self, columns: Columns, z: Z) -> dict:
        """A row of metrics.csv or val.csv: {name: number, or None for an empty cell}. columns: those of all G examples,
        in float64, on the CPU."""
        return {name: mean(column_G) for name, column_G in columns.items()}

    def logratio(self, logps: Tensor, ref_logps: Tensor | None, length_BK: Tensor) -> Tensor:
        """The log-ratio r = log policy - log reference, in nats."""
        r = logps if ref_logps is None else logps - ref_logps
        return r / length_BK if self.average_logps else r

    def make_z(self, logratio_n: Tensor, step: Step) -> Tensor | float:
        """z of a step, from the log-ratios (n,) of its mismatched pairs: one number, or (G,). By default it is their
        mean, clamped to at least 0. (Clamping each log-ratio would make z too large.)

        Pair i belongs to example step.mismatched_index[i]. n may be 0. Validation calls this method, too, so it must
        not change state."""
        z = logratio_n.mean() if len(logratio_n) else logratio_n.new_zeros(())
        return z.clamp(min=0)

    def after_step(self, step: Step, columns: Columns, z: Z) -> None:
        """Update state that the objective keeps from step to step. Called in each training step, before the weights
        change. The columns of all G examples are on the CPU, the same on all ranks. step.examples[i].number is the
        place of an example in data.train."""

    def make_module(self, width: int) -> torch.nn.Module | None:
        """A module on the policy's hidden states, such as a value head: (T, width) -> (T, ...). Row t has the hidden
        state that predicts token t of the completions. The loss gets the output as batch.outputs (B, K, L, ...).

        The module is trained, sharded, saved and resumed with the policy, but not exported. The loss must not use its
        parameters, which a rank of a sharded run has only during a forward."""
        return None

    def state_dict(self) -> dict:
        """{attribute: value} for a checkpoint. A value is a number, a text or a list of these, so convert tensors by
        float(x) or x.tolist()."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Set the attributes that state_dict returned."""
        vars(self).update(state)

    @classmethod
    def overrides(cls, method: str) -> bool:
        """Whether this class has its own version of a method of Objective."""
        return getattr(cls, method) is not getattr(Objective, method)


# ---- columns and rows ----------------------------------------------------------------------------


def mean(x: Tensor) -> float | None:
    """The mean of a 1-D tensor; None if it is empty."""
    return x.mean().item() if len(x) else None


def share_above_0(x: Tensor) -> float | None:
    """The share of numbers above 0. A 0 counts one half."""
    return mean((x > 0).double() + 0.5 * (x == 0))


def on_cpu(columns: Columns, z: Z) -> tuple[Columns, Z]:
    """Copies of columns and z on the CPU."""
    *copies, z_G, mismatched_logratio_n = copied_to_cpu([*columns.values(), *z])
    return dict(zip(columns, copies)), Z(z_G, mismatched_logratio_n)


def join_columns(first: dict, second: dict) -> dict:
    """The columns of both. Raises BadInput if both have a column of the same name."""
    shared = ", ".join(sorted(first.keys() & second.keys()))
    if shared:
        raise BadInput(
            f"columns: {shared}: the program has a column of this name: rename yours, in loss or metrics"
        )
    return first | second


# ---- settings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreferenceSettings:
    """The settings that kto.py and dpo.py share."""

    beta: PositiveFloat = 0.1
    """A larger beta keeps the policy closer to the reference."""
    average_logps: bool = False
    """Divide log-ratios (also in z) and the SFT loss by the number of tokens."""
    sft_loss_weight: NonNegativeFloat = 0.0
    """Weight of the SFT loss: the negative log-likelihood of the desirable (chosen) completions."""
