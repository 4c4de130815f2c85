"""A checkpoint is whole or not there; a resumed run is the same run, bit for bit."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    CLOCKS,
    PARITY,
    Started,
    assert_same,
    checkpoint_tensors,
    first_shard,
    killed_and_resumed,
    last_of_each,
    numbers,
    ranks,
    start,
    train,
    until,
)  # fmt: skip
from models import gpt2_from_hf
from safetensors.torch import load_file

import kto
from runs import checkpoint, files, settings, tensors
from runs.checkpoint import read_state
from runs.cli import parse
from runs.errors import BadInput, Failed, run_cli
from runs.files import file_hash, verify_folder
from runs.folder import checkpoints_by_step
from runs.settings import RunSettings
from runs.stop import Stop
from train import Trainer

RUN = ("--batch_size=7", "--max_steps=9", "--epochs=9", "--optim.lr=1e-3", "--save_interval=2",
       "--micro_batch_size=4", "--precision=32-true")  # fmt: skip
ROOT = Path(kto.__file__).parent
VAL = f"--data.val={PARITY}/kto_data.jsonl"


FULL, LORA = (), ("--lora.rank=4", "--lora.dropout=0.3")
KILLED = [(1, "auto", FULL), (2, "ddp", FULL), (2, "fsdp", FULL), (1, "auto", LORA),
          pytest.param(2, "ddp", LORA, marks=pytest.mark.slow), (2, "fsdp", LORA)]  # fmt: skip


@pytest.mark.parametrize("n,strategy,mode", KILLED)
def test_a_run_killed_at_any_moment_and_resumed_is_the_same_run(
    n, strategy, mode, tiny, ratings, tmp_path
):
    argv = (f"--strategy={strategy}", VAL, "--val_interval=3", *RUN, "--max_steps=7", *mode)
    whole, *_ = ranks(n, lambda rank: train(tiny, ratings, tmp_path / "whole", *argv))
    out = tmp_path / "run"
    moments = [("metrics.csv", 2), ("metrics.csv", 6)]  # before the first checkpoint, after some
    resumed = killed_and_resumed(
        n, out, moments, lambda rank, *more: train(tiny, ratings, out, *argv, *more)
    )
    assert_same(resumed, whole)
    assert (out / "val.csv").read_text() == (tmp_path / "whole" / "val.csv").read_text()
    last = Path("checkpoints", "step-00000007")
    shards = sorted((tmp_path / "whole" / last).glob("shard-*"))
    assert len(shards) >= 4, "weights and random states, and three moments"
    for shard in shards:
        equal = (out / last / shard.name).read_bytes() == shard.read_bytes()
        assert equal, "equal checkpoints are equal files"
    if mode == LORA and n == 1:
        out, argv = tmp_path / "other", (*argv, "--seed=2")
        other, *_ = ranks(n, lambda rank: train(tiny, ratings, out, *argv))
        proves = "else dropout draws nothing and its state proves nothing"
        assert numbers(other) != numbers(whole), proves


def test_sigterm_finishes_the_step_saves_and_says_how_to_go_on(tiny, ratings, tmp_path):
    out = tmp_path / "run"
    argv = [f"--model={tiny}", f"--data.train={ratings}", f"--out_dir={out}", *RUN]
    argv += ["--max_steps=4000", "--epochs=9999", "--progress=false"]
    child, rows = Started(tmp_path, "kto", argv), out / "metrics.csv"
    until(lambda: rows.exists() and rows.read_text().count("\n") > 3)
    child.signal(signal.SIGTERM)
    code, said, stderr = child.ended()
    steps = rows.read_text().count("\n") - 1
    assert code == 128 + signal.SIGTERM, stderr
    assert f"stopped by SIGTERM at step {steps} of 4000" in said
    assert f"kto.py --config {out}/settings.yaml --resume auto" in said
    assert max(checkpoints_by_step(out / "checkpoints")) == steps
    argv = ["--config", f"{out}/settings.yaml", "--resume", "auto"]
    cfg = parse(kto.Settings, argv, "", "none")
    assert cfg.out_dir == str(out), "the command that it prints finds the run"


@pytest.fixture
def at_once(monkeypatch):
    """A time limit that is over after the first step."""
    monkeypatch.setattr(RunSettings, "seconds", lambda self: 1e-9)
    return "--max_time=00:00:01"


def test_the_time_limit_stops_the_run_like_a_signal_and_the_rest_follows(
    at_once, tiny, ratings, tmp_path
):
    whole = train(tiny, ratings, tmp_path / "whole", *RUN)
    run = train(tiny, ratings, tmp_path / "run", *RUN, at_once)
    assert len(run["rows"]) == 1 and run["weights"] is None
    assert_same(train(tiny, ratings, tmp_path / "run", *RUN, "--resume=auto"), whole)


@pytest.fixture(scope="module")
def finished(tiny, ratings, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    return train(tiny, ratings, out, *RUN, "--keep_last=9"), out


@contextlib.contextmanager
def put_back(folder):
    """What is changed in it meanwhile."""
    kept = shutil.copytree(folder, folder.with_name("kept"))
    yield
    shutil.rmtree(folder)
    kept.rename(folder)


@pytest.fixture
def done(finished):
    """A finished run to spoil, in the folder in which it ran."""
    run, out = finished
    with put_back(out):
        yield out, run


SHARDS = [f"shard-00001-model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
FILES = [SHARDS[0], SHARDS[-1], "state.json", "manifest.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    file, damage, done, tiny, ratings, capsys
):
    out, run = done
    shutil.rmtree(out / "final")
    newest = out / "checkpoints" / "step-00000009" / file
    blob = bytearray(newest.read_bytes())
    blob[len(blob) // 2] ^= 1
    newest.unlink()
    if damage != "gone":
        newest.write_bytes(blob[: len(blob) // 2] if damage == "cut" else blob)
    (out / "checkpoints" / ".step-00000010.tmp").mkdir()
    resumed = train(tiny, ratings, out, *RUN, "--keep_last=9", "--resume=auto")
    said = capsys.readouterr().out
    if file == "manifest.json" and damage == "flipped" and "not used" not in said:
        return  # a flipped bit in white space is no damage
    assert "step-00000009: not used" in said and "resumed from" in said and "step-00000008" in said
    assert_same(resumed, run)


def test_a_resume_refuses_by_name_what_would_make_it_another_run(done, tiny, ratings):
    out, _ = done
    changed = ("--kto.beta=0.2", "--optim.lr=1e-4", "--seed=5", "--max_steps=10",
               "--data.max_prompt=9", "--lora.rank=2")  # fmt: skip
    with pytest.raises(BadInput) as e:
        train(tiny, ratings, out, *RUN, "--resume=auto", *changed)
    names = {line.split(":")[0] for line in str(e.value).splitlines()}
    follows = {"data.max_completion"}  # from max_prompt
    assert names == {c[2:].split("=")[0] for c in changed} | follows


@pytest.mark.survive("R3")
def test_a_setting_that_the_old_run_did_not_have_is_a_difference(done, tiny, ratings):
    out, _ = done
    settings = out / "checkpoints" / "step-00000009" / "settings.yaml"
    old = settings.read_text()
    settings.write_text(old.replace("  desirable_weight: 1.0\n", "", 1))
    assert settings.read_text() != old
    manifest = settings.with_name("manifest.json")
    hashes = json.loads(manifest.read_text()) | {"settings.yaml": file_hash(settings)}
    manifest.write_text(json.dumps(hashes))
    with pytest.raises(BadInput) as e:
        train(tiny, ratings, out, *RUN, "--resume=auto")
    own = f"a resume uses the run's own settings (--config {out / 'settings.yaml'})"
    changed = "kto.desirable_weight: the run has None, you gave 1.0"
    assert str(e.value) == f"{changed}; {own}"
    with pytest.raises(BadInput) as e:
        train(tiny, ratings, out, *RUN, "--resume=auto", "--kto.beta=0.7", "--seed=9")
    *lines, last = str(e.value).split("\n")
    assert lines == ["seed: the run has 1, you gave 9", "kto.beta: the run has 0.1, you gave 0.7"]
    assert last == f"{changed}; {own}", "the advice stands once, at the end"


def test_a_resume_may_change_the_cut_and_says_that_it_is_then_equal_to_rounding(
    at_once, tiny, ratings, tmp_path, capsys
):
    out = tmp_path / "run"
    train(tiny, ratings, out, *RUN, at_once)
    more = ("--micro_batch_size=5", "--save_interval=3", "--log_interval=2")
    train(tiny, ratings, out, *RUN, *more, "--resume=auto")
    assert "the same run up to rounding, since micro_batch_size changed" in capsys.readouterr().out


def test_a_run_on_a_cpu_resumes_with_examples_in_place_of_its_default_of_tokens(
    at_once, tiny, ratings, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(settings, "CPU_ACTIVATIONS", 1.0)  # the default is now 256 tokens
    out, sizes, fit = tmp_path / "run", [], kto.Trainer.fit
    monkeypatch.setattr(kto.Trainer, "fit", lambda self: sizes.append(self.run.cut) or fit(self))
    argv = ("--batch_size=7", "--max_steps=9", "--epochs=9", "--accelerator=cpu")
    train(tiny, ratings, out, *argv, at_once)
    own = f"--config={out / 'settings.yaml'}", "--resume=auto", "--micro_batch_size=5"
    start("kto", own)
    assert "the same run up to rounding, since micro_batch_size changed" in capsys.readouterr().out
    assert [(x.max_tokens, x.max_examples) for x in sizes] == [(256, None), (None, 5)]


@pytest.mark.survive("R3")
def test_a_checkpoint_of_another_program_is_refused_by_the_names_of_both(tiny, pairs, tmp_path):
    argv = ("--batch_size=4", "--precision=32-true")
    train(tiny, pairs, tmp_path / "run", *argv, program="dpo")
    with pytest.raises(BadInput, match=r"a run of \S*/dpo\.py, not of \S*/kto\.py$"):
        train(tiny, pairs, tmp_path / "run", *argv, "--resume=auto")


def test_a_program_that_has_changed_is_said_once_and_goes_on(
    tiny, ratings, tmp_path, capsys, monkeypatch
):
    program, out = tmp_path / "a_copy_of_kto.py", tmp_path / "run"
    shutil.copy(ROOT / "kto.py", program)
    monkeypatch.syspath_prepend(tmp_path)

    def go(*argv) -> bool:
        runs.append(train(tiny, ratings, out, *RUN, *argv, program=program.stem))
        return f"{program} has changed since" in capsys.readouterr().out

    runs = []
    assert not go("--stop_at=1")
    assert not go("--stop_at=2", "--resume=auto")
    program.write_text(program.read_text() + "# an idea\n")
    assert go("--stop_at=3", "--resume=auto")
    assert not go("--resume=auto")
    assert_same(runs[-1], train(tiny, ratings, tmp_path / "whole", *RUN))


@pytest.fixture(scope="module")
def ended(tiny, ratings, tmp_path_factory):
    """A finished run, whose model, data and template are its own."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(tiny, folder / "model")
    shutil.copy(ratings, folder / "data.jsonl")
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")

    def go(resume="auto"):
        argv = (*RUN, "--max_steps=2", "--save_interval=1", f"--resume={resume}",
                f"--data.chat_template={folder / 'chat.jinja'}")  # fmt: skip
        return train(folder / "model", folder / "data.jsonl", folder / "run", *argv)

    go()
    return folder, go


