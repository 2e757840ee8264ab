"""The longest cached prefix; ties go to the fewest requests.

The simplest use of a prefix cache, which shows why a policy needs more: every request that shares a block
with all others goes to the place that had it first.
"""

from __future__ import annotations

from kvasir_router.decide.peers.place import PeerPolicy, PlacementChoice, PlacementQuery, least


class LongestPrefix(PeerPolicy):
    """`cached` has a weight that no number of requests can outweigh."""

    name = "prefix"

    def _place(self, ask: PlacementQuery) -> PlacementChoice:
        load = ask.in_flight()
        cached = ask.candidates.cached_tokens[ask.rows]
        longest = cached.max()
        missed = (longest - cached) * (int(load.max()) + 1)
        row = least(ask.rows, missed + load, self._rng)
        return PlacementChoice(row, ask.table("requests", ("missed", "in_flight"), missed, load))
