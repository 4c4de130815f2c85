"""Answers of the policy to held-out prompts, and what a checker says of them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from generate import generate, read_answer
from records.examples import Example
from records.tokenizer import Tokenizer
from runs.console import progress, say
from runs.devices import Stop, on_rank_0
from runs.logger import write_json
from runs.settings import RunSettings, refuse_unless


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


def as_answer(tokenizer: Tokenizer, example: Example, ids: list[int], stop: list[str]) -> Answer:
    """Sampled token ids as a checker sees them."""
    text, cut = read_answer(tokenizer, ids, stop)
    return Answer(tokenizer.decode(example.prompt), text, example.extra, cut)


def count_by_field(answers: list[Answer], verdicts: list[bool | float]) -> dict:
    """{field: {value: [right, of]}}: counts by each text field that has few values, such as the kind of a task."""
    counts = {}
    for name, first in answers[0].fields.items():
        values = [a.fields[name] for a in answers]
        if isinstance(first, str) and 1 < len(set(values)) <= min(30, len(values) / 2):
            counts[name] = {}
            for value in sorted(set(values)):
                own = [verdict for verdict, x in zip(verdicts, values) if x == value]
                counts[name][value] = [sum(own), len(own)]
    return counts


@dataclass
class Evaluator:
    """Samples answers and has them checked. The same weights and settings give the same answers."""

    fabric: object
    cfg: RunSettings
    policy: object
    tokenizer: Tokenizer
    examples: list[Example]
    """Those of data.val; after __post_init__ the first one of each prompt, in order."""
    checker: Checker | None
    """The user's own, given in code; without one, the checker that eval.check names."""
    stop: Stop
    last_check = None
    checked_answers = ()
    """Of the last check, as examples with the answers as completions."""

    def __post_init__(self):
        if self.checker is None and self.cfg.eval.check == "demo":
            from demo.check import check

            self.checker = check
        of_prompt = {}
        for e in self.examples:
            of_prompt.setdefault(e.prompt.tobytes(), e)
        self.examples = list(of_prompt.values())

    def samples(self, step: int) -> list[dict]:
        """A few answers to look at, as {"prompt", "completion"}: the first ones of this step's check, or fresh ones if
        there was none."""
        n, check = self.cfg.eval.samples, self.last_check
        if check and check["step"] == step:
            answers = check["answers"]
        else:
            answers = [a._asdict() for a in self.answer(n, "samples")[1]]
        return [{"prompt": a["prompt"], "completion": a["completion"]} for a in answers[:n]]

    def answer(self, n: int, title: str) -> tuple[list[Example], list[Answer]]:
        """Answers sampled from the policy to the first n held-out prompts: as the examples' completions, and as a
        checker sees them. title: what they are for."""
        args, tokenizer = self.cfg.eval, self.tokenizer
        new = args.max_new_tokens or self.cfg.data.max_completion
        check_stop = partial(self.stop.check, self.fabric.device)
        prompts = [e.prompt for e in self.examples[:n]]
        with progress(title, len(prompts) * new):
            all_ids = generate(
                self.fabric, self.policy, prompts, tokenizer, args, new, self.cfg.seed, check_stop
            )
        pairs = list(zip(self.examples, all_ids))
        answered = [e._replace(completions=(np.array(ids, np.int32),)) for e, ids in pairs]
        return answered, [as_answer(tokenizer, e, ids, args.stop) for e, ids in pairs]

    def judge(self, answers: list[Answer]) -> list[bool | float]:
        """The checker's verdicts, as Python's own bools and numbers; on rank 0 alone: no collective. Raises
        BadInput, with the number of the first answer whose verdict is neither."""
        refuse_unless(
            self.checker, "eval.check: there is no checker to ask: demo, or main(checker=...)"
        )
        given = self.checker(list(answers))  # it may sort or empty its own list
        verdicts = [x.item() if hasattr(x, "item") else x for x in given]  # numpy's, torch's
        refuse_unless(
            len(verdicts) == len(answers),
            f"checker: {len(answers)} answers need as many verdicts, got {len(verdicts)}",
        )
        for i, x in enumerate(verdicts):
            refuse_unless(
                isinstance(x, int | float) and 0 <= x <= 1,
                f"checker: answer {i}: expected True, False or a number from 0 to 1, got {x!r}",
            )
        return verdicts

    def check(self, name: str, step: int) -> dict | None:
        """Sample answers to the held-out prompts and have them checked; also written as
        eval/name.json. -> {"step", "right", "of", "cut", "by": {field: {value: [right, of]}},
        "answers"}; None without checker or prompts."""
        n = self.cfg.eval.prompts
        if not (self.checker and self.examples and n):
            return None
        if not self.last_check or self.last_check["step"] != step:
            self.checked_answers, answers = self.answer(n, f"check at step {step}")
            verdicts = on_rank_0(self.fabric, lambda: self.judge(answers))
            self.last_check = {
                "step": step,
                "right": sum(verdicts),
                "of": len(answers),
                "cut": sum(a.cut for a in answers),
                "by": count_by_field(answers, verdicts),
                "answers": [a._asdict() | {"right": v} for a, v in zip(answers, verdicts)],
            }
        if self.fabric.global_rank == 0:
            write_json(self.file(name), self.last_check)
        return self.last_check

    def file(self, name: str) -> Path:
        return Path(self.cfg.out_dir, "eval", f"{name}.json")

    def accuracy(self, step: int) -> float | None:
        """The share of answers that the checker accepts."""
        result = self.check(f"answers-{step}" if step else "before", step)
        return result and result["right"] / result["of"]

    def compare(self, step: int) -> None:
        """Write the check of the last step as eval/after.json (after a resume it is asked anew), and
        print the accuracy and some answers beside those from before the run."""
        after, before = self.check("after", step), self.file("before")
        if after and before.exists():
            say(format_before_after(json.loads(before.read_text()), after))


