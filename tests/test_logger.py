"""What a run writes between steps: csv files that survive a kill, progress, trackers, answers."""

import contextlib
import csv
import fcntl
import json
import math
import multiprocessing
import os
import re
import struct
import sys
import termios
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tqdm.std
from conftest import Started
from tokens import EOS, ids_of, plain

import evaluate
import kto
import model
from evaluate import Evaluator
from records.examples import Example
from runs import console
from runs.checkpoint import RunState
from runs.console import (
    Progress,
    Wait,
    advance,
    fit_80_columns,
    format_before_after,
    format_table,
    say,
    wilson_interval,
)
from runs.errors import BadInput, Failed
from runs.files import write_json
from runs.logger import Csv, Logger, make_tracker, read_claimed_rows
from runs.metrics import Throughput, least_passes
from runs.settings import Data, Eval

ROOT = Path(__file__).parent.parent


def run_settings(out: Path, **kw) -> kto.Settings:
    return kto.Settings("m", Data("t"), out_dir=str(out), **kw)


# ---- metrics.csv ---------------------------------------------------------------------------------


def write(path, *rows, claimed_rows: bytes = b"") -> list:
    """-> what a checkpoint after these rows claims"""
    file = Csv(path, claimed_rows)
    for row in rows:
        file.row(row)
    claim = file.sync()
    file.file.close()
    return claim


CHECKPOINT = Path("out/run/checkpoints/step-00000002")


def test_a_resume_keeps_the_rows_that_its_checkpoint_claims_and_goes_on_after_them(tmp_path):
    path = tmp_path / "m.csv"
    rows = [{"step": i, "loss": i / 7} for i in range(5)]
    claim = write(path, *rows[:3])
    saved = path.read_bytes()
    write(path, *rows[3:], claimed_rows=saved)
    claimed_rows = read_claimed_rows(path, claim, CHECKPOINT)
    assert claim[0] == 4 and claimed_rows == saved, "a header and three rows"
    next_claim = write(path, {"step": 3, "loss": 0.5}, claimed_rows=claimed_rows)
    lines = path.read_text().splitlines()
    assert lines == ["step,loss", "0,0.0", f"1,{1 / 7}", f"2,{2 / 7}", "3,0.5"]
    assert read_claimed_rows(path, next_claim, CHECKPOINT) == path.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["m.csv"]


@pytest.mark.survive("R8")
def test_what_follows_the_claimed_rows_is_cut_whatever_it_says(tmp_path):
    path = tmp_path / "m.csv"
    claim = write(path, {"step": 1, "loss": 0.1})
    for rest in ("2,0.2", "2,0.", "2", "2,", '2,"', "\0\0\0", "\xff", "1,0.1\n", "words\n2,0.2\n"):
        path.write_bytes(b"step,loss\n1,0.1\n" + rest.encode("latin-1"))
        claimed_rows = read_claimed_rows(path, claim, CHECKPOINT)
        write(path, {"step": 2, "loss": 0.25}, claimed_rows=claimed_rows)
        assert path.read_text() == "step,loss\n1,0.1\n2,0.25\n"


ROWS = b"step,loss\n1,0.5\n2,0.25\n"
DAMAGES = {
    "empty": b"",
    "cut": ROWS[:-4],
    "a row lost": b"step,loss\n2,0.25\n",
    "NULs": ROWS.replace(b"2,", b"\0\0"),
    "a flipped header": ROWS.replace(b"loss", b"lorr"),
    "a flipped digit": ROWS.replace(b"25", b"26"),
    "not UTF-8": ROWS.replace(b"0.5", b"\xff.5"),
    "a row twice": b"step,loss\n1,0.5\n1,0.5\n2,0.25\n",
    "a line that is no row": b"step,loss\n1,0.5\nwords\n2,0.25\n",
}


