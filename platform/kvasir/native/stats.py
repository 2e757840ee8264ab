"""What a prefix tree says of itself, in either implementation."""

from __future__ import annotations

from typing import NamedTuple


class TreeStats(NamedTuple):
    """`blocks` counts (block, owner) pairs, reported and predicted; `predicted_blocks` the latter; `names`
    the distinct blocks that the tree keeps, in `nodes` runs; `unswept` the pairs of dropped owners that are
    not reclaimed; `expired` and `evicted` predictions in all; `bytes` what the tree has allocated."""

    blocks: int
    predicted_blocks: int
    names: int
    nodes: int
    groups: int
    unswept: int
    expired: int
    evicted: int
    bytes: int
