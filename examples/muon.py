"""KTO with Muon. Run it: python examples/muon.py"""

import torch

from infra.console import run_cli
from infra.optimizer import make_optimizer
from kto import main


class Both(torch.optim.Optimizer):
    """Two optimizers, of different parameters, as one: they share groups and state."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        super().__init__([group for o in optimizers for group in o.param_groups], {})
        for optimizer in optimizers:
            optimizer.state = self.state

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


def muon(policy, cfg):
    """Muon (torch's own) for the matrices of the blocks, AdamW for all else."""
    matrices = [p for p in policy.blocks.parameters() if p.ndim == 2 and p.requires_grad]
    adamw, of_muon = make_optimizer(policy, cfg), {id(p) for p in matrices}
    for group in adamw.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in of_muon]
    o = cfg.optim
    # steps of the size of AdamW's, so that one learning rate serves both
    how = "match_rms_adamw"
    of_blocks = torch.optim.Muon(matrices, o.lr, weight_decay=o.weight_decay, adjust_lr_fn=how)
    return Both(of_blocks, adamw)


if __name__ == "__main__":
    run_cli(lambda: main(optimizer=muon))
