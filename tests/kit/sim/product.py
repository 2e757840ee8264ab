"""The product in one process: a gateway on a real socket, the router, sessions with workers, and costs. Only
engines are simulated, and fail when they are told to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from tests.kit.gateway.http_edge import listening, models_of

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment
from kvasir.telemetry.reasons import REASONS
from kvasir_platform.cli.main import main
from kvasir_platform.gateway.app import Gateway
from kvasir_platform.gateway.catalog.models import ModelTable
from kvasir_platform.gateway.costs.keeper import make_costs
from kvasir_platform.gateway.start import make_gateway, make_metrics
from kvasir_platform.gateway.traffic.rollouts import make_rollouts
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.worker import InventedAdapters
from kvasir_workers.adapters.host import AdapterFileStore

WITHIN_S = 20.0
GATEWAY = {"port": 0, "drain_timeout_s": 0.0}
ENGINE = {"kind": "sim", "block_size": 16, "max_num_seqs": 1, "sim": {"decode_step_s": 0.01}}
POOL = {"name": "serve", "role": "both", "engine": ENGINE}
ASKED = {"model": "kvasir-tiny", "prompt": "hi", "max_tokens": 8, "ignore_eos": True}
STREAM = {**ASKED, "max_tokens": 500, "stream": True}


@dataclass
class Product:
    """A running deployment; `client` talks to its gateway at `address`."""

    cluster: Cluster
    gateway: Gateway
    client: httpx.AsyncClient
    address: str

    @property
    def worker(self) -> str:
        """The only worker."""
        (worker,) = self.cluster.workers
        return worker

    async def ask(self, key: str = "", **fields: Any) -> httpx.Response:
        """One completion, with a tenant's key if there are any."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return await self.client.post("/v1/completions", json=ASKED | fields, headers=headers)

    async def refused(self, count: int, key: str = "") -> httpx.Response:
        """The first answer to so many requests at once, of which others wait."""
        asked = [asyncio.create_task(self.ask(key)) for _ in range(count)]
        try:
            done, _ = await asyncio.wait(asked, timeout=WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def kvasir(self, *arguments: str) -> int:
        """The command line, asking this gateway."""
        return await asyncio.to_thread(main, [*arguments, "--address", self.address])


@asynccontextmanager
async def product(
    *,
    adapter_files: Callable[[], AdapterFileStore] = InventedAdapters,
    table: Callable[[Deployment], ModelTable] = models_of,
    **fields: Any,
) -> AsyncIterator[Product]:
    """A product of one worker until the block ends; `fields` of its deployment are not the stand's."""
    clock = MonotonicClock()
    spec = {"disaggregation": "never", "pools": [POOL], "gateway": GATEWAY}
    deployment = Deployment.model_validate(spec | fields)
    cluster = Cluster(deployment, clock, adapter_files=adapter_files)
    await cluster.start()
    gateway = make_gateway(
        deployment,
        cluster.router,
        clock,
        make_metrics(deployment),
        table(deployment),
        rollouts=make_rollouts(deployment, clock, time.time),
        costs=make_costs(deployment, "router", clock, time.time),
    )
    async with (
        listening(gateway) as (host, port, _),
        httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=WITHIN_S) as client,
    ):
        yield Product(cluster, gateway, client, f"{host}:{port}")
    for worker in cluster.workers:
        cluster.faults.thaw(worker)
    await cluster.rest(WITHIN_S)
    await cluster.close()


def error_of(answer: httpx.Response, code: str) -> str:
    """The message of an error, which must be answered as the table says, and say more than what failed."""
    error = answer.json()["error"]
    assert (error["code"], answer.status_code) == (code, REASONS[code].status), error
    assert error["message"]
    assert ("retry-after" in answer.headers) is (answer.status_code in (429, 503))
    message: str = error["message"]
    return message
