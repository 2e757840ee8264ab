"""How many requests are distributed: one after another through production fleets, over workers that take
time.

Workers compute prompts one after another and decode all streams at once. Routers see them through reports
that are late, and know nothing of each other.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import mean

import pytest

from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import EngineLoad, Request, Role, Sampling, SloClass, Timings, Usage, token_ids
from kvasir.ports.routing import Candidates, Plan, RequestView, RoutingPolicy, RoutingTarget
from kvasir_router.decide import CostPolicy, CostRates, Disaggregation, RateBook
from kvasir_router.fleet.fleet import Charges, Fleet
from kvasir_router.index import FleetIndex

MakeIdentity = Callable[..., WorkerIdentity]

BLOCK = 4
RATES = CostRates(
    prefill_fixed_s=0.0, prefill_token_s=0.001, step_fixed_s=0.01, step_stream_s=0.0005, transfer_fixed_s=0.0
)
OUTPUT = 20


@dataclass
class Worker:
    """Prompts in order, then streams side by side."""

    free_s: float = 0.0
    legs: list[tuple[float, float, float]] = field(default_factory=list)

    def run(self, uncached: int, now: float) -> tuple[float, float]:
        """When the prompt is computed, and when the request ends."""
        begun = max(now, self.free_s)
        self.free_s = begun + uncached * RATES.prefill_token_s
        end = self.free_s + OUTPUT * (RATES.step_fixed_s + RATES.step_stream_s * self.streams(now))
        self.legs.append((begun, self.free_s, end))
        return self.free_s, end

    def streams(self, now: float) -> int:
        return sum(end > now for _, _, end in self.legs)

    def load(self, now: float) -> EngineLoad:
        self.legs = [leg for leg in self.legs if leg[2] > now - 10.0]
        live = [leg for leg in self.legs if leg[2] > now]
        waiting = sum(begun > now for begun, _, _ in live)
        return EngineLoad(running=len(live) - waiting, waiting=waiting)


class World:
    """Routers that share `workers` workers, and what happens at which time."""

    def __init__(
        self, make_identity: MakeIdentity, policies: Sequence[RoutingPolicy], workers: int, *, kv_blocks: int
    ) -> None:
        self.now = 0.0
        self.workers = {f"w{number:02}": Worker() for number in range(workers)}
        self.fleets = []
        self.sent: list[tuple[float, str, str]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        for policy in policies:
            index = FleetIndex(capacity_blocks=10**6, predicted_blocks=10**6, predicted_ttl_s=1e6)
            fleet = Fleet(
                policy,
                index,
                RateBook(lambda identity: RATES),
                hash_blocks=lambda request, size: array("Q"),
                expected_output_tokens=OUTPUT,
            )
            for worker_id in self.workers:
                fleet.add(worker_id, replace(make_identity(worker_id), kv_blocks=kv_blocks), 0.0)
            self.fleets.append(fleet)

    def at(self, when: float, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, do))

    def run_until(self, when: float) -> None:
        while self._events and self._events[0][0] <= when:
            self.now, _, do = heapq.heappop(self._events)
            do()
        self.now = when

    def ask(self, group: str, shared: int, own: int, router: int = 0, ttft_s: float = 2.0) -> str:
        """A request of `shared` tokens that its whole group begins with, and some of its own."""
        fleet, name = self.fleets[router], f"{group}-{len(self.sent)}"
        names = array("Q", [hash((group, n)) % 2**64 for n in range(shared // BLOCK)])
        names.extend(hash((name, n)) % 2**64 for n in range(own // BLOCK))
        request = Request(
            name,
            "m",
            token_ids(range(shared + own)),
            Sampling(max_tokens=OUTPUT),
            arrival_s=self.now,
            slo=SloClass("s", ttft_s=ttft_s, itl_s=0.1),
        )
        plan = fleet.plan(request, names, self.now)
        assert plan is not None
        charges = fleet.commit(request, names, plan, self.now)
        worker_id = plan.decode.worker_id
        fleet.workers[worker_id].legs[name] = name
        computed, ends = self.workers[worker_id].run(shared + own - plan.predicted_cached_tokens, self.now)
        self.at(computed, lambda: self._computed(fleet, name, plan.decode, charges))
        self.at(ends, lambda: self._ended(fleet, name, plan.decode, charges))
        self.sent.append((self.now, group, worker_id))
        return worker_id

    def report(self, *, every_s: float, late_s: float, until_s: float) -> None:
        """All workers report to all routers, `late_s` late."""
        for tick in range(int(until_s / every_s)):
            self.at(tick * every_s, lambda: self._send_reports(late_s))

    def _send_reports(self, late_s: float) -> None:
        for worker_id, worker in self.workers.items():
            load = worker.load(self.now)
            for fleet in self.fleets:
                self.at(
                    self.now + late_s,
                    lambda fleet=fleet, worker_id=worker_id, load=load: fleet.report(worker_id, load),  # type: ignore[misc]  # bound early
                )

    def _computed(self, fleet: Fleet, name: str, target: RoutingTarget, charges: Charges) -> None:
        fleet.confirm(name, target, self.now)
        fleet.settle(charges, target, charges[target].prompt())

    def _ended(self, fleet: Fleet, name: str, target: RoutingTarget, charges: Charges) -> None:
        del fleet.workers[target.worker_id].legs[name]
        fleet.settle(charges, target, replace(charges[target]))


MakeWorld = Callable[..., World]


@pytest.fixture
def world(make_identity: MakeIdentity) -> MakeWorld:
    def make(workers: int, policies: Sequence[RoutingPolicy] | None = None, kv_blocks: int = 10_000) -> World:
        return World(make_identity, policies or [cost(0)], workers, kv_blocks=kv_blocks)

    return make


def cost(seed: int) -> CostPolicy:
    return CostPolicy(Disaggregation.NEVER, Random(seed))


@pytest.mark.parametrize("seed", range(5))
def test_a_burst_of_one_group_stays_on_few_workers(world: MakeWorld, seed: int) -> None:
    """32 requests at once that share 1,000 of 1,020 tokens: one computes the prefix, the others wait."""
    stage = world(4, [cost(seed)])
    placed = Counter(stage.ask("agents", 1000, 20) for _ in range(32))
    assert len(placed) <= 2


@pytest.mark.parametrize("seed", range(5))
def test_distinct_groups_spread_over_idle_workers(world: MakeWorld, seed: int) -> None:
    stage = world(4, [cost(seed)])
    placed = Counter(stage.ask(f"group {number}", 1000, 20) for number in range(16))
    assert max(placed.values()) / (16 / 4) <= 1.25


def test_groups_return_to_where_they_are(world: MakeWorld) -> None:
    stage = world(8)
    homes: dict[int, list[str]] = {}
    for turn in range(6):
        for group in range(24):
            stage.run_until(stage.now + 0.5)
            home = stage.ask(f"chat {group}", 400 * (turn + 1), 0)
            homes.setdefault(group, []).append(home)
    moved = sum(len(set(where)) for where in homes.values()) - len(homes)
    assert moved <= 24 // 4
    load = Counter(worker_id for _, _, worker_id in stage.sent)
    assert max(load.values()) / mean(load.values()) <= 1.7


@pytest.mark.parametrize("seed", range(3))
def test_a_hot_prefix_gets_as_many_copies_as_its_load_needs(world: MakeWorld, seed: int) -> None:
    """Each request takes its worker 0.1 s, and 25 a second come: one worker cannot do it, three can."""
    stage = world(8, [cost(seed)])
    for number in range(500):
        stage.at(number / 25, lambda: void(stage.ask("hot", 1000, 100)))
    stage.run_until(20.0)
    late = Counter(worker_id for when, _, worker_id in stage.sent if when > 10.0)
    assert 3 <= len(late) <= 6
    waits = max(worker.free_s - 20.0 for worker in stage.workers.values())
    assert waits < 2.0


def test_nothing_is_copied_while_the_holder_keeps_up(world: MakeWorld) -> None:
    stage = world(8)
    for number in range(100):
        stage.at(number / 5, lambda: void(stage.ask("warm", 1000, 100)))
    stage.run_until(20.0)
    assert len({worker_id for _, _, worker_id in stage.sent}) == 1


# -- several routers ---------------------------------------------------------------------------------


class Argmin:
    """What the cost model must not be: the least loaded, the first of equals, nothing supposed of others."""

    name = "argmin"

    def decide(self, request: RequestView, candidates: Candidates, now: float) -> Plan | None:
        load = candidates.queued_prefill_tokens + candidates.streams
        row = int(load.argmin())
        return Plan(None, candidates.targets[row], self.name, int(candidates.cached_tokens[row]))

    def missing(self, prefills: Sequence[bool], decodes: Sequence[bool], worker: Sequence[int]) -> str | None:
        return None


def worst_pile(stage: World, *, routers: int, rate: float, seconds: int, seed: int) -> float:
    """The most that one worker is sent between two reports, over the mean of all: the mean of all seconds."""
    rng = Random(seed)
    stage.report(every_s=1.0, late_s=0.3, until_s=float(seconds))
    when = 0.0
    while when < seconds:
        when += rng.expovariate(rate)
        tokens, router = 4 * rng.randrange(20, 150), rng.randrange(routers)
        stage.at(
            when,
            lambda tokens=tokens, router=router: void(  # type: ignore[misc]  # bound early
                stage.ask(f"g{len(stage.sent)}", 0, tokens, router)
            ),
        )
    stage.run_until(float(seconds))
    piles = []
    for second in range(5, seconds):
        sent = Counter(who for at, _, who in stage.sent if second + 0.3 <= at < second + 1.3)
        if sent:
            piles.append(max(sent.values()) / (sum(sent.values()) / len(stage.workers)))
    return mean(piles)


@pytest.mark.parametrize("routers", [2, 4])
def test_routers_that_see_the_same_late_reports_do_not_stampede(world: MakeWorld, routers: int) -> None:
    """16 workers get 16 requests a second, and report once a second: drawn blindly, the fullest gets 3.1
    times the mean, and no router can know better of what the others have sent since."""
    ours = world(16, [cost(seed) for seed in range(routers)])
    naive = world(16, [Argmin() for _ in range(routers)])
    ours_piles = worst_pile(ours, routers=routers, rate=16.0, seconds=60, seed=1)
    naive_piles = worst_pile(naive, routers=routers, rate=16.0, seconds=60, seed=1)
    assert ours_piles <= 3.5
    assert naive_piles > 1.15 * ours_piles


@pytest.mark.parametrize("faster", [0.2, 1.0, 5.0], ids=["slower", "as foreseen", "faster"])
@pytest.mark.parametrize("decoders", [2, 5])
def test_idle_workers_of_a_pool_share_its_requests_though_one_was_measured_first(
    make_identity: MakeIdentity, decoders: int, faster: float
) -> None:
    """Whatever the roofline was wrong by: what one has measured is believed of all."""
    index = FleetIndex(capacity_blocks=10**6, predicted_blocks=10**6, predicted_ttl_s=1e6)
    policy = CostPolicy(Disaggregation.ALWAYS, Random(1))
    fleet = Fleet(
        policy,
        index,
        RateBook(lambda identity: RATES),
        hash_blocks=lambda request, size: array("Q"),
        expected_output_tokens=OUTPUT,
    )
    fleet.add("p", make_identity("p", Role.PREFILL), 0.0)
    for number in range(decoders):
        fleet.add(f"d{number}", make_identity(f"d{number}", Role.DECODE), 0.0)
    served: Counter[str] = Counter()
    step_s = (RATES.step_fixed_s + RATES.step_stream_s) / faster
    for number in range(40 * decoders):
        request = Request(f"r{number}", "m", token_ids(range(100)), Sampling(max_tokens=OUTPUT))
        plan = fleet.plan(request, array("Q"), 0.0)
        assert plan is not None
        served[plan.decode.worker_id] += 1
        charges = fleet.commit(request, array("Q"), plan, 0.0)
        usage = Usage(100, transferred_tokens=99, transferred_bytes=1584, output_tokens=OUTPUT)
        timings = Timings(transfer_s=0.003 / faster, decode_s=(OUTPUT - 1) * step_s)
        fleet.measured(plan.decode, usage, timings, charges)
        for target in list(charges):
            fleet.settle(charges, target, replace(charges[target]))
    assert min(served[f"d{number}"] for number in range(decoders)) >= 20


def void(_: object) -> None:
    """For events, which answer nothing."""
