"""SimPO (arXiv 2405.14734): pairs without a reference. Run it: python examples/simpo.py"""

from dataclasses import dataclass

from torch.nn.functional import logsigmoid

from dpo import main
from infra.console import run_cli
from infra.settings import RunSettings
from objective import Objective


@dataclass(frozen=True)
class SimPOSettings:
    beta: float = 2.0
    """Scale of the rewards, which are mean log-probs of a completion's tokens."""
    gamma: float = 0.5
    """How far the chosen reward should be above the rejected one."""


@dataclass(frozen=True)
class Settings(RunSettings):
    dpo: SimPOSettings = SimPOSettings()


class SimPO(Objective):
    record_kind, needs_reference = "paired", False

    def __init__(self, args):
        self.args = args

    def loss(self, logps, ref_logps, batch, z_B):
        reward = self.args.beta * logps / batch.length
        margin = reward[:, 0] - reward[:, 1]
        columns = {"margin": margin, "accuracy": margin > 0}
        return -logsigmoid(margin - self.args.gamma), columns


if __name__ == "__main__":
    run_cli(lambda: main(objective=SimPO, settings=Settings))
