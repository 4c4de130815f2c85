"""What the tests share: a tiny model folder, and real ranks by fork."""

import atexit
import functools
import gc
import io
import json
import os
import runpy
import shutil
import signal
import socket
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from unittest import mock

if "gpu" not in sys.argv:  # -m gpu: all other tests are of the CPU, and fork
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as programs set it before they import torch

import docstring_parser  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# for what the tests start: two cores with two threads each would wait in turns
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# half of reading settings is reading the sentences under their fields again, the same each time
docstring_parser.parse_from_object = functools.cache(docstring_parser.parse_from_object)
ROOT = Path(__file__).parent.parent
PARITY = Path(__file__).parent / "parity"


def pytest_itemcollected(item):
    for mark in item.iter_markers("survive"):
        item.user_properties.append(("row", mark.args[0]))


def pytest_terminal_summary(terminalreporter, config):
    """The scoreboard of `python -m pytest -m survive`: what a run survives, by row. The table of
    `python -m pytest -m gpu`: what was measured."""
    if config.option.markexpr == "gpu":
        for outcome in ("passed", "failed", "error"):
            for report in terminalreporter.getreports(outcome):
                told = "; ".join(text for _, text in report.user_properties)
                name = report.nodeid.split("::test_")[-1]
                terminalreporter.write_line(
                    f"{outcome:<6} {report.duration:5.1f} s  {name}  {told}"
                )
    if config.option.markexpr != "survive":
        return
    rows = {f"R{i}": [] for i in range(1, 20)}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.getreports(outcome):
            for _, row in report.user_properties:
                rows[row].append(outcome == "passed")
    for row, passed in rows.items():
        terminalreporter.write_line(f"{row:<4} {sum(passed)}/{len(passed)}")


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """What is imported lives as long as the process: a collection, which a run ends with, need not
    look through it, nor copy its pages in a forked child."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A Hugging Face folder: GPT-2, 2 layers x 32, vocabulary 512, context 128, EOS 0, no BOS."""
    folder = tmp_path_factory.mktemp("tiny")
    for source in (PARITY / "policy", PARITY / "tokenizer"):
        shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A clone as a user has it, by links; of the demo's data the first few records."""
    folder = tmp_path_factory.mktemp("clone")
    names = ("runs", "hub", "records", "config", "examples")
    for path in [*ROOT.glob("*.py"), *(ROOT / name for name in names)]:
        (folder / path.name).symlink_to(path)
    (folder / "demo").mkdir()
    for path in (ROOT / "demo").iterdir():
        if path.suffix == ".jsonl":
            few = path.read_text().splitlines(keepends=True)[: 40 if "val" in path.name else 400]
            (folder / "demo" / path.name).write_text("".join(few))
        else:
            (folder / "demo" / path.name).symlink_to(path)
    return folder


