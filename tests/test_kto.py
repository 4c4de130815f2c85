"""The objective: the loss by hand and against another implementation's recorded numbers, and its metrics."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import PARITY
from lightning.fabric import Fabric
from safetensors.torch import load_file

import kto
import model
import tell
from data import Batch, Example, Micro

CASES = {case["name"]: case for case in json.loads((PARITY / "kto.json").read_text())}


def example(prompt, completion, label, where="x:1"):
    return Example(np.array(prompt, "int32"), (np.array(completion, "int32"),), label, (1.0, 0.0), where)


def recorded_batch(batch, pairs: bool) -> Batch:
    """The recorded examples, each with the recorded mismatched pair."""

    def cut(i, name):
        ids, mask, on = (
            np.array(batch[f"{name}{field}"][i]) for field in ("input_ids", "attention_mask", "completion_mask")
        )
        return ids[(mask == 1) & (on == 0)], ids[on == 1]

    n = len(batch["label"])
    examples = [example(*cut(i, ""), bool(batch["label"][i])) for i in range(n)]
    partners = None
    if pairs:
        partners = [(i - 1) % n for i in range(n)]
        for i, j in enumerate(partners):  # it rotates the other way round: (x1, yn), (x2, y1), ...
            prompt, completion = cut(i, "KL_")
            assert (prompt == examples[i].prompt).all() and (completion == examples[j].completions[0]).all()
    return Batch(examples, partners, torch.tensor([e.label for e in examples]), False)


def score(objective, policy, reference, batch):
    """One step's look and learn on one device, with the gradient left in the policy."""
    fabric, micro = Fabric(accelerator="cpu", devices=1), Micro(list(range(len(batch.examples))), 1.0)
    with torch.no_grad():
        base = objective.look(fabric, policy, reference, batch, [micro])
    rows = batch.rows(micro.slots)
    loss_B, columns = objective.loss(policy(rows), rows.length_BK, batch, micro.slots, base)
    loss_B.mean().backward()
    columns = {k: v.detach().double() for k, v in (base.columns | columns).items()}
    return base, columns, objective.report(columns, base)


@pytest.mark.parametrize("name", CASES)
def test_it_matches_another_implementations_recorded_numbers(name):
    case = CASES[name]
    names = ("policy", "ref") if not case["swap_policy_and_ref"] else ("ref", "policy")
    policy, reference = (model.load(PARITY / n) for n in names)
    chosen = {k: v for k, v in case["settings"].items() if "weight" in k or k == "beta"}
    args = kto.KTO(loss=case["settings"].get("loss_type", "kto"), **chosen)
    recorded = case["batches"][0]
    pairs = args.loss == "kto"
    batch = recorded_batch(recorded["batch"], pairs)
    base, columns, line = score(kto.kto_objective(args), policy, reference, batch)
    exact, trl = recorded["fp64"], recorded["trl"]
    norm = torch.cat([p.grad.flatten() for p in policy.parameters()]).norm().item()
    assert columns["logp"].tolist() == pytest.approx(exact["policy_logps"], abs=1e-4)
    assert base.ref_logp_GK[:, 0].tolist() == pytest.approx(exact["ref_logps"], abs=1e-4)
    assert (args.beta * columns["logratio"]).tolist() == pytest.approx(trl["rewards"], abs=1e-4)
    assert line["loss"] == pytest.approx(exact["loss"], abs=1e-5)
    assert norm == pytest.approx(exact["grad_norm"], rel=1e-4)
    if pairs:
        assert line["kl"] == pytest.approx(exact["kl"], abs=1e-4)
    if name == "default":
        assert exact["kl"] > 0, "else the clamp hides a wrong mean"
        state: dict = {}
        model.gpt2_from_hf(None, state, load_file(PARITY / "kto_grads_default.safetensors"))
        for n, p in policy.named().items():
            torch.testing.assert_close(p.grad, state[n], atol=1e-6, rtol=1e-4)


R = torch.tensor([3.0, -2.0, 0.5, -1.0], dtype=torch.float64)
GOOD = torch.tensor([True, True, False, False])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_the_loss_is_equation_8_by_hand():
    args = kto.KTO(beta=0.5, desirable_weight=1.25, undesirable_weight=0.75)
    z = torch.tensor(0.4, dtype=torch.float64)
    by_hand = [
        1.25 * (1 - sigmoid(0.5 * (3.0 - 0.4))),
        1.25 * (1 - sigmoid(0.5 * (-2.0 - 0.4))),
        0.75 * (1 - sigmoid(0.5 * (0.4 - 0.5))),
        0.75 * (1 - sigmoid(0.5 * (0.4 - -1.0))),
    ]
    assert kto.kto_loss(R, z, GOOD, args).tolist() == pytest.approx(by_hand, rel=1e-12)


