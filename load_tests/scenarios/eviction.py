"""Comparison of the tiers' eviction policies on recorded prompts.

The prompts of a trace pass through an arena under each policy and at several capacities, given as a share of
the trace's distinct blocks. A prompt hits all blocks before its first missing one; the rest is inserted. Hits
are compared with those of an unbounded cache and of a cache that knows the future (Belady, 1966; it does not
insert what is not used again). With several workers, each conversation stays on one worker, and each worker
has its share of the capacity.

    make bench-eviction TRACE=mooncake_conversation.jsonl
    make bench-eviction TRACE=… ARGS=--quick         a few hundred requests, as a smoke test

The trace (Mooncake, FAST 2025, Apache-2.0) is not in this repository.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import NamedTuple

from kvasir.ports.tier import KEY_BYTES, TierBlock
from kvasir_platform.workload.files import TRACE_BLOCK_TOKENS, read_mooncake
from kvasir_platform.workload.requests import Workload
from kvasir_workers.tiers.arena import Arena
from kvasir_workers.tiers.eviction import Eviction, EvictionKind, eviction
from load_tests.report import Row, median, write

KINDS: tuple[EvictionKind, ...] = ("lru", "lfu", "s3fifo")
FLOOR: EvictionKind = "lru"
SHARES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5)
WORKERS = 4
SEED = 1
QUICK = 600
"""Requests of a quick run."""
NEVER = 1 << 62


class Prompt(NamedTuple):
    """The whole blocks of a prompt and how many of them a hit can save: the last token is always computed."""

    blocks: tuple[TierBlock, ...]
    most: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Blocks hit, blocks looked up, and the CPU time of both."""

    hits: int
    asked: int
    cpu_s: float


class Order(Enum):
    """The end of a prompt from which its blocks are used and inserted. Engines insert from the front, as
    blocks are computed. Inserting the whole prompt from its end never evicts a block that has successors,
    which is the upper bound of chain-aware eviction."""

    USED_FROM_END = "as it is"
    USED_FROM_FRONT = "used from the front"
    ALL_FROM_END = "brought in from the end too"


