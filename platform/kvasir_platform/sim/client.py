"""A simulated client that checks its stream for lost and repeated tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, Request
from kvasir.ports.router import RequestSummary

OnStream = Callable[[Delta | RequestSummary], None]


class ClientStream:
    """The StreamSink of one request. `on_event` gets everything that reaches the client; `broken` is how the
    stream was incomplete, "" while it is not."""

    def __init__(self, request: Request, on_event: OnStream | None = None) -> None:
        self.request = request
        self.tokens: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self.texts: list[str] = [""] * request.sampling.n
        self.last: Delta | None = None
        self.summary: RequestSummary | None = None
        self.error: KvasirError | None = None
        self.broken = ""
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self._on_event = on_event

    def on_delta(self, delta: Delta) -> None:
        """See StreamSink. Raises AssertionError if a token was lost or repeated."""
        tokens = self.tokens[delta.index]
        if self.ended.is_set() or delta.offset != len(tokens):
            self._break(f"{delta.request_id}: token {delta.offset} came at {len(tokens)}")
        tokens.extend(delta.token_ids)
        self.texts[delta.index] += delta.text
        self.last = delta
        self.started.set()
        if self._on_event is not None:
            self._on_event(delta)

    def lane(self, request_id: str) -> None:
        """None: it examines each delta."""

    def on_finish(self, summary: RequestSummary) -> None:
        """See StreamSink."""
        self._end(summary)

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None:
        """See StreamSink."""
        self.error = error
        self._end(summary)

    async def finished(self) -> RequestSummary:
        """Wait for the end. Raises the error if the stream ended with one."""
        await self.ended.wait()
        if self.error is not None:
            raise self.error
        if self.summary is None:
            raise AssertionError("ended without a summary")
        return self.summary

    def _end(self, summary: RequestSummary) -> None:
        if self.ended.is_set():
            self._break(f"{summary.request_id} ended twice")
        self.summary = summary
        self.ended.set()
        if self._on_event is not None:
            self._on_event(summary)

    def _break(self, how: str) -> None:
        self.broken = self.broken or how
        raise AssertionError(how)
