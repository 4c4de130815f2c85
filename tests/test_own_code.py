"""A user's own function fails after hours: one line names it and the last checkpoint, from which the printed command
continues. The run has saved before it calls a checker, a rollout or a judge."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import Started, assert_same, environments_of_ranks, result

# A fork of each program as a user writes it: FAIL names a function and at which of its calls it fails, on which rank.
FORK = """
import os

import {program}
from infra.console import rank, run_cli

calls = {{}}


def may_fail(name):
    calls[name] = calls.get(name, 0) + 1
    if os.environ.get("FAIL") in (f"{{name}} {{calls[name]}}", f"{{name}} {{calls[name]}} on {{rank()}}"):
        raise ConnectionError(f"{{name}} is away")


class Mine({program}.{objective}):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def state_dict(self):
        return {{"seen": self.seen}}

    def loss(self, logps, ref_logps, batch, z_B):
        may_fail("loss")
        loss_B, columns = super().loss(logps, ref_logps, batch, z_B)
        return loss_B + 0.001 * len(self.seen), columns

    def metrics(self, columns, z):
        may_fail("metrics")
        return super().metrics(columns, z)

    def after_step(self, step, columns, z):
        self.seen.append(step.examples[0].number)
        may_fail("after_step")


def checker(answers):
    may_fail("checker")
    return [len(a.completion) % 2 == 0 for a in answers]


def rollout(folder, prompts, sampling, max_new_tokens, seed):
    may_fail("rollout")
    return [[seed % 7 + 1, len(prompt) % 5 + 1] for prompt in prompts]


def rate(run, prompts, answers):
    may_fail("rate")
    return online.rate_answers(run, prompts, answers)


if __name__ == "__main__":
    run_cli(lambda: {program}.main(objective=Mine, checker=checker{handed}))
"""
HANDED = {"kto": "", "spin": ", rollout=rollout", "online": ", rollout=rollout, rate=rate"}
OBJECTIVE = {"kto": "KTO", "spin": "SPIN", "online": "OnlineKTO"}
COMMON = ("--optim.lr=1e-3", "--precision=32-true", "--progress=false", "--eval.samples=1",
          "--eval.max_new_tokens=4", "--eval.prompts=4", "--save_interval=null", "--lora.rank=4",
          "--lora.dropout=0.3", "--batch_size=4", "--log_interval=1")  # fmt: skip
SETTINGS = {
    "kto": ("--max_steps=7", "--epochs=2", "--val_interval=2", "--eval.check_interval=2"),
    "spin": ("--spin.max_iterations=2", "--spin.max_new_tokens=6", "--spin.rollout_batch_size=3"),
    "online": ("--online.max_iterations=2", "--online.prompts_per_iteration=8", "--online.rollout_batch_size=3",
               "--online.max_new_tokens=6"),
}  # fmt: skip


@pytest.fixture(scope="module")
def forks(tmp_path_factory, tiny, ratings, demos):
    """forks(program, n, out, *argv, FAIL=...) runs a fork on n processes. -> of each its code, stdout, stderr"""
    folder = tmp_path_factory.mktemp("forks")
    for program, objective in OBJECTIVE.items():
        text = FORK.format(program=program, objective=objective, handed=HANDED[program])
        (folder / f"my_{program}.py").write_text(text)

    def run(program: str, n: int, out: Path, *argv, **env):
        data = demos if program == "spin" else ratings
        given = [
            f"--model={tiny}",
            f"--data.train={data}",
            f"--data.val={data}",
            f"--out_dir={out}",
        ]
        argv = argv or (*given, *COMMON, *SETTINGS[program])
        fork = str(folder / f"my_{program}.py")
        envs = environments_of_ranks(n) if n > 1 else [{}]
        children = [Started(out.parent, fork, argv, **env, **of_rank) for of_rank in envs]
        return [child.ended() for child in children]

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory, forks):
    """whole(program, n): the folder of a run in which nothing fails."""
    done = {}

    def run(program: str, n: int) -> Path:
        if (program, n) not in done:
            out = tmp_path_factory.mktemp("whole") / "run"
            assert [code for code, *_ in forks(program, n, out)] == [0] * n
            done[program, n] = out
        return done[program, n]

    return run


FAILURES = [
    ("kto", 1, "loss 13", 4),
    ("kto", 1, "metrics 5", 2),  # of step 3
    ("kto", 1, "checker 5", 7),  # of the last step
    ("kto", 2, "after_step 4 on 1", 2), ("kto", 2, "checker 2 on 0", 2),
    ("spin", 1, "rollout 3", 0),
    ("online", 1, "rollout 5", 2), ("online", 2, "rate 2 on 0", 2),
]  # fmt: skip


@pytest.mark.parametrize("program, n, failure, saved", FAILURES)
def test_a_run_whose_own_function_fails_continues_from_the_last_checkpoint_as_the_same_run(
    program, n, failure, saved, forks, whole, tmp_path
):
    out = tmp_path / "run"
    ended = forks(program, n, out, FAIL=failure)
    assert [code for code, *_ in ended] == [1] * n
    name = failure.split()[0]
    errors = "".join(stderr for *_, stderr in ended)
    line = f"error: {name}: .*my_{program}.py:[0-9]+: ConnectionError: {name} is away"
    assert re.search(line, errors), errors
    assert "Traceback" not in errors
    said = ended[0][1]
    pattern = r"^stopped by an error; saved up to step (\d+) of .*\n  python (.*)$"
    found = re.findall(pattern, said, re.M)
    assert [int(step) for step, _ in found] == [saved], said
    fork, *argv = shlex.split(found[0][1])
    assert Path(fork).name == f"my_{program}.py", "another program would swap the loss in mid-run"
    assert [code for code, *_ in forks(program, n, out, *argv)] == [0] * n
    assert_same(result(out), result(whole(program, n)))
    assert (out / "val.csv").read_text() == (whole(program, n) / "val.csv").read_text()


def test_a_function_that_fails_on_a_record_is_named_with_its_own_line_and_the_records(
    tiny, ratings, tmp_path
):
    fork = tmp_path / "mine.py"
    fork.write_text(
        "import kto\nfrom infra.console import run_cli\n\n\ndef joined(click):\n"
        '    return [click | {"label": click["thumb"]}]\n\n\n'
        "run_cli(lambda: kto.main(make_records=joined))\n"
    )
    argv = [f"--model={tiny}", f"--data.train={ratings}", f"--out_dir={tmp_path / 'run'}"]
    code, _, stderr = Started(tmp_path, str(fork), argv).ended()
    first = stderr.splitlines()[0]
    assert code == 2 and "Traceback" not in stderr
    assert first == f"error: {ratings}:1: main(make_records=...): {fork}:6: KeyError: 'thumb'"
    assert not (tmp_path / "run").exists()
