"""Codes of the router and of workers, each caused for real: over the gateway, the router, sessions with
workers and their engines, which compute nothing and fail when they are told to."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
from tests.kit.sim.product import GATEWAY, STREAM, WITHIN_S, Product, error_of, product

from kvasir_platform.gateway.console.live_pages import MOST_VIEWERS
from kvasir_router.recordings.recorder import MOST_READERS

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


async def test_what_an_engine_says_of_a_request_is_what_its_client_hears() -> None:
    async with product() as served:
        for code in OF_ENGINES:
            served.cluster.faults.fail(served.worker, code)
            error_of(await served.ask(), code)


async def test_without_a_worker_there_is_none_to_serve_to_drain_or_to_be_ready() -> None:
    async with product(routing={"queue_timeout_s": 0.1}, worker={"resume_window_s": 0.2}) as served:
        worker = served.worker
        assert worker in error_of(await drain(served, "serve-9"), "worker_not_found")
        await served.cluster.kill(worker)
        async with asyncio.timeout(WITHIN_S):
            while (answer := await drain(served, worker)).status_code == 202:
                await asyncio.sleep(0)
        told = error_of(answer, "session_lost")
        assert "try again once `kvasir get workers` does not show it connecting" in told
        await served.cluster.forget(worker)
        error_of(await served.ask(), "no_workers")
        told = error_of(await served.client.get("/health/ready"), "not_ready")
        assert "no worker of role both" in told


async def drain(served: Product, worker: str) -> httpx.Response:
    return await served.client.post(f"/workers/{worker}/drain", json={})


async def test_a_stream_that_nobody_can_go_on_with_ends_with_its_reason() -> None:
    async with product(routing={"queue_timeout_s": 0.1}, worker={"resume_window_s": 0.2}) as served:
        worker = served.worker
        error = await _killed(served, STREAM)
    assert error["code"] == "no_workers"
    assert f"worker {worker} was lost" in error["message"]


async def test_a_stream_that_no_other_worker_can_repeat_exactly_ends_with_the_loss() -> None:
    drawn = STREAM | {"temperature": 0.7, "presence_penalty": 0.5}
    async with product(worker={"resume_window_s": 0.2}) as served:
        worker = served.worker
        error = await _killed(served, drawn)
    assert error["code"] == "worker_lost"
    assert f"worker {worker} was lost" in error["message"]


async def _killed(served: Product, body: dict[str, Any]) -> dict[str, str]:
    """The error of a stream whose worker is killed after its first token."""
    async with served.client.stream("POST", "/v1/completions", json=body) as answer:
        events = [line async for line in _killed_after_the_first(served, served.worker, answer)]
    error: dict[str, str] = json.loads(events[-1].removeprefix("data: "))["error"]
    return error


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
        error_of(await served.refused(6), "queue_full")


async def test_a_tenant_fills_its_part_of_the_queue_and_not_the_rest(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    names = ("red", "blue")
    keys.write_text("".join(f"{hashlib.sha256(name.encode()).hexdigest()} tenant={name}\n" for name in names))
    fields: dict[str, Any] = {
        "routing": {"max_queue": 8},
        "gateway": {**GATEWAY, "api_keys_file": str(keys)},
        "tenancy": {"tenants": [{"name": name} for name in names]},
    }
    async with product(**fields) as served:
        served.cluster.faults.freeze(served.worker)
        error_of(await served.refused(12, "red"), "tenant_queue_full")


async def test_a_router_is_recorded_and_watched_by_so_many_at_once() -> None:
    async with product() as served:
        for reader in range(MOST_READERS):
            opened = await served.client.post(f"/recordings/r{reader}", json={"salt": "00" * 16})
            assert opened.status_code == 200, opened.text
        refused = await served.client.post("/recordings/late", json={"salt": "00" * 16})
        assert "end one, and try again" in error_of(refused, "too_many_recordings")
        async with AsyncExitStack() as watching:
            for _ in range(MOST_VIEWERS):
                await watching.enter_async_context(served.client.stream("GET", "/console/live"))
            error_of(await served.client.get("/console/live"), "no_capacity")
