"""The objective: its loss by hand and against another implementation's numbers; its metrics."""

import csv
import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PARITY, assert_same, last_of_each, train
from lightning.fabric import Fabric
from models import gpt2_from_hf
from safetensors.torch import load_file

import evaluate
import kto
import model
from data import Batch, Cut, make_batch, pack
from records.examples import Example
from reference import Reference
from runs.checkpoint import RunState
from runs.errors import Failed
from runs.metrics import auc
from train import KL, Trainer

CASES = {case["name"]: case for case in json.loads((PARITY / "kto.json").read_text())}


def example(prompt, completion, label):
    prompt, completion = (np.array(ids, "int32") for ids in (prompt, completion))
    return Example(prompt, (completion,), label, where="x:1")


def recorded_batch(batch, pairs: bool) -> Batch:
    """The recorded examples, each with the recorded mismatched pair."""

    def cut(i, name):
        fields = ("input_ids", "attention_mask", "completion_mask")
        ids, mask, on = (np.array(batch[f"{name}{field}"][i]) for field in fields)
        return ids[(mask == 1) & (on == 0)], ids[on == 1]

    n = len(batch["label"])
    examples = [example(*cut(i, ""), bool(batch["label"][i])) for i in range(n)]
    partners = None
    if pairs:
        partners = [(i - 1) % n for i in range(n)]
        for i, j in enumerate(partners):  # it rotates the other way round: (x1, yn), (x2, y1), ...
            prompt, completion = cut(i, "KL_")
            assert (prompt == examples[i].prompt).all()
            assert (completion == examples[j].completions[0]).all()
    return Batch(examples, partners)


def trainer_of(objective, policy=None, reference=None) -> Trainer:
    """As much of one as a step on one device needs."""
    fabric, data = Fabric(accelerator="cpu", devices=1), SimpleNamespace(score_prompt=False)
    run = SimpleNamespace(
        fabric=fabric,
        objective=objective,
        policy=policy and fabric.setup_module(policy),
        reference=reference and Reference(fabric, None, reference),
        tokenizer=None,
        state=RunState(),
        stop=SimpleNamespace(check=lambda device: None),
        cut=Cut(max_examples=99, max_tokens=None),
        cfg=SimpleNamespace(data=data, strategy="auto"),
    )
    return Trainer(run)


def score(objective, policy, reference, batch):
    """One step of both passes, with the gradient left in the policy. -> NoGrad, columns, metrics"""
    trainer = trainer_of(objective, policy, reference)
    columns, kl = trainer.forward_backward(batch)
    no_grad = trainer.no_gradient_pass(batch, trainer.forward, objective)
    assert no_grad.kl.z.item() == pytest.approx(kl.z.item(), abs=1e-5)
    return no_grad, columns, objective.metrics(columns, kl)


@pytest.mark.parametrize("name", CASES)
def test_it_matches_another_implementations_recorded_numbers(name):
    case = CASES[name]
    names = ("policy", "ref") if not case["swap_policy_and_ref"] else ("ref", "policy")
    policy, reference = (model.load_model(PARITY / n) for n in names)
    chosen = {k: v for k, v in case["settings"].items() if "weight" in k or k == "beta"}
    args = kto.KTOSettings(loss=case["settings"].get("loss_type", "kto"), **chosen)
    recorded = case["batches"][0]
    pairs = args.loss == "kto"
    batch = recorded_batch(recorded["batch"], pairs)
    no_grad, columns, row = score(kto.KTO(args), policy, reference, batch)
    exact, trl = recorded["fp64"], recorded["trl"]
    norm = torch.cat([p.grad.flatten() for p in policy.parameters()]).norm().item()
    assert columns["logp"].tolist() == pytest.approx(exact["policy_logps"], abs=1e-4)
    assert no_grad.ref_logps[:, 0].tolist() == pytest.approx(exact["ref_logps"], abs=1e-4)
    assert (args.beta * columns["logratio"]).tolist() == pytest.approx(trl["rewards"], abs=1e-4)
    assert row["loss"] == pytest.approx(exact["loss"], abs=1e-5)
    assert norm == pytest.approx(exact["grad_norm"], rel=1e-4)
    if pairs:
        assert row["kl"] == pytest.approx(exact["kl"], abs=1e-4)
    if name == "default":
        assert exact["kl"] > 0, "else the clamp hides a wrong mean"
        state: dict = {}
        gpt2_from_hf(None, state, load_file(PARITY / "kto_grads_default.safetensors"))
        for n, p in policy.unique_parameters().items():
            torch.testing.assert_close(p.grad, state[n], atol=1e-6, rtol=1e-4)


