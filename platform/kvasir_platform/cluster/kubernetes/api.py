"""List and watch requests to the Kubernetes API server, by kubernetes_asyncio, with bounds on each response.

The library's aiohttp session is replaced by one with the router's bounds, and responses are read here as
they arrive (docs/adr/0021-kubernetes-asyncio-carries-requests.md). Import this module only where Kubernetes
discovery is used: the library costs 0.4 s of CPU and 45 MiB.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from kubernetes_asyncio.client import ApiClient, Configuration

from kvasir_platform.cluster.kubernetes.access import Access

T = TypeVar("T")

MAX_OBJECT_BYTES = 8 << 20
"""Maximum size of one watch event, and of one page of a list."""
MAX_LIST_BYTES = 64 << 20
PAGE_ITEMS = 20
MAX_RETRY_AFTER_S = 60.0
GONE = 410
_MAX_ERROR_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_MAX_LINE_BYTES = 256 << 10
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, seconds, probes: how a dead connection without traffic is detected."""


class ApiError(Exception):
    """A failed request to the API server. `status` is the HTTP status, 0 without a readable response;
    `retry_after_s` is the server's Retry-After, 0 without one."""

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
    """A whole collection at `version`: JSON objects by name; names are unique in a namespace."""

    version: str
    items: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Event:
    """A change, after which the collection is at `version`. `kind` is ADDED, MODIFIED, DELETED, or BOOKMARK:
    no change up to `version`."""

    kind: str
    name: str
    version: str
    value: bytes


