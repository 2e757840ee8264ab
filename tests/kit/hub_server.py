"""A Hugging Face Hub on this machine: serves model folders by the part of its API that downloads use."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0" * 39 + "1"
_PATH = re.compile(r"/(?:api/models/)?([^/]+/[^/]+)/(revision|resolve|tree)/([^/?]+)/?([^?]*)")


@dataclass
class Hub:
    """Models by id, and the Hub's error code instead of a model. `sent_bytes` counts what files it sent."""

    folders: dict[str, Path] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    url: str = ""
    sent_bytes: int = 0


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` at its `url`."""
    server = _Server(hub)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""

    def _hub(self) -> Hub:
        assert isinstance(self.server, _Server)
        return self.server.hub

    def _answer(self, *, body: bool) -> None:
        asked = _PATH.match(self.path)
        name, what, revision, file = asked.groups() if asked else ("", "", "", "")
        hub = self._hub()
        folder = hub.folders.get(name)
        if folder is None or revision not in ("main", COMMIT):
            missing = "RepoNotFound" if folder is None else "RevisionNotFound"
            code = hub.errors.get(name, missing)
            if code == "InvalidToken":
                self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
            else:
                self._send(403 if code == "GatedRepo" else 404, b"", {"X-Error-Code": code})
        elif what == "revision":
            files = [{"rfilename": path.name, "size": path.stat().st_size} for path in folder.iterdir()]
            self._json({"id": name, "sha": COMMIT, "siblings": files})
        elif what == "tree":
            sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
            self._json([{"type": "file", "oid": n, "path": n, "size": size} for n, size in sizes.items()])
        else:
            self._file(folder / file, body=body)

    def _json(self, page: object) -> None:
        self._send(200, json.dumps(page).encode(), {"Content-Type": "application/json"})

    def _file(self, path: Path, *, body: bool) -> None:
        size = path.stat().st_size
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(part[1]), min(int(part[2]) + 1, size)) if part else (0, size)
        headers = {"ETag": f'"{path.name}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if part:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        if not body:
            self._send(200, b"", headers | {"Content-Length": str(size)})
            return
        with path.open("rb") as stream:
            stream.seek(begin)
            content = stream.read(end - begin)
        self._hub().sent_bytes += len(content)
        self._send(206 if part else 200, content, headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)
