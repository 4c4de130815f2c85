"""DPO, IPO, RPO: losses by hand and against recorded numbers; the same loop and guarantees."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PARITY, ranks, train
from models import gpt2_from_hf
from safetensors.torch import load_file
from test_kto import POLICY, REF, Table, sigmoid, trainer_of
from test_kto import score as score_batch
from test_step import assert_equal, start

import dpo
import model
from data import make_batch
from records.examples import Example
from runs.errors import BadInput

CASES = {case["name"]: case for case in json.loads((PARITY / "dpo.json").read_text())}


def pair(prompt, chosen, rejected, rewards=(None, None)):
    prompt, *completions = (np.array(x, "int32") for x in (prompt, chosen, rejected))
    return Example(prompt, tuple(completions), True, rewards, "x:1")


def score(args, policy, reference, examples):
    objective = dpo.DPO(args)
    batch = make_batch(trainer_of(objective).run, examples, objective)
    return score_batch(objective, policy, reference, batch)[1:]


@pytest.mark.parametrize("name", CASES)
def test_it_matches_another_implementations_recorded_numbers(name):
    case = CASES[name]
    policy, reference = model.load_model(PARITY / "policy"), model.load_model(PARITY / "ref")
    fields = ("input_ids", "attention_mask", "completion_mask")
    ids, mask, on = (np.array(case["batch"][k]) for k in fields)
    n = len(ids) // 2  # the chosen rows, then the rejected ones
    cut = [(ids[i][(mask[i] == 1) & (on[i] == 0)], ids[i][on[i] == 1]) for i in range(2 * n)]
    examples = [pair(cut[i][0], cut[i][1], cut[i + n][1]) for i in range(n)]
    kw = dict(beta=case["settings"]["beta"], average_logps=name == "ipo")
    args = dpo.DPOSettings(loss={"sigmoid": "dpo"}.get(name, name), **kw)
    columns, row = score(args, policy, reference, examples)
    logps = columns["logps/chosen"].tolist() + columns["logps/rejected"].tolist()
    recorded = case["trl"]["chosen_logps"] + case["trl"]["rejected_logps"]
    assert logps == pytest.approx(recorded, abs=1e-4)
    norm = torch.cat([p.grad.flatten() for p in policy.parameters()]).norm().item()
    # ipo squares a difference of log-probs of about -100, which float32 has to 1e-5
    assert row["loss"] == pytest.approx(case["fp64"]["loss"], rel=2e-6, abs=1e-5)
    assert norm == pytest.approx(case["fp64"]["grad_norm"], rel=1e-4)
    if name == "sigmoid":
        state: dict = {}
        gpt2_from_hf(None, state, load_file(PARITY / "dpo_grads_sigmoid.safetensors"))
        for n, p in policy.unique_parameters().items():
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


EXAMPLES = [pair([9], [0], [1, 1], (0.9, 0.2)), pair([9, 8], [2] * 3, [3] * 4)]


def test_margins_rewards_and_the_sft_term_by_hand():
    torch.set_default_dtype(torch.float64)
    args = dpo.DPOSettings(beta=0.2, sft_loss_weight=0.3, preference_loss_weight=0.6)
    columns, row = score(args, Table(POLICY), Table(REF), EXAMPLES)
    r = [[0.5, 2 * -0.5], [3 * 0.1, 4 * 0.75]]
    h = [r[0][0] - r[0][1], r[1][0] - r[1][1]]
    assert columns["h"].tolist() == pytest.approx(h)
    nll = (1.0 + 9.0) / 2
    preference = -sum(math.log(sigmoid(0.2 * x)) for x in h) / 2
    assert row["preference_loss"] == pytest.approx(preference)
    assert row["sft_loss"] == pytest.approx(nll)
    assert row["loss"] == pytest.approx(0.6 * preference + 0.3 * nll)
    assert row["rewards/chosen"] == pytest.approx(0.2 * (0.5 + 0.3) / 2)
    assert row["rewards/rejected"] == pytest.approx(0.2 * (-1 + 3) / 2)
    assert row["rewards/margins"] == pytest.approx(0.2 * sum(h) / 2)
    assert row["accuracy"] == 0.5
    assert row["logps/chosen"] == pytest.approx((-1 - 9) / 2)
    assert row["logps/rejected"] == pytest.approx((-5 - 2) / 2)


def test_a_records_weight_multiplies_its_whole_loss():
    torch.set_default_dtype(torch.float64)
    args = dpo.DPOSettings(beta=0.2, sft_loss_weight=0.3, preference_loss_weight=0.6)
    weighted = [e._replace(weight=w) for e, w in zip(EXAMPLES, (2.5, 0.0))]
    columns, _ = score(args, Table(POLICY), Table(REF), weighted)
    preference = [-math.log(sigmoid(0.2 * h)) for h in (1.5, 0.3 - 3)]
    assert columns["preference_loss"].tolist() == pytest.approx(preference)
    assert columns["sft_loss"].tolist() == pytest.approx([1.0, 9.0])
    total = [2.5 * (0.6 * preference[0] + 0.3 * 1.0), 0.0]
    assert columns["loss"].tolist() == pytest.approx(total)


def test_average_logps_divides_each_completion_by_its_own_length():
    torch.set_default_dtype(torch.float64)
    args = dpo.DPOSettings(average_logps=True)
    columns, row = score(args, Table(POLICY), Table(REF), EXAMPLES)
    assert columns["h"].tolist() == pytest.approx([0.5 + 0.5, 0.1 - 0.75])
    assert row["sft_loss"] == pytest.approx((1.0 + 3.0) / 2)
    args = dpo.DPOSettings(average_logps=True, sft_average_logps=False)
    _, row = score(args, Table(POLICY), Table(REF), EXAMPLES)
    assert row["sft_loss"] == pytest.approx((1.0 + 9.0) / 2)


def test_a_records_rewards_win_over_the_defaults():
    torch.set_default_dtype(torch.float64)
    rewards = dict(gt_reward_scale=2.0, chosen_reward=0.8, rejected_reward=-0.1)
    args = dpo.DPOSettings(loss="rpo_sq", beta=0.2, **rewards)
    columns, _ = score(args, Table(POLICY), Table(REF), EXAMPLES)
    by_hand = [(0.2 * 1.5 - 2 * 0.7) ** 2, (0.2 * -2.7 - 2 * 0.9) ** 2]
    assert columns["preference_loss"].tolist() == pytest.approx(by_hand)
    _, row = score(args, Table(POLICY), Table(POLICY), EXAMPLES)
    assert row["preference_loss"] == pytest.approx((1.4**2 + 1.8**2) / 2)


@pytest.mark.parametrize("loss", dpo.LOSSES)
def test_the_known_value_at_the_start_is_what_equal_models_give(loss):
    torch.set_default_dtype(torch.float64)
    args = dpo.DPOSettings(loss=loss, beta=0.5, gt_reward_scale=2.0)
    _, row = score(args, Table(POLICY), Table(POLICY), EXAMPLES)
    known = (BY_HAND[loss](0.0, 2.0 * 0.7) + BY_HAND[loss](0.0, 2.0 * 1.0)) / 2
    assert row["preference_loss"] == pytest.approx(known, rel=1e-12)


COMMON = ("--batch_size=3", "--max_steps=10", "--epochs=9", "--optim.lr=1e-3", "--dpo.beta=0.3",
          "--save_interval=null", "--dpo.sft_loss_weight=0.01")  # fmt: skip


@pytest.mark.parametrize("precision", ["64-true", "32-true"])
def test_the_cut_is_free_here_too(precision, tiny, pairs, tmp_path):
    def run(n, name, *argv):
        out, argv = tmp_path / name, (f"--precision={precision}", *COMMON, *argv)
        run = ranks(n, lambda rank: train(tiny, pairs, out, *argv, program="dpo"))[0]
        for row in run["rows"]:
            row["kl"] = 0.0  # dpo has none
        return run

    whole, base, double = (
        run(1, "whole", "--micro_batch_size=3"),
        start(tiny),
        precision == "64-true",
    )
    runs = [(1, "one", "--micro_batch_size=1"), (1, "tokens", "--micro_batch_tokens=90")]
    runs.append((2, "ddp", "--strategy=ddp"))
    if not double:
        runs.append((2, "fsdp", "--strategy=fsdp", "--micro_batch_size=1"))
    for n, name, *argv in runs:
        assert_equal(run(n, name, *argv), whole, base, double)


def test_a_pair_of_weight_2_beside_one_of_weight_0_is_that_pair_twice(tiny, pairs, tmp_path):
    records = [json.loads(line) for line in pairs.read_text().splitlines()]
    weighted = [{**records[0], "weight": 2}, {**records[1], "weight": 0.0}, *records[2:]]
    twice = [records[0], records[0], *records[2:]]
    runs, val = [], []
    for name, some in (("weighted", weighted), ("twice", twice)):
        file, out = tmp_path / f"{name}.jsonl", tmp_path / name
        file.write_text("".join(json.dumps(r) + "\n" for r in some))
        argv = ("--batch_size=8", "--epochs=3", "--optim.lr=1e-3", "--precision=64-true",
                "--dpo.sft_loss_weight=0.1")  # fmt: skip
        runs.append(train(tiny, file, out, f"--data.val={file}", *argv, program="dpo"))
        head, *rows = ([*x.split(",")] for x in (out / "val.csv").read_text().splitlines())
        val.append([float(row[head.index("loss")]) for row in rows])
    for name in ("loss", "grad_norm"):
        one, two = ([row[name] for row in run["rows"]] for run in runs)
        assert one == pytest.approx(two, rel=1e-9)
    assert len(val[0]) == 4 and val[0] == pytest.approx(val[1], rel=1e-9), "validation weighs too"
    one, two = (run["rows"][2]["rewards/margins"] for run in runs)
    assert abs(one - two) > 1e-2, "else the two pairs are alike"


def test_it_resumes_bit_for_bit_and_validates_and_takes_another_reference(
    tiny, pairs, tmp_path, monkeypatch
):
    argv = ("--batch_size=3", "--max_steps=5", "--epochs=9", "--optim.lr=1e-3", "--lora.rank=2",
            f"--data.val={pairs}", f"--reference={tiny}", "--precision=32-true")  # fmt: skip
    whole = train(tiny, pairs, tmp_path / "whole", *argv, program="dpo")
    monkeypatch.setattr(dpo.Settings, "seconds", lambda self: 1e-9)
    train(tiny, pairs, tmp_path / "run", *argv, "--max_time=00:00:01", program="dpo")
    monkeypatch.undo()
    run = train(tiny, pairs, tmp_path / "run", *argv, "--resume=auto", program="dpo")
    assert [r["loss"] for r in run["rows"]] == [r["loss"] for r in whole["rows"]]
    assert all(torch.equal(x, whole["weights"][n]) for n, x in run["weights"].items())
    head = (tmp_path / "run" / "val.csv").read_text().split("\n")[0].split(",")
    assert "kl" not in head and {"accuracy", "rewards/margins"} <= set(head)


def test_rated_records_are_refused_with_a_hint(tiny, ratings, tmp_path):
    with pytest.raises(BadInput, match="pairs are needed here"):
        train(tiny, ratings, tmp_path / "run", program="dpo")


def test_kto_and_its_loop_do_not_know_of_dpo():
    for name in ("kto.py", "train.py", "setup.py", "evaluate.py", "data.py"):
        text = Path(dpo.__file__).with_name(name).read_text().lower()
        assert "dpo" not in text.replace("threadpool", ""), name
