"""Three gateways with scripted routers, joined over gRPC: what a client of one sees when others answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import pytest_asyncio
from tests.kit.gateway.http_edge import listening, models_of
from tests.kit.gateway.scripted_router import ScriptedRouter

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment
from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.requests import FinishReason, Role
from kvasir.ports.router import WorkerView
from kvasir.ports.stores.costs import HOUR_S
from kvasir_platform.gateway.costs.budgets import Spending
from kvasir_platform.gateway.costs.keeper import CostKeeper, make_costs
from kvasir_platform.gateway.start import make_gateway, make_metrics
from kvasir_platform.regions.connections import CellConnection, OnCell
from kvasir_platform.regions.grpc_cells import GrpcCellDialer, GrpcCellServer
from kvasir_platform.regions.router import RegionRouter
from kvasir_platform.regions.start import make_region_router

NAMES = ("ap", "eu", "us")
MODEL = "kvasir-tiny"
_PATIENCE_S = 30.0
NETWORK_S = {"us": 0.01, "ap": 0.02}
_KV = KvLayout(16, "f", "NHD", 2, 2, 32, 64)
_IDENTITY = WorkerIdentity("w", 1, "both", Role.BOTH, MODEL, "r1", "d", 4096, _KV, 8, "sim", "1")
WORKER = WorkerView("w", "w:1", "both", "ready", identity=_IDENTITY)


class Ports(dict[str, int]):
    """Where cells listen, by name, once they do."""

    def listener(self, cell: str, on_cell: OnCell) -> Listening:
        """What a cell listens with."""
        return Listening(self, cell, GrpcCellServer(on_cell, bind="127.0.0.1:0", peers=(), tls=None))


@dataclass
class Listening:
    """A server that notes its port."""

    ports: Ports
    cell: str
    server: GrpcCellServer

    async def start(self) -> int:
        """See CellListener."""
        self.ports[self.cell] = await self.server.start()
        return self.ports[self.cell]

    async def stop(self) -> None:
        """See CellListener."""
        await self.server.stop()


@dataclass
class Dialing:
    """Connects to where a cell listens."""

    ports: Ports
    cell: str

    async def dial(self) -> CellConnection:
        """See CellDialer."""
        return await GrpcCellDialer(f"127.0.0.1:{self.ports[self.cell]}", self.cell, None).dial()


@dataclass
class Site:
    """One cell: its scripted router, and a client of its gateway."""

    scripted: ScriptedRouter
    router: RegionRouter
    client: openai.AsyncOpenAI
    costs: CostKeeper | None
    links: asyncio.Task[None] | None = None

    def join(self) -> None:
        """Keep the links to the others."""
        self.links = asyncio.create_task(self.router.run())

    async def leave(self) -> None:
        """End all links."""
        assert self.links is not None
        # A task that is cancelled before it begins closes nothing.
        await asyncio.sleep(0)
        self.links.cancel()
        await asyncio.wait([self.links])


def deployment(name: str, tenant: Mapping[str, Any] | None = None, **regions: Any) -> Deployment:
    """The spec of a cell, with the default `tenant`. Its addresses are those of the test's own dialers."""
    peers = [
        {"name": each, "address": "127.0.0.1:1", "network_s": NETWORK_S.get(each, 0.03)}
        for each in NAMES
        if each != name
    ]
    spec = {"name": name, "peers": peers, "lost_after_s": 2.0, **regions}
    tenancy = {} if tenant is None else {"tenancy": {"tenants": [{"name": "default", **tenant}]}}
    gateway = {"port": 0, "drain_timeout_s": 0.0}
    return Deployment.model_validate({"name": name, "regions": spec, "gateway": gateway, **tenancy})


async def site(stack: AsyncExitStack, ports: Ports, spec: Deployment) -> Site:
    """Start a cell."""
    clock, name = MonotonicClock(), spec.name
    scripted = ScriptedRouter(clock)
    scripted.views = [WORKER]
    scripted.reasons = {MODEL: None}
    costs = make_costs(spec, name, clock, time.time)
    router = make_region_router(
        spec,
        scripted,
        clock,
        dialer=lambda peer: Dialing(ports, peer.name),
        listener=lambda on_cell: ports.listener(name, on_cell),
        router_id=name,
        tokenizers={MODEL: "d"},
        epoch=1,
        budgets=None if costs is None else costs.budgets,
    )
    await router.start()
    gateway = make_gateway(
        spec, router, clock, make_metrics(spec), models_of(spec), costs=costs, limits_over=router.limits
    )
    host, port, _ = await stack.enter_async_context(listening(gateway))
    client = openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)
    stack.push_async_callback(client.close)
    return Site(scripted, router, client, costs)


