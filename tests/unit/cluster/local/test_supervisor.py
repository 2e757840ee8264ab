"""The order of a start, and what ends it, under a clock that tests control."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kit.clocks import SteppedClock

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError, StartError
from kvasir_platform.cluster.local.janitor import Janitor
from kvasir_platform.cluster.local.launcher import ReplicaStatus
from kvasir_platform.cluster.local.runtime_dir import DeploymentState, RuntimeDir
from kvasir_platform.cluster.local.supervisor import (
    StartProgress,
    Supervisor,
    SupervisorLimits,
    with_session_token,
)


class ScriptedLauncher:
    """Records calls; does what the test scripted."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.raises: dict[str, Exception] = {}
        self.hangs: set[str] = set()
        self.statuses: list[list[ReplicaStatus]] = [
            [ReplicaStatus("prefill", "p", "ready"), ReplicaStatus("decode", "d", "ready")]
        ]
        self.failed: asyncio.Future[StartError] = asyncio.get_running_loop().create_future()

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.raises:
            raise self.raises[name]
        if name in self.hangs:
            await asyncio.Event().wait()

    async def start_cluster(self) -> None:
        await self._call("cluster")

    async def start_pools(self) -> None:
        await self._call("pools")

    async def pool_status(self) -> list[ReplicaStatus]:
        return self.statuses[0]

    async def start_router(self) -> str:
        await self._call("router")
        return "127.0.0.1:1"

    async def wait_failed(self) -> StartError:
        return await asyncio.shield(self.failed)

    async def stop(self) -> None:
        await self._call("stop")


class Stage:
    """A supervisor with everything around it scripted."""

    def __init__(self, folder: Path, limits: SupervisorLimits | None = None) -> None:
        self.launcher = ScriptedLauncher()
        self.clock = SteppedClock()
        self.told: list[StartProgress] = []
        self.at_ready: DeploymentState | None = None
        self.not_ready: list[str | None] = [None]
        runtime = RuntimeDir(folder, "kvasir")
        runtime.create()
        self.runtime = runtime
        temp_dir = folder / "temp"
        temp_dir.mkdir()
        shm = folder / "shm"
        shm.mkdir()
        state = DeploymentState("kvasir", "unit", 1, "starting", 0.0, "m", "s", "logs", str(temp_dir), 1.0)
        self.supervisor = Supervisor(
            Deployment(),
            self.launcher,
            runtime,
            state,
            janitor=Janitor("unit-supervisor", started_at=0.0, supervised=False, shm=shm),
            probe=self.probe,
            clock=self.clock,
            wall_time=lambda: 77.0,
            report=self.report,
            # The clock goes as fast as tasks sleep on it: only where a start gives up may its time run out.
            limits=limits or SupervisorLimits(start_s=1e6, stop_s=5.0),
        )

    async def probe(self, address: str) -> str | None:
        return self.not_ready.pop(0) if len(self.not_ready) > 1 else self.not_ready[0]

    def report(self, progress: StartProgress) -> None:
        self.told.append(progress)
        # The inventory reads the status too, at times of its own: a status ends when it has been told.
        if (progress.event, progress.step) == ("detail", "replicas") and len(self.launcher.statuses) > 1:
            self.launcher.statuses.pop(0)
        if progress.event == "ready":
            self.at_ready = self.runtime.read()
            self.supervisor.stop.set()

    def events(self) -> list[str]:
        return [f"{p.event} {p.step}".strip() for p in self.told if p.event != "detail"]


@pytest.fixture
async def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


async def test_a_start_goes_in_order_and_a_stop_ends_it(stage: Stage) -> None:
    assert await stage.supervisor.run() is None
    assert stage.launcher.calls == ["cluster", "pools", "router", "stop"]
    assert stage.events() == [
        "step cluster", "done cluster", "step pools", "done pools", "step router", "done router",
        "step replicas", "done replicas", "step ready", "done ready", "ready", "stopping", "stopped",
    ]  # fmt: skip
    state = stage.runtime.read()
    assert state is not None
    assert (state.phase, state.address, state.ready_at) == ("stopped", "127.0.0.1:1", 77.0)
    assert not Path(state.temp_dir).exists()


async def test_it_records_that_it_is_ready_before_it_says_so_and_then_that_it_has(stage: Stage) -> None:
    assert await stage.supervisor.run() is None
    said, after = stage.at_ready, stage.runtime.read()
    assert said is not None
    assert after is not None
    assert (said.phase, said.announced, after.announced) == ("ready", False, True)


async def test_it_waits_for_replicas_and_says_for_which(stage: Stage) -> None:
    ready = stage.launcher.statuses[0]
    loading = [ready[0], ReplicaStatus("decode", "d", "starting", "loading weights")]
    stage.launcher.statuses = [[], loading, ready]
    assert await stage.supervisor.run() is None
    details = [p.text for p in stage.told if p.event == "detail" and p.step == "replicas"]
    assert details == [
        "prefill 0/1, decode 0/1",
        "prefill 1/1, decode 0/1 (loading weights)",
        "prefill 1/1, decode 1/1",
    ]


