"""The requests that ended last, with their figures as columns.

The console reads thousands of them every second. Unpacking each would take milliseconds, for which streams
wait; columns are read in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Literal, Self, get_type_hints, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvasir.core.figures import Fields, Numbers
from kvasir.core.values import contents
from kvasir.ports.routing import CROSS_ROLE
from kvasir.ports.views.packed import Figures, PackedRows
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
_NAMES = Fields(("outcome", "reason"))
_FIELDS = get_type_hints(RequestSummary)
# Summaries are packed without the names of their fields, which would be half of the bytes.
_SUMMARIES: msgspec.msgpack.Decoder[tuple[tuple[Any, ...], msgspec.Raw]] = msgspec.msgpack.Decoder(
    tuple[tuple[tuple(_FIELDS[each.name] for each in fields(RequestSummary))], msgspec.Raw]  # type: ignore[misc]  # made of the fields
)


_KEPT = 9
_FINISHED, _ARRIVAL, _FIRST, _PROMPT, _CACHED, _OUTPUT, _SLO_TTFT, _SLO_ITL, _FLAGS = range(_KEPT)
"""Figures that are kept: those of _NUMBERS, and flags."""
_WELL, _JUDGED, _CROSSED = 1, 2, 4
"""Bits of the flags."""


def _figures_of(summaries: Sequence[RequestSummary]) -> NDArray[np.float64]:
    """Return what the columns are made of: a row for each of _NUMBERS, then one of flags. A time that is not
    known is NaN. Columns are made when they are read, since they are read less often than requests end."""
    made = np.empty((_KEPT, len(summaries)))
    made[:-1] = _NUMBERS.of(summaries)
    made[-1] = [
        (_WELL if outcome == "ok" else 0)
        | (0 if outcome in NOT_JUDGED else _JUDGED)
        | (_CROSSED if reason == CROSS_ROLE else 0)
        for outcome, reason in _NAMES.of(summaries)
    ]
    return made


def _flag(kept: Figures, bit: int) -> NDArray[np.bool_]:
    flagged: NDArray[np.bool_] = kept(_FLAGS).astype(np.uint8) & bit != 0
    return flagged


def _ttft(kept: Figures) -> NDArray[np.float64]:
    ttft: NDArray[np.float64] = kept(_FIRST) - kept(_ARRIVAL)
    return ttft


def _itl(kept: Figures) -> NDArray[np.float64]:
    later = kept(_OUTPUT) - 1
    several = _flag(kept, _WELL) & (later > 0)
    return np.where(several, (kept(_FINISHED) - kept(_FIRST)) / np.maximum(later, 1), np.nan)


def _met(kept: Figures) -> NDArray[np.float64]:
    in_time = ~((_ttft(kept) > kept(_SLO_TTFT)) | (_itl(kept) > kept(_SLO_ITL)))
    return np.where(_flag(kept, _JUDGED), _flag(kept, _WELL) & in_time, np.nan)


# The definitions of SLO, TTFT and ITL are those of RequestSummary.
_COLUMNS: dict[EndedColumn, Callable[[Figures], NDArray[Any]]] = {
    "finished_s": lambda kept: kept(_FINISHED),
    "lasted_s": lambda kept: kept(_FINISHED) - kept(_ARRIVAL),
    "prompt_tokens": lambda kept: kept(_PROMPT),
    "cached_tokens": lambda kept: kept(_CACHED),
    "slo_met": _met,
    "cross_role": lambda kept: _flag(kept, _CROSSED),
    "answered": lambda kept: _flag(kept, _WELL),
    "ttft_s": _ttft,
    "itl_s": _itl,
}


class EndedRequests(Sequence[RequestSummary]):
    """At most `capacity` requests of one model, from the earliest to the latest; further ones replace the
    earliest. A row is valid until further requests are added. With each request, a value that is packed
    (kvasir.ports.views.packed) and bytes that requests may share can be kept."""

    __slots__ = ("_rows",)

    def __init__(self, capacity: int) -> None:
        self._rows = PackedRows(capacity, _KEPT)

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
        return self._rows.column(_COLUMNS[name])

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
