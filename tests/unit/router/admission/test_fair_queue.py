"""The order of the fair queue: shares among tenants, classes and age, for any arrivals and departures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvasir_router.admission import AdmissionTicket
from kvasir_router.admission.fair_queue import LANES, SHORT, FairQueue

MakeTicket = Callable[..., AdmissionTicket]

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}
MOST_COST = 3


def taken(queue: FairQueue, count: int, *, long: bool = True) -> list[AdmissionTicket]:
    found = []
    for _ in range(count):
        ticket = queue.next(LANES if long else SHORT)
        assert ticket is not None
        queue.take(ticket)
        found.append(ticket)
    return found


def test_a_tenants_own_requests_keep_their_order(make_ticket: MakeTicket) -> None:
    queue = FairQueue()
    tickets = [make_ticket() for _ in range(20)]
    for ticket in tickets:
        queue.add(ticket)
    assert taken(queue, 20) == tickets
    assert queue.next() is None


@given(costs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, MOST_COST)), min_size=30, max_size=60))
def test_tenants_that_wait_get_shares_by_their_weights(
    make_ticket: MakeTicket, costs: list[tuple[str, int]]
) -> None:
    queue = FairQueue()
    for tenant, cost in costs:
        queue.add(make_ticket(tenant, cost, weight=WEIGHTS[tenant]))
    left = Counter(tenant for tenant, _ in costs)
    served = Counter[str]()
    while True:
        waiting = [tenant for tenant in WEIGHTS if left[tenant]]
        for one in waiting:
            for other in waiting:
                apart = served[one] / WEIGHTS[one] - served[other] / WEIGHTS[other]
                assert apart <= MOST_COST / WEIGHTS[one], f"{one} got too much beside {other}"
        if len(waiting) < 2:
            break
        (ticket,) = taken(queue, 1)
        served[ticket.tenant] += ticket.cost
        left[ticket.tenant] -= 1


def test_who_comes_late_is_next_and_has_no_credit_from_before(make_ticket: MakeTicket) -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.add(make_ticket("greedy"))
    taken(queue, 50)
    for _ in range(10):
        queue.add(make_ticket("late"))
    order = [ticket.tenant for ticket in taken(queue, 20)]
    assert order[0] == "late"
    assert order.count("late") == 10
    assert all(order[at : at + 4].count("late") <= 3 for at in range(16))


def test_what_began_without_waiting_counts(make_ticket: MakeTicket) -> None:
    queue = FairQueue()
    queue.charge(make_ticket("b", 1))
    queue.charge(make_ticket("a", 10))
    for tenant in "ab":
        queue.add(make_ticket(tenant))
    assert [ticket.tenant for ticket in taken(queue, 2)] == ["b", "a"]


def test_a_more_urgent_class_goes_first_until_the_other_has_aged(make_ticket: MakeTicket) -> None:
    queue = FairQueue()
    queue.add(make_ticket("a", level=1, urgency=0.0 + 30.0))
    queue.add(make_ticket("a", level=0, urgency=10.0))
    queue.add(make_ticket("a", level=0, urgency=29.0))
    queue.add(make_ticket("a", level=0, urgency=31.0))
    assert [ticket.level for ticket in taken(queue, 4)] == [0, 0, 1, 0]


def test_weighted_classes_share(make_ticket: MakeTicket) -> None:
    queue = FairQueue(class_factor=4.0)
    for _ in range(40):
        queue.add(make_ticket("a", level=0))
        queue.add(make_ticket("b", level=1))
    served = Counter(ticket.level for ticket in taken(queue, 20))
    assert served == {0: 16, 1: 4}


def test_the_lane_of_long_prompts_can_be_shut_and_nobody_else_waits_for_it(make_ticket: MakeTicket) -> None:
    queue = FairQueue()
    long = make_ticket("a", 100, long=True, level=0)
    queue.add(long)
    short = [make_ticket(tenant, level=1) for tenant in "aab"]
    for ticket in short:
        queue.add(ticket)
    assert set(map(id, taken(queue, 3, long=False))) == set(map(id, short))
    assert queue.next(SHORT) is None
    assert queue.next() is long


def test_tenants_can_be_passed_over(make_ticket: MakeTicket) -> None:
    queue = FairQueue()
    queue.charge(make_ticket("b", 5))
    mine, other = make_ticket("a"), make_ticket("b")
    queue.add(mine)
    queue.add(other)
    assert queue.next() is mine
    assert queue.next(without={(0, "a")}) is other
    assert queue.next(without={(0, "a"), (0, "b")}) is None
    queue.add(make_ticket("c", level=1, urgency=1e9))
    assert queue.next(without={(0, "a"), (0, "b")}) is None


def test_what_waits_before_a_request_is_what_will_be_served_before_it(make_ticket: MakeTicket) -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.add(make_ticket("greedy", 5))
    assert queue.before(make_ticket("greedy")) == 50
    assert queue.before(make_ticket("other")) <= 5
    queue.add(make_ticket("urgent", 7, level=0))
    assert queue.before(make_ticket("third", level=1)) == 57


def test_nothing_is_kept_of_what_has_left(make_ticket: MakeTicket) -> None:
    queue = FairQueue()
    for number in range(5000):
        ticket = make_ticket(f"t{number}")
        queue.add(ticket)
        queue.remove(ticket)
    (known,) = queue._classes.values()
    assert len(known.flows) < 100
    assert sum(len(heap) for heap in known.oldest) < 100


class Histories(RuleBasedStateMachine):
    """Everybody begins in the end, and the next one is always there while somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue()
        self.waiting: list[AdmissionTicket] = []
        self.number = 0

    @rule(tenant=st.sampled_from("ab"), level=st.integers(0, 1), long=st.booleans(), cost=st.integers(1, 3))
    def arrive(self, tenant: str, level: int, long: bool, cost: int) -> None:
        self.number += 1
        ticket = AdmissionTicket(
            request_id=f"r{self.number}",
            tenant=tenant,
            weight=WEIGHTS[tenant],
            level=level,
            urgency=self.number + 10.0 * level,
            cost=cost,
            prompt_tokens=cost,
            kv_least=0,
            choices=1,
            whole=False,
            itl_s=0.1,
            ttft_s=1.0,
            deadline_s=None,
            long=long,
        )
        self.queue.add(ticket)
        self.waiting.append(ticket)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.queue.remove(ticket)

    @rule(long=st.booleans())
    def begin(self, long: bool) -> None:
        ticket = self.queue.next(LANES if long else SHORT)
        assert (ticket is None) == (not any(long or not each.long for each in self.waiting))
        if ticket is not None:
            first = [
                t
                for t in self.waiting
                if (t.tenant, t.level, t.long) == (ticket.tenant, ticket.level, ticket.long)
            ]
            assert first[0] is ticket, "a tenant's own order is lost"
            self.waiting.remove(ticket)
            self.queue.take(ticket)

    @invariant()
    def counts_agree(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.waiting)

    def teardown(self) -> None:
        for _ in range(len(self.waiting)):
            self.begin(long=True)
        assert not self.waiting
        assert not self.queue.backlogs()


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=40, deadline=None)
