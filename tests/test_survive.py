"""A run that is killed or stopped at any moment goes on as the same run, and its processes end together."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import (
    ROOT,
    Started,
    assert_same,
    at_call,
    die,
    even,
    kill_at,
    result,
    started_ranks,
    until,
)
from lightning.fabric import Fabric

import evaluation
import rollout
import run
import sampler
import trainer
from evaluation import Evaluator
from infra.console import FIRST_PROCESS, Failed
from infra.logger import Logger
from models import export
from trainer import Trainer

EVERY = ("--optim.lr=1e-3", "--save_interval=2", "--precision=32-true", "--progress=false",
         "--eval.samples=1", "--eval.max_new_tokens=4", "--epochs=9")  # fmt: skip
SETTINGS = {
    "kto": (*EVERY, "--batch_size=7", "--max_steps=7", "--val_interval=3"),
    "spin": (*EVERY, "--batch_size=4", "--epochs=2", "--spin.max_iterations=3", "--spin.mix=0.5",
             "--spin.max_new_tokens=6", "--spin.rollout_batch_size=3"),
    "online": (*EVERY, "--batch_size=4", "--epochs=2", "--online.max_iterations=3",
               "--online.prompts_per_iteration=8", "--online.max_new_tokens=6",
               "--online.rollout_batch_size=3", "--eval.prompts=5", "--eval.check=demo"),
}  # fmt: skip
FIRST, LORA = ("--online.reference=first",), ("--lora.rank=4", "--lora.dropout=0.3")


def rate_by_length() -> None:
    """The demo's checker finds all answers of a tiny model wrong; this one finds about half right."""
    import demo.check

    demo.check.check = even


@pytest.fixture
def argv_of(tiny, ratings, demos):
    """argv_of("kto", out, ...) -> the arguments of a run."""

    def argv(program: str, out: Path, *more) -> list[str]:
        data = demos if program == "spin" else ratings
        given = [f"--model={tiny}", f"--data.train={data}", f"--data.val={data}"]
        return [*given, f"--out_dir={out}", *SETTINGS[program], *more]

    return argv


def run_to_the_end(n: int, folder: Path, program: str, argv) -> None:
    for child in started_ranks(n, folder, program, argv, lambda rank: rate_by_length()):
        code, said, stderr = child.ended()
        assert (code, stderr) == (0, "") and "Warning" not in said, "nothing but their own lines"


def assert_same_run(one: Path, other: Path) -> None:
    assert_same(result(one), result(other))
    assert (one / "val.csv").read_text() == (other / "val.csv").read_text()


# ---- kill -9 -------------------------------------------------------------------------------------

# At which call of which function a run is killed, and the resumed run again at the next.
MOMENTS = {
    "kto": [
        ((Logger, "step"), 2),  # before the first checkpoint
        ((run, "save_checkpoint"), 1),  # between a row of metrics.csv and its checkpoint
        ((os, "fsync"), 1),  # in the middle of a checkpoint
        ((Path, "rename"), 1),  # at its end
        ((evaluation, "generate"), 2),  # in a validation, one checkpoint later
        ((export, "export"), 1),
    ],
    "spin": [
        ((rollout, "generate"), 2),  # one batch of the first answers is on the disk
        ((rollout, "generate"), 4),  # one batch of the second iteration's
        ((trainer, "clip_gradient"), 4),  # in the middle of the second iteration
        ((os, "fsync"), 1),
    ],
    "online": [
        ((rollout, "generate"), 2),
        ((Evaluator, "verdicts"), 2),  # the first answers are there, and no ratings
        ((trainer, "clip_gradient"), 3),
        ((Evaluator, "verdicts"), 2),  # in the check at an iteration's end
        ((os, "fsync"), 1),
    ],
}
KILLED = [("kto", 1, "auto", LORA), ("kto", 2, "fsdp", LORA), ("spin", 1, "auto", LORA),
          ("spin", 2, "fsdp", ()), ("online", 1, "auto", FIRST), ("online", 2, "ddp", LORA)]  # fmt: skip


