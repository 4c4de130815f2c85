"""What a run survives, from outside: `python -m pytest -m survive` prints a scoreboard by row.

R1 trackers, R2 completions of one token, R3 a resume that would mix runs, R4 a stale cache, R5 two
processes in one folder, R6 a folder that vanishes, R7 a key given twice, R8 damaged tables, R9 a
damaged `final`, R10 a full disk, R11 Ctrl-C, R12 a console that takes nothing, R13 litter, R14
what is found too late, R15 tracebacks, R16 templates and limits, R17 records, R18 what is echoed,
R19 two processes, R20 links.
"""

import fcntl
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import (
    PARITY,
    Started,
    assert_same,
    last_of_each,
    numbers,
    result,
    start,
    train,
    until,
)  # fmt: skip
from safetensors.torch import load_file

import kto
import runs.folder
from runs import checkpoint, errors, files, logger
from runs.errors import run_cli
from runs.files import sync
from runs.folder import _new_folder, newest_checkpoint, prune_checkpoints, take_lock

ROOT = Path(kto.__file__).parent
RUN = ("--batch_size=7", "--max_steps=6", "--epochs=9", "--optim.lr=1e-3", "--save_interval=2",
       "--precision=32-true", "--progress=false")  # fmt: skip
LONG = (*RUN, "--max_steps=4000", "--epochs=9999")


def row(name: str):
    return pytest.mark.survive(name)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture
def begin(tiny, ratings, tmp_path):
    """begin("kto", ...) -> a Started run in tmp_path / "run", of `tiny` on `ratings`."""
    children = []

    def start(*argv, program="kto", out=None, **kw) -> Started:
        out = out or tmp_path / "run"
        base = [f"--model={tiny}", f"--data.train={ratings}", f"--out_dir={out}", *RUN]
        folder = tmp_path / f"said-{len(children)}"
        folder.mkdir()
        children.append(Started(folder, program, [*base, *argv], **kw))
        return children[-1]

    yield start
    for child in children:
        try:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def errors_of(stderr: str) -> list[str]:
    assert "Traceback" not in stderr, stderr
    return [line for line in stderr.splitlines() if "error: " in line]


# ---- R5: two processes, one folder ---------------------------------------------------------------


@row("R5")
def test_a_second_process_is_refused_beside_a_living_run_and_goes_on_after_its_kill(
    begin, tmp_path
):
    out = tmp_path / "run"
    first = begin("--max_steps=4000", "--epochs=9999")
    until(lambda: lines(out / "metrics.csv") > 4)
    before = (out / "settings.yaml").read_bytes()
    for resume in ("--resume=auto", "--seed=1"):
        code, said, stderr = begin(resume, "--max_steps=4000", "--epochs=9999").ended()
        (line,) = errors_of(stderr)
        holder = rf"process {first.pid} on {re.escape(socket.gethostname())} since 20\d\d-"
        assert code == 2 and re.search(rf"^error: out_dir: {out}: in use by {holder}", line)
        assert "resumed" not in said and (out / "settings.yaml").read_bytes() == before
    first.signal(signal.SIGKILL)
    assert first.ended()[0] == -signal.SIGKILL
    again = begin("--resume=auto", "--max_steps=4000", "--epochs=9999")
    n = lines(out / "metrics.csv")
    until(lambda: lines(out / "metrics.csv") > n + 2)
    again.signal(signal.SIGTERM)
    assert again.ended()[0] == 128 + signal.SIGTERM


@row("R5")
def test_of_two_fresh_runs_at_the_same_moment_one_goes_on_and_the_other_is_refused(begin):
    ended = [child.ended() for child in [begin() for _ in range(2)]]
    assert sorted(code for code, *_ in ended) == [0, 2]
    (refused,) = [stderr for code, _, stderr in ended if code]
    assert len(errors_of(refused)) == 1
    assert "in use by process" in refused or "holds a run already" in refused


@row("R5")
def test_runs_without_a_folder_that_begin_in_the_same_second_get_one_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    folders = {_new_folder(Path("kto.py")) for _ in range(3)}
    assert len(folders) == 3 and all(folder.is_dir() for folder in folders)


