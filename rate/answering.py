"""Who answers on the page: a model in this process, or one behind an OpenAI-compatible server.

Both have `name`, `chat` (whether a prompt is messages), `asked` (the record as the model is asked) and `answer` (the
text of an answer, and whether it was cut at the length limit).
"""

import json
import os
import secrets
import threading
import urllib.error
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from generate import AskedModel
from infra.console import BadInput, Failed, user_error
from infra.server import Server, read_reply
from infra.settings import refuse_unless
from records.forms import Record, as_turns

if TYPE_CHECKING:
    from rate.__main__ import RateSettings


class OwnModel(AskedModel):
    def __init__(self, args: "RateSettings"):
        """Raises BadInput."""
        super().__init__(args.model, args.plain, args.chat_template_kwargs)
        self.args = args
        self.name = args.model
        self.chat = self.by_template
        self.answering = threading.Lock()
        self.closed = threading.Event()

    def answer(self, record: Record) -> tuple[str, bool]:
        """Raises BadInput for a prompt that does not fit, and Failed when the program ends."""
        ids = self.encode(record, advice=": begin a new chat")
        seed = secrets.randbelow(2**31)
        with self.answering:  # one answer at a time
            (answer,) = self.answers([ids], self.args, seed, self.check_open)
        return answer

    def check_open(self) -> None:
        if self.closed.is_set():
            raise Failed("python -m rate was stopped.")

    def close(self) -> None:
        """End the answer under way."""
        self.closed.set()
        with self.answering:
            pass


class OtherServer:
    chat = True

    def __init__(self, args: "RateSettings"):
        """Raises BadInput."""
        self.args = args
        refuse_unless(
            urlsplit(args.server).scheme in ("http", "https"),
            f"server: {args.server}: expected an address that begins with http:// or https://",
        )
        for name in ("plain", "chat_template_kwargs"):
            refuse_unless(
                not getattr(args, name),
                f"{name}: not with --server, which is asked with temperature, top_p, stop and max_new_tokens",
            )
        self.server = Server(args.server, os.environ.get("OPENAI_API_KEY"))
        self.name = args.model
        if not self.name:
            models = self.call("/models")
            with user_error("server", f"{self.server.url}/models: expected a list of models"):
                self.name = models["data"][0]["id"]

    def asked(self, record: Record) -> Record:
        """Raises BadInput for what only the server's own template could say."""
        refuse_unless(
            not record.template_kwargs, "chat_template_kwargs: a server is asked without them"
        )
        return record._replace(prompt=as_turns(record.prompt))

    def answer(self, record: Record) -> tuple[str, bool]:
        """Raises BadInput with what the server says."""
        args = self.args
        body = {
            "model": self.name,
            "messages": record.prompt,
            "temperature": args.temperature,
            "max_tokens": args.max_new_tokens,
        }
        # some servers refuse a field that they do not know, and a top_p of 1
        if args.top_p != 1:
            body["top_p"] = args.top_p
        if args.stop:
            body["stop"] = args.stop
        if record.tools:
            body["tools"] = record.tools
        answer = self.call("/chat/completions", json.dumps(body))
        words = json.dumps(answer)[:300]
        with user_error("server", f"an answer without choices[0].message.content: {words}"):
            said = read_reply(answer)
        refuse_unless(
            not said.thought,
            "server: its answer has the model's thoughts apart (reasoning_content), and a rating would be of the rest "
            "alone: turn thinking off, or the server's reasoning parser",
        )
        return said.text, said.cut

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
