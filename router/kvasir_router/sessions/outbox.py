"""Messages to one worker that are sent at the end of this turn of the event loop.

A message costs the same whatever its size, so all submits, aborts and releases of a turn are sent as one
message each.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir.core.errors import KvasirError
from kvasir.core.messages import Abort, ReleaseLeases, RouterMessage, Submit
from kvasir.core.requests import EngineRequest

Send = Callable[[RouterMessage], None]


class Outbox:
    """Emptied every turn, so bounded by what the machine admits."""

    def __init__(self) -> None:
        self._submits: list[EngineRequest] = []
        self._aborts: list[str] = []
        self._releases: list[str] = []

    def submit(self, request: EngineRequest) -> None:
        """Start a leg."""
        self._submits.append(request)

    def abort(self, leg_ids: tuple[str, ...]) -> None:
        """Abort legs, which may have been submitted in the same turn."""
        self._aborts.extend(leg_ids)

    def release(self, lease_ids: tuple[str, ...]) -> None:
        """Release leases."""
        self._releases.extend(lease_ids)

    def clear(self) -> None:
        """Drop all messages: the session is over."""
        self._submits.clear()
        self._aborts.clear()
        self._releases.clear()

    def flush(self, send: Send) -> list[tuple[EngineRequest, KvasirError]]:
        """Send all, submits before the aborts that may refer to them. Return the submits that could not be
        sent, with the error."""
        submits, aborts, releases = self._submits[:], tuple(self._aborts), tuple(self._releases)
        self.clear()
        refused: list[tuple[EngineRequest, KvasirError]] = []
        if submits:
            try:
                send(Submit(tuple(submits)))
            except KvasirError:
                refused = _one_by_one(submits, send)
        if aborts:
            send(Abort(aborts))
        if releases:
            send(ReleaseLeases(releases))
        return refused


def _one_by_one(submits: list[EngineRequest], send: Send) -> list[tuple[EngineRequest, KvasirError]]:
    """Send requests one by one, so that one that cannot be sent does not block the others."""
    refused: list[tuple[EngineRequest, KvasirError]] = []
    for request in submits:
        try:
            send(Submit((request,)))
        except KvasirError as error:
            refused.append((request, error))
    return refused
