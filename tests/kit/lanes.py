"""Lanes as a connection of the gateway makes them, for tests that are their clients."""

from __future__ import annotations

from collections.abc import Callable

from kvasir.native import SocketLane
from kvasir.telemetry.histogram import Histogram


def socket_lane(
    fd: int,
    gaps: Histogram,
    *,
    write: Callable[[bytes], None],
    pending: Callable[[], int] = lambda: 0,
    before: bytes = b"",
    after: bytes = b"",
    chunked: bool = False,
    last_s: float = 0.0,
) -> SocketLane:
    """A lane into `fd` whose gaps are counted in `gaps`."""
    return SocketLane(
        fd=fd,
        pending=pending,
        write=write,
        before=before,
        after=after,
        chunked=chunked,
        bounds=gaps.bounds,
        counts=gaps.counts,
        total=gaps.total,
        last_s=last_s,
    )
