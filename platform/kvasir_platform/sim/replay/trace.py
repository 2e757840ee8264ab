"""Recorded traffic: when requests came, how long they were, and which blocks they share.

Two public formats are read. Mooncake's conversation trace (kvcache-ai/Mooncake, FAST25-release, Apache-2.0)
has one JSON object a line: `timestamp` in ms, `input_length`, `output_length` and `hash_ids`, the names of
the prompt's blocks of 512 tokens, equal where the whole prefix is equal. Azure's trace of 2023
(Azure/AzurePublicDataset, CC-BY) has arrivals and lengths only: its prompts share nothing.

Engines cache whole blocks, so the part of a block at a prompt's end has no name here.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from kvasir.ports.clock import Rng

BLOCK_TOKENS = 512
_M64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: `arrival_s` since the trace began, lengths in tokens, the names of its whole blocks."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    names: array[int]


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests by arrival."""

    requests: tuple[TraceRequest, ...]

    @property
    def prompt_tokens(self) -> int:
        """Of all requests together."""
        return sum(each.prompt_tokens for each in self.requests)

    def infinite_hits(self) -> int:
        """Prompt tokens that one cache without bounds would not have to compute. Engines compute at least
        the last token of a prompt."""
        seen: set[int] = set()
        hits = 0
        for each in self.requests:
            depth = next((i for i, name in enumerate(each.names) if name not in seen), len(each.names))
            hits += min(depth, (each.prompt_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
            seen.update(each.names)
        return hits

    def first(self, count: int) -> RequestTrace:
        """The trace's beginning."""
        return RequestTrace(self.requests[:count])

    def halves_swapped(self) -> RequestTrace:
        """The second half of the time before the first: other caches meet other requests."""
        middle = self.requests[-1].arrival_s / 2
        late = [r for r in self.requests if r.arrival_s >= middle]
        early = [r for r in self.requests if r.arrival_s < middle]
        start = late[0].arrival_s
        behind = late[-1].arrival_s - start
        moved = [replace(r, arrival_s=r.arrival_s - start) for r in late]
        return RequestTrace((*moved, *(replace(r, arrival_s=r.arrival_s + behind) for r in early)))


def block_name(number: int) -> int:
    """A name like those that prompts are hashed to (SplitMix64; Steele, Lea and Flood, 2014)."""
    x = (number * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def read_mooncake(path: Path, rng: Rng) -> RequestTrace:
    """Mooncake's format. Its clock ticks every three seconds, about ten requests a tick: within its tick a
    request comes at a time drawn from `rng`, in the order of the file. Raises ValueError where a line
    is not such a record."""
    rows = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                rows.append(
                    (row["timestamp"] / 1000, row["input_length"], row["output_length"], row["hash_ids"])
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from error
    times = _spread([row[0] for row in rows], rng)
    requests = []
    for arrival, (_, prompt, output, ids) in zip(times, rows, strict=True):
        names = array("Q", map(block_name, ids[: prompt // BLOCK_TOKENS]))
        requests.append(TraceRequest(arrival, prompt, max(1, output), names))
    return RequestTrace(tuple(requests))


def read_azure(path: Path) -> RequestTrace:
    """Azure's format. Raises ValueError where a line is not such a record."""
    requests: list[TraceRequest] = []
    start: datetime | None = None
    blocks = 0
    with path.open(newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), 2):
            try:
                # Seven decimals of a second, of which datetime takes six.
                at = datetime.fromisoformat(row["TIMESTAMP"][:26])
                prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from error
            start = start or at
            count = prompt // BLOCK_TOKENS
            names = array("Q", map(block_name, range(blocks, blocks + count)))
            blocks += count
            requests.append(TraceRequest((at - start).total_seconds(), prompt, max(1, output), names))
    return RequestTrace(tuple(requests))


def _spread(times: Sequence[float], rng: Rng) -> list[float]:
    """Each time moved to one within its tick, in order."""
    ticks = sorted(set(times))
    gaps = [later - earlier for earlier, later in pairwise(ticks)]
    # A pause is no tick: within it nobody came.
    usual = sorted(gaps)[len(gaps) // 2] if gaps else 0.0
    widths = dict(zip(ticks, [min(gap, usual) for gap in gaps] + [usual], strict=True)) if ticks else {}
    return sorted(time + rng.random() * widths[time] for time in times)
