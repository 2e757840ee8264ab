"""Several cells in one event loop: a simulated deployment each, and links between them that delay, hold back
and break."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.media.served import MediaInputs
from kvasir.config.spec.traffic.regions import PeerCellSpec, RegionsSpec
from kvasir.core.requests import Request, Sampling, token_ids
from kvasir.ports.clock import Clock
from kvasir.ports.session import ConnectionLost
from kvasir_platform.gateway.costs.budgets import Budgets
from kvasir_platform.regions.connections import CellConnection, OnCell
from kvasir_platform.regions.router import RegionRouter
from kvasir_platform.regions.start import make_region_router
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import TOKENIZER_DIGEST, Cluster

GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


class LinkEnd:
    """`CellConnection` over memory. What is sent arrives after `delay_s`; while the link is `cut`, it is held
    back, and arrives afterwards, as TCP sends it again."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.cut = False
        self.other: LinkEnd | None = None
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._held: deque[bytes | None] = deque()
        self._under_way: deque[bytes | None] = deque()
        self._closed = False

    async def send(self, data: bytes) -> None:
        """See CellConnection."""
        if self._closed:
            raise ConnectionLost("closed")
        self._pass(data)

    async def receive(self) -> bytes:
        """See CellConnection."""
        data = None if self._closed else await self._inbox.get()
        if data is None:
            self._closed = True
            raise ConnectionLost("the link broke")
        return data

    async def close(self) -> None:
        """See CellConnection."""
        if not self._closed:
            self._closed = True
            self._inbox.put_nowait(None)
            self._pass(None)

    def heal(self) -> None:
        """Let pass what was held back."""
        self.cut = False
        while self._held:
            self._pass(self._held.popleft())

    def _pass(self, data: bytes | None) -> None:
        if self.cut:
            self._held.append(data)
        else:
            self._under_way.append(data)
            asyncio.get_running_loop().call_later(self.delay_s, self._arrive)

    def _arrive(self) -> None:
        # Timers of the same time have no order.
        data = self._under_way.popleft()
        if self.other is not None:
            self.other._inbox.put_nowait(data)


class _Listener:
    def __init__(self, links: CellLinks, cell: str, on_cell: OnCell) -> None:
        self._links, self._cell, self._on_cell = links, cell, on_cell

    async def start(self) -> int:
        self._links.listening[self._cell] = self._on_cell
        return 1

    async def stop(self) -> None:
        self._links.listening.pop(self._cell, None)


@dataclass
class _Dialer:
    links: CellLinks
    origin: str
    cell: str

    async def dial(self) -> CellConnection:
        return await self.links.dial(self.origin, self.cell)


@dataclass
class CellLinks:
    """All links. `delays_s` is one way, by the two names in order; `apart` are pairs that do not reach each
    other."""

    clock: Clock
    delays_s: Mapping[frozenset[str], float] = field(default_factory=dict)
    listening: dict[str, OnCell] = field(default_factory=dict)
    apart: set[frozenset[str]] = field(default_factory=set)
    ends: list[tuple[frozenset[str], LinkEnd]] = field(default_factory=list)
    serving: set[asyncio.Task[None]] = field(default_factory=set)

    async def dial(self, origin: str, cell: str) -> CellConnection:
        """Connect two cells."""
        pair = frozenset((origin, cell))
        delay_s = self.delays_s.get(pair, 0.0)
        await self.clock.sleep(2 * delay_s)
        on_cell = self.listening.get(cell)
        if pair in self.apart or on_cell is None:
            raise ConnectionLost(f"{cell} does not answer")
        near, far = LinkEnd(delay_s), LinkEnd(delay_s)
        near.other, far.other = far, near
        self.ends += [(pair, near), (pair, far)]
        task: asyncio.Task[None] = asyncio.ensure_future(on_cell(far, origin))
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)
        return near

    def cut(self, *cells: str) -> None:
        """Hold back everything between each of `cells` and any other."""
        for pair, end in self.ends:
            if pair & set(cells):
                end.cut = True
        self.apart |= {pair for pair in self.pairs() if pair & set(cells)}

    def heal(self) -> None:
        """End all cuts."""
        self.apart.clear()
        for _, end in self.ends:
            end.heal()

    def pairs(self) -> Iterable[frozenset[str]]:
        """All pairs that have delays."""
        return self.delays_s


