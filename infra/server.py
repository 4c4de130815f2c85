"""Requests to an OpenAI-compatible server of somebody else: rate.py and examples/judge.py ask one."""

import urllib.request
from http.client import HTTPResponse


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        """A redirect is an error: it could take the key to another server."""


class Server:
    """Where a server is, and the key that it gets with each request."""

    def __init__(self, address: str, key: str | None):
        """address: `http://HOST:PORT`, with or without /v1. key: None sends none."""
        self.url = address.rstrip("/").removesuffix("/v1") + "/v1"
        self.headers = {"Content-Type": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        self.opener = urllib.request.build_opener(NoRedirect)

    def open(self, path: str, body: str | None, timeout: float) -> HTTPResponse:
        """The reply to a POST of this JSON, or to a GET where there is none. timeout: seconds. Raises OSError and
        HTTPException; HTTPError, an OSError, for a reply that is no success or names another address."""
        data = body.encode() if body else None
        request = urllib.request.Request(self.url + path, data, self.headers)
        return self.opener.open(request, timeout=timeout)
