"""Maps the request id that a client received to the ids of the router.

A client may send one id twice, and a call with several prompts is several requests in the router.
"""

from __future__ import annotations

from collections import deque


class RequestNames:
    """The router's ids of the newest `capacity` calls, by the id that the client received. 0 keeps none."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Of each call: in two rings, as a pair would be an object more for each of thousands of calls. There
        # is no index, as few of them are ever looked up.
        self._client_ids: deque[str] = deque(maxlen=capacity)
        self._names: deque[tuple[str, ...]] = deque(maxlen=capacity)

    def note(self, client_id: str, names: tuple[str, ...]) -> None:
        """Register a call; a later call replaces an earlier one with the same id."""
        self._client_ids.append(client_id)
        self._names.append(names)

    def find(self, client_id: str) -> tuple[str, ...]:
        """Return the router's ids; for an unknown id, the id itself, which may be one of the router's."""
        latest_first = zip(reversed(self._client_ids), reversed(self._names), strict=True)
        return next((names for each, names in latest_first if each == client_id), (client_id,))
