"""Rate limits in memory: never more than a bucket and its refill, all or nothing, exact retry times."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.kit.clocks import StillClock

from kvasir.ports.limits import WINDOW_S, BucketLevels, Grant, LimitRefusal, Quota
from kvasir_platform.gateway.tenants.buckets import remaining
from kvasir_platform.gateway.tenants.limit_headers import limit_headers
from kvasir_platform.gateway.tenants.memory_limits import MemoryLimits

START = 12_345.678
EPSILON = 1e-3


@dataclass
class Spent:
    """What was let in, and when."""

    amounts: list[tuple[float, float]] = field(default_factory=list)

    def most_beyond(self, per_min: int) -> float:
        """By how much the worst span of time exceeds a bucket and its refill."""
        worst = -math.inf
        for first, (begin, _) in enumerate(self.amounts):
            total = 0.0
            for at, amount in self.amounts[first:]:
                total += amount
                worst = max(worst, total - per_min * (1 + (at - begin) / WINDOW_S))
        return worst


class Limited(RuleBasedStateMachine):
    """One tenant that asks as it likes, and one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = StillClock(START)
        self.limits = MemoryLimits(self.clock.now)
        self.requests = Spent()
        self.tokens = Spent()
        self.running: list[Grant] = []
        self.others = 0

    @initialize(
        requests=st.integers(1, 7), tokens=st.integers(1, 50), concurrency=st.none() | st.integers(1, 3)
    )
    def limit(self, requests: int, tokens: int, concurrency: int | None) -> None:
        self.quota = Quota(requests, tokens, concurrency)
        self.per_min = requests, tokens

    @rule(seconds=st.floats(0.0, 90.0))
    def wait(self, seconds: float) -> None:
        self.clock.at += seconds

    @rule(share=st.floats(0.0, 1.0))
    def ask(self, share: float) -> None:
        tokens = int(share * self.per_min[1])
        verdict = self.limits.decide("a", self.quota, tokens)
        if isinstance(verdict, LimitRefusal):
            assert verdict.retry_after_s > 0
            self.retry(tokens, verdict)
        else:
            self.granted(verdict)

    def retry(self, tokens: int, refusal: LimitRefusal) -> None:
        if refusal.limit == "concurrency":
            while self.running:
                self.limits.settle(self.running[-1], self.running.pop().tokens)
        self.clock.at += refusal.retry_after_s
        verdict = self.limits.decide("a", self.quota, tokens)
        if isinstance(verdict, LimitRefusal):
            assert verdict.limit == "concurrency"
        else:
            self.granted(verdict)

    def granted(self, grant: Grant) -> None:
        self.requests.amounts.append((self.clock.at, 1))
        self.tokens.amounts.append((self.clock.at, grant.tokens))
        self.running.append(grant)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """With all used: what is given back is another test's."""
        grant = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.limits.settle(grant, grant.tokens)

    @rule()
    def another(self) -> None:
        """Whatever this tenant has used, another one finds its own buckets full."""
        self.others += 1
        verdict = self.limits.decide(f"other-{self.others}", self.quota, self.per_min[1])
        assert isinstance(verdict, Grant)

    @invariant()
    def never_more(self) -> None:
        if hasattr(self, "quota"):
            assert self.requests.most_beyond(self.per_min[0]) <= EPSILON
            assert self.tokens.most_beyond(self.per_min[1]) <= EPSILON
            most = self.quota.concurrency
            assert most is None or self.limits.running("a") <= most
            assert self.limits.running("a") == len(self.running)


TestLimited = Limited.TestCase
TestLimited.settings = settings(stateful_step_count=30, deadline=None)


@given(
    per_min=st.integers(1, 10**9),
    waits=st.lists(st.floats(0.0, 30.0), max_size=5),
    share=st.floats(0.0, 1.0),
    used=st.floats(0.0, 1.0),
)
def test_what_was_not_used_is_as_if_never_charged(
    per_min: int, waits: list[float], share: float, used: float
) -> None:
    clock = StillClock(START)
    quota = Quota(tokens_per_min=per_min)
    charged, spared = MemoryLimits(clock.now), MemoryLimits(clock.now)
    tokens = int(share * per_min)
    spent = int(used * tokens)
    first, second = charged.decide("a", quota, tokens), spared.decide("a", quota, spent)
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    charged.settle(first, spent)
    spared.settle(second, spent)
    for seconds in waits:
        clock.at += seconds
    one, other = charged.decide("a", quota, 0), spared.decide("a", quota, 0)
    assert isinstance(one, Grant)
    assert isinstance(other, Grant)
    assert math.isclose(one.levels.tokens_s, other.levels.tokens_s, abs_tol=EPSILON)


def test_a_released_request_gives_back_its_place_its_request_and_its_tokens() -> None:
    limits = MemoryLimits(StillClock(START).now)
    quota = Quota(1, 10, 1)
    for _ in range(5):
        grant = limits.decide("a", quota, 10)
        assert isinstance(grant, Grant)
        limits.release(grant)


def test_a_refused_request_charges_nothing() -> None:
    clock = StillClock(START)
    limits = MemoryLimits(clock.now)
    assert isinstance(limits.decide("a", Quota(10, 10), 10), Grant)
    before = limits.decide("a", Quota(10, 10), 5)
    assert before == limits.decide("a", Quota(10, 10), 5)
    assert isinstance(before, LimitRefusal)
    assert (before.limit, before.levels) == ("tokens", BucketLevels(6.0, 60.0))
    assert math.isclose(before.retry_after_s, 30.0, abs_tol=EPSILON)


def test_what_is_used_beyond_the_charge_is_owed_up_to_a_minute() -> None:
    clock = StillClock(START)
    limits = MemoryLimits(clock.now)
    quota = Quota(tokens_per_min=60)
    grant = limits.decide("a", quota, 60)
    assert isinstance(grant, Grant)
    limits.settle(grant, 600)
    refusal = limits.decide("a", quota, 60)
    assert isinstance(refusal, LimitRefusal)
    assert math.isclose(refusal.retry_after_s, 120.0, abs_tol=EPSILON)
    clock.at += refusal.retry_after_s
    assert isinstance(limits.decide("a", quota, 60), Grant)


@given(per_min=st.integers(1, 10**6), amount=st.integers(0, 10**6))
def test_what_the_headers_say_is_left_can_be_had(per_min: int, amount: int) -> None:
    limits = MemoryLimits(StillClock(START).now)
    quota = Quota(tokens_per_min=per_min)
    grant = limits.decide("a", quota, min(amount, per_min))
    assert isinstance(grant, Grant)
    left = remaining(grant.levels.tokens_s, per_min)
    assert left == per_min - min(amount, per_min)
    assert isinstance(limits.decide("a", quota, left), Grant)
    refused = limits.decide("a", quota, min(per_min, 1))
    assert isinstance(refused, LimitRefusal)


def test_headers_are_as_openai_writes_them() -> None:
    assert limit_headers(Quota(600, 40_000, 3), BucketLevels(0.1, 61.5)) == (
        b"x-ratelimit-limit-requests: 600\r\nx-ratelimit-remaining-requests: 599\r\n"
        b"x-ratelimit-reset-requests: 100ms\r\n"
        b"x-ratelimit-limit-tokens: 40000\r\nx-ratelimit-remaining-tokens: 0\r\n"
        b"x-ratelimit-reset-tokens: 1m1.5s\r\n"
    )
    assert limit_headers(Quota(concurrency=3), BucketLevels()) == b""