@pytest.fixture
def own(ended):
    """A folder with a run, and a function that goes on with it: what is changed there is put back."""
    folder, go = ended
    with put_back(folder):
        yield folder, go


@pytest.mark.survive("R3")
def test_a_resume_refuses_a_model_whose_weights_have_changed(own):
    folder, go = own
    go()
    shutil.copy(PARITY / "ref" / "model.safetensors", folder / "model")
    with pytest.raises(BadInput, match="model weights: not what this run began with"):
        go()


@pytest.mark.survive("R3")
def test_a_resume_refuses_other_ends_of_an_answer(own):
    folder, go = own
    go()
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    with pytest.raises(BadInput, match="ids of tokens that end an answer: not what this run began"):
        go()


def test_processes_that_have_read_other_records_refuse_to_start(tiny, ratings, tmp_path, capfd):
    lines = ratings.read_text().splitlines()
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    files[0].write_text("\n".join(lines))
    files[1].write_text("\n".join(lines[::-1]))

    def work(rank):
        return refusal(lambda: train(tiny, files[rank], tmp_path / "run", *RUN, "--strategy=ddp"))

    capfd.readouterr()
    assert ranks(2, work) == [2, 2]
    (said,) = capfd.readouterr().err.splitlines()
    assert said.endswith(
        "error: data: the processes have read different records: all nodes need the same files"
    )
    assert not (tmp_path / "run").exists()


