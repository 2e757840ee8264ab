"""Commands to a running deployment: over a real socket, with scripted pools."""

from __future__ import annotations

import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.kit.clocks import StillClock

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.cluster.local.commands import (
    CommandClient,
    CommandSocket,
    ControlCommand,
    ask,
    listening,
    socket_path,
)
from kvasir_platform.cluster.ray.pool_commands import PoolCommands
from kvasir_platform.cluster.ray.pool_records import PoolRecord
from kvasir_platform.cluster.ray.pool_status import ReplicaRow

PATIENCE_S = 10.0


@dataclass(frozen=True)
class Status:
    pool: str = "decode"
    failed: bool = False
    message: str = ""
    state: str = "RUNNING"
    wanted: int = 2
    running: int = 2
    remedy: str = ""


@dataclass(frozen=True)
class Attempt:
    note: str


class Pools:
    """Two replicas of `decode`; a test says what becomes of them."""

    def __init__(self) -> None:
        self.rows = [ReplicaRow("a", "RUNNING"), ReplicaRow("b", "RUNNING")]
        self.calls: list[object] = []
        self.pinned: dict[str, int | None] = {}
        self.size = 2

    def names(self) -> list[str]:
        return ["decode"]

    def record(self, pool: str) -> PoolRecord:
        return PoolRecord(1, self.size, 2, "digest", "spec")

    def status(self) -> list[Status]:
        return [Status(message="no weights", state="DEPLOY_FAILED", running=0), Status("prefill")]

    def wanted(self, pool: str) -> int:
        if pool != "decode":
            raise ConfigError(f"there is no pool {pool!r}; there are: decode")
        return 2

    def replicas(self, pool: str) -> list[ReplicaRow]:
        return self.rows

    def restart(self, pool: str) -> bool:
        self.calls.append(("restart", pool))
        return True

    def settle(self, pool: str) -> bool:
        self.calls.append(("settle", pool))
        return True

    def pin(self, pool: str, replicas: int | None) -> None:
        self.pinned[pool] = replicas

    def scale(self, pool: str, replicas: int) -> None:
        self.calls.append(("scale", pool, replicas))


class Desk:
    """The control process's part, and callers on threads."""

    def __init__(self, commands: CommandSocket, path: Path) -> None:
        self.pools, self.clock = Pools(), StillClock()
        self.work = PoolCommands(self.pools, self.clock, start_s=900.0, drain_s=1.0)
        self._commands = commands
        self._path = path

    def ask(self, what: ControlCommand) -> tuple[list[dict[str, Any]], threading.Thread]:
        """Ask on a thread; returns its answers, which grow, and the thread, which ends with the last."""
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: answers.extend(ask(self._path, what, PATIENCE_S)))
        thread.start()
        taken = self._commands.wait(PATIENCE_S)
        assert taken is not None
        self.work.take(*taken)
        return answers, thread

    def step(self, status: Status | None = None) -> None:
        self.work.step([status or Status()])


@pytest.fixture
def desk() -> Iterator[Desk]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        path = socket_path(Path(folder))
        with listening(path) as commands:
            yield Desk(commands, path)


def finish(answers: list[dict[str, Any]], thread: threading.Thread) -> list[dict[str, Any]]:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    return answers


def events(answers: list[dict[str, Any]]) -> list[str]:
    return [str(answer["event"]) for answer in answers]


def test_a_restart_is_told_step_by_step_and_is_done_when_the_last_old_replica_has_gone(desk: Desk) -> None:
    answers, thread = desk.ask(ControlCommand("restart", "decode"))
    a, b, c, d = (ReplicaRow(name, "RUNNING") for name in "abcd")
    stages = [
        [a, b, ReplicaRow("c", "STARTING")],
        [ReplicaRow("a", "STOPPING"), b, c],
        [b, c],
        [ReplicaRow("b", "STOPPING"), c, d],
        [c, d],
    ]
    for rows in stages:
        assert thread.is_alive()
        desk.pools.rows = rows
        desk.step()
    told = finish(answers, thread)
    assert events(told) == ["started", "progress", "done"]
    assert [answer.get("replaced") for answer in told] == [None, 1, 2]
    assert desk.pools.calls == [("restart", "decode")]


