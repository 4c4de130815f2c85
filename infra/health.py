"""Signs of a sick run, in its own numbers: at most one line at a tenth, at half and at the end of a run.

docs/health.md says what each sign means and on which runs its limit was tried.
"""

import csv
import math
from pathlib import Path
from statistics import median

FEWEST = 5  # rows of metrics.csv: fewer say nothing

Row = dict[str, float]


def signs_are_due(step: int, total: int) -> bool:
    """Whether a run of `total` steps looks for signs after this step."""
    return step in (math.ceil(total / 10), math.ceil(total / 2), total)


def read_rows(path: Path) -> list[Row]:
    """The rows of metrics.csv or val.csv, without their empty cells; no rows if there is no file."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(x) for name, x in row.items() if x} for row in rows]


def mean(rows: list[Row], name: str) -> float:
    """The mean of a column. NaN if no row has it: every comparison below is then false, and there is no sign."""
    numbers = [row[name] for row in rows if name in row]
    return sum(numbers) / len(numbers) if numbers else math.nan


def find_sign(
    rows: list[Row], validations: list[Row], clip: float | None, n_held_out: int, total: int
) -> str | None:
    """The first sign that a run's rows of metrics.csv and val.csv show, or None. clip: optim.clip. n_held_out: examples
    of data.val. total: steps of the whole run."""
    if len(rows) < FEWEST:
        return None
    recent = rows[-max(3, len(rows) // 5) :]
    return (
        sign_of_entropy(rows[:3], recent)
        or sign_of_rewards(recent, is_late=rows[-1]["step"] >= total / 2)
        or sign_of_gradient(rows[:3], recent, clip or math.inf)
        or sign_of_overfitting(rows, recent, validations, n_held_out)
    )


def sign_of_entropy(first: list[Row], recent: list[Row]) -> str | None:
    before = mean(first, "entropy")
    now = mean(recent, "entropy")
    if not now > 1.25 * before:
        return None
    rises = f"entropy is {now:.2f}, and was {before:.2f} at the start (usual: it falls)"
    if mean(recent, "rewards/chosen") < 0 and mean(recent, "rewards/rejected") < 0:
        return (
            f"{rises}, and both chosen and rejected answers become less probable: try a smaller optim.lr, kto.balance "
            "if one label is rare, or dpo.sft_loss_weight; check that the labels are not flipped"
        )
    kl = mean(recent, "kl")
    if kl > 1:
        return (
            f"{rises}, and kl is {kl:.1f} (usual: below 1), as with ratings of another author's answers: rate answers "
            "of this model, or try kto.sft_loss_weight"
        )
    return None


def sign_of_rewards(recent: list[Row], is_late: bool) -> str | None:
    reward = mean(recent, "rewards/mean")
    std = mean(recent, "rewards/std")
    if abs(reward) > 2 * std:
        return (
            f"rewards/mean is {reward:.2f}, and rewards/std only {std:.2f} (usual: larger than the mean): nearly all "
            "rewards have one sign: try kto.balance, or a smaller optim.lr"
        )
    if is_late and std < 0.1 and mean(recent, "lr") > 0:
        return (
            f"rewards/std is {std:.3f} (usual: above 0.1 by now): the log-ratios have hardly moved: try a larger "
            "optim.lr"
        )
    return None


def sign_of_gradient(first: list[Row], recent: list[Row], clip: float) -> str | None:
    """A gradient that is clipped from the start on is no sign: AdamW divides by its size, and the demo ends as well."""
    before = mean(first, "grad_norm")
    now = median(row["grad_norm"] for row in recent)
    if now > clip and now > 3 * before:
        return (
            f"grad_norm is {now:.2f}, and was {before:.2f} at the start (usual: it falls), and most gradients are "
            f"clipped to {clip:g}: try a smaller optim.lr"
        )
    return None


def sign_of_overfitting(
    rows: list[Row], recent: list[Row], validations: list[Row], n_held_out: int
) -> str | None:
    trained = [row for row in validations if row["step"] > 0 and "accuracy" in row]
    if not trained:
        return None
    best = max(trained, key=lambda row: row["accuracy"])
    now = trained[-1]["accuracy"]
    at_best = [row for row in rows if row["step"] <= best["step"]][-len(recent) :]
    is_learning = mean(recent, "accuracy") > mean(at_best, "accuracy")
    if is_learning and best["accuracy"] - now > n_held_out**-0.5:  # two standard errors
        return (
            f"accuracy on data.val is {now:.2f}, and was {best['accuracy']:.2f} at step {best['step']:.0f}, while it "
            "rises in training (usual: both rise): try fewer epochs, or keep_best accuracy"
        )
    return None
