"""A gateway with its router in another process answers like one with it in the same process."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.kit.gateway.edge_link import SECRET, core_parts, far_core, linked
from tests.kit.gateway.http_edge import models_of
from tests.kit.gateway.scripted_router import ScriptedRouter, ScriptedStream
from tests.kit.lab.gateway import metric

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment, EngineSpec, GatewaySpec, ModelSpec, PoolSpec
from kvasir.config.spec.tenants import TenancySpec, TenantSpec
from kvasir.core.errors import CapacityError
from kvasir.core.requests import FinishReason, Request, Role
from kvasir.ports.responses import StoredResponse
from kvasir.ports.router import RequestSummary, ServedAdapter, StreamSink
from kvasir_platform.edge.core_pages import CorePages
from kvasir_platform.gateway.costs.keeper import CostKeeper
from kvasir_platform.gateway.costs.memory_store import MemoryCosts
from kvasir_platform.gateway.operator.operators import operators_here
from kvasir_platform.gateway.start import make_gateway, make_metrics
from kvasir_platform.gateway.tenants.memory_limits import MemoryLimits
from kvasir_platform.gateway.tenants.salts import CacheScope

ROOM = 6
FULL = CapacityError("It is full.", code="queue_full", retry_after_s=7.0)


class NarrowRouter(ScriptedRouter):
    """Refuses what goes beyond ROOM at a time, as admission does."""

    def submit(self, request: Request, sink: StreamSink) -> None:
        if sum(stream.live for stream in self.streams) >= ROOM:
            raise FULL
        super().submit(request, sink)


@dataclass
class Front:
    """A client of the gateway, and what is behind it."""

    client: httpx.AsyncClient
    router: ScriptedRouter
    limits: MemoryLimits
    metrics: Any

    def count(self, series: str, **labels: str) -> float:
        return metric(self.metrics.render().decode(), series, **labels)


@asynccontextmanager
async def front(
    router: ScriptedRouter,
    *,
    far: bool,
    keys: str | None = None,
    shares: Callable[[], Mapping[str, float]] = dict,
    costs: CostKeeper | None = None,
    **parts: Any,
) -> AsyncIterator[Front]:
    """`far`: over a link. `keys` is a file of API keys; `shares` are those of canaries. With `costs`, the
    core has the pages of a router; else they show what is asked."""
    spec = GatewaySpec(port=0, drain_timeout_s=0.0, api_keys_file=keys)
    deployment = Deployment.model_validate({"gateway": spec, **parts})
    metrics = make_metrics(deployment)
    limits = MemoryLimits(MonotonicClock().now)
    core = replace(core_parts(router, limits), shares=shares)
    if costs is not None:
        pages = operators_here(
            deployment, models_of(deployment), router, metrics, MonotonicClock(),
            in_flight=lambda: 0, draining=lambda: False, costs=costs,
        )  # fmt: skip
        core = replace(core, pages=CorePages(core.figures, pages))
    async with linked(core) as both:
        behind = far_core(both) if far else router
        gateway = make_gateway(deployment, behind, MonotonicClock(), metrics, models_of(deployment))
        started: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(gateway.serve(None, lambda *address: started.set_result(address)))
        host, port = await started
        try:
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=30.0) as client:
                yield Front(client, router, limits, metrics)
        finally:
            gateway.stop()
            await serving


async def test_salts_are_made_from_the_cores_secret_so_that_all_edges_have_the_same(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(hashlib.sha256(b"k").hexdigest())

    def answered(stream: ScriptedStream) -> None:
        stream.emit("Ahoy", finish=FinishReason.STOP)
        stream.finish()

    router = ScriptedRouter(MonotonicClock(), answered)
    async with front(router, far=True, keys=str(keys)) as made:
        body = {"model": "kvasir-tiny", "prompt": [1, 2], "max_tokens": 4}
        answer = await made.client.post("/v1/completions", json=body, headers={"authorization": "Bearer k"})
    assert answer.status_code == 200
    assert router.streams[0].request.salt == CacheScope(SECRET, "own", "default").salt()


async def test_an_adapter_is_a_model_at_the_edge_as_soon_as_the_edge_answers_that_it_is_loaded() -> None:
    router = ScriptedRouter(MonotonicClock())
    body = {"lora_name": "sql", "lora_path": "/adapters/sql"}
    async with front(router, far=True) as made:
        assert (await made.client.get("/v1/models/sql")).status_code == 404
        router.adapters.loaded["sql"] = ServedAdapter("sql", "kvasir-tiny", "sql@0123")
        asked = await made.client.post("/v1/load_lora_adapter", json=body)
        assert asked.text == f"/v1/load_lora_adapter{asked.request.content.decode()}"
        assert (await made.client.get("/v1/models/sql")).json()["parent"] == "kvasir-tiny"
        router.adapters.loaded.clear()
        await made.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert (await made.client.get("/v1/models/sql")).status_code == 404


async def test_the_share_of_a_canary_reaches_the_edges() -> None:
    router, canary = ScriptedRouter(MonotonicClock(), end_at_once), {"model": "second"}
    parts: dict[str, Any] = {
        "disaggregation": "never",
        "pools": (PoolSpec(name="one", role=Role.BOTH), PoolSpec(name="two", role=Role.BOTH, model="second")),
        "models": [{"name": "second", "source": ModelSpec().source}],
        "slo": [{"name": "default"}],
        "routes": [{"name": "chat", "model": "kvasir-tiny", "canary": canary}],
    }
    shares = {"chat": 1.0}
    async with front(router, far=True, shares=lambda: shares, **parts) as made:
        body = {"model": "chat", "prompt": [1, 2], "max_tokens": 4}
        assert (await made.client.post("/v1/completions", json=body)).json()["model"] == "second"
        assert router.streams[0].request.route_arm == ("chat", "second")
        assert made.count("kvasir_route_requests_total", arm="second", outcome="ok") == 1
        # A refusal comes after the request was sent over the link; the next model answers.
        router.refusals["second"] = FULL
        assert (await made.client.post("/v1/completions", json=body)).json()["model"] == "kvasir-tiny"
        assert made.count("kvasir_route_fallbacks_total", arm="second") == 1


async def test_responses_are_found_continued_forgotten_and_cancelled_through_the_core() -> None:
    router = ScriptedRouter(MonotonicClock(), end_at_once)
    async with front(router, far=True) as made:
        body: dict[str, Any] = {"model": "kvasir-tiny", "input": "Hi", "max_output_tokens": 4}
        first = (await made.client.post("/v1/responses", json=body)).json()
        path = f"/v1/responses/{first['id']}"
        assert (await made.client.get(path)).json() == first
        more = {**body, "previous_response_id": first["id"]}
        assert (await made.client.post("/v1/responses", json=more)).status_code == 200
        assert len(router.streams[1].request.tokens) > len(router.streams[0].request.tokens)
        assert (await made.client.delete(path)).json()["deleted"] is True
        assert (await made.client.get(path)).status_code == 404
        router.script = None
        running = await made.client.post("/v1/responses", json={**body, "background": True})
        path = f"/v1/responses/{running.json()['id']}"
        await router.submitted(3)
        assert (await made.client.get(path)).json()["status"] == "queued"
        cancelled = await made.client.post(f"{path}/cancel", json={})
        assert cancelled.json()["status"] == "cancelled"
        assert await router.cancels() == [router.streams[2].request.request_id]


async def test_what_an_edge_ran_in_the_background_is_lost_with_it() -> None:
    core = core_parts(ScriptedRouter(MonotonicClock()))
    found: list[StoredResponse | None] = []
    async with linked(core) as both:
        both.link.responses.put(StoredResponse("t", "a", b"{}", b"", "running"), lambda: None)
        both.link.responses.find("t", "a", found.append)
        while not found:
            await asyncio.sleep(0)
    while not both.heard.lost:
        await asyncio.sleep(0)
    core.responses.find("t", "a", found.append)
    assert [each.status for each in found if each is not None] == ["running", "lost"]


EMBEDDING: dict[str, Any] = {
    "model": ModelSpec(served_name="e"),
    "pools": (PoolSpec(name="embed", role=Role.EMBED, engine=EngineSpec(kind="sim")),),
    "disaggregation": "never",
}


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
async def test_a_call_with_more_inputs_than_there_is_room_for_takes_its_turns(far: bool) -> None:
    router = NarrowRouter(MonotonicClock(), lambda stream: stream.embed([float(len(stream.request.tokens))]))
    async with front(router, far=far, **EMBEDDING) as made:
        inputs = [[1] * (number + 1) for number in range(40)]
        answer = await made.client.post("/v1/embeddings", json={"model": "e", "input": inputs})
        assert answer.status_code == 200, answer.text
        assert [item["embedding"] for item in answer.json()["data"]] == [[n + 1.0] for n in range(40)]
        assert made.count("kvasir_requests_total") == 40
        assert made.count("kvasir_requests_total", outcome="ok") == 40


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_refusal_has_its_status_and_headers_and_costs_nothing(far: bool, stream: bool) -> None:
    router = ScriptedRouter(MonotonicClock())
    router.refusal = FULL
    limited = TenancySpec(tenants=(TenantSpec(name="default", requests_per_min=1, operator=True),))
    async with front(router, far=far, tenancy=limited) as made:
        body = {"model": "kvasir-tiny", "prompt": [1, 2], "max_tokens": 4, "stream": stream}
        for _ in range(3):
            answer = await made.client.post("/v1/completions", json=body)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "queue_full"
            assert answer.headers["retry-after"] == "7"
        assert made.count("kvasir_requests_total", outcome="queue_full") == 3
        assert made.count("kvasir_slo_requests_total") == 0
        router.refusal = None
        router.script = end_at_once
        assert (await made.client.post("/v1/completions", json=body)).status_code == 200
        assert (await made.client.post("/v1/completions", json=body)).status_code == 429


def end_at_once(stream: ScriptedStream) -> None:
    """One token and the end."""
    stream.emit("Hello", finish=FinishReason.STOP)
    stream.finish()


async def test_the_core_shows_what_is_asked_of_the_whole_deployment() -> None:
    async with front(ScriptedRouter(MonotonicClock()), far=True) as made:
        assert (await made.client.get("/status")).text == "/status"
        assert (await made.client.get("/requests")).text == "/requests"
        assert (await made.client.get("/decisions/x")).text == "/decisions/x"
        for shared in ("status", "requests"):
            viewers = [made.client.get(f"/console/{shared}") for _ in range(8)]
            assert {page.text for page in await asyncio.gather(*viewers)} == {f"/{shared}"}
        assert (await made.client.get("/console/prefixes")).text == "/console/prefixes"
        costs = await made.client.get("/console/costs?by=model&days=30")
        assert costs.text == '/costs{"by":"model","days":30}'
        drained = await made.client.post("/workers/w/drain", json={"reason": "r"})
        assert drained.text == '/workers/w/drain{"reason":"r"}'
        assert (await made.client.post("/recordings/me", json={})).text == "/recordings/me{}"
        assert (await made.client.get("/decisions")).text == "/decisions"
        assert (await made.client.get("/metrics")).status_code == 200
        assert (await made.client.get("/health/ready")).status_code == 200
        assert (await made.client.get("/v1/models")).json()["data"][0]["id"] == "kvasir-tiny"


async def test_an_edge_shows_the_cores_claims_of_a_request_and_its_costs_as_they_are_chosen() -> None:
    costs = CostKeeper(Deployment(), "router-test", MemoryCosts(), MonotonicClock(), time.time)
    router = ScriptedRouter(MonotonicClock())
    ended = RequestSummary(
        "r", "kvasir-tiny", "ok", 10.0, 13.0,
        routed_s=10.0, started_s=10.0, first_token_s=11.0, decode_worker="d-0",
    )  # fmt: skip
    router.summaries = [ended]
    async with front(router, far=True, costs=costs) as made:
        (timeline,) = (await made.client.get("/decisions/r")).json()["timelines"]
        page = (await made.client.get("/console/costs?by=model&days=30")).json()
    # Nothing is known of the worker: the request had it alone.
    times = {"prefill_s": 1.0, "decode_s": 2.0, "kv_s": 0.0, "transfer_s": 0.0, "wasted_s": 0.0}
    assert timeline["claims"] == [{"worker_id": "d-0", "pool": "(other)"} | times]
    assert (page["by"], page["counted"]) == (["day", "model"], True)