@row("R5")
def test_where_there_are_no_locks_it_is_said(tmp_path, monkeypatch, capsys):
    def nolock(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(runs.folder.fcntl, "lockf", nolock)
    os.close(take_lock(tmp_path))
    assert "no locks on this file system (Operation not supported)" in capsys.readouterr().out


# ---- R6: a folder that vanishes ------------------------------------------------------------------


@row("R6")
def test_a_folder_that_vanishes_after_the_last_step_is_not_made_anew(
    tiny, ratings, tmp_path, capfd, monkeypatch
):
    out, real = tmp_path / "run", kto.Trainer.finish

    def finish(trainer):
        out.rename(tmp_path / "elsewhere")
        real(trainer)

    monkeypatch.setattr(kto.Trainer, "finish", finish)
    assert refused(lambda: train(tiny, ratings, out, *RUN)) == 1
    (line,) = errors_of(capfd.readouterr().err)
    assert line.startswith(f"error: {out}/metrics.csv: not saved: ") and not out.exists()


@row("R6")
@pytest.mark.parametrize("how", ["renamed", "deleted", "another in its place"])
def test_a_folder_that_vanishes_ends_the_run_with_its_name(how, begin, tmp_path):
    out = tmp_path / "run"
    child = begin("--max_steps=4000", "--epochs=9999")
    until(lambda: lines(out / "metrics.csv") > 4)
    if how == "another in its place":
        (tmp_path / "another").mkdir()
        shutil.copy(out / "metrics.csv", tmp_path / "another")
    out.rename(tmp_path / "elsewhere")
    if how == "another in its place":
        (tmp_path / "another").rename(
            out
        )  # at once: the run makes its checkpoints in what is there
    elif how == "deleted":
        shutil.rmtree(tmp_path / "elsewhere")
    code, _, stderr = child.ended()
    (line,) = errors_of(stderr)
    assert code == 1 and line.startswith(f"error: {out}/"), stderr
    assert "not saved: " in line
    if how != "another in its place":
        assert not out.exists(), "nothing is made in its place"


# ---- R8: damaged tables --------------------------------------------------------------------------


@row("R8")
@pytest.mark.parametrize("name", ["metrics.csv", "val.csv"])
def test_a_resume_without_its_rows_is_refused_and_goes_on_elsewhere(
    name, tiny, ratings, tmp_path, capfd
):
    argv = (f"--data.val={ratings}", "--val_interval=2", "--eval.samples=0", *RUN)
    whole = train(tiny, ratings, tmp_path / "whole", *argv)
    out = tmp_path / "run"
    train(tiny, ratings, out, *argv, "--stop_at=4")
    text = (out / name).read_text()
    settings = (out / "settings.yaml").read_bytes()
    (out / name).write_text(text.replace(text.splitlines()[2] + "\n", ""))
    capfd.readouterr()
    assert refused(lambda: train(tiny, ratings, out, *argv, "--resume=auto")) == 2
    said = capfd.readouterr()
    (line,) = errors_of(said.err)
    assert line.startswith(f"error: resume: {out / name}: not the ") and "put the file back" in line
    assert "resumed from" not in said.out and (out / "settings.yaml").read_bytes() == settings
    (elsewhere,) = re.findall(r"--resume (\S+) --out_dir", line)
    train(tiny, ratings, tmp_path / "b", *argv, f"--resume={elsewhere}")
    (out / name).write_text(text + "7,torn")
    assert_same(train(tiny, ratings, out, *argv, "--resume=auto"), whole)
    assert (out / "val.csv").read_text() == (tmp_path / "whole" / "val.csv").read_text()


def refused(go) -> int:
    with pytest.raises(SystemExit) as e:
        run_cli(go)
    return e.value.code


# ---- R9: a damaged `final` -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tiny, ratings, tmp_path_factory) -> Path:
    """A finished run."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(tiny, ratings, out, *RUN)
    return out


def flip(path: Path) -> None:
    blob = bytearray(path.read_bytes())
    blob[len(blob) // 2] ^= 1
    path.write_bytes(blob)


@row("R9")
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_final_is_refused_by_every_program(
    file, damage, finished, tiny, ratings, tmp_path, capfd, monkeypatch
):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "final" / file
    flip(path) if damage == "flipped" else path.write_bytes(path.read_bytes()[:-1])
    out, run = tmp_path / "out", tmp_path / "run"
    generate = import_module("generate")
    monkeypatch.setattr(sys, "argv", ["generate.py", f"--model={run}", "--prompt=a"])
    for what, go in {
        "model": lambda: train(run, ratings, out, *RUN),
        "model ": lambda: train(run / "final", ratings, out, *RUN),
        "reference": lambda: train(tiny, ratings, tmp_path / "o", *RUN, f"--reference={run}"),
        "model  ": generate.main,
    }.items():
        assert refused(go) == 2
        (line,) = errors_of(capfd.readouterr().err)
        assert line.startswith(f"error: {what.strip()}: {run / 'final'}: {file} is damaged"), line
    assert not out.exists()
    (run / "final" / "manifest.json").unlink()
    if file == "config.json" and damage == "cut":  # of a line's end
        train(run, ratings, out, *RUN)  # one's own change, and one's own word for it


SHARDS = [f"shard-00001-model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]


@row("R9")
@pytest.mark.parametrize("name", [*SHARDS, "state.json", "settings.yaml"])
def test_a_checkpoint_whose_manifest_names_too_little_is_not_used(name, finished, tmp_path):
    folder = shutil.copytree(finished / "checkpoints" / "step-00000006", tmp_path / "step-6")
    assert checkpoint.verify_checkpoint(folder) is None
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest[name]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.verify_checkpoint(folder) == f"manifest.json names no {name}"


@row("R9")
def test_a_file_of_weights_that_is_not_a_checkpoints_is_never_read(finished, tiny, tmp_path, capfd):
    """torch's reader takes every safetensors file of a folder, and of equal names the last one."""
    run = shutil.copytree(finished, tmp_path / "run")
    folder = run / "checkpoints" / "step-00000006"
    theirs = folder / "a-copy.safetensors"
    shutil.copy(folder / SHARDS[0], theirs)
    why = "a-copy.safetensors: not a file of this checkpoint: remove it"
    assert checkpoint.verify_checkpoint(folder) == why
    assert newest_checkpoint(run).name == "step-00000004"
    for program in ("generate", "export"):
        argv = [f"--model={folder}"] if program == "generate" else [str(folder)]
        assert refused(lambda: start(program, argv)) == 2  # noqa: B023
        assert why in errors_of(capfd.readouterr().err)[0]


@row("R9")
def test_a_damaged_shard_whose_manifest_says_the_same_is_one_line(finished, tmp_path, capfd):
    run = shutil.copytree(finished, tmp_path / "run")
    folder = run / "checkpoints" / "step-00000006"
    shard = folder / SHARDS[0]
    shard.write_bytes(shard.read_bytes()[:50])
    hashes = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(hashes | {shard.name: files.file_hash(shard)}))
    assert refused(lambda: start("generate", [f"--model={folder}"])) == 2
    (line,) = errors_of(capfd.readouterr().err)
    assert line.startswith(f"error: {folder}: ")


# ---- R10: a full disk ----------------------------------------------------------------------------


