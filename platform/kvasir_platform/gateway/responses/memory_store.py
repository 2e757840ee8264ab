"""Responses in the memory of one router."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvasir.config.spec.edge import ResponsesSpec
from kvasir.ports.responses import StoredResponse

_OVERHEAD = 512
"""Bytes that a response takes beside its texts."""
_EXPIRED_AT_ONCE = 16
"""Expired responses that leave in one call, which adds one at most."""


@dataclass(slots=True)
class _Kept:
    response: StoredResponse
    until_s: float
    on_cancel: Callable[[], None] | None

    @property
    def size(self) -> int:
        return self.response.size + _OVERHEAD


@dataclass(slots=True)
class _Shelf:
    """The ids of one tenant's responses, the least recently used first, and their bytes."""

    names: OrderedDict[str, None] = field(default_factory=OrderedDict)
    bytes: int = 0


class MemoryResponses:
    """`kvasir.ports.responses.ResponseStore`. Beyond its limits, the least recently used response of the
    tenant that has the most bytes leaves. Those whose time is over leave with the next calls, whatever these
    are for. `now` is monotonic, in seconds."""

    def __init__(self, spec: ResponsesSpec, now: Callable[[], float]) -> None:
        self._spec = spec
        self._now = now
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        """By tenant and id, in the order in which they were put and so expire."""
        self._shelves: dict[str, _Shelf] = {}
        self._bytes = 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Number and bytes of what is kept."""
        return len(self._kept), self._bytes

    def put(self, response: StoredResponse, on_cancel: Callable[[], None] | None = None) -> None:
        """See the port. A response that is larger than all of the room is not kept."""
        spec = self._spec
        tenant, name = response.tenant, response.id
        earlier = self._used(tenant, name)
        if earlier is not None:
            if earlier.response.status == "cancelled":
                return
            self._drop(tenant, name)
        kept = _Kept(response, self._now() + spec.ttl_s, on_cancel)
        if not spec.max_responses or kept.size > spec.max_bytes:
            return
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.names[name] = None
        shelf.bytes += kept.size
        self._kept[tenant, name] = kept
        self._bytes += kept.size
        while len(self._kept) > spec.max_responses or self._bytes > spec.max_bytes:
            self._evict()

    def find(self, tenant: str, name: str, then: Callable[[StoredResponse | None], None]) -> None:
        """See the port."""
        kept = self._used(tenant, name)
        then(None if kept is None else kept.response)

    def cancel(self, tenant: str, name: str, then: Callable[[StoredResponse | None], None]) -> None:
        """See the port."""
        kept = self._used(tenant, name)
        if kept is None:
            then(None)
            return
        if kept.response.status == "running":
            stop = kept.on_cancel
            kept.response, kept.on_cancel = replace(kept.response, status="cancelled"), None
            if stop is not None:
                stop()
        then(kept.response)

    def remove(self, tenant: str, name: str, then: Callable[[StoredResponse | None], None]) -> None:
        """See the port."""
        kept = self._used(tenant, name)
        if kept is not None:
            self._drop(tenant, name)
            if kept.on_cancel is not None:
                kept.on_cancel()
        then(None if kept is None else kept.response)

    def _used(self, tenant: str, name: str) -> _Kept | None:
        """Return a response, the most recently used of its tenant from then on; None for none, or for one
        that is too old."""
        now = self._now()
        self._expire(now)
        kept = self._kept.get((tenant, name))
        if kept is None:
            return None
        if now >= kept.until_s:
            self._drop(tenant, name)
            return None
        self._shelves[tenant].names.move_to_end(name)
        return kept

    def _expire(self, now: float) -> None:
        for _ in range(_EXPIRED_AT_ONCE):
            oldest = next(iter(self._kept.items()), None)
            if oldest is None or now < oldest[1].until_s:
                return
            self._drop(*oldest[0])

    def _drop(self, tenant: str, name: str) -> None:
        size = self._kept.pop((tenant, name)).size
        self._bytes -= size
        shelf = self._shelves[tenant]
        shelf.bytes -= size
        del shelf.names[name]
        if not shelf.names:
            del self._shelves[tenant]

    def _evict(self) -> None:
        tenant, shelf = max(self._shelves.items(), key=lambda each: each[1].bytes)
        self._drop(tenant, next(iter(shelf.names)))
