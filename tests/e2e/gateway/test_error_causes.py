"""Codes of the router and of workers, each caused for real: over the gateway, the router, sessions with
workers and their engines, which compute nothing and fail when they are told to."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.kit.gateway.http_edge import listening, models_of

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment
from kvasir.telemetry.reasons import REASONS
from kvasir_platform.gateway.start import make_gateway, make_metrics
from kvasir_platform.sim.cluster import Cluster

#: What an engine says of a request; the router passes it on once it has nobody else to ask.
OF_ENGINES = (
    "worker_failed",
    "engine_dead",
    "worker_overloaded",
    "worker_draining",
    "transfer_failed",
    "protocol_error",
    "internal_error",
    "duplicate_request",
    "request_too_large",
    "invalid_request",
)
STREAM = {"model": "kvasir-tiny", "prompt": "hi", "max_tokens": 500, "ignore_eos": True, "stream": True}
ASKED = {"model": "kvasir-tiny", "prompt": "hi", "max_tokens": 8, "ignore_eos": True}
WITHIN_S = 20.0


@dataclass
class Product:
    """A deployment of one simulated worker behind a gateway."""

    cluster: Cluster
    client: httpx.AsyncClient

    @property
    def worker(self) -> str:
        """The only worker."""
        (worker,) = self.cluster.workers
        return worker

    async def ask(self, key: str = "") -> httpx.Response:
        """One request, with a tenant's key if there are any."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return await self.client.post("/v1/completions", json=ASKED, headers=headers)

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


@asynccontextmanager
async def product(**fields: Any) -> AsyncIterator[Product]:
    clock = MonotonicClock()
    engine = {"kind": "sim", "block_size": 16, "max_num_seqs": 1, "sim": {"decode_step_s": 0.01}}
    spec = {
        "disaggregation": "never",
        "pools": [{"name": "serve", "role": "both", "engine": engine}],
        "gateway": {"port": 0, "drain_timeout_s": 0.0},
    }
    deployment = Deployment.model_validate(spec | fields)
    cluster = Cluster(deployment, clock)
    await cluster.start()
    gateway = make_gateway(deployment, cluster.router, clock, make_metrics(deployment), models_of(deployment))
    async with (
        listening(gateway) as (host, port, _),
        httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=WITHIN_S) as client,
    ):
        yield Product(cluster, client)
    for worker in cluster.workers:
        cluster.faults.thaw(worker)
    await cluster.rest(WITHIN_S)
    await cluster.close()


def assert_told(answer: httpx.Response, code: str) -> None:
    error = answer.json()["error"]
    assert (error["code"], answer.status_code) == (code, REASONS[code].status)
    assert error["message"]
    assert ("retry-after" in answer.headers) is (answer.status_code in (429, 503))


async def test_what_an_engine_says_of_a_request_is_what_its_client_hears() -> None:
    async with product() as served:
        for code in OF_ENGINES:
            served.cluster.faults.fail(served.worker, code)
            assert_told(await served.ask(), code)


async def test_without_a_worker_there_is_none() -> None:
    async with product(routing={"queue_timeout_s": 0.1}) as served:
        worker = served.worker
        await served.cluster.kill(worker)
        await served.cluster.forget(worker)
        assert_told(await served.ask(), "no_workers")


async def test_a_stream_that_nobody_can_go_on_with_ends_with_its_reason() -> None:
    async with product(routing={"queue_timeout_s": 0.1}, worker={"resume_window_s": 0.2}) as served:
        worker = served.worker
        async with served.client.stream("POST", "/v1/completions", json=STREAM) as answer:
            events = [line async for line in _killed_after_the_first(served, worker, answer)]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["code"] == "no_workers"
    assert f"worker {worker} was lost" in error["message"]


async def _killed_after_the_first(served: Product, worker: str, answer: httpx.Response) -> AsyncIterator[str]:
    alive = True
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield line
            if alive:
                alive = False
                await served.cluster.kill(worker)
                await served.cluster.forget(worker)


async def test_a_full_queue_refuses() -> None:
    async with product(routing={"max_queue": 2}) as served:
        served.cluster.faults.freeze(served.worker)
        assert_told(await served.refused(6), "queue_full")


async def test_a_tenant_fills_its_part_of_the_queue_and_not_the_rest(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    names = ("red", "blue")
    keys.write_text("".join(f"{hashlib.sha256(name.encode()).hexdigest()} tenant={name}\n" for name in names))
    fields = {
        "routing": {"max_queue": 8},
        "gateway": {"port": 0, "drain_timeout_s": 0.0, "api_keys_file": str(keys)},
        "tenancy": {"tenants": [{"name": name} for name in names]},
    }
    async with product(**fields) as served:
        served.cluster.faults.freeze(served.worker)
        assert_told(await served.refused(12, "red"), "tenant_queue_full")
