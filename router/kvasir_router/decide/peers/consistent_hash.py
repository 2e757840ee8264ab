"""Consistent hashing with bounded loads: the session's place on a ring, or the next one with room.

Source: V. Mirrokni, M. Thorup, M. Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018
(arXiv:1608.01350, 2016), section 1: with m balls (this one included) in n bins no bin holds more than ceil(c
* m / n), and a ball goes to the first bin clockwise of its hash that is not full. c is 1.25. A ball here is a
request in flight, hashed by its session, else by its first block.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
import xxhash

from kvasir.ports.clock import Rng
from kvasir.ports.routing import RoutingTarget
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.affinity import affinity_key
from kvasir_router.decide.peers.place import PeerPolicy, PlacementChoice, PlacementQuery

BALANCE = 1.25
POINTS = 100
"""Points per place on the ring: spreads the arcs to about a tenth of their mean."""


class _Ring:
    """Positions are 64-bit hashes; `owners[i]` is the index of the target at `points[i]`."""

    def __init__(self, targets: tuple[RoutingTarget, ...]) -> None:
        self.targets = targets
        placed = sorted(
            (xxhash.xxh64_intdigest(f"{target.worker_id}/{target.rank}#{point}".encode()), index)
            for index, target in enumerate(targets)
            for point in range(POINTS)
        )
        self.points = [position for position, _ in placed]
        self.owners = [index for _, index in placed]

    def walk(self, key: str) -> list[int]:
        """Yield targets by index, in the order in which their first points follow the key's hash."""
        start = bisect_left(self.points, xxhash.xxh64_intdigest(key.encode()))
        return list(dict.fromkeys(self.owners[start:] + self.owners[:start]))


class ConsistentHash(PeerPolicy):
    """See PlacePolicy; each part has a ring of its own."""

    name = "consistent_hash"

    def __init__(self, disaggregation: Disaggregation, rng: Rng, balance: float = BALANCE) -> None:
        super().__init__(disaggregation, rng)
        self._balance = balance
        self._rings: dict[str, _Ring] = {}

    def _place(self, ask: PlacementQuery) -> PlacementChoice:
        load = ask.in_flight()
        limit = math.ceil(self._balance * (int(load.sum()) + 1) / len(load))
        walk = self._ring(ask).walk(affinity_key(ask.request))
        position = next(index for index in walk if load[index] < limit)
        distance = np.empty(len(load), dtype=np.int64)
        distance[walk] = np.arange(len(walk))
        full = np.where(load < limit, 0, len(load))
        table = ask.table("places", ("distance", "full"), distance, full)
        return PlacementChoice(int(ask.rows[position]), table)

    def _decode(self, ask: PlacementQuery) -> PlacementChoice:
        return self._place(ask)

    def _ring(self, ask: PlacementQuery) -> _Ring:
        targets = tuple(ask.candidates.targets[row] for row in ask.rows)
        ring = self._rings.get(ask.part)
        if ring is None or ring.targets != targets:
            ring = self._rings[ask.part] = _Ring(targets)
        return ring
