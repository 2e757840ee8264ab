"""The fast path of a token: from a worker's message into its client's socket, in native code.

Of the deltas of a running stream nearly all are plain: the next tokens of its only choice, and their text.
What the machine, the sink and the event loop do about one takes longer than the system call that sends it. So
a stream that runs undisturbed is given a lane, and its deltas are found, framed and sent by one native call
for all streams of a message. Whatever is not plain ends the lane of its stream, and takes the ordinary way,
on which the stream is given another.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvasir.core.messages import EncodedStep
from kvasir.core.requests import Delta, StepBatch
from kvasir.native import Fan
from kvasir.ports.router import Lane, StreamSink

LOAD_S = 0.01
"""How old a worker's load may be: engines with shorter steps say more often what no decision would notice."""
_MAX_WORKERS = 4096


class FastPath:
    """The lanes of a router. `join(request_id, delta, lane)` has what follows `delta` counted as that of a
    lane, and tells worker, leg and offset of it; None where it may have none."""

    def __init__(self, join: Callable[[str, Delta, Lane], tuple[str, str, int] | None]) -> None:
        self._join = join
        self._fan = Fan()
        self._loaded_s: dict[str, float] = {}

    def __len__(self) -> int:
        """Lanes that are open."""
        return len(self._fan)

    def offer(self, request_id: str, delta: Delta, sink: StreamSink) -> None:
        """Give the stream a lane after a delta, if it may have one."""
        if delta.index or delta.finish is not None or delta.raw_length is not None or delta.logprobs:
            return
        lane = sink.lane(request_id)
        if lane is None:
            return
        place = self._join(request_id, delta, lane)
        if place is None:
            lane.close()
            return
        worker_id, leg_id, offset = place
        self._fan.add(worker_id, leg_id, offset, lane)

    def rest(self, worker_id: str, step: EncodedStep, now: float) -> StepBatch | None:
        """Pass on what goes over lanes, and return the rest of the step, None where that is not worth a look:
        a load that follows another closely. Raises ProtocolError."""
        others, changes = self._fan.take(worker_id, step.frame, now)
        if others or others is None or changes:
            return step.decode(others)
        if now - self._loaded_s.get(worker_id, -math.inf) < LOAD_S:
            return None
        if len(self._loaded_s) >= _MAX_WORKERS:
            self._loaded_s.clear()
        self._loaded_s[worker_id] = now
        return step.decode(others)
