"""A mock of a vLLM server: HTTP, a tiny model computed by transformers, and what such a server has that can spoil a
run. It reads a path once. It remembers the model of a prompt that it has computed, until that is reset.

fault: one more thing that goes wrong, at completion number FAULTY or from the second load on.
"""

import json
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import transformers

FAULTY = 7  # of the completions, from 1
PARAMS = """temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty stop stop_token_ids
skip_special_tokens ignore_eos model prompt seed max_tokens min_tokens include_stop_str_in_output return_token_ids
logprobs"""


class Engine:
    def __init__(self, folder: Path, fault: str):
        self.first = self.read(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.fault = fault
        self.by_path = {}  # a path is read once
        self.by_prompt = {}  # the model with which a prompt was computed
        self.n_completions = 0
        self.start()

    def start(self) -> None:
        self.model = self.first
        self.version = "default"

    def read(self, folder: Path):
        kind = transformers.AutoModelForCausalLM
        return kind.from_pretrained(folder, attn_implementation="eager").eval()

    def load(self, path: str) -> None:
        if path not in self.by_path:
            self.by_path[path] = self.read(path)
        if self.fault != "loads nothing" or len(self.by_path) == 1:
            self.model = self.by_path[path]

    @torch.no_grad()
    def complete(self, params: dict) -> tuple[str, list[int], list[float]]:
        """-> why the answer ended, its token ids, their log-probs"""
        prompt = params["prompt"]
        model = self.by_prompt.setdefault(tuple(prompt), self.model)
        generator = torch.Generator().manual_seed(params["seed"])
        ids, logps = [], []
        while len(ids) < params["max_tokens"]:
            logits = model(torch.tensor([prompt + ids])).logits[0, -1].double()
            logp = logits.log_softmax(-1)
            p = (logits / max(params["temperature"], 1e-9)).softmax(-1)
            ids.append(torch.multinomial(p, 1, generator=generator).item())
            logps.append(logp[ids[-1]].item())
            text = self.tokenizer.decode(ids)
            if ids[-1] in params["stop_token_ids"] or any(x in text for x in params["stop"]):
                return "stop", ids, logps
        return "length", ids, logps


def handler(engine: Engine, log: Path):
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args) -> None:
            pass

        def reply(self, content: dict, code: int = 200) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def do_GET(self) -> None:
            found = self.path in ("/health", "/weight_info")
            self.reply({"weight_version": engine.version}, 200 if found else 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                with open(log, "a") as file:
                    file.write(json.dumps([self.path, body]) + "\n")
                self.act(body)

        def act(self, body: dict) -> None:
            match self.path:
                case "/pause" | "/resume":
                    self.reply({"status": "done"})
                case "/collective_rpc":
                    engine.load(body["kwargs"]["weights_path"])
                    self.reply({"results": [None]})
                case "/reset_prefix_cache":
                    if engine.fault != "keeps its cache":
                        engine.by_prompt.clear()
                    self.reply({"success": engine.fault != "keeps its cache"})
                case "/update_weight_version":
                    engine.version = body["new_version"]
                    self.reply({"success": True})
                case "/v1/completions":
                    assert body.keys() == {*PARAMS.split()} and body["model"] == "policy"
                    self.complete(body)
                case _:
                    self.reply({"detail": "Not Found"}, 404)

        def complete(self, params: dict) -> None:
            engine.n_completions += 1
            fault = engine.fault if engine.n_completions == FAULTY else ""
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hangs":
                time.sleep(5)
            if fault == "starts anew":
                engine.start()
            reason, ids, logps = engine.complete(params)
            if fault == "breaks off":
                reason = "abort"
            choice = {"finish_reason": reason, "token_ids": ids}
            self.reply({"choices": [choice | {"logprobs": {"token_logprobs": logps}}]})

    return Handler


class HTTPServer(ThreadingHTTPServer):
    request_queue_size = 256  # connections that wait to be accepted


def serve(folder: Path, port: int, fault: str, log: Path) -> None:
    torch.set_num_threads(1)
    server = HTTPServer(("127.0.0.1", port), handler(Engine(folder, fault), log))
    server.serve_forever()
