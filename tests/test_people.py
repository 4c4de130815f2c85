"""people.py: what people said is read as it was said, the floors and the ceiling are those by hand, and a run learns
from the training prompts what its method means."""

import csv
import json
import math
import shutil
import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import people  # noqa: E402

PAIRS = [
    # instruction, input, two answers, three annotators
    ("Say hello.", "", "hi", "hello there", (1, 1, 2)),
    ("Say hello.", "", "hi", "good day to you", (2, 2, 2)),
    ("Say hello.", "in one word", "hello", "oh hello", (1, 0, 1)),
    ("Count.", "", "one two", "one", (1, 1, 1)),
    ("Count.", "", "one two", "two one", (0, 0, 1)),  # a tie
    ("Count.", "", "one two", "two", (1, 0, 2)),  # nobody agrees
    ("Count.", "", "", "one", (2, 2, 2)),  # an empty answer
    ("Count.", "", True, "one", (2, 2, 2)),  # no text
]


def write_pandalm(folder):
    rows = []
    for instruction, given, first, second, votes in PAIRS:
        row = {"instruction": instruction, "input": given}
        row |= {"response1": first, "response2": second}
        row |= {f"annotator{i}": vote for i, vote in enumerate(votes, start=1)}
        rows.append(row)
    file = folder / "testset.json"
    file.write_text(json.dumps(rows))
    return file


def write_truthfulqa(folder, questions=6):
    file = folder / "questions.csv"
    with file.open("w", newline="", encoding="utf-8-sig") as lines:
        writer = csv.writer(lines)
        writer.writerow(["Question", "Correct Answers", "Incorrect Answers"])
        for i in range(questions):
            writer.writerow(
                [f"Is {i} a word?", "No; It is false; No", "Yes; yes, it is; It is; so"]
            )
    return file


def test_pairs_without_a_majority_ties_and_answers_without_text_are_left_out(tmp_path):
    hello, one_word, count = people.read_pandalm(write_pandalm(tmp_path))
    assert hello.prompt == "Say hello." and one_word.prompt == "Say hello.\n\nin one word"
    assert hello.group == one_word.group != count.group
    assert hello.answers == ["hi", "hello there", "good day to you", "hi"]
    assert hello.good == [True, False, True, False] and hello.pairs == [(0, 1), (2, 3)]
    assert count.answers == ["one two", "one"] and count.votes == [(1, 1, 1)]


def test_a_cell_of_answers_is_a_list_in_which_each_stands_once(tmp_path):
    first, *_ = people.read_truthfulqa(write_truthfulqa(tmp_path))
    assert first.answers == ["No", "It is false", "Yes", "yes, it is", "It is", "so"]
    assert first.good == [True, True, False, False, False, False]
    assert first.pairs == [(i, j) for i in (0, 1) for j in (2, 3, 4, 5)]


def test_the_ceiling_is_how_often_one_annotator_names_what_the_other_two_name(tmp_path):
    questions = people.read_pandalm(write_pandalm(tmp_path))
    # (1, 1, 2): one case, of the third annotator, who disagrees; (2, 2, 2): three that agree; (1, 0, 1): the second
    # one says a tie, one half; (1, 1, 1): three that agree
    votes = [q.votes for q in questions]
    assert people.agreement(votes) == {"pairs": pytest.approx((0 + 3 + 0.5 + 3) / 8)}


def test_the_measures_are_those_by_hand():
    def judged(value, tokens, negates):
        pairs = np.array([(0, 1), (2, 3)])
        good = np.array([True, False] * 2)
        value, tokens = np.array(value, float), np.array(tokens, float)
        return people.Judged(value, tokens, np.array(negates), good, pairs)

    # better and worse answer: 2 > 1 and shorter; -1 < 3 and longer; 1 = 1 and as long; 0 > -4 and shorter
    both = [
        judged([2, 1, -1, 3], [3, 5, 6, 2], [True, False, False, False]),
        judged([1, 1, 0, -4], [4, 4, 8, 9], [True, True, False, True]),
    ]
    got = people.measure(both)
    assert got["pairs"] == (1 + 0 + 0.5 + 1) / 4
    assert got["better_shorter"] == 1 and got["better_longer"] == 0
    assert got["alike"] == (0 + 0.5) / 2
    assert got["above_longer"] == got["pairs"] - (0 + 1 + 0.5 + 0) / 4
    # good 2, -1, 1, 0 beside bad 1, 3, 1, -4
    above = (1 + 0 + 1 + 1) + (0 + 0 + 0 + 1) + (0.5 + 0 + 0.5 + 1) + (0 + 0 + 0 + 1)
    assert got["auc"] == pytest.approx(above / 16)
    assert got["sign"] == (2 + 1) / 8  # good 2 and 1, bad -4
    assert (got["r_good"], got["r_bad"]) == (0.5, 0.25)
    by_hand = np.corrcoef([2, 1, -1, 3, 1, 1, 0, -4], [3, 5, 6, 2, 4, 4, 8, 9])[0, 1]
    assert got["length"] == pytest.approx(by_hand) and by_hand < -0.5


