"""max(0, margin - h) on pairs, with h as in DPO. Run it: python examples/hinge.py"""

import sys
from dataclasses import dataclass

sys.path.append(f"{sys.path[0]}/..")  # the project, wherever this file is started from

from runs.cli import parse
from runs.errors import run_cli
from runs.settings import RunSettings
from setup import setup
from train import Objective, Trainer


@dataclass(frozen=True)
class Settings(RunSettings):
    margin: float = 1.0
    """How far the chosen log-ratio should be above the rejected one."""


class Hinge(Objective):
    records = "paired"

    def __init__(self, margin):
        self.margin = margin

    def loss(self, logps, ref_logps, batch, z):
        h = (logps - ref_logps) @ logps.new_tensor([1.0, -1.0])  # r_chosen - r_rejected
        return (self.margin - h).relu(), {"wins": h > 0}


def main(argv=None):
    cfg = parse(Settings, argv, __doc__, demo="demo_dpo.yaml")
    with Trainer(setup(cfg, Hinge(cfg.margin))) as trainer:
        if trainer.fit():
            trainer.finish()


if __name__ == "__main__":
    run_cli(main)
