"""Online KTO: the policy answers, a checker rates, KTO learns; no ratings, the same guarantees."""

import csv
import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import (
    PARITY,
    assert_same,
    killed_and_resumed,
    last_of_each,
    ranks,
    result,
)

import evaluate
import online
import rollout
import spin
from kto import KTO, KTOSettings
from records.tokenizer import Tokenizer
from runs.errors import BadInput
from runs.folder import checkpoints_by_step

RUN = ("--batch_size=4", "--optim.lr=1e-2", "--online.max_iterations=3", "--online.prompts_per_iteration=5",
       "--online.num_generations=2", "--online.max_new_tokens=5", "--online.rollout_batch_size=4", "--save_interval=1",
       "--precision=32-true", "--keep_last=99", "--eval.samples=0", "--data.max_completion=12")  # fmt: skip


def even(answers) -> list[bool]:
    return [len(a.completion) % 2 == 0 for a in answers]


def never(answers) -> list[bool]:
    return [False] * len(answers)


def short(answers) -> list[bool]:
    return [len(a.completion) < 12 for a in answers]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """7 distinct prompts, one of them twice, without ratings."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [json.loads(line) for line in (PARITY / "kto_data.jsonl").read_text().splitlines()]
    names = [r["prompt"] for r in records][:7]
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in [*names, names[0]]))
    return file


def go(tiny, prompts, out: Path, *argv, **given) -> dict:
    argv = [
        f"--model={tiny}",
        f"--data.train={prompts}",
        f"--out_dir={out}",
        "--progress=false",
        *RUN,
        *argv,
    ]
    argv = last_of_each(argv)
    with mock.patch.object(sys, "argv", [online.__file__, *argv]):
        online.main(argv, **{"checker": even, **given})
    return result(out)


def answers(out: Path, i: int) -> list[dict]:
    return [
        json.loads(line)
        for line in (out / "iterations" / f"answers-{i}.jsonl").read_text().splitlines()[1:]
    ]


def test_each_iteration_learns_from_fresh_answers_that_the_checker_rated(
    tiny, prompts, tmp_path, monkeypatch, capsys
):
    seen, real = [], online.Trainer.fit
    monkeypatch.setattr(
        online.Trainer, "fit", lambda self, e, p: seen.append((e, p)) or real(self, e, p)
    )
    run = go(tiny, prompts, tmp_path)
    assert [(p.begin, p.end) for _, p in seen] == [(0, 2), (2, 4), (4, 6)], (
        "ten answers are two steps of four"
    )
    for i, (examples, _) in enumerate(seen, 1):
        own = answers(tmp_path, i)
        assert [list(e.completions[0]) for e in examples] == [a["ids"] for a in own]
        assert [e.label for e in examples] == [len(a["completion"]) % 2 == 0 for a in own]
        good = sum(e.label for e in examples)
        assert f"iteration {i}: 10 answers, {good} right" in capsys.readouterr().out or i > 1
    asked = [e.prompt.tobytes() for examples, _ in seen for e in examples[::2]]
    assert len(set(asked[:7])) == 7 and len(set(asked[7:14])) == 7, (
        "one pass over distinct prompts after another"
    )
    assert answers(tmp_path, 1) != answers(tmp_path, 2) and len(run["rows"]) == 6


def test_an_iteration_answers_no_prompt_twice_where_more_are_asked_for_than_there_are(
    tiny, prompts, tmp_path
):
    asked = {}
    for n in ("1000", "null"):
        argv = (f"--online.prompts_per_iteration={n}", "--online.max_iterations=1")
        go(tiny, prompts, tmp_path / n, *argv)
        asked[n] = answers(tmp_path / n, 1)
    assert len(asked["1000"]) == 14 and asked["1000"] == asked["null"]


def test_without_a_checker_it_is_refused(tiny, prompts, tmp_path):
    with pytest.raises(BadInput, match="needs a checker"):
        go(tiny, prompts, tmp_path, checker=None)


@pytest.mark.parametrize(
    "program, records, advice",
    [(online, "prompts", ": derive it from OnlineKTO"), (spin, "demonstrations", "")],
)
def test_an_objective_that_learns_from_other_records_is_refused(
    program, records, advice, tiny, prompts, tmp_path
):
    """Its data would be read as ratings: each of a prompt's five ratings would be a prompt to answer."""
    name = Path(program.__file__).name
    argv = [f"--model={tiny}", f"--data.train={prompts}", f"--out_dir={tmp_path / 'run'}"]
    match = f'^objective: {name} needs records = "{records}"{advice}$'
    with pytest.raises(BadInput, match=match):
        program.main(argv, objective=lambda *given: KTO(KTOSettings()), checker=even)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("reference", ["first", "last"])
