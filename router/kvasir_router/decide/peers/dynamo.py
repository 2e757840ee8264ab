"""NVIDIA Dynamo's KV router.

Source: ai-dynamo 1.6.1 on PyPI (ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector: `worker_logit`,
`minimum_cost_index`, `softmax_sample_index`; lib/kv-router/src/sequences for the load), with the defaults
of its `KvRouterConfig`: overlap_score_credit 1, host_cache_hit_weight 0.75, disk_cache_hit_weight 0.25,
prefill_load_scale 1, decode_active_request_weight 0, router_temperature 0. In blocks:

    prefill = prefill_load_scale * max(0, (active prefill tokens + prompt tokens) / block size - credit)
    credit  = device + 0.75 * host + 0.25 * disk             blocks of the prompt held there
    decode  = blocks of active requests, shared ones once, with those that this request adds
    cost    = prefill + decode, the lowest wins; at a temperature t > 0 a sample with weights
              exp(-cost / (t * (max - min)))

Disaggregated, as in its frontend: the prefill place without `decode` (router_track_active_blocks off), the
decode place by the blocks of active requests alone (no credit, no prefill, nothing shared).

Dynamo counts a request's blocks until it ends. Here the number of requests at a place bounds how many of
those sent there can still be active; the oldest are assumed to have ended. Expected output is part
of the load here; there it is not by default (router_track_output_blocks).
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter, deque

import numpy as np

from kvasir.ports.clock import Rng
from kvasir.ports.routing import FloatColumn, RoutingTarget
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.place import WHOLE, PeerPolicy, PlacementChoice, PlacementQuery, least

PREFILL_LOAD_SCALE = 1.0
TIER_CREDIT = (0.75, 0.25, 0.25)
"""Credit of host memory, and of disk and slower media."""

ACTIVE_LIMIT = 4_096
"""Requests per place whose blocks are kept."""


class _Active:
    """The blocks of requests that may be active at one place."""

    def __init__(self) -> None:
        self._requests: deque[array[int]] = deque()
        self._blocks: Counter[int] = Counter()

    def add(self, names: array[int]) -> None:
        self._requests.append(names)
        self._blocks.update(names)

    def trim(self, count: int) -> None:
        """Drop the oldest requests until at most `count` are left."""
        while len(self._requests) > min(count, ACTIVE_LIMIT):
            self._blocks.subtract(gone := self._requests.popleft())
            for name in gone:
                if not self._blocks[name]:
                    del self._blocks[name]

    def repeated(self) -> int:
        """Blocks that were counted before: the savings of sharing."""
        return self._blocks.total() - len(self._blocks)

    def shared(self, names: array[int]) -> int:
        """Number of leading blocks that an active request has too."""
        return bisect_left(names, True, key=lambda name: name not in self._blocks)


class Dynamo(PeerPolicy):
    """NVIDIA Dynamo's KV router; the sum of a row's terms is its cost in blocks."""

    name = "dynamo"

    def __init__(
        self,
        disaggregation: Disaggregation,
        rng: Rng,
        temperature: float = 0.0,
        *,
        prefill_load_scale: float = PREFILL_LOAD_SCALE,
    ) -> None:
        super().__init__(disaggregation, rng)
        self._prefill_load_scale = prefill_load_scale
        self._temperature = temperature
        self._active: dict[RoutingTarget, _Active] = {}

    def _place(self, ask: PlacementQuery) -> PlacementChoice:
        candidates, rows = ask.candidates, ask.rows
        size = candidates.block_size[rows]
        tokens = candidates.queued_prefill_tokens[rows] + ask.request.prompt_tokens
        below = (candidates.tier_tokens[rows] // size[:, None]) @ np.array(TIER_CREDIT)
        credit = candidates.cached_tokens[rows] // size + below
        prefill = self._prefill_load_scale * np.maximum(0.0, tokens / size - credit)
        whole = ask.part == WHOLE
        decode = self._decode_blocks(ask) if whole else np.zeros(len(rows))
        row = self._pick(ask, prefill + decode)
        if whole:
            self._active.setdefault(candidates.targets[row], _Active()).add(ask.request.block_hashes)
        return PlacementChoice(row, ask.table("blocks", ("prefill", "decode"), prefill, decode))

    def _decode(self, ask: PlacementQuery) -> PlacementChoice:
        size = ask.candidates.block_size[ask.rows]
        active = ask.candidates.reserved_kv_tokens[ask.rows] // size
        own = ask.request.prompt_tokens // size
        return PlacementChoice(
            self._pick(ask, (active + own).astype(np.float64)),
            ask.table("blocks", ("active", "own"), active, own),
        )

    def _decode_blocks(self, ask: PlacementQuery) -> FloatColumn:
        """Potential decode blocks: the active ones, and those that this request adds."""
        candidates, names = ask.candidates, ask.request.block_hashes
        self._forget_the_gone(candidates.targets)
        in_flight = ask.in_flight()
        size = candidates.block_size[ask.rows]
        own = ask.request.prompt_tokens // size
        blocks = (candidates.reserved_kv_tokens[ask.rows] // size).astype(np.float64)
        for position, row in enumerate(ask.rows.tolist()):
            active = self._active.get(candidates.targets[row])
            blocks[position] += own[position]
            if active is not None:
                active.trim(int(in_flight[position]))
                blocks[position] -= active.repeated() + active.shared(names)
        return np.maximum(0.0, blocks)

    def _forget_the_gone(self, targets: tuple[RoutingTarget, ...]) -> None:
        if len(self._active) > 2 * len(targets):
            for gone in self._active.keys() - set(targets):
                del self._active[gone]

    def _pick(self, ask: PlacementQuery, cost: FloatColumn) -> int:
        low, high = float(cost.min()), float(cost.max())
        if self._temperature == 0.0 or low == high:
            return least(ask.rows, cost, self._rng)
        weights = np.exp((low - cost) / ((high - low) * self._temperature))
        drawn = self._rng.random() * math.fsum(weights)
        position = int(np.searchsorted(np.cumsum(weights), drawn))
        return int(ask.rows[min(position, len(ask.rows) - 1)])
