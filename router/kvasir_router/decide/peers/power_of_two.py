"""The less loaded of two places sampled at random.

Source: M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 12(10), 2001; as
in sglang-router 0.3.2 and vllm-router 0.1.17 (`power_of_two`) the load is the number of requests in flight,
and the first sample wins a tie.
"""

from __future__ import annotations

from kvasir_router.decide.peers.place import PeerPolicy, PlacementChoice, PlacementQuery


class PowerOfTwo(PeerPolicy):
    """Two samples without replacement, for either part."""

    name = "power_of_two"

    def _place(self, ask: PlacementQuery) -> PlacementChoice:
        count = len(ask.rows)
        drawn = [self._rng.randrange(count)]
        if count > 1:
            drawn.append((drawn[0] + 1 + self._rng.randrange(count - 1)) % count)
        ask = ask._replace(rows=ask.rows[drawn])
        load = ask.in_flight()
        return PlacementChoice(int(ask.rows[load.argmin()]), ask.table("requests", ("in_flight",), load))

    def _decode(self, ask: PlacementQuery) -> PlacementChoice:
        return self._place(ask)
