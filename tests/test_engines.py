"""Answers by a server: examples/vllm_server.py against a stand-in that has what spoils a run (fake_engine.py), and what
is done with an engine's log-probs."""

import contextlib
import os
import re
import shutil
import signal
import urllib.request
from pathlib import Path

import fake_engine
import pytest
from conftest import (
    ROOT,
    Started,
    assert_same,
    even,
    free_port,
    make_thread_pool,
    numbers,
    of_iteration,
    ranks,
    train,
    until,
)

from infra.console import BadInput, Failed
from infra.files import read_lines
from rollout import WithLogps
from vllm_server import Settings, WithServer

RUN = ("--batch_size=4", "--optim.lr=1e-2", "--online.max_iterations=2", "--online.prompts_per_iteration=null",
       "--online.num_generations=2", "--online.max_new_tokens=6", "--online.rollout_batch_size=5", "--save_interval=1",
       "--precision=32-true", "--keep_last=99", "--eval.samples=0", "--data.max_completion=12", "--progress=false",
       "--engine.timeout=60", "--engine.max_gap=1e-5")  # fmt: skip


@contextlib.contextmanager
def running(folder: Path, log: Path, port: int | None = None, fault: str = ""):
    """A server in a process of its own, until the end of the context. -> its address"""
    if port is None:
        port = free_port()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a broken connection prints
            make_thread_pool()
            fake_engine.serve(folder, port, fault, log)
        os._exit(1)
    address = f"http://127.0.0.1:{port}"

    def runs() -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}/health", timeout=1).close()
            return True
        return False

    try:
        until(runs)
        yield address
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def go(tiny, data, out: Path, server: str, *argv: str) -> dict:
    argv = (*RUN, f"--engine.server={server}", *argv)
    handed = dict(settings=Settings, trainer=WithServer, checker=even)
    return train(tiny, data, out, *argv, program="online", **handed)


def asked(log: Path, path: str) -> list[dict]:
    """The bodies of the requests to this path."""
    return [body for at, body in read_lines(log) if at == path]


