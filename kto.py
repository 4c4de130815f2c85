"""KTO: learn from single ratings, thumbs up or down (Ethayarajh et al. 2024, arXiv 2402.01306).

    python kto.py                                # the demo: two cores, half a minute
    python kto.py --config config/gpt2.yaml      # GPT-2 on rated data
    python kto.py --help                         # every setting

To try an idea, copy this file (cp kto.py mine.py), change kto_loss, and run it (python mine.py). Or write a
short file that gives `main` what changes (its arguments, below), as the files in examples/ do.

A completion's log-ratio r = log policy - log reference says how much more probable it has become. The loss compares
r with z, the paper's estimate of KL(policy || reference) in nats: the mean r of mismatched pairs (a prompt with the
completion of another prompt), which cost no sampling. This mean can come out below 0, which no KL is: z is then 0.

Reading order: settings, kto_loss (the idea), the objective, main. The loop is Trainer.fit in trainer.py.
objective.py has the other methods that an algorithm may override. Two of them: make_z makes z, and after_step updates
what is remembered from step to step.

Where we differ from the paper and its ports: z is made once for the whole optimizer step, from all
micro-batches and devices, one number for all examples; a mismatched completion never comes from an equal
prompt; before the first step a few examples are scored, and unless --reference names another model every r, of
rated and of mismatched completions, must be exactly 0 (checks.check_start).

Shape letters: G examples of a step, B of a micro-batch, K completions of an example, n mismatched pairs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jsonargparse.typing import NonNegativeFloat

from data import MicroBatch
from evaluation import Checker
from infra.console import run_cli
from infra.parse import parse
from infra.settings import RunSettings
from objective import Objective, PreferenceSettings, Z, join_columns, mean
from run import setup
from trainer import Trainer


# --help shows the docstrings. beta, average_logps and the SFT term come from PreferenceSettings
@dataclass(frozen=True)
class KTOSettings(PreferenceSettings):
    """The KTO loss."""

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto, or apo_zero_unpaired (arXiv 2408.06266: z = 0, no mismatched pairs)."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of a thumbs up (the paper's lambda_D). python data.py FILE prints what the paper
    suggests for the file's numbers of thumbs up and down."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of a thumbs down (lambda_U)."""


@dataclass(frozen=True)
class Settings(RunSettings):
    kto: KTOSettings = KTOSettings()


def kto_loss(
    logratio_B: torch.Tensor, z_B: torch.Tensor, desirable_B: torch.Tensor, args: KTOSettings
) -> torch.Tensor:
    """The loss of the paper, lambda_y - v(x, y): near 0 where a completion's log-ratio is far on its label's side of z,
    near its weight where it is far on the other side. -> (B,)

    logratio_B, z_B: (B,) nats; z_B has no gradient. desirable_B: (B,) bool."""
    sign_B = 2 * desirable_B.to(logratio_B.dtype) - 1
    lambda_B = torch.where(desirable_B, args.desirable_weight, args.undesirable_weight)
    return lambda_B * (1 - torch.sigmoid(args.beta * sign_B * (logratio_B - z_B)))


