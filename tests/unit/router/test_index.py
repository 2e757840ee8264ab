"""The prefix index equals a naive model after any history, and keeps its own invariants throughout.

Two symbols are enough to build every shape of tree, and small capacities make eviction common.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvasir_router.index import Owner, PrefixIndex

Prefix = tuple[int, ...]

A, B = Owner("a"), Owner("b")


def chained(symbols: Sequence[int]) -> tuple[int, ...]:
    """Hashes as the kernel makes them: each names the whole prefix up to it."""
    hashes, parent = [], 1
    for symbol in symbols:
        parent = parent * 2 + symbol
        hashes.append(parent)
    return tuple(hashes)


def index(capacity: int = 1000, ttl: float = 100.0) -> PrefixIndex:
    return PrefixIndex(capacity_blocks=capacity, ttl_s=ttl)


class NaiveIndex:
    """Each owner's prefixes one by one, with the insertion that last touched each."""

    def __init__(self, capacity: int, ttl: float) -> None:
        self.capacity, self.ttl = capacity, ttl
        self.held: dict[tuple[Owner, Prefix], tuple[int, float]] = {}
        self.generation = 0

    def insert(self, owner: Owner, hashes: Prefix, now: float) -> None:
        self.expire(now)
        self.generation += 1
        for end in range(1, min(len(hashes), self.capacity) + 1):
            self.held[owner, hashes[:end]] = (self.generation, now)
        by_age = sorted(self.held, key=lambda key: (self.held[key][0], -len(key[1])))
        for key in by_age[: max(0, len(self.held) - self.capacity)]:
            del self.held[key]

    def expire(self, now: float) -> None:
        self.held = {key: value for key, value in self.held.items() if now - value[1] < self.ttl}

    def remove_worker(self, worker: str) -> None:
        self.held = {key: value for key, value in self.held.items() if key[0].worker != worker}

    def match(self, hashes: Prefix) -> dict[Owner, int]:
        depths: dict[Owner, int] = {}
        for owner, prefix in self.held:
            if hashes[: len(prefix)] == prefix:
                depths[owner] = max(depths.get(owner, 0), len(prefix))
        return depths


owners = st.sampled_from([Owner("a"), Owner("a", rank=1), Owner("b"), Owner("b", tier="cpu"), Owner("c")])
prefixes = st.lists(st.integers(0, 1), max_size=8).map(chained)


class IndexHistories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = index(capacity=12, ttl=5.0)
        self.model = NaiveIndex(capacity=12, ttl=5.0)
        self.now = 0.0

    @rule(owner=owners, hashes=prefixes, pause=st.integers(0, 2))
    def insert(self, owner: Owner, hashes: Prefix, pause: int) -> None:
        self.now += pause
        self.index.insert(owner, hashes, self.now)
        self.model.insert(owner, hashes, self.now)

    @rule(pause=st.integers(0, 6))
    def expire(self, pause: int) -> None:
        self.now += pause
        self.index.expire(self.now)
        self.model.expire(self.now)

    @rule(worker=st.sampled_from("abc"))
    def remove_worker(self, worker: str) -> None:
        self.index.remove_worker(worker)
        self.model.remove_worker(worker)

    @rule(hashes=prefixes)
    def match(self, hashes: Prefix) -> None:
        assert self.index.match(hashes) == self.model.match(hashes)

    @precondition(lambda self: not self.model.held)
    @rule()
    def is_empty_when_the_model_is(self) -> None:
        stats = self.index.stats()
        assert (stats.blocks, stats.edge_blocks, stats.nodes, stats.owners) == (0, 0, 0, 0)

    @invariant()
    def holds_together(self) -> None:
        self.index.check_integrity()
        stats = self.index.stats()
        assert stats.blocks == len(self.model.held)
        assert stats.edge_blocks == len({prefix for _, prefix in self.model.held})


TestIndexHistories = IndexHistories.TestCase
TestIndexHistories.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


def test_one_long_prompt_is_one_edge() -> None:
    tree = index()
    tree.insert(A, chained([0] * 100), 0.0)
    assert tree.stats().nodes == 1


def test_a_conversation_that_grows_stays_one_edge() -> None:
    tree = index()
    for turn in range(1, 6):
        tree.insert(A, chained([1] * 10 * turn), float(turn))
    assert tree.stats().nodes == 1
    assert tree.match(chained([1] * 60)) == {A: 50}


def test_a_match_ends_where_the_prompts_part() -> None:
    tree = index()
    tree.insert(A, chained([0, 0, 0, 0]), 0.0)
    tree.insert(B, chained([0, 0, 1, 1]), 0.0)
    assert tree.match(chained([0, 0, 1, 0])) == {A: 2, B: 3}


def test_an_empty_prompt_matches_nobody() -> None:
    tree = index()
    tree.insert(A, (), 0.0)
    assert tree.match(()) == {}


def test_entries_expire_a_ttl_after_they_were_last_inserted() -> None:
    tree = index(ttl=10.0)
    tree.insert(A, chained([0, 0, 0]), 0.0)
    tree.insert(A, chained([0]), 5.0)
    tree.expire(10.0)
    assert tree.match(chained([0, 0, 0])) == {A: 1}
    tree.expire(15.0)
    assert tree.match(chained([0, 0, 0])) == {}
    assert tree.stats().expired_blocks == 3


def test_a_full_index_forgets_the_ends_of_the_oldest_prefixes_first() -> None:
    tree = index(capacity=6)
    tree.insert(A, chained([0, 0, 0, 0]), 0.0)
    tree.insert(B, chained([1, 1, 1]), 1.0)
    assert tree.match(chained([0, 0, 0, 0])) == {A: 3}
    assert tree.match(chained([1, 1, 1])) == {B: 3}
    assert tree.stats().evicted_blocks == 1


def test_a_prompt_longer_than_the_index_is_kept_from_its_start() -> None:
    tree = index(capacity=3)
    tree.insert(A, chained([0] * 9), 0.0)
    assert tree.match(chained([0] * 9)) == {A: 3}


def test_removing_a_worker_leaves_the_others() -> None:
    tree = index()
    tree.insert(Owner("a", rank=0), chained([0, 0]), 0.0)
    tree.insert(Owner("a", rank=1), chained([0, 1]), 0.0)
    tree.insert(B, chained([0, 1]), 0.0)
    tree.remove_worker("a")
    assert tree.match(chained([0, 1])) == {B: 2}
    assert tree.held(B) == 2
    assert tree.held(Owner("a", rank=1)) == 0


@pytest.mark.parametrize("worker", ["a", "nobody"])
def test_removing_all_or_an_unknown_worker_keeps_the_index_sound(worker: str) -> None:
    tree = index()
    tree.insert(A, chained([0, 1, 0]), 0.0)
    tree.remove_worker(worker)
    tree.check_integrity()
