"""KTO on the demo's task under other conditions, with z in five forms: the runs of docs/z.md.

python sweep.py examples/regimes.py --kto.z step,zero --kto.up 0.1,0.5,0.9 --epochs 5 --seed 1,2,3
"""

import random
import sys
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

sys.path.append(f"{sys.path[0]}/..")  # the project, wherever this file is started from

import kto
from demo.check import quoted
from demo.make import slip
from examples.ema_z import EMA
from online import balanced
from runs.console import run_cli
from train import Objective, Trainer


@dataclass(frozen=True)
class Regime(kto.KTOSettings):
    z: Literal["step", "zero", "average", "four", "free"] = "step"
    """One a step, as in kto.py; 0; an average over steps; one for each four examples; one a step, not clamped."""
    up: float = 0.5
    """Share of thumbs up among the 1,200 ratings."""
    flip: float = 0.0
    """Share of the ratings that are turned round."""
    other: float = 0.5
    """Share of the answers that another author wrote, in another form than the model's own."""
    weigh: bool = False
    """Weigh the ratings so that thumbs up and thumbs down count equally."""


@dataclass(frozen=True)
class Settings(kto.Settings):
    kto: Regime = field(default_factory=Regime)


class KTOWithZ(EMA):
    def __init__(self, args: Regime):
        super().__init__(args)
        self.needs_mismatched_pairs = args.z != "zero"

    def baseline(self, logratio_n, step):
        if self.args.z == "average":
            return super().baseline(logratio_n, step)
        if self.args.z == "free":
            return logratio_n.sum() / max(1, len(logratio_n))
        if self.args.z == "four":
            fours = step.mismatched_index // 4
            sums, counts = (
                torch.zeros(step.size, dtype=x.dtype).index_add(0, fours, x)
                for x in (logratio_n, torch.ones_like(logratio_n))
            )
            return (sums / counts.clamp(min=1)).clamp(min=0)[torch.arange(step.size) // 4]
        return Objective.baseline(self, logratio_n, step)


def examples_of(run, n: int = 1200) -> list:
    """The demo's own answers, some in the words of another author who makes the same kinds of mistakes."""
    args, tokenizer, rng = run.cfg.kto, run.tokenizer, random.Random(run.cfg.seed)
    mark = tokenizer.encode([quoted([])])[0]
    own = [e for e in run.examples["train"] if e.completions[0][: len(mark)].tolist() != mark]
    rng.shuffle(own)
    n_up, examples = round(n * args.up), []
    for label, size in ((True, n_up), (False, n - n_up)):
        for e in [e for e in own if e.label == label][:size]:
            if rng.random() < args.other:
                words = sorted(tokenizer.decode(e.prompt)[5:-1].split())
                text = quoted(words if label else slip(words, rng))
                ids = np.array([*tokenizer.encode([text])[0], tokenizer.eos], np.int32)
                e = e._replace(completions=(ids,))
            examples.append(e._replace(label=label != (rng.random() < args.flip)))
    return balanced(examples) if args.weigh else examples


class InRegime(Trainer):
    def fit(self):
        return super().fit(examples_of(self.run))


if __name__ == "__main__":
    run_cli(lambda: kto.main(objective=KTOWithZ, settings=Settings, trainer=InRegime))