@pytest.fixture(scope="module")
def whole(tiny, demos, tmp_path_factory) -> dict:
    """The result of a run that nothing has disturbed, and its folder. The server's log lies beside it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with running(tiny, out.parent / "log") as server:
        return go(tiny, demos, out, server) | {"out": out}


# ---- a server that does what it should -----------------------------------------------------------


def test_a_server_answers_with_the_policy_of_each_iteration(whole):
    out = whole["out"]
    one, two = (of_iteration(out, i) for i in (1, 2))
    assert one != two and [a["ids"] for a in one[::2]] != [a["ids"] for a in one[1::2]]
    seeds = [body["seed"] for body in asked(out.parent / "log", "/v1/completions")]
    assert len(set(seeds)) == len(seeds) == 32, "a seed is one request's"
    (folder,) = (out / "iterations").glob("policy-*")
    assert folder.name.startswith("policy-2-"), "the last one is gone"


def test_all_settings_of_sampling_and_all_ends_reach_the_server(tiny, demos, tmp_path):
    base = shutil.copytree(tiny, tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": [0, 7], "top_k": 3}')
    argv = ("--online.temperature=0.7", "--online.top_p=0.9",
            '--online.stop=["e","the"]', "--online.max_iterations=1")  # fmt: skip
    with running(base, tmp_path / "log") as server:
        go(base, demos, tmp_path / "run", server, *argv)
    body = asked(tmp_path / "log", "/v1/completions")[0]
    expected = {"temperature": 0.7, "top_k": -1, "top_p": 0.9, "min_tokens": 0, "stop": ["e", "the"], "max_tokens": 6,
                "repetition_penalty": 1.0, "stop_token_ids": [0, 7], "include_stop_str_in_output": True}  # fmt: skip
    assert {name: body[name] for name in expected} == expected
    short = [a for a in of_iteration(tmp_path / "run", 1) if len(a["ids"]) < 6]
    assert short and all("e" not in a["completion"] for a in of_iteration(tmp_path / "run", 1))


def test_two_processes_with_a_sharded_policy_ask_once_and_measure_the_same(
    tiny, demos, whole, tmp_path
):
    argv = ("--strategy=fsdp", "--micro_batch_size=2")
    with running(tiny, tmp_path / "log-2") as server:
        two = ranks(2, lambda rank: numbers(go(tiny, demos, tmp_path / "two", server, *argv)))[0]
    for a, b in zip(numbers(whole), two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
    assert len(asked(tmp_path / "log-2", "/v1/completions")) == 32


# ---- a server that does not ----------------------------------------------------------------------

FAULTS = {  # what the server does -> what the run says
    "dies": r"server http://127.0.0.1:\d+: /v1/completions: .*",
    "hangs": r"server http://127.0.0.1:\d+: /v1/completions: timed out",
    "breaks off": r"server http://127.0.0.1:\d+: broke an answer off, \d tokens: abort",
    "starts anew": r"server http://127.0.0.1:\d+: has the weights default, not .*: it has restarted, .*",
    "keeps its cache": r"server http://127.0.0.1:\d+: policy-1-.*: not loaded: {'success': False}",
    "loads nothing": "rollout: the engine answers with other weights, another tokenizer or template: its .*",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_is_one_line_and_a_mended_one_makes_it_the_same_run(
    fault, tiny, demos, whole, tmp_path
):
    with running(tiny, tmp_path / "log-2", fault=fault) as server:
        with pytest.raises(Failed, match=f"^{FAULTS[fault]}$") as said:
            go(tiny, demos, tmp_path / "run", server, "--engine.timeout=2")
    assert "\n" not in str(said.value)
    if fault == "dies":
        assert len(of_iteration(tmp_path / "run", 1)) == 5, "the first rollout batch stays"
    if fault in ("dies", "loads nothing"):  # in the first iteration, and in the second
        with running(tiny, tmp_path / "log-3") as server:
            assert_same(go(tiny, demos, tmp_path / "run", server, "--resume=auto"), whole)
    if fault == "dies":
        assert len(asked(tmp_path / "log-3", "/v1/completions")) == 27


def test_the_command_that_starts_the_server_is_said_and_the_run_waits_for_it(tiny, demos, tmp_path):
    port = free_port()
    argv = [f"--model={tiny}", f"--data.train={demos}", f"--out_dir={tmp_path / 'run'}", *RUN]
    argv += [f"--engine.server=http://127.0.0.1:{port}", "--eval.check=demo"]
    argv += ["--online.max_iterations=1"]
    child = Started(tmp_path, str(ROOT / "examples" / "vllm_server.py"), argv)
    stdout = tmp_path / "stdout-0"
    command = re.compile(
        r"^  VLLM_SERVER_DEV_MODE=1 vllm serve (\S+) .* --host 127.0.0.1 --port (\d+)$", re.M
    )
    until(lambda: stdout.exists() and command.search(stdout.read_text()))
    folder, said_port = command.search(stdout.read_text()).groups()
    with running(Path(folder), tmp_path / "log", int(said_port)):
        code, said, stderr = child.ended()
    assert code == 0 and stderr == "" and "exported to" in said
    assert re.search(r"has policy-1-\w+ after \d", said)


# ---- log-probs of any engine ---------------------------------------------------------------------


def test_log_probs_that_are_not_the_policys_are_refused_before_anything_is_written(
    tiny, demos, tmp_path
):
    logps = []

    def engine(folder, prompts, *_):
        return WithLogps([[5, 6]] * len(prompts), logps[: len(prompts)])

    given = dict(program="online", rollout=engine, checker=even)
    argv = [x for x in RUN if "engine" not in x]
    far = "nats a token off the policy's, and at most 0.1 are allowed"
    for i, wrong in enumerate((-1.0, float("nan"))):
        logps[:] = [[wrong, wrong]] * 16
        with pytest.raises(Failed, match=far):
            train(tiny, demos, tmp_path / f"{i}", *argv, **given)
        assert not list((tmp_path / f"{i}").glob("iterations/answers*"))
    for wrong, match in (
        ([-1.0], "expected a log-prob for each token of each answer"),
        ([-1.0, None], ".*TypeError: float"),
    ):
        logps[:] = [wrong] * 16
        with pytest.raises((BadInput, Failed), match=f"^rollout: {match}"):
            train(tiny, demos, tmp_path / "other", *argv, **given)
