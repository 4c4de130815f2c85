"""sweep.py over kto.py, and over a small program where one has to fail or wait."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import refused

import sweep
from infra.console import Failed

HERE = Path(sweep.__file__).parent
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
# Finishes at once, but for --kto.beta=0.3: while a file `how` is there, it does what that says.
PROGRAM = """
import signal, sys, time
from pathlib import Path

given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
out = Path(given["out_dir"])
lines = ["# mine.py, commit 1", *(f"{name}: {value}" for name, value in given.items()), ""]
(out / "settings.yaml").write_text("\\n".join(lines))
for name in ("metrics.csv", "val.csv"):
    (out / name).write_text("step,loss\\n1,0.5\\n")
if given["kto.beta"] == "0.3" and Path("how").exists():
    if Path("how").read_text() == "fail":
        sys.exit("loading\\nerror: no luck")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print("waiting", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("saved")
        sys.exit(130)
(out / "final").mkdir()
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PROGRAM)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


GRID = ["mine.py", "--kto.beta", "0.1,0.3", '--lora.targets="q,k",v', "--seed", "1"]


def test_every_combination_runs_and_a_failed_one_goes_on_with_the_same_command(capsys):
    Path("how").write_text("fail")
    with pytest.raises(Failed, match="^failed: kto.beta=0.3,lora.targets=q,k kto.beta=0.3,lora"):
        sweep.main(GRID)
    printed = capsys.readouterr().out.splitlines()
    runs = [f"kto.beta={beta},lora.targets={x}" for beta in (0.1, 0.3) for x in ("q,k", "v")]
    ends = ["finished"] * 2 + ["failed, code 1: error: no luck"] * 2
    assert printed[:4] == [f"{run}  {end}" for run, end in zip(runs, ends)]
    assert "2: ended=step-1, kto.beta=0.3, lora.targets=q,k (n=1)" in printed, "the report has it"
    assert (
        "lora.targets: q,k\nseed: 1\n"
        in Path(f"out/sweep-mine/{runs[0]}/settings.yaml").read_text()
    )
    Path("how").unlink()
    sweep.main([*GRID, "--out_dir", "out/sweep-mine"])
    printed = capsys.readouterr().out.splitlines()
    ends = ["finished before"] * 2 + ["finished"] * 2
    assert printed[:4] == [f"{run}  {end}" for run, end in zip(runs, ends)]


def test_a_wrong_command_is_refused_before_the_first_run():
    said = "^--seed: expected values with commas, without blanks"
    refused(said, sweep.main, [*GRID, "--seed", "1,", "2"])
    assert not Path("out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_lets_the_run_save_and_ends_the_sweep(number):
    Path("how").write_text("wait")
    command = [sys.executable, str(HERE / "sweep.py"), *GRID]
    log = Path("out/sweep-mine/kto.beta=0.3,lora.targets=q,k/log.txt")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not log.exists() or "waiting" not in log.read_text():
        time.sleep(0.05)
        assert process.poll() is None
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)  # the sweep alone, as a scheduler may
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, "stopped; the same command continues\n")
    assert log.read_text() == "waiting\nsaved\n" and len(os.listdir("out/sweep-mine")) == 3
