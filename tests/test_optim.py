"""Steps of a run, the learning rate against numbers by hand, what decays, clipping."""

import re

import pytest
import torch
import transformers
from conftest import refused
from lightning.fabric import Fabric
from tiny_models import GQA, made, with_adapters
from torch import nn

import kto
from infra.optimizer import (
    Plan,
    check_iterations,
    clip_gradient,
    is_due,
    iteration_plans,
    lr_at,
    make_optimizer,
    run_plan,
    what_trains,
)
from infra.settings import Data, Lora, Optim
from models import load


def run_settings(**kw) -> kto.Settings:
    return kto.Settings(model="m", data=Data(train="t"), **kw)


# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, total",
    [({}, 10), ({"epochs": 3}, 30), ({"epochs": 3, "max_steps": 7}, 7), ({"max_steps": 47}, 47)],
)
def test_max_steps_overrides_epochs_and_an_epoch_leaves_out_the_rest(settings, total):
    # 10 batches and 7 examples
    assert run_plan(run_settings(batch_size=8, **settings), 87) == Plan(10, total, 0, total, 10)


@pytest.mark.parametrize(
    "interval, first, second",
    [
        # epochs of 6 and of 5 steps; in epochs an iteration begins anew; 2.7 steps are 3, 2.25 are 2
        ("0.45 epochs", [3, 6, 9, 12], [14, 16, 18, 20, 22]),
        ("1 epoch", [6, 12], [17, 22]),
        ("0.01 epochs", [*range(1, 13)], [*range(13, 23)]),
        (5, [5, 10], [15, 20, 22]),
        (99, [], [22]),  # the last step of the run
        (None, [12], [22]),  # of each iteration
    ],
)
def test_intervals_in_epochs_count_from_the_iterations_begin_and_in_steps_over_the_run(
    interval, first, second
):
    plans = iteration_plans(run_settings(batch_size=8, epochs=2), [55, 40])
    for plan, expected in zip(plans, (first, second)):
        steps = range(plan.begin + 1, plan.end + 1)
        assert [step for step in steps if is_due(step, interval, plan)] == expected


def test_iterations_lie_end_to_end_under_one_schedule():
    twice = run_settings(batch_size=8, epochs=2)
    plans = iteration_plans(twice, [87, 87, 40])
    assert [(p.begin, p.end) for p in plans] == [(0, 20), (20, 40), (40, 50)]
    assert [p.per_epoch for p in plans] == [10, 10, 5]
    assert {(p.total, p.warmup_epoch) for p in plans} == {(50, 10)}
    plans = iteration_plans(run_settings(batch_size=8, max_steps=12), [87, 87, 87])
    assert [(p.end, p.total) for p in plans] == [(10, 12), (12, 12), (12, 12)]
    match = "^max_steps: 31, but the iterations have 30 steps"
    refused(match, check_iterations, run_settings(batch_size=8, max_steps=31), [87, 87, 87])


