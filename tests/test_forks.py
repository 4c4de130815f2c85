"""A new idea is one short file: the examples train, resume to the bit after a kill, and give the same on two processes;
and a copy of kto.py with another loss does all that by the commands that a user types."""

import json
import os
import random
import re
import shlex
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import tokens
import torch
import transformers
from conftest import (
    ROOT,
    Started,
    assert_same,
    checkpoint_tensors,
    even,
    killed,
    numbers,
    ranks,
    refused,
    result,
    rows_of,
    train,
)  # fmt: skip
from safetensors.torch import load_file
from tiny_models import ragged
from torch.nn.functional import binary_cross_entropy_with_logits

import dpo
import kto
import online
from checks import check_objective
from infra.checkpoint import checkpoint_folder
from infra.console import BadInput, Failed
from infra.logger import Logger
from models import load
from packing import pack
from trainer import Trainer

EXAMPLES = ROOT / "examples"

COMMON = ("--batch_size=6", "--max_steps=6", "--optim.lr=1e-2", "--save_interval=2",
          "--precision=32-true", "--micro_batch_size=4", "--eval.samples=0")  # fmt: skip


ONLINE = ("--epochs=1", "--online.max_iterations=3", "--online.prompts_per_iteration=3",
          "--online.num_generations=4", "--online.max_new_tokens=5", "--data.max_completion=12")  # fmt: skip
# example: (its program, what it hands over to the program's main, its own arguments)
HANDED = {
    "bco": (kto, "objective=BCO settings=Settings", ""),
    "token_kto": (kto, "objective=TokenKTO", "--data.train={marked}"),
    "learned_z": (kto, "objective=LearnedZ", ""),
    "simpo": (dpo, "objective=SimPO settings=Settings", ""),
    "humanline": (kto, "objective=Humanline settings=Settings trainer=MovingReference",
                  "--kto.fall=0.2 --kto.rise=0.1"),
    "grpo": (online, "objective=GRPO settings=Settings rate=rate", ""),
    "online_dpo": (online, "objective=OnlineDPO settings=Settings rate=rate",
                   "--online.prompts_per_iteration=16"),
    "oapl": (online, "objective=OAPL settings=Settings rate=rate", ""),
    "next_message": (kto, "objective=NextMessage settings=Settings trainer=WithNext make_records=without_thumb",
                     "--data.train={with_next} --data.val={with_next} --data.extra=next"),
    "distill": (online, "objective=Distill settings=Settings rate=rate",
                "--reference={teacher} --kto.top_k=3"),
    "judge": (online, "settings=Settings trainer=Judged checker=judge",
              "--judge.server={server} --judge.model=m --eval.prompts=4"),
    "reward_model": (online, "settings=Settings trainer=Rewarded rate=rate checker=reward_model "
                     "make_records=with_dialogue",
                     "--reward.model={reward} --reward.threshold=median --data.extra=dialogue --eval.prompts=4"),
}  # fmt: skip
PLACES = {}  # what stands in the arguments in braces


def train_example(name: str, tiny, data, out: Path, *argv: str) -> dict:
    """An example in this process, with what it hands over and its own arguments."""
    program, names, own = HANDED[name]
    module = import_module(name)
    handed = {
        key: getattr(module, value) for key, value in (word.split("=") for word in names.split())
    }
    if program is online:
        handed.setdefault("checker", even)
        argv += ONLINE
    argv += tuple(own.format(**PLACES).split())
    return train(tiny, data, out, *argv, program=program.__name__, **handed)


def saved(out: Path, step: int, kind: str) -> dict[str, torch.Tensor]:
    return checkpoint_tensors(checkpoint_folder(out, step), kind)


def state(out: Path, step: int) -> dict:
    """What the objective remembers."""
    file = checkpoint_folder(out, step) / "state.json"
    return json.loads(file.read_text())["objective_state"]


# ---- the examples --------------------------------------------------------------------------------


