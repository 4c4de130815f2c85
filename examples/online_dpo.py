"""Online DPO (arXiv 2402.04792): the best and the worst answer to a prompt are a pair, by a checker's verdicts.

    python examples/online_dpo.py --online.num_generations 4

A verdict is True or False, or a number from 0 to 1; with --kto.loss rpo_sq these numbers are the true rewards. Where
all answers to a prompt are equally good there is no pair. online.py wants an example for each answer: one that is not
the better half of a pair has weight 0. It still counts in batch_size, by which a step's loss is divided, and not in
the columns of metrics.csv; `pairs` there is the share of the step's examples that are pairs.
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
    """Beside each answer stands another one: the worst beside the best, else its own first token, for weight 0."""
    answered = with_answers(prompts, answers)
    to_judge = as_answers(run.tokenizer, answered, run.cfg.online.stop)
    verdicts = run.evaluator.verdicts(to_judge)
    n = run.cfg.online.num_generations
    examples = []
    for begin in range(0, len(answered), n):
        judged = [i for i in range(begin, begin + n) if verdicts[i] is not None]
        best = max(judged, key=verdicts.__getitem__, default=None)
        worst = min(judged, key=verdicts.__getitem__, default=None)
        for i in range(begin, begin + n):
            (own,) = answered[i].completions
            example = answered[i]._replace(label=bool(verdicts[i] and verdicts[i] > 0.5))
            if i == best and verdicts[best] > verdicts[worst]:
                pair = (own, *answered[worst].completions)
                scores = (verdicts[best], verdicts[worst])
                example = example._replace(completions=pair, rewards=scores)
            else:
                example = example._replace(completions=(own, own[:1]), weight=0.0)
            examples.append(example)
    return examples


class OnlineDPO(dpo.DPO):
    record_kind = "prompts"

    def loss(self, logps, ref_logps, batch, z_B):
        loss_B, columns = super().loss(logps, ref_logps, batch, z_B)
        return loss_B, columns | {"pairs": batch.step.weight[batch.index_B] > 0}

    def metrics(self, columns, z):
        is_pair = columns.pop("pairs") > 0
        of_pairs = {name: column[is_pair] for name, column in columns.items()}
        return super().metrics(of_pairs, z) | {"pairs": is_pair.double().mean().item()}


if __name__ == "__main__":
    run_cli(lambda: online.main(objective=OnlineDPO, settings=Settings, rate=rate))