@pytest_asyncio.fixture
async def sites() -> AsyncIterator[dict[str, Site]]:
    """Three cells that know each other; eu has no workers."""
    ports = Ports(dict.fromkeys(NAMES, 1))
    async with AsyncExitStack() as stack:
        found = {name: await site(stack, ports, deployment(name)) for name in NAMES}
        for each in found.values():
            each.join()
        found["eu"].scripted.views = []
        found["eu"].scripted.reasons = {MODEL: "no worker"}
        while found["eu"].router.not_ready_models()[MODEL] is not None or any(
            view.state not in ("here", "fresh") for view in found["eu"].router.cells()
        ):
            await asyncio.sleep(0.02)
        yield found
        for each in found.values():
            await each.leave()


async def test_a_stream_is_answered_by_another_cell_and_goes_on_in_a_third(sites: dict[str, Site]) -> None:
    eu, us, ap = sites["eu"], sites["us"], sites["ap"]
    asked = asyncio.ensure_future(
        eu.client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=4, temperature=0, stream=True)
    )
    away = await us.scripted.submitted()
    assert list(away.request.tokens) == [5, 6, 7]
    away.emit("one ")
    away.emit("two ")
    stream = await asked
    text = [chunk.choices[0].text async for chunk in _first(stream, 2)]
    await us.leave()
    async with asyncio.timeout(_PATIENCE_S):
        further = await ap.scripted.submitted()
    assert away.live is False
    assert further.request.resumed is not None
    assert further.request.resumed.tokens == (0, 1)
    assert further.request.resumed.characters == len("one two ")
    further.offsets[0] = 2
    further.emit("three ")
    further.emit("four", finish=FinishReason.LENGTH)
    further.finish()
    text += [chunk.choices[0].text async for chunk in stream if chunk.choices]
    assert "".join(text) == "one two three four"
    assert [view.lost for view in eu.router.cells() if view.cell == "us"] == [1]


async def _first(stream: Any, count: int) -> AsyncIterator[Any]:
    for _ in range(count):
        yield await anext(stream)


async def test_errors_of_another_cell_reach_the_client_as_its_own(sites: dict[str, Site]) -> None:
    eu, us = sites["eu"], sites["us"]
    asked = asyncio.ensure_future(eu.client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=4))
    away = await us.scripted.submitted()
    away.emit("a whole answer", finish=FinishReason.LENGTH)
    away.finish()
    assert (await asked).choices[0].text == "a whole answer"
    left = asyncio.ensure_future(eu.client.completions.create(model=MODEL, prompt=[8, 9], max_tokens=4))
    stream = await us.scripted.submitted(2)
    left.cancel()
    assert await us.scripted.cancels() == [stream.request.request_id]


async def test_a_tenant_of_another_cell_is_refused_with_its_place() -> None:
    async with AsyncExitStack() as stack:
        spec = deployment("us", residency={"default": ["eu"]})
        us = await site(stack, Ports(dict.fromkeys(NAMES, 1)), spec)
        with pytest.raises(
            openai.PermissionDeniedError, match="Data of tenant default stays in eu"
        ) as refused:
            await us.client.completions.create(model=MODEL, prompt=[5], max_tokens=4)
        assert refused.value.code == "data_residency"
        assert us.scripted.streams == []
        us.join()
        await us.leave()


async def test_requests_in_other_cells_and_their_costs_count_for_the_limits_of_a_tenant() -> None:
    async with AsyncExitStack() as stack:
        ports = Ports(dict.fromkeys(NAMES, 1))
        tenant = {"concurrency": 1, "budget": {"period": "month", "hard": 9}}
        found = {name: await site(stack, ports, deployment(name, tenant)) for name in NAMES}
        for each in found.values():
            each.join()
        eu, us = found["eu"], found["us"]
        asked = asyncio.ensure_future(us.client.completions.create(model=MODEL, prompt=[5], max_tokens=4))
        running = await us.scripted.submitted()
        with pytest.raises(openai.RateLimitError, match="limit is 1 requests at the same time") as refused:
            await eu.client.completions.create(model=MODEL, prompt=[5], max_tokens=4)
        assert refused.value.code == "concurrency_limit"
        running.emit("done", finish=FinishReason.LENGTH)
        running.finish()
        assert (await asked).choices[0].text == "done"
        spend(us, 9.5)
        async with asyncio.timeout(_PATIENCE_S):
            while eu.costs is None or eu.costs.budgets is None or eu.costs.budgets.reached("default") is None:
                await asyncio.sleep(0.02)
        with pytest.raises(openai.RateLimitError, match=r"9\.50 in other cells") as spent:
            await eu.client.completions.create(model=MODEL, prompt=[5], max_tokens=4)
        assert spent.value.code == "budget_exceeded"
        assert eu.scripted.streams == []
        for each in found.values():
            await each.leave()


def spend(cell: Site, amount: float) -> None:
    """Have the default tenant cost this much in a cell, and nothing in others."""
    assert cell.costs is not None
    assert cell.costs.budgets is not None
    spending = Spending(time.time)
    spending.update({int(time.time()) // HOUR_S * HOUR_S: {"default": amount}})
    cell.costs.budgets.refresh(spending)
