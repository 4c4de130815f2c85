"""BCO (arXiv 2404.04656): a baseline with memory. Run it: python examples/bco.py"""

from dataclasses import dataclass

from torch.nn.functional import logsigmoid

from infra.console import run_cli
from infra.settings import RunSettings
from kto import main
from objective import Objective


@dataclass(frozen=True)
class BCOSettings:
    beta: float = 0.1
    """Strength of the pull back to the reference."""


@dataclass(frozen=True)
class Settings(RunSettings):
    kto: BCOSettings = BCOSettings()


class BCO(Objective):
    count, delta = 0, 0.0  # delta: the mean of all rewards so far

    def __init__(self, args):
        self.beta = args.beta

    def loss(self, logps, ref_logps, batch, z_B):
        reward = self.beta * (logps - ref_logps)[:, 0]
        sign = 2.0 * batch.label - 1
        return -logsigmoid(sign * (reward - self.delta)), {"reward": reward}

    def after_step(self, step, columns, z):
        self.count += len(columns["reward"])
        self.delta += (columns["reward"] - self.delta).sum().item() / self.count

    def state_dict(self):
        return {"count": self.count, "delta": self.delta}


if __name__ == "__main__":
    run_cli(lambda: main(objective=BCO, settings=Settings))
