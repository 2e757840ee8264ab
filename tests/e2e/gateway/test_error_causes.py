"""Codes of the router and of workers, each caused for real: over the gateway, the router, sessions with
workers and their engines, which compute nothing and fail when they are told to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from tests.kit.sim.product import GATEWAY, STREAM, Product, error_of, product

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


async def test_without_a_worker_there_is_none() -> None:
    async with product(routing={"queue_timeout_s": 0.1}) as served:
        worker = served.worker
        await served.cluster.kill(worker)
        await served.cluster.forget(worker)
        error_of(await served.ask(), "no_workers")


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
        error_of(await served.refused(6), "queue_full")


async def test_a_tenant_fills_its_part_of_the_queue_and_not_the_rest(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    names = ("red", "blue")
    keys.write_text("".join(f"{hashlib.sha256(name.encode()).hexdigest()} tenant={name}\n" for name in names))
    fields = {
        "routing": {"max_queue": 8},
        "gateway": {**GATEWAY, "api_keys_file": str(keys)},
        "tenancy": {"tenants": [{"name": name} for name in names]},
    }
    async with product(**fields) as served:
        served.cluster.faults.freeze(served.worker)
        error_of(await served.refused(12, "red"), "tenant_queue_full")
