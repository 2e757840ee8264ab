"""Leases of batches in the bucket itself, by conditional writes: routers need no other server.

A lease is an object with its holder, its fencing token and a count, which the holder replaces at intervals.
Each write names the entity tag of the object that it replaces, so that of two processes one succeeds. Clocks
are not compared: a process takes the lease of another once it has seen the same object for TTL_S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import Struct

from kvasir.core.errors import CapacityError

TTL_S = 30.0
RENEW_S = 5.0
CALL_S = 4.0
"""Bound of a call. The three of `keep` end within TTL_S, if the first begins before TTL_S / 2."""
_MOST_SEEN = 4096
"""Leases of others that are remembered; beyond them, the oldest is seen anew."""


class ConditionalObjects(Protocol):
    """The objects of `S3Storage`."""

    def tagged(self, key: str) -> tuple[bytes, str] | None: ...

    def create(self, key: str, content: bytes) -> str | None: ...

    def replace(self, key: str, content: bytes, tag: str) -> str | None: ...

    def remove(self, key: str) -> None: ...


class _Lease(Struct, array_like=True, frozen=True):
    """`holder` is "" once it has been given back. `count` makes each object differ from the last."""

    holder: str
    token: int
    count: int = 0


@dataclass(frozen=True, slots=True)
class _Held:
    lease: _Lease
    tag: str
    kept_s: float


_DECODER = msgspec.json.Decoder(_Lease)
_encode = msgspec.json.Encoder().encode


class S3Lease:
    """WorkLease in a bucket. `process` names this holder, `now` is monotonic, in seconds."""

    def __init__(self, objects: ConditionalObjects, process: str, now: Callable[[], float]) -> None:
        self._objects = objects
        self._process = process
        self._now = now
        self._held: dict[str, _Held] = {}
        self._seen: dict[str, tuple[str, float]] = {}

    def take(self, name: str) -> int | None:
        """See WorkLease."""
        asked_s = self._now()
        found = self._objects.tagged(_key(name))
        if found is None:
            lease = _Lease(self._process, 1)
            tag = self._objects.create(_key(name), _encode(lease))
        else:
            last = _DECODER.decode(found[0])
            if last.holder and not self._given_up(name, found[1]):
                return None
            lease = _Lease(self._process, last.token + 1)
            tag = self._objects.replace(_key(name), _encode(lease), found[1])
        if tag is None:
            return None
        self._seen.pop(name, None)
        self._held[name] = _Held(lease, tag, asked_s)
        return lease.token

    def keep(self, name: str) -> bool:
        """See WorkLease: while the server does not answer, a lease lasts for half of its time."""
        held, asked_s = self._held.get(name), self._now()
        if held is None:
            return False
        if asked_s - held.kept_s < RENEW_S:
            return True
        try:
            renewed = self._renewed(name, held, asked_s)
        except CapacityError:
            return asked_s - held.kept_s < TTL_S / 2
        if renewed is None:
            self._held.pop(name, None)
            return False
        self._held[name] = renewed
        return True

    def release(self, name: str, *, done: bool) -> None:
        """See WorkLease."""
        held = self._held.pop(name, None)
        if held is None:
            return
        if done:
            self._objects.remove(_key(name))
        else:
            self._objects.replace(_key(name), _encode(_Lease("", held.lease.token)), held.tag)

    def _renewed(self, name: str, held: _Held, asked_s: float) -> _Held | None:
        """Return the lease as it is kept, None if another has it."""
        lease = msgspec.structs.replace(held.lease, count=held.lease.count + 1)
        tag = self._objects.replace(_key(name), _encode(lease), held.tag)
        if tag is None:
            # The answer to an earlier write may have been lost.
            found = self._objects.tagged(_key(name))
            if found is None:
                return None
            last = _DECODER.decode(found[0])
            if (last.holder, last.token) != (self._process, held.lease.token):
                return None
            lease = msgspec.structs.replace(last, count=last.count + 1)
            tag = self._objects.replace(_key(name), _encode(lease), found[1])
        return None if tag is None else _Held(lease, tag, asked_s)

    def _given_up(self, name: str, tag: str) -> bool:
        """Whether the holder has not replaced this object for the time of a lease."""
        now = self._now()
        seen = self._seen.get(name)
        if seen is None or seen[0] != tag:
            self._seen.pop(name, None)
            self._seen[name] = (tag, now)
            if len(self._seen) > _MOST_SEEN:
                del self._seen[next(iter(self._seen))]
            return False
        return now - seen[1] >= TTL_S


def _key(name: str) -> str:
    return f"leases/{name}"
