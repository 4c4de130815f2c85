"""Samples from the policy, and what a checker says of them."""

from collections.abc import Callable
from pathlib import Path

from generate import completion_text, generate
from runs.devices import on_rank_0
from runs.files import write_json
from runs.settings import RunSettings

Checker = Callable[[str, str], bool]  # (prompt, completion) -> whether it is right


class Evaluator:
    """Answers held-out prompts. The same weights and settings give the same
    answers. `checker`: one's own, by code; else the one that eval.check names."""

    def __init__(self, fabric, cfg: RunSettings, policy, tokenizer, val, checker: Checker | None):
        if checker is None and cfg.eval.check == "demo":
            from demo.check import check as checker
        self.fabric, self.cfg, self.policy, self.tokenizer = fabric, cfg, policy, tokenizer
        self.checker = checker
        self.prompts = list({e.prompt.tobytes(): e.prompt for e in val}.values())  # distinct
        self.last: dict | None = None  # the last verdict

    def samples(self) -> list[dict]:
        """A few completions to look at."""
        return self.answers(self.prompts[: self.cfg.eval.samples])

    def answers(self, prompts: list) -> list[dict]:
        """Completions sampled from the policy, as text."""
        if not prompts:
            return []
        e, tokenizer = self.cfg.eval, self.tokenizer
        new = e.max_new_tokens or self.cfg.data.max_completion
        ids = generate(self.fabric, self.policy, prompts, tokenizer, e, new, self.cfg.seed)
        return [
            {
                "prompt": completion_text(tokenizer, list(p)),
                "completion": completion_text(tokenizer, y, e.stop),
            }
            for p, y in zip(prompts, ids)
        ]

    def judge(self, answers: list[tuple[str, str]]) -> list[bool]:
        """The checker's word on (prompt, completion) pairs, asked on rank 0 for all ranks."""
        return on_rank_0(self.fabric, lambda: [bool(self.checker(*x)) for x in answers])

    def check(self, name: str, step: int) -> dict | None:
        """The checker's verdict on fresh answers, also written as eval/name.json."""
        if self.checker is None or not self.prompts[: self.cfg.eval.prompts]:
            return None
        if self.last is None or self.last["step"] != step:
            answers = self.answers(self.prompts[: self.cfg.eval.prompts])
            right = sum(self.judge([tuple(a.values()) for a in answers]))
            counts = {"step": step, "right": right, "of": len(answers)}
            self.last = counts | {"answers": answers}
        if self.fabric.global_rank == 0:
            write_json(Path(self.cfg.out_dir) / "eval" / f"{name}.json", self.last)
        return self.last

    def accuracy(self, step: int) -> float | None:
        """The share of answers that the checker accepts."""
        verdict = self.check("before" if step == 0 else f"answers-{step}", step)
        return verdict and verdict["right"] / verdict["of"]
