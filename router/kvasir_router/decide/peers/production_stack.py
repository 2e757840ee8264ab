"""vLLM production-stack's prefix-aware routing.

Source: vllm-project/production-stack, src/vllm_router/routers/routing_logic.py (`PrefixAwareRouter`) and
src/vllm_router/prefix/hashtrie.py (`HashTrie`, chunk_size 128).

    walk the trie of sent prompts, one chunk of the prompt after the other, while any available place was
    sent the chunk; of the places that were sent the last one, pick one at random

Neither load nor the size of a match counts; without any match all places are equal. The original's chunks
have 128 characters and are never evicted; here they are the prompt's blocks, with 2**20 kept per place. It
has no rule for decode places (its `DisaggregatedPrefillRouter` takes the first), so the fewest streams
decide.
"""

from __future__ import annotations

import numpy as np

from kvasir.ports.clock import Rng
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.place import PeerPolicy, PlacementChoice, PlacementQuery
from kvasir_router.decide.peers.tree import SentTree

MAX_TREE_BLOCKS = 2**20


class ProductionStack(PeerPolicy):
    """vLLM production-stack's router; `sent` is the depth of the match if the place was sent all of it, else
    0."""

    name = "production_stack"

    def __init__(
        self, disaggregation: Disaggregation, rng: Rng, max_tree_blocks: int = MAX_TREE_BLOCKS
    ) -> None:
        super().__init__(disaggregation, rng)
        self._tree = SentTree(max_tree_blocks)

    def _place(self, ask: PlacementQuery) -> PlacementChoice:
        self._tree.keep(ask.candidates.targets)
        targets = [ask.candidates.targets[row] for row in ask.rows]
        depth, holders = self._tree.match_among(ask.request.block_hashes, targets)
        matched = np.array([not holders or target in holders for target in targets])
        rows = ask.rows[matched]
        row = int(rows[self._rng.randrange(len(rows))])
        self._tree.insert(ask.request.block_hashes, ask.candidates.targets[row])
        missed = np.where(matched, 0, depth)
        return PlacementChoice(row, ask.table("blocks", ("missed",), missed))
