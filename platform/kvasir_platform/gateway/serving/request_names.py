"""Which of the router's request ids belong to the id that a client was given.

A client may send one id twice, and a call with several prompts is several requests in the router.
"""

from __future__ import annotations

from collections import OrderedDict


class RequestNames:
    """The router's ids of the newest calls, by the id that the client was given. `capacity` 0: none."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._names: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def note(self, client_id: str, names: tuple[str, ...]) -> None:
        """A call; of two with one id the later one is meant."""
        if not self.capacity:
            return
        self._names[client_id] = names
        self._names.move_to_end(client_id)
        if len(self._names) > self.capacity:
            self._names.popitem(last=False)

    def find(self, client_id: str) -> tuple[str, ...]:
        """The router's ids; of an id that is not known, itself: it may be one of the router's."""
        return self._names.get(client_id, (client_id,))
