"""Pods of another template are released when they are free, and a roll without available pods is given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import pytest

from kvasir_platform.cluster.ray.pod_templates import PodRow
from kvasir_platform.cluster.ray.pool_records import PoolRecord
from kvasir_platform.cluster.ray.pool_rolls import LONGEST_WAIT_S, POD_START_S, UNREAD_S, PoolRolls
from kvasir_platform.cluster.ray.pool_status import ReplicaRow

OLD, NEW = "0123456789ab", "ba9876543210"
DRAIN_S = 60.0


@dataclass(frozen=True)
class Status:
    pool: str = "decode"
    ready: bool = False
    failed: bool = False
    message: str = ""
    gave_up: bool = False
    remedy: str = ""


class Pools:
    """Two replicas of `decode` in pods a and b, which a changed template must replace."""

    def __init__(self) -> None:
        before = PoolRecord(1, 2, 2, "spec", "{}", OLD)
        self.kept = before.follow(template=NEW)
        self.template = NEW
        self.rows = [PodRow("a", "decode", OLD, free=False), PodRow("b", "decode", OLD, free=False)]
        self.serving = ["one", "two"]
        self.told = Status()
        self.calls: list[str] = []
        self.answers = True
        self.beside = False

    def names(self) -> Sequence[str]:
        return ["decode"]

    def record(self, pool: str) -> PoolRecord:
        return self.kept

    def desired(self, pool: str) -> str:
        return self.template

    def pods(self) -> Sequence[PodRow]:
        return self.rows

    def replicas(self, pool: str) -> list[ReplicaRow]:
        return [ReplicaRow("starting", "STARTING"), *(ReplicaRow(name, "RUNNING") for name in self.serving)]

    def status(self) -> Sequence[Status]:
        return [Status(pool="prefill", failed=True), self.told]

    def let_go(self, pod: PodRow) -> bool:
        self.calls.append(f"let_go {pod.node_id}")
        return self.answers

    def confirm(self, pool: str) -> None:
        self.calls.append("confirm")
        self.kept = replace(self.kept, before=None)

    def settle(self, pool: str) -> bool:
        self.calls.append("settle")
        if self.kept.before is None:
            return False
        self.kept = self.kept.before
        return True

    def stop_first(self, pool: str) -> bool:
        beside, self.beside = self.beside, False
        return beside

    def start_again(self, pool: str) -> None:
        self.calls.append("start_again")
        self.kept = replace(self.kept, version=self.kept.version + 1)

    def retry(self, pool: str) -> None:
        self.calls.append("retry")
        self.kept = self.kept.follow(template=self.template)


class Scene:
    """A control process that checks pools, with a clock that the test controls."""

    def __init__(self) -> None:
        self.pools = Pools()
        self.at = 0.0
        self.events: list[tuple[str, dict[str, object]]] = []
        self.revision = 2
        self.rolls = self.control()

    def control(self) -> PoolRolls:
        """Another control process."""
        return PoolRolls(
            self.pools,
            self,
            self.tell,
            drain_s=DRAIN_S,
            revision=lambda: self.revision,
            wall=self.wall,
        )

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.at)

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here waits")

    def tell(self, event: str, **details: object) -> None:
        self.events.append((event, details))

    def pod(self, name: str, template: str, *, free: bool) -> None:
        """Set the state of a pod."""
        others = [row for row in self.pools.rows if row.node_id != name]
        self.pools.rows = [*others, PodRow(name, "decode", template, free)]

    def look(self, *, busy: bool = False, after_s: float = 0.0) -> list[str]:
        """The calls of one check."""
        self.at += after_s
        self.pools.calls.clear()
        self.rolls.step(busy=busy)
        return list(self.pools.calls)

    def control_anew(self) -> list[str]:
        """The calls of the first check of another control process."""
        self.rolls = self.control()
        return self.look()

    def said(self, event: str) -> list[dict[str, object]]:
        return [details for name, details in self.events if name == event]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_pod_that_serves_is_left_until_its_replica_has_gone(scene: Scene) -> None:
    assert scene.look() == []
    scene.pod("a", OLD, free=True)
    assert scene.look() == ["let_go a"]
    assert scene.said("let_go") == [{"pool": "decode", "node": "a", "template": OLD}]


def test_free_pods_go_one_after_the_other_and_each_is_told_once(scene: Scene) -> None:
    scene.pod("a", OLD, free=True)
    scene.pod("b", OLD, free=True)
    assert scene.look() == scene.look() == ["let_go a"]
    scene.pools.rows = [row for row in scene.pools.rows if row.node_id != "a"]
    assert scene.look() == ["let_go b"]
    assert [told["node"] for told in scene.said("let_go")] == ["a", "b"]


def test_one_that_ray_could_not_be_told_of_is_not_said_to_go(scene: Scene) -> None:
    scene.pools.answers = False
    scene.pod("a", OLD, free=True)
    assert scene.look() == ["let_go a"]
    assert scene.events == []


def test_pods_of_the_wished_template_stay_however_free_they_are(scene: Scene) -> None:
    scene.pod("c", NEW, free=True)
    assert scene.look() == []


def test_a_pod_that_served_before_the_chart_named_templates_goes_too(scene: Scene) -> None:
    scene.pod("a", "", free=True)
    assert scene.look() == ["let_go a"]


def test_a_pod_of_a_later_revision_waits_for_the_template_it_is_made_from(scene: Scene) -> None:
    later = "00112233aabb"
    for revision in (2, 1, 0):
        scene.pools.rows = [PodRow(f"c{revision}", "decode", later, free=True, revision=revision)]
        assert scene.control_anew() == [f"let_go c{revision}"]
    scene.pools.rows = [PodRow("c", "decode", later, free=True, revision=3)]
    assert scene.control_anew() == []
    # The ConfigMap has come, and with it the template.
    scene.revision = 3
    scene.pools.template = later
    assert scene.look(after_s=90.0) == []


def test_a_rollback_lets_the_pods_go_of_the_revision_that_it_undoes(scene: Scene) -> None:
    """Helm restores the former files as they were, with the former number of the revision."""
    undone = "00112233aabb"
    scene.look()
    scene.revision, scene.pools.template = 3, undone
    scene.pools.rows = [PodRow("c", "decode", undone, free=True, revision=3)]
    assert scene.look(after_s=10.0) == []
    scene.revision, scene.pools.template = 2, NEW
    assert scene.look(after_s=10.0) == ["let_go c"]


def test_a_revision_that_was_undone_unread_holds_its_pods_for_the_kubelets_delay_only(scene: Scene) -> None:
    scene.pools.rows = [PodRow("c", "decode", "00112233aabb", free=True, revision=3)]
    assert scene.look() == []
    assert scene.look(after_s=UNREAD_S - 1.0) == []
    assert scene.look(after_s=1.0) == ["let_go c"]


def test_a_pod_of_a_rollback_waits_for_the_files_that_it_restores(scene: Scene) -> None:
    """Its revision has a lower number than that of the files that are still there."""
    scene.look()
    scene.pools.rows = [PodRow("c", "decode", OLD, free=True, revision=1)]
    assert scene.look(after_s=10.0) == []
    scene.revision, scene.pools.template = 1, OLD
    assert scene.look(after_s=60.0) == []


def test_another_control_process_waits_for_no_pod_that_it_finds(scene: Scene) -> None:
    scene.pools.rows = [PodRow("c", "decode", OLD, free=True, revision=1)]
    assert scene.control_anew() == ["let_go c"]


def test_without_wishes_no_pod_is_let_go() -> None:
    scene = Scene()
    scene.pools.template = ""
    scene.pools.kept = PoolRecord(1, 2, 2, "spec", "{}")
    scene.pod("a", "", free=True)
    assert scene.look() == []


def test_what_was_there_before_is_forgotten_when_all_replicas_serve(scene: Scene) -> None:
    scene.pools.told = Status(ready=True)
    assert scene.look() == ["confirm"]
    assert scene.look() == []


def test_a_roll_that_serve_gives_up_is_settled_with_its_reason_and_free_pods_stay(scene: Scene) -> None:
    scene.pools.told = Status(failed=True, message="another KV layout")
    assert scene.look() == ["settle"]
    assert scene.said("settled") == [{"pool": "decode", "message": "another KV layout"}]
    # Of either template: the only pods that KubeRay creates are those that the pool does not continue in.
    scene.pod("a", NEW, free=True)
    scene.pod("b", OLD, free=True)
    assert scene.look(after_s=10 * POD_START_S) == []


def test_the_way_back_lets_the_pods_of_a_failed_roll_go(scene: Scene) -> None:
    scene.pools.told = Status(failed=True)
    scene.look()
    scene.pod("a", NEW, free=True)
    scene.pools.template = OLD
    assert scene.look() == ["let_go a"]


def test_a_command_that_runs_ends_its_own_roll(scene: Scene) -> None:
    scene.pools.told = Status(failed=True)
    scene.pod("a", OLD, free=True)
    assert scene.look(busy=True) == ["let_go a"]


@pytest.mark.parametrize("template", [OLD, NEW], ids=["in its pods", "in others"])
def test_a_roll_for_which_no_pod_comes_is_given_up_and_says_what_to_look_at(
    scene: Scene, template: str
) -> None:
    scene.pools.template = template
    scene.pools.kept = PoolRecord(1, 2, 2, "spec", "{}", OLD).follow(digest="another", template=template)
    assert scene.look() == []
    assert scene.look(after_s=POD_START_S) == []
    assert scene.look(after_s=DRAIN_S) == ["settle"]
    (told,) = scene.said("settled")
    assert "pools.decode.maxReplicas" in str(told["message"])
    assert scene.look(after_s=10 * POD_START_S) == []


def test_each_replica_that_comes_or_goes_gives_the_next_one_its_time(scene: Scene) -> None:
    for serving in (["one", "two"], ["two"], ["two", "three"], ["three"]):
        scene.pools.serving = serving
        assert scene.look(after_s=POD_START_S) == []
    assert scene.look(after_s=POD_START_S) == []
    assert scene.look(after_s=DRAIN_S) == ["settle"]


def test_where_there_is_no_room_for_one_more_each_replica_is_stopped_first(scene: Scene) -> None:
    scene.pools.beside = True
    scene.look()
    assert scene.look(after_s=POD_START_S + DRAIN_S) == []
    assert scene.said("stop_first") == [{"pool": "decode"}]
    assert scene.look(after_s=POD_START_S) == []
    assert scene.look(after_s=POD_START_S + DRAIN_S) == ["settle"]


def test_a_pod_that_comes_late_is_taken(scene: Scene) -> None:
    scene.look()
    scene.look(after_s=POD_START_S + DRAIN_S)
    scene.pod("c", NEW, free=False)
    assert scene.look() == []
    scene.pod("c", NEW, free=True)
    assert scene.look(busy=True) == []
    assert scene.look() == ["retry"]
    assert scene.said("resumed") == [{"pool": "decode"}]
    assert scene.look() == []


def test_another_control_process_goes_on_where_this_one_ended(scene: Scene) -> None:
    scene.look()
    scene.pod("a", OLD, free=True)
    scene.rolls = scene.control()
    assert scene.look() == ["let_go a"]
    scene.pools.told = Status(failed=True, message="no such file")
    assert "settle" in scene.look()


@pytest.fixture
def never_started(scene: Scene) -> Scene:
    """A pool on whose first start Serve has given up."""
    scene.pools.template = OLD
    scene.pools.kept = PoolRecord(1, 2, 2, "spec", "{}", OLD)
    scene.pools.told = Status(failed=True, gave_up=True, message="no weights", remedy="put them there")
    return scene


def test_a_pool_that_did_not_start_is_started_again_after_growing_waits_without_end(
    never_started: Scene,
) -> None:
    scene, waits = never_started, []
    for _ in range(9):
        assert scene.look() == []
        began = scene.at
        while not scene.look(after_s=5.0):
            assert scene.at - began <= LONGEST_WAIT_S
        waits.append(scene.at - began)
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0, 300.0]


def test_a_failed_start_is_told_with_its_attempt_the_next_ones_time_and_the_error(
    never_started: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene = never_started
    scene.look()
    scene.look(after_s=10.0)
    scene.look(after_s=60.0)
    failed = {"pool": "decode", "message": "no weights; put them there"}
    assert scene.said("start_failed") == [
        failed | {"attempt": 1, "next_at": "2026-01-01T00:00:10+00:00"},
        failed | {"attempt": 2, "next_at": "2026-01-01T00:01:30+00:00"},
    ]
    assert scene.said("starting_again") == [{"pool": "decode", "attempt": 2}]
    note = "attempt 2 failed, the next one is at 00:01:30 UTC: no weights; put them there"
    assert caplog.messages[-1] == f"decode does not start: {note}"
    shown = scene.rolls.failed_start("decode")
    assert shown is not None
    assert shown.note == note
    scene.look(after_s=20.0)
    shown = scene.rolls.failed_start("decode")
    assert shown is not None
    assert shown.note == "attempt 2 failed, the next one has begun: no weights; put them there"


def test_once_a_pool_serves_its_failed_starts_are_forgotten(never_started: Scene) -> None:
    scene = never_started
    scene.look()
    assert scene.look(after_s=10.0) == ["start_again"]
    scene.pools.told = Status(ready=True)
    assert scene.look() == []
    assert scene.rolls.failed_start("decode") is None
    assert scene.rolls.failed_start("prefill") is None


def test_while_a_command_runs_no_pool_is_started_again(never_started: Scene) -> None:
    never_started.look()
    assert never_started.look(busy=True, after_s=400.0) == []
    assert never_started.look() == ["start_again"]