R = torch.tensor([3.0, -2.0, 0.5, -1.0], dtype=torch.float64)
GOOD = torch.tensor([True, True, False, False])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_the_loss_is_equation_8_by_hand():
    args = kto.KTOSettings(beta=0.5, desirable_weight=1.25, undesirable_weight=0.75)
    z = torch.tensor(0.4, dtype=torch.float64)
    by_hand = [
        1.25 * (1 - sigmoid(0.5 * (3.0 - 0.4))),
        1.25 * (1 - sigmoid(0.5 * (-2.0 - 0.4))),
        0.75 * (1 - sigmoid(0.5 * (0.4 - 0.5))),
        0.75 * (1 - sigmoid(0.5 * (0.4 - -1.0))),
    ]
    assert kto.kto_loss(R, z, GOOD, args).tolist() == pytest.approx(by_hand, rel=1e-12)


def test_without_pairs_it_is_apo_zero_by_hand():
    weights = dict(desirable_weight=1.25, undesirable_weight=0.75)
    args, z = kto.KTOSettings(loss="apo_zero_unpaired", beta=0.5, **weights), torch.tensor(0.0)
    by_hand = [1.25 * (1 - sigmoid(1.5)), 1.25 * (1 - sigmoid(-1.0))]
    by_hand += [0.75 * sigmoid(0.25), 0.75 * sigmoid(-0.5)]
    assert kto.kto_loss(R, z, GOOD, args).tolist() == pytest.approx(by_hand, rel=1e-12)


class Table(torch.nn.Module):
    """A stand-in for a model: a completion's log-prob is its first token's value x its length."""

    def __init__(self, values):
        super().__init__()
        self.values = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def forward(self, packed, prompt_cache=None):
        return self.values[packed.target_T[packed.first_target_BK]] * packed.length_BK


def tables(labels=(True, False, True, True), **kw):
    """Four examples; completion i is of i + 1 tokens i. Nothing symmetric."""
    examples = [example([9, i], [i] * (i + 1), label) for i, label in enumerate(labels)]
    objective = kto.KTO(kto.KTOSettings(beta=0.1, **kw))
    return objective, make_batch(trainer_of(objective).run, examples, objective)


POLICY, REF = [-1.0, -2.5, -3.0, -0.5], [-1.5, -2.0, -3.1, -1.25]


def test_z_is_the_mean_over_mismatched_pairs_and_then_the_clamp():
    torch.set_default_dtype(torch.float64)
    objective, batch = tables()
    assert batch.partners == [1, 2, 3, 0]
    per_pair = [2 * -0.5, 3 * 0.1, 4 * 0.75, 1 * 0.5]  # length x (policy - ref), of the borrowed
    by_hand = sum(per_pair) / 4
    assert by_hand > 0.1 and min(per_pair) < -0.1, "else clamping each one first would not show"
    no_grad, _, row = score(objective, Table(POLICY), Table(REF), batch)
    assert no_grad.kl.z.item() == pytest.approx(by_hand, rel=1e-12)
    assert (row["kl"], row["kl/clamped"], row["kl/pairs"]) == (pytest.approx(by_hand), 0.0, 4)
    assert row["kl/stderr"] == pytest.approx(np.std(per_pair, ddof=1) / 2)
    no_grad, _, row = score(objective, Table(REF), Table(POLICY), batch)
    assert (no_grad.kl.z.item(), row["kl"], row["kl/clamped"]) == (0.0, 0.0, 1.0)


def test_rounding_before_the_first_update_is_not_logged_as_a_clamp():
    columns = dict.fromkeys(
        ("logratio", "logp", "loss", "preference_loss", "sft_loss"), torch.zeros(4)
    )
    columns["desirable"] = torch.tensor([1.0, 0, 1, 0])
    kl = KL(torch.full((4,), -1e-16), torch.tensor(0.0))
    for r, clamped in ((0.0, 0.0), (0.1, 1.0)):
        row = kto.KTO(kto.KTOSettings()).metrics(columns | {"logratio": torch.full((4,), r)}, kl)
        assert row["kl/clamped"] == clamped and (row["accuracy"] is None) == (r == 0)


