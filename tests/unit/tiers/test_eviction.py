"""What each eviction policy keeps, and that its counts stay correct."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_workers.tiers.eviction import Eviction, EvictionKind, Lfu, Lru, S3Fifo, eviction

POLICIES: dict[EvictionKind, Callable[[int], Eviction[int]]] = {
    "lru": lambda capacity: Lru(),
    "lfu": Lfu,
    "s3fifo": S3Fifo,
}
policies = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)


def _filled(policy: Eviction[int], keys: range) -> Eviction[int]:
    for key in keys:
        policy.insert(key)
    return policy


@policies
def test_what_was_used_gives_way_after_what_was_not(make: Callable[[int], Eviction[int]]) -> None:
    policy = _filled(make(4), range(4))
    for _ in range(2):
        policy.touch(0)
    assert [policy.victim() for _ in range(4)] == [1, 2, 3, 0]
    assert policy.victim() is None


@pytest.mark.parametrize("make", [POLICIES["lru"], Lfu], ids=["lru", "lfu"])
def test_a_prompt_touched_from_its_end_gives_way_from_its_end(make: Callable[[int], Eviction[int]]) -> None:
    policy = _filled(make(8), range(8))
    for _ in range(2):
        for key in reversed(range(8)):
            policy.touch(key)
    assert [policy.victim() for _ in range(8)] == [7, 6, 5, 4, 3, 2, 1, 0]


@policies
def test_a_key_that_is_skipped_stays_and_is_not_met_again_at_once(
    make: Callable[[int], Eviction[int]],
) -> None:
    policy = _filled(make(6), range(6))
    asked: list[int] = []

    def pinned(key: int) -> bool:
        asked.append(key)
        return key < 3

    assert policy.victim(pinned) == 3
    asked.clear()
    assert policy.victim(pinned) == 4
    assert asked == [4]
    assert len(policy) == 4


@policies
def test_there_is_no_victim_when_every_key_is_skipped_and_nothing_is_lost(
    make: Callable[[int], Eviction[int]],
) -> None:
    policy = _filled(make(4), range(4))
    policy.touch(2)
    assert policy.victim(lambda key: True) is None
    assert len(policy) == 4
    assert {policy.victim() for _ in range(4)} == {0, 1, 2, 3}


@policies
def test_a_key_that_was_removed_is_like_one_never_seen(make: Callable[[int], Eviction[int]]) -> None:
    policy = _filled(make(4), range(4))
    for _ in range(3):
        policy.touch(0)
    policy.remove(0)
    for key in (0, 4):
        policy.insert(key)
    assert [policy.victim() for _ in range(5)] == [1, 2, 3, 0, 4]


def test_a_scan_takes_nothing_from_what_lfu_and_s3fifo_keep_and_all_from_lru() -> None:
    kept = {}
    for kind, make in POLICIES.items():
        policy = _filled(make(100), range(50))
        for _ in range(3):
            for key in range(50):
                policy.touch(key)
        held = set(range(50))
        for key in range(1000, 1200):
            if len(policy) == 100:
                victim = policy.victim()
                held.discard(-1 if victim is None else victim)
            policy.insert(key)
        kept[kind] = len(held)
    assert kept == {"lru": 0, "lfu": 50, "s3fifo": 50}


@pytest.mark.parametrize("kind", ["lru", "lfu", "s3fifo"])
def test_old_use_fades(kind: EvictionKind) -> None:
    policy = POLICIES[kind](10)
    policy.insert(-1)
    gone_at = None
    for key in range(2000):
        policy.insert(key)
        for each in (-1,) if key < 1000 else (key, key):
            policy.touch(each)
        if len(policy) > 10 and policy.victim() == -1:
            gone_at = key
    assert gone_at is not None
    assert gone_at >= 1000


@pytest.mark.parametrize("make", [Lfu, S3Fifo], ids=["lfu", "s3fifo"])
def test_a_key_that_comes_back_outlives_those_that_never_went(make: Callable[[int], Eviction[int]]) -> None:
    policy = _filled(make(10), range(10))
    assert policy.victim() == 0
    policy.remove(0)
    policy.insert(0)
    policy.insert(10)
    assert [policy.victim() for _ in range(11)] == [*range(1, 11), 0]


@pytest.mark.parametrize("make", [Lfu, S3Fifo], ids=["lfu", "s3fifo"])
def test_the_names_of_victims_are_bounded(make: Callable[[int], Lfu[int] | S3Fifo[int]]) -> None:
    policy = make(10)
    for key in range(1000):
        policy.insert(key)
        if len(policy) > 10:
            policy.victim()
    assert len(policy._ghosts) <= 20


@policies
def test_victims_cost_constant_time_whatever_was_used_before(make: Callable[[int], Eviction[int]]) -> None:
    policy = _filled(make(1000), range(1000))
    asked = 0

    def pinned(key: int) -> bool:
        nonlocal asked
        asked += 1
        return key % 2 == 0 and key < 1000

    for key in range(1000, 5000):
        policy.touch(key - 7)
        assert policy.victim(pinned) is not None
        policy.insert(key)
    assert asked < 4000 * 4


@given(
    make=st.sampled_from(list(POLICIES.values())),
    capacity=st.integers(1, 6),
    history=st.lists(st.tuples(st.sampled_from("itrv"), st.integers(0, 7), st.integers(0, 255)), max_size=60),
)
def test_every_policy_holds_what_a_set_would_hold(
    make: Callable[[int], Eviction[int]], capacity: int, history: list[tuple[str, int, int]]
) -> None:
    policy, held = make(capacity), set[int]()
    for step, key, mask in history:
        if step == "i":
            policy.insert(key)
            held.add(key)
        elif step == "t":
            policy.touch(key)
        elif step == "r":
            policy.remove(key)
            held.discard(key)
        else:
            may = {each for each in held if not mask >> each & 1}
            victim = policy.victim((held - may).__contains__)
            assert (victim in may) if may else (victim is None)
            held.discard(-1 if victim is None else victim)
        assert len(policy) == len(held)
    assert {policy.victim() for _ in held} == held


@pytest.mark.parametrize(("kind", "what"), [("lru", Lru), ("lfu", Lfu), ("s3fifo", S3Fifo)])
def test_a_policy_is_had_by_its_name_in_the_spec(kind: EvictionKind, what: type) -> None:
    assert isinstance(eviction(kind, 1), what)


@pytest.mark.parametrize("kind", ["lfu", "s3fifo"])
def test_a_policy_for_no_keys_is_refused(kind: EvictionKind) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        eviction(kind, 0)
