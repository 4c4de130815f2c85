"""Answers of the policy to held-out prompts, and what a checker says of them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from generate import completion_text, generate
from records.examples import Example
from runs.console import format_before_after, say
from runs.devices import on_rank_0
from runs.files import write_json
from runs.settings import RunSettings

Checker = Callable[[str, str], bool]  # (prompt, completion) -> whether the completion is right


class Evaluator:
    """Samples answers and has them checked. The same weights and settings give the same answers.

    checker: the user's own, given in code; without one, the checker that eval.check names.
    """

    def __init__(self, fabric, cfg: RunSettings, policy, tokenizer, val, checker: Checker | None):
        if checker is None and cfg.eval.check == "demo":
            from demo.check import check as checker
        self.fabric, self.cfg, self.policy, self.tokenizer = fabric, cfg, policy, tokenizer
        self.checker = checker
        # distinct prompts, in order
        self.prompts = list({e.prompt.tobytes(): e.prompt for e in val}.values())
        self.folder = Path(cfg.out_dir) / "eval"
        self.last_check: dict | None = None
        self.last_answers: list[Example] = []  # what `answer` sampled last, as token ids

    def samples(self) -> list[dict]:
        """A few answers to look at, as {"prompt", "completion"}."""
        return self.answer(self.prompts[: self.cfg.eval.samples])

    def answer(self, prompts: list) -> list[dict]:
        """Answers sampled from the policy to prompts of token ids, as {"prompt", "completion"}."""
        if not prompts:
            return []
        args, tokenizer = self.cfg.eval, self.tokenizer
        new = args.max_new_tokens or self.cfg.data.max_completion
        ids = generate(self.fabric, self.policy, prompts, tokenizer, args, new, self.cfg.seed)
        self.last_answers = [
            Example(prompt, (np.array(answer, np.int32),), True)
            for prompt, answer in zip(prompts, ids)
        ]
        return [
            {
                "prompt": completion_text(tokenizer, list(prompt)),
                "completion": completion_text(tokenizer, answer, args.stop),
            }
            for prompt, answer in zip(prompts, ids)
        ]

    def judge(self, answers: list[tuple[str, str]]) -> list[bool]:
        """The checker's verdict on (prompt, completion) pairs; asked on rank 0 for all ranks."""
        return on_rank_0(self.fabric, lambda: [bool(self.checker(*pair)) for pair in answers])

    def check(self, name: str, step: int) -> dict | None:
        """Sample answers to the held-out prompts and have them checked; also written as
        eval/name.json. -> {"step", "right", "of", "answers"}; None without checker or prompts."""
        prompts = self.prompts[: self.cfg.eval.prompts]
        if self.checker is None or not prompts:
            return None
        if self.last_check is None or self.last_check["step"] != step:
            answers = self.answer(prompts)
            right = sum(self.judge([(a["prompt"], a["completion"]) for a in answers]))
            counts = {"step": step, "right": right, "of": len(answers)}
            self.last_check = {**counts, "answers": answers}
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
        after, before = self.check("after", step), self.folder / "before.json"
        if after and before.exists():
            say(format_before_after(json.loads(before.read_text()), after))
