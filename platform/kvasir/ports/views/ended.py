"""The requests that ended last, with their figures as columns.

The console reads thousands of them every second. Unpacking each would take milliseconds, for which streams
wait; columns are read in microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Literal, Self, get_args, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvasir.core.requests import RouteArm, SloClass, Usage
from kvasir.ports.routing import CROSS_ROLE
from kvasir.ports.views.packed import PackedRows
from kvasir.ports.views.summaries import LostAttempt, RequestSummary

EndedColumn = Literal[
    "finished_s",
    "lasted_s",
    "prompt_tokens",
    "cached_tokens",
    "slo_met",
    "cross_role",
    "answered",
    "ttft_s",
    "itl_s",
]

_MET = {None: math.nan, False: 0.0, True: 1.0}
_COLUMNS: tuple[EndedColumn, ...] = get_args(EndedColumn)
# Fields whose own fields are packed in their place, which takes a third of the time.
_FLAT = {"usage": Usage, "slo": SloClass}
_TYPES: dict[str, Any] = {"route_arm": RouteArm | None, "lost": tuple[LostAttempt, ...]}
_NAMES = [field.name for field in fields(RequestSummary)]
_FIELDS = [
    path
    for name in _NAMES
    for path in ([f"{name}.{field.name}" for field in fields(_FLAT[name])] if name in _FLAT else [name])
]
_VALUES_OF = attrgetter(*_FIELDS)
_USAGE = _FIELDS.index("usage.prompt_tokens")
_AFTER_USAGE = _USAGE + len(fields(Usage))
_SLO = _FIELDS.index("slo.name")
_AFTER_SLO = _SLO + len(fields(SloClass))
_SUMMARIES: msgspec.msgpack.Decoder[tuple[tuple[Any, ...], msgspec.Raw]] = msgspec.msgpack.Decoder(
    tuple[tuple[tuple(_TYPES.get(name, Any) for name in _FIELDS)], msgspec.Raw]  # type: ignore[misc]  # made of the fields
)


def _summary(values: tuple[Any, ...]) -> RequestSummary:
    usage, slo = Usage(*values[_USAGE:_AFTER_USAGE]), SloClass(*values[_SLO:_AFTER_SLO])
    arguments = [*values[:_USAGE], usage, *values[_AFTER_USAGE:_SLO], slo, *values[_AFTER_SLO:]]
    return RequestSummary(*arguments)


def _known(figures: Sequence[float | None]) -> list[float]:
    return [math.nan if each is None else each for each in figures]


class EndedRequests(Sequence[RequestSummary]):
    """At most `capacity` requests of one model, from the earliest to the latest; further ones replace the
    earliest. A row is valid until further requests are added. With each request, a value that is packed
    (kvasir.ports.views.packed) and bytes that requests may share can be kept."""

    __slots__ = ("_rows",)

    def __init__(self, capacity: int) -> None:
        self._rows = PackedRows(capacity, len(_COLUMNS))

    @classmethod
    def of(cls, summaries: Iterable[RequestSummary]) -> Self:
        """Return these requests, all kept."""
        listed = list(summaries)
        made = cls(len(listed))
        made.add(listed)
        return made

    def add(
        self,
        summaries: Sequence[RequestSummary],
        beside: Sequence[object] | None = None,
        shared: Sequence[bytes] | None = None,
    ) -> None:
        """Add requests that have ended after all others, with what is kept `beside` each."""
        values = map(_VALUES_OF, summaries)
        finished = [each.finished_s for each in summaries]
        lasted = [each.finished_s - each.arrival_s for each in summaries]
        usages = [each.usage for each in summaries]
        prompt, cached = [each.prompt_tokens for each in usages], [each.cached_tokens for each in usages]
        crossed = [each.reason == CROSS_ROLE for each in summaries]
        answered = [each.outcome == "ok" for each in summaries]
        ttfts, itls = [each.ttft_s for each in summaries], [each.itl_s for each in summaries]
        met = [_MET[each.met_with(ttft, itl)] for each, ttft, itl in zip(summaries, ttfts, itls, strict=True)]
        self._rows.add(
            [each.request_id for each in summaries],
            list(zip(values, beside or [None] * len(summaries), strict=True)),
            shared=shared,
            figures=(finished, lasted, prompt, cached, met, crossed, answered, _known(ttfts), _known(itls)),
        )

    def column(self, name: EndedColumn) -> NDArray[np.float64]:
        """Return a copy of one figure of all requests, in their order: when it ended and how long it took, in
        seconds, tokens of its prompt, whether it met its SLO (1, 0, or NaN if that is not judged), whether it
        was placed for CROSS_ROLE and whether it ended without an error (1 or 0), its TTFT and its mean ITL in
        seconds (NaN without any)."""
        return self._rows.column(_COLUMNS.index(name))

    def find(self, request_id: str) -> int | None:
        """Return the row of the latest request of that id, None if there is none."""
        return self._rows.find(request_id)

    def beside(self, row: int) -> tuple[msgspec.Raw, bytes]:
        """Return what is kept beside a request: its packed value, and the bytes that it shares."""
        _, beside = _SUMMARIES.decode(self._rows.value(row))
        return beside, self._rows.shared(row)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> RequestSummary: ...

    @overload
    def __getitem__(self, row: slice) -> list[RequestSummary]: ...

    def __getitem__(self, row: int | slice) -> RequestSummary | list[RequestSummary]:
        count = len(self)
        if isinstance(row, slice):
            return [self[at] for at in range(*row.indices(count))]
        if not -count <= row < count:
            raise IndexError(row)
        values, _ = _SUMMARIES.decode(self._rows.value(row % count))
        return _summary(values)

    def __iter__(self) -> Iterator[RequestSummary]:
        return (self[row] for row in range(len(self)))
