"""Codes of requests that wait for a worker or are not let in, each caused by load on a gateway, the router
and a worker that computes one request at a time."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.kit.lab.gateway import metric
from tests.kit.sim.product import ASKED, GATEWAY, WITHIN_S, Product, error_of, product

CROWD, MANY = 12, 100
"""Requests of 80 ms: those that wait at first, and more than are let in."""
PATIENT = {"name": "patient", "ttft_s": 60.0}


def keys(folder: Path, *tenants: str) -> str:
    """A file with a key for each tenant, which is its name."""
    path = folder / "keys"
    path.write_text(
        "".join(f"{hashlib.sha256(each.encode()).hexdigest()} tenant={each}\n" for each in tenants)
    )
    return str(path)


@asynccontextmanager
async def crowded(served: Product, key: str = "") -> AsyncIterator[None]:
    """Requests that wait for a worker that has stopped, after the router has measured how long one takes."""
    waiting = [asyncio.create_task(served.ask(key)) for _ in range(CROWD)]
    try:
        async with asyncio.timeout(WITHIN_S):
            for done in itertools.islice(asyncio.as_completed(waiting), CROWD // 3):
                assert (await done).status_code == 200
        served.cluster.faults.freeze(served.worker)
        yield
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_who_waits_for_longer_than_the_queue_allows_is_told() -> None:
    async with product(routing={"queue_timeout_s": 0.2}, admission={"patience": 0}) as served:
        served.cluster.faults.freeze(served.worker)
        told = error_of(await served.refused(3), "queue_timeout")
        assert "within 0.2 s" in told


async def test_a_request_ends_with_its_deadline() -> None:
    async with product(gateway={**GATEWAY, "request_timeout_s": 0.2}) as served:
        served.cluster.faults.freeze(served.worker)
        assert "was not done after 0." in error_of(await served.ask(), "request_timeout")


async def test_who_would_wait_too_long_is_told_at_once() -> None:
    async with product(slo=[PATIENT], admission={"patience": 0.05}) as served, crowded(served):
        told = error_of(await served.refused(MANY), "wait_too_long")
        assert "would wait for about" in told


async def test_who_cannot_start_before_its_deadline_is_told_at_once() -> None:
    async with (
        product(gateway={**GATEWAY, "request_timeout_s": 4.0}, slo=[PATIENT]) as served,
        crowded(served),
    ):
        told = error_of(await served.refused(MANY), "deadline_unreachable")
        assert "would wait for about" in told


async def test_a_tenant_over_its_share_hears_that_it_is_its_own_load(tmp_path: Path) -> None:
    async with product(
        slo=[PATIENT],
        admission={"patience": 0.05},
        gateway={**GATEWAY, "api_keys_file": keys(tmp_path, "red", "blue")},
        tenancy={"tenants": [{"name": "red"}, {"name": "blue"}]},
    ) as served:
        assert (await served.ask("blue")).status_code == 200
        async with crowded(served, "red"):
            told = error_of(await served.refused(MANY, "red"), "tenant_over_share")
            assert "would wait for about" in told


async def test_a_brownout_refuses_the_class_that_it_sheds(tmp_path: Path) -> None:
    brownout = {"steps": [{"shed": "batch"}], "enter": 0.01, "leave": 0.001, "enter_s": 0.0}
    async with product(
        admission={"brownout": brownout, "patience": 0},
        gateway={**GATEWAY, "api_keys_file": keys(tmp_path, "red", "nightly")},
        tenancy={"tenants": [{"name": "red"}, {"name": "nightly", "priority": "batch"}]},
    ) as served:
        assert (await served.ask("nightly")).status_code == 200
        async with crowded(served, "red"), asyncio.timeout(WITHIN_S):
            while not served.cluster.router.brownout("kvasir-tiny").level:
                await asyncio.sleep(0.01)
            told = error_of(await served.ask("nightly"), "shed")
            assert "refuses requests of this priority class" in told


async def test_a_line_of_a_batch_that_others_leave_no_room_for_is_counted_and_sent_again(
    tmp_path: Path,
) -> None:
    batches = {"storage": str(tmp_path / "files")}
    async with product(gateway={**GATEWAY, "batches": batches}) as served:
        served.cluster.faults.freeze(served.worker)
        waiting = asyncio.create_task(served.ask())
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ASKED}
        file = await served.client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", json.dumps(line).encode())}
        )
        batch = await served.client.post(
            "/v1/batches",
            json={
                "input_file_id": file.json()["id"],
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            },
        )
        path = f"/v1/batches/{batch.json()['id']}"
        async with asyncio.timeout(WITHIN_S):
            while not metric(
                (await served.client.get("/metrics")).text,
                "kvasir_requests_total",
                outcome="no_spare_capacity",
            ):
                await asyncio.sleep(0.02)
            served.cluster.faults.thaw(served.worker)
            assert (await waiting).status_code == 200
            while (done := (await served.client.get(path)).json())["status"] != "completed":
                await asyncio.sleep(0.02)
        assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
