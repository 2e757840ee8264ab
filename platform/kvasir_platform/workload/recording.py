"""The format `kvasir-workload/1`, in which traffic of a deployment is recorded: docs/WORKLOADS.md.

Lines of JSON. The first names the format; each other one is a request, in any order. Fields that a reader
does not know are ignored, so that a recording may have more to say of each request.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvasir_platform.workload.requests import Workload, WorkloadRequest, block_name, block_names

FORMAT = "kvasir-workload/1"
_LABELS = ("tenant", "session", "model", "slo")
_U64 = 1 << 64


def header_line(block_tokens: int, more: Mapping[str, Any] | None = None) -> str:
    """The first line, with its end. `more` are further fields for it."""
    return _line({"format": FORMAT, "block_tokens": block_tokens} | dict(more or {}))


def request_line(request: WorkloadRequest, more: Mapping[str, Any] | None = None) -> str:
    """The line of one request, with its end. `more` are further fields: its outcome, times, decisions."""
    row: dict[str, Any] = {
        "arrival_s": round(request.arrival_s, 6),
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "prefix_hashes": list(request.names),
    }
    if request.embeds:
        row["embeds"] = True
    row |= {label: value for label in _LABELS if (value := getattr(request, label))}
    return _line(row | dict(more or {}))


class RecordingReader:
    """Takes the lines of a recording one by one, beginning with its header. Raises ValueError that says what
    is wrong with a line."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        if header.get("format") != FORMAT:
            raise ValueError(f"the first line must have format {FORMAT}")
        self._block_tokens = _count(header, "block_tokens", least=1)
        self._requests: list[WorkloadRequest] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Take the line of a request."""
        prompt = _count(row, "prompt_tokens", least=1)
        hashes = row.get("prefix_hashes", ())
        if not isinstance(hashes, list | tuple) or not all(
            type(each) is int and 0 <= each < _U64 for each in hashes
        ):
            raise ValueError("prefix_hashes: whole numbers from 0 to 2^64 - 1")
        arrival = row.get("arrival_s")
        if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0.0 <= arrival < 1e12:
            raise ValueError(f"arrival_s: {arrival!r} is not a number of seconds")
        whole = prompt // self._block_tokens
        # Blocks that the recording does not name are shared with nobody.
        alone = block_name(len(self._requests))
        names = array("Q", hashes[:whole]) + block_names(alone, range(len(hashes), whole))
        self._requests.append(
            WorkloadRequest(
                float(arrival),
                prompt,
                _count(row, "output_tokens", least=0),
                names,
                embeds=row.get("embeds") is True,
                **{label: _text(row, label) for label in _LABELS},
            )
        )

    def workload(self, name: str) -> Workload:
        """The requests by arrival, the first at 0."""
        ordered = sorted(self._requests, key=lambda each: each.arrival_s)
        start = ordered[0].arrival_s if ordered else 0.0
        moved = (replace(each, arrival_s=each.arrival_s - start) for each in ordered)
        return Workload(tuple(moved), self._block_tokens, name)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"


def _count(row: Mapping[str, Any], field: str, *, least: int) -> int:
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{field}: {value!r} is not a whole number of at least {least}")
    return value


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    return "" if value is None else str(value)
