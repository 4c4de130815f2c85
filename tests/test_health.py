"""A run names the signs of sickness in its own numbers (docs/health.md)."""

import re

import pytest
from conftest import ROOT, train

import health
from infra.health import find_sign

HEALTHY = {
    "entropy": (0.3, 0.2),
    "rewards/chosen": (0.0, 0.2),
    "rewards/rejected": (0.0, -1.4),
    "rewards/mean": (0.0, -0.6),
    "rewards/std": (0.1, 1.0),
    "kl": (0.0, 0.1),
    "grad_norm": (0.5, 0.5),
    "lr": (1e-3, 1e-4),
    "accuracy": (0.8, 0.9),
}
BOTH_FALL = {"rewards/chosen": -0.2}
# (columns that end at other numbers, steps of the whole run, accuracies on data.val, the setting that the line names)
TABLE = [
    ({}, 20, [0.8, 0.9], None),
    (BOTH_FALL | {"entropy": 0.36}, 20, [], None),
    (BOTH_FALL | {"entropy": 0.39}, 20, [], "optim.lr"),
    ({"entropy": 0.39}, 20, [], None),
    ({"entropy": 0.39, "kl": 1.1}, 20, [], "kto.sft_loss_weight"),
    ({"rewards/mean": -1.9}, 20, [], None),
    ({"rewards/mean": -2.1}, 20, [], "kto.balance"),
    ({"rewards/mean": 2.1}, 20, [], "kto.balance"),
    ({"rewards/mean": 0.0, "rewards/std": 0.09}, 20, [], "optim.lr"),
    ({"rewards/mean": 0.0, "rewards/std": 0.09}, 200, [], None),
    ({"grad_norm": 1.9}, 20, [], None),
    ({"grad_norm": 2.1}, 20, [], "clipped to 2: try a smaller optim.lr"),
    ({"grad_norm": (1.0, 2.9)}, 20, [], None),
    ({}, 20, [0.9, 0.81], None),
    ({}, 20, [0.9, 0.79], "epochs"),
    ({"accuracy": 0.7}, 20, [0.9, 0.79], None),
]


@pytest.mark.parametrize("ends, total, held_out, setting", TABLE)
def test_a_sign_is_named_beyond_its_limit_and_not_within(ends, total, held_out, setting):
    """Each column goes from its first to its last number in ten of twenty steps. 100 examples are held out."""
    columns = dict(HEALTHY)
    for name, end in ends.items():
        columns[name] = end if isinstance(end, tuple) else (columns[name][0], end)
    rows = []
    for step in range(1, 21):
        share = min(1.0, max(0, step - 3) / 10)
        row = {name: a + (b - a) * share for name, (a, b) in columns.items()}
        rows.append(row | {"step": step})
    validations = [{"step": 4.0 + 16 * i, "accuracy": x} for i, x in enumerate(held_out)]
    validations.insert(0, {"step": 0.0, "accuracy": 0.95})  # the start does not count
    sign = find_sign(rows, validations, clip=2.0, n_held_out=100, total=total)
    assert (sign is None) == (setting is None)
    assert setting is None or setting in sign and "(usual: " in sign


@pytest.mark.parametrize(
    "argv, steps", [("--optim.lr=1e-6", [5, 10]), ("--optim.lr=1e-3", []), ("--optim.lr=0", [])]
)
def test_a_run_says_at_half_and_at_its_end_that_its_log_ratios_hardly_move(
    argv, steps, tmp_path, capsys
):
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join((ROOT / "demo/train.jsonl").read_text().splitlines()[:320]))
    more = ("--batch_size=32", "--kto.beta=0.5", "--precision=32-true")
    train(ROOT / "demo/base", few, tmp_path / "run", *more, argv)
    said = re.findall(r"health at step (\d+): rewards/std is 0.0.*", capsys.readouterr().out)
    assert [int(step) for step in said] == steps


# run -> its ratings (benchmarks/health.py), its settings, and what its health line names
TWELVE = {
    "lr 1e-6": ("own", "--optim.lr 1e-6", "rewards/std"),
    "lr 7e-3": ("own", "--optim.lr 7e-3", "entropy"),
    "labels turned round": ("turned", "", "entropy"),
    "10% thumbs up": ("rare", "--epochs 4", "entropy"),
    "60% of another author": ("others", "", "kl"),
    "256 ratings, a quarter wrong": ("noisy", "--epochs 30 --val_interval 12", "data.val"),
    **{f"seed {seed}": ("own", f"--seed {seed}", None) for seed in range(1, 6)},
    "kto_paper.yaml in small": (
        "own",
        "--kto.beta 0.1 --optim.lr 1e-4 --optim.schedule constant --batch_size 32 --epochs 1",
        None,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind, settings, sign", TWELVE.values(), ids=TWELVE)
def test_of_twelve_runs_the_six_sick_ones_are_named(kind, settings, sign, tmp_path):
    log = health.run("run", health.ratings_of(kind, tmp_path), settings, tmp_path)
    said = re.findall(r"health at step .*", log)
    assert bool(said) == bool(sign), said
    assert sign is None or sign in said[0]