class SimCell:
    """One cell: a simulated deployment behind a router over several cells."""

    def __init__(
        self, deployment: Deployment, clock: Clock, links: CellLinks, budgets: Budgets | None = None
    ) -> None:
        assert deployment.regions is not None
        self.name = deployment.regions.name
        self.deployment = deployment
        self.cluster = Cluster(deployment, clock)
        self.tokenizer = TOKENIZER_DIGEST
        self.budgets = budgets
        self.media: dict[str, MediaInputs] = {}
        self._clock, self._links = clock, links
        self._router: RegionRouter | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def router(self) -> RegionRouter:
        """The router of the cell's gateways."""
        assert self._router is not None
        return self._router

    async def start(self) -> None:
        """Start the deployment and its links."""
        await self.cluster.start()
        self._router = make_region_router(
            self.deployment,
            self.cluster.router,
            self._clock,
            dialer=lambda peer: _Dialer(self._links, self.name, peer.name),
            listener=lambda on_cell: _Listener(self._links, self.name, on_cell),
            router_id=self.name,
            tokenizers={self.deployment.model.name: self.tokenizer},
            epoch=1,
            budgets=self.budgets,
            media=self.media,
        )
        await self._router.start()
        self._running = asyncio.ensure_future(self._router.run())

    def submit(
        self, name: str, prompt: Iterable[int], sampling: Sampling = GREEDY, tenant: str = ""
    ) -> ClientStream:
        """Send a client's request to this cell."""
        request = Request(
            request_id=name,
            model=self.deployment.model.name,
            tokens=token_ids(prompt),
            sampling=sampling,
            arrival_s=self._clock.now(),
            tenant=tenant,
        )
        stream = ClientStream(request)
        self.router.submit(request, stream)
        return stream

    def runs(self) -> set[str]:
        """The requests that this cell's own router runs."""
        return {view.so_far.request_id for view in self.cluster.router.running(1000)}

    async def stop(self) -> None:
        """Stop the links, then the deployment."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        await self.cluster.close()


class SimCells:
    """Cells of equal deployments, each a peer of all others. `budgets` makes those of one cell, and `regions`
    is as in the spec. Use as `async with`."""

    def __init__(
        self,
        deployment: Deployment,
        clock: Clock,
        delays_s: Mapping[tuple[str, str], float],
        budgets: Callable[[], Budgets] | None = None,
        **regions: Any,
    ) -> None:
        self.clock = clock
        self.links = CellLinks(clock, {frozenset(pair): delay for pair, delay in delays_s.items()})
        names = sorted({name for pair in delays_s for name in pair})
        self.cells = {
            name: SimCell(
                _as_cell(deployment, name, names, regions),
                clock,
                self.links,
                None if budgets is None else budgets(),
            )
            for name in names
        }
        self.twice: set[str] = set()
        """Requests that two cells ran at the same time."""
        self._watch: asyncio.Task[None] | None = None

    def __getitem__(self, name: str) -> SimCell:
        return self.cells[name]

    async def __aenter__(self) -> Self:
        for cell in self.cells.values():
            await cell.start()
        self._watch = asyncio.ensure_future(self._watched())
        while any(
            view.state not in ("here", "fresh")
            for cell in self.cells.values()
            for view in cell.router.cells()
        ):
            await self.clock.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self.links.heal()
        for cell in self.cells.values():
            await cell.stop()
        for task in list(self.links.serving):
            task.cancel()
        await asyncio.gather(*self.links.serving, return_exceptions=True)

    async def _watched(self) -> None:
        while True:
            seen: set[str] = set()
            for cell in self.cells.values():
                own = cell.runs()
                self.twice |= seen & own
                seen |= own
            await self.clock.sleep(0.01)


def _as_cell(
    deployment: Deployment, name: str, names: Iterable[str], regions: Mapping[str, Any]
) -> Deployment:
    peers = tuple(PeerCellSpec(name=each, address="127.0.0.1:1") for each in names if each != name)
    spec = RegionsSpec(name=name, peers=peers, **regions)
    return deployment.model_copy(update={"name": name, "regions": spec})