def test_an_example_without_partner_leaves_the_mean_and_is_counted():
    torch.set_default_dtype(torch.float64)
    objective, batch = tables()
    some, none = (dataclasses.replace(batch, partners=p) for p in ([2, -1, 3, -1], [-1] * 4))
    no_grad, _, row = score(objective, Table(POLICY), Table(REF), some)
    assert no_grad.kl.z.item() == pytest.approx((3 * 0.1 + 4 * 0.75) / 2) and row["kl/pairs"] == 2
    no_grad, _, row = score(objective, Table(POLICY), Table(REF), none)
    assert no_grad.kl.z.item() == 0 and row["kl/pairs"] == 0


def test_average_logps_divides_r_and_z_by_the_scored_tokens():
    torch.set_default_dtype(torch.float64)
    objective, batch = tables(average_logps=True)
    no_grad, columns, _ = score(objective, Table(POLICY), Table(REF), batch)
    assert no_grad.kl.z.item() == pytest.approx((-0.5 + 0.1 + 0.75 + 0.5) / 4)
    assert columns["logratio"].tolist() == pytest.approx([0.5, -0.5, 0.1, 0.75])


@pytest.mark.parametrize("average", [None, False, True])
@pytest.mark.parametrize("sft_average", [None, False, True])
def test_the_sft_term_is_a_mean_over_the_desirable_without_class_weights(average, sft_average):
    torch.set_default_dtype(torch.float64)
    average = bool(average)
    kw = dict(average_logps=average, sft_average_logps=sft_average, sft_loss_weight=0.7)
    kw |= dict(preference_loss_weight=0.3, desirable_weight=3.0, undesirable_weight=2.0)
    objective, batch = tables(**kw)
    _, columns, row = score(objective, Table(POLICY), Table(REF), batch)
    divide = average if sft_average is None else sft_average
    nll = [1.0, 3.0 * (1 if divide else 3), 0.5 * (1 if divide else 4)]  # the desirable ones
    assert row["sft_loss"] == pytest.approx(sum(nll) / 3)
    assert row["loss"] == pytest.approx(0.3 * row["preference_loss"] + 0.7 * sum(nll) / 3)
    assert columns["sft_loss"][1] == 0, "an undesirable completion is no demonstration"


def test_a_records_weight_multiplies_its_whole_loss_but_neither_z_nor_the_columns():
    torch.set_default_dtype(torch.float64)
    objective, batch = tables(preference_loss_weight=0.3, sft_loss_weight=0.7)
    weights = [2.0, 0.25, 0.0, 3.0]
    weighted = [e._replace(weight=w) for e, w in zip(batch.examples, weights)]
    weighted = dataclasses.replace(batch, examples=weighted)
    policy = Table(POLICY)
    no_grad, columns, _ = score(objective, policy, Table(REF), weighted)
    z = (2 * -0.5 + 3 * 0.1 + 4 * 0.75 + 1 * 0.5) / 4
    assert no_grad.kl.z.item() == pytest.approx(z)
    rs, signs, sft = [0.5, -1.0, 0.3, 3.0], [1, -1, 1, 1], [4 / 3 * x for x in (1.0, 0, 9.0, 2.0)]
    by_hand = [1 - sigmoid(0.1 * s * (r - z)) for s, r in zip(signs, rs)]
    assert columns["preference_loss"].tolist() == pytest.approx(by_hand)
    assert columns["sft_loss"].tolist() == pytest.approx(sft)
    total = [w * (0.3 * x + 0.7 * y) for w, x, y in zip(weights, by_hand, sft)]
    assert columns["loss"].tolist() == pytest.approx(total)
    assert policy.values.grad[2] == 0, "nothing is learned at weight 0"


