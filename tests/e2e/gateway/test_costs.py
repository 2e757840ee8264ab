"""Costs over HTTP and on the command line: what requests are charged, and budgets that bound it."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import openai
import pytest
from tests.e2e.gateway.conftest import POOLS, Product, Reply, read_reply
from tests.kit.browser.console_views import choose, pictured, rows, tab_to
from tests.kit.browser.tab import Tab
from tests.kit.gateway.http_edge import listening

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment, GatewaySpec
from kvasir.ports.router import RequestSummary
from kvasir.ports.stores.costs import DAY_S, HOUR_S, CostBatch, CostGroup, WorkerHour, WorkSums
from kvasir_platform.gateway.catalog.models import EdgeModel, ModelTable
from kvasir_platform.gateway.costs.keeper import CostKeeper
from kvasir_platform.gateway.costs.memory_store import MemoryCosts
from kvasir_platform.gateway.http.errors import MAX_RETRY_AFTER_S
from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer
from kvasir_platform.gateway.start import make_gateway, make_metrics
from kvasir_platform.sim.cluster import Cluster

YEAR_2030 = 1_900_000_000.0


class Feed(list[RequestSummary]):
    """The summaries of a cluster, which are charged."""

    costs: CostKeeper | None = None

    def append(self, summary: RequestSummary) -> None:
        if self.costs is not None:
            self.costs.ledger.ended(summary)


@dataclass
class Charged(Product):
    """A product whose costs are counted."""

    costs: CostKeeper
    metrics: Any
    store: MemoryCosts

    async def fetch(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Reply:
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        reply = await read_reply(reader)
        writer.close()
        return reply

    async def console(self, query: str) -> Any:
        return json.loads((await self.fetch("GET", f"/console/costs{query}")).body)

    async def earlier(self, days: int, requests: float) -> None:
        """Some days ago, requests of a model and an SLO class that there were kept a worker busy for half an
        hour."""
        hour = int(time.time() - days * DAY_S) // HOUR_S * HOUR_S
        group = CostGroup(hour, "decode", "default", "", "retired", "leisurely")
        worker = WorkerHour(hour, "decode", "decode-old", "router-old", 0.0, HOUR_S, HOUR_S / 2, 0.0, 1.0)
        work = {group: WorkSums(requests=requests, decode=100.0)}
        await self.store.add(CostBatch(f"router-{days}", 1, work, [worker]))

    async def chat(self) -> Reply:
        message = {"role": "user", "content": "Once upon a time"}
        body = {"model": "kvasir-tiny", "max_tokens": 8, "messages": [message]}
        return await self.fetch("POST", "/v1/chat/completions", body)


@asynccontextmanager
async def charged(
    tokenizer: ModelTokenizer, deployed: Mapping[str, Any] = MappingProxyType({})
) -> AsyncIterator[Charged]:
    clock = MonotonicClock()
    deployment = Deployment.model_validate(
        {"pools": POOLS, "gateway": GatewaySpec(port=0, drain_timeout_s=0.0), **deployed}
    )
    metrics = make_metrics(deployment)
    store = MemoryCosts()
    costs = CostKeeper(deployment, "router-test", store, clock, time.time)
    feed = Feed()
    feed.costs = costs
    cluster = Cluster(deployment, clock, summaries=feed)
    await cluster.start()
    costs.ledger.source = cluster.router
    costs.ledger.sample()
    metrics.track_costs(costs.figures)
    models = ModelTable([EdgeModel.of(deployment, tokenizer)])
    gateway = make_gateway(deployment, cluster.router, clock, metrics, models, costs=costs)
    async with (
        listening(gateway) as (host, port, _),
        openai.AsyncOpenAI(api_key="x", base_url=f"http://{host}:{port}/v1", max_retries=0) as client,
    ):
        yield Charged(cluster, client, f"{host}:{port}", costs, metrics, store)
    await cluster.rest()
    await cluster.close()


async def test_requests_are_charged_by_tenant_and_all_lines_add_up(
    tokenizer: ModelTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with charged(tokenizer) as made:
        for _ in range(3):
            await made.ask(max_tokens=8)
        page = json.loads((await made.fetch("POST", "/costs", {"by": ["tenant", "model"]})).body)
        assert await made.kvasir("cost", "--by", "tenant,model") == 0
        shown = capsys.readouterr().out
        assert await made.kvasir("cost", "-o", "json") == 0
        as_json = json.loads(capsys.readouterr().out)
        assert await made.kvasir("cost", "--focus", "csv", "--since", "2d") == 0
        rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
        assert await made.kvasir("cost", "--focus", "json", "--since", "2d") == 0
        focus = json.loads(capsys.readouterr().out)
        console = json.loads((await made.fetch("GET", "/console/costs")).body)
        scraped = (await made.fetch("GET", "/metrics")).body.decode()
    used = [line for line in page["lines"] if line["kind"] == "usage"]
    assert [line["names"] for line in used] == [{"tenant": "default", "model": "kvasir-tiny"}]
    assert (used[0]["requests"], used[0]["output_tokens"]) == (3, 24)
    assert used[0]["cached_tokens"] > 0
    assert sum(line["seconds"] for line in page["lines"]) == pytest.approx(page["device_seconds"], abs=0.01)
    assert sum(line["cost"] for line in page["lines"]) == pytest.approx(page["cost"], abs=1e-5)
    assert page["cost"] > 0
    assert shown.splitlines()[2].split()[:2] == ["TENANT", "MODEL"]
    assert "(idle)" in shown
    assert 0 < float(shown.splitlines()[3].split()[-1]) <= page["cost"] * 1.1
    assert as_json["by"] == ["tenant"]
    usage = [row for row in rows if row["x_Kind"] == "usage"]
    assert {row["SubAccountId"] for row in usage} == {"default"}
    assert {row["ServiceCategory"] for row in rows} == {"AI and Machine Learning"}
    assert sum(float(row["x_OutputTokens"]) for row in usage) == 24
    assert [row.keys() for row in focus] == [set(rows[0])] * len(rows)
    assert sum(row["x_OutputTokens"] for row in focus if row["x_Kind"] == "usage") == 24
    assert console["by"] == ["day", "tenant"]
    assert 'kvasir_cost_claimed_seconds_total{phase="decode",tenant="default"}' in scraped
    assert "kvasir_cost_stored 1.0" in scraped


async def test_a_hard_budget_refuses_until_it_is_renewed_and_a_soft_one_warns(
    tokenizer: ModelTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    budget = {"period": "month", "soft": 1e-9, "hard": 1.0}
    tenant = {"name": "default", "operator": True, "budget": budget}
    # A CPU core that costs a million an hour spends a budget with one request.
    spec = {"tenancy": {"tenants": [tenant]}, "cost": {"prices": {"cpu": 1e6}}}
    async with charged(tokenizer, spec) as made:
        first = await made.chat()
        made.costs.ledger.sample()
        await made.costs.write()
        refused = await made.chat()
        page = json.loads((await made.fetch("POST", "/costs", {})).body)
        scraped = (await made.fetch("GET", "/metrics")).body.decode()
    assert first.status == 200
    assert "x-kvasir-budget" not in first.headers
    error = json.loads(refused.body)["error"]
    assert (refused.status, error["code"]) == (429, "budget_exceeded")
    assert "of soft 0.00, hard 1.00" in error["message"]
    assert 0 < int(refused.headers["retry-after"]) <= MAX_RETRY_AFTER_S
    assert "x-kvasir-budget" in refused.headers
    assert page["budgets"][0]["spent"] > 1.0
    assert 'kvasir_cost_budget_ratio{bound="hard",tenant="default"}' in scraped
    assert 'kvasir_tenant_refused_total{reason="budget_exceeded",tenant="default"} 1.0' in scraped
    assert [record.message for record in caplog.records if "budget" in record.message] == [
        "a tenant has reached its soft budget",
        "a tenant has reached its hard budget",
    ]


async def test_a_soft_budget_only_adds_a_header(tokenizer: ModelTokenizer) -> None:
    tenant = {"name": "default", "operator": True, "budget": {"soft": 1e-9}, "requests_per_min": 100}
    spec = {"tenancy": {"tenants": [tenant]}, "cost": {"prices": {"cpu": 1e6}}}
    async with charged(tokenizer, spec) as made:
        await made.chat()
        made.costs.ledger.sample()
        await made.costs.write()
        answer = await made.chat()
    assert answer.status == 200
    assert answer.headers["x-kvasir-budget"].startswith("USD ")
    assert "x-ratelimit-remaining-requests" in answer.headers


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"by": ["colour"]}, "invalid_type"),
        ({"since": 5.0}, "invalid_value"),
        ({"since": YEAR_2030 * 2}, "invalid_value"),
        ({"whence": 1}, "invalid_type"),
    ],
)
async def test_a_question_that_makes_no_sense_is_refused(
    tokenizer: ModelTokenizer, body: dict[str, Any], code: str
) -> None:
    async with charged(tokenizer) as made:
        answer = await made.fetch("POST", "/costs", body)
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, code)


PHASES = ("prefill", "decode", "kv", "transfer", "wasted")


async def test_the_page_of_a_request_has_what_it_claims_of_its_workers(
    tokenizer: ModelTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with charged(tokenizer) as made:
        name = await made.ask(max_tokens=8)
        (timeline,) = json.loads((await made.fetch("GET", f"/decisions/{name}")).body)["timelines"]
        await made.fetch("POST", "/costs", {})
        charge = dict(made.costs.ledger.claimed)
        assert await made.kvasir("trace", name) == 0
        shown = capsys.readouterr().out
        assert await made.kvasir("trace", name, "-o", "json") == 0
        traced = json.loads(capsys.readouterr().out)
    prefilled, decoded = timeline["claims"]
    assert prefilled["worker_id"] in ("prefill-0", "prefill-1")
    assert decoded["worker_id"] in ("decode-2", "decode-3")
    assert (prefilled["pool"], decoded["pool"]) == ("prefill", "decode")
    assert (prefilled["prefill_s"] > 0, prefilled["decode_s"], prefilled["wasted_s"]) == (True, 0.0, 0.0)
    assert (decoded["prefill_s"], decoded["decode_s"] > 0, decoded["wasted_s"]) == (0.0, True, 0.0)
    for phase in PHASES:
        claimed = sum(each[f"{phase}_s"] for each in timeline["claims"])
        assert claimed == pytest.approx(charge.get(("default", phase), 0.0), abs=1e-5), phase
    lines = [line.split() for line in shown.splitlines()]
    head = ["WORKER", "POOL", *(phase.upper() for phase in PHASES)]
    at = lines.index(head)
    assert [line[:2] for line in lines[at + 1 : at + 3]] == [
        [each["worker_id"], each["pool"]] for each in timeline["claims"]
    ]
    (as_json,) = traced["timelines"]
    assert [list(each) for each in as_json["claims"]] == [
        ["worker_id", "pool", *(f"{phase}_s" for phase in PHASES)]
    ] * 2


async def test_the_console_s_page_has_the_dimension_and_the_days_that_are_asked_for(
    tokenizer: ModelTokenizer,
) -> None:
    async with charged(tokenizer, {"cost": {"retention_days": 31}}) as made:
        await made.ask(max_tokens=8)
        await made.earlier(3, 5.0)
        await made.earlier(15, 7.0)
        day = await made.console("?by=model&days=1")
        week = await made.console("?by=model")
        kept = await made.console("?by=slo&days=90")
        refused = await made.fetch("GET", "/console/costs?by=colour")
        now = time.time()

    def requests(page: Any) -> dict[str, int]:
        counts: dict[str, int] = {}
        for line in page["lines"]:
            if line["kind"] == "usage":
                name = line["names"][page["by"][1]]
                counts[name] = counts.get(name, 0) + line["requests"]
        return counts

    assert day["by"] == week["by"] == ["day", "model"]
    assert requests(day) == {"kvasir-tiny": 1}
    assert requests(week) == {"kvasir-tiny": 1, "retired": 5}
    assert kept["by"] == ["day", "slo"]
    assert requests(kept) == {"default": 1, "leisurely": 12}
    assert now - 31 * DAY_S - 2 * HOUR_S < kept["since"] <= now - 31 * DAY_S
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (400, "invalid_value")


async def test_costs_that_are_not_counted_say_so(edge: Any) -> None:
    answer = await edge.post("/costs", b"{}")
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"]) == (404, "costs_disabled")
    assert "cost.enabled" in error["message"]
    shown = await edge.get("/console/costs")
    assert json.loads(shown.body)["counted"] is False


SLO_CLASSES = "[...document.querySelectorAll('[aria-label=\"Costs by SLO class\"] tbody tr')]"


async def test_the_console_shows_what_tenants_cost(tokenizer: ModelTokenizer, tab: Tab) -> None:
    budget = {"soft": 5.0, "hard": 10.0}
    tenant = {"name": "default", "operator": True, "budget": budget}
    slos = [{"name": "chat"}, {"name": "batch"}]
    spec = {"tenancy": {"tenants": [tenant]}, "slo": slos}
    async with charged(tokenizer, spec) as made:
        for slo in ("chat", "chat", "batch"):
            await made.ask(max_tokens=8, **{"x-kvasir-slo": slo})
        await made.earlier(20, 40.0)
        made.costs.ledger.sample()
        await tab.open(f"http://{made.address}/console/#/tenants")
        (used,) = await rows(tab, "Costs by tenant")
        (bounded,) = await rows(tab, "Budgets of tenants")
        (day,) = await rows(tab, "Costs by day and kind")
        figures = await tab.until("document.querySelector('.figures')?.innerText")
        await pictured(tab, "costs")
        await tab_to(tab, "select[name=by]")
        for _ in ("key", "model"):
            await tab.press("ArrowDown")
        (model,) = await rows(tab, "Costs by model")
        assert await tab.until("document.activeElement.name") == "by"
        await choose(tab, "Costs by", "slo")
        classes = await rows(tab, "Costs by SLO class")
        await choose(tab, "Costs by", "pool")
        pools = await rows(tab, "Costs by pool")
        await choose(tab, "Costs by", "slo")
        await choose(tab, "Period", "30")
        await tab.until(f"{SLO_CLASSES}.length === 3")
        month = await rows(tab, "Costs by SLO class")
        days = await rows(tab, "Costs by day and kind")
        await pictured(tab, "costs-of-a-month")
        logged = tab.console
    assert (used["tenant"], used["requests"]) == ("default", "3")
    assert used["cost"].endswith("USD")
    assert bounded["hard"] == "10.00 USD"
    assert "idle" in day
    assert "cost of all workers" in figures
    assert (model["model"], model["requests"]) == ("kvasir-tiny", "3")
    assert {each["SLO class"]: each["requests"] for each in classes} == {"chat": "2", "batch": "1"}
    assert {each["pool"]: each["requests"] for each in pools} == {"prefill": "0", "decode": "3"}
    assert {each["SLO class"]: each["requests"] for each in month} == {
        "chat": "2", "batch": "1", "leisurely": "40",
    }  # fmt: skip
    assert len(days) == 2
    assert logged == []
