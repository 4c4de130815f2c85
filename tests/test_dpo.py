"""DPO, IPO, RPO: their losses by hand and against recorded numbers, on the same loop with the same guarantees."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import PARITY, ranks, train
from lightning.fabric import Fabric
from safetensors.torch import load_file
from test_kto import POLICY, REF, Table, sigmoid
from test_step import assert_equal, start

import dpo
import model
from data import Example, Micro

CASES = {case["name"]: case for case in json.loads((PARITY / "dpo.json").read_text())}


def pair(prompt, chosen, rejected, rewards=(None, None)):
    arrays = [np.array(x, "int32") for x in (prompt, chosen, rejected)]
    return Example(arrays[0], (arrays[1], arrays[2]), True, rewards, "x:1")


def score(args, policy, reference, examples):
    objective, fabric = dpo.dpo_objective(args), Fabric(accelerator="cpu", devices=1)
    batch, slots = objective.batch(examples), list(range(len(examples)))
    with torch.no_grad():
        base = objective.look(fabric, policy, reference, batch, [Micro(slots, 1.0)])
    rows = batch.rows(slots)
    loss_B, columns = objective.loss(policy(rows), rows.length_BK, batch, slots, base)
    loss_B.mean().backward()
    columns = {k: v.detach().double() for k, v in columns.items()}
    return columns, objective.report(dict(columns), base), objective.at_start(batch)


@pytest.mark.parametrize("name", CASES)
def test_it_matches_another_implementations_recorded_numbers(name):
    case = CASES[name]
    policy, reference = model.load(PARITY / "policy"), model.load(PARITY / "ref")
    ids, mask, on = (np.array(case["batch"][k]) for k in ("input_ids", "attention_mask", "completion_mask"))
    n = len(ids) // 2  # the chosen rows, then the rejected ones
    cut = [(ids[i][(mask[i] == 1) & (on[i] == 0)], ids[i][on[i] == 1]) for i in range(2 * n)]
    examples = [pair(cut[i][0], cut[i][1], cut[i + n][1]) for i in range(n)]
    args = dpo.DPO(loss={"sigmoid": "dpo"}.get(name, name), beta=case["settings"]["beta"], average_logps=name == "ipo")
    columns, line, _ = score(args, policy, reference, examples)
    logps = columns["logps/chosen"].tolist() + columns["logps/rejected"].tolist()
    assert logps == pytest.approx(case["trl"]["chosen_logps"] + case["trl"]["rejected_logps"], abs=1e-4)
    norm = torch.cat([p.grad.flatten() for p in policy.parameters()]).norm().item()
    # ipo squares a difference of log-probs of about -100, which float32 has to 1e-5
    assert line["loss"] == pytest.approx(case["fp64"]["loss"], rel=2e-6, abs=1e-5)
    assert norm == pytest.approx(case["fp64"]["grad_norm"], rel=1e-4)
    if name == "sigmoid":
        state: dict = {}
        model.gpt2_from_hf(None, state, load_file(PARITY / "dpo_grads_sigmoid.safetensors"))
        for n, p in policy.named().items():
            torch.testing.assert_close(p.grad, state[n], atol=1e-6, rtol=1e-4)


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
    args = dpo.DPO(loss=name, beta=0.5, gt_reward_scale=0.7)
    value = dpo.LOSSES[name](*(torch.tensor([x], dtype=torch.float64) for x in (h, d)), args)
    assert value.item() == pytest.approx(BY_HAND[name](0.5 * h, 0.7 * d), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["rpo_bwd_kl", "rpo_fwd_kl"])
def test_the_kl_forms_stay_finite_where_a_sigmoid_rounds_to_one(name):
    h = torch.tensor([200.0, -200.0, 40.0], requires_grad=True)
    value = dpo.LOSSES[name](h, torch.tensor([1.0, 1.0, -60.0]), dpo.DPO(beta=1.0))
    value.sum().backward()
    assert value.isfinite().all() and h.grad.isfinite().all()
    p = sigmoid(1.0)
    by_hand = {"rpo_bwd_kl": p * math.log(p) + (1 - p) * (math.log(1 - p) + 200), "rpo_fwd_kl": -math.log(p)}
    assert value[0].item() == pytest.approx(by_hand[name], rel=1e-5)


EXAMPLES = [pair([9], [0], [1, 1], (0.9, 0.2)), pair([9, 8], [2] * 3, [3] * 4)]


def test_margins_rewards_and_the_sft_term_by_hand(torch_state):
    torch.set_default_dtype(torch.float64)
    args = dpo.DPO(beta=0.2, sft_loss_weight=0.3, preference_loss_weight=0.6)
    columns, line, known = score(args, Table(POLICY), Table(REF), EXAMPLES)
    r = [[0.5, 2 * -0.5], [3 * 0.1, 4 * 0.75]]
    h = [r[0][0] - r[0][1], r[1][0] - r[1][1]]
    assert columns["h"].tolist() == pytest.approx(h)
    nll = (1.0 + 9.0) / 2
    preference = -sum(math.log(sigmoid(0.2 * x)) for x in h) / 2
    assert line["preference_loss"] == pytest.approx(preference) and line["sft_loss"] == pytest.approx(nll)
    assert line["loss"] == pytest.approx(0.6 * preference + 0.3 * nll)
    assert line["rewards/chosen"] == pytest.approx(0.2 * (0.5 + 0.3) / 2)
    assert line["rewards/rejected"] == pytest.approx(0.2 * (-1 + 3) / 2)
    assert line["rewards/margins"] == pytest.approx(0.2 * sum(h) / 2)
    assert line["accuracy"] == 0.5 and known == pytest.approx(math.log(2))
    assert line["logps/chosen"] == pytest.approx((-1 - 9) / 2) and line["logps/rejected"] == pytest.approx((-5 - 2) / 2)


def test_average_logps_divides_each_completion_by_its_own_length(torch_state):
    torch.set_default_dtype(torch.float64)
    columns, line, _ = score(dpo.DPO(average_logps=True), Table(POLICY), Table(REF), EXAMPLES)
    assert columns["h"].tolist() == pytest.approx([0.5 + 0.5, 0.1 - 0.75])
    assert line["sft_loss"] == pytest.approx((1.0 + 3.0) / 2)
    _, line, _ = score(dpo.DPO(average_logps=True, sft_average_logps=False), Table(POLICY), Table(REF), EXAMPLES)
    assert line["sft_loss"] == pytest.approx((1.0 + 9.0) / 2)


def test_a_records_rewards_win_over_the_defaults(torch_state):
    torch.set_default_dtype(torch.float64)
    args = dpo.DPO(loss="rpo_sq", beta=0.2, gt_reward_scale=2.0, chosen_reward=0.8, rejected_reward=-0.1)
    columns, _, known = score(args, Table(POLICY), Table(REF), EXAMPLES)
    by_hand = [(0.2 * 1.5 - 2 * 0.7) ** 2, (0.2 * -2.7 - 2 * 0.9) ** 2]
    assert columns["preference_loss"].tolist() == pytest.approx(by_hand)
    assert known == pytest.approx((1.4**2 + 1.8**2) / 2)


@pytest.mark.parametrize("loss", dpo.LOSSES)
def test_the_known_value_at_the_start_is_what_equal_models_give(loss, torch_state):
    torch.set_default_dtype(torch.float64)
    args = dpo.DPO(loss=loss, beta=0.2, gt_reward_scale=2.0)
    _, line, known = score(args, Table(POLICY), Table(POLICY), EXAMPLES)
    assert line["preference_loss"] == pytest.approx(known, rel=1e-12)


COMMON = ("--batch_size=3", "--max_steps=10", "--epochs=9", "--optim.lr=1e-3", "--dpo.beta=0.3", "--save_interval=null",
          "--dpo.sft_loss_weight=0.01")  # fmt: skip


@pytest.mark.parametrize("precision", ["64-true", "32-true"])
def test_the_cut_is_free_here_too(precision, tiny, pairs, tmp_path):
    def run(n, name, *argv):
        out, argv = tmp_path / name, (f"--precision={precision}", *COMMON, *argv)
        return ranks(n, lambda rank: train(tiny, pairs, out, *argv, program="dpo"))[0]

    whole, base, double = run(1, "whole", "--micro_batch_size=3"), start(tiny), precision == "64-true"
    for row in whole["rows"]:
        row["kl"] = 0.0  # dpo has none
    runs = [(1, "one", "--micro_batch_size=1"), (1, "tokens", "--micro_batch_tokens=90"), (2, "ddp", "--strategy=ddp")]
    if not double:
        runs.append((2, "fsdp", "--strategy=fsdp", "--micro_batch_size=1"))
    for n, name, *argv in runs:
        other = run(n, name, *argv)
        for row in other["rows"]:
            row["kl"] = 0.0
        assert_equal(other, whole, base, double)


def test_it_resumes_bit_for_bit_and_validates_and_takes_another_reference(
    tiny, pairs, tmp_path, monkeypatch, torch_state
):
    argv = ("--batch_size=3", "--max_steps=5", "--epochs=9", "--optim.lr=1e-3", f"--data.val={pairs}", "--lora.rank=2",
            f"--reference={tiny}", "--precision=32-true")  # fmt: skip
    whole = train(tiny, pairs, tmp_path / "whole", *argv, program="dpo")
    monkeypatch.setattr(dpo.Settings, "seconds", lambda self: 1e-9)
    train(tiny, pairs, tmp_path / "run", *argv, "--max_time=00:00:01", program="dpo")
    monkeypatch.undo()
    run = train(tiny, pairs, tmp_path / "run", *argv, "--resume=auto", program="dpo")
    assert [r["loss"] for r in run["rows"]] == [r["loss"] for r in whole["rows"]]
    assert all(torch.equal(x, whole["weights"][n]) for n, x in run["weights"].items())
    head = (tmp_path / "run" / "val.csv").read_text().split("\n")[0]
    assert "kl" not in head.split(",") and {"accuracy", "rewards/margins"} <= set(head.split(","))


def test_rated_records_are_refused_with_a_hint(tiny, ratings, tmp_path):
    with pytest.raises(dpo.BadInput, match="pairs are needed here"):
        train(tiny, ratings, tmp_path / "run", program="dpo")


def test_kto_and_its_loop_do_not_know_of_dpo():
    from pathlib import Path

    source = Path(dpo.__file__).with_name("kto.py").read_text()
    assert "import dpo" not in source and "dpo" not in source.replace("dpo, spin", "").lower().replace("ddp", "")
