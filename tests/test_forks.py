"""A new idea is one short file: the examples train, resume to the bit after a kill, and give the same on two processes;
and a copy of kto.py with another loss does all that by the commands that a user types."""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ROOT,
    Started,
    assert_same,
    checkpoint_tensors,
    killed,
    numbers,
    ranks,
    result,
    train,
    until,
)  # fmt: skip
from safetensors.torch import load_file

import dpo
import kto
import model
import online
from records.examples import Example
from runs.cli import parse
from runs.errors import BadInput, Failed, Interrupted
from runs.optimizer import make_optimizer
from setup import setup
from train import Trainer

EXAMPLES = ROOT / "examples"
sys.path += [str(EXAMPLES), str(ROOT / "benchmarks")]
COMMON = ("--batch_size=6", "--max_steps=6", "--epochs=9", "--optim.lr=1e-2", "--save_interval=2",
          "--precision=32-true", "--micro_batch_size=4")  # fmt: skip


# example: (its program, what it hands over to the program's main, its own arguments)
HANDED = {
    "bco": (kto, {"objective": "BCO", "settings": "Settings"}, ()),
    "ema_z": (kto, {"objective": "EMA"}, ()),
    "token_kto": (kto, {"objective": "TokenKTO"}, ()),
    "z_by_source": (kto, {"objective": "ZBySource"}, ()),
    "tr_kto": (kto, {"objective": "TRKTO", "settings": "Settings"}, ("--kto.interval=2",)),
    "muon": (kto, {"optimizer": "muon"}, ("--optim.ema=0.5",)),
    "simpo": (dpo, {"objective": "SimPO", "settings": "Settings"}, ()),
    "orpo": (dpo, {"objective": "ORPO", "settings": "Settings"}, ()),
    "hinge": (dpo, {"objective": "Hinge", "settings": "Settings"}, ()),
    "tdpo": (dpo, {"objective": "TDPO", "settings": "Settings"}, ()),
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
    for strategy in ("ddp", "fsdp") if program != "tdpo" else ("ddp",):
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
    "program", ["bco", "ema_z", "simpo", "hinge", "orpo", "tr_kto", "muon", "grpo"]
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
            r"loss: loss: one number an example, shape \(6,\), not \(\)",
        ),
        (
            {"loss": lambda o, *a: (kto.KTO.loss(o, *a)[0], {"kl": a[3]})},
            r"loss: kl: one number an example, shape \(6,\), not \(\)",
        ),
        (
            {"loss": lambda o, lp, ref, batch, z: (lp[:, 0] * batch.extra("age"), {})},
            "data.extra: age: the loss asks for it: --data.extra age",
        ),
        (
            {"state_dict": lambda o: {"z": torch.zeros(3)}},
            "state_dict: Changed: Object of type Tensor is not JSON serializable",
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
    "example, setting", [("token_kto", "--data.score_prompt=true"), ("token_kto", "--reference_cache=c"),
                         ("tdpo", "--strategy=fsdp")]
)  # fmt: skip
def test_what_an_objective_by_token_cannot_have_is_refused_before_any_work(
    example, setting, tiny, ratings, pairs, tmp_path
):
    data = pairs if HANDED[example][0] is dpo else ratings
    with pytest.raises(BadInput, match="this objective"):
        train_example(example, tiny, data, tmp_path / "run", *COMMON, setting)
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
        def after_step(self, columns, kl):
            self.z = kl.z.item()

    class Remembers(Forgets):
        def state_dict(self):
            return {"z": 0.0}

    Forgets.after_step.__qualname__ = "Objective.after_step"  # as in a class Objective of a fork
    line = "Forgets: after_step without a state_dict: a resume forgets what it kept"
    for kind, said in ((Forgets, True), (Remembers, False), (kto.KTO, False)):
        out = f"--out_dir={tmp_path / kind.__name__}"
        argv = [f"--model={tiny}", f"--data.train={ratings}", out, "--batch_size=6"]
        cfg = parse(kto.Settings, argv, "", demo="demo.yaml")
        with Trainer(setup(cfg, kind(cfg.kto))):
            assert (line in capsys.readouterr().out.splitlines()) == said


def test_a_step_that_is_not_finite_writes_its_examples(tiny, ratings, tmp_path):
    def loss(objective, *given):
        loss_B, columns = kto.KTO.loss(objective, *given)
        return loss_B / given[2].label, columns  # 0 / 0 or a / 0 for a thumb down

    argv = [f"--model={tiny}", f"--data.train={ratings}", f"--out_dir={tmp_path}"]
    cfg = parse(kto.Settings, [*argv, "--batch_size=6", "--max_steps=2"], "", demo="demo.yaml")
    with pytest.raises(Failed, match=r"step 1: not finite .*ratings.jsonl:\d+.*untouched"):
        with Trainer(setup(cfg, Changed(cfg.kto, loss=loss))) as trainer:
            trainer.fit()
    with open(tmp_path / "examples-1.csv") as f:
        table = list(csv.DictReader(f))
    assert len(table) == 6 and {x["loss"] for x in table if x["label"] == "False"} <= {"inf", "nan"}


# ---- what follows the weights: an average of them, a reference that moves ----------------------


def saved(out: Path, step: int, kind: str) -> dict[str, torch.Tensor]:
    return checkpoint_tensors(out / "checkpoints" / f"step-{step:08d}", kind)


