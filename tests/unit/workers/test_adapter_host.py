"""A worker's adapters: one at a time, reported on every change, and removed when nothing uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvasir.config.spec.deployment import LoraLoadingSpec
from kvasir.core.errors import RequestError
from kvasir.core.messages import LoadAdapter
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_workers.adapters.files import AdapterFiles
from kvasir_workers.adapters.host import QUIET_S, AdapterHost

SPEC = LoraLoadingSpec(allow=("/a",), max_adapters=2)


class Engine:
    """Records what it holds; `legs` are the live ones of every adapter."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.legs = 0
        self.refuses = False

    async def add_adapter(self, key: str, folder: Path) -> None:
        if self.refuses:
            raise RequestError("no", code="adapter_refused")
        self.held.add(key)

    async def remove_adapter(self, key: str) -> None:
        self.held.remove(key)

    def adapter_legs(self, key: str) -> int:
        assert key in self.held
        return self.legs


class Store:
    """Files with the contents `digest`; those discarded are recorded."""

    def __init__(self) -> None:
        self.digest = "0123"
        self.opened = 0
        self.discarded: list[AdapterFiles] = []
        self.closed = False

    async def open(self, source: str) -> AdapterFiles:
        self.opened += 1
        await asyncio.sleep(0.5)
        return AdapterFiles(Path(source), 8, 100, self.digest)

    async def discard(self, files: AdapterFiles) -> None:
        self.discarded.append(files)

    async def close(self) -> None:
        self.closed = True


class Bench:
    """A host with its surroundings, and the names in each of its reports."""

    def __init__(self) -> None:
        self.engine, self.store, self.clock = Engine(), Store(), VirtualClock()
        self.host = AdapterHost(self.engine, self.store, SPEC, self.clock, taken=("m",))
        self.reports: list[list[tuple[str, bool]]] = []
        self.host.on_change = lambda: self.reports.append([(h.name, h.retiring) for h in self.host.held])

    async def load(self, name: str = "sql", source: str = "/a/x", **order: Any) -> None:
        await self.host.load(LoadAdapter(1, name, source, **order))


def play(scenario: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        bench = Bench()
        await scenario(bench)
        await bench.host.close()
        assert bench.store.closed

    run_virtual(main())


async def refused(bench: Bench, *arguments: str, **order: Any) -> str:
    with pytest.raises(RequestError) as caught:
        await bench.load(*arguments, **order)
    return caught.value.code


def test_an_adapter_is_reported_when_the_engine_has_it() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.load(replicas=1)
        (held,) = bench.host.held
        assert (held.key, held.replicas, held.rank) == ("sql@0123", 1, 8)
        assert bench.engine.held == {"sql@0123"}
        assert bench.reports == [[("sql", False)]]

    play(scenario)


def test_a_repeated_order_loads_nothing_and_one_for_other_files_is_refused() -> None:
    async def scenario(bench: Bench) -> None:
        await asyncio.gather(bench.load(), bench.load(), bench.load(digest="0123"))
        assert bench.store.opened == 1
        assert await refused(bench, "sql", "/a/y") == "adapter_exists"
        assert await refused(bench, digest="4567") == "adapter_exists"
        assert await refused(bench, "m") == "adapter_exists"
        assert await refused(bench, "s q l") == "invalid_value"
        assert len(bench.reports) == 1

    play(scenario)


def test_files_other_than_those_of_other_workers_are_refused_and_discarded() -> None:
    async def scenario(bench: Bench) -> None:
        assert await refused(bench, digest="4567") == "adapter_load_failed"
        bench.engine.refuses = True
        assert await refused(bench) == "adapter_refused"
        assert len(bench.store.discarded) == 2
        assert (bench.host.held, bench.reports) == ((), [])

    play(scenario)


def test_a_full_worker_refuses_a_further_one() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.load("a")
        await bench.load("b")
        assert await refused(bench, "c") == "adapter_limit"

    play(scenario)


def test_an_adapter_in_use_retires_at_once_and_is_removed_when_nothing_has_used_it_for_a_while() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.load()
        bench.engine.legs = 1
        waiting = [asyncio.ensure_future(bench.host.unload("sql")) for _ in range(2)]
        await bench.clock.sleep(10.0)
        assert bench.reports[-1] == [("sql", True)]
        assert await refused(bench) == "adapter_exists"
        bench.engine.legs = 0
        await bench.clock.sleep(QUIET_S / 2)
        bench.engine.legs = 1
        await bench.clock.sleep(QUIET_S)
        assert bench.engine.held == {"sql@0123"}
        bench.engine.legs = 0
        await asyncio.gather(*waiting)
        assert (bench.engine.held, bench.host.held, bench.reports[-1]) == (set(), (), [])
        assert len(bench.store.discarded) == 1
        await bench.host.unload("sql")
        await bench.load()

    play(scenario)


def test_the_removal_goes_on_when_the_caller_has_gone() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.load()
        unloading = asyncio.ensure_future(bench.host.unload("sql"))
        await bench.clock.sleep(0.1)
        unloading.cancel()
        await bench.clock.sleep(2 * QUIET_S)
        assert bench.host.held == ()

    play(scenario)
