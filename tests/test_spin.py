"""SPIN: iterations whose reference is the last policy; the same loop, the same guarantees."""

import numpy as np
import pytest
import tokens
import torch
from conftest import of_iteration, refused, rows_of, train
from test_forks import saved
from tiny_models import same_weights, with_adapters
from tokens import example

import spin
from data import Step
from infra.devices import set_weights
from infra.parse import parse
from infra.settings import Lora
from models import load
from models.hub import Source
from models.lora import merged_weights
from objective import Z
from packing import pack
from records.tokenizer import Tokenizer
from trainer import Trainer

RUN = ("--batch_size=4", "--epochs=2", "--optim.lr=1e-3", "--spin.max_iterations=3",
       "--spin.max_new_tokens=6", "--spin.rollout_batch_size=3", "--save_interval=2",
       "--precision=32-true", "--keep_last=99")  # fmt: skip


def go(tiny, demos, out, *argv):
    return train(tiny, demos, out, *RUN, *argv, program="spin")


def ids_of(out, i: int) -> list[list[int]]:
    """The answers of iteration i."""
    return [row["ids"] for row in of_iteration(out, i)]


def test_each_iterations_reference_is_the_policy_that_the_last_one_made(
    tiny, demos, tmp_path, capsys
):
    rows = go(tiny, demos, tmp_path)["rows"]
    epochs = [row["epoch"] for row in rows]
    assert epochs == [0.5, 1.0, 1.5, 2.0] * 3, "epochs count in each iteration"
    for end in (4, 8):
        reference = saved(tmp_path, end + 2, "reference")
        assert same_weights(reference, saved(tmp_path, end, "weights"))
        assert abs(rows[end]["rewards/margins"]) < 1e-5 < rows[end - 1]["rewards/margins"]
    said = capsys.readouterr().out
    assert said.count("policy and reference agree to the bit") == 3, "checked in every iteration"
    assert set(map(int, saved(tmp_path, 6, "step").values())) == {6}, "the optimizer carries on"


def test_lora_merges_its_adapters_and_begins_anew(tiny, demos, tmp_path, capsys):
    rows = go(tiny, demos, tmp_path, "--lora.rank=2", "--optim.lr=1e-2")["rows"]
    policy = with_adapters(tiny, Lora(rank=2))
    for end in (4, 8):  # base and adapters as at the iteration's end
        set_weights(policy, saved(tmp_path, end, "weights"))
        merged = merged_weights(policy)
        later = saved(tmp_path, end + 2, "weights")
        base = {n.replace(".linear.", "."): x for n, x in later.items() if "lora_" not in n}
        assert same_weights(base, merged)
        assert abs(rows[end]["rewards/margins"]) < 1e-5
    steps = set(map(int, saved(tmp_path, 6, "step").values()))
    assert steps == {2}, "its optimizer restarts with it"
    assert capsys.readouterr().out.count("agree to the bit") == 3


def test_each_iteration_and_rollout_batch_draws_random_numbers_of_its_own(tiny, demos, tmp_path):
    """A policy that does not move and prompts that are all alike: only the random numbers differ."""
    same = tmp_path / "same.jsonl"
    same.write_text(demos.read_text().splitlines(keepends=True)[0] * 8)
    argv = ("--optim.lr=0", "--batch_size=8", "--epochs=1", "--spin.rollout_batch_size=4")
    go(tiny, same, tmp_path / "run", *argv)
    answers = [ids_of(tmp_path / "run", i) for i in (1, 2, 3)]
    assert len({str(own[at : at + 4]) for own in answers for at in (0, 4)}) == 6


def test_the_pairs_are_the_humans_completion_and_the_policys_own(
    tiny, demos, tmp_path, monkeypatch, capsys
):
    seen, real = [], Trainer.train_step

    def train_step(self, step, *rest):
        seen.append((self.run.objective.args.beta, step.examples))
        return real(self, step, *rest)

    monkeypatch.setattr(Trainer, "train_step", train_step)
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
    assert "iteration 2: beta 0.7, 12 pairs" in capsys.readouterr().out
    second = [list(e.completions[1]) for beta, examples in seen if beta == 0.7 for e in examples]
    assert sum(ids not in own[1] for ids in second) == 4, "and half of the last's eight"
    assert any(len(ids) == 6 and ids[-1] != 0 for ids in own[0]), "at its limit it has no EOS"


def test_the_settings_of_the_loss_reach_dpo():
    args = spin.SPINSettings(average_logps=True, sft_loss_weight=0.5)
    of_dpo = spin.SPIN(args, 0.3).args
    assert (of_dpo.beta, of_dpo.average_logps, of_dpo.sft_loss_weight) == (0.3, True, 0.5)


def test_validation_is_the_likelihood_of_the_demonstrations(tiny, demos, tmp_path):
    go(tiny, demos, tmp_path, f"--data.val={demos}", "--spin.max_iterations=1", "--optim.lr=0")
    first, *_ = rows_of(tmp_path / "val.csv")
    assert [*first] == ["step", "loss"]
    examples, _ = tokens.load(demos, Tokenizer(Source(tiny)), "demonstrations")
    gpt = load.load_model(tiny)
    with torch.no_grad():
        logps = [gpt(pack([e.prompt], [e.completions])).logps.item() for e in examples]
    nll = [-logp / len(e.completions[0]) for logp, e in zip(logps, examples)]
    assert float(first["loss"]) == pytest.approx(np.mean(nll), rel=1e-5)


def test_an_own_answer_that_equals_the_demonstration_counts_one_half():
    """However the step is packed: their log-ratios differ by rounding."""
    step = Step([example([9], [5, 6], own) for own in ([5, 6], [5, 6], [7])])
    logps = torch.tensor([[-1.0 + 1e-6, -1.0], [-1.0 - 1e-6, -1.0], [-1.0, -3.0]])
    objective = spin.SPIN(spin.SPINSettings(), 0.1)
    micro = step.micro_batch(step.parts[0])
    _, columns = objective.loss(logps, torch.zeros(3, 2), micro, torch.zeros(3))
    row = objective.metrics(columns, Z(torch.zeros(3), torch.zeros(0)))
    assert row["accuracy"] == pytest.approx((2 / 2 + 1) / 3)


REFUSED = [("--reference=x", "the policy as an iteration begins"), ("--spin.beta=[0.1]", "3 of them"),
           ("--spin.mix=2", "spin.mix"), ("--spin.beta=0", "PositiveFloat"),
           ("--reference_cache=x", "reference_cache: the answers"),
           ("--lora.rank=2 --lora.quantize=nf4", "a quantised base cannot take")]  # fmt: skip


@pytest.mark.parametrize("argv,word", REFUSED)
def test_what_cannot_be_meant_is_refused(argv, word):
    argv = ["--model=m", "--data.train=d", *argv.split()]
    refused(word, parse, spin.Settings, argv, spin.SPIN, "none")
