"""Another model as the checker: any OpenAI-compatible server, a local vLLM or a hosted one.

    python examples/judge.py --judge.server http://127.0.0.1:8000 --judge.model NAME

This is online KTO. kto.main(settings=..., trainer=Judged, checker=judge) has answers judged before and after a run on
ratings; its settings need a group `judge` as below. Each reply is saved immediately, in judge.jsonl in the run's folder
or in --judge.cache, so a resume asks nothing twice. A reply that is neither yes nor no, or was cut, is no verdict: its
answer gets no thumb, and is counted. If the judge thinks, only the text after its thoughts counts. The thoughts of the
policy are a part of its answer. Read a few replies and eval/*.json: a policy may learn to persuade its judge.
"""

import hashlib
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

from jsonargparse.typing import PositiveFloat, PositiveInt

import online
from evaluation import Answer
from infra.console import BadInput, Failed, advance, progress, run_cli, say, user_error
from infra.settings import free, refuse_unless
from trainer import Trainer

PROMPT = """A question:
{prompt}

An answer to it:
{completion}

Is the answer right? Think in a sentence or two. Then end with a line that is YES or NO."""

# Matches a reply's last line, which says only yes or no: signs, \boxed{} and <answer> around the word, and words
# before a colon
SIGNS = r"(?:[\W_]|\\\w+|</?\w+>)*"
VERDICT = re.compile(rf"(?:.*:)?{SIGNS}(yes|no){SIGNS}")
WAITS = (1, 2, 4, 8, 16, 32)  # seconds before each further try
THIS_MACHINE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


# ---- a server ------------------------------------------------------------------------------------


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        """A redirect is an error: it could take the key to another server."""