@pytest.mark.survive("R8")
@pytest.mark.parametrize("damage", [*DAMAGES, "gone", "a directory", "a dangling link"])
def test_a_resume_is_refused_where_a_claimed_row_is_missing_and_says_what_to_do(tmp_path, damage):
    path = tmp_path / "m.csv"
    claim = write(path, {"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25})
    assert path.read_bytes() == ROWS and read_claimed_rows(path, claim, CHECKPOINT) == ROWS
    path.unlink()
    if damage in DAMAGES:
        path.write_bytes(DAMAGES[damage])
    elif damage == "a directory":
        path.mkdir()
    elif damage == "a dangling link":
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadInput) as e:
        read_claimed_rows(path, claim, CHECKPOINT)
    steps = {"a row lost": "2", "a flipped digit": "1, 2", "cut": "1", "NULs": "1"}
    steps |= {"a flipped header": "1, 2", "not UTF-8": "1, 2"}
    steps |= {"a row twice": "1, 1, 2", "a line that is no row": "1, 2"}
    assert str(e.value) == (
        f"resume: {path}: not the 2 rows that step-00000002 was saved with (steps in the file: "
        f"{steps.get(damage, 'none')}); put the file back, or continue in a new folder: "
        f"--resume {CHECKPOINT} --out_dir <a new folder>"
    )
    no_claim = read_claimed_rows(path, None, CHECKPOINT)
    assert no_claim == read_claimed_rows(path, [0, "any"], CHECKPOINT) == b""


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    file = Csv(tmp_path / "m.csv")
    file.row({"step": 1, "loss": 0.5})
    assert (tmp_path / "m.csv").read_text() == "step,loss\n1,0.5\n", "a kill now must not lose it"
    file.file.close()


@pytest.mark.survive("R6")
@pytest.mark.parametrize("change", ["renamed", "gone", "another"])
def test_a_file_that_is_no_longer_there_fails_at_the_next_row_and_at_the_next_save(
    tmp_path, change
):
    folder = tmp_path / "run"
    folder.mkdir()
    file = Csv(folder / "m.csv")
    file.row({"step": 1, "loss": 0.5})
    if change == "gone":
        (folder / "m.csv").unlink()
    else:
        folder.rename(tmp_path / "elsewhere")
    reason = "No such file or directory"
    if change == "another":
        folder.mkdir()
        (folder / "m.csv").touch()
        reason = "another file is there now"
    with pytest.raises(Failed, match=f"^{folder}/m.csv: not saved: {reason}$"):
        file.row({"step": 2, "loss": 0.5})
    with pytest.raises(Failed, match=f"^{folder}/m.csv: not saved: {reason}$"):
        file.sync()
    file.file.close()


def test_a_new_run_overwrites_what_an_unsaved_one_left(tmp_path):
    (tmp_path / "m.csv").write_text("step,other\n1,2\n")
    write(tmp_path / "m.csv", {"step": 1, "loss": 0.5})
    assert (tmp_path / "m.csv").read_text() == "step,loss\n1,0.5\n"


def test_columns_stay_where_the_first_row_put_them_and_none_is_empty(tmp_path):
    path = tmp_path / "m.csv"
    first, second = {"step": 1, "loss": None, "kl": 0.0}, {"kl": 2.0, "step": 2, "loss": 3.0}
    write(path, first, second)
    write(path, {"step": 3, "kl": 4.0}, claimed_rows=path.read_bytes())
    content = "step,loss,kl\n1,,0.0\n2,3.0,2.0\n3,,4.0\n"
    assert path.read_text() == content, "0.0 is a value, None is an empty cell"


def test_numbers_come_back_to_the_bit(tmp_path):
    numbers = [0.1 + 0.2, 1 / 3, 1e-300, 5e-324, -0.0, math.pi * 1e20, 123456789.123456789]
    numbers.append(math.inf)
    write(tmp_path / "m.csv", *({"step": i, "x": x} for i, x in enumerate(numbers)))
    write(tmp_path / "m.csv", claimed_rows=(tmp_path / "m.csv").read_bytes())  # rewritten once
    back = [float(row["x"]) for row in rows(tmp_path / "m.csv")]
    assert list(map(repr, back)) == list(map(repr, numbers))


def rows(path: Path) -> list[dict]:
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


# ---- progress ------------------------------------------------------------------------------------


def progress(capsys, total, start=0, log_interval=1, on=True, **row) -> list[str]:
    """The lines of a run, each of whose rows has the same numbers."""
    display = Progress(total, start, on)
    row = {"loss": 0.25, "kl": None, "rewards/margins": 1.5, "tokens/s": 1234.5, "auc": 0.5} | row
    for step in range(start + 1, total + 1):
        has_row = step % log_interval == 0 or step == total
        display.step(step, row if has_row else None, 0.0)
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def alone(monkeypatch):
    """No launcher."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def test_without_a_terminal_progress_is_about_twenty_lines(capsys, alone):
    lines = progress(capsys, 1000)
    assert len(lines) == 21
    assert lines[0].startswith("step 1/1000: loss 0.2500 margins 1.5000 tok/s 1,234 ETA 00:")
    assert lines[1].startswith("step 50/") and lines[-1].startswith("step 1000/")
    assert all(len(line) <= 80 for line in lines)
    for total, interval in ((30, 1), (39, 1), (1000, 7), (2100, 100), (999, 10), (1010, 50)):
        lines = progress(capsys, total, log_interval=interval)
        assert 10 <= len(lines) <= 30, (total, interval)
    assert len(progress(capsys, 3)) == 3
    steps = [line.split("/")[0] for line in progress(capsys, 1000, start=900)]
    assert steps == ["step 901", "step 950", "step 1000"], "a resumed run prints its first step too"


def test_progress_says_where_the_clamp_made_z_zero(capsys, alone):
    for clamped, shown in ((1.0, "kl 0 (clamped)"), (0.0, "kl 0.0000"), (None, "kl 0.0000")):
        (line,) = progress(capsys, 1, kl=0.0, **{"kl/clamped": clamped})
        assert f"loss 0.2500 {shown} margins" in line


def test_a_line_that_would_be_longer_than_80_columns_is_two(capsys, alone):
    row = {"kl": 0.0, "kl/clamped": 1.0, "tokens/s": 123456.0, "rewards/margins": -12.5}
    head, rest = progress(capsys, 100_000, start=99_999, **row)
    assert head == "step 100000/100000:"
    assert rest.startswith("  loss 0.2500 kl 0 (clamped) margins -12.5000 tok/s 123,456 ETA ")
    assert fit_80_columns("a", "b" * 77) == "a: " + "b" * 77
    assert fit_80_columns("a", "b" * 78) == "a:\n  " + "b" * 78


def test_progress_off_says_nothing(capsys):
    assert progress(capsys, 100, on=False) == []


def test_on_a_terminal_progress_is_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = Progress(10, 4, True)
    progress.step(5, {"loss": 0.25, "kl": 0.125}, 0.0)
    progress.step(6, None, 0.0)
    bar = progress.bar
    assert (bar.n, bar.total, bar.desc) == (6, 10, "loss 0.2500 kl 0.1250 ")
    progress.close()
    assert capsys.readouterr().out == "" and bar.disable
    assert Progress(10, 0, False).bar is None


def screen(folder: Path, program: str, argv: list[str]) -> list[str]:
    """What stands on a terminal of 80 columns after a program, line by line, without empty lines."""
    our_end, program_end = os.openpty()
    fcntl.ioctl(program_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    folder.mkdir()

    def use_terminal():
        for fd in (1, 2):
            os.dup2(program_end, fd)

    child = Started(folder, program, argv, first=use_terminal)
    os.close(program_end)
    printed = b""
    try:
        while block := os.read(our_end, 65536):
            printed += block
    except OSError:  # the program has ended
        os.close(our_end)
    assert child.ended()[0] == 0
    assert b"\x1b" not in printed.replace(b"\x1b[A", b""), "no escape but `cursor up`"
    assert b"3 loss " in printed, "there was a bar"
    lines = []
    for line in printed.decode().replace("\r\n", "\n").split("\n"):
        cells = []
        for part in line.split("\r"):  # each part overwrites the line from its beginning
            cells[: len(part)] = part
        text = "".join(cells).rstrip()
        if text:
            lines.append(text)
    return lines


@pytest.mark.parametrize("program", ["kto", "spin"])
def test_on_a_terminal_the_last_line_is_what_to_do_next_and_no_bar(tiny, demos, tmp_path, program):
    sources = {"kto": ROOT / "tests/parity/kto_data.jsonl", "spin": demos}
    out = tmp_path / "run"
    argv = ["--model", tiny, "--data.train", sources[program], "--out_dir", out, *TINY.split()]
    if program == "spin":
        argv += ["--spin.max_iterations=2", "--spin.max_new_tokens=3", "--epochs=1"]
    *_, stopped, command = screen(tmp_path / "a", program, [*argv, "--stop_at=2"])
    assert stopped == "stopped by stop_at at step 2 of 3, saved; go on with"
    assert command.startswith("  python ") and command.endswith("--resume auto")
    lines = screen(tmp_path / "b", program, [*argv, "--resume=auto"])
    assert lines[-1] == f"exported to {out / 'final'}"
    assert not any("ETA" in line for line in lines), "nor anywhere above"


def test_the_first_eta_leaves_out_what_came_before_the_first_step(capsys, monkeypatch):
    clock = {"now": 1000.0}
    monkeypatch.setattr(time, "monotonic", lambda: clock["now"])
    for module in (time, tqdm.std):
        monkeypatch.setattr(module, "time", lambda: clock["now"])
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda on=terminal: on, raising=False)
        progress = Progress(10, 0, True)
        clock["now"] += 500  # a check at step 0
        progress.step(1, {"loss": 0.25}, 10.0)
        if terminal:
            assert progress.bar.format_dict["elapsed"] == 10
            progress.close()
        else:
            assert capsys.readouterr().out.endswith("ETA 01:30\n"), "9 more steps of 10 seconds"


def test_only_the_first_rank_speaks_and_writes(capsys, monkeypatch, tmp_path):
    for rank, printed, files in (("0", "hi\n", {"metrics.csv", "val.csv"}), ("1", "", set())):
        monkeypatch.setenv("RANK", rank)
        say("hi")
        assert capsys.readouterr().out == printed
        (tmp_path / rank).mkdir()
        logger = Logger(run_settings(tmp_path / rank), None)
        if rank == "1":
            logger.step(1, {"loss": 1.0}, 0.0)
            logger.validation(1, {"loss": 1.0}, [])
            logger.sync()
        logger.close()
        assert {p.name for p in (tmp_path / rank).iterdir()} == files


def test_the_end_of_a_run_closes_what_it_writes_to(tmp_path, monkeypatch):
    logger = Logger(run_settings(tmp_path), None)
    closed = []
    monkeypatch.setattr(logger.tracker, "close", lambda: closed.append("tracker"))
    logger.close()
    assert closed == ["tracker"] and logger.metrics.file.closed and logger.val.file.closed


# ---- trackers, through whole runs ----------------------------------------------------------------

TINY = "--batch_size=4 --epochs=2 --max_steps=3 --val_interval=null --save_interval=null"
TINY += " --eval.samples=2 --eval.max_new_tokens=3 --optim.lr=1e-3"
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
SPIN = "--spin.max_iterations=1 --spin.max_new_tokens=3"


@pytest.fixture(scope="module")
def tracked(tiny, ratings, pairs, demos, tmp_path_factory):
    """(program, logger) -> (its folder, exit code, stdout, stderr) of a run."""
    root = tmp_path_factory.mktemp("tracked")
    sources = {"kto": ratings, "dpo": pairs, "spin": demos}

    def run(program, logger):
        out = root / f"{program}-{logger}"
        folder = root / f"printed-{out.name}"
        folder.mkdir()
        argv = ["--model", tiny, "--out_dir", out, f"--logger={logger}", *TINY.split()]
        argv += ["--data.train", sources[program], "--data.val", sources[program]]
        if program == "spin":
            argv += SPIN.split()
        child = Started(folder, program, argv, first=without_wandb, **OFFLINE, HOME=str(root))
        return out, *child.ended()

    runs = {}
    for logger in ("tensorboard", "wandb"):
        for program in sources:
            runs[program, logger] = run(program, logger)
    return runs


def without_wandb():
    """Remove this machine's own settings of wandb. wandb leaves files open, which would warn."""
    for name in list(os.environ):
        if name.startswith("WANDB_") and name not in OFFLINE:
            del os.environ[name]
    warnings.simplefilter("ignore")


def events(out: Path) -> dict[tuple[str, int], float | str]:
    """(tag, step) -> number or text, of a run's one TensorBoard file."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = (out / "tensorboard").glob("events.out.tfevents.*")
    raw = file.read_bytes()
    values = {}
    while raw:  # a record: its length (8 bytes), a checksum (4), its content, a checksum (4)
        n = int.from_bytes(raw[:8], "little")
        event = Event.FromString(raw[12 : 12 + n])
        raw = raw[16 + n :]
        for value in event.summary.value:
            assert (value.tag, event.step) not in values
            text = b"".join(value.tensor.string_val).decode()
            values[value.tag, event.step] = text or value.simple_value
    return values


def history(out: Path) -> dict[tuple[str, int], float]:
    """(name, step) -> number, of a run's one wandb file."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (out / "wandb").glob("offline-run-*/*.wandb")
    raw = file.read_bytes()
    at = 7  # behind the file's header
    record = b""
    values = {}
    while at < len(raw):  # parts in blocks of 32 KiB: checksum (4 bytes), length (2), kind (1)
        left_in_block = 32768 - at % 32768
        if left_in_block < 7:
            at += left_in_block
            continue
        n = int.from_bytes(raw[at + 4 : at + 6], "little")
        kind = raw[at + 6]
        record += raw[at + 7 : at + 7 + n]
        at += 7 + n
        if kind in (1, 4):  # a complete record, or its last part
            entry = Record.FromString(record).history
            record = b""
            for item in entry.item:
                name, value = "/".join(item.nested_key), json.loads(item.value_json)
                if not name.startswith("_") and isinstance(value, float | int):
                    values[name, entry.step.num] = value
    return values


def logged(out: Path) -> dict[tuple[str, int], float]:
    """What a tracker should have: all cells of metrics.csv and val.csv."""
    expected = {}
    for file, prefix in (("metrics.csv", ""), ("val.csv", "val/")):
        for row in rows(out / file):
            step = int(row["step"])
            for name, cell in row.items():
                if cell and name != "step":
                    expected[f"{prefix}{name}", step] = pytest.approx(float(cell), rel=1e-6)
    for key in (("loss", 1), ("loss", 2), ("loss", 3), ("val/loss", 0), ("val/loss", 3)):
        assert key in expected
    return expected


def samples(out: Path, step: int) -> list[list[str]]:
    """The prompts and completions that were shown at a step."""
    answers = json.loads((out / "eval" / f"step-{step}.json").read_text())["samples"]
    assert len(answers) == 2
    return [[answer["prompt"], answer["completion"]] for answer in answers]


@pytest.mark.survive("R1")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", ["kto", "dpo", "spin"])
def test_tensorboard_gets_every_value_at_its_step_and_the_samples(tracked, program):
    out, code, _, stderr = tracked[program, "tensorboard"]
    assert code == 0, stderr
    values = events(out)
    texts = {step: value for (_, step), value in values.items() if isinstance(value, str)}
    assert {k: v for k, v in values.items() if not isinstance(v, str)} == logged(out)
    assert set(texts) == {0, 3}
    for step, text in texts.items():
        for prompt, completion in samples(out, step):
            assert f"{prompt} **{completion}**" in text


@pytest.mark.survive("R1")
@pytest.mark.parametrize("program", ["kto", "dpo", "spin"])
def test_wandb_gets_every_value_at_its_step_and_the_samples_offline(tracked, program):
    out, code, _, stderr = tracked[program, "wandb"]
    assert code == 0, stderr
    values, expected = history(out), logged(out)
    assert {key: values.get(key) for key in expected} == expected
    files = (out / "wandb").glob("offline-run-*/files/media/table/**/*.table.json")
    tables = [json.loads(file.read_text())["data"] for file in files]
    assert sorted(tables) == sorted(samples(out, step) for step in (0, 3))


@pytest.mark.parametrize("program, empty", [("kto", True), ("dpo", True), ("spin", False)])
def test_before_the_first_step_the_empty_accuracy_is_explained(tracked, program, empty):
    out, _, stdout, _ = tracked[program, "tensorboard"]
    lines = re.findall(r"^validation at step (\d+):\s+(.*)$", stdout, re.M)
    assert [step for step, _ in lines] == ["0", "3"]
    assert [line.endswith(", no accuracy (r is 0)") for _, line in lines] == [empty, False]
    if empty:
        assert [row["accuracy"] != "" for row in rows(out / "val.csv")] == [False, True]


def test_the_docs_name_every_column(tracked):
    text = (ROOT / "docs" / "columns.md").read_text()
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    named = {name.strip() for cell in first_cells for name in cell.split(",")} - {"column", "---"}
    seen = {"checker_accuracy", "kl/own"}  # no run here has a checker
    for program in ("kto", "dpo", "spin"):
        out, *_ = tracked[program, "tensorboard"]
        for table in ("metrics.csv", "val.csv"):
            seen |= rows(out / table)[0].keys()
    assert named == seen


def test_a_run_says_how_many_steps_it_will_have(tracked):
    out, _, stdout, _ = tracked["kto", "tensorboard"]
    assert "\n3 steps of 4 examples\n" in stdout
    assert "\n6 steps per epoch, which leaves out 0 of 24 examples\n" in stdout
    assert "\nstep 1/3: loss " in stdout and f"\nrun folder: {out}\n" in stdout


def test_the_csv_logger_tracks_nowhere_else(tmp_path):
    tracker = make_tracker(run_settings(tmp_path), tmp_path, False)
    tracker.scalars({"loss": 1.0}, 1)
    tracker.samples([{"prompt": "p", "completion": "c"}], 1)
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def wandb_elsewhere(out: Path, runs: int, **env) -> list[str] | None:
    """Start `runs` wandb trackers, the second one resumed, in a process of their own, because wandb
    leaves threads and hooks. Returns the ids of their wandb runs, or the error, as the last text;
    None when 30 s were not enough."""
    pytest.importorskip("wandb")
    out.mkdir()

    def work():
        for name in list(os.environ):
            if name.startswith("WANDB"):
                del os.environ[name]
        os.environ.update(HOME=str(out), NETRC=str(out / "none"), **env)
        sys.stdin = open(os.devnull)
        warnings.simplefilter("ignore")
        texts = []
        try:
            for resumed in (False, True)[:runs]:
                tracker = make_tracker(run_settings(out, logger="wandb"), out, resumed)
                tracker.scalars({"loss": 0.5}, 1 + resumed)
                tracker.close()
                texts.append((out / "wandb_id").read_text())
                sys.modules["wandb"].finish()
        except BadInput as e:
            texts.append(str(e))
        (out / "texts.json").write_text(json.dumps(texts))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(30)
    process.kill()
    file = out / "texts.json"
    return json.loads(file.read_text()) if file.exists() else None


def test_a_resumed_run_goes_on_with_its_own_in_wandb(tmp_path):
    ids = wandb_elsewhere(tmp_path / "run", 2, WANDB_MODE="offline")
    if ids is None:
        pytest.skip("wandb needs more than 30 s here")
    assert len(ids) == 2 and ids[0] == ids[1]


def test_wandb_online_without_a_key_is_refused_at_once_in_one_line(tmp_path):
    (message,) = wandb_elsewhere(tmp_path / "run", 1, WANDB_API_KEY="")
    assert message.startswith("logger: wandb: ") and "\n" not in message
    assert message.endswith("; WANDB_MODE=offline needs neither a key nor a network")


# ---- tables --------------------------------------------------------------------------------------


def test_wilsons_interval_by_hand():
    assert wilson_interval(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    z2 = 1.96**2
    assert wilson_interval(0, 10) == pytest.approx((0, z2 / (10 + z2)), abs=1e-12)
    assert wilson_interval(10, 10) == pytest.approx((10 / (10 + z2), 1), abs=1e-12)
    assert wilson_interval(1, 10) == pytest.approx((0.0179, 0.4042), abs=1e-4)  # Newcombe's tables
    low, high = wilson_interval(0, 10)
    assert low == 0 and 0.27 < high < 0.28


def answers(*texts):
    return [{"prompt": f"p{i}", "completion": text} for i, text in enumerate(texts)]


def test_the_verdict_shows_both_accuracies_with_intervals_and_the_gain(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    before = {"right": 5, "of": 10, "answers": answers("b c", "a\nb")}
    after = {"right": 8, "of": 10, "answers": answers("a b", "x" * 99)}
    text = format_before_after(before, after)
    assert "  before   50.0%  (23.7 to 76.3)  5 of 10\n" in text  # Wilson's interval, from a table
    assert "  after    80.0%  (49.0 to 94.3)  8 of 10\n" in text
    assert "  gain    +30.0 points\n" in text
    assert text.splitlines()[-2:] == ["  p0      b c     a b", f"  p1      a b     {'x' * 34}"]
    assert "  gain    -30.0 points\n" in format_before_after(after, before)
    assert "p1" not in format_before_after(before, after, n=1)
    graded = format_before_after(before | {"right": 7.83489}, after)
    assert "  7.8 of 10\n" in graded, "of a checker with numbers"
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, format_before_after(before, after).splitlines())) <= 80


def test_answers_that_changed_come_first_in_their_order():
    before = {"right": 0, "of": 4, "answers": answers("1", "2", "3", "4")}
    after = {"right": 2, "of": 4, "answers": answers("1", "b", "3", "d")}
    lines = format_before_after(before, after, n=3).splitlines()[-3:]
    assert [line.split() for line in lines] == [
        ["p1", "2", "b"],
        ["p3", "4", "d"],
        ["p0", "1", "1"],
    ]


def test_of_a_prompt_its_end_is_shown_since_a_template_begins_all_alike(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    begins = "system\nYou are kind.\nuser\n"
    prompts = [f"{begins}sort: {words} =" for words in ("pear fig apple", "x" * 99, "b a")]
    rows = [(prompt, "y" * 99, "z" * 99) for prompt in [*prompts, "twenty-four characters,,", "p"]]
    head, *lines = format_table(("prompt", "before", "after"), rows).splitlines()
    shown = [line[2:26].rstrip() for line in lines]
    assert shown[0] == "… sort: pear fig apple =" and shown[1] == f"…{'x' * 21} ="
    assert shown[2:] == ["… kind. user sort: b a =", "twenty-four characters,,", "p"]
    assert all(line[26:] == f"  {'y' * 24}  {'z' * 24}" for line in lines)
    assert max(map(len, lines)) <= 80 and head.split() == ["prompt", "before", "after"]


# ---- held-out answers and the best step ----------------------------------------------------------


def held_out(out: Path, monkeypatch, letters: str, checker=None, **settings) -> Evaluator:
    """With prompts of a letter each and a policy that answers "ab" to all."""

    def generate(_fabric, _policy, prompts, *_):
        return [[66, 67, EOS]] * len(prompts)

    monkeypatch.setattr(evaluate, "generate", generate)
    val = [Example(np.array(ids_of(plain(), x), np.int32), (), True) for x in letters]
    cfg = run_settings(out, eval=Eval(max_new_tokens=2, **settings))
    fabric = SimpleNamespace(global_rank=0, broadcast=lambda x: x, device=None)
    stop = SimpleNamespace(
        check=lambda device: None, interruptible=lambda alone: contextlib.nullcontext()
    )
    return Evaluator(fabric, cfg, None, plain(), val, checker, stop)


def test_as_many_distinct_prompts_are_checked_as_asked_for(tmp_path, monkeypatch):
    asked = []

    def checker(answers):
        asked.extend((a.prompt, a.completion) for a in answers)
        return [a.prompt == "s" for a in answers]

    evaluator = held_out(tmp_path, monkeypatch, "snsmo", checker, prompts=3)
    verdict = evaluator.check("before", 0)
    assert asked == [("s", "ab"), ("n", "ab"), ("m", "ab")]
    assert (verdict["right"], verdict["of"], verdict["step"]) == (1, 3, 0)
    assert len(evaluator.samples(0)) == 4, "more than were checked"
    assert len(evaluator.checked_answers) == 3, "not the samples"
    assert json.loads((tmp_path / "eval" / "before.json").read_text()) == verdict
    assert evaluator.accuracy(7) == 1 / 3 and len(asked) == 6, "the policy has moved"
    assert evaluator.check("after", 7)["right"] == 1 and len(asked) == 6, "the same weights"
    files = {"before.json", "answers-7.json", "after.json"}
    assert {p.name for p in (tmp_path / "eval").iterdir()} == files


def test_samples_are_the_first_answers_of_the_steps_check_if_there_was_one(tmp_path, monkeypatch):
    evaluator = held_out(tmp_path, monkeypatch, "snm", lambda a: [True] * len(a), samples=2)
    evaluator.check("before", 0)
    sampled = []

    def sampled_anew(*given):
        sampled.append(given)
        return [[66, EOS]] * 2

    monkeypatch.setattr(evaluate, "generate", sampled_anew)
    answers = [{"prompt": "s", "completion": "ab"}, {"prompt": "n", "completion": "ab"}]
    assert evaluator.samples(0) == answers and not sampled
    assert [a["completion"] for a in evaluator.samples(1)] == ["a", "a"], "the policy has moved"


def test_nothing_is_checked_without_prompts_or_a_checker(tmp_path, monkeypatch):
    for letters, asked, check in (("p", 0, "demo"), ("", 500, "demo"), ("p", 500, "none")):
        nothing = held_out(tmp_path, monkeypatch, letters, check=check, prompts=asked)
        assert nothing.check("before", 0) is None, "0 of 0 has no accuracy"
        assert nothing.accuracy(0) is None
    assert list(tmp_path.iterdir()) == []


def test_the_demos_checker_is_used_where_it_is_named_and_none_is_given(tmp_path, monkeypatch):
    from demo.check import check

    assert held_out(tmp_path, monkeypatch, "p", check="demo").checker is check
    assert held_out(tmp_path, monkeypatch, "p", max, check="demo").checker is max


def best_of(keep_best, values) -> list[int]:
    """The steps at which a validation is the best so far."""
    state = RunState()
    best_steps = []
    for step, value in enumerate(values):
        state.step = step
        row = dict(loss=value, kl=value, accuracy=value, checker_accuracy=value, auc=None)
        row |= {"kl/own": value, "rating_loss": value, "kl/stderr": None}
        if state.remember_if_best(row, keep_best):
            best_steps.append(step)
    assert state.best_step == (best_steps[-1] if best_steps else None)
    return best_steps


def test_the_best_is_the_lowest_loss_or_kl_and_the_highest_of_all_else():
    values = [0.5, 0.4, 0.6, 0.3, 0.7]
    for lowest in ("loss", "kl", "kl/own", "rating_loss"):
        assert best_of(lowest, values) == [1, 3]
    assert best_of("accuracy", values) == [1, 2, 4]
    assert best_of("loss", [0.5, math.nan, 0.4, math.nan]) == [2], "NaN is no value"
    assert best_of("accuracy", [0.5, math.nan, 0.4]) == [2]
    assert best_of("accuracy", [0.5, math.inf, 0.4]) == [2], "state.json could not be read again"
    tie = best_of("loss", [0.1, 0.5, 0.5])
    assert tie == [1], "step 0 has no checkpoint, and a tie changes nothing"
    assert best_of(None, values) == []
    checked = [0.5, None, 0.6, None, 0.7]
    assert best_of("checker_accuracy", checked) == [2, 4], "not each validation is checked"
    assert best_of("accuracy", [None, 0.4, 0.6]) == [1, 2], "at step 0 it is empty: r is 0"
    assert best_of("kl/own", [0.0, None, 0.6, None, 0.3]) == [2, 4]


def test_a_column_that_is_not_there_is_refused_before_the_first_step():
    have = "loss, kl, accuracy, checker_accuracy, kl/own, rating_loss"
    for name in ("los", "kl/stderr"):  # one that is not there, one that is empty
        with pytest.raises(
            BadInput, match=f"^keep_best: {name}: not in val.csv, which has {have}$"
        ):
            best_of(name, [0.5])
    with pytest.raises(BadInput, match="^keep_best: checker_accuracy: not in val.csv"):
        RunState().remember_if_best({"loss": 0.5}, "checker_accuracy")


def test_json_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "eval" / "x.json"
    with pytest.raises(TypeError):
        write_json(file, {"fine": 1, "not": object()})
    assert not list(file.parent.glob("*"))
    write_json(file, {"text": "Größe", "n": 1})
    assert json.loads(file.read_text()) == {"text": "Größe", "n": 1}
    assert "Größe" in file.read_text()
    with pytest.raises(TypeError):
        write_json(file, {"not": object()})
    assert json.loads(file.read_text())["n"] == 1, "the old one stays"
    assert [p.name for p in file.parent.iterdir()] == ["x.json"]


# ---- speed ---------------------------------------------------------------------------------------


def test_only_passes_that_no_implementation_can_save_are_counted():
    def passes(kl_pairs, reference, lora):
        return least_passes(kl_pairs=kl_pairs, reference=reference, lora=lora)

    assert passes(False, True, False) == (4, 4)  # policy: forward 1, backward 2; reference 1
    assert passes(False, False, False) == (3, 3)
    assert passes(False, True, True) == (3, 3), "with LoRA the matrices need no gradient"
    assert passes(True, True, False) == (4, 6), "both completions share the passes of the prompt"
    assert passes(True, False, True) == (2, 3), "the reference is cached"


def test_useful_flops_are_two_for_each_weight_token_and_pass(tiny):
    policy = model.load_model(tiny)
    fabric = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    body = sum(p.numel() for p in policy.transformer.h.parameters())
    speed = Throughput(fabric, "32-true", policy, (4, 6))
    example = SimpleNamespace(prompt=[0] * 5, completions=([0] * 3, [0] * 4))
    for seconds in (0.5, 1.5):
        speed.add([example], seconds)
    row = speed.read()
    head = policy.config.n_embd * policy.config.padded_vocab_size
    flops = 2 * 2 * (body * (4 * 5 + 6 * 7) + head * 6 * 7)  # the head runs on completions only
    assert row["tflops/s"] == pytest.approx(flops / 2 / 1e12)
    assert (row["tokens/s"], row["seconds"], row["mfu"]) == (12, 2.0, None)
    speed.add([example], 3.0)
    assert speed.read()["tokens/s"] == 4, "each line is of its own steps"


# ---- waits ---------------------------------------------------------------------------------------


@pytest.fixture
def shown(monkeypatch):
    """Waits print, also after a test that has run a program with --progress false."""
    monkeypatch.setattr(console, "shows_progress", True)


@pytest.mark.usefixtures("shown")
def test_a_short_wait_prints_nothing_and_a_long_one_what_how_far_and_how_long(monkeypatch, capfd):
    with Wait("quick", 2, "answers"):
        advance(2)
    assert capfd.readouterr().out == ""
    monkeypatch.setattr(console, "SILENT", 0.2)
    with Wait("the checker", 1000, "answers"):
        advance(50)
        time.sleep(0.3)
    with Wait("check at step 0", 1000):
        advance(250, tokens=250)
        time.sleep(0.3)
    with Wait("reading x.csv", None, "records"):
        advance(7)
        time.sleep(0.3)
    checker, check, reading = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"the checker: 50 of 1,000 answers, 00:0(4|5) left", checker)
    assert re.fullmatch(r"check at step 0: 25%, 1,\d\d\d tokens/s, 00:01 left", check)
    assert reading == "reading x.csv: 7 records, 00:00 so far"


@pytest.mark.usefixtures("shown")
def test_of_a_wait_within_another_only_the_inner_one_is_shown_and_counts(monkeypatch, capfd):
    monkeypatch.setattr(console, "SILENT", 0.2)
    with Wait("outer", 2):
        with Wait("inner", 10):
            advance()
            assert console.current_work() == "inner"
            time.sleep(0.5)
        assert console.current_work() == "outer"
    said = capfd.readouterr().out
    assert "inner: 10%" in said and "outer" not in said
    assert console.current_work() == "this step"


@pytest.mark.usefixtures("shown")
def test_what_makes_a_wait_of_more_than_five_minutes_shorter_is_said_once(monkeypatch, capfd):
    monkeypatch.setattr(console, "SILENT", 0.1)
    with Wait("answers", 1000, shorter="a smaller eval.prompts"):
        advance(1)
        time.sleep(0.2)
    assert "answers: 0%, 00:00 so far" in capfd.readouterr().out, "too early to say how long"
    monkeypatch.setattr(console, "LATEST_ESTIMATE", 0)
    for n in (1, 900):
        with Wait("answers", 1000, shorter="a smaller eval.prompts"):
            advance(n)
            time.sleep(0.7 if n == 1 else 0.2)
        told = capfd.readouterr().out.count("shorter with a smaller eval.prompts")
        assert told == (n == 1)


@pytest.mark.usefixtures("shown")
def test_a_slow_start_gives_no_estimate_of_many_hours(monkeypatch, capfd):
    """Prompts are read for a minute before the first token: that minute says nothing about the tokens."""
    monkeypatch.setattr(console, "SILENT", 0.6)
    monkeypatch.setattr(console, "LATEST_ESTIMATE", 0.4)
    with Wait("answers", 1000):
        time.sleep(0.5)
        advance(1)
        time.sleep(0.9)  # lines after 0.6 and 1.2 seconds
    early, later = capfd.readouterr().out.splitlines()
    assert early.endswith("so far") and later.endswith("left")


def test_no_progress_means_no_lines_of_waits_either(monkeypatch, capfd):
    monkeypatch.setattr(console, "SILENT", 0.05)
    monkeypatch.setattr(console, "shows_progress", False)
    with Wait("answers"):
        time.sleep(0.2)
    assert capfd.readouterr().out == ""


SLOW = """
import time
from runs import console
console.SILENT = 0.3
from kto import main
from runs.errors import run_cli
run_cli(lambda: main(checker=lambda answers: time.sleep(1) or [True] * len(answers)))
"""


def test_a_run_says_the_size_of_a_check_and_how_far_it_is(tiny, ratings, tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    argv = [f"--model={tiny}", f"--data.train={ratings}", f"--data.val={ratings}"]
    argv += [f"--out_dir={tmp_path / 'run'}", "--batch_size=8", "--max_steps=1"]
    argv += ["--eval.prompts=5", "--eval.max_new_tokens=3"]
    child = Started(tmp_path, str(script), argv, first=lambda: sys.path.insert(0, str(ROOT)))
    code, said, stderr = child.ended()
    assert (code, stderr) == (0, "")
    size = said.index("check at step 0: 5 prompts, answers of at most 3 tokens\n")
    progress = re.search(r"the checker: 00:0\d so far\n", said)
    assert progress and progress.start() > size