@pytest.mark.parametrize("program, n, strategy, more", KILLED)
def test_a_run_killed_at_any_moment_and_resumed_is_the_same_run(
    program, n, strategy, more, argv_of, tmp_path, monkeypatch
):
    more = (f"--strategy={strategy}", "--resume=auto", *more)
    run_to_the_end(n, tmp_path, program, argv_of(program, tmp_path / "whole", *more))
    argv = argv_of(program, tmp_path / "run", *more)
    monkeypatch.setattr("demo.check.check", even)
    for point, call in MOMENTS[program]:
        kill_at(point, call, n, tmp_path, program, argv)
    run_to_the_end(n, tmp_path, program, argv)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    for file in (tmp_path / "whole").glob("iterations/*.jsonl"):
        text = (tmp_path / "run" / "iterations" / file.name).read_text()
        assert text == file.read_text()


# ---- Ctrl-C, SIGTERM, limits ---------------------------------------------------------------------


def stopped(n: int, folder: Path, program: str, argv, at=None, signal_of=signal.SIGINT, rank=0):
    """A run that gets a signal at a call of a function on one rank. -> rank 0's exit code, the reason and
    step that it prints, and the command that it prints"""

    def first(own_rank):
        rate_by_length()
        if at and own_rank == rank:
            at_call(*at, lambda: os.kill(os.getpid(), signal_of))

    ended = [child.ended() for child in started_ranks(n, folder, program, argv, first)]
    others = [code for code, *_ in ended[1:]]
    assert not any(others), "a launcher would kill rank 0, which may still upload its logs"
    assert not any("rror" in err for *_, err in ended)
    said = "".join(said for _, said, _ in ended)
    found = re.findall(r"^stopped by (.*) of .*continue with\n  python (.*)$", said, re.M)
    assert len(found) == 1, "one rank says it"
    return ended[0][0], found[0][0], shlex.split(found[0][1])


# (arguments, where the signal comes, which, exit code, what is said) of one start after the other
STOPS = {
    "kto": [
        (("--stop_at=1",), None, 0, 0, "stop_at; saved up to step 1"),
        ((), ((Fabric, "backward"), 1), signal.SIGTERM, 143, "SIGTERM; saved up to step 2"),
        (
            (),
            ((Trainer, "score_examples"), 1),
            signal.SIGINT,
            130,
            "SIGINT; saved up to step 3",
        ),  # a validation
        (
            (),
            ((evaluation, "generate"), 1),
            signal.SIGINT,
            130,
            "SIGINT; saved up to step 3",
        ),  # the check in it
    ],
    "spin": [
        ((), ((sampler, "choose_token"), 8), signal.SIGINT, 130, "SIGINT; saved up to step 0"),
        ((), ((rollout, "generate"), 4), signal.SIGHUP, 129, "SIGHUP; saved up to step 4"),
        (("--stop_at=5",), None, 0, 0, "stop_at; saved up to step 5"),
    ],
    "online": [
        ((), ((Evaluator, "verdicts"), 1), signal.SIGUSR1, 138, "SIGUSR1; saved up to step 0"),
        ((), ((Evaluator, "verdicts"), 5), signal.SIGINT, 130, "SIGINT; saved up to step 8"),
    ],
}


@pytest.mark.parametrize(
    "program, n, more",
    [("kto", 1, ("--eval.check=demo",)), ("kto", 2, ()), ("spin", 1, ()), ("online", 1, ())],
)
def test_a_stopped_run_is_saved_and_the_command_that_it_prints_makes_it_the_same_run(
    program, n, more, argv_of, tmp_path
):
    run_to_the_end(n, tmp_path, program, argv_of(program, tmp_path / "whole", *more))
    out = tmp_path / "Größe [1]"
    command = [program, *argv_of(program, out, *more)]
    for argv, at, number, *expected in STOPS[program]:
        # on two processes the signal reaches the second one alone
        found = stopped(n, tmp_path, command[0], [*command[1:], *argv], at, number, rank=n - 1)
        *said, command = found
        assert said == expected
        assert command[0].endswith(f"{program}.py") and "--stop_at=1" not in command
    run_to_the_end(n, tmp_path, command[0], command[1:])
    assert_same_run(out, tmp_path / "whole")


CTRL_C = [signal.SIGINT] * 2
SCHEDULER = [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM]  # a notice, then the limit