def prompts_of(trace: Workload) -> list[Prompt]:
    """The trace's prompts in order, without those shorter than a block."""
    blocks: dict[int, TierBlock] = {}
    made = []
    for request in trace.requests:
        parent = 0
        for name in request.names:
            if name not in blocks:
                blocks[name] = TierBlock(name.to_bytes(8, "little") * (KEY_BYTES // 8), name, parent)
            parent = name
        if request.names:
            most = (request.prompt_tokens - 1) // TRACE_BLOCK_TOKENS
            made.append(Prompt(tuple(blocks[name] for name in request.names), most))
    return made


def apart(prompts: Sequence[Prompt], workers: int) -> list[list[Prompt]]:
    """The prompts by worker. The first block is nearly the same for all prompts; the second identifies the
    conversation."""
    parts: list[list[Prompt]] = [[] for _ in range(workers)]
    for prompt in prompts:
        parts[prompt.blocks[:2][-1].name % workers].append(prompt)
    return parts


def play(prompts: Sequence[Prompt], policy: Eviction[bytes], slots: int, order: Order) -> Outcome:
    """Run the prompts through an arena."""
    arena = Arena(slots, policy)
    hits = asked = 0
    began = time.process_time()
    for prompt in prompts:
        keys = [block.key for block in prompt.blocks]
        depth = next((i for i, key in enumerate(keys) if arena.find(key) is None), len(keys))
        there = [key for key in keys if arena.holds(key)]
        arena.touch(there[::-1] if order is Order.USED_FROM_FRONT else there)
        rest = prompt.blocks[depth:]
        for block in reversed(rest) if order is Order.ALL_FROM_END else rest:
            if not arena.holds(block.key):
                slot = arena.reserve(block)
                if slot is not None:
                    arena.commit(slot)
        arena.take_changes()
        hits += min(depth, prompt.most)
        asked += len(keys)
    return Outcome(hits, asked, time.process_time() - began)


def predicted_hits(prompts: Sequence[Prompt], slots: int) -> int:
    """Hits of a cache that knows when each block is used again. A request that uses a block uses all blocks
    before it, so the end of a prompt is never used earlier than its beginning and is evicted first."""
    following: dict[bytes, int] = {}
    uses: list[list[int]] = [[] for _ in prompts]
    for number in range(len(prompts) - 1, -1, -1):
        uses[number] = [following.get(block.key, NEVER) for block in prompts[number].blocks]
        following.update((block.key, number) for block in prompts[number].blocks)
    held: dict[bytes, int] = {}
    latest: list[tuple[int, int, bytes]] = []
    hits = 0
    for prompt, again in zip(prompts, uses, strict=True):
        blocks = prompt.blocks
        depth = next((i for i, block in enumerate(blocks) if block.key not in held), len(blocks))
        hits += min(depth, prompt.most)
        for place, (block, use) in enumerate(zip(blocks, again, strict=True)):
            held[block.key] = use
            heappush(latest, (-use, -place, block.key))
        while latest and (len(held) > slots or latest[0][0] == -NEVER):
            use, _, key = heappop(latest)
            # An entry whose block was used since is outdated.
            if held.get(key) == -use:
                del held[key]
    return hits


@dataclass(frozen=True, slots=True)
class Fleet:
    """Prompts by worker, hits of an unbounded cache, and the number of distinct blocks."""

    label: str
    parts: Sequence[Sequence[Prompt]]
    infinite: int
    distinct: int

    def slots(self, share: float) -> int:
        """Capacity of each worker."""
        return max(1, int(self.distinct * share) // len(self.parts))

    def outcome(self, kind: EvictionKind, share: float, order: Order = Order.USED_FROM_END) -> Outcome:
        """All workers together under one policy."""
        slots = self.slots(share)
        runs = [play(part, eviction(kind, slots), slots, order) for part in self.parts]
        return Outcome(
            sum(run.hits for run in runs), sum(run.asked for run in runs), sum(run.cpu_s for run in runs)
        )

    def predicted(self, share: float) -> float:
        """Hits of the cache with foresight as a share of the infinite cache's."""
        return sum(predicted_hits(part, self.slots(share)) for part in self.parts) / self.infinite


def fleet(label: str, trace: Workload, workers: int) -> Fleet:
    """The trace on that many workers."""
    distinct = len({name for request in trace.requests for name in request.names})
    return Fleet(
        label, apart(prompts_of(trace), workers), trace.infinite_hits() // TRACE_BLOCK_TOKENS, distinct
    )


def compare(on: Fleet, shares: Sequence[float]) -> list[Row]:
    """All policies at all capacities."""
    rows = []
    costs: dict[EvictionKind, list[float]] = {kind: [] for kind in KINDS}
    for share in shares:
        at = f"{share:.0%} of the blocks, {on.label}"
        rates = {}
        for kind in KINDS:
            run = on.outcome(kind, share)
            rates[kind] = run.hits / on.infinite
            costs[kind].append(run.cpu_s / run.asked * 1e6)
            rows.append(_beside(f"hits, {kind}, {at}", rates[kind], rates[FLOOR], shown=kind != FLOOR))
        rows.append(Row(f"hits, with foresight, {at}", on.predicted(share), "", "higher"))
        say(f"{at}: " + ", ".join(f"{kind} {rate:.4f}" for kind, rate in rates.items()))
    for kind, samples in costs.items():
        value, spread = median(samples)
        rows.append(Row(f"CPU per block, {kind}, {on.label}", value, "µs", "lower", spread=spread))
    return rows


def orders(on: Fleet, shares: Sequence[float]) -> list[Row]:
    """The gain of chain-aware eviction."""
    rows = []
    for share in shares:
        for kind in KINDS:
            rates = {order: on.outcome(kind, share, order).hits / on.infinite for order in Order}
            plain = rates.pop(Order.USED_FROM_END)
            at = f"{kind}, {share:.0%} of the blocks, {on.label}"
            rows += [_beside(f"hits, {order.value}, {at}", rate, plain) for order, rate in rates.items()]
    say(f"orders, {on.label}")
    return rows


def _beside(name: str, value: float, peer: float, *, shown: bool = True) -> Row:
    row = Row(name, value, "", "higher")
    return replace(row, peer=peer, ratio=value / peer if peer else None) if shown else row


def say(line: str) -> None:
    """Print progress."""
    sys.stderr.write(line + "\n")


def main(argv: Sequence[str]) -> list[Row]:
    """Measure, and write the report or print it. Exit with a message if the command line is invalid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="mooncake_conversation.jsonl")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} requests, no report")
    args = parser.parse_args(argv)
    if not args.trace.is_file():
        sys.exit(f"{args.trace}: no such file; the trace is in its publishers' repository")
    trace = read_mooncake(args.trace, Random(SEED))
    if args.quick:
        trace = trace.first(QUICK)
    alone = fleet("1 worker", trace, 1)
    say(f"{len(trace.requests):,} requests, {alone.distinct:,} blocks, {alone.infinite:,} to be hit")
    rows = compare(alone, SHARES)
    rows += compare(fleet(f"{WORKERS} workers", trace, WORKERS), SHARES)
    rows += compare(fleet("1 worker, halves of the trace swapped", trace.halves_swapped(), 1), SHARES)
    rows += orders(alone, SHARES)
    if args.quick:
        for row in rows:
            print(f"{row.name}: {row.value:.4g} {row.unit}")
        return rows
    note = (
        f"{len(trace.requests):,} requests, {alone.distinct:,} distinct blocks of {TRACE_BLOCK_TOKENS} "
        f"tokens. Hits are a share of those of an infinite cache, {alone.infinite:,} blocks; the peer is "
        f"{FLOOR}, and in the rows on orders the same policy with prompts used from their end and brought in "
        "from their front. CPU is that of the arena and its policy, over all capacities"
    )
    rows[0] = replace(rows[0], note=note)
    write("eviction", f"make bench-eviction TRACE={args.trace.name}", rows)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
