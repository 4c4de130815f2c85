"""Humanline KTO (arXiv 2509.24207): each token's log-ratio is clipped, and the reference is the policy of a step ago.

    python examples/humanline.py
    python examples/humanline.py --config config/lora.yaml --model M --reference M --precision 32-true --data.train F

In bfloat16 the reference is the policy with its weights rounded at random, so --precision 32-true is closer.

The clip and its limits are those of the authors' code (HALOs), for the mismatched pairs of z too. There the reference
becomes the policy just before each step; the paper has every k steps (--kto.sync_interval). Two things differ, as in
kto.py: z is one number for the whole step, and mismatched completions come from other prompts.

The reference moves, so the losses of two steps cannot be compared. Judge a run by a checker.
"""

from dataclasses import dataclass

from jsonargparse.typing import NonNegativeFloat, PositiveInt

import kto
from infra.console import BadInput, run_cli
from trainer import Trainer


@dataclass(frozen=True)
class HumanlineSettings(kto.KTOSettings):
    fall: NonNegativeFloat = 1.0
    """A token's log-ratio counts down to minus this number of nats (HALOs: log_epsilon_P is -1)."""
    rise: NonNegativeFloat = 1.5
    """A token's log-ratio counts up to this number of nats (HALOs: log_epsilon_R)."""
    sync_interval: PositiveInt = 1
    """Steps between two moves of the reference."""


@dataclass(frozen=True)
class Settings(kto.Settings):
    kto: HumanlineSettings = HumanlineSettings()

    def validate(self) -> None:
        super().validate()
        if self.lora.rank and not self.reference:
            raise BadInput(
                "lora.rank: the reference would be the model without adapters, which cannot move alone: "
                "give --reference, too, the model itself"
            )


class Humanline(kto.KTO):
    by_token = True

    def reduce_tokens(self, logps, ref_logps, length_BK):
        """(B, K, L) -> (B, K). The reference's log-prob moves until the log-ratio is within its limits. A clipped token
        has no gradient."""
        clipped = (logps - ref_logps).clamp(-self.args.fall, self.args.rise)
        return logps.sum(-1), (logps - clipped).sum(-1)


class MovingReference(Trainer):
    def optimizer_step(self, plan):
        done = self.run.state.step - 1  # run.state.step is the number of this step
        if done % self.run.cfg.kto.sync_interval == 0:
            self.run.new_reference()  # the policy before this step
        return super().optimizer_step(plan)


if __name__ == "__main__":
    run_cli(lambda: kto.main(objective=Humanline, settings=Settings, trainer=MovingReference))
