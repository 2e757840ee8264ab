"""Pool sizes over a fake Ray Serve that tests step."""

from __future__ import annotations

import pytest
from tests.kit.clocks import StillClock
from tests.kit.serve import AwayError, Serve, ServedPool

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir.ports.scaler import Replica, ReplicaState
from kvasir_platform.cluster.ray.scaler import RayScaler


class Stage:
    def __init__(self, serving: int) -> None:
        self.serve, self.clock = Serve(decode=serving), StillClock()
        self.pool = self.serve.pools["decode"]
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
    assert [each.worker_id for each in stage.of(ReplicaState.SERVING)] == ["w-d1", "w-d2", "w-d3"]


def test_a_replica_that_retires_is_told_by_name_and_fewer_are_asked_for_once_it_is_gone() -> None:
    stage = Stage(3)
    stage.scaler.retire("decode", ["d2"])
    assert list(stage.serve.retired) == ["d2"]
    assert stage.states()["d2"] is ReplicaState.LEAVING
    # Serve would end another one if it were asked for fewer while this one drains.
    stage.serve.reconcile()
    assert (stage.pool.target, stage.pool.ended) == (3, [])
    stage.serve.drained("d2")
    stage.serve.reconcile()
    stage.scaler.follow()
    stage.serve.reconcile()
    assert stage.pool.target == 2
    assert sorted(stage.pool.rows) == ["d1", "d3"]
    assert stage.pool.ended == ["d4"]


def test_replicas_that_have_not_begun_are_not_waited_for() -> None:
    stage = Stage(1)
    stage.scaler.start("decode", 2)
    stage.serve.reconcile()
    starting = [each.replica_id for each in stage.of(ReplicaState.STARTING)]
    stage.scaler.retire("decode", starting)
    stage.serve.reconcile()
    assert stage.serve.retired == {}
    assert sorted(stage.pool.rows) == ["d1"]


def test_a_replacement_that_is_not_wanted_any_more_is_neither_counted_on_nor_retired() -> None:
    stage = Stage(2)
    stage.scaler.retire("decode", ["d1"])
    stage.serve.drained("d1")
    stage.serve.reconcile()
    # Fewer are asked for in this very look; Serve has not come to stop what it has begun to start.
    states = stage.states()
    assert states == {"d2": ReplicaState.SERVING, "d3": ReplicaState.LEAVING}
    stage.scaler.retire("decode", ["d3"])
    stage.serve.reconcile()
    assert (stage.pool.target, sorted(stage.pool.rows)) == (1, ["d2"])


def test_who_is_unknown_or_leaves_already_is_asked_nothing() -> None:
    stage = Stage(2)
    stage.scaler.retire("decode", ["d1", "d1", "stranger"])
    stage.scaler.retire("decode", ["d1"])
    assert stage.pool.target == 2
    stage.serve.drained("d1")
    stage.scaler.follow()
    stage.scaler.follow()
    assert stage.pool.target == 1


def test_more_than_a_pool_may_have_is_refused_with_those_that_leave_counted_and_they_go_on_leaving() -> None:
    stage = Stage(2)
    stage.pool.most = 2
    stage.scaler.retire("decode", ["d1"])
    with pytest.raises(ConfigError, match="2 replicas at most"):
        stage.scaler.start("decode", 1)
    assert stage.states() == {"d1": ReplicaState.LEAVING, "d2": ReplicaState.SERVING}
    # The bound is a smaller one by the time that it is gone.
    stage.pool.most = 0
    stage.serve.drained("d1")
    stage.scaler.follow()
    assert stage.pool.target == 1


def test_a_pool_that_comes_back_under_its_name_has_nothing_to_do_with_those_that_left_it() -> None:
    stage = Stage(2)
    stage.scaler.retire("decode", ["d1"])
    del stage.serve.pools["decode"]
    stage.scaler.follow()
    stage.serve.pools["decode"] = again = ServedPool("e", target=2)
    stage.serve.reconcile()
    stage.scaler.follow()
    assert again.target == 2


def test_a_replica_that_drains_by_itself_is_not_taken_for_one_that_starts() -> None:
    stage = Stage(2)
    stage.scaler.observe()
    stage.serve.retired["d1"] = "SIGTERM: its record is withdrawn"
    assert stage.states() == {"d1": ReplicaState.LEAVING, "d2": ReplicaState.SERVING}


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
        stage.scaler.retire("decode", ["d1"])
    stage.serve.away = False
    assert stage.serve.retired == {}
    with pytest.raises(ConfigError):
        stage.scaler.start("nowhere", 1)
