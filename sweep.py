"""A grid of runs, one after the other, and the report over them.

    python sweep.py kto.py --seed 1,2,3 --kto.beta 0.1,0.3 --optim.lr 1e-3

Runs go to out/sweep-kto (or --name). The same command again does what is left.
"""

from support.errors import BadInput, run_cli  # noqa: I001  first: for Ctrl-C
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


def values(name: str, text: str) -> list[str]:
    """Commas in brackets and quotes are part of a value: 1,"2,3",[4,5] are three."""
    try:
        nodes = yaml.compose(f"[{text}]").value
    except yaml.YAMLError:
        raise BadInput(f"sweep: {name}: {text}: unbalanced brackets or quotes") from None
    cut = [text[n.start_mark.index - 1 : n.end_mark.index - 1] for n in nodes]
    return [n.value if isinstance(n.value, str) else c for n, c in zip(nodes, cut)]


def parse(argv: list[str]) -> dict[str, list[str]]:
    grid = {"--out_dir": [], "--resume": []}  # these the sweep gives
    words = [w for x in argv for w in (x.split("=", 1) if x[:2] == "--" else [x])]
    for name, text in zip_longest(words[::2], words[1::2], fillvalue="--"):
        if name[:2] != "--" or text[:2] == "--" or name in grid:
            raise BadInput(f"sweep: {name}: expected --setting value, each once")
        grid[name] = values(name, text) if "," in text else [text]
    return {name: grid[name] for name in grid if grid[name]}


def run(command: list[str], folder: Path) -> str:
    """-> how it went. Ctrl-C goes to the run, which saves and ends."""
    began, told, stops = time.monotonic(), f"$ {shlex.join(command)}\n", []
    with open(f"{folder}.log", "a+", errors="replace") as log:
        if (folder / "final").exists():
            log.seek(0)
            return "skipped, finished" + ("" if told in log else " with other settings")
        start = log.write(told) and log.tell()
        child = Popen(command, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True)
        for number in (SIGINT, SIGTERM, SIGHUP):
            signal(number, lambda *_: stops.append(child.send_signal(SIGINT)))
        code, took = child.wait(), f"{time.monotonic() - began:.0f} s"
        if stops or (code == 0 and (folder / "final").exists()):
            return f"{'stopped' if stops else 'finished'} after {took}"
        log.seek(start)
        errors = [f"\n  {line.strip()}" for line in log if line.startswith("error: ")]
        return f"failed after {took}, code {code}, see {log.name}" + "".join(errors[-3:])


def main(argv: list[str] | None = None) -> None:
    program, *rest = (sys.argv[1:] if argv is None else argv) or ["program"]
    if not program.endswith(".py") or not Path(program).is_file():
        raise BadInput(f"sweep: {program}: expected the path of a .py file")
    grid, failed = parse(rest), []
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
        print(how := run([*command, f"--out_dir={out / name}", "--resume=auto"], out / name))
        if how.startswith("stopped"):
            raise SystemExit(f"go on with\n  python {shlex.join(sys.argv)}")
        failed += [name] if how.startswith("failed") else []
    tables = sorted(out.glob("*/metrics.csv"))
    if tables:
        folders = [str(path.parent) for path in tables]
        report.main([*folders, "--out", f"{out}/report.html"], skip=True)
    if failed:
        raise SystemExit(f"failed: {' '.join(failed)}")


if __name__ == "__main__":
    run_cli(main)
