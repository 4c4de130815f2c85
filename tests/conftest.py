"""What the tests share: a tiny model folder, small data files, forked ranks, and programs in processes of their own."""

import atexit
import contextlib
import csv
import functools
import gc
import io
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
os.environ["HF_HUB_OFFLINE"] = "1"

import docstring_parser  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

import infra.program  # noqa: E402

# One thread for each process that the tests start: more threads than cores would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# The sentences under the fields of settings are the same each time: parsing them again takes half of reading settings.
docstring_parser.parse_from_object = functools.cache(docstring_parser.parse_from_object)
# A run parses the files of its program, which are the same, too.
imported_names = infra.program.imported_names
names_in = functools.cache(lambda file, content: list(imported_names(file)))
infra.program.imported_names = lambda file: names_in(file, file.read_bytes())
# It asks for the same file, and does not wait for the disk: no test pulls the plug.
os.fsync = os.fstat
ROOT = Path(__file__).parent.parent
PARITY = Path(__file__).parent / "parity"


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Take imported objects out of the garbage collection, for they live as long as the process. A run ends with a
    collection: in a forked process it would copy every page that it looks at."""
    gc.collect()
    gc.freeze()


def recorded_model(tmp_path_factory, name: str) -> Path:
    """A folder with a model of parity/ and its tokenizer."""
    folder = shutil.copytree(PARITY / name, tmp_path_factory.mktemp(name) / name)
    return shutil.copytree(PARITY / "tokenizer", folder, dirs_exist_ok=True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A Hugging Face folder: GPT-2, 2 layers x 32, vocabulary 512, context 128, EOS 0, no BOS."""
    return recorded_model(tmp_path_factory, "policy")


@pytest.fixture(scope="session")
def chatty(tiny, tmp_path_factory) -> Path:
    """The same with a chat template."""
    folder = shutil.copytree(tiny, tmp_path_factory.mktemp("chatty") / "model")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def parity_ref(tmp_path_factory) -> Path:
    """The model that `tiny` was made of by a little noise; the same tokenizer."""
    return recorded_model(tmp_path_factory, "ref")


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    """A Hugging Face folder: Llama, 2 layers x 64, grouped heads, widths that nf4 takes, the tokenizer of tiny."""
    import transformers
    from tiny_models import made

    folder = tmp_path_factory.mktemp("llama")
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=128, vocab_size=512)
    made(transformers.LlamaConfig(**sizes), folder)
    return folder


class FakeJudge(BaseHTTPRequestHandler):
    """An OpenAI-compatible server: YES to a question of even length, NO to another one. `faults`, of the server, are
    given first, in place of replies: (status, headers, body)."""

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (message,) = body["messages"]
        server.asked.append((dict(self.headers), body))
        verdict = "YES" if len(message["content"]) % 2 == 0 else "NO"
        status, headers, text = 200, {}, server.reply_of(message["content"], verdict)
        reply = json.dumps({"choices": [{"message": {"content": text}}]})
        if server.faults:
            status, headers, reply = server.faults.pop(0)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def judge_server():
    """A FakeJudge that runs: what it was `asked`; `faults`; reply_of(question, verdict)."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeJudge)
    server.asked, server.faults = [], []
    server.reply_of = lambda question, verdict: f"Let me see.\n{verdict}."
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def reward_folder(tmp_path_factory) -> Path:
    """A reward model: a tiny Llama with one score, the tokenizer of tiny, and a chat template."""
    import transformers

    folder = tmp_path_factory.mktemp("reward")
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(max_position_embeddings=256, vocab_size=512, num_labels=1, pad_token_id=0)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**sizes)
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(PARITY / "tokenizer")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the repository as a user has it, made of links; the files of the demo's data have the first few records
    only."""
    folder = tmp_path_factory.mktemp("clone")
    names = ("infra", "models", "records", "config", "examples")
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
    one of them fails the test; one that waits for another, which has failed, is killed after ten minutes."""
    pipes, pids = [], []
    for rank, env in enumerate(environments_of_ranks(n)):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.environ |= env
            torch.set_num_threads(1)
            signal.alarm(600)
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
    ratings = (PARITY / "kto_data.jsonl").read_text()
    file = tmp_path_factory.mktemp("demos") / "demos.jsonl"
    file.write_text(re.sub(', "label": (true|false)', "", ratings))
    return file


def even(answers) -> list[bool]:
    """A checker that finds about half of a tiny model's answers right."""
    return [len(a.completion) % 2 == 0 for a in answers]


