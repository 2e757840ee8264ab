"""A router in a pod discovers workers by EndpointSlices only; the API server may be unavailable."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.kit.cluster.api_server import SLICES, ApiServer, api_server
from tests.kit.cluster.slices import Pod, endpoint_slice
from tests.kit.gateway.api_requests import Rule
from tests.kit.lab import gateway
from tests.kit.lab.invariants import ends_at_rest
from tests.kit.lab.processes import LabProcess, Processes
from tests.kit.lab.stream import Ask, complete, open_stream

from kvasir.clock import MonotonicClock
from kvasir.config.load.loader import load
from kvasir.ports.clock import Clock

pytestmark = pytest.mark.slow
PATIENCE_S = 60.0
ACCOUNT = "system:serviceaccount:default:router"


@dataclass
class Cluster:
    """Processes that stand for pods: each worker has an address of its own, and all have one port."""

    folder: Path
    server: ApiServer
    processes: Processes
    port: int
    address: str = ""
    clock: Clock = field(default_factory=MonotonicClock)
    key: str = ""
    started: list[LabProcess] = field(default_factory=list)

    def pids(self) -> dict[str, int]:
        return {each.name: each.pid for each in self.started if each.alive}

    def gateways(self) -> dict[str, str]:
        return {"router": self.address}

    @property
    def spec(self) -> list[str]:
        account = self.folder / "account"
        return [
            f"discovery={{kind: kubernetes, kubernetes: {{credentials_dir: {account}}}}}",
            "pools.prefill.engine.kind=sim",
            "pools.decode.engine.kind=sim",
            "gateway.port=0",
        ]

    def write(self, name: str, *overrides: str) -> Path:
        file = self.folder / f"{name}.yaml"
        # JSON is YAML too.
        file.write_text(json.dumps(load(None, [*self.spec, *overrides]).model_dump(mode="json")))
        return file

    async def start_worker(self, pool: str, host: str) -> LabProcess:
        file = self.write(f"worker-{host}", f"worker.host={host}")
        argv = [sys.executable, "-m", "kvasir_platform.apps.worker_node", "--deployment", str(file)]
        argv += ["--pool", pool, "--port", str(self.port)]
        process, _ = await self.processes.start_ready(f"worker-{host}", argv, "serving")
        self.started.append(process)
        return process

    async def start_router(self) -> None:
        argv = [sys.executable, "-m", "kvasir_platform.apps.router_app", "--deployment"]
        process, said = await self.processes.start_ready(
            "router", [*argv, str(self.write("router"))], "listening"
        )
        self.started.append(process)
        self.address = said["address"]

    def put(self, pool: str, *pods: Pod) -> None:
        self.server.put(SLICES, endpoint_slice(pool, pods, port=self.port))

    async def until_workers(self, expected: dict[str, str]) -> None:
        """Wait until the router shows just these states, by the workers' hosts."""

        async def seen() -> bool:
            found = await gateway.workers(self.address)
            return {at.partition(":")[0]: each["state"] for at, each in found.items()} == expected

        await gateway.until(seen, PATIENCE_S, f"workers {expected}", MonotonicClock(), 0.05)

    async def check(self) -> dict[str, Any]:
        """`kvasir check` in the router's pod; its JSON."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvasir_platform.cli.main", "-o", "json", "check"),
            *("-f", str(self.write("router"))),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | self.server.environment(),
        )
        output, _ = await process.communicate()
        found: dict[str, Any] = json.loads(output)
        return found


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    async with api_server(tmp_path) as server:
        server.write_credentials(tmp_path / "account")
        server.rules[ACCOUNT] = (Rule(("discovery.k8s.io",), ("endpointslices",), ("list", "watch")),)
        processes = Processes(tmp_path, os.environ | server.environment())
        try:
            yield Cluster(tmp_path, server, processes, port)
        finally:
            await processes.close()


async def test_streams_and_members_outlive_the_api_server_and_workers_come_and_go_by_slices(
    cluster: Cluster,
) -> None:
    cluster.put("prefill", Pod("p-0", "127.0.0.2"))
    cluster.put("decode", Pod("d-0", "127.0.0.3"))
    await asyncio.gather(
        cluster.start_worker("prefill", "127.0.0.2"),
        cluster.start_worker("decode", "127.0.0.3"),
        cluster.start_router(),
    )
    await cluster.until_workers({"127.0.0.2": "ready", "127.0.0.3": "ready"})

    async with ends_at_rest(cluster):
        await outlives(cluster)


async def outlives(cluster: Cluster) -> None:
    clock = cluster.clock
    stream = await open_stream(cluster.address, Ask(tuple(range(10, 80)), 200), clock)
    await stream.begun.wait()
    cluster.server.stop()
    await stream.ended.wait()
    assert stream.outcome.exact, stream.outcome
    assert (await complete(cluster.address, Ask(tuple(range(20, 90)), 20), clock)).exact

    await cluster.start_worker("decode", "127.0.0.4")
    cluster.put("decode", Pod("d-0", "127.0.0.3"), Pod("d-1", "127.0.0.4"))
    cluster.server.expire()
    await cluster.server.listen()
    await cluster.until_workers({"127.0.0.2": "ready", "127.0.0.3": "ready", "127.0.0.4": "ready"})

    # Long enough to be running still when the router has heard.
    streams = [
        await open_stream(cluster.address, Ask(tuple(range(30 + n, 100 + n)), 1000), clock) for n in range(8)
    ]
    await asyncio.gather(*(each.begun.wait() for each in streams))
    cluster.put("decode", Pod("d-0", "127.0.0.3", terminating=True), Pod("d-1", "127.0.0.4"))
    await cluster.until_workers({"127.0.0.2": "ready", "127.0.0.3": "draining", "127.0.0.4": "ready"})
    await asyncio.gather(*(each.ended.wait() for each in streams))
    assert all(each.outcome.exact for each in streams)
    await cluster.until_workers({"127.0.0.2": "ready", "127.0.0.4": "ready"})


async def test_check_in_a_pod_finds_a_cluster_that_serves_sound_and_names_what_is_not(
    cluster: Cluster,
) -> None:
    cluster.put("prefill", Pod("p-0", "127.0.0.2"))
    cluster.put("decode", Pod("d-0", "127.0.0.3", ready=False))
    found = await cluster.check()
    troubles = [(each["check"], each["level"]) for each in found["findings"] if each["level"] != "ok"]
    # Workers on loopback are no pods, which is what this test has.
    assert troubles == [("workers", "error"), ("workers", "warning")]
    assert any(each["message"].startswith("pool prefill: 1 of 1 pods") for each in found["findings"])
    cluster.server.rules[ACCOUNT] = ()
    assert any(
        "may not list endpointslices" in each["message"] for each in (await cluster.check())["findings"]
    )
