"""SPIN: learn from demonstrations only, against the policy of the last iteration (Chen et al. 2024, arXiv
2401.01335).

    python spin.py                                 # the demo: two cores, half a minute

In each iteration the policy becomes the reference and answers every prompt. Then it learns by DPO to prefer the
human's completion to its own answer. Reading order: settings, the objective, the pairs, main.

The paper leaves two choices open. Here one learning-rate schedule spans all iterations, and the optimizer keeps its
state. LoRA resets the state, because the adapters are merged into the base and start again.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from data import MicroBatch, shuffled
from dpo import DPO, DPOSettings
from evaluation import Checker
from infra.console import BadInput, run_cli, say
from infra.devices import to_device
from infra.files import read_lines
from infra.parse import parse
from infra.settings import RunSettings, refuse_unless
from objective import Columns, Objective, Z
from records.examples import Example
from rollout import (
    LOST,
    RolloutSettings,
    iteration_file,
    iterations,
    policy_answers,
    validate_iterations,
)
from run import Run, setup
from trainer import Trainer


@dataclass(frozen=True)
class SPINSettings(RolloutSettings):
    """The iterations, and how answers are sampled."""

    max_iterations: PositiveInt = 3
    """Iterations; --epochs counts within each."""
    beta: PositiveFloat | list[PositiveFloat] = 0.1
    """Strength of the pull to the iteration's reference: one number, or one for each iteration."""
    mix: ClosedUnitInterval = 0.0
    """Add this fraction of the last iteration's answers to an iteration's own; 1.0, the paper's
    practice, adds all."""
    sft_loss_weight: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of the demonstrations."""
    average_logps: bool = False
    """Divide log-ratios by the number of scored tokens."""

    def betas(self) -> list[float]:
        """One for each iteration."""
        return self.beta if isinstance(self.beta, list) else [self.beta] * self.max_iterations


@dataclass(frozen=True)
class Settings(RunSettings):
    spin: SPINSettings = SPINSettings()

    def validate(self) -> None:
        super().validate()
        validate_iterations(self, moving_reference=True)
        n = self.spin.max_iterations
        betas = self.spin.betas()
        refuse_unless(
            len(betas) == n,
            f"spin.beta: expected one number or {n} of them, got {self.spin.beta}",
        )


class SPIN(DPO):
    """DPO with the demonstration as the chosen completion and the policy's own answer as the rejected one. Validation
    has no answers: there the loss is the negative log-likelihood of the demonstration, per token."""

    record_kind = "demonstrations"

    def __init__(self, args: SPINSettings, beta: float):
        super().__init__(
            DPOSettings(
                beta=beta, average_logps=args.average_logps, sft_loss_weight=args.sft_loss_weight
            )
        )

    def loss(
        self,
        logps: Tensor,
        ref_logps: Tensor | None,
        batch: MicroBatch,
        z_B: Tensor,
    ) -> tuple[Tensor, Columns]:
        if logps.shape[1] == 1:  # validation
            return -logps[:, 0] / batch.length[:, 0], {}
        loss_B, columns = super().loss(logps, ref_logps, batch, z_B)
        # If the policy's answer is the demonstration itself, it is a tie, and h is only rounding error.
        is_tie = torch.tensor([np.array_equal(*e.completions) for e in batch.examples])
        columns["h"] = columns["h"].masked_fill(to_device(is_tie, logps.device), 0)
        return loss_B, columns

    def metrics(self, columns: Columns, z: Z) -> dict:
        kind = DPO if "h" in columns else Objective  # validation has no h
        return kind.metrics(self, columns, z)


def make_pairs(run: Run, i: int, answers: list[list[int]], mix: float) -> list[Example]:
    """Pair the demonstrations with the policy's answers. A share `mix` of them is also paired with the answers of the
    last iteration."""
    demonstrations = run.examples["train"]
    pairs = list(zip(demonstrations, answers))
    if i > 1 and mix:
        file = iteration_file(run, "answers", i - 1)
        last = read_lines(file)
        if len(last) != len(demonstrations):
            raise BadInput(f"resume: {file}: {LOST}")
        order = shuffled(len(demonstrations), i, run.cfg.seed)
        mixed = order[: int(mix * len(demonstrations))]
        pairs += [(demonstrations[j], last[j]["ids"]) for j in mixed]
    return [e._replace(completions=(*e.completions, np.array(ids, np.int32))) for e, ids in pairs]


def main(
    argv: list[str] | None = None,
    objective: Callable[..., Objective] = SPIN,
    settings: type = Settings,
    trainer: type[Trainer] = Trainer,
    checker: Checker | None = None,
    optimizer: Callable | None = None,
    rollout: Callable | None = None,
    make_records: Callable | None = None,
) -> None:
    """Train. The arguments are those of kto.main, with objective(cfg.spin, beta) and settings with a group spin.
    rollout: an engine that answers prompts (see rollout.py)."""
    cfg = parse(settings, argv, objective, demo="demo_spin.yaml")
    betas = cfg.spin.betas()
    run = setup(
        cfg, objective(cfg.spin, betas[0]), checker, optimizer, rollout, make_records=make_records
    )
    with run:
        loop = trainer(run)
        demonstrations = run.examples["train"]
        n = len(demonstrations)
        with_mixed = n + int(cfg.spin.mix * n)  # from the second iteration on
        if cfg.spin.mix and with_mixed == n:
            say(f"no effect: spin.mix: less than one of {n} answers")
        sizes = [n] + [with_mixed] * (cfg.spin.max_iterations - 1)
        for i, plan in iterations(run, sizes, moving_reference=True):
            answers = policy_answers(run, i, plan, demonstrations, cfg.spin)
            pairs = make_pairs(run, i, answers, cfg.spin.mix)
            say(f"iteration {i}: beta {betas[i - 1]}, {len(pairs):,} pairs")
            run.use_objective(objective(cfg.spin, betas[i - 1]))
            if not loop.fit(pairs, plan):
                break
        else:
            loop.finish()


if __name__ == "__main__":
    run_cli(main)