def test_ctrl_c_in_the_check_after_the_second_iteration_saves_and_a_resume_checks_it(
    reference, tiny, prompts, tmp_path
):
    """A resume goes on in the iteration that was stopped, not in the first one."""
    calls = []

    def stopped_once(answers):
        calls.append(len(answers))
        if len(calls) == 5:  # before, answers, check, answers, check
            os.kill(os.getpid(), signal.SIGINT)
        return even(answers)

    argv = (f"--data.val={prompts}", f"--online.reference={reference}")
    whole = go(tiny, prompts, tmp_path / "whole", *argv)
    with pytest.raises(SystemExit):
        go(tiny, prompts, tmp_path / "run", *argv, checker=stopped_once)
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 1 + 4
    assert_same(go(tiny, prompts, tmp_path / "run", *argv, "--resume=auto"), whole)
    assert (tmp_path / "run/val.csv").read_text() == (tmp_path / "whole/val.csv").read_text()


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (
            "--online.prompts_per_iteration=1",
            "online.prompts_per_iteration: an iteration has 2 ans",
        ),
        ("--keep_best=checker_accuracy --eval.prompts=0 --data.val={}", "keep_best: checker_acc"),
    ],
)
def test_settings_that_do_nothing_or_make_no_step_are_refused(
    argv, reason, tiny, prompts, tmp_path
):
    with pytest.raises(BadInput, match=f"^{reason}"):
        go(tiny, prompts, tmp_path / "run", *argv.format(prompts).split())
    assert not (tmp_path / "run").exists()


BAD = {  # what a checker gives for ten answers -> what is said
    "10 answers need as many verdicts, got 9": [True] * 9,
    "expected a list of 10 verdicts, got True": True,
    "expected a list of 10 verdicts, got None": None,
    "answer 7: expected True, False or a number from 0 to 1, got None": [True] * 7 + [None] * 3,
    "answer 0: expected .*, got 'no'": ["no"] * 10,
    "answer 9: expected .*, got nan": [True] * 9 + [float("nan")],
    "answer 1: expected .*, got 1.5": [False, np.float32(1.5)] + [True] * 8,
    "answer 2: KTO learns from True or False, got 0.5; .*": [True, False] + [0.5] * 8,
    "answer 0: KTO learns from True or False, got 1; .*": torch.ones(10),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_checkers_verdict_that_is_none_is_one_line_with_the_answers_number(
    fault, tiny, prompts, tmp_path
):
    with pytest.raises(BadInput, match=f"^checker: {fault}$"):
        go(tiny, prompts, tmp_path, checker=lambda answers: BAD[fault])


STOP = '--online.stop=["e"]'


def is_cut(tiny, ids) -> bool:
    """Whether an answer of a run with STOP ended by its length."""
    return ids[-1] != 0 and "e" not in Tokenizer(tiny).decode(ids)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, iter])
def test_a_checker_may_give_numpys_and_torchs_bools(kind, tiny, prompts, tmp_path):
    one = ("--online.max_iterations=1",)
    run = go(tiny, prompts, tmp_path / "a", *one, checker=lambda answers: kind(even(answers)))
    assert_same(run, go(tiny, prompts, tmp_path / "b", *one))