def test_without_pairs_it_is_apo_zero_by_hand():
    args = kto.KTO(loss="apo_zero_unpaired", beta=0.5, desirable_weight=1.25, undesirable_weight=0.75)
    by_hand = [1.25 * (1 - sigmoid(1.5)), 1.25 * (1 - sigmoid(-1.0)), 0.75 * sigmoid(0.25), 0.75 * sigmoid(-0.5)]
    assert kto.kto_loss(R, torch.tensor(0.0), GOOD, args).tolist() == pytest.approx(by_hand, rel=1e-12)


class Table(torch.nn.Module):
    """A stand-in for a model: the log-prob of a completion is looked up by its first token, times its length."""

    def __init__(self, values):
        super().__init__()
        self.values = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def forward(self, rows):
        first = torch.cat([torch.tensor([True]), rows.segment_T[1:] != rows.segment_T[:-1]])
        K = rows.length_BK.shape[1]
        return self.values[rows.target_T[first]].view(-1, K) * rows.length_BK


def tables(**kw):
    """Four examples with completions of 1, 2, 3, 4 tokens that begin with tokens 0, 1, 2, 3; nothing symmetric."""
    examples = [example([9, i], [i] * (i + 1), label) for i, label in enumerate([True, False, True, True])]
    args = kto.KTO(beta=0.1, **kw)
    objective = kto.kto_objective(args)
    return objective, objective.batch(examples)


POLICY, REF = [-1.0, -2.5, -3.0, -0.5], [-1.5, -2.0, -3.1, -1.25]


def test_z_is_the_mean_over_mismatched_pairs_and_then_the_clamp(torch_state):
    torch.set_default_dtype(torch.float64)
    objective, batch = tables()
    assert batch.partners == [1, 2, 3, 0]
    per_pair = [2 * -0.5, 3 * 0.1, 4 * 0.75, 1 * 0.5]  # length x (policy - ref) of the borrowed completion
    by_hand = sum(per_pair) / 4
    assert by_hand > 0.1 and min(per_pair) < -0.1, "else clamping each one first would not show"
    base, _, line = score(objective, Table(POLICY), Table(REF), batch)
    assert base.z.item() == pytest.approx(by_hand, rel=1e-12)
    assert (line["kl"], line["kl/clamped"], line["kl/pairs"]) == (pytest.approx(by_hand), 0.0, 4)
    assert line["kl/stderr"] == pytest.approx(np.std(per_pair, ddof=1) / 2)
    base, _, line = score(objective, Table(REF), Table(POLICY), batch)
    assert (base.z.item(), line["kl"], line["kl/clamped"]) == (0.0, 0.0, 1.0)


def test_an_example_without_partner_leaves_the_mean_and_is_counted(torch_state):
    torch.set_default_dtype(torch.float64)
    objective, batch = tables()
    batch = batch._replace(partners=[2, -1, 3, -1])
    base, _, line = score(objective, Table(POLICY), Table(REF), batch)
    assert base.z.item() == pytest.approx((3 * 0.1 + 4 * 0.75) / 2) and line["kl/pairs"] == 2
    base, _, line = score(objective, Table(POLICY), Table(REF), batch._replace(partners=[-1] * 4))
    assert base.z.item() == 0 and line["kl/pairs"] == 0


def test_average_logps_divides_r_and_z_by_the_scored_tokens(torch_state):
    torch.set_default_dtype(torch.float64)
    objective, batch = tables(average_logps=True)
    base, columns, _ = score(objective, Table(POLICY), Table(REF), batch)
    assert base.z.item() == pytest.approx((-0.5 + 0.1 + 0.75 + 0.5) / 4)
    assert columns["logratio"].tolist() == pytest.approx([0.5, -0.5, 0.1, 0.75])


@pytest.mark.parametrize("average", [None, False, True])
@pytest.mark.parametrize("sft_average", [None, False, True])
def test_the_sft_term_is_a_mean_over_the_desirable_without_class_weights(average, sft_average, torch_state):
    torch.set_default_dtype(torch.float64)
    average = bool(average)
    kw = dict(average_logps=average, sft_average_logps=sft_average, sft_loss_weight=0.7, preference_loss_weight=0.3)
    objective, batch = tables(**kw, desirable_weight=3.0, undesirable_weight=2.0)
    policy = Table(POLICY)
    _, columns, line = score(objective, policy, Table(REF), batch)
    divide = average if sft_average is None else sft_average
    nll = [1.0, 3.0 * (1 if divide else 3), 0.5 * (1 if divide else 4)]  # the three desirable ones
    assert line["sft_loss"] == pytest.approx(sum(nll) / 3)
    assert line["loss"] == pytest.approx(0.3 * line["preference_loss"] + 0.7 * sum(nll) / 3)
    assert columns["sft_loss"][1] == 0, "an undesirable completion is no demonstration"