async def test_a_failed_replica_ends_the_start_with_its_log(stage: Stage) -> None:
    stage.launcher.statuses = [[ReplicaStatus("decode", "d-0", "failed", "no such file", "/l/d.log")]]
    failure = await stage.supervisor.run()
    assert failure is not None
    assert failure.message == "decode replica d-0 failed: no such file"
    assert failure.log == "/l/d.log"
    assert stage.launcher.calls[-1] == "stop"


async def test_a_root_error_is_the_failure_as_it_is_with_its_remedy(stage: Stage) -> None:
    detail = "pool decode does not start: no memory is left"
    stage.launcher.statuses = [
        [ReplicaStatus("decode", "d-0", "failed", detail, "/l/d.log", "lower x", is_root=True)]
    ]
    failure = await stage.supervisor.run()
    assert failure is not None
    assert (failure.message, failure.remedy) == (detail, "lower x")
    assert (failure.log, failure.is_root) == ("/l/d.log", True)


async def test_a_start_that_takes_too_long_says_what_it_waited_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path, SupervisorLimits(start_s=5.0, stop_s=5.0))
    stage.launcher.statuses = [[ReplicaStatus("prefill", "p", "ready")]]
    failure = await stage.supervisor.run()
    assert failure is not None
    assert "gave up after 5 s: replicas are not ready: prefill 1/1, decode 0/1" in failure.message


async def test_the_download_of_a_model_may_take_longer_than_a_start(tmp_path: Path) -> None:
    stage = Stage(tmp_path, SupervisorLimits(start_s=5.0, stop_s=5.0))
    ready = stage.launcher.statuses[0]
    stage.launcher.statuses = [[], ready]

    async def downloaded() -> None:
        await stage.clock.sleep(1000.0)

    stage.supervisor._fetch = downloaded
    assert await stage.supervisor.run() is None
    assert stage.clock.now() >= 1000.0


async def test_a_gateway_that_never_gets_ready_says_what_is_missing(tmp_path: Path) -> None:
    stage = Stage(tmp_path, SupervisorLimits(start_s=5.0, stop_s=5.0))
    stage.not_ready = ["no decode worker"]
    failure = await stage.supervisor.run()
    assert failure is not None
    assert "no decode worker" in failure.message


async def test_a_gateway_that_will_never_be_ready_ends_the_start_at_once(stage: Stage) -> None:
    async def refused(address: str) -> str | None:
        raise StartError("the router refuses every worker of pool decode: model: x != m (router)")

    stage.supervisor._probe = refused
    failure = await stage.supervisor.run()
    assert failure is not None
    assert failure.message.startswith("the router refuses every worker of pool decode")
    assert stage.events()[-4:] == ["step ready", "failed", "stopping", "stopped"]


@pytest.mark.parametrize("step", ["cluster", "pools", "router"])
async def test_a_stop_during_a_step_interrupts_it(stage: Stage, step: str) -> None:
    stage.launcher.hangs.add(step)
    running = asyncio.create_task(stage.supervisor.run())
    while step not in stage.launcher.calls:
        await asyncio.sleep(0)
    stage.supervisor.stop.set()
    assert await running is None
    assert stage.launcher.calls[-2:] == [step, "stop"]


@pytest.mark.parametrize("error", [StartError("no", log="/x", remedy="do"), ConfigError("no")])
async def test_an_error_of_a_step_is_reported_after_everything_was_stopped(
    stage: Stage, error: Exception
) -> None:
    stage.launcher.raises["pools"] = error
    failure = await stage.supervisor.run()
    assert failure is not None
    assert failure.message == "no"
    assert stage.events()[-3:] == ["failed", "stopping", "stopped"]
    state = stage.runtime.read()
    assert state is not None
    assert (state.phase, state.failure) == ("failed", "no")


async def test_a_part_that_dies_interrupts_a_step(stage: Stage) -> None:
    stage.launcher.hangs.add("router")
    stage.launcher.failed.set_result(StartError("control ended"))
    failure = await stage.supervisor.run()
    assert failure is not None
    assert failure.message == "control ended"


async def test_a_stop_that_hangs_is_cut_by_a_second_signal(stage: Stage) -> None:
    stage.launcher.hangs.add("stop")
    running = asyncio.create_task(stage.supervisor.run())
    while "stop" not in stage.launcher.calls:
        await asyncio.sleep(0)
    stage.supervisor.hurry.set()
    assert await running is None


async def test_a_stop_that_hangs_is_cut_after_its_limit(tmp_path: Path) -> None:
    stage = Stage(tmp_path, SupervisorLimits(start_s=1e6, stop_s=0.05))
    stage.launcher.hangs.add("stop")
    assert await stage.supervisor.run() is None
    assert stage.events()[-1] == "stopped"


async def test_a_stop_that_fails_is_told_and_the_janitor_still_works(stage: Stage) -> None:
    stage.launcher.raises["stop"] = RuntimeError("ray is gone")
    assert await stage.supervisor.run() is None
    assert any("ray is gone" in p.text for p in stage.told)
    state = stage.runtime.read()
    assert state is not None
    assert not Path(state.temp_dir).exists()


def test_a_session_token_of_the_spec_is_kept() -> None:
    made = with_session_token(Deployment(), Path("/t"))
    assert made.worker.session_token_file == "/t"
    assert with_session_token(made, Path("/u")).worker.session_token_file == "/t"
