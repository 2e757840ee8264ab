"""What of a session outlives its connections."""

from __future__ import annotations

import asyncio
import math

from kvasir.core.kv import KvBatch
from kvasir.core.messages import RouterMessage, WorkerFrame, WorkerMessage
from kvasir.core.requests import EngineLoad, KvHandoff
from kvasir.core.session_link import LinkLimits, SessionLink
from kvasir.wire.pump import SessionPump


class RouterSession:
    """One router's session on this worker.

    `live` maps the router's request ids to the engine's, `leases` ids to when they end; `load` is what the
    router was told last, and `said_s` when it was told anything. `window` runs while there is no connection.
    """

    def __init__(self, session_id: str, router_id: str, limits: LinkLimits) -> None:
        self.session_id = session_id
        self.router_id = router_id
        self.link: SessionLink[WorkerMessage] = SessionLink(limits)
        self.pump: SessionPump[WorkerMessage, RouterMessage, WorkerFrame] | None = None
        self.window: asyncio.Task[None] | None = None
        self.live: dict[str, str] = {}
        self.leases: dict[str, float] = {}
        self.load: EngineLoad | None = None
        self.said_s = -math.inf
        self.ended = False
        self._deferred: KvBatch | None = None

    def hold(self, handoff: KvHandoff, now: float) -> None:
        """Remember a lease, from here on for its time, and forget those that have ended."""
        self.leases.pop(handoff.lease_id, None)
        for lease_id, ends in list(self.leases.items()):
            if ends > now:
                break
            del self.leases[lease_id]
        self.leases[handoff.lease_id] = now + handoff.ttl_s

    def defer_if_slow(self, kv: KvBatch | None) -> KvBatch | None:
        """`kv`, or None for a router that has enough to read: it sees the gap, and takes a snapshot."""
        if kv is None:
            return None
        if self.link.half_full:
            self._deferred = kv
            return None
        self._deferred = None
        return kv

    def take_deferred(self) -> KvBatch | None:
        """The newest batch that the router was spared, once it can read on: with nothing after it, the gap
        would not be seen."""
        return self.defer_if_slow(self._deferred)
