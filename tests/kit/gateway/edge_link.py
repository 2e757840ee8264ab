"""An edge and its core in one process: both ends of a link over a real socket pair."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvasir.clock import MonotonicClock
from kvasir.config.spec.edge import ResponsesSpec
from kvasir.ports.limits import RateLimits
from kvasir.ports.router import RequestPort
from kvasir_platform.edge.core_endpoint import MAX_WAITING_BYTES, CoreEndpoint, CoreParts
from kvasir_platform.edge.core_link import CoreLink
from kvasir_platform.edge.core_pages import CorePages
from kvasir_platform.edge.core_status import core_status_of
from kvasir_platform.edge.edge_metrics import EdgeMetrics
from kvasir_platform.edge.frames import EdgeWelcome, ErrorNote, ToEdge
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.operator.operators import OperatorPages
from kvasir_platform.gateway.responses.memory_store import MemoryResponses
from kvasir_platform.gateway.serving.remote_core import RemoteCore
from kvasir_platform.gateway.serving.request_names import RequestNames
from kvasir_platform.gateway.tenants.memory_limits import MemoryLimits

SECRET = b"s" * 32
WELCOME = EdgeWelcome(b"{}", [("127.0.0.1", 1)])


@dataclass
class Heard:
    """What the core received from its edge besides requests."""

    started: list[tuple[str, int]] = field(default_factory=list)
    failed: list[ErrorNote] = field(default_factory=list)
    lost: int = 0

    def note_lost(self) -> None:
        """The link is closed."""
        self.lost += 1


@dataclass
class Linked:
    """Both ends of a link."""

    link: CoreLink
    end: CoreEndpoint
    core: CoreParts
    heard: Heard
    frames: list[ToEdge]
    """Messages that the edge received."""

    def hold(self, *, holding: bool = True) -> None:
        """Stop the edge's reading, as in a stopped process, or resume it."""
        transport: Any = self.link._pipe._transport
        if holding:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def shorten(self) -> None:
        """Let the kernel hold as little as it can of what the core sends."""
        transport = self.end._pipe._transport
        assert transport is not None
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)

    def say_raw(self, data: bytes) -> None:
        """Send bytes that the edge's code would not send."""
        transport = self.link._pipe._transport
        assert transport is not None
        transport.write(data)


def page(exchange: Exchange) -> None:
    """A page that shows its request."""
    exchange.respond(200, exchange.request.path.encode() + exchange.request.body)


def core_parts(
    router: RequestPort, limits: RateLimits | None = None, own: Callable[[], Iterable[bytes]] = tuple
) -> CoreParts:
    """A core around `router`; `own` returns its metrics."""
    clock = MonotonicClock()
    figures, pages = EdgeMetrics(own), OperatorPages(RequestNames(16), *[page] * 11)
    return CoreParts(
        router=router,
        limits=MemoryLimits(clock.now) if limits is None else limits,
        responses=MemoryResponses(ResponsesSpec(), clock.now),
        names=pages.names,
        pages=CorePages(figures, pages),
        figures=figures,
        now=clock.now,
    )


@asynccontextmanager
async def linked(
    core: CoreParts,
    *,
    name: str = "edge-0",
    max_waiting_bytes: int = MAX_WAITING_BYTES,
    fast_path: bool = True,
) -> AsyncIterator[Linked]:
    """A link that is open until the context ends."""
    ours, theirs = socket.socketpair()
    heard = Heard()
    end = CoreEndpoint(
        name,
        core,
        on_started=lambda host, port: heard.started.append((host, port)),
        on_failed=heard.failed.append,
        on_lost=heard.note_lost,
        max_waiting_bytes=max_waiting_bytes,
    )
    link = CoreLink(MonotonicClock(), fast_path=fast_path)
    await end.connect(ours, WELCOME)
    await link.connect(theirs)
    end.send_status(core_status_of(core.router, core.shares()))
    frames: list[ToEdge] = []
    receive = link._pipe._receive

    def keep(frame: ToEdge) -> None:
        frames.append(frame)
        receive(frame)

    link._pipe._receive = keep
    try:
        yield Linked(link, end, core, heard, frames)
    finally:
        link.close()
        end.abort()


def far_core(both: Linked) -> RemoteCore:
    """The core as a gateway at the other end of the link sees it."""
    link = both.link
    port: RequestPort = link.router
    return RemoteCore(
        port, link.limits, link.responses, link.names, SECRET, link.pages.show, link.router.shares
    )
