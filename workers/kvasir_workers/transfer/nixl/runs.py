"""Runs of neighbouring blocks, which take one descriptor instead of one per block.

Computed with arrays, because a long prompt has thousands of blocks and the engine's step waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Run number i is `blocks[i]` blocks that are contiguous on both sides, from `source[i]` to
    `target[i]`."""

    source: Numbers
    target: Numbers
    blocks: Numbers


def merge(source: Sequence[int], target: Sequence[int]) -> Runs:
    """Return pairs (source[i], target[i]) as runs, in the given order. Raise ValueError if the lengths
    differ."""
    if len(source) != len(target):
        raise ValueError(f"{len(source)} source blocks for {len(target)} target blocks")
    of, to = np.asarray(source, dtype=np.int64), np.asarray(target, dtype=np.int64)
    begins = np.ones(len(of), dtype=bool)
    begins[1:] = (np.diff(of) != 1) | (np.diff(to) != 1)
    starts = np.flatnonzero(begins)
    return Runs(of[starts], to[starts], np.diff(starts, append=len(of)))
