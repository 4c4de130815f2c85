"""Talk to a model in the browser and give its answers thumbs up or down.

    python rate.py --model out/<run>                           # a chat
    python rate.py --model out/<run> --prompts prompts.jsonl   # one prompt of a file after the other, by keys
    python rate.py --server http://127.0.0.1:8000              # a model behind an OpenAI-compatible server

The thumbs are in ratings.jsonl, in a form that kto.py reads. This file is the whole state: it is read and written
anew for each thumb, so a killed server loses none, and a page that is still open goes on with the next server.
The page, rate.html, shows the command that trains on the thumbs.

Reading order: training_advice (the command), the two who answer, Desk (what the page may ask), PageHandler (HTTP).
The file of thumbs: records/ratings.py.
"""

import json
import os
import secrets
import shlex
import threading
import traceback
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from checks import sampling_faults
from generate import AskedModel, read_prompts
from infra.console import BadInput, Failed, command_line, run_cli, say, user_error
from infra.parse import parse_command
from infra.server import Server, read_reply
from infra.settings import ROOT, Sampling, refuse_unless
from records.forms import Record, Turns, as_turns
from records.ratings import Ratings, count_labels, prompt_key

FEWEST = 8  # ratings that config/thumbs.yaml trains on: one batch
LONGEST_REQUEST = 4_000_000  # bytes


@dataclass(frozen=True, kw_only=True)
class RateSettings(Sampling):
    """python rate.py --model out/<run> opens a page on which a person rates the model's answers."""

    model: str | None = None
    """A run's folder, its `final`, a checkpoint, or any folder or id that kto.py takes. With --server: the model's
    name there; default: the first one that the server lists."""
    server: str | None = None
    """The address of an OpenAI-compatible server that answers in place of a model here, such as
    http://127.0.0.1:8000, or that of its API, as https://HOST/v1beta/openai. A key is read from OPENAI_API_KEY."""
    ratings: str = "ratings.jsonl"
    """The file with the thumbs. Its records are read first; it is made if it is not there."""
    prompts: str | None = None
    """Records whose prompts are shown one after the other, in any form that online.py reads. Prompts that have
    a rating are left out. Default: a chat."""
    port: NonNegativeInt = 8765
    """The page is on 127.0.0.1 at this port; 0: any free one."""
    temperature: NonNegativeFloat = 0.7
    """Sampling temperature; at 0 another answer is always the same one."""
    max_new_tokens: PositiveInt = 512
    """Longest answer in tokens; less where the context ends."""
    plain: bool = False
    """true: leave the chat template aside, as for a run on plain records. Each prompt is then alone."""
    chat_template_kwargs: str | None = None
    """As data.chat_template_kwargs of the run that trained the model: enable_thinking=false."""


# ---- the command that trains -----------------------------------------------------------------------


def training_command(model: str, file: Path, up: int, down: int, out_dir: str) -> list[str]:
    """The words of the command that trains on a file with so many thumbs. Where one kind is rare, its class weight
    makes both count alike, as the KTO paper advises."""
    words = ["python", os.path.relpath(ROOT / "kto.py")]
    words += ["--config", os.path.relpath(ROOT / "config/thumbs.yaml"), "--model", model]
    words += ["--data.train", str(file), "--out_dir", out_dir]
    if up < down * 3 / 4:
        words += ["--kto.desirable_weight", f"{down / up:.3g}"]
    if down < up * 3 / 4:
        words += ["--kto.undesirable_weight", f"{up / down:.3g}"]
    return words


def training_advice(model: str, file: Path, up: int, down: int) -> dict[str, str]:
    """What the page says of training: a note, and the command once there are thumbs to learn from."""
    if up + down == 0:
        return {"note": "", "command": ""}
    if up + down < FEWEST or not up or not down:
        note = f"It takes {FEWEST} thumbs, some up and some down; 40 or more are better."
        return {"note": note, "command": ""}
    n = 1
    while Path(f"out/thumbs-{n}").exists():
        n += 1
    out_dir = f"out/thumbs-{n}"
    talk = f"python {os.path.relpath(ROOT / 'rate.py')} --model {out_dir}"
    note = f"Stop rate.py with Ctrl-C, run this, and talk to the result with {talk}"
    command = training_command(model, file, up, down, out_dir)
    return {"note": note, "command": shlex.join(command)}


