"""POST to one URL, many times: a bounded pool of connections, every answer bounded in time and size."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httptools

from kvasir.config.checks.outbound import OutboundRefused, OutboundTarget
from kvasir_platform.gateway.http.outbound import Open, Resolve, connect, system_resolve

MAX_HEAD_BYTES = 16 << 10
MAX_BODY_BYTES = 256 << 10
_MAX_ANSWER_BYTES = 2 * (MAX_HEAD_BYTES + MAX_BODY_BYTES)
"""With what chunked coding adds."""
_MAX_AGE_S = 60.0
"""A connection that is older is not used again, so that names which move are followed."""
_READ_BYTES = 64 << 10
_MAX_TOKEN_BYTES = 16 << 10


class PostError(Exception):
    """No answer that can be used. `again`: whether a further try may go better."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


@dataclass(frozen=True, slots=True)
class PostTarget:
    """Where to, and how. `private`, see `check_address`."""

    target: OutboundTarget
    private: bool = False
    context: ssl.SSLContext | None = None
    token_file: str | None = None


class _Answer:
    """Takes an answer apart as it comes. The parser calls these methods."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.head_bytes = 0
        self.status = 0
        self.complete = False
        self.keeps = False
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.head_bytes += len(name) + len(value)
        if self.head_bytes > MAX_HEAD_BYTES:
            raise ValueError("its headers are too large")

    def on_body(self, piece: bytes) -> None:
        self.body += piece
        if len(self.body) > MAX_BODY_BYTES:
            raise ValueError("its body is too large")

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("it answers more than was asked")

    def on_message_complete(self) -> None:
        status = self.parser.get_status_code()
        if status < 200:
            # What comes before an answer, as 103 is.
            return
        self.status, self.complete = status, True
        # The parser forgets it with the message's end.
        self.keeps = self.parser.should_keep_alive()


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    opened_s: float
    head: bytes

    def close(self) -> None:
        self.writer.transport.abort()


class HttpPoster:
    """A pool for one endpoint. Used from one event loop."""

    def __init__(
        self,
        endpoint: PostTarget,
        *,
        connections: int,
        now: Callable[[], float],
        resolve: Resolve = system_resolve,
    ) -> None:
        self._endpoint = endpoint
        self._now = now
        self._resolve = resolve
        self._free = asyncio.Semaphore(connections)
        self._idle: list[_Connection] = []
        self._closed = False

    async def post(self, body: bytes) -> bytes:
        """The body of the answer to `body`, which is JSON. Raises PostError. Bound it in time: cancelling
        closes its connection."""
        async with self._free:
            while (connection := self._reusable()) is not None:
                try:
                    return await self._exchange(connection, body)
                except ConnectionError:
                    # The server had closed it while it was idle, and nothing was heard of this request.
                    continue
            connection = await self._open()
            try:
                return await self._exchange(connection, body)
            except ConnectionError as error:
                raise PostError("the connection was lost", again=True) from error

    def close(self) -> None:
        """Close what is idle, and keep nothing from here on."""
        self._closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _reusable(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            young = self._now() - connection.opened_s < _MAX_AGE_S
            if young and not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.close()
        return None

    async def _open(self) -> _Connection:
        endpoint = self._endpoint
        try:
            token = b"" if endpoint.token_file is None else token_header(Path(endpoint.token_file))
        except OSError as error:
            raise PostError("the token for it cannot be read", again=False) from error
        try:
            opened: Open = await connect(
                endpoint.target, private=endpoint.private, context=endpoint.context, resolve=self._resolve
            )
        except OutboundRefused as error:
            raise PostError(str(error), again=False) from error
        except OSError as error:
            raise PostError(f"no connection to {endpoint.target.host}", again=True) from error
        head = (
            b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\naccept: application/json\r\n"
            b"user-agent: kvasir\r\n%bcontent-length: "
        ) % (endpoint.target.path.encode(), endpoint.target.authority.encode(), token)
        return _Connection(*opened, self._now(), head)

    async def _exchange(self, connection: _Connection, body: bytes) -> bytes:
        """One request and its answer. Raises ConnectionError where nothing was heard, PostError else."""
        kept = False
        try:
            connection.writer.write(b"%b%d\r\n\r\n%b" % (connection.head, len(body), body))
            answer = await self._read(connection.reader)
            status = answer.status
            kept = answer.keeps and not self._closed
        finally:
            if kept:
                self._idle.append(connection)
            else:
                connection.close()
        if status != 200:
            again = status in (408, 425, 429) or status >= 500
            raise PostError(f"it answered with status {status}", again=again)
        return bytes(answer.body)

    async def _read(self, reader: asyncio.StreamReader) -> _Answer:
        answer, heard = _Answer(), 0
        while not answer.complete:
            try:
                data = await reader.read(_READ_BYTES)
            except OSError as error:
                data = b""
                if not heard:
                    raise ConnectionResetError from error
            if not data:
                if heard:
                    raise PostError("its answer broke off", again=True)
                raise ConnectionResetError
            heard += len(data)
            # The parser keeps a header that does not end.
            if heard > _MAX_ANSWER_BYTES:
                raise PostError("its answer is too large", again=False)
            try:
                answer.parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                raise PostError("its answer is no sound HTTP, or too large", again=False) from error
        return answer


def token_header(path: Path) -> bytes:
    """The header line with the token in a file. Raises OSError."""
    with path.open("rb") as file:
        token = file.read(_MAX_TOKEN_BYTES).strip()
    if not token or any(byte < 0x21 or byte > 0x7E for byte in token):
        raise OSError(f"{path} does not hold one token")
    return b"authorization: Bearer %b\r\n" % token
