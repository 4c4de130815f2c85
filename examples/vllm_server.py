"""Online KTO with the answers of a vLLM server, which runs in a separate environment.

    python examples/vllm_server.py --engine.server http://127.0.0.1:8000

It takes the settings of online.py and prints the command that starts the server. The server may start before or after
the run, also on another machine that sees the run's folder under the same path. Nothing of vLLM is imported, because
all goes over HTTP. The server loads each iteration's policy from a new folder. The folder's name is the version of the
server's weights. If the server has another version, such as that of another run, the run ends. Therefore one server
serves one run. On one GPU give the server --gpu-memory-utilization 0.4 or so.

vLLM 0.32 on a CPU dies if it splits a prompt that has a seed: use --no-enable-chunked-prefill --max-model-len N
--max-num-batched-tokens N. It also keeps the first weights of a head that is tied to the embedding, so use LoRA there.

A checker of your own: online.main(settings=Settings, trainer=WithServer, checker=...).
SPIN: spin.main(rollout=Server(EngineSettings())).
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from jsonargparse.typing import PositiveFloat, PositiveInt

import online
from infra.console import Failed, advance, progress, run_cli, say
from infra.settings import Sampling, free
from records.tokenizer import model_stops
from rollout import WithLogps
from run import Run
from trainer import Trainer


@dataclass(frozen=True)
class EngineSettings:
    """The server that answers."""

    server: str = free("http://127.0.0.1:8000")
    """Its address."""
    max_gap: PositiveFloat = free(0.1)
    """The run ends if the server's log-probs differ from the policy's by more, in nats per token: the server then has
    other weights, another tokenizer or template. The run prints smaller differences."""
    timeout: PositiveInt = free(600)
    """Seconds to wait for the server to start, and for one answer."""
    requests: PositiveInt = free(256)
    """Prompts that the server gets in parallel."""


@dataclass(frozen=True)
class Settings(online.Settings):
    engine: EngineSettings = EngineSettings()


class Server:
    """Answers a run's prompts (see rollout.py)."""

    def __init__(self, args: EngineSettings):
        self.args = args
        self.version = ""  # of the weights that the server was given
        # a proxy is for the Internet, not for this server
        self.http = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __call__(
        self, folder: Path, prompts: list[list[int]], sampling: Sampling, max_new: int, seed: int
    ) -> WithLogps:
        if self.version != str(folder):
            self.wait(folder)
            self.load(folder)
        ask = partial(self.answer, sampling, max_new, model_stops(folder))
        # a seed is one request's: with one for all, equal prompts would get equal answers
        seeds = range(seed, seed + len(prompts))
        answers = []
        logps = []
        with (
            progress("the server's answers", len(prompts)),
            ThreadPoolExecutor(self.args.requests) as threads,
        ):
            for ids, of_answer in threads.map(ask, prompts, seeds):
                answers.append(ids)
                logps.append(of_answer)
                advance()
        self.check_version()  # the server may have restarted, or loaded another run's weights
        return WithLogps(answers, logps, self.args.max_gap)

    def wait(self, folder: Path) -> None:
        """Wait until the server runs."""
        address = urlsplit(self.args.server)
        # Weights are loaded in vLLM's development mode. Without --generation-config vllm a file of the model changes
        # how it samples.
        command = (
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {folder} --served-model-name policy "
            f"--generation-config vllm --host {address.hostname} --port {address.port or 80}"
        )
        with progress(f"waiting for {self.args.server}", self.args.timeout):
            for second in range(self.args.timeout):
                try:
                    return self.http.open(f"{self.args.server}/health", timeout=10).close()
                except (OSError, http.client.HTTPException):
                    if second == 0:
                        say(
                            f"no server at {self.args.server} yet; in a separate environment:\n  {command}"
                        )
                    time.sleep(1)
                    advance()
        raise Failed(f"server {self.args.server}: did not start within {self.args.timeout} s")

    def load(self, folder: Path) -> None:
        """Give the server the policy's weights. It forgets keys and values that it has computed with others."""
        began = time.perf_counter()
        self.version = str(folder)
        self.post("/pause")
        path = {"weights_path": str(folder)}
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": path})
        done = self.post("/reset_prefix_cache")
        self.post("/update_weight_version", {"new_version": self.version})
        self.post("/resume")
        if not done["success"]:
            raise Failed(f"server {self.args.server}: {folder.name}: not loaded: {done}")
        say(f"{self.args.server} has {folder.name} after {time.perf_counter() - began:.1f} s")

    def check_version(self) -> None:
        """Refuse other weights than those that were loaded."""
        version = self.request("/weight_info")["weight_version"]
        if version != self.version:
            raise Failed(
                f"server {self.args.server}: has the weights {version}, not {self.version}: it has "
                "restarted, or serves another run"
            )

    def answer(
        self, sampling: Sampling, max_new: int, ends: list[int], prompt: list[int], seed: int
    ) -> tuple[list[int], list[float]]:
        """One answer: its token ids and their log-probs."""
        # all settings are given, because the server may have other defaults
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": sampling.stop,
            "skip_special_tokens": False,  # a stop text may be one
            "stop_token_ids": ends,
            "ignore_eos": False,
            "seed": seed,
            "max_tokens": max_new,
            "min_tokens": 0,
            "include_stop_str_in_output": True,
            "return_token_ids": True,
            "logprobs": 0,
        }
        reply = self.post("/v1/completions", {"model": "policy", "prompt": prompt} | params)
        (choice,) = reply["choices"]
        reason = choice["finish_reason"]
        ids = choice["token_ids"]
        if reason != "stop" and (reason != "length" or len(ids) != max_new):
            raise Failed(
                f"server {self.args.server}: broke an answer off, {len(ids)} tokens: {reason}"
            )
        return ids, choice["logprobs"]["token_logprobs"]

    def post(self, path: str, body: dict | None = None) -> dict:
        return self.request(path, json.dumps(body or {}).encode())

    def request(self, path: str, data: bytes | None = None) -> dict:
        """The server's reply to a GET, or with data to a POST. Raises Failed."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.args.server + path, data, headers)
        try:
            with self.http.open(request, timeout=self.args.timeout) as reply:
                return json.loads(reply.read() or "{}")
        except urllib.error.HTTPError as e:
            reason = f"{e} {e.read().decode(errors='replace')}"
        except (OSError, http.client.HTTPException, ValueError) as e:
            reason = str(e) or type(e).__name__
        raise Failed(f"server {self.args.server}: {path}: {' '.join(reason.split())[:300]}")


class WithServer(Trainer):
    """A run that takes its answers from a server."""

    def __init__(self, run: Run):
        super().__init__(run)
        run.rollout = Server(run.cfg.engine)


if __name__ == "__main__":
    run_cli(lambda: online.main(settings=Settings, trainer=WithServer))
