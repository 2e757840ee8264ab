"""A simulated fleet with the pages that operators read: what the console and `kvasir top` show of it, and
what Prometheus scrapes."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, cast

from tests.kit.observability.mix import MOST_AT_ONCE, TENANTS, FaultScene, TrafficMix

from kvasir.config.spec.deployment import Deployment
from kvasir.core.demand import PoolForecast, PoolPlan
from kvasir.core.errors import KvasirError
from kvasir.core.loads.gpu import GpuLoad
from kvasir.core.requests import Delta, Request, Sampling, SloClass, token_ids
from kvasir.ports.clock import Clock
from kvasir.ports.router import RequestSummary
from kvasir.telemetry.families.updated import Histogram
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.tenant_series import BudgetUse, CostStats, RateLimitStats, TenantStats, TenantUsage
from kvasir_platform.cli.top.command import screen_text
from kvasir_platform.cli.top.snapshot import TopSnapshot, tenants_in
from kvasir_platform.cli.top.tables import TopOrder
from kvasir_platform.edge.exposition import Families, parse
from kvasir_platform.gateway.costs.ledger import CostLedger
from kvasir_platform.gateway.costs.prices import Prices
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.operator.requests_page import RequestPages
from kvasir_platform.gateway.operator.status_page import StatusPages, figures_of
from kvasir_platform.gateway.start import make_metrics
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster

_WIDE = 200
_PRICE, _BUDGET = 0.01, 10.0
_GPU_BYTES, _WATTS = 80 << 30, 700.0
_AT_LIMIT, _SPENT = "concurrency_limit", "budget_exceeded"
_FILTER = "names"


class WatchedFleet:
    """`run` sends traffic to a started cluster. `wall_s` is Unix time in seconds at the beginning, and
    `expires_s` when the gateway's certificate expires. The fleet does for metrics what a gateway does: it
    counts requests, refusals, gaps between tokens, tenants, decisions about their limits, and acts of an
    output filter."""

    def __init__(
        self, spec: Deployment, clock: Clock, *, wall_s: float, expires_s: float, seed: int = 1
    ) -> None:
        self.metrics: Metrics = make_metrics(spec)
        self.cluster = Cluster(spec, clock, seed=seed, on_decision=self.metrics.decided)
        self.scene = FaultScene(
            self.cluster, TrafficMix(), wall_s, expires_s, _path(spec.gateway.tls.cert_file)
        )
        self._clock = clock
        self._rng = Random(seed)
        slo = spec.slo[0]
        self._slo = SloClass(slo.name, slo.ttft_s, slo.itl_s)
        self._model = spec.model.name
        self._usages = {name: TenantUsage(name) for name in TENANTS}
        self._spec = spec
        self._number = self._alone = 0
        self._costs = CostLedger("watched", Prices(spec), clock.now, lambda: self.scene.wall_s)

    async def start(self) -> None:
        """Start the fleet."""
        await self.cluster.start()
        router, metrics = self.cluster.router, self.metrics
        metrics.track_in_flight(lambda: router.in_flight)
        metrics.track_index(router.index_stats)
        metrics.track_accounting(router.accounting)
        metrics.track_links(router.link_transfers)
        metrics.track_regret(router.regret)
        metrics.track_admission(router.admission)
        metrics.track_tenants(self._tenants)
        metrics.track_certificate(lambda: self.scene.expires_s)
        metrics.track_scaling(self._plans, self._unanswered_s)
        metrics.track_discovery(self._unanswered_s)
        self._costs.source = router
        metrics.track_costs(self._claimed)
        self._status = StatusPages(
            self._spec,
            lambda: [self._model],
            router,
            metrics,
            self._clock,
            in_flight=lambda: router.in_flight,
            draining=lambda: False,
            wall=lambda: self.scene.wall_s,
        )
        self._requests = RequestPages(router, self._clock)

    async def run(self, seconds: float) -> None:
        """Send traffic for so long."""
        end = self._clock.now() + seconds
        while (at := self._clock.now() + self._rng.expovariate(self.scene.mix.total)) < end:
            await self._clock.sleep(at - self._clock.now())
            self._submit()
        await self._clock.sleep(end - self._clock.now())

    async def close(self) -> None:
        """Stop everything, whatever still runs."""
        await self.cluster.close()

    # -- what operators see ------------------------------------------------------------------------

    def scrape(self) -> Families:
        """What Prometheus gets."""
        return parse(self.figures())

    def figures(self) -> bytes:
        """The same as text."""
        router = self.cluster.router
        self._use_gpus()
        self.metrics.batches(
            router.workers(), {pool.name: pool.engine.largest_batch for pool in self._spec.pools}
        )
        return b"".join(figures_of(router, self.metrics))

    def status(self) -> dict[str, Any]:
        """GET /status, which the console reads."""
        return _page(self._status.status)

    def top(self) -> str:
        """What `kvasir top --once` prints."""
        return "\n".join(screen_text(self.snapshot(), TopOrder(), _WIDE))

    def snapshot(self) -> TopSnapshot:
        """What `kvasir top` reads."""
        tenants = tenants_in(self.scrape())
        return TopSnapshot(self._clock.now(), self.status(), _page(self._requests.requests), tenants)

    # -- inside ------------------------------------------------------------------------------------

    def _submit(self) -> None:
        mix, now = self.scene.mix, self._clock.now()
        tenant = mix.tenant(self._rng)
        self._alone += not self.scene.redis_answers
        usage = self._usages[tenant]
        spent = tenant in self.scene.spent
        if spent or usage.running >= MOST_AT_ONCE:
            code = _SPENT if spent else _AT_LIMIT
            usage.refused[code] = usage.refused.get(code, 0) + 1
            self.metrics.request_refused(code, self._model)
            return
        self._number += 1
        request = Request(
            request_id=f"w{self._number}",
            model=self._model,
            tokens=token_ids(mix.tokens(self._rng)),
            sampling=Sampling(max_tokens=mix.output, temperature=0.0, ignore_eos=True),
            arrival_s=now,
            tenant=tenant,
            slo=self._slo,
        )
        gaps = _Gaps(self._clock, self.metrics.inter_token(self._model))

        def seen(event: Delta | RequestSummary) -> None:
            if isinstance(event, Delta):
                gaps.add(event)
            else:
                usage.running -= 1
                usage.prompt_tokens += event.usage.prompt_tokens
                usage.output_tokens += event.usage.output_tokens
                self.metrics.request_finished(event)
                answers = self.scene.classifier_answers
                self.metrics.filter_acted(_FILTER, "redacted" if answers else "failed_open")
                self._costs.ended(event)

        try:
            self.cluster.router.submit(request, ClientStream(request, seen))
        except KvasirError as error:
            self.metrics.request_refused(error.code, self._model)
        else:
            usage.running += 1
            usage.requests += 1

    def _unanswered_s(self) -> float:
        """Return the seconds since planner and discovery stopped to answer; 0 while they do."""
        stopped_s = self.scene.control_stopped_s
        return 0.0 if stopped_s is None else self._clock.now() - stopped_s

    def _plans(self) -> dict[str, PoolPlan]:
        """Return what a planner would say that sizes pools for twice their load, as long as it answers."""
        plans = {}
        for pool in self._spec.pools:
            views = [view for view in self.cluster.router.workers() if view.pool == pool.name]
            serving = sum(view.state == "ready" for view in views)
            load = sum(view.in_flight for view in views) / pool.engine.max_num_seqs
            desired = max(pool.replicas, math.ceil(2 * load))
            forecast = PoolForecast(load, load, 2 * load, ("twice its load",))
            applied = self.scene.control_stopped_s is None
            plans[pool.name] = PoolPlan(desired, serving, desired - serving, applied, forecast)
        return plans

    def _claimed(self) -> CostStats:
        """Return what ended requests claim, at a price for each second; nothing is written."""
        self._costs.take()
        claimed: dict[str, dict[str, float]] = {}
        for (tenant, phase), seconds in self._costs.claimed.items():
            claimed.setdefault(tenant, {})[phase] = seconds
        spent = {tenant: _PRICE * sum(phases.values()) for tenant, phases in claimed.items()}
        budgets = [BudgetUse(tenant, {"hard": cost / _BUDGET}) for tenant, cost in spent.items()]
        return CostStats(claimed, spent, budgets, stored=self.scene.redis_answers)

    def _use_gpus(self) -> None:
        """Have each worker report a GPU that is as busy as its batch is full."""
        for worker in self.cluster.workers.values():
            full = worker.engine.load().running / self._spec.pool(worker.endpoint.pool).engine.max_num_seqs
            used = _GPU_BYTES // 2 + round(full * _GPU_BYTES / 4)
            worker.faults.gpus = (GpuLoad(0, float(full > 0), used, _GPU_BYTES, _WATTS * full, full, full),)

    def _tenants(self) -> TenantStats:
        limits = RateLimitStats(self.scene.redis_answers, self._alone)
        return TenantStats(tuple(self._usages.values()), limits)


class _Gaps:
    """Observes the time between the deltas of one stream."""

    def __init__(self, clock: Clock, histogram: Histogram) -> None:
        self._clock = clock
        self._histogram = histogram
        self._last: float | None = None

    def add(self, delta: Delta) -> None:
        now = self._clock.now()
        if self._last is not None and delta.token_ids:
            self._histogram.observe(now - self._last)
        self._last = now


class _Answer:
    """The Exchange of a page that is only read."""

    def __init__(self) -> None:
        self.body = b""

    def respond(self, status: int, body: bytes, *_: bytes) -> None:
        """Keep the answer."""
        self.body = body


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def _page(show: Callable[[Exchange], None]) -> dict[str, Any]:
    answer = _Answer()
    show(cast(Exchange, answer))
    found: dict[str, Any] = json.loads(answer.body)
    return found


async def cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    """End tasks that a fault has left waiting."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
