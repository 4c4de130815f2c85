"""DPO, IPO, RPO: losses by hand and against recorded numbers; the same loop and guarantees."""

import json
import math

import pytest
import torch
from conftest import PARITY, ranks, train
from test_kto import (
    POLICY,
    REF,
    Seen,
    assert_gradient,
    recorded_ids,
    recorded_row,
    score,
    sigmoid,
)
from test_step import assert_equal, start
from tokens import example

import dpo
from data import Step

CASES = {case["name"]: case for case in json.loads((PARITY / "dpo.json").read_text())}


@pytest.mark.parametrize("name", CASES)
def test_it_matches_another_implementations_recorded_numbers(name, tiny, parity_ref, tmp_path):
    case = CASES[name]
    n = len(case["batch"]["input_ids"]) // 2  # the chosen rows, then the rejected ones
    ids = [recorded_ids(case["batch"], i) for i in range(2 * n)]
    examples = [example(*ids[i], ids[i + n][1]) for i in range(n)]
    loss = {"sigmoid": "dpo"}.get(name, name)
    argv = (
        f"--dpo.loss={loss}",
        f"--dpo.beta={case['settings']['beta']}",
        f"--dpo.average_logps={str(name == 'ipo').lower()}",
    )
    models = (tiny, parity_ref)
    row = recorded_row("dpo_data.jsonl", examples, *models, tmp_path, *argv, program="dpo")
    logps = Seen.columns["logps/chosen"].tolist() + Seen.columns["logps/rejected"].tolist()
    recorded = case["trl"]["chosen_logps"] + case["trl"]["rejected_logps"]
    assert logps == pytest.approx(recorded, abs=1e-4)
    # ipo squares a difference of log-probs of about -100, which float32 has to 1e-5
    assert row["loss"] == pytest.approx(case["fp64"]["loss"], rel=2e-6, abs=1e-5)
    assert row["grad_norm"] == pytest.approx(case["fp64"]["grad_norm"], rel=1e-4)
    if name == "sigmoid":
        assert_gradient(PARITY / "dpo_grads_sigmoid.safetensors")


