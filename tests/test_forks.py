"""A new idea is one short file: the examples train, resume to the bit after a kill, and give the same on two processes;
and a copy of kto.py with another loss does all that by the commands that a user types."""

import copy
import csv
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import torch
import transformers
from conftest import (
    ROOT,
    Started,
    assert_same,
    checkpoint_tensors,
    killed,
    last_of_each,
    numbers,
    ranks,
    result,
    train,
    until,
)  # fmt: skip
from safetensors.torch import load_file
from torch.nn.functional import binary_cross_entropy_with_logits

import data
import dpo
import kto
import model
import online
from generate import generate
from hub.folders import fetch_model
from records.examples import Example
from runs.cli import parse
from runs.errors import BadInput, Failed
from runs.optimizer import make_optimizer
from runs.settings import Sampling
from setup import setup
from train import Objective, Trainer

EXAMPLES = ROOT / "examples"
sys.path += [str(EXAMPLES), str(ROOT / "benchmarks")]

from rating_head import RatingKTO  # noqa: E402
from rating_head import RatingSettings as RatingArguments  # noqa: E402
from rating_head import Settings as RatingSettings  # noqa: E402

COMMON = ("--batch_size=6", "--max_steps=6", "--epochs=9", "--optim.lr=1e-2", "--save_interval=2",
          "--precision=32-true", "--micro_batch_size=4")  # fmt: skip


# example: (its program, what it hands over to the program's main, its own arguments)
HANDED = {
    "bco": (kto, {"objective": "BCO", "settings": "Settings"}, ()),
    "ema_z": (kto, {"objective": "EMA"}, ()),
    "token_kto": (kto, {"objective": "TokenKTO"}, ()),
    "z_by_source": (kto, {"objective": "ZBySource"}, ()),
    "rating_head": (kto, {"objective": "RatingKTO", "settings": "Settings"}, ()),
    "muon": (kto, {"optimizer": "muon"}, ()),
    "simpo": (dpo, {"objective": "SimPO", "settings": "Settings"}, ()),
    "orpo": (dpo, {"objective": "ORPO", "settings": "Settings"}, ()),
    "hinge": (dpo, {"objective": "Hinge", "settings": "Settings"}, ()),
    "grpo": (
        online,
        {"objective": "GRPO", "settings": "Settings", "rate": "rate"},
        ("--epochs=1", "--online.max_iterations=3", "--online.prompts_per_iteration=3",
         "--online.num_generations=4", "--online.max_new_tokens=5", "--data.max_completion=12"),
    ),
}  # fmt: skip


def train_example(name: str, tiny, data, out: Path, *argv: str) -> dict:
    """An example in this process, with what it hands over."""
    program, names, own = HANDED[name]
    replaced = {x.split("=")[0] for x in own}
    argv = [x for x in argv if x.split("=")[0] not in replaced]
    handed = {key: getattr(import_module(name), value) for key, value in names.items()}
    if program is online:
        handed["checker"] = lambda answers: [len(a.completion) % 2 == 0 for a in answers]
    return train(tiny, data, out, *argv, *own, program=program.__name__, **handed)


@pytest.mark.parametrize("program", HANDED)
def test_an_algorithm_from_outside_trains_resumes_and_shards(
    program, tiny, ratings, pairs, tmp_path
):
    data = pairs if HANDED[program][0] is dpo else ratings
    argv = (*COMMON, f"--data.val={data}", "--eval.samples=0", "--val_interval=3")
    whole = train_example(program, tiny, data, tmp_path / "whole", *argv)
    if program == "grpo":
        assert any(row["clipped"] for row in whole["rows"]), "or the clamp is not tested"
    else:
        assert whole["rows"][-1]["loss"] < whole["rows"][0]["loss"], "it learns"
    out = tmp_path / "run"
    killed(1, out, "metrics.csv", 4, lambda rank: train_example(program, tiny, data, out, *argv))
    assert_same(train_example(program, tiny, data, out, *argv, "--resume=auto"), whole)
    for strategy in ("ddp", "fsdp"):
        two = (program, tiny, data, tmp_path / strategy, f"--strategy={strategy}", *argv)
        (run, _) = ranks(2, lambda rank: train_example(*two))  # noqa: B023
        for a, b in zip(numbers(run), numbers(whole), strict=True):
            # Muon orthogonalises in bfloat16
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-3 if program == "muon" else 1e-4)


def state(out: Path, step: int) -> dict:
    file = out / "checkpoints" / f"step-{step:08d}" / "state.json"
    return json.loads(file.read_text())["run"]["objective"]


def test_memory_is_updated_by_training_steps_only_and_from_all_ranks(tiny, ratings, tmp_path):
    argv = (*COMMON, "--optim.lr=1e-3", "--keep_last=9")
    train_example("bco", tiny, ratings, tmp_path / "a", *argv)
    train_example(
        "bco",
        tiny,
        ratings,
        tmp_path / "b",
        *argv,
        f"--data.val={ratings}",
        "--val_interval=1",
    )
    ranks(2, lambda rank: train_example("bco", tiny, ratings, tmp_path / "c", *argv) and None)
    a, b, c = (state(tmp_path / name, 6) for name in "abc")
    assert a == b and a["count"] == 6 * 6 == c["count"]
    assert a["delta"] == pytest.approx(c["delta"], abs=1e-6) and abs(a["delta"]) > 1e-4
    with open(tmp_path / "a" / "metrics.csv") as f:
        rewards = [float(row["reward"]) for row in csv.DictReader(f)]
    assert a["delta"] == pytest.approx(sum(rewards) / 6, abs=1e-9), "the mean of all rewards so far"


def test_an_objective_without_a_reference_loads_and_runs_none(tiny, pairs, tmp_path, monkeypatch):
    import model
    import setup

    loads, real = [], model.load_model
    monkeypatch.setattr(model, "load_model", lambda *a: loads.append(a) or real(*a))
    no_copy = SimpleNamespace(deepcopy=lambda m: pytest.fail("a copy for a reference"))
    monkeypatch.setattr(setup, "copy", no_copy)
    train_example("simpo", tiny, pairs, tmp_path, *COMMON)
    assert len(loads) == 1


class NoReference(kto.KTO):
    """With mismatched pairs: z is then of log pi alone."""

    needs_reference = False


def test_an_objective_with_pairs_and_without_a_reference_loads_and_runs_none(
    tiny, ratings, tmp_path, monkeypatch
):
    import reference
    import setup

    no_copy = SimpleNamespace(deepcopy=lambda m: pytest.fail("a copy for a reference"))
    monkeypatch.setattr(setup, "copy", no_copy)
    monkeypatch.setattr(reference.Reference, "__call__", lambda *a: pytest.fail("it ran"))
    argv = (*COMMON, f"--data.val={ratings}")
    train(tiny, ratings, tmp_path / "a", *argv, objective=NoReference)
    rows = result(tmp_path / "a")["rows"]
    assert all(row["kl"] == 0 and row["kl/clamped"] == 1 for row in rows), "log pi is below 0"
    for row in rows:
        for kind in ("chosen", "rejected"):
            assert row[f"rewards/{kind}"] == pytest.approx(0.1 * row[f"logps/{kind}"], rel=1e-6)


