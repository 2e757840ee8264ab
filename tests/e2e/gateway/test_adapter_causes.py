"""Codes of LoRA adapters, each caused over the gateway, the router and workers that read real files."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.kit.sim.product import POOL, STREAM, WITHIN_S, Product, error_of, product
from tests.kit.stack import ADAPTER

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import LoraLoadingSpec
from kvasir_workers.adapters.files import CONFIG_FILE, WEIGHTS_FILE, AdapterFiles
from kvasir_workers.adapters.store import AdapterStore

BASE = resolve_model("kvasir-tiny")
REPOSITORY = "my-org/sql"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What may be loaded: a sound adapter, `sound`, and others."""
    allowed = tmp_path / "adapters"
    shutil.copytree(ADAPTER, allowed / "sound")
    return allowed


def reading(folder: Path, store: type[AdapterStore] = AdapterStore, **loading: object) -> dict[str, Any]:
    """The parts of a deployment whose workers load from `folder` and from one repository."""
    spec = {"allow": (str(folder), REPOSITORY), "cache_folder": str(folder.parent / "cache"), **loading}
    checked = LoraLoadingSpec.model_validate(spec)
    return {"lora_loading": spec, "adapter_files": lambda: store(checked, BASE)}


async def load(served: Product, source: Path | str, name: str = "sql") -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(source)}
    return await served.client.post("/v1/load_lora_adapter", json=body)


async def unload(served: Product, name: str = "sql") -> httpx.Response:
    return await served.client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def changed(
    folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
) -> Path:
    """A copy of the sound adapter with other weights."""
    made = folder / name
    shutil.copytree(folder / "sound", made)
    save_file(dict(change(load_file(made / WEIGHTS_FILE))), made / WEIGHTS_FILE)
    return made


async def test_what_is_wrong_with_a_source_is_told_before_an_engine_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody listens on the discard port.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    wide = changed(
        folder, "wide", lambda ts: {n: torch.cat((t, t), dim=-1).contiguous() for n, t in ts.items()}
    )
    (folder / "empty").mkdir()
    cut = shutil.copytree(folder / "sound", folder / "cut") / WEIGHTS_FILE
    cut.write_bytes(cut.read_bytes()[:-8])
    async with product(**reading(folder, max_rank=8)) as served:
        outside = error_of(await load(served, folder.parent), "adapter_source_not_allowed")
        assert "lora_loading.allow" in outside
        for source in (folder / "empty", folder / "cut", folder / "nothing"):
            assert str(source) in error_of(await load(served, source), "adapter_unreadable")
        assert "was not trained on this model" in error_of(await load(served, wide), "adapter_base_mismatch")
        away = error_of(await load(served, REPOSITORY), "adapter_source_unavailable")
        assert REPOSITORY in away
        assert "kvasir lora list" in error_of(await unload(served), "adapter_not_found")


async def test_what_is_larger_than_the_engine_has_room_for_names_the_field_to_raise(folder: Path) -> None:
    async with product(**reading(folder, max_rank=4)) as served:
        told = error_of(await load(served, folder / "sound"), "adapter_rank_too_large")
        assert "raise lora_loading.max_rank" in told
    async with product(**reading(folder, max_bytes=1024)) as served:
        told = error_of(await load(served, folder / "sound"), "adapter_too_large")
        assert "lora_loading.max_bytes" in told


async def test_names_and_places_are_given_once_and_what_runs_is_waited_for(folder: Path) -> None:
    async with product(**reading(folder, max_adapters=1, timeout_s=0.3)) as served:
        sound = folder / "sound"
        assert (await load(served, sound)).status_code == 200
        assert "unload the adapter first" in error_of(await load(served, sound), "adapter_exists")
        assert "raise lora_loading.max_adapters (1)" in error_of(
            await load(served, sound, "other"), "adapter_limit"
        )
        body = STREAM | {"model": "sql"}
        async with served.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            late = error_of(await unload(served), "adapter_timeout")
            assert "`kvasir lora list` shows when it is done" in late
            # The stream ends with its client, and the adapter with it.


async def test_an_adapter_is_kept_while_a_worker_that_holds_it_is_away(folder: Path) -> None:
    async with product(**reading(folder)) as served:
        assert (await load(served, folder / "sound")).status_code == 200
        worker = served.cluster.workers[served.worker]
        served.cluster.network.unlisten(served.worker)
        served.cluster.network.cut(served.worker)
        async with asyncio.timeout(WITHIN_S):
            while served.cluster.router.workers()[0].state == "ready":
                await asyncio.sleep(0)
        told = error_of(await unload(served), "adapter_unreachable")
        assert f"{served.worker} holds the adapter 'sql'" in told
        assert "unload it when the worker is back or has left" in told
        served.cluster.network.listen(served.worker, worker.host.serve, worker.host.snapshot, worker.process)
        await served.cluster.ready()
        assert (await unload(served)).status_code == 200


async def test_where_nothing_may_be_loaded_the_field_to_set_is_named() -> None:
    async with product() as served:
        assert "lora_loading.allow" in error_of(
            await load(served, "/adapters/sql"), "adapter_loading_disabled"
        )


class Rewritten(AdapterStore):
    """A source that is written again whenever a worker reads it."""

    async def open(self, source: str) -> AdapterFiles:
        config = Path(source) / CONFIG_FILE
        config.write_text(config.read_text() + " ")
        return await super().open(source)


async def test_workers_that_read_other_files_than_the_first_leave_an_adapter_partly_loaded(
    folder: Path,
) -> None:
    async with product(**reading(folder, Rewritten), pools=[POOL | {"replicas": 2}]) as served:
        told = error_of(await load(served, folder / "sound"), "adapter_load_failed")
        assert "is on 1 workers, and 1 failed to load it" in told
        assert "are not those that other workers loaded" in told
        assert "unload the adapter and load it again" in told
        assert (await unload(served)).status_code == 200
