"""SGLang's cache-aware routing.

Source: sglang-router 0.3.2 on PyPI (sgl-project/sglang, sgl-model-gateway/src/policies/cache_aware.rs and
tree.rs, policy `cache_aware`), with the defaults of its `RouterArgs`: cache_threshold 0.3,
balance_abs_threshold 64, balance_rel_threshold 1.5, max_tree_size 2**26.

    imbalanced = max - min > balance_abs_threshold  and  max > balance_rel_threshold * min
    imbalanced:                      the place with the fewest requests in flight
    match / prompt > cache_threshold: the place that was first sent the longest prefix sent to any
    else:                            the place with the fewest requests in flight

The tree has what this router sent, not what workers hold. The first place in order wins a tie. Prefill and
decode places have a tree each. Here a prompt is measured in blocks instead of characters, and the least
recently sent prefixes are evicted at once instead of every minute.
"""

from __future__ import annotations

import numpy as np

from kvasir.ports.clock import Rng
from kvasir.ports.routing import RoutingTarget
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.place import PeerPolicy, PlacementChoice, PlacementQuery
from kvasir_router.decide.peers.tree import SentTree

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5
MAX_TREE_BLOCKS = 2**20
"""Per place: 2**26 characters are 2**20 blocks of 16 tokens of 4 characters."""


class SglangCacheAware(PeerPolicy):
    """SGLang's router; `cached` counts only for the place that the tree names, as in the original."""

    name = "sglang"

    def __init__(
        self,
        disaggregation: Disaggregation,
        rng: Rng,
        *,
        cache_threshold: float = CACHE_THRESHOLD,
        balance_abs_threshold: int = BALANCE_ABS_THRESHOLD,
        balance_rel_threshold: float = BALANCE_REL_THRESHOLD,
        max_tree_blocks: int = MAX_TREE_BLOCKS,
    ) -> None:
        super().__init__(disaggregation, rng)
        self._cache_threshold = cache_threshold
        self._abs_threshold = balance_abs_threshold
        self._rel_threshold = balance_rel_threshold
        self._max_tree_blocks = max_tree_blocks
        self._trees: dict[str, SentTree] = {}

    def _place(self, ask: PlacementQuery) -> PlacementChoice:
        tree = self._trees.setdefault(ask.part, SentTree(self._max_tree_blocks))
        tree.keep(ask.candidates.targets)
        names, load = ask.request.block_hashes, ask.in_flight()
        depth, holders = tree.match(names)
        holder = holders[0] if holders else None
        sent = np.array([ask.candidates.targets[row] == holder for row in ask.rows]) * depth
        table = ask.table("requests and blocks", ("in_flight", "sent"), load, sent)
        if self._imbalanced(int(load.min()), int(load.max())):
            position, reason = int(load.argmin()), "sglang_imbalanced"
        elif holder is not None and depth > self._cache_threshold * len(names):
            position, reason = self._holder(ask, tree, holder, sent), "sglang_cached"
        else:
            position, reason = int(load.argmin()), "sglang_shortest_queue"
        row = int(ask.rows[position])
        tree.insert(names, ask.candidates.targets[row])
        return PlacementChoice(row, table, reason)

    def _decode(self, ask: PlacementQuery) -> PlacementChoice:
        return self._place(ask)._replace(reason="")

    def _imbalanced(self, least: int, most: int) -> bool:
        return most - least > self._abs_threshold and most > self._rel_threshold * least

    def _holder(self, ask: PlacementQuery, tree: SentTree, holder: RoutingTarget, sent: np.ndarray) -> int:
        """The original takes the first healthy place, and drops the other from the tree, if the named one is
        gone."""
        if sent.any():
            return int(sent.argmax())
        if holder not in ask.candidates.targets:
            tree.forget(holder)
        return 0