@pytest.fixture
def places(judge_server, reward_folder, parity_ref, tmp_path):
    """The server and the models that some of the examples ask; records with marks and with the user's next message."""
    lines = (ROOT / "demo" / "val.jsonl").read_text().splitlines()[:24]
    records = [json.loads(line) for line in lines]
    said = ["Thank you!" if r["label"] else f"No, {r['prompt'][6:9]}" for r in records]
    marks = [[{"start": 1, "end": 6, "label": not r["label"]}] for r in records[::2]]
    with_next = [r | {"next": text} for r, text in zip(records, said)]
    marked = [r | {"spans": spans} for r, spans in zip(records[::2], marks)] + records[1::2]
    PLACES.update(server=judge_server.url, reward=reward_folder, teacher=parity_ref)
    for name, some in {"with_next": with_next, "marked": marked}.items():
        PLACES[name] = tokens.write(tmp_path / f"{name}.jsonl", *some)


@pytest.mark.parametrize("name", HANDED)
def test_an_algorithm_from_outside_trains_resumes_and_shards(
    name, tiny, ratings, pairs, tmp_path, places
):
    data = pairs if HANDED[name][0] is dpo else ratings
    # eps: as in test_step.py, or a gradient of rounding moves a weight, and another token is sampled
    argv = (*COMMON, "--optim.eps=1e-5", f"--data.val={data}", "--val_interval=3")
    whole = train_example(name, tiny, data, tmp_path / "whole", *argv)
    if name == "grpo":
        assert any(row["clipped"] for row in whole["rows"]), "or the clamp is not tested"
    elif HANDED[name][0] is online or name == "next_message":
        # the loss of DPO begins at ln 2 in each iteration
        at_least = 3 if name == "online_dpo" else 4
        assert len({row["loss"] for row in whole["rows"]}) >= at_least, "it learns from something"
    else:
        assert whole["rows"][-1]["loss"] < whole["rows"][0]["loss"], "it learns"
    out = tmp_path / "run"
    step_4 = (Logger, "step"), 4
    killed(*step_4, lambda: train_example(name, tiny, data, out, *argv))
    assert_same(train_example(name, tiny, data, out, *argv, "--resume=auto"), whole)
    two = (name, tiny, data, tmp_path / "fsdp", "--strategy=fsdp", *argv)
    run, _ = ranks(2, lambda rank: train_example(*two))
    for a, b in zip(numbers(run), numbers(whole), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)


def run(clone: Path, folder: Path, command: str) -> tuple[int, str, str]:
    """The command as typed in the clone. -> exit code, stdout, stderr"""

    def first():
        os.chdir(clone)
        sys.path.insert(0, str(clone))

    program, *argv = shlex.split(command)[1:]
    return Started(folder, program, argv, first=first).ended()


@pytest.mark.parametrize("name", HANDED)
def test_an_example_runs_where_it_lies_by_its_command(name, clone, tmp_path, places):
    text = (EXAMPLES / f"{name}.py").read_text()
    command, *_ = re.findall(r'(python examples/.*?)(?:""")?$', text, re.M)
    command = command.replace("http://127.0.0.1:8000", PLACES["server"])
    command = command.replace("FOLDER", str(PLACES["reward"])).replace("TEACHER", "demo/base")
    command = command.replace("FILE", str(PLACES["with_next"]))
    command += " --batch_size 4 --max_steps 1 --eval.prompts 2"
    if "online" in text:
        command += " --online.prompts_per_iteration 8"
    code, said, stderr = run(clone, tmp_path, command)
    assert code == 0 and "exported to" in said, stderr


def test_blocks_of_ones_own_resume_and_export_a_model_that_their_file_alone_loads(clone, tmp_path):
    example = "python examples/parallel_residual.py --batch_size 8 --eval.prompts 4"
    example += " --precision 32-true --kto.sft_loss_weight 1 --data.val demo/val.jsonl"
    command = f"{example} --max_steps 4 --optim.lr 1e-2 --out_dir out/run --stop_at 2"
    code, said, stderr = run(clone, tmp_path / "a", command)
    assert "the blocks are ParallelBlock: log-probs are not compared" in said, stderr
    (resume,) = re.findall(r"^  (python .*)$", said, re.M)
    code, said, stderr = run(clone, tmp_path / "b", resume)
    assert code == 0, stderr
    # its export: refused by kto.py and by transformers, read by its own file
    final = clone / "out" / "run" / "final"
    ask = f"--model {final} --data.train demo/train.jsonl --max_steps 1 --eval.samples 0"
    code, _, stderr = run(clone, tmp_path / "c", f"python kto.py {ask}")
    assert (code, stderr.count("\n")) == (2, 1) and "its blocks are ParallelBlock" in stderr
    with pytest.raises(ValueError, match="ParallelBlock"):
        transformers.AutoModelForCausalLM.from_pretrained(final)
    code, _, stderr = run(clone, tmp_path / "d", f"{example} {ask} --out_dir out/again")
    assert code == 0, stderr
    before, *_, trained = rows_of(clone / "out" / "run" / "val.csv")
    exported, *_ = rows_of(clone / "out" / "again" / "val.csv")
    losses = [float(row["sft_loss"]) for row in (before, trained, exported)]
    assert losses[2] == pytest.approx(losses[1], rel=1e-4) and abs(losses[0] - losses[1]) > 0.01


