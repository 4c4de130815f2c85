"""Online DPO (arXiv 2402.04792): the best and the worst answer to a prompt are a pair, by a checker's verdicts.

    python examples/online_dpo.py --online.num_generations 4

A verdict is True or False, or a number from 0 to 1; with --kto.loss rpo_sq these numbers are the true rewards. If all
answers to a prompt are equally good, there is no pair. An iteration has as many steps as its pairs fill.
"""

from dataclasses import dataclass

import dpo
import online
from evaluation import as_answers, with_answers
from infra.console import run_cli
from infra.settings import refuse_unless


@dataclass(frozen=True)
class Settings(online.Settings):
    kto: dpo.DPOSettings = dpo.DPOSettings()

    def validate(self) -> None:
        super().validate()
        refuse_unless(self.online.num_generations > 1, "online.num_generations: a pair needs two")
        refuse_unless(self.online.cut == "judge", "online.cut: the checker judges all answers")


def rate(run, prompts, answers):
    """For each prompt the pair of its best and its worst answer, unless all are equally good."""
    answered = with_answers(prompts, answers)
    to_judge = as_answers(run.tokenizer, answered, run.cfg.online.stop)
    verdicts = run.evaluator.verdicts(to_judge)
    n = run.cfg.online.num_generations
    pairs = []
    for begin in range(0, len(answered), n):
        judged = [i for i in range(begin, begin + n) if verdicts[i] is not None]
        best = max(judged, key=verdicts.__getitem__, default=None)
        worst = min(judged, key=verdicts.__getitem__, default=None)
        if judged and verdicts[best] > verdicts[worst]:
            completions = answered[best].completions + answered[worst].completions
            scores = (verdicts[best], verdicts[worst])
            pair = answered[best]._replace(completions=completions, label=True, rewards=scores)
            pairs.append(pair)
    return pairs


class OnlineDPO(dpo.DPO):
    record_kind = "prompts"


if __name__ == "__main__":
    run_cli(lambda: online.main(objective=OnlineDPO, settings=Settings, rate=rate))
