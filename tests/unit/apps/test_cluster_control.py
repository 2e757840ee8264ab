"""The control process of a cluster checks its pod's configuration before Ray starts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.kit.clocks import StillClock

from kvasir.core.errors import ConfigError
from kvasir_platform.apps import cluster_control
from kvasir_platform.apps.cluster_control import LEAVE_S, STUCK_S, ClusterControl, outlived
from kvasir_platform.apps.common.failed_starts import read_failed_starts
from kvasir_platform.apps.common.pods_file import PodsFile
from kvasir_platform.apps.common.spec_file import SpecFile
from kvasir_platform.apps.common.stopping import Stop
from kvasir_platform.cluster.ray.command import option

POD = {
    "KUBERAY_GEN_RAY_START_CMD": "ray start --head --block --num-cpus=0",
    "KVASIR_POD_IP": "fd00::7",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN_PATH": "/etc/kvasir/ray/auth_token",
}
SPEC = "worker: {host: pod, port: 7001}"


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    pod = dict(POD)
    monkeypatch.setattr(os, "environ", pod)
    return pod


def made(tmp_path: Path, spec: str = SPEC, redis_password: Path | None = None) -> ClusterControl:
    path = tmp_path / "kvasir.yaml"
    path.write_text(spec)
    return ClusterControl(SpecFile(path, None), PodsFile(None), "token", tmp_path / "t", redis_password)


@pytest.fixture
def control(tmp_path: Path) -> Callable[[], ClusterControl]:
    return partial(made, tmp_path)


def test_rays_command_gets_its_folder_and_the_password_of_its_redis(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    (tmp_path / "password").write_text("s3cret\n")
    control = made(tmp_path, redis_password=tmp_path / "password")
    assert option(control.command, "--temp-dir") == str(tmp_path / "t" / "ray")
    assert option(control.command, "--redis-password") == "s3cret"
    assert control.address == "[fd00::7]:6379"
    assert environ["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.parametrize(
    ("spec", "said"),
    [("worker: {port: 7001}", r"worker\.host"), ("worker: {host: pod}", r"worker\.port")],
    ids=["workers on loopback", "workers at any port"],
)
def test_workers_that_no_router_would_find_are_refused(
    tmp_path: Path, environ: dict[str, str], spec: str, said: str
) -> None:
    assert environ
    with pytest.raises(ConfigError, match=said):
        made(tmp_path, spec)


@pytest.mark.parametrize("lacking", sorted(set(POD)))
def test_a_pod_that_lacks_a_variable_is_told_which(
    tmp_path: Path, environ: dict[str, str], lacking: str
) -> None:
    del environ[lacking]
    with pytest.raises(ConfigError, match=lacking):
        made(tmp_path)


def test_a_password_that_cannot_be_read_is_named(tmp_path: Path, environ: dict[str, str]) -> None:
    assert environ
    with pytest.raises(ConfigError, match="absent"):
        made(tmp_path, redis_password=tmp_path / "absent")


def test_workers_outlive_a_head_that_keeps_its_state_in_redis() -> None:
    assert outlived({"RAY_REDIS_ADDRESS": "redis://redis:6379"})
    assert not outlived({})


def test_why_a_pool_does_not_start_is_kept_for_events_and_reported_as_before(
    tmp_path: Path, environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert environ
    (tmp_path / "kvasir.yaml").write_text(SPEC)
    spec, kept, pools = SpecFile(tmp_path / "kvasir.yaml", None), tmp_path / "kept", Mock()
    control = ClusterControl(spec, PodsFile(None), "token", tmp_path, None, failed_starts=kept)
    _, rolls = control._watches(pools, StillClock(), None)
    rolls._tell("start_failed", pool="decode", attempt=3, next_at="08:00", message="no room")
    (failed,) = read_failed_starts(kept)
    assert (failed.pool, failed.attempt, failed.message) == ("decode", 3, "no room")
    assert '"event": "start_failed"' in capsys.readouterr().out


class Head:
    """A head that runs until it is stopped."""

    status = None

    def __init__(self) -> None:
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1


class Ended(threading.Event):
    """The end of the process, in place of os._exit."""

    def __call__(self, status: int) -> None:
        self.status = status
        self.set()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Ended:
    made = Ended()
    monkeypatch.setattr(os, "_exit", made)
    monkeypatch.setattr(cluster_control, "LOOK_S", 0.01)
    return made


@pytest.mark.parametrize(
    ("redis", "asked", "after_s", "status"),
    [("redis://redis:6379", True, LEAVE_S, 0), ("", True, STUCK_S, 0), ("", False, STUCK_S, 1)],
    ids=["workers outlive it", "workers drain", "nobody asked"],
)
def test_a_head_that_does_not_answer_ends_and_soon_where_workers_outlive_a_requested_stop(
    control: Callable[[], ClusterControl],
    environ: dict[str, str],
    ended: Ended,
    *,
    redis: str,
    asked: bool,
    after_s: float,
    status: int,
) -> None:
    environ["RAY_REDIS_ADDRESS"] = redis
    head: Any = Head()
    clock, stop = StillClock(), Stop()
    with control()._watched(head, clock, stop):
        # A call to Ray blocks.
        stop.requested = asked
        clock.at = after_s - 0.5
        assert not ended.wait(0.1)
        clock.at = 2 * after_s
        assert ended.wait(10.0)
    assert ended.status == status
    assert head.stops
