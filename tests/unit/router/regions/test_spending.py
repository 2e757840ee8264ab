"""What tenants spend in several cells: how far they go beyond a budget, whatever cells hear of each other."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_router.regions.sharing.spending import (
    SILENT_S,
    CellSpending,
    OtherSpending,
    SpentInOthers,
    TenantSpent,
)

KEY = ("lab", "2030-01")
HARD = 1000.0
NAMES = ("a", "b", "c", "d")
DELAY = 3
"""Seconds after which a cell hears what another one has spent."""
KNOWN_S = DELAY + SILENT_S + 2


class Cells:
    """Cells that spend until they know that the budget is spent. Those of different `groups` do not hear each
    other."""

    def __init__(self, names: tuple[str, ...] = NAMES) -> None:
        self.now = 0.0
        self.spent = dict.fromkeys(names, 0.0)
        self.groups = dict.fromkeys(names, 0)
        self.others = {name: OtherSpending([each for each in names if each != name], 0.0) for name in names}
        self._mail: deque[tuple[float, str, str, float]] = deque()

    def second(self, rates: dict[str, float]) -> None:
        """A second in which each cell would spend at its rate."""
        for name, others in self.others.items():
            if self.spent[name] + others.of(*KEY).amount < HARD:
                self.spent[name] += rates.get(name, 0.0)
            self._mail += [
                (self.now + DELAY, name, other, self.spent[name])
                for other in self.spent
                if other != name and self.groups[other] == self.groups[name]
            ]
        self.now += 1.0
        while self._mail and self._mail[0][0] <= self.now:
            _, origin, cell, amount = self._mail.popleft()
            self.others[cell].heard(origin, {KEY: amount}, self.now)
        for name, others in self.others.items():
            others.advance({KEY: self.spent[name]}, self.now)

    @property
    def beyond(self) -> float:
        return sum(self.spent.values()) - HARD


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=len(NAMES), max_size=len(NAMES)),
    st.lists(
        st.tuples(st.integers(1, 60), st.lists(st.sampled_from([0.0, 1.0, 5.0]), min_size=4, max_size=4)),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 100),
    st.integers(0, 400),
)
def test_cells_go_beyond_a_budget_by_what_they_spend_unheard_at_most(
    groups: list[int], phases: list[tuple[int, list[float]]], together_s: int, apart_s: int
) -> None:
    cells = Cells()
    for _ in range(together_s):
        cells.second(dict.fromkeys(NAMES, 1.0))
    highest = dict.fromkeys(NAMES, 1.0)
    for at, group in enumerate((groups, [0] * len(NAMES))):
        cells.groups = dict(zip(NAMES, group, strict=True))
        left_s = 300 if at else apart_s
        for seconds, rates in phases * 20:
            for _ in range(min(seconds, left_s)):
                chosen = dict(zip(NAMES, rates, strict=True))
                cells.second(chosen)
                highest = {name: max(highest[name], chosen[name]) for name in NAMES}
            left_s -= min(seconds, left_s)
    assert cells.beyond <= KNOWN_S * sum(highest.values())


def test_cells_that_hear_each_other_stop_together() -> None:
    cells = Cells()
    for _ in range(600):
        cells.second(dict.fromkeys(NAMES, 1.0))
    assert 0 <= cells.beyond <= DELAY * len(NAMES)


def test_one_cell_can_spend_the_whole_budget() -> None:
    cells = Cells()
    for _ in range(600):
        cells.second({"c": 5.0})
    assert 0 <= cells.beyond <= 5.0


def test_a_cell_that_is_cut_off_spends_its_part_of_what_is_left() -> None:
    cells = Cells()
    for _ in range(100):
        cells.second({"a": 2.0})
    cells.groups["d"] = 1
    for _ in range(600):
        cells.second({"d": 4.0})
    left = HARD - 200.0
    assert left / len(NAMES) <= cells.spent["d"] <= left / len(NAMES) + 4.0 * KNOWN_S
    for _ in range(600):
        cells.second({"a": 4.0, "b": 4.0, "c": 4.0})
    assert -1.0 <= cells.beyond <= 4.0 * 4 * KNOWN_S


def test_what_was_assumed_of_a_cell_ends_as_it_is_heard_again() -> None:
    cells = Cells()
    for _ in range(10):
        cells.second({})
    cells.groups["d"] = 1
    for _ in range(300):
        cells.second({"a": 5.0})
    others = cells.others["a"]
    assert others.silent() == ("d",)
    assert others.of(*KEY).assumed > 0.9 * cells.spent["a"] / 3
    assert cells.spent["a"] < HARD * 3 / 4 + 5.0 * KNOWN_S
    cells.groups["d"] = 0
    for _ in range(300):
        cells.second({"a": 5.0})
    assert others.silent() == ()
    assert others.of(*KEY) == SpentInOthers()
    assert cells.spent["a"] >= HARD


def test_a_cell_that_was_never_heard_counts_from_the_start_of_this_one() -> None:
    others = OtherSpending(["b"], 0.0)
    others.advance({KEY: 700.0}, 1.0)
    others.advance({KEY: 700.0}, SILENT_S + 1.0)
    assert others.of(*KEY) == SpentInOthers()
    others.advance({KEY: 710.0}, SILENT_S + 2.0)
    assert others.of(*KEY) == SpentInOthers(10.0, 10.0)


def test_a_new_period_begins_without_what_was_assumed() -> None:
    others, renewed = OtherSpending(["b"], 0.0), ("lab", "2030-02")
    others.heard("b", {KEY: 5.0}, 0.0)
    for second in range(20):
        others.advance({KEY: float(second)}, float(second))
    assert others.of(*KEY).assumed > 0
    others.advance({renewed: 0.5}, 21.0)
    assert others.of(*KEY) == SpentInOthers(5.0)
    assert others.of(*renewed) == SpentInOthers(0.5, 0.5)


@pytest.mark.parametrize("amount", [-1.0, float("nan"), float("inf"), 1e16])
def test_an_amount_of_any_number_is_no_amount(amount: float) -> None:
    data = msgspec.msgpack.encode(CellSpending("USD", (TenantSpent("lab", "2030-01", amount),)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=CellSpending)