def test_a_restart_that_ray_gives_up_fails_with_its_reason_and_the_pool_is_settled(desk: Desk) -> None:
    answers, thread = desk.ask(ControlCommand("restart", "decode"))
    desk.step(Status(failed=True, message="no such file"))
    told = finish(answers, thread)
    assert told[-1]["event"] == "failed"
    assert told[-1]["message"] == "no such file"
    assert desk.pools.calls[-1] == ("settle", "decode")


def test_another_pools_failure_is_not_this_restarts(desk: Desk) -> None:
    answers, thread = desk.ask(ControlCommand("restart", "decode"))
    desk.step(Status(pool="prefill", failed=True))
    desk.pools.rows = [ReplicaRow("c", "RUNNING"), ReplicaRow("d", "RUNNING")]
    desk.step()
    assert events(finish(answers, thread)) == ["started", "done"]


def test_a_restart_that_never_ends_is_given_up(desk: Desk) -> None:
    answers, thread = desk.ask(ControlCommand("restart", "decode"))
    desk.clock.at = 2 * (900.0 + 1.0) - 1.0
    desk.step()
    assert desk.work.busy
    desk.clock.at += 2.0
    desk.step()
    assert finish(answers, thread)[-1]["message"] == "not done in time"


def test_one_command_runs_at_a_time(desk: Desk) -> None:
    _, first = desk.ask(ControlCommand("restart", "decode"))
    answers, thread = desk.ask(ControlCommand("scale", "decode", 3))
    assert finish(answers, thread)[0]["message"] == "decode is being restarted; retry when that is done"
    desk.pools.rows = [ReplicaRow("c", "RUNNING"), ReplicaRow("d", "RUNNING")]
    desk.step()
    first.join(PATIENCE_S)
    answers, thread = desk.ask(ControlCommand("scale", "decode", 3))
    assert events(finish(answers, thread)) == ["done"]
    assert desk.pools.calls[-1] == ("scale", "decode", 3)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (ControlCommand("restart", "nope"), "there is no pool 'nope'"),
        (ControlCommand("dance", "decode"), "unknown command 'dance'"),
        (ControlCommand("scale", "decode"), "unknown command 'scale'; there are: restart, scale"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    desk: Desk, what: ControlCommand, reason: str
) -> None:
    told = finish(*desk.ask(what))
    assert events(told) == ["refused"]
    assert reason in told[0]["message"]


def test_pools_are_told_with_the_error_of_the_newest_start_and_the_next_attempt() -> None:
    listener = Listener()
    note = "attempt 3 failed, the next one is at 17:05:10 UTC: no weights"
    failed = {"decode": Attempt(note)}
    work = PoolCommands(Pools(), StillClock(), start_s=900.0, drain_s=1.0, failed_start=failed.get)
    work.take(ControlCommand("status", ""), listener)
    ((event, details),) = listener.told
    assert event == "done"
    shown = {"wanted": 2, "pool": "decode", "state": "DEPLOY_FAILED", "running": 0}
    healthy = {"wanted": 2, "pool": "prefill", "state": "RUNNING", "running": 2, "detail": ""}
    assert details == {"pools": [shown | {"detail": note}, healthy]}


def test_a_caller_that_leaves_does_not_end_the_work(desk: Desk) -> None:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(desk._path))
        caller.sendall(b'{"command":"restart","pool":"decode"}\n')
        taken = desk._commands.wait(PATIENCE_S)
        assert taken is not None
    desk.work.take(*taken)
    desk.pools.rows = [ReplicaRow("c", "RUNNING"), ReplicaRow("d", "RUNNING")]
    desk.step()
    answers, thread = desk.ask(ControlCommand("scale", "decode", 1))
    assert events(finish(answers, thread)) == ["done"]