# ---- before and after ----------------------------------------------------------------------------


def format_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of texts as lines that fit the terminal; each cell has at most 34 characters.

    The first column is a prompt. A long prompt is cut at its beginning, because all prompts of a
    chat template begin with the same words; other cells are cut at their end.
    """
    width = min(34, shutil.get_terminal_size((110, 0)).columns // len(head) - 2)
    lines = []
    for row in (head, *rows):
        prompt, *others = (cell.replace("\n", " ") for cell in row)
        cells = [prompt[-width:], *(cell[:width] for cell in others)]
        lines.append("  " + "  ".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def wilson_interval(k: float, n: int) -> tuple[float, float]:
    """The 95% confidence interval (low, high) of a share k / n, with n at least 1 (Wilson 1927).

    The usual k/n ± 2 sigma is too narrow near 0 and 1, and may leave [0, 1].
    """
    z = 1.96  # 95% of a normal distribution lie within so many standard deviations
    middle = (k + z * z / 2) / (n + z * z)
    half_width = z * (k * (n - k) / n + z * z / 4) ** 0.5 / (n + z * z)
    return max(0.0, middle - half_width), middle + half_width


def format_before_after(before: dict, after: dict, n: int = 5) -> str:
    """The checker's accuracy before and after training, with 95% intervals, and n answers.

    `before` and `after` are what Evaluator.check returns, of the same prompts in the same order. Answers that
    changed come first.
    """
    lines = ["", "held-out accuracy by the checker (95% interval)"]
    for name, check in (("before", before), ("after", after)):
        right, of = check["right"], check["of"]
        low, high = wilson_interval(right, of)
        interval = f"({100 * low:.1f} to {100 * high:.1f})"
        # a sum of numbers from 0 to 1 has many digits
        lines.append(f"  {name:<7} {right / of:6.1%}  {interval}  {round(right, 1)} of {of}")
    gain = 100 * (after["right"] / after["of"] - before["right"] / before["of"])
    lines.append(f"  gain    {gain:+5.1f} points")
    for name, counts in after["by"].items():
        width = max(map(len, (name, *counts)))
        lines.append(f"  {name:<{width}}  before   after     of")
        for value, (right, of) in counts.items():
            old = before["by"][name][value][0]
            lines.append(f"  {value:<{width}}  {old / of:6.1%}  {right / of:6.1%}  {of:5}")
    pairs = zip(before["answers"], after["answers"])
    rows = [(old["prompt"], old["completion"], new["completion"]) for old, new in pairs]
    rows.sort(key=lambda row: row[1] == row[2])  # those that changed first
    return "\n".join([*lines, "", format_table(("prompt", "before", "after"), rows[:n])])
