"""Responses that clients can read again, continue or cancel, kept by one router in memory or in a shared
store.

Results are delivered by callback, at once or in a later turn of the event loop, as for rate limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

StoredStatus = Literal["ended", "running", "cancelled", "lost"]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response of one tenant. `body` is the response object as JSON, `items` a JSON array of the items
    that it was made from, those of earlier responses included. `status` is `running` for a background
    response that goes on, `lost` for one whose process has ended."""

    tenant: str
    id: str
    body: bytes
    items: bytes
    status: StoredStatus = "ended"

    @property
    def size(self) -> int:
        """Bytes that it is counted with."""
        return len(self.body) + len(self.items)


class ResponseStore(Protocol):
    """Obligations: a tenant finds its own responses only; the number and the bytes of what is kept are
    bounded, and no tenant makes another's responses leave before its own; what is older than the store's
    time to live is not found. All calls come from one event loop.
    """

    def put(self, response: StoredResponse, on_cancel: Callable[[], None] | None = None) -> None:
        """Keep a response, in place of an earlier state of it, unless that was cancelled. `on_cancel` is
        called at most once, when a running one is cancelled or removed."""
        ...

    def find(self, tenant: str, name: str, then: Callable[[StoredResponse | None], None]) -> None:
        """Call `then` with the response of that id, None for none. Raise KvasirError if the store cannot be
        reached."""
        ...

    def cancel(self, tenant: str, name: str, then: Callable[[StoredResponse | None], None]) -> None:
        """Cancel a running response, and call `then` as `find` does. One that is not running stays as it
        is."""
        ...

    def remove(self, tenant: str, name: str, then: Callable[[StoredResponse | None], None]) -> None:
        """Forget a response, and call `then` with what it was."""
        ...
