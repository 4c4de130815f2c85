"""max(0, margin - h) on pairs, with h as in DPO. Run it: python examples/hinge.py"""

from dataclasses import dataclass

from dpo import main
from infra.console import run_cli
from infra.settings import RunSettings
from objective import Objective


@dataclass(frozen=True)
class HingeSettings:
    margin: float = 1.0
    """How far the chosen log-ratio should be above the rejected one."""


@dataclass(frozen=True)
class Settings(RunSettings):
    dpo: HingeSettings = HingeSettings()


class Hinge(Objective):
    record_kind = "paired"

    def __init__(self, args):
        self.margin = args.margin

    def loss(self, logps, ref_logps, batch, z_B):
        h = (logps - ref_logps) @ logps.new_tensor([1.0, -1.0])  # r_chosen - r_rejected
        return (self.margin - h).relu(), {"wins": h > 0}


if __name__ == "__main__":
    run_cli(lambda: main(objective=Hinge, settings=Settings))
