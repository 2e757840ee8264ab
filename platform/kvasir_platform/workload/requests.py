"""The requests of a workload, as simulator, planner and load generator take them.

What prompts share is told by names of their whole blocks, in place of any content: the ids of a trace, salted
hashes of a recording, or numbers of a generator. Two equal names stand for two equal prefixes up to and with
that block, as block hashes of the router do. Engines cache whole blocks, so a partial block at a prompt's end
has no name.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd

MOST_REQUESTS = 2_000_000
"""What a workload holds at most."""
_M64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request: `arrival_s` since the start of the workload, lengths in tokens, a name for each whole
    block of its prompt.

    `embeds`: it asks for an embedding, and has no output tokens. The turns of a conversation have the same
    `session`. Labels are empty where nothing is known.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    names: array[int]
    embeds: bool = False
    tenant: str = ""
    session: str = ""
    model: str = ""
    slo: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by arrival; their blocks have `block_tokens` tokens."""

    requests: tuple[WorkloadRequest, ...]
    block_tokens: int
    name: str = ""

    @property
    def prompt_tokens(self) -> int:
        """Sum over all requests."""
        return sum(each.prompt_tokens for each in self.requests)

    @property
    def output_tokens(self) -> int:
        """Sum over all requests."""
        return sum(each.output_tokens for each in self.requests)

    @property
    def duration_s(self) -> float:
        """The last arrival."""
        return self.requests[-1].arrival_s if self.requests else 0.0

    def infinite_hits(self) -> int:
        """Prompt tokens that an unbounded cache would not have to compute. Engines compute at least the last
        token of a prompt."""
        seen: set[int] = set()
        hits = 0
        for each in self.requests:
            depth = next((i for i, name in enumerate(each.names) if name not in seen), len(each.names))
            hits += min(depth, max(0, each.prompt_tokens - 1) // self.block_tokens) * self.block_tokens
            seen.update(each.names)
        return hits

    def first(self, count: int) -> Workload:
        """The first part of the workload."""
        return replace(self, requests=self.requests[:count])

    def halves_swapped(self) -> Workload:
        """The second half in time before the first: the caches meet other requests."""
        middle = self.requests[-1].arrival_s / 2
        late = [r for r in self.requests if r.arrival_s >= middle]
        early = [r for r in self.requests if r.arrival_s < middle]
        start = late[0].arrival_s
        behind = late[-1].arrival_s - start
        moved = [replace(r, arrival_s=r.arrival_s - start) for r in late]
        return replace(self, requests=(*moved, *(replace(r, arrival_s=r.arrival_s + behind) for r in early)))

    def sped_up(self, factor: float) -> Workload:
        """The same requests, with the time between arrivals divided by `factor`."""
        requests = (replace(r, arrival_s=r.arrival_s / factor) for r in self.requests)
        return replace(self, requests=tuple(requests))

    def with_blocks_of(self, block_tokens: int) -> Workload:
        """The same requests with names of blocks of another size, for an engine that caches such blocks."""
        if block_tokens == self.block_tokens:
            return self
        requests = (
            replace(each, names=_renamed(each, number, self.block_tokens, block_tokens))
            for number, each in enumerate(self.requests)
        )
        return replace(self, requests=tuple(requests), block_tokens=block_tokens)


def block_name(number: int) -> int:
    """An id like those that prompts are hashed to (SplitMix64; Steele, Lea and Flood, 2014)."""
    x = (number * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def named_under(parent: int, number: int) -> int:
    """The name of part `number` of what `parent` names."""
    return block_name(parent ^ block_name(number))


def block_names(parent: int, numbers: Iterable[int]) -> array[int]:
    """Names of blocks that belong to one text, by their place in it."""
    return array("Q", (named_under(parent, number) for number in numbers))


def _renamed(request: WorkloadRequest, number: int, old: int, new: int) -> array[int]:
    """Names of blocks of `new` tokens: as the name of a block stands for all before it, that of a larger one
    is the last of those it holds, and the parts of one are numbered. What had no name is shared with nobody.
    """
    common = gcd(old, new)
    parts = [named_under(name, part) for name in request.names for part in range(old // common)]
    alone = block_name(number)
    parts += [named_under(alone, at) for at in range(len(parts), request.prompt_tokens // common)]
    step = new // common
    return array("Q", parts[step - 1 :: step])
