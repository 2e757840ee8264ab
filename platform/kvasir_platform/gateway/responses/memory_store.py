"""Responses in the memory of one router."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvasir.config.spec.edge import ResponsesSpec
from kvasir.ports.responses import StoredResponse

_OVERHEAD = 512
"""Bytes that a response takes beside its texts."""


@dataclass(slots=True)
class _Kept:
    response: StoredResponse
    until_s: float
    on_cancel: Callable[[], None] | None

    @property
    def size(self) -> int:
        return self.response.size + _OVERHEAD


class _Shelf:
    """The responses of one tenant, the least recently used first."""

    __slots__ = ("bytes", "kept")

    def __init__(self) -> None:
        self.kept: OrderedDict[str, _Kept] = OrderedDict()
        self.bytes = 0


class MemoryResponses:
    """`kvasir.ports.responses.ResponseStore`. Beyond its limits, the least recently used response of the
    tenant that has the most bytes leaves. `now` is monotonic, in seconds."""

    def __init__(self, spec: ResponsesSpec, now: Callable[[], float]) -> None:
        self._spec = spec
        self._now = now
        self._shelves: dict[str, _Shelf] = {}
        self._count = 0
        self._bytes = 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Number and bytes of what is kept."""
        return self._count, self._bytes

    def put(self, response: StoredResponse, on_cancel: Callable[[], None] | None = None) -> None:
        """See the port. A response that is larger than all of the room is not kept."""
        spec = self._spec
        earlier = self._take(response.tenant, response.id)
        if earlier is not None and earlier.response.status == "cancelled":
            self._add(earlier)
            return
        kept = _Kept(response, self._now() + spec.ttl_s, on_cancel)
        if not spec.max_responses or kept.size > spec.max_bytes:
            return
        self._add(kept)
        while self._count > spec.max_responses or self._bytes > spec.max_bytes:
            self._evict()

    def find(self, tenant: str, name: str, then: Callable[[StoredResponse | None], None]) -> None:
        """See the port."""
        kept = self._take(tenant, name)
        if kept is not None:
            self._add(kept)
        then(None if kept is None else kept.response)

    def cancel(self, tenant: str, name: str, then: Callable[[StoredResponse | None], None]) -> None:
        """See the port."""
        kept = self._take(tenant, name)
        if kept is None:
            then(None)
            return
        stop = kept.on_cancel
        if kept.response.status == "running":
            kept.response, kept.on_cancel = replace(kept.response, status="cancelled"), None
        self._add(kept)
        if stop is not None:
            stop()
        then(kept.response)

    def remove(self, tenant: str, name: str, then: Callable[[StoredResponse | None], None]) -> None:
        """See the port."""
        kept = self._take(tenant, name)
        if kept is not None and kept.on_cancel is not None:
            kept.on_cancel()
        then(None if kept is None else kept.response)

    def _take(self, tenant: str, name: str) -> _Kept | None:
        """Remove a response and return it; None for none, or for one that is too old."""
        shelf = self._shelves.get(tenant)
        kept = None if shelf is None else shelf.kept.pop(name, None)
        if shelf is None or kept is None:
            return None
        self._removed(tenant, shelf, kept)
        return kept if self._now() < kept.until_s else None

    def _add(self, kept: _Kept) -> None:
        shelf = self._shelves.setdefault(kept.response.tenant, _Shelf())
        shelf.kept[kept.response.id] = kept
        shelf.bytes += kept.size
        self._count += 1
        self._bytes += kept.size

    def _removed(self, tenant: str, shelf: _Shelf, kept: _Kept) -> None:
        shelf.bytes -= kept.size
        self._count -= 1
        self._bytes -= kept.size
        if not shelf.kept:
            del self._shelves[tenant]

    def _evict(self) -> None:
        tenant, shelf = max(self._shelves.items(), key=lambda each: each[1].bytes)
        _, kept = shelf.kept.popitem(last=False)
        self._removed(tenant, shelf, kept)
