"""Codes of what a deployment keeps elsewhere, each caused by a store that is gone: over the gateway, with the
router's own clients of Redis, SQLite and folders."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
from tests.kit.sim.product import GATEWAY, POOL, Product, error_of, product

#: Nobody listens on the discard port.
GONE = {"url": "redis://127.0.0.1:9/0"}
ROUTED: dict[str, Any] = {
    "models": [{"name": "second", "source": "kvasir-tiny"}],
    "pools": [POOL, POOL | {"name": "second", "model": "second"}],
    "routes": [{"name": "chat", "model": "kvasir-tiny", "canary": {"model": "second"}}],
    "slo": [{"name": "default"}],
}


async def upload(served: Product, key: str) -> httpx.Response:
    file = {"file": ("in.jsonl", b"{}")}
    return await served.client.post(
        "/v1/files", data={"purpose": "batch"}, files=file, headers={"authorization": f"Bearer {key}"}
    )


async def order(served: Product, route: str, action: str) -> httpx.Response:
    return await served.client.post(
        f"/rollouts/{route}/{action}", json={}, headers={"authorization": "Bearer operator"}
    )


async def test_without_its_stores_a_router_says_which_one_does_not_answer(tmp_path: Path) -> None:
    keys, folder, costs = tmp_path / "keys", tmp_path / "files", tmp_path / "costs.db"
    keys.write_text(f"{hashlib.sha256(b'operator').hexdigest()} tenant=ops\n")
    async with product(
        **ROUTED,
        cost={"enabled": True, "file": str(costs)},
        gateway={
            **GATEWAY,
            "api_keys_file": str(keys),
            "api_keys_redis": True,
            "batches": {"storage": str(folder)},
        },
        tenancy={"tenants": [{"name": "ops", "operator": True}], "redis": GONE},
    ) as served:
        assert "Try again" in error_of(await served.ask("made in Redis"), "api_keys_unavailable")
        told = error_of(await order(served, "chat", "start"), "rollouts_unavailable")
        assert "127.0.0.1:9" in told
        assert (await upload(served, "operator")).status_code == 200
        shutil.rmtree(folder)
        folder.write_text("no folder any more")
        told = error_of(await upload(served, "operator"), "storage_unavailable")
        assert "The storage of files and batches fails" in told
        with closing(sqlite3.connect(costs)) as other:
            other.execute("DROP TABLE work")
        answer = await served.client.post(
            "/costs", json={"by": ["tenant"]}, headers={"authorization": "Bearer operator"}
        )
        assert str(costs) in error_of(answer, "costs_unavailable")


async def test_orders_that_do_not_apply_to_a_rollout_are_refused_with_those_that_do() -> None:
    async with product(**ROUTED) as served:
        assert (await order(served, "chat", "start")).status_code == 200
        told = error_of(await order(served, "chat", "start"), "rollout_state")
        assert "start applies to one that is" in told
        assert "there are: chat" in error_of(await order(served, "poems", "start"), "rollout_not_found")