def checkpoint_tensors(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of one process, by name. kind: weights, reference or a moment of the
    optimizer (exp_avg)."""
    from safetensors.torch import load_file

    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {n.partition("|")[2]: x for n, x in tensors.items() if n.startswith(f"{kind}|")}


def start(program: str, argv: list[str], **given) -> None:
    """Call a program's main in this process, with sys.argv as from a command line. given: what a fork hands over."""
    module, argv = import_module(program), [str(x) for x in argv]
    with mock.patch.object(sys, "argv", [module.__file__, *argv]):
        module.main(argv, **given)


def make_thread_pool() -> None:
    """After a fork torch makes its thread pool anew, at the next call that asks for threads. Where two threads ask at
    once, as those of transformers that read weights, one finds none: "Invalid thread pool"."""
    torch.set_num_threads(torch.get_num_threads())


@functools.cache
def prepare_forks() -> None:
    """Once, before all forks: what the programs import, and the names in their files."""
    for name in ("kto", "spin", "online"):
        infra.program.program_hash(Path(import_module(name).__file__))


class Started:
    """A program in a process of its own. It is forked, so that it need not import anything again.

    program: the name of a module with main(), or the path of a .py file, which is run as a script. first: called in
    the process before the program. env: environment variables."""

    def __init__(self, folder: Path, program: str, argv, first=None, **env):
        prepare_forks()
        folder.mkdir(parents=True, exist_ok=True)
        self.files = [folder / f"{name}-{env.get('RANK', 0)}" for name in ("stdout", "stderr")]
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            atexit._clear()  # the hooks of the parent; those of the program run below
            try:
                # an earlier run in this process has set some
                for name in environments_of_ranks(1)[0]:
                    os.environ.pop(name, None)
                signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
                signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup started the tests
                os.environ |= env
                for fd, name, path in ((1, "stdout", self.files[0]), (2, "stderr", self.files[1])):
                    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), fd)
                    setattr(sys, name, open(fd, "w", closefd=False))
                make_thread_pool()
                if first:
                    first()
                self._run(program, [str(x) for x in argv])
                code = 0
            except SystemExit as e:
                code = e.code or 0
            finally:
                atexit._run_exitfuncs()
                sys.stdout.flush()
                os._exit(code)

    def _run(self, program: str, argv: list[str]) -> None:
        if program.endswith(".py"):  # as a user types it
            sys.argv = [program, *argv]
            runpy.run_path(program, run_name="__main__")
        else:
            module = import_module(program)
            sys.argv = [module.__file__, *argv]
            import_module("infra.console").run_cli(module.main)

    def ended(self, within: float = 90) -> tuple[int, str, str]:
        """Wait for the end, at most `within` seconds. -> exit code (minus the number of the signal that ended it),
        stdout, stderr"""
        deadline = time.monotonic() + within
        while not (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"still alive after {within} s")
            time.sleep(0.01)
        texts = [p.read_text() if p.exists() else "" for p in self.files]
        return os.waitstatus_to_exitcode(done[1]), *texts

    def signal(self, number) -> None:
        os.kill(self.pid, number)


def started_ranks(n: int, folder: Path, program: str, argv, first=None) -> list[Started]:
    """A program as a launcher starts it on n processes, in the order of their ranks. first(rank)"""
    if n == 1:
        return [Started(folder, program, argv, first=lambda: first and first(0))]
    children = []
    for rank, env in enumerate(environments_of_ranks(n)):
        child = Started(folder, program, argv, lambda rank=rank: first and first(rank), **env)
        children.append(child)
    return children


