"""Online KTO with the answers of a vLLM or SGLang server, which runs in a separate environment.

    python examples/vllm_server.py --engine.server http://127.0.0.1:8000

It takes online.py's settings and prints the command that starts the server, which may run before or after it, also on
another machine that sees the run's folder under the same path. Nothing of vLLM is imported: all goes over HTTP. Each
iteration's policy is loaded from a new folder. The folder's name is the version of the server's weights. If the server
has another version, such as that of another run, the run ends. One server therefore serves one run.

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
from typing import Literal
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
    kind: Literal["vllm", "sglang"] = "vllm"
    """What it is. The code for SGLang was tried against a mock, never against SGLang."""
    max_gap: PositiveFloat = free(0.1)
    """The run ends if the server's log-probs differ from the policy's by more, in nats per token: the server then has
    other weights, another tokenizer or template. engine/gap in metrics.csv shows smaller differences."""
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
        where = f"--host {address.hostname} --port {address.port or 80}"
        # vLLM: weights are loaded in its development mode, and without --generation-config vllm a file of the model
        # changes how it samples. SGLang: otherwise its log-probs are those after the temperature.
        command = {
            "vllm": f"VLLM_SERVER_DEV_MODE=1 vllm serve {folder} --served-model-name policy "
            f"--generation-config vllm {where}",
            "sglang": f"SGLANG_RETURN_ORIGINAL_LOGPROB=1 python -m sglang.launch_server --model-path {folder} "
            f"--enable-deterministic-inference {where}",
        }[self.args.kind]
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
        """Give the server the policy's weights; keys and values that it has computed with others are forgotten."""
        began = time.perf_counter()
        self.version = str(folder)
        if self.args.kind == "vllm":
            self.post("/pause")
            path = {"weights_path": str(folder)}
            self.post("/collective_rpc", {"method": "reload_weights", "kwargs": path})
            done = self.post("/reset_prefix_cache")
            self.post("/update_weight_version", {"new_version": self.version})
            self.post("/resume")
        else:
            update = {"model_path": str(folder), "weight_version": self.version}
            options = {"flush_cache": True, "abort_all_requests": True}
            done = self.post("/update_weights_from_disk", update | options)
        if not done["success"]:
            raise Failed(f"server {self.args.server}: {folder.name}: not loaded: {done}")
        say(f"{self.args.server} has {folder.name} after {time.perf_counter() - began:.1f} s")

    def check_version(self) -> None:
        """Refuse other weights than those that were loaded."""
        path = {"vllm": "/weight_info", "sglang": "/get_model_info"}[self.args.kind]
        version = self.request(path)["weight_version"]
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
        }
        if self.args.kind == "vllm":
            params |= {"seed": seed, "max_tokens": max_new, "min_tokens": 0}
            params |= {"include_stop_str_in_output": True, "return_token_ids": True, "logprobs": 0}
            reply = self.post("/v1/completions", {"model": "policy", "prompt": prompt} | params)
            (choice,) = reply["choices"]
            reason = choice["finish_reason"]
            ids = choice["token_ids"]
            logps = choice["logprobs"]["token_logprobs"]
        else:
            params |= {"sampling_seed": seed, "max_new_tokens": max_new, "no_stop_trim": True}
            params |= {"min_new_tokens": 0}
            question = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
            reply = self.post("/generate", question)["meta_info"]
            reason = reply["finish_reason"]["type"]
            logps, ids, _ = zip(*reply["output_token_logprobs"])
        if reason != "stop" and (reason != "length" or len(ids) != max_new):
            raise Failed(
                f"server {self.args.server}: broke an answer off, {len(ids)} tokens: {reason}"
            )
        return list(ids), list(logps)

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
