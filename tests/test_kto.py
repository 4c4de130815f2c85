"""The objective: its loss by hand and against another implementation's numbers; its metrics."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tokens
import torch
from conftest import PARITY, assert_same, ranks, result, rows_of, start, train
from safetensors.torch import load_file
from tiny_models import gpt2_from_hf
from tokens import example

import evaluation
import kto
from data import Step
from models import load
from objective import Z
from packing import Part, pack
from records.examples import Example
from trainer import Trainer

CASES = {case["name"]: case for case in json.loads((PARITY / "kto.json").read_text())}


class Seen(Trainer):
    """Keeps the last step: its examples, columns and gradient."""

    examples: list[Example] = []
    columns: dict[str, torch.Tensor] = {}
    gradient_of: dict[str, torch.Tensor] = {}

    def train_step(self, step, *rest):
        Seen.examples = step.examples
        return super().train_step(step, *rest)

    def metrics_row(self, columns, z):
        Seen.columns = columns
        return super().metrics_row(columns, z)

    def optimizer_step(self, plan):
        parameters = self.run.policy.unique_parameters()
        Seen.gradient_of = {name: p.grad.clone() for name, p in parameters.items()}
        return super().optimizer_step(plan)


def tokens_of(text: str) -> bytes:
    return np.array(tokens.ids_of(tokens.plain(), text), "int32").tobytes()


def recorded_ids(batch: dict, i: int, name: str = ""):
    """A prompt and a completion that the other implementation recorded."""
    fields = ("input_ids", "attention_mask", "completion_mask")
    ids, mask, on = (np.array(batch[f"{name}{field}"][i]) for field in fields)
    return ids[(mask == 1) & (on == 0)], ids[on == 1]


def recorded_row(file: str, examples, model: Path, reference: Path, out: Path, *argv, **given):
    """A run of one step on the other implementation's records, in its order. -> its row"""
    records = [json.loads(x) for x in (PARITY / file).read_text().splitlines()]
    by_prompt = {tokens_of(r["prompt"]): r for r in records}
    ordered = [by_prompt[e.prompt_key] for e in examples]
    if "label" in ordered[0]:
        ordered = [r | {"label": e.label} for r, e in zip(ordered, examples)]
    data = tokens.write(out / "recorded.jsonl", *ordered)
    argv += (f"--reference={reference}", f"--batch_size={len(examples)}", "--data.shuffle=false")
    argv += ("--optim.clip=null", "--precision=32-true")
    (row,) = train(model, data, out / "run", *argv, trainer=Seen, **given)["rows"]
    for e, expected in zip(Seen.examples, examples, strict=True):
        assert e.key == expected.key and e.label == expected.label
    return row


class Rotated(kto.KTO):
    """The other implementation rotates completions the other way round: (x1, yn), (x2, y1), ..."""

    def mismatched_completions(self, examples):
        return [examples[i - 1].completions[0] for i in range(len(examples))]


@pytest.mark.parametrize("name", CASES)
def test_it_matches_another_implementations_recorded_numbers(name, tiny, parity_ref, tmp_path):
    """A run on its first four records, with its pairs."""
    case = CASES[name]
    models = (parity_ref, tiny) if case["swap_policy_and_ref"] else (tiny, parity_ref)
    recorded = case["batches"][0]
    batch, exact, trl = recorded["batch"], recorded["fp64"], recorded["trl"]
    labels = batch["label"]
    examples = [example(*recorded_ids(batch, i), label=x) for i, x in enumerate(labels)]
    if "KL_input_ids" in batch:
        for i, completion in enumerate(Rotated.mismatched_completions(None, examples)):
            pair = (examples[i].prompt, completion)
            assert all(map(np.array_equal, pair, recorded_ids(batch, i, "KL_")))
    settings = {k: v for k, v in case["settings"].items() if "weight" in k or k == "beta"}
    settings["loss"] = case["settings"].get("loss_type", "kto")
    argv = [f"--kto.{k}={v}" for k, v in settings.items()]
    row = recorded_row("kto_data.jsonl", examples, *models, tmp_path, *argv, objective=Rotated)
    logp, logratio = Seen.columns["logp"], Seen.columns["logratio"]
    assert logp.tolist() == pytest.approx(exact["policy_logps"], abs=1e-4)
    assert (logp - logratio).tolist() == pytest.approx(exact["ref_logps"], abs=1e-4)
    rewards = case["settings"]["beta"] * logratio
    assert rewards.tolist() == pytest.approx(trl["rewards"], abs=1e-4)
    assert row["loss"] == pytest.approx(exact["loss"], abs=1e-5)
    assert row["grad_norm"] == pytest.approx(exact["grad_norm"], rel=1e-4)
    if settings["loss"] == "kto":
        assert row["kl"] == pytest.approx(exact["kl"], abs=1e-4)
    if name == "default":
        assert exact["kl"] > 0, "else the clamp hides a wrong mean"
        assert_gradient(PARITY / "kto_grads_default.safetensors")