def test_a_checker_sees_the_records_own_fields_and_whether_the_answer_was_cut(
    tiny, prompts, tmp_path, capsys
):
    own, seen = tmp_path / "own.jsonl", []
    records = [json.loads(line) for line in prompts.read_text().splitlines()]
    lines = [json.dumps(r | {"level": i, "kind": "ab"[i % 2]}) for i, r in enumerate(records)]
    own.write_text("".join(f"{line}\n" for line in lines))
    level = {r["prompt"]: i for i, r in reversed(list(enumerate(records)))}

    def checker(given):
        seen.extend(given)
        return [a.fields["kind"] == "a" for a in given]

    argv = ("--data.extra=level,kind", f"--data.val={own}", "--online.max_iterations=1", STOP)
    go(tiny, own, tmp_path / "run", *argv, checker=checker)
    for a in seen:
        assert a.fields == {"level": level[a.prompt], "kind": "ab"[level[a.prompt] % 2]}
    cut = [is_cut(tiny, row["ids"]) for row in answers(tmp_path / "run", 1)]
    assert [a.cut for a in seen[:10]] == cut and {True, False} == set(cut)
    said = capsys.readouterr().out
    assert f"%), {sum(cut)} cut, " in said
    before = json.loads((tmp_path / "run" / "eval" / "before.json").read_text())
    assert before["by"] == {"kind": {"a": [4, 4], "b": [0, 3]}} and before["right"] == 4
    assert [a["right"] for a in before["answers"]] == [True, False] * 3 + [True]
    assert "  kind  before   after     of\n  a     100.0%  100.0%      4\n" in said


@pytest.mark.parametrize("rule", ["judge", "wrong", "drop"])
def test_what_becomes_of_an_answer_that_was_cut(rule, tiny, prompts, tmp_path, monkeypatch):
    seen, real = [], online.Trainer.fit
    monkeypatch.setattr(
        online.Trainer, "fit", lambda self, e, p: seen.extend(e) or real(self, e, p)
    )
    argv = ("--online.max_iterations=1", f"--online.cut={rule}", STOP)
    go(tiny, prompts, tmp_path, *argv, checker=lambda given: [True] * len(given))
    assert len(seen) == 10
    of_cut = {(e.label, e.weight) for e in seen if is_cut(tiny, e.completions[0])}
    of_others = {(e.label, e.weight) for e in seen if not is_cut(tiny, e.completions[0])}
    expected = {"judge": (True, 1.0), "wrong": (False, 1.0), "drop": (True, 0.0)}
    assert of_cut == {expected[rule]} and of_others == {(True, 1.0)}


def test_balanced_the_two_kinds_of_an_iteration_count_equally_and_one_kind_alone_as_it_is(
    tiny, prompts, tmp_path, monkeypatch
):
    seen, real = [], online.Trainer.fit

    def fit(trainer, examples, plan):
        seen.append(examples)
        return real(trainer, examples, plan)

    monkeypatch.setattr(online.Trainer, "fit", fit)
    argv = ("--online.max_iterations=2", "--online.balance=true")
    shares = iter([[True] * 3 + [False] * 7, [False] * 10])  # of two iterations
    go(tiny, prompts, tmp_path, *argv, checker=lambda given: next(shares)[: len(given)])
    first, second = seen
    assert [e.weight for e in first] == pytest.approx([5 / 3] * 3 + [5 / 7] * 7)
    assert {e.weight for e in second} == {1.0}


def test_a_forks_rate_takes_the_place_of_the_checkers_labels(tiny, prompts, tmp_path):
    """Numbers of the checker, as a field that a loss may read."""
    rated = []

    def rate(run, asked, ids):
        given = [evaluate.as_answer(run.tokenizer, e, x, []) for e, x in zip(asked, ids)]
        for e, x, reward in zip(asked, ids, run.evaluator.judge(given)):
            extra = {"reward": reward}
            e = e._replace(completions=(np.array(x, np.int32),), label=reward > 0.5, extra=extra)
            rated.append(e)
        return rated[-len(asked) :]

    def checker(given):
        return [len(a.completion) % 10 / 10 for a in given]

    one = ("--online.max_iterations=1", f"--data.val={prompts}")
    go(tiny, prompts, tmp_path / "a", *one, checker=checker, rate=rate)
    own = [len(a["completion"]) % 10 / 10 for a in answers(tmp_path / "a", 1)]
    assert [e.extra["reward"] for e in rated] == own and len(set(own)) > 2
    after = json.loads((tmp_path / "a" / "eval" / "after.json").read_text())
    assert after["right"] == pytest.approx(sum(a["right"] for a in after["answers"]))
    with pytest.raises(BadInput, match="rate: 10 answers need as many examples, got 9"):
        go(tiny, prompts, tmp_path / "b", *one, checker=checker, rate=lambda *a: rate(*a)[1:])


