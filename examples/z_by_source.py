"""KTO with a z for each source of the data, a field of the records. Run it: python examples/z_by_source.py"""

import sys

sys.path.append(f"{sys.path[0]}/..")  # the project, wherever this file is started from

import torch

from kto import KTO, Settings
from runs.cli import parse
from runs.errors import run_cli
from setup import setup
from train import Trainer


class ZBySource(KTO):
    field = ""  # of the records, named by data.extra; without one all examples have one source

    def baseline(self, kl_n, step):
        """(G,): for each example the mean of r over its source's mismatched pairs, then the clamp."""
        sources = step.extra(self.field) if self.field else [0] * step.size
        z_G = torch.zeros(step.size, dtype=kl_n.dtype, device=kl_n.device)
        paired = step.paired.tolist()
        for source in set(sources):
            own = torch.tensor([sources[i] == source for i in range(step.size)])
            pairs = own[paired].to(kl_n.device)
            if pairs.any():
                z_G[own.to(kl_n.device)] = kl_n[pairs].mean().clamp(min=0)
        return z_G


def main(argv=None):
    cfg = parse(Settings, argv, __doc__, demo="demo.yaml")
    objective = ZBySource(cfg.kto)
    objective.field = cfg.data.extra
    with Trainer(setup(cfg, objective)) as trainer:
        if trainer.fit():
            trainer.finish()


if __name__ == "__main__":
    run_cli(main)