def no_room(most: int = 400):
    """As on a full disk: no file grows beyond so many bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@row("R10")
def test_a_full_disk_at_start_up_is_one_line(begin, tmp_path):
    nowhere = os.open(os.devnull, os.O_WRONLY)  # else what it prints would be refused first
    code, _, stderr = begin(first=no_room(), stdout=nowhere).ended()
    (line,) = errors_of(stderr)
    assert code == 1 and line.startswith(f"error: {tmp_path}/run"), stderr


@row("R10")
@pytest.mark.parametrize("name", ["metrics.csv", "val.csv"])
def test_a_full_disk_at_a_row_is_one_line(name, begin, tmp_path, ratings):
    out = tmp_path / "run"
    real = open

    def first():
        def full(path, mode="r", *args, **kw):
            instead = "/dev/full" if path == out / name and mode == "a" else path
            return real(instead, mode, *args, **kw)

        logger.open = full
        logger.os.path.samestat = lambda *_: True

    argv = [f"--data.val={ratings}", "--eval.samples=0"]
    code, _, stderr = begin(*argv, first=first).ended()
    assert code == 1
    assert stderr == f"error: {out / name}: not saved: No space left on device\n"


@row("R10")
@pytest.mark.parametrize("name", ["eval", "cache"])
def test_a_full_disk_between_saves_is_one_line_and_the_last_checkpoint_stays(
    name, begin, tmp_path, ratings
):
    argv = [f"--data.val={ratings}", "--eval.samples=0", "--val_interval=2"]
    assert begin(*argv, "--stop_at=4").ended()[0] == 0
    real = sync

    def full(path):
        if f"/{name}/" in str(path):
            raise OSError(28, "No space left on device")
        return real(path)

    def first():
        files.sync = full

    argv += [f"--reference_cache={tmp_path / 'cache'}"] if name == "cache" else []
    code, _, stderr = begin(*argv, "--resume=auto", first=first).ended()
    (line,) = errors_of(stderr)
    assert code == 1 and f"/{name}/" in line and line.endswith("not saved: No space left on device")
    assert newest_checkpoint(tmp_path / "run").name == "step-00000004"
    assert begin(*argv, "--resume=auto").ended()[0] == 0


# ---- R11: Ctrl-C ---------------------------------------------------------------------------------


@row("R11")
def test_ctrl_c_while_the_model_is_read_is_one_line(begin):
    import model

    reached = os.pipe()

    def first():
        model.load_model = lambda *_: os.write(reached[1], b"x") and time.sleep(60)

    child = begin(first=first)
    os.read(reached[0], 1)
    child.signal(signal.SIGINT)
    code, _, stderr = child.ended(10)
    assert (code, stderr) == (130, "error: stopped by SIGINT\n")


@row("R11")
def test_ctrl_c_while_spin_answers_stops_at_the_next_token_and_a_resume_is_the_same_run(
    begin, demos, tmp_path
):
    argv = [f"--data.train={demos}", "--spin.max_iterations=2", "--epochs=1"]
    argv += ["--batch_size=4", "--spin.max_new_tokens=20", "--spin.rollout_batch_size=2"]
    reached = os.pipe()

    def first():
        import generate

        real, calls = generate.choose_token, []

        def choose(*a):
            calls.append(1)
            if len(calls) == 30:  # in the second batch of the first answers, or later
                os.write(reached[1], b"x")
                time.sleep(0.5)
            assert len(calls) < 32, "one more token at most"
            return real(*a)

        generate.choose_token = choose

    whole = tmp_path / "whole"
    assert begin(*argv, program="spin", out=whole).ended()[0] == 0
    child = begin(*argv, program="spin", first=first)
    os.read(reached[0], 1)
    child.signal(signal.SIGINT)
    code, said, stderr = child.ended()
    assert code == 130 and not errors_of(stderr), stderr
    assert "stopped by SIGINT at step 0 of" in said and "--resume auto" in said
    n = len((tmp_path / "run" / "iterations" / "answers-1.jsonl").read_text().splitlines())
    assert n > 1, "whole batches are kept"
    code, _, stderr = begin(*argv, "--resume=auto", program="spin").ended()
    assert code == 0, stderr
    assert_same(result(tmp_path / "run"), result(whole))


@row("R11")
def test_a_second_ctrl_c_ends_at_once(begin, tmp_path):
    def first():
        import train as loop

        loop.clip_gradient = lambda *a: time.sleep(60)

    child = begin(first=first)
    until(lambda: (tmp_path / "run" / "metrics.csv").exists())
    time.sleep(0.5)
    child.signal(signal.SIGINT)
    time.sleep(0.3)
    assert os.waitpid(child.pid, os.WNOHANG)[0] == 0, "the first one waits for the step"
    child.signal(signal.SIGINT)
    code, said, stderr = child.ended(5)
    assert (code, stderr) == (128 + signal.SIGINT, "")
    first, second = said.splitlines()[-2:]
    assert first.startswith("SIGINT: waiting for the end of this step; a second one ends the run")
    assert second == "ended at once: what was not saved is lost"


HANGING = """
import time
from kto import main
from runs.errors import run_cli

def checker(answers):
    print("asked", flush=True)
    try:
        time.sleep(600)
    except Exception:  # as a checker may do around its own work
        return False

