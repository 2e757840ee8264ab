"""KV events of engines under conversation traffic, generated from a seed.

Uses the standard library only, so that a peer in its own environment receives the same blocks. Lengths follow
the means of the Mooncake conversation trace at 16 tokens per block: a request computes about 476 prompt
blocks, in records of at most 128 (a chunk of 2,048 tokens), after a prefix that is shared or an earlier turn
of the same conversation, and 21 output blocks, reported one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

CHUNK_BLOCKS = 128
MEAN_PROMPT_BLOCKS = 476
OUTPUT_BLOCKS = 21
SHARED_PREFIXES = 64
SHARED_BLOCKS = 96
TURNS = 4


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks stored by one worker, each the child of the block before it; `parent` is 0 for the first block
    of a chain."""

    worker: int
    parent: int
    names: array[int]


def _names(rng: Random, count: int) -> array[int]:
    names = array("Q")
    names.frombytes(rng.randbytes(8 * count))
    return names


def stored(seed: int, workers: int, blocks: int) -> Iterator[Stored]:
    """Events of `workers` caches until they hold at least `blocks` in total; a block counts per worker."""
    rng = Random(seed)
    shared = [_names(rng, SHARED_BLOCKS) for _ in range(SHARED_PREFIXES)]
    has = [[False] * SHARED_PREFIXES for _ in range(workers)]
    held = turn = 0
    worker, tail = 0, 0
    while held < blocks:
        if turn % TURNS == 0:
            worker, prefix = rng.randrange(workers), rng.randrange(SHARED_PREFIXES)
            if not has[worker][prefix]:
                has[worker][prefix] = True
                held += SHARED_BLOCKS
                yield Stored(worker, 0, shared[prefix])
            tail = shared[prefix][-1]
        turn += 1
        left = 1 + min(int(rng.expovariate(1 / MEAN_PROMPT_BLOCKS)), 8 * MEAN_PROMPT_BLOCKS)
        held += left + OUTPUT_BLOCKS
        while left:
            names = _names(rng, min(left, CHUNK_BLOCKS))
            yield Stored(worker, tail, names)
            tail, left = names[-1], left - len(names)
        for name in _names(rng, OUTPUT_BLOCKS):
            yield Stored(worker, tail, array("Q", (name,)))
            tail = name


def prompts(seed: int, count: int, blocks: int) -> list[array[int]]:
    """Chains of exactly `blocks` blocks that share nothing with other chains, for look-ups."""
    rng = Random(seed)
    return [_names(rng, blocks) for _ in range(count)]
