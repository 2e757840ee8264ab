"""The requests that ended last, with their figures as columns.

The console reads thousands of them every second. Unpacking each would take milliseconds, for which streams
wait; columns are read in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Literal, Self, get_args, get_type_hints, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvasir.core.figures import Numbers
from kvasir.core.values import contents
from kvasir.ports.routing import CROSS_ROLE
from kvasir.ports.views.packed import PackedRows
from kvasir.ports.views.summaries import NOT_JUDGED, RequestSummary

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

_COLUMNS: tuple[EndedColumn, ...] = get_args(EndedColumn)
_NUMBERS = Numbers(
    (
        "finished_s",
        "arrival_s",
        "first_token_s",
        "usage.prompt_tokens",
        "usage.cached_tokens",
        "usage.output_tokens",
        "slo.ttft_s",
        "slo.itl_s",
    )
)
_FIELDS = get_type_hints(RequestSummary)
# Summaries are packed without the names of their fields, which would be half of the bytes.
_SUMMARIES: msgspec.msgpack.Decoder[tuple[tuple[Any, ...], msgspec.Raw]] = msgspec.msgpack.Decoder(
    tuple[tuple[tuple(_FIELDS[each.name] for each in fields(RequestSummary))], msgspec.Raw]  # type: ignore[misc]  # made of the fields
)


def _figures_of(summaries: Sequence[RequestSummary]) -> NDArray[np.float64]:
    """Return a row for each of _COLUMNS. The definitions of SLO, TTFT and ITL are those of RequestSummary;
    asking each summary for them takes several times as long."""
    # A time that is not known is NaN.
    finished, arrival, first, prompt, cached, output, slo_ttft, slo_itl = _NUMBERS.of(summaries)
    outcomes = [each.outcome for each in summaries]
    well = np.frombuffer(bytes([each == "ok" for each in outcomes]), np.bool_)
    judged = np.frombuffer(bytes([each not in NOT_JUDGED for each in outcomes]), np.bool_)
    crossed = np.frombuffer(bytes([each.reason == CROSS_ROLE for each in summaries]), np.bool_)
    ttft, later = first - arrival, output - 1
    itl = np.where(well & (later > 0), (finished - first) / np.maximum(later, 1), np.nan)
    in_time = ~((ttft > slo_ttft) | (itl > slo_itl))
    met = np.where(judged, well & in_time, np.nan)
    return np.stack((finished, finished - arrival, prompt, cached, met, crossed, well, ttft, itl))


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
        if not summaries:
            return
        self._rows.add(
            [each.request_id for each in summaries],
            list(zip(map(contents, summaries), beside or [None] * len(summaries), strict=True)),
            shared=shared,
            figures=_figures_of(summaries),
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
        return RequestSummary(*values)

    def __iter__(self) -> Iterator[RequestSummary]:
        return (self[row] for row in range(len(self)))
