"""A grid of runs, one after the other, and the report over them.

    python sweep.py kto.py --seed 1,2,3 --kto.beta 0.1,0.3 --optim.lr 1e-3

Values by commas make a grid of runs in out/sweep-kto (or --name), and a report
at the end. The same again skips finished runs and resumes killed ones.
"""

import re
import shlex
import sys
import time
from hashlib import sha256
from itertools import product, zip_longest
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, signal
from subprocess import DEVNULL, Popen
from urllib.parse import quote

import yaml

import report
from runs.errors import BadInput, run_cli


def split_values(name: str, text: str) -> list[str]:
    """Commas in brackets and quotes are part of a value: 1,"2,3",[4,5] are three."""
    try:
        nodes = yaml.compose(f"[{text}]").value
    except yaml.YAMLError:
        raise BadInput(f"sweep: {name}: {text}: unbalanced brackets or quotes") from None
    cut = [text[n.start_mark.index - 1 : n.end_mark.index - 1] for n in nodes]
    return [n.value if isinstance(n.value, str) else c for n, c in zip(nodes, cut)]


def parse_grid(argv: list[str]) -> dict[str, list[str]]:
    grid = {"--out_dir": [], "--resume": []}  # these the sweep gives
    words = [w for x in argv for w in (x.split("=", 1) if x[:2] == "--" else [x])]
    for name, text in zip_longest(words[::2], words[1::2], fillvalue="--"):
        if name[:2] != "--" or text[:2] == "--" or name in grid:
            raise BadInput(f"sweep: {name}: expected --setting value, each once")
        grid[name] = split_values(name, text) if "," in text else [text]
    return {name: grid[name] for name in grid if grid[name]}


def skipped(told: str, log: str, folder: Path) -> str:
    """-> why a run need not start, if so"""
    stop = re.search(r" --stop_at=(\d+) ", told)
    there = stop and (folder / f"checkpoints/step-{stop[1]:0>8}").exists()
    why = "stopped by stop_at" if there else ""
    why = "finished" if (folder / "final").exists() else why
    last = re.findall(r"^\$ .* --resume=auto$", log, re.M)[-1:]
    was, now = (shlex.split(" ".join(x)) for x in (last, [told]))
    if not why or sorted(was) == sorted(now) or told in log:
        return why and f"skipped, {why}"
    words = [*was, "before,", *now, "now"]
    differ = " ".join(x for x in words if words.count(x) == 1)
    other = f"with other settings ({differ})"
    return f"skipped, {why} {other}: use another --name"


def run_one(command: list[str], folder: Path) -> str:
    """-> how it went. Ctrl-C goes to the run, which saves and ends."""
    began, told, stops = time.monotonic(), f"$ {shlex.join(command)}\n", []
    with open(f"{folder}.log", "a+", errors="replace") as log:
        if why := skipped(told, log.seek(0) or log.read(), folder):
            return why
        start = log.write(told) and log.tell()
        child = Popen(command, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True)
        for number in (SIGINT, SIGTERM, SIGHUP):
            signal(number, lambda *_: stops.append(child.send_signal(SIGINT)))
        code, took = child.wait(), f"{time.monotonic() - began:.0f} s"
        said = log.seek(start) and log.read()
    own = re.search(r"^stopped by \w+", said, re.M)
    if stops or (code == 0 and (own or (folder / "final").exists())):
        return f"{'stopped' if stops else own[0] if own else 'finished'} after {took}"
    errors = re.findall(r"^error: (.*)", said, re.M)[-3:]
    if code == 2:
        raise BadInput("\n".join(errors) or f"see {log.name}")
    return "\n  error: ".join([f"failed after {took}, code {code}, see {log.name}", *errors])


def main(argv: list[str] | None = None) -> None:
    program, *rest = (sys.argv[1:] if argv is None else argv) or ["program"]
    if {"-h", "--help"} & {program, *rest}:
        return print(__doc__.strip())
    if not program.endswith(".py") or not Path(program).is_file():
        raise BadInput(f"sweep: {program}: expected the path of a .py file")
    grid, failed, tables = parse_grid(rest), [], []
    out = Path("out", "sweep-" + quote(",".join(grid.pop("--name", [Path(program).stem])), ""))
    out.mkdir(parents=True, exist_ok=True)
    combos = [dict(zip(grid, combo)) for combo in product(*grid.values())]
    for k, combo in enumerate(combos, 1):
        varied = [quote(f"{n[2:]}={v}", "=") for n, v in combo.items() if len(grid[n]) > 1]
        name = ",".join(varied) or "run"
        if len(name) > 200:  # of 255 bytes
            name = name[:99] + sha256(name.encode()).hexdigest()
        command = [sys.executable, "-u", program, *map("=".join, combo.items())]
        print(f"{k}/{len(combos)}  {name}", end="  ", flush=True)
        print(how := run_one([*command, f"--out_dir={out / name}", "--resume=auto"], out / name))
        if how.startswith("stopped after"):
            raise SystemExit(f"go on with\n  python {shlex.join(sys.argv)}")
        failed += [name] if how.startswith("failed") else []
        tables += [] if "other settings" in how else (out / name).glob("metrics.csv")
    if tables:
        runs = [str(file.parent) for file in tables]
        report.main([*runs, "--out", f"{out}/report.html"], skip=True)
    if failed:
        raise SystemExit(f"failed: {' '.join(failed)}")


if __name__ == "__main__":
    run_cli(main)