# ---- who answers -----------------------------------------------------------------------------------


class Reply(NamedTuple):
    text: str
    cut: bool
    """Whether it ended at the length limit."""


class OwnModel:
    """A model in this process."""

    def __init__(self, args: RateSettings):
        self.args = args
        self.name = args.model
        self.model = AskedModel(args.model, args.plain, args.chat_template_kwargs)
        self.chat = self.model.by_template
        self.answering = threading.Lock()
        self.closed = threading.Event()

    def answer(self, prompt: Turns) -> Reply:
        """Raises BadInput for a prompt that does not fit, and Failed when the program ends."""
        ids = self.model.encode(Record(prompt, []), advice=": begin a new chat")
        seed = secrets.randbelow(2**31)
        with self.answering:  # one answer at a time
            (answer,) = self.model.answers([ids], self.args, seed, self.check_open)
        return Reply(*answer)

    def check_open(self) -> None:
        if self.closed.is_set():
            raise Failed("rate.py was stopped.")

    def close(self) -> None:
        """End the answer under way."""
        self.closed.set()
        with self.answering:
            pass


class OtherServer:
    """A model behind an OpenAI-compatible server."""

    chat = True

    def __init__(self, args: RateSettings):
        self.args = args
        refuse_unless(
            urlsplit(args.server).scheme in ("http", "https"),
            f"server: {args.server}: expected an address that begins with http:// or https://",
        )
        for name in (
            "plain",
            "chat_template_kwargs",
        ):
            refuse_unless(
                getattr(args, name) == getattr(RateSettings, name),  # its default
                f"{name}: not with --server, which is asked with temperature, top_p, stop and max_new_tokens",
            )
        self.server = Server(args.server, os.environ.get("OPENAI_API_KEY"))
        self.name = args.model
        if not self.name:
            models = self.call("/models")
            with user_error("server", f"{self.server.url}/models: expected a list of models"):
                self.name = models["data"][0]["id"]

    def answer(self, prompt: Turns) -> Reply:
        """Raises BadInput with what the server says."""
        args = self.args
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body = {
            "model": self.name,
            "messages": turns,
            "temperature": args.temperature,
            "max_tokens": args.max_new_tokens,
        }
        # some servers refuse a field that they do not know, and a top_p of 1
        if args.top_p != 1:
            body["top_p"] = args.top_p
        if args.stop:
            body["stop"] = args.stop
        answer = self.call("/chat/completions", json.dumps(body))
        words = f"{json.dumps(answer, ensure_ascii=False):.300}"
        with user_error("server", f"an answer without choices[0].message.content: {words}"):
            said = read_reply(answer)
        refuse_unless(
            not said.thought,
            "server: its answer has the model's thoughts apart (reasoning_content), and a rating would be of the rest "
            "alone: turn thinking off, or the server's reasoning parser",
        )
        return Reply(said.text, said.cut)

    def call(self, path: str, body: str | None = None) -> dict:
        """What the server says to this JSON. Raises BadInput."""
        where = f"server: {self.server.url}{path}"
        try:
            with self.server.open(path, body, timeout=600) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as e:
            words = e.read(2000).decode(errors="replace").split()
            raise BadInput(f"{where}: {e.code} {e.reason}: {' '.join(words)[:300]}") from None
        except (OSError, HTTPException, ValueError) as e:
            reason = getattr(e, "reason", e)  # URLError hides it in itself
            raise BadInput(f"{where}: no answer: {reason}") from None

    def close(self) -> None:
        pass


# ---- what the page may ask -------------------------------------------------------------------------


