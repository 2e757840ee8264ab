"""Keeps the costs of a router: samples its workers, writes what is new, and reads what tenants have spent.

Nothing here is on the path of a request. What cannot be written is kept and sent again, as the same batch, so
that it counts once however often its reply is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import UpstreamError
from kvasir.ports.clock import Clock
from kvasir.ports.stores.costs import DAY_S, HOUR_S, CostBatch, CostStore
from kvasir.telemetry.tenant_series import BudgetUse, CostStats
from kvasir_platform.gateway.costs.budgets import BudgetPeriod, Budgets, Spending
from kvasir_platform.gateway.costs.ledger import CostLedger
from kvasir_platform.gateway.costs.memory_store import MemoryCosts
from kvasir_platform.gateway.costs.prices import Prices
from kvasir_platform.gateway.costs.sqlite_store import SqliteCosts
from kvasir_platform.gateway.costs.statement import CostStatement, spent_by_hour, statement

log = logging.getLogger(__name__)

SAMPLE_S = 5.0
WRITE_S = 10.0
"""Seconds between two writes: what a router that dies at once does not write, at most."""


class CostKeeper:
    """The costs of one process. Set `ledger.source`, and pass each ended request to `ledger.ended`; `run`
    must run. `wall` is Unix time in seconds."""

    def __init__(
        self,
        deployment: Deployment,
        name: str,
        store: CostStore,
        clock: Clock,
        wall: Callable[[], float],
    ) -> None:
        self.currency = deployment.cost.currency
        self.retention_s = deployment.cost.retention_days * DAY_S
        self.ledger = CostLedger(name, Prices(deployment), clock.now, wall)
        tenants = deployment.tenancy.tenants
        bounded = any(tenant.budget is not None for tenant in tenants)
        self.budgets = Budgets(tenants, self.currency, wall) if bounded else None
        self._store = store
        self._clock = clock
        self._wall = wall
        self._spending = Spending(wall)
        self._lock = asyncio.Lock()
        self._pending: CostBatch | None = None
        self._forgot_s = 0
        self._warned = False
        self.stored = True
        """Whether the last write succeeded."""

    async def run(self) -> None:
        """Sample and write until cancelled, then write once more."""
        written_s = float("-inf")
        try:
            while True:
                self.ledger.sample()
                if self._clock.now() - written_s >= WRITE_S:
                    written_s = self._clock.now()
                    await self.write()
                await self._clock.sleep(SAMPLE_S)
        finally:
            self.ledger.sample()
            await self.write()
            with contextlib.suppress(UpstreamError):
                await self._store.close()

    async def write(self) -> None:
        """Write what is new and read what tenants have spent. Errors are logged once until that succeeds."""
        try:
            async with self._lock:
                await self._write()
        except UpstreamError as error:
            self.stored = False
            if not self._warned:
                self._warned = True
                log.error("costs cannot be written; they are kept and written later: %s", error.message)
        else:
            self.stored = True
            if self._warned:
                self._warned = False
                log.warning("costs are written again")

    async def _write(self) -> None:
        # One batch that may have been written comes first, then all that came since.
        while (batch := self._pending or self.ledger.take()) is not None:
            self._pending = batch
            await self._store.add(batch)
            self._pending = None
        now = int(self._wall())
        since = self._spending.since()
        records = await self._store.read(since, now + HOUR_S)
        self._spending.update(await asyncio.to_thread(spent_by_hour, records))
        if self.budgets is not None:
            self.budgets.refresh(self._spending)
        if now - self._forgot_s >= HOUR_S:
            self._forgot_s = now
            await self._store.forget((now - self.retention_s) // HOUR_S * HOUR_S)

    async def statement(self, since: int, until: int, by: Sequence[str]) -> CostStatement:
        """Return the statement of hours from `since` to `until` in Unix seconds, all that this router knows
        included. Raise UpstreamError if the store cannot be reached."""
        self.ledger.sample()
        await self.write()
        records = await self._store.read(since // HOUR_S * HOUR_S, until)
        return await asyncio.to_thread(statement, records, tuple(by))

    def figures(self) -> CostStats:
        """Return what is exposed as metrics."""
        claimed: dict[str, dict[str, float]] = {}
        for (tenant, phase), seconds in self.ledger.claimed.items():
            claimed.setdefault(tenant, {})[phase] = seconds
        month = BudgetPeriod.at("month", self._wall())
        spent = {tenant: self._spending.of(tenant, month) for tenant in self._spending.tenants()}
        states = [] if self.budgets is None else self.budgets.states()
        uses = [
            BudgetUse(state.tenant, {name: state.spent / bound for name, bound in state.bounds.items()})
            for state in states
        ]
        return CostStats(claimed, spent, uses, self.stored)


def make_costs(
    deployment: Deployment, name: str, clock: Clock, wall: Callable[[], float]
) -> CostKeeper | None:
    """Return the costs of the spec; None if they are not counted. `name` is unique among routers. Raise
    ConfigError for a file that cannot be used."""
    cost = deployment.cost
    if not cost.enabled:
        return None
    store: CostStore
    if cost.redis is not None:
        # The Redis client takes megabytes that only those who use it are to pay.
        from kvasir_platform.gateway.costs.redis_store import RedisCosts

        store = RedisCosts(cost.redis, cost.retention_days)
    elif cost.file is not None:
        store = SqliteCosts(Path(cost.file))
    else:
        store = MemoryCosts()
    return CostKeeper(deployment, name, store, clock, wall)
