"""Sizes over Ray Serve, on a Serve of a few lines: it starts what is asked for, replaces what has ended, and
of too many ends first what has not begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir.core.membership import MemberRecord
from kvasir.ports.scaler import Replica, ReplicaState
from kvasir_platform.control.ray_scaler import RayScaler
from kvasir_platform.control.rolling import ReplicaRow


class StillClock:
    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here waits")


class AwayError(Exception):
    """What Ray would raise."""


@dataclass
class Serve:
    """One pool, `decode`. `reconcile` is a turn of Serve's controller, `come_up` ends all starts."""

    target: int = 0
    rows: dict[str, str] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)
    away: bool = False
    made: int = 0
    ended: list[str] = field(default_factory=list)

    def names(self) -> Sequence[str]:
        return ["decode"]

    def wanted(self, pool: str) -> int:
        if pool != "decode":
            raise ConfigError(f"there is no pool {pool!r}")
        return self.target

    def replicas(self, pool: str) -> list[ReplicaRow]:
        if self.away:
            raise AwayError("gone fishing")
        return [ReplicaRow(name, state) for name, state in self.rows.items()]

    def members(self) -> Mapping[str, MemberRecord]:
        running = [name for name, state in self.rows.items() if state == "RUNNING"]
        return {n: MemberRecord(f"w-{n}", "h:1", "decode", 1, 1, n) for n in running if n not in self.told}

    def ask_to_leave(self, worker_id: str, reason: str) -> None:
        self.told[worker_id.removeprefix("w-")] = reason

    def scale(self, pool: str, replicas: int) -> None:
        self.target = replicas

    def reconcile(self) -> None:
        while len(self.rows) < self.target:
            self.made += 1
            self.rows[f"r{self.made}"] = "STARTING"
        while len(self.rows) > self.target:
            starting = [name for name, state in self.rows.items() if state == "STARTING"]
            name = starting[-1] if starting else next(iter(self.rows))
            del self.rows[name]
            self.ended.append(name)

    def come_up(self) -> None:
        self.rows = dict.fromkeys(self.rows, "RUNNING")

    def drained(self, name: str) -> None:
        """The process has ended, and Serve has not put another in its place yet."""
        del self.rows[name]


class Stage:
    def __init__(self, serving: int) -> None:
        self.serve, self.clock = Serve(target=serving), StillClock()
        self.serve.reconcile()
        self.serve.come_up()
        self.scaler = RayScaler(self.serve, self.clock, (AwayError,))

    def states(self) -> dict[str, ReplicaState]:
        return {each.replica_id: each.state for each in self.scaler.observe()}

    def of(self, state: ReplicaState) -> list[Replica]:
        return [each for each in self.scaler.observe() if each.state is state]


def test_what_is_asked_for_is_to_be_seen_before_serve_has_come_to_it_and_until_it_serves() -> None:
    stage = Stage(1)
    stage.scaler.start("decode", 2)
    assert len(stage.of(ReplicaState.STARTING)) == 2
    stage.serve.reconcile()
    assert len(stage.of(ReplicaState.STARTING)) == 2
    stage.serve.come_up()
    assert [each.worker_id for each in stage.of(ReplicaState.SERVING)] == ["w-r1", "w-r2", "w-r3"]


def test_a_replica_that_retires_is_told_by_name_and_fewer_are_asked_for_once_it_is_gone() -> None:
    stage = Stage(3)
    stage.scaler.retire("decode", ["r2"])
    assert list(stage.serve.told) == ["r2"]
    assert stage.states()["r2"] is ReplicaState.LEAVING
    # Serve would end another one if it were asked for fewer while this one drains.
    stage.serve.reconcile()
    assert (stage.serve.target, stage.serve.ended) == (3, [])
    stage.serve.drained("r2")
    stage.serve.reconcile()
    stage.scaler.follow()
    stage.serve.reconcile()
    assert stage.serve.target == 2
    assert sorted(stage.serve.rows) == ["r1", "r3"]
    assert stage.serve.ended == ["r4"]


def test_replicas_that_have_not_begun_are_not_waited_for() -> None:
    stage = Stage(1)
    stage.scaler.start("decode", 2)
    stage.serve.reconcile()
    starting = [each.replica_id for each in stage.of(ReplicaState.STARTING)]
    stage.scaler.retire("decode", starting)
    stage.serve.reconcile()
    assert stage.serve.told == {}
    assert sorted(stage.serve.rows) == ["r1"]


def test_a_replacement_that_is_not_wanted_any_more_is_neither_counted_on_nor_retired() -> None:
    stage = Stage(2)
    stage.scaler.retire("decode", ["r1"])
    stage.serve.drained("r1")
    stage.serve.reconcile()
    # Fewer are asked for in this very look; Serve has not come to stop what it has begun to start.
    states = stage.states()
    assert states == {"r2": ReplicaState.SERVING, "r3": ReplicaState.LEAVING}
    stage.scaler.retire("decode", ["r3"])
    stage.serve.reconcile()
    assert (stage.serve.target, sorted(stage.serve.rows)) == (1, ["r2"])


def test_who_is_unknown_or_leaves_already_is_asked_nothing() -> None:
    stage = Stage(2)
    stage.scaler.retire("decode", ["r1", "r1", "stranger"])
    stage.scaler.retire("decode", ["r1"])
    assert stage.serve.target == 2
    stage.serve.drained("r1")
    stage.scaler.follow()
    stage.scaler.follow()
    assert stage.serve.target == 1


def test_a_replica_that_drains_by_itself_is_not_taken_for_one_that_starts() -> None:
    stage = Stage(2)
    stage.scaler.observe()
    stage.serve.told["r1"] = "SIGTERM: its record is withdrawn"
    assert stage.states() == {"r1": ReplicaState.LEAVING, "r2": ReplicaState.SERVING}


def test_states_keep_the_time_since_when_they_are_so() -> None:
    stage = Stage(1)
    stage.scaler.observe()
    stage.clock.at = 7.0
    stage.scaler.start("decode", 1)
    stage.scaler.observe()
    stage.clock.at = 9.0
    assert sorted(each.since_s for each in stage.scaler.observe()) == [0.0, 7.0]


def test_a_ray_that_does_not_answer_is_an_upstream_error_and_changes_nothing() -> None:
    stage = Stage(2)
    stage.serve.away = True
    with pytest.raises(UpstreamError, match="gone fishing"):
        stage.scaler.observe()
    with pytest.raises(UpstreamError):
        stage.scaler.retire("decode", ["r1"])
    stage.serve.away = False
    assert stage.serve.told == {}
    with pytest.raises(ConfigError):
        stage.scaler.start("nowhere", 1)