class Server:
    """A server's address and the key that it gets with each request."""

    def __init__(self, address: str, key: str | None):
        """address: `http://HOST:PORT`, which gets /v1, or with a path, such as /v1beta/openai. key: None sends none."""
        self.url = address.rstrip("/")
        place = urlsplit(self.url)
        if not place.path:
            self.url += "/v1"
        self.headers = {"Content-Type": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        # a proxy of the environment is for the Internet, and would get the key and the texts
        proxies = {} if place.hostname in THIS_MACHINE else None  # None: those of the environment
        proxy_handler = urllib.request.ProxyHandler(proxies)
        self.opener = urllib.request.build_opener(NoRedirect, proxy_handler)

    def open(self, path: str, body: str, timeout: float) -> HTTPResponse:
        """The reply to a POST of this JSON. timeout: seconds. Raises OSError and HTTPException. A reply that is no
        success, or that names another address, raises HTTPError, which is an OSError."""
        request = urllib.request.Request(self.url + path, body.encode(), self.headers)
        return self.opener.open(request, timeout=timeout)


def read_reply(reply: dict) -> tuple[str, bool]:
    """The text of the first choice, and whether it was cut at the longest length. Raises LookupError, TypeError or
    AttributeError if it is missing."""
    choice = reply["choices"][0]
    text = choice["message"]["content"] or ""
    if isinstance(text, list):  # Mistral's form: parts of text and of thoughts
        text = "".join(part["text"] for part in text if part["type"] == "text")
    return text, choice.get("finish_reason") == "length"


# ---- the judge -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class JudgeSettings:
    model: str
    """The model's name on the server."""
    server: str = free("http://127.0.0.1:8000")
    """Its address, or that of its API, as https://HOST/v1beta/openai. Nothing else is asked, also if the server names
    another address."""
    key: str | None = free("OPENAI_API_KEY")
    """The environment variable that has the server's key, if it is set; null: send no key."""
    prompt: str = PROMPT
    """The question to the judge. {prompt}, {completion} and {field}, for a field that data.extra names, are filled in.
    The last line of the reply must be yes or no; it may have words and a colon before."""
    request: str = '{"temperature": 0, "max_tokens": 512}'
    """Other fields of a request, as JSON. A judge that thinks needs more max_tokens; some hosted models want
    max_completion_tokens."""
    threads: PositiveInt = free(16)
    """Requests at once."""
    timeout: PositiveFloat = free(120.0)
    """Seconds to wait for a reply before another try."""
    cache: str | None = free(None)
    """The file of the replies, which runs may share one after the other. Default: judge.jsonl in the run's folder."""

    def __post_init__(self):
        url = urlsplit(self.server)
        refuse_unless(
            url.scheme in ("http", "https") and url.hostname and not url.password,
            "judge.server: expected http://HOST:PORT or https://HOST, without a password",
        )
        refuse_unless("{completion}" in self.prompt, "judge.prompt: expected {completion} in it")
        with user_error("judge.request"):
            json.loads(self.request)


@dataclass(frozen=True, kw_only=True)
class Settings(online.Settings):
    judge: JudgeSettings


class Judge:
    """The checker; `begin` says whom it asks."""

    def begin(self, run) -> None:
        self.args = run.cfg.judge
        self.run = run
        self.server = Server(self.args.server, os.environ.get(self.args.key or ""))
        self.where = f"judge.server: {self.server.url}"  # for messages
        self.file = Path(self.args.cache or run.folder / "judge.jsonl").expanduser()
        self.lock = threading.Lock()

    def __call__(self, answers: list[Answer]) -> list[bool | None]:
        """Raises BadInput where the server refuses a request; Failed where it does not reply."""
        requests = [self.request(answer) for answer in answers]
        replies = self.replies()
        missing = list(dict.fromkeys(r for r in requests if key_of(r) not in replies))
        with progress("judging", len(missing)), ThreadPoolExecutor(self.args.threads) as pool:
            for _ in pool.map(self.ask, missing):
                advance()
                if self.run.fabric.world_size == 1:  # else the others do not wait here
                    self.run.stop.check(self.run.fabric.device)
        replies = self.replies()
        rows = [replies[key_of(request)] for request in requests]
        n_cut = sum(row.get("cut", False) for row in rows)
        if n_cut:
            say(
                f"judge.request: {n_cut:,} of {len(rows):,} replies were cut before their end, so they are no "
                "verdicts: more max_tokens, or a judge that thinks less"
            )
        return [None if row.get("cut") else verdict(row["reply"]) for row in rows]

    def request(self, answer: Answer) -> str:
        """The body of the request about an answer."""
        values = {**answer.fields, "prompt": answer.prompt, "completion": answer.completion}
        # in one pass: {completion} in a prompt's own text stays there
        text = re.sub(r"\{(\w+)\}", lambda m: str(values.get(m[1], m[0])), self.args.prompt)
        messages = [{"role": "user", "content": text}]
        body = {"model": self.args.model, "messages": messages}
        return json.dumps(body | json.loads(self.args.request))

    def replies(self) -> dict[str, dict]:
        """The replies on the disk by key_of: {"request", "reply", "cut"}."""
        replies = {}
        if self.file.exists():
            for line in self.file.read_text(encoding="utf-8").split("\n"):
                with suppress(ValueError):  # a killed process may leave a torn row
                    row = json.loads(line)
                    replies[row["request"]] = row
        return replies

    def ask(self, body: str) -> None:
        """Put the server's reply to a request into the file. Called in a thread."""
        text, cut = self.reply(body)
        row = {"request": key_of(body), "reply": text, "cut": cut}
        with self.lock, open(self.file, "a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(row))  # a newline first, because the last row may be torn

    def reply(self, body: str) -> tuple[str, bool]:
        """The text of the server's reply, and whether it was cut."""
        for wait in (*WAITS, None):
            words = b""
            try:
                with self.server.open("/chat/completions", body, self.args.timeout) as reply:
                    words = reply.read()
                return read_reply(json.loads(words))
            except urllib.error.HTTPError as e:
                fault = f"{e.code} {e.reason}: {e.read(300).decode(errors='replace')!r}"
                if e.code != 429 and e.code < 500:
                    raise BadInput(f"{self.where}: {fault}") from None
            except (OSError, HTTPException) as e:
                fault = f"no reply as expected: {e!r}"
            except (ValueError, LookupError, TypeError, AttributeError):
                # some servers report an error in a reply with status 200
                fault = f"no reply as expected: {words[:300].decode(errors='replace')!r}"
            if wait is not None:
                time.sleep(wait)
        raise Failed(f"{self.where}: {len(WAITS) + 1} times {fault}")


def key_of(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:32]


def verdict(reply: str) -> bool | None:
    """True if the last line is yes, False if it is no, otherwise None. None, too, if the reply ends within the judge's
    thoughts."""
    answer = reply.rpartition("</think>")[2].strip().lower()
    # without lines of signs alone
    lines = [line for line in answer.split("\n") if re.search("[a-z]", line)]
    if not lines or answer.startswith("<think>"):
        return None
    word = VERDICT.fullmatch(lines[-1].strip())
    return word[1] == "yes" if word else None


judge = Judge()


class Judged(Trainer):
    def __init__(self, run):
        super().__init__(run)
        judge.begin(run)


if __name__ == "__main__":
    run_cli(lambda: online.main(settings=Settings, trainer=Judged, checker=judge))
