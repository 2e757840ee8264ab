"""The sum of all reported changes equals the tier's contents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvasir.ports.tier import KEY_BYTES, TierBlock, TierChange
from kvasir_workers.tiers.ledger import BlockLedger

STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove", "clear", "take"]), st.integers(0, 4)))


def block(number: int, name: int | None = None) -> TierBlock:
    return TierBlock(bytes([number]) * KEY_BYTES, number if name is None else name, 0)


@given(STEPS, st.integers(1, 6))
def test_changes_add_up_to_what_is_held(steps: list[tuple[str, int]], most: int) -> None:
    ledger, held, told = BlockLedger(most), list[TierBlock](), set[TierBlock]()
    for what, number in [*steps, ("take", 0)]:
        if what == "add":
            ledger.add(block(number))
            held = [*(each for each in held if each != block(number)), block(number)][-most:]
        elif what == "remove":
            ledger.remove(block(number).key)
            held = [each for each in held if each != block(number)]
        elif what == "clear":
            ledger.clear()
            held.clear()
        else:
            change = ledger.take()
            assert not set(change.stored) & told
            assert set(change.removed) <= told
            told = told - set(change.removed) | set(change.stored)
            assert told == set(held)
        assert ledger.blocks() == held
        assert len(ledger) == len(held)
    assert ledger.take() == TierChange()


def test_what_falls_off_is_the_least_recently_used_and_told_to_be_gone() -> None:
    ledger = BlockLedger(2)
    ledger.add(block(1))
    ledger.add(block(2))
    ledger.add(block(1))
    ledger.take()
    ledger.add(block(3))
    assert block(2).key not in ledger
    assert ledger.take() == TierChange((block(3),), (block(2),))


def test_what_came_and_went_between_two_questions_is_not_told() -> None:
    ledger = BlockLedger(4)
    ledger.add(block(1))
    ledger.remove(block(1).key)
    assert ledger.take() == TierChange()


def test_a_key_under_another_name_is_removed_and_stored() -> None:
    ledger = BlockLedger(4)
    ledger.add(block(1))
    ledger.take()
    ledger.add(block(1, name=9))
    assert ledger.take() == TierChange((block(1, name=9),), (block(1),))


def test_the_order_is_that_of_use() -> None:
    ledger = BlockLedger(4)
    assert ledger.newest() is None
    for number in (1, 2, 3, 1):
        ledger.add(block(number))
    assert ledger.keys() == [block(2).key, block(3).key, block(1).key]
    assert ledger.newest() == block(1).key
