"""Does z matter? KTO with z as we have it, as other libraries have it (docs/beside.md), and without.

    python sweep.py benchmarks/z_variants.py --kto.z ours,zero,trl16,trl4,nemo16,nemo4 --seed 1,2,3,4,5
    python sweep.py benchmarks/z_variants.py --kto.z ours,pairs,trl --data.group_by_prompt true \\
        --seed 1,2,3,4,5

They train on the demo, half a minute a run; regimes.py changes what they learn from. Everything is computed
from the mismatched pairs of the whole step, so it needs neither the micro-batches nor the ranks of the
other libraries.
metrics.csv has two more columns, in nats: how far the z of the examples is from the z of the step's
pairs, z/bias on average and z/rmse as a root mean square.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

import kto
from examples.ema_z import EMA
from infra.console import run_cli


class Variant(NamedTuple):
    """Sizes, in consecutive examples of the step."""

    group: int | None = None  # that share a z, a micro-batch over all ranks; None: the whole step
    rank: int | None = None  # one rank's part of a group: its mean is clamped, then averaged
    block: int | None = None  # in which TRL makes its pairs


VARIANTS = {
    "ours": Variant(),  # one z per step
    "zero": Variant(),  # z = 0, no pairs: as --kto.loss apo_zero_unpaired
    "average": Variant(),  # an average over steps, clamped
    "free": Variant(),  # one z per step, not clamped
    "trl16": Variant(group=16),  # TRL: a z per micro-batch of 16
    "trl4": Variant(group=4),
    "nemo16": Variant(rank=16),  # NeMo: ranks of 16, each clamped, then averaged
    "nemo4": Variant(rank=4),
    "pairs": Variant(block=4),  # one z per step, of TRL's pairs in blocks of 4
    "trl": Variant(group=4, block=4),  # TRL's pairs and its z
}


@dataclass(frozen=True)
class ZSettings(kto.KTOSettings):
    z: Literal[tuple(VARIANTS)] = "ours"
    """One of VARIANTS."""


@dataclass(frozen=True)
class Settings(kto.Settings):
    kto: ZSettings = ZSettings()


class OtherZ(EMA):
    def __init__(self, args: ZSettings):
        super().__init__(args)
        self.needs_mismatched_pairs = args.z != "zero"
        self.variant = VARIANTS[args.z]

    def mismatched_completions(self, examples):
        if self.variant.block:
            partners = neighbours(len(examples), self.variant.block)
            return [examples[j].completions[0] for j in partners]
        return super().mismatched_completions(examples)

    def make_z(self, logratio_n, step):
        group, rank, _ = self.variant
        if self.args.z == "average":
            return super().make_z(logratio_n, step)
        if self.args.z == "free":
            return logratio_n.sum() / max(1, len(logratio_n))
        if not group and not rank:
            return kto.KTO.make_z(self, logratio_n, step)
        assert len(logratio_n) == step.size, "each example has a pair"
        return z_by_groups(logratio_n, group, rank)

    def metrics(self, columns, z):
        row = super().metrics(columns, z)
        if self.needs_mismatched_pairs:
            z_G, logratio_n = z
            error = z_G - kto.KTO.make_z(self, logratio_n, None).to(z_G.dtype)
            row |= {"z/bias": error.mean().item(), "z/rmse": error.square().mean().sqrt().item()}
        return row


def neighbours(n: int, size: int) -> list[int]:
    """TRL's pairs of n examples: each takes the completion of the one before it in its block of
    `size`; the first of a block takes the last one's."""
    partners = []
    for start in range(0, n, size):
        block = list(range(start, min(start + size, n)))
        partners += block[-1:] + block[:-1]
    return partners


def z_by_groups(r_G, group: int | None, rank: int | None):
    """z (G,) of each example. A last group that is smaller is a group too."""
    z_G = torch.empty_like(r_G)
    for z_g, r_g in zip(z_G.split(group or len(r_G)), r_G.split(group or len(r_G))):
        means = [r.mean().clamp(min=0) for r in r_g.split(rank or len(r_g))]
        z_g[:] = torch.stack(means).mean()
    return z_G


if __name__ == "__main__":
    run_cli(lambda: kto.main(objective=OtherZ, settings=Settings))
