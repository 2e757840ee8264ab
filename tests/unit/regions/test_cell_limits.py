"""Limits that cells share: calls of several cells against one bucket, with answers that take their time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from tests.kit.clocks import StillClock

from kvasir.ports.limits import Grant, LimitRefusal, Quota
from kvasir_platform.gateway.tenants.memory_limits import MemoryLimits
from kvasir_platform.regions.sharing.asks import AskCell, LimitAllotted, LimitAsk, TenantSlotAsk, TenantSlots
from kvasir_platform.regions.sharing.limits import CellLimits, home_of
from kvasir_router.regions.limits import SharedLimitRules, overshoot
from kvasir_router.regions.sharing.slots import part_of, slots_overshoot

CELLS = ("ap", "eu", "us")
TENANT = next(name for name in (f"t{i}" for i in range(100)) if home_of(name, CELLS) == "eu")
PER_MIN = 600
QUOTA = Quota(requests_per_min=PER_MIN, tokens_per_min=PER_MIN * 10)


class Three:
    """Three cells, whose messages wait until they are delivered, or are lost while a cell is apart."""

    def __init__(self, quota: Quota = QUOTA) -> None:
        self.quota = quota
        self.clock = StillClock()
        self.apart: set[str] = set()
        self._mail: deque[Callable[[], None]] = deque()
        self.cells: dict[str, CellLimits] = {}
        for name in CELLS:
            self.cells[name] = CellLimits(
                name, CELLS, {TENANT: quota}, self.clock, ask=self._asker(name), epoch=1
            )

    def _asker(self, own: str) -> AskCell:
        def ask(cell: str, ask: LimitAsk | TenantSlotAsk) -> bool:
            def slots(answer: TenantSlots) -> None:
                if not {own, cell} & self.apart:
                    self.cells[own].granted(cell, answer)

            def allotted(answer: LimitAllotted) -> None:
                if not {own, cell} & self.apart:
                    self.cells[own].answered(cell, answer)

            def deliver() -> None:
                if isinstance(ask, TenantSlotAsk):
                    self.cells[cell].grant(own, ask, slots)
                else:
                    self.cells[cell].allot(own, ask, allotted)

            if not {own, cell} & self.apart:
                self._mail.append(deliver)
            return True

        return ask

    def deliver(self) -> None:
        """Deliver all messages, also those that they bring about."""
        while self._mail:
            self._mail.popleft()()

    def take(self, cell: str, tokens: int = 10) -> list[Grant | LimitRefusal]:
        """A call in a cell; the list has its answer once there is one."""
        answers: list[Grant | LimitRefusal] = []
        self.cells[cell].take(TENANT, self.quota, tokens, answers.append)
        return answers

    def second(self, calls: dict[str, int]) -> dict[str, int]:
        """Calls of one second, by cell; return how many were granted."""
        asked = {cell: [self.take(cell) for _ in range(count)] for cell, count in calls.items()}
        self.deliver()
        self.clock.at += 1.0
        for limits in self.cells.values():
            limits.tick()
        self.deliver()
        return {
            cell: sum(bool(each) and isinstance(each[0], Grant) for each in answers)
            for cell, answers in asked.items()
        }


def test_the_first_call_in_another_cell_waits_for_one_answer() -> None:
    three = Three()
    answers = three.take("us")
    assert answers == []
    three.deliver()
    (grant,) = answers
    assert isinstance(grant, Grant)
    assert grant.quota == QUOTA
    assert three.take("us") != []


def test_all_cells_together_admit_what_the_limit_allows_within_the_bound() -> None:
    three, seconds = Three(), 60
    granted = 0
    for _ in range(seconds):
        granted += sum(three.second(dict.fromkeys(CELLS, 30)).values())
    allowed = PER_MIN * (1 + seconds / 60)
    assert granted <= allowed + overshoot(PER_MIN, 3, 0, seconds, SharedLimitRules())
    assert granted >= 0.9 * allowed


def test_a_cell_that_is_apart_goes_on_with_its_part() -> None:
    three = Three()
    three.second({"us": 5, "eu": 5})
    three.apart = {"us"}
    granted = [three.second({"us": 30})["us"] for _ in range(60)]
    assert sum(granted) <= PER_MIN / 3 * 2 + PER_MIN / 4
    assert sum(granted[10:]) >= 0.8 * 50 * PER_MIN / 3 / 60


def test_what_a_request_did_not_use_is_returned() -> None:
    three = Three()
    for cell in ("eu", "us"):
        for _ in range(100):
            answers = three.take(cell, tokens=500)
            three.deliver()
            (grant,) = answers
            assert isinstance(grant, Grant)
            three.cells[cell].settle(grant, 10)


def test_a_refusal_says_when_to_come_again_and_charges_nothing() -> None:
    three = Three()
    first, second = three.take("eu", tokens=PER_MIN * 10), three.take("eu", tokens=100)
    assert isinstance(first[0], Grant)
    assert isinstance(second[0], LimitRefusal)
    assert (second[0].limit, second[0].retry_after_s) == ("tokens", 1.0)
    three.cells["eu"].release(first[0])
    assert isinstance(three.take("eu", tokens=100)[0], Grant)


def test_all_cells_share_the_slots_of_a_tenant() -> None:
    three = Three(Quota(concurrency=2))
    first, second, third = three.take("eu"), three.take("us"), three.take("ap")
    assert (len(first), second, third) == (1, [], [])
    three.deliver()
    ended, refused = sorted((second[0], third[0]), key=lambda each: isinstance(each, LimitRefusal))
    assert isinstance(ended, Grant)
    assert isinstance(refused, LimitRefusal)
    assert (refused.limit, refused.retry_after_s) == ("concurrency", 1.0)
    for limits, grant in ((three.cells["eu"], first[0]), (three.cells["us"], ended)):
        assert isinstance(grant, Grant)
        limits.settle(grant, 5)
    three.second({})
    three.second({})
    assert three.second({"ap": 3}) == {"ap": 2}


def test_calls_at_the_same_time_wait_for_two_answers_at_most() -> None:
    three = Three(Quota(concurrency=50))
    answers = [three.take("us") for _ in range(50)]
    three.deliver()
    assert all(isinstance(answer, Grant) for (answer,) in answers)
    assert isinstance(three.take("eu")[0], LimitRefusal)


def test_requests_that_run_in_cells_stay_within_the_bound_of_a_separation() -> None:
    most = 6
    three = Three(Quota(concurrency=most))
    calls = [three.take("us") for _ in range(most)]
    three.deliver()
    assert all(isinstance(answer, Grant) for (answer,) in calls)
    three.apart = {"us", "ap"}
    for _ in range(10):
        calls += [three.take(cell) for cell in CELLS for _ in range(most)]
        three.second({})
    granted = sum(isinstance(answer, Grant) for answers in calls for answer in answers)
    assert granted == most + slots_overshoot(most, len(CELLS), 2) == 2 * most + part_of(most, len(CELLS))


def test_a_refusal_by_concurrency_charges_nothing_else() -> None:
    three = Three(Quota(requests_per_min=2, concurrency=1))
    (grant,) = three.take("eu")
    assert isinstance(grant, Grant)
    for _ in range(5):
        assert isinstance(three.take("eu")[0], LimitRefusal)
    three.cells["eu"].settle(grant, 5)
    assert isinstance(three.take("eu")[0], Grant)


def test_without_any_limit_those_of_one_cell_stay() -> None:
    inner = MemoryLimits(StillClock().now)
    limits = CellLimits("us", CELLS, {}, StillClock(), ask=lambda cell, ask: True, epoch=1)
    assert limits.over(inner) is inner
    one = CellLimits(
        "us", CELLS, {TENANT: Quota(concurrency=1)}, StillClock(), ask=lambda cell, ask: True, epoch=1
    )
    assert one.over(inner) is one


def test_more_than_a_minutes_amount_can_never_be_granted() -> None:
    with pytest.raises(ValueError, match="exceed the limit"):
        Three().take("us", tokens=PER_MIN * 10 + 1)


def test_more_than_may_be_out_is_granted_in_the_home_cell_only() -> None:
    three, tokens = Three(), PER_MIN * 6
    for _ in range(4):
        three.second({})
    (refusal,) = three.take("us", tokens=tokens)
    assert isinstance(refusal, LimitRefusal)
    three.second({})
    assert isinstance(three.take("eu", tokens=tokens)[0], Grant)


def test_a_cell_does_not_answer_for_another_home_or_in_anothers_name() -> None:
    quota = Quota(requests_per_min=PER_MIN, concurrency=5)
    three, sent = Three(quota), list[LimitAsk | TenantSlotAsk]()

    def keep(cell: str, ask: LimitAsk | TenantSlotAsk) -> bool:
        sent.append(ask)
        return True

    CellLimits("us", CELLS, {TENANT: quota}, three.clock, ask=keep, epoch=1).tick()
    ask, slot_ask = sent
    assert isinstance(ask, LimitAsk)
    assert isinstance(slot_ask, TenantSlotAsk)
    answers: list[TenantSlots | LimitAllotted] = []
    for cell, name in (("ap", "us"), ("eu", "ap"), ("eu", "u")):
        three.cells[cell].grant(name, slot_ask, answers.append)
        three.cells[cell].allot(name, ask, answers.append)
    assert answers == []
    three.cells["eu"].grant("us", slot_ask, answers.append)
    three.cells["eu"].allot("us", ask, answers.append)
    assert len(answers) == 2


def test_home_cells_are_the_same_for_every_order_and_spread() -> None:
    homes = [home_of(f"tenant-{i}", CELLS) for i in range(300)]
    assert homes == [home_of(f"tenant-{i}", CELLS[::-1]) for i in range(300)]
    assert min(homes.count(cell) for cell in CELLS) > 60
