"""Requests to an OpenAI-compatible server of somebody else: the page for thumbs and examples/judge.py ask one."""

import urllib.request
from http.client import HTTPResponse
from typing import NamedTuple
from urllib.parse import urlsplit

THIS_MACHINE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        """A redirect is an error: it could take the key to another server."""


class Server:
    """Where a server is, and the key that it gets with each request."""

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

    def open(self, path: str, body: str | None, timeout: float) -> HTTPResponse:
        """The reply to a POST of this JSON, or to a GET where there is none. timeout: seconds. Raises OSError and
        HTTPException; HTTPError, an OSError, for a reply that is no success or names another address."""
        data = body.encode() if body else None
        request = urllib.request.Request(self.url + path, data, self.headers)
        return self.opener.open(request, timeout=timeout)


class Said(NamedTuple):
    """What a model said, in a reply to /chat/completions."""

    text: str
    cut: bool
    """Whether it ended at the longest length."""
    thought: bool
    """Whether the server gives the model's thoughts apart from the text, which is then not all that it generated."""


def read_reply(reply: dict) -> Said:
    """The first choice of a reply. Raises LookupError, TypeError or AttributeError where there is none."""
    choice = reply["choices"][0]
    message = choice["message"]
    thought = any(message.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    text = message["content"] or ""
    if isinstance(text, list):  # Mistral's form: parts of text and of thoughts
        thought = thought or any(part["type"] == "thinking" for part in text)
        text = "".join(part["text"] for part in text if part["type"] == "text")
    return Said(text, choice.get("finish_reason") == "length", thought)
