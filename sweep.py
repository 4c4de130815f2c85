"""A grid of runs, one after the other, and the report over them.

    python sweep.py kto.py --seed 1,2,3 --kto.beta 0.1,0.3 --optim.lr 1e-3

Values separated by commas make a grid of runs, in out/sweep-kto (--name NAME:
out/sweep-NAME), with a report at the end. The same command again skips finished
runs and resumes killed ones.
"""

import re
import shlex
import sys
import time
from hashlib import sha256
from itertools import product
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, signal
from subprocess import DEVNULL, Popen
from typing import NamedTuple
from urllib.parse import quote

import yaml

import report
from runs.errors import BadInput, run_cli

# The log of a run has, for each attempt, the command and below it what the command printed.
# The command of an attempt:
#   $ /usr/bin/python -u kto.py --seed=1 --stop_at=10 --out_dir=out/sweep-kto/run --resume=auto
COMMAND_LINE = re.compile(r"^\$ .* --resume=auto$", re.MULTILINE)
# The step in such a command:
#   --stop_at=10
STOP_AT = re.compile(r" --stop_at=(\d+) ")
# What a run prints when stop_at, max_time or a signal ends it:
#   stopped by max_time at step 120 of 300, saved; go on with
STOPPED_LINE = re.compile(r"^stopped by \w+", re.MULTILINE)
# What a run prints when it fails:
#   error: data.train: ratings.jsonl: no such .jsonl, .json, .csv, .tsv or .parquet file
ERROR_LINE = re.compile(r"^error: (.*)", re.MULTILINE)


# ---- the grid -----------------------------------------------------------------------------------


def split_values(name: str, text: str) -> list[str]:
    """The values of a setting, split at commas. A comma in brackets or quotes is a part of its
    value: 1,"2,3",[4,5] are three values. Raises BadInput where brackets or quotes do not close."""
    try:
        nodes = yaml.compose(f"[{text}]").value
    except yaml.YAMLError:
        raise BadInput(f"sweep: {name}: {text}: unbalanced brackets or quotes") from None
    values = []
    for node in nodes:
        if isinstance(node.value, str):
            values.append(node.value)  # without its quotes
        else:  # a list or a dict, as it is written; - 1 for the bracket before the text
            values.append(text[node.start_mark.index - 1 : node.end_mark.index - 1])
    return values


def parse_grid(argv: list[str]) -> dict[str, list[str]]:
    """{"--setting": its values} of a command line of `--setting values` and `--setting=values`.
    Raises BadInput when a setting has no value, is given twice, or is the sweep's own."""
    words = []
    for word in argv:
        if word.startswith("--"):
            words += word.split("=", 1)
        else:
            words.append(word)
    if len(words) % 2:
        words.append("--")  # the last setting has no value; refused below
    grid = {}
    for name, text in zip(words[::2], words[1::2]):
        if not name.startswith("--") or text.startswith("--"):
            raise BadInput(f"sweep: {name}: expected --setting value")
        if name in ("--out_dir", "--resume"):
            raise BadInput(f"sweep: {name}: leave it out; the sweep sets it for each run")
        if name in grid:
            raise BadInput(f"sweep: {name}: give each setting once")
        grid[name] = split_values(name, text) if "," in text else [text]
    return grid


def run_name(settings: dict[str, str], grid: dict[str, list[str]]) -> str:
    """The name of a run's folder: the settings that vary in the grid, as seed=1,kto.beta=0.3."""
    varied = []
    for name, value in settings.items():
        if len(grid[name]) > 1:
            setting = name.removeprefix("--")
            varied.append(quote(f"{setting}={value}", safe="="))
    folder_name = ",".join(varied) or "run"
    if len(folder_name) > 200:  # file systems allow 255 bytes
        folder_name = folder_name[:99] + sha256(folder_name.encode()).hexdigest()
    return folder_name


# ---- one run ------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """How a run of the grid went."""

    text: str  # for the console
    interrupted: bool = False  # by Ctrl-C or a signal: the sweep ends
    failed: bool = False
    in_report: bool = True  # False where the folder holds a run with other settings


