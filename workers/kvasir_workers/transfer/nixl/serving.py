"""The offering side: leases that end exactly once, by a notification, a release or their deadline."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import LeaseEnded
from kvasir_workers.transfer.nixl.agent import NixlAgent
from kvasir_workers.transfer.nixl.leases import LeaseTable

MAX_NOTIFICATION_BYTES = 1024


class PulledNotice(msgspec.Struct, frozen=True, array_like=True):
    """What a receiver tells when it holds every block that it wanted."""

    lease_id: str
    fence: int


@dataclass(frozen=True, slots=True)
class _Lease:
    fence: int
    deadline_s: float


class ServingSide:
    """Leases on local blocks, published in a table that receivers read."""

    def __init__(self, agent: NixlAgent, table: LeaseTable) -> None:
        self._agent = agent
        self._table = table
        self._live: dict[str, _Lease] = {}
        self._ended: list[LeaseEnded] = []

    @property
    def live(self) -> int:
        """Leases that have not ended."""
        return len(self._live)

    def offer(self, lease_id: str, fence: int, deadline_s: float) -> None:
        """Publish a lease. Raises TransferError when it is live already or the table is full."""
        if lease_id in self._live:
            raise TransferError(f"lease {lease_id} is live already")
        self._table.grant(lease_id, fence)
        self._live[lease_id] = _Lease(fence, deadline_s)

    def end(self, lease_id: str, how: str) -> None:
        """End a lease if it is live."""
        if self._live.pop(lease_id, None) is not None:
            self._table.end(lease_id)
            self._ended.append(LeaseEnded(lease_id, how))

    def close(self) -> list[LeaseEnded]:
        """End every lease; those that ended since the last poll."""
        for lease_id in list(self._live):
            self.end(lease_id, "released")
        ended, self._ended = self._ended, []
        return ended

    def poll(self, now: float) -> list[LeaseEnded]:
        """Leases that ended since the last call."""
        for message in self._agent.notifications():
            notice = _parse(message)
            lease = self._live.get(notice.lease_id) if notice else None
            if notice and lease and lease.fence == notice.fence:
                self.end(notice.lease_id, "pulled")
        for lease_id in [i for i, lease in self._live.items() if now >= lease.deadline_s]:
            self.end(lease_id, "expired")
        ended, self._ended = self._ended, []
        return ended


def _parse(message: bytes) -> PulledNotice | None:
    if len(message) > MAX_NOTIFICATION_BYTES:
        return None
    try:
        return msgspec.msgpack.decode(message, type=PulledNotice)
    except msgspec.MsgspecError:
        return None
