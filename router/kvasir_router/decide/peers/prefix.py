"""The longest prefix and nothing else; among places that hold equally much, the fewest requests.

The rule that a prefix cache suggests first, and the reason why a policy needs more than that: every request
that shares a block with all others goes to the place that had it first.
"""

from __future__ import annotations

from kvasir_router.decide.peers.place import PeerPolicy, PlacementChoice, PlacementQuery, least


class LongestPrefix(PeerPolicy):
    """`cached` is weighted so that no number of requests outweighs one token."""

    name = "prefix"

    def _place(self, ask: PlacementQuery) -> PlacementChoice:
        load = ask.in_flight()
        cached = ask.candidates.cached_tokens[ask.rows]
        longest = cached.max()
        missed = (longest - cached) * (int(load.max()) + 1)
        row = least(ask.rows, missed + load, self._rng)
        return PlacementChoice(row, ask.table("requests", ("missed", "in_flight"), missed, load))
