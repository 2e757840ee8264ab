"""One simulated worker: the process, the engine in it and its sessions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import RequestError
from kvasir.core.membership import Endpoint
from kvasir.core.requests import KvHandoff
from kvasir.ports.clock import Clock
from kvasir_platform.sim.core.process import EngineClock, SimProcess
from kvasir_platform.sim.faulty_engine import FaultyEngine
from kvasir_workers.adapters.files import AdapterFiles
from kvasir_workers.adapters.host import AdapterFileStore, AdapterHost
from kvasir_workers.engines.sim.engine import SimEngine
from kvasir_workers.engines.sim.fabric import Offerer, SimFabric, SimTicket
from kvasir_workers.engines.sim.model import SimModel
from kvasir_workers.server.sessions import SessionHost, SessionHostLimits

TOKENIZER_DIGEST = "simulated"


class StallingFabric(SimFabric):
    """A fabric on which some workers do not answer, without being known to be gone: a pull from them takes
    until the puller's timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.stalled: set[str] = set()

    def offerer(self, ticket: SimTicket, handoff: KvHandoff) -> Offerer:
        """See SimFabric. A worker that does not answer does not refuse either."""
        return _Nobody() if ticket.worker_id in self.stalled else super().offerer(ticket, handoff)

    def occupy(self, worker_id: str, now: float, seconds: float) -> float:
        """See SimFabric."""
        stalled = worker_id in self.stalled
        return float("inf") if stalled else super().occupy(worker_id, now, seconds)


class _Nobody:
    """The offerer that does not answer: a request to it ends only by timeout."""

    epoch = 0

    def lease_problem(self, lease_id: str, fence: int) -> str | None:
        return None

    def lease_pulled(self, lease_id: str) -> None:
        """Not received by any worker: the lease ends by its release or its deadline."""

    def complete(self, lease_id: str) -> int:
        return sys.maxsize

    async def progressed(self) -> None:
        """Never return: nothing more is computed."""
        await asyncio.Event().wait()


class InventedAdapters:
    """Files of adapters that exist nowhere: the contents of a source are its address. Those whose address
    ends with `missing` cannot be read."""

    async def open(self, source: str) -> AdapterFiles:
        """See AdapterStore."""
        if source.endswith("missing"):
            raise RequestError(f"{source} has no adapter_config.json", code="adapter_unreadable")
        return AdapterFiles(Path(source), rank=8, nbytes=1 << 20, digest=f"{crc32(source.encode()):08x}")

    async def discard(self, files: AdapterFiles) -> None:
        """There is nothing to delete."""

    async def close(self) -> None:
        """There is nothing to delete."""


@dataclass
class SimWorker:
    """One worker process. `engine` is the simulated one, `faults` the wrapper that its sessions use; `host`
    are its sessions."""

    endpoint: Endpoint
    engine: SimEngine
    host: SessionHost
    faults: FaultyEngine
    process: SimProcess
    engine_clock: EngineClock
    epoch: int


async def start_worker(
    endpoint: Endpoint,
    deployment: Deployment,
    clock: Clock,
    fabric: SimFabric,
    *,
    epoch: int = 1,
    model: SimModel | None = None,
    adapter_files: Callable[[], AdapterFileStore] = InventedAdapters,
) -> SimWorker:
    """Create the worker at `endpoint`, in a process of its own, with `adapter_files` of its own. Raises
    ConfigError."""
    process = SimProcess(clock)
    engine_clock = EngineClock(process)
    engine = SimEngine(
        deployment,
        deployment.pool(endpoint.pool),
        clock=engine_clock,
        fabric=fabric,
        model=model,
        tokenizer_digest=TOKENIZER_DIGEST,
    )
    faults = FaultyEngine(engine)
    spec, loading = deployment.worker, deployment.lora_loading
    host = await SessionHost.start(
        faults,
        worker_id=endpoint.worker_id,
        epoch=epoch,
        clock=process,
        limits=SessionHostLimits(resume_window_s=spec.resume_window_s, heartbeat_s=spec.heartbeat_s),
        locality=deployment.pool(endpoint.pool).topology.locality,
        adapters=AdapterHost(engine, adapter_files(), loading, process) if loading.enabled else None,
    )
    return SimWorker(endpoint, engine, host, faults, process, engine_clock, epoch)
