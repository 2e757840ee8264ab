"""Recorded traffic: arrivals, lengths, and shared blocks.

Two public formats are read. Mooncake's conversation trace (kvcache-ai/Mooncake, FAST25-release, Apache-2.0)
has one JSON object per line: `timestamp` in ms, `input_length`, `output_length` and `hash_ids`, the ids of
the prompt's blocks of 512 tokens, equal if the whole prefix is equal. Azure's trace of 2023
(Azure/AzurePublicDataset, CC-BY) has arrivals and lengths only: its prompts share nothing.

Engines cache whole blocks, so a partial block at a prompt's end has no id here.
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
    """One request: `arrival_s` since the start of the trace, lengths in tokens, ids of its whole blocks."""

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
        """Sum over all requests."""
        return sum(each.prompt_tokens for each in self.requests)

    def infinite_hits(self) -> int:
        """Prompt tokens that an unbounded cache would not have to compute. Engines compute at least the last
        token of a prompt."""
        seen: set[int] = set()
        hits = 0
        for each in self.requests:
            depth = next((i for i, name in enumerate(each.names) if name not in seen), len(each.names))
            hits += min(depth, (each.prompt_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
            seen.update(each.names)
        return hits

    def first(self, count: int) -> RequestTrace:
        """The first part of the trace."""
        return RequestTrace(self.requests[:count])

    def halves_swapped(self) -> RequestTrace:
        """The second half in time before the first: the caches meet other requests."""
        middle = self.requests[-1].arrival_s / 2
        late = [r for r in self.requests if r.arrival_s >= middle]
        early = [r for r in self.requests if r.arrival_s < middle]
        start = late[0].arrival_s
        behind = late[-1].arrival_s - start
        moved = [replace(r, arrival_s=r.arrival_s - start) for r in late]
        return RequestTrace((*moved, *(replace(r, arrival_s=r.arrival_s + behind) for r in early)))


def block_name(number: int) -> int:
    """An id like those that prompts are hashed to (SplitMix64; Steele, Lea and Flood, 2014)."""
    x = (number * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def read_mooncake(path: Path, rng: Rng) -> RequestTrace:
    """Read Mooncake's format. Its clock ticks every three seconds, about ten requests per tick: the time of a
    request within its tick is drawn from `rng`, in the order of the file. Raise ValueError for an invalid
    line."""
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
    """Read Azure's format. Raise ValueError for an invalid line."""
    requests: list[TraceRequest] = []
    start: datetime | None = None
    blocks = 0
    with path.open(newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), 2):
            try:
                # Seven decimals of a second, of which datetime accepts six.
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
    """Move each time to one within its tick, in order."""
    ticks = sorted(set(times))
    gaps = [later - earlier for earlier, later in pairwise(ticks)]
    # A gap is longer than a tick: no request arrived within it.
    usual = sorted(gaps)[len(gaps) // 2] if gaps else 0.0
    widths = dict(zip(ticks, [min(gap, usual) for gap in gaps] + [usual], strict=True)) if ticks else {}
    return sorted(time + rng.random() * widths[time] for time in times)