@pytest.fixture(autouse=True)
def default_dtype():
    """Put back what a run in float64 changes in this process."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


def ranks(n: int, work):
    """work(rank) in n forked processes that can talk (gloo); their results in order. An error in
    one fails the test."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pipes, pids = [], []
    for rank in range(n):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.environ |= dict(LOCAL_RANK=str(rank), RANK=str(rank), NODE_RANK="0", GROUP_RANK="0")
            os.environ |= dict(WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
            os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ["TORCHELASTIC_RUN_ID"] = "test"
            torch.set_num_threads(1)
            try:
                out = ("ok", work(rank))
            except BaseException:
                out = ("error", traceback.format_exc())
            with os.fdopen(write, "wb") as f:
                torch.save(out, f)
            os._exit(0)
        os.close(write)
        pipes.append(read)
        pids.append(pid)
    results = []
    for read, pid in zip(pipes, pids):
        with os.fdopen(read, "rb") as f:
            blob = f.read()
        os.waitpid(pid, 0)
        died = ("error", "died")
        results.append(torch.load(io.BytesIO(blob), weights_only=True) if blob else died)
    errors = [f"rank {i}: {value}" for i, (status, value) in enumerate(results) if status != "ok"]
    assert not errors, "\n".join(errors)
    return [value for _, value in results]


@pytest.fixture(scope="session")
def ratings(tmp_path_factory) -> Path:
    """24 rated examples: 8 ratings, and 8 pairs whose ratings share a prompt. 12 of 24 are up."""
    rated = (PARITY / "kto_data.jsonl").read_text().splitlines()
    pairs = (PARITY / "dpo_data.jsonl").read_text().splitlines()
    file = tmp_path_factory.mktemp("data") / "ratings.jsonl"
    file.write_text("\n".join(rated + pairs) + "\n")
    return file


@pytest.fixture(scope="session")
def pairs() -> Path:
    """8 pairs."""
    return PARITY / "dpo_data.jsonl"


@pytest.fixture(scope="session")
def demos(tmp_path_factory) -> Path:
    """8 demonstrations."""
    records = map(json.loads, (PARITY / "kto_data.jsonl").read_text().splitlines())
    records = [{k: r[k] for k in ("prompt", "completion")} for r in records]
    file = tmp_path_factory.mktemp("demos") / "demos.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


def checkpoint_tensors(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """A checkpoint's weights or optimizer state."""
    from runs.shards import open_shards

    return dict(open_shards(folder, kind))


def first_shard(folder: Path) -> Path:
    """A checkpoint's file of weights."""
    return sorted(folder.glob("shard-*.safetensors"))[0]


def start(program: str, argv: list[str]) -> None:
    """A program's main in this process, as if it had been started."""
    module = import_module(program)
    with mock.patch.object(sys, "argv", [module.__file__, *argv]):
        module.main(argv)


class Started:
    """A program in a process of its own (forked: its imports are done), or one of several ranks."""

    def __init__(self, folder: Path, program: str, argv, stdout=None, first=None, **env):
        from runs import errors

        self.files = [folder / f"{name}-{env.get('RANK', 0)}" for name in ("stdout", "stderr")]
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            atexit._clear()  # the parent's hooks; the run's own are run below
            try:
                os.environ |= env
                self._redirect(stdout, env.pop("PYTHONIOENCODING", "utf-8"))
                if first:
                    first()
                if program.endswith(".py"):  # as typed
                    sys.argv = [program, *map(str, argv)]
                    runpy.run_path(program, run_name="__main__")
                else:
                    module = import_module(program)
                    sys.argv = [module.__file__, *map(str, argv)]
                    errors.run_cli(module.main)
                code = 0
            except SystemExit as e:
                code = e.code or 0
            finally:
                atexit._run_exitfuncs()
                sys.stdout.flush()
                os._exit(code if isinstance(code, int) else 1)

    def _redirect(self, stdout, encoding):
        for fd, name, path in ((1, "stdout", self.files[0]), (2, "stderr", self.files[1])):
            own = stdout is None or fd == 2
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) if own else stdout, fd)
            stream = io.TextIOWrapper(open(fd, "wb", closefd=False), encoding)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)

    def ended(self, within: float = 60) -> tuple[int, str, str]:
        """-> exit code (negative: by that signal), stdout, stderr"""
        deadline = time.monotonic() + within
        while not (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"still alive after {within} s")
            time.sleep(0.01)
        texts = [p.read_text(errors="replace") if p.exists() else "" for p in self.files]
        return os.waitstatus_to_exitcode(done[1]), *texts

    def signal(self, number) -> None:
        os.kill(self.pid, number)


def until(condition, within: float = 60) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def train(tiny, data, out: Path, *argv: str, program: str = "kto") -> dict:
    """A run of kto.py (dpo.py) in this process. -> its rows, and its final weights."""
    given = [f"--model={tiny}", f"--data.train={data}", f"--out_dir={out}", "--progress=false"]
    start(program, [*given, *argv])
    return result(out)


def result(out: Path) -> dict:
    """A run's rows, and its final weights."""
    import csv

    from safetensors.torch import load_file

    with open(out / "metrics.csv") as f:
        rows = [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(f)]
    final = out / "final" / "model.safetensors"
    return {"rows": rows, "weights": load_file(final) if final.exists() else None}


CLOCKS = {"tokens/s", "seconds", "memory_gb", "tflops/s", "mfu"}


def numbers(run: dict) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in CLOCKS} for row in run["rows"]]


def assert_same(a: dict, b: dict):
    assert numbers(a) == numbers(b)
    assert a["weights"].keys() == b["weights"].keys()
    assert all(torch.equal(x, b["weights"][n]) for n, x in a["weights"].items())


def killed(n: int, out: Path, name: str, lines: int, work) -> None:
    """work(rank) on n forked ranks, killed with SIGKILL as soon as the file `name` of the run `out`
    has so many lines. On a busy machine we may look too late, when it has ended: then once more."""
    before = out.with_name(f"{out.name}-before")
    if out.exists():
        shutil.copytree(out, before)
    for _ in range(5):
        parent = os.fork()
        if parent == 0:
            os.setpgrp()
            try:
                ranks(n, work)
            finally:
                os._exit(0)
        file, deadline = out / name, time.monotonic() + 120
        while not (file.exists() and file.read_text().count("\n") >= lines):
            assert time.monotonic() < deadline
            if os.waitpid(parent, os.WNOHANG)[0]:
                parent = 0
                break
            time.sleep(0.002)
        if parent:
            os.killpg(parent, signal.SIGKILL)
            os.waitpid(parent, 0)
        if not (out / "final").exists():
            shutil.rmtree(before, ignore_errors=True)
            return
        shutil.rmtree(out)
        if before.exists():
            shutil.copytree(before, out)
    raise AssertionError("killed too late, five times")


def killed_and_resumed(n: int, out: Path, moments, work) -> dict:
    """work(rank, "--resume=auto"), killed at each (file, lines) and gone on with. -> rank 0's."""
    for name, lines in moments:
        killed(n, out, name, lines, lambda rank: work(rank, "--resume=auto"))
    return ranks(n, lambda rank: work(rank, "--resume=auto"))[0]