def test_it_learns_what_the_checker_likes(tiny, prompts, tmp_path):
    """Short answers are right: after some iterations more of them are."""
    argv = (
        "--online.max_iterations=12",
        "--online.num_generations=8",
        "--batch_size=8",
        "--save_interval=null",
    )
    go(tiny, prompts, tmp_path, *argv, checker=short)
    shares = [
        sum(len(a["completion"]) < 12 for a in answers(tmp_path, i)) / 40 for i in (1, 11, 12)
    ]
    assert shares[0] < 0.6 and min(shares[1:]) > shares[0] + 0.2


FIRST, LORA = ("--online.reference=first",), ("--lora.rank=2",)
CASES = [(1, "auto", FIRST), (1, "auto", LORA), (2, "fsdp", ()),
         pytest.param(2, "ddp", (), marks=pytest.mark.slow)]  # fmt: skip


@pytest.mark.parametrize("n,strategy,more", CASES)
def test_killed_while_answering_or_learning_and_resumed_it_is_the_same_run(
    n, strategy, more, tiny, prompts, tmp_path
):
    argv = (f"--strategy={strategy}", "--batch_size=3", *more)  # three steps an iteration
    whole, *_ = ranks(n, lambda rank: go(tiny, prompts, tmp_path / "whole", *argv))
    out, moments = tmp_path / "run", [("iterations/answers-2.jsonl", 5), ("metrics.csv", 6)]
    resumed = killed_and_resumed(
        n, out, moments, lambda rank, *more: go(tiny, prompts, out, *argv, *more)
    )
    assert_same(resumed, whole)
    for i in (1, 2, 3):
        assert answers(out, i) == answers(tmp_path / "whole", i)


@pytest.mark.parametrize("moves", [True, False])
def test_the_reference_stays_the_first_model_or_becomes_the_last_iterations(
    moves, tiny, prompts, tmp_path
):
    run = go(tiny, prompts, tmp_path, f"--online.reference={'last' if moves else 'first'}")
    at_start = abs(run["rows"][2]["rewards/mean"])  # the first step of iteration 2
    assert (at_start < 1e-5) == moves
    assert (tmp_path / "iterations" / "2" / "weights.safetensors").exists() == moves


def test_two_processes_answer_and_learn_like_one(tiny, prompts, tmp_path):
    one = go(tiny, prompts, tmp_path / "one", "--online.max_iterations=1")
    two, _ = ranks(
        2,
        lambda rank: go(
            tiny, prompts, tmp_path / "two", "--online.max_iterations=1", "--strategy=ddp"
        ),
    )
    assert answers(tmp_path / "one", 1) == answers(tmp_path / "two", 1)
    for a, b in zip(one["rows"], two["rows"]):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)


def test_a_step_of_one_class_only_is_right(tiny, prompts, tmp_path):
    run = go(tiny, prompts, tmp_path, "--online.max_iterations=1", checker=never)
    assert run["rows"][0]["rewards/chosen"] is None and run["rows"][0]["loss"] == pytest.approx(
        0.5, abs=1e-6
    )


def test_an_iteration_that_moved_nothing_is_said_and_the_next_one_begins(
    tiny, prompts, tmp_path, capsys
):
    argv = ("--kto.undesirable_weight=0", "--online.max_iterations=2")
    go(tiny, prompts, tmp_path, *argv, checker=never)
    said = capsys.readouterr().out
    assert said.count("iteration 2: the last iteration has not changed the policy") == 1
    assert "exported to" in said


