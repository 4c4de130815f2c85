"""On-policy distillation (GKD, arXiv 2306.13649): the policy learns a teacher's distribution on the policy's answers.

    python examples/distill.py --reference TEACHER

TEACHER is a model with the tokenizer of the policy. At each token of an answer the loss is the reverse KL divergence
from policy to teacher over k + 1 outcomes: the k tokens that the teacher finds most probable, and all others together.
No answer is rated: a checker only says how good the policy becomes.
"""

from dataclasses import dataclass

import torch
from jsonargparse.typing import PositiveInt

import online
from evaluation import with_answers
from infra.console import run_cli
from infra.settings import refuse_unless
from objective import Objective
from online import OnlineSettings


@dataclass(frozen=True)
class DistillSettings:
    top_k: PositiveInt = 16
    """How many of the teacher's most probable tokens are compared one by one."""


@dataclass(frozen=True)
class Settings(online.Settings):
    kto: DistillSettings = DistillSettings()
    online: OnlineSettings = OnlineSettings(reference="first")

    def validate(self) -> None:
        super().validate()
        refuse_unless(self.reference, "reference: expected the teacher, a model")


def rate(run, prompts, answers):
    """Every answer is learned from."""
    return with_answers(prompts, answers)


def with_rest(logps):
    """(..., k) log-probs of some tokens -> (..., k + 1), the last one of all other tokens together."""
    rest = 1 - logps.exp().sum(-1, keepdim=True)
    return torch.cat([logps, rest.clamp(min=1e-6).log()], -1)


def reverse_kl(logps, ref_logps):
    """KL(policy || teacher) in nats at each place, (..., k) -> (...)."""
    logps, ref_logps = with_rest(logps), with_rest(ref_logps)
    return (logps.exp() * (logps - ref_logps)).sum(-1)


class Distill(Objective):
    record_kind = "prompts"
    by_token = True

    def __init__(self, args):
        self.top_k = args.top_k

    def loss(self, logps, ref_logps, batch, z_B):
        # (B, 1, L, 1 + k): the first is the answer's own token. Beyond an answer's end all are 0, and so is the KL.
        kl_BL = reverse_kl(logps[:, 0, :, 1:], ref_logps[:, 0, :, 1:])
        return kl_BL.sum(1) / batch.length[:, 0], {"length": batch.length[:, 0]}


if __name__ == "__main__":
    run_cli(lambda: online.main(objective=Distill, settings=Settings, rate=rate))
