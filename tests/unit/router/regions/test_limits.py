"""Limits that cells share: how much they admit together, whatever happens to their messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_router.regions.limits import (
    Admitted,
    Allotment,
    AllotmentAsk,
    AllottedLimit,
    HomeLimit,
    SharedLimitRules,
    TokenBucket,
    overshoot,
)

RULES = SharedLimitRules()
PER_MIN = 6000.0
CELLS = 3


@dataclass(slots=True)
class Cells:
    """A home cell and two others, whose messages take time, are lost and are repeated. A cell in `apart`
    exchanges none. `admitted` has the time and amount of each request, negative for what is given back."""

    rng: Random
    loss: float = 0.0
    delay_s: float = 3.0
    now: float = 0.0
    apart: set[str] = field(default_factory=set)
    admitted: list[tuple[float, float]] = field(default_factory=list)
    refused: int = 0
    home: HomeLimit = field(init=False)
    others: dict[str, AllottedLimit] = field(init=False)
    ever_apart: set[str] = field(default_factory=set)
    _asks: list[tuple[float, AllotmentAsk]] = field(default_factory=list)
    _answers: list[tuple[float, str, Allotment]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.home = HomeLimit(PER_MIN, 0.0, RULES)
        self.others = {name: AllottedLimit(name, PER_MIN, CELLS, 0.0, RULES) for name in ("b", "c")}

    def separate(self, cell: str) -> None:
        self.apart.add(cell)
        self.ever_apart.add(cell)

    def request(self, cell: str, amount: float) -> Admitted:
        limit = self.home if cell == "home" else self.others[cell]
        found = limit.take(amount, self.now)
        if found is Admitted.YES:
            self.admitted.append((self.now, amount))
        else:
            self.refused += 1
        return found

    def give_back(self, cell: str, amount: float) -> None:
        limit = self.home if cell == "home" else self.others[cell]
        limit.give_back(amount, self.now)
        self.admitted.append((self.now, -amount))

    def tick(self, seconds: float) -> None:
        """Every cell asks, time passes, and what arrives in it is handled."""
        for name, limit in self.others.items():
            ask = limit.ask(self.now)
            for _ in range(self._copies(name)):
                self._asks.append((self.now + self.rng.uniform(0.0, self.delay_s), ask))
        steps = min(20, max(1, round(seconds / 0.1)))
        for _ in range(steps):
            self.now += seconds / steps
            self._deliver()

    def _deliver(self) -> None:
        for at, ask in sorted(self._asks, key=lambda each: each[0]):
            if at <= self.now:
                answer = self.home.allot(ask, self.now)
                for _ in range(self._copies(ask.cell)):
                    self._answers.append((self.now + self.rng.uniform(0.0, self.delay_s), ask.cell, answer))
        self._asks = [each for each in self._asks if each[0] > self.now]
        for at, cell, answer in self._answers:
            if at <= self.now:
                self.others[cell].answered(answer, self.now)
        self._answers = [each for each in self._answers if each[0] > self.now]

    def _copies(self, cell: str) -> int:
        if cell in self.apart or self.rng.random() < self.loss:
            return 0
        return 2 if self.rng.random() < 0.1 else 1

    def excess(self) -> float:
        """By how much the worst span exceeds what one bucket admits in it and the overshoot of the cells."""
        totals: dict[float, float] = {}
        for at, amount in self.admitted:
            totals[at] = totals.get(at, 0.0) + amount
        times, worst = sorted(totals), -PER_MIN
        for first, begin in enumerate(times):
            total = 0.0
            for end in times[first:]:
                total += totals[end]
                span_s = end - begin
                over = overshoot(PER_MIN, CELLS, len(self.ever_apart), span_s, RULES)
                worst = max(worst, total - PER_MIN * (1 + span_s / 60) - over)
        return worst


_EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("request"), st.sampled_from(["home", "b", "c"]), st.sampled_from([1.0, 200.0, 1500.0])
        ),
        st.tuples(st.just("burst"), st.sampled_from(["home", "b", "c"]), st.just(300.0)),
        st.tuples(st.just("tick"), st.just(""), st.sampled_from([0.1, 1.0, 1.0, 4.0, 20.0])),
        st.tuples(st.just("apart"), st.sampled_from(["b", "c"]), st.just(0.0)),
        st.tuples(st.just("join"), st.sampled_from(["b", "c"]), st.just(0.0)),
        st.tuples(st.just("back"), st.sampled_from(["home", "b", "c"]), st.sampled_from([50.0, 400.0])),
    ),
    max_size=50,
)


@settings(deadline=None)
@given(_EVENTS, st.integers(0, 1000), st.sampled_from([0.0, 0.3]))
def test_cells_together_never_exceed_the_bound(
    events: list[tuple[str, str, float]], seed: int, loss: float
) -> None:
    cells = Cells(Random(seed), loss)
    spent = dict.fromkeys(("home", "b", "c"), 0.0)
    for kind, cell, amount in events:
        if kind == "tick":
            cells.tick(amount)
        elif kind == "apart":
            cells.separate(cell)
        elif kind == "join":
            cells.apart.discard(cell)
        elif kind == "back":
            back = min(amount, spent[cell])
            spent[cell] -= back
            cells.give_back(cell, back)
        else:
            for _ in range(20 if kind == "burst" else 1):
                spent[cell] += amount if cells.request(cell, amount) is Admitted.YES else 0.0
    # Lost messages may make a cell believe that it is apart.
    if loss:
        cells.ever_apart |= set(cells.others)
    assert cells.excess() <= 1e-3


def test_the_bound_is_nearly_reached_by_cells_that_are_apart() -> None:
    cells = Cells(Random(1))
    for _ in range(4):
        cells.tick(1.0)
    for name in cells.others:
        cells.separate(name)
    for _ in range(60):
        cells.tick(1.0)
        for cell in ("home", "b", "c"):
            for _ in range(40):
                cells.request(cell, 100.0)
    admitted = sum(amount for _, amount in cells.admitted)
    none_apart, both = (overshoot(PER_MIN, CELLS, apart, 60.0, RULES) for apart in (0, 2))
    assert PER_MIN * 2 + 0.9 * (both - none_apart) < admitted
    assert cells.excess() <= 1e-3


def test_one_cell_can_use_nearly_the_whole_limit_of_another() -> None:
    cells = Cells(Random(2), delay_s=0.2)
    for _ in range(180):
        cells.tick(1.0)
        while cells.request("b", 50.0) is Admitted.YES:
            pass
    late = sum(amount for at, amount in cells.admitted if at > 60.0)
    assert late > 0.85 * PER_MIN * 2
    assert cells.excess() <= 1e-3


def test_large_requests_of_all_cells_use_nearly_the_whole_limit() -> None:
    cells = Cells(Random(3), delay_s=0.1)
    for second in range(600):
        for cell in ("home", "b", "c"):
            if second % 10 == 0 and cells.request(cell, 1200.0) is Admitted.ASK:
                cells.tick(0.2)
                cells.tick(0.2)
                cells.request(cell, 1200.0)
        cells.tick(1.0)
    minutes = cells.now / 60.0
    assert sum(amount for _, amount in cells.admitted) > 0.85 * PER_MIN * minutes
    assert cells.excess() <= 1e-3


def test_a_first_request_waits_for_one_answer() -> None:
    home, other = HomeLimit(PER_MIN, 0.0), AllottedLimit("b", PER_MIN, CELLS, 0.0)
    assert other.take(500.0, 0.0) is Admitted.ASK
    other.answered(home.allot(other.ask(0.0), 0.05), 0.1)
    assert other.take(500.0, 0.1) is Admitted.YES


def test_a_cell_apart_has_its_equal_part_of_the_limit() -> None:
    other = AllottedLimit("b", PER_MIN, CELLS, 0.0)
    other.ask(0.0)
    assert other.take(500.0, 1.0) is Admitted.ASK
    assert not other.apart(2.5)
    assert other.take(500.0, 2.6) is Admitted.YES
    assert other.take(1501.0, 2.6) is Admitted.NO
    assert other.take(1500.0, 2.6) is Admitted.YES
    assert other.take(1.0, 2.6) is Admitted.NO


def test_an_idle_cell_is_not_taken_for_apart() -> None:
    home, other = HomeLimit(PER_MIN, 0.0), AllottedLimit("b", PER_MIN, CELLS, 0.0)
    other.answered(home.allot(other.ask(0.0), 0.0), 0.1)
    assert not other.apart(3600.0)
    assert other.take(500.0, 3600.0) is Admitted.ASK


def test_an_allotment_ends_in_the_cell_before_it_ends_at_home() -> None:
    home, other = HomeLimit(PER_MIN, 0.0), AllottedLimit("b", PER_MIN, CELLS, 0.0)
    answer = home.allot(AllotmentAsk("b", 1, 100.0), 0.3)
    other.ask(0.0)
    other.answered(Allotment(1, answer.amount), 0.6)
    assert other.held(5.9) == 100.0
    assert (other.held(6.0), home.out(6.0)) == (0.0, 100.0)
    assert home.out(6.3) == 0.0


def test_repeated_messages_give_nothing_twice() -> None:
    home, other = HomeLimit(PER_MIN, 0.0), AllottedLimit("b", PER_MIN, CELLS, 0.0)
    ask = other.ask(0.0)
    answer = home.allot(ask, 0.0)
    assert home.allot(ask, 0.1).amount == 0.0
    other.answered(answer, 0.1)
    other.answered(answer, 0.2)
    assert other.held(0.2) == answer.amount > 0


def test_what_a_cell_does_not_need_goes_back() -> None:
    home, other = HomeLimit(PER_MIN, 0.0), AllottedLimit("b", PER_MIN, CELLS, 0.0)
    other.take(1000.0, 0.0)
    other.answered(home.allot(other.ask(0.0), 0.0), 0.0)
    assert home.out(0.0) == pytest.approx(1000.0)
    for second in range(1, 60):
        other.answered(home.allot(other.ask(second), second), second)
        assert home.out(second) == pytest.approx(other.held(second))
    assert other.held(59.0) < 200.0
    assert home.take(PER_MIN - 200.0, 59.0) is Admitted.YES


def test_what_requests_give_back_does_not_exceed_what_was_given() -> None:
    other = AllottedLimit("b", PER_MIN, CELLS, 0.0)
    first = other.ask(0.0)
    other.answered(Allotment(first.number, 100.0), 0.0)
    assert other.take(100.0, 0.0) is Admitted.YES
    second = other.ask(5.0)
    other.answered(Allotment(second.number, 60.0), 5.0)
    other.give_back(100.0, 6.5)
    assert other.held(6.5) == 60.0


def test_an_allotment_that_has_ended_is_not_returned_to_the_bucket() -> None:
    home = HomeLimit(PER_MIN, 0.0)
    assert home.allot(AllotmentAsk("b", 1, 500.0), 0.0).amount == 500.0
    assert home.allot(AllotmentAsk("b", 2, 300.0), 5.0).amount == 300.0
    home.allot(AllotmentAsk("b", 3, 0.0, ((1, 500.0),)), 6.5)
    assert home.out(6.5) == 300.0
    home.allot(AllotmentAsk("b", 4, 0.0, ((2, 100.0), (2, 900.0))), 6.5)
    assert home.out(6.5) == 0.0


def test_a_restarted_cell_is_heard() -> None:
    home = HomeLimit(PER_MIN, 0.0)
    first = AllottedLimit("b", PER_MIN, CELLS, 0.0, after=1000)
    assert home.allot(first.ask(0.0), 0.0).amount > 0
    again = AllottedLimit("b", PER_MIN, CELLS, 0.0, after=2000)
    assert home.allot(again.ask(0.0), 0.0).amount > 0


def test_debt_is_paid_by_the_next_allotment() -> None:
    home, other = HomeLimit(PER_MIN, 0.0), AllottedLimit("b", PER_MIN, CELLS, 0.0)
    other.take(500.0, 0.0)
    other.answered(home.allot(other.ask(0.0), 0.0), 0.0)
    assert other.take(500.0, 0.0) is Admitted.YES
    other.give_back(-200.0, 0.0)
    other.answered(home.allot(other.ask(1.0), 1.0), 1.0)
    held = other.held(1.0)
    assert home.out(1.0) == pytest.approx(500.0 + 200.0 + held)


@pytest.mark.parametrize("wanted", [float("nan"), float("inf"), -5.0, 1e18])
def test_an_ask_of_any_number_gets_at_most_the_part_that_may_be_out(wanted: float) -> None:
    home = HomeLimit(PER_MIN, 0.0, RULES)
    answer = home.allot(AllotmentAsk("b", 1, wanted, ((7, 1e18), (1, float("nan")))), 0.0)
    assert 0.0 <= answer.amount <= RULES.out_share * PER_MIN
    assert home.out(0.0) == answer.amount


def test_a_bucket_refills_and_owes_at_most_a_minute() -> None:
    bucket = TokenBucket(60.0, 0.0)
    assert bucket.take(60.0, 0.0)
    assert not bucket.take(2.0, 1.0)
    assert bucket.take(1.0, 1.0)
    bucket.add(-1e9, 1.0)
    assert bucket.content(1.0) == -60.0
    assert bucket.content(1000.0) == 60.0