@pytest.mark.parametrize("said", [b"hello\n", b'{"command":"restart"}\n', b"x" * 10_000])
def test_what_is_not_a_command_is_refused(desk: Desk, said: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(PATIENCE_S)
        caller.connect(str(desk._path))
        caller.sendall(said)
        assert desk._commands.wait(PATIENCE_S) is None
        assert b'"refused"' in caller.recv(4096)


def test_the_socket_is_its_users_alone_and_goes_with_its_owner(desk: Desk) -> None:
    assert stat.S_IMODE(desk._path.stat().st_mode) == 0o600
    desk._commands.close()
    assert not desk._path.exists()
    with pytest.raises(UpstreamError, match="does not answer"):
        list(ask(desk._path, ControlCommand("restart", "decode"), PATIENCE_S))


class Planned:
    """A planner of the pool `decode`."""

    def __init__(self) -> None:
        self.pinned: dict[str, int | None] = {}

    def pin(self, pool: str, size: int | None) -> None:
        self.pinned[pool] = size

    def explain(self, now: float) -> dict[str, object]:
        return {"now": now}

    def plans(self, pool: str) -> bool:
        return pool == "decode"


class Listener(CommandClient):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, object]]] = []

    def tell(self, event: str, **details: object) -> None:
        self.told.append((event, details))


def _asked(what: ControlCommand, sizes: Planned | None) -> tuple[Pools, list[tuple[str, dict[str, object]]]]:
    pools, listener = Pools(), Listener()
    PoolCommands(pools, StillClock(), start_s=900.0, drain_s=1.0, sizes=sizes).take(what, listener)
    return pools, listener.told


def test_a_size_for_a_pool_that_is_planned_for_pins_it_and_is_kept() -> None:
    planned = Planned()
    pools, told = _asked(ControlCommand("scale", "decode", 3), planned)
    assert planned.pinned == {"decode": 3} == pools.pinned
    assert pools.calls == []
    assert told == [("done", {"pool": "decode", "replicas": 3})]
    pools, told = _asked(ControlCommand("unpin", "decode"), planned)
    assert planned.pinned == {"decode": None} == pools.pinned
    assert told[0][0] == "done"


def test_a_pool_that_nobody_plans_for_cannot_be_given_back() -> None:
    pools, _ = _asked(ControlCommand("scale", "decode", 3), None)
    assert pools.calls == [("scale", "decode", 3)]
    assert _asked(ControlCommand("unpin", "decode"), None)[1][0][0] == "refused"
    assert _asked(ControlCommand("scale", "nowhere", 3), Planned())[1][0][0] == "refused"


def test_sizes_are_explained_while_a_restart_runs() -> None:
    pools, listener = Pools(), Listener()
    work = PoolCommands(pools, StillClock(), start_s=900.0, drain_s=1.0, sizes=Planned())
    work.take(ControlCommand("restart", "decode"), listener)
    work.take(ControlCommand("explain", ""), listener)
    assert listener.told[-1] == ("done", {"explanation": {"now": 0.0, "by_hand": []}})


def test_sizes_that_nobody_plans_are_explained_by_who_set_them() -> None:
    pools, listener = Pools(), Listener()
    work = PoolCommands(pools, StillClock(), start_s=900.0, drain_s=1.0)
    work.take(ControlCommand("explain", ""), listener)
    pools.size = 3
    work.take(ControlCommand("explain", ""), listener)
    why = ["the spec's size (pools.decode.replicas)"]
    why += ["set by `kvasir scale`, until pools.decode.replicas changes, which is 2"]
    assert listener.told == [
        (
            "done",
            {"explanation": {"by_hand": [{"pool": "decode", "serving": 2, "size": size, "why": reason}]}},
        )
        for size, reason in zip((2, 3), why, strict=True)
    ]
