"""A fleet of real processes on this machine: workers with simulated engines, and routers in front of them.

The processes are the product's own (`kvasir-worker`, `kvasir-router`) with static discovery. A worker keeps
its address over restarts; it may run behind a proxy, or in its own network namespace.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal, Self

from tests.kit.lab import gateway
from tests.kit.lab.invariants import REST_S, Descriptors, at_rest
from tests.kit.lab.netns import Namespace
from tests.kit.lab.processes import LabProcess, Processes, Proof
from tests.kit.lab.proxy import TcpProxy

from kvasir.config.spec.base import Spec
from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.workers import TlsSpec
from kvasir.ports.clock import Clock

Place = Literal["direct", "proxy", "namespace"]

_READY_S = 30.0
_PORTS = (10_000, 32_000)
_STARTING_AT_ONCE = 4


@dataclass(slots=True)
class LabWorker:
    """One worker. `address` is where routers look for it; `reserved` workers have an address, but no process
    until they are started."""

    name: str
    pool: str
    address: str
    place: Place
    command: list[str] = field(default_factory=list)
    process: LabProcess | None = None
    proxy: TcpProxy | None = None
    namespace: Namespace | None = None

    @property
    def running(self) -> LabProcess:
        """Its process. Raise RuntimeError if there is none."""
        if self.process is None or not self.process.alive:
            raise RuntimeError(f"{self.name} is not running")
        return self.process


@dataclass(slots=True)
class LabRouter:
    """One router with its gateway at `address`."""

    name: str
    address: str
    process: LabProcess


@dataclass(frozen=True, slots=True)
class Layout:
    """Number of processes of each kind. `reserved` addresses are configured at routers, without a process at
    first; `place` is what is between routers and the workers of a pool."""

    workers: Mapping[str, int]
    routers: int = 1
    reserved: Mapping[str, int] = field(default_factory=dict)
    place: Mapping[str, Place] = field(default_factory=dict)


class Fleet:
    """Starts all of `layout` for `deployment` in `folder`; fills in discovery and ports. Use as `async with`:
    afterwards no process and no namespace remains. `key` is an operator's key, if the deployment requires
    keys. `prefix` begins the command of every process that is started from then on. After a block that
    succeeds all invariants must hold within `rest_s`, with the descriptors of `before`; raise Violated."""

    def __init__(
        self,
        folder: Path,
        deployment: Deployment,
        layout: Layout,
        *,
        clock: Clock,
        seed: int = 0,
        key: str = "",
        rest_s: float = REST_S,
    ) -> None:
        self.clock = clock
        self.key = key
        self.prefix: list[str] = []
        self.workers: list[LabWorker] = []
        self.routers: list[LabRouter] = []
        self._rest_s = rest_s
        self._folder = folder
        self._deployment = deployment
        self._layout = layout
        self._rng = Random(seed)
        self._processes = Processes(folder)
        self._stack = AsyncExitStack()
        self._names = 0
        # Not from the seed: two fleets with the same seed may run at the same time.
        self._ports = _free_ports(Random())

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        self.before = Descriptors(self)
        return self

    async def __aexit__(self, error: object, *_: object) -> None:
        try:
            if error is None:
                await self._check()
        finally:
            await self.close()

    async def close(self) -> None:
        """Terminate everything, in whatever state it is."""
        for worker in self.workers:
            if worker.proxy is not None:
                worker.proxy.resume()
        await self._processes.close()
        await self._stack.aclose()

    # -- state -------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The first router's gateway."""
        return self.routers[0].address

    def pool(self, name: str) -> list[LabWorker]:
        """The running workers of a pool."""
        return [w for w in self.workers if w.pool == name and w.process is not None and w.process.alive]

    def pids(self) -> dict[str, int]:
        """Every running process, by name."""
        found = {router.name: router.process.pid for router in self.routers if router.process.alive}
        for worker in self.workers:
            if worker.process is not None and worker.process.alive:
                found[worker.name] = worker.process.pid
        return found

    def gateways(self) -> dict[str, str]:
        """The addresses of the running routers, by name."""
        return {router.name: router.address for router in self.routers if router.process.alive}

    # -- actions -----------------------------------------------------------------------------------

    async def start_worker(self, worker: LabWorker) -> None:
        """Start a reserved or exited worker at its own address. Raise StartError."""
        worker.process, said = await self._processes.start_ready(worker.name, worker.command, "serving")
        if worker.proxy is None:
            worker.address = str(said["address"])

    async def stop_worker(self, worker: LabWorker, grace_s: float) -> Proof:
        """Send SIGTERM; the process must exit normally within `grace_s`."""
        return await worker.running.terminate(grace_s)

    async def add_router(self) -> LabRouter:
        """Start another router; it listens when this returns, without sessions yet."""
        name = self._name("router")
        argv = [*self._module("kvasir_platform.apps.router_app"), "--deployment", str(self._router_file())]
        process, said = await self._processes.start_ready(name, argv, "listening")
        router = LabRouter(name, str(said["address"]), process)
        self.routers.append(router)
        return router

    async def all_ready(
        self,
        router: LabRouter | None = None,
        within_s: float = _READY_S,
        states: Sequence[str] = ("ready",),
    ) -> float:
        """Wait until a router (by default the first) has a session with every running worker, in one of these
        states; return the seconds it took. Raise TimeoutError."""
        address = (router or self.routers[0]).address
        wanted = {w.address for w in self.workers if w.process is not None and w.process.alive}

        async def ready() -> bool:
            seen = await gateway.workers(address, self.key)
            return all(at in seen and seen[at]["state"] in states for at in wanted)

        return await gateway.until(ready, within_s, f"all of {sorted(wanted)} ready", self.clock, 0.05)

    # -- inside ------------------------------------------------------------------------------------

    async def _check(self) -> None:
        if not self.gateways() and self.pids():
            # Workers hold nothing for routers that are gone.
            await self.all_ready(await self.add_router(), states=("ready", "draining"))
        await at_rest(self, self._rest_s)
        await self.before.check(self.clock)

    async def _start(self) -> None:
        layout = self._layout
        if "namespace" in layout.place.values():
            # Workers that listen beyond loopback require a secret, and a setting for certificates.
            token = self._folder / "token"
            token.write_text(secrets.token_hex(16))
            spec = self._deployment.worker.model_copy(update={"session_token_file": str(token)})
            self._deployment = self._deployment.model_copy(
                update={"worker": spec, "tls": TlsSpec(mode="off")}
            )
        for pool, count in layout.workers.items():
            for _ in range(count):
                self.workers.append(await self._make(pool, layout.place.get(pool, "direct")))
        gate = asyncio.Semaphore(_STARTING_AT_ONCE)

        async def start(worker: LabWorker) -> None:
            async with gate:
                await self.start_worker(worker)

        await asyncio.gather(*map(start, self.workers))
        for pool, count in layout.reserved.items():
            for _ in range(count):
                self.workers.append(await self._make(pool, "direct"))
        for _ in range(layout.routers):
            await self.add_router()
        for router in self.routers:
            await self.all_ready(router)

    async def _make(self, pool: str, place: Place) -> LabWorker:
        worker = LabWorker(self._name(pool), pool, "", place)
        host = "127.0.0.1"
        if place == "namespace":
            worker.namespace = await self._stack.enter_async_context(Namespace())
            host = worker.namespace.address
            port = 7001
        else:
            port = next(self._ports)
        worker.address = f"{host}:{port}"
        if place == "proxy":
            proxy = TcpProxy(worker.address, clock=self.clock, rng=self._rng)
            worker.proxy = await self._stack.enter_async_context(proxy)
            worker.address = proxy.address
        spec = self._deployment.worker.model_copy(update={"host": host})
        discovery = {"kind": "static", "endpoints": [f"{pool}={host}:{port}"]}
        file = self._write(worker.name, {"worker": _stated(spec), "discovery": discovery})
        argv = [*self._module("kvasir_platform.apps.worker_node"), "--deployment", str(file), "--pool", pool]
        argv += ["--port", str(port)]
        worker.command = argv if worker.namespace is None else worker.namespace.command(argv)
        return worker

    def _router_file(self) -> Path:
        endpoints = [f"{worker.pool}={worker.address}" for worker in self.workers]
        wanted = self._deployment.gateway
        # The same number of processes on every machine.
        edges = wanted.edges or 0
        edge = wanted.model_copy(update={"port": 0, "edges": edges})
        return self._write(
            "router",
            {
                "gateway": _stated(edge),
                "discovery": {"kind": "static", "endpoints": endpoints},
            },
        )

    def _write(self, name: str, changes: Mapping[str, Any]) -> Path:
        # JSON is valid YAML. Only what the spec states: a build of another version knows other defaults.
        path = self._folder / f"{name}.yaml"
        path.write_text(json.dumps(_stated(self._deployment) | dict(changes)))
        return path

    def _module(self, name: str) -> list[str]:
        return [*self.prefix, sys.executable, "-m", name]

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}-{self._names}"


def _stated(spec: Spec) -> dict[str, Any]:
    return spec.model_dump(mode="json", exclude_unset=True)


def _free_ports(rng: Random) -> Iterator[int]:
    """Free ports below the kernel's range for outgoing connections: a worker that is down for a while must
    find its own port free when it restarts."""
    while True:
        port = rng.randrange(*_PORTS)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port