DATA = "data (token ids and labels)"
CHANGES = {
    "a label": (DATA, "data.jsonl", lambda text: text.replace("true", "false", 1)),
    "the order": (DATA, "data.jsonl", lambda text: "\n".join(text.splitlines()[::-1])),
    "a missing record": (DATA, "data.jsonl", lambda text: text.split("\n", 1)[1]),
    "the tokenizer": ("tokenizer.json", "model/tokenizer.json", lambda text: text + "\n"),
    "the config": ("config.json", "model/config.json", lambda text: text + "\n"),
    "the chat template": ("data.chat_template", "chat.jinja", lambda text: text + "!"),
}


def refusal(go) -> int:
    """The exit code of a program, which a process of several would leave at once."""
    with mock.patch.object(os, "_exit"), pytest.raises(SystemExit) as e:
        run_cli(go)
    return e.value.code


@pytest.mark.survive("R3")
@pytest.mark.parametrize("n,change", [*((1, change) for change in CHANGES), (2, "a label")])
def test_a_resume_refuses_in_one_line_what_has_changed_under_the_same_path(n, change, own, capfd):
    (name, file, new), (folder, go) = CHANGES[change], own
    (folder / file).write_text(new((folder / file).read_text()))
    capfd.readouterr()
    codes = [refusal(go)] if n == 1 else ranks(n, lambda rank: refusal(go))
    line = f"error: resume: {name}: not what this run began with"
    assert codes == [2] * n
    assert [said.removeprefix("rank 1: ") for said in capfd.readouterr().err.splitlines()] == [line]


