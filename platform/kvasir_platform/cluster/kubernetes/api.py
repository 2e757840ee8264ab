"""What is asked of the Kubernetes API server from inside the cluster, and the bounds on every answer.

A client of its own on the router's event loop: a router lists one collection and watches it. Those two
requests need bounds in time and in size, a token that is read anew because the kubelet replaces it, and a
connection that costs nothing while nothing happens (docs/adr/0021-own-kubernetes-client.md).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

import httptools
import msgspec

from kvasir.core.errors import ConfigError

T = TypeVar("T")

MAX_HEAD_BYTES = 16 << 10
MAX_OBJECT_BYTES = 8 << 20
"""Of one watch event, and of one page of a list."""
MAX_LIST_BYTES = 64 << 20
PAGE_ITEMS = 20
MAX_RETRY_AFTER_S = 60.0
GONE = 410
_MAX_ERROR_BYTES = 64 << 10
_MAX_FILE_BYTES = 1 << 20
_READ_BYTES = 64 << 10
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, seconds, probes: how a connection is found dead on which nothing is said for long."""


class ApiError(Exception):
    """The API server refused, or did not answer. `status` is HTTP's, 0 where no answer could be read;
    `retry_after_s` is how long it asks to be left alone."""

    def __init__(self, message: str, *, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s


class _Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _Object(msgspec.Struct):
    metadata: _Meta


class _Page(msgspec.Struct):
    metadata: _Meta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    message: str = ""
    code: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """A whole collection at `version`: JSON objects by their names, which are unique in a namespace."""

    version: str
    items: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Event:
    """A change, after which the collection is at `version`. `kind` is ADDED, MODIFIED, DELETED, or BOOKMARK:
    nothing has changed up to `version`."""

    kind: str
    name: str
    version: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API server is and who asks. `folder` has `token`, `ca.crt` and `namespace`."""

    host: str
    port: int
    folder: Path

    @classmethod
    def in_cluster(cls, folder: Path, environ: Mapping[str, str]) -> Access:
        """As Kubernetes tells every container. Raises ConfigError outside a cluster."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "")
        if not host or not port.isdigit():
            raise ConfigError(
                "discovery: kubernetes works inside a cluster only: KUBERNETES_SERVICE_HOST and "
                "KUBERNETES_SERVICE_PORT are not set; run the router in a pod, or choose another kind"
            )
        return cls(host, int(port), folder)

    def namespace(self) -> str:
        """The pod's own. Raises ConfigError where it is not told."""
        try:
            return self._read("namespace")
        except OSError as error:
            raise ConfigError(
                f"discovery: kubernetes: the pod's namespace cannot be read: {error}; set "
                "discovery.kubernetes.namespace, or mount the service account"
            ) from error

    def token(self) -> str:
        """The service account's. Raises OSError."""
        token = self._read("token")
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise OSError(f"{self.folder / 'token'} does not hold one token")
        return token

    def context(self) -> ssl.SSLContext:
        """By which the API server is verified. Raises OSError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(cadata=self._read("ca.crt"))
        return context

    def _read(self, name: str) -> str:
        with (self.folder / name).open(encoding="ascii", errors="replace") as file:
            return file.read(_MAX_FILE_BYTES).strip()


class _Answer:
    """Takes an answer apart as it comes. The parser calls these methods."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.status = 0
        self.complete = False
        self.retry_after_s = 0.0
        self._head_bytes = 0
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("its headers are too large")
        if name.lower() == b"retry-after" and value.isdigit():
            self.retry_after_s = min(float(value), MAX_RETRY_AFTER_S)

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self.body += piece
        if len(self.body) > MAX_OBJECT_BYTES + _READ_BYTES:
            raise ValueError("its answer is too large")

    def on_message_complete(self) -> None:
        self.complete = True


class _Exchange:
    """One request, on a connection of its own, and its answer as it comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.answer = _Answer()
        self._reader = reader
        self._writer = writer
        self._before_head = MAX_HEAD_BYTES + _READ_BYTES

    def send(self, request: bytes) -> None:
        self._writer.write(request)

    async def more(self) -> None:
        """Take in what came next. Raises ApiError where nothing more can."""
        data = await self._reader.read(_READ_BYTES)
        if not data:
            raise ApiError("the connection broke off")
        if not self.answer.status:
            # The parser keeps a header that does not end.
            self._before_head -= len(data)
            if self._before_head < 0:
                raise ApiError("its headers are too large")
        try:
            self.answer.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ApiError("its answer is no sound HTTP, or too large") from error

    async def whole(self, limit: int) -> bytes:
        """The body, of `limit` bytes at most."""
        while not self.answer.complete:
            await self.more()
            if len(self.answer.body) > limit:
                raise ApiError("its answer is too large")
        return bytes(self.answer.body)

    def close(self) -> None:
        self._writer.transport.abort()


class ApiServer:
    """Lists and watches collections, such as `/api/v1/namespaces/NAMESPACE/pods`. Each request is answered
    within `timeout_s`. Everything raises ApiError."""

    def __init__(self, access: Access, *, timeout_s: float) -> None:
        self._access = access
        self._timeout_s = timeout_s

    async def list(self, collection: str, params: Mapping[str, str]) -> Listing:
        """Everything that `params` (labelSelector, fieldSelector) select, of one moment."""
        items: dict[str, bytes] = {}
        query = {**params, "limit": str(PAGE_ITEMS)}
        left = MAX_LIST_BYTES
        while left > 0:
            page, size = await self._page(collection, query)
            left -= size
            for raw in page.items or ():
                items[_decode(raw, _Object).metadata.name] = bytes(raw)
            if not page.metadata.continue_:
                return Listing(page.metadata.resource_version, items)
            query["continue"] = page.metadata.continue_
        raise ApiError(f"{collection} has more than {MAX_LIST_BYTES} bytes")

    async def watch(
        self, collection: str, params: Mapping[str, str], version: str, for_s: float
    ) -> AsyncGenerator[Event, None]:
        """Changes after `version`, for `for_s` seconds at most. Ends when the server has ended it in good
        order. An ApiError of status GONE: what comes after `version` is not known any more, list anew."""
        query = {
            **params,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(for_s))),
        }
        end_s = asyncio.get_running_loop().time() + for_s + self._timeout_s
        async with self._asked(collection, query) as exchange:
            answer = exchange.answer
            while True:
                *lines, rest = answer.body.split(b"\n")
                answer.body = bytearray(rest)
                for line in lines:
                    if line:
                        yield _event(bytes(line))
                if answer.complete:
                    return
                if len(rest) > MAX_OBJECT_BYTES:
                    raise ApiError("an event is too large")
                try:
                    async with asyncio.timeout_at(end_s):
                        await exchange.more()
                except TimeoutError:
                    raise ApiError("the watch did not end when it should have") from None
                except OSError as error:
                    raise ApiError(_words(error)) from error

    async def _page(self, collection: str, query: Mapping[str, str]) -> tuple[_Page, int]:
        """A page, and its size in bytes."""
        try:
            async with asyncio.timeout(self._timeout_s), self._asked(collection, query) as exchange:
                body = await exchange.whole(MAX_OBJECT_BYTES)
        except TimeoutError:
            raise ApiError(self._late()) from None
        except OSError as error:
            raise ApiError(_words(error)) from error
        return _decode(body, _Page), len(body)

    @asynccontextmanager
    async def _asked(self, path: str, query: Mapping[str, str]) -> AsyncIterator[_Exchange]:
        """The exchange whose answer's head says 200."""
        exchange: _Exchange | None = None
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    exchange = await self._open()
                    exchange.send(self._head(path, query))
                    while not exchange.answer.status:
                        await exchange.more()
                    if exchange.answer.status != 200:
                        raise await _refusal(exchange)
            except TimeoutError:
                raise ApiError(self._late()) from None
            except OSError as error:
                raise ApiError(_words(error)) from error
            yield exchange
        finally:
            if exchange is not None:
                exchange.close()

    async def _open(self) -> _Exchange:
        access = self._access
        reader, writer = await asyncio.open_connection(
            access.host, access.port, limit=_READ_BYTES, ssl=access.context(), server_hostname=access.host
        )
        connection: socket.socket | None = writer.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if (option := getattr(socket, name, None)) is not None:
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
        return _Exchange(reader, writer)

    def _head(self, path: str, query: Mapping[str, str]) -> bytes:
        access = self._access
        host = f"[{access.host}]" if ":" in access.host else access.host
        return (
            f"GET {path}?{urlencode(query)} HTTP/1.1\r\nhost: {host}:{access.port}\r\n"
            f"authorization: Bearer {access.token()}\r\naccept: application/json\r\nuser-agent: kvasir\r\n"
            "connection: close\r\n\r\n"
        ).encode("ascii")

    def _late(self) -> str:
        return f"it did not answer within {self._timeout_s:g} s"


async def probe_watch(api: ApiServer, collection: str, params: Mapping[str, str], version: str) -> None:
    """Begin a watch, and end it after its first event or a second: whether it is allowed. Raises ApiError."""
    async with aclosing(api.watch(collection, params, version, 1.0)) as events:
        async for _ in events:
            return


async def _refusal(exchange: _Exchange) -> ApiError:
    body = await exchange.whole(_MAX_ERROR_BYTES)
    answer = exchange.answer
    try:
        message = msgspec.json.decode(body, type=_Status).message
    except msgspec.DecodeError:
        message = ""
    return ApiError(
        message[:1000] or f"it answered with status {answer.status}",
        status=answer.status,
        retry_after_s=answer.retry_after_s,
    )


def _event(line: bytes) -> Event:
    event = _decode(line, _Event)
    if event.type == "ERROR":
        status = _decode(event.object, _Status)
        raise ApiError(status.message[:1000] or "the watch failed", status=status.code)
    meta = _decode(event.object, _Object).metadata
    return Event(event.type, meta.name, meta.resource_version, bytes(event.object))


def _decode(raw: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"its answer is not understood: {error}") from error


def _words(error: OSError) -> str:
    """What a person can use of an error of the socket, or of TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not of the cluster's authority: {error.verify_message}"
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return error.strerror or str(error) or type(error).__name__
