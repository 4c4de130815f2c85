"""The end of a run: its answers before and after, its exports (final, best, final_adapter), the test split."""

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from evaluation import format_rows, row_of
from export import export_adapters, export_step
from infra.checkpoint import checkpoint_folder, read_state
from infra.console import say
from infra.files import write_json
from infra.logger import format_cells
from models.export import is_rounded
from models.hub import read_json
from objective import join_columns

if TYPE_CHECKING:
    from run import Run
    from trainer import Trainer


def finish(loop: "Trainer") -> None:
    """Compare the answers of the last weights with those before the run; export the last weights, and then
    the best ones, and score the test split with each."""
    run = loop.run
    compare(run)
    if run.cfg.lora.rank:
        export_adapters(run)
    reason = ""
    if run.cfg.lora.quantize:
        reason = "the measured base is in 4 bits"
    elif is_rounded(run.source, run.cfg):
        reason = "its weights are rounded to the types of the model's files"
    if reason:
        say(
            f"`final` is another model than the measured one, because {reason}: measure `final` itself"
        )
    exports = {"final": run.state.step, "best": run.state.best_step}
    if run.cfg.keep_best and run.state.best_step is None:
        say(f"keep_best: {run.cfg.keep_best}: no row of val.csv has a value: there is no best")
    test = run.examples["test"]
    scores = {}
    for name, step in exports.items():
        if step is None:
            continue
        export_step(run, name, step)
        say(f"\nexported to {run.folder / name}")
        checkpoint = checkpoint_folder(run.folder, step)
        if run.state.reference_has_moved and not read_state(checkpoint).reference_has_moved:
            say(
                f"test, {name} weights: not scored, because the reference has moved since step {step}"
            )
        elif test and (test[0].completions or run.evaluator.checker):
            run.load(checkpoint)  # what moved after it goes back, too
            scores[name] = test_row(loop, name)
            say(f"test, {name} weights: {', '.join(format_cells(scores[name]))}")
    if scores and run.fabric.global_rank == 0:
        write_json(run.folder / "eval" / "test.json", scores)


def test_row(loop: "Trainer", name: str) -> dict:
    """The test split's row, of the policy's weights. name: of their export, final or best. If there is a checker,
    the row has the share of right answers. These are in eval/test-final.json or test-best.json."""
    run = loop.run
    test = run.examples["test"]
    row = row_of(loop, test, "the test split")
    if run.evaluator.checker:
        evaluator = replace(run.evaluator, examples=test)
        share, _ = evaluator.accuracy(run.state.step, f"test-{name}")
        row = join_columns(row, {"checker_accuracy": share})
    return row


# ---- before and after ----------------------------------------------------------------------------


def compare(run: "Run") -> None:
    """Copy the check of the last step to eval/after.json, and print its accuracy and some of its answers with
    those from before the run. On rank 0."""
    before = run.evaluator.file(0)
    last = run.evaluator.file(run.state.step)
    if run.fabric.global_rank == 0 and last.exists():
        shutil.copyfile(last, last.with_name("after.json"))
        if before.exists():
            say(format_before_after(read_json(before), read_json(last)))


def wilson_interval(k: float, n: int) -> tuple[float, float]:
    """The 95% confidence interval (low, high) of a share k / n, with n at least 1 (Wilson 1927).

    The usual k/n ± 2 sigma is too narrow near 0 and 1, and may leave [0, 1].
    """
    s = 1.96  # 95% of a normal distribution lie within so many standard deviations
    middle = (k + s * s / 2) / (n + s * s)
    half_width = s * (k * (n - k) / n + s * s / 4) ** 0.5 / (n + s * s)
    return middle - half_width, middle + half_width


def format_before_after(before: dict, after: dict) -> str:
    """The checker's accuracy before and after training, with 95% intervals, and five answers.

    `before` and `after` are two checks as Evaluator.accuracy writes them, with the same prompts in the same order.
    Answers that changed come first.
    """
    lines = ["", "held-out accuracy by the checker (95% interval)"]
    for name, check in (("before", before), ("after", after)):
        right = check["right"]
        of = check["of"]
        low, high = wilson_interval(right, of)
        interval = f"({100 * low:.1f} to {100 * high:.1f})"
        # a sum of numbers from 0 to 1 has many digits
        lines.append(f"  {name:<7} {right / of:6.1%}  {interval}  {round(right, 1)} of {of}")
    pairs = zip(before["answers"], after["answers"])
    rows = [(old["prompt"], old["completion"], new["completion"]) for old, new in pairs]
    rows.sort(key=lambda row: row[1] == row[2])  # answers that changed come first
    lines.append(format_rows(("prompt", "before", "after"), rows[:5]))
    return "\n".join(lines)