def test_a_checkpoint_of_another_version_is_refused_without_naming_a_setting(tmp_path):
    (tmp_path / "state.json").write_text('{"run": {}, "optimizer": {}}')
    with pytest.raises(BadInput, match=f"^{tmp_path}: a checkpoint of another version"):
        checkpoint.read_state(tmp_path)


def test_two_processes_that_write_the_same_file_do_not_share_a_temporary_one(tmp_path, monkeypatch):
    """Another process writes the file while this one waits for the disk."""
    name, wait = tmp_path / "same.json", files.sync

    def meanwhile(path):
        wait(path)
        monkeypatch.setattr(files, "sync", wait)
        with mock.patch("os.getpid", return_value=os.getpid() + 1):
            files.write_atomically(name, "theirs")

    monkeypatch.setattr(files, "sync", meanwhile)
    files.write_atomically(name, "ours")
    assert name.read_text() == "ours" and list(tmp_path.iterdir()) == [name]


@pytest.mark.survive("R3")
def test_a_resume_that_is_refused_changes_nothing_and_does_not_say_that_it_resumes(own, capsys):
    folder, go = own
    (folder / "chat.jinja").write_text("")
    run, checkpoints = folder / "run", folder / "run" / "checkpoints"
    files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    capsys.readouterr()
    with pytest.raises(BadInput, match="data.chat_template: not what this run began with"):
        go(checkpoints / "step-00000001")
    assert list(checkpoints_by_step(checkpoints)) == [1, 2], "none was put aside"
    assert files == {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    said = capsys.readouterr().out
    assert "resumed from" not in said and "run folder" not in said


def test_a_taken_folder_is_refused_before_any_data_is_read(done, tiny, tmp_path):
    out, _ = done
    nowhere = tmp_path / "no-such-file.jsonl"
    with pytest.raises(BadInput, match=f"^out_dir: {out} holds a run already"):
        train(tiny, nowhere, out, *RUN)
    with pytest.raises(BadInput, match="no-such-file"):
        train(tiny, nowhere, tmp_path / "new", *RUN)
    assert not (tmp_path / "new").exists(), "and a refused run leaves no folder"


def test_a_folder_that_holds_a_run_is_not_overwritten(done, tiny, ratings):
    out, _ = done
    before = (out / "metrics.csv").read_bytes()
    with pytest.raises(BadInput, match="holds a run already"):
        train(tiny, ratings, out, *RUN)
    assert (out / "metrics.csv").read_bytes() == before


def test_keep_last_and_keep_best_decide_what_stays_and_the_test_split_sees_both(
    tiny, ratings, tmp_path
):
    out = tmp_path / "run"
    argv = (VAL, f"--data.test={ratings}", "--val_interval=1", "--keep_best=kl", "--keep_last=2",
            "--save_interval=4")  # fmt: skip
    train(tiny, ratings, out, *RUN, *argv)
    names, *rows = [line.split(",") for line in (out / "val.csv").read_text().split()]
    kl = {int(row[0]): float(row[names.index("kl")]) for row in rows if int(row[0]) > 0}
    best = min(kl, key=lambda step: (kl[step], step))
    assert best not in (8, 9), "else keep_last keeps it"
    kept = list(checkpoints_by_step(out / "checkpoints"))
    assert kept == sorted({best, 8, 9})
    scores = json.loads((out / "eval" / "test.json").read_text())
    assert scores["final"]["loss"] != scores["best"]["loss"]
    assert_last_exported(out)


def assert_last_exported(out: Path):
    """`final` holds the last weights, not the best ones."""
    last = list(checkpoints_by_step(out / "checkpoints").values())[-1]
    ours: dict = {}
    gpt2_from_hf(None, ours, load_file(out / "final" / "model.safetensors"))
    theirs = checkpoint_tensors(last, "weights")
    assert all(torch.equal(ours[n], x) for n, x in theirs.items())


def test_going_back_to_an_older_checkpoint_puts_the_newer_ones_aside(done, tiny, ratings):
    out, run = done
    four = out / "checkpoints" / "step-00000004"
    assert_same(train(tiny, ratings, out, *RUN, "--keep_last=9", f"--resume={four}"), run)
    assert list(checkpoints_by_step(out / "checkpoints")) == [2, 4, 6, 8, 9]
    assert (out / "checkpoints" / "abandoned-step-00000006").is_dir()


def test_a_run_may_go_on_in_another_folder(tiny, ratings, tmp_path):
    argv = (*RUN, f"--data.val={ratings}", f"--data.test={ratings}", "--val_interval=2",
            "--keep_best=loss", "--optim.lr=0.1")  # fmt: skip
    train(tiny, ratings, tmp_path / "a", *argv)
    eight = tmp_path / "a" / "checkpoints" / "step-00000008"
    train(tiny, ratings, tmp_path / "b", *argv, f"--resume={eight}")
    assert_last_exported(tmp_path / "b")


def test_a_run_without_a_folder_gets_a_fresh_one_and_its_settings_know_it(
    tiny, ratings, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [kto.__file__])
    argv = ["--batch_size=8", "--max_steps=1", "--progress=false"]
    for _ in range(2):
        kto.main([f"--model={tiny}", f"--data.train={ratings}", *argv])
    one, two = sorted((tmp_path / "out").iterdir())
    assert f"out_dir: {one}\n" in (one / "settings.yaml").read_text()
    assert f"run folder: out/{two.name}" in capsys.readouterr().out
    assert one.name.startswith("kto-") and two.name.startswith("kto-")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_that_comes_after_the_ranks_have_agreed_is_not_lost(ranks, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks > 1)
    stop = Stop(None, None)
    try:
        stop.set_agreed(stop.code())
        os.kill(os.getpid(), signal.SIGTERM)
        now = stop.requested()
        stop.set_agreed(stop.code())
        assert (now, stop.requested(), stop.reason) == (ranks == 1, True, "SIGTERM")
    finally:
        stop.close()


@pytest.mark.survive("R10")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_save_that_fails_says_so_and_leaves_the_older_checkpoints(
    code, tiny, ratings, tmp_path, monkeypatch
):
    out, real = tmp_path / "run", checkpoint.save_shards

    def full(folder, tensors):
        real(folder, tensors)
        if "step-00000004" in str(folder):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(checkpoint, "save_shards", full)
    with pytest.raises(Failed, match=f"step-00000004: not saved: {os.strerror(code)}"):
        train(tiny, ratings, out, *RUN)
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-00000002"]
    assert checkpoint.verify_checkpoint(out / "checkpoints" / "step-00000002") is None
    monkeypatch.undo()
    whole = train(tiny, ratings, tmp_path / "whole", *RUN)
    assert_same(train(tiny, ratings, out, *RUN, "--resume=auto"), whole)


@pytest.mark.survive("R10")
def test_a_full_disk_at_the_end_of_a_sharded_run_ends_all_ranks_and_leaves_no_half(
    tiny, ratings, tmp_path
):
    """Rank 0 alone writes `final`, from what all gather."""
    out, real = tmp_path / "run", tensors.write_file

    def full(path, state):
        if ".final" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, state)

    def work(rank):
        with mock.patch.object(tensors, "write_file", full):
            with pytest.raises(Failed, match="final: not saved: No space left"):
                train(tiny, ratings, out, *RUN, "--strategy=fsdp")

    ranks(2, work)
    assert not list(out.glob(".final*")) and not (out / "final").exists()
    ranks(2, lambda rank: train(tiny, ratings, out, *RUN, "--strategy=fsdp", "--resume=auto") and 0)
    assert verify_folder(out / "final", ["model.safetensors"]) is None


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_say_nothing_but_their_own_lines(strategy, tiny, ratings, tmp_path):
    """No library's warning stands between them."""
    argv = [f"--model={tiny}", f"--data.train={ratings}", f"--out_dir={tmp_path / 'run'}", *RUN]
    argv += ["--devices=2", f"--strategy={strategy}", "--max_steps=2"]
    argv = [sys.executable, ROOT / "kto.py", *last_of_each(argv)]
    process = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stderr) == (0, "")
    assert "exported to" in process.stdout and "Warning" not in process.stdout