class ApiServer:
    """Lists and watches collections, such as `/api/v1/namespaces/NAMESPACE/pods`. A response has to come
    within `timeout_s`. Every method raises ApiError."""

    def __init__(self, access: Access, *, timeout_s: float) -> None:
        self._access = access
        self._timeout_s = timeout_s

    async def list(self, collection: str, params: Mapping[str, str]) -> Listing:
        """Return all objects that `params` (labelSelector, fieldSelector) select, as of one version."""
        items: dict[str, bytes] = {}
        query = {**params, "limit": str(PAGE_ITEMS)}
        left = MAX_LIST_BYTES
        while left > 0:
            body = await self._page(collection, query)
            left -= len(body)
            page = _decode(body, _Page)
            for raw in page.items or ():
                items[_decode(raw, _Object).metadata.name] = bytes(raw)
            if not page.metadata.continue_:
                return Listing(page.metadata.resource_version, items)
            query["continue"] = page.metadata.continue_
        raise ApiError(f"{collection} has more than {MAX_LIST_BYTES} bytes")

    async def watch(
        self, collection: str, params: Mapping[str, str], version: str, for_s: float
    ) -> AsyncGenerator[Event, None]:
        """Yield changes after `version`, for at most `for_s` seconds. Ends when the server completes the
        response. An ApiError of status GONE means that `version` has expired: list again."""
        query = {
            **params,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(for_s))),
        }
        end_s = asyncio.get_running_loop().time() + for_s + self._timeout_s
        async with self._get(collection, query) as response:
            rest = b""
            while True:
                try:
                    async with asyncio.timeout_at(end_s):
                        piece = await response.content.readany()
                except TimeoutError:
                    raise ApiError("the watch did not end when it should have") from None
                if not piece:
                    return
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line:
                        yield _event(line)
                if len(rest) > MAX_OBJECT_BYTES:
                    raise ApiError("an event is too large")

    async def log(
        self, namespace: str, pod: str, params: Mapping[str, str], *, follow: bool
    ) -> AsyncGenerator[str, None]:
        """Yield the lines of a pod's log; `params` are those of the API (container, sinceSeconds, tailLines,
        follow). With `follow`, lines may be any time apart; longer ones than a few hundred KiB come in
        parts."""
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(pod, safe='')}/log"
        timeout_s = None if follow else self._timeout_s
        async with self._get(path, params, accept="*/*") as response:
            rest = b""
            while True:
                async with asyncio.timeout(timeout_s):
                    piece = await response.content.readany()
                *lines, rest = (rest + piece).split(b"\n")
                if rest and (not piece or len(rest) > _MAX_LINE_BYTES):
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    yield line.decode("utf-8", "replace")
                if not piece:
                    return

    async def _page(self, collection: str, query: Mapping[str, str]) -> bytes:
        end_s = asyncio.get_running_loop().time() + self._timeout_s
        async with self._get(collection, query) as response, asyncio.timeout_at(end_s):
            return await _body(response, MAX_OBJECT_BYTES)

    @asynccontextmanager
    async def _get(
        self, path: str, query: Mapping[str, str], accept: str = "application/json"
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response of status 200 to a GET, on a connection of its own, closed with the block. Raises
        ApiError, also for what fails while the block reads the response."""
        try:
            end_s = asyncio.get_running_loop().time() + self._timeout_s
            async with self._client() as client:
                async with asyncio.timeout_at(end_s):
                    response: aiohttp.ClientResponse = await client.call_api(
                        path,
                        "GET",
                        query_params=list(query.items()),
                        # The bounds are on decoded bytes, so the server should not compress them.
                        header_params={"Accept": accept, "Accept-Encoding": "identity"},
                        auth_settings=["BearerToken"],
                        _preload_content=False,
                    )
                try:
                    if response.status != 200 or response.history:
                        async with asyncio.timeout_at(end_s):
                            raise await _refusal(response)
                    yield response
                finally:
                    _abort(response)
        except TimeoutError:
            raise ApiError(f"it did not answer within {self._timeout_s:g} s") from None
        except (OSError, aiohttp.ClientError) as error:
            raise ApiError(_words(error)) from error

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[ApiClient]:
        """A client with the token and authority of the moment. Raises OSError if they cannot be read."""
        access, context = self._access, self._access.context()
        host = f"[{access.host}]" if ":" in access.host else access.host
        configuration = Configuration(
            host=f"https://{host}:{access.port}", api_key={"BearerToken": f"Bearer {access.token()}"}
        )
        configuration.ssl_ca_cert = str(access.folder / "ca.crt")
        async with ApiClient(configuration) as client:
            client.user_agent = "kvasir"
            # The library's session buffers 4 MiB, sets no TCP keepalive, and uses the environment's proxies.
            await client.rest_client.close()
            client.rest_client.pool_manager = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context, socket_factory=_socket),
                read_bufsize=_READ_BYTES,
            )
            yield client


async def probe_watch(api: ApiServer, collection: str, params: Mapping[str, str], version: str) -> None:
    """Open a watch, and end it after its first event or a second. Raises ApiError if it is not allowed."""
    async with aclosing(api.watch(collection, params, version, 1.0)) as events:
        async for _ in events:
            return


def _socket(
    address: tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, object],
) -> socket.socket:
    """A socket with TCP keepalive."""
    family, kind, proto, _, _ = address
    made = socket.socket(family, kind, proto)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def _abort(response: aiohttp.ClientResponse) -> None:
    """Close the connection at once. `response.close` alone waits for the server's end of TLS."""
    if response.connection is not None and (transport := response.connection.transport) is not None:
        transport.abort()
    response.close()


async def _body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the body. Raises ApiError if it has more than `limit` bytes."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > limit:
            raise ApiError("the response is too large")
    return bytes(body)


async def _refusal(response: aiohttp.ClientResponse) -> ApiError:
    body = await _body(response, _MAX_ERROR_BYTES)
    try:
        message = msgspec.json.decode(body, type=_Status).message
    except msgspec.DecodeError:
        message = ""
    after = response.headers.get("Retry-After", "")
    return ApiError(
        message[:1000] or f"the response has status {response.status}",
        status=response.status,
        retry_after_s=min(float(after), MAX_RETRY_AFTER_S) if after.isdecimal() else 0.0,
    )


def _event(line: bytes) -> Event:
    if len(line) > MAX_OBJECT_BYTES:
        raise ApiError("an event is too large")
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
        raise ApiError(f"the response cannot be parsed: {error}") from error


def _words(error: OSError | aiohttp.ClientError) -> str:
    """Describe an error of the connection, of TLS, or of HTTP."""
    match error:
        case aiohttp.ClientConnectorCertificateError(certificate_error=reason):
            detail = getattr(reason, "verify_message", reason)
            return f"its certificate is not signed by the cluster's authority: {detail}"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError():
            return "the connection was closed"
        case aiohttp.ClientResponseError():
            return "the response is not valid HTTP, or is too large"
        case OSError(filename=str(name), strerror=reason):
            return f"{name}: {reason}"
        case OSError(strerror=str(reason)) if reason:
            return reason
    return str(error) or type(error).__name__