def free_port() -> int:
    """A port on which nobody listens, below those (from 32768 on) that the system gives to sockets of other programs:
    they could take it before the test's own process does."""
    while True:
        port = random.SystemRandom().randint(20_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def environments_of_ranks(n: int) -> list[dict[str, str]]:
    """What torchrun sets for each of n processes on one node."""
    port = free_port()
    all_ranks = dict(NODE_RANK=0, GROUP_RANK=0, WORLD_SIZE=n, LOCAL_WORLD_SIZE=n)
    all_ranks |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="test")
    envs = [all_ranks | dict(RANK=rank, LOCAL_RANK=rank) for rank in range(n)]
    return [{name: str(value) for name, value in env.items()} for env in envs]


# a moment of a run: the call of a function, by its class or module and its name
Point = tuple[object, str]


def at_call(point: Point, n: int, act) -> None:
    """From now on act() is called before the nth call of a function."""
    owner, name = point
    real, calls = getattr(owner, name), []

    def spied(*args, **options):
        calls.append(1)
        if len(calls) == n:
            act()
        return real(*args, **options)

    setattr(owner, name, spied)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(point: Point, call: int, work) -> None:
    """Call work() in a forked process, which is killed at a call of a function."""
    pid = os.fork()
    if pid == 0:
        try:
            make_thread_pool()
            at_call(point, call, die)
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def kill_at(point: Point, call: int, n: int, folder: Path, program: str, argv) -> None:
    """Start a program on n processes. Rank 0 is killed (SIGKILL) at a call of a function, then the others, each by its
    id."""

    def first(rank):
        if rank == 0:
            at_call(point, call, die)

    child, *others = started_ranks(n, folder, program, argv, first)
    code, _, stderr = child.ended()
    for other in others:
        other.signal(signal.SIGKILL)
        other.ended()
    assert code == -signal.SIGKILL, f"{point[1]} was not called {call} times: {code} {stderr}"


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


def refused(match: str, f, *args, **options) -> str:
    """Check that f(*args, **options) raises BadInput with one short line that matches. -> the line"""
    from infra.console import BadInput

    with pytest.raises(BadInput, match=match) as e:
        f(*args, **options)
    assert "\n" not in str(e.value) and len(str(e.value)) < 600, e.value
    return str(e.value)


def rows_of(file: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv or val.csv."""
    with open(file, newline="") as f:
        return list(csv.DictReader(f))


def result(out: Path) -> dict:
    """A run's rows of metrics.csv, {"rows": ...}, and its exported weights, {"weights": ... or None}."""
    from safetensors.torch import load_file

    found = rows_of(out / "metrics.csv")
    rows = [{k: float(v) if v else None for k, v in row.items()} for row in found]
    final = out / "final" / "model.safetensors"
    return {"rows": rows, "weights": load_file(final) if final.exists() else None}


def of_iteration(out: Path, i: int, kind: str = "answers") -> list[dict]:
    """The lines of an iteration of a run: its answers, or what it has rated."""
    from infra.files import read_lines

    return read_lines(out / "iterations" / f"{kind}-{i}.jsonl")


def learned(out: Path, i: int) -> list[dict]:
    """The examples that an iteration learned from."""
    return [row["example"] for row in of_iteration(out, i, "rated")]


def evaluated(out: Path, name: str) -> dict:
    """A file of a run's folder eval/."""
    return json.loads((out / "eval" / f"{name}.json").read_text())


# columns of metrics.csv that depend on the machine
CLOCKS = {"tokens/s", "seconds", "memory_gb"}


def numbers(run: dict) -> list[dict]:
    """The rows of a run (see result) without CLOCKS."""
    return [{k: v for k, v in row.items() if k not in CLOCKS} for row in run["rows"]]


def assert_same(a: dict, b: dict):
    """Two runs (see result) have equal numbers and, to the bit, equal weights."""
    assert numbers(a) == numbers(b)
    assert a["weights"].keys() == b["weights"].keys()
    assert all(torch.equal(x, b["weights"][n]) for n, x in a["weights"].items())
