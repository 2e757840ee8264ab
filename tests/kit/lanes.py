"""Lanes as the gateway's connections create them, for tests that act as clients."""

from __future__ import annotations

from collections.abc import Callable

from kvasir.native import SocketLane, StreamGaps
from kvasir.telemetry.families.updated import Histogram


def socket_lane(
    fd: int,
    gaps: StreamGaps,
    *,
    write: Callable[[bytes], None],
    pending: Callable[[], int] = lambda: 0,
    before: bytes = b"",
    after: bytes = b"",
    chunked: bool = False,
    plain: bool = True,
) -> SocketLane:
    """A lane into `fd` whose token gaps are measured in `gaps`."""
    return SocketLane(
        fd=fd,
        plain=plain,
        pending=pending,
        write=write,
        before=before,
        after=after,
        chunked=chunked,
        gaps=gaps,
    )


def stream_gaps(histogram: Histogram, *, first_s: float | None = 0.0) -> StreamGaps:
    """Gaps of a stream that are counted in `histogram`. `first_s` is the time of its first token, if any."""
    gaps = StreamGaps(histogram.bounds, histogram.counts, histogram.total)
    if first_s is not None:
        gaps.add(1, first_s)
    return gaps