@pytest.mark.parametrize("numbers, code, end", [
    (CTRL_C, 130, "error: stopped by SIGINT\n"),  # Python's own
    (SCHEDULER, 143, ""),
])  # fmt: skip
def test_a_second_ctrl_c_ends_at_once_and_what_a_scheduler_sends_is_one_stop_that_is_saved(
    numbers, code, end, argv_of, tmp_path
):
    reached, out = tmp_path / "reached", tmp_path / "run"

    def first():
        at_call((trainer, "clip_gradient"), 1, lambda: reached.touch() or time.sleep(3))

    child = Started(tmp_path, "kto", argv_of("kto", out), first)
    until(reached.exists)
    for number in numbers:
        child.signal(number)
        time.sleep(0.3)
    told = f"{numbers[0].name}: stopping soon; Ctrl-C now ends at once\n"
    ended, said, stderr = child.ended()
    assert (ended, stderr) == (code, told + end)
    is_saved = "stopped by SIGTERM; saved up to step 1" in said
    assert is_saved == (out / "checkpoints" / "step-00000001").exists() == (not end)


# ---- a run's folder, and processes that end together ---------------------------------------------

LONG = ("--max_steps=4000", "--val_interval=null")


def has_rows(out: Path, n: int = 4):
    rows = out / "metrics.csv"
    return lambda: rows.exists() and rows.read_bytes().count(b"\n") > n


@pytest.mark.parametrize("n", [1, 2])
def test_a_second_process_is_refused_beside_a_living_run_and_goes_on_after_its_kill(
    n, argv_of, tmp_path
):
    out = tmp_path / "run"
    argv = argv_of("kto", out, *LONG, "--resume=auto")
    living = started_ranks(n, tmp_path / "first", "kto", argv)
    until(has_rows(out))
    before = (out / "settings.yaml").read_bytes()
    for child in started_ranks(n, tmp_path / "second", "kto", argv):
        code, said, stderr = child.ended()
        (line,) = stderr.splitlines()
        assert code == 2 and f"error: out_dir: {out}: in use by another process" in line
        assert "resumed" not in said and (out / "settings.yaml").read_bytes() == before
    for child in living:
        child.signal(signal.SIGKILL)
        child.ended()
    assert stopped(n, tmp_path, "kto", argv, ((trainer, "clip_gradient"), 1))[0] == 130


KTO = str(ROOT / "kto.py")  # as a user starts it: so does Fabric start the others


def fail():
    raise Failed("all is lost")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_ends_the_others(failing, argv_of, tmp_path):
    first = lambda rank: rank == failing and at_call((trainer, "clip_gradient"), 3, fail)  # noqa: E731
    children = started_ranks(2, tmp_path, "kto", argv_of("kto", tmp_path / "run", *LONG), first)
    ended = [child.ended(30) for child in children]
    why = ["another process of this run has ended"] * 2
    why[failing] = "all is lost"
    said = [f"error: {why[0]}\n", f"rank 1: error: {why[1]}\n"]
    assert [(code, stderr) for code, _, stderr in ended] == [(1, said[0]), (1, said[1])]


def test_a_program_continues_if_nobody_can_read_its_lines_any_more():
    reader, writer = os.pipe()
    os.close(reader)
    code = "from infra.console import say; say('one'); say('two'); print('not flushed')"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("point, call, act, code, said", [
    ((trainer, "clip_gradient"), 3, fail, 1, "error: all is lost\n"),
    ((dist, "init_process_group"), 1, die, -signal.SIGKILL, ""),  # before they have found each other
])  # fmt: skip
def test_processes_that_fabric_has_launched_end_with_the_first_one(
    point, call, act, code, said, argv_of, tmp_path
):
    argv = argv_of("kto", tmp_path / "run", *LONG, "--devices=2")
    child = Started(tmp_path, KTO, argv, lambda: at_call(point, call, act))
    assert child.ended()[::2] == (code, said)
    mark = f"{FIRST_PROCESS}={child.pid}\0".encode()

    def others() -> list[Path]:
        """The processes that it has started; what is a zombie has no environment."""
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # gone in the meantime
                found += [file] if mark in file.read_bytes() else []
        return found

    until(lambda: not others())
