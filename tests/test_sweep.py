"""sweep.py, from outside, over a tiny program that writes run folders as ours do."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
import sweep  # noqa: E402
from runs.errors import BadInput  # noqa: E402

HERE = Path(sweep.__file__).parent

# A run of three steps that --resume=auto continues. The file `how` has lines `SEED BEHAVIOUR`: what
# the run with this seed does instead of finishing (die, stop, refuse, ...).
FAKE = """
import os, signal, sys, time
from pathlib import Path

given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
out, resume = Path(given.pop("out_dir")), given.pop("resume")
stop_at = int(given.pop("stop_at", 0))
how = Path("how").read_text() if Path("how").exists() else ""
behaviour = dict(line.split() for line in how.splitlines()).get(given["seed"])
if behaviour == "refuse":
    sys.exit("error: seed: 2 is not welcome")
if behaviour == "mistake":
    print("error: sede: no such setting\\nerror: two of them", file=sys.stderr)
    sys.exit(2)
text = "".join(f"{name}: {value}\\n" for name, value in given.items())
out.mkdir(parents=True, exist_ok=True)
saved = out / "settings.yaml"
if resume == "auto" and saved.exists() and saved.read_text() != text:
    sys.exit("error: lr: a resume cannot change it")
saved.write_text(text)
stop = []


def on_signal(number, frame):
    stop.append(number)
    signal.signal(number, signal.SIG_DFL)  # a second one ends at once


