"""Object storage: the calls of S3's API that read a bucket, over HTTP on this machine, behind a slow link.

The packages that read from S3 are the real ones; what they sign is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from load_tests.scenarios.sources.link import SlowLink

BUCKET = "models"
_PIECE = 1 << 20
_POLL_S = 0.05
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_CHANGED = "Thu, 01 Jan 2026 00:00:00 GMT"
_CHANGED_ISO = "2026-01-01T00:00:00.000Z"
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


def listing(sizes: Mapping[str, int], prefix: str) -> str:
    """The answer to ListObjectsV2: all of the objects, with their sizes in bytes, whose keys begin so."""
    found = [(key, size) for key, size in sorted(sizes.items()) if key.startswith(prefix)]
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>{_CHANGED_ISO}</LastModified>"
        f'<ETag>"{size:x}"</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>'
        for key, size in found
    )
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="{_NAMESPACE}"><Name>{BUCKET}</Name>'
        f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(found)}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
    )


def part(asked: str | None, size: int) -> tuple[int, int]:
    """Where the part of an object of `size` bytes begins and ends that the header Range asks for, the end
    excluded. Raise ValueError if it asks for something else than one range of the object."""
    if asked is None:
        return 0, size
    found = _RANGE.fullmatch(asked)
    if found is None or int(found[1]) >= size:
        raise ValueError(f"no range of {size} bytes: {asked}")
    return int(found[1]), min(size, int(found[2]) + 1) if found[2] else size


class SlowBucket:
    """A bucket with the files of `folder`, without folders in it, below the key `folder.name`. It listens on
    this machine only."""

    def __init__(self, folder: Path, link: SlowLink) -> None:
        objects = {f"{folder.name}/{path.name}": path for path in folder.iterdir() if path.is_file()}
        self.uri = f"s3://{BUCKET}/{folder.name}"
        self._server = _Server(objects, link)
        self._thread = Thread(target=self._server.serve_forever, args=(_POLL_S,), name="bucket", daemon=True)

    @property
    def variables(self) -> dict[str, str]:
        """The environment of processes that read the bucket."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "measured",
            "AWS_SECRET_ACCESS_KEY": "measured",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, objects: Mapping[str, Path], link: SlowLink) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects = objects
        self.link = link


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        key = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        if key:
            self._send_object(key)
        else:
            prefix = parse_qs(url.query).get("prefix", [""])[0]
            sizes = {name: path.stat().st_size for name, path in self.server.objects.items()}
            self._send_text(200, listing(sizes, prefix))

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a stream is thousands of requests."""

    def _send_object(self, key: str) -> None:
        path = self.server.objects.get(key)
        if path is None:
            self._send_text(404, f"<Error><Code>NoSuchKey</Code><Key>{escape(key)}</Key></Error>")
            return
        size = path.stat().st_size
        asked = self.headers.get("Range")
        try:
            begin, end = part(asked, size)
        except ValueError:
            self._send_text(416, "<Error><Code>InvalidRange</Code></Error>")
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Type", "binary/octet-stream")
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{size:x}"')
        self.send_header("Last-Modified", _CHANGED)
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.end_headers()
        if self.command == "GET":
            self._send_bytes(path, begin, end)

    def _send_bytes(self, path: Path, begin: int, end: int) -> None:
        with path.open("rb") as file:
            for at in range(begin, end, _PIECE):
                count = min(_PIECE, end - at)
                self.server.link.carry(count)
                self.connection.sendfile(file, at, count)

    def _send_text(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
