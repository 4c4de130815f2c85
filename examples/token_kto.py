"""KTO on marked parts of an answer, in the spirit of Step-KTO (arXiv 2501.10799). Run it: python examples/token_kto.py

A record may have `spans`, parts of the completion with a thumb each. An answer with marks learns from its marked tokens
alone, each with the sign of its mark. An answer without marks learns from its thumb, as in kto.py. z is 0.
"""

import torch

from infra.console import run_cli
from kto import KTO, main


class TokenKTO(KTO):
    by_token = True

    def __init__(self, args):
        super().__init__(args)
        self.needs_mismatched_pairs = False  # z is of whole answers

    def loss(self, logps, ref_logps, batch, z_B):
        logratio_BL = (logps - ref_logps)[:, 0]
        sign_B = 2 * batch.label.to(logratio_BL.dtype) - 1
        mark_BL = batch.token_label.to(logratio_BL.dtype)
        has_marks_B = mark_BL.any(dim=1)
        sign_BL = torch.where(has_marks_B[:, None], mark_BL, sign_B[:, None])
        # beyond the end of a completion the log-ratios are 0
        loss_B = 1 - torch.sigmoid(self.args.beta * (sign_BL * logratio_BL).sum(1))
        return loss_B, {
            "logratio": logratio_BL.sum(1),
            "logp": logps[:, 0].sum(1),
            "desirable": batch.label,
            "marked": has_marks_B,
        }


if __name__ == "__main__":
    run_cli(lambda: main(objective=TokenKTO))
