"""An S3-compatible server in this process, for tests: that of moto, which knows nothing of our client.

It checks signatures only after `refuse_strangers`, and keeps objects in memory, of all servers of a process
together: each test has a bucket of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import uuid
from collections.abc import Iterator
from typing import Self

from moto.server import ThreadedMotoServer

from kvasir.config.spec.redis import S3ServerSpec

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "no-secret", "AWS_REGION": "us-east-1"}
"""Credentials, as the processes that use the server find them."""


class S3Server:
    """A server on the loopback interface, which runs within the context."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.url = ""

    def __enter__(self) -> Self:
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    @property
    def spec(self) -> S3ServerSpec:
        """The server as the deployment spec names it."""
        return S3ServerSpec(endpoint=self.url)

    def bucket(self) -> str:
        """Create a bucket, and return its name."""
        name = f"bucket-{uuid.uuid4().hex}"
        self._ask("PUT", f"/{name}")
        return name

    def unfinished(self, bucket: str) -> int:
        """Return how many uploads in parts are neither completed nor aborted."""
        return self._ask("GET", f"/{bucket}?uploads").count("<Upload>")

    @contextlib.contextmanager
    def refuse_strangers(self) -> Iterator[None]:
        """Refuse credentials that the server did not issue, which are all, within the context."""
        self._ask("POST", "/moto-api/reset-auth", "0")
        try:
            yield
        finally:
            self._ask("POST", "/moto-api/reset-auth", "inf")

    def _ask(self, method: str, path: str, body: str = "") -> str:
        with contextlib.closing(http.client.HTTPConnection(self.url.removeprefix("http://"))) as connection:
            connection.request(method, path, body)
            response = connection.getresponse()
            text = response.read().decode()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: {response.status} {text}")
        return text
