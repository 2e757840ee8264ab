"""Round robin and least loaded, specified decision by decision.

Round robin: place number (start + turn) modulo the places, in the order of their ids; the generator gives the
start. Least loaded: the fewest streams, among equals the fewest queued prompt tokens, among equals by lot.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvasir.ports.clock import Rng
from kvasir.ports.routing import Candidates, RequestView
from kvasir_router.decide import LeastLoaded, RoundRobin
from kvasir_router.decide.eligible import Disaggregation

Fleet = Callable[..., Candidates]
Prompt = Callable[..., RequestView]
Draws = Callable[..., Rng]

# Start, places at each decision, and the place taken: 20 decisions of one life, the fleet changing meanwhile.
TURNS = [
    (3, 0),  # (6 + 0) mod 3
    (3, 1),  # 7 mod 3
    (3, 2),  # 8 mod 3
    (3, 0),  # 9 mod 3
    (3, 1),  # 10 mod 3
    (4, 3),  # 11 mod 4: a fourth has joined
    (4, 0),  # 12 mod 4
    (4, 1),  # 13 mod 4
    (4, 2),  # 14 mod 4
    (4, 3),  # 15 mod 4
    (4, 0),  # 16 mod 4
    (2, 1),  # 17 mod 2: two have left
    (2, 0),  # 18 mod 2
    (2, 1),  # 19 mod 2
    (5, 0),  # 20 mod 5
    (5, 1),  # 21 mod 5
    (5, 2),  # 22 mod 5
    (1, 0),  # one is left
    (1, 0),
    (7, 4),  # 25 mod 7
    (7, 5),  # 26 mod 7
    (7, 6),  # 27 mod 7
    (7, 0),  # 28 mod 7
]
START = 6

# Streams, queued prompt tokens, the draw among equals, and the place taken.
LOADS = [
    ([0, 0, 0], [0, 0, 0], 0, 0),  # all equal: the first drawn
    ([0, 0, 0], [0, 0, 0], 2, 2),  # all equal: the third drawn
    ([3, 1, 2], [0, 0, 0], 0, 1),  # fewest streams
    ([3, 1, 2], [0, 900, 0], 0, 1),  # streams come before queues
    ([1, 1, 2], [5, 4, 0], 0, 1),  # equal streams: the shorter queue
    ([1, 1, 2], [4, 5, 0], 0, 0),
    ([2, 2, 2], [7, 7, 6], 0, 2),
    ([2, 2, 2], [7, 6, 6], 0, 1),  # w1 and w2 are equal: the first of them
    ([2, 2, 2], [7, 6, 6], 1, 2),  # and the second
    ([9, 8], [0, 1000], 0, 1),
    ([8, 9], [1000, 0], 0, 0),
    ([0, 5, 0, 5], [3, 0, 2, 0], 0, 2),
    ([0, 5, 0, 5], [2, 0, 2, 0], 0, 0),
    ([0, 5, 0, 5], [2, 0, 2, 0], 1, 2),
    ([4, 3, 2, 1], [0, 0, 0, 0], 0, 3),
    ([1, 2, 3, 4], [0, 0, 0, 0], 0, 0),
    ([5], [77], 0, 0),
    ([6, 6, 6, 6, 5], [0, 0, 0, 0, 4096], 0, 4),
    ([0, 0], [1, 0], 0, 1),
    ([0, 0], [0, 1], 0, 0),
    ([100, 99, 100], [0, 0, 0], 0, 1),
    ([2, 1, 1, 1], [0, 9, 8, 8], 1, 3),  # w2 and w3 are equal: the second of them
]


class Starts:
    """Begins a turn where it is told."""

    def random(self) -> float:
        raise AssertionError("takes turns")

    def randrange(self, stop: int, /) -> int:
        raise AssertionError("takes turns")

    def getrandbits(self, k: int, /) -> int:
        return START


def test_turns_are_taken_in_the_order_of_ids_whoever_comes_and_goes(fleet: Fleet, prompt: Prompt) -> None:
    policy = RoundRobin(Disaggregation.NEVER, Starts())
    for number, (places, taken) in enumerate(TURNS):
        plan = policy.decide(prompt(), fleet(places, streams=[9] * places), float(number))
        assert plan is not None
        assert plan.decode.worker_id == f"w{taken}", number


@pytest.mark.parametrize("golden", LOADS)
def test_the_fewest_streams_then_the_shortest_queue_are_taken(
    golden: tuple[list[int], list[int], int, int], fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    streams, queued, draw, taken = golden
    policy = LeastLoaded(Disaggregation.NEVER, draws(draw))
    plan = policy.decide(prompt(), fleet(len(streams), streams=streams, queued_prefill_tokens=queued), 0.0)
    assert plan is not None
    assert plan.decode.worker_id == f"w{taken}"
