"""Which replicas are removed, and which change their role."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.demand import WorkerStats
from kvasir.core.requests import Role
from kvasir.ports.scaler import Replica, ReplicaState
from kvasir_platform.planner.victims import Savings, Size, flips, victims

STARTING, SERVING, LEAVING = ReplicaState


def replica(name: str, state: ReplicaState = SERVING, since_s: float = 0.0) -> Replica:
    return Replica(f"replica-{name}", "prefill", state, since_s, "" if state is STARTING else name)


def worker(name: str, hits: int = 0, streams: int = 0) -> WorkerStats:
    return WorkerStats(name, "prefill", Role.PREFILL, True, 0.0, 0.0, 0.0, 0.0, hits, 0, 0, streams)


def chosen(
    replicas: list[Replica], count: int, *workers: WorkerStats, savings: Savings | None = None
) -> list[str]:
    known = {each.worker_id: each for each in workers}
    found = victims(replicas, count, savings or Savings(), known)
    return [each.replica_id.removeprefix("replica-") for each in found]


def test_those_that_have_not_begun_go_first_the_youngest_before_the_others() -> None:
    replicas = [replica("a"), replica("old", STARTING, 1.0), replica("new", STARTING, 9.0)]
    assert chosen(replicas, 3) == ["new", "old", "a"]


def test_those_go_first_of_all_that_take_too_long_to_begin() -> None:
    replicas = [replica("a"), *(replica(str(at), STARTING, float(at)) for at in (5, 1, 9, 3))]
    going = victims(replicas, 5, Savings(), {}, late_s=4.0)
    assert [each.replica_id.removeprefix("replica-") for each in going] == ["3", "1", "9", "5", "a"]


def test_the_cache_that_has_saved_the_least_goes() -> None:
    savings = Savings()
    savings.take([worker("a"), worker("b"), worker("c")], 10.0)
    savings.take([worker("a", 500), worker("b", 100), worker("c", 900)], 10.0)
    assert chosen([replica(name) for name in "abc"], 2, savings=savings) == ["b", "a"]


def test_between_equals_the_one_goes_that_is_gone_the_soonest() -> None:
    workers = [worker("a", streams=3), worker("b", streams=1), worker("c", streams=2)]
    assert chosen([replica(name) for name in "abc"], 1, *workers) == ["b"]


def test_one_that_no_router_knows_has_nothing_to_lose() -> None:
    savings = Savings()
    savings.take([worker("a")], 10.0)
    savings.take([worker("a", 100)], 10.0)
    assert chosen([replica("a"), replica("unknown")], 1, worker("a", 100), savings=savings) == ["unknown"]


@given(
    st.lists(st.tuples(st.sampled_from(ReplicaState), st.integers(0, 3), st.integers(0, 2)), max_size=8),
    st.integers(0, 9),
)
def test_none_that_leaves_already_goes_and_never_more_than_so_many(
    drawn: list[tuple[ReplicaState, int, int]], count: int
) -> None:
    replicas = [replica(str(number), state) for number, (state, _, _) in enumerate(drawn)]
    workers = {str(n): worker(str(n), streams=streams) for n, (_, streams, _) in enumerate(drawn)}
    found = victims(replicas, count, Savings(), workers)
    assert LEAVING not in {each.state for each in found}
    assert len({each.replica_id for each in found}) == len(found)
    staying = [each for each in replicas if each.state is not LEAVING]
    assert len(found) == min(count, len(staying))
    if any(each.state is SERVING for each in found):
        assert all(each in found for each in staying if each.state is STARTING)


# -- what caches save --------------------------------------------------------------------------------


def test_what_a_cache_had_saved_before_it_was_first_seen_is_not_of_late() -> None:
    savings = Savings()
    savings.take([worker("a", 10_000)], 10.0)
    assert savings.of("a") == 0.0


def test_savings_fade_and_are_forgotten_with_their_worker() -> None:
    savings = Savings()
    savings.take([worker("a")], 10.0)
    savings.take([worker("a", 9000)], 10.0)
    fresh = savings.of("a")
    assert fresh > 0.0
    savings.take([worker("a", 9000)], 900.0)
    assert savings.of("a") == pytest.approx(fresh * 0.37, rel=0.01)
    savings.take([], 10.0)
    assert savings.of("a") == 0.0


def test_a_worker_that_counts_anew_has_saved_nothing_and_owes_nothing() -> None:
    savings = Savings()
    savings.take([worker("a", 9000)], 10.0)
    savings.take([worker("a", 5)], 10.0)
    assert savings.of("a") == 0.0


# -- flips -------------------------------------------------------------------------------------------

PARTNERS = {"p": "d", "d": "p"}


def size(pool: str, have: int, desired: int, need: int, serving: int | None = None) -> Size:
    return Size(pool, have if serving is None else serving, have, desired, need)


@pytest.mark.parametrize(
    ("p", "d", "found"),
    [
        (size("p", 8, 8, 3), size("d", 2, 5, 5), [("p", "d", 3)]),
        (size("p", 8, 8, 6), size("d", 2, 5, 5), [("p", "d", 2)]),
        (size("p", 8, 8, 8), size("d", 2, 5, 5), []),
        (size("p", 8, 9, 3), size("d", 2, 5, 5), []),
        (size("p", 8, 5, 1), size("d", 2, 2, 1), []),
        (size("p", 8, 8, 1, serving=2), size("d", 2, 9, 9), [("p", "d", 1)]),
        (size("p", 1, 1, 0), size("d", 2, 9, 9), []),
    ],
    ids=[
        "it has enough",
        "it has some",
        "it needs all",
        "it grows itself",
        "nobody grows",
        "most of it starts still",
        "the last one stays",
    ],
)
def test_a_pool_lends_what_it_does_not_need(p: Size, d: Size, found: list[tuple[str, str, int]]) -> None:
    assert flips([p, d], PARTNERS) == found


def test_without_a_partner_nothing_is_lent() -> None:
    assert flips([size("p", 8, 8, 1), size("d", 1, 5, 5)], {}) == []
    assert flips([size("d", 1, 5, 5)], PARTNERS) == []


SIZES = st.builds(
    lambda serving, starting, desired, need: (serving, serving + starting, desired, need),
    st.integers(0, 6),
    st.integers(0, 3),
    st.integers(0, 9),
    st.integers(1, 9),
)


@given(SIZES, SIZES)
def test_no_pool_is_left_with_less_than_it_needs_and_none_gets_more_than_it_wishes(
    p: tuple[int, int, int, int], d: tuple[int, int, int, int]
) -> None:
    sizes = {name: Size(name, *drawn) for name, drawn in (("p", p), ("d", d))}
    found = flips(list(sizes.values()), PARTNERS)
    assert len(found) <= 1
    for source, target, count in found:
        giver, taker = sizes[source], sizes[target]
        assert count > 0
        assert giver.have - count >= giver.need
        assert giver.serving - count >= 1
        assert taker.have + count <= taker.desired


def test_no_worker_is_lent_for_replicas_that_have_only_begun_to_start() -> None:
    """Two of five serve; the others will be more than is needed, one day."""
    sizes = [Size("prefill", 4, 4, 6, 6), Size("decode", 2, 5, 2, 2)]
    assert flips(sizes, {"prefill": "decode", "decode": "prefill"}) == []
    served = [sizes[0], Size("decode", 5, 5, 2, 2)]
    assert flips(served, {"prefill": "decode", "decode": "prefill"}) == [("decode", "prefill", 2)]