signal.signal(signal.SIGINT, on_signal)
table = out / "metrics.csv"
step = len(table.read_text().splitlines()) - 1 if table.exists() else 0
print("resumed at" if step else "starting at", step)
with open(table, "a") as file:
    if not step:
        file.write("step,loss\\n")
        file.flush()
    if behaviour == "early":
        sys.exit(1)
    while step < 3:
        step += 1
        file.write(f"{step},{float(given['seed']) / step}\\n")
        file.flush()
        if behaviour == "die" and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "leave":
            sys.exit(0)
        if step == stop_at or behaviour == "time" and step == 2:
            (out / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
            reason = "stop_at" if stop_at else "max_time"
            print(f"stopped by {reason} at step {step} of 3, saved; go on with")
            sys.exit(0)
        if behaviour == "wait" and step == 2:
            print("waiting")
            while not stop:
                time.sleep(0.01)
            time.sleep(0.3)
        if stop:
            print("saved")
            sys.exit(130)
(out / "final").mkdir(exist_ok=True)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the program kto.py; signals as they were afterwards."""
    monkeypatch.chdir(tmp_path)
    Path("kto.py").write_text(FAKE)
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


def lines(out: str) -> list[str]:
    """The line of each run, without its time."""
    return [line.split(" after")[0] for line in out.splitlines() if re.match(r"\d+/\d+ ", line)]


def test_a_grid_runs_in_order_and_ends_with_the_report_over_all(place, capsys):
    sweep.main(["kto.py", "--seed", "1,2", "--beta=0.1,0.3", "--lr", "1e-3"])
    out = capsys.readouterr().out
    assert lines(out) == [
        "1/4  seed=1,beta=0.1  finished",
        "2/4  seed=1,beta=0.3  finished",
        "3/4  seed=2,beta=0.1  finished",
        "4/4  seed=2,beta=0.3  finished",
    ]
    run = Path("out/sweep-kto/seed=2,beta=0.3")
    assert (run / "settings.yaml").read_text() == "seed: 2\nbeta: 0.3\nlr: 1e-3\n"
    log = Path(f"{run}.log").read_text()
    assert "kto.py --seed=2 --beta=0.3 --lr=1e-3 --out_dir=out/sweep-kto/seed=2,beta=0.3" in log
    assert "starting at 0" in log
    assert "0: beta=0.1\n1: beta=0.3\n" in out and re.search(r"0\u00a0train 2 +3 +0.5\n", out)
    page = Path("out/sweep-kto/report.html").read_text()
    assert "1: beta=0.3<" in page and Path("out/sweep-kto/report-svg/loss.svg").exists()


def test_the_same_command_again_skips_what_is_finished_and_runs_what_is_new(place, capsys):
    sweep.main(["kto.py", "--seed", "1,2", "--name", "mine"])
    capsys.readouterr()
    sweep.main(["kto.py", "--seed", "1,2,3", "--name", "mine"])
    done = "skipped, finished"
    expected = [f"1/3  seed=1  {done}", f"2/3  seed=2  {done}", "3/3  seed=3  finished"]
    assert lines(capsys.readouterr().out) == expected
    assert "3" in Path("out/sweep-mine/report.html").read_text()


def test_a_killed_run_does_not_stop_the_others_and_is_resumed_by_the_next_call(place, capsys):
    Path("how").write_text("1 die\n")
    with pytest.raises(SystemExit) as e:
        sweep.main(["kto.py", "--seed", "1,2"])
    assert e.value.code == "failed: seed=1", "a text: exit code 1"
    out = capsys.readouterr().out
    assert lines(out) == ["1/2  seed=1  failed", "2/2  seed=2  finished"]
    assert "code -9, see out/sweep-kto/seed=1.log" in out
    assert "0: finished=False\n1: finished=True" in out, "the report has both"
    Path("how").unlink()
    sweep.main(["kto.py", "--seed", "1,2"])
    out = capsys.readouterr().out
    assert lines(out) == ["1/2  seed=1  finished", "2/2  seed=2  skipped, finished"]
    assert "resumed at 2" in Path("out/sweep-kto/seed=1.log").read_text()


def test_the_message_of_a_run_that_refuses_is_passed_on(place, capsys):
    Path("how").write_text("1 die\n2 refuse\n")
    with pytest.raises(SystemExit, match="failed: seed=1 seed=2"):
        sweep.main(["kto.py", "--seed", "1,2", "--lr", "1e-3"])
    assert "  error: seed: 2 is not welcome\n" in capsys.readouterr().out
    Path("how").unlink()
    with pytest.raises(SystemExit, match="failed: seed=1$"):
        sweep.main(["kto.py", "--seed", "1,2", "--lr", "1e-4"])
    out = capsys.readouterr().out
    assert "  error: lr: a resume cannot change it\n" in out
    Path("how").write_text("1 leave\n")
    with pytest.raises(SystemExit, match="failed: seed=1$"):
        sweep.main(["kto.py", "--seed", "1,2", "--lr", "1e-3"])
    assert "error: " not in capsys.readouterr().out, "only what this attempt printed"


def test_a_run_that_ends_well_but_is_not_finished_did_not_succeed(place, capsys):
    Path("how").write_text("1 leave\n")
    with pytest.raises(SystemExit, match="failed: run"):
        sweep.main(["kto.py", "--seed", "1"])
    assert "code 0, see out/sweep-kto/run.log" in capsys.readouterr().out


def test_a_finished_run_of_other_settings_is_not_skipped_in_silence(place, capsys):
    sweep.main(["kto.py", "--seed", "1", "--lr", "1e-3"])
    sweep.main(["kto.py", "--seed", "1", "--lr", "1e-4"])
    sweep.main(["kto.py", "--seed", "1"])
    sweep.main(["kto.py", "--seed", "1", "--lr=1e-3", "--beta", "1"])
    out = capsys.readouterr().out
    other = "1/1  run  skipped, finished with other settings "
    assert lines(out)[1:] == [
        f"{other}(--lr=1e-3 before, --lr=1e-4 now): use another --name",
        f"{other}(--lr=1e-3 before, now): use another --name",
        f"{other}(before, --beta=1 now): use another --name",
    ]
    assert out.count("\u00a0train") == 1, "it is no run of this grid"


def test_what_its_own_settings_stop_has_not_failed_and_never_runs_past_stop_at(place, capsys):
    Path("how").write_text("3 leave\n")
    for said in ("stopped by stop_at", "skipped, stopped by stop_at"):
        sweep.main(["kto.py", "--seed", "1,2", "--stop_at", "2"])
        expected = [f"1/2  seed=1  {said}", f"2/2  seed=2  {said}"]
        out = capsys.readouterr().out
        assert lines(out) == expected and re.search(r"train 2 +2 ", out), "in the report too"
    sweep.main(["kto.py", "--seed", "1,2", "--stop_at", "2", "--lr", "1"])
    other = (
        "skipped, stopped by stop_at with other settings (before, --lr=1 now): use another --name"
    )
    assert lines(capsys.readouterr().out)[0] == f"1/2  seed=1  {other}"
    sweep.main(["kto.py", "--stop_at", "2", "--seed", "1,2"])
    same = ["1/2  seed=1  skipped, stopped by stop_at", "2/2  seed=2  skipped, stopped by stop_at"]
    assert lines(capsys.readouterr().out) == same, "in another order"
    with pytest.raises(SystemExit, match="failed: seed=3"):
        sweep.main(["kto.py", "--seed", "2,3", "--stop_at", "2"])
    sweep.main(["kto.py", "--seed", "1,2"])
    assert lines(capsys.readouterr().out)[-1] == "2/2  seed=2  finished", "without stop_at"
    Path("how").write_text("4 time\n")
    for said in ("stopped by max_time", "finished"):
        sweep.main(["kto.py", "--seed", "4,5"])
        assert lines(capsys.readouterr().out)[0] == f"1/2  seed=4  {said}", "going on is right"


def test_a_command_that_began_a_run_skips_it_when_a_later_command_has_finished_it(place, capsys):
    sweep.main(["kto.py", "--seed", "1", "--stop_at", "2"])
    sweep.main(["kto.py", "--seed", "1"])
    sweep.main(["kto.py", "--seed", "1", "--stop_at", "2"])
    expected = ["stopped by stop_at", "finished", "skipped, finished"]
    assert lines(capsys.readouterr().out) == [f"1/1  run  {text}" for text in expected]


def test_a_run_that_was_stopped_after_its_export_goes_on(place, capsys):
    """Its test split may not be scored yet."""
    sweep.main(["kto.py", "--seed", "1"])
    log = Path("out/sweep-kto/run.log")
    with open(log, "a") as file:
        file.write("stopped by SIGINT at step 3 of 3, saved; go on with\n")
    for said in ("finished", "skipped, finished"):
        capsys.readouterr()
        sweep.main(["kto.py", "--seed", "1"])
        assert lines(capsys.readouterr().out) == [f"1/1  run  {said}"]
    assert log.read_text().endswith("resumed at 3\n")


def test_a_mistake_ends_the_sweep_at_once_in_its_own_words(place):
    Path("how").write_text("2 mistake\n")
    with pytest.raises(BadInput, match="^sede: no such setting\ntwo of them$"):
        sweep.main(["kto.py", "--seed", "1,2,3"])
    assert not Path("out/sweep-kto/seed=3.log").exists()


def test_kto_itself_stops_goes_no_further_and_names_a_mistake(place, tiny, ratings, capsys):
    argv = [str(HERE / "kto.py"), "--model", str(tiny), "--data.train", str(ratings)]
    argv += ["--batch_size", "4", "--max_steps", "3", "--stop_at", "1"]
    for said in ("stopped by stop_at", "skipped, stopped by stop_at"):
        sweep.main(argv)
        assert lines(capsys.readouterr().out) == [f"1/1  run  {said}"]
        assert Path("out/sweep-kto/run/metrics.csv").read_text().count("\n") == 2
    with pytest.raises(BadInput, match="^kto.betaa: no such setting; did you mean kto.beta\\?$"):
        sweep.main([*argv, "--kto.betaa", "0.1,0.2"])
    assert capsys.readouterr().out == "1/2  kto.betaa=0.1  ", "and the message follows"
    assert len(list(Path("out/sweep-kto").glob("kto.betaa*"))) == 1


def test_the_report_is_of_this_grids_runs_alone(place, capsys):
    sweep.main(["kto.py", "--seed", "1,2", "--beta", "0.1,0.3"])
    capsys.readouterr()
    sweep.main(["kto.py", "--seed", "1,2", "--beta", "0.5"])
    out = capsys.readouterr().out
    assert out.count("\u00a0train") == 1 and "beta=0.1" not in out
    Path("how").write_text("4 refuse\n5 refuse\n")
    with pytest.raises(SystemExit, match="failed: seed=4 seed=5"):
        sweep.main(["kto.py", "--seed", "4,5"])
    assert "train" not in capsys.readouterr().out, "none got to a step"


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["kto.py", "--help"]])
def test_help_says_what_a_grid_is_and_where_its_runs_lie(place, argv, capsys):
    sweep.main(argv)
    out = " ".join(capsys.readouterr().out.split())
    for words in ("python sweep.py kto.py --seed 1,2,3", "commas make a grid", "out/sweep-kto"):
        assert words in out
    for words in ("--name", "skips finished", "resumes killed", "report at the end"):
        assert words in out
    assert not Path("out").exists()


def test_a_folder_that_cannot_be_read_is_left_out_of_the_report_in_one_line(place, capsys):
    sweep.main(["kto.py", "--seed", "1,2"])
    spoilt = Path("out/sweep-kto/seed=1/metrics.csv")
    for damage in (b"\xff\xfe\x00", b"step,loss\n1,2\n2,3,4\n"):
        spoilt.write_bytes(damage)
        Path("out/sweep-kto/report.html").unlink()
        capsys.readouterr()
        sweep.main(["kto.py", "--seed", "1,2"])
        printed = capsys.readouterr().out.splitlines()
        (line,) = [line for line in printed if "left out" in line]
        assert line.startswith(f"left out of the report: metrics: {spoilt}: ")
        assert "seed=2" in Path("out/sweep-kto/report.html").read_text()


@pytest.mark.survive("R12")
@pytest.mark.parametrize("how", ["refuse", "early"])
def test_when_no_run_gets_to_a_step_there_is_no_report(place, how):
    Path("how").write_text(f"1 {how}\n")
    with pytest.raises(SystemExit, match="failed: run"):
        sweep.main(["kto.py", "--seed", "1"])
    assert not Path("out/sweep-kto/report.html").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_lets_the_run_save_stops_the_sweep_and_says_how_to_go_on(place, number):
    Path("how").write_text("2 wait\n")
    command = [sys.executable, str(HERE / "sweep.py"), "kto.py", "--seed", "1,2,3"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    log = Path("out/sweep-kto/seed=2.log")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # the log is live
    with subprocess.Popen(command, **pipes, env=env, start_new_session=True) as child:
        deadline = time.monotonic() + 120
        while not (log.exists() and "waiting" in log.read_text()):
            assert time.monotonic() < deadline and child.poll() is None
            time.sleep(0.02)
        if number == signal.SIGINT:
            os.killpg(child.pid, number)  # as a terminal does: all of the foreground
        else:
            child.send_signal(number)
        out, err = child.communicate(timeout=120)
    assert child.returncode == 1
    assert lines(out) == ["1/3  seed=1  finished", "2/3  seed=2  stopped"]
    assert f"go on with\n  python {HERE / 'sweep.py'} kto.py --seed 1,2,3" in err
    assert "Traceback" not in err
    assert log.read_text().endswith("saved\n")
    assert not Path("out/sweep-kto/seed=3").exists()


@pytest.mark.parametrize(
    "text, expected",
    [
        ("1", ["1"]),
        ("1e-3,1e-4", ["1e-3", "1e-4"]),
        ("a b,c", ["a b", "c"]),
        ("[1,2]", ["[1,2]"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("[[1,2],3],{a: 1, b: 2}", ["[[1,2],3]", "{a: 1, b: 2}"]),
        ("'a,b',c", ["a,b", "c"]),
        ('"a,b"', ["a,b"]),
        ("don't", ["don't"]),
        ("[1", ["[1"]),
        ("0.10,true,null", ["0.10", "true", "null"]),
        ("out/a.jsonl,https://b/c", ["out/a.jsonl", "https://b/c"]),
    ],
)
def test_commas_outside_brackets_and_quotes_make_the_grid(text, expected):
    assert sweep.parse_grid(["--x", text]) == sweep.parse_grid([f"--x={text}"]) == {"--x": expected}


def test_folders_are_safe_and_no_two_runs_share_one(place):
    paths = ["../../a/b", "..%2F..%2Fa/b", ".. /../a/b", "a,seed=2", "a", "ä" * 100, "ä" * 101, "~"]
    quoted = ",".join(f'"{path}"' for path in paths)
    sweep.main(["kto.py", "--seed", "1,2", "--data", quoted, "--name", "../x y"])
    (out,) = Path("out").iterdir()
    assert out.name == "sweep-..%2Fx%20y"
    folders = [path for path in out.iterdir() if path.is_dir() and path.name != "report-svg"]
    assert len(folders) == 2 * len(paths)
    assert sum(len(list(path.glob("final"))) for path in folders) == 2 * len(paths)
    assert {path.name for path in place.iterdir()} == {"kto.py", "out"}


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "sweep: program: expected the path"),
        (["kto.txt"], "sweep: kto.txt: expected the path of a .py file"),
        (["no.py"], "sweep: no.py: expected"),
        (["kto.py", "seed"], "sweep: seed: expected --setting value"),
        (["kto.py", "--seed"], "sweep: --seed: expected --setting value"),
        (["kto.py", "--seed", "--lr", "1"], "sweep: --seed: expected"),
        (["kto.py", "--seed", "1", "2"], "sweep: 2: expected"),
        (["kto.py", "--seed", "1", "--seed=2"], "sweep: --seed: .*once"),
        (["kto.py", "--seed", "1,[2"], r"sweep: --seed: 1,\[2: unbalanced"),
        (["kto.py", "--out_dir", "x"], "sweep: --out_dir: leave it out"),
        (["kto.py", "--resume=auto"], "sweep: --resume: leave it out"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(place, argv, message):
    with pytest.raises(BadInput, match=message) as e:
        sweep.main(argv)
    assert "\n" not in str(e.value) and not Path("out").exists()


def test_the_command_ends_with_2_and_one_line(place):
    command = [sys.executable, str(HERE / "sweep.py"), "no.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 2
    assert done.stderr == "error: sweep: no.py: expected the path of a .py file\n"
