"""Measurements of the policy: held-out answers and their verdicts (Evaluator), and the rows of val.csv (validate)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import nn

from checks import as_python
from data import Step
from infra.console import Failed, progress, say, user_code
from infra.devices import Stop, all_reduce, on_rank_0
from infra.files import write_json
from infra.optimizer import Plan, is_due
from infra.settings import RunSettings, refuse_unless
from objective import join_columns
from records.examples import Example, distinct_questions
from records.tokenizer import Tokenizer
from sampler import generate, read_answer

if TYPE_CHECKING:
    from run import Run
    from trainer import Trainer


class Answer(NamedTuple):
    """An answer for a checker."""

    prompt: str
    """A dialogue as the chat template renders it, without special tokens."""
    completion: str
    fields: dict[str, str | float]
    """The record's fields that data.extra names."""
    cut: bool
    """Whether the answer ended at the length limit, not by EOS or a stop text."""


Verdict = bool | float
# A verdict says whether an answer is right, or is a number from 0 to 1. None is no verdict: a judge may say neither
# yes nor no
Checker = Callable[[list[Answer]], list[Verdict | None]]


def with_answers(examples: list[Example], answers: list[list[int]]) -> list[Example]:
    """The examples with the answers (token ids) as their completions, instead of the data's completions."""
    return [e._replace(completions=(np.array(ids, np.int32),)) for e, ids in zip(examples, answers)]


def as_answers(tokenizer: Tokenizer, examples: list[Example], stop: list[str]) -> list[Answer]:
    """Examples that have an answer as their completion, as a checker sees them."""
    answers = []
    for e in examples:
        text, cut = read_answer(tokenizer, e.completions[0], stop)
        answers.append(Answer(tokenizer.decode(e.prompt), text, e.extra, cut))
    return answers


@dataclass
class Evaluator:
    """Samples answers and has them checked. The same weights and settings give the same answers."""

    fabric: Fabric
    cfg: RunSettings
    policy: nn.Module
    tokenizer: Tokenizer
    examples: list[Example]
    """The examples of data.val; after __post_init__ the first example of each question, in order."""
    checker: Checker | None
    """The checker that the user gives in code; without it, the checker that eval.check names."""
    stop: Stop

    def __post_init__(self):
        if self.cfg.eval.check == "demo" and not self.checker:
            from demo.check import check

            self.checker = check
        self.examples = distinct_questions(self.examples)

    def answer(self, n: int, title: str) -> list[Example]:
        """The first n held-out prompts with answers sampled from the policy as completions. title: what for."""
        args = self.cfg.eval
        examples = self.examples[:n]
        with progress(title, len(examples)):
            answers = generate(
                self.fabric,
                self.policy,
                [e.prompt for e in examples],
                self.tokenizer,
                args,
                args.max_new_tokens or self.cfg.data.max_completion,
                self.cfg.seed,
                partial(self.stop.check, self.fabric.device),
            )
        return with_answers(examples, answers)

    def verdicts(self, answers: list[Answer]) -> list[Verdict | None]:
        """The checker's verdicts as bools and numbers of Python; None for no verdict; their number is printed.
        Called on rank 0 alone. Raises BadInput, with the number of the first answer that has another verdict;
        Failed if no answer has a verdict."""
        with user_code("checker"):  # which may sort or empty its list
            verdicts = [as_python(x) for x in self.checker(list(answers))]
        refuse_unless(
            len(verdicts) == len(answers),
            f"checker: {len(answers)} answers need as many verdicts, got {len(verdicts)}",
        )
        for i, x in enumerate(verdicts):
            refuse_unless(
                x is None or isinstance(x, int | float) and 0 <= x <= 1,
                f"checker: answer {i}: expected True, False or a number from 0 to 1, got {x!r}",
            )
        n_unjudged = verdicts.count(None)
        if n_unjudged == len(verdicts):
            raise Failed(f"checker: no verdict on any of {len(verdicts):,} answers")
        if n_unjudged:
            say(
                f"checker: no verdict on {n_unjudged:,} of {len(verdicts):,} answers, which are not counted"
            )
        return verdicts

    def accuracy(self, step: int, name: str | None = None) -> tuple[float, list[Example]]:
        """Sample answers to the held-out prompts and have them checked, after this step. -> the share of the answers
        that are right, of those with a verdict; and the prompts with all answers. Writes eval/before.json (at step 0)
        or answers-N.json, or eval/NAME.json. A collective."""
        answered = self.answer(self.cfg.eval.prompts, f"check at step {step}")
        answers = as_answers(self.tokenizer, answered, self.cfg.eval.stop)
        verdicts = on_rank_0(self.fabric, lambda: self.verdicts(answers))
        judged = [verdict for verdict in verdicts if verdict is not None]
        check = {
            "step": step,
            "right": sum(judged),
            "of": len(judged),
            "cut": sum(a.cut for a in answers),
            "unjudged": len(answers) - len(judged),
            "answers": [a._asdict() | {"right": v} for a, v in zip(answers, verdicts)],
        }
        if self.fabric.global_rank == 0:
            write_json(self.file(step, name), check)
        return check["right"] / check["of"], answered

    def file(self, step: int, name: str | None = None) -> Path:
        """The file of the check after this step: see accuracy."""
        if name is None:
            name = f"answers-{step}" if step else "before"
        return Path(self.cfg.out_dir, "eval", f"{name}.json")

    def samples(self, answered: list[Example]) -> list[dict]:
        """A few answers to look at, as {"prompt", "completion"}: the first answers of this step's check (answered),
        or fresh answers if there was no check."""
        n = self.cfg.eval.samples
        examples = answered[:n] if answered else self.answer(n, "samples")
        answers = as_answers(self.tokenizer, examples, self.cfg.eval.stop)
        return [{"prompt": a.prompt, "completion": a.completion} for a in answers]