@pytest.mark.survive("R3")
def test_a_run_is_written_over_neither_by_a_branch_nor_by_one_that_lost_its_checkpoints(
    tiny, ratings, tmp_path, capsys
):
    for name in "ab":
        train(tiny, ratings, tmp_path / name, *RUN, f"--seed={ord(name)}", "--keep_last=1")
    rows = (tmp_path / "b" / "metrics.csv").read_bytes()
    (last,) = (tmp_path / "a" / "checkpoints").iterdir()
    with pytest.raises(BadInput, match="out_dir: .*b holds another run: a run that branches off"):
        train(tiny, ratings, tmp_path / "b", *RUN, "--seed=97", f"--resume={last}")
    (last,) = (tmp_path / "b" / "checkpoints").iterdir()
    weights = bytearray(first_shard(last).read_bytes())
    weights[-1] ^= 1
    first_shard(last).write_bytes(weights)
    with pytest.raises(BadInput, match="resume: .*b: none of its checkpoints is whole"):
        train(tiny, ratings, tmp_path / "b", *RUN, "--seed=98", "--resume=auto")
    assert (tmp_path / "b" / "metrics.csv").read_bytes() == rows and last.is_dir()


class Stopped(Trainer):
    """Ctrl-C before the first step of this start."""

    def precompute(self, *given):
        os.kill(os.getpid(), signal.SIGINT)
        super().precompute(*given)


