"""The loop applies plans to a fake scaler."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvasir.config.spec.deployment import Deployment, PoolScalingSpec, PoolSpec, ScalingSpec
from kvasir.config.spec.models import ModelSpec
from kvasir.core.demand import DemandReport, PlannerReply, Traffic, WorkerStats
from kvasir.core.errors import ConfigError, UpstreamError
from kvasir.core.requests import Role
from kvasir.ports.scaler import Replica, ReplicaState
from kvasir_platform.planner.loop import ScalingLoop
from kvasir_platform.planner.starts import Starts

STARTING, SERVING, LEAVING = ReplicaState
STEP_S = 10.0


class Owner:
    """kvasir.ports.scaler.Scaler: what is asked for is noted; nothing comes up before the test says so. Of no
    pool are there more than `most`. What retires is gone at once, or when the test says so if it `drains`."""

    def __init__(self, most: int, **pools: int) -> None:
        self.most = most
        self.drains = False
        self.replicas: list[Replica] = []
        self.calls: list[tuple[object, ...]] = []
        self.now = 0.0
        self.refuses: set[str] = set()
        self.meanwhile: Callable[[], object] = lambda: None
        self._made = 0
        for pool, count in pools.items():
            self._make(pool, count, SERVING)

    def _make(self, pool: str, count: int, state: ReplicaState) -> None:
        for _ in range(count):
            self._made += 1
            self.replicas.append(Replica(f"r{self._made}", pool, state, self.now, f"w{self._made}"))

    def _asked(self, what: str) -> None:
        if what in self.refuses:
            raise UpstreamError("Serve does not answer", code="not_ready")

    def observe(self) -> Sequence[Replica]:
        self._asked("observe")
        self.meanwhile()
        return list(self.replicas)

    def start(self, pool: str, count: int) -> None:
        self._asked("start")
        if self.count(pool) + count > self.most:
            raise ConfigError(f"{pool} can have {self.most} replicas at most")
        self.calls.append(("start", pool, count))
        self._make(pool, count, STARTING)

    def retire(self, pool: str, replica_ids: Sequence[str]) -> None:
        self._asked("retire")
        self.calls.append(("retire", pool, *replica_ids))
        self.replicas = [
            replace(each, state=LEAVING) if each.replica_id in replica_ids else each for each in self.replicas
        ]
        if not self.drains:
            self.drained()

    def drained(self) -> None:
        """All that leave are gone."""
        self.replicas = [each for each in self.replicas if each.state is not LEAVING]

    def comes_up(self) -> None:
        """All that start serve from now on."""
        self.replicas = [
            Replica(each.replica_id, each.pool, SERVING, self.now, each.worker_id)
            if each.state is STARTING
            else each
            for each in self.replicas
        ]

    def dies(self, worker_id: str) -> None:
        self.replicas = [each for each in self.replicas if each.worker_id != worker_id]

    def count(self, pool: str) -> int:
        return sum(each.pool == pool for each in self.replicas)


class Stage:
    """One deployment and one router, whose requests keep a prefill worker busy for a second each."""

    def __init__(
        self,
        begin: tuple[int, int] = (4, 2),
        bounds: tuple[int, int] = (1, 20),
        pins: dict[str, int] | None = None,
        **scaling: Any,
    ) -> None:
        self.owner = Owner(bounds[1], prefill=begin[0], decode=begin[1])
        pools = tuple(
            PoolSpec(
                name=role.value,
                role=role,
                replicas=count,
                scaling=PoolScalingSpec(min=bounds[0], max=bounds[1]),
            )
            for role, count in zip((Role.PREFILL, Role.DECODE), begin, strict=True)
        )
        self.spec = Deployment(
            model=ModelSpec(source="kvasir-tiny", served_name="m"),
            pools=pools,
            scaling=ScalingSpec.model_validate({"start_timeout_s": 60.0} | scaling),
        )
        self.events: list[dict[str, object]] = []
        self.rolling: set[str] = set()
        self.loop = self._made(pins)
        self.counts = Traffic()
        self.sequence = 0
        self.now = 0.0
        self.word = PlannerReply("", False, {}, {}, {})

    def _made(self, pins: dict[str, int] | None, before: ScalingLoop | None = None) -> ScalingLoop:
        return ScalingLoop(
            self.spec,
            self.owner,
            epoch="now",
            tell=lambda _event, **details: self.events.append(details),
            rolling=self.rolling.__contains__,
            pins=pins,
            before=before,
        )

    def renew(self, **fields: Any) -> None:
        """Go on by another spec of the same deployment."""
        self.spec = self.spec.model_copy(update=fields)
        self.loop = self._made(None, self.loop)

    def hear(
        self, requests: int = 0, output: int = 100, hits: dict[str, int] | None = None, **news: int
    ) -> PlannerReply:
        self.sequence += 1
        came = Traffic(
            arrived=requests,
            ended=requests,
            prompt_tokens=1000 * requests,
            computed_tokens=1000 * requests,
            computed_squares=1000**2 * requests,
            output_tokens=output * requests,
            judged=requests,
            met=requests,
        )
        self.counts = self.counts.plus(came)
        known = {name: getattr(self.counts, name) for name in Traffic.__slots__} | news
        workers = tuple(
            WorkerStats(
                worker_id=each.worker_id,
                pool=each.pool,
                role=Role(each.pool),
                serving=True,
                prefill_fixed_s=0.0,
                prefill_token_s=0.001,
                step_fixed_s=0.01,
                step_stream_s=0.0005,
                hit_tokens=(hits or {}).get(each.worker_id, 0),
                kv_tokens=10**6,
                used_tokens=0,
                streams=0,
            )
            for each in self.owner.replicas
            if each.state is SERVING
        )
        report = DemandReport("router", "now", self.sequence, {"m": Traffic(**known)}, workers)
        self.word = self.loop.take(report, self.now)
        return self.word

    def look(self, requests: int = 0, *, hears: bool = True, **news: Any) -> list[tuple[object, ...]]:
        """What one look asks of the owner."""
        self.now += STEP_S
        self.owner.now = self.now
        self.owner.calls.clear()
        if hears:
            self.hear(requests, **news)
        self.loop.step(self.now)
        return list(self.owner.calls)

    def run(
        self, requests: int, looks: int, *, comes_up: bool = True, **news: Any
    ) -> list[tuple[object, ...]]:
        """What so many looks alike ask of the owner."""
        asked: list[tuple[object, ...]] = []
        for _ in range(looks):
            asked += self.look(requests, **news)
            if comes_up:
                self.owner.comes_up()
        return asked

    @property
    def explain(self) -> dict[str, Any]:
        return self.loop.explain(self.now)

    def pool(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in self.explain["pools"] if each["pool"] == name)
        return found


def starts(calls: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    return [call for call in calls if call[0] == "start"]


# -- what is done ------------------------------------------------------------------------------------


def test_before_any_router_was_heard_nothing_is_changed() -> None:
    stage = Stage()
    assert [stage.look(hears=False) for _ in range(3)] == [[], [], []]
    assert stage.explain["frozen"] == "no router has reported yet"


def test_pools_grow_and_shrink_with_their_load_and_say_why() -> None:
    stage = Stage()
    asked = stage.run(80, 60)
    assert stage.owner.count("prefill") >= 9
    assert starts(asked)
    assert "busy, up to" in stage.pool("prefill")["why"]
    asked = stage.run(5, 120)
    assert {call[0] for call in asked} >= {"retire"}
    assert stage.owner.count("prefill") <= 5
    assert all(event["done"] for event in stage.events if "done" in event)


def test_between_two_decisions_nothing_is_looked_at() -> None:
    stage = Stage()
    stage.look(5)
    stage.owner.refuses.add("observe")
    stage.loop.step(stage.now + STEP_S / 2)
    assert stage.explain["frozen"] is None


def test_whether_anything_is_on_its_way_is_told() -> None:
    stage = Stage()
    stage.hear()
    assert not stage.loop.step(0.0)
    stage.loop.pin("prefill", 5)
    stage.hear()
    stage.loop.step(10.0)
    stage.loop.step(20.0)
    assert stage.owner.count("prefill") == 5
    assert stage.loop.step(30.0)


def test_the_cache_that_saves_the_least_goes() -> None:
    stage = Stage(begin=(4, 1), flips=False)
    hits: dict[str, int] = {}
    gone: list[tuple[object, ...]] = []
    while not gone:
        there = [each.worker_id for each in stage.owner.replicas if each.pool == "prefill"]
        hits = {name: hits.get(name, 0) + 1000 * (name != "w3") for name in there}
        gone = [call for call in stage.look(12, hits=hits) if call[:2] == ("retire", "prefill")]
        stage.owner.comes_up()
    assert gone == [("retire", "prefill", "r3")]


def test_the_number_of_a_pool_that_is_rolled_is_left_alone() -> None:
    stage = Stage()
    stage.rolling.add("prefill")
    asked = stage.run(80, 30)
    assert {call[1] for call in starts(asked)} <= {"decode"}
    stage.rolling.clear()
    assert ("prefill",) in {call[1:2] for call in starts(stage.run(80, 5))}


def test_no_more_are_started_than_there_may_be() -> None:
    stage = Stage(bounds=(1, 6))
    stage.run(500, 60)
    assert stage.owner.count("prefill") == 6


# -- what cannot be seen -----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["observe", "start"])
def test_an_owner_that_cannot_be_asked_is_asked_again_at_the_next_decision(what: str) -> None:
    stage = Stage()
    stage.run(30, 30)
    stage.owner.refuses.add(what)
    have = stage.owner.count("prefill")
    for _ in range(3):
        assert starts(stage.look(150)) == []
    assert "Serve does not answer" in stage.explain["frozen"]
    assert stage.owner.count("prefill") == have
    assert not any(
        act["what"] == "start" and act["done"] and act["ago_s"] < 30 for act in stage.explain["acts"]
    )
    stage.owner.refuses.clear()
    assert starts(stage.run(150, 3))
    assert stage.explain["frozen"] is None


def test_while_routers_are_silent_nothing_is_changed_and_it_is_said_once() -> None:
    stage = Stage()
    stage.run(30, 30)
    stage.events.clear()
    # The first is still near enough to the last word.
    stage.look(hears=False)
    assert [stage.look(hears=False) for _ in range(10)] == [[]] * 10
    assert [event["frozen"] for event in stage.events if "frozen" in event] == [
        "no report from router for 20 s"
    ]


@pytest.mark.parametrize("looks", [4, 20], ids=["for a moment", "until it is forgotten"])
def test_what_came_while_routers_were_silent_is_not_taken_for_a_crowd(looks: int) -> None:
    stage = Stage()
    stage.run(30, 60)
    have = stage.owner.count("prefill")
    for _ in range(looks):
        stage.look(hears=False)
    asked = stage.look(30 * looks) + stage.run(30, 2)
    assert starts(asked) == []
    assert stage.owner.count("prefill") == have
    assert stage.pool("prefill")["load"] == pytest.approx(3.0)


def test_an_interval_without_a_word_is_not_taken_for_one_without_a_request() -> None:
    stage = Stage()
    stage.run(30, 60)
    for requests, hears in ((0, False), (60, True)):
        stage.look(requests, hears=hears)
        assert stage.explain["frozen"] is None
        assert stage.pool("prefill")["load"] == pytest.approx(3.0)


def test_another_planners_epoch_is_answered_and_not_counted() -> None:
    stage = Stage()
    told = DemandReport("router", "before", 1, {"m": Traffic(arrived=10**6)})
    word = stage.loop.take(told, 0.0)
    assert (word.epoch, word.accepted) == ("now", False)
    stage.look(hears=False)
    assert stage.explain["frozen"] == "no router has reported yet"
    assert stage.hear().accepted


# -- starts ------------------------------------------------------------------------------------------


def test_a_start_takes_what_the_last_ones_took() -> None:
    found = Starts(120.0)
    assert found.typical_s("a", ["a", "b"]) == 120.0
    for number, took in enumerate([30.0, 50.0, 40.0]):
        name, at = f"r{number}", 1000.0 * number
        found.look([Replica(name, "a", STARTING, at)], at + 1)
        found.look([Replica(name, "a", SERVING, at + took)], at + took)
    assert found.typical_s("a", []) == 40.0
    assert found.typical_s("b", ["b", "a"]) == 40.0


def test_a_start_that_was_broken_off_is_no_measure() -> None:
    found = Starts(120.0)
    found.look([Replica("r", "a", STARTING, 0.0)], 1.0)
    found.look([], 5.0)
    found.look([Replica("other", "a", SERVING, 9.0)], 9.0)
    assert found.typical_s("a", []) == 120.0


def test_what_does_not_come_up_is_not_asked_for_again() -> None:
    stage = Stage()
    stage.run(30, 30)
    stage.run(60, 8, comes_up=False)
    asked = stage.owner.count("prefill")
    assert asked > 4
    # Of the pool whose starts last, that is.
    again = starts(stage.run(120, 30, comes_up=False))
    assert "prefill" not in {call[1] for call in again}
    assert "start too slowly" in stage.pool("prefill")["why"]
    stage.owner.comes_up()
    assert starts(stage.run(120, 3))


# -- sleep -------------------------------------------------------------------------------------------


def asleep(most: int = 4, *, drains: bool = False) -> Stage:
    """The last replicas have been told to leave, and no decision has been made since."""
    stage = Stage(bounds=(0, most), begin=(1, 1), idle_s=60.0)
    stage.owner.drains = drains
    stage.run(5, 5)
    for _ in range(12):
        if any(each.state is SERVING for each in stage.owner.replicas):
            stage.look()
    assert all(each.state is LEAVING for each in stage.owner.replicas) if drains else not stage.owner.replicas
    return stage


def test_a_model_that_is_asked_for_is_woken_at_once_and_once() -> None:
    stage = asleep()
    assert stage.hear().ready_in_s == {"m": 120.0}
    stage.owner.calls.clear()
    stage.hear(parked=1, waiting=1, in_flight=1)
    for _ in range(3):
        stage.loop.step(stage.now + 0.1)
    assert stage.owner.calls == [("start", "prefill", 1), ("start", "decode", 1)]
    assert stage.hear(parked=1).ready_in_s == {"m": pytest.approx(120.0, abs=0.5)}


def test_a_request_that_was_turned_away_at_once_wakes_its_model_too() -> None:
    """Where a start takes longer than requests may wait, none of them waits."""
    stage = asleep()
    stage.owner.calls.clear()
    stage.hear(arrived=stage.counts.arrived + 1)
    stage.loop.step(stage.now + 0.1)
    assert stage.owner.calls == [("start", "prefill", 1), ("start", "decode", 1)]


def test_a_request_that_is_told_of_while_a_decision_looks_at_the_pools_wakes_its_model() -> None:
    stage = asleep()
    stage.hear()
    stage.owner.calls.clear()
    told = iter([1])  # the first look only
    stage.owner.meanwhile = lambda: [stage.hear(count, parked=count, in_flight=count) for count in told]
    stage.loop.step(stage.now + STEP_S)
    # The decision itself may ask for more.
    assert stage.owner.calls[:2] == [("start", "prefill", 1), ("start", "decode", 1)]
    assert [act["pool"] for act in stage.explain["acts"] if act["what"] == "wake"] == ["prefill", "decode"]


def test_a_wake_that_was_lost_is_repeated_after_a_while() -> None:
    stage = asleep()
    stage.hear(parked=1, in_flight=1)
    stage.loop.step(stage.now + 0.1)
    stage.owner.replicas.clear()
    stage.owner.calls.clear()
    stage.run(0, 5, comes_up=False, parked=1, in_flight=1)
    assert ("start", "prefill", 1) in stage.owner.calls or stage.owner.count("prefill") >= 1


def test_a_model_whose_last_replicas_still_leave_is_woken_when_they_are_gone() -> None:
    """They hold the pods that the new ones would take."""
    stage = asleep(1, drains=True)
    stage.owner.calls.clear()
    stage.hear(parked=1, in_flight=1)
    for _ in range(3):
        stage.loop.step(stage.now + 0.1)
    assert stage.owner.calls == []
    stage.owner.drained()
    stage.loop.step(stage.now + 0.2)
    assert stage.owner.calls == [("start", "prefill", 1), ("start", "decode", 1)]


def test_a_model_pinned_to_nothing_is_not_woken() -> None:
    stage = asleep()
    for pool in ("prefill", "decode"):
        stage.loop.pin(pool, 0)
    stage.owner.calls.clear()
    assert stage.run(0, 3, parked=1, in_flight=1) == []


@pytest.mark.parametrize("pools", [("prefill",), ("decode",), ("prefill", "decode")])
def test_no_request_is_told_to_wait_for_a_pool_that_is_pinned_to_nothing(pools: tuple[str, ...]) -> None:
    stage = asleep()
    assert stage.hear().ready_in_s
    for pool in pools:
        stage.loop.pin(pool, 0)
    stage.run(0, 3, comes_up=False, parked=1, in_flight=1)
    assert stage.hear().ready_in_s == {}
    for pool in pools:
        stage.loop.pin(pool, None)
    stage.run(0, 1, comes_up=False, parked=1, in_flight=1)
    assert stage.hear().ready_in_s


def test_no_request_is_told_to_wait_where_a_start_is_only_advised_unless_somebody_pins_it() -> None:
    stage = Stage(bounds=(0, 4), begin=(0, 0), mode="advise")
    assert stage.run(0, 3, parked=1, in_flight=1) == []
    assert stage.hear().ready_in_s == {}
    assert ("wake", False) in {(act["what"], act["done"]) for act in stage.explain["acts"]}
    for pool in ("prefill", "decode"):
        stage.loop.pin(pool, 1)
    stage.run(0, 1, comes_up=False)
    assert stage.hear().ready_in_s


def test_one_part_that_is_missing_is_all_that_is_started() -> None:
    stage = asleep()
    stage.owner._make("prefill", 1, SERVING)
    stage.hear(parked=1, in_flight=1)
    stage.owner.calls.clear()
    stage.loop.step(stage.now + 0.1)
    assert stage.owner.calls == [("start", "decode", 1)]


def test_replicas_that_leave_count_until_they_are_gone() -> None:
    stage = Stage(begin=(6, 2), bounds=(1, 6))
    stage.owner.drains = True
    stage.run(2, 60)
    assert LEAVING in {each.state for each in stage.owner.replicas if each.pool == "prefill"}
    stage.run(120, 20)
    assert stage.owner.count("prefill") == 6
    stage.owner.drained()
    stage.run(120, 2)
    assert stage.owner.count("prefill") == 6
    assert all(each.state is SERVING for each in stage.owner.replicas if each.pool == "prefill")


def test_a_size_that_the_owner_refuses_is_told_and_nothing_ends_for_it() -> None:
    stage = Stage()
    stage.owner.most = 5
    stage.run(120, 20)
    assert "the scaler rejected a size: prefill can have 5 replicas at most" in stage.explain["frozen"]
    stage.owner.most = 20
    stage.run(120, 2)
    assert stage.explain["frozen"] is None
    assert stage.owner.count("prefill") > 5


# -- flips -------------------------------------------------------------------------------------------


def lent(begin: tuple[int, int] = (8, 1)) -> Stage:
    """Prompts get few, answers long: prefill workers decode."""
    stage = Stage(begin=begin, window_s=600.0)
    stage.run(50, 10)
    stage.run(5, 40, output=30_000)
    assert stage.hear().roles
    return stage


def test_workers_are_lent_before_any_is_started_and_routers_are_told() -> None:
    stage = Stage(begin=(8, 1), window_s=600.0)
    stage.run(50, 10)
    served = stage.pool("prefill")["serving"]
    while not (roles := stage.hear().roles):
        assert not starts(stage.look(5, output=30_000))
    assert set(roles.values()) == {Role.DECODE}
    assert stage.pool("decode")["serving"] == 1 + len(roles)
    assert stage.pool("prefill")["serving"] == served - len(roles)


def test_one_that_was_lent_and_is_gone_is_not_told_of_any_more() -> None:
    stage = lent()
    gone = min(stage.word.roles)
    stage.owner.dies(gone)
    stage.look(5, output=30_000)
    assert gone not in stage.hear().roles


def test_no_pool_lends_fewer_than_its_least() -> None:
    stage = Stage(begin=(8, 5), bounds=(5, 20), window_s=600.0)
    stage.run(20, 10)
    stage.run(5, 40, output=30_000)
    assert stage.pool("prefill")["serving"] >= 5
    assert len(stage.hear().roles) <= 3


def test_pinned_pools_neither_lend_nor_borrow() -> None:
    stage = Stage(begin=(8, 1), window_s=600.0, pins={"prefill": 8})
    asked = stage.run(50, 10) + stage.run(5, 40, output=30_000)
    assert stage.hear().roles == {}
    assert starts(asked)


def test_what_pools_do_not_share_is_not_lent() -> None:
    stage = Stage(begin=(8, 1), window_s=600.0, flips=False)
    asked = stage.run(50, 10) + stage.run(5, 40, output=30_000)
    assert starts(asked)
    assert stage.hear().roles == {}


# -- who decides -------------------------------------------------------------------------------------


def test_advice_asks_nothing_of_the_owner_and_is_told_once_for_each_pool() -> None:
    stage = Stage(mode="advise", begin=(20, 20))
    assert stage.run(5, 60) == []
    assert {act["pool"] for act in stage.explain["acts"]} == {"prefill", "decode"}
    told = [(event["pool"], event["what"], event["count"]) for event in stage.events if "pool" in event]
    for pool in ("prefill", "decode"):
        own = [each for each in told if each[0] == pool]
        assert all(one != other for one, other in itertools.pairwise(own))
    assert not any(act["done"] for act in stage.explain["acts"])
    assert stage.hear().pools["prefill"].desired < 20


@pytest.mark.parametrize(
    ("pool", "size", "why"),
    [
        ("prefill", 21, r"0 to 20 replicas \(scaling.max\), not 21"),
        ("prefill", -1, "not -1"),
        ("embed", 1, "embed has no scaling"),
        ("embed", None, "embed has no scaling"),
    ],
)
def test_a_pin_that_cannot_be_is_refused_and_changes_nothing(pool: str, size: int | None, why: str) -> None:
    stage = Stage()
    with pytest.raises(ConfigError, match=why):
        stage.loop.pin(pool, size)
    assert stage.loop.pins == {}


def test_a_pin_is_seen_to_at_once_kept_and_taken_away() -> None:
    stage = Stage(pins={"decode": 3})
    stage.run(30, 10)
    assert stage.owner.count("decode") == 3
    stage.loop.pin("decode", 0)
    stage.hear(10)
    stage.loop.step(stage.now + 1.0)
    assert stage.owner.count("decode") == 0
    assert stage.pool("decode")["because"] == ["pinned to 0"]
    stage.loop.pin("decode", None)
    stage.run(30, 3)
    assert stage.pool("decode")["serving"] >= 1
    assert stage.loop.pins == {}


def test_another_spec_is_planned_by_with_what_was_learned_under_the_last_one() -> None:
    stage = Stage()
    stage.run(50, 3)
    careful = stage.pool("prefill")["margin"]
    stage.run(50, 900)
    learned = stage.pool("prefill")["margin"]
    assert learned < careful
    prefill, decode = stage.spec.pools
    stage.renew(pools=(prefill.model_copy(update={"scaling": PoolScalingSpec(min=1, max=3)}), decode))
    stage.run(50, 3)
    assert stage.pool("prefill")["margin"] == learned
    assert stage.owner.count("prefill") <= 3
    assert "limited to scaling.max 3" in " ".join(stage.pool("prefill")["because"])
    # Of other pools nothing is known.
    both = PoolSpec(name="prefill", role=Role.BOTH, scaling=PoolScalingSpec(min=1, max=20))
    stage.renew(pools=(both,))
    stage.run(50, 3)
    assert stage.pool("prefill")["margin"] == careful


def test_a_new_planner_goes_on_with_the_roles_that_routers_have() -> None:
    """Otherwise lent workers would go home at once, and their work with them."""
    deployment = Deployment(
        pools=(
            PoolSpec(name="prefill", role=Role.PREFILL, replicas=2, scaling=PoolScalingSpec(min=1, max=4)),
            PoolSpec(name="decode", role=Role.DECODE, scaling=PoolScalingSpec(min=1, max=4)),
        )
    )
    lent = WorkerStats("prefill-1", "prefill", Role.DECODE, True, 0.0, 1e-4, 0.01, 1e-3, 0, 1000, 0, 0)
    home = WorkerStats("prefill-2", "prefill", Role.PREFILL, True, 0.0, 1e-4, 0.01, 1e-3, 0, 1000, 0, 0)
    loop = ScalingLoop(deployment, Nobody(), epoch="new", tell=lambda _name, **_details: None)
    for sequence, epoch in enumerate(("old", "new", "new"), 1):
        word = loop.take(DemandReport("router", epoch, sequence, {}, (lent, home)), float(sequence))
        assert word.accepted == (epoch == "new")
        assert word.roles == ({"prefill-1": Role.DECODE} if word.accepted else {})


class Nobody:
    """Owns no pool."""

    def observe(self) -> list[Replica]:
        return []

    def start(self, pool: str, count: int) -> None:
        raise AssertionError(pool)

    def retire(self, pool: str, replica_ids: Sequence[str]) -> None:
        raise AssertionError(pool)
