"""An S3-compatible server for tests: that of moto, which knows nothing of our client.

    python -m tests.kit.lab.s3_server

It prints its address, and serves until its standard input ends. It has a process of its own, because vLLM
looks into all modules that are imported when it starts, and those of the server cannot be looked into.

The server checks signatures only after `refuse_strangers`, and keeps objects in memory: each test has a
bucket of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from kvasir.config.spec.redis import S3ServerSpec

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "no-secret", "AWS_REGION": "us-east-1"}
"""Credentials, as the processes that use the server find them."""


class S3Server:
    """A server on the loopback interface, which runs within the context."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self.url = ""

    def __enter__(self) -> Self:
        argv, tree = [sys.executable, "-m", __name__], Path(__file__).parents[3]
        server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree)
        # The context of a process closes its input, at which the server ends, and waits for it.
        self._open.enter_context(server)
        assert server.stdout is not None
        self.url = server.stdout.readline().strip()
        if not self.url:
            self._open.close()
            raise RuntimeError(f"the S3 server did not start: exit status {server.returncode}")
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

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


def main() -> None:
    """Serve until standard input ends."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
