"""KTO, and beside it a head that learns to predict the ratings. Run it: python examples/rating_head.py"""

import sys
from dataclasses import dataclass, field

sys.path.append(f"{sys.path[0]}/..")  # the project, wherever this file is started from

from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import kto
from runs.errors import run_cli
from runs.metrics import mean
from runs.settings import setting


@dataclass(frozen=True)
class RatingSettings(kto.KTOSettings):
    rating_weight: float = setting(0.1, at_least=0)
    """Weight of the head's loss beside KTO's."""
    rating_lr_scale: float = setting(10.0, above=0)
    """The head's learning rate is so many times that of the model."""


@dataclass(frozen=True)
class Settings(kto.Settings):
    kto: RatingSettings = field(default_factory=RatingSettings)


class RatingKTO(kto.KTO):
    def make_module(self, width):
        head = nn.Linear(width, 1)
        head.lr_scale = self.args.rating_lr_scale
        return head

    def loss(self, logps, ref_logps, batch, z):
        loss_B, columns = super().loss(logps, ref_logps, batch, z)
        # the state that predicts the last token, EOS: it has read all others
        last_B11 = batch.length[:, :1, None] - 1
        logit_B = batch.outputs[:, 0].gather(1, last_B11)[:, 0, 0]
        label_B = batch.label.to(logit_B.dtype)
        rating_B = binary_cross_entropy_with_logits(logit_B, label_B, reduction="none")
        columns |= {"rating_loss": rating_B, "rating_accuracy": (logit_B > 0) == batch.label}
        return loss_B + self.args.rating_weight * rating_B, columns

    def metrics(self, columns, kl):
        of_head = {name: mean(columns[name]) for name in ("rating_loss", "rating_accuracy")}
        return super().metrics(columns, kl) | of_head


if __name__ == "__main__":
    run_cli(lambda: kto.main(objective=RatingKTO, settings=Settings))