@pytest.mark.survive("R3")
def test_a_branch_that_is_stopped_before_its_first_step_goes_on_from_there(
    tiny, ratings, tmp_path, capsys
):
    argv = (*RUN, "--keep_last=9")
    whole = train(tiny, ratings, tmp_path / "run", *argv)
    four = tmp_path / "run" / "checkpoints" / "step-00000004"
    out = tmp_path / "branch"
    argv = (*argv, f"--reference_cache={tmp_path / 'cache'}")
    with pytest.raises(SystemExit):
        train(tiny, ratings, out, *argv, f"--resume={four}", trainer=Stopped)
    assert "stopped by SIGINT at step 4 of 9, saved" in capsys.readouterr().out
    branch = train(tiny, ratings, out, *argv, "--resume=auto")
    assert branch["rows"][-1]["loss"] == pytest.approx(whole["rows"][-1]["loss"], rel=1e-6)
    assert f"resumed from {out / 'checkpoints' / 'step-00000004'}" in capsys.readouterr().out


@pytest.mark.survive("R3")
def test_a_branch_has_a_best_checkpoint_of_its_own(tiny, ratings, tmp_path):
    argv = (*RUN, VAL, "--val_interval=1", "--keep_best=kl/pairs", "--keep_last=9")
    train(tiny, ratings, tmp_path / "a", *argv)
    four = tmp_path / "a" / "checkpoints" / "step-00000004"
    train(tiny, ratings, tmp_path / "b", *argv, f"--resume={four}")
    assert read_state(tmp_path / "a" / "checkpoints" / "step-00000009")[0].best_step == 1
    assert read_state(tmp_path / "b" / "checkpoints" / "step-00000009")[0].best_step == 5
    assert (tmp_path / "b" / "best" / "model.safetensors").exists()


