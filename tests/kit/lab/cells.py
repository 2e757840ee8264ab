"""Several cells of real processes, each in a network namespace of its own, with delay between them.

A cell reaches another one through a proxy on its namespace's host end, since the kernel's netem is missing on
many machines. To cut a cell off, its namespace's link is taken down: its processes live on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, Self

from tests.kit.lab import gateway
from tests.kit.lab.invariants import REST_S, Descriptors, at_rest
from tests.kit.lab.netns import Namespace
from tests.kit.lab.processes import LabProcess, Processes
from tests.kit.lab.proxy import DOWNSTREAM, UPSTREAM, Link, TcpProxy

from kvasir.ports.clock import Clock
from kvasir.wire.tls import TlsNames
from kvasir_platform.cluster.certificates import CA_FILE, ROUTER_FILE, Authority, worker_file

KEY = "kv-three-cells"
POOL = "both"
_DOMAIN = "kvasir.local"
_GATEWAY, _LINKS = 8000, 7443
_LIFE_S = 3600.0
_READY_S = 60.0
_ENGINES: dict[str, Any] = {
    "disaggregation": "never",
    "pools": [{"name": POOL, "role": "both", "engine": {"kind": "sim", "sim": {"decode_step_s": 0.03}}}],
    "slo": [{"name": "default", "ttft_s": 30.0, "itl_s": 1.0}],
}


class LabCell:
    """One cell: a worker, and a router with its gateway at `address`."""

    def __init__(self, name: str, namespace: Namespace, folder: Path) -> None:
        self.name = name
        self.namespace = namespace
        self.folder = folder
        self.worker: LabProcess | None = None
        self.router: LabProcess | None = None

    @property
    def address(self) -> str:
        """Its gateway's address."""
        return f"{self.namespace.address}:{_GATEWAY}"


class LabCells:
    """Cells with `delays_s` of one way between them, by pairs of names. Use as `async with`: afterwards no
    process and no namespace remains. As of a Fleet, all invariants must hold after the block."""

    key = KEY

    def __init__(self, folder: Path, delays_s: Mapping[tuple[str, str], float], clock: Clock) -> None:
        self._folder = folder
        self._delays_s = {frozenset(pair): delay for pair, delay in delays_s.items()}
        self.clock = clock
        self._stack = AsyncExitStack()
        self._processes = Processes(folder)
        self.cells: dict[str, LabCell] = {}

    def __getitem__(self, name: str) -> LabCell:
        return self.cells[name]

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._close()
            raise
        self._before = Descriptors(self)
        return self

    async def __aexit__(self, error: object, *_: object) -> None:
        try:
            if error is None:
                await at_rest(self, REST_S)
                await self._before.check(self.clock)
        finally:
            await self._close()

    def pids(self) -> dict[str, int]:
        """Every running process, by name."""
        every = [each for cell in self.cells.values() for each in (cell.worker, cell.router)]
        return {each.name: each.pid for each in every if each is not None and each.alive}

    def gateways(self) -> dict[str, str]:
        """The addresses of the running routers, by name."""
        every = self.cells.values()
        return {cell.name: cell.address for cell in every if cell.router is not None and cell.router.alive}

    async def state(self, viewer: str, cell: str) -> dict[str, Any]:
        """What a cell's /status says of a cell."""
        page = await gateway.status(self[viewer].address, KEY)
        found: dict[str, Any] = next(each for each in page["cells"] if each["cell"] == cell)
        return found

    async def _close(self) -> None:
        await self._processes.close()
        await self._stack.aclose()

    async def _start(self) -> None:
        names = sorted({name for pair in self._delays_s for name in pair})
        for name in names:
            folder = self._folder / name
            folder.mkdir()
            namespace = await self._stack.enter_async_context(Namespace())
            self.cells[name] = LabCell(name, namespace, folder)
        self._certify()
        for cell in self.cells.values():
            spec = self._spec(cell, await self._proxies(cell))
            await self._launch(cell, spec)
        for cell in self.cells.values():
            await gateway.until(partial(self._whole, cell), _READY_S, "all cells", self.clock, 0.1)

    def _certify(self) -> None:
        """One authority for all cells."""
        now = time.time()
        authority = Authority.make("cells", now - 60, now + _LIFE_S)
        for cell in self.cells.values():
            names = TlsNames(_DOMAIN, cell.name)
            (cell.folder / CA_FILE).write_bytes(authority.pem)
            for file, uri, dns in (
                (ROUTER_FILE, names.router, names.router_dns),
                (worker_file(POOL), names.worker(POOL), names.worker_dns(POOL)),
            ):
                (cell.folder / file).write_bytes(authority.certify(uri, dns, now - 60, now + _LIFE_S))

    async def _proxies(self, cell: LabCell) -> dict[str, str]:
        """Return where the cell reaches each of the others."""
        found = {}
        for other in self.cells.values():
            if other is not cell:
                proxy = TcpProxy(
                    f"{other.namespace.address}:{_LINKS}",
                    clock=self.clock,
                    rng=Random(),
                    listen_host=cell.namespace.host_address,
                )
                await self._stack.enter_async_context(proxy)
                for direction in (UPSTREAM, DOWNSTREAM):
                    proxy.shape(direction, Link(self._delays_s[frozenset((cell.name, other.name))]))
                found[other.name] = proxy.address
        return found

    def _spec(self, cell: LabCell, peers: Mapping[str, str]) -> dict[str, Any]:
        keys = cell.folder / "keys"
        keys.write_text(f"{sha256(KEY.encode()).hexdigest()} tenant=default\n")
        keys.chmod(0o600)
        changes: dict[str, Any] = {
            "name": cell.name,
            "tls": {"directory": str(cell.folder)},
            "gateway": {
                "host": cell.namespace.address,
                "port": _GATEWAY,
                "edges": 0,
                "api_keys_file": str(keys),
            },
            "discovery": {"kind": "static", "endpoints": [f"{POOL}=127.0.0.1:7001"]},
            "regions": {
                "name": cell.name,
                "listen": f"{cell.namespace.address}:{_LINKS}",
                "peers": [{"name": name, "address": address} for name, address in peers.items()],
            },
        }
        return _ENGINES | changes

    async def _launch(self, cell: LabCell, spec: Mapping[str, Any]) -> None:
        # JSON is valid YAML.
        file = cell.folder / "kvasir.yaml"
        file.write_text(json.dumps(spec))
        worker = ["kvasir_platform.apps.worker_node", "--pool", POOL, "--port", "7001"]
        router = ["kvasir_platform.apps.router_app"]
        for kind, (module, *options), event in (
            ("worker", worker, "serving"),
            ("router", router, "listening"),
        ):
            argv = [sys.executable, "-m", module, "--deployment", str(file), *options]
            name = f"{cell.name}-{kind}"
            process, _ = await self._processes.start_ready(name, cell.namespace.command(argv), event)
            if kind == "worker":
                cell.worker = process
            else:
                cell.router = process

    async def _whole(self, cell: LabCell) -> bool:
        page = await gateway.status(cell.address, KEY)
        states = {each["state"] for each in page["cells"]}
        return bool(page["ready"]) and states == {"here", "fresh"}