# ---- the learning rate ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "total, optim, expected",
    [
        # 2 up, then 1 down in 6
        (
            8,
            dict(warmup=".2 epochs", schedule="linear"),
            [0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6],
        ),
        # (1 + cos x) / 2 at x = 0, 30, 60, 90, 120, 150 degrees
        (8, dict(warmup=2, schedule="cosine"), [0.5, 1, 1, 0.9330127, 0.75, 0.5, 0.25, 0.0669873]),
        (8, dict(warmup=4, schedule="constant"), [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        (4, dict(schedule="constant"), [1, 1, 1, 1]),
        (4, dict(warmup="2.5 epochs"), [0.04, 0.08, 0.12, 0.16]),  # a run that ends in its warmup
    ],
)
def test_the_rate_rises_along_a_line_and_then_falls_as_the_schedule_says(total, optim, expected):
    plan = Plan(10, total, 0, total, 10)
    rates = [lr_at(step, plan, Optim(**optim), 2.0) for step in range(1, total + 1)]
    assert rates == pytest.approx([2 * x for x in expected])


# ---- AdamW ---------------------------------------------------------------------------------------


def decayed(module) -> dict[str, bool]:
    """Name -> whether a step with a gradient of 0 shrinks it, and by as much as it should."""
    for p in module.parameters():
        p.data.fill_(1.0)
        p.grad = torch.zeros_like(p)
    make_optimizer(module, run_settings(optim=Optim(lr=0.5, weight_decay=0.25))).step()
    named = dict(module.named_parameters(remove_duplicate=False))
    named = {n: p for n, p in named.items() if p.requires_grad}
    for name, p in named.items():
        assert p.unique().tolist() in ([1.0], [0.875]), name  # 1 - 0.5 * 0.25
    return {name: p.flatten()[0].item() < 1 for name, p in named.items()}


def test_weight_decay_covers_the_matrices_and_skips_biases_norms_and_embeddings(tiny):
    shrinks = decayed(load.load_model(tiny))
    assert shrinks["transformer.h.0.attn.qkv.weight"] and shrinks["transformer.h.1.mlp.proj.weight"]
    unchanged = [name for name, does_shrink in shrinks.items() if not does_shrink]
    names = ("transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head")
    assert {f"{name}.weight" for name in names} <= set(unchanged)
    skipped = re.compile("bias|norm|ln_f|wte|wpe|lm_head")  # this model's head is its embedding
    assert [name for name in shrinks if skipped.search(name)] == unchanged
    assert sum(shrinks.values()) == 8, "four matrices in each of two layers"


def test_norms_of_two_dimensions_do_not_decay(tmp_path):
    """Command R+ has norms of queries and keys for each head."""
    config = transformers.CohereConfig(**GQA, use_qk_norm=True)
    assert made(config, tmp_path).get_parameter("model.layers.0.self_attn.q_norm.weight").ndim == 2
    shrinks = decayed(load.load_model(tmp_path))
    norms = [name for name in shrinks if "norm" in name]
    assert len(norms) == 2 * 3 + 1 and not any(shrinks[name] for name in norms)
    assert sum(shrinks.values()) == 2 * 7, "the matrices of two layers"


def test_adapters_decay_and_nothing_frozen_is_given_to_the_optimizer(tiny):
    policy = with_adapters(tiny, Lora(rank=2))
    shrinks = decayed(policy)
    assert shrinks and all("lora_" in name for name in shrinks) and all(shrinks.values())
    assert len(make_optimizer(policy, run_settings()).param_groups) == 1, "no empty group"
    assert what_trains(policy) == "training 2,304 weights"


def test_the_optimizer_has_the_numbers_of_the_settings():
    o = Optim(lr=0.1, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.3)
    optimizer = make_optimizer(nn.Linear(4, 4), run_settings(optim=o))
    assert isinstance(optimizer, torch.optim.AdamW)
    names = ("lr", "betas", "eps", "weight_decay")
    matrix, bias = ([group[name] for name in names] for group in optimizer.param_groups)
    assert (matrix, bias) == ([0.1, (0.8, 0.95), 1e-6, 0.3], [0.1, (0.8, 0.95), 1e-6, 0.0])


# ---- clipping ------------------------------------------------------------------------------------


def clipped(gradient: list[float], max_norm: float | None) -> tuple[float, list[float]]:
    fabric = Fabric(accelerator="cpu", devices=1)
    layer = nn.Linear(2, 1, bias=False)
    policy, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), 0.1))
    layer.weight.grad = torch.tensor([gradient])
    return clip_gradient(fabric, policy, optimizer, max_norm), layer.weight.grad[0].tolist()


def test_clipping_scales_to_the_norm_and_returns_what_it_was():
    norm, gradient = clipped([3.0, 4.0], 1.0)
    assert norm == 5.0 and gradient == pytest.approx([0.6, 0.8], rel=1e-6)
    for limit in (6.0, None):
        assert clipped([3.0, 4.0], limit) == (5.0, [3.0, 4.0]), "below the limit it is left alone"