@pytest.mark.survive("R3")
def test_rows_or_checkpoints_make_a_run_and_a_branch_without_any_begins_again(
    tiny, ratings, tmp_path
):
    whole = train(tiny, ratings, tmp_path / "whole", *RUN)
    argv = (*RUN, "--log_interval=100", "--stop_at=2")
    train(tiny, ratings, tmp_path / "a", *argv)  # no row yet
    with pytest.raises(BadInput, match="out_dir: .*a holds a run already"):
        train(tiny, ratings, tmp_path / "a", *argv)
    first, *_ = checkpoints_by_step(tmp_path / "whole" / "checkpoints").values()
    for _ in range(2):  # killed before its first checkpoint, and queued again
        shutil.rmtree(tmp_path / "b" / "checkpoints", ignore_errors=True)
        shutil.rmtree(tmp_path / "b" / "final", ignore_errors=True)
        branch = train(tiny, ratings, tmp_path / "b", *RUN, f"--resume={first}")
    assert branch["rows"][-1] | dict.fromkeys(CLOCKS) == whole["rows"][-1] | dict.fromkeys(CLOCKS)
    train(tiny, ratings, tmp_path / "c", *RUN, "--stop_at=4")
    (tmp_path / "c" / "checkpoints").rename(tmp_path / "scratch")  # a larger disk
    (tmp_path / "c" / "checkpoints").symlink_to(tmp_path / "scratch")
    assert_same(train(tiny, ratings, tmp_path / "c", *RUN, "--resume=auto"), whole)


@pytest.mark.survive("R3")
def test_a_refused_run_leaves_its_folder_to_the_corrected_one(tiny, ratings, tmp_path):
    argv = (*RUN, VAL, "--val_interval=2")
    with pytest.raises(BadInput, match="keep_best: nope: not in val.csv"):
        train(tiny, ratings, tmp_path / "run", *argv, "--keep_best=nope")
    train(tiny, ratings, tmp_path / "run", *argv, "--keep_best=kl")
    own_kl = (*argv, "--keep_best=kl/own", f"--reference_cache={tmp_path}")
    with pytest.raises(BadInput, match="keep_best: kl/own: empty with reference_cache"):
        train(tiny, ratings, tmp_path / "cached", *own_kl)
    nothing = (*RUN, "--data.split=100,0", "--keep_best=kl")
    with pytest.raises(BadInput, match="keep_best: data.val: no examples"):
        train(tiny, ratings, tmp_path / "split", *nothing)


@pytest.mark.survive("R19")
def test_an_error_on_one_rank_ends_all_ranks(tiny, ratings, tmp_path):
    """The second process fails in its third step; the first waits in a collective, not for ever."""
    script = tmp_path / "mine.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import os, kto, train\n"
        "from runs.errors import run_cli\n"
        "real, calls = train.clip_gradient, []\n"
        "def clip(*a):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3 and os.environ['LOCAL_RANK'] == '1':\n"
        "        raise MemoryError('out of memory')\n"
        "    return real(*a)\n"
        "train.clip_gradient = clip\n"
        "run_cli(kto.main)\n"
    )
    argv = [f"--model={tiny}", f"--data.train={ratings}", f"--out_dir={tmp_path / 'run'}", *RUN]
    argv, began = [sys.executable, script, *argv, "--devices=2"], time.monotonic()
    process = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert process.returncode != 0 and "out of memory" in process.stderr
    assert time.monotonic() - began < 60
