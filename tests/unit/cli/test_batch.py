"""`kvasir batch` against a gateway that answers with a script of states."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from kvasir_platform.cli.batch import actions
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.main import main

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}


def batch(status: str, done: int = 0, failed: int = 0, **fields: Any) -> dict[str, Any]:
    counts = {"total": 10, "completed": done, "failed": failed}
    shown = {"id": "batch_1", "status": status, "endpoint": "/v1/completions", "created_at": 0}
    return {**shown, "request_counts": counts, **fields}


class Script:
    """A gateway with `answers` by method and path, the last of each again and again; `bodies` were sent. It
    cuts the content of files `unsent` bytes before the end."""

    def __init__(self) -> None:
        self.answers: dict[str, list[tuple[int, bytes]]] = {}
        self.bodies: dict[str, bytes] = {}
        self.unsent = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _do(self) -> None:
                key = f"{self.command} {self.path}"
                outer.bodies[key] = self.rfile.read(int(self.headers.get("content-length") or 0))
                listed = outer.answers.get(key, [(404, b'{"error": {"message": "no such"}}')])
                status, body = listed.pop(0) if len(listed) > 1 else listed[0]
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                unsent = outer.unsent if key.endswith("/content") else 0
                self.wfile.write(body[: len(body) - unsent])

            do_GET = do_POST = do_DELETE = _do

            def log_message(self, format: str, *args: object) -> None:
                """No output."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def answer(self, key: str, *values: object, status: int = 200) -> None:
        bodies = [value if isinstance(value, bytes) else json.dumps(value).encode() for value in values]
        self.answers[key] = [(status, body) for body in bodies]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path))
    monkeypatch.delenv("KVASIR_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    made = Script()
    yield made
    made.close()


def run(script: Script, *arguments: str) -> int:
    return main(["batch", *arguments, "--address", script.address])


def test_submit_uploads_the_file_and_takes_the_endpoint_from_its_first_line(
    script: Script, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("\n" + json.dumps(LINE))
    script.answer("POST /v1/files", {"id": "file-1"})
    script.answer("POST /v1/batches", batch("validating"))
    assert run(script, "submit", str(file), "--window", "7d") == 0
    assert file.read_bytes() in script.bodies["POST /v1/files"]
    asked = json.loads(script.bodies["POST /v1/batches"])
    assert asked == {
        "input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "7d",
    }  # fmt: skip
    assert "kvasir batch watch batch_1" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [("--window", "soon"), ("--window", "0h"), ("--endpoint", "/v1/images")])
def test_what_no_gateway_takes_is_refused_before_the_upload(
    script: Script, tmp_path: Path, capsys: Any, wrong: tuple[str, str]
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(LINE))
    assert run(script, "submit", str(file), *wrong) == 2
    assert wrong[1] in capsys.readouterr().err
    assert not script.bodies


def test_a_file_whose_batch_is_refused_is_deleted(script: Script, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(LINE))
    script.answer("POST /v1/files", {"id": "file-1"})
    script.answer("POST /v1/batches", {"error": {"message": "up to 720h"}}, status=400)
    script.answer("DELETE /v1/files/file-1", {"id": "file-1", "deleted": True})
    assert run(script, "submit", str(file), "--window", "99999d") == 1
    assert "up to 720h" in capsys.readouterr().err
    assert "DELETE /v1/files/file-1" in script.bodies


def test_a_file_without_a_url_asks_for_the_endpoint(script: Script, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("{}")
    assert run(script, "submit", str(file)) == 2
    assert "--endpoint" in capsys.readouterr().err


def test_watch_shows_progress_until_the_end(script: Script, capsys: Any) -> None:
    done = batch("completed", 9, 1, output_file_id="file-o")
    script.answer("GET /v1/batches/batch_1", batch("in_progress", 0), batch("in_progress", 5), done)
    clock = iter(range(0, 1000, 20))
    site, output = Site(script.address), CommandOutput(json=False)
    assert actions.watch("batch_1", site, output, pause=lambda _: None, now=lambda: float(next(clock))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "0/10 lines" in lines[0]
    assert "5/10 lines, 0.0" in lines[1] or "a second" in lines[1]
    assert "10/10 lines, 1 failed" in lines[2]
    assert "kvasir batch fetch batch_1" in lines[3]


def test_watch_of_a_failed_batch_names_the_lines(script: Script, capsys: Any) -> None:
    errors = {"data": [{"code": "x", "message": "no url", "param": None, "line": 3}]}
    script.answer("GET /v1/batches/batch_1", batch("failed", errors=errors))
    assert run(script, "watch", "batch_1") == 1
    assert "line 3: no url" in capsys.readouterr().out


def test_fetch_writes_answers_and_errors_and_replaces_no_file(
    script: Script, tmp_path: Path, capsys: Any
) -> None:
    script.answer("GET /v1/batches/batch_1", batch("completed", output_file_id="o", error_file_id="e"))
    script.answer("GET /v1/files/o/content", b"answers\n")
    script.answer("GET /v1/files/e/content", b"errors\n")
    assert run(script, "fetch", "batch_1") == 0
    assert (tmp_path / "batch_1.jsonl").read_text() == "answers\n"
    assert (tmp_path / "batch_1.jsonl.errors").read_text() == "errors\n"
    assert run(script, "fetch", "batch_1") == 2
    assert "--force" in capsys.readouterr().err
    assert run(script, "fetch", "batch_1", "--force") == 0


def test_fetch_of_a_batch_that_runs_says_to_wait(script: Script, capsys: Any) -> None:
    script.answer("GET /v1/batches/batch_1", batch("in_progress"))
    assert run(script, "fetch", "batch_1") == 2
    assert "kvasir batch watch batch_1" in capsys.readouterr().err


def test_batches_are_listed(script: Script, capsys: Any) -> None:
    script.answer("GET /v1/batches?limit=20", {"data": [batch("completed", 10)]})
    assert run(script, "list") == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["ID", "STATUS", "LINES"]
    assert line.split()[:4] == ["batch_1", "completed", "10", "10"]


def test_a_download_that_is_cut_leaves_no_file(script: Script, tmp_path: Path, capsys: Any) -> None:
    script.answer("GET /v1/batches/batch_1", batch("completed", output_file_id="o"))
    script.answer("GET /v1/files/o/content", b"answers\n")
    script.unsent = 3
    assert run(script, "fetch", "batch_1") == 1
    assert "3 bytes before the end" in capsys.readouterr().err
    assert list(tmp_path.glob("*batch_1*")) == []


@pytest.mark.parametrize("name", ["é", "a b", "../files", "a?b", "%"])
def test_an_id_of_any_text_is_asked_for_as_it_is(script: Script, name: str, capsys: Any) -> None:
    assert run(script, "watch", name) == 1
    assert "no such" in capsys.readouterr().err
    assert list(script.bodies) == [f"GET /v1/batches/{quote(name, safe='')}"]


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"\xff"])
def test_a_server_that_is_no_gateway_is_named(script: Script, answer: bytes, capsys: Any) -> None:
    script.answer("GET /v1/batches?limit=20", answer)
    assert run(script, "list") == 1
    assert "is it a Kvasir gateway?" in capsys.readouterr().err


def test_a_refusal_is_said_as_the_gateway_says_it(script: Script, capsys: Any) -> None:
    assert run(script, "cancel", "batch_2") == 1
    assert "no such" in capsys.readouterr().err
