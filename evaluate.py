"""Answers of the policy to held-out prompts, and what a checker says of them."""

import json
import numbers
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from generate import completion_text, generate
from records.examples import Example
from records.tokenizer import Tokenizer
from runs.console import Wait, format_before_after, say
from runs.devices import on_rank_0
from runs.errors import BadInput, parse_file, printable, user_error
from runs.files import write_json
from runs.settings import RunSettings
from runs.stop import Stop


class Answer(NamedTuple):
    """What a checker judges."""

    prompt: str
    """A dialogue as the chat template renders it."""
    completion: str
    fields: dict[str, str | float]
    """The record's own fields, those that data.extra names."""
    cut: bool
    """Whether it ended at the length limit, not by EOS or a stop text."""


# One verdict for each answer: whether it is right, or for an objective that wants it a number from 0 to 1
Checker = Callable[[list[Answer]], list[bool | float]]
MOST_VALUES = 30  # right answers are not counted by a field that has more values


def as_answer(tokenizer: Tokenizer, example: Example, ids: list[int], stop: list[str]) -> Answer:
    """Sampled token ids as a checker sees them."""
    return Answer(
        completion_text(tokenizer, list(example.prompt)),
        completion_text(tokenizer, ids, stop),
        example.extra,
        was_cut(tokenizer, ids, stop),
    )


def was_cut(tokenizer: Tokenizer, ids: list[int], stop: list[str]) -> bool:
    """Whether an answer ended neither by EOS nor by a stop text."""
    if ids and ids[-1] in tokenizer.stops:
        return False
    return not stop or not any(text in tokenizer.decode(ids) for text in stop)


def ask_checker(checker: Checker, answers: list[Answer]) -> list[bool | float]:
    """The checker's verdicts, as Python's own bools and floats. Raises BadInput with the number of the
    first answer whose verdict is neither."""
    given = checker(list(answers))  # it may sort or empty its own list
    try:
        verdicts = [x.item() if hasattr(x, "item") else x for x in given]  # numpy's, torch's
    except (TypeError, ValueError, RuntimeError):
        raise BadInput(
            f"checker: expected a list of {len(answers)} verdicts, got {printable(repr(given))}"
        ) from None
    if len(verdicts) != len(answers):
        raise BadInput(
            f"checker: {len(answers)} answers need as many verdicts, got {len(verdicts)}"
        )
    for i, verdict in enumerate(verdicts):
        if type(verdict) is bool:
            continue
        if not isinstance(verdict, numbers.Real) or not 0 <= verdict <= 1:  # NaN too
            raise BadInput(
                f"checker: answer {i}: expected True, False or a number from 0 to 1, "
                f"got {printable(repr(verdict))}"
            )
        verdicts[i] = float(verdict)
    return verdicts


def count_by_field(answers: list[Answer], verdicts: list[bool | float]) -> dict:
    """{field: {value: [right, of]}}: counts by each text field that has few values, such as the kind of a task."""
    counts = {}
    for name in answers[0].fields:
        values = [a.fields[name] for a in answers]
        n = len(set(values))
        if not isinstance(values[0], str) or not 1 < n <= min(MOST_VALUES, len(answers) / 2):
            continue
        of_value = counts[name] = {value: [0, 0] for value in sorted(set(values))}
        for value, verdict in zip(values, verdicts):
            of_value[value][0] += verdict
            of_value[value][1] += 1
    return counts


