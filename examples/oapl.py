"""OAPL (arXiv 2602.19362; A*-PO, 2505.20686): beta times the log-ratio is fitted to reward minus the prompt's value.

    python examples/oapl.py --online.num_generations 8

The value of a prompt is value_beta * log(mean(exp(reward / value_beta))) over its answers, which is the value of the
best policy that stays near the one that gave the answers. There is no clip and no ratio of policies, so answers may be
some steps old (--epochs).
"""

from dataclasses import dataclass

import torch
from jsonargparse.typing import PositiveFloat

import online
from evaluation import as_answers, with_answers
from infra.console import run_cli
from infra.settings import refuse_unless
from objective import Objective


@dataclass(frozen=True)
class OAPLSettings:
    beta: PositiveFloat = 0.05
    """Strength of the pull back to the policy that gave the answers."""
    value_beta: PositiveFloat = 0.5
    """Near 0 the value of a prompt is its best reward; a large one makes it the mean reward."""


@dataclass(frozen=True)
class Settings(online.Settings):
    kto: OAPLSettings = OAPLSettings()

    def validate(self) -> None:
        super().validate()
        refuse_unless(
            self.online.num_generations > 1, "online.num_generations: a value needs two answers"
        )


def rate(run, prompts, answers):
    """`rewards` is the checker's verdict minus the value of the prompt. Every answer needs a verdict."""
    args, answered = run.cfg.online, with_answers(prompts, answers)
    verdicts = run.evaluator.verdicts(as_answers(run.tokenizer, answered, args.stop))
    rewards = torch.tensor(verdicts, dtype=torch.float64).view(-1, args.num_generations)
    beta = run.cfg.kto.value_beta
    values = beta * (rewards / beta).exp().mean(dim=1, keepdim=True).log()
    advantages = (rewards - values).flatten().tolist()
    return [
        e._replace(label=v > 0.5, rewards=(advantage, None))
        for e, v, advantage in zip(answered, verdicts, advantages)
    ]


class OAPL(Objective):
    record_kind = "prompts"

    def __init__(self, args):
        self.beta = args.beta

    def loss(self, logps, ref_logps, batch, z_B):
        logratio_B = self.logratio(logps, ref_logps, batch.length)[:, 0]
        loss_B = (self.beta * logratio_B - batch.reward) ** 2
        return loss_B, {"right": batch.label, "logratio": logratio_B}


if __name__ == "__main__":
    run_cli(lambda: online.main(objective=OAPL, settings=Settings, rate=rate))