SMOOTH = ("--batch_size=6", "--max_steps=4", "--optim.lr=1e-2", "--optim.eps=0.1", "--save_interval=1",
          "--keep_last=9", "--eval.samples=0", "--precision=32-true")  # fmt: skip


def test_the_average_of_the_weights_by_hand_is_validated_and_exported(tiny, ratings, tmp_path):
    argv = (*SMOOTH, f"--data.val={ratings}", "--val_interval=2", "--keep_best=loss")
    plain = train(tiny, ratings, tmp_path / "plain", *argv)
    run = train(tiny, ratings, tmp_path / "run", *argv, "--optim.ema=0.75")
    assert numbers(run) == numbers(plain), "the raw weights train on"
    average = dict(model.load_model(tiny).unique_parameters())
    for step in range(1, 5):
        now = saved(tmp_path / "run", step, "weights")
        average = {n: 0.75 * x + 0.25 * now[n] for n, x in average.items()}
    for n, x in saved(tmp_path / "run", 4, "ema").items():
        torch.testing.assert_close(x, average[n].detach(), rtol=0, atol=1e-6)
    exported = dict(model.load_model(tmp_path / "run" / "final").unique_parameters())
    for n, x in saved(tmp_path / "run", 4, "ema").items():
        assert torch.equal(exported[n], x)
    assert torch.equal(load(tmp_path / "run" / "best"), load(tmp_path / "run" / "final"))
    assert not torch.equal(load(tmp_path / "run" / "final"), load(tmp_path / "plain" / "final"))
    # a run that starts from the export, compared with the same reference, validates as the last row
    argv = [x for x in argv if not x.startswith(("--optim.lr", "--max_steps"))]
    argv += [f"--reference={tiny}", "--optim.lr=0", "--max_steps=1"]
    train(tmp_path / "run" / "final", ratings, tmp_path / "again", *argv)
    before, after = (rows_of(tmp_path / name / "val.csv") for name in ("run", "again"))
    assert float(before[-1]["loss"]) == pytest.approx(float(after[0]["loss"]), abs=1e-6)
    plain_rows = rows_of(tmp_path / "plain" / "val.csv")
    assert (
        before[0]["loss"] == plain_rows[0]["loss"] and before[-1]["loss"] != plain_rows[-1]["loss"]
    )


def load(folder: Path) -> torch.Tensor:
    """All weights of an exported model, in one row."""
    weights = load_file(folder / "model.safetensors")
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


def rows_of(file: Path) -> list[dict]:
    with open(file) as f:
        return list(csv.DictReader(f))


def test_the_average_is_sharded_and_the_same_on_two_processes(tiny, ratings, tmp_path):
    argv = (*SMOOTH, "--optim.ema=0.75")
    train(tiny, ratings, tmp_path / "one", *argv)
    two = (tiny, ratings, tmp_path / "fsdp", "--strategy=fsdp", *argv)
    ranks(2, lambda rank: train(*two) and None)
    a, b = (load(tmp_path / name / "final") for name in ("one", "fsdp"))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_a_signal_during_a_validation_leaves_the_raw_weights_in_the_policy(tiny, ratings, tmp_path):
    argv = ("--max_steps=2", "--optim.ema=0.5", "--optim.lr=1e-2")
    with trainer_of(tiny, ratings, tmp_path, *argv) as trainer:
        trainer.fit()
        run = trainer.run

        def weights():
            return run.policy.unique_parameters()["transformer.ln_f.bias"]

        raw = weights().detach().clone()
        with pytest.raises(Interrupted):
            with run.averaged_policy():
                assert not torch.equal(weights(), raw)
                raise Interrupted(15)
        assert torch.equal(weights(), raw)


class Follows(kto.KTO):
    """A reference that moves by a quarter after each second step."""

    def reference_share(self, step):
        return 0.25 if step % 2 == 0 else 0.0


def test_a_reference_that_moves_by_hand(tiny, ratings, tmp_path):
    train(tiny, ratings, tmp_path, *SMOOTH, objective=Follows)
    reference = dict(model.load_model(tiny).unique_parameters())
    for step in (1, 2, 3, 4):
        now = saved(tmp_path, step, "weights")
        if step in (2, 4):
            reference = {n: 0.75 * x.detach() + 0.25 * now[n] for n, x in reference.items()}
        for n, x in saved(tmp_path, step, "reference").items():
            torch.testing.assert_close(x, reference[n], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "argv, setting",
    [
        ("--lora.rank=2", "lora.rank"),
        ("--reference={tiny}", "reference"),
        ("--reference_cache=cache", "reference_cache"),
    ],
)
def test_a_reference_that_cannot_move_is_refused_at_the_start(argv, setting, tiny, tmp_path):
    with pytest.raises(BadInput, match=f"^{setting}: Follows moves the reference"):
        train(tiny, "no-such-file", tmp_path, argv.format(tiny=tiny), objective=Follows)


# ---- an optimizer of one's own -----------------------------------------------------------------


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
    code, said, stderr = run(clone, tmp_path / "a", "python examples/tr_kto.py --help").ended()
    assert code == 0 and "TR-KTO (arXiv 2404.09656)" in said, stderr
    assert "--kto.interval" in said and "from one such update to the next" in said
