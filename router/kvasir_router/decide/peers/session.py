"""Sticky sessions: load decides only about a session's first request.

The rule of HAProxy's stick tables and of vllm-project/router's src/policies/sticky_least_loaded.rs: a bounded
table from session name to place, with least recently used eviction. A session whose place is gone is placed
again.
"""

from __future__ import annotations

from collections import OrderedDict

from kvasir.ports.clock import Rng
from kvasir.ports.routing import RoutingTarget
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.affinity import affinity_key
from kvasir_router.decide.peers.place import PeerPolicy, PlacementChoice, PlacementQuery, least

SESSIONS = 65_536


class StickySession(PeerPolicy):
    """Sticky for both parts, each with its own entry."""

    name = "session"

    def __init__(self, disaggregation: Disaggregation, rng: Rng, sessions: int = SESSIONS) -> None:
        super().__init__(disaggregation, rng)
        self._capacity = sessions
        self._places: OrderedDict[tuple[str, str], RoutingTarget] = OrderedDict()

    def _place(self, ask: PlacementQuery) -> PlacementChoice:
        load = ask.in_flight()
        key = (ask.part, affinity_key(ask.request))
        known = self._places.pop(key, None)
        row = next((int(r) for r in ask.rows if ask.candidates.targets[r] == known), None)
        reason = "" if row is None else "session_sticky"
        if row is None:
            row = least(ask.rows, load, self._rng)
        self._places[key] = ask.candidates.targets[row]
        while len(self._places) > self._capacity:
            self._places.popitem(last=False)
        return PlacementChoice(row, ask.table("requests", ("in_flight",), load), reason)

    def _decode(self, ask: PlacementQuery) -> PlacementChoice:
        return self._place(ask)
