"""Maps the request id that a client received to the ids of the router.

A client may send one id twice, and a call with several prompts is several requests in the router.
"""

from __future__ import annotations

import msgspec

from kvasir.ports.views.packed import PackedRows

_TOGETHER = 64
"""Calls that are added at once, while code and data are in the processor's caches."""
_NAMES = msgspec.msgpack.Decoder(tuple[str, ...])


class RequestNames:
    """The router's ids of the newest `capacity` calls, by the id that the client received. 0 keeps none."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept = PackedRows(capacity)
        self._newest: list[tuple[str, tuple[str, ...]]] = []

    def note(self, client_id: str, names: tuple[str, ...]) -> None:
        """Register a call; a later call replaces an earlier one with the same id."""
        if not self.capacity:
            return
        self._newest.append((client_id, names))
        if len(self._newest) >= _TOGETHER:
            self._add()

    def find(self, client_id: str) -> tuple[str, ...]:
        """Return the router's ids; for an unknown id, the id itself, which may be one of the router's."""
        self._add()
        row = self._kept.find(client_id)
        return (client_id,) if row is None else _NAMES.decode(self._kept.value(row))

    def _add(self) -> None:
        newest, self._newest = self._newest, []
        self._kept.add([client_id for client_id, _ in newest], [names for _, names in newest])
