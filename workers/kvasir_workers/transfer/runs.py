"""Neighbouring blocks as runs: one descriptor moves what would otherwise take one per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """`blocks` blocks that lie next to each other on both sides, from `source` to `target`."""

    source: int
    target: int
    blocks: int


def merge(source: Sequence[int], target: Sequence[int], longest: int) -> list[Run]:
    """Pairs (source[i], target[i]) as runs of at most `longest` blocks, in the given order.

    Raises ValueError when the lengths differ."""
    runs: list[Run] = []
    for src, dst in zip(source, target, strict=True):
        if runs:
            last = runs[-1]
            adjacent = src == last.source + last.blocks and dst == last.target + last.blocks
            if adjacent and last.blocks < longest:
                runs[-1] = Run(last.source, last.target, last.blocks + 1)
                continue
        runs.append(Run(src, dst, 1))
    return runs
