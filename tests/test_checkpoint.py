"""A run's folder: whose it is, what a resume compares, and which checkpoints stay."""

import errno
import os
import re
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import (
    PARITY,
    assert_same,
    checkpoint_tensors,
    evaluated,
    ranks,
    refused,
    result,
    rows_of,
    start,
    train,
)
from safetensors.torch import load_file
from tiny_models import gpt2_from_hf

from checks import check_tokens
from infra import checkpoint
from infra.checkpoint import checkpoint_folder, checkpoints_by_step
from infra.console import BadInput, Failed
from records.examples import Example

RUN = ("--batch_size=7", "--max_steps=9", "--optim.lr=1e-3", "--save_interval=2",
       "--micro_batch_size=4", "--precision=32-true", "--keep_last=9")  # fmt: skip
VAL = f"--data.val={PARITY}/kto_data.jsonl"


@pytest.fixture(scope="module")
def finished(tiny, ratings, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    return train(tiny, ratings, out, *RUN), out


@pytest.fixture
def done(finished, tmp_path):
    """A finished run that a test may change: its folder, and its result."""
    run, out = finished
    return shutil.copytree(out, tmp_path / "run"), run


# ---- a folder has one run ------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_refused_before_any_data_is_read(done, tiny, tmp_path):
    out, _ = done
    nowhere = tmp_path / "no-such-file.jsonl"
    refused(f"^out_dir: {out} holds a run already", train, tiny, nowhere, out, *RUN)
    refused("no-such-file", train, tiny, nowhere, tmp_path / "new", *RUN)
    assert not (tmp_path / "new").exists(), "and a refused run leaves no folder"
    for gone in ("metrics.csv", "checkpoints"):  # killed before its first row or checkpoint
        aside = (out / gone).rename(out / "aside")
        refused(f"^out_dir: {out} holds a run already", train, tiny, nowhere, out, *RUN)
        aside.rename(out / gone)


def test_a_folder_with_another_run_or_of_another_program_is_refused(
    done, tiny, ratings, pairs, tmp_path
):
    out, _ = done
    other = checkpoint_folder(tmp_path / "other", 8)
    match = f"^resume: {other}: no checkpoint of the run in {out}$"
    refused(match, train, tiny, ratings, out, *RUN, f"--resume={other}")
    with pytest.raises(BadInput, match="\ndpo.beta: the run has None, you gave "):
        train(tiny, pairs, out, *RUN, "--resume=auto", "--batch_size=4", program="dpo")


def test_runs_without_a_folder_get_one_each_and_their_settings_name_it(
    tiny, ratings, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    argv = [f"--model={tiny}", f"--data.train={ratings}", "--batch_size=8", "--max_steps=1"]
    for _ in range(2):
        start("kto", argv)
    one, two = sorted((tmp_path / "out").iterdir())
    assert one.name.startswith("kto-20")
    text = (two / "settings.yaml").read_text()
    assert re.match("# kto.py, code [0-9a-f]{12}, records [0-9a-f]{12}, commit .*, torch 2", text)
    assert f"run folder: {two}" in capsys.readouterr().out
    start("kto", ["--config", two / "settings.yaml", "--resume=auto"])
    assert f"resumed from {two / 'checkpoints'}" in capsys.readouterr().out


# ---- what a resume compares ----------------------------------------------------------------------


def test_a_resume_refuses_by_name_what_would_make_it_another_run(done, tiny, ratings):
    out, _ = done
    changed = ("--kto.beta=0.2", "--optim.lr=1e-4", "--seed=5", "--max_steps=10", "--lora.rank=2")
    with pytest.raises(BadInput) as e:
        train(tiny, ratings, out, *RUN, "--resume=auto", *changed)
    lines = str(e.value).split("\n")
    assert {line.split(":")[0] for line in lines} == {c[2:].split("=")[0] for c in changed}
    assert "kto.beta: the run has 0.1, you gave 0.2" in lines


RECORDS, FILES = "records", "config, tokenizer or chat template"
CHANGES = {
    "a label": (RECORDS, "data.jsonl", lambda text: text.replace("true", "false", 1)),
    "the order": (RECORDS, "data.jsonl", lambda text: "\n".join(text.splitlines()[::-1])),
    "the tokenizer": (FILES, "model/tokenizer.json", lambda text: text + "\n"),
    "the chat template": (FILES, "chat.jinja", lambda text: text + "!"),
    "the weights": ("model weights", "model/model.safetensors", None),
    "what the reference is": (
        "reference config",
        "reference/config.json",
        lambda text: text.replace('"layer_norm_epsilon": 1e-05', '"layer_norm_epsilon": 0.05'),
    ),
}


def words_of(folder: Path) -> list[str]:
    """The arguments of a run of a model, records and a template that are in a folder."""
    places = {"model": "model", "reference": "reference", "data.train": "data.jsonl"}
    places |= {"data.chat_template": "chat.jinja", "out_dir": "run"}
    places = [f"--{name}={folder / place}" for name, place in places.items()]
    return [*places, *RUN, "--max_steps=2", "--save_interval=1"]


@pytest.fixture(scope="module")
def ended(tiny, ratings, tmp_path_factory) -> Path:
    """A folder with such a run."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("model", "reference"):
        shutil.copytree(tiny, folder / name)
    shutil.copy(ratings, folder / "data.jsonl")
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    start("kto", words_of(folder))
    return folder


@pytest.mark.parametrize("n,change", [*((1, change) for change in CHANGES), (2, "a label")])
def test_a_resume_that_finds_something_changed_is_refused_and_changes_nothing(
    n, change, ended, tmp_path
):
    own = shutil.copytree(ended, tmp_path / "moved")
    name, file, new = CHANGES[change]
    if new:
        (own / file).write_text(new((own / file).read_text()))
    else:
        shutil.copy(PARITY / "ref" / "model.safetensors", own / file)
    files = [p for p in (own / "run").rglob("*") if p.is_file() and p.name != ".lock"]
    before = {p: p.read_bytes() for p in files}

    def work(rank):
        match = f"^{name}: not what this run began with"
        refused(
            match, start, "kto", [*words_of(own), f"--resume={checkpoint_folder(own / 'run', 1)}"]
        )

    ranks(n, work)
    assert all(p.read_bytes() == content for p, content in before.items())


def test_a_run_of_a_gpu_goes_on_on_a_cpu(tiny, ratings, tmp_path, monkeypatch):
    """The state of a GPU's random numbers has 16 bytes, that of a CPU's 5,056."""
    argv = (*RUN, "--max_steps=2", "--save_interval=1")
    whole = train(tiny, ratings, tmp_path / "whole", *argv)
    of_gpu = mock.Mock(get_state=lambda: torch.arange(16, dtype=torch.uint8))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "generator_of", lambda fabric: of_gpu)
        train(tiny, ratings, tmp_path / "run", *argv, "--stop_at=1")
    assert_same(train(tiny, ratings, tmp_path / "run", *argv, "--resume=auto"), whole)


def test_processes_that_have_read_other_records_refuse_to_start(tiny, ratings, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(ratings.read_text().splitlines()[::-1]))

    def work(rank):
        match = "^data: the processes have read different files"
        file = [ratings, other][rank]
        refused(match, train, tiny, file, tmp_path / "run", *RUN, "--strategy=ddp")

    ranks(2, work)
    assert not (tmp_path / "run").exists()


# ---- older checkpoints ---------------------------------------------------------------------------


def test_a_resume_from_an_older_checkpoint_puts_the_newer_ones_aside(done, tiny, ratings, capsys):
    out, run = done
    copy = shutil.copytree(checkpoint_folder(out, 8), out / "checkpoints" / "step-00000008-backup")
    assert_same(train(tiny, ratings, out, *RUN, f"--resume={checkpoint_folder(out, 4)}"), run)
    assert list(checkpoints_by_step(out)) == [2, 4, 6, 8, 9]
    assert (copy / "state.json").exists(), "a user's copy is left alone"
    assert (out / "checkpoints" / "abandoned-step-00000006").is_dir()
    train(tiny, ratings, out, *RUN, "--resume=auto")
    assert f"resumed from {checkpoint_folder(out, 9)}\n" in capsys.readouterr().out, (
        "the newest one"
    )


def test_a_run_that_was_moved_or_copied_continues_where_its_settings_file_lies(
    done, tiny, ratings, tmp_path
):
    """The file names the old folder: there the original would continue, or a new run begin."""
    out, run = done  # the fixture has copied it
    train(tiny, ratings, out, *RUN, f"--resume={checkpoint_folder(out, 4)}", "--stop_at=4")
    before = sorted(out.rglob("*"))
    copied = shutil.copytree(out, tmp_path / "copy")
    link = tmp_path / "link"
    link.symlink_to(copied)
    start("kto", [f"--config={link}/settings.yaml", "--resume=auto"])
    assert_same(result(copied), run)
    assert sorted(out.rglob("*")) == before


# ---- which checkpoints there are -----------------------------------------------------------------


def test_keep_last_and_keep_best_decide_what_stays_and_the_test_split_sees_both(
    tiny, ratings, tmp_path, monkeypatch
):
    out = tmp_path / "run"
    argv = (VAL, f"--data.test={ratings}", "--val_interval=1", "--keep_best=kl", "--keep_last=2")
    real, synced = os.fsync, set()
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.add(os.readlink(f"/proc/self/fd/{fd}")) or real(fd)
    )
    last = "--stop_at=9"  # the last step, so it is an end and no stop
    train(tiny, ratings, out, *RUN, "--save_interval=1", *argv, last)
    for folder in (checkpoint_folder(out, 8), out / "final"):
        files = {str(folder.with_name(f".{folder.name}.tmp") / p.name) for p in folder.iterdir()}
        assert files <= synced, "on the disk before the folder has its name"
    kl = {int(row["step"]): float(row["kl"]) for row in rows_of(out / "val.csv")[1:]}
    best = min(kl, key=lambda step: (kl[step], step))
    assert best < 7, "else keep_last keeps it, or one that keeps three would do"
    assert list(checkpoints_by_step(out)) == sorted({best, 8, 9})
    assert len(list((out / "checkpoints").iterdir())) == 3, "the others are off the disk"
    scores = evaluated(out, "test")
    assert scores["final"]["loss"] != scores["best"]["loss"]
    for name, of_step in (("final", 9), ("best", best)):
        exported: dict = {}
        gpt2_from_hf(None, exported, load_file(out / name / "model.safetensors"))
        weights = checkpoint_tensors(checkpoint_folder(out, of_step), "weights")
        assert all(torch.equal(exported[n], x) for n, x in weights.items())


@pytest.mark.parametrize("n", [1, 2])
def test_a_full_disk_while_saving_is_said_and_the_older_checkpoint_stays(
    n, tiny, ratings, tmp_path, finished, monkeypatch
):
    out, real = tmp_path / "run", checkpoint.dcp.save
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(*_):
        raise full

    def save(tensors, storage_writer):
        is_last_rank = n == 1 or torch.distributed.get_rank() == 1  # the disk of one node
        if "step-00000004" in str(storage_writer.path) and is_last_rank:
            storage_writer.write_data = write
        real(tensors, storage_writer=storage_writer)

    argv = (*RUN, f"--strategy={'ddp' if n > 1 else 'auto'}")

    def fails(rank):
        with pytest.raises(Failed, match="step-00000004: not saved: No space left on device$"):
            train(tiny, ratings, out, *argv)

    monkeypatch.setattr(checkpoint.dcp, "save", save)
    ranks(n, fails)
    assert list(checkpoints_by_step(out)) == [2]
    monkeypatch.undo()
    stale = out / "checkpoints" / ".step-00000004.tmp" / "shard-00009.safetensors"
    stale.write_text("of the process that has ended")
    ranks(n, lambda rank: train(tiny, ratings, out, *argv, "--resume=auto") and None)
    assert not (checkpoint_folder(out, 4) / stale.name).exists()
    if n == 1:
        assert_same(result(out), finished[0])


def test_where_a_file_system_has_no_locks_the_run_says_so_and_goes_on(
    tmp_path, monkeypatch, capsys
):
    fault = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(checkpoint.fcntl, "lockf", mock.Mock(side_effect=fault))
    checkpoint.take_folder(tmp_path, None)
    assert f"out_dir: {tmp_path}: no locks here" in capsys.readouterr().out


def test_a_reference_without_some_ids_of_the_records_is_refused():
    ids = np.array([69, 70])
    example = Example(prompt=ids, completions=(ids,), label=True, where="a.jsonl:1")
    check_tokens([example], 71, "large")
    line = "^a.jsonl:1: token: id 70, but the embedding of small has 70 rows"
    refused(line, check_tokens, [example], 70, "small")
