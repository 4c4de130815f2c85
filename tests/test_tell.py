"""What is written between steps: csv files that survive a kill, progress lines, trackers, verdicts."""

import csv
import json
import math
import multiprocessing
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import tell
from data import BadInput
from optim import Plan
from tell import Csv, Progress, Tell, tracker, verdicts, write_json

# ---- metrics.csv ----------------------------------------------------------------------------------------------------


def write(path, resume_step, *rows) -> None:
    file = Csv(path, resume_step)
    for row in rows:
        file.row(row)
    file.sync()
    file.file.close()


def test_a_resume_keeps_the_rows_up_to_its_step_and_goes_on_after_them(tmp_path):
    path = tmp_path / "m.csv"
    write(path, None, *({"step": i, "loss": i / 7} for i in range(5)))
    write(path, 2, {"step": 3, "loss": 0.5})
    lines = path.read_text().splitlines()
    assert lines == ["step,loss", "0,0.0", f"1,{1 / 7}", f"2,{2 / 7}", "3,0.5"]
    assert [p.name for p in tmp_path.iterdir()] == ["m.csv"]


def test_a_torn_last_line_is_dropped_whatever_it_says(tmp_path):
    path = tmp_path / "m.csv"
    for torn in ("2,0.2", "2,0.", "2", "2,", '2,"', "\0\0\0"):
        path.write_text(f"step,loss\n1,0.1\n{torn}")
        write(path, 9, {"step": 2, "loss": 0.25})
        assert path.read_text() == "step,loss\n1,0.1\n2,0.25\n", "a whole-looking line without its end may lack digits"


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    file = Csv(tmp_path / "m.csv", None)
    file.row({"step": 1, "loss": 0.5})
    assert (tmp_path / "m.csv").read_text() == "step,loss\n1,0.5\n", "a kill now must not lose it"
    file.file.close()


@pytest.mark.parametrize("torn", ["", "step", "step,lo", "\n"])
def test_without_a_whole_first_line_it_starts_anew(tmp_path, torn):
    (tmp_path / "m.csv").write_text(torn)
    write(tmp_path / "m.csv", 3, {"step": 4, "loss": 0.5, "kl": 1.0})
    assert (tmp_path / "m.csv").read_text() == "step,loss,kl\n4,0.5,1.0\n"


def test_a_header_alone_is_kept_and_a_missing_file_made(tmp_path):
    (tmp_path / "m.csv").write_text("step,loss\n")
    for name in ("m.csv", "new.csv"):
        write(tmp_path / name, 3, {"step": 4, "loss": 0.5})
        assert (tmp_path / name).read_text() == "step,loss\n4,0.5\n"


def test_a_new_run_overwrites_what_an_unsaved_one_left(tmp_path):
    (tmp_path / "m.csv").write_text("step,other\n1,2\n")
    write(tmp_path / "m.csv", None, {"step": 1, "loss": 0.5})
    assert (tmp_path / "m.csv").read_text() == "step,loss\n1,0.5\n"


def test_columns_stay_where_the_first_row_put_them_and_none_is_empty(tmp_path):
    path = tmp_path / "m.csv"
    first, second = {"step": 1, "loss": None, "kl": 0.0}, {"kl": 2.0, "step": 2, "loss": 3.0}
    write(path, None, first, second)
    write(path, 2, {"step": 3, "kl": 4.0})
    assert path.read_text() == "step,loss,kl\n1,,0.0\n2,3.0,2.0\n3,,4.0\n", "0.0 is a value, None is none"


def test_numbers_come_back_to_the_bit(tmp_path):
    numbers = [0.1 + 0.2, 1 / 3, 1e-300, 5e-324, -0.0, math.pi * 1e20, 123456789.123456789, math.inf]
    write(tmp_path / "m.csv", None, *({"step": i, "x": x} for i, x in enumerate(numbers)))
    write(tmp_path / "m.csv", len(numbers))  # rewritten once
    with open(tmp_path / "m.csv") as f:
        back = [float(row["x"]) for row in csv.DictReader(f)]
    assert list(map(repr, back)) == list(map(repr, numbers))


# ---- progress -------------------------------------------------------------------------------------------------------


def lines(capsys, total, start=0, log_interval=1, on=True) -> list[str]:
    bar = Progress(Plan(total, total, None, None), start, on)
    for step in range(start + 1, total + 1):
        line = {"loss": 0.25, "kl": None, "rewards/margins": 1.5, "tokens/s": 1234.5, "auc": 0.5}
        bar.step(step, line if step % log_interval == 0 or step == total else None)
    return capsys.readouterr().out.splitlines()


