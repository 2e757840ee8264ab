"""A request through gateway, router and simulated workers, and its explanation afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import pytest_asyncio

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment, EngineSpec, GatewaySpec, PoolSpec
from kvasir.core.requests import Role
from kvasir_platform.cli.main import main
from kvasir_platform.gateway.catalog.models import EdgeModel, ModelTable
from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer
from kvasir_platform.gateway.start import make_gateway, make_metrics
from kvasir_platform.sim.cluster import Cluster

ENGINE = EngineSpec(kind="sim", block_size=32)
POOLS = (
    PoolSpec(name="prefill", role=Role.PREFILL, replicas=2, engine=ENGINE),
    PoolSpec(name="decode", role=Role.DECODE, replicas=2, engine=ENGINE),
)
STORY = "Once upon a time there was a router that knew what every worker holds. " * 20


@dataclass
class Product:
    """Everything but real engines, behind one address."""

    cluster: Cluster
    client: openai.AsyncOpenAI
    address: str

    async def ask(self, **headers: str) -> str:
        """Send the same prompt as ever; returns the id that the answer carried."""
        raw = await self.client.chat.completions.with_raw_response.create(
            model="kvasir-tiny",
            messages=[{"role": "user", "content": STORY}],
            max_tokens=8,
            extra_headers=headers,
        )
        raw.parse()
        return str(raw.headers["x-request-id"])

    async def kvasir(self, *arguments: str) -> int:
        """The command line, asking this gateway."""
        return await asyncio.to_thread(main, [*arguments, "--address", self.address])


@pytest_asyncio.fixture
async def product(tokenizer: ModelTokenizer) -> AsyncIterator[Product]:
    clock = MonotonicClock()
    deployment = Deployment(pools=POOLS, gateway=GatewaySpec(port=0, drain_timeout_s=0.0))
    metrics = make_metrics(deployment)
    cluster = Cluster(deployment, clock, on_decision=metrics.decided)
    await cluster.start()
    metrics.track_index(cluster.router.index_stats)
    models = ModelTable([EdgeModel.of(deployment, tokenizer)])
    gateway = make_gateway(deployment, cluster.router, clock, metrics, models)
    started: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(gateway.serve(None, lambda host, port: started.set_result((host, port))))
    host, port = await started
    async with openai.AsyncOpenAI(api_key="x", base_url=f"http://{host}:{port}/v1", max_retries=0) as client:
        yield Product(cluster, client, f"{host}:{port}")
    gateway.stop()
    await serving
    await cluster.rest()
    await cluster.close()


async def explained(product: Product, capsys: pytest.CaptureFixture[str], request_id: str) -> Any:
    capsys.readouterr()
    assert await product.kvasir("explain", request_id, "-o", "json") == 0
    (record,) = json.loads(capsys.readouterr().out)["decisions"]
    return record


async def test_a_second_request_goes_where_the_first_left_its_blocks_and_says_so(
    product: Product, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await explained(product, capsys, await product.ask())
    second = await explained(product, capsys, await product.ask())
    assert first["outcome"] == second["outcome"] == "ok"
    assert (first["predicted_cached_tokens"], first["actual_cached_tokens"]) == (0, 0)
    assert second["prefill_worker"] == first["prefill_worker"]
    assert second["predicted_cached_tokens"] == second["actual_cached_tokens"] > 0
    assert second["slo_met"] is True
    assert second["actual_ttft_s"] > 0
    parts = {part["part"]: part["places"] for part in second["parts"]}
    for part, chosen in (("prefill", second["prefill_worker"]), ("decode", second["decode_worker"])):
        assert {place["pool"] for place in parts[part]} == {part}
        assert len(parts[part]) == 2
        assert [place["worker_id"] for place in parts[part] if place["chosen"]] == [chosen]
    assert parts["prefill"][0]["facts"]["cached_tokens"] == second["predicted_cached_tokens"]
    assert {place["kv_state"] for place in parts["prefill"]} == {"exact"}
    assert all(place["total"] == pytest.approx(sum(place["terms"].values())) for place in parts["prefill"])


async def test_the_command_line_tells_people_who_holds_what_and_why(
    product: Product, capsys: pytest.CaptureFixture[str]
) -> None:
    name = await product.ask(**{"x-request-id": "mine-1", "x-session-id": "tab"})
    assert name == "mine-1"
    assert await product.kvasir("explain", name) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[1].startswith("Prefilled on prefill-")
    assert "prefill: 2 considered, terms in ms" in told
    assert "SLO default: met" in told
    assert await product.kvasir("get", "workers") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:6] == ["WORKER", "POOL", "ROLE", "STATE", "HEALTH", "KV"]
    assert [row.split()[4:6] for row in rows] == [["healthy", "exact"]] * 4
    assert sum(int(row.split()[6]) for row in rows) > 0


async def test_metrics_show_the_index_the_decision_and_the_promise_kept(product: Product) -> None:
    await product.ask()
    shown = (await product.client.get("/../metrics", cast_to=str)).splitlines()
    values = dict(line.rsplit(" ", 1) for line in shown if not line.startswith("#"))
    assert float(values["kvasir_index_blocks"]) > 0
    assert float(values["kvasir_decision_seconds_count"]) == 1
    assert values['kvasir_slo_requests_total{met="yes",slo="default"}'] == "1.0"
    assert values['kvasir_cached_tokens_error_ratio_bucket{le="0.0",model="kvasir-tiny"}'] == "1.0"
    exact = [name for name in values if name.startswith("kvasir_worker_kv_state{") and "exact" in name]
    assert [values[name] for name in exact] == ["1.0"] * 4


async def test_a_decision_is_judged_when_its_request_has_ended(
    product: Product, capsys: pytest.CaptureFixture[str]
) -> None:
    record = await explained(product, capsys, await product.ask())
    assert record["regret_s"] >= 0.0
    assert sum(record["regret_causes"].values()) == pytest.approx(record["regret_s"])
    assert await product.kvasir("explain") == 0
    assert "of 1 judged decisions" in capsys.readouterr().out