run_cli(lambda: main(checker=checker))
"""


@pytest.fixture
def hanging(tmp_path, ratings) -> dict:
    """What `begin` and `group` need for a run whose checker hangs at its first answer."""
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    argv = [f"--data.val={ratings}", "--eval.samples=0", "--eval.max_new_tokens=4"]
    return dict(argv=argv, program=str(script), first=lambda: sys.path.insert(0, str(ROOT)))


def is_asked(tmp_path) -> bool:
    said = tmp_path / "said-0" / "stdout-0"
    return said.exists() and "asked" in said.read_text()


@row("R11")
def test_one_ctrl_c_ends_a_hanging_checker(begin, hanging, tmp_path):
    child = begin(*hanging.pop("argv"), **hanging)
    until(lambda: is_asked(tmp_path))
    child.signal(signal.SIGINT)
    code, said, stderr = child.ended(10)
    assert (code, stderr) == (130, "")
    assert "SIGINT: ending the checker; a second one ends the run at once" in said
    assert "stopped by SIGINT at step 0 of 6; go on with\n  python " in said, "nothing was saved"


@row("R11")
@pytest.mark.parametrize("last", [False, True])
def test_ctrl_c_in_a_validation_saves_the_step_and_a_resume_validates_it(
    last, begin, tmp_path, ratings
):
    argv = [f"--data.val={ratings}", "--val_interval=2", "--keep_best=loss", "--eval.samples=1"]
    reached, hangs_at = tmp_path / "reached", 6 if last else 4

    def first():
        import evaluate

        real = evaluate.Evaluator.samples

        def samples(self, step):
            if newest_row(tmp_path / "run" / "metrics.csv") == hangs_at:
                reached.touch()
                time.sleep(60)
            return real(self, step)

        evaluate.Evaluator.samples = samples

    whole = tmp_path / "whole"
    assert begin(*argv, out=whole).ended()[0] == 0
    child = begin(*argv, first=first)
    until(reached.exists)
    child.signal(signal.SIGINT)
    code, said, stderr = child.ended(20)
    assert (code, stderr) == (130, "")
    assert f"stopped by SIGINT at step {hangs_at} of 6, saved; go on with" in said
    assert begin(*argv, "--resume=auto").ended()[0] == 0
    assert_same(result(tmp_path / "run"), result(whole))
    assert (tmp_path / "run" / "val.csv").read_text() == (whole / "val.csv").read_text()


def newest_row(rows: Path) -> int:
    return lines(rows) - 1


@row("R11")
def test_ctrl_c_while_log_probs_are_precomputed_keeps_those_that_are_done(begin, tmp_path):
    argv = [f"--reference_cache={tmp_path / 'cache'}"]
    reached = tmp_path / "reached"

    def first():
        import reference

        real, calls = reference.Reference.compute, []

        def compute(self, *args):
            calls.append(1)
            if len(calls) == 4:
                reached.touch()
                time.sleep(60)
            return real(self, *args)

        reference.Reference.compute = compute

    child = begin(*argv, first=first)
    until(reached.exists)
    child.signal(signal.SIGINT)
    code, said, stderr = child.ended(20)
    assert (code, stderr) == (130, "")
    assert "SIGINT: ending precomputing log-probs; " in said and "saved" not in said
    assert list((tmp_path / "cache").glob("*.safetensors"))
    assert begin(*argv, "--resume=auto").ended()[0] == 0


@row("R11")
def test_a_terminal_that_is_closed_ends_a_run_saved(begin, tmp_path):
    master, slave = os.openpty()

    def first():  # as a shell starts a program in a terminal
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
        os.close(master)
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for fd in (1, 2):
            os.dup2(slave, fd)
        os.close(slave)

    child = begin("--max_steps=4000", "--epochs=9999", "--progress=true", first=first)
    os.close(slave)
    until(lambda: lines(tmp_path / "run" / "metrics.csv") > 4)
    os.close(master)
    assert child.ended()[0] == 128 + signal.SIGHUP
    newest = newest_checkpoint(tmp_path / "run").name
    assert newest == f"step-{newest_row(tmp_path / 'run' / 'metrics.csv'):08d}"


# ---- R12: a console that takes nothing -----------------------------------------------------------


@row("R12")
def test_a_console_that_does_not_know_a_character_is_not_worth_a_run(begin, tmp_path, ratings):
    out = tmp_path / "Größe-日本"
    code, _, stderr = begin(f"--data.val={ratings}", out=out, PYTHONIOENCODING="ascii").ended()
    assert (code, stderr) == (0, "")
    assert lines(out / "metrics.csv") == 7 and (out / "final" / "manifest.json").exists()


@row("R12")
@pytest.mark.parametrize("console", ["closed", "full"])
def test_output_that_nobody_takes_ends_the_run_in_one_line(console, begin, tmp_path):
    if console == "closed":
        read, stdout = os.pipe()
        os.close(read)
    else:
        stdout = os.open("/dev/full", os.O_WRONLY)
    code, _, stderr = begin(stdout=stdout).ended()
    (line,) = errors_of(stderr)
    assert code == 1 and line.startswith("error: output: ")


# ---- R13: litter ---------------------------------------------------------------------------------


@row("R13")
def test_litter_of_an_earlier_life_goes_when_a_run_takes_the_folder_and_only_then(
    tiny, ratings, tmp_path, capfd
):
    out = tmp_path / "run"
    train(tiny, ratings, out, *RUN, "--stop_at=4")
    litter = [
        "checkpoints/.step-00000004.old/a", "checkpoints/.step-00000005.tmp/a", ".final.tmp/b",
        "eval/step-2.tmp", "metrics.tmp", "iterations/.1.tmp/c",
    ]  # fmt: skip
    for name in litter:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("x")
    shutil.copytree(
        out / "checkpoints" / "step-00000002", out / "checkpoints" / ".step-00000003.old"
    )
    argv = (*RUN, "--resume=auto")
    assert refused(lambda: train(tiny, ratings, out, *argv, "--seed=2")) == 2
    assert all((out / name).exists() for name in litter), "this run did not take the folder"
    train(tiny, ratings, out, *argv, "--stop_at=5", "--keep_last=9")
    assert not any((out / name).exists() for name in litter)
    kept = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert kept == [f"step-0000000{i}" for i in (2, 3, 4, 5)], "the only copy of step 3 is back"


@row("R13")
def test_half_of_a_checkpoint_that_was_being_removed_is_litter(finished, tmp_path, monkeypatch):
    shutil.copytree(finished / "checkpoints", tmp_path / "c")
    monkeypatch.setattr(files.shutil, "rmtree", lambda *a, **kw: None)  # killed before it
    prune_checkpoints(tmp_path / "c", 1, None)
    names = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert names == [".step-00000004.tmp", "step-00000006"]


# ---- R14: found too late -------------------------------------------------------------------------


@row("R14")
def test_a_folder_among_a_models_files_does_not_fail_the_export(tiny, ratings, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "tokenizer").mkdir()
    (model / "vocab").mkdir()
    train(model, ratings, tmp_path / "run", *RUN)
    assert (tmp_path / "run" / "final" / "tokenizer.json").exists()


@row("R14")
def test_a_file_that_could_not_be_exported_is_refused_before_the_first_step(
    tiny, ratings, tmp_path, capfd, monkeypatch
):
    real = shutil.copyfile

    def copyfile(source, target):
        if source.name == "tokenizer.json":
            raise PermissionError(13, "Permission denied", str(source))
        return real(source, target)

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    assert refused(lambda: train(tiny, ratings, tmp_path / "run", *RUN)) == 2
    (line,) = errors_of(capfd.readouterr().err)
    assert line == f"error: model: {tiny / 'tokenizer.json'}: Permission denied"
    assert not (tmp_path / "run" / "metrics.csv").exists()


# ---- R15: tracebacks -----------------------------------------------------------------------------

LITGPT = "model_config.yaml"
HOSTILE = {
    "config []": ("config.json", "[]"),
    "config 5": ("config.json", "5"),
    "config not UTF-8": ("config.json", b"\xff"),
    "config deep": ("config.json", "[" * 100000),
    "no heads": ("config.json", {"n_head": 0}),
    "null heads": ("config.json", {"n_head": None}),
    "a list of heads": ("config.json", {"n_head": [4]}),
    "too many layers": ("config.json", {"n_layer": 10**9}),
    "too long a context": ("config.json", {"n_positions": 10**15}),
    "heads that do not divide": ("config.json", {"n_head": 5}),
    "a folder as config": ("config.json", None),
    "tokenizer_config []": ("tokenizer_config.json", "[]"),
    "tokenizer_config 5": ("tokenizer_config.json", "5"),
    "tokenizer_config not UTF-8": ("tokenizer_config.json", b"\xff"),
    "tokenizer.json []": ("tokenizer.json", "[]"),
    "a template that is a number": ("tokenizer_config.json", {"chat_template": 5}),
    "templates of a wrong form": ("tokenizer_config.json", {"chat_template": [5]}),
    "templates without a name": ("tokenizer_config.json", {"chat_template": [{"a": 1}]}),
    "a foreign tag": (LITGPT, "!!python/object:os.system {}"),
    "a foreign key": (
        LITGPT,
        "{n_layer: 1, n_head: 1, n_embd: 8, block_size: 8, vocab_size: 9, x: 1}",
    ),
    "model_config []": (LITGPT, "[]"),
    "weights": ("model.safetensors", b"\xff" * 100),
    "an end that is no token": ("generation_config.json", {"eos_token_id": [0, 10**30]}),
    "a template too deep": ("chat_template.jinja", "{{" + "(" * 5000 + ")" * 5000 + "}}"),
}


@row("R15")
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_model_folder_is_one_line(case, tiny, ratings, tmp_path, capfd):
    file, content = HOSTILE[case]
    folder = shutil.copytree(tiny, tmp_path / "model")
    path = folder / file
    if file == LITGPT:
        (folder / "lit_model.pth").write_bytes(b"x")
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content)
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refused(lambda: train(folder, ratings, tmp_path / "run", *RUN)) == 2
    (line,) = errors_of(capfd.readouterr().err)
    assert str(folder) in line and len(line) < 700


@row("R15")
@pytest.mark.parametrize("how", ["a pipe", "a link to nothing"])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_pipe_among_a_models_files_is_one_line(name, how, tiny, ratings, tmp_path, capfd):
    """Its reader would wait for a writer for ever; and a link to nothing would count as no file."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name) if how == "a pipe" else (folder / name).symlink_to("nothing")
    assert refused(lambda: train(folder, ratings, tmp_path / "run", *RUN)) == 2
    (line,) = errors_of(capfd.readouterr().err)
    assert line == f"error: model: {folder / name}: a pipe or a link to nothing, not a file"


