"""Statistics of a prefix tree, in either implementation."""

from __future__ import annotations

from typing import NamedTuple


class TreeStats(NamedTuple):
    """`blocks`: (block, owner) pairs, reported and predicted. `predicted_blocks`: predicted pairs. `names`:
    distinct blocks in the tree, stored in `nodes` runs. `unswept`: pairs of dropped owners that are not
    reclaimed. `expired` and `evicted`: total number of such predictions. `bytes`: memory allocated by the
    tree."""

    blocks: int
    predicted_blocks: int
    names: int
    nodes: int
    groups: int
    unswept: int
    expired: int
    evicted: int
    bytes: int
