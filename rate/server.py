"""The page of a desk over HTTP, on this machine alone."""

import json
import re
import traceback
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from infra.console import BadInput, Failed, user_error
from infra.settings import refuse_unless
from rate.desk import Desk
from records.forms import parse_json

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


class RateServer(ThreadingHTTPServer):
    """The page of a desk on 127.0.0.1; no other machine reaches it."""

    # requests that wait to be taken; with the default, 5, some of a burst are lost
    request_queue_size = 64
    desk: Desk

    def __init__(self, port: int):
        with user_error("port", f"{port} (0: any free one)"):
            super().__init__(("127.0.0.1", port), PageHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class PageHandler(BaseHTTPRequestHandler):
    """GET / is the page; GET /state and POST /answer and /rate are JSON, an error too: {"error": text}."""

    server: RateServer

    def do_GET(self) -> None:
        code, result = self.result()
        is_page = isinstance(result, bytes)
        content = result if is_page else json.dumps(result).encode()
        kind = "text/html" if is_page else "application/json"
        with suppress(ConnectionError):  # the page was closed while the model was thinking
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    do_POST = do_GET

    def result(self) -> tuple[int, dict | bytes]:
        """The status and the desk's reply: the page, JSON, or an error in words."""
        if not self.is_from_here():
            return 403, {"error": "This page answers to 127.0.0.1 and localhost alone."}
        desk = self.server.desk
        actions = {
            "GET /": Path(__file__).with_name("page.html").read_bytes,
            "GET /state": desk.state,
            "POST /answer": lambda: desk.answer(self.body()),
            "POST /rate": lambda: desk.rate(self.body()),
        }
        action = actions.get(f"{self.command} {self.path}")
        if action is None:
            return 404, {"error": f"{self.path}: there is no such page"}
        try:
            return 200, action()
        except (BadInput, Failed) as e:
            return 400, {"error": str(e)}
        except Exception as e:
            traceback.print_exc()
            return 500, {"error": f"python -m rate failed: {type(e).__name__}: {e}"}

    def body(self) -> dict:
        """The request's JSON object. Raises BadInput."""
        # no other site can send this type without asking first
        is_json = self.headers.get_content_type() == "application/json"
        refuse_unless(is_json, "Content-Type: expected application/json")
        with user_error("request"):
            request = parse_json(self.rfile.read(int(self.headers["Content-Length"])))
        refuse_unless(isinstance(request, dict), "request: expected an object")
        return request

    def is_from_here(self) -> bool:
        """Whether the page itself asks. Another site in the same browser reaches 127.0.0.1 too, with another
        Origin. A name that an attacker points at 127.0.0.1 is in Host."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        is_local = re.fullmatch(r"(127\.0\.0\.1|localhost)(:\d+)?", host)
        return bool(is_local) and origin in (None, f"http://{host}")

    def log_message(self, *_) -> None:
        pass
