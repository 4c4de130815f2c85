"""KTO, and beside it a head that learns to predict the ratings. Run it: python examples/rating_head.py"""

from dataclasses import dataclass

from jsonargparse.typing import NonNegativeFloat, PositiveFloat
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import kto
from infra.console import run_cli


@dataclass(frozen=True)
class RatingSettings(kto.KTOSettings):
    rating_weight: NonNegativeFloat = 0.1
    """Weight of the head's loss beside KTO's."""
    rating_lr_scale: PositiveFloat = 10.0
    """The head's learning rate is so many times that of the model."""


@dataclass(frozen=True)
class Settings(kto.Settings):
    kto: RatingSettings = RatingSettings()


class RatingKTO(kto.KTO):
    def make_module(self, width):
        head = nn.Linear(width, 1)
        head.lr_scale = self.args.rating_lr_scale
        return head

    def loss(self, logps, ref_logps, batch, z_B):
        loss_B, columns = super().loss(logps, ref_logps, batch, z_B)
        # the state that predicts the last token, EOS: it has read all others
        last_B11 = batch.length[:, :1, None] - 1
        logit_B = batch.outputs[:, 0].gather(1, last_B11)[:, 0, 0]
        label_B = batch.label.to(logit_B.dtype)
        rating_B = binary_cross_entropy_with_logits(logit_B, label_B, reduction="none")
        columns |= {"rating_loss": rating_B, "rating_accuracy": (logit_B > 0) == batch.label}
        return loss_B + self.args.rating_weight * rating_B, columns


if __name__ == "__main__":
    run_cli(lambda: kto.main(objective=RatingKTO, settings=Settings))
