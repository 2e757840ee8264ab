"""The gateway of a core with edge processes. It has the interface of a single-process Gateway."""

from __future__ import annotations

import asyncio
import math
import random
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from kvasir.config.load.loader import dump
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import KvasirError
from kvasir.ports.clock import Clock
from kvasir.ports.router import RouterPort
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.tenant_series import TenantStats
from kvasir_platform.edge.address import hold, resolve
from kvasir_platform.edge.core_endpoint import CoreParts
from kvasir_platform.edge.core_pages import CorePages
from kvasir_platform.edge.edge_metrics import EdgeMetrics
from kvasir_platform.edge.frames import EdgeWelcome
from kvasir_platform.edge.supervisor import EdgeSupervisor, RestartLimits
from kvasir_platform.gateway.app import console_taken
from kvasir_platform.gateway.catalog.models import ModelTable
from kvasir_platform.gateway.costs.budgets import within_budgets
from kvasir_platform.gateway.costs.keeper import CostKeeper
from kvasir_platform.gateway.endpoints import routed_core
from kvasir_platform.gateway.operator.status_page import figures_of
from kvasir_platform.gateway.tenants.callers import LimitsOver, limits_state, make_limits, unchanged
from kvasir_platform.gateway.tenants.salts import salt_secret
from kvasir_platform.gateway.traffic.choice import primary_models
from kvasir_platform.gateway.traffic.rollouts import Rollouts

EDGE_COMMAND = (sys.executable, "-m", "kvasir_platform.apps.edge_app")

_WORTH_IT = 4
_MOST = 8
_DRAIN_MARGIN_S = 5.0


def edge_count(wanted: int | None, cpus: float) -> int:
    """Return the number of edges of a router with this many CPUs: `wanted`, or a default.

    Below four edges, the core and the other processes need the CPUs, and one process does both. Above eight
    edges the core, through which every token passes, is the bottleneck.
    """
    if wanted is not None:
        return wanted
    whole = math.floor(cpus)
    return 0 if whole < _WORTH_IT else min(whole - 1, _MOST)


class Edges:
    """`count` edge processes of `deployment` in front of `router`. `models` are read, then closed, since the
    core tokenizes nothing. `rollouts` are those of the spec's canaries, and
    `limits_over` is as for make_gateway. `serve` until `stop`, as a Gateway."""

    def __init__(
        self,
        count: int,
        deployment: Deployment,
        router: RouterPort,
        *,
        clock: Clock,
        metrics: Metrics,
        models: ModelTable,
        rollouts: Rollouts | None = None,
        command: Sequence[str] = EDGE_COMMAND,
        patience: RestartLimits | None = None,
        costs: CostKeeper | None = None,
        limits_over: LimitsOver = unchanged,
    ) -> None:
        self._count = count
        self._deployment = deployment
        self._clock = clock
        self._command = command
        self._patience = patience
        self._keeper: EdgeSupervisor | None = None
        self._stop = asyncio.Event()
        own_limits = make_limits(deployment.tenancy.redis, clock, random.SystemRandom())
        self._limits = limits = limits_over(own_limits)
        metrics.track_tenants(lambda: TenantStats((), limits_state(limits)))
        models.loaded = router.adapters
        models.routes = primary_models(deployment.routes)
        core = routed_core(
            deployment,
            router,
            models,
            metrics,
            clock,
            in_flight=self._in_flight,
            draining=self._stop.is_set,
            rollouts=rollouts,
            costs=costs,
        )
        models.close()
        figures = EdgeMetrics(partial(figures_of, router, metrics))
        self._core = CoreParts(
            router=core.requests,
            limits=within_budgets(limits, None if costs is None else costs.budgets),
            responses=core.stored,
            names=core.operate.names,
            pages=CorePages(figures, core.operate),
            figures=figures,
            now=clock.now,
            shares=core.shares,
        )

    async def serve(self, listen: None, on_started: Callable[[str, int], None]) -> None:
        """Bind the spec's address, start all edges on it, call `on_started` with it, and supervise them until
        `stop`. Return when drained. Raise OSError if the address is taken, KvasirError for an edge that does
        not start, ConfigError if the address of the console is taken."""
        spec = self._deployment.gateway
        counting = asyncio.create_task(self._limits.run(), name="rate limits")
        counting.add_done_callback(self._counted)
        try:
            with ExitStack() as held:
                addresses = _held(held, await resolve(spec.host, spec.port))
                console = []
                if spec.console.port is not None:
                    try:
                        console = _held(held, await resolve(spec.console.host, spec.console.port))
                    except OSError as error:
                        raise console_taken(spec, error) from error
                await self._keep(addresses, console, on_started)
        finally:
            counting.cancel()
            await asyncio.wait([counting])
        if not counting.cancelled():
            counting.result()

    def _counted(self, counting: asyncio.Task[None]) -> None:
        """Runs background work of the limits, which may be none, and raises its errors."""
        if not counting.cancelled() and counting.exception() is not None:
            self.stop()

    def stop(self) -> None:
        """Begin to drain; `serve` returns shortly after `drain_timeout_s` of the spec at the latest.
        Idempotent."""
        self._stop.set()

    async def _keep(
        self,
        addresses: list[tuple[str, int]],
        console: list[tuple[str, int]],
        on_started: Callable[[str, int], None],
    ) -> None:
        welcome = EdgeWelcome(
            dump(self._deployment).encode(), addresses, salt_secret(self._deployment), console
        )
        self._keeper = keeper = EdgeSupervisor(
            self._count, self._core, self._command, welcome, clock=self._clock, patience=self._patience
        )
        starting = asyncio.ensure_future(keeper.start())
        stopped = asyncio.ensure_future(self._stop.wait())
        broken = asyncio.ensure_future(keeper.broken.wait())
        ends = stopped, broken
        try:
            await asyncio.wait((starting, *ends), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                on_started(*starting.result())
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await keeper.drain(self._deployment.gateway.drain_timeout_s + _DRAIN_MARGIN_S)
        finally:
            for task in (starting, *ends):
                task.cancel()
            await keeper.close()
            await asyncio.wait((starting, *ends))
        if keeper.broken.is_set():
            raise KvasirError("the supervision of edges failed; see the log")

    def _in_flight(self) -> int:
        return 0 if self._keeper is None else self._keeper.in_flight()


def _held(stack: ExitStack, addresses: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Bind the addresses until the stack is left; return them with the ports that were bound."""
    return [_address(stack.enter_context(each)) for each in hold(addresses)]


def _address(sock: socket.socket) -> tuple[str, int]:
    host, port, *_ = sock.getsockname()
    return str(host), int(port)