def test_the_code_in_docs_forks_runs(tiny, ratings, tmp_path, monkeypatch):
    """A loss, settings and a second model in one run; rate in two others."""
    text = (ROOT / "docs" / "forks.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    [loop] = [block for block in blocks if "import iterations" in block]  # a part of a main
    blocks.remove(loop)
    compile(loop, "forks.md", "exec")
    (tmp_path / "as_in_forks_md.py").write_text("\n".join(blocks).replace('"folder"', f'"{tiny}"'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    given = import_module("as_in_forks_md")
    example = {"prompt": "2 + 2 =", "completion": " 4", "label": True}
    assert given.joined({"id": 1, "up": True}) == [example]
    assert given.joined({"id": 8, "up": True}) == []
    argv = (*COMMON, "--max_steps=2", "--precision=bf16-mixed", "--kto.margin=0.5")
    handed = dict(objective=given.Mine, settings=given.Settings, trainer=given.WithTeacher)
    train(tiny, ratings, tmp_path / "a", *argv, **handed)
    argv = (*COMMON, "--online.max_iterations=1", "--online.max_new_tokens=4", "--max_steps=2")
    rows = train(tiny, ratings, tmp_path / "b", *argv, program="online", rate=given.rate)["rows"]
    assert len(rows) == 2
    argv = (*argv, "--online.num_generations=2", "--epochs=1", "--max_steps=1")
    handed = dict(program="online", rate=given.mixed_groups, checker=given.check)
    train(tiny, ratings, tmp_path / "c", *argv, **handed)
    rated = (tmp_path / "c" / "iterations" / "rated-1.jsonl").read_text().splitlines()
    labels = [json.loads(line)["label"] for line in rated]
    assert 0 < len(labels) < 32 and all(a != b for a, b in zip(labels[::2], labels[1::2]))


# ---- a loss of one's own -------------------------------------------------------------------------


def test_an_objective_without_a_reference_loads_none_and_refuses_one(
    tiny, pairs, tmp_path, monkeypatch
):
    for setting in (f"--reference={tiny}", "--reference_cache=cache"):
        name = setting[2:].split("=")[0]
        match = f"^{name}: SimPO has no reference"
        refused(match, train_example, "simpo", tiny, pairs, tmp_path / "no", *COMMON, setting)
    monkeypatch.setattr("models.load.freeze", lambda *a: pytest.fail("a copy for a reference"))
    for kind in ("FrozenModel", "AdaptersOff"):
        monkeypatch.setattr(f"reference.{kind}.__init__", lambda *a: pytest.fail("a reference"))
    train_example("simpo", tiny, pairs, tmp_path / "run", *COMMON, "--max_steps=2")


class Changed(kto.KTO):
    """KTO with a method of another's."""

    def __init__(self, args, **methods):
        super().__init__(args)
        vars(self).update({name: partial(method, self) for name, method in methods.items()})


def changed(f) -> dict:
    """KTO's loss, whose losses and columns f changes."""

    def loss(objective, *given):
        return f(*kto.KTO.loss(objective, *given), *given)

    return {"loss": loss}


LOSSES = [  # f of the losses, the columns and what a loss is given -> what is said
    (lambda x, columns, *a: (x.mean(), {}), r"loss: losses: expected a tensor \(4,\), one number an example, got \(\)"),
    (lambda x, columns, logps, ref, batch, z: (x / batch.label, {}),  # 0 / 0 or a / 0 for a thumb down
     r"step 1: not finite .*ratings.jsonl:\d+.* the weights are unchanged"),
    (lambda x, columns, logps, ref, batch, z: (x * batch.extra("age"), {}),
     "data.extra: age: the loss asks for this field: --data.extra age"),
    (lambda x, columns, *a: (x / len(x), {}),
     "loss: an example's loss depends on the other examples of its micro-batch"),
    (lambda x, columns, logps, ref, *a: (x + (logps - ref).mean(), {}), "loss: an example's loss depends"),
    (lambda x, columns, *a: (x, {}), r"metrics: .*kto.py:\d+: KeyError: 'desirable'"),
    (lambda x, columns, *a: x, r"loss: expected the losses and \{column: numbers\}"),
    (lambda x, columns, *a: (x.detach(), columns), "loss: the losses have no gradient"),
    (lambda x, columns, *a: (x + torch.sqrt(columns["logratio"] ** 2), columns),
     "step 1: not finite .* at step 1, look for the fault in the loss"),
    (lambda x, columns, *a: (x, columns | {"entropy": x}), "columns: entropy: the program has a column of this name"),
]  # fmt: skip
FAULTS = [
    *((changed(f), said) for f, said in LOSSES),
    ({"make_z": lambda o, *a: torch.tensor(torch.inf)},
     r"step 1: not finite \(gradient norm, sum of z, .*, inf, .*the weights are unchanged"),
    ({"make_z": lambda o, *a: [0.0, 0.0]}, r"make_z: .*RuntimeError: The expanded size"),
    ({"loss": lambda o, logps, batch: None}, r"loss: .*trainer.py:\d+: TypeError: .* takes 3 positional arguments"),
    ({"state_dict": lambda o: {"average_logps": {0: 1.0}}}, "state_dict: Changed: expected attributes"),
    ({"make_module": lambda o, width: torch.nn.Flatten(0)}, "make_module: one output a token"),
    *(({"metrics": lambda o, *a, x=x: {"mine": x}}, "metrics: mine: expected a number or None, got ")
      for x in (torch.zeros(2), "text")),
]  # fmt: skip


@pytest.mark.parametrize("methods, fault", FAULTS)
def test_what_an_objective_does_wrong_is_said_by_name(methods, fault, tiny, ratings, tmp_path):
    def objective(args):
        return Changed(args, **methods)

    with pytest.raises((BadInput, Failed), match=f"^{fault}"):
        train(tiny, ratings, tmp_path, *COMMON[:2], objective=objective)
    rows = tmp_path / "metrics.csv"
    assert not rows.exists() or rows.read_text().count("\n") <= 2, "at the first step"


class Own(kto.KTO):
    def loss(self, logps, ref_logps, batch, z_B):
        loss_B, columns = super().loss(logps, ref_logps, batch, z_B)
        return loss_B, columns | {"age": batch.extra("age")}

    def make_z(self, logratio_n, step):
        return torch.arange(step.size) / 10

    def metrics(self, columns, z):
        return super().metrics(columns, z) | {"a": columns["loss"].mean(), "b": None}


def test_fields_and_z_of_an_example_reach_it_in_any_micro_batch_and_metrics_may_be_tensors(
    tiny, tmp_path
):
    records = [tokens.rated(f"p{i}", f"c{i}", age=i) for i in range(6)]
    data = tokens.write(tmp_path / "d.jsonl", *records)
    losses = []
    for size in "61":
        argv = (*COMMON, "--max_steps=3", f"--micro_batch_size={size}", "--data.extra=age")
        rows = train(tiny, data, tmp_path / size, *argv, objective=Own)["rows"]
        losses.append([row["loss"] for row in rows])
        assert (rows[0]["age"], rows[0]["b"]) == (2.5, None)
        assert rows[0]["a"] == pytest.approx(rows[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][0] != 0.5


KNOWN = kto.KTOSettings()
OF_DPO = dpo.DPOSettings()


@pytest.mark.parametrize(
    "base, args, own, fault",
    [
        (kto.KTO, KNOWN, {"mak_z": kto.KTO.make_z}, "mak_z: not known: did you mean make_z"),
        (dpo.DPO, OF_DPO, {"mismatched_completions": lambda self, examples: examples},
         "mismatched_completions: it would not be called"),
    ],
)  # fmt: skip
def test_an_attribute_that_would_have_no_effect_is_refused(base, args, own, fault):
    objective = type("Mine", (base,), own)(args)
    refused(f"^Mine.{fault}", check_objective, objective)


@pytest.mark.parametrize("base, args", [(kto.KTO, KNOWN), (dpo.DPO, OF_DPO)])
def test_an_attribute_of_a_fork_takes_the_place_of_the_setting(base, args):
    given = {"average_logps": True, "needs_mismatched_pairs": False}
    of_instance = base(args)
    vars(of_instance).update(given)
    for objective in (of_instance, type("Mine", (base,), given)(args)):
        check_objective(objective)
        r = objective.logratio(torch.tensor([[6.0]]), torch.tensor([[2.0]]), torch.tensor([[2]]))
        assert r.item() == 2, "the mean over two tokens"
        assert objective.needs_mismatched_pairs is False


def test_parameters_that_nobody_trains_are_refused():
    objective = kto.KTO(KNOWN)
    objective.head = torch.nn.Linear(2, 1)
    refused("KTO.head: .* make it in make_module", check_objective, objective)
    objective.head.requires_grad_(False)
    check_objective(objective)


def test_random_numbers_of_a_fork_are_the_same_in_a_resume_and_on_every_rank(
    tiny, ratings, tmp_path
):
    class Drawn(kto.KTO):
        def mismatched_completions(self, examples):
            order = torch.randperm(len(examples)).tolist()
            np.random.shuffle(order)
            return [examples[i].completions[0] for i in order]

        def make_z(self, logratio_n, step):
            return super().make_z(logratio_n, step) + random.random()

    def work(n: int, folder: str, *more) -> dict:
        def one(rank):
            random.seed(rank + len(more))
            np.random.seed(rank + len(more))
            argv = (*COMMON, "--save_interval=1", "--strategy=ddp", *more)
            return train(tiny, ratings, tmp_path / folder, *argv, objective=Drawn)

        return ranks(n, one)[0]

    whole = work(1, "whole")
    work(1, "part", "--stop_at=2")
    assert_same(work(1, "part", "--resume=auto"), whole)
    for a, b in zip(numbers(work(2, "two")), numbers(whole), strict=True):
        assert (a["loss"], a["kl"]) == pytest.approx((b["loss"], b["kl"]), abs=1e-4)


def sgd_of(*groups):
    """An optimizer with these groups of the policy's parameters: its first one, and all others."""

    def optimizer(policy, cfg):
        first, *others = policy.parameters()
        params = [first], others
        return torch.optim.SGD([{"params": p} | group for p, group in zip(params, groups)], lr=0.5)

    return optimizer


def test_an_optimizer_that_leaves_out_weights_is_refused(tiny, ratings, tmp_path):
    fault = r"^optimizer: \d+ weights are in none .* would never change, \S+ first"
    refused(fault, train, tiny, ratings, tmp_path / "run", *COMMON, optimizer=sgd_of({}))


def test_an_example_has_the_same_number_in_each_epoch_and_after_a_resume(tiny, ratings, tmp_path):
    """A file of 24: of a pair both ratings have the same line, and numbers of their own."""
    met: set[tuple] = set()

    class Remembers(kto.KTO):
        def after_step(self, step, columns, z):
            met.update((e.number, e.where, e.label) for e in step.examples)

    argv = (*COMMON, "--max_steps=8")  # two epochs of four steps
    train(tiny, ratings, tmp_path, *argv, "--stop_at=5", objective=Remembers)
    train(tiny, ratings, tmp_path, *argv, "--resume=auto", objective=Remembers)
    assert sorted(number for number, _, _ in met) == list(range(24))
    assert len({where for _, where, _ in met}) == 16


class Columns(kto.KTO):
    """With two more columns, in another order on rank 1, which may lack the first."""

    lacks = ""

    def loss(self, logps, ref_logps, batch, z_B):
        loss_B, columns = super().loss(logps, ref_logps, batch, z_B)
        names = "yx".replace(self.lacks, "") if os.environ["RANK"] == "1" else "xy"
        return loss_B, columns | {name: torch.full_like(loss_B, "xy".index(name)) for name in names}


SPLIT = ("--batch_size=7", "--micro_batch_size=1", "--max_steps=2", "--strategy=ddp")


def test_a_column_that_only_some_micro_batches_have_is_refused(tiny, ratings, tmp_path):
    def work(rank):
        # of ranks that differ the first one ends when the others have said it
        match = "^loss: columns [xy](, y)?: not of every micro-batch" if rank else None
        with pytest.raises(BadInput if match else RuntimeError, match=match):
            lacking = type("Lacking", (Columns,), {"lacks": "x"})
            train(tiny, ratings, tmp_path, *SPLIT, objective=lacking)

    ranks(2, work)


def test_columns_of_ones_own_reach_metrics_and_val_as_means_also_in_another_order_by_rank(
    tiny, ratings, tmp_path
):
    """Of 7 examples on two processes one has a filler."""
    given = (tiny, ratings, tmp_path, *SPLIT, f"--data.val={ratings}")
    run, *_ = ranks(2, lambda rank: train(*given, objective=Columns))
    for row in (*run["rows"], *rows_of(tmp_path / "val.csv")):
        assert (float(row["x"]), float(row["y"])) == (0.0, 1.0)


# ---- memory --------------------------------------------------------------------------------------


def test_memory_is_updated_by_training_steps_only_and_from_all_ranks(tiny, ratings, tmp_path):
    validated = (f"--data.val={ratings}", "--val_interval=1")
    for name, n, more in (("a", 1, validated), ("b", 2, ())):
        given = (tiny, ratings, tmp_path / name, *COMMON, "--optim.lr=1e-3", *more)
        ranks(n, lambda rank: train_example("bco", *given) and None)  # noqa: B023
    a, b = (state(tmp_path / name, 6) for name in "ab")
    assert a["count"] == 6 * 6 == b["count"]
    assert a["delta"] == pytest.approx(b["delta"], abs=1e-6) and abs(a["delta"]) > 1e-4
    rewards = [row["reward"] for row in result(tmp_path / "a")["rows"]]
    assert a["delta"] == pytest.approx(sum(rewards) / 6, abs=1e-9), "the mean of all rewards so far"


# ---- z of one's own ------------------------------------------------------------------------------


def test_mismatched_pairs_of_ones_own_may_depend_on_the_last_step_and_be_no_answers(
    tiny, ratings, tmp_path
):
    """The completions are those of no example. z of the last step is computed by hand."""
    seen = []

    class Follower(kto.KTO):
        shift = 0

        def after_step(self, step, columns, z):
            self.shift = 1 + int(1e6 * columns["loss"].mean().item()) % 5

        def state_dict(self):
            return {"shift": self.shift}

        def mismatched_completions(self, examples):
            ids = [[7, 8, 9 + self.shift + i][: 1 + i % 3] for i in range(len(examples))]
            prompts = [e.prompt for e in examples]
            seen.append((self.shift, prompts, [(np.array(y),) for y in ids]))
            return ids

    argv = (*COMMON, "--keep_last=9", "--save_interval=1")
    *_, row = train(tiny, ratings, tmp_path, *argv, objective=Follower)["rows"]
    assert seen[-1][0] == state(tmp_path, 5)["shift"], "what the last step has left"
    policy, packed = load.load_model(checkpoint_folder(tmp_path, 5)), pack(*seen[-1][1:])
    with torch.no_grad():
        r = (policy(packed).logps - load.load_model(tiny)(packed).logps)[:, 0]
    assert row["kl"] == pytest.approx(max(0, r.mean().item()), abs=1e-4)
    assert row["kl/stderr"] == pytest.approx(r.std().item() / 6**0.5, rel=1e-3) and row["kl/stderr"]


# ---- the loop ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [6, 2])
def test_an_override_of_forward_is_reached_on_every_path(cut, tiny, ratings, tmp_path):
    in_steps, elsewhere = [], []  # where the policy is in eval mode: no dropout

    class Counts(Trainer):
        def forward(self, packed, *rest, **options):
            (in_steps if self.run.policy.training else elsewhere).append(packed.length_BK.numel())
            return super().forward(packed, *rest, **options)

    argv = (*COMMON, f"--micro_batch_size={cut}", "--max_steps=2", f"--data.val={ratings}")
    train(tiny, ratings, tmp_path, *argv, "--val_interval=null", trainer=Counts)
    # own and mismatched completions: of two steps; of two validations of 24, and of the start check
    assert (sum(in_steps), sum(elsewhere)) == (2 * 12, 2 * 48 + 2 * 4)


class SyncedReference(Trainer):
    """As in docs/forks.md: TRL's sync_ref_model."""

    every, share = 2, 0.6

    def optimizer_step(self, plan):
        lr = super().optimizer_step(plan)
        if self.run.state.step % self.every == 0:
            self.run.new_reference(share=self.share)
        return lr


def test_a_reference_that_follows_the_policy_moves_by_its_share_and_resumes_to_the_bit(
    tiny, ratings, tmp_path
):
    whole = train(tiny, ratings, tmp_path / "whole", *COMMON, trainer=SyncedReference)
    policy = saved(tmp_path / "whole", 2, "weights")
    start = load.load_model(tiny).unique_parameters()
    for name, x in saved(tmp_path / "whole", 2, "reference").items():
        expected = 0.4 * start[name].detach() + 0.6 * policy[name]
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-7)
    fixed = train(tiny, ratings, tmp_path / "fixed", *COMMON, "--stop_at=3")
    assert numbers(whole)[:2] == numbers(fixed)[:2] and numbers(whole)[2] != numbers(fixed)[2]
    argv = (tiny, ratings, tmp_path / "run", *COMMON)
    train(*argv, "--stop_at=3", trainer=SyncedReference)
    assert_same(train(*argv, "--resume=auto", trainer=SyncedReference), whole)


def test_a_reference_in_bfloat16_moves_by_its_share_on_average(tiny, ratings, tmp_path):
    """Rounded to nearest, a share of 0.4 of one spacing would be nothing."""
    synced = type("Synced", (SyncedReference,), {"every": 1, "share": 0.4})
    argv = (*COMMON, "--max_steps=1", "--precision=bf16-mixed", "--optim.lr=1e-4")
    train(tiny, ratings, tmp_path, *argv, trainer=synced)
    policy = saved(tmp_path, 1, "weights")
    start = load.load_model(tiny).unique_parameters()
    moved = whole = 0.0
    for name, x in saved(tmp_path, 1, "reference").items():
        if x.dtype == torch.bfloat16:
            first = start[name].detach().bfloat16().double()
            step = policy[name].bfloat16().double() - first
            moved += (step.sign() * (x.double() - first)).sum().item()
            whole += step.abs().sum().item()
    assert moved / whole == pytest.approx(0.4, abs=0.05)


CANNOT_MOVE = {  # what is said -> the share and the setting
    "new_reference: .*: not by a share, and not into 4 bits; give --reference": (
        0.6,
        "--lora.rank=2",
    ),
    "reference_cache: ": (0.6, "--reference_cache={out}/cache"),
    "new_reference: share: .* got 60": (60.0, "--seed=2"),
}


@pytest.mark.parametrize("fault", CANNOT_MOVE)
def test_a_reference_that_cannot_move_is_refused_before_it_does(fault, tiny, ratings, tmp_path):
    share, setting = CANNOT_MOVE[fault]
    synced = type("Synced", (SyncedReference,), {"every": 1, "share": share})
    argv = (*COMMON, setting.format(out=tmp_path))
    refused(f"^{fault}", train, tiny, ratings, tmp_path / "run", *argv, trainer=synced)


def test_humanline_clips_each_tokens_log_ratio_and_its_gradient_by_hand():
    from humanline import Humanline, HumanlineSettings

    objective = Humanline(HumanlineSettings())
    logps = torch.tensor([[[-1.0, -4.0, -0.5, -2.0, 0.0]]], requires_grad=True)
    ref_logps = torch.tensor([[[-1.5, -2.0, -3.5, -2.0, 0.0]]])  # log-ratios 0.5, -2, 3, 0; the end
    policy, reference = objective.reduce_tokens(logps, ref_logps, torch.tensor([[4]]))
    assert policy.item() == -7.5 and (policy - reference).item() == 0.5 - 1 + 1.5
    (gradient,) = torch.autograd.grad((policy - reference).sum(), logps)
    assert gradient.tolist() == [[[1, 0, 0, 1, 1]]], "beyond a limit a token has no gradient"


# ---- an optimizer and settings of one's own ------------------------------------------------------


def test_a_group_learns_by_the_schedule_from_its_own_peak(tiny, ratings, tmp_path):
    """Two warmup steps: step 1 has half of each group's lr, step 2 has all of it. Another optim.lr changes nothing."""
    moves = {}
    rates = {}
    start = load.load_model(tiny).unique_parameters()
    for peak in (0.5, 0.125, 0.0):
        out = tmp_path / f"{peak}"
        argv = (tiny, ratings, out, *COMMON, "--max_steps=2", "--optim.warmup=2", "--optim.lr=9")
        train(*argv, "--stop_at=1", optimizer=sgd_of({}, {"lr": peak}))
        weights = saved(out, 1, "weights")
        moves[peak] = {name: x - start[name].detach() for name, x in weights.items()}
        train(*argv, "--resume=auto", optimizer=sgd_of({}, {"lr": peak}))
        rates[peak] = [float(row["lr"]) for row in rows_of(out / "metrics.csv")]
    first, *_ = start
    for name, move in moves[0.5].items():
        assert move.abs().max() > 1e-5
        for peak in (0.125, 0.0):
            share = 1.0 if name == first else peak / 0.5
            torch.testing.assert_close(moves[peak][name], share * move, rtol=1e-3, atol=1e-6)
    assert rates == dict.fromkeys(moves, [0.25, 0.5])


# ---- a module of one's own -----------------------------------------------------------------------


class RatingKTO(kto.KTO):
    """KTO, and beside it a head that learns to predict the ratings from the state at each answer's end."""

    def make_module(self, width):
        return torch.nn.Linear(width, 1)

    def loss(self, logps, ref_logps, batch, z_B):
        loss_B, columns = super().loss(logps, ref_logps, batch, z_B)
        last_B11 = batch.length[:, :1, None] - 1
        logit_B = batch.outputs[:, 0].gather(1, last_B11)[:, 0, 0]
        label_B = batch.label.to(logit_B.dtype)
        rating_B = binary_cross_entropy_with_logits(logit_B, label_B, reduction="none")
        return loss_B + 0.1 * rating_B, columns | {"rating_loss": rating_B}


def rated(tiny, ratings, out: Path, *argv: str) -> dict:
    argv = (*COMMON, "--batch_size=7", "--max_steps=5", "--optim.clip=0.1", *argv)
    return train(tiny, ratings, out, *argv, objective=RatingKTO)


@pytest.mark.parametrize("n, cut", [(1, "--micro_batch_tokens=70"), (2, "--micro_batch_size=2")])
def test_a_modules_gradient_is_that_of_the_whole_step_in_every_cut(n, cut, tiny, ratings, tmp_path):
    argv = ("--precision=64-true", "--lora.rank=2", "--strategy=ddp")
    whole = rated(tiny, ratings, tmp_path / "whole", *argv, "--micro_batch_size=7")
    argv = ("--micro_batch_size=null", *argv, cut) if "tokens" in cut else (*argv, cut)
    given = (tiny, ratings, tmp_path / "cut")
    many, *_ = ranks(n, lambda rank: rated(*given, *argv))
    for a, b in zip(numbers(many), numbers(whole), strict=True):
        for name in ("loss", "rating_loss", "grad_norm", "kl"):
            assert a[name] == pytest.approx(b[name], rel=1e-12 if a["step"] == 1 else 1e-9), name
    assert min(row["grad_norm"] for row in whole["rows"]) > 0.1, "clipping acts"
    stored = load_file(tiny / "model.safetensors")
    assert many["weights"].keys() == stored.keys(), "it is not exported"
    one, two = (saved(tmp_path / name, 5, "weights") for name in ("whole", "cut"))
    for name in ("objective_module.weight", "objective_module.bias"):
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-9)


def test_a_module_gets_the_states_that_predict_the_tokens(tiny):
    """Against transformers."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(tiny).transformer
    gpt, head = load.load_model(tiny), torch.nn.Linear(32, 2)
    gpt.objective_module = head
    prompts, completions = ragged(2, 512, 0)
    for x, ys, outputs in zip(prompts, completions, gpt(pack(prompts, completions)).outputs):
        for y, output in zip(ys, outputs):
            states = hf(torch.tensor([[*x, *y]])).last_hidden_state[0]
            expected = head(states[len(x) - 1 : -1])
            torch.testing.assert_close(output[: len(y)], expected, atol=1e-4, rtol=0)
            assert not output[len(y) :].any()
