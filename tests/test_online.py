"""Online KTO: the policy answers, a checker rates, KTO learns; no ratings, the same guarantees."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokens
from conftest import (
    PARITY,
    assert_same,
    evaluated,
    even,
    learned,
    of_iteration,
    ranks,
    refused,
    start,
    train,
)

import evaluation
import online
from infra.checkpoint import checkpoint_folder, checkpoints_by_step
from infra.console import BadInput, Failed
from infra.files import read_lines
from models.hub import Source
from records.tokenizer import Tokenizer

RUN = ("--batch_size=4", "--optim.lr=1e-2", "--online.max_iterations=3", "--online.prompts_per_iteration=5",
       "--online.num_generations=2", "--online.max_new_tokens=5", "--online.rollout_batch_size=4", "--save_interval=1",
       "--precision=32-true", "--keep_last=99", "--eval.samples=0", "--data.max_completion=12")  # fmt: skip
ONE = "--online.max_iterations=1"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """7 distinct prompts, one of them twice, without ratings."""
    first, *others = read_lines(PARITY / "kto_data.jsonl")[:7]
    records = [{"prompt": record["prompt"]} for record in (first, first, *others)]
    return Path(tokens.write(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", *records))


def go(tiny, prompts, out: Path, *argv, **given) -> dict:
    given = {"checker": even, **given}
    return train(tiny, prompts, out, *RUN, *argv, program="online", **given)


@pytest.fixture
def fits(monkeypatch) -> list:
    """The examples and the plan of each fit from here on."""
    seen, real = [], online.Trainer.fit
    monkeypatch.setattr(
        online.Trainer, "fit", lambda self, e, p: seen.append((e, p)) or real(self, e, p)
    )
    return seen


# ---- iterations ----------------------------------------------------------------------------------


def test_each_iteration_learns_from_fresh_answers_that_the_checker_rated(
    tiny, prompts, tmp_path, fits, capsys
):
    run = go(tiny, prompts, tmp_path / "run")
    ends = [(p.begin, p.end) for _, p in fits]
    assert ends == [(0, 2), (2, 4), (4, 6)], "ten answers are two steps of four"
    said = capsys.readouterr().out
    for i, (examples, _) in enumerate(fits, 1):
        own = of_iteration(tmp_path / "run", i)
        assert [list(e.completions[0]) for e in examples] == [a["ids"] for a in own]
        assert [e.label for e in examples] == [len(a["completion"]) % 2 == 0 for a in own]
        assert (
            f"iteration {i}: 10 examples, {sum(e.label for e in examples)} of 10 rated right"
            in said
        )
    asked = [e.prompt.tobytes() for examples, _ in fits for e in examples[::2]]
    assert len(set(asked[:7])) == len(set(asked[7:14])) == 7, "one pass after another"
    assert of_iteration(tmp_path / "run", 1) != of_iteration(tmp_path / "run", 2)
    # the reference is the policy as the iteration began, or the first model
    fixed = go(tiny, prompts, tmp_path / "fixed", "--online.reference=first")
    at_start = [abs(rows[2]["rewards/mean"]) for rows in (run["rows"], fixed["rows"])]
    assert len(run["rows"]) == 6 and at_start[0] < 1e-5 < at_start[1]


# ---- the disk (kills and Ctrl-C: test_survive.py) ------------------------------------------------


@pytest.mark.parametrize("more", [("--online.reference=first",), ("--lora.rank=2",)])
def test_a_resume_learns_from_what_the_disk_has_or_makes_a_whole_iteration_anew(
    more, tiny, prompts, tmp_path
):
    whole = go(tiny, prompts, tmp_path / "whole", *more)
    copy = shutil.copytree(tmp_path / "whole", tmp_path / "copy")
    (copy / "iterations" / "answers-2.jsonl").unlink()
    match = "answers-2.jsonl: missing, or not what this iteration learns from: continue in"
    refused(match, go, tiny, prompts, copy, *more, f"--resume={checkpoint_folder(copy, 3)}")
    end = checkpoint_folder(copy, 2)
    assert_same(go(tiny, prompts, copy, *more, f"--resume={end}"), whole)


# ---- checkers and raters -------------------------------------------------------------------------


def by_chance(run, asked, ids) -> list:
    """9 examples in iteration 1, 3 in iteration 2, 13 in iteration 3; order, labels and weights by chance."""
    answered = evaluation.with_answers(asked, ids)
    noise = np.random.default_rng(list(os.urandom(8)))
    rated = [
        e._replace(label=bool(noise.integers(2)), weight=np.float64(1 + noise.random()))
        for e in (*answered, *answered)
    ]
    order = noise.permutation(len(rated))
    return [rated[i] for i in order[: {1: 9, 2: 3, 3: 13}[run.state.iteration]]]


@pytest.mark.parametrize("n, stop, more", [(1, 1, ()), (1, 4, ("--lora.rank=2",)), (2, 2, ())])
def test_ratings_by_chance_and_their_number_are_the_same_on_all_ranks_and_after_a_resume(
    n, stop, more, tiny, prompts, tmp_path, capfd, monkeypatch
):
    """Two steps of four, none, three: an order of ten answers each would give six steps."""
    real = online.Trainer.fit

    def fit(trainer, examples, plan):
        rows = [[e.label, e.weight] for e in examples]
        name = f"fit-{trainer.run.state.iteration}-{os.getpid()}"
        (tmp_path / name).write_text(json.dumps(rows))
        return real(trainer, examples, plan)

    monkeypatch.setattr(online.Trainer, "fit", fit)
    out, handed = tmp_path / "run", dict(rate=by_chance)
    argv = ("--optim.schedule=linear", "--optim.warmup=0", *more)
    argv += (f"--strategy={'ddp' if n > 1 else 'auto'}",)
    for last in (f"--stop_at={stop}", "--resume=auto"):
        run, *_ = ranks(n, lambda rank: go(tiny, prompts, out, *argv, last, **handed))  # noqa: B023
    assert len(run["rows"]) == 5 and [len(learned(out, i)) for i in (1, 2, 3)] == [9, 3, 13]
    for i in (1, 2, 3):
        seen = {file.read_text() for file in tmp_path.glob(f"fit-{i}-*")}
        assert seen <= {json.dumps([[e["label"], e["weight"]] for e in learned(out, i)])}
    # a line from 1 to 0: of 6 steps as long as each iteration may have two, then of 5
    assert [row["lr"] for row in run["rows"]] == pytest.approx(
        [1e-2 * x for x in (1, 5 / 6, 3 / 5, 2 / 5, 1 / 5)]
    )
    assert "iteration 2: no step: 3 examples are fewer than batch_size" in capfd.readouterr().out


def asks_checker(run, asked, ids) -> list:
    answered = evaluation.with_answers(asked, ids)
    verdicts = run.evaluator.verdicts(evaluation.as_answers(run.tokenizer, answered, []))
    return [e._replace(label=bool(v)) for e, v in zip(answered, verdicts)]


def of_three(*given) -> list:
    return by_chance(*given)[:3]


def verdicts(values):
    return {"checker": lambda answers: values}


BAD = {  # what is said -> what is handed over, for ten answers
    "checker: 10 answers need as many verdicts, got 9": verdicts([True] * 9),
    "checker: answer 7: expected True, False or a number from 0 to 1, got 'yes'": verdicts([True] * 7 + ["yes"] * 3),
    "checker: answer 9: expected .*, got nan": verdicts([True] * 9 + [float("nan")]),
    "checker: answer 2: KTO learns from True or False, got 0.5; .*": verdicts([True, False] + [0.5] * 8),
    "checker: no verdict on any of 10 answers": verdicts([None] * 10),
    "checker: .*'NoneType' object is not iterable": verdicts(None),
    "rate: .*'NoneType' object is not iterable": {"rate": lambda *given: None},
    "rate: no iteration has as many examples as batch_size": {"rate": of_three},
    "eval.check: online KTO needs a checker: .*": {"checker": None},
    "checker: .*'NoneType' object is not callable": {"checker": None, "rate": asks_checker},
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_what_is_no_verdict_and_no_rating_is_one_line(fault, tiny, prompts, tmp_path):
    with pytest.raises((BadInput, Failed), match=f"^{fault}$"):
        go(tiny, prompts, tmp_path, **BAD[fault])


def test_an_answer_without_a_verdict_is_no_thumb_and_no_part_of_the_accuracy(
    tiny, prompts, tmp_path, fits, capsys
):
    def checker(given):
        return [None if i % 5 == 4 else i % 5 == 0 for i in range(len(given))]

    argv = (ONE, f"--data.val={prompts}", "--eval.prompts=7", "--eval.max_new_tokens=4")
    go(tiny, prompts, tmp_path, *argv, checker=checker)
    ((seen, _),) = fits
    assert [(e.label, e.weight) for e in seen[:5]] == [(True, 1), *[(False, 1)] * 3, (False, 0)]
    before = evaluated(tmp_path, "before")
    assert (before["right"], before["of"], before["unjudged"]) == (2, 6, 1)
    assert [a["right"] for a in before["answers"][3:]] == [False, None, True, False]
    said = capsys.readouterr().out
    assert "no verdict on 2 of 10 answers, which are not counted" in said
    assert "iteration 1: 10 examples, 2 of 8 rated right, " in said
    assert "33.3%" in said and "2 of 6" in said


def test_a_checker_says_how_many_answers_to_the_test_split_are_right(tiny, prompts, tmp_path):
    """By hand: `final` is asked by generate.py, greedily, and its answers are checked here."""
    run, out = tmp_path / "run", tmp_path / "answers.jsonl"
    split = (ONE, f"--data.test={prompts}")
    go(tiny, prompts, run, *split, "--eval.temperature=0", "--eval.max_new_tokens=4")
    asked = f"--model={run}/final --prompts={prompts} --out={out} --temperature=0"
    start("generate", [*asked.split(), "--max_new_tokens=4", "--plain=true"])
    rows = read_lines(out)
    right = sum(even([SimpleNamespace(completion=row["completion"]) for row in rows]))
    scores = evaluated(run, "test")
    assert scores == {"final": {"checker_accuracy": right / 7}}
    check = evaluated(run, "test-final")
    assert [a["completion"] for a in check["answers"]] == [row["completion"] for row in rows]


def test_more_prompts_an_iteration_than_there_are_are_all_and_its_end_is_saved(
    tiny, prompts, tmp_path, fits
):
    argv = ("--online.max_iterations=2", "--online.prompts_per_iteration=99", "--save_interval=99")
    go(tiny, prompts, tmp_path, *argv)
    assert [len(examples) for examples, _ in fits] == [14, 14]
    assert sorted(checkpoints_by_step(tmp_path)) == [3, 6]


STOP = '--online.stop=["e"]'


def is_cut(tiny, ids) -> bool:
    """Whether an answer of a run with STOP ended by its length."""
    return ids[-1] != 0 and "e" not in Tokenizer(Source(tiny)).decode(ids)


def test_a_checker_sees_the_records_own_fields_and_whether_the_answer_was_cut(
    tiny, prompts, tmp_path, capsys
):
    records = read_lines(prompts)
    own = tokens.write(tmp_path / "own.jsonl", *(r | {"level": i} for i, r in enumerate(records)))
    seen = []

    def checker(given):
        seen.extend(given)
        verdicts = [a.fields["level"] % 2 == 0 for a in given]
        given.clear()  # the list is its own
        return verdicts

    argv = ("--data.extra=level", f"--data.val={own}", "--eval.prompts=5", ONE, STOP)
    go(tiny, own, tmp_path / "run", *argv, checker=checker)
    for a in seen:
        assert a.prompt == records[a.fields["level"]]["prompt"]
    cut = [is_cut(tiny, row["ids"]) for row in of_iteration(tmp_path / "run", 1)]
    assert [a.cut for a in seen[:10]] == cut and {True, False} == set(cut)
    assert f" rated right, {sum(cut)} cut" in capsys.readouterr().out
    before = evaluated(tmp_path / "run", "before")
    found = [(a["fields"]["level"], a["right"]) for a in before["answers"]]
    assert found == [(i, i % 2 == 0) for i in range(5)], "one prompt twice"


@pytest.mark.parametrize("rule", ["judge", "wrong", "drop"])
def test_what_becomes_of_an_answer_that_was_cut(rule, tiny, prompts, tmp_path, fits):
    argv = (ONE, f"--online.cut={rule}", STOP)
    go(tiny, prompts, tmp_path, *argv, checker=lambda given: [True] * len(given))
    ((seen, _),) = fits
    of_cut = {(e.label, e.weight) for e in seen if is_cut(tiny, e.completions[0])}
    of_others = {(e.label, e.weight) for e in seen if not is_cut(tiny, e.completions[0])}
    expected = {"judge": (True, 1.0), "wrong": (False, 1.0), "drop": (True, 0.0)}
    assert of_cut == {expected[rule]} and of_others == {(True, 1.0)}


def test_balanced_the_two_kinds_of_an_iteration_count_equally_and_one_kind_alone_as_it_is(
    tiny, prompts, tmp_path, fits
):
    argv = ("--online.max_iterations=2", "--online.balance=true")
    shares = iter([[True] * 3 + [False] * 7, [False] * 10])  # of two iterations
    go(tiny, prompts, tmp_path, *argv, checker=lambda given: next(shares)[: len(given)])
    (first, _), (second, _) = fits
    assert [e.weight for e in first] == pytest.approx([5 / 3] * 3 + [5 / 7] * 7)
    assert {e.weight for e in second} == {1.0}


def test_a_mended_engine_is_asked_for_the_rest_and_answers_by_other_settings_are_not_taken(
    tiny, prompts, tmp_path
):
    calls = []

    def engine(folder, asked, *_):
        calls.append(len(asked))
        return [[5]] * 3 if len(calls) == 2 else np.full((len(asked), 2), 7)

    out = tmp_path / "a"
    match = "^rollout: expected 4 answers, got 3"
    refused(match, go, tiny, prompts, out, ONE, rollout=engine)
    assert len(of_iteration(out, 1)) == 4, "the first batch stays"
    shutil.copytree(out, tmp_path / "b")
    go(tiny, prompts, out, "--resume=auto", ONE, rollout=engine)
    go(tiny, prompts, tmp_path / "b", ONE, "--online.temperature=0.5", rollout=engine)
    assert calls == [4, 4, 4, 2, 4, 4, 2]


# ---- lengths -------------------------------------------------------------------------------------

LONG = "--online.max_new_tokens=120"  # with a prompt of 21 tokens beyond the context of 128


def test_a_limit_that_would_only_be_met_later_is_refused_before_the_first_token(
    tiny, prompts, tmp_path
):
    said = "online.max_new_tokens: 120: more than data.max_completion, 12, and these answers become completions"
    refused(f"^{said}$", go, tiny, prompts, tmp_path, LONG, '--eval.stop=["."," "]')
    assert not list(tmp_path.iterdir()), "nothing was sampled, and there is no folder"


LABEL = "label: expected True or False; a graded rating belongs into rewards, got"
WRONG_IDS = {  # what is said -> the ids of an answer
    r"token ids \[512\], but the model has 0 to 511": [512],
    r"token ids \[-1\], but the model has 0 to 511": [7, -1],
    r"120 tokens, after a prompt of \d\d, exceed the context of 128": [7] * 120,
}
WRONG = {  # what is said -> fields of an example
    **{said: {"completions": (np.array(ids),)} for said, ids in WRONG_IDS.items()},
    f"{LABEL} -1": {"label": -1},
    f"{LABEL} None": {"label": None},
}


@pytest.mark.parametrize("said", WRONG_IDS)
def test_what_an_engine_gives_is_checked_when_it_returns(said, tiny, prompts, tmp_path):
    def engine(folder, asked, *_):
        return [[7]] * (len(asked) - 1) + [WRONG_IDS[said]]

    refused(f"^rollout: answer 3: {said}$", go, tiny, prompts, tmp_path, ONE, rollout=engine)
    assert not (tmp_path / "iterations" / "answers-1.jsonl").exists()


@pytest.mark.parametrize("said", WRONG)
def test_what_a_rater_gives_is_checked_when_it_returns(said, tiny, prompts, tmp_path):
    def rate(run, asked, ids):
        *others, last = evaluation.with_answers(asked, ids)
        return [*(e._replace(label=True) for e in others), last._replace(**WRONG[said])]

    refused(f"^rate: example 9: {said}$", go, tiny, prompts, tmp_path, ONE, checker=None, rate=rate)
