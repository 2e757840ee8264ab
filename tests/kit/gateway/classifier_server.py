"""A small HTTP server that returns scripted verdicts on texts and records its requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Reply = Callable[[dict[str, Any]], object]
"""The answer to a request: a verdict, an HTTP answer as bytes, or None for no answer at all."""


@dataclass
class ClassifierServer:
    """Its address, scripted answer and recorded requests. While `gate` is clear it does not answer."""

    port: int = 0
    reply: Reply = field(default=lambda _: {"flagged": False})
    asked: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    most_open: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    met: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/judge"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        question = json.loads(await reader.readexactly(size))
        self.heads.append(head)
        self.asked.append(question)
        self.met.set()
        await self.gate.wait()
        said = self.reply(question)
        if said is None:
            return False
        if not isinstance(said, bytes):
            body = json.dumps(said).encode()
            said = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        writer.write(said)
        await writer.drain()
        return True


@asynccontextmanager
async def classifier_server(reply: Reply | None = None) -> AsyncIterator[ClassifierServer]:
    """A server on a free port of loopback."""
    made = ClassifierServer()
    made.gate.set()
    if reply is not None:
        made.reply = reply
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        made.gate.set()
        listening.close()


def status(code: int, more: bytes = b"") -> bytes:
    """An empty HTTP answer."""
    return b"HTTP/1.1 %d X\r\n%bcontent-length: 0\r\n\r\n" % (code, more)
