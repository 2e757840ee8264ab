"""Which responses `helm test` accepts as a streamed completion."""

from __future__ import annotations

import json
import runpy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.helm.rendering import CHART

STREAM = runpy.run_path(str(CHART / "files" / "stream.py"))
CHUNK = 'data: {"choices": [{"text": " there"}]}\n\n'
DONE = "data: [DONE]\n\n"


@contextmanager
def gateway(*answers: tuple[int, str]) -> Iterator[tuple[str, list[str]]]:
    """Answers requests one after the other; yields its address, and the keys that it was shown."""
    left, keys = list(answers), list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert asked["stream"] is True
            keys.append(self.headers["authorization"])
            status, body = left.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", keys
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(url: str, folder: Path, timeout_s: float = 5) -> int:
    (folder / "key").write_text("sk-kvasir-1\n")
    arguments = [f"--url={url}", "--model=m", f"--key-file={folder / 'key'}", f"--timeout-s={timeout_s}"]
    status: int = STREAM["main"](arguments)
    return status


def test_a_stream_with_text_and_an_end_is_one(tmp_path: Path) -> None:
    with gateway((200, CHUNK + CHUNK + DONE)) as (url, keys):
        assert run(url, tmp_path) == 0
    assert keys == ["Bearer sk-kvasir-1"]


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (200, CHUNK, "no end"),
        (200, DONE, "no text"),
        (200, 'data: {"error": {"message": "the engine died"}}\n\n', "the engine died"),
        (200, "data: {nonsense\n\n", "Expecting"),
        (401, '{"error": {"code": "invalid_api_key"}}', "invalid_api_key"),
    ],
)
def test_anything_else_fails_at_once_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int, body: str, why: str
) -> None:
    with gateway((status, body)) as (url, _):
        assert run(url, tmp_path) == 1
    assert why in capsys.readouterr().err


def test_workers_that_are_never_ready_are_waited_for_no_longer_than_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with gateway((503, '{"error": {"code": "no_workers"}}')) as (url, _):
        assert run(url, tmp_path, timeout_s=1) == 1
    assert "no_workers" in capsys.readouterr().err
