"""KV events in order: late, lost, repeated, and requested again."""

from __future__ import annotations

from random import Random

import pytest

from kvasir_workers.engines.vllm.events.event_order import EventOrder


class Bench:
    """A publisher with a ring, and everything that the order makes of what is let through."""

    def __init__(self, ring: int = 100, max_waiting: int = 100) -> None:
        self.taken: list[int] = []
        self.asked: list[int] = []
        self.lost: list[str] = []
        self.published = 0
        self.ring = ring
        self.order = EventOrder(
            take=lambda payload: self.taken.append(int(payload)),
            ask=self.asked.append,
            lost=self.lost.append,
            max_waiting=max_waiting,
        )

    def publish(self, count: int = 1, *, heard: bool = True) -> None:
        for _ in range(count):
            if heard:
                self.order.live(self.published, b"%d" % self.published)
            self.published += 1

    def answer(self, *, drop: frozenset[int] = frozenset()) -> None:
        start = max(self.asked[-1], self.published - self.ring)
        for number in range(start, self.published):
            if number not in drop:
                self.order.answer(number, b"%d" % number)
        self.order.answer_ended()


def test_messages_in_order_are_taken_at_once() -> None:
    bench = Bench()
    bench.publish(5)
    assert (bench.taken, bench.asked) == ([0, 1, 2, 3, 4], [])


def test_a_repeated_message_is_taken_once() -> None:
    bench = Bench()
    bench.publish(3)
    bench.order.live(1, b"1")
    assert bench.taken == [0, 1, 2]


def test_a_subscriber_that_joins_late_asks_from_the_first() -> None:
    bench = Bench()
    bench.publish(3, heard=False)
    bench.publish(2)
    assert (bench.taken, bench.asked) == ([], [0])
    bench.answer()
    assert bench.taken == [0, 1, 2, 3, 4]
    bench.publish()
    assert bench.taken == [0, 1, 2, 3, 4, 5]
    assert (bench.asked, bench.lost) == ([0], [])


def test_what_the_ring_has_forgotten_is_reported_and_the_rest_is_taken() -> None:
    bench = Bench(ring=2)
    bench.publish(2)
    bench.publish(6, heard=False)
    bench.publish()
    bench.answer()
    assert bench.taken == [0, 1, 7, 8]
    assert bench.lost == ["vLLM's KV events 2 to 6 are lost"]
    bench.publish()
    assert bench.taken[-1] == 9


def test_an_answer_with_a_hole_is_asked_for_again_and_nothing_is_lost() -> None:
    bench = Bench()
    bench.publish(6, heard=False)
    bench.publish()
    bench.answer(drop=frozenset({3, 4}))
    assert bench.taken == [0, 1, 2]
    assert bench.asked == [0, 3]
    bench.answer()
    assert (bench.taken, bench.lost) == ([0, 1, 2, 3, 4, 5, 6], [])


def test_messages_beyond_those_that_may_wait_are_asked_for_again() -> None:
    bench = Bench(max_waiting=2)
    bench.publish(heard=False)
    bench.publish(2)
    bench.order.answer(0, b"0")
    bench.order.answer(1, b"1")
    bench.publish(2)
    bench.order.answer_ended()
    bench.publish()
    while len(bench.taken) < 6:
        bench.answer()
    assert (bench.taken, bench.lost) == ([0, 1, 2, 3, 4, 5], [])


def test_without_any_answer_it_goes_on_from_what_is_there_and_says_what_is_lost() -> None:
    bench = Bench()
    bench.publish(heard=False)
    bench.publish(2)
    for _ in range(5):
        bench.order.unanswered()
    assert bench.asked == [0] * 5
    assert (bench.taken, bench.lost) == ([1, 2], ["vLLM's KV events 0 to 0 are lost"])


def test_a_probe_finds_what_was_lost_with_nothing_after_it() -> None:
    bench = Bench()
    bench.publish()
    bench.publish(heard=False)
    bench.order.probe()
    bench.answer()
    assert (bench.taken, bench.lost) == ([0, 1], [])


def test_live_messages_do_not_wait_for_a_probe() -> None:
    bench = Bench()
    bench.publish()
    bench.order.probe()
    bench.publish(2)
    assert bench.taken == [0, 1, 2]
    bench.answer()
    assert (bench.taken, bench.lost) == ([0, 1, 2], [])


def test_a_probe_that_nobody_answers_loses_nothing() -> None:
    bench = Bench()
    bench.publish()
    bench.order.probe()
    for _ in range(5):
        bench.order.unanswered()
    assert bench.lost == []
    bench.publish()
    assert bench.taken == [0, 1]


@pytest.mark.parametrize("seed", range(200))
def test_every_message_is_taken_once_in_order_or_reported_lost(seed: int) -> None:
    rng = Random(seed)
    bench = Bench(ring=rng.choice([3, 10, 100]), max_waiting=rng.choice([1, 3, 50]))
    for _ in range(150):
        roll = rng.random()
        if roll < 0.6:
            bench.publish(heard=rng.random() < 0.7)
        elif roll < 0.7:
            bench.order.probe()
        elif roll < 0.75:
            bench.order.unanswered()
        elif bench.asked:
            bench.answer(drop=frozenset(rng.sample(range(200), rng.choice([0, 0, 60]))))
    # The network is well again.
    bench.publish()
    bench.order.probe()
    for _ in range(20):
        bench.answer()
    assert bench.taken == sorted(set(bench.taken))
    missing = set(range(bench.published)) - set(bench.taken)
    said = set()
    for reason in bench.lost:
        words = reason.split()
        said |= set(range(int(words[3]), int(words[5]) + 1))
    assert missing == said
    assert bench.taken[-1] == bench.published - 1
