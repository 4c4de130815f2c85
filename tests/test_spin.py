"""SPIN: iterations whose reference is the last policy; the same loop, the same guarantees."""

import csv
import dataclasses
import json

import numpy as np
import pytest
import torch
from conftest import assert_same, checkpoint_tensors, killed_and_resumed, ranks, train
from models import same_weights
from safetensors.torch import load_file

import data
import model
import rollout
import spin
from data import pack
from hub.lora import merge_adapters
from records.examples import load_examples
from records.tokenizer import Tokenizer
from runs import tensors
from runs.cli import parse
from runs.errors import BadInput
from runs.folder import checkpoints_by_step
from runs.optimizer import iteration_plans
from runs.settings import Data, Lora

RUN = ("--batch_size=4", "--epochs=2", "--optim.lr=1e-3", "--spin.max_iterations=3",
       "--spin.max_new_tokens=6", "--spin.rollout_batch_size=3", "--save_interval=2",
       "--precision=32-true", "--keep_last=99")  # fmt: skip


def go(tiny, demos, out, *argv):
    return train(tiny, demos, out, *RUN, *argv, program="spin")


def weights(out, name):
    return load_file(out / name / "weights.safetensors")


def weights_at(out, step: int):
    return checkpoint_tensors(out / f"checkpoints/step-{step:08d}", "weights")


def data_of(policy) -> dict:
    return {n: p.data for n, p in policy.unique_parameters().items()}


def ids_of(out, i: int) -> list[list[int]]:
    """The answers of iteration i."""
    lines = (out / "iterations" / f"answers-{i}.jsonl").read_text().splitlines()
    return [json.loads(line)["ids"] for line in lines[1:]]