def test_the_sft_term_is_zero_when_nothing_is_desirable(torch_state):
    torch.set_default_dtype(torch.float64)
    objective, batch = tables(sft_loss_weight=1.0)
    batch = batch._replace(desirable_G=torch.zeros(4, dtype=torch.bool))
    _, _, line = score(objective, Table(POLICY), Table(REF), batch)
    assert line["sft_loss"] == 0 and math.isfinite(line["loss"])
    assert line["rewards/chosen"] is None and line["auc"] is None


def test_z_and_the_reference_get_no_gradient(torch_state):
    torch.set_default_dtype(torch.float64)
    objective, batch = tables()
    policy, reference = Table(POLICY), Table(REF)
    _, columns, _ = score(objective, policy, reference, batch)
    assert reference.values.grad is None
    z = (2 * -0.5 + 3 * 0.1 + 4 * 0.75 + 1 * 0.5) / 4
    for i, (r, length, good) in enumerate(zip([0.5, -1.0, 0.3, 3.0], [1, 2, 3, 4], [1, -1, 1, 1])):
        s = sigmoid(0.1 * good * (r - z))
        assert policy.values.grad[i].item() == pytest.approx(-0.1 * good * s * (1 - s) * length / 4, rel=1e-9)


def test_the_metrics_are_those_of_the_field(torch_state):
    torch.set_default_dtype(torch.float64)
    objective, batch = tables()
    _, _, line = score(objective, Table(POLICY), Table(REF), batch)
    r, z = [0.5, -1.0, 0.3, 3.0], line["kl"]
    assert line["rewards/chosen"] == pytest.approx(0.1 * (0.5 + 0.3 + 3.0) / 3)
    assert line["rewards/rejected"] == pytest.approx(-0.1)
    assert line["rewards/margins"] == pytest.approx(line["rewards/chosen"] - line["rewards/rejected"])
    assert line["rewards/mean"] == pytest.approx(0.1 * sum(r) / 4)
    assert line["rewards/std"] == pytest.approx(0.1 * np.std(r, ddof=1))
    assert line["logps/chosen"] == pytest.approx((-1 - 9 - 2) / 3) and line["logps/rejected"] == pytest.approx(-5)
    assert line["accuracy"] == 1.0 and 0.3 < z < 3.0
    assert line["accuracy/about_z"] == pytest.approx(2 / 4), "0.5 and 0.3 are below z, -1 is too, 3 is above"


def test_auc_is_the_chance_that_a_desirable_reward_is_above_an_undesirable_one():
    high, low = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0])
    assert tell.auc(high, low) == pytest.approx((1 + 1.5 + 2) / 6)
    assert tell.auc(low, high) == pytest.approx(1.5 / 6)


def test_one_class_only_is_right_and_finite(torch_state):
    torch.set_default_dtype(torch.float64)
    for label in (True, False):
        objective, batch = tables()
        batch = batch._replace(desirable_G=torch.full((4,), label))
        base, columns, line = score(objective, Table(POLICY), Table(REF), batch)
        sign = 1 if label else -1
        by_hand = [1 - sigmoid(0.1 * sign * (r - base.z.item())) for r in (0.5, -1.0, 0.3, 3.0)]
        assert line["loss"] == pytest.approx(sum(by_hand) / 4)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_where_policy_and_reference_agree_the_loss_is_half_the_mean_weight(loss, torch_state):
    torch.set_default_dtype(torch.float64)
    objective, batch = tables(loss=loss, desirable_weight=1.5, undesirable_weight=0.5)
    assert objective.at_start(batch) == (3 * 1.5 + 0.5) / 4 / 2
    base, _, line = score(objective, Table(POLICY), Table(POLICY), batch)
    assert base.z == 0 and line["preference_loss"] == pytest.approx(objective.at_start(batch))


def test_the_check_at_start_refuses_another_reference(tiny):
    policy, other = model.load(tiny), model.load(PARITY / "ref")
    examples = [example([5, 6, 7], [i, 9, 0], i % 2 == 0) for i in range(4)]
    fabric, objective = Fabric(accelerator="cpu", devices=1), kto.kto_objective(kto.KTO())
    kto.check_start(fabric, policy, model.load(tiny), objective, examples)
    with pytest.raises(kto.Failed, match="not the model we start from"):
        kto.check_start(fabric, policy, other, objective, examples)