@pytest.mark.parametrize("up, down", [(1.0, 0.0), (2.0, 0.5)])
def test_weights_of_records_by_class_train_and_validate_as_the_class_weights(
    up, down, tiny, ratings, tmp_path
):
    records = []
    for r in map(json.loads, ratings.read_text().splitlines()):
        both = ("chosen", True), ("rejected", False)
        for k, label in both if "chosen" in r else [("completion", r["label"])]:
            records.append({"prompt": r["prompt"], "completion": r[k], "label": label})
    settings = (f"--kto.desirable_weight={up}", f"--kto.undesirable_weight={down}")
    weighted = [r | {"weight": up if r["label"] else down} for r in records]
    runs, val = [], set()
    for name, some, argv in (("settings", records, settings), ("records", weighted, ())):
        file, out = tmp_path / f"{name}.jsonl", tmp_path / name
        file.write_text("".join(json.dumps(r) + "\n" for r in some))
        argv = (f"--data.val={file}", "--batch_size=8", "--epochs=2", "--optim.lr=1e-3", *argv)
        runs.append(train(tiny, file, out, *argv))
        with open(out / "val.csv") as f:
            val.add(tuple(row["loss"] for row in csv.DictReader(f)))
        for row in runs[-1]["rows"]:
            del row["preference_loss"]  # with the weights of classes, without those of records
    assert_same(*runs)
    assert len(val) == 1


@pytest.mark.parametrize("n_up, is_said", [(2, True), (4, False), (6, False), (0, False)])
def test_a_run_on_more_thumbs_down_than_up_says_which_weights_the_paper_suggests(
    n_up, is_said, tiny, tmp_path, capfd
):
    file = tmp_path / "ratings.jsonl"
    lines = [{"prompt": f"p{i}", "completion": f"c{i}", "label": i < n_up} for i in range(8)]
    file.write_text("".join(json.dumps(r) + "\n" for r in lines))
    train(tiny, file, tmp_path / "run", "--max_steps=1", "--batch_size=8")
    said = capfd.readouterr().out
    advice = "for this balance:\n  kto.desirable_weight 3.00 to 4.00, kto.undesirable_weight 1\n"
    assert (advice in said) == ("KTO paper suggests" in said) == is_said
    assert "None" not in said


def test_the_sft_term_is_zero_when_nothing_is_desirable():
    torch.set_default_dtype(torch.float64)
    objective, batch = tables([False] * 4, sft_loss_weight=1.0)
    _, _, row = score(objective, Table(POLICY), Table(REF), batch)
    assert row["sft_loss"] == 0 and math.isfinite(row["loss"])
    assert row["rewards/chosen"] is None and row["auc"] is None


def test_z_and_the_reference_get_no_gradient():
    torch.set_default_dtype(torch.float64)
    objective, batch = tables()
    policy, reference = Table(POLICY), Table(REF)
    score(objective, policy, reference, batch)
    assert reference.values.grad is None
    z = (2 * -0.5 + 3 * 0.1 + 4 * 0.75 + 1 * 0.5) / 4
    for i, (r, length, good) in enumerate(zip([0.5, -1.0, 0.3, 3.0], [1, 2, 3, 4], [1, -1, 1, 1])):
        s = sigmoid(0.1 * good * (r - z))
        by_hand = -0.1 * good * s * (1 - s) * length / 4
        assert policy.values.grad[i].item() == pytest.approx(by_hand, rel=1e-9)


def test_the_metrics_are_those_of_the_field():
    torch.set_default_dtype(torch.float64)
    objective, batch = tables()
    _, _, row = score(objective, Table(POLICY), Table(REF), batch)
    r, z = [0.5, -1.0, 0.3, 3.0], row["kl"]
    chosen, rejected = row["rewards/chosen"], row["rewards/rejected"]
    assert chosen == pytest.approx(0.1 * (0.5 + 0.3 + 3.0) / 3) and rejected == pytest.approx(-0.1)
    assert row["rewards/margins"] == pytest.approx(chosen - rejected)
    assert row["rewards/mean"] == pytest.approx(0.1 * sum(r) / 4)
    assert row["rewards/std"] == pytest.approx(0.1 * np.std(r, ddof=1))
    assert row["logps/chosen"] == pytest.approx((-1 - 9 - 2) / 3)
    assert row["logps/rejected"] == pytest.approx(-5)
    assert row["accuracy"] == 1.0 and 0.3 < z < 3.0
    about_z = "0.5 and 0.3 are below z, -1 is too, 3 is above"
    assert row["accuracy/about_z"] == pytest.approx(2 / 4), about_z