class Desk:
    """The state of the page, and its requests: an answer, the thumb that an answer has, a new thumb."""

    def __init__(self, model: OwnModel | OtherServer, ratings: Ratings, prompts: list[Turns]):
        self.model = model
        self.ratings = ratings
        self.prompts = prompts

    def state(self) -> dict:
        """What the page shows: the mode (chat or cards), whether the model has a chat template (chat) and can be
        asked (asks), the prompts without a rating as cards, and the counts."""
        ratings = self.ratings.read()
        rated = {prompt for prompt, _ in ratings}
        cards = []
        for i, prompt in enumerate(self.prompts):
            if prompt_key(prompt) not in rated:
                cards.append({"id": i, "prompt": prompt})
        state = {
            "mode": "cards" if self.prompts else "chat",
            "model": self.model.name,
            "chat": self.model.chat,
            "asks": True,
            "cards": cards,
            "waiting": False,
        }
        return state | self.counts(*count_labels(ratings))

    def counts(self, up: int, down: int) -> dict:
        advice = training_advice(self.model.name, self.ratings.file, up, down)
        return {"up": up, "down": down} | advice

    def answer(self, prompt: Turns) -> dict:
        """One more answer, whose it is, and its thumb if this very answer has one already."""
        reply = self.model.answer(prompt)
        return reply._asdict() | {"model": self.model.name} | self.label(prompt, reply.text)

    def label(self, prompt: Turns, completion: str) -> dict:
        """The thumb that this answer has; null: none."""
        return {"label": self.ratings.label(prompt, completion)}

    def rate(self, prompt: Turns, completion: str, label: bool | None) -> dict:
        return self.counts(*self.ratings.set(prompt, completion, label))


# ---- HTTP --------------------------------------------------------------------------------------------


