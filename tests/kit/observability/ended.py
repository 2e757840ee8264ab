"""Requests that have ended, as a router keeps them."""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.native import Numbers
from kvasir.ports.router import EndedRequests, RequestSummary
from kvasir.ports.views.ended import NUMBERS

_numbers = Numbers(NUMBERS)


def room_for(capacity: int) -> EndedRequests:
    """Return an empty record of so many requests."""
    return EndedRequests(capacity, _numbers.of)


def ended_requests(summaries: Iterable[RequestSummary]) -> EndedRequests:
    """Return a record of these requests."""
    listed = list(summaries)
    made = room_for(len(listed))
    made.add(listed)
    return made
