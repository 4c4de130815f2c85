"""KTO: learn from single ratings, thumbs up or down (Ethayarajh et al. 2024, arXiv 2402.01306).

    python kto.py                                # the demo: two cores, half a minute
    python kto.py --config config/gpt2.yaml      # GPT-2 on rated data
    python kto.py --help                         # every setting

To try an idea, copy this file (cp kto.py mine.py), change kto_loss, and run the copy. Or pass the changed parts to
`main`, as the files in examples/ do.

The log-ratio of a completion, r = log policy - log reference, says how much more probable the completion has become.
The loss compares r with z, an estimate of KL(policy || reference) in nats. z is the mean r of the step's mismatched
pairs, clamped to at least 0. A mismatched pair is a prompt with the completion of another prompt. The estimate is
rough, because these completions are no samples of the policy. Sampling would be slow.

Differences from the paper and from other implementations:
- z is one number for a whole optimizer step, made from all its micro-batches and devices.
- A mismatched pair never has a completion of its own prompt.
- Policy and reference start as the same model. A run does not start unless r is exactly 0 on a few examples. (With
  --reference, which names another model, this is not checked.)

trainer.py has the loop, objective.py the other methods that an algorithm may override.

Shape letters: G examples of a step, B of a micro-batch, K completions of an example (here 1), n mismatched pairs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from jsonargparse.typing import NonNegativeFloat
from torch import Tensor

from data import MicroBatch
from evaluation import Checker
from infra.console import run_cli
from infra.parse import parse
from infra.settings import RunSettings
from objective import Columns, Objective, PreferenceSettings, Z, join_columns, mean, share_above_0
from records.examples import Example, class_weights
from run import setup
from trainer import Trainer


# PreferenceSettings has beta, average_logps and sft_loss_weight. --help shows the docstrings.
@dataclass(frozen=True)
class KTOSettings(PreferenceSettings):
    """The KTO loss."""

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto, or apo_zero_unpaired (arXiv 2408.06266), which has z = 0 and no mismatched pairs."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of a thumbs up (the paper's lambda_D)."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of a thumbs down (lambda_U)."""
    balance: bool = False
    """Choose both weights so that the thumbs up and down of data.train count equally, as the KTO paper advises."""


@dataclass(frozen=True)
class Settings(RunSettings):
    kto: KTOSettings = KTOSettings()


def kto_loss(logratio_B: Tensor, z_B: Tensor, desirable_B: Tensor, args: KTOSettings) -> Tensor:
    """The loss of the paper, lambda_y - v(x, y), for each example. For thumbs up it tends to 0 as the log-ratio rises
    above z, and to lambda_D as it falls below z. For thumbs down it is the other way round.

    logratio_B and z_B are in nats. z_B has z for each example, usually one number for all, without gradient.
    desirable_B is bool."""
    sign_B = 2 * desirable_B.to(logratio_B.dtype) - 1
    lambda_B = torch.where(desirable_B, args.desirable_weight, args.undesirable_weight)
    return lambda_B * (1 - torch.sigmoid(args.beta * sign_B * (logratio_B - z_B)))