@pytest.mark.parametrize("reference", ["first", "last"])
def test_online_kto_without_a_reference_runs_and_resumes(reference, clone, tmp_path):
    text = (ROOT / "online.py").read_text()
    old = '    records = "prompts"\n'
    assert text.count(old) == 1
    name = f"bare_{reference}"
    (clone / f"{name}.py").write_text(text.replace(old, f"{old}    needs_reference = False\n"))
    command = f"python {name}.py --batch_size 8 --online.max_iterations 2 --eval.prompts 4"
    command += f" --online.prompts_per_iteration 16 --online.reference {reference}"
    command += " --eval.samples 0 --save_interval 1"
    code, said, stderr = run(clone, tmp_path / "a", f"{command} --out_dir out/{name}").ended()
    assert code == 0 and "exported to" in said, stderr
    assert "policy and reference" not in said
    stopped = f"{command} --out_dir out/{name}-b"
    code, said, stderr = run(clone, tmp_path / "b", f"{stopped} --stop_at 3").ended()
    assert code == 0 and "stopped by stop_at at step 3" in said, stderr
    code, said, stderr = run(clone, tmp_path / "c", f"{stopped} --resume auto").ended()
    assert code == 0, stderr
    assert_same(result(clone / "out" / f"{name}-b"), result(clone / "out" / name))


def run(clone: Path, folder: Path, command: str) -> Started:
    """The command as typed in the clone."""

    def first():
        os.chdir(clone)
        sys.path.insert(0, str(clone))

    folder.mkdir()
    program, *argv = shlex.split(command)[1:]
    return Started(folder, program, argv, first=first)


