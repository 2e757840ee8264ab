"""What the user reads of a pool that is not running."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import ReplicaState
from ray.serve.schema import ApplicationStatus

from kvasir_platform.cluster.ray.launcher import _replicas
from kvasir_platform.cluster.ray.pool_status import (
    DEPLOY_FAILED,
    RUNNING,
    PoolStatus,
    pool_status,
    without_traceback,
)
from kvasir_workers.pool.failures import StartFailure

SERVE = """A replica failed to start with exception. Retrying 1 more time(s). Error:
\x1b[36mray::ServeReplica:kvasir-decode:decode.initialize_and_get_metadata()\x1b[39m (pid=7, ip=127.0.0.2)
  File "/x/concurrent/futures/_base.py", line 456, in result
    return self.__get_result()
RuntimeError: Traceback (most recent call last):
  File "/x/replica.py", line 117, in start
    self._llm = await asyncio.to_thread(runtime.build, arguments)
RuntimeError: Engine core initialization failed.

The above exception was the direct cause of the following exception:

ray::ServeReplica:kvasir-decode:decode.initialize_and_get_metadata() (pid=7, ip=127.0.0.2)
kvasir.core.errors.ConfigError: port 7001 is in use;
stop the other process"""


def test_states_are_named_as_serve_names_them() -> None:
    assert ApplicationStatus.RUNNING.value == ReplicaState.RUNNING.value == RUNNING
    assert ApplicationStatus.DEPLOY_FAILED.value == DEPLOY_FAILED


def application(state: str, running: int, message: str) -> Any:
    decode = SimpleNamespace(replica_states={"RUNNING": running}, message=message)
    return SimpleNamespace(deployments={"decode": decode}, status=SimpleNamespace(value=state), message="")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (SERVE, "ConfigError: port 7001 is in use;\nstop the other process"),
        ("1 replicas that have taken more than 30s to initialize.",) * 2,
        (
            "The actor died unexpectedly.\n  class_name: ServeReplica\n  pid: 7",
            "The actor died unexpectedly.",
        ),
        ("", ""),
    ],
)
def test_a_message_of_serve_has_no_traceback(message: str, expected: str) -> None:
    assert without_traceback(message) == expected


def test_a_pool_fails_when_serve_gives_up_or_another_start_would_fail_too() -> None:
    starting = pool_status("decode", 2, application("DEPLOYING", 1, SERVE))
    assert (starting.running, starting.failed, starting.ready) == (1, False, False)
    passing = starting.failing(StartFailure("the port is in use", log="/l"))
    assert (passing.message, passing.log, passing.failed) == ("the port is in use", "/l", False)
    lasting = starting.failing(StartFailure("no memory", "lower x", permanent=True))
    assert (lasting.remedy, lasting.failed) == ("lower x", True)
    assert pool_status("decode", 2, application("DEPLOY_FAILED", 0, SERVE)).failed
    assert pool_status("decode", 2, application("RUNNING", 2, "")).ready
    assert pool_status("decode", 2, None) == PoolStatus("decode", "NOT_STARTED", 2, 0)


def test_the_supervisor_gets_the_reason_the_remedy_and_the_log_of_a_failed_replica() -> None:
    pool = {"pool": "decode", "state": "DEPLOYING", "wanted": 2, "running": 1, "message": "no memory"}
    event = pool | {"remedy": "lower x", "log": "/logs/d.log", "permanent": True, "failed": True}
    ready, failed = _replicas(event, "/logs")
    assert ready.state == "ready"
    assert (failed.state, failed.detail, failed.remedy) == ("failed", "no memory", "lower x")
    assert (failed.log, failed.is_root) == ("/logs/d.log", True)
