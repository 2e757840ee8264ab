"""Sends calls over HTTP. It is the only module of the package that knows aiohttp.

Nothing is retried: a benchmark reports what a client would have seen. Connections are kept and used again.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

from kvasir.core.errors import UpstreamError
from kvasir_platform.bench.client.answers import AnswerEvents, BrokenAnswerError, message_in, read_whole
from kvasir_platform.bench.client.dialect import Dialect
from kvasir_platform.bench.client.endpoint import BenchCall, CallResult

_BODY_LIMIT = 64 << 20
_MODELS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """A server: its URL without /v1, headers of every request, and how its certificate is verified."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None


class HttpConnections:
    """Connections to one server, at most `most` at a time. `now` is the clock of all times."""

    def __init__(self, target: HttpTarget, most: int, timeout_s: float, now: Callable[[], float]) -> None:
        self._target = target
        self._now = now
        self._timeout_s = timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=most, ssl=target.tls if target.tls is not None else True),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, 30.0)),
            headers=dict(target.headers),
        )

    @property
    def url(self) -> str:
        """The server's."""
        return self._target.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def models(self) -> list[dict[str, Any]]:
        """The server's models, as /v1/models lists them. Raises UpstreamError that says why there is no
        list."""
        try:
            timeout = aiohttp.ClientTimeout(total=_MODELS_TIMEOUT_S)
            async with self._session.get(f"{self._target.url}/v1/models", timeout=timeout) as answer:
                body = await _body(answer)
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamError(f"{self._target.url} does not answer: {_said(error)}") from error
        try:
            listed = json.loads(body)["data"]
        except (ValueError, KeyError, TypeError):
            listed = None
        if status != 200 or not isinstance(listed, list):
            raise UpstreamError(
                f"{self._target.url}/v1/models answered {status}: {message_in(body)}; name the model with "
                "--model"
            )
        return [each for each in listed if isinstance(each, dict) and each.get("id")]

    async def post(self, path: str, body: Mapping[str, Any], *, streams: bool) -> CallResult:
        """Send one call. Errors are in the result."""
        result = CallResult(self._now())
        payload = json.dumps(body, separators=(",", ":"))
        try:
            async with self._session.post(
                f"{self._target.url}{path}", data=payload, headers={"Content-Type": "application/json"}
            ) as answer:
                if answer.status != 200:
                    result.error = f"http_{answer.status}"
                    result.detail = message_in(await _body(answer))
                elif streams:
                    await self._stream(answer, result)
                else:
                    read_whole(await _body(answer), result)
        except BrokenAnswerError as error:
            result.error, result.detail = error.kind, error.detail
        except TimeoutError:
            result.error, result.detail = "timeout", f"no end within {self._timeout_s:g} s"
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
            result.error, result.detail = "disconnected", _said(error)
        except (aiohttp.ClientError, OSError) as error:
            result.error, result.detail = "connection", _said(error)
        result.ended_s = self._now()
        return result

    async def _stream(self, answer: aiohttp.ClientResponse, result: CallResult) -> None:
        stream = AnswerEvents(result)
        while data := await answer.content.readany():
            stream.feed(data, self._now())
        if not stream.ended:
            raise BrokenAnswerError("stream_broken", "the stream ended without [DONE]")
        if not result.chunks:
            raise BrokenAnswerError("no_output", "the stream had no output")


class HttpEndpoint:
    """The port over HTTP: calls of one model, written in one dialect."""

    def __init__(
        self, connections: HttpConnections, model: str, dialect: Dialect, more: Mapping[str, Any]
    ) -> None:
        self._connections = connections
        self._model = model
        self._dialect = dialect
        self._more = more

    async def send(self, call: BenchCall) -> CallResult:
        """As the port says."""
        body = self._dialect.body(self._model, call, self._more)
        return await self._connections.post(self._dialect.path, body, streams=bool(body.get("stream")))


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    """The whole body, up to a limit; what is more does not parse."""
    parts, length = [], 0
    while length < _BODY_LIMIT and (data := await answer.content.readany()):
        parts.append(data)
        length += len(data)
    return b"".join(parts)


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