@row("R15")
def test_metrics_that_are_a_pipe_are_refused_by_a_resume(finished, tiny, ratings, tmp_path, capfd):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "metrics.csv").unlink()
    os.mkfifo(run / "metrics.csv")
    assert refused(lambda: train(tiny, ratings, run, *RUN, "--resume=auto")) == 2
    (line,) = errors_of(capfd.readouterr().err)
    assert "not the 6 rows that step-00000006 was saved with" in line


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
SAVED = {
    "state.json": {
        "a list": [],
        "a number": 5,
        "not UTF-8": b"\xff",
        "deep": b"[" * 100000,
        "without its run": {"run": None},
        "a list as its run": {"run": []},
        "shards that are a number": {"shards": 5},
        "shards that are numbers": {"shards": [5]},
        "an optimizer that is a list": {"optimizer": []},
        "a step that is a text": {"run": {"step": "4"}},
        "a step that is true": {"run": {"step": True}},
        "a step of a half": {"run": {"step": 4.5}},
        "a step below 0": {"run": {"step": -1}},
        "a step that no run reaches": {"run": {"step": 10**30}},
        "an iteration below 0": {"run": {"iteration": -1}},
        "a program that is null": {"run": {"program": None}},
        "an identity that is a list": {"run": {"identity": ["x"]}},
        "an identity of numbers": {"run": {"identity": {"config.json": 5}}},
        "rows without a hash": {"run": {"rows": {"metrics.csv": [3]}}},
        "rows that are a number": {"run": {"rows": {"metrics.csv": 3}}},
        "a template that is a number": {"run": {"chat_template": 5}},
        "a best value that is a text": {"run": {"best_value": "x"}},
        "a field of another version": {"run": {"of_tomorrow": 1}},
    },
    "settings.yaml": {
        "a list": b"- 1\n",
        "a number": b"5\n",
        "empty": b"",
        "not UTF-8": b"\xff",
        "deep": b"[" * 100000,
        "broken": b"a: [1\n",
        "a python object": b"a: !!python/object:os.system {}\n",
        "an alias bomb": BOMB.encode(),
        "a bomb of groups": BOMB.replace("[", "{b: ").replace(", ", ", c: ").replace("]", "}").encode(),
        "a model that is a number": {"model": 5},
        "no model": {"model": None},
        "data that are a list": {"data": []},
        "no precision": {"precision": 16},
        "adapters that are a list": {"lora": [1]},
    },
}  # fmt: skip


def write_saved(folder: Path, file: str, content) -> None:
    """Put a file into a checkpoint: bytes, or a value over what is there; its manifest knows it."""
    path = folder / file
    if isinstance(content, dict):
        was = yaml.safe_load(path.read_text())  # JSON too
        if isinstance(content.get("run"), dict):
            content = {"run": was["run"] | content["run"]}
        content = was | content
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    manifest = folder / "manifest.json"
    hashes = json.loads(manifest.read_text()) | {file: files.file_hash(path)}
    manifest.write_text(json.dumps(hashes))


@row("R15")
@pytest.mark.parametrize("file,case", [(file, case) for file in SAVED for case in SAVED[file]])
def test_a_checkpoint_that_says_nonsense_is_one_line_in_every_program(
    file, case, finished, tiny, ratings, tmp_path, capfd
):
    run = shutil.copytree(finished, tmp_path / "run")
    folder = run / "checkpoints" / "step-00000006"
    write_saved(folder, file, SAVED[file][case])
    for go in (
        lambda: train(tiny, ratings, tmp_path / "b", *RUN, f"--resume={folder}"),
        lambda: train(folder, ratings, tmp_path / "c", *RUN),
        lambda: import_module("export").main([str(folder), f"--out={tmp_path / 'd'}"]),
    ):
        assert refused(go) == 2
        (line,) = errors_of(capfd.readouterr().err)
        assert str(folder) in line and len(line) < 500, line
    assert not any((tmp_path / name / "metrics.csv").exists() for name in "bc")


@row("R15")
def test_a_manifest_names_files_of_its_folder_only(finished, tmp_path):
    folder = shutil.copytree(finished / "checkpoints" / "step-00000006", tmp_path / "step-6")
    hashes = json.loads((folder / "manifest.json").read_text())
    for name in ("/dev/zero", "../secret", "a/b", "gone", "\0"):
        (folder / "manifest.json").write_text(json.dumps(hashes | {name: "x"}))
        assert "named by manifest.json: no such file" in checkpoint.verify_checkpoint(folder)
    for content in ("[]", "5", "{", '"x"'):
        (folder / "manifest.json").write_text(content)
        assert str(folder / "manifest.json") in checkpoint.verify_checkpoint(folder)


