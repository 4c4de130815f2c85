"""Answers of the policy to held-out prompts, and what a checker says of them."""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from generate import completion_text, generate
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
    verdicts = [x.item() if hasattr(x, "item") else x for x in given]  # numpy's, torch's
    refuse_unless(
        len(verdicts) == len(answers),
        f"checker: {len(answers)} answers need as many verdicts, got {len(verdicts)}",
    )
    for i, verdict in enumerate(verdicts):
        refuse_unless(
            isinstance(verdict, bool | int | float) and 0 <= verdict <= 1,
            f"checker: answer {i}: expected True, False or a number from 0 to 1, got {verdict!r}",
        )
    return [x if isinstance(x, bool) else float(x) for x in verdicts]


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
        prompts = [e.prompt for e in examples]
        with progress(title, len(prompts) * new):
            all_ids = generate(
                self.fabric, self.policy, prompts, tokenizer, args, new, self.cfg.seed, check_stop
            )
        answers = [as_answer(tokenizer, e, ids, args.stop) for e, ids in zip(examples, all_ids)]
        return all_ids, answers

    def judge(self, answers: list[Answer]) -> list[bool | float]:
        """The checker's verdicts, on rank 0 alone: no collective. Raises BadInput."""
        refuse_unless(
            self.checker, "eval.check: there is no checker to ask: demo, or main(checker=...)"
        )
        return ask_checker(self.checker, answers)

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
        if after and file.exists():
            before = json.loads(file.read_text())
            say(format_before_after(before, after))


# ---- before and after ----------------------------------------------------------------------------


def format_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of texts as lines that fit the terminal; each cell has at most 34 characters.

    The first column is a prompt. A long prompt is cut at its beginning, because all prompts of a
    chat template begin with the same words; other cells are cut at their end.
    """
    terminal_width = shutil.get_terminal_size((110, 0)).columns
    cell_width = min(34, terminal_width // len(head) - 2)
    table = []
    for row in (head, *rows):
        prompt, *others = [cell.replace("\n", " ") for cell in row]
        if len(prompt) > cell_width:
            prompt = "…" + prompt[len(prompt) - cell_width + 1 :]
        table.append([prompt, *[cell[:cell_width] for cell in others]])
    widths = [max(len(cell) for cell in column) for column in zip(*table)]
    lines = []
    for row in table:
        padded = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  " + "  ".join(padded).rstrip())
    return "\n".join(lines)


def wilson_interval(k: float, n: int) -> tuple[float, float]:
    """The 95% confidence interval (low, high) of a share k / n, with n at least 1 (Wilson 1927).

    The usual k/n ± 2 sigma is too narrow near 0 and 1, and may leave [0, 1].
    """
    z = 1.96  # 95% of a normal distribution lie within so many standard deviations
    middle = (k + z * z / 2) / (n + z * z)
    half_width = z * math.sqrt(k * (n - k) / n + z * z / 4) / (n + z * z)
    return max(0.0, middle - half_width), min(1.0, middle + half_width)


def format_by_field(before: dict, after: dict) -> list[str]:
    """Lines of right answers by the values of the records' fields; none where nothing was counted."""
    lines = []
    for name, counts in after["by"].items():
        width = max(map(len, (name, *counts)))
        lines.append(f"  {name:<{width}}  before   after     of")
        for value, (right, total) in counts.items():
            right_before, total_before = before["by"][name][value]
            shares = f"{100 * (right_before / total_before):5.1f}%  {100 * (right / total):5.1f}%"
            lines.append(f"  {value:<{width}}  {shares}  {total:5}")
    return lines


def format_before_after(before: dict, after: dict, n: int = 5) -> str:
    """The checker's accuracy before and after training, with 95% intervals, and n answers.

    `before` and `after` are verdicts of Evaluator.check: {"right": how many answers the checker
    accepts, "of": how many there are, "answers": [{"prompt": ..., "completion": ...}, ...]}, with
    the same prompts in the same order. Answers that changed come first.
    """
    lines = ["", "held-out accuracy by the checker (95% interval)"]
    for name, verdict in (("before", before), ("after", after)):
        right, total = verdict["right"], verdict["of"]
        low, high = wilson_interval(right, total)
        percent = f"{100 * (right / total):5.1f}%"
        interval = f"({100 * low:.1f} to {100 * high:.1f})"
        if isinstance(right, float):  # a sum of numbers from 0 to 1
            right = f"{right:.1f}"
        lines.append(f"  {name:<7} {percent}  {interval}  {right} of {total}")
    gain = 100 * (after["right"] / after["of"] - before["right"] / before["of"])
    lines += [f"  gain    {gain:+5.1f} points", *format_by_field(before, after), ""]

    rows = []
    for old, new in zip(before["answers"], after["answers"]):
        rows.append((old["prompt"], old["completion"], new["completion"]))
    rows.sort(key=lambda row: row[1] == row[2])  # those that changed first
    lines.append(format_table(("prompt", "before", "after"), rows[:n]))
    return "\n".join(lines)
