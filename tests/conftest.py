"""What the tests share: a tiny model folder, small data files, forked ranks, and programs in processes of their own."""

import atexit
import functools
import gc
import io
import json
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from unittest import mock

# Only the tests of -n 0 -m gpu use a GPU. All others fork, and a process that has used CUDA cannot fork.
if "gpu" not in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# --deterministic needs it. torch looks at it once in a process, at the first product on a GPU: a run in its own process
# sets it in time, but not one that comes after other tests.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as programs set it before they import torch

import docstring_parser  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# One thread for each process that the tests start: more threads than cores would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# The sentences under the fields of settings are the same each time: parsing them again takes half of reading settings.
docstring_parser.parse_from_object = functools.cache(docstring_parser.parse_from_object)
ROOT = Path(__file__).parent.parent
PARITY = Path(__file__).parent / "parity"


def pytest_itemcollected(item):
    for mark in item.iter_markers("survive"):
        item.user_properties.append(("row", mark.args[0]))


def pytest_terminal_summary(terminalreporter, config):
    """Print how many tests passed for each row of `python -m pytest -m survive` (R1, R2, ...: what a run survives), or
    what the tests of `python -m pytest -n 0 -m gpu` measured."""
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
    rows = defaultdict(list)
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.getreports(outcome):
            for _, row in report.user_properties:
                rows[row].append(outcome == "passed")
    for row, passed in sorted(rows.items(), key=lambda item: int(item[0][1:])):
        terminalreporter.write_line(f"{row:<4} {sum(passed)}/{len(passed)}")


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Take imported objects out of the garbage collection, for they live as long as the process. A run ends with a
    collection: in a forked process it would copy every page that it looks at."""
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
    """A copy of the repository as a user has it, made of links; the files of the demo's data have the first few records
    only."""
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
    """Restore torch's default dtype: a run in float64 changes it in this process."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


def ranks(n: int, work):
    """Call work(rank) in n forked processes that form a process group (gloo). -> their results, by rank. An error in
    one of them fails the test."""
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
    """A file of 24 rated examples: 8 ratings, and 8 pairs, which are two ratings of one prompt each. 12 of the 24 are
    desirable."""
    rated = (PARITY / "kto_data.jsonl").read_text().splitlines()
    pairs = (PARITY / "dpo_data.jsonl").read_text().splitlines()
    file = tmp_path_factory.mktemp("data") / "ratings.jsonl"
    file.write_text("\n".join(rated + pairs) + "\n")
    return file


@pytest.fixture(scope="session")
def pairs() -> Path:
    """A file of 8 pairs."""
    return PARITY / "dpo_data.jsonl"


@pytest.fixture(scope="session")
def demos(tmp_path_factory) -> Path:
    """A file of 8 demonstrations."""
    records = map(json.loads, (PARITY / "kto_data.jsonl").read_text().splitlines())
    records = [{k: r[k] for k in ("prompt", "completion")} for r in records]
    file = tmp_path_factory.mktemp("demos") / "demos.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


def checkpoint_tensors(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, by name. kind: weights or optimizer (see runs/shards.py)."""
    from runs.shards import open_shards

    return dict(open_shards(folder, kind))


def first_shard(folder: Path) -> Path:
    """The first of a checkpoint's files of weights and optimizer state."""
    return sorted(folder.glob("shard-*.safetensors"))[0]


def last_of_each(argv) -> list[str]:
    """Of --name=value given several times the last one: a program would refuse two values. So a test adds to a list of
    arguments what it wants otherwise."""
    words = {}
    for i, word in enumerate(map(str, argv)):
        words[word.split("=")[0] if re.match("--.*=", word) else i] = word
    return list(words.values())


def start(program: str, argv: list[str], **given) -> None:
    """Call a program's main in this process, with sys.argv as from a command line. given: what a fork hands over."""
    module, argv = import_module(program), last_of_each(argv)
    with mock.patch.object(sys, "argv", [module.__file__, *argv]):
        module.main(argv, **given)


class Started:
    """A program, or one rank of it, in a process of its own. It is forked, so that it need not import anything again.

    program: the name of a module with main(), or the path of a .py file, which is run as a script. stdout: a file
    descriptor in place of a file in `folder`. first: called in the process before the program. env: environment
    variables."""

    def __init__(self, folder: Path, program: str, argv, stdout=None, first=None, **env):
        from runs import errors

        argv = last_of_each(argv)
        self.files = [folder / f"{name}-{env.get('RANK', 0)}" for name in ("stdout", "stderr")]
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            atexit._clear()  # the hooks of the parent; those of the program run below
            try:
                os.environ |= env
                self._redirect(stdout, env.pop("PYTHONIOENCODING", "utf-8"))
                if first:
                    first()
                if program.endswith(".py"):  # as a user types it
                    sys.argv = [program, *argv]
                    runpy.run_path(program, run_name="__main__")
                else:
                    module = import_module(program)
                    sys.argv = [module.__file__, *argv]
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
        """Wait for the end, at most `within` seconds. -> exit code (minus the number of the signal that ended it),
        stdout, stderr"""
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
    """Wait until condition() is true, at most `within` seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def train(tiny, data, out: Path, *argv: str, program: str = "kto", **handed) -> dict:
    """Run a program in this process, its main with what a fork hands over. -> see result()"""
    given = [f"--model={tiny}", f"--data.train={data}", f"--out_dir={out}", "--progress=false"]
    start(program, [*given, *argv], **handed)
    return result(out)


def result(out: Path) -> dict:
    """A run's rows of metrics.csv, {"rows": ...}, and its exported weights, {"weights": ... or None}."""
    import csv

    from safetensors.torch import load_file

    with open(out / "metrics.csv") as f:
        rows = [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(f)]
    final = out / "final" / "model.safetensors"
    return {"rows": rows, "weights": load_file(final) if final.exists() else None}


# columns of metrics.csv that depend on the machine
CLOCKS = {"tokens/s", "seconds", "memory_gb", "tflops/s", "mfu"}


def numbers(run: dict) -> list[dict]:
    """The rows of a run (see result) without CLOCKS."""
    return [{k: v for k, v in row.items() if k not in CLOCKS} for row in run["rows"]]


def assert_same(a: dict, b: dict):
    """Two runs (see result) have equal numbers and, to the bit, equal weights."""
    assert numbers(a) == numbers(b)
    assert a["weights"].keys() == b["weights"].keys()
    assert all(torch.equal(x, b["weights"][n]) for n, x in a["weights"].items())


def killed(n: int, out: Path, name: str, lines: int, work) -> None:
    """Call work(rank) on n forked ranks and kill them with SIGKILL as soon as the file `name` of the run `out` has this
    many lines. On a busy machine the run may have ended before it is killed: then it is restored and run again."""
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
    """Call work(rank, "--resume=auto") on n ranks; kill it at each of the moments (file name, lines) and resume it. ->
    the result of rank 0"""
    for name, lines in moments:
        killed(n, out, name, lines, lambda rank: work(rank, "--resume=auto"))
    return ranks(n, lambda rank: work(rank, "--resume=auto"))[0]
