"""Membership of a deployment, and the record that each worker writes.

A record has a beat that its writer advances. A reader decides on liveness by whether the beat advances on the
reader's own clock, so machines need not agree on the time, and the record of a killed worker becomes stale by
itself.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir.core.errors import ProtocolError
from kvasir.core.locality import NOWHERE, Locality

NAMESPACE = b"kvasir"
HEARTBEAT_S = 1.0
STALE_S = 6.0
_ADDRESS = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
_SCHEMES = frozenset(("dns", "fd", "ipv4", "ipv6", "passthrough", "unix", "unix-abstract", "vsock", "xds"))
"""Names that gRPC parses as a scheme instead of a host."""


def is_worker_address(text: str) -> bool:
    """Whether `text` is `host:port` that every client parses alike, and not a link-local address, where
    clouds serve credentials, or a multicast address."""
    parts = _ADDRESS.fullmatch(text)
    if parts is None or not 0 < int(parts[2]) < 65536 or parts[1].lower() in _SCHEMES:
        return False
    try:
        address = ipaddress.ip_address(parts[1].strip("[]"))
    except ValueError:
        # Some clients parse a host of digits as an address; a host in brackets must be an address.
        return not parts[1].startswith("[") and not parts[1].rpartition(".")[2].isdigit()
    return not (address.is_link_local or address.is_multicast)


def host_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A worker's gRPC address (`host:port`, or an in-memory name) and the pool that it reports.

    `worker_id` is unique per process: a restarted worker has a new one. `locality` is what discovery knows of
    its place; it does not make another endpoint.
    """

    worker_id: str
    address: str
    pool: str
    locality: Locality = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class MembershipSnapshot:
    """All endpoints at `revision`. Revisions grow; an equal revision means an equal set."""

    revision: int
    endpoints: frozenset[Endpoint] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """The record of one worker. `beat` only grows within one process. `replica` is the name of the worker at
    the owner of its pool, "" for none."""

    worker_id: str
    address: str
    pool: str
    pid: int
    beat: int
    replica: str = ""

    def encode(self) -> bytes:
        return json.dumps(
            {
                "worker_id": self.worker_id,
                "address": self.address,
                "pool": self.pool,
                "pid": self.pid,
                "beat": self.beat,
                "replica": self.replica,
            },
            separators=(",", ":"),
        ).encode()

    @classmethod
    def decode(cls, raw: bytes) -> MemberRecord:
        """Raises ProtocolError for a malformed record."""
        try:
            data = json.loads(raw)
            if not is_worker_address(address := str(data["address"])):
                raise ValueError("its address is not host:port")
            return cls(
                worker_id=str(data["worker_id"]),
                address=address,
                pool=str(data["pool"]),
                pid=int(data["pid"]),
                beat=int(data["beat"]),
                replica=str(data.get("replica", "")),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"not a member record: {raw[:200]!r}") from error


def member_key(deployment: str, worker_id: str) -> str:
    """The key of a worker's record."""
    return f"{member_prefix(deployment)}{worker_id}"


def member_prefix(deployment: str) -> str:
    """The key prefix of all records of a deployment."""
    return f"kvasir/{deployment}/members/"


def leave_key(deployment: str, worker_id: str) -> str:
    """The key that tells a worker to drain and end; its value is the reason."""
    return f"kvasir/{deployment}/leave/{worker_id}"


@dataclass(slots=True)
class Liveness:
    """Separates live records from stale ones by whether their beats advance."""

    stale_s: float = STALE_S
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def live(self, records: Mapping[str, MemberRecord], now: float) -> frozenset[Endpoint]:
        """Return the endpoints whose beat advanced within `stale_s` before `now` (seconds, always the same
        clock)."""
        for worker_id in self._seen.keys() - records.keys():
            del self._seen[worker_id]
        alive: list[Endpoint] = []
        for worker_id, record in records.items():
            beat, moved_s = self._seen.get(worker_id, (-1, now))
            if record.beat != beat:
                moved_s = now
                self._seen[worker_id] = (record.beat, now)
            if now - moved_s < self.stale_s:
                alive.append(Endpoint(worker_id=worker_id, address=record.address, pool=record.pool))
        return frozenset(alive)

    def long_stale(self, now: float, age_s: float) -> list[str]:
        """Return workers whose beat has not advanced for `age_s`; their records can be removed."""
        return [worker for worker, (_, moved_s) in self._seen.items() if now - moved_s >= age_s]