def test_auc_is_the_chance_that_a_desirable_reward_is_above_an_undesirable_one():
    high, low = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0])
    assert auc(high, low) == pytest.approx((1 + 1.5 + 2) / 6)
    assert auc(low, high) == pytest.approx(1.5 / 6)


def test_one_class_only_is_right_and_finite():
    torch.set_default_dtype(torch.float64)
    for label in (True, False):
        objective, batch = tables([label] * 4)
        no_grad, _, row = score(objective, Table(POLICY), Table(REF), batch)
        sign, z = 1 if label else -1, no_grad.kl.z.item()
        by_hand = [1 - sigmoid(0.1 * sign * (r - z)) for r in (0.5, -1.0, 0.3, 3.0)]
        assert row["loss"] == pytest.approx(sum(by_hand) / 4)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_where_policy_and_reference_agree_the_loss_is_half_the_mean_weight(loss):
    torch.set_default_dtype(torch.float64)
    objective, batch = tables(loss=loss, desirable_weight=1.5, undesirable_weight=0.5)
    no_grad, _, row = score(objective, Table(POLICY), Table(POLICY), batch)
    assert no_grad.kl.z == 0
    assert row["preference_loss"] == pytest.approx((3 * 1.5 + 0.5) / 4 / 2)


def test_the_check_at_start_refuses_another_reference(tiny):
    examples = [example([5, 6, 7], [i, 9, 0], i % 2 == 0) for i in range(4)]
    objective = kto.KTO(kto.KTOSettings())
    for reference, same in (
        (model.load_model(tiny), True),
        (model.load_model(PARITY / "ref"), False),
    ):
        trainer = trainer_of(objective, model.load_model(tiny), reference)
        batch = make_batch(trainer.run, examples, objective)
        if same:
            trainer.check_start(batch)
            continue
        with pytest.raises(Failed, match="not the model that the run starts from"):
            trainer.check_start(batch)


def test_kl_own_is_the_mean_of_r_over_the_answers_that_the_policy_has_just_sampled(
    tiny, ratings, tmp_path, monkeypatch
):
    sampled, sample = [], evaluate.generate

    def remember(fabric, policy, prompts, *rest):
        sampled.append((prompts, sample(fabric, policy, prompts, *rest)))
        return sampled[-1][1]

    monkeypatch.setattr(evaluate, "generate", remember)
    argv = [f"--model={tiny}", f"--data.train={ratings}", f"--data.val={ratings}"]
    argv += [f"--out_dir={tmp_path}", "--batch_size=6", "--max_steps=4", "--optim.lr=0.01"]
    argv += ["--eval.check=demo", "--eval.samples=0", "--progress=false"]
    kto.main(argv)
    with open(tmp_path / "val.csv") as f:
        first, *_, last = (float(row["kl/own"]) for row in csv.DictReader(f))
    prompts, answers = sampled[-1]
    packed = pack(prompts, [(np.array(ids),) for ids in answers])
    policy, reference = (model.load_model(folder) for folder in (tmp_path / "final", tiny))
    with torch.no_grad():
        by_hand = (policy(packed) - reference(packed)).mean().item()
    assert first == 0 and by_hand > 0.1, "else nothing was learned"
    assert last == pytest.approx(by_hand, rel=1e-4)


def test_a_checker_is_asked_at_its_own_interval_between_validations_too(tiny, ratings, tmp_path):
    argv = [f"--model={tiny}", f"--data.train={ratings}", f"--data.val={ratings}"]
    argv += [f"--out_dir={tmp_path}", "--batch_size=6", "--max_steps=7", "--epochs=9"]
    argv += ["--val_interval=3", "--eval.check_interval=2", "--eval.samples=0", "--progress=false"]
    kto.main(argv, checker=lambda answers: [True] * len(answers))
    with open(tmp_path / "val.csv") as f:
        rows = {int(row["step"]): row["checker_accuracy"] for row in csv.DictReader(f)}
    assert list(rows) == [0, 2, 3, 4, 6, 7]
    assert [step for step, share in rows.items() if share == "1.0"] == [0, 2, 4, 6, 7]
    kto.main(
        last_of_each([*argv, f"--out_dir={tmp_path / 'none'}"])
    )  # without one there is nothing to ask
    with open(tmp_path / "none" / "val.csv") as f:
        assert [row["step"] for row in csv.DictReader(f)] == ["0", "3", "6", "7"]