@row("R15")
@pytest.mark.parametrize("what", ["[]", "{}", "{", '{"right": 1}', "a folder"])
def test_damaged_answers_from_before_the_run_cost_only_the_comparison(
    what, tiny, ratings, tmp_path, capfd, monkeypatch
):
    out, real = tmp_path / "run", kto.Trainer.finish

    def finish(trainer):
        before = out / "eval" / "before.json"
        assert before.exists()
        before.unlink()
        before.mkdir() if what == "a folder" else before.write_text(what)
        real(trainer)

    monkeypatch.setattr(kto.Trainer, "finish", finish)
    argv = (*RUN, f"--data.val={ratings}", "--eval.check=demo", "--eval.max_new_tokens=2")
    train(tiny, ratings, out, *argv)
    said, stderr = capfd.readouterr()
    line = f"no comparison with the answers before the run: {out / 'eval' / 'before.json'}: "
    assert line in said and stderr == "" and f"exported to {out / 'final'}" in said


@row("R15")
@pytest.mark.parametrize("what", ["a pipe", "a device", "large"])
def test_a_small_file_that_has_no_end_is_one_line(what, tiny, ratings, tmp_path, capfd):
    path = tmp_path / "run.yaml"
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**40)
    assert refused(lambda: kto.main([f"--config={path}", *RUN])) == 2
    (line,) = errors_of(capfd.readouterr().err)
    why = "larger than 67,108,864 bytes" if what == "large" else "not a regular file"
    assert line == f"error: config: {path}: {why}"


GIVEN = {
    "--data.train={}/directory.jsonl": "data.train|directory.jsonl",
    "--data.train={}/latin.jsonl": "latin.jsonl:1: json: not UTF-8",
    "--data.chat_template={}/latin.jsonl": "chat template: .*latin.jsonl: not UTF-8 at byte",
    "--max_time=99999999999:00:00": "max_time: expected HH:MM:SS",
    "--max_time=٠١:00:00": "max_time: expected HH:MM:SS",
    "--lora.rank=1000000000": "lora.rank: expected below 8192",
    "--kto.desirable_weight=1e308": "kto.desirable_weight: expected below 1e\\+30",
    "--kto.beta=1e308": "kto.beta: expected below 1e\\+30",
    "--batch_size=" + "9" * 5000: "batch_size: ",
    "--config={}/nul.yaml": r"model: expected a path in UTF-8 or an id, got 'a\\x00b'",
    "--out_dir=": "out_dir: expected a path in UTF-8 or an id, got ''",
    "--out_dir={}/Gr\udcf6\udcdfe": r"out_dir: expected a path in UTF-8 .*Gr\\udcf6\\udcdfe'",
    "--out_dir={}/occupied": "out_dir: .*occupied/eval: File exists",
    "--out_dir={}/latin.jsonl": "out_dir: .*latin.jsonl: ",
    "--reference_cache={}/latin.jsonl": "reference_cache: .*latin.jsonl: File exists",
    "--resume={}/occupied": "resume: .*occupied: ",
    "--model={}/esc\x1b[31mape": r"model: .*esc\\x1b\[31mape",
    "--eval.check=a\nb\x1b": r"eval.check: expected demo; got a\\nb\\x1b$",
    "--optim.schedule=a\nb": r"optim.schedule: expected cosine, linear, constant; got a\\nb$",
    "--logger=" + "x" * 10000: "logger: expected .* \\.\\.\\. x+$",
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "directory.jsonl").mkdir()
    (folder / "latin.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    (folder / "nul.yaml").write_text('model: "a\\0b"\ndata: {train: t}\n')
    (folder / "occupied").mkdir()
    (folder / "occupied" / "eval").touch()
    return folder


@row("R15")
@pytest.mark.parametrize("given", GIVEN)
def test_a_foolish_setting_is_one_line(given, odd, tiny, ratings, tmp_path, capfd):
    argv = [f"--out_dir={tmp_path / 'run'}", given.format(odd)]
    if not given.startswith("--config"):
        argv = [f"--model={tiny}", f"--data.train={ratings}", *argv]
    assert refused(lambda: kto.main(last_of_each([*RUN, *argv]))) == 2
    (line,) = errors_of(capfd.readouterr().err)
    assert re.search(f"^error: .*{GIVEN[given]}", line), line
    assert len(line) < 500 and "\x1b" not in line


@row("R15")
def test_generates_seed_is_bounded(tiny, capfd, monkeypatch):
    generate = import_module("generate")
    for seed in ("-1", "9" * 30):
        argv = ["generate.py", f"--model={tiny}", "--prompt=a", f"--seed={seed}"]
        monkeypatch.setattr(sys, "argv", argv)
        assert refused(generate.main) == 2
        (line,) = errors_of(capfd.readouterr().err)
        assert line.startswith("error: seed: expected ")


# ---- R16: limits ---------------------------------------------------------------------------------


@row("R16")
def test_absurdly_many_new_tokens_are_as_many_as_the_context_has_room_for(tiny, capfd, monkeypatch):
    generate = import_module("generate")
    argv = ["generate.py", f"--model={tiny}", "--prompt=a", "--max_new_tokens=16000000"]
    monkeypatch.setattr(sys, "argv", argv)
    generate.main()
    assert capfd.readouterr().out


# ---- R18: what is echoed, and more ---------------------------------------------------------------


@row("R18")
def test_a_run_whose_folder_is_not_ascii_goes_on_by_the_printed_command(
    tiny, ratings, tmp_path, capfd
):
    out = tmp_path / "Größe-日本 [1]"
    whole = train(tiny, ratings, tmp_path / "whole", *RUN)
    train(tiny, ratings, out, *RUN, "--stop_at=2")
    (command,) = re.findall("^  python (.*)$", capfd.readouterr().out, re.M)
    start("kto", [*shlex.split(command)[1:], "--stop_at=null"])
    assert_same(result(out), whole)


@row("R18")
@pytest.mark.filterwarnings("ignore")
def test_a_parquet_files_name_is_a_path_and_no_pattern(tiny, ratings, tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    rated = (PARITY / "kto_data.jsonl").read_text().splitlines()
    path = tmp_path / "a[1]*.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(map(json.loads, rated))), path)
    calls = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: calls.append(address))
    a = train(tiny, path, tmp_path / "a", *RUN)
    b = train(tiny, PARITY / "kto_data.jsonl", tmp_path / "b", *RUN)
    assert_same(a, b)
    assert not calls


@row("R18")
def test_not_a_number_is_not_called_the_references_doing(tiny, ratings, tmp_path, capfd):
    from safetensors.torch import save_file

    model = shutil.copytree(tiny, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    save_file({k: x * float("nan") for k, x in weights.items()}, model / "model.safetensors")
    assert refused(lambda: train(model, ratings, tmp_path / "run", *RUN)) == 1
    (line,) = errors_of(capfd.readouterr().err)
    assert line.endswith("nan nats: the weights do not give finite log-probs")


@row("R18")
def test_each_iteration_of_spin_draws_its_own_random_numbers(tiny, demos, tmp_path):
    """At a learning rate of 0 the policy never moves: only the draws can differ."""
    argv = ["--batch_size=8", "--optim.lr=0", "--precision=32-true", "--spin.max_iterations=2"]
    argv += ["--spin.max_new_tokens=8"]
    train(tiny, demos, tmp_path / "run", *argv, program="spin")
    folder = tmp_path / "run" / "iterations"
    one, two = ((folder / f"answers-{i}.jsonl").read_text().splitlines()[1:] for i in (1, 2))
    assert len(one) == len(two) == 8
    assert sum(a != b for a, b in zip(one, two)) > 4


# ---- R19: two processes --------------------------------------------------------------------------


@pytest.fixture
def group(begin):
    """group(strategy, ...) -> the Started ranks of one run on two processes."""

    def start(strategy, *argv, **kw) -> list[Started]:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        common = dict(NODE_RANK="0", GROUP_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        common |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="test")
        argv = (f"--strategy={strategy}", *argv)
        one = (dict(RANK=str(i), LOCAL_RANK=str(i)) for i in range(2))
        return [begin(*argv, **kw, **common, **env) for env in one]

    return start


def ended_together(children: list[Started]) -> tuple[list[int], str]:
    """Exit codes, and the one cause that was printed."""
    ended = [children[0].ended()]
    began = time.monotonic()
    ended += [child.ended(10) for child in children[1:]]
    assert time.monotonic() - began < 10
    said = [line for _, _, stderr in ended for line in errors_of(stderr)]
    assert len(said) == 1, said
    return [code for code, *_ in ended], said[0]


BOTH = pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])


