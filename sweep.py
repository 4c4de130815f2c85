"""A grid of runs, one after the other, and the report over them.

    python sweep.py kto.py --seed 1,2,3 --kto.beta 0.1,0.3 --optim.lr 1e-3

Values separated by commas make the grid. Put a value that has commas in double quotes:
--lora.targets '"q_proj,v_proj",all-linear' are two values. Each run has a folder in out/sweep-kto (another one:
--out_dir), with its output in log.txt. The same command again skips finished runs and continues the others. If the
program's files have changed since, the report does not mix the runs. To run them all again, delete the folder.
"""

import argparse
import csv
import shlex
import sys
from itertools import product
from pathlib import Path
from signal import SIGINT, SIGTERM, SIGUSR1, signal
from subprocess import Popen

import report
from infra.console import Failed, run_cli
from infra.parse import split_options
from infra.settings import LocalPath, refuse_unless

STOPS = SIGINT, SIGTERM, SIGUSR1  # after which a run has saved (devices.Stop)


def run_one(command: list[str], folder: Path) -> str:
    """Run a command, unless it has finished before. -> how it ended."""
    finished = f"finished: {shlex.join(command)}\n"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "a+") as log:
        log.seek(0)
        # A finished run is also started if its command has changed. The run then refuses the other settings.
        if finished in log.read():
            return "finished before"
        run = Popen(command, stdout=log, stderr=log)
        # A terminal sends Ctrl-C to the run, too. A scheduler's signals may reach only the sweep, so it passes them on:
        # the run saves and ends.
        signal(SIGINT, lambda *_: None)
        for number in STOPS[1:]:
            signal(number, lambda *_: run.terminate())
        code = run.wait()
        if code - 128 in STOPS or -code in STOPS:
            raise SystemExit("stopped; the same command continues")
        if code:
            log.seek(0)
            last_line = ["", *log][-1]
            return f"failed, code {code}: {last_line.strip()}"
        log.write(finished)
        return "finished"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("program", type=Path, help="kto.py, another program, or a copy of one")
    parser.add_argument(
        "--out_dir", type=LocalPath, help="the folder of all runs and of the report"
    )
    args, words = parser.parse_known_args(argv)
    out = Path(args.out_dir) if args.out_dir else Path("out", f"sweep-{args.program.stem}")
    grid = []
    for option in filter(None, split_options(words)):
        name, _, values = "=".join(option).partition("=")
        refuse_unless(len(option) < 3, f"{name}: expected values with commas, without blanks")
        grid.append([f"{name}={value}" for value in next(csv.reader([values])) or [""]])

    failed = []
    for settings in product(*grid):
        varied = [x[2:] for x, values in zip(settings, grid) if len(values) > 1]
        name = ",".join(varied).replace("/", "_") or "run"
        command = [sys.executable, str(args.program), *settings]
        print(name, end="  ", flush=True)
        how = run_one([*command, f"--out_dir={out / name}", "--resume=auto"], out / name)
        print(how)
        if how.startswith("failed"):
            failed.append(name)
    if runs := sorted(str(file.parent) for file in out.glob("*/settings.yaml")):
        report.main(runs)
    if failed:
        raise Failed(f"failed: {' '.join(failed)}")


if __name__ == "__main__":
    run_cli(main)
