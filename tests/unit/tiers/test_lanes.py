"""The order in which a tier's thread executes its tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvasir_workers.tiers import threads as lanes
from kvasir_workers.tiers.threads import TierThread, Urgency

WAIT_S = 10.0


class Bench:
    """A lane that is busy until the test lets it go on, and what it has done since."""

    def __init__(self, more_to_tend: int = 0) -> None:
        self.time = 0.0
        self.done: list[str] = []
        self.tended = 0
        self.more_to_tend = more_to_tend
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.lane = TierThread("test", lambda: self.time, self.maintain)

    def maintain(self) -> bool:
        self.tended += 1
        return self.tended <= self.more_to_tend

    def occupy(self) -> None:
        """Return when the lane is in a call that does not return before `go_on`."""

        def hang() -> None:
            self.entered.set()
            assert self.go_on.wait(WAIT_S)

        assert self.lane.add(Urgency.LOOKUP, hang)
        assert self.entered.wait(WAIT_S)

    def note(self, word: str) -> Callable[[], None]:
        return lambda: self.done.append(word)

    def rest(self) -> None:
        """Let it go on, and return when it has done all that waits."""
        self.go_on.set()
        assert self.lane.close(WAIT_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.rest()


def test_questions_go_before_reads_and_reads_before_writes(bench: Bench) -> None:
    bench.occupy()
    for word, urgency in (("w1", 2), ("r1", 1), ("l1", 0), ("w2", 2), ("r2", 1), ("l2", 0)):
        assert bench.lane.add(Urgency(urgency), bench.note(word))
    bench.rest()
    assert bench.done == ["l1", "l2", "r1", "r2", "w1", "w2"]


def test_a_job_that_fails_costs_none_of_the_others(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    bench.occupy()
    bench.lane.add(Urgency.READ, fail)
    bench.lane.add(Urgency.WRITE, bench.note("after"))
    bench.rest()
    assert bench.done == ["after"]
    assert "tier test: a job failed" in caplog.text


def test_a_call_that_does_not_return_is_told(bench: Bench) -> None:
    bench.occupy()
    assert not bench.lane.stuck(1.0)
    bench.time = 2.0
    assert bench.lane.stuck(1.0)
    bench.rest()
    assert not bench.lane.stuck(1.0)


def test_no_more_than_so_many_jobs_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_WAITING", 2)
    bench.occupy()
    assert [bench.lane.add(Urgency.WRITE, bench.note("w")) for _ in range(3)] == [True, True, False]
    assert bench.lane.add(Urgency.READ, bench.note("r"))


def test_a_closed_lane_takes_nothing_more(bench: Bench) -> None:
    bench.rest()
    assert not bench.lane.add(Urgency.LOOKUP, bench.note("late"))


def test_closing_does_not_wait_for_a_call_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "TEND_S", 0.0)
    bench = Bench()
    bench.occupy()
    assert not bench.lane.close(0.01)
    bench.go_on.set()


def test_what_is_still_tended_for_the_first_time_is_not_tended_yet() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def maintain() -> bool:
        entered.set()
        return not go_on.wait(WAIT_S)

    lane = TierThread("test", lambda: 0.0, maintain)
    assert entered.wait(WAIT_S)
    assert not lane.tended
    go_on.set()
    assert lane.close(WAIT_S)
    assert lane.tended


def test_it_tends_soon_after_the_start_and_again_while_there_is_more_to_do() -> None:
    bench = Bench(more_to_tend=3)
    for _ in range(int(WAIT_S / 0.01)):
        if bench.lane.tended:
            break
        bench.entered.wait(0.01)
    assert bench.lane.tended
    assert bench.tended == 4
    bench.rest()