class Evaluator:
    """Samples answers and has them checked. The same weights and settings give the same answers.

    checker: the user's own, given in code; without one, the checker that eval.check names.
    """

    def __init__(
        self,
        fabric,
        cfg: RunSettings,
        policy,
        tokenizer,
        val,
        checker: Checker | None,
        stop: Stop,
    ):
        if checker is None and cfg.eval.check == "demo":
            from demo.check import check as checker
        self.fabric, self.cfg, self.policy, self.tokenizer = fabric, cfg, policy, tokenizer
        self.checker, self.stop = checker, stop
        distinct: dict[bytes, Example] = {}  # the first example of each prompt, in order
        for e in val:
            distinct.setdefault(e.prompt.tobytes(), e)
        self.examples = list(distinct.values())
        self.folder = Path(cfg.out_dir) / "eval"
        self.last_check: dict | None = None
        self.checked_answers: list[Example] = []  # of the last check, as token ids

    def samples(self, step: int) -> list[dict]:
        """A few answers to look at, as {"prompt", "completion"}: the first ones of this step's check, or fresh ones if
        there was none or it has fewer."""
        examples = self.examples[: self.cfg.eval.samples]
        answers = []
        if self.last_check and self.last_check["step"] == step:
            answers = self.last_check["answers"][: len(examples)]
        if len(answers) < len(examples):
            _, fresh = self.answer(examples, "samples", "eval.samples")
            answers = [a._asdict() for a in fresh]
        return [{"prompt": a["prompt"], "completion": a["completion"]} for a in answers]

    @property
    def max_new_tokens(self) -> int:
        return self.cfg.eval.max_new_tokens or self.cfg.data.max_completion

    def answer(
        self, examples: list[Example], title: str, setting: str
    ) -> tuple[list[list[int]], list[Answer]]:
        """Answers sampled from the policy to the examples' prompts, as token ids and as a checker sees
        them. While it waits: what they are for, and the setting that says how many."""
        if not examples:
            return [], []
        args, tokenizer, new = self.cfg.eval, self.tokenizer, self.max_new_tokens
        check_stop = partial(self.stop.check, self.fabric.device)
        shorter = f"a smaller {setting} or eval.max_new_tokens"
        prompts = [e.prompt for e in examples]
        with Wait(title, len(prompts) * new, shorter=shorter):
            all_ids = generate(
                self.fabric, self.policy, prompts, tokenizer, args, new, self.cfg.seed, check_stop
            )
        answers = [as_answer(tokenizer, e, ids, args.stop) for e, ids in zip(examples, all_ids)]
        return all_ids, answers

    def judge(self, answers: list[Answer]) -> list[bool | float]:
        """The checker's verdicts; asked on rank 0 for all ranks. Raises BadInput."""
        if self.checker is None:
            raise BadInput("eval.check: there is no checker to ask: demo, or main(checker=...)")

        def ask():
            with Wait("the checker"), self.stop.interruptible(alone=True):
                return ask_checker(self.checker, answers)

        return on_rank_0(self.fabric, ask)

    def check(self, name: str, step: int) -> dict | None:
        """Sample answers to the held-out prompts and have them checked; also written as
        eval/name.json. -> {"step", "right", "of", "cut", "by": {field: {value: [right, of]}},
        "answers"}; None without checker or prompts."""
        examples = self.examples[: self.cfg.eval.prompts]
        if self.checker is None or not examples:
            return None
        if self.last_check is None or self.last_check["step"] != step:
            n, new = len(examples), self.max_new_tokens
            say(f"check at step {step}: {n:,} prompts, answers of at most {new:,} tokens")
            all_ids, answers = self.answer(examples, f"check at step {step}", "eval.prompts")
            self.checked_answers = [
                e._replace(completions=(np.array(ids, np.int32),))
                for e, ids in zip(examples, all_ids)
            ]
            verdicts = self.judge(answers)
            self.last_check = {
                "step": step,
                "right": sum(verdicts),
                "of": len(answers),
                "cut": sum(a.cut for a in answers),
                "by": count_by_field(answers, verdicts),
                "answers": [a._asdict() | {"right": v} for a, v in zip(answers, verdicts)],
            }
        if self.fabric.global_rank == 0:
            write_json(self.folder / f"{name}.json", self.last_check)
        return self.last_check

    def accuracy(self, step: int) -> float | None:
        """The share of answers that the checker accepts."""
        result = self.check("before" if step == 0 else f"answers-{step}", step)
        return result and result["right"] / result["of"]

    def compare(self, step: int) -> None:
        """Write the check of the last step as eval/after.json (after a resume it is asked anew), and
        print the accuracy and some answers beside those from before the run."""
        after, file = self.check("after", step), self.folder / "before.json"
        if not after or not file.exists():
            return
        try:
            with user_error(None, file, Exception):  # of a damaged file anything may be wrong
                before = parse_file(None, file, json.loads, at_most=2**32)
                say(format_before_after(before, after))
        except BadInput as e:
            say(f"no comparison with the answers before the run: {e}")