def test_a_copy_of_kto_with_another_loss_is_stopped_and_goes_on_by_the_command_that_it_printed(
    clone, tmp_path
):
    text = (ROOT / "kto.py").read_text()
    old = "(1 - torch.sigmoid(args.beta * sign_B * (logratio_B - z)))"
    assert text.count(old) == 1
    new = "-torch.nn.functional.logsigmoid(args.beta * sign_B * (logratio_B - z))"
    (clone / "mine.py").write_text(text.replace(old, new))
    base = "python mine.py --batch_size 8 --max_steps 30 --eval.prompts 4 --eval.samples 0"
    base += " --save_interval 5"
    code, _, stderr = run(clone, tmp_path / "a", f"{base} --out_dir out/whole").ended()
    assert code == 0, stderr
    out = clone / "out" / "run"
    _, *typed = shlex.split(f"{base} --out_dir out/run")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen([sys.executable, *typed], cwd=clone, **pipes)  # a real one
    metrics = out / "metrics.csv"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") > 5)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, said
    (command,) = re.findall(r"^  (python .*)$", said, re.M)
    assert command.startswith("python mine.py "), "kto.py would swap the loss in mid-run"
    code, said, stderr = run(clone, tmp_path / "b", command).ended()
    assert code == 0 and "exported to" in said, stderr
    found = result(out)
    assert_same(found, result(clone / "out" / "whole"))
    assert found["rows"][0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    code, _, said = run(clone, tmp_path / "c", command.replace("mine.py", "kto.py")).ended()
    assert code == 2 and re.search(r"a run of mine\.py, not of kto\.py", said), said


OWN_OPTIONS = """
import argparse
from kto import main
from runs.errors import run_cli

parser = argparse.ArgumentParser()
parser.add_argument("--shortest", type=int, required=True)
parser.add_argument("--longest", type=int, required=True)
own, settings = parser.parse_known_args()


def checker(answers):
    return [own.shortest < len(answer.completion) < own.longest for answer in answers]


run_cli(lambda: main(settings, checker=checker))
"""


def test_the_printed_command_keeps_the_options_of_the_script_itself(clone, tmp_path):
    (clone / "options.py").write_text(OWN_OPTIONS)
    command = (
        "python options.py --shortest 3 --batch_size 8 --longest 8 --max_steps 3 --eval.prompts 3"
    )
    command += " --seed 3 --eval.samples 0 --stop_at 2"
    code, said, stderr = run(clone, tmp_path / "a", command).ended()
    assert code == 0, stderr
    (resume,) = re.findall(r"^  (python .*)$", said, re.M)
    assert resume.startswith("python options.py --shortest 3 --longest 8 --config "), resume
    code, said, stderr = run(clone, tmp_path / "b", f"{resume} --stop_at null").ended()
    assert code == 0 and "held-out accuracy by the checker" in said, stderr


def test_a_run_with_relative_paths_goes_on_and_is_exported_from_another_directory(clone, tmp_path):
    (clone / "mine").mkdir()
    for path in (clone / "demo").iterdir():  # the demo's own paths are found from everywhere
        (clone / "mine" / path.name).symlink_to(path)
    command = "python kto.py --model mine/base --data.train mine/train.jsonl --data.val"
    command += " mine/val.jsonl:1,mine/va?.jsonl:1 --batch_size 8 --max_steps 3 --stop_at 2"
    command += " --eval.samples 0 --out_dir out/moved"
    code, said, stderr = run(clone, tmp_path / "a", command).ended()
    assert code == 0 and "run folder: out/moved\n" in said, stderr
    (elsewhere := tmp_path / "elsewhere").mkdir()
    out = clone / "out" / "moved"
    resume = f"python {clone / 'kto.py'} --config {out / 'settings.yaml'} --resume auto"
    for i, command in enumerate(
        [
            f"python {clone / 'export.py'} {out}/checkpoints/step-00000002 --out {elsewhere}/two",
            f"{resume} --stop_at null",
        ]
    ):
        code, said, stderr = run(elsewhere, tmp_path / f"b{i}", command).ended()
        assert code == 0 and "exported to" in said, stderr


def test_the_z_of_other_libraries_by_hand():
    from z_variants import with_neighbours, z_by_groups

    r_G = torch.tensor([2.0, -6, 4, 4, 1, 1, -4, -1])
    assert z_by_groups(r_G, None, None).tolist() == [0.125] * 8
    assert z_by_groups(r_G, 4, None).tolist() == [1.0] * 4 + [0.0] * 4, "TRL: a micro-batch of 4"
    assert z_by_groups(r_G, None, 4).tolist() == [0.5] * 8, "NeMo: two ranks of 4"
    assert z_by_groups(r_G, 4, 2).tolist() == [2.0] * 4 + [0.5] * 4
    examples = [Example(None, (name,), True) for name in "abcde"]
    pairs = [e.completions for e in with_neighbours(examples, 3)]
    assert pairs == [("a", "c"), ("b", "a"), ("c", "b"), ("d", "e"), ("e", "d")]


def test_a_trainer_with_our_own_z_has_the_numbers_of_kto_py(tiny, ratings, tmp_path):
    import z_variants

    argv = ["--batch_size=6", "--max_steps=4", "--optim.lr=1e-2", "--eval.samples=0"]
    expected = numbers(train(tiny, ratings, tmp_path / "kto", *argv))
    argv += [f"--model={tiny}", f"--data.train={ratings}"]
    rows = {}
    for name in ("ours", "trl4", "pairs"):
        z_variants.run_variant("kto", name, [*argv, f"--out_dir={tmp_path / name}"])
        rows[name] = numbers(result(tmp_path / name))
    for row, ours in zip(expected, rows["ours"], strict=True):
        assert ours == row | {"z/bias": 0, "z/rmse": 0}
    for name in ("trl4", "pairs"):
        assert rows[name][-1]["z/rmse"] > 0 and rows[name][-1]["loss"] != expected[-1]["loss"]


@pytest.mark.parametrize(
    "program",
    ["bco", "ema_z", "simpo", "hinge", "orpo", "rating_head", "muon", "grpo"],
)
def test_an_example_runs_where_it_lies_by_its_command_and_resumes_by_the_printed_one(
    program, clone, tmp_path
):
    text = (EXAMPLES / f"{program}.py").read_text()
    (command,) = re.findall(r'^""".* Run it: (python .*)"""$', text, re.M)
    command += " --batch_size 8 --max_steps 3 --eval.prompts 4 --stop_at 2"
    if program == "grpo":
        command += " --online.prompts_per_iteration 4"
    code, said, stderr = run(clone, tmp_path / "a", command).ended()
    (resume,) = re.findall(r"^  (python .*)$", said, re.M)
    assert code == 0 and resume.startswith(f"python examples/{program}.py "), stderr
    code, said, stderr = run(clone, tmp_path / "b", f"{resume} --stop_at null").ended()
    assert code == 0 and "held-out accuracy by the checker" in said, stderr


def test_a_checker_of_ones_own_is_five_lines_and_its_accuracy_a_column_of_val_csv(clone, tmp_path):
    command = (
        "python examples/my_checker.py --max_steps 4 --eval.prompts 30 --eval.check_interval 2"
    )
    command += " --val_interval 1 --out_dir out/c"
    code, said, stderr = run(clone, tmp_path / "a", command).ended()
    assert code == 0 and "held-out accuracy by the checker" in said, stderr
    with open(clone / "out" / "c" / "val.csv") as f:
        shares = [row["checker_accuracy"] for row in csv.DictReader(f)]
    assert [bool(x) for x in shares] == [True, False, True, False, True], "at 0, 2 and the end"
    verdict = json.loads((clone / "out" / "c" / "eval" / "after.json").read_text())
    right = sum(len(a["completion"].split()) < 4 for a in verdict["answers"])
    assert float(shares[-1]) == right / 30


class Changed(kto.KTO):
    """KTO with a method of another's."""

    def __init__(self, args, **methods):
        super().__init__(args)
        vars(self).update({name: partial(method, self) for name, method in methods.items()})


@pytest.mark.parametrize(
    "methods,fault",
    [
        (
            {"loss": lambda o, *a: (kto.KTO.loss(o, *a)[0].mean(), {})},
            r"loss: one number an example, shape \(6,\), not \(\)",
        ),
        (
            {"loss": lambda o, *a: (kto.KTO.loss(o, *a)[0], {"kl": a[3]})},
            r"loss: kl: one number an example, shape \(6,\), not \(\)",
        ),
        ({"loss": lambda o, *a: None}, r"loss: expected \(losses, columns\), .* got NoneType"),
        (
            {"loss": lambda o, *a: (kto.KTO.loss(o, *a)[0], {"mine": 0.5})},
            r"loss: mine: expected a tensor \(6,\), got float",
        ),
        (
            {"loss": lambda o, *a: (kto.KTO.loss(o, *a)[0].detach(), {})},
            "loss: it has no gradient, so nothing would be learned",
        ),
        ({"baseline": lambda o, *a: [0.0]}, r"baseline: one number or \(6,\), .*, not list"),
        (
            {"loss": lambda o, *a: (kto.KTO.loss(o, *a)[0] + torch.tensor(torch.inf), {})},
            "step 1: not finite .* the weights are unchanged",
        ),
        (
            {"loss": lambda o, lp, ref, batch, z: (lp[:, 0] * batch.extra("age"), {})},
            "data.extra: age: the loss asks for it: --data.extra age",
        ),
        (
            {"state_dict": lambda o: {"z": torch.zeros(3)}},
            "state_dict: Changed: z: Object of type Tensor is not JSON serializable",
        ),
    ],
)
def test_what_an_objective_does_wrong_is_said_by_name(methods, fault, tiny, ratings, tmp_path):
    argv = [f"--model={tiny}", f"--data.train={ratings}", f"--out_dir={tmp_path}"]
    cfg = parse(kto.Settings, [*argv, "--batch_size=6", "--max_steps=2"], "", demo="demo.yaml")
    with pytest.raises((BadInput, Failed), match=fault):
        with Trainer(setup(cfg, Changed(cfg.kto, **methods))) as trainer:
            trainer.fit()


def trainer_of(tiny, ratings, out, *argv, kind=Trainer):
    argv = [
        f"--model={tiny}",
        f"--data.train={ratings}",
        f"--out_dir={out}",
        "--batch_size=6",
        *argv,
    ]
    cfg = parse(kto.Settings, argv, "", demo="demo.yaml")
    return kind(setup(cfg, kto.KTO(cfg.kto)))


def test_an_override_of_forward_is_reached_on_every_path_whatever_the_cut(tiny, ratings, tmp_path):
    class Counts(Trainer):
        def forward(self, packed, prompt_cache=None):
            calls.append(packed.length_BK.numel())
            return super().forward(packed, prompt_cache)

    for cut in ((), ("--micro_batch_size=2",)):
        calls = []
        argv = (
            *cut,
            "--max_steps=2",
            f"--data.val={ratings}",
            "--val_interval=null",
            "--eval.samples=0",
        )
        with trainer_of(tiny, ratings, tmp_path / f"{len(cut)}", *argv, kind=Counts) as trainer:
            trainer.fit()
        # own and borrowed completions: of two steps, of two validations of 24, and in the start check
        # (of at most four examples)
        assert sum(calls) - 2 * 48 == 2 * 12 + (8 if not cut else 4), calls


@pytest.mark.parametrize(
    "example, setting",
    [
        ("token_kto", "--data.score_prompt=true"),
        ("token_kto", "--reference_cache=c"),
        ("rating_head", "--data.score_prompt=true"),
    ],
)
def test_what_an_objective_of_tokens_cannot_have_is_refused_before_any_work(
    example, setting, tiny, ratings, tmp_path
):
    with pytest.raises(BadInput, match="this objective"):
        train_example(example, tiny, ratings, tmp_path / "run", *COMMON, setting)
    assert not (tmp_path / "run").exists()


def test_a_second_fit_needs_a_plan_of_its_own(tiny, ratings, tmp_path):
    with pytest.raises(AssertionError, match="the default plan has ended"):
        with trainer_of(tiny, ratings, tmp_path, "--max_steps=1") as trainer:
            assert trainer.fit()
            trainer.fit()


def test_another_objective_takes_over_what_the_last_one_remembers(tiny, ratings, tmp_path):
    class Remembers(kto.KTO):
        count = 0

        def state_dict(self):
            return {"count": self.count}

    with trainer_of(tiny, ratings, tmp_path, "--max_steps=1") as trainer:
        first, second = (Remembers(trainer.run.cfg.kto) for _ in range(2))
        trainer.run.use_objective(first)
        first.count = 7
        trainer.run.use_objective(second)
        assert trainer.run.objective is second and second.count == 7
        trainer.fit()


def test_memory_that_no_checkpoint_saves_is_said_at_the_start(tiny, ratings, tmp_path, capsys):
    class Forgets(kto.KTO):
        z = 0.0

        def after_step(self, columns, kl):
            self.z = kl.z.item()

    class Remembers(Forgets):
        def state_dict(self):
            return {"z": self.z}

    Forgets.after_step.__qualname__ = "Objective.after_step"  # as in a class Objective of a fork
    line = "Forgets: after_step without a state_dict: a resume forgets what it kept"
    for kind, said in ((Forgets, True), (Remembers, False), (kto.KTO, False)):
        out = f"--out_dir={tmp_path / kind.__name__}"
        argv = [f"--model={tiny}", f"--data.train={ratings}", out, "--batch_size=6"]
        cfg = parse(kto.Settings, argv, "", demo="demo.yaml")
        with Trainer(setup(cfg, kind(cfg.kto))):
            assert (line in capsys.readouterr().out.splitlines()) == said


def test_a_step_that_is_not_finite_names_its_examples(tiny, ratings, tmp_path):
    def loss(objective, *given):
        loss_B, columns = kto.KTO.loss(objective, *given)
        return loss_B / given[2].label, columns  # 0 / 0 or a / 0 for a thumb down

    argv = [f"--model={tiny}", f"--data.train={ratings}", f"--out_dir={tmp_path}"]
    cfg = parse(kto.Settings, [*argv, "--batch_size=6", "--max_steps=2"], "", demo="demo.yaml")
    with pytest.raises(Failed, match=r"step 1: not finite .*ratings.jsonl:\d+.*unchanged"):
        with Trainer(setup(cfg, Changed(cfg.kto, loss=loss))) as trainer:
            trainer.fit()


def saved(out: Path, step: int, kind: str) -> dict[str, torch.Tensor]:
    return checkpoint_tensors(out / "checkpoints" / f"step-{step:08d}", kind)


def rows_of(file: Path) -> list[dict]:
    with open(file) as f:
        return list(csv.DictReader(f))


# ---- an optimizer of one's own -----------------------------------------------------------------


def test_an_optimizer_that_is_none_is_refused(tiny, ratings, tmp_path):
    with pytest.raises(BadInput, match="^optimizer: expected a torch.optim.Optimizer, got list"):
        train(tiny, ratings, tmp_path, *COMMON, optimizer=lambda policy, cfg: [])


def test_a_group_learns_by_its_own_share_of_the_schedule(tiny, ratings, tmp_path):
    def sgd(scale, policy, cfg):
        blocks = list(policy.transformer.h.parameters())
        others = [p for p in policy.parameters() if all(p is not q for q in blocks)]
        groups = [{"params": blocks, "lr_scale": scale}, {"params": others}]
        return torch.optim.SGD(groups, lr=cfg.optim.lr)

    moves = {}
    start = model.load_model(tiny).unique_parameters()
    argv = ("--batch_size=6", "--max_steps=1", "--optim.lr=0.5", "--precision=32-true")
    for scale in (1.0, 0.25):
        out = tmp_path / f"{scale}"
        train(tiny, ratings, out, *argv, optimizer=partial(sgd, scale))
        moves[scale] = {n: x - start[n].detach() for n, x in saved(out, 1, "weights").items()}
    for name, move in moves[1.0].items():
        share = 0.25 if ".h." in name else 1.0
        torch.testing.assert_close(moves[0.25][name], share * move, rtol=1e-3, atol=1e-6)
    assert max(move.abs().max() for name, move in moves[1.0].items() if ".h." in name) > 1e-3


def test_a_weight_that_no_export_knows_is_refused_at_the_start_by_its_name(tiny, ratings, tmp_path):
    def optimizer(policy, cfg):
        policy.value_head = torch.nn.Linear(32, 1)
        return make_optimizer(policy, cfg)

    with pytest.raises(BadInput, match="model: value_head.weight: not a weight of this family"):
        train(tiny, ratings, tmp_path, *COMMON, optimizer=optimizer)
    assert not (tmp_path / "metrics.csv").exists()


# ---- settings of one's own ---------------------------------------------------------------------


@dataclass(frozen=True)
class OwnGroup(kto.KTOSettings):
    alpha: float = 0.5
    """A name that lora has, with another range."""
    rank: float = -1.0
    """The same."""
    prompts: str = "all"
    """A name that eval has, with another type."""
    seed: float = -0.5
    """A name that every run has."""


@dataclass(frozen=True)
class OwnSettings(kto.Settings):
    kto: OwnGroup = field(default_factory=OwnGroup)


def test_a_setting_of_ones_own_may_have_the_name_of_another_groups(tiny, ratings):
    argv = [f"--model={tiny}", f"--data.train={ratings}", "--kto.alpha=-2.5", "--kto.seed=-3"]
    own = parse(OwnSettings, argv, "", demo="demo.yaml").kto
    assert (own.alpha, own.rank, own.prompts, own.seed) == (-2.5, -1.0, "all", -3.0)


def test_the_help_of_a_fork_begins_with_its_own_docstring(clone, tmp_path):
    code, said, stderr = run(clone, tmp_path / "a", "python examples/hinge.py --help").ended()
    assert code == 0 and "max(0, margin - h) on pairs" in said, stderr
    assert "--dpo.margin" in said and "the chosen log-ratio should be above" in said


# ---- a module of one's own ---------------------------------------------------------------------

HEAD = ("--batch_size=7", "--max_steps=5", "--epochs=9", "--optim.lr=1e-2", "--kto.beta=0.5",
        "--eval.samples=0", "--optim.clip=0.1", "--save_interval=null")  # fmt: skip


def rated(tiny, ratings, out: Path, *argv: str) -> dict:
    return train_example("rating_head", tiny, ratings, out, *HEAD, *argv)


CUTS = {
    "examples": ("--micro_batch_size=1",),
    "tokens": ("--micro_batch_tokens=70",),
    "ddp": ("--micro_batch_size=2", "--strategy=ddp"),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("lora", [(), ("--lora.rank=2",)])
def test_a_modules_gradient_is_that_of_the_whole_step_in_every_cut(
    cut, lora, tiny, ratings, tmp_path
):
    argv = ("--precision=64-true", *lora)
    whole = rated(tiny, ratings, tmp_path / "whole", *argv)
    given = (tiny, ratings, tmp_path / "cut", *argv, *CUTS[cut])
    many, *_ = ranks(2 if cut == "ddp" else 1, lambda rank: rated(*given))
    for a, b in zip(numbers(many), numbers(whole), strict=True):
        for name in ("loss", "rating_loss", "grad_norm", "kl"):
            assert a[name] == pytest.approx(b[name], rel=1e-12 if a["step"] == 1 else 1e-9), name
    assert min(row["grad_norm"] for row in whole["rows"]) > 0.1, "clipping acts"
    one, two = (saved(tmp_path / name, 5, "weights") for name in ("whole", "cut"))
    for name in ("objective_module.weight", "objective_module.bias"):
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_module_is_saved_and_resumed_to_the_bit_and_never_exported(
    strategy, tiny, ratings, tmp_path
):
    argv = ("--precision=32-true", f"--strategy={strategy}")

    def run(name, *more):
        given = (tiny, ratings, tmp_path / name, *argv, *more)
        return ranks(2, lambda rank: rated(*given))[0]

    whole = run("whole")
    run("run", "--stop_at=3")
    assert_same(run("run", "--resume=auto"), whole)
    assert whole["weights"].keys() == load_file(tiny / "model.safetensors").keys()
    for kind in ("weights", "optimizer"):
        one, two = (saved(tmp_path / name, 5, kind) for name in ("run", "whole"))
        assert one.keys() == two.keys() and any("objective_module.bias" in n for n in one)
        assert all(torch.equal(x, two[n]) for n, x in one.items())
    rated(tiny, ratings, tmp_path / "one", "--precision=32-true", "--micro_batch_size=2")
    one, two = (saved(tmp_path / name, 5, "weights") for name in ("one", "whole"))
    head = "objective_module.weight"
    torch.testing.assert_close(one[head], two[head], rtol=0, atol=1e-4)


def test_a_checkpoint_with_a_module_is_exported_and_started_from_without_it(
    tiny, ratings, tmp_path
):
    for lora in (), ("--lora.rank=2",):
        out = tmp_path / f"lora-{len(lora)}"
        weights = rated(tiny, ratings, out, *lora)["weights"]
        checkpoint = out / "checkpoints" / "step-00000005"
        conftest.start("export", [str(checkpoint), f"--out={out / 'exported'}"])
        exported = load_file(out / "exported" / "model.safetensors")
        assert exported.keys() == weights.keys()
        assert all(torch.equal(x, weights[n]) for n, x in exported.items())
        train(checkpoint, ratings, out / "next", "--batch_size=6", "--max_steps=1")


def test_a_module_gets_the_states_that_predict_the_tokens_and_its_gradient_reaches_the_model(
    tiny, ratings, tmp_path
):
    """Against transformers, with the loss of the head alone."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(tiny).transformer
    losses, lengths = [], []

    class Compares(RatingKTO):
        def make_module(self, width):
            head = super().make_module(width)
            self.copy = copy.deepcopy(head)
            return head

        def loss(self, logps, ref_logps, batch, z):
            for example, outputs in zip(batch.examples, batch.outputs[:, 0]):
                x, (y,) = example.prompt, example.completions
                with torch.enable_grad():
                    states = hf(torch.tensor([[*x, *y]])).last_hidden_state[0]
                    logits = self.copy(states[len(x) - 1 : -1])
                    target = torch.full((1,), float(example.label))
                    losses.append(binary_cross_entropy_with_logits(logits[-1], target))
                torch.testing.assert_close(outputs[: len(y)], logits, atol=1e-4, rtol=0)
                assert not outputs[len(y) :].any()
                lengths.append(len(y))
            _, columns = super().loss(logps, ref_logps, batch, z)
            return columns["rating_loss"], columns

    argv = (*HEAD, "--max_steps=1", "--save_interval=1", "--optim.clip=null", "--optim.warmup=0",
            "--micro_batch_size=3", "--precision=32-true", "--optim.lr=1")  # fmt: skip
    handed = dict(objective=Compares, settings=RatingSettings)
    handed["optimizer"] = lambda policy, cfg: torch.optim.SGD(policy.parameters())
    train(tiny, ratings, tmp_path, *last_of_each(argv), **handed)
    assert len(lengths) == 7 and len(set(lengths)) > 2
    torch.stack(losses).mean().backward()
    start, after = model.load_model(tiny).unique_parameters(), saved(tmp_path, 1, "weights")
    for name, p in {"wpe.weight": hf.wpe.weight, "ln_f.weight": hf.ln_f.weight}.items():
        step = after[f"transformer.{name}"] - start[f"transformer.{name}"].detach()
        torch.testing.assert_close(step, -p.grad, atol=1e-5, rtol=1e-3)
        assert p.grad.abs().max() > 1e-3


class Learned(kto.KTO):
    """KTO whose beta is learned: a module that makes nothing of the hidden states."""

    def make_module(self, width):
        class Beta(torch.nn.Module):
            lr_scale = 3.0

            def __init__(self):
                super().__init__()
                self.log_beta = torch.nn.Parameter(torch.zeros(1))

            def forward(self, h_TC):
                return self.log_beta.exp().expand(len(h_TC))

        return Beta()

    def loss(self, logps, ref_logps, batch, z):
        r = (logps - ref_logps)[:, 0]
        sign = 2.0 * batch.label - 1
        beta = batch.outputs[:, 0, 0]
        return 1 - torch.sigmoid(beta * sign * (r - z)), {"beta": beta}

    metrics = Objective.metrics


@pytest.mark.parametrize("n, strategy", [(1, "auto"), (2, "ddp"), (2, "fsdp")])
def test_a_number_is_learned_with_a_learning_rate_of_its_own(n, strategy, tiny, ratings, tmp_path):
    argv = ("--batch_size=6", "--max_steps=3", "--optim.lr=1e-2", "--optim.warmup=0", "--precision=32-true",
            "--optim.schedule=constant", f"--strategy={strategy}")  # fmt: skip
    run, *_ = ranks(n, lambda r: train(tiny, ratings, tmp_path, *argv, objective=Learned))
    betas = [math.log(row["beta"]) for row in run["rows"]]
    assert betas[0] == betas[1] == 0, "at r = 0 beta has no gradient"
    # AdamW's step for the gradients 0 and g: the corrected means of g and of its square
    mean, square = 0.1 / (1 - 0.9**2), 0.001 / (1 - 0.999**2)
    assert abs(betas[2]) == pytest.approx(3 * 1e-2 * mean / square**0.5, rel=1e-2)


def test_an_objective_by_token_and_one_with_a_cached_reference_have_a_module_too(
    tiny, ratings, pairs, tmp_path
):
    class ByToken(RatingKTO):
        by_token = True

    cache = f"--reference_cache={tmp_path / 'cache'}"
    whole = rated(tiny, ratings, tmp_path / "a", "--precision=32-true")
    for name, kind, more in (("b", ByToken, ()), ("c", RatingKTO, (cache,))):
        argv = (*HEAD, "--precision=32-true", *more)
        out = tmp_path / name
        run = train(tiny, ratings, out, *argv, objective=kind, settings=RatingSettings)
        for a, b in zip(numbers(run), numbers(whole), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
            assert a["rating_loss"] == pytest.approx(b["rating_loss"], abs=1e-5)


@pytest.mark.parametrize("lora", [(), ("--lora.rank=2",)])
def test_a_module_goes_on_from_one_iteration_to_the_next(lora, tiny, ratings, tmp_path):
    class OnlineRating(RatingKTO):
        records = "prompts"

    argv = (*COMMON, *HANDED["grpo"][2], "--batch_size=6", "--epochs=1", *lora)
    handed = dict(program="online", objective=OnlineRating, settings=OnlineRatingSettings)
    handed |= dict(checker=lambda answers: [len(a.completion) % 2 == 0 for a in answers])

    def run(name, *more):
        return train(tiny, ratings, tmp_path / name, *last_of_each([*argv, *more]), **handed)

    whole = run("whole")
    run("run", "--stop_at=4")
    assert_same(run("run", "--resume=auto"), whole)


@dataclass(frozen=True)
class OnlineRatingSettings(online.Settings):
    kto: RatingArguments = field(default_factory=RatingArguments)


@pytest.mark.parametrize(
    "module, fault",
    [
        (lambda: torch.nn.BatchNorm1d(32), "running_mean, running_var, num_batches_tracked: only"),
        (lambda: torch.nn.Linear(32, 1).requires_grad_(False), "weight, bias: only parameters"),
        (lambda: torch.nn.ParameterDict({"beta": torch.zeros(())}), "beta: expected at least one"),
        (lambda: [torch.nn.Linear(32, 1)], "expected a torch.nn.Module, got list"),
        (lambda: torch.nn.Flatten(0), r"one output a token, shape \((\d+), ...\), not \("),
    ],
)
def test_a_module_that_could_not_be_saved_or_used_is_refused(
    module, fault, tiny, ratings, tmp_path
):
    class Wrong(kto.KTO):
        def make_module(self, width):
            return module()

    with pytest.raises((BadInput, Failed), match=f"make_module: {fault}"):
        train(tiny, ratings, tmp_path, *COMMON, objective=Wrong)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_checkpoint_of_another_module_is_refused_by_its_name(tiny, ratings, tmp_path):
    class Same(RatingKTO): ...  # all of this file: another program is refused before

    class Without(kto.KTO): ...

    class Wider(RatingKTO):
        def make_module(self, width):
            return torch.nn.Linear(width, 2)

    class Other(RatingKTO):
        def make_module(self, width):
            return torch.nn.ParameterDict({"x": torch.zeros(1)})

    def run(kind, out, *argv):
        train(tiny, ratings, out, *HEAD, *argv, objective=kind, settings=RatingSettings)

    run(Same, tmp_path / "a", "--stop_at=2")
    for kind in (Wider, Other, Without):
        fault = "step-00000002: objective_module.bias: not of this model"
        with pytest.raises(BadInput, match=fault):
            run(kind, tmp_path / "a", "--resume=auto")
    run(Without, tmp_path / "b", "--stop_at=2")
    with pytest.raises(BadInput, match="step-00000002: holds no objective_module.weight"):
        run(Same, tmp_path / "b", "--resume=auto")


# ---- partners of one's own ---------------------------------------------------------------------


class Follower(kto.KTO):
    """Whose completion each example borrows depends on what the step before has left."""

    shift = 0

    def after_step(self, columns, kl):
        self.shift = 1 + int(1e6 * columns["loss"].mean().item()) % 5

    def state_dict(self):
        return {"shift": self.shift}

    def partners(self, examples):
        seen.append((threading.current_thread() is threading.main_thread(), self.shift))
        return [(i + self.shift) % len(examples) for i in range(len(examples))]


seen: list[tuple[bool, int]] = []


def test_partners_of_ones_own_are_chosen_by_what_the_step_before_has_left(tiny, ratings, tmp_path):
    argv = ("--batch_size=7", "--max_steps=6", "--epochs=9", "--optim.lr=1e-2", "--keep_last=9",
            "--save_interval=1", "--precision=32-true")  # fmt: skip
    seen.clear()
    whole = train(tiny, ratings, tmp_path / "whole", *argv, objective=Follower)
    start_check, *steps = seen
    left = [state(tmp_path / "whole", step)["shift"] for step in range(1, 6)]
    assert [shift for _, shift in steps] == [0, *left]
    assert len({shift for _, shift in steps}) > 2 and all(main for main, _ in seen)
    train(tiny, ratings, tmp_path / "run", *argv, "--stop_at=3", objective=Follower)
    again = train(tiny, ratings, tmp_path / "run", *argv, "--resume=auto", objective=Follower)
    assert_same(again, whole)


def test_our_own_partners_are_chosen_a_step_ahead_in_a_thread(tiny, ratings, tmp_path, monkeypatch):
    threads = []

    def mismatched(examples):
        threads.append(threading.current_thread() is threading.main_thread())
        return data.mismatched(examples)

    monkeypatch.setattr("train.mismatched", mismatched)
    train(tiny, ratings, tmp_path, "--batch_size=7", "--max_steps=3", "--eval.samples=0")
    assert threads == [True, False, False, False], "of the start check, and of the steps"


# ---- what would be lost or replaced without a word ----------------------------------------------


@pytest.mark.parametrize("program", ["bco", "hinge", "simpo"])
def test_an_example_of_weight_0_teaches_nothing_whatever_the_loss(program, tiny, tmp_path):
    """The same as an example that no gradient comes from: all weights 0 leave the model as it is."""
    kind = "paired" if HANDED[program][0] is dpo else "rated"
    records = {
        "paired": [{"prompt": p, "chosen": "a", "rejected": "bb", "weight": 0} for p in "klmnop"],
        "rated": [{"prompt": p, "completion": "a", "label": True, "weight": 0} for p in "klmnop"],
    }[kind]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    run = train_example(program, tiny, file, tmp_path / "run", *COMMON, "--max_steps=2")
    assert [(row["loss"], row["grad_norm"]) for row in run["rows"]] == [(0, 0)] * 2


def test_a_loss_on_tokens_begins_at_log_ratios_of_exactly_0(tiny, ratings, tmp_path):
    argv = ("--batch_size=7", "--max_steps=1", f"--data.val={ratings}", "--eval.samples=0")
    argv = (*argv, "--precision=bf16-mixed")
    first = train_example("token_kto", tiny, ratings, tmp_path, *argv)["rows"][0]
    validated = rows_of(tmp_path / "val.csv")[0]
    for column in ("rewards/chosen", "rewards/rejected"):
        assert first[column] == 0 == float(validated[column]), column


class Columns(kto.KTO):
    """With columns of these names, in this order; all of name x are 1.0, of name y 2.0."""

    names = staticmethod(lambda batch: "xy")

    def loss(self, logps, ref_logps, batch, z):
        loss_B, columns = super().loss(logps, ref_logps, batch, z)
        values = {"x": 1.0, "y": 2.0}
        more = {name: torch.full_like(loss_B, values[name]) for name in self.names(batch)}
        return loss_B, columns | more


class ByLabel(Columns):
    names = staticmethod(lambda batch: "x" if batch.label.any() else "y")


class ByRank(Columns):
    names = staticmethod(lambda batch: "xy" if os.environ["RANK"] == "0" else "y")


class OrderByRank(Columns):
    names = staticmethod(lambda batch: "xy" if os.environ["RANK"] == "0" else "yx")


@pytest.mark.parametrize("n, kind", [(1, ByLabel), (2, ByRank)])
def test_a_column_that_only_some_micro_batches_have_is_refused(n, kind, tiny, ratings, tmp_path):
    argv = ("--batch_size=6", "--micro_batch_size=1", "--max_steps=2", "--strategy=ddp")

    def work(rank):
        with pytest.raises(Failed, match="^loss: columns x(, y)?: not of every micro-batch"):
            train(tiny, ratings, tmp_path, *argv, objective=kind)

    ranks(n, work)


def test_columns_may_come_in_another_order_on_another_rank(tiny, ratings, tmp_path):
    argv = ("--batch_size=6", "--max_steps=2", "--strategy=ddp", f"--data.val={ratings}")
    run, *_ = ranks(2, lambda rank: train(tiny, ratings, tmp_path, *argv, objective=OrderByRank))
    for row in (*run["rows"], *rows_of(tmp_path / "val.csv")):
        assert (float(row["x"]), float(row["y"])) == (1.0, 2.0)


class BothRatios(kto.KTO):
    """Refuses log-ratios that the first step cannot have."""

    def loss(self, logps, ref_logps, batch, z):
        if self.is_first:
            assert (logps == ref_logps).all()
        return super().loss(logps, ref_logps, batch, z)

    is_first = True

    def after_step(self, columns, kl):
        self.is_first = False


def test_a_rank_without_an_example_of_its_own_computes_a_loss_that_is_finite_too(
    tiny, ratings, tmp_path
):
    argv = ("--batch_size=3", "--micro_batch_size=1", "--max_steps=2", "--strategy=ddp")
    run, *_ = ranks(2, lambda rank: train(tiny, ratings, tmp_path, *argv, objective=BothRatios))
    assert len(run["rows"]) == 2


class Graded(kto.KTO):
    """With a column of its own: how far the log-prob is from the reference's, squared."""

    squares = []  # of the last step's examples

    def after_step(self, columns, kl):
        Graded.squares = (columns["logratio"] ** 2).tolist()

    def loss(self, logps, ref_logps, batch, z):
        loss_B, columns = super().loss(logps, ref_logps, batch, z)
        return loss_B, columns | {"square": columns["logratio"] ** 2}


@pytest.mark.parametrize("n, more", [(1, ()), (1, ("--micro_batch_size=4",)), (2, ())])
def test_a_column_of_ones_own_reaches_metrics_and_val_as_a_mean(n, more, tiny, ratings, tmp_path):
    argv = ("--batch_size=7", "--max_steps=3", "--optim.lr=1e-2", f"--data.val={ratings}",
            "--eval.samples=0", "--precision=64-true", *more)  # fmt: skip
    if n > 1:
        argv = (*argv, "--strategy=ddp")

    def work(rank):
        return train(tiny, ratings, tmp_path, *argv, objective=Graded), Graded.squares

    (run, squares), *_ = ranks(n, work)
    assert len(squares) == 7 and max(squares) > 0
    assert run["rows"][-1]["square"] == pytest.approx(sum(squares) / 7, rel=1e-9)
    assert float(rows_of(tmp_path / "val.csv")[-1]["square"]) > 0


@pytest.mark.parametrize(
    "name", ["loss", "entropy", "grad_norm", "lr", "tokens/s", "kl", "auc", "step"]
)
def test_a_column_with_a_name_of_the_programs_is_refused(name, tiny, ratings, tmp_path):
    def loss(objective, *given):
        loss_B, columns = kto.KTO.loss(objective, *given)
        return loss_B, columns | {name: loss_B}

    def objective(args):
        return Changed(args, loss=loss)

    with pytest.raises(Failed, match=f"^loss: {name}: the program has a column of this name"):
        train(tiny, ratings, tmp_path, *COMMON, objective=objective)


def state_of(**fields):
    """KTO that remembers, from its first step on, what `fields` has."""

    class Stateful(kto.KTO):
        def __init__(self, args):
            super().__init__(args)
            self.average = 0.0

        def after_step(self, columns, kl):
            self.average = fields["later"]

        def state_dict(self):
            as_saved = fields.get("as_saved", lambda x: x)
            return {fields.get("name", "average"): as_saved(self.average)}

    return Stateful


@pytest.mark.parametrize(
    "fields, fault",
    [
        ({"name": "mean", "later": 1.0}, "mean: no attribute of this name: .* is saved"),
        ({"later": {0: 1.0}}, r"average: a resume would make \{'0': 1.0\} of it, and it is \{0: 1.0\}"),
        ({"later": (1.0, 2.0)}, r"average: a resume would make \[1.0, 2.0\] of it"),
        ({"later": torch.ones(()), "as_saved": float}, r"average: a resume would make 1.0 of it, and it is tensor"),
        ({"later": torch.ones(())}, r"average: Object of type Tensor .*: .* float\(x\) or x.tolist"),
    ],
)  # fmt: skip
def test_a_state_that_a_resume_would_not_get_is_refused_by_the_first_step(
    fields, fault, tiny, ratings, tmp_path
):
    with pytest.raises(BadInput, match=f"^state_dict: Stateful: {fault}"):
        train(tiny, ratings, tmp_path, *COMMON, objective=state_of(**fields))
    metrics = tmp_path / "metrics.csv"
    assert not metrics.exists() or len(rows_of(metrics)) == 0, "before the second step"


@pytest.mark.parametrize("later", [{"0": [1.0, None]}, float("nan"), "text", -0.0])
def test_a_state_of_plain_values_is_saved(later, tiny, ratings, tmp_path):
    train(tiny, ratings, tmp_path, *COMMON, "--max_steps=2", objective=state_of(later=later))
    assert repr(state(tmp_path, 2)["average"]) == repr(later)


@pytest.mark.parametrize("setting", ["--reference={tiny}", "--reference_cache=cache"])
def test_a_reference_for_an_objective_without_one_is_refused(setting, tiny, pairs, tmp_path):
    name = setting[2:].split("=")[0]
    with pytest.raises(BadInput, match=f"^{name}: SimPO has no reference"):
        train_example("simpo", tiny, pairs, tmp_path / "run", *COMMON, setting.format(tiny=tiny))


def test_weights_that_an_optimizer_leaves_out_are_refused_unless_they_are_frozen(
    tiny, ratings, tmp_path
):
    def blocks_only(policy, cfg):
        return torch.optim.SGD(policy.transformer.h.parameters(), lr=cfg.optim.lr)

    def others_at_rate_0(policy, cfg):
        blocks = list(policy.transformer.h.parameters())
        others = [p for p in policy.parameters() if all(p is not q for q in blocks)]
        return torch.optim.SGD([{"params": blocks}, {"params": others, "lr_scale": 0}], lr=1)

    fault = r"^optimizer: \d+ weights are in none .* would never change, \S*(wte|wpe|ln_f)\S* first"
    with pytest.raises(BadInput, match=fault):
        train(tiny, ratings, tmp_path / "a", *COMMON, optimizer=blocks_only)
    train(tiny, ratings, tmp_path / "b", *COMMON, "--max_steps=1", optimizer=others_at_rate_0)
    now, start = saved(tmp_path / "b", 1, "weights"), model.load_model(tiny).unique_parameters()
    for name, x in now.items():
        assert torch.equal(x, start[name].detach()) == (".h." not in name), name


def test_a_run_in_float64_leaves_no_trace_in_its_process(tiny, ratings, tmp_path):
    argv = (*COMMON, "--max_steps=2")
    first = train(tiny, ratings, tmp_path / "a", *argv)
    train(tiny, ratings, tmp_path / "b", *argv, "--precision=64-true")
    assert torch.get_default_dtype() == torch.float32
    torch.set_default_dtype(torch.float64)  # as a run leaves it that has ended by an error in setup
    assert_same(train(tiny, ratings, tmp_path / "c", *argv), first)


# ---- more that a fork may ask for ----------------------------------------------------------------


def test_the_columns_of_any_examples_are_those_that_validation_sees(tiny, ratings, tmp_path):
    argv = ("--batch_size=6", "--max_steps=4", f"--data.val={ratings}", "--eval.samples=0",
            "--optim.lr=1e-2", "--micro_batch_size=5", "--precision=64-true")  # fmt: skip

    class Paced(Trainer):
        """The examples of the largest log-prob a token first."""

        def fit(self, examples=None, plan=None):
            examples = self.run.examples["train"]
            columns, kl = self.score_examples(examples)
            assert len(columns["logp"]) == len(kl.logratio) == len(examples)
            assert self.run.policy.training
            order = columns["logp"].argsort(descending=True).tolist()
            ended = super().fit([examples[i] for i in order], plan)
            means.update({n: x.mean().item() for n, x in self.score_examples(examples)[0].items()})
            return ended

    def work(rank):
        train(tiny, ratings, tmp_path / f"{n}", *argv, trainer=Paced)
        return means

    for n in (1, 2):
        means = {}
        argv = (*argv, "--strategy=ddp") if n == 2 else argv
        found, *_ = ranks(n, work)
        row = rows_of(tmp_path / f"{n}" / "val.csv")[-1]
        assert found["loss"] == pytest.approx(float(row["loss"]), rel=1e-9)
        assert found["logratio"] != 0


class Fresh(kto.KTO):
    """z of completions that no example has."""

    def partners(self, examples):
        return [np.array([7, 8, 9 + i][: 1 + i % 3], np.int32) for i in range(len(examples))]


def test_partners_may_be_completions(tiny, ratings, tmp_path):
    argv = ("--batch_size=7", "--max_steps=3", "--optim.lr=1e-2", "--precision=64-true")

    class AsExamples(kto.KTO):
        """The same by hand: the completions belong to examples behind the step's."""

        def partners(self, examples):
            return list(range(len(examples)))

    class Lends(Trainer):
        def no_gradient_pass(self, batch, score_pairs, objective):
            lent = Fresh.partners(objective, batch.examples)
            both = [e._replace(completions=(y,)) for e, y in zip(batch.examples, lent)]
            own = super().no_gradient_pass(batch, score_pairs, objective)
            lending = data.make_batch(self.run, both, objective)
            return own._replace(kl=super().no_gradient_pass(lending, self.forward, objective).kl)

    by_hand = train(tiny, ratings, tmp_path / "a", *argv, objective=AsExamples, trainer=Lends)
    for more in ((), ("--micro_batch_size=3",)):
        run = train(tiny, ratings, tmp_path / f"b{len(more)}", *argv, *more, objective=Fresh)
        for a, b in zip(run["rows"], by_hand["rows"], strict=True):
            assert a["kl/pairs"] == 7
            for name in ("loss", "kl", "kl/stderr"):
                assert a[name] == pytest.approx(b[name], rel=1e-9), name

    class ByToken(Fresh):
        by_token = True

        def partners(self, examples):
            return [np.arange(5, 5 + 40, dtype=np.int32) for _ in examples]

    rows = train(tiny, ratings, tmp_path / "c", *argv, objective=ByToken)["rows"]
    assert rows[-1]["kl/stderr"] > 0, "longer than any completion of the step"


def test_a_second_model_beside_the_reference(tiny, ratings, tmp_path):
    """As docs/forks.md has it; here it is the reference itself."""
    seen = []

    class WithTeacher(Trainer):
        def __init__(self, run):
            super().__init__(run)
            teacher = model.load_model(fetch_model(str(tiny)), None, torch.get_default_dtype())
            self.teacher = run.fabric.to_device(model.freeze(teacher, run.cfg.precision))

        def micro_batch_loss(self, objective, batch, micro, packed, *rest):
            with torch.no_grad(), self.run.fabric.autocast():
                objective.teacher_logps = self.teacher(packed)
            return super().micro_batch_loss(objective, batch, micro, packed, *rest)

    class Taught(kto.KTO):
        def loss(self, logps, ref_logps, batch, z):
            seen.append((ref_logps - self.teacher_logps).abs().max().item())
            return super().loss(logps, ref_logps, batch, z)

    argv = (*COMMON, "--max_steps=3", "--precision=bf16-mixed")
    train(tiny, ratings, tmp_path, *argv, objective=Taught, trainer=WithTeacher)
    assert len(seen) >= 3 and seen == [0] * len(seen)


class OwnAnswers(kto.KTO):
    """z of answers that the policy gives to the step's prompts before it."""

    run = None

    def partners(self, examples):
        run, prompts = self.run, [e.prompt for e in examples]
        seed = run.cfg.seed * 1009 + run.state.step
        ids = generate(run.fabric, run.policy, prompts, run.tokenizer, Sampling(), 5, seed)
        return [np.array(x, np.int32) for x in ids]


class HandsOver(Trainer):
    def __init__(self, run):
        super().__init__(run)
        run.objective.run = run


def test_z_of_fresh_answers_of_the_policy_resumes_to_the_bit(tiny, ratings, tmp_path):
    handed = dict(objective=OwnAnswers, trainer=HandsOver)
    whole = train(tiny, ratings, tmp_path / "whole", *COMMON, **handed)
    assert all(row["kl/pairs"] == 6 for row in whole["rows"])
    assert any(row["kl/stderr"] > 0 for row in whole["rows"])
    train(tiny, ratings, tmp_path / "run", *COMMON, "--stop_at=3", **handed)
    assert_same(train(tiny, ratings, tmp_path / "run", *COMMON, "--resume=auto", **handed), whole)
