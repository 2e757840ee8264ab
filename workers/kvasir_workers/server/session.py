"""The state of a session that outlives its connections."""

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

    `live` maps the router's request ids to the engine's, `leases` maps ids to when they end; `load` is the
    last load sent to the router, `said_s` the time of the last message to it, `reported_s` that of the last
    one with only the load, and `beat_s` that of the last heartbeat without a message. `window` runs while
    there is no connection.
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
        self.said_s = self.reported_s = self.beat_s = -math.inf
        self.ended = False
        self._deferred: KvBatch | None = None

    def hold(self, handoff: KvHandoff, now: float) -> None:
        """Record a lease with its deadline, and remove those that have ended."""
        self.leases.pop(handoff.lease_id, None)
        for lease_id, ends in list(self.leases.items()):
            if ends > now:
                break
            del self.leases[lease_id]
        self.leases[handoff.lease_id] = now + handoff.ttl_s

    def defer_if_slow(self, kv: KvBatch | None) -> KvBatch | None:
        """Return `kv`, or None for a router with too many unread frames: it detects the gap, and takes a
        snapshot."""
        if kv is None:
            return None
        if self.link.half_full:
            self._deferred = kv
            return None
        self._deferred = None
        return kv

    def take_deferred(self) -> KvBatch | None:
        """Return the newest deferred batch once the router can read again: without a later batch, it would
        not detect the gap."""
        return self.defer_if_slow(self._deferred)
