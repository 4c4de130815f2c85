"""DPO, IPO and RPO: learn from pairs, a chosen and a rejected completion of one prompt.

    python dpo.py                                  # the demo: two cores, a minute
    python dpo.py --config config/gpt2_dpo.yaml    # GPT-2 on paired data

Copy this file and add a line to LOSSES to try an idea. Reading order: the losses (functions of the margin h),
settings, the objective, main.

Other projects use two of the names differently. Their "RPO" is DPO plus a likelihood term; here that is dpo with
sft_loss_weight. Their "ipo" divides each log-ratio by its length; here that is ipo with average_logps.

Shape letters: G examples of a step, B of a micro-batch, K = 2 completions (chosen, rejected).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from data import MicroBatch
from evaluation import Checker
from infra.console import run_cli
from infra.devices import to_device
from infra.parse import parse
from infra.settings import Number, RunSettings
from objective import Columns, Objective, PreferenceSettings, Z, join_columns, mean, share_above_0
from records.examples import Example
from run import setup
from trainer import Trainer

# Each loss is a function of (B,) tensors -> (B,). h = r_chosen - r_rejected, in nats. d is the true reward of the
# chosen completion minus that of the rejected one. Only RPO uses d.


def dpo_loss(h_B: Tensor, d_B: Tensor, args: "DPOSettings") -> Tensor:
    return -logsigmoid(args.beta * h_B)


def ipo_loss(h_B: Tensor, d_B: Tensor, args: "DPOSettings") -> Tensor:
    return (h_B - 1 / (2 * args.beta)) ** 2  # Azar et al. 2023, eq. 17


def rpo_sq_loss(h_B: Tensor, d_B: Tensor, args: "DPOSettings") -> Tensor:
    return (args.beta * h_B - args.gt_reward_scale * d_B) ** 2


def rpo_bwd_kl_loss(h_B: Tensor, d_B: Tensor, args: "DPOSettings") -> Tensor:
    return bernoulli_kl(args.gt_reward_scale * d_B, args.beta * h_B)


def rpo_fwd_kl_loss(h_B: Tensor, d_B: Tensor, args: "DPOSettings") -> Tensor:
    return bernoulli_kl(args.beta * h_B, args.gt_reward_scale * d_B)


def bernoulli_kl(p_logit: Tensor, q_logit: Tensor) -> Tensor:
    """KL(Bernoulli(sigmoid(p)) || Bernoulli(sigmoid(q))). Every log is a logsigmoid, which stays finite if a sigmoid
    rounds to 1."""
    p = torch.sigmoid(p_logit)
    yes = p * (logsigmoid(p_logit) - logsigmoid(q_logit))
    return yes + (1 - p) * (logsigmoid(-p_logit) - logsigmoid(-q_logit))


LOSSES = {
    "dpo": dpo_loss,
    "ipo": ipo_loss,
    "rpo_sq": rpo_sq_loss,
    "rpo_bwd_kl": rpo_bwd_kl_loss,
    "rpo_fwd_kl": rpo_fwd_kl_loss,
}


@dataclass(frozen=True)
class DPOSettings(PreferenceSettings):
    """The loss of pairs."""  # beta, average_logps and sft_loss_weight are in PreferenceSettings

    loss: Literal[tuple(LOSSES)] = "dpo"
    """dpo (arXiv 2305.18290), ipo (2310.12036), rpo_sq, rpo_bwd_kl or rpo_fwd_kl (2406.11704,
    NeMo-Aligner's)."""
    gt_reward_scale: Number = 1.0
    """RPO: eta, which multiplies the difference of the true (gt: ground-truth) rewards."""
    chosen_reward: Number = 1.0
    """RPO: the true reward of a chosen completion if its record has none."""
    rejected_reward: Number = 0.0
    """RPO: the true reward of a rejected completion if its record has none."""


@dataclass(frozen=True)
class Settings(RunSettings):
    dpo: DPOSettings = DPOSettings()


class DPO(Objective):
    """Completion 1 is chosen, completion 2 rejected."""

    record_kind = "paired"

    def __init__(self, args: DPOSettings):
        self.args = args

    @cached_property  # see KTO
    def average_logps(self) -> bool:
        return self.args.average_logps

    def true_margin(self, examples: list[Example]) -> Tensor:
        """d (B,), from the rewards of the records. A record without rewards has those of the settings."""
        margins = []
        for example in examples:
            chosen, rejected = example.rewards
            chosen = self.args.chosen_reward if chosen is None else chosen
            rejected = self.args.rejected_reward if rejected is None else rejected
            margins.append(chosen - rejected)
        return torch.tensor(margins)

    def loss(
        self,
        logps: Tensor,
        ref_logps: Tensor | None,
        batch: MicroBatch,
        z_B: Tensor,
    ) -> tuple[Tensor, Columns]:
        args = self.args
        r_BK = self.logratio(logps, ref_logps, batch.length)
        h_B = r_BK[:, 0] - r_BK[:, 1]
        d_B = to_device(self.true_margin(batch.examples), h_B.device).to(h_B.dtype)
        preference_loss_B = LOSSES[args.loss](h_B, d_B, args)
        sft_loss_B = -logps[:, 0]
        if self.average_logps:
            sft_loss_B = sft_loss_B / batch.length[:, 0]
        loss_B = preference_loss_B + args.sft_loss_weight * sft_loss_B
        return loss_B, {
            "preference_loss": preference_loss_B,
            "sft_loss": sft_loss_B,
            "h": h_B,
            "rewards/chosen": args.beta * r_BK[:, 0],
            "logps/chosen": logps[:, 0],
            "rewards/rejected": args.beta * r_BK[:, 1],
            "logps/rejected": logps[:, 1],
        }

    def metrics(self, columns: Columns, z: Z) -> dict:
        h_G = columns["h"]
        means = {name: mean(column_G) for name, column_G in columns.items() if name != "h"}
        rewards = torch.cat([columns["rewards/chosen"], columns["rewards/rejected"]])
        row = {
            "rewards/margins": mean(self.args.beta * h_G),
            "rewards/mean": mean(rewards),
            "rewards/std": rewards.std().item(),
            "accuracy": share_above_0(h_G),
        }
        return join_columns(means, row)


def main(
    argv: list[str] | None = None,
    objective: Callable[..., Objective] = DPO,
    settings: type = Settings,
    trainer: type[Trainer] = Trainer,
    checker: Checker | None = None,
    optimizer: Callable | None = None,
    make_records: Callable | None = None,
) -> None:
    """Train. The arguments are those of kto.main, with objective(cfg.dpo) and settings with a group dpo."""
    cfg = parse(settings, argv, objective, demo="demo_dpo.yaml")
    run = setup(cfg, objective(cfg.dpo), checker, optimizer, make_records=make_records)
    with run:
        loop = trainer(run)
        if loop.fit():
            loop.finish()


if __name__ == "__main__":
    run_cli(main)