class KTO(Objective):
    """The loss of rated completions. It gets z, which Objective.make_z makes from the mismatched pairs."""

    def __init__(self, args: KTOSettings):
        self.args = args
        self.average_logps = args.average_logps  # for Objective.logratio
        # apo_zero_unpaired is the same loss at z = 0, which is what make_z gives without pairs
        self.needs_mismatched_pairs = args.loss == "kto"

    def loss(
        self,
        logps: torch.Tensor,
        ref_logps: torch.Tensor | None,
        batch: MicroBatch,
        z_B: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        args = self.args
        # (B, K), and K is 1: a rated example has one completion
        logp_B = logps[:, 0]
        logratio_B = self.logratio(logps, ref_logps, batch.length)[:, 0]
        preference_loss_B = kto_loss(logratio_B, z_B, batch.label, args)
        nll_B = -logp_B
        if args.average_logps:
            nll_B = nll_B / batch.length[:, 0]
        # The loop takes the mean over all G examples; times this it is the mean over the step's desirable ones.
        scale = batch.step.size / max(1, batch.step.n_desirable)
        sft_loss_B = torch.where(batch.label, nll_B, 0) * scale
        loss_B = preference_loss_B + args.sft_loss_weight * sft_loss_B
        return loss_B, {  # metrics needs logratio, logp and desirable
            "preference_loss": preference_loss_B,
            "sft_loss": sft_loss_B,
            "logratio": logratio_B,
            "logp": logp_B,
            "desirable": batch.label,
        }

    def metrics(self, columns: dict[str, torch.Tensor], z: Z) -> dict:
        desirable_G = columns["desirable"] > 0  # the loop has made float64 of all columns
        logratio_G = columns["logratio"]
        logp_G = columns["logp"]
        sign_G = torch.where(desirable_G, 1.0, -1.0)
        reward_G = self.args.beta * logratio_G
        # TRL's words for the desirable and the undesirable ones
        chosen = mean(reward_G[desirable_G])
        rejected = mean(reward_G[~desirable_G])
        has_both = chosen is not None and rejected is not None
        z_G, mismatched_logratio_n = z
        n = len(mismatched_logratio_n)
        # KTO's z is one number, whose mean would differ in its last digits; a fork's make_z may give several
        is_one_number = bool((z_G == z_G[0]).all())
        mean_z = (z_G[0] if is_one_number else z_G.mean()).item()
        # Before the first update r is 0 everywhere, unless --reference names another model. Then no r is on a side of
        # 0 or z; and that of mismatched pairs may be off 0 by rounding (Trainer.reference_and_pairs).
        any_r = bool(logratio_G.any())
        is_clamped = n > 0 and any_r and mean_z == 0 and mismatched_logratio_n.mean().item() < 0
        inputs = ("logratio", "logp", "desirable")  # used below, not logged themselves
        means = {name: mean(x_G) for name, x_G in columns.items() if name not in inputs}
        # a mean over the desirable ones; a fork's loss may leave it out
        if "sft_loss" in means and not desirable_G.any():
            means["sft_loss"] = None
        # n is 0 with pairs, too, where all prompts of a step are equal
        row = {
            "kl": mean_z if self.needs_mismatched_pairs else None,
            "kl/stderr": (mismatched_logratio_n.std() / math.sqrt(n)).item() if n > 1 else None,
            "kl/clamped": float(is_clamped) if n else None,
            "kl/pairs": n if self.needs_mismatched_pairs else None,
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected if has_both else None,
            "rewards/mean": mean(reward_G),
            "rewards/std": reward_G.std().item() if len(reward_G) > 1 else None,
            "logps/chosen": mean(logp_G[desirable_G]),
            "logps/rejected": mean(logp_G[~desirable_G]),
            # the share of r on its label's side of 0; and on its label's side of z, as the loss sees it
            "accuracy": mean((sign_G * logratio_G > 0).double()) if any_r else None,
            "accuracy/about_z": mean((sign_G * (logratio_G - z_G) > 0).double()) if any_r else None,
            # P(r of a thumbs up > r of a thumbs down)
            "auc": auc(logratio_G, desirable_G) if has_both and any_r else None,
        }
        return join_columns(means, row)


def auc(x: torch.Tensor, is_high: torch.Tensor) -> float:
    """The probability that one of the numbers x that are marked high is above one of the others; a tie counts one half.

    Both are 1-D tensors; at least one number is marked, and one is not."""
    high = x[is_high]
    low = x[~is_high].sort().values
    n_below = torch.searchsorted(low, high)  # for each of `high`
    n_below_or_equal = torch.searchsorted(low, high, right=True)
    wins = (n_below + n_below_or_equal).double() / 2
    return (wins.mean() / len(low)).item()


def main(
    argv: list[str] | None = None,
    objective: Callable[..., Objective] = KTO,
    settings: type = Settings,
    trainer: type[Trainer] = Trainer,
    checker: Checker | None = None,
    optimizer: Callable | None = None,
    make_records: Callable | None = None,
) -> None:
    """What a file of your own may replace: objective, called with cfg.kto, gives an Objective; settings, a
    class like Settings with a group kto; trainer, a subclass of Trainer; checker, a function that judges a
    list of held-out answers (evaluation.Checker); optimizer(policy, cfg), as infra.optimizer.make_optimizer;
    make_records(raw record), which turns one record of the user's file into a list of records in our form."""
    # without --model and --config: config/demo.yaml; --help begins with the docstring of the objective's file
    cfg = parse(settings, argv, objective, demo="demo.yaml")
    run = setup(cfg, objective(cfg.kto), checker, optimizer, make_records=make_records)
    with trainer(run) as loop:  # after an error Trainer.__exit__ saves the last whole step
        if loop.fit():  # False: stopped early
            loop.finish()


if __name__ == "__main__":
    run_cli(main)