@row("R19")
@BOTH
def test_two_processes_end_together_when_the_folder_is_anothers(strategy, group, tmp_path):
    first = group(strategy, "--max_steps=4000", "--epochs=9999")
    until(lambda: lines(tmp_path / "run" / "metrics.csv") > 3)
    codes, line = ended_together(group(strategy, "--resume=auto"))
    assert codes == [2, 2] and f"in use by process {first[0].pid} on" in line


@row("R19")
@BOTH
def test_two_processes_end_together_when_the_folder_vanishes(strategy, group, tmp_path):
    children = group(strategy, "--max_steps=4000", "--epochs=9999")
    until(lambda: lines(tmp_path / "run" / "metrics.csv") > 3)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    codes, line = ended_together(children)
    assert codes[0] == 1 and codes[1] and f"error: {tmp_path / 'run'}/" in line


@row("R19")
@BOTH
def test_two_processes_end_together_when_a_resume_is_refused(strategy, group, tmp_path):
    assert [child.ended()[0] for child in group(strategy, "--stop_at=2")] == [0, 0]
    (tmp_path / "run" / "metrics.csv").write_text("")
    codes, line = ended_together(group(strategy, "--resume=auto"))
    assert codes == [2, 2] and "metrics.csv: not the 2 rows" in line


@row("R19")
@BOTH
def test_two_processes_end_together_on_a_full_disk(strategy, group, tmp_path):
    nowhere = os.open(os.devnull, os.O_WRONLY)
    codes, line = ended_together(group(strategy, first=no_room(), stdout=nowhere))
    assert codes[0] == 1 and codes[1] and f"error: {tmp_path / 'run'}" in line


@row("R19")
@BOTH
def test_two_processes_end_together_when_one_is_killed(strategy, group, tmp_path):
    children = group(strategy, "--max_steps=4000", "--epochs=9999")
    until(lambda: lines(tmp_path / "run" / "metrics.csv") > 3)
    children[1].signal(signal.SIGKILL)
    codes, line = ended_together(children)
    assert codes == [1, -signal.SIGKILL]
    assert line == "error: another process of this run has died"


def test_the_network_error_of_a_checker_keeps_its_traceback(tiny, tmp_path, capfd):
    def checker(answers):
        raise ConnectionResetError(104, "Connection reset by peer")

    file = tmp_path / "val.jsonl"
    file.write_text('{"prompt": "a", "completion": "b", "label": true}\n' * 8)
    with pytest.raises(SystemExit) as e:
        run_cli(
            lambda: train(
                tiny,
                file,
                tmp_path / "run",
                f"--data.val={file}",
                "--batch_size=8",
                checker=checker,
            )
        )
    said = capfd.readouterr().err
    assert e.value.code == 1 and "in checker" in said and "another process" not in said


@row("R19")
@BOTH
def test_ctrl_c_on_two_processes_saves_once_and_a_resume_is_the_same_run(strategy, group, tmp_path):
    children = group(strategy, "--max_steps=4000", "--epochs=9999")
    until(lambda: lines(tmp_path / "run" / "metrics.csv") > 3)
    for child in children:
        child.signal(signal.SIGINT)
    ended = [child.ended(20) for child in children]
    assert [code for code, *_ in ended] == [130, 130]
    assert sum("stopped by SIGINT" in said for _, said, _ in ended) == 1
    assert not any(errors_of(stderr) for *_, stderr in ended)


@row("R19")
def test_one_ctrl_c_ends_a_hanging_checker_of_two_processes(group, hanging, tmp_path):
    children = group("ddp", *hanging.pop("argv"), **hanging)
    until(lambda: is_asked(tmp_path))
    for child in children:  # as a terminal sends it
        child.signal(signal.SIGINT)
    ended = [child.ended(20) for child in children]
    assert [(code, stderr) for code, _, stderr in ended] == [(130, ""), (130, "")]
    assert sum("stopped by SIGINT at step 0" in said for _, said, _ in ended) == 1


@row("R19")
def test_the_rank_that_fails_first_has_written_its_line_before_rank_0_ends_it(group, tmp_path):
    """Rank 1 is slow to write, and rank 0 ends the processes that it launched."""
    other = tmp_path / "pid of rank 1"

    def first():
        import kto

        rank_1 = os.environ["RANK"] == "1"
        if rank_1:
            other.write_text(str(os.getpid()))
        real_print, real_end = errors._print_error, errors.end_process

        def fail(*_):
            if not rank_1:
                time.sleep(1)  # so rank 1 is the first
            raise errors.BadInput("both fail")

        def slowly(text):
            time.sleep(2 if rank_1 else 0)
            real_print(text)

        def end(code):
            if not rank_1:
                os.kill(int(other.read_text()), signal.SIGKILL)
            real_end(code)

        kto.kto_loss, errors._print_error, errors.end_process = fail, slowly, end

    ended = [child.ended(20) for child in group("ddp", first=first)]
    (line,) = [line for _, _, stderr in ended for line in errors_of(stderr)]
    assert line == "rank 1: error: both fail" and ended[0][0] == 2


