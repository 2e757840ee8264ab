"""The fast path of a token: from a worker's message to the client's socket, in native code.

Nearly all deltas of a running stream are plain: the next tokens of its only choice, and their text. The
request machine, the sink and the event loop take longer to process one than the system call that sends it.
An eligible stream therefore gets a lane: one native call parses, frames and sends the deltas of
all streams of a message. Any other delta closes the lane of its stream and takes the ordinary path, which
opens another lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvasir.core.messages import EncodedStep
from kvasir.core.requests import Delta, StepBatch
from kvasir.native import Fan, StreamTokens
from kvasir.ports.router import Lane, StreamSink

LOAD_S = 0.01
"""Minimum interval between two load reports of a worker that are processed, in seconds."""
_MAX_WORKERS = 4096


class FastPath:
    """The lanes of a router. `place(request_id, delta)` returns the worker, the leg and the tokens of a
    request after `delta`; None if it cannot have a lane. Call `close` when a request ends."""

    def __init__(self, place: Callable[[str, Delta], tuple[str, str, StreamTokens] | None]) -> None:
        self._place = place
        self._fan = Fan()
        self._lanes: dict[str, Lane] = {}
        self._loaded_s: dict[str, float] = {}

    def __len__(self) -> int:
        """Number of open lanes."""
        return len(self._fan)

    def offer(self, request_id: str, delta: Delta, sink: StreamSink) -> None:
        """Replace the lane of the stream after a delta that took the ordinary path; the stream has none after
        it if it is not eligible."""
        self.close(request_id)
        if delta.index or delta.finish is not None or delta.raw_length is not None or delta.logprobs:
            return
        place = self._place(request_id, delta)
        lane = None if place is None else sink.lane(request_id)
        if place is None or lane is None:
            return
        worker_id, leg_id, tokens = place
        self._fan.add(worker_id, leg_id, tokens, lane)
        self._lanes[request_id] = lane

    def close(self, request_id: str) -> None:
        """Close the lane of a request, if it has one."""
        lane = self._lanes.pop(request_id, None)
        if lane is not None:
            lane.close()

    def rest(self, worker_id: str, step: EncodedStep, now: float) -> StepBatch | None:
        """Send the deltas that have a lane and return the rest of the step. Return None if the rest is only a
        load less than LOAD_S after the last one. Raises ProtocolError."""
        others, changes = self._fan.take(worker_id, step.frame, now)
        if others or others is None or changes:
            return step.decode(others)
        if now - self._loaded_s.get(worker_id, -math.inf) < LOAD_S:
            return None
        if len(self._loaded_s) >= _MAX_WORKERS:
            self._loaded_s.clear()
        self._loaded_s[worker_id] = now
        return step.decode(others)
