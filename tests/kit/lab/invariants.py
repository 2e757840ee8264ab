"""Invariants after every exercise: nothing in flight, nothing pinned, nothing leaked.

Everything is read from outside, from the gateway's pages and from /proc, so that wrong state within a process
is detected.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from tests.kit.lab import gateway
from tests.kit.lab.processes import descriptors

from kvasir.core.errors import UpstreamError
from kvasir.ports.clock import Clock

SPARE_DESCRIPTORS = 8
"""Connections that open and close independently: health checks, polls of these pages, snapshots."""


REST_S = 30.0
"""Longer than a worker holds what a lost router had begun."""

EMPTY_AT_REST = (
    "kvasir_requests_in_flight",
    "kvasir_requests_queued",
    "kvasir_router_legs",
    "kvasir_router_accounted_requests",
    "kvasir_router_leases",
)


class Violated(AssertionError):
    """An invariant does not hold; the message has which, where, and by how much."""


def invariant_violations(status: Mapping[str, Any], metrics: str) -> list[str]:
    """What is not at rest on one router, among the workers that it has a session with."""
    found = []
    if status["in_flight"]:
        found.append(f"{status['in_flight']} requests in flight")
    for worker in status["workers"]:
        if worker["state"] not in ("ready", "draining"):
            continue
        name, load = worker["worker_id"], worker["load"] or {}
        if worker["in_flight"]:
            found.append(f"{name}: {worker['in_flight']} accounted")
        for key in ("running", "waiting", "kv_blocks_leased"):
            if load.get(key):
                found.append(f"{name}: {load[key]} {key}")
    return found + _unsettled(metrics)


def _unsettled(metrics: str) -> list[str]:
    """Leftovers and violations in the router's own metrics."""
    found = []
    for name in EMPTY_AT_REST:
        if value := gateway.metric(metrics, name):
            found.append(f"{name} is {value:g}")
    if not gateway.metric(metrics, "kvasir_router_accounting_consistent"):
        found.append("what is served and what is accounted do not agree")
    if broken := gateway.metric(metrics, "kvasir_requests_total", outcome="protocol_error"):
        found.append(f"{broken:g} streams lost, repeated or invented tokens on a worker")
    return found


async def remaining(fleet: Deployed) -> list[str]:
    """Return what is not at rest on the routers that run, or why they do not tell."""
    left = []
    for name, address in fleet.gateways().items():
        try:
            page = await gateway.status(address, fleet.key)
            series = await gateway.metrics(address, fleet.key)
        except UpstreamError as error:
            left.append(str(error))
        else:
            left.extend(f"{name}: {what}" for what in invariant_violations(page, series))
    return left


async def at_rest(fleet: Deployed, within_s: float) -> float:
    """Wait until no router accounts for anything and no worker runs or pins anything; return the seconds it
    took. Raise Violated with the rest after `within_s`."""
    left = ["nothing was read"]

    async def resting() -> bool:
        left[:] = await remaining(fleet)
        return not left

    try:
        return await gateway.until(resting, within_s, "rest", fleet.clock, 0.05)
    except TimeoutError as error:
        raise Violated(f"not at rest after {within_s:g} s: {'; '.join(left[:12])}") from error


class Running(Protocol):
    """Processes by name, from a Fleet."""

    def pids(self) -> dict[str, int]: ...


class Deployed(Running, Protocol):
    """A Fleet or the like. `gateways` are the addresses of the routers that run, by name."""

    @property
    def clock(self) -> Clock: ...
    @property
    def key(self) -> str: ...
    def gateways(self) -> dict[str, str]: ...


class Descriptors:
    """Open descriptors of a fleet's processes, to compare when it is at rest again."""

    def __init__(self, fleet: Running) -> None:
        self._fleet = fleet
        self._before = {pid: descriptors(pid) for pid in fleet.pids().values()}

    def grown(self) -> dict[str, int]:
        """Descriptors that each running process has gained, beyond those that open and close."""
        now = {name: (pid, descriptors(pid)) for name, pid in self._fleet.pids().items()}
        grown = {name: count - self._before[pid] for name, (pid, count) in now.items() if pid in self._before}
        return {name: by for name, by in grown.items() if by > SPARE_DESCRIPTORS}

    async def check(self, clock: Clock, within_s: float = 5.0) -> None:
        """Raise Violated if a process has more descriptors than before, and still has after `within_s`."""

        async def back() -> bool:
            return not self.grown()

        try:
            await gateway.until(back, within_s, "descriptors", clock, 0.1)
        except TimeoutError as error:
            raise Violated(f"descriptors leaked: {self.grown()}") from error


@asynccontextmanager
async def ends_at_rest(fleet: Deployed, within_s: float = REST_S) -> AsyncIterator[None]:
    """Raise Violated unless all invariants hold soon after the block has succeeded."""
    before = Descriptors(fleet)
    yield
    await at_rest(fleet, within_s)
    await before.check(fleet.clock)
