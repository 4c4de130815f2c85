"""GRPO (arXiv 2402.03300), clipped by token. Run it: python examples/grpo.py --online.num_generations 8"""

from dataclasses import dataclass

import torch
from jsonargparse.typing import PositiveFloat

import online
from evaluation import as_answers, with_answers
from infra.console import run_cli
from infra.settings import Sampling, refuse_unless
from objective import Objective


@dataclass(frozen=True)
class GRPOSettings:
    clip: PositiveFloat = 0.2
    """How far from 1 the ratio of policy and sampler counts."""


@dataclass(frozen=True)
class Settings(online.Settings):
    kto: GRPOSettings = GRPOSettings()

    def validate(self) -> None:
        super().validate()
        args = self.online
        several = "online.num_generations: the answers to a prompt are compared: 2 or more"
        refuse_unless(args.num_generations > 1, several)
        sampler = "the ratio is that to the policy which gave the answers, at temperature 1"
        refuse_unless(args.reference == "last", f"online.reference: {sampler}")
        for name in ("temperature", "top_p"):
            is_default = getattr(args, name) == getattr(Sampling, name)
            refuse_unless(is_default, f"online.{name}: {sampler}")
        refuse_unless(args.cut == "judge", "online.cut: the checker judges all answers")
        refuse_unless(not args.balance, "online.balance: advantages are balanced within a prompt")


def rate(run, prompts, answers):
    """Advantages by the checker's verdicts on all answers of a prompt. A step may have only some of these answers.
    Every answer needs a verdict."""
    args, answered = run.cfg.online, with_answers(prompts, answers)
    # booleans, or numbers from 0 to 1
    verdicts = run.evaluator.verdicts(as_answers(run.tokenizer, answered, args.stop))
    groups = torch.tensor(verdicts, dtype=torch.float64).view(-1, args.num_generations)
    std, mean = torch.std_mean(groups, dim=1, correction=0, keepdim=True)
    advantages = ((groups - mean) / (std + 1e-4)).flatten().tolist()
    return [
        e._replace(label=v > 0.5, rewards=(advantage, None))
        for e, v, advantage in zip(answered, verdicts, advantages)
    ]


class GRPO(Objective):
    """The reference is the policy that gave the answers (online.reference last); no KL term. The default
    `reduce_tokens` gives the loss the log-probs of each token."""

    record_kind, by_token = "prompts", True

    def __init__(self, args):
        self.clip = args.clip

    def loss(self, logps, ref_logps, batch, z_B):
        ratio, length = (logps - ref_logps)[:, 0].exp(), batch.length[:, 0]  # (B, L), (B,)
        near = ratio.clamp(1 - self.clip, 1 + self.clip)
        advantage = batch.reward[:, None]
        is_token = torch.arange(ratio.shape[1], device=ratio.device) < length[:, None]
        gain = torch.minimum(ratio * advantage, near * advantage) * is_token
        clipped = ((ratio != near) & is_token).sum(1) / length
        return -gain.sum(1) / length, {"right": batch.label, "clipped": clipped, "length": length}


if __name__ == "__main__":
    run_cli(lambda: online.main(objective=GRPO, settings=Settings, rate=rate))
