"""Two random draws, of which the less loaded is chosen.

`GOLDENS`: loads, the first draw, the second (how far beyond the next place), and the place.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvasir.ports.clock import Rng
from kvasir.ports.routing import Candidates, RequestView
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.power_of_two import PowerOfTwo

Fleet = Callable[..., Candidates]
Prompt = Callable[..., RequestView]
Draws = Callable[..., Rng]

GOLDENS = [
    ([0, 0, 0], 0, 0, 0),  # 0 at w0, 0 at w1
    ([2, 2], 1, 0, 1),  # 2 at w1, 2 at w0
    ([3, 4, 0, 3, 1, 3], 1, 4, 0),  # 4 at w1, 3 at w0
    ([2, 0, 2, 1, 2, 2], 4, 0, 4),  # 2 at w4, 2 at w5
    ([1, 0, 4], 2, 1, 1),  # 4 at w2, 0 at w1
    ([4, 3, 0], 1, 1, 1),  # 3 at w1, 4 at w0
    ([0, 0, 1], 1, 0, 1),  # 0 at w1, 1 at w2
    ([1, 1, 1], 2, 1, 2),  # 1 at w2, 1 at w1
    ([4, 2], 0, 0, 1),  # 4 at w0, 2 at w1
    ([4, 4, 0], 2, 1, 2),  # 0 at w2, 4 at w1
    ([4, 2, 4, 2, 4, 3], 1, 4, 1),  # 2 at w1, 4 at w0
    ([4, 2, 3, 1, 4, 4], 0, 1, 2),  # 4 at w0, 3 at w2
    ([0, 1], 0, 0, 0),  # 0 at w0, 1 at w1
    ([2, 0, 2, 3, 1, 2], 4, 0, 4),  # 1 at w4, 2 at w5
    ([4, 1], 1, 0, 1),  # 1 at w1, 4 at w0
    ([1, 3, 2], 2, 1, 2),  # 2 at w2, 3 at w1
    ([2, 2, 1], 0, 1, 2),  # 2 at w0, 1 at w2
    ([1, 4, 4, 4], 0, 2, 0),  # 1 at w0, 4 at w3
    ([4, 1, 3, 2, 2, 3], 1, 1, 1),  # 1 at w1, 2 at w3
    ([0, 4, 3, 2], 0, 1, 0),  # 0 at w0, 3 at w2
    ([3, 1], 1, 0, 1),  # 1 at w1, 3 at w0
    ([3, 4, 4], 2, 0, 0),  # 4 at w2, 3 at w0
    ([1, 1, 0, 4], 0, 1, 2),  # 1 at w0, 0 at w2
    ([4, 3], 1, 0, 1),  # 3 at w1, 4 at w0
]


@pytest.mark.parametrize("golden", GOLDENS)
def test_the_less_loaded_of_two_drawn_places_is_taken(
    golden: tuple[list[int], int, int, int], fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    load, first, second, chosen = golden
    policy = PowerOfTwo(Disaggregation.NEVER, draws(first, second))
    waiting = [value // 2 for value in load]
    streams = [value - half for value, half in zip(load, waiting, strict=True)]
    plan = policy.decide(prompt(), fleet(len(load), waiting=waiting, streams=streams), 0.0)
    assert plan is not None
    assert plan.decode.worker_id == f"w{chosen}"
    assert len(plan.tables[0].rows) == 2


def test_one_place_is_drawn_once(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    plan = PowerOfTwo(Disaggregation.NEVER, draws(0)).decide(prompt(), fleet(2, "b-"), 0.0)
    assert plan is not None
    assert plan.decode.worker_id == "w0"


def test_both_parts_are_drawn(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    policy = PowerOfTwo(Disaggregation.ALWAYS, draws(0, 0, 1, 0))
    plan = policy.decide(prompt(), fleet(4, "ppdd", streams=[3, 1, 2, 2]), 0.0)
    assert plan is not None
    assert plan.prefill is not None
    assert (plan.prefill.worker_id, plan.decode.worker_id) == ("w1", "w3")