def test_without_a_terminal_progress_is_about_twenty_lines(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    said = lines(capsys, 1000)
    assert said[0].startswith("step 1/1000  loss 0.2500  margins 1.5000  tokens/s 1,234  ETA 0:00:")
    assert said[1].startswith("step 50/") and said[-1].startswith("step 1000/") and len(said) == 21
    for total, log_interval in ((30, 1), (39, 1), (1000, 7), (2100, 100), (999, 10), (1010, 50)):
        assert 10 <= len(lines(capsys, total, log_interval=log_interval)) <= 30, (total, log_interval)
    assert len(lines(capsys, 3)) == 3
    said = lines(capsys, 1000, start=900)
    assert [x.split("/")[0] for x in said] == ["step 901", "step 950", "step 1000"], (
        "a resumed run says that it goes on"
    )


def test_progress_off_says_nothing(capsys):
    assert lines(capsys, 100, on=False) == []


def test_on_a_terminal_progress_is_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = Progress(Plan(10, 10, None, None), 4, True)
    bar.step(5, {"loss": 0.25, "kl": 0.125})
    bar.step(6, None)
    assert (bar.bar.n, bar.bar.total, bar.bar.postfix) == (6, 10, "loss=0.2500, kl=0.1250")
    bar.bar.close()
    assert capsys.readouterr().out == ""
    assert Progress(Plan(10, 10, None, None), 0, False).bar is None


def test_only_the_first_rank_speaks(capsys, monkeypatch):
    for rank, said in (("0", "hi\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        tell.say("hi")
        assert capsys.readouterr().out == said


# ---- trackers -------------------------------------------------------------------------------------------------------


def test_the_csv_logger_tracks_nowhere_else(tmp_path):
    log, close = tracker("csv", tmp_path, "kto", {}, False)
    log({"loss": 1.0}, 1)
    close()
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_run_closes_what_it_writes_to(tmp_path):
    ended, files = [], [Csv(tmp_path / name, None) for name in ("metrics.csv", "val.csv")]
    bar = Progress(Plan(10, 10, None, None), 0, False)
    me = SimpleNamespace(main=True, metrics=files[0], val_csv=files[1], bar=bar, untrack=lambda: ended.append(True))
    Tell.close(me)
    assert ended and all(f.file.closed for f in files)
    Tell.close(SimpleNamespace(main=False))


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_gets_every_value_at_its_step(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    log, close = tracker("tensorboard", tmp_path, "kto", {}, False)
    log({"loss": 0.5, "val/kl": 2.0}, 3)
    log({"loss": 0.25}, 4)
    close()
    (file,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    raw, found = file.read_bytes(), []
    while raw:  # a record: its length (8 bytes), a checksum (4), itself, a checksum (4)
        n = int.from_bytes(raw[:8], "little")
        event, raw = Event.FromString(raw[12 : 12 + n]), raw[16 + n :]
        found += [(v.tag, v.simple_value, event.step) for v in event.summary.value]
    assert found == [("loss", 0.5, 3), ("val/kl", 2.0, 3), ("loss", 0.25, 4)]


def wandb_elsewhere(out: Path, runs: int, **env) -> list[str] | None:
    """What `runs` trackers, the second one resumed, say in a process of their own (wandb leaves threads and hooks)."""
    pytest.importorskip("wandb")
    out.mkdir()

    def work():
        for name in [k for k in os.environ if k.startswith("WANDB")]:
            del os.environ[name]
        os.environ.update(HOME=str(out), NETRC=str(out / "none"), **env)
        sys.stdin, said = open(os.devnull), []
        warnings.simplefilter("ignore")
        try:
            for resumed in (False, True)[:runs]:
                log, close = tracker("wandb", out, "kto", {"kto": {"beta": 0.1}}, resumed)
                log({"loss": 0.5}, 1 + resumed)
                close()
                said.append((out / "wandb_id").read_text())
                sys.modules["wandb"].finish()
        except BadInput as e:
            said.append(str(e))
        (out / "said.json").write_text(json.dumps(said))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(30)
    process.kill()
    return json.loads((out / "said.json").read_text()) if (out / "said.json").exists() else None


def test_wandb_works_offline_and_a_resumed_run_goes_on_with_its_own(tmp_path):
    said = wandb_elsewhere(tmp_path / "run", 2, WANDB_MODE="offline")
    if said is None:
        pytest.skip("wandb needs more than 30 s here")
    assert len(said) == 2 and said[0] == said[1]
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))) >= 1


def test_wandb_online_without_a_key_is_refused_at_once_in_one_line(tmp_path):
    (said,) = wandb_elsewhere(tmp_path / "run", 1, WANDB_API_KEY="")
    assert said.startswith("logger: wandb: ") and "\n" not in said
    assert said.endswith("; WANDB_MODE=offline needs neither key nor network")


# ---- answers and verdicts -------------------------------------------------------------------------------------------


def answers(*texts):
    return [{"prompt": f"p{i}", "completion": text} for i, text in enumerate(texts)]


def test_the_verdict_shows_both_accuracies_with_intervals_and_the_gain():
    before = {"right": 5, "of": 10, "answers": answers("b c", "a\nb")}
    after = {"right": 8, "of": 10, "answers": answers("a b", "x" * 99)}
    text = verdicts(before, after)
    assert "  before   50.0%  (23.7 to 76.3)  5 of 10\n" in text  # Wilson's interval, from a table
    assert "  after    80.0%  (49.0 to 94.3)  8 of 10\n" in text
    assert "  gain    +30.0 points\n" in text
    assert text.splitlines()[-2:] == ["  p0      b c     a b", f"  p1      a b     {'x' * 34}"]
    assert "  gain    -30.0 points\n" in verdicts(after, before)
    assert "p1" not in verdicts(before, after, n=1)


def judged(tmp_path, prompts, asked, check="demo"):
    """judge() by a policy that answers "a b" to all, on the first rank."""
    s = SimpleNamespace(eval=SimpleNamespace(check=check, prompts=asked))
    me = SimpleNamespace(s=s, out=tmp_path, prompts=prompts, main=True)
    me.answers = lambda prompts: [{"prompt": p, "completion": "a b"} for p in prompts]
    return Tell.judge(me, "before")


def test_as_many_prompts_are_judged_as_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(tell.CHECKERS, "demo", lambda: lambda prompt, completion: prompt == "sort")
    verdict = judged(tmp_path, ["sort", "no", "sort"], 2)
    assert (verdict["right"], verdict["of"]) == (1, 2)
    assert json.loads((tmp_path / "eval" / "before.json").read_text()) == verdict


def test_nothing_is_judged_without_prompts_or_a_checker(tmp_path):
    for prompts, asked, check in ((["p"], 0, "demo"), ([], 500, "demo"), (["p"], 500, "none")):
        assert judged(tmp_path, prompts, asked, check) is None, "0 of 0 has no accuracy"
    assert list(tmp_path.iterdir()) == []


def best_of(keep_best, values) -> list[int]:
    """The steps at which validation says that this is the best so far."""
    s = SimpleNamespace(keep_best=keep_best, eval=SimpleNamespace(samples=0))
    me = SimpleNamespace(s=s, main=False, prompts=[], state={"best": None}, answers=lambda prompts: [])
    found = []
    for step, value in enumerate(values):
        me.validate = lambda value=value: {"loss": value, "kl": value, "accuracy": value, "auc": None}
        found += [step] if Tell.validation(me, step) else []
    assert me.state["best"] == ({"step": found[-1], "value": me.state["best"]["value"]} if found else None)
    return found


def test_the_best_is_the_lowest_loss_or_kl_and_the_highest_of_all_else():
    values = [0.5, 0.4, 0.6, 0.3, 0.7]
    assert best_of("loss", values) == best_of("kl", values) == [1, 3]
    assert best_of("accuracy", values) == [1, 2, 4]
    assert best_of("loss", [0.1, 0.5, 0.5]) == [1], "step 0 has no checkpoint, and a tie changes nothing"
    assert best_of(None, values) == []


def test_a_column_that_is_not_there_is_refused_before_the_first_step():
    for name in ("los", "auc"):
        with pytest.raises(BadInput, match=f"^keep_best: {name}: not in val.csv, which has loss, kl, accuracy$"):
            best_of(name, [0.5])


def test_json_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "eval" / "x.json"
    with pytest.raises(TypeError):
        write_json(file, {"fine": 1, "not": object()})
    assert not list(file.parent.glob("*"))
    write_json(file, {"text": "Größe", "n": 1})
    assert json.loads(file.read_text()) == {"text": "Größe", "n": 1} and "Größe" in file.read_text()
    with pytest.raises(TypeError):
        write_json(file, {"not": object()})
    assert json.loads(file.read_text())["n"] == 1, "the old one stays"
    assert [p.name for p in file.parent.iterdir()] == ["x.json"]