def assert_gradient(file) -> None:
    """The last step's gradient is the one in this file, by transformers' names."""
    expected: dict = {}
    gpt2_from_hf(None, expected, load_file(file))
    for name, gradient in Seen.gradient_of.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def score(objective, policy: list, reference: list, step: Step):
    """What an objective makes of a step, in float64. policy, reference: the log-prob of each token of a
    completion, by the completion's first token; that of policy has a gradient afterwards.
    -> z, columns, metrics, the gradient of the step's loss by `policy`"""
    batch = step.micro_batch(Part(list(range(step.size))))
    values = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    constants = torch.tensor(reference, dtype=torch.float64)

    def logps(values, packed) -> torch.Tensor:
        return values[packed.target_T[packed.first_target_BK]] * packed.length_BK

    logratio_n = torch.zeros(0, dtype=torch.float64)
    if batch.mismatched is not None:
        pairs = [logps(x, batch.mismatched).detach() for x in (values, constants)]
        logratio_n = objective.logratio(*pairs, batch.mismatched.length_BK)[:, 0]
        logratio_n = logratio_n[step.mismatched_index]
    z_G = objective.make_z(logratio_n, step).expand(step.size)
    own = logps(values, batch.packed), logps(constants, batch.packed)
    loss_B, columns = objective.loss(*own, batch, z_G)
    loss_B = loss_B * step.weight
    loss_B.mean().backward()
    columns = {name: x.detach().double() for name, x in {"loss": loss_B, **columns}.items()}
    return z_G[0].item(), columns, objective.metrics(columns, Z(z_G, logratio_n)), values.grad


def tables(labels=(True, False, True, True), **kw):
    """Four examples; completion i is of i + 1 tokens i. Nothing symmetric. From here on in float64."""
    torch.set_default_dtype(torch.float64)
    examples = [example([9, i], [i] * (i + 1), label=x) for i, x in enumerate(labels)]
    objective = kto.KTO(kto.KTOSettings(beta=0.1, **kw))
    return objective, Step(examples, objective.mismatched_completions(examples))


POLICY, REF = [-1.0, -2.5, -3.0, -0.5], [-1.5, -2.0, -3.1, -1.25]
# of the four examples, length x (policy - ref); and the mean over the mismatched pairs
RATIOS, MEAN_Z = [0.5, -1.0, 0.3, 3.0], (2 * -0.5 + 3 * 0.1 + 4 * 0.75 + 1 * 0.5) / 4


def test_z_is_the_mean_over_mismatched_pairs_and_then_the_clamp():
    objective, batch = tables()
    assert [ids[0] for ids in batch.mismatched_completions] == [1, 2, 3, 0]
    assert MEAN_Z > 0.1 and min(RATIOS) < -0.1, "else clamping each one first would not show"
    z, _, row, _ = score(objective, POLICY, REF, batch)
    assert z == pytest.approx(MEAN_Z, rel=1e-12)
    assert (row["kl"], row["kl/clamped"], row["kl/pairs"]) == (pytest.approx(MEAN_Z), 0.0, 4)
    assert row["kl/stderr"] == pytest.approx(np.std(RATIOS, ddof=1) / 2)
    z, columns, row, _ = score(objective, REF, POLICY, batch)
    assert (z, row["kl"], row["kl/clamped"]) == (0.0, 0.0, 1.0)
    for pairs, z in ((0.5, 0.0), (-0.5, 0.2)):
        row = objective.metrics(columns, Z(torch.full((4,), z), torch.full((4,), pairs)))
        assert row["kl/clamped"] == 0.0, "a mean above 0; a z of one's own"


