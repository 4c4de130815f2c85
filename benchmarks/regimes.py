"""KTO under other conditions, with another z (z_variants.py): the runs of docs/z.md.

python sweep.py benchmarks/regimes.py --kto.z ours,zero --kto.up 0.1,0.5,0.9 --epochs 5 --seed 1,2,3

The ratings are drawn from the demo's, or from --data.train, then with --kto.other 0 (methods.py does so).
"""

import random
from dataclasses import dataclass

import numpy as np
from jsonargparse.typing import ClosedUnitInterval, PositiveInt
from z_variants import OtherZ, ZSettings

import kto
from demo.check import quoted
from demo.make import slip
from infra.console import run_cli
from infra.settings import refuse_unless
from online import balanced
from trainer import Trainer


@dataclass(frozen=True)
class Regime(ZSettings):
    ratings: PositiveInt = 1200
    """How many ratings a run learns from."""
    up: ClosedUnitInterval = 0.5
    """Share of thumbs up among them."""
    flip: ClosedUnitInterval = 0.0
    """Share of the ratings whose label is flipped."""
    other: ClosedUnitInterval = 0.5
    """Share of the answers that another author wrote, in another form than the model's own. Only for the demo."""
    weigh: bool = False
    """Weigh the ratings so that thumbs up and thumbs down count equally."""


@dataclass(frozen=True)
class Settings(kto.Settings):
    kto: Regime = Regime()


def draw_ratings(run) -> list:
    """The model's own answers, some in the words of another author who makes the same kinds of mistakes."""
    args, tokenizer, rng = run.cfg.kto, run.tokenizer, random.Random(run.cfg.seed)
    mark = tokenizer.encode([quoted([])])[0]
    own = [e for e in run.examples["train"] if e.completions[0][: len(mark)].tolist() != mark]
    rng.shuffle(own)
    n_up, examples = round(args.ratings * args.up), []
    for label, size in ((True, n_up), (False, args.ratings - n_up)):
        drawn = [e for e in own if e.label == label][:size]
        refuse_unless(len(drawn) == size, f"kto.up: the data have {len(drawn)} of {size} answers")
        for e in drawn:
            if rng.random() < args.other:
                words = sorted(tokenizer.decode(e.prompt)[5:-1].split())
                text = quoted(words if label else slip(words, rng))
                ids = np.array([*tokenizer.encode([text])[0], tokenizer.eos], np.int32)
                e = e._replace(completions=(ids,))
            examples.append(e._replace(label=label != (rng.random() < args.flip)))
    return balanced(examples) if args.weigh else examples


class RegimeTrainer(Trainer):
    def fit(self):
        return super().fit(draw_ratings(self.run))


if __name__ == "__main__":
    run_cli(lambda: kto.main(objective=OtherZ, settings=Settings, trainer=RegimeTrainer))