def test_held_out_prompts_are_answered_and_checked(tiny, prompts, tmp_path):
    go(
        tiny,
        prompts,
        tmp_path,
        f"--data.val={prompts}",
        "--val_interval=1",
        "--keep_best=checker_accuracy",
    )
    with open(tmp_path / "val.csv") as f:
        rows = list(csv.DictReader(f))
    assert list(rows[0]) == ["step", "checker_accuracy", "kl/own"]
    assert [bool(r["checker_accuracy"]) for r in rows] == [
        True,
        False,
        True,
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("intervals", "validated", "checked"),
    [
        ("--val_interval=4 --eval.check_interval=4", "0 4 6", "0 4 6"),  # steps
        ("--val_interval=4", "0 2 4 6", "0 2 4 6"),  # null: each iteration's end
        ("--val_interval=1.0 --eval.check_interval=5", "0 2 4 5 6", "0 5 6"),  # an epoch
        ("--val_interval=null --eval.check_interval=0.5", "0 1 2 3 4 5 6", "0 1 2 3 4 5 6"),
    ],
)
def test_intervals_in_steps_count_on_over_the_iterations_and_others_end_with_each(
    intervals, validated, checked, tiny, prompts, tmp_path
):
    """An iteration has two steps."""
    go(tiny, prompts, tmp_path, f"--data.val={prompts}", *intervals.split())
    with open(tmp_path / "val.csv") as f:
        rows = list(csv.DictReader(f))
    assert " ".join(r["step"] for r in rows) == validated
    assert " ".join(r["step"] for r in rows if r["checker_accuracy"]) == checked


def test_an_engine_answers_from_an_exported_folder(tiny, prompts, tmp_path):
    """As vLLM would: here transformers' generate on the Hugging Face folder of the policy as it is."""
    import transformers

    weights = []

    def engine(folder, asked, sampling, max_new_tokens, seed):
        torch.manual_seed(seed)
        policy = transformers.AutoModelForCausalLM.from_pretrained(folder)
        weights.append(policy.lm_head.weight.detach().clone())
        out = []
        for ids in asked:
            ids = torch.tensor([ids])
            told = policy.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True,
                                   max_new_tokens=max_new_tokens, temperature=sampling.temperature,
                                   top_k=0, pad_token_id=0)  # fmt: skip
            out.append(told[0, ids.shape[1] :].tolist())
        return out

    run = go(tiny, prompts, tmp_path, "--online.max_iterations=2", rollout=engine)
    assert len(run["rows"]) == 4 and len(answers(tmp_path, 2)) == 10
    assert len(weights) == 6 and torch.equal(weights[0], weights[2]), (
        "one policy for an iteration's three calls"
    )
    assert not torch.equal(weights[2], weights[3]), (
        "the next iteration asks the policy as it is then"
    )


GIVEN = {  # what an engine gives for four prompts -> what is said
    "rollout: 4 prompts need as many answers, got 3": [[5]] * 3,
    "rollout: expected a list of answers, got None": None,
    r"rollout: answer 2: expected 1 to 5 token ids from 0 to 511, got \[\]": [[5], [5], [], [5]],
    "answer 1: .* from 0 to 511, got .5, 512.": [[5], [5, 512], [5], [5]],
    "answer 3: .* from 0 to 511, got .-1.": [[5], [5], [5], [-1]],
    "answer 0: .* got .5.0.": [[5.0], [5], [5], [5]],
    "answer 0: .* got 'hello'": ["hello", [5], [5], [5]],
    "answer 1: .* got None": [[5], None, [5], [5]],
    "answer 0: expected 1 to 5 token ids": [[5] * 6, [5], [5], [5]],
    "answer 2: token ids after the end of the answer, got .5, 0, 5.": [[5], [5], [5, 0, 5], [5]],
}


@pytest.mark.parametrize("fault", GIVEN)
def test_an_engines_answers_are_checked_before_they_are_written(fault, tiny, prompts, tmp_path):
    calls = []

    def engine(folder, asked, *_):
        calls.append(len(asked))
        return GIVEN[fault] if len(calls) == 2 else np.full((len(asked), 2), 7)

    with pytest.raises(BadInput, match=fault):
        go(tiny, prompts, tmp_path, rollout=engine)
    assert len(answers(tmp_path, 1)) == 4, "the first batch stays"
    calls = [1, 2]  # a mended engine
    go(tiny, prompts, tmp_path, "--resume=auto", "--online.max_iterations=1", rollout=engine)
    assert calls == [1, 2, 4, 2], "is asked for the rest"


def damage(file: Path, how: str) -> None:
    header, *lines = file.read_text().splitlines(keepends=True)
    if how == "a digit":
        place = lines[0].index("[") + 1
        lines[0] = f"{lines[0][:place]}{(int(lines[0][place]) + 1) % 10}{lines[0][place + 1 :]}"
    elif how == "two rows":
        lines[0], lines[1] = lines[1], lines[0]
    elif how == "the end":
        lines = lines[:-1]
    else:
        header = "5\n"
    file.write_text("".join([header, *lines]))


