"""The ordered events of a run: a digest by which two runs are compared, and a readable story."""

from __future__ import annotations

import hashlib

from kvasir.core.requests import Delta
from kvasir.ports.clock import Clock
from kvasir.ports.router import RequestSummary


class ChaosTrace:
    """All deltas that reached clients and all faults of the cluster, with their times in nanoseconds. With
    `keep`, `story` has a line for everything but tokens."""

    def __init__(self, clock: Clock, *, keep: bool = False) -> None:
        self.events = 0
        self.story: list[str] = []
        self._clock = clock
        self._keep = keep
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        """Equal for equal histories."""
        return self._digest.hexdigest()

    def client(self, event: Delta | RequestSummary) -> None:
        """Record a delta that reached a client."""
        if isinstance(event, Delta):
            place = f"{event.request_id} {event.index} {event.offset}"
            self._note(f"{place} {event.token_ids} {event.text} {event.finish}")
            return
        where = f"{event.prefill_worker} → {event.decode_worker}"
        line = (
            f"{event.request_id} ends: {event.outcome}, {event.usage.output_tokens} tokens, "
            f"{where}, {event.retries} retries, {event.migrations} migrations"
        )
        self._note(line, visible=True)

    def fault(self, what: str) -> None:
        """Record a fault."""
        self._note(what, visible=True)

    def _note(self, what: str, *, visible: bool = False) -> None:
        now = self._clock.now()
        self.events += 1
        self._digest.update(f"{round(now * 1e9)} {what}\n".encode())
        if visible and self._keep:
            self.story.append(f"{now:10.4f}  {what}")
