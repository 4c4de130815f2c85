"""A checkpoint is whole or not there; a resumed run is the same run, bit for bit."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import PARITY, assert_same, killed, numbers, ranks, train
from safetensors.torch import load_file

import checkpoint
import devices
import kto
import model

RUN = ("--batch_size=7", "--max_steps=9", "--epochs=9", "--optim.lr=1e-3", "--save_interval=2", "--micro_batch_size=2",
       "--precision=32-true")  # fmt: skip
ROOT = Path(kto.__file__).parent


MODES = {
    "full": (),
    "lora": ("--lora.rank=4",),
    "lora with dropout": ("--lora.rank=4", "--lora.dropout=0.3"),
}


@pytest.mark.parametrize("n,strategy", [(1, "auto"), (2, "ddp"), (2, "fsdp")])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_killed_at_any_moment_and_resumed_is_the_same_run(mode, n, strategy, tiny, ratings, tmp_path):
    argv = (f"--strategy={strategy}", f"--data.val={PARITY}/kto_data.jsonl", "--val_interval=3", *RUN, *MODES[mode])
    whole, *_ = ranks(n, lambda rank: train(tiny, ratings, tmp_path / "whole", *argv))
    for i, lines in enumerate((2, 6)):  # before the first checkpoint, and after some
        out = tmp_path / str(i)
        killed(n, out, "metrics.csv", lines, lambda rank: train(tiny, ratings, out, *argv))
        resumed, *_ = ranks(n, lambda rank: train(tiny, ratings, out, "--resume=auto", *argv))
        assert_same(resumed, whole)
        assert (out / "val.csv").read_text() == (tmp_path / "whole" / "val.csv").read_text()
    if mode == "lora with dropout":
        other, *_ = ranks(n, lambda rank: train(tiny, ratings, tmp_path / "other", *argv, "--seed=2"))
        assert numbers(other) != numbers(whole), "else dropout draws nothing and its state proves nothing"


def test_sigterm_finishes_the_step_saves_and_says_how_to_go_on(tiny, ratings, tmp_path):
    out = tmp_path / "run"
    argv = [f"--model={tiny}", f"--data.train={ratings}", f"--out_dir={out}", *RUN, "--max_steps=4000", "--epochs=9999"]
    process = subprocess.Popen([sys.executable, ROOT / "kto.py", *argv], stdout=subprocess.PIPE, text=True)
    while not (out / "metrics.csv").exists() or (out / "metrics.csv").read_text().count("\n") < 4:
        time.sleep(0.01)
    process.terminate()
    said, _ = process.communicate(timeout=60)
    steps = (out / "metrics.csv").read_text().count("\n") - 1
    assert process.returncode == 128 + signal.SIGTERM
    assert (
        f"stopped by SIGTERM at step {steps} of 4000" in said and f"--config {out}/settings.yaml --resume auto" in said
    )
    assert max(checkpoint.steps(out / "checkpoints")) == steps
    s = kto.parse(kto.Settings, ["--config", f"{out}/settings.yaml", "--resume", "auto"], "", Path("none"))
    assert s.out_dir == str(out), "the command that it prints finds the run"


@pytest.fixture
def at_once(monkeypatch):
    """A time limit that is over after the first step."""
    monkeypatch.setattr(kto.Settings, "seconds", lambda self: 1e-9)
    return "--max_time=00:00:01"


def test_the_time_limit_stops_the_run_like_a_signal_and_the_rest_follows(at_once, tiny, ratings, tmp_path):
    whole = train(tiny, ratings, tmp_path / "whole", *RUN)
    run = train(tiny, ratings, tmp_path / "run", *RUN, at_once)
    assert len(run["rows"]) == 1 and run["weights"] is None
    assert_same(train(tiny, ratings, tmp_path / "run", *RUN, "--resume=auto"), whole)


@pytest.fixture
def done(tiny, ratings, tmp_path):
    """A finished run to spoil."""
    run = train(tiny, ratings, tmp_path / "run", *RUN, "--keep_last=9")
    return tmp_path / "run", run


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(file, damage, done, tiny, ratings, capsys):
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
    changed = (
        "--kto.beta=0.2",
        "--optim.lr=1e-4",
        "--seed=5",
        "--max_steps=10",
        "--data.max_prompt=9",
        "--lora.rank=2",
    )
    with pytest.raises(kto.BadInput) as e:
        train(tiny, ratings, out, *RUN, "--resume=auto", *changed)
    names = [line.split(":")[0] for line in str(e.value).splitlines()]
    assert set(names) == {c[2:].split("=")[0] for c in changed} | {"data.max_completion"}, (
        "which follows from max_prompt"
    )


def test_a_resume_may_change_the_cut_and_says_that_it_is_then_equal_to_rounding(
    at_once, tiny, ratings, tmp_path, capsys
):
    out = tmp_path / "run"
    train(tiny, ratings, out, *RUN, at_once)
    more = ("--micro_batch_size=5", "--save_interval=3", "--log_interval=2")
    train(tiny, ratings, out, *RUN, *more, "--resume=auto")
    assert "equal to rounding only, since micro_batch_size changed" in capsys.readouterr().out


def test_a_resume_refuses_a_model_whose_weights_have_changed(done, tiny, ratings, tmp_path):
    out, _ = done
    shutil.rmtree(out / "final")
    moved = tmp_path / "model"
    shutil.copytree(tiny, moved)
    settings = out / "checkpoints" / "step-00000009" / "settings.yaml"
    settings.write_text(settings.read_text().replace(str(tiny), str(moved)))
    manifest = settings.with_name("manifest.json")
    hashes = json.loads(manifest.read_text()) | {"settings.yaml": checkpoint.digest(settings)}
    manifest.write_text(json.dumps(hashes))
    train(moved, ratings, out, *RUN, "--keep_last=9", "--resume=auto")
    shutil.copy(PARITY / "ref" / "model.safetensors", moved)
    with pytest.raises(kto.BadInput, match="other weights than when this run began"):
        train(moved, ratings, out, *RUN, "--keep_last=9", "--resume=auto")


def test_a_folder_that_holds_a_run_is_not_overwritten(done, tiny, ratings):
    out, _ = done
    before = (out / "metrics.csv").read_bytes()
    with pytest.raises(kto.BadInput, match="holds a run already"):
        train(tiny, ratings, out, *RUN)
    assert (out / "metrics.csv").read_bytes() == before


def test_keep_last_and_keep_best_decide_what_stays_and_the_test_split_sees_both(tiny, ratings, tmp_path):
    out = tmp_path / "run"
    argv = (f"--data.val={PARITY}/kto_data.jsonl", f"--data.test={ratings}", "--val_interval=1", "--keep_best=kl",
            "--keep_last=2", "--save_interval=4")  # fmt: skip
    train(tiny, ratings, out, *RUN, *argv)
    lines = [line.split(",") for line in (out / "val.csv").read_text().split()]
    kl = {int(row[0]): float(row[lines[0].index("kl")]) for row in lines[1:] if int(row[0]) > 0}
    best = min(kl, key=lambda step: (kl[step], step))
    assert best not in (8, 9), "else keep_last keeps it"
    kept = list(checkpoint.steps(out / "checkpoints"))
    assert kept == sorted({best, 8, 9})
    scores = json.loads((out / "eval" / "test.json").read_text())
    assert scores["final"]["loss"] != scores["best"]["loss"]
    assert_last_exported(out)


def assert_last_exported(out: Path):
    last = list(checkpoint.steps(out / "checkpoints").values())[-1]
    ours: dict = {}
    model.gpt2_from_hf(None, ours, load_file(out / "final" / "model.safetensors"))
    theirs = load_file(last / "weights.safetensors")
    assert all(torch.equal(ours[n], x) for n, x in theirs.items()), "final holds the last weights, not the best ones"


def test_going_back_to_an_older_checkpoint_puts_the_newer_ones_aside(done, tiny, ratings):
    out, run = done
    four = out / "checkpoints" / "step-00000004"
    assert_same(train(tiny, ratings, out, *RUN, "--keep_last=9", f"--resume={four}"), run)
    assert list(checkpoint.steps(out / "checkpoints")) == [2, 4, 6, 8, 9]
    assert (out / "checkpoints" / "abandoned-step-00000006").is_dir()


def test_a_run_may_go_on_in_another_folder(tiny, ratings, tmp_path):
    argv = (f"--data.val={ratings}", f"--data.test={ratings}", "--val_interval=2", "--keep_best=loss", "--optim.lr=0.1")
    train(tiny, ratings, tmp_path / "a", *RUN, *argv)
    train(tiny, ratings, tmp_path / "b", *RUN, *argv, f"--resume={tmp_path}/a/checkpoints/step-00000008")
    assert_last_exported(tmp_path / "b")


def test_a_run_without_a_folder_gets_a_fresh_one_and_its_settings_know_it(tiny, ratings, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        kto.main([f"--model={tiny}", f"--data.train={ratings}", "--batch_size=8", "--max_steps=1", "--progress=false"])
    one, two = sorted((tmp_path / "out").iterdir())
    assert f"out_dir: out/{one.name}\n" in (one / "settings.yaml").read_text()
    assert f"run folder: out/{two.name}" in capsys.readouterr().out


def test_a_signal_that_comes_while_the_ranks_agree_is_not_lost():
    class Fabric:
        device = "cpu"

        def all_reduce(self, mine, reduce_op):
            if not calls:
                calls.append(os.kill(os.getpid(), signal.SIGTERM))
            return mine

    calls, before = [], [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    try:
        stop = devices.Stop(None)
        assert [stop.now(Fabric()), stop.now(Fabric())] == [False, True] and stop.why == "SIGTERM"
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before):
            signal.signal(number, handler)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_save_that_fails_says_so_and_leaves_the_older_checkpoints(code, tiny, ratings, tmp_path, monkeypatch):
    out, real = tmp_path / "run", checkpoint.save_file

    def full(state, path, **kw):
        if "step-00000004" in str(path) and "optimizer" in str(path):
            raise OSError(code, os.strerror(code))
        return real(state, path, **kw)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(kto.Failed, match=f"step-00000004: not saved: {os.strerror(code)}"):
        train(tiny, ratings, out, *RUN)
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-00000002"]
    assert checkpoint.verify(out / "checkpoints" / "step-00000002") is None
    monkeypatch.undo()
    assert_same(train(tiny, ratings, out, *RUN, "--resume=auto"), train(tiny, ratings, tmp_path / "whole", *RUN))


def test_an_error_on_one_rank_ends_all_ranks(tiny, ratings, tmp_path):
    """The second process fails in its third step; the first waits in a collective, and must not wait for ever."""
    script = tmp_path / "mine.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import os, kto, devices\n"
        "real, calls = kto.clip, []\n"
        "def clip(*a):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3 and os.environ['LOCAL_RANK'] == '1': raise MemoryError('out of memory')\n"
        "    return real(*a)\n"
        "kto.clip = clip\n"
        "devices.guarded(kto.main)\n"
    )
    argv = [f"--model={tiny}", f"--data.train={ratings}", f"--out_dir={tmp_path / 'run'}", *RUN, "--devices=2"]
    began = time.monotonic()
    process = subprocess.run([sys.executable, script, *argv], capture_output=True, text=True, timeout=120)
    assert process.returncode != 0 and "out of memory" in process.stderr
    assert time.monotonic() - began < 60
