"""Online KTO: no ratings at all. The policy answers, a checker rates the answers, KTO learns.

    python online.py                               # the demo: two cores, two minutes

A checker of your own, (prompt, completion) -> bool, is given in code, online.main(checker=f).

Reading order: settings, the examples of an iteration, main. The loss is kto.py's; data.train is
read for its prompts only. The reference stays the first model, or becomes the policy as it is when
an iteration begins (online.reference).
"""

from runs.errors import BadInput, user_error, run_cli  # noqa: I001  first: for Ctrl-C
from dataclasses import dataclass, field

import numpy as np

from data import next_items
from generate import completion_text
from kto import KTO, KTOSettings
from rollout import ROUNDS, policy_answers, iterations
from runs.folder import refuse_another_identity
from runs.cli import parse
from runs.console import say
from records.examples import Example, examples_hash, load_examples
from runs.console import format_table
from runs.optimizer import iteration_plans
from runs.settings import RunSettings, Sampling, refuse_unless
from train import Trainer


@dataclass(frozen=True)
class OnlineSettings(Sampling):
    """The iterations, and how answers are sampled."""

    max_iterations: int = 6
    """Iterations; --epochs counts within each."""
    prompts_per_iteration: int | None = None
    """So many prompts are answered in an iteration, the next ones of a seeded order. Default: all."""
    num_generations: int = 1
    """Answers to each prompt of an iteration."""
    reference: str = "last"
    """last: the policy as it is when an iteration begins. first: the model that the run started
    from."""
    ratings: str | None = None
    """Offline rated records to mix in, in the forms that kto.py takes."""
    ratings_per_iteration: int | None = None
    """So many of them join each iteration, the next ones of a seeded order. Default: all."""
    rollout_batch_size: int = 512
    """Prompts answered between two writes to disk: a resume goes on at such a border."""

    def validate(self, group: str = "online") -> None:
        super().validate(group)
        counts = ("max_iterations", "num_generations", "rollout_batch_size")
        for name in (*counts, "prompts_per_iteration", "ratings_per_iteration"):
            value = getattr(self, name)
            refuse_unless(value is None or value >= 1, f"{group}.{name}: expected at least 1")
        expected = f"{group}.reference: expected first or last, got {self.reference}"
        refuse_unless(self.reference in ("first", "last"), expected)


@dataclass(frozen=True)
class Settings(RunSettings):
    kto: KTOSettings = field(default_factory=KTOSettings)
    online: OnlineSettings = field(default_factory=OnlineSettings)

    def validate(self) -> None:
        super().validate()
        self.kto.validate()
        self.online.validate()
        moves = "reference_cache: the completions are not known before the run"
        refuse_unless(not self.reference_cache, moves)
        last, first = self.online.reference == "last", "goes with online.reference first only"
        refuse_unless(not (last and self.reference), f"reference: {first}")
        refuse_unless(not (last and self.lora.base), f"lora.base: {first}")
        rounds = last and self.precision == "bf16-true"
        refuse_unless(not rounds, f"{ROUNDS}, or online.reference first")


class OnlineKTO(KTO):
    records = "prompts"


def rate(trainer, prompts: list[Example], own: list[list[int]]) -> list[Example]:
    """The policy's answers as rated examples, by the checker."""
    stop, tokenizer = trainer.cfg.online.stop, trainer.tokenizer
    asked = [completion_text(tokenizer, list(e.prompt)) for e in prompts]
    said = [completion_text(tokenizer, ids, stop) for ids in own]
    labels = trainer.evaluator.judge(list(zip(asked, said)))
    arrays = [np.array(ids, np.int32) for ids in own]
    rated = zip(prompts, arrays, labels)
    return [e._replace(completions=(ids,), label=good) for e, ids, good in rated]


def ratings(trainer) -> list[Example]:
    """Offline rated examples; a resume must find the same ones."""
    cfg, state = trainer.cfg, trainer.state
    if not cfg.online.ratings:
        return []
    with user_error("online.ratings", cfg.online.ratings):
        rated = load_examples(cfg.online.ratings, trainer.tokenizer, "rated", cfg.data).examples
    new = {"online.ratings": examples_hash({"": rated})}
    if state.step:
        refuse_another_identity(state.identity, new)
    state.identity |= new
    return rated


def show_ratings(trainer, i: int, examples: list[Example], tokens: int) -> None:
    good = sum(e.label for e in examples)
    share = f"{good:,} right ({100 * good / len(examples):.1f}%)"
    say(f"iteration {i}: {len(examples):,} answers, {share}, {tokens:,} tokens")
    rows = []
    for e in examples[:4]:
        prompt, answer = (
            completion_text(trainer.tokenizer, list(x)) for x in (e.prompt, e.completions[0])
        )
        rows.append((prompt, answer, "up" if e.label else "down"))
    say(format_table(("prompt", "answer", "rated"), rows))


def main(argv=None, checker=None, rollout=None) -> None:
    """`checker`: a function (prompt, completion) -> bool; `rollout`: an engine that answers."""
    cfg = parse(Settings, argv, __doc__, demo="demo_online.yaml")
    args, given = cfg.online, dict(checker=checker, rollout=rollout)
    if checker is None and cfg.eval.check == "none":
        raise BadInput("eval.check: online KTO needs a checker: demo, or main(checker=...)")
    with Trainer(cfg, OnlineKTO(cfg.kto), **given) as trainer:
        prompts, rated = trainer.examples["train"], ratings(trainer)
        n_rated = min(len(rated), args.ratings_per_iteration or len(rated))
        n = (args.prompts_per_iteration or len(prompts)) * args.num_generations
        plans = iteration_plans(cfg, [n + n_rated] * args.max_iterations)
        for i, plan in iterations(trainer, plans, moving_reference=args.reference == "last"):
            asked = next_items(prompts, i, args.prompts_per_iteration, cfg.seed)
            asked = [e for e in asked for _ in range(args.num_generations)]
            own = policy_answers(trainer, i, plan, [e.prompt for e in asked], args)
            examples = rate(trainer, asked, own)
            show_ratings(trainer, i, examples, sum(map(len, own)))
            if rated:
                examples += next_items(rated, i, n_rated, cfg.seed)
            if not trainer.fit(examples, plan):
                break
        else:
            trainer.finish()


if __name__ == "__main__":
    run_cli(main)
