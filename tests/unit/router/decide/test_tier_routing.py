"""From workers' reports about tiers to routing, through the whole request machine."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

import pytest

from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvBatch, KvEventKind, KvSnapshotPart, Medium, TierLoad
from kvasir.core.requests import (
    Delta,
    EngineLoad,
    EngineRequest,
    FinishReason,
    KvHandoff,
    Leg,
    Request,
    Role,
    StepBatch,
    Usage,
    token_ids,
)
from kvasir.native._twin import record
from kvasir.ports.routing import Plan, RoutingTarget
from kvasir_router.build import hash_blocks
from kvasir_router.decide import CostPolicy, CostRates, Disaggregation, RateBook
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.index import FetchSnapshot, FleetIndex
from kvasir_router.requests.events import (
    Effect,
    RequestArrived,
    SnapshotEnded,
    SnapshotPart,
    StepReceived,
    SubmitTo,
    WorkerReady,
)
from kvasir_router.requests.machine import MachineLimits, RequestMachine

MakeIdentity = Callable[..., WorkerIdentity]

TOKENS = 401
"""A prompt of a hundred blocks of four tokens, and one token more."""
BLOCK_BYTES = 64
LOWER = [Medium.CPU, Medium.DISK, Medium.REMOTE]
RATES = CostRates(
    prefill_fixed_s=0.0,
    prefill_token_s=0.001,
    tier_fixed_s=(0.0, 0.0, 0.0),
    tier_byte_s=(1e-6, 1e-6, 1e-6),
)
"""Computing the prompt takes 0.4 s, and loading it 6.4 ms."""


class Stage:
    """A machine over workers that all report what they hold."""

    def __init__(self, make_identity: MakeIdentity, disaggregation: str = "never") -> None:
        self.make_identity = make_identity
        self.fleet = Fleet(
            CostPolicy(Disaggregation(disaggregation), Random(0)),
            FleetIndex(capacity_blocks=10_000, predicted_blocks=1000, predicted_ttl_s=1000.0),
            RateBook(lambda _: RATES),
            hash_blocks=hash_blocks,
            expected_output_tokens=16,
        )
        self.machine = RequestMachine(self.fleet, MachineLimits())
        self.sequences: dict[str, int] = {}
        self.asked = 0
        self.names = hash_blocks(self.request("any"), 4)

    def request(self, name: str) -> Request:
        return Request(name, "m", token_ids(range(TOKENS)))

    def join(self, worker_id: str, role: Role = Role.BOTH, store: str = "") -> None:
        identity = replace(self.make_identity(worker_id, role), reports_kv=True, shared_tier=store)
        (fetch,) = [
            effect
            for effect in self.machine.handle(WorkerReady(worker_id, identity), 0.0)
            if isinstance(effect, FetchSnapshot)
        ]
        self.machine.handle(SnapshotPart(worker_id, fetch.attempt, KvSnapshotPart(1, 0, b"", True)), 0.0)
        self.machine.handle(SnapshotEnded(worker_id, fetch.attempt, None), 0.0)
        self.sequences[worker_id] = 0

    def hold(self, worker_id: str, medium: Medium, blocks: Iterable[int] = range(100)) -> None:
        names = array("Q", [self.names[block] for block in blocks])
        self.sequences[worker_id] += 1
        log = record(KvEventKind.STORED, medium, 0, 0, names)
        batch = StepBatch(kv=KvBatch(1, self.sequences[worker_id], log))
        self.machine.handle(StepReceived(worker_id, batch), 0.0)

    def report(self, worker_id: str, *tiers: TierLoad) -> None:
        self.machine.handle(StepReceived(worker_id, StepBatch(load=EngineLoad(tiers=tiers))), 0.0)

    def plan(self) -> Plan:
        plan = self.fleet.plan(self.request("looked at"), self.names, 0.0)
        assert plan is not None
        return plan

    def ask(self) -> tuple[str, EngineRequest]:
        self.asked += 1
        return submitted(self.machine.handle(RequestArrived(self.request(f"r{self.asked}")), 0.0))


def submitted(effects: list[Effect]) -> tuple[str, EngineRequest]:
    (found,) = [effect for effect in effects if isinstance(effect, SubmitTo)]
    return found.worker_id, found.request


@pytest.fixture
def stage(make_identity: MakeIdentity) -> Stage:
    return Stage(make_identity)


@pytest.mark.parametrize("medium", LOWER)
def test_a_request_goes_where_a_tier_holds_its_prefix_and_says_how_much(stage: Stage, medium: Medium) -> None:
    for worker_id in ("a", "b", "c", "d"):
        stage.join(worker_id)
    stage.hold("c", medium)
    worker_id, leg = stage.ask()
    assert (worker_id, leg.tier_tokens) == ("c", 400)
    plan = stage.plan()
    assert plan.decode == RoutingTarget("c")


@pytest.mark.parametrize("medium", LOWER)
def test_a_prefix_in_a_tier_that_has_proved_slow_is_computed_where_nobody_waits(
    stage: Stage, medium: Medium
) -> None:
    stage.join("a")
    stage.join("b")
    stage.hold("b", medium)
    assert stage.plan().predicted_tier_tokens[medium - 1] == 400
    for loads in range(1, 20):
        stage.report(
            "b", TierLoad(medium, loads=loads, load_s=loads * 0.9, loaded_bytes=loads * 100 * BLOCK_BYTES)
        )
    plan = stage.plan()
    assert (plan.predicted_cached_tokens, plan.predicted_tier_tokens) == (0, (0, 0, 0))


def test_what_the_device_and_each_tier_hold_is_added_up(stage: Stage) -> None:
    stage.join("a")
    stage.hold("a", Medium.DEVICE, range(10))
    stage.hold("a", Medium.CPU, range(30))
    stage.hold("a", Medium.DISK, range(25, 60))
    stage.hold("a", Medium.REMOTE, range(90))
    plan = stage.plan()
    assert (plan.predicted_cached_tokens, plan.predicted_tier_tokens) == (360, (80, 120, 120))
    assert stage.ask()[1].tier_tokens == 320


def test_what_one_worker_has_written_to_a_store_is_loaded_by_another_that_has_nothing_to_do(
    stage: Stage,
) -> None:
    for worker_id in ("a", "b"):
        stage.join(worker_id, store="redis")
    stage.join("stranger")
    stage.hold("a", Medium.REMOTE)
    where = [stage.ask() for _ in range(2)]
    assert {worker_id for worker_id, _ in where} == {"a", "b"}
    assert [leg.tier_tokens for _, leg in where] == [400, 400]


@pytest.mark.parametrize(
    ("troubled", "offered"),
    [
        ([], (80, 120, 200)),
        ([Medium.CPU], (0, 0, 0)),
        ([Medium.DISK], (80, 0, 0)),
        ([Medium.REMOTE], (80, 120, 0)),
    ],
)
def test_what_a_tier_in_trouble_adds_is_not_counted_on_nor_what_lies_behind_it(
    stage: Stage, troubled: list[Medium], offered: tuple[int, ...]
) -> None:
    stage.join("a")
    stage.hold("a", Medium.CPU, range(20))
    stage.hold("a", Medium.DISK, range(20, 50))
    stage.hold("a", Medium.REMOTE, range(50, 100))
    stage.report("a", *(TierLoad(each, readable=each not in troubled) for each in LOWER))
    plan = stage.plan()
    assert (plan.predicted_tier_tokens, plan.predicted_cached_tokens) == (offered, sum(offered))


def test_a_tier_in_trouble_that_adds_nothing_hides_nothing(stage: Stage) -> None:
    stage.join("a")
    stage.hold("a", Medium.CPU, range(20))
    stage.hold("a", Medium.DISK, range(10))
    stage.hold("a", Medium.REMOTE, range(50))
    stage.report("a", TierLoad(Medium.DISK, readable=False))
    assert stage.plan().predicted_tier_tokens == (80, 0, 120)


def test_one_workers_trouble_is_no_other_workers_and_ends_when_it_says_so(stage: Stage) -> None:
    for worker_id in ("a", "b"):
        stage.join(worker_id, store="redis")
    stage.hold("a", Medium.REMOTE)
    stage.report("a", TierLoad(Medium.REMOTE, readable=False))
    assert stage.plan().decode == RoutingTarget("b")
    stage.report("b", TierLoad(Medium.REMOTE, readable=False))
    assert stage.plan().predicted_cached_tokens == 0
    stage.report("a", TierLoad(Medium.REMOTE))
    assert (stage.plan().decode, stage.plan().predicted_cached_tokens) == (RoutingTarget("a"), 400)


def test_a_tier_that_takes_no_writes_is_counted_on_while_it_is_read(stage: Stage) -> None:
    stage.join("a")
    stage.hold("a", Medium.DISK)
    stage.report("a", TierLoad(Medium.DISK, trouble="full"))
    assert stage.plan().predicted_tier_tokens == (0, 400, 0)


def test_a_load_that_says_nothing_of_tiers_leaves_what_was_said_of_them(stage: Stage) -> None:
    stage.join("a")
    stage.hold("a", Medium.DISK)
    stage.report("a", TierLoad(Medium.DISK, blocks=100, readable=False))
    stage.report("a")
    assert stage.plan().predicted_cached_tokens == 0
    load = stage.fleet.workers["a"].load
    assert load is not None
    assert [tier.blocks for tier in load.tiers] == [100]


def test_who_prefills_is_told_what_lies_in_its_tiers_and_who_decodes_is_not(
    make_identity: MakeIdentity,
) -> None:
    stage = Stage(make_identity, "always")
    stage.join("p", Role.PREFILL)
    stage.join("d", Role.DECODE)
    stage.hold("p", Medium.CPU, range(50))
    stage.hold("d", Medium.CPU)
    worker_id, leg = stage.ask()
    assert (worker_id, leg.leg, leg.tier_tokens) == ("p", Leg.PREFILL, 200)
    end = Delta(
        leg.request_id,
        0,
        (1,),
        finish=FinishReason.LENGTH,
        last=True,
        usage=Usage(TOKENS, cached_tokens=200, tier_tokens=200, output_tokens=1),
        handoff=KvHandoff("lease", 1, 20.0, 5, b"ticket"),
    )
    worker_id, leg = submitted(stage.machine.handle(StepReceived("p", StepBatch((end,))), 0.0))
    assert (worker_id, leg.leg, leg.tier_tokens) == ("d", Leg.DECODE, 0)


@pytest.mark.parametrize(
    ("medium", "wrong"), [(Medium.CPU, True), (Medium.DISK, True), (Medium.REMOTE, False)]
)
def test_only_a_remote_store_may_have_dropped_what_was_foreseen(
    stage: Stage, medium: Medium, wrong: bool
) -> None:
    stage.join("a")
    stage.hold("a", medium)
    stage.fleet.reconcile(stage.request("r"), stage.plan(), Usage(TOKENS, cached_tokens=0), 0.0)
    status = stage.fleet.kv_status("a")
    assert status is not None
    assert (status.error_ratio > 0.0) is wrong
