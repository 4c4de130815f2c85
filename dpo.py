"""DPO, IPO and RPO: learn from pairs, a chosen and a rejected completion of one prompt.

    python dpo.py                                  # the demo: two cores, a minute
    python dpo.py --config config/gpt2_dpo.yaml    # GPT-2 on paired data

To try an idea, copy this file and add a line to LOSSES. Reading order: settings, the losses
(functions of the margin h alone), the objective, main.

Names differ in the field: "RPO" is elsewhere DPO plus a likelihood term, which here is dpo with
sft_loss_weight; elsewhere "ipo" divides each log-ratio by its length, which here is ipo with
average_logps.
"""

from runs.errors import run_cli  # noqa: I001  first: for Ctrl-C
from dataclasses import dataclass, field

import torch
from torch.nn.functional import logsigmoid

from runs.cli import parse
from runs.metrics import mean
from runs.settings import PreferenceSettings, RunSettings, refuse_unless
from train import Objective, Trainer


@dataclass(frozen=True)
class DPOSettings(PreferenceSettings):
    """The objective. Besides: beta, average_logps and the weight of an SFT term (Preference)."""

    loss: str = "dpo"
    """dpo (arXiv 2305.18290), ipo (2310.12036), rpo_sq, rpo_bwd_kl or rpo_fwd_kl (2406.11704,
    NeMo-Aligner's)."""
    gt_reward_scale: float = 1.0
    """RPO: the true rewards' difference is multiplied by this (eta)."""
    chosen_reward: float = 1.0
    """RPO: the true reward of a chosen completion whose record gives none."""
    rejected_reward: float = 0.0
    """RPO: the true reward of a rejected completion whose record gives none."""

    def validate(self, group: str = "dpo") -> None:
        super().validate(group)
        expected = f"dpo.loss: expected {', '.join(LOSSES)}; got {self.loss}"
        refuse_unless(self.loss in LOSSES, expected)


@dataclass(frozen=True)
class Settings(RunSettings):
    dpo: DPOSettings = field(default_factory=DPOSettings)

    def validate(self) -> None:
        super().validate()
        self.dpo.validate()


def bernoulli_kl(p_logit, q_logit):
    """KL(Bernoulli(sigmoid(p)) || Bernoulli(sigmoid(q))), every log by logsigmoid: finite where a
    sigmoid rounds to 1."""
    p = torch.sigmoid(p_logit)
    yes = p * (logsigmoid(p_logit) - logsigmoid(q_logit))
    return yes + (1 - p) * (logsigmoid(-p_logit) - logsigmoid(-q_logit))


# (h, d, args) -> (B,), h = r_chosen - r_rejected, d = true reward of chosen - of rejected
LOSSES = {
    "dpo": lambda h, d, a: -logsigmoid(a.beta * h),
    "ipo": lambda h, d, a: (h - 1 / (2 * a.beta)) ** 2,  # Azar et al. 2023, eq. 17
    "rpo_sq": lambda h, d, a: (a.beta * h - a.gt_reward_scale * d) ** 2,
    "rpo_bwd_kl": lambda h, d, a: bernoulli_kl(a.gt_reward_scale * d, a.beta * h),
    "rpo_fwd_kl": lambda h, d, a: bernoulli_kl(a.beta * h, a.gt_reward_scale * d),
}


class DPO(Objective):
    records = "paired"

    def __init__(self, args: DPOSettings):
        self.args, self.average_logps = args, args.average_logps

    def true_margin(self, examples):
        """d (B,): a record's own rewards, or the settings' defaults."""
        defaults = self.args.chosen_reward, self.args.rejected_reward
        given = [[v if v is not None else w for v, w in zip(e.rewards, defaults)] for e in examples]
        return torch.tensor([chosen - rejected for chosen, rejected in given])

    def loss(self, logps, ref_logps, batch, z):
        args = self.args
        r_BK = self.logratio(logps, ref_logps, batch.length)
        h_B = r_BK[:, 0] - r_BK[:, 1]
        d_B = self.true_margin(batch.examples).to(h_B)
        loss_B = batch.weight * LOSSES[args.loss](h_B, d_B, args)
        sft_B = -logps[:, 0] / (batch.length[:, 0] if args.sft_average else 1)
        total_B = args.preference_loss_weight * loss_B + args.sft_loss_weight * sft_B
        columns = {"preference_loss": loss_B, "sft_loss": sft_B, "h": h_B}
        for k, name in enumerate(("chosen", "rejected")):
            columns |= {f"rewards/{name}": args.beta * r_BK[:, k], f"logps/{name}": logps[:, k]}
        return total_B, columns

    def metrics(self, columns, kl):
        h = columns["h"]
        row = {name: mean(value) for name, value in columns.items() if name != "h"}
        rewards = torch.cat([columns["rewards/chosen"], columns["rewards/rejected"]])
        return row | {
            "rewards/margins": mean(self.args.beta * h),
            "rewards/mean": mean(rewards),
            "rewards/std": rewards.std().item(),
            "accuracy": mean((h > 0).double()),
        }


def main(argv=None, checker=None) -> None:
    """`checker`: a function (prompt, completion) -> bool that judges held-out answers."""
    cfg = parse(Settings, argv, __doc__, demo="demo_dpo.yaml")
    with Trainer(cfg, DPO(cfg.dpo), checker=checker) as trainer:
        if trainer.fit():
            trainer.finish()


if __name__ == "__main__":
    run_cli(main)