def test_a_negation_is_a_word_that_says_no():
    assert people.has_negation("No, it isn't") and people.has_negation("it isn’t")
    assert people.has_negation("They cannot.") and not people.has_negation("Nobel knows the north")


def test_an_interval_draws_prompts_and_not_answers():
    def share(prompts):
        return {"share": float(np.mean([x for prompt in prompts for x in prompt]))}

    few, many = [[0.0] * 50, [1.0] * 50], [[0.0, 1.0]] * 50
    assert people.with_intervals(share, few) == {"share": [0.5, 0, 1]}
    assert people.with_intervals(share, many) == {"share": [0.5, 0.5, 0.5]}


def test_a_split_never_divides_an_instruction_and_every_method_learns_from_the_same_prompts(
    tmp_path, monkeypatch
):
    questions = people.read_pandalm(write_pandalm(tmp_path))
    for seed in range(4):
        training, held_out = people.split(questions, 1, seed)
        assert len(training) + len(held_out) == 3
        assert {q.group for q in training}.isdisjoint(q.group for q in held_out)
    monkeypatch.setattr(people, "RATINGS", {"pandalm": 6, "truthfulqa": 16})
    ratings, pairs = people.choose("pandalm", questions)
    # first one pair of each prompt
    assert [prompt for prompt, *_ in pairs] == [q.prompt for q in questions]
    assert ratings[:2] == [("Say hello.", "hi", True), ("Say hello.", "hello there", False)]
    questions = people.read_truthfulqa(write_truthfulqa(tmp_path))
    ratings, pairs = people.choose("truthfulqa", questions)
    assert len(ratings) == 16 and len(pairs) == 8
    assert {prompt for prompt, *_ in ratings} == {prompt for prompt, *_ in pairs}
    # the rarer kind comes again
    first = [(better, worse) for prompt, better, worse in pairs if "0" in prompt]
    assert first == [("No", "Yes"), ("It is false", "yes, it is"), ("No", "It is")]


def write_model(tiny, folder):
    """The tiny model with a chat template."""
    shutil.copytree(tiny, folder)
    file = folder / "tokenizer_config.json"
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|endoftext|>' }}{% endfor %}"
    )
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return folder


def test_runs_from_the_command_line_are_rows_and_are_not_run_again(
    tiny, tmp_path, monkeypatch, capsys
):
    """A tiny model with random weights, 8 steps of SFT at a high rate: the held-out answers are those of training."""
    monkeypatch.setattr(people, "OUT", tmp_path / "out")
    monkeypatch.setattr(people, "RESULTS", tmp_path / "people.jsonl")
    monkeypatch.setattr(people, "RATINGS", {"truthfulqa": 64})
    monkeypatch.setattr(people, "HELD_OUT", {"truthfulqa": 2})
    monkeypatch.setattr(people, "BATCH", {"truthfulqa": 8})
    monkeypatch.setattr(people, "MAX_PROMPT", 64)
    monkeypatch.setattr(people, "MAX_COMPLETION", 32)
    small = {
        "epochs": 8,
        "optim.lr": 0.05,
        "optim.warmup": 0,
        "data.max_prompt": 64,
        "data.max_completion": 32,
    }
    monkeypatch.setattr(people, "COMMON", people.COMMON | small | {"lora.rank": 4})
    file, model = write_truthfulqa(tmp_path), write_model(tiny, tmp_path / "model")
    command = ["people.py", "run", "sft", "--seeds", "1"]
    command += ["--truthfulqa", str(file), "--model", str(model)]
    monkeypatch.setattr(sys, "argv", command)
    people.main()
    first = capsys.readouterr().out
    lines = (tmp_path / "people.jsonl").read_text().splitlines()
    rows = {row["method"]: row for row in map(json.loads, lines)}
    assert list(rows) == [
        "longer",
        "has a negation",
        "base's log-prob",
        "base's log-prob a token",
        "sft",
    ]
    assert all(row["off"] < 1e-3 for row in rows.values())
    # SFT is the mean over the good answers of -log pi(y|x), all 8 in one step
    good = people.read_records(tmp_path / "out" / "truthfulqa-1" / "good.jsonl")
    logps = people.score_by_transformers(model, good)
    with (tmp_path / "out" / "truthfulqa-1" / "sft" / "metrics.csv").open() as table:
        row = next(csv.DictReader(table))
    assert len(good) == 8 and math.isclose(float(row["loss"]), -np.mean(logps), rel_tol=1e-4)
    # and it learns them, so r of the good answers is above that of the bad ones
    measures = rows["sft"]["measures"]
    assert measures["pairs"][0] > 0.5 and measures["r_good"][0] > max(0, measures["r_bad"][0])
    # of 8 pairs 2 have the negation in the good answer alone, none in the bad one alone
    assert rows["has a negation"]["measures"]["pairs"][0] == (4 + 4 * 0.5) / 8
    # the first of the good answers is as long as the shortest bad ones
    assert rows["longer"]["measures"]["length"] == [1, 1, 1]
    people.main()
    assert (tmp_path / "people.jsonl").read_text().splitlines() == lines
    again = capsys.readouterr().out
    assert "| sft | 1 | " in again and again in first
