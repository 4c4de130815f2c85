"""ORPO (arXiv 2403.07691): likelihood and odds ratio of pairs, no reference. Run it: python examples/orpo.py"""

from dataclasses import dataclass

import torch
from jsonargparse.typing import NonNegativeFloat
from torch.nn.functional import logsigmoid

from dpo import main
from infra.console import run_cli
from infra.settings import RunSettings
from objective import Objective


@dataclass(frozen=True)
class ORPOSettings:
    alpha: NonNegativeFloat = 0.1
    """Weight of the odds ratio beside the likelihood of the chosen completion (the paper's lambda)."""


@dataclass(frozen=True)
class Settings(RunSettings):
    dpo: ORPOSettings = ORPOSettings()


class ORPO(Objective):
    record_kind, needs_reference = "paired", False

    def __init__(self, args):
        self.alpha = args.alpha

    def loss(self, logps, ref_logps, batch, z_B):
        p = logps / batch.length  # log-probs of a token, (B, 2)
        p = p.clamp(max=-1e-6)  # at probability 1 the odds are infinite, and the gradient no number
        log_odds = p - torch.log(-torch.expm1(p))  # log(P / (1 - P)) with P = exp(p)
        margin = log_odds[:, 0] - log_odds[:, 1]
        columns = {"sft_loss": -p[:, 0], "margin": margin, "accuracy": margin > 0}
        return -p[:, 0] - self.alpha * logsigmoid(margin), columns


if __name__ == "__main__":
    run_cli(lambda: main(objective=ORPO, settings=Settings))