def test_the_metrics_are_those_of_the_field():
    objective, batch = tables()
    _, _, row, _ = score(objective, POLICY, REF, batch)
    chosen, rejected = row["rewards/chosen"], row["rewards/rejected"]
    assert chosen == pytest.approx(0.1 * (0.5 + 0.3 + 3.0) / 3) and rejected == pytest.approx(-0.1)
    assert row["rewards/margins"] == pytest.approx(chosen - rejected)
    assert row["rewards/mean"] == pytest.approx(0.1 * sum(RATIOS) / 4)
    assert row["rewards/std"] == pytest.approx(0.1 * np.std(RATIOS, ddof=1))
    assert row["logps/chosen"] == pytest.approx((-1 - 9 - 2) / 3)
    assert row["logps/rejected"] == pytest.approx(-5)
    assert row["accuracy"] == 1.0


def test_an_example_without_a_pair_leaves_the_mean_and_is_counted():
    objective, batch = tables()
    for partners, by_hand, n in (
        ([2, None, 3, None], (3 * 0.1 + 4 * 0.75) / 2, 2),
        ([None] * 4, 0.0, 0),
    ):
        of_others = [None if j is None else batch.examples[j].completions[0] for j in partners]
        some = Step(batch.examples, of_others)
        z, _, row, _ = score(objective, POLICY, REF, some)
        assert z == pytest.approx(by_hand) and row["kl/pairs"] == n


def test_average_logps_divides_r_and_z_by_the_scored_tokens():
    objective, batch = tables(average_logps=True)
    z, columns, _, _ = score(objective, POLICY, REF, batch)
    assert z == pytest.approx((-0.5 + 0.1 + 0.75 + 0.5) / 4)
    assert columns["logratio"].tolist() == pytest.approx([0.5, -0.5, 0.1, 0.75])


@pytest.mark.parametrize("divides", [True, False])
def test_the_sft_term_is_a_mean_over_the_desirable(divides):
    objective, batch = tables(average_logps=divides)
    _, columns, row, _ = score(objective, POLICY, REF, batch)
    nll = [1.0, 3.0 if divides else 9.0, 0.5 if divides else 2.0]  # the desirable ones
    assert row["sft_loss"] == pytest.approx(sum(nll) / 3)
    assert columns["sft_loss"][1] == 0, "an undesirable completion is no demonstration"


def test_without_a_thumb_up_the_likelihood_is_an_empty_cell_and_not_0():
    objective, batch = tables((False,) * 4, sft_loss_weight=0.5)
    _, _, row, _ = score(objective, POLICY, REF, batch)
    assert row["sft_loss"] is None, "an empty cell: the column stays if the first step has none"
    assert row["loss"] == row["preference_loss"]


def test_loss_and_gradient_are_equation_8_by_hand_and_a_records_weight_multiplies_both_terms():
    """Neither z nor the reference has a gradient; a weight changes neither z nor the columns; class weights do
    not touch the SFT term."""
    kw = dict(desirable_weight=1.25, undesirable_weight=0.75)
    objective, batch = tables(sft_loss_weight=0.7, **kw)
    weights, signs, classes = [2.0, 0.25, 0.0, 3.0], [1, -1, 1, 1], [1.25, 0.75, 1.25, 1.25]
    weighted = [e._replace(weight=w) for e, w in zip(batch.examples, weights)]
    batch = Step(weighted, batch.mismatched_completions)
    z, columns, _, gradient = score(objective, POLICY, REF, batch)
    assert z == pytest.approx(MEAN_Z)
    wrong = [1 - sigmoid(0.1 * s * (r - MEAN_Z)) for s, r in zip(signs, RATIOS)]
    by_hand = [c * x for c, x in zip(classes, wrong)]
    sft = [4 / 3 * x for x in (1.0, 0, 9.0, 2.0)]
    assert columns["preference_loss"].tolist() == pytest.approx(by_hand)
    assert columns["sft_loss"].tolist() == pytest.approx(sft)
    total = [w * (x + 0.7 * y) for w, x, y in zip(weights, by_hand, sft)]
    assert columns["loss"].tolist() == pytest.approx(total)
    for i, (w, c, x, s) in enumerate(zip(weights, classes, wrong, signs)):
        nll = -4 / 3 if s > 0 else 0.0
        slope = w * (i + 1) * (-0.1 * s * c * x * (1 - x) + 0.7 * nll) / 4
        assert gradient[i].item() == pytest.approx(slope, rel=1e-9)


