"""SPIN: iterations whose reference is the last policy, on the same loop with the same guarantees."""

import json

import numpy as np
import pytest
import torch
from conftest import PARITY, assert_same, killed, ranks, train
from safetensors.torch import load_file

import checkpoint
import model
import spin
from data import pack

RUN = ("--batch_size=4", "--epochs=2", "--optim.lr=1e-3", "--spin.max_iterations=3", "--spin.max_new_tokens=6",
       "--spin.rollout_batch_size=3", "--save_interval=2", "--precision=32-true", "--keep_last=99")  # fmt: skip


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """8 demonstrations."""
    file = tmp_path_factory.mktemp("demos") / "demos.jsonl"
    records = [json.loads(line) for line in (PARITY / "kto_data.jsonl").read_text().splitlines()]
    file.write_text("".join(json.dumps({k: r[k] for k in ("prompt", "completion")}) + "\n" for r in records))
    return file


def go(tiny, demos, out, *argv):
    return train(tiny, demos, out, *RUN, *argv, program="spin")


def weights(out, name):
    return load_file(out / name / "weights.safetensors")


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[n]) for n, x in a.items())


def test_each_iterations_reference_is_the_policy_that_the_last_one_made(tiny, demos, tmp_path, capsys):
    run = go(tiny, demos, tmp_path)
    assert [row["step"] for row in run["rows"]] == list(range(1, 13))
    assert [row["epoch"] for row in run["rows"]][:5] == [0.5, 1.0, 1.5, 2.0, 0.5], "epochs count in each iteration"
    assert equal(weights(tmp_path, "iterations/1"), {n: p.data for n, p in model.load(tiny).named().items()})
    for t, step in ((2, 4), (3, 8)):
        assert equal(weights(tmp_path, f"iterations/{t}"), weights(tmp_path, f"checkpoints/step-{step:08d}"))
        assert abs(run["rows"][step]["rewards/margins"]) < 1e-5 < run["rows"][step - 1]["rewards/margins"]
    said = capsys.readouterr().out
    assert said.count("policy and reference agree to the bit") == 3, "checked in every iteration"


def test_lora_folds_its_branches_and_begins_anew(tiny, demos, tmp_path, capsys):
    run = go(tiny, demos, tmp_path, "--lora.rank=2", "--optim.lr=1e-2")
    bases = [weights(tmp_path, f"iterations/{t}") for t in (1, 2, 3)]
    start = {n: p.data for n, p in model.load(tiny, spin.model.Lora(rank=2)).named().items() if "lora_" not in n}
    assert equal(bases[0], start)
    policy = model.load(tiny, spin.model.Lora(rank=2))
    for t, step in ((1, 4), (2, 8)):  # base and branches as the checkpoint at the iteration's end has them
        with torch.no_grad():
            for name, p in policy.named().items():
                p.copy_(bases[t - 1].get(name, weights(tmp_path, f"checkpoints/step-{step:08d}").get(name, p)))
        plain = model.fold_lora({n: p.data for n, p in policy.named().items()}, policy)
        assert all(torch.equal(x, plain[n.replace(".linear.", ".")]) for n, x in bases[t].items())
        assert not equal(bases[t], bases[t - 1])
        assert abs(run["rows"][step]["rewards/margins"]) < 1e-5
    state = load_file(tmp_path / "checkpoints" / "step-00000006" / "optimizer.safetensors")
    assert {int(x) for n, x in state.items() if n.endswith("|step")} == {2}, "its optimizer restarts with it"
    assert capsys.readouterr().out.count("agree to the bit") == 3


def test_full_fine_tuning_carries_the_optimizers_state_on(tiny, demos, tmp_path):
    go(tiny, demos, tmp_path)
    state = load_file(tmp_path / "checkpoints" / "step-00000006" / "optimizer.safetensors")
    assert {int(x) for n, x in state.items() if n.endswith("|step")} == {6}


@pytest.mark.parametrize("n,strategy,more", [(1, "auto", ()), (1, "auto", ("--lora.rank=2", "--lora.dropout=0.2")),
                                             (2, "ddp", ()), (2, "fsdp", ("--lora.rank=2",))])  # fmt: skip