@pytest.mark.parametrize("how", ["a digit", "two rows", "the end", "the header"])
def test_damaged_answers_are_refused_or_made_anew(how, tiny, prompts, tmp_path, capsys):
    whole = go(tiny, prompts, tmp_path / "whole")
    out = tmp_path / "run"
    file = out / "iterations" / "answers-2.jsonl"
    go(tiny, prompts, out, "--stop_at=3")
    damage(file, how)
    with pytest.raises(BadInput, match="resume from a checkpoint of step 2 or before"):
        go(tiny, prompts, out, "--resume=auto")
    assert "answers-2.jsonl: " in capsys.readouterr().out
    step_2 = checkpoints_by_step(out / "checkpoints")[2]
    resumed = go(tiny, prompts, out, f"--resume={step_2}")
    assert "they cannot be used" in capsys.readouterr().out
    assert_same(resumed, whole)


def test_answers_that_are_gone_in_the_middle_of_an_iteration_are_not_made_anew(
    tiny, prompts, tmp_path
):
    go(tiny, prompts, tmp_path, "--stop_at=3")
    (tmp_path / "iterations" / "answers-2.jsonl").unlink()
    with pytest.raises(BadInput, match="resume from a checkpoint of step 2 or before"):
        go(tiny, prompts, tmp_path, "--resume=auto")
    go(
        tiny,
        prompts,
        tmp_path,
        f"--resume={checkpoints_by_step(tmp_path / 'checkpoints')[2]}",
    )
    assert len(answers(tmp_path, 2)) == 10


def test_iterations_draw_other_random_numbers(tiny, prompts, tmp_path, monkeypatch):
    seeds, real = [], rollout.generate
    monkeypatch.setattr(rollout, "generate", lambda *a: seeds.append(a[-1]) or real(*a))
    go(tiny, prompts, tmp_path, "--optim.lr=1e-9")
    assert len(set(seeds)) == len(seeds) == 9
    assert answers(tmp_path, 1) != answers(tmp_path, 2)


@pytest.mark.parametrize("reference", ["first", "last"])
def test_a_run_with_adapters_resumes_to_the_bit(reference, tiny, prompts, tmp_path):
    """With a moving reference they begin anew in each iteration."""
    argv = ("--lora.rank=2", f"--online.reference={reference}")
    whole = go(tiny, prompts, tmp_path / "whole", *argv)
    go(tiny, prompts, tmp_path / "run", *argv, "--stop_at=3")
    assert_same(go(tiny, prompts, tmp_path / "run", *argv, "--resume=auto"), whole)


def test_answers_that_are_a_pipe_are_damaged_answers(tmp_path):
    os.mkfifo(tmp_path / "answers-1.jsonl")
    with pytest.raises(BadInput, match="not a regular file"):
        rollout._read_lines(tmp_path / "answers-1.jsonl")


def test_a_checker_may_sort_or_empty_the_list_that_it_gets():
    answers = [evaluate.Answer("p", text, {}, False) for text in "ba"]

    def checker(given):
        verdicts = [a.completion == "b" for a in given]
        given.sort(key=lambda a: a.completion)
        return verdicts

    assert evaluate.ask_checker(checker, answers) == [True, False]
    assert [a.completion for a in answers] == ["b", "a"]


# ---- ratings of one's own: once, on rank 0, kept beside the answers ------------------------------


def by_chance(run, asked, ids) -> list:
    """A rater that never says the same twice, and notes on which rank it was asked."""
    with open(Path(run.cfg.out_dir) / "asked", "a") as f:
        f.write(f"{run.fabric.global_rank} {run.state.iteration}\n")
    given = [evaluate.as_answer(run.tokenizer, e, x, []) for e, x in zip(asked, ids)]
    verdicts = run.evaluator.judge(given)  # works on rank 0 alone, too
    noise = np.random.default_rng(list(os.urandom(8)))
    return [
        e._replace(completions=(np.array(x, np.int32),), label=bool(noise.integers(2)),
                   rewards=(noise.random(), None), weight=np.float64(1 + noise.random()),
                   extra={"verdict": torch.tensor(float(v))})
        for e, x, v in zip(asked, ids, verdicts)
    ]  # fmt: skip


