"""Slots that cells share: how many requests run together, whatever happens to messages between cells."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_router.regions.limits import Admitted, SharedLimitRules
from kvasir_router.regions.sharing.slots import (
    CellSlots,
    HomeSlots,
    SlotAsk,
    SlotGrant,
    part_of,
    slots_overshoot,
)

RULES = SharedLimitRules()
MOST = 10
NAMES = ("b", "c", "d")
CELLS = 4
LIFE_S = RULES.allotment_s


@dataclass(slots=True)
class Cells:
    """A home cell and three others, whose messages take time, are lost and are repeated. A cell in `apart`
    exchanges none; `ever_apart` are those that have acted on their own since they last had no request that
    began so. `worst` is how far the running requests have exceeded the limit and the overshoot."""

    rng: Random
    loss: float = 0.0
    delay_s: float = 1.5
    now: float = 0.0
    apart: set[str] = field(default_factory=set)
    ever_apart: set[str] = field(default_factory=set)
    running: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("home", *NAMES), 0))
    waiting: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    worst: int = -MOST
    home: HomeSlots = field(default_factory=lambda: HomeSlots(MOST, RULES))
    others: dict[str, CellSlots] = field(
        default_factory=lambda: {name: CellSlots(name, MOST, CELLS, RULES) for name in NAMES}
    )
    _asks: list[tuple[float, SlotAsk]] = field(default_factory=list)
    _answers: list[tuple[float, str, SlotGrant]] = field(default_factory=list)

    def begin(self, cell: str) -> Admitted:
        """A request of a cell, which waits if the cell has to ask."""
        found = (self.home if cell == "home" else self.others[cell]).take(self.now)
        if found is Admitted.YES:
            self.running[cell] += 1
        elif found is Admitted.ASK:
            self.waiting[cell] += 1
        self._judge()
        return found

    def end(self, cell: str) -> None:
        if self.running[cell]:
            self.running[cell] -= 1
            (self.home if cell == "home" else self.others[cell]).end()

    def tick(self, seconds: float) -> None:
        """Every cell asks, time passes, and what arrives in it is handled."""
        for name, slots in self.others.items():
            self._ask(name, slots)
        steps = min(20, max(1, round(seconds / 0.1)))
        for _ in range(steps):
            self.now += seconds / steps
            self._deliver()

    def _ask(self, name: str, slots: CellSlots) -> None:
        ask = slots.ask(self.waiting[name], self.now)
        for _ in range(self._copies(name)):
            self._asks.append((self.now + self.rng.uniform(0.0, self.delay_s), ask))

    def _deliver(self) -> None:
        for at, ask in sorted(self._asks, key=lambda each: each[0]):
            if at <= self.now and (answer := self.home.grant(ask, self.now)) is not None:
                for _ in range(self._copies(ask.cell)):
                    self._answers.append((self.now + self.rng.uniform(0.0, self.delay_s), ask.cell, answer))
        self._asks = [each for each in self._asks if each[0] > self.now]
        for at, cell, answer in self._answers:
            if at <= self.now:
                self.others[cell].answered(answer, self.now)
                waiting, self.waiting[cell] = self.waiting[cell], 0
                for _ in range(waiting):
                    self.begin(cell)
        self._answers = [each for each in self._answers if each[0] > self.now]
        self._judge()

    def _copies(self, cell: str) -> int:
        if cell in self.apart or self.rng.random() < self.loss:
            return 0
        return 2 if self.rng.random() < 0.1 else 1

    def _judge(self) -> None:
        # The home cell may have taken back the slots of a cell that it has not heard.
        self.ever_apart |= {name for name, slots in self.others.items() if slots.apart(self.now)}
        total = sum(self.running.values())
        self.worst = max(self.worst, total - MOST - slots_overshoot(MOST, CELLS, len(self.ever_apart)))


_CELL = st.sampled_from(["home", *NAMES])
_OTHER = st.sampled_from(NAMES)
_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), _CELL, st.sampled_from([1.0, 4.0, 12.0])),
        st.tuples(st.just("end"), _CELL, st.sampled_from([1.0, 3.0])),
        st.tuples(st.just("tick"), st.just(""), st.sampled_from([0.1, 1.0, 1.0, 2.0, 8.0])),
        st.tuples(st.just("apart"), _OTHER, st.just(0.0)),
        st.tuples(st.just("join"), _OTHER, st.just(0.0)),
    ),
    max_size=50,
)


@settings(deadline=None)
@given(_EVENTS, st.integers(0, 1000), st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.4, 3.0]))
def test_requests_in_all_cells_never_exceed_the_bound(
    events: list[tuple[str, str, float]], seed: int, loss: float, delay_s: float
) -> None:
    cells = Cells(Random(seed), loss, delay_s)
    for kind, cell, amount in events:
        if kind == "tick":
            for _ in range(int(amount)):
                cells.tick(1.0)
            cells.tick(amount % 1.0)
        elif kind == "apart":
            cells.apart.add(cell)
        elif kind == "join":
            cells.apart.discard(cell)
        else:
            for _ in range(int(amount)):
                if kind == "begin":
                    cells.begin(cell)
                else:
                    cells.end(cell)
    assert cells.worst <= 0


def test_the_bound_is_reached_by_cells_that_are_cut_off() -> None:
    cells = Cells(Random(1), delay_s=0.0)
    for _ in range(MOST):
        cells.begin("b")
    cells.tick(1.0)
    assert cells.running["b"] == MOST
    cells.apart = set(NAMES)
    for _ in range(10):
        cells.tick(1.0)
    for cell in cells.running:
        for _ in range(MOST):
            cells.begin(cell)
    assert sum(cells.running.values()) == MOST + slots_overshoot(MOST, CELLS, 3)


def test_a_cell_that_is_cut_off_begins_requests_up_to_its_equal_part() -> None:
    cells = Cells(Random(1), delay_s=0.0)
    cells.apart = {"b"}
    for _ in range(4):
        cells.tick(1.0)
    begun = [cells.begin("b") for _ in range(5)]
    assert begun == [Admitted.YES] * part_of(MOST, CELLS) + [Admitted.NO] * 2


def test_after_the_requests_of_a_separation_have_ended_the_limit_holds_again() -> None:
    cells = Cells(Random(1), delay_s=0.0)
    for _ in range(MOST):
        cells.begin("b")
    cells.tick(1.0)
    cells.apart = {"b"}
    for _ in range(8):
        cells.tick(1.0)
    for _ in range(MOST):
        cells.begin("home")
    cells.apart = set()
    cells.tick(1.0)
    assert sum(cells.running.values()) == 2 * MOST
    for _ in range(MOST - 1):
        cells.end("home")
        assert cells.begin("home") is Admitted.NO
    for _ in range(MOST - 1):
        cells.end("b")
    cells.tick(1.0)
    cells.tick(1.0)
    taken = [cells.begin(cell) for cell in ("home", "b") * MOST]
    assert taken.count(Admitted.YES) <= MOST - 2
    assert sum(cells.running.values()) <= MOST


def test_one_cell_can_use_all_slots_of_another() -> None:
    cells = Cells(Random(2), delay_s=0.2)
    for _ in range(MOST):
        assert cells.begin("b") is Admitted.ASK
    cells.tick(1.0)
    assert cells.running["b"] == MOST
    assert cells.begin("home") is Admitted.NO
    assert cells.begin("c") is Admitted.ASK
    cells.tick(1.0)
    assert cells.running["c"] == 0
    assert cells.others["c"].take(cells.now) is Admitted.NO


def test_slots_that_no_request_uses_go_back() -> None:
    cells = Cells(Random(3), delay_s=0.0)
    for _ in range(MOST):
        cells.begin("b")
    cells.tick(1.0)
    for _ in range(MOST):
        cells.end("b")
    for _ in range(3):
        cells.tick(1.0)
    assert cells.home.given(cells.now) == 0
    assert cells.begin("home") is Admitted.YES


def test_a_slot_stays_for_the_next_request_of_its_cell() -> None:
    cells = Cells(Random(3), delay_s=0.0)
    cells.begin("b")
    cells.tick(0.5)
    cells.end("b")
    assert cells.begin("b") is Admitted.YES


def test_slots_end_in_the_cell_before_they_end_at_home() -> None:
    home, other = HomeSlots(MOST, RULES), CellSlots("b", MOST, CELLS, RULES)
    answer = home.grant(other.ask(4, 0.0), 0.3)
    assert answer == SlotGrant(1, 4)
    other.answered(answer, 0.6)
    assert (other.held(LIFE_S - 0.1), other.held(LIFE_S)) == (4, 0)
    assert (home.given(LIFE_S), home.given(LIFE_S + 0.3)) == (4, 0)


def test_an_answer_does_not_return_what_a_later_ask_has_given_up() -> None:
    home, other = HomeSlots(MOST, RULES), CellSlots("b", MOST, CELLS, RULES)
    many, few = other.ask(8, 0.0), other.ask(2, 0.1)
    first, second = home.grant(many, 0.2), home.grant(few, 0.3)
    assert first is not None
    assert second is not None
    other.answered(first, 0.4)
    assert (other.held(0.4), home.given(0.4)) == (2, 2)
    other.answered(second, 0.5)
    other.answered(first, 0.6)
    assert other.held(0.6) == 2


def test_an_ask_that_comes_again_has_no_answer() -> None:
    home, other = HomeSlots(MOST, RULES), CellSlots("b", MOST, CELLS, RULES, after=1000)
    ask = other.ask(3, 0.0)
    assert home.grant(ask, 0.0) == SlotGrant(1001, 3)
    assert home.grant(ask, 0.1) is None
    restarted = CellSlots("b", MOST, CELLS, RULES, after=2000)
    assert home.grant(restarted.ask(0, 0.2), 0.2) == SlotGrant(2001, 0)
    assert home.given(0.2) == 0


def test_a_home_cell_that_restarts_counts_what_runs_in_others() -> None:
    home = HomeSlots(MOST, RULES)
    assert home.grant(SlotAsk("b", 7, 6, 6), 0.0) == SlotGrant(7, 6)
    assert home.grant(SlotAsk("c", 7, 6, 6), 0.0) == SlotGrant(7, 4)
    assert home.given(0.0) == 12
    assert home.take(0.0) is Admitted.NO


@pytest.mark.parametrize(("most", "cells", "part"), [(1, 3, 1), (3, 3, 1), (10, 4, 3), (5, 0, 5)])
def test_the_equal_part_of_a_cell_is_at_least_one_request(most: int, cells: int, part: int) -> None:
    assert part_of(most, cells) == part
