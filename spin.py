"""SPIN: learn from demonstrations alone, against one's own last self (Chen et al. 2024, arXiv
2401.01335).

    python spin.py                                 # the demo: two cores, two minutes

Each iteration: the policy becomes the reference, answers every prompt, and learns by DPO to prefer
the human's completion to that answer. Reading order: settings, the objectives, main.

Where the paper leaves a choice: one learning-rate schedule spans all iterations and the optimizer's
state carries on (LoRA's restarts, since its adapters are merged into the base and begin anew).
"""

from runs.errors import run_cli  # noqa: I001  first: for Ctrl-C
from dataclasses import dataclass, field

import numpy as np

from data import epoch_order
from dpo import DPO, DPOSettings
from generate import completion_text
from rollout import ROUNDS, policy_answers, iterations, offloaded, read_answers
from runs.cli import parse
from runs.console import say
from records.examples import Example
from runs.console import format_table
from runs.optimizer import iteration_plans
from runs.settings import RunSettings, Sampling, refuse_unless
from train import Objective, Trainer


@dataclass(frozen=True)
class SPINSettings(Sampling):
    """The iterations, and how answers are sampled."""

    max_iterations: int = 3
    """Iterations; --epochs counts within each."""
    beta: float | list[float] = 0.1
    """Strength of the pull to the iteration's reference: one number, or one for each iteration."""
    mix: float = 0.0
    """Add this fraction of the last iteration's answers to an iteration's own; 1.0, the paper's
    practice, adds all."""
    rollout_batch_size: int = 512
    """Prompts answered between two writes to disk: a resume goes on at such a border."""
    sft_loss_weight: float = 0.0
    """Weight of the negative log-likelihood of the demonstrations."""
    average_logps: bool = False
    """Divide log-probabilities by the number of scored tokens."""
    offload: bool = False
    """Keep the optimizer's state on the CPU while the policy answers."""

    def betas(self) -> list[float]:
        return self.beta if isinstance(self.beta, list) else [self.beta] * self.max_iterations

    def validate(self, group: str = "spin") -> None:
        super().validate(group)
        n, betas = self.max_iterations, self.betas()
        counts = min(n, self.rollout_batch_size) >= 1
        refuse_unless(
            counts and 0 <= self.mix <= 1 and self.sft_loss_weight >= 0,
            "spin: max_iterations and rollout_batch_size are at least 1, mix in [0, 1], weights at "
            "least 0",
        )
        expected = f"spin.beta: expected one number above 0, or {n} of them; got {self.beta}"
        refuse_unless(len(betas) == n and all(b > 0 for b in betas), expected)


@dataclass(frozen=True)
class Settings(RunSettings):
    spin: SPINSettings = field(default_factory=SPINSettings)

    def validate(self) -> None:
        super().validate()
        self.spin.validate()
        refuse_unless(not self.reference, "reference: SPIN's reference is its own last self")
        refuse_unless(
            not self.reference_cache,
            "reference_cache: SPIN's reference is another one in each iteration",
        )
        folds = "lora.base: SPIN adds the adapters to the base, which a quantised one does not take"
        refuse_unless(not self.lora.base, folds)
        refuse_unless(self.precision != "bf16-true", ROUNDS)
        refuse_unless(
            not self.spin.offload or self.strategy != "fsdp",
            "spin.offload: does not work with strategy fsdp, which shards the state already",
        )


class SPIN(DPO):
    """DPO with chosen = the demonstration, rejected = the policy's own answer."""

    records = "demonstrations"

    def __init__(self, args: SPINSettings, beta: float):
        rest = dict(average_logps=args.average_logps, sft_loss_weight=args.sft_loss_weight)
        super().__init__(DPOSettings(beta=beta, **rest))


class Likelihood(Objective):
    """Validation: the negative log-likelihood of the demonstrations, per token."""

    records, needs_reference = "demonstrations", False

    def loss(self, logps, ref_logps, batch, z):
        return -logps[:, 0] / batch.length[:, 0], {}


def pairs(trainer, i: int, own: list[list[int]]) -> list[Example]:
    """The demonstrations against the policy's own answers, and `mix` of the last iteration's."""
    args, demos = trainer.cfg.spin, trainer.examples["train"]
    made = [_against(e, ids) for e, ids in zip(demos, own)]
    if i > 1 and args.mix:
        last = read_answers(trainer, i - 1)
        order = epoch_order(len(demos), i, trainer.cfg.seed, True)
        made += [_against(demos[j], last[j]) for j in order[: int(args.mix * len(demos))]]
    return made


def _against(demo: Example, ids: list[int]) -> Example:
    return demo._replace(completions=(demo.completions[0], np.array(ids, dtype=np.int32)))


def show_pairs(trainer, i: int, beta: float, examples: list[Example]) -> None:
    same = sum(np.array_equal(*e.completions) for e in examples)
    counts = f"{len(examples):,} pairs, {same:,} answered as demonstrated"
    say(f"iteration {i}: beta {beta}, {counts}")
    decode, stop = trainer.tokenizer, trainer.cfg.spin.stop
    few = [(e.prompt, *e.completions) for e in examples[:4]]
    rows = [[completion_text(decode, list(ids), stop) for ids in row] for row in few]
    say(format_table(("prompt", "demonstration", "the policy's own"), rows))


def main(argv=None, checker=None, rollout=None) -> None:
    """`checker`: a function (prompt, completion) -> bool; `rollout`: an engine that answers."""
    cfg = parse(Settings, argv, __doc__, demo="demo_spin.yaml")
    betas, given = cfg.spin.betas(), dict(checker=checker, rollout=rollout)
    objective = SPIN(cfg.spin, betas[0])
    with Trainer(cfg, objective, validation=Likelihood(), **given) as trainer:
        n, n_mixed = (
            len(trainer.examples["train"]),
            int(cfg.spin.mix * len(trainer.examples["train"])),
        )
        plans = iteration_plans(cfg, [n] + [n + n_mixed] * (cfg.spin.max_iterations - 1))
        for i, plan in iterations(trainer, plans, moving_reference=True):
            prompts = [e.prompt for e in trainer.examples["train"]]
            with offloaded(trainer.optimizer, cfg.spin.offload):
                own = policy_answers(trainer, i, plan, prompts, cfg.spin)
            examples = pairs(trainer, i, own)
            show_pairs(trainer, i, betas[i - 1], examples)
            trainer.objective = SPIN(cfg.spin, betas[i - 1])
            if not trainer.fit(examples, plan):
                break
        else:
            trainer.finish()


if __name__ == "__main__":
    run_cli(main)