class KTO(Objective):
    """The objective of rated completions. Objective.make_z computes z from the mismatched pairs."""

    def __init__(self, args: KTOSettings):
        self.args = args

    # cached_property, not property: a subclass may simply assign average_logps = True

    @cached_property
    def average_logps(self) -> bool:
        return self.args.average_logps

    @cached_property
    def needs_mismatched_pairs(self) -> bool:
        """Without pairs z is 0, as apo_zero_unpaired wants it."""
        return self.args.loss == "kto"

    def resolve(self, cfg: RunSettings, train: Sequence[Example]) -> RunSettings:
        """For kto.balance: set both weights."""
        if not self.args.balance:
            return cfg
        up, down = class_weights(train)
        self.args = replace(self.args, desirable_weight=up, undesirable_weight=down)
        return replace(cfg, kto=self.args)

    def loss(
        self,
        logps: Tensor,
        ref_logps: Tensor | None,
        batch: MicroBatch,
        z_B: Tensor,
    ) -> tuple[Tensor, Columns]:
        args = self.args
        # K is 1: a rated example has one completion
        logp_B = logps[:, 0]
        logratio_B = self.logratio(logps, ref_logps, batch.length)[:, 0]
        preference_loss_B = kto_loss(logratio_B, z_B, batch.label, args)
        nll_B = -logp_B
        if self.average_logps:
            nll_B = nll_B / batch.length[:, 0]
        # The loop divides the sum of the losses by G, but the SFT loss is a mean over the desirable examples.
        scale = batch.step.size / max(1, batch.step.n_desirable)
        sft_loss_B = torch.where(batch.label, nll_B, 0) * scale
        loss_B = preference_loss_B + args.sft_loss_weight * sft_loss_B
        return loss_B, {  # `metrics` needs logratio, logp and desirable
            "preference_loss": preference_loss_B,
            "sft_loss": sft_loss_B,
            "logratio": logratio_B,
            "logp": logp_B,
            "desirable": batch.label,
        }

    def metrics(self, columns: Columns, z: Z) -> dict:
        desirable_G = columns["desirable"].bool()
        logratio_G = columns["logratio"]
        logp_G = columns["logp"]
        sign_G = torch.where(desirable_G, 1.0, -1.0)
        reward_G = self.args.beta * logratio_G
        # chosen and rejected: TRL's words for desirable and undesirable
        chosen = mean(reward_G[desirable_G])
        rejected = mean(reward_G[~desirable_G])
        has_both = chosen is not None and rejected is not None
        row = z_columns(z) if self.needs_mismatched_pairs else {}
        row |= {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected if has_both else None,
            "rewards/mean": mean(reward_G),
            "rewards/std": reward_G.std().item() if len(reward_G) > 1 else None,
            "logps/chosen": mean(logp_G[desirable_G]),
            "logps/rejected": mean(logp_G[~desirable_G]),
            # the share of examples with r above 0 for thumbs up, below 0 for thumbs down
            "accuracy": share_above_0(sign_G * logratio_G),
        }
        inputs = ("logratio", "logp", "desirable")  # used above, but not logged
        means = {name: mean(x_G) for name, x_G in columns.items() if name not in inputs}
        # without desirable examples the cell is empty
        if chosen is None and "sft_loss" in means:
            means["sft_loss"] = None
        return join_columns(means, row)


def z_columns(z: Z) -> dict:
    """The columns about z and the mismatched pairs."""
    r_n = z.mismatched_logratio_n
    n = len(r_n)
    kl = z.z_G.double().mean().item()
    return {
        "kl": kl,
        "kl/stderr": r_n.std().item() / n**0.5 if n > 1 else None,
        "kl/clamped": float(kl == 0 and r_n.sum() < 0),
        "kl/pairs": n,
    }


def main(
    argv: list[str] | None = None,
    objective: Callable[..., Objective] = KTO,
    settings: type = Settings,
    trainer: type[Trainer] = Trainer,
    checker: Checker | None = None,
    optimizer: Callable | None = None,
    make_records: Callable | None = None,
) -> None:
    """Train. A fork may replace these parts:

    objective      called with cfg.kto, returns an Objective
    settings       a class like Settings with a group kto
    trainer        a subclass of Trainer
    checker        judges a list of sampled answers (evaluation.Checker)
    optimizer      a function like infra.optimizer.make_optimizer
    make_records   turns one record of the user's file into a list of records in our form (docs/data.md)"""
    # a command without --model and --config starts from config/demo.yaml
    cfg = parse(settings, argv, objective, demo="demo.yaml")
    run = setup(cfg, objective(cfg.kto), checker, optimizer, make_records=make_records)
    with run:  # ends the run, also after an error or a signal
        loop = trainer(run)
        if loop.fit():  # False: stopped early
            loop.finish()


if __name__ == "__main__":
    run_cli(main)