def test_the_loop_multiplies_each_loss_by_the_records_weight(tiny, ratings, tmp_path):
    """At the first step each loss is 0.5, whatever its label."""
    weights = [2.0, 0.25, 0.0, 3.0]
    rows = [json.loads(x) for x in ratings.read_text().splitlines()[:4]]
    rows = [row | {"weight": w} for row, w in zip(rows, weights)]
    data = tokens.write(tmp_path / "weighted.jsonl", *rows)
    (row,) = train(tiny, data, tmp_path / "run", "--batch_size=4")["rows"]
    assert row["loss"] == pytest.approx(0.5 * sum(weights) / 4)
    assert row["preference_loss"] == 0.5


def test_balanced_both_kinds_count_equally_also_after_a_resume_and_on_two_processes(
    tiny, ratings, tmp_path
):
    """By hand: 2 thumbs up and 6 down count as 4 each with the weights 2 and 2/3."""
    rows = [json.loads(x) for x in ratings.read_text().splitlines()[:8]]
    rows = [row | {"label": i < 2} for i, row in enumerate(rows)]
    data = tokens.write(tmp_path / "imbalanced.jsonl", *rows)
    argv = ("--batch_size=8", "--max_steps=3", "--optim.lr=0.01", "--precision=64-true")
    weights = ("--kto.desirable_weight=2", f"--kto.undesirable_weight={4 / 6}")
    balance = "--kto.balance=true"
    expected = train(tiny, data, tmp_path / "by-hand", *argv, *weights)
    assert expected["rows"][-1]["loss"] != expected["rows"][0]["loss"] == pytest.approx(0.5)
    out = tmp_path / "resumed"
    train(tiny, data, out, *argv, balance, "--stop_at=1")
    start("kto", ["--config", out / "settings.yaml", "--stop_at=null", "--resume=auto"])
    assert_same(result(out), expected)
    of_two = tmp_path / "two"
    ranks(2, lambda rank: train(tiny, data, of_two, *argv, balance, "--devices=2") and None)
    for row, own in zip(result(of_two)["rows"], expected["rows"]):
        assert (row["loss"], row["grad_norm"]) == pytest.approx((own["loss"], own["grad_norm"]))
    other_weights = train(
        tiny, data, tmp_path / "other", *argv, balance, "--kto.desirable_weight=3"
    )
    assert_same(other_weights, expected)


def test_kl_own_is_the_mean_of_r_over_the_answers_that_the_policy_has_just_sampled(
    tiny, ratings, tmp_path, monkeypatch
):
    sampled, sample = [], evaluation.generate

    def remember(fabric, policy, prompts, *rest):
        sampled.append((prompts, sample(fabric, policy, prompts, *rest)))
        return sampled[-1][1]

    monkeypatch.setattr(evaluation, "generate", remember)
    argv = ("--batch_size=6", "--max_steps=4", "--optim.lr=0.01", "--eval.samples=0")
    argv += (f"--data.val={ratings}", "--eval.check=demo", "--precision=32-true")
    train(tiny, ratings, tmp_path, *argv)
    first, *_, last = (float(row["kl/own"]) for row in rows_of(tmp_path / "val.csv"))
    prompts, answers = sampled[-1]
    packed = pack(prompts, [(np.array(ids),) for ids in answers])
    policy, reference = (load.load_model(folder) for folder in (tmp_path / "final", tiny))
    with torch.no_grad():
        by_hand = (policy(packed).logps - reference(packed).logps).mean().item()
    assert first == 0 and by_hand > 0.1, "else nothing was learned"
    assert last == pytest.approx(by_hand, rel=1e-4)
