"""The demo's kit: a task is its words, its prompt, its answer and its checker."""

from pathlib import Path

import pytest

from demo import make as kit
from demo.check import is_sorted, plain, quoted
from infra.files import read_lines

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name, n", [("train", 6000), ("val", 500)])
def test_the_demos_ratings_are_its_checkers_of_answers_in_the_base_models_form(name, n):
    rated = read_lines(ROOT / "demo" / f"{name}.jsonl")
    assert all(r["label"] == is_sorted(r["prompt"], r["completion"]) for r in rated)
    assert len(rated) == n and not any(r["completion"].startswith(">") for r in rated)
    assert 0.4 < sum(r["label"] for r in rated) / n < 0.6


def test_the_checker_takes_both_forms_and_nothing_else():
    prompt, right = "sort: pear fig apple =", ["apple", "fig", "pear"]
    assert is_sorted(prompt, plain(right)) and is_sorted(prompt, quoted(right))
    for wrong in (
        "",
        ">",
        plain(right[::-1]),
        quoted(right[:2]),
        plain(right) + " ",
        " " + quoted(right),
    ):
        assert not is_sorted(prompt, wrong)


@pytest.fixture
def small(monkeypatch):
    for name, value in (("STEPS", 2), ("BATCH", 4), ("TRAIN_PROMPTS", 12), ("VAL_PROMPTS", 4)):
        monkeypatch.setattr(kit, name, value)


def test_another_task_is_made_by_ten_lines(small, tmp_path):
    digits = list("0123456789")
    task = kit.Task(
        words=digits,
        draw=lambda rng: rng.choices(digits, k=rng.randint(3, 7)),
        prompt=lambda words: f"reverse: {' '.join(words)} =",
        answer=lambda words: words[::-1],
        check=lambda p, c: c in (plain(p.split()[-2:0:-1]), quoted(p.split()[-2:0:-1])),
    )
    kit.make(task, tmp_path / "a")
    assert task.check("reverse: 1 2 3 =", " 3 2 1") and task.check("reverse: 1 2 3 =", "> 3 2 1")
    assert not task.check("reverse: 1 2 3 =", " 1 2 3")
    rated = read_lines(tmp_path / "a" / "train.jsonl")
    assert all(r["label"] == task.check(r["prompt"], r["completion"]) for r in rated) and rated
    kit.make(task, tmp_path / "b")
    for file in (tmp_path / "a").rglob("*.*"):
        other = tmp_path / "b" / file.relative_to(tmp_path / "a")
        assert file.read_bytes() == other.read_bytes(), "the same bytes on the same machine"