def test_with_mixed_answers_each_iteration_is_validated_and_saved_once_at_its_end(
    tiny, demos, tmp_path
):
    """From the second iteration on an epoch has more steps."""
    argv = (f"--data.val={demos}", "--spin.mix=0.5", "--epochs=1", "--save_interval=1.0")
    argv += ("--eval.samples=0",)
    go(tiny, demos, tmp_path, *argv)
    with open(tmp_path / "metrics.csv") as f:
        rows = list(csv.DictReader(f))
    pairs = zip(rows, [*rows[1:], None])
    ends = [a["step"] for a, b in pairs if b is None or float(b["epoch"]) < float(a["epoch"])]
    assert len(ends) == 3 and int(ends[1]) - int(ends[0]) > int(ends[0])
    with open(tmp_path / "val.csv") as f:
        assert [row["step"] for row in csv.DictReader(f)] == ["0", *ends]
    saved = sorted(int(p.name.split("-")[1]) for p in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == [int(x) for x in ends]


def test_each_iterations_reference_is_the_policy_that_the_last_one_made(
    tiny, demos, tmp_path, capsys
):
    rows = go(tiny, demos, tmp_path)["rows"]
    assert [row["step"] for row in rows] == list(range(1, 13))
    epochs = [row["epoch"] for row in rows[:5]]
    assert epochs == [0.5, 1.0, 1.5, 2.0, 0.5], "epochs count in each iteration"
    assert same_weights(weights(tmp_path, "iterations/1"), data_of(model.load_model(tiny)))
    for i, step in ((2, 4), (3, 8)):
        assert same_weights(weights(tmp_path, f"iterations/{i}"), weights_at(tmp_path, step))
        assert abs(rows[step]["rewards/margins"]) < 1e-5 < rows[step - 1]["rewards/margins"]
    said = capsys.readouterr().out
    assert said.count("policy and reference agree to the bit") == 3, "checked in every iteration"


def test_lora_merges_its_adapters_and_begins_anew(tiny, demos, tmp_path, capsys):
    rows = go(tiny, demos, tmp_path, "--lora.rank=2", "--optim.lr=1e-2")["rows"]
    bases = [weights(tmp_path, f"iterations/{i}") for i in (1, 2, 3)]
    policy = model.load_model(tiny, Lora(rank=2))
    assert same_weights(bases[0], {n: x for n, x in data_of(policy).items() if "lora_" not in n})
    for i, step in ((1, 4), (2, 8)):  # base and adapters as at the iteration's end
        tensors.set_weights(policy, weights_at(tmp_path, step) | bases[i - 1])
        plain = merge_adapters(data_of(policy), policy)
        assert all(torch.equal(x, plain[n.replace(".linear.", ".")]) for n, x in bases[i].items())
        assert not same_weights(bases[i], bases[i - 1])
        assert abs(rows[step]["rewards/margins"]) < 1e-5
    state = checkpoint_tensors(tmp_path / "checkpoints" / "step-00000006", "optimizer")
    steps = {int(x) for n, x in state.items() if n.endswith("|step")}
    assert steps == {2}, "its optimizer restarts with it"
    assert capsys.readouterr().out.count("agree to the bit") == 3


def test_full_fine_tuning_carries_the_optimizers_state_on(tiny, demos, tmp_path):
    go(tiny, demos, tmp_path)
    state = checkpoint_tensors(tmp_path / "checkpoints" / "step-00000006", "optimizer")
    assert {int(x) for n, x in state.items() if n.endswith("|step")} == {6}


def test_each_iteration_and_rollout_batch_draws_random_numbers_of_its_own(tiny, demos, tmp_path):
    """A policy that does not move and prompts that are all alike: answers differ by their random
    numbers alone."""
    record, same = demos.read_text().splitlines()[0], tmp_path / "same.jsonl"
    same.write_text(f"{record}\n" * 8)
    argv = ("--optim.lr=1e-12", "--batch_size=8", "--epochs=1", "--spin.rollout_batch_size=4")
    go(tiny, same, tmp_path / "run", *argv)
    answers = [ids_of(tmp_path / "run", i) for i in (1, 2, 3)]
    batches = [str(own[at : at + 4]) for own in answers for at in (0, 4)]
    assert len(set(batches)) == 6
    first, *others = (weights(tmp_path / "run", f"iterations/{i}") for i in (1, 2, 3))
    assert all((x - y[n]).abs().max() < 1e-9 for y in others for n, x in first.items())


MODES = [(1, "auto", ()), (1, "auto", ("--lora.rank=2", "--lora.dropout=0.2")),
         pytest.param(2, "ddp", (), marks=pytest.mark.slow),
         (2, "fsdp", ("--lora.rank=2",))]  # fmt: skip


@pytest.mark.parametrize("n,strategy,more", MODES)
def test_a_run_killed_while_answering_or_learning_and_resumed_is_the_same_run(
    n, strategy, more, tiny, demos, tmp_path
):
    def run(out, *argv):
        argv = (f"--strategy={strategy}", "--spin.mix=0.5", f"--data.val={demos}", *more, *argv)
        return go(tiny, demos, out, *argv)

    whole, *_ = ranks(n, lambda rank: run(tmp_path / "whole"))
    names, out = [f"iterations/answers-{i}.jsonl" for i in (1, 2, 3)], tmp_path / "run"
    moments = [(names[0], 4), (names[1], 4), ("metrics.csv", 8)]
    assert_same(killed_and_resumed(n, out, moments, lambda rank, *more: run(out, *more)), whole)
    for name in names:
        assert (out / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_answers_on_disk_are_not_asked_for_again_unless_something_else_asked(
    tiny, demos, tmp_path, monkeypatch
):
    asked, real = [], rollout.generate

    def generate(fabric, policy, prompts, *args):
        asked.append(len(prompts))
        return real(fabric, policy, prompts, *args)

    def answered(*argv) -> list[int]:
        asked.clear()
        go(tiny, demos, tmp_path, "--spin.max_iterations=1", *argv)
        return list(asked)

    def forget(name):
        (tmp_path / "metrics.csv").unlink()
        for step in checkpoints_by_step(tmp_path / "checkpoints").values():
            step.rename(step.with_name(f"{name}-{step.name}"))

    monkeypatch.setattr(rollout, "generate", generate)
    assert answered() == [3, 3, 2]
    forget("gone")
    file = tmp_path / "iterations" / "answers-1.jsonl"
    whole = file.read_text()
    assert answered("--resume=auto") == [] and file.read_text() == whole
    forget("lost")
    header, lines = rollout._read_lines(file)
    rollout._write_lines(file, header, lines[:3])  # as a kill in the second batch leaves it
    assert answered("--resume=auto") == [3, 2] and file.read_text() == whole
    forget("left")
    assert answered("--spin.temperature=0.5") == [3, 3, 2], "another temperature: other answers"


def test_the_pairs_are_the_humans_completion_and_the_policys_own(
    tiny, demos, tmp_path, monkeypatch, capsys
):
    seen, real = [], data.batch_of_step

    def batch_of_step(run, *args):
        batch = real(run, *args)
        seen.append((run.objective.args.beta, batch.examples))
        return batch

    monkeypatch.setattr(data, "batch_of_step", batch_of_step)
    argv = ("--spin.max_iterations=2", "--spin.beta=[0.2,0.7]", "--spin.mix=0.5", "--epochs=1")
    go(tiny, demos, tmp_path, *argv)
    own = [ids_of(tmp_path, i) for i in (1, 2)]
    assert [beta for beta, _ in seen] == [0.2] * 2 + [0.7] * 3
    for beta, examples in seen:
        for e in examples:
            i = int(e.where.rsplit(":", 1)[1]) - 1
            allowed = own if beta == 0.7 else own[:1]
            assert list(e.completions[1]) in [answers[i] for answers in allowed]
            assert e.completions[0][-1] == 0, "the human's ends with EOS"
    said = capsys.readouterr().out
    assert "iteration 2: beta 0.7, 12 pairs" in said, "eight, and half the last's eight"
    assert any(len(ids) == 6 and ids[-1] != 0 for ids in own[0]), "at its limit it has no EOS"


def settings(*argv):
    return parse(spin.Settings, ["--model=m", "--data.train=d", *argv], "", "none")


def test_the_plan_spans_all_iterations():
    cfg = settings("--batch_size=10", "--epochs=3")
    plans = iteration_plans(cfg, [47, 47 + 23, 47 + 23])
    made = [(p.per_epoch, p.begin, p.end, p.total) for p in plans]
    assert made == [(4, 0, 12, 54), (7, 12, 33, 54), (7, 33, 54, 54)]
    plans = iteration_plans(dataclasses.replace(cfg, max_steps=20), [47, 47 + 23, 47 + 23])
    assert [(p.begin, p.end, p.total) for p in plans] == [(0, 12, 20), (12, 20, 20)]


def test_validation_is_the_likelihood_of_the_demonstrations(tiny, demos, tmp_path):
    go(tiny, demos, tmp_path, f"--data.val={demos}", "--spin.max_iterations=1", "--optim.lr=0")
    rows = (tmp_path / "val.csv").read_text().splitlines()
    assert rows[0] == "step,loss"
    limits = Data(train="", max_prompt=64, max_completion=64)
    examples = load_examples(str(demos), Tokenizer(tiny), "demonstrations", limits).examples
    gpt = model.load_model(tiny)
    with torch.no_grad():
        logps = [gpt(pack([e.prompt], [e.completions])).item() for e in examples]
    nll = [-logp / len(e.completions[0]) for logp, e in zip(logps, examples)]
    assert float(rows[1].split(",")[1]) == pytest.approx(np.mean(nll), rel=1e-5)


REFUSED = [(["--reference=x"], "the policy as an iteration begins"), (["--spin.beta=[0.1]"], "3 of them"),
           (["--precision=bf16-true", "--lora.rank=2"], "would lose them to rounding"),
           (["--spin.mix=2"], "mix"),
           (["--spin.beta=0"], "above 0")]  # fmt: skip


@pytest.mark.parametrize("argv,word", REFUSED)
def test_what_cannot_be_meant_is_refused(argv, word):
    with pytest.raises(BadInput, match=word):
        settings(*argv)
