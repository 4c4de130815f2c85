"""SimPO (arXiv 2405.14734): pairs without a reference. Run it: python examples/simpo.py"""

import sys
from dataclasses import dataclass

sys.path.append(f"{sys.path[0]}/..")  # the project, wherever this file is started from

from torch.nn.functional import logsigmoid

from runs.cli import parse
from runs.errors import run_cli
from runs.settings import RunSettings
from setup import setup
from train import Objective, Trainer


@dataclass(frozen=True)
class Settings(RunSettings):
    beta: float = 2.0
    """Scale of the rewards, which are mean log-probs of a completion's tokens."""
    gamma: float = 0.5
    """How far the chosen reward should be above the rejected one."""


class SimPO(Objective):
    records, needs_reference = "paired", False

    def __init__(self, cfg):
        self.beta, self.gamma = cfg.beta, cfg.gamma

    def loss(self, logps, ref_logps, batch, z):
        reward = self.beta * logps / batch.length
        margin = reward[:, 0] - reward[:, 1]
        columns = {"margin": margin, "accuracy": margin > 0}
        return -logsigmoid(margin - self.gamma), columns


def main(argv=None):
    cfg = parse(Settings, argv, __doc__, demo="demo_dpo.yaml")
    with Trainer(setup(cfg, SimPO(cfg))) as trainer:
        if trainer.fit():
            trainer.finish()


if __name__ == "__main__":
    run_cli(main)
