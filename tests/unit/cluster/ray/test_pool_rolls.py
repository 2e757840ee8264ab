"""Pods of another template are released when they are free, and a roll without available pods is given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from kvasir_platform.cluster.ray.pod_templates import PodRow
from kvasir_platform.cluster.ray.pool_records import PoolRecord
from kvasir_platform.cluster.ray.pool_rolls import POD_START_S, PoolRolls
from kvasir_platform.cluster.ray.pool_status import ReplicaRow

OLD, NEW = "0123456789ab", "ba9876543210"
DRAIN_S = 60.0


@dataclass(frozen=True)
class Status:
    pool: str = "decode"
    ready: bool = False
    failed: bool = False
    message: str = ""


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


def test_a_pod_of_a_later_revision_waits_for_the_wish_it_is_made_from(scene: Scene) -> None:
    later = "00112233aabb"
    for revision in (2, 1, 0):
        scene.pools.rows = [PodRow("c", "decode", later, free=True, revision=revision)]
        assert scene.look() == ["let_go c"]
    scene.pools.rows = [PodRow("c", "decode", later, free=True, revision=3)]
    assert scene.look() == []
    # The ConfigMap has come, and with it the template.
    scene.revision = 3
    scene.pools.template = later
    assert scene.look() == []
    # A rollback is a revision of its own.
    scene.revision = 4
    scene.pools.template = NEW
    assert scene.look() == ["let_go c"]


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
