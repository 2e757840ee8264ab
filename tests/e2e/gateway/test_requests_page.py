"""The page of requests: what runs, and the slowest and newest of what ended."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from kvasir.core.requests import Usage
from kvasir.ports.router import AdmissionView, RequestSummary
from kvasir_platform.gateway.operator.requests_page import MOST_ENDED

CHAT = "/v1/chat/completions"
BODY = b'{"model":"kvasir-tiny","messages":[{"role":"user","content":"hi"}]}'
ENDED = RequestSummary(
    "r", "kvasir-tiny", "ok", 10.0, 11.0,
    routed_s=10.1, first_token_s=10.5, decode_worker="d-0", tenant="acme",
    usage=Usage(prompt_tokens=30, cached_tokens=16, output_tokens=6),
)  # fmt: skip


async def page(edge: Any) -> dict[str, Any]:
    reply = await edge.get("/requests")
    assert reply.status == 200
    found: dict[str, Any] = json.loads(reply.body)
    return found


async def test_a_running_request_is_listed_with_its_progress(edge: Any) -> None:
    call = asyncio.ensure_future(edge.post(CHAT, BODY))
    stream = await edge.router.submitted()
    stream.emit("a")
    stream.emit("b")
    found = await page(edge)
    (row,) = found["running"]
    assert found["in_flight"] == 1
    assert (row["request_id"], row["phase"], row["output_tokens"]) == (
        stream.request.request_id, "decoding", 2,
    )  # fmt: skip
    assert row["prompt_tokens"] == len(stream.request.tokens)
    assert row["age_s"] >= row["ttft_s"] >= 0.0
    stream.finish()
    await call
    assert (await page(edge))["running"] == []


async def test_ended_requests_are_listed_by_duration_and_by_time(edge: Any) -> None:
    count = MOST_ENDED + 5
    edge.router.summaries = [
        replace(ENDED, request_id=f"r{i}", finished_s=11.0 + i, arrival_s=10.0 + 2 * i) for i in range(count)
    ]
    edge.router.admissions = {"kvasir-tiny": AdmissionView(queued=2, parked=1)}
    found = await page(edge)
    assert found["queued"] == 3
    assert len(found["slowest"]) == len(found["latest"]) == MOST_ENDED
    assert (found["slowest"][0]["request_id"], found["latest"][0]["request_id"]) == ("r0", f"r{count - 1}")
    slowest = found["slowest"][0]
    assert (slowest["tenant"], slowest["e2e_s"], slowest["ttft_s"]) == ("acme", 1.0, 0.5)
    assert (slowest["queued_s"], slowest["itl_s"], slowest["cached_tokens"]) == (0.1, 0.1, 16)


async def test_the_decision_page_has_the_timeline_of_a_request_that_runs_and_has_ended(edge: Any) -> None:
    call = asyncio.ensure_future(edge.post(CHAT, BODY))
    stream = await edge.router.submitted()
    name = stream.request.request_id
    found = json.loads((await edge.get(f"/decisions/{name}")).body)
    assert found["decisions"] == []
    assert found["timelines"][0]["running"] == "prefilling"
    stream.emit("a")
    stream.finish()
    await call
    edge.router.summaries = [stream.summary("ok", 0)]
    found = json.loads((await edge.get(f"/decisions/{name}")).body)
    (timeline,) = found["timelines"]
    assert (timeline["outcome"], timeline["running"], timeline["output_tokens"]) == ("ok", None, 1)
    assert timeline["phases"][-1]["end_s"] == timeline["total_s"]
    assert timeline["claims"] is None


async def test_the_status_has_a_verdict_its_queues_and_its_pools(edge: Any) -> None:
    edge.router.admissions = {"kvasir-tiny": AdmissionView(queued=4, pressure=2.0, wait_s=5.0)}
    edge.router.reasons = {"kvasir-tiny": None}
    status = json.loads((await edge.get("/status")).body)
    assert status["queues"]["kvasir-tiny"]["queued"] == 4
    assert [pool["serving"] for pool in status["pools"]] == [0] * len(status["pools"])
    assert status["verdict"]["ok"] is False
    codes = {problem["code"] for problem in status["verdict"]["problems"]}
    assert {"queue_wait", "pool_short"} <= codes
    assert status["verdict"]["sentence"].startswith("Service is degraded: a typical request to kvasir-tiny")
