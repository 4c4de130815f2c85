"""Online KTO: the policy answers, a checker rates the answers, KTO learns. No ratings are needed.

    python online.py                               # the demo: two cores, two minutes

Pass a checker of your own in code: online.main(checker=f). f takes a list of answers (evaluation.Answer) and returns
a bool for each. Pass main(rate=f) to change how answers become examples.

Reading order: settings, the examples of an iteration, main. The loss is that of kto.py. Only the prompts of
data.train are read. The setting online.reference says whether the policy becomes the reference when an iteration
begins."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Literal, cast

from jsonargparse.typing import PositiveInt

from data import shuffled
from evaluation import Checker, as_answers, with_answers
from infra.console import run_cli, say
from infra.optimizer import iteration_plans
from infra.parse import parse
from infra.settings import RunSettings, refuse_unless
from kto import KTO, KTOSettings
from objective import Objective
from records.examples import Example, class_weights
from rollout import (
    RolloutSettings,
    iterations,
    policy_answers,
    rated_examples,
    validate_iterations,
)
from run import Run, setup
from trainer import Trainer


@dataclass(frozen=True)
class OnlineSettings(RolloutSettings):
    """The iterations, and how answers are sampled."""

    max_iterations: PositiveInt = 6
    """Iterations; --epochs counts within each."""
    prompts_per_iteration: PositiveInt | None = 256
    """Prompts answered in an iteration: the next ones in a seeded order. null: all of them."""
    num_generations: PositiveInt = 1
    """Answers to each prompt of an iteration."""
    reference: Literal["first", "last"] = "last"
    """last: the policy at the start of the iteration. first: the model that the run started from, or --reference."""
    cut: Literal["judge", "wrong", "drop"] = "judge"
    """The rating of an answer that ended at the length limit. judge: the checker decides (it sees that the answer
    was cut). wrong: thumbs down. drop: weight 0. A dropped answer has the loss 0, but it counts in z, in the plain
    means of metrics.csv and in the division of the loss by batch_size."""
    balance: bool = False
    """Weight the examples of an iteration so that thumbs up and thumbs down count equally, as the KTO paper advises.
    Otherwise a policy that is mostly wrong mainly learns which answers to avoid."""


@dataclass(frozen=True)
class Settings(RunSettings):
    kto: KTOSettings = KTOSettings()
    online: OnlineSettings = OnlineSettings()

    def validate(self) -> None:
        super().validate()
        validate_iterations(self, moving_reference=self.online.reference == "last")


class OnlineKTO(KTO):
    record_kind = "prompts"


def rate_answers(run: Run, prompts: list[Example], answers: list[list[int]]) -> list[Example]:
    """The policy's answers as examples with the checker's ratings. An answer without a verdict has weight 0.

    A fork may replace this function, main(rate=f), and make other examples: for instance with a number in `extra`
    that its loss reads. The function is called once per iteration, on rank 0 only, so it must contain no collective,
    such as a forward of a sharded policy. Raises BadInput, Failed."""
    args = cast(Settings, run.cfg).online
    answered = with_answers(prompts, answers)
    to_judge = as_answers(run.tokenizer, answered, args.stop)
    examples = []
    for i, verdict in enumerate(run.evaluator.verdicts(to_judge)):
        if verdict is None:
            examples.append(answered[i]._replace(label=False, weight=0.0))
            continue
        refuse_unless(
            isinstance(verdict, bool),
            f"checker: answer {i}: KTO learns from True or False, got {verdict:g}; main(rate=...) makes "
            "examples of numbers",
        )
        rule = args.cut if to_judge[i].cut else "judge"
        example = answered[i]._replace(label=verdict and rule != "wrong")
        if rule == "drop":
            example = example._replace(weight=0.0)
        examples.append(example)
    return examples


def balanced(examples: list[Example]) -> list[Example]:
    """The same examples with other weights: thumbs up and thumbs down each get half of the sum."""
    up, down = class_weights(examples)
    return [e._replace(weight=e.weight * (up if e.label else down)) for e in examples]


def show_ratings(run: Run, i: int, examples: list[Example], stop: list[str]) -> None:
    """Print the iteration's counts."""
    rated = [e for e in examples if e.weight > 0]  # the others are dropped
    right = sum(e.label for e in rated)
    cut = sum(a.cut for a in as_answers(run.tokenizer, examples, stop))
    counts = f"{len(examples):,} examples, {right:,} of {len(rated):,} rated right, {cut:,} cut"
    say(f"iteration {i}: {counts}")


def items_of_iteration(items: list, i: int, n: int, seed: int) -> list:
    """The n items, such as prompts, of iteration i, counted from 1.

    Iterations take consecutive slices of an endless list: all items in a seeded order, then all items in another
    seeded order, and so on."""
    endless = chain.from_iterable(shuffled(len(items), epoch, seed) for epoch in count())
    return [items[j] for j in islice(endless, (i - 1) * n, i * n)]


def main(
    argv: list[str] | None = None,
    objective: Callable[..., Objective] = OnlineKTO,
    settings: type = Settings,
    trainer: type[Trainer] = Trainer,
    rate: Callable[[Run, list[Example], list[list[int]]], list[Example]] = rate_answers,
    checker: Checker | None = None,
    optimizer: Callable | None = None,
    rollout: Callable | None = None,
    make_records: Callable | None = None,
) -> None:
    """Train. The arguments are those of kto.main, with settings that have the groups kto and online. rollout: an
    engine that answers prompts (see rollout.py). rate: makes examples from prompts and answers."""
    cfg = parse(settings, argv, objective, demo="demo_online.yaml")
    args = cfg.online
    refuse_unless(
        checker or cfg.eval.check or rate is not rate_answers,
        "eval.check: online KTO needs a checker: demo, or main(checker=...)",
    )
    run = setup(cfg, objective(cfg.kto), checker, optimizer, rollout, make_records=make_records)
    with run:
        loop = trainer(run)
        prompts = run.examples["train"]
        n_prompts = min(len(prompts), args.prompts_per_iteration or len(prompts))
        n_answers = n_prompts * args.num_generations
        expected = [n_answers] * args.max_iterations
        for i, plan in iterations(run, expected, moving_reference=args.reference == "last"):
            picked = items_of_iteration(prompts, i, n_prompts, cfg.seed)
            repeated = []
            for example in picked:
                repeated += [example] * args.num_generations
            answers = policy_answers(run, i, plan, repeated, args)
            examples = rated_examples(run, i, plan, rate, repeated, answers, args.stop)
            show_ratings(run, i, examples, args.stop)
            if args.balance:
                examples = balanced(examples)
            sizes = run.state.iteration_sizes
            sizes[i - 1] = len(examples)
            # each later iteration is expected to have as many, and at least one step
            sizes[i:] = [max(len(examples), cfg.batch_size)] * (len(sizes) - i)
            plan = iteration_plans(cfg, sizes)[i - 1]
            if plan.begin == plan.end:
                say(f"iteration {i}: no step: {len(examples)} examples are fewer than batch_size")
            elif not loop.fit(examples, plan):
                break
        else:
            refuse_unless(run.state.step, "rate: no iteration has as many examples as batch_size")
            loop.finish()


if __name__ == "__main__":
    run_cli(main)
