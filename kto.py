"""KTO: learn from single thumbs up and down (Ethayarajh et al. 2024, arXiv
2402.01306).

    python kto.py                                # the demo: two cores, half a minute
    python kto.py --config config/gpt2.yaml      # GPT-2 on rated data
    python kto.py --help                         # every setting

To try an idea, copy this file (cp kto.py mine.py), change kto_loss, and run it
(python mine.py).

Reading order: settings, kto_loss (the idea), the objective, main. The loop is
Trainer.fit in train.py, and so is z over micro-batches and ranks; what else an
algorithm may change (its baseline z, what it remembers from step to step) are the
other methods of Objective there.

Where we differ from the paper and its ports: z is one number for the whole
optimizer step, over all micro-batches and devices; a mismatched completion never
comes from an equal prompt; the reference is checked before the first step.

Shape letters: G examples of a step, B of a micro-batch, K completions of a prompt.
"""

from runs.errors import run_cli  # noqa: I001  first: for Ctrl-C
import math
from dataclasses import dataclass, field

import torch

from runs.cli import parse
from runs.metrics import auc, mean
from runs.settings import PreferenceSettings, RunSettings, refuse_unless
from train import Objective, Trainer


@dataclass(frozen=True)
class KTOSettings(PreferenceSettings):
    """The objective. Besides: beta, average_logps and the weight of an SFT term
    (Preference)."""

    loss: str = "kto"
    """kto, or apo_zero_unpaired (arXiv 2408.06266: z = 0, no mismatched pairs)."""
    desirable_weight: float = 1.0
    """Weight of a thumbs up (the paper's lambda_D). The table before training says
    what the paper's rule would give."""
    undesirable_weight: float = 1.0
    """Weight of a thumbs down (lambda_U)."""

    def validate(self, group: str = "kto") -> None:
        super().validate(group)
        known = self.loss in ("kto", "apo_zero_unpaired")
        refuse_unless(known, f"kto.loss: expected kto or apo_zero_unpaired, got {self.loss}")
        lowest = min(self.desirable_weight, self.undesirable_weight)
        refuse_unless(lowest >= 0, "kto: class weights are at least 0")


@dataclass(frozen=True)
class Settings(RunSettings):
    kto: KTOSettings = field(default_factory=KTOSettings)

    def validate(self) -> None:
        super().validate()
        self.kto.validate()
        refuse_unless(
            self.kto.loss != "kto" or self.batch_size >= 2,
            "batch_size: kto needs at least 2: a mismatched pair takes another's completion",
        )


def kto_loss(logratio_B, z, desirable_B, args: KTOSettings):
    """Eq. 8 of the paper: how far a completion's log-ratio is on the right side of
    z. -> (B,)"""
    sign_B = 2 * desirable_B.to(logratio_B.dtype) - 1
    weight_B = torch.where(desirable_B, args.desirable_weight, args.undesirable_weight)
    return weight_B * (1 - torch.sigmoid(args.beta * sign_B * (logratio_B - z)))


class KTO(Objective):
    """Completion 1 is rated; completion 2, another example's, is z's mismatched
    pair."""

    def __init__(self, args: KTOSettings):
        self.args, self.average_logps = args, args.average_logps
        self.kl_pairs = args.loss == "kto"  # apo_zero_unpaired is the same loss at z = 0

    def loss(self, logps, ref_logps, batch, z):
        args, logp_B, length_B = self.args, logps[:, 0], batch.length[:, 0]
        logratio_B = self.logratio(logp_B, ref_logps[:, 0], length_B)
        loss_B = batch.weight * kto_loss(logratio_B, z, batch.label, args)
        # a mean over the step's n_D desirable ones, written as one over its G examples
        share = batch.step_size / max(1, batch.step_desirable)
        sft_B = -logp_B / (length_B if args.sft_average else 1) * batch.label * share
        total_B = args.preference_loss_weight * loss_B + args.sft_loss_weight * sft_B
        columns = {"preference_loss": loss_B, "sft_loss": sft_B, "logratio": logratio_B}
        return total_B, columns | {"logp": logp_B, "desirable": batch.label}

    def metrics(self, columns, kl):
        good, r, logp = columns["desirable"] > 0, columns["logratio"], columns["logp"]
        beta, z, n = self.args.beta, kl.z.item(), len(kl.logratio)
        right = torch.where(good, 1.0, -1.0)
        chosen, rejected = mean(beta * r[good]), mean(beta * r[~good])
        both = None not in (chosen, rejected)
        row = {name: mean(columns[name]) for name in ("loss", "preference_loss", "sft_loss")}
        return row | {
            "kl": z if self.kl_pairs else None,
            "kl/stderr": (kl.logratio.std() / math.sqrt(n)).item() if n > 1 else None,
            "kl/clamped": float(z == 0 and kl.logratio.mean() < 0) if n else None,
            "kl/pairs": n if self.kl_pairs else None,
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected if both else None,
            "rewards/mean": mean(beta * r),
            "rewards/std": (beta * r).std().item() if len(r) > 1 else None,
            "logps/chosen": mean(logp[good]),
            "logps/rejected": mean(logp[~good]),
            "accuracy": mean((right * r > 0).double()),
            "accuracy/about_z": mean((right * (r - z) > 0).double()),
            "auc": auc(r[good], r[~good]) if both else None,
        }


def main(argv=None, checker=None) -> None:
    """`checker`: a function (prompt, completion) -> bool that judges held-out
    answers."""
    cfg = parse(Settings, argv, __doc__, demo="demo.yaml")
    with Trainer(cfg, KTO(cfg.kto), checker=checker) as trainer:
        if trainer.fit():
            trainer.finish()


if __name__ == "__main__":
    run_cli(main)
