"""Consistent hashing with bounded loads, computed from the paper's definition.

`GOLDENS`: loads, session, the bound ceil(1.25 * (sum + 1) / n), whose point follows the session's hash
first, and the place: the first in that order whose load with this request keeps the bound. Points are
xxh64("worker/rank#number") for 100 numbers, the session's hash is xxh64("session:name").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from kvasir.ports.clock import Rng
from kvasir.ports.routing import Candidates, RequestView
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.consistent_hash import ConsistentHash

Fleet = Callable[..., Candidates]
Prompt = Callable[..., RequestView]
Draws = Callable[..., Rng]

GOLDENS = [
    ([2, 5, 2, 2, 3], "user-735", 4, 0, 0),
    ([1, 3, 0], "user-621", 3, 1, 0),
    ([5, 5, 2], "user-468", 6, 2, 2),
    ([5, 2, 0, 5], "user-851", 5, 0, 2),
    ([5, 1, 1, 2], "user-356", 4, 2, 2),
    ([5, 2, 1], "user-512", 4, 0, 1),
    ([5, 3, 2], "user-338", 5, 2, 2),
    ([0, 1, 3], "user-777", 3, 2, 0),
    ([5, 2, 1], "user-995", 4, 2, 2),
    ([3, 5, 1, 2], "user-454", 4, 1, 3),
    ([1, 2, 3, 2], "user-498", 3, 1, 1),
    ([2, 0, 3], "user-465", 3, 2, 1),
    ([0, 1, 2], "user-11", 2, 0, 0),
    ([2, 3, 1], "user-137", 3, 1, 2),
    ([1, 1, 2], "user-211", 3, 2, 2),
    ([2, 5, 0], "user-188", 4, 1, 0),
    ([1, 1, 1, 0], "user-661", 2, 1, 1),
    ([0, 1, 0, 0, 2], "user-728", 1, 1, 0),
    ([1, 2, 1, 3], "user-276", 3, 1, 1),
    ([5, 1, 1, 5], "user-251", 5, 0, 1),
    ([5, 1, 2], "user-257", 4, 1, 1),
    ([2, 1, 0, 1], "user-294", 2, 0, 2),
    ([1, 2, 1, 1, 1], "user-948", 2, 3, 3),
    ([5, 1, 2], "user-38", 4, 0, 2),
    ([1, 0, 1], "user-278", 2, 1, 1),
    ([0, 0, 0, 1], "user-16", 1, 3, 1),
]


@pytest.mark.parametrize("golden", GOLDENS)
def test_a_session_goes_to_the_first_place_clockwise_that_has_room(
    golden: tuple[list[int], str, int, int, int], fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    load, session, bound, first, chosen = golden
    policy = ConsistentHash(Disaggregation.NEVER, draws())
    plan = policy.decide(prompt("a", session=session), fleet(len(load), streams=load), 0.0)
    assert plan is not None
    distance, full = plan.tables[0].values.T
    assert int(distance.argmin()) == first
    assert plan.decode.worker_id == f"w{chosen}"
    assert load[chosen] + 1 <= bound
    assert [bool(value) for value in full] == [value + 1 > bound for value in load]


def test_no_place_ever_holds_more_than_the_bound(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    policy = ConsistentHash(Disaggregation.NEVER, draws())
    load = [0] * 5
    for number in range(500):
        session = "hot" if number % 3 else f"user-{number}"
        plan = policy.decide(prompt("a", session=session), fleet(5, streams=load), 0.0)
        assert plan is not None
        load[int(plan.decode.worker_id[1:])] += 1
        assert max(load) <= -(-125 * (number + 1) // 500)


def test_few_sessions_move_when_a_place_is_added(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    policy = ConsistentHash(Disaggregation.NEVER, draws())
    moved: Counter[str] = Counter()
    for number in range(600):
        request = prompt("a", session=f"user-{number}")
        before, after = (policy.decide(request, fleet(count), 0.0) for count in (9, 10))
        assert before is not None
        assert after is not None
        if before.decode != after.decode:
            moved[after.decode.worker_id] += 1
    assert set(moved) == {"w9"}
    assert 30 <= moved["w9"] <= 90
