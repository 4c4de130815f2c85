"""A fourth algorithm from outside: a batch, a baseline, a loss, and the loop is none the wiser."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from conftest import ranks

import kto
from data import Batch
from settings import Run, parse
from tell import mean


@dataclass
class Hinge:
    margin: float = 1.0
    """How far the chosen log-ratio should be above the rejected one."""


@dataclass
class Settings(Run):
    hinge: Hinge = field(default_factory=Hinge)


def hinge_objective(args: Hinge) -> kto.Objective:
    """max(0, margin - h) on pairs, h as in DPO."""

    def batch(examples):
        return Batch(examples, None, torch.ones(len(examples), dtype=torch.bool), False)

    def look(fabric, policy, reference, batch, micros):
        ref_logp_GK = torch.zeros(len(batch.examples), 2, device=fabric.device)
        for slots, weight in micros:
            logp_BK = reference(batch.rows(slots).to(fabric.device))
            if weight:
                ref_logp_GK[slots] = logp_BK
        return kto.Base(ref_logp_GK, torch.zeros(()), {})

    def loss(logp_BK, length_BK, batch, slots, base):
        ratio_BK = logp_BK - base.ref_logp_GK[slots]
        loss_B = torch.relu(args.margin - (ratio_BK[:, 0] - ratio_BK[:, 1]))
        return loss_B, {"loss": loss_B, "preference_loss": loss_B}

    def report(columns, base):
        return {"loss": mean(columns["loss"]), "wins": mean((columns["loss"] < args.margin).double())}

    return kto.Objective("paired", batch, look, loss, report, lambda batch: args.margin, ((4, 4), (3, 3), (1, 1)))


def train(tiny, pairs, out, *argv):
    s = parse(Settings, [f"--model={tiny}", f"--data.train={pairs}", f"--out_dir={out}", "--batch_size=4", "--epochs=4",
                         "--optim.lr=1e-3", "--progress=false", *argv], "", Path("none"))  # fmt: skip
    kto.run(s, hinge_objective(s.hinge), "hinge")
    rows = [line.split(",") for line in (out / "metrics.csv").read_text().splitlines()]
    return rows[0], [[float(x) if x else None for x in row] for row in rows[1:]]


def test_a_fourth_algorithm_is_a_batch_a_baseline_and_a_loss(tiny, pairs, tmp_path):
    names, rows = train(tiny, pairs, tmp_path / "one", "--hinge.margin=2")
    assert names[:3] == ["step", "loss", "wins"] and rows[0][1] == 2.0
    assert rows[-1][1] < 1.0 and rows[-1][2] == 1.0, "it learns"
    (_, two), _ = ranks(2, lambda rank: train(tiny, pairs, tmp_path / "two", "--hinge.margin=2", "--strategy=fsdp"))
    assert all(abs(a[1] - b[1]) < 1e-4 for a, b in zip(rows, two)), "the cut is free for it too"
    _, more = train(tiny, pairs, tmp_path / "one", "--hinge.margin=2", "--resume=auto")
    assert [r[1] for r in more] == [r[1] for r in rows]
