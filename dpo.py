"""DPO, IPO and RPO: learn from pairs, a chosen and a rejected completion of one prompt, on kto.py's loop.

    python dpo.py                                  # the demo: two cores, a minute
    python dpo.py --config config/gpt2_dpo.yaml    # GPT-2 on paired data

Reading order: settings, the losses (functions of the margin h alone), the objective, main. To try an idea, copy this
file and add a line to LOSSES.

Names differ in the field: "RPO" is elsewhere DPO plus a likelihood term, which here is dpo with sft_loss_weight;
elsewhere "ipo" divides each log-ratio by its length, which here is ipo with average_logps.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid

from data import BadInput, Batch, Example
from devices import guarded
from kto import Base, Objective, run
from settings import Run, parse
from tell import mean


@dataclass
class DPO:
    """The objective."""

    loss: str = "dpo"
    """dpo (arXiv 2305.18290), ipo (2310.12036), rpo_sq, rpo_bwd_kl or rpo_fwd_kl (2406.11704, NeMo-Aligner's)."""
    beta: float = 0.1
    """Strength of the pull back to the reference; larger keeps the policy closer."""
    average_logps: bool = False
    """Divide log-probabilities by the number of scored tokens."""
    preference_loss_weight: float = 1.0
    """Weight of the loss above."""
    sft_loss_weight: float = 0.0
    """Weight of the negative log-likelihood of the chosen completions."""
    sft_average_logps: bool | None = None
    """Divide that by its tokens. Default: as average_logps."""
    gt_reward_scale: float = 1.0
    """RPO: the true rewards' difference is multiplied by this (eta)."""
    chosen_reward: float = 1.0
    """RPO: the true reward of a chosen completion whose record gives none."""
    rejected_reward: float = 0.0
    """RPO: the true reward of a rejected completion whose record gives none."""

    def refuse(self):
        if self.loss not in LOSSES:
            raise BadInput(f"dpo.loss: expected {', '.join(LOSSES)}; got {self.loss}")
        if not self.beta > 0 or min(self.preference_loss_weight, self.sft_loss_weight) < 0:
            raise BadInput("dpo: beta is above 0, preference_loss_weight and sft_loss_weight are at least 0")
        if self.preference_loss_weight == self.sft_loss_weight == 0:
            raise BadInput("dpo: preference_loss_weight and sft_loss_weight are both 0: nothing to learn")


@dataclass
class Settings(Run):
    dpo: DPO = field(default_factory=DPO)

    def refuse(self):
        super().refuse()
        self.dpo.refuse()


# ---- the losses: (h, d, args) -> (B,), h = r_chosen - r_rejected, d = true reward of chosen - of rejected ---------


def bernoulli_kl(p_logit, q_logit):
    """KL(Bernoulli(sigmoid(p)) || Bernoulli(sigmoid(q))), every log by logsigmoid: fine where a sigmoid rounds to 1."""
    p = torch.sigmoid(p_logit)
    return p * (logsigmoid(p_logit) - logsigmoid(q_logit)) + (1 - p) * (logsigmoid(-p_logit) - logsigmoid(-q_logit))


LOSSES = {
    "dpo": lambda h, d, a: -logsigmoid(a.beta * h),
    "ipo": lambda h, d, a: (h - 1 / (2 * a.beta)) ** 2,  # Azar et al. 2023, eq. 17
    "rpo_sq": lambda h, d, a: (a.beta * h - a.gt_reward_scale * d) ** 2,
    "rpo_bwd_kl": lambda h, d, a: bernoulli_kl(a.gt_reward_scale * d, a.beta * h),
    "rpo_fwd_kl": lambda h, d, a: bernoulli_kl(a.beta * h, a.gt_reward_scale * d),
}


# ---- the objective --------------------------------------------------------------------------------------------------


def dpo_objective(args: DPO, score_prompt: bool = False) -> Objective:
    sft_average = args.average_logps if args.sft_average_logps is None else args.sft_average_logps
    defaults = args.chosen_reward, args.rejected_reward

    def batch(examples: list[Example]) -> Batch:
        return Batch(examples, None, torch.ones(len(examples), dtype=torch.bool), score_prompt)

    def look(fabric, policy, reference, batch: Batch, micros) -> Base:
        ref_logp_GK = torch.zeros(len(batch.examples), 2, device=fabric.device)
        for slots, weight in micros:
            ref_logp_BK = reference(batch.rows(slots).to(fabric.device))
            if weight:
                ref_logp_GK[slots] = ref_logp_BK
        return Base(ref_logp_GK, ref_logp_GK.new_zeros(()), {})

    def true_margin(batch: Batch, slots: list[int]) -> torch.Tensor:
        given = [[v if v is not None else w for v, w in zip(batch.examples[s].rewards, defaults)] for s in slots]
        return torch.tensor([chosen - rejected for chosen, rejected in given])

    def loss(logp_BK, length_BK, batch: Batch, slots: list[int], base: Base):
        ratio_BK = (logp_BK - base.ref_logp_GK[slots]) / (length_BK if args.average_logps else 1)
        h_B = ratio_BK[:, 0] - ratio_BK[:, 1]
        loss_B = LOSSES[args.loss](h_B, true_margin(batch, slots).to(h_B), args)
        sft_B = -logp_BK[:, 0] / (length_BK[:, 0] if sft_average else 1)
        total_B = args.preference_loss_weight * loss_B + args.sft_loss_weight * sft_B
        columns = {"loss": total_B, "preference_loss": loss_B, "sft_loss": sft_B, "h": h_B}
        for k, name in enumerate(("chosen", "rejected")):
            columns |= {f"rewards/{name}": args.beta * ratio_BK[:, k], f"logps/{name}": logp_BK[:, k]}
        return total_B, columns

    def report(columns: dict[str, torch.Tensor], base: Base) -> dict:
        h = columns.pop("h")
        line = {name: mean(value) for name, value in columns.items()}
        rewards = torch.cat([columns["rewards/chosen"], columns["rewards/rejected"]])
        line |= {
            "rewards/margins": mean(args.beta * h),
            "rewards/mean": mean(rewards),
            "rewards/std": rewards.std().item(),
        }
        return line | {"accuracy": mean((h > 0).double())}

    def at_start(batch: Batch) -> float:
        d = true_margin(batch, list(range(len(batch.examples)))).double()
        return LOSSES[args.loss](torch.zeros_like(d), d, args).mean().item()

    return Objective("paired", batch, look, loss, report, at_start, ((4, 4), (3, 3), (1, 1)))


def main(argv: list[str] | None = None) -> None:
    here, doc = Path(__file__).parent, __doc__.split("\n\n")[0]
    s = parse(Settings, sys.argv[1:] if argv is None else argv, doc, here / "config" / "demo_dpo.yaml")
    run(s, dpo_objective(s.dpo, s.data.score_prompt), "dpo")


if __name__ == "__main__":
    guarded(main)