@row("R19")
def test_what_only_the_second_process_finds_wrong_is_written_by_it(begin, tmp_path):
    """Before the processes know of each other. torchrun then ends the first one."""
    env = dict(RANK="1", LOCAL_RANK="1", NODE_RANK="0", GROUP_RANK="0", WORLD_SIZE="2")
    child = begin("--model=nowhere/at/all", TORCHELASTIC_RUN_ID="test", **env)
    code, _, stderr = child.ended()
    assert code == 2 and stderr.startswith("rank 1: error: model: nowhere/at/all: no such folder")


# ---- R20: links ----------------------------------------------------------------------------------

LINKED = ["metrics.csv", "val.csv", "settings.yaml", "eval/step-0.json", ".final.tmp", ".final.old",
          "final", "checkpoints/.step-00000002.tmp"]  # fmt: skip


@row("R20")
@pytest.mark.parametrize("name", LINKED)
def test_a_link_in_a_runs_folder_is_replaced_and_what_it_points_at_stays(
    name, tiny, ratings, tmp_path
):
    """Of a file, and of a folder with a file of a tokenizer's name."""
    out, mine = tmp_path / "run", tmp_path / "mine"
    if "." in Path(name).suffix and "final" not in name and "step-00000002" not in name:
        mine.touch()
    else:
        mine.mkdir()
        (mine / "tokenizer.json").write_text("mine")
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).symlink_to(mine)
    argv = (*RUN, f"--data.val={ratings}", "--eval.samples=0", "--val_interval=2")
    train(tiny, ratings, out, *argv, "--resume=auto")
    assert not (out / name).is_symlink() and (out / "final" / "model.safetensors").exists()
    if mine.is_dir():
        assert [p.name for p in mine.iterdir()] == ["tokenizer.json"]
        assert (mine / "tokenizer.json").read_text() == "mine"
    else:
        assert mine.read_bytes() == b""


@row("R20")
def test_a_lock_that_is_a_link_is_refused_and_what_it_points_at_stays(
    tiny, ratings, tmp_path, capfd
):
    out, mine = tmp_path / "run", tmp_path / "mine"
    out.mkdir()
    mine.write_text("mine")
    (out / ".lock").symlink_to(mine)
    assert refused(lambda: train(tiny, ratings, out, *RUN)) == 2
    (line,) = errors_of(capfd.readouterr().err)
    assert line == f"error: out_dir: {out}/.lock: a link: remove it" and mine.read_text() == "mine"


@row("R20")
def test_a_copy_of_a_run_by_hard_links_changes_nothing_in_the_run(tiny, ratings, tmp_path):
    """cp -al: each file of the copy is the run's own file until it is written anew."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    train(tiny, ratings, run, *RUN, "--stop_at=4")
    shutil.copytree(run, copy, copy_function=os.link)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    train(tiny, ratings, copy, *RUN, "--resume=auto")
    assert lines(copy / "metrics.csv") == 7
    assert all(p.read_bytes() == content for p, content in before.items())


@row("R20")
def test_what_a_model_links_to_is_not_exported_unless_a_tokenizer_reads_it(tiny, ratings, tmp_path):
    model, mine = shutil.copytree(tiny, tmp_path / "model"), tmp_path / "mine"
    mine.write_text("mine")
    (model / "tokenizer_mine").symlink_to(mine)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to(tiny / "tokenizer.json")  # as in the Hub's cache
    train(model, ratings, tmp_path / "run", *RUN)
    final = tmp_path / "run" / "final"
    assert (final / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert not (final / "tokenizer_mine").exists()


# ---- slow: many moments --------------------------------------------------------------------------


@row("R5")
@row("R8")
@pytest.mark.slow
def test_killed_at_many_moments_and_resumed_it_is_the_same_run(begin, tmp_path, tiny, ratings):
    argv = ["--max_steps=60", "--epochs=99", "--save_interval=7", f"--data.val={ratings}"]
    argv += ["--val_interval=5", "--eval.samples=0"]
    assert begin(*argv, out=tmp_path / "whole").ended()[0] == 0
    r, out = np.random.default_rng(0), tmp_path / "run"
    for _ in range(20):
        child = begin(*argv, "--resume=auto")
        time.sleep(r.uniform(0.05, 1.5))
        child.signal(signal.SIGKILL)
        child.ended()
    code, _, stderr = begin(*argv, "--resume=auto").ended()
    assert code == 0, stderr
    assert numbers(result(out)) == numbers(result(tmp_path / "whole"))
    assert (out / "val.csv").read_text() == (tmp_path / "whole" / "val.csv").read_text()
    names = [str(p) for p in out.rglob("*")]
    assert not [name for name in names if name.endswith((".tmp", ".old"))]


@row("R11")
@row("R19")
@pytest.mark.slow
def test_ctrl_c_while_ranks_wait_for_each_other_is_one_line_and_leaves_no_process(tmp_path):
    argv = [sys.executable, ROOT / "kto.py", "--out_dir", tmp_path / "run", "--devices=2"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([*argv, "--accelerator=cpu"], start_new_session=True, **pipes)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: children.read_text())
    (child,) = children.read_text().split()
    # stopped before its exec it would hold up rank 0 in vfork, where no signal reaches it
    until(lambda: b"LOCAL_RANK" in Path(f"/proc/{child}/environ").read_bytes())
    os.kill(int(child), signal.SIGSTOP)  # rank 0 then waits in torch, where Python gets no turn
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    try:
        _, stderr = process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert (process.returncode, stderr) == (130, "error: stopped by SIGINT\n")
    status = Path(f"/proc/{child}/stat")
    until(lambda: not status.exists() or status.read_text().split()[2] == "Z", 10)


@row("R11")
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.2, 0.4, 0.6, 0.9, 1.2])
def test_ctrl_c_at_any_moment_after_the_imports_is_one_line_or_a_saved_run(seconds, begin):
    """A forked process has imported everything. During the imports Ctrl-C is Python's own traceback."""
    child = begin("--max_steps=4000", "--epochs=9999")
    time.sleep(seconds)
    child.signal(signal.SIGINT)
    code, said, stderr = child.ended()
    assert code == 130 and "Traceback" not in stderr
    assert stderr == "error: stopped by SIGINT\n" or "stopped by SIGINT at step" in said