# ---- texts ---------------------------------------------------------------------------------------


def format_rows(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Rows of texts, with a line for each text and an empty line before each row."""
    width = max(map(len, names))
    lines = []
    for row in rows:
        lines += ["", *(f"  {name:<{width}}  {short(text)}" for name, text in zip(names, row))]
    return "\n".join(lines)


def short(text: str) -> str:
    """A text in one line of at most 56 characters, without its middle if it is longer."""
    line = " ".join(text.split())
    return line if len(line) <= 56 else f"{line[:25]} ... {line[-26:]}"


# ---- validation, and the end of a run -----------------------------------------------------------

OWN_ANSWERS = 64  # own_kl scores at least so many: scoring all would take as long as sampling them


def validate(loop: "Trainer", plan: Plan) -> None:
    """Write a row of val.csv, samples, and the checker's accuracy. If the row is the best so far by keep_best, the step
    is saved."""
    run = loop.run
    step_number = run.state.step
    if not run.examples["val"]:
        return
    run.state.unvalidated = True
    # Saved before the checker is asked, because it may be slow and may fail. A resume validates again.
    save_is_due = step_number == plan.end or is_due(step_number, run.cfg.save_interval, plan)
    is_saved = step_number > 0 and (save_is_due or checker_is_due(run, plan))
    if is_saved:
        run.save()
    row, samples = validation_row(loop, plan)
    run.state.unvalidated = False
    is_best = run.state.remember_if_best(row, run.cfg.keep_best)
    run.logger.validation(step_number, row, samples)
    if is_saved:
        run.save_state()
    elif is_best:
        run.save()


def checker_is_due(run: "Run", plan: Plan) -> bool:
    """Whether the checker judges answers after this step."""
    step_number = run.state.step
    if run.evaluator.checker is None:
        return False
    return step_number == 0 or is_due(step_number, run.cfg.eval.check_interval, plan)


def validation_row(loop: "Trainer", plan: Plan) -> tuple[dict, list[dict]]:
    """-> a row of val.csv, and samples. A collective."""
    run = loop.run
    step_number = run.state.step
    row = row_of(loop, run.examples["val"], "validation")
    answered: list[Example] = []
    if run.evaluator.checker:
        share = kl_own = None
        if checker_is_due(run, plan):
            share, answered = run.evaluator.accuracy(step_number)
            kl_own = own_kl(loop, answered)
        row = join_columns(row, {"checker_accuracy": share, "kl/own": kl_own})
    return row, run.evaluator.samples(answered)


def row_of(loop: "Trainer", examples: list[Example], title: str) -> dict:
    """A row by the objective's metrics, of all these examples. Empty for prompts without completions, because only a
    checker can judge these. A collective."""
    if not examples[0].completions:
        return {}
    columns, z = loop.score_examples(examples, title)
    return loop.metrics_row(columns, z)


@torch.no_grad()
def own_kl(loop: "Trainer", answered: list[Example]) -> float | None:
    """The mean of r, in nats an answer, over 64 to 127 of the check's answers (all if there are fewer). It
    estimates KL(policy || reference) if they were sampled at temperature 1 without top_p;
    else it may even be negative. None without a reference in memory."""
    run = loop.run
    if run.reference is None or run.cfg.reference_cache:
        return None
    answered = answered[:: max(1, len(answered) // OWN_ANSWERS)]  # of all kinds of prompts
    step = Step(answered, budget=run.budget)
    sums = []
    for micro in loop.on_device(step):
        logps = loop.forward(micro.packed).logps
        ref_logps = run.reference(micro.packed, by_token=run.objective.by_token).logps
        r_B = (logps - ref_logps).flatten(1).sum(1)  # (B, 1), or (B, 1, L) by token
        sums.append(r_B.double().sum() * (not micro.part.filler))
    return all_reduce(sum(sums)).item() / len(answered)
