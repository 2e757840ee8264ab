"""Codes of the gateway, the router and the sessions of workers, each caused for real: over all of them, with
engines that compute nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.kit.sim.product import ASKED, GATEWAY, STREAM, WITHIN_S, Product, error_of, product

from kvasir.core.requests import StepBatch
from kvasir_platform.gateway import app
from kvasir_platform.gateway.console.live_pages import MOST_VIEWERS
from kvasir_router.recordings.recorder import MOST_READERS


async def test_a_worker_that_drains_before_its_router_knows_refuses() -> None:
    async with product(routing={"max_retries": 0}) as served:
        faults, worker = served.cluster.faults, served.worker
        # What either of them sends is held back, the notice of the drain too.
        faults.partition(worker)
        await served.cluster.workers[worker].host.drain("an upgrade", 0.0)
        asked = asyncio.create_task(served.ask())
        async with asyncio.timeout(WITHIN_S):
            while not served.cluster.router.in_flight:
                await asyncio.sleep(0)
        faults.heal(worker)
        assert error_of(await asked, "worker_draining") == "an upgrade"


async def test_a_worker_that_loses_a_token_is_told_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async with product() as served:
        host = served.cluster.workers[served.worker].host
        deliver = host.deliver

        def without_one(batch: StepBatch) -> None:
            deliver(replace(batch, deltas=tuple(delta for delta in batch.deltas if delta.offset != 1)))

        monkeypatch.setattr(host, "deliver", without_one)
        told = error_of(await served.ask(), "protocol_error")
        assert f"worker {served.worker} broke the stream" in told


class Same(random.Random):
    """Draws the same number each time."""

    def getrandbits(self, _bits: int) -> int:
        return 7


async def test_an_id_that_is_in_flight_is_not_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    # The gateway adds to an id of a client what it draws.
    monkeypatch.setattr(app, "random", SimpleNamespace(SystemRandom=Same))
    async with product() as served:
        named = {"x-request-id": "mine"}
        async with served.client.stream("POST", "/v1/completions", json=STREAM, headers=named) as answer:
            await anext(answer.aiter_lines())
            second = await served.client.post("/v1/completions", json=ASKED, headers=named)
            assert "mine-00000007 is in flight" in error_of(second, "duplicate_request")
        other = await served.client.post("/v1/completions", json=ASKED, headers={"x-request-id": "other"})
        assert other.status_code == 200


async def test_a_stored_file_that_others_wrote_over_is_a_fault_of_ours(tmp_path: Path) -> None:
    async with product(gateway={**GATEWAY, "batches": {"storage": str(tmp_path)}}) as served:
        uploaded = await served.client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", b"{}")}
        )
        for kept in filter(Path.is_file, tmp_path.rglob("*")):
            kept.write_bytes(b"no JSON")
        told = error_of(await served.client.get(f"/v1/files/{uploaded.json()['id']}"), "internal_error")
        assert "the log has the details" in told
        assert (await served.ask()).status_code == 200


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
