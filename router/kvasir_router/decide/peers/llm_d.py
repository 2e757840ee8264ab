"""llm-d's precise prefix-cache routing: filters, then scores in [0, 1] by weight, then the highest.

Source: llm-d/llm-d, guides/precise-prefix-cache-routing/router/precise-prefix-cache-routing.values.yaml
(weights), llm-d/llm-d-router, pkg/epp/framework/plugins/scheduling/scorer (formulas), llm-d-kv-cache,
pkg/kvcache/backend.go (the weight of a block by medium: 1 on the device, then `MEDIUM_WEIGHTS`).

    precise-prefix-cache-scorer  3   blocks of the prompt held there / blocks of the prompt
    kv-cache-utilization-scorer  2   1 - share of the KV memory in use
    queue-scorer                 2   (longest queue - queue) / (longest - shortest), 1 where all are equal
    no-hit-lru-scorer            2   0.5 if any place holds a part of the prompt; else 1 - rank / (n - 1),
                                     ranked by the time of the last such request, places without one first
    max-score-picker                 the highest sum; ties at random

Disaggregated, the prompt uses the same profile over prefill places, and the decode place is the one with the
fewest requests (`active-request-scorer`, guides/pd-disaggregation). The KV in use is what the router
reserved, not a scraped metric; prefixes are looked up in Kvasir's index.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from kvasir.ports.clock import Rng
from kvasir.ports.routing import SCORE, FloatColumn, RoutingTarget
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.place import PeerPolicy, PlacementChoice, PlacementQuery, least

PREFIX_WEIGHT = 3.0
KV_UTILIZATION_WEIGHT = 2.0
QUEUE_WEIGHT = 2.0
NO_HIT_LRU_WEIGHT = 2.0
MEDIUM_WEIGHTS = (0.8, 0.3, 0.4)
"""Weights of a block in CPU memory, on the worker's disk (`storage`) and in a remote store
(`shared_storage`)."""

LRU_SIZE = 1_024


class LlmD(PeerPolicy):
    """llm-d's scheduler; the sum of a row's terms is its weighted score."""

    name = "llm_d"

    def __init__(
        self,
        disaggregation: Disaggregation,
        rng: Rng,
        *,
        prefix_weight: float = PREFIX_WEIGHT,
        queue_weight: float = QUEUE_WEIGHT,
    ) -> None:
        super().__init__(disaggregation, rng)
        self._prefix_weight, self._queue_weight = prefix_weight, queue_weight
        self._cold: OrderedDict[RoutingTarget, None] = OrderedDict()

    def _place(self, ask: PlacementQuery) -> PlacementChoice:
        prefix = _prefix(ask)
        cold = not prefix.any()
        terms = (
            self._prefix_weight * prefix,
            KV_UTILIZATION_WEIGHT * _kv_free(ask),
            self._queue_weight * _queue(ask),
            NO_HIT_LRU_WEIGHT * (self._lru(ask) if cold else np.full(len(ask.rows), 0.5)),
        )
        row = least(ask.rows, -np.sum(terms, axis=0), self._rng)
        if cold:
            self._remember(ask.candidates.targets[row])
        return PlacementChoice(
            row, ask.table(SCORE, ("prefix", "kv_utilization", "queue", "no_hit_lru"), *terms)
        )

    def _decode(self, ask: PlacementQuery) -> PlacementChoice:
        load = ask.in_flight()
        return PlacementChoice(least(ask.rows, load, self._rng), ask.table("requests", ("in_flight",), load))

    def _lru(self, ask: PlacementQuery) -> FloatColumn:
        """Places that never had a cold request, in order, then the others, the least recent first."""
        count = len(ask.rows)
        if count == 1:
            return np.ones(1)
        positions = {target: position for position, target in enumerate(self._cold)}
        ranks = np.array([positions.get(ask.candidates.targets[row], -1) for row in ask.rows])
        never = ranks < 0
        ranks = np.where(never, np.cumsum(never) - 1, ranks + never.sum())
        scores: FloatColumn = np.maximum(0.0, 1.0 - ranks / (count - 1))
        return scores

    def _remember(self, target: RoutingTarget) -> None:
        self._cold[target] = None
        self._cold.move_to_end(target)
        while len(self._cold) > LRU_SIZE:
            self._cold.popitem(last=False)


def _prefix(ask: PlacementQuery) -> FloatColumn:
    candidates, rows = ask.candidates, ask.rows
    size = candidates.block_size[rows]
    below = (candidates.tier_tokens[rows] // size[:, None]) @ np.array(MEDIUM_WEIGHTS)
    held = candidates.cached_tokens[rows] // size + below
    blocks = np.maximum(1, ask.request.prompt_tokens // size)
    scores: FloatColumn = np.minimum(1.0, held / blocks)
    return scores


def _kv_free(ask: PlacementQuery) -> FloatColumn:
    used = ask.candidates.reserved_kv_tokens[ask.rows] / ask.candidates.kv_tokens[ask.rows]
    free: FloatColumn = 1.0 - np.minimum(1.0, used)
    return free


def _queue(ask: PlacementQuery) -> FloatColumn:
    waiting = ask.candidates.waiting[ask.rows]
    shortest, longest = int(waiting.min()), int(waiting.max())
    if shortest == longest:
        return np.ones(len(ask.rows))
    scores: FloatColumn = (longest - waiting) / (longest - shortest)
    return scores
