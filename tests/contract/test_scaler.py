"""Contract of scalers: replicas start as requested, and only the named ones stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import pytest
from tests.kit.serve import AwayError, Serve

from kvasir.core.errors import ConfigError
from kvasir.core.requests import Role
from kvasir.ports.scaler import Replica, ReplicaState, Scaler
from kvasir_platform.cluster.ray.scaler import RayScaler
from kvasir_platform.sim.scaling.days import RequestShape
from kvasir_platform.sim.scaling.fleet import Kind, ScaledFleet, SimSlo

STARTING, SERVING, LEAVING = ReplicaState
BEGIN = {"prefill": 3, "decode": 2}


class Stage(Protocol):
    """A scaler of a pool `prefill` of three replicas and a pool `decode` of two, which all serve. Its owner
    does what it was asked for when `settle` is called, and nothing before."""

    scaler: Scaler

    def settle(self) -> None:
        """What was asked for is done: starts and ends are over."""

    def occupy(self) -> None:
        """Every decode replica has a stream, that does not end until `release`."""

    def release(self) -> None:
        """Those streams end."""

    def clock(self) -> float:
        """The time that `since_s` is a reading of."""


class Simulated:
    """In virtual time, which passes when it is told to."""

    def __init__(self) -> None:
        kind = Kind(0.01, 1e-5, 0.0, 0.01, 0.0, 0.0, 10_000, 8, start_s=60.0)
        pools = {"prefill": (Role.PREFILL, BEGIN["prefill"]), "decode": (Role.DECODE, BEGIN["decode"])}
        # A stream of each takes a hundred seconds.
        streams = [RequestShape(100, 100, 9_900)] * BEGIN["decode"]
        self.fleet = ScaledFleet(kind, SimSlo(1.0, 1.0), pools, [1000.0] * len(streams), streams)
        self.scaler: Scaler = self.fleet

    def settle(self) -> None:
        self.fleet.run(self.fleet.now + 61.0)

    def occupy(self) -> None:
        self.fleet.run(1001.0)

    def release(self) -> None:
        self.fleet.run(self.fleet.now + 100.0)

    def clock(self) -> float:
        return self.fleet.now


class OverServe:
    """Ray Serve's adapter. The real Serve is under it in the end-to-end tests; here it does in no time what
    takes it seconds."""

    def __init__(self) -> None:
        self.serve, self.at = Serve(**BEGIN), 0.0
        self.busy: set[str] = set()
        self.scaler: Scaler = RayScaler(self.serve, self, (AwayError,))

    def settle(self) -> None:
        self.at += 60.0
        for name in set(self.serve.retired) - self.busy:
            self.serve.drained(name)
        self.serve.reconcile()
        self.scaler.observe()
        self.serve.reconcile()
        self.serve.come_up()
        self.scaler.observe()

    def occupy(self) -> None:
        self.busy = set(self.serve.pools["decode"].rows)

    def release(self) -> None:
        self.busy = set()

    def clock(self) -> float:
        return self.at

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(f"nothing here waits for {seconds} s")


MAKERS: Sequence[Callable[[], Stage]] = [Simulated, OverServe]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def stage(request: pytest.FixtureRequest) -> Stage:
    made: Stage = request.param()
    return made


def states(stage: Stage, pool: str) -> Counter[ReplicaState]:
    return Counter(each.state for each in stage.scaler.observe() if each.pool == pool)


def ids(stage: Stage, pool: str, state: ReplicaState = SERVING) -> list[str]:
    return [each.replica_id for each in stage.scaler.observe() if (each.pool, each.state) == (pool, state)]


def kept(seen: Sequence[Replica]) -> set[tuple[str, str, ReplicaState]]:
    return {(each.replica_id, each.pool, each.state) for each in seen}


def test_every_replica_of_every_pool_is_seen_once(stage: Stage) -> None:
    seen = stage.scaler.observe()
    assert Counter(each.pool for each in seen) == BEGIN
    assert {each.state for each in seen} == {SERVING}
    assert len({each.replica_id for each in seen}) == len({each.worker_id for each in seen}) == len(seen)
    assert all(each.worker_id for each in seen)
    assert all(each.since_s <= stage.clock() for each in seen)


def test_as_many_start_as_were_asked_for_and_then_serve(stage: Stage) -> None:
    before = kept(stage.scaler.observe())
    stage.scaler.start("prefill", 2)
    assert states(stage, "prefill") == {SERVING: 3, STARTING: 2}
    assert before < kept(stage.scaler.observe())
    stage.settle()
    assert states(stage, "prefill") == {SERVING: 5}
    assert states(stage, "decode") == {SERVING: 2}
    assert before < kept(stage.scaler.observe())


def test_what_starts_is_in_its_state_since_it_was_asked_for_and_then_since_it_serves(stage: Stage) -> None:
    stage.settle()
    served, asked_s = ids(stage, "decode"), stage.clock()
    stage.scaler.start("decode", 1)
    (starting,) = [each for each in stage.scaler.observe() if each.state is STARTING]
    assert starting.since_s == pytest.approx(asked_s, abs=1.0)
    stage.settle()
    (serving,) = [
        each for each in stage.scaler.observe() if each.pool == "decode" and each.replica_id not in served
    ]
    assert asked_s < serving.since_s <= stage.clock()
    assert serving.worker_id


def test_starts_that_were_asked_for_one_after_the_other_all_come(stage: Stage) -> None:
    stage.scaler.start("prefill", 1)
    stage.scaler.start("prefill", 2)
    stage.scaler.start("decode", 1)
    stage.settle()
    assert (states(stage, "prefill"), states(stage, "decode")) == ({SERVING: 6}, {SERVING: 3})


def test_those_that_are_named_retire_and_no_other(stage: Stage) -> None:
    first, second, third = ids(stage, "prefill")
    stage.scaler.retire("prefill", [second])
    assert sorted(ids(stage, "prefill")) == sorted([first, third])
    stage.settle()
    assert [each.replica_id for each in stage.scaler.observe() if each.pool == "prefill"] == [first, third]
    assert states(stage, "decode") == {SERVING: 2}


def test_what_was_retired_does_not_come_back_when_others_start(stage: Stage) -> None:
    gone, *_ = ids(stage, "prefill")
    stage.scaler.retire("prefill", [gone])
    stage.scaler.start("prefill", 2)
    stage.settle()
    assert gone not in ids(stage, "prefill")
    assert states(stage, "prefill") == {SERVING: 4}


def test_a_replica_ends_its_streams_before_it_goes(stage: Stage) -> None:
    stage.occupy()
    gone, stays = ids(stage, "decode")
    stage.scaler.retire("decode", [gone])
    assert ids(stage, "decode", LEAVING) == [gone]
    stage.settle()
    assert ids(stage, "decode", LEAVING) == [gone]
    stage.release()
    stage.settle()
    assert states(stage, "decode") == {SERVING: 1}
    assert ids(stage, "decode") == [stays]


def test_one_that_has_not_begun_to_serve_does_not_start(stage: Stage) -> None:
    stage.scaler.start("decode", 2)
    served = set(ids(stage, "decode"))
    stage.scaler.retire("decode", ids(stage, "decode", STARTING)[:1])
    # Which of them, the owner may not be able to choose: none has anything to lose.
    assert states(stage, "decode") == {SERVING: 2, STARTING: 1}
    for _ in range(2):
        stage.settle()
        assert states(stage, "decode") == {SERVING: 3}
    assert served < set(ids(stage, "decode"))


def test_what_is_asked_for_twice_is_done_once(stage: Stage) -> None:
    stage.occupy()
    gone, _ = ids(stage, "decode")
    for _ in range(2):
        stage.scaler.retire("decode", [gone, gone])
    assert states(stage, "decode") == {SERVING: 1, LEAVING: 1}
    (leaving,) = [each for each in stage.scaler.observe() if each.state is LEAVING]
    stage.settle()
    stage.scaler.retire("decode", [gone])
    (still,) = [each for each in stage.scaler.observe() if each.state is LEAVING]
    assert still.since_s == pytest.approx(leaving.since_s, abs=1.0)
    stage.release()
    stage.settle()
    stage.scaler.retire("decode", [gone])
    stage.settle()
    assert states(stage, "decode") == {SERVING: 1}


def test_those_that_are_not_known_or_of_another_pool_are_ignored(stage: Stage) -> None:
    before = kept(stage.scaler.observe())
    stage.scaler.retire("prefill", ["nobody", *ids(stage, "decode")])
    stage.scaler.retire("decode", [])
    stage.scaler.retire("embed", ["nobody"])
    stage.settle()
    assert kept(stage.scaler.observe()) == before


def test_the_last_replicas_of_a_pool_may_go_and_come_back(stage: Stage) -> None:
    stage.scaler.retire("decode", ids(stage, "decode"))
    stage.settle()
    assert states(stage, "decode") == {}
    stage.scaler.start("decode", 1)
    stage.settle()
    assert states(stage, "decode") == {SERVING: 1}


def test_a_pool_that_does_not_exist_cannot_start_anything(stage: Stage) -> None:
    before = kept(stage.scaler.observe())
    with pytest.raises(ConfigError, match="embed"):
        stage.scaler.start("embed", 1)
    stage.settle()
    assert kept(stage.scaler.observe()) == before