def test_a_run_killed_while_answering_or_learning_and_resumed_is_the_same_run(n, strategy, more, tiny, demos, tmp_path):
    argv = (f"--strategy={strategy}", "--spin.mix=0.5", f"--data.val={demos}", *more)
    whole, *_ = ranks(n, lambda rank: go(tiny, demos, tmp_path / "whole", *argv))
    for i, (file, lines) in enumerate((("iterations/answers-1.jsonl", 4), ("iterations/answers-2.jsonl", 4),
                                       ("metrics.csv", 8))):  # fmt: skip
        out = tmp_path / str(i)
        killed(n, out, file, lines, lambda rank: go(tiny, demos, out, *argv))
        resumed, *_ = ranks(n, lambda rank: go(tiny, demos, out, "--resume=auto", *argv))
        assert_same(resumed, whole)
        for t in (1, 2, 3):
            name = f"iterations/answers-{t}.jsonl"
            assert (out / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_answers_on_disk_are_not_asked_for_again_unless_something_else_asked(tiny, demos, tmp_path, monkeypatch):
    asked, real = [], spin.generate
    monkeypatch.setattr(
        spin, "generate", lambda f, p, prompts, *a: asked.append(len(prompts)) or real(f, p, prompts, *a)
    )
    go(tiny, demos, tmp_path, "--spin.max_iterations=1")
    assert asked == [3, 3, 2]
    file = tmp_path / "iterations" / "answers-1.jsonl"
    (tmp_path / "metrics.csv").unlink()
    for step in checkpoint.steps(tmp_path / "checkpoints").values():
        step.rename(step.with_name("gone-" + step.name))
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:6]))  # one batch of three, and two of the next: as a kill may leave it
    asked.clear()
    go(tiny, demos, tmp_path, "--spin.max_iterations=1", "--resume=auto")
    assert asked == [3, 2] and file.read_text() == "".join(lines)
    (tmp_path / "metrics.csv").unlink()
    for step in checkpoint.steps(tmp_path / "checkpoints").values():
        step.rename(step.with_name("lost-" + step.name))
    asked.clear()
    go(tiny, demos, tmp_path, "--spin.max_iterations=1", "--spin.temperature=0.5")
    assert asked == [3, 3, 2], "another temperature: other answers"


def test_the_pairs_are_the_humans_completion_and_the_references_own(tiny, demos, tmp_path, monkeypatch, capsys):
    seen, real = [], spin.dpo_objective
    monkeypatch.setattr(
        spin, "dpo_objective",
        lambda args, p: real(args, p)._replace(batch=lambda e: seen.append((args.beta, e)) or real(args, p).batch(e)),
    )  # fmt: skip
    go(tiny, demos, tmp_path, "--spin.max_iterations=2", "--spin.beta=[0.2,0.7]", "--spin.mix=0.5", "--epochs=1")
    own = [[json.loads(x)["ids"] for x in (tmp_path / "iterations" / f"answers-{t}.jsonl").read_text().splitlines()[1:]]
           for t in (1, 2)]  # fmt: skip
    for beta, allowed in ((0.2, [own[0]]), (0.7, own)):
        pairs = [e for b, batch in seen if b == beta for e in batch]
        for e in pairs:
            i = int(e.where.rsplit(":", 1)[1]) - 1
            assert list(e.completions[1]) in [answers[i] for answers in allowed]
            assert e.completions[0][-1] == 0, "the human's ends with EOS"
    assert "iteration 2: beta 0.7, 12 pairs" in capsys.readouterr().out, "eight, and half the last's eight"
    assert any(len(ids) == 6 and ids[-1] != 0 for ids in own[0]), "one that hit its limit has no EOS"


def test_the_plan_spans_all_iterations():
    s = spin.parse(spin.Settings, ["--model=m", "--data.train=d", "--batch_size=10", "--epochs=3", "--spin.mix=0.5",
                                   "--spin.max_iterations=3"], "", None)  # fmt: skip
    made = [(p.per_epoch, p.begin, p.end, p.total) for p in spin.plans(s, 47)]
    assert made == [(4, 0, 12, 54), (7, 12, 33, 54), (7, 33, 54, 54)]
    s.max_steps = 20
    assert [(p.begin, p.end, p.total) for p in spin.plans(s, 47)] == [(0, 12, 20), (12, 20, 20)]


def test_validation_is_the_likelihood_of_the_demonstrations(tiny, demos, tmp_path):
    go(tiny, demos, tmp_path, f"--data.val={demos}", "--spin.max_iterations=1", "--optim.lr=0")
    rows = (tmp_path / "val.csv").read_text().splitlines()
    assert rows[0] == "step,loss"
    examples, _ = spin_data(tiny, demos)
    gpt = model.load(tiny)
    with torch.no_grad():
        nll = [-(gpt(pack([e.prompt], [e.completions])).item()) / len(e.completions[0]) for e in examples]
    assert float(rows[1].split(",")[1]) == pytest.approx(np.mean(nll), rel=1e-5)


def spin_data(tiny, demos):
    from data import Tokenizer, load

    return load(str(demos), Tokenizer(tiny), "demos", 64, 64)


def test_offloading_changes_nothing(tiny, demos, tmp_path):
    assert_same(go(tiny, demos, tmp_path / "a", "--spin.offload=true"), go(tiny, demos, tmp_path / "b"))


@pytest.mark.parametrize("argv,word", [(["--reference=x"], "own last self"), (["--spin.beta=[0.1]"], "3 of them"),
                                       (["--spin.offload=true", "--strategy=fsdp"], "fsdp"), (["--spin.mix=2"], "mix"),
                                       (["--spin.beta=0"], "above 0")])  # fmt: skip
def test_what_cannot_be_meant_is_refused(argv, word):
    with pytest.raises(spin.BadInput, match=word):
        spin.parse(spin.Settings, ["--model=m", "--data.train=d", *argv], "", None)