class RateServer(ThreadingHTTPServer):
    """The page of a desk on 127.0.0.1; no other machine reaches it."""

    # requests that wait to be taken; with the default, 5, some of a burst are lost
    request_queue_size = 64

    def __init__(self, desk: Any, port: int):
        """desk: a Desk, or another object with those of its methods that the page asks."""
        self.desk = desk
        with user_error("port", f"{port} (0: any free one)"):
            super().__init__(("127.0.0.1", port), PageHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class PageHandler(BaseHTTPRequestHandler):
    """GET / is the page; GET /state and POST /answer, /label and /rate are JSON, an error too: {"error": text}."""

    server: RateServer

    def do_GET(self) -> None:
        self.respond({"/": self.page, "/state": lambda: self.server.desk.state()})

    def do_POST(self) -> None:
        self.respond({"/answer": self.answer, "/label": self.label, "/rate": self.rate})

    def page(self) -> bytes:
        return (Path(__file__).parent / "rate.html").read_bytes()

    def answer(self) -> dict:
        return self.server.desk.answer(self.body("prompt")["prompt"])

    def label(self) -> dict:
        body = self.body("prompt", "completion")
        return self.server.desk.label(body["prompt"], body["completion"])

    def rate(self) -> dict:
        body = self.body("prompt", "completion", "label")
        completion = body["completion"]
        refuse_unless(isinstance(completion, str), "completion: expected a text")
        label = body["label"]
        refuse_unless(label in (True, False, None), "label: expected true, false or null")
        return self.server.desk.rate(body["prompt"], completion, label)

    def body(self, *names: str) -> dict:
        """The request's JSON object, which has these fields. Raises BadInput."""
        # no other site can send this type without asking first
        is_json = self.headers.get_content_type() == "application/json"
        refuse_unless(is_json, "Content-Type: expected application/json")
        size = int(self.headers.get("Content-Length") or 0)
        refuse_unless(size <= LONGEST_REQUEST, f"{size:,} bytes are too many")
        with user_error("request"):
            body = json.loads(self.rfile.read(size))
            refuse_unless(isinstance(body, dict), "expected an object")
        for name in names:
            refuse_unless(name in body, f"{name}: missing")
        return body

    def respond(self, actions: dict[str, Callable]) -> None:
        """Send what the action for this path returns, or what is wrong, in words."""
        action = actions.get(self.path)
        if not self.is_from_here():
            self.send_fault(403, "This page answers to 127.0.0.1 and localhost alone.")
            return
        if action is None:
            self.send_fault(404, f"{self.path}: there is no such page")
            return
        try:
            result = action()
        except BadInput as e:
            self.send_fault(400, str(e))
        except Failed as e:
            self.send_fault(503, str(e))
        except Exception as e:
            traceback.print_exc()
            self.send_fault(500, f"rate.py failed: {type(e).__name__}: {e}")
        else:
            self.send(200, result)

    def send_fault(self, code: int, text: str) -> None:
        self.send(code, {"error": text})

    def send(self, code: int, result: dict | bytes) -> None:
        """Send a page (bytes), or JSON."""
        is_page = isinstance(result, bytes)
        content = result if is_page else json.dumps(result).encode()
        kind = "text/html" if is_page else "application/json"
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header(
            "Content-Security-Policy",
            "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; "
            "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        )
        self.end_headers()
        try:
            self.wfile.write(content)
        except ConnectionError:
            pass  # the page was closed while the model was thinking

    def is_from_here(self) -> bool:
        """Whether the page itself asks. Another site in the same browser reaches 127.0.0.1 too, but not under
        this Origin; and a name that an attacker points at 127.0.0.1 stands in Host."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        is_local = urlsplit(f"//{host}").hostname in ("127.0.0.1", "localhost")
        return is_local and origin in (None, f"http://{host}")

    def log_message(self, *_) -> None:
        pass


# ---- the command -------------------------------------------------------------------------------------


def shown_prompts(source: str, model: OwnModel | OtherServer) -> list[Turns]:
    """The prompts that the page shows. Raises BadInput, also for a record that asks the template for more."""
    prompts = []
    faults = []
    for where, record in read_prompts(source, lambda record: record).items():
        prompts.append(as_turns(record.prompt) if model.chat else record.prompt)
        asked = {"tools": record.tools, "chat_template_kwargs": record.template_kwargs}
        for name, value in asked.items():
            if value:
                faults.append(
                    f"{where}: {name}: rate.py asks without them; generate.py --prompts asks with them"
                )
    if faults:
        raise BadInput("\n".join(faults[:20]))
    return prompts


def main(argv: list[str] | None = None) -> None:
    args = parse_command(RateSettings, __doc__, command_line()[1:] if argv is None else argv)
    faults = sampling_faults(args)
    if faults:
        raise BadInput("\n".join(faults))
    refuse_unless(
        args.model or args.server, "model: missing: --model, or --server for one elsewhere"
    )
    ratings = Ratings(Path(args.ratings).expanduser())
    refuse_unless(
        ratings.file.suffix == ".jsonl", f"ratings: {args.ratings}: expected a .jsonl file"
    )
    refuse_unless(
        ratings.file.absolute().parent.is_dir(), f"ratings: {args.ratings}: its folder is not there"
    )
    ratings.read()  # a bad line is refused before a model is loaded
    server = RateServer(None, args.port)  # a port that is taken is refused before it, too
    model = OtherServer(args) if args.server else OwnModel(args)
    prompts = shown_prompts(args.prompts, model) if args.prompts else []
    desk = server.desk = Desk(model, ratings, prompts)
    say(f"open {server.url} in a browser; Ctrl-C ends it, the thumbs are in {ratings.file}")
    up, down = count_labels(ratings.read())
    if up or down:
        say(
            f"it has {up} up and {down} down already; a run renders all records of a file alike (docs/data.md)"
        )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        model.close()
        server.server_close()
    state = desk.counts(*count_labels(ratings.read()))
    say(f"{state['up']} up, {state['down']} down in {ratings.file}")
    if state["command"]:
        say(f"train on them: {state['command']}")


if __name__ == "__main__":
    run_cli(main)
