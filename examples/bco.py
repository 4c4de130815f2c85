"""BCO (arXiv 2404.04656): a baseline with memory. Run it: python examples/bco.py"""

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
    beta: float = 0.1
    """Strength of the pull back to the reference."""


class BCO(Objective):
    count, delta = 0, 0.0  # delta: the mean of all rewards so far

    def __init__(self, beta):
        self.beta = beta

    def loss(self, logps, ref_logps, batch, z):
        reward = self.beta * (logps - ref_logps)[:, 0]
        sign = 2.0 * batch.label - 1
        return -logsigmoid(sign * (reward - self.delta)), {"reward": reward}

    def after_step(self, columns, kl):
        self.count += len(columns["reward"])
        self.delta += (columns["reward"] - self.delta).sum().item() / self.count

    def state_dict(self):
        return {"count": self.count, "delta": self.delta}


def main(argv=None):
    cfg = parse(Settings, argv, __doc__, demo="demo.yaml")
    with Trainer(setup(cfg, BCO(cfg.beta))) as trainer:
        if trainer.fit():
            trainer.finish()


if __name__ == "__main__":
    run_cli(main)