def bernoulli(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


BY_HAND = {
    "dpo": lambda x, y: -math.log(sigmoid(x)),
    "ipo": lambda x, y: (x / 0.5 - 1) ** 2,  # 1 / (2 * 0.5) = 1
    "rpo_sq": lambda x, y: (x - y) ** 2,
    "rpo_bwd_kl": lambda x, y: bernoulli(sigmoid(y), sigmoid(x)),
    "rpo_fwd_kl": lambda x, y: bernoulli(sigmoid(x), sigmoid(y)),
}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("h", [-7.0, -0.6, 0.0, 0.9, 1.7, 5.5])
@pytest.mark.parametrize("d", [-1.5, 0.4, 2.0])
def test_a_loss_is_its_formula_on_both_sides_of_its_minimum(name, h, d):
    args = dpo.DPOSettings(loss=name, beta=0.5, gt_reward_scale=0.7)
    h_B, d_B = (torch.tensor([x], dtype=torch.float64) for x in (h, d))
    value = dpo.LOSSES[name](h_B, d_B, args)
    assert value.item() == pytest.approx(BY_HAND[name](0.5 * h, 0.7 * d), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["rpo_bwd_kl", "rpo_fwd_kl"])
def test_the_kl_forms_stay_finite_where_a_sigmoid_rounds_to_one(name):
    h, p = torch.tensor([200.0, -200.0, 40.0], requires_grad=True), sigmoid(1.0)
    value = dpo.LOSSES[name](h, torch.tensor([1.0, 1.0, -60.0]), dpo.DPOSettings(beta=1.0))
    value.sum().backward()
    assert value.isfinite().all() and h.grad.isfinite().all()
    backward = p * math.log(p) + (1 - p) * (math.log(1 - p) + 200)
    by_hand = {"rpo_bwd_kl": backward, "rpo_fwd_kl": -math.log(p)}
    assert value[0].item() == pytest.approx(by_hand[name], rel=1e-5)


def by_hand(rewards=(None, None), weights=(1.0, 1.0), policy=POLICY, **args):
    """Columns and metrics of two pairs in float64, of a policy and a reference that are tables."""
    torch.set_default_dtype(torch.float64)
    examples = [example([9], [0], [1, 1], rewards=rewards), example([9, 8], [2] * 3, [3] * 4)]
    examples = [e._replace(weight=w) for e, w in zip(examples, weights)]
    _, columns, row, _ = score(dpo.DPO(dpo.DPOSettings(**args)), policy, REF, Step(examples))
    return columns, row


def test_margins_rewards_weights_and_the_sft_term_by_hand():
    args = dict(beta=0.2, sft_loss_weight=0.3)
    columns, row = by_hand(weights=(2.5, 0.0), **args)
    h = [0.5 - 2 * -0.5, 3 * 0.1 - 4 * 0.75]
    preference = [-math.log(sigmoid(0.2 * x)) for x in h]
    assert columns["h"].tolist() == pytest.approx(h)
    assert columns["preference_loss"].tolist() == pytest.approx(preference)
    assert columns["sft_loss"].tolist() == pytest.approx([1.0, 9.0])
    # a record's weight multiplies its whole loss
    assert row["loss"] == pytest.approx(2.5 * (preference[0] + 0.3 * 1.0) / 2)
    assert row["rewards/chosen"] == pytest.approx(0.2 * (0.5 + 0.3) / 2)
    assert row["rewards/rejected"] == pytest.approx(0.2 * (-1 + 3) / 2)
    assert row["rewards/margins"] == pytest.approx(0.2 * sum(h) / 2)
    assert row["accuracy"] == 0.5
    assert row["logps/chosen"] == pytest.approx((-1 - 9) / 2)
    assert row["logps/rejected"] == pytest.approx((-5 - 2) / 2)


def test_average_logps_divides_each_completion_by_its_own_length():
    columns, row = by_hand(average_logps=True)
    assert columns["h"].tolist() == pytest.approx([0.5 + 0.5, 0.1 - 0.75])
    assert row["sft_loss"] == pytest.approx((1.0 + 3.0) / 2)


def test_a_records_rewards_win_over_the_defaults():
    args = dict(
        loss="rpo_sq", beta=0.2, gt_reward_scale=2.0, chosen_reward=0.8, rejected_reward=-0.1
    )
    columns, _ = by_hand(rewards=(0.9, 0.2), **args)
    expected = [(0.2 * 1.5 - 2 * 0.7) ** 2, (0.2 * -2.7 - 2 * 0.9) ** 2]
    assert columns["preference_loss"].tolist() == pytest.approx(expected)
    _, row = by_hand(policy=REF, **args)  # equal models: h = 0
    assert row["preference_loss"] == pytest.approx(1.8**2) and row["accuracy"] == 0.5


COMMON = ("--batch_size=3", "--max_steps=10", "--optim.lr=1e-3", "--dpo.beta=0.3",
          "--save_interval=null", "--dpo.sft_loss_weight=0.01")  # fmt: skip


def test_the_cut_is_free_here_too(tiny, pairs, tmp_path):
    def run(n, name, *argv):
        argv = ("--precision=64-true", *COMMON, *argv)
        run = ranks(n, lambda _: train(tiny, pairs, tmp_path / name, *argv, program="dpo"))[0]
        for row in run["rows"]:
            row["kl"] = 0.0  # dpo has none
        return run

    whole = run(1, "whole", "--micro_batch_size=3")
    assert_equal(run(1, "one", "--micro_batch_size=1"), whole, start(tiny), True)
    assert_equal(run(2, "ddp", "--strategy=ddp"), whole, start(tiny), True)
