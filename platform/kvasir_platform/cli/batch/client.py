"""Calls of `kvasir batch` to the gateway: JSON, an upload, and downloads that go to a file piece by piece."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from kvasir.core.errors import ConfigError, RequestError, UpstreamError
from kvasir_platform.cli.common.gateway_client import key_headers, reason_in
from kvasir_platform.cli.common.gateway_site import Site

_TIMEOUT_S = 60.0
_PIECE = 256 << 10
_ANSWER_LIMIT = 16 << 20


def asked(site: Site, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the answer to a call. Raises RequestError if the gateway refuses it, UpstreamError if it does
    not answer."""
    headers = {} if body is None else {"Content-Type": "application/json"}
    sent = None if body is None else json.dumps(body)
    with _answer(site, method, path, sent, headers) as response:
        return _object(site, path, response)


def upload(site: Site, path: Path, shown: Callable[[int, int], None]) -> dict[str, Any]:
    """Upload a file for a batch, and return it as the gateway has it. `shown` is called with the bytes that
    are sent, and all. Raises as `asked`, and ConfigError for a file that cannot be read."""
    boundary = secrets.token_hex(16)
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{path.name}"\r\n'
        "Content-Type: application/jsonl\r\n\r\n"
    ).encode("utf-8", "replace")
    end = f"\r\n--{boundary}--\r\n".encode()
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            headers = {
                "Content-Type": f"multipart/form-data; boundary={boundary}",
                "Content-Length": str(len(head) + size + len(end)),
            }
            pieces = _pieces(head, file, end, lambda sent: shown(sent, size))
            with _answer(site, "POST", "/v1/files", pieces, headers) as response:
                return _object(site, "/v1/files", response)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def download(site: Site, name: str, path: Path, *, force: bool) -> None:
    """Write the content of a file to `path`, whole or not at all. Raises as `upload`."""
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; name another file with --to, or replace it with --force")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with (
            _answer(site, "GET", f"/v1/files/{quote(name, safe='')}/content", None, {}) as response,
            draft.open("wb") as file,
        ):
            while piece := _read(site, response, _PIECE):
                file.write(piece)
            if response.length:
                raise UpstreamError(
                    f"the gateway at {site.authority} cut the connection {response.length} bytes before the "
                    "end; fetch it again"
                )
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)


def _read(site: Site, response: http.client.HTTPResponse, most: int) -> bytes:
    try:
        return response.read(most)
    except (OSError, http.client.HTTPException) as error:
        raise UpstreamError(f"the gateway at {site.authority} {site.explain(error)}") from error


def _object(site: Site, path: str, response: http.client.HTTPResponse) -> dict[str, Any]:
    try:
        value = json.loads(_read(site, response, _ANSWER_LIMIT))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UpstreamError(
            f"the gateway at {site.authority} returned no JSON object at {path}; is it a Kvasir gateway?"
        )
    return value


def _pieces(head: bytes, file: BinaryIO, end: bytes, shown: Callable[[int], None]) -> Iterator[bytes]:
    yield head
    sent = 0
    while piece := file.read(_PIECE):
        yield piece
        sent += len(piece)
        shown(sent)
    yield end


@contextlib.contextmanager
def _answer(
    site: Site, method: str, path: str, body: str | Iterator[bytes] | None, headers: dict[str, str]
) -> Iterator[http.client.HTTPResponse]:
    connection: http.client.HTTPConnection | None = None
    try:
        try:
            connection = site.connect(_TIMEOUT_S)
            # An iterator has its length in the headers.
            connection.request(method, path, body, {**key_headers(), **headers})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise UpstreamError(f"the gateway at {site.authority} {site.explain(error)}") from error
        if response.status != 200:
            reason = reason_in(_read(site, response, _ANSWER_LIMIT))
            raise RequestError(
                f"the gateway at {site.authority} refuses it: {reason}", status=response.status
            )
        yield response
    finally:
        if connection is not None:
            connection.close()
