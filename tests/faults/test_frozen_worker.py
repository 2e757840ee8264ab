"""A real worker process is stopped and continued under a session over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.lab.fleet import Fleet, LabWorker, Layout

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import WorkerSpec
from kvasir.core.messages import Abort, SetDraining
from kvasir_platform.sim.stories import small_deployment
from kvasir_router.sessions.grpc_transport import GrpcDialer
from kvasir_router.sessions.session import SessionInterrupted, SessionLimits, SessionLost, SessionReady

pytestmark = pytest.mark.slow


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[LabWorker]:
    """A worker process with a simulated engine, which holds nothing for routers that a test has closed."""
    spec = small_deployment(0, 0, 1, "never").model_copy(update={"worker": WorkerSpec()})
    async with Fleet(tmp_path, spec, Layout({"both": 1}, routers=0), clock=MonotonicClock()) as fleet:
        yield fleet.workers[0]


def kinds(router: Any) -> list[type]:
    return [type(event) for event in router.told()]


async def test_a_frozen_worker_is_noticed_by_its_silence_and_resumes_its_stream_when_it_thaws(
    worker: LabWorker, bench: Any
) -> None:
    router = bench.router(GrpcDialer(None), worker.address, limits=SessionLimits())
    await router.ready()
    router.session.send(bench.submit(("a", 1, 200)))
    await router.until(lambda: len(router.tokens.get("a", ())) > 20)
    assert (await worker.running.freeze()).state == "T"
    await router.until(lambda: SessionInterrupted in kinds(router))
    assert router.told()[-1].reason == "no frame for 1.5 s"
    router.session.send(SetDraining(True, "frozen"))
    await bench.clock.sleep(3.0)
    await worker.running.thaw()
    await router.ready(2)
    await router.ended("a")
    assert len(router.tokens["a"]) == 200
    await router.until(lambda: any("frozen" in repr(event) for event in router.events))
    assert kinds(router) == [SessionReady, SessionInterrupted, SessionReady]


async def test_a_worker_that_thaws_after_the_window_gets_a_clean_session(
    worker: LabWorker, bench: Any
) -> None:
    router = bench.router(GrpcDialer(None), worker.address, limits=SessionLimits(resume_window_s=2.0))
    await router.ready()
    router.session.send(bench.submit(("a", 1, 4000)))
    await router.until(lambda: len(router.tokens.get("a", ())) > 20)
    await worker.running.freeze()
    await router.until(lambda: SessionLost in kinds(router))
    known = len(router.tokens["a"])
    await worker.running.thaw()
    await router.ready(2)
    router.session.send(bench.submit(("b", 1, 20)))
    router.session.send(Abort(("a",)))
    await router.ended("b")
    assert len(router.tokens["b"]) == 20
    assert len(router.tokens["a"]) == known
    assert kinds(router) == [SessionReady, SessionInterrupted, SessionLost, SessionReady]