def skip_finished(command_line: str, log: str, folder: Path) -> Outcome | None:
    """The outcome of a run that need not start because it finished, or reached its stop_at, in an
    earlier sweep; None when it has to start.

    command_line: the command as the log would have it. log: the log of earlier attempts.
    """
    reason = None
    stop_at = STOP_AT.search(command_line)
    # A run that was stopped after its export may have no score of the test split.
    was_stopped = STOPPED_LINE.search(COMMAND_LINE.split(log)[-1])
    if (folder / "final").exists() and not was_stopped:
        reason = "finished"
    elif stop_at and (folder / "checkpoints" / f"step-{stop_at[1]:0>8}").exists():
        reason = "stopped by stop_at"
    if reason is None:
        return None

    attempts = COMMAND_LINE.findall(log)
    old = shlex.split(attempts[-1]) if attempts else []
    new = shlex.split(command_line)
    same_settings = sorted(old) == sorted(new)  # perhaps in another order
    # The run may have begun with this command (and --stop_at) and gone on with another one.
    was_an_attempt = f"{command_line}\n" in log
    if same_settings or was_an_attempt:
        return Outcome(f"skipped, {reason}")
    only_old = [word for word in old if word not in new]
    only_new = [word for word in new if word not in old]
    difference = " ".join([*only_old, "before,", *only_new, "now"])
    text = f"skipped, {reason} with other settings ({difference}): use another --name"
    return Outcome(text, in_report=False)


def run_one(command: list[str], folder: Path) -> Outcome:
    """Run a command as a child process, unless its run is finished, with its output in FOLDER.log.

    A signal to the sweep, as from Ctrl-C, goes to the child, which saves and ends. Raises BadInput
    when the command is wrong (exit code 2): the other runs of the grid would have the same mistake.
    """
    began = time.monotonic()
    command_line = f"$ {shlex.join(command)}"
    log_file = f"{folder}.log"
    with open(log_file, "a+", errors="replace") as log:
        log.seek(0)
        skipped = skip_finished(command_line, log.read(), folder)
        if skipped:
            return skipped
        log.write(f"{command_line}\n")
        log.flush()
        output_begins = log.tell()
        # In a session of its own: a terminal sends Ctrl-C to the sweep only, which passes it on.
        child = Popen(command, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True)
        signals = []

        def pass_on(number, frame):
            child.send_signal(SIGINT)
            signals.append(number)

        before = {number: signal(number, pass_on) for number in (SIGINT, SIGTERM, SIGHUP)}
        code = child.wait()
        for number, handler in before.items():  # between two runs Ctrl-C ends the sweep
            signal(number, handler)
        log.seek(output_begins)
        output = log.read()

    took = f"{time.monotonic() - began:.0f} s"
    if signals:
        return Outcome(f"stopped after {took}", interrupted=True)
    stopped = STOPPED_LINE.search(output)  # by the run's own settings stop_at or max_time
    if code == 0 and stopped:
        return Outcome(f"{stopped[0]} after {took}")
    if code == 0 and (folder / "final").exists():
        return Outcome(f"finished after {took}")
    errors = ERROR_LINE.findall(output)[-3:]
    if code == 2:
        raise BadInput("\n".join(errors) or f"see {log_file}")
    lines = [f"failed after {took}, code {code}, see {log_file}", *errors]
    return Outcome("\n  error: ".join(lines), failed=True)


# ---- all runs -----------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Run the grid of a command line (default: sys.argv), then the report over its runs. Raises
    BadInput for a wrong command, SystemExit with a message when a run failed or was interrupted."""
    if argv is None:
        argv = sys.argv[1:]
    if "-h" in argv or "--help" in argv:
        print(__doc__.strip())
        return
    program = argv[0] if argv else "program"
    if not program.endswith(".py") or not Path(program).is_file():
        raise BadInput(f"sweep: {program}: expected the path of a .py file")
    grid = parse_grid(argv[1:])
    sweep_name = ",".join(grid.pop("--name", [Path(program).stem]))
    out = Path("out", "sweep-" + quote(sweep_name, safe=""))
    out.mkdir(parents=True, exist_ok=True)

    failed = []  # names of runs
    reported = []  # run folders
    combinations = list(product(*grid.values()))
    for k, values in enumerate(combinations, start=1):
        settings = dict(zip(grid, values))
        name = run_name(settings, grid)
        folder = out / name
        arguments = [f"{setting}={value}" for setting, value in settings.items()]
        arguments += [f"--out_dir={folder}", "--resume=auto"]
        print(f"{k}/{len(combinations)}  {name}", end="  ", flush=True)
        outcome = run_one([sys.executable, "-u", program, *arguments], folder)
        print(outcome.text)
        if outcome.interrupted:
            raise SystemExit(f"go on with\n  python {shlex.join(sys.argv)}")
        if outcome.failed:
            failed.append(name)
        if outcome.in_report and (folder / "metrics.csv").exists():
            reported.append(str(folder))
    if reported:
        report.main([*reported, "--out", f"{out}/report.html"], skip=True)
    if failed:
        raise SystemExit(f"failed: {' '.join(failed)}")


if __name__ == "__main__":
    run_cli(main)