def learned_from(out: Path, i: int) -> list[dict]:
    file = out / "iterations" / f"rated-{i}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


@pytest.mark.parametrize("n, strategy", [(1, "auto"), (2, "ddp")])
def test_ratings_by_chance_are_the_same_on_all_ranks_and_after_a_resume(
    n, strategy, tiny, prompts, tmp_path, monkeypatch
):
    real = online.Trainer.fit

    def fit(trainer, examples, plan):
        rank, step = trainer.run.fabric.global_rank, trainer.run.state.step
        rows = [[e.label, e.weight, e.rewards[0], e.extra["verdict"]] for e in examples]
        (tmp_path / f"fit-{plan.begin}-{step}-{rank}").write_text(json.dumps(rows))
        return real(trainer, examples, plan)

    monkeypatch.setattr(online.Trainer, "fit", fit)
    argv = ("--online.max_iterations=2", "--batch_size=3", f"--strategy={strategy}")
    out = tmp_path / "run"
    ranks(n, lambda rank: go(tiny, prompts, out, *argv, "--stop_at=4", rate=by_chance))
    ranks(n, lambda rank: go(tiny, prompts, out, *argv, "--resume=auto", rate=by_chance))
    assert (out / "asked").read_text() == "0 1\n0 2\n", "once an iteration, on rank 0"
    for begin, step in ((0, 0), (3, 3), (3, 4)):
        seen = [(tmp_path / f"fit-{begin}-{step}-{rank}").read_text() for rank in range(n)]
        lines = learned_from(out, begin // 3 + 1)
        rated = [
            [x.get("label", True), x["weight"], x["rewards"][0], x["extra"]["verdict"]]
            for x in lines
        ]
        assert len(rated) == 10 and {json.dumps(rated)} == set(seen)


def test_in_mid_iteration_ratings_that_are_lost_or_changed_are_refused(tiny, prompts, tmp_path):
    argv = ("--online.max_iterations=1", "--stop_at=1")
    go(tiny, prompts, tmp_path, *argv, rate=by_chance)
    file = tmp_path / "iterations" / "rated-1.jsonl"
    text = file.read_text()
    file.write_text(text.replace('"verdict": 1.0', '"verdict": 0.0', 1))
    for _ in range(2):
        with pytest.raises(BadInput, match="rated-1.jsonl: not what this iteration learns from"):
            go(tiny, prompts, tmp_path, *argv, "--resume=auto", "--stop_at=2", rate=by_chance)
        file.unlink(missing_ok=True)
    file.write_text(text)
    go(tiny, prompts, tmp_path, *argv, "--resume=auto", "--stop_at=2", rate=by_chance)


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"completions": ()}, "expected completions of token ids"),
        ({"completions": (np.zeros(0, np.int32),)}, "expected completions of token ids"),
        ({"completions": (np.array([5, 10**6], np.int32),)}, "expected .* that the model has"),
        ({"completions": (np.array([5, -1], np.int32),)}, "expected .* that the model has"),
        ({"completions": (np.full(10**4, 5, np.int32),)}, "expected .* that fit its context"),
        ({"label": 0.7}, "expected .* a label that is True or False"),
        ({"weight": -1.0}, "expected .* weight of at least 0"),
        ({"rewards": (float("nan"), None)}, "expected .* finite rewards"),
        ({"extra": {"judge": object()}}, "'object' object has no attribute 'tolist'"),
    ],
)
def test_an_example_of_a_rate_that_cannot_be_learned_from_is_said_by_its_number(
    change, fault, tiny, prompts, tmp_path
):
    def rate(run, asked, ids):
        examples = [e._replace(completions=(np.array(x, np.int32),)) for e, x in zip(asked, ids)]
        return [*examples[:3], examples[3]._replace(**change), *examples[4:]]

    with pytest.raises(BadInput, match=f"^rate: example 3: {fault}"):
        go(tiny, prompts, tmp_path, rate=rate)


def test_a_rate_that_asks_a_checker_that_is_not_there_is_told_what_to_set(tiny, prompts, tmp_path):
    def work(rank):
        with pytest.raises(BadInput, match="^eval.check: there is no checker to ask"):
            go(tiny, prompts, tmp_path, "--strategy=ddp", checker=None, rate=by_chance)

    ranks(2, work)
