"""A gateway that answers what a test wrote down."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class CannedGateway:
    """`answers` maps a path to status and body, `later` to those that come first, one for each request, with
    headers of their own, if any; a path that ends in a slash stands for all below it, and a function is
    called with the body. `keys` has the Authorization header of each request, `posts` the path and body of
    those that ask for something."""

    address: str
    answers: dict[str, Any] = field(default_factory=dict)
    later: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    keys: list[str | None] = field(default_factory=list)
    posts: list[tuple[str, Any]] = field(default_factory=list)


@contextmanager
def canned_gateway() -> Iterator[CannedGateway]:
    """A gateway that answers until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            canned.posts.append((self.path, body))
            self._answer(body)

        def do_GET(self) -> None:
            self._answer(None)

        def _answer(self, sent: Any) -> None:
            canned.keys.append(self.headers.get("authorization"))
            first = canned.later.get(self.path)
            below = self.path[: self.path.rfind("/") + 1]
            known = canned.answers.get(self.path) or canned.answers.get(below, (404, {}))
            if callable(known):
                known = known(sent)
            status, body, *headers = first.pop(0) if first else known
            encoded = json.dumps(body).encode()
            self.send_response(status)
            for name, value in headers[0].items() if headers else ():
                self.send_header(name, value)
            self.send_header("content-length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        canned = CannedGateway(f"127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield canned
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def gateway() -> Iterator[CannedGateway]:
    with canned_gateway() as canned:
        yield canned
