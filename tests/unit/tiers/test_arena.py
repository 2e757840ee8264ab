"""Ownership of the arena's slots, compared with a simple model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvasir.ports.tier import KEY_BYTES, TierBlock, TierChange
from kvasir_workers.tiers.arena import Arena
from kvasir_workers.tiers.eviction import EvictionKind, Lru, eviction


def _block(number: int) -> TierBlock:
    return TierBlock(bytes([number]) * KEY_BYTES, number, number - 1)


def _arena(slots: int) -> Arena:
    return Arena(slots, Lru())


def _ready(arena: Arena, *numbers: int) -> list[int]:
    slots = []
    for number in numbers:
        slot = arena.reserve(_block(number))
        assert slot is not None
        arena.commit(slot)
        slots.append(slot)
    return slots


def test_a_block_is_found_once_it_is_ready_and_held_before() -> None:
    arena = _arena(2)
    key = _block(1).key
    slot = arena.reserve(_block(1))
    assert slot is not None
    assert (arena.holds(key), arena.find(key), arena.ready) == (True, None, 0)
    arena.commit(slot)
    assert (arena.holds(key), arena.find(key), arena.ready) == (True, slot, 1)
    assert arena.block(slot) == _block(1)


def test_slots_are_handed_out_side_by_side() -> None:
    assert _ready(_arena(4), 1, 2, 3, 4) == [0, 1, 2, 3]


def test_what_is_pinned_or_filling_does_not_give_way() -> None:
    arena = _arena(3)
    first, second = _ready(arena, 1, 2)
    arena.pin(first)
    filling = arena.reserve(_block(3))
    assert filling not in {None, first, second}
    assert arena.reserve(_block(4)) == second
    assert arena.reserve(_block(5)) is None
    arena.unpin(first)
    assert arena.reserve(_block(5)) == first


def test_pins_are_counted() -> None:
    arena = _arena(1)
    (slot,) = _ready(arena, 1)
    arena.pin(slot)
    arena.pin(slot)
    arena.unpin(slot)
    assert arena.reserve(_block(2)) is None
    arena.unpin(slot)
    assert arena.reserve(_block(2)) == slot


def test_a_prompt_gives_way_from_its_end() -> None:
    arena = _arena(3)
    _ready(arena, 1, 2, 3)
    arena.touch([_block(number).key for number in (1, 2, 3)])
    _ready(arena, 4)
    assert [block.name for block in arena.blocks()] == [1, 2, 4]


def test_changes_are_what_differs_since_the_last_call() -> None:
    arena = _arena(2)
    _ready(arena, 1, 2)
    assert arena.take_changes() == TierChange((_block(1), _block(2)), ())
    _ready(arena, 3)
    assert arena.take_changes() == TierChange((_block(3),), (_block(1),))
    assert arena.take_changes() == TierChange()


def test_what_came_and_went_between_two_calls_is_not_told() -> None:
    arena = _arena(1)
    _ready(arena, 1, 2)
    assert arena.take_changes() == TierChange((_block(2),), ())
    _ready(arena, 1, 2)
    assert arena.take_changes() == TierChange()


def test_an_abandoned_slot_is_free_and_nothing_is_told_of_it() -> None:
    arena = _arena(1)
    slot = arena.reserve(_block(1))
    assert slot is not None
    arena.abandon(slot)
    assert not arena.holds(_block(1).key)
    assert arena.take_changes() == TierChange()
    assert arena.reserve(_block(1)) == slot


@pytest.mark.parametrize(
    "call",
    [
        lambda arena: arena.reserve(_block(1)),
        lambda arena: arena.commit(0),
        lambda arena: arena.abandon(0),
        lambda arena: arena.pin(1),
        lambda arena: arena.unpin(0),
        lambda arena: arena.block(1),
        lambda arena: Arena(0, Lru()),
    ],
)
def test_a_call_in_the_wrong_state_is_refused_and_changes_nothing(call: Callable[[Arena], object]) -> None:
    arena = _arena(2)
    _ready(arena, 1)
    with pytest.raises(ValueError, match=r"slot|held"):
        call(arena)
    assert (arena.ready, arena.find(_block(1).key)) == (1, 0)
    assert [arena.reserve(_block(number)) for number in (2, 3, 4)] == [1, 0, None]


class Histories(RuleBasedStateMachine):
    """Few slots and few blocks, so that everything meets everything within a few calls.

    The model knows of each slot whose it is and how often it is pinned; which block gives way is the
    policy's, and the model only asks that it was one that might.
    """

    @initialize(slots=st.integers(1, 4), kind=st.sampled_from(["lru", "lfu", "s3fifo"]))
    def begin(self, slots: int, kind: EvictionKind) -> None:
        self.arena = Arena(slots, eviction(kind, slots))
        self.slots = slots
        self.filling: dict[int, int] = {}
        self.ready: dict[int, int] = {}
        self.pins: Counter[int] = Counter()
        self.told: set[TierBlock] = set()
        self.evicted = 0

    @rule(number=st.integers(0, 6))
    def reserve(self, number: int) -> None:
        if number in self.filling or number in self.ready:
            with pytest.raises(ValueError, match="held"):
                self.arena.reserve(_block(number))
            return
        free = set(range(self.slots)) - {*self.filling.values(), *self.ready.values()}
        idle = {slot: owner for owner, slot in self.ready.items() if not self.pins[slot]}
        slot = self.arena.reserve(_block(number))
        if free:
            assert slot in free
        elif idle:
            assert slot in idle
            del self.ready[idle[slot]]
            self.evicted += 1
        else:
            assert slot is None
        if slot is not None:
            self.filling[number] = slot

    @rule(number=st.integers(0, 6), comes=st.booleans())
    def finish(self, number: int, comes: bool) -> None:
        slot = self.filling.pop(number, None)
        if slot is None:
            return
        if comes:
            self.arena.commit(slot)
            self.ready[number] = slot
        else:
            self.arena.abandon(slot)

    @rule(number=st.integers(0, 6))
    def pin(self, number: int) -> None:
        if number in self.ready:
            self.arena.pin(self.ready[number])
            self.pins[self.ready[number]] += 1

    @rule(slot=st.integers(0, 3))
    def unpin(self, slot: int) -> None:
        if not self.pins[slot]:
            return
        self.arena.unpin(slot)
        self.pins[slot] -= 1

    @rule(numbers=st.lists(st.integers(0, 6), max_size=4))
    def touch(self, numbers: list[int]) -> None:
        self.arena.touch([_block(number).key for number in numbers])

    @rule()
    def take_changes(self) -> None:
        stored, removed = self.arena.take_changes()
        assert set(removed) <= self.told
        assert not set(stored) & self.told
        self.told = self.told - set(removed) | set(stored)
        assert self.told == {_block(number) for number in self.ready}

    @invariant()
    def the_arena_agrees(self) -> None:
        arena = self.arena
        assert [arena.find(_block(n).key) for n in range(7)] == [self.ready.get(n) for n in range(7)]
        held = {*self.ready, *self.filling}
        assert [arena.holds(_block(n).key) for n in range(7)] == [n in held for n in range(7)]
        assert {block.name for block in arena.blocks()} == set(self.ready)
        assert arena.ready == len(self.ready)
        assert arena.evicted == self.evicted


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=30, deadline=None)
