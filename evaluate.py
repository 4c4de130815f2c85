"""Answers of the policy to held-out prompts, and what a checker says of them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from generate import completion_text, generate
from runs.console import Wait, advance, format_before_after, say
from runs.devices import on_rank_0
from runs.files import write_json
from runs.settings import RunSettings
from runs.stop import Stop

Checker = Callable[[str, str], bool]  # (prompt, completion) -> whether the completion is right


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
        # distinct prompts, in order
        self.prompts = list({e.prompt.tobytes(): e.prompt for e in val}.values())
        self.folder = Path(cfg.out_dir) / "eval"
        self.last_check: dict | None = None

    def samples(self) -> list[dict]:
        """A few answers to look at, as {"prompt", "completion"}."""
        return self.answer(self.prompts[: self.cfg.eval.samples], "samples", "eval.samples")

    @property
    def max_new_tokens(self) -> int:
        return self.cfg.eval.max_new_tokens or self.cfg.data.max_completion

    def answer(self, prompts: list, title: str, setting: str) -> list[dict]:
        """Answers sampled from the policy to prompts of token ids, as {"prompt", "completion"}. While
        it waits: what they are for, and the setting that says how many."""
        if not prompts:
            return []
        args, tokenizer, new = self.cfg.eval, self.tokenizer, self.max_new_tokens
        ask = partial(self.stop.check, self.fabric.device)
        shorter = f"a smaller {setting} or eval.max_new_tokens"
        with Wait(title, len(prompts) * new, shorter=shorter):
            ids = generate(
                self.fabric, self.policy, prompts, tokenizer, args, new, self.cfg.seed, ask
            )
        return [
            {
                "prompt": completion_text(tokenizer, list(prompt)),
                "completion": completion_text(tokenizer, answer, args.stop),
            }
            for prompt, answer in zip(prompts, ids)
        ]

    def judge(self, answers: list[tuple[str, str]]) -> list[bool]:
        """The checker's verdict on (prompt, completion) pairs; asked on rank 0 for all ranks."""

        def ask_checker():
            verdicts = []
            with Wait("the checker", len(answers), "answers"), self.stop.interruptible(alone=True):
                for pair in answers:
                    verdicts.append(bool(self.checker(*pair)))
                    advance()
            return verdicts

        return on_rank_0(self.fabric, ask_checker)

    def check(self, name: str, step: int) -> dict | None:
        """Sample answers to the held-out prompts and have them checked; also written as
        eval/name.json. -> {"step", "right", "of", "answers"}; None without checker or prompts."""
        prompts = self.prompts[: self.cfg.eval.prompts]
        if self.checker is None or not prompts:
            return None
        if self.last_check is None or self.last_check["step"] != step:
            n, new = len(prompts), self.max_new_tokens
            say(f"check at step {step}: {n:,} prompts, answers of at most {new:,} tokens")
            answers = self.answer(prompts, f"check at step {step}", "eval.prompts")
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
