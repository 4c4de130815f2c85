"""KTO with a learned baseline z(x): a head on the prompt's last hidden state, fitted to r of the mismatched pairs.

    python examples/learned_z.py

Only the loss gets the outputs of a module, so the loss takes z from the head. `make_z` returns r of each example's
mismatched pair, the target of the head. metrics get the head's z instead.
"""

from torch import Tensor, nn

import kto
from infra.console import run_cli

FIT = 0.001  # weight of the head's loss: its gradient is clipped together with the policy's


class Head(nn.Linear):
    def forward(self, h_TC: Tensor) -> Tensor:
        """(T, C) -> (T, 1). The head learns from the policy's states and does not change them."""
        # a step of AdamW has the size of the learning rate, so the output moves ten times as fast
        return 10 * super().forward(h_TC.detach())


class LearnedZ(kto.KTO):
    def make_module(self, width):
        head = Head(width, 1)
        nn.init.zeros_(head.weight)  # z is 0 at the start
        nn.init.zeros_(head.bias)
        return head

    def make_z(self, logratio_n, step):
        """-> (G,): r of each example's mismatched pair; the step's own z where it has none."""
        r_G = super().make_z(logratio_n, step).repeat(step.size)
        # at the first step r is 0 up to rounding error, and AdamW would take a full step along the rounding error
        r_G[step.mismatched_index] = logratio_n.round(decimals=4)
        return r_G

    def loss(self, logps, ref_logps, batch, z_B):
        # the state that predicts the first token of the answer has read the prompt alone
        head_B = batch.outputs[:, 0, 0, 0]
        learned_z_B = head_B.detach().clamp(min=0)
        loss_B, columns = super().loss(logps, ref_logps, batch, learned_z_B)
        fit_B = nn.functional.smooth_l1_loss(head_B, z_B.to(head_B.dtype), reduction="none")
        return loss_B + FIT * fit_B, columns | {"learned_z": learned_z_B, "fit": fit_B}

    def metrics(self, columns, z):
        return super().metrics(columns, z._replace(z_G=columns["learned_z"]))


if __name__ == "__main__":
    run_cli(lambda: kto.main(objective=LearnedZ))
