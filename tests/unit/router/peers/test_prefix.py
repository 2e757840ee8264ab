"""The longest prefix wins whatever the load; `GOLDENS`: cached tokens, loads, and the place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvasir.ports.clock import Rng
from kvasir.ports.routing import Candidates, RequestView
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.prefix import LongestPrefix

Fleet = Callable[..., Candidates]
Prompt = Callable[..., RequestView]
Draws = Callable[..., Rng]

GOLDENS = [
    ([64, 160, 160, 160], [8, 7, 0, 1], 2),
    ([0, 0, 0], [3, 5, 5], 0),
    ([160, 16], [3, 4], 0),
    ([16, 16], [7, 0], 1),
    ([16, 16, 160], [7, 4, 0], 2),
    ([16, 160], [1, 6], 1),
    ([16, 0, 0], [2, 3, 6], 0),
    ([16, 16], [5, 7], 0),
    ([160, 16, 64, 16], [1, 1, 6, 3], 0),
    ([64, 16, 16, 16], [5, 6, 5, 2], 0),
    ([16, 64, 16], [7, 7, 4], 1),
    ([16, 64], [8, 0], 1),
    ([160, 0, 16, 0], [8, 0, 7, 6], 0),
    ([16, 16, 0], [6, 7, 0], 0),
    ([16, 16], [8, 6], 1),
    ([0, 160, 160, 64], [3, 5, 6, 5], 1),
    ([160, 64], [3, 6], 0),
    ([16, 16, 16, 16], [2, 0, 5, 8], 1),
    ([16, 64], [3, 7], 1),
    ([0, 160, 160], [6, 2, 0], 2),
    ([160, 16], [8, 5], 0),
    ([16, 160, 64, 160], [6, 5, 0, 3], 3),
    ([64, 160, 16, 16], [6, 0, 3, 1], 1),
    ([0, 64], [7, 5], 1),
]


@pytest.mark.parametrize("golden", GOLDENS)
def test_the_longest_prefix_wins_and_load_decides_among_equals(
    golden: tuple[list[int], list[int], int], fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    cached, load, chosen = golden
    candidates = fleet(len(load), cached_tokens=cached, streams=load)
    plan = LongestPrefix(Disaggregation.NEVER, draws()).decide(prompt(range(10)), candidates, 0.0)
    assert plan is not None
    assert plan.decode.worker_id == f"w{chosen}"
    assert plan.predicted_cached_tokens == cached[chosen]
    assert int(plan.tables[0].values.sum(axis=1).argmin()) == chosen


def test_equals_are_drawn(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    candidates = fleet(3, cached_tokens=[32, 0, 32], streams=[4, 0, 4])
    plan = LongestPrefix(Disaggregation.NEVER, draws(1)).decide(prompt(range(4)), candidates, 0.0)
    assert plan is not None
    assert plan.decode.worker_id == "w2"
