"""Operator pages: metrics, and the status of the deployment."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

import msgspec

from kvasir.config.spec.deployment import Deployment
from kvasir.core.demand import PoolForecast, PoolPlan
from kvasir.core.kv import KvStatus
from kvasir.ports.clock import Clock
from kvasir.ports.router import RouterPort, WorkerView
from kvasir.telemetry.metrics import CONTENT_TYPE, OPENMETRICS, OPENMETRICS_TYPE, Metrics
from kvasir_platform.gateway.http.exchange import Exchange, LaterAnswers
from kvasir_platform.gateway.openai.schema.answers import Readiness, StatusResponse
from kvasir_platform.gateway.openai.schema.operation import PoolSize, RouteStatus, SizeForecast
from kvasir_platform.gateway.operator.facts.certificate_expiries import CertificateExpiries
from kvasir_platform.gateway.operator.facts.recent_figures import recent_requests
from kvasir_platform.gateway.operator.requests_page import MOST_RUNNING
from kvasir_platform.gateway.operator.verdict import StatusFacts, verdict_of
from kvasir_platform.gateway.tenants.wanted_place import POLICIES
from kvasir_platform.gateway.traffic.rollouts import Rollouts

_TURN_BYTES = 8192
"""Text of metrics that is made in one turn of the event loop: it takes about a millisecond (by hand)."""


def figures_of(router: RouterPort, metrics: Metrics, *, openmetrics: bool = False) -> Iterator[bytes]:
    """Return the metrics of this process, metric by metric."""
    metrics.workers(router.workers())
    return metrics.openmetrics_parts() if openmetrics else metrics.parts()


async def in_turns(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield all parts. Streams have their turns meanwhile."""
    size = 0
    for part in parts:
        yield part
        size += len(part)
        if size >= _TURN_BYTES:
            size = 0
            await asyncio.sleep(0)


async def joined_in_turns(parts: Iterable[bytes]) -> bytes:
    """Return all parts together. Streams have their turns meanwhile."""
    return b"".join([part async for part in in_turns(parts)])


class StatusPages:
    """GET /metrics and /status. `models` returns the names that clients may use, `clock` is the router's
    clock, `rollouts` has the canaries, `in_flight` returns the number of running calls, `draining` whether
    the gateway is stopping, and `wall` Unix time in seconds."""

    def __init__(
        self,
        deployment: Deployment,
        models: Callable[[], Iterable[str]],
        router: RouterPort,
        metrics: Metrics,
        clock: Clock,
        *,
        in_flight: Callable[[], int],
        draining: Callable[[], bool],
        rollouts: Rollouts | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._deployment = deployment
        self._models = models
        self._router = router
        self._metrics = metrics
        self._clock = clock
        self._in_flight = in_flight
        self._draining = draining
        self._rollouts = rollouts
        self._wall = wall
        self._later = LaterAnswers("metrics")
        files = (deployment.gateway.tls.cert_file, deployment.tls.cert_file)
        self._certificates = CertificateExpiries(file for file in files if file is not None)
        self._batches = {
            pool.name: {
                "max_num_batched_tokens": pool.engine.max_num_batched_tokens,
                "max_num_seqs": pool.engine.max_num_seqs,
            }
            for view in deployment.views()
            for pool in view.pools
        }

    def metrics(self, exchange: Exchange) -> None:
        """Respond later to GET /metrics, in Prometheus' text format, or as OpenMetrics if exemplars are on
        and asked for."""
        asked = OPENMETRICS in exchange.request.headers.get(b"accept", b"")
        exemplars = asked and self._deployment.telemetry.exemplars
        parts = figures_of(self._router, self._metrics, openmetrics=exemplars)
        self._later.answer(exchange, joined_in_turns(parts), OPENMETRICS_TYPE if exemplars else CONTENT_TYPE)

    def status(self, exchange: Exchange) -> None:
        """GET /status: the output of `kvasir status`."""
        reason = "draining" if self._draining() else self._router.not_ready_reason()
        facts = self._facts()
        shown = StatusResponse(
            deployment=self._deployment.name,
            ready=reason is None,
            reason=reason,
            disaggregation=self._deployment.disaggregation,
            models=list(self._models()),
            readiness={
                name: Readiness(missing is None, missing) for name, missing in facts.readiness.items()
            },
            in_flight=facts.in_flight,
            workers=[self._worker(view) for view in facts.workers],
            pools=list(facts.pools),
            queues={model: asdict(view) for model, view in facts.queues.items()},
            verdict=verdict_of(facts),
            routes=self._routes(),
            policy=self._deployment.routing.policy,
            policies=POLICIES,
            cells=list(facts.cells),
            recent=recent_requests(facts.ended, facts.now, self._deployment.routing.decision_records),
        )
        exchange.respond(200, msgspec.json.encode(shown))

    def _routes(self) -> list[RouteStatus]:
        found = {} if self._rollouts is None else {each.route: each for each in self._rollouts.views()}
        return [
            RouteStatus(route.name, list(route.targets), list(route.fallbacks), found.get(route.name))
            for route in self._deployment.routes
        ]

    def _facts(self) -> StatusFacts:
        workers, metrics = self._router.workers(), self._metrics
        scaling, queues = metrics.scaling(), self._router.admission()
        waiting = any(queue.queued for queue in queues.values())
        return StatusFacts(
            now=self._clock.now(),
            stopping=self._draining(),
            readiness=self._router.not_ready_models(),
            workers=workers,
            pools=pool_sizes(self._deployment, workers, {} if scaling is None else scaling.plans),
            queues=queues,
            in_flight=self._in_flight(),
            planner_inactive_s=0.0 if scaling is None else scaling.inactive_s,
            discovery_stale_s=metrics.discovery_stale_s(),
            limits_shared=metrics.limits_shared(),
            ended=self._router.ended(),
            cells=self._router.cells(),
            tenants=self._tenants() if waiting else {},
            certificates=self._certificates.left_s(self._wall()),
        )

    def _tenants(self) -> dict[str, int]:
        """Return the requests of each tenant: those that edges count, or of all that arrived first."""
        return self._metrics.running_by_tenant() or Counter(
            view.so_far.tenant for view in self._router.running(MOST_RUNNING) if view.so_far.tenant
        )

    def _worker(self, worker: WorkerView) -> dict[str, Any]:
        return _worker(worker, self._clock.now()) | {"batch": self._batches.get(worker.pool)}


_SHOWN_OF_KV = tuple(field.name for field in fields(KvStatus) if field.name != "since_s")


def pool_sizes(
    deployment: Deployment, workers: Iterable[WorkerView], plans: Mapping[str, PoolPlan]
) -> list[PoolSize]:
    """Return the pools. A pool has the size of kvasir.yaml, unless the planner applies another one."""
    counted = Counter((view.pool, view.state) for view in workers)
    sizes = []
    for view in deployment.views():
        for pool in view.pools:
            plan = plans.get(pool.name)
            known = plan is not None and plan.applied
            starting = counted[pool.name, "connecting"]
            sizes.append(
                PoolSize(
                    pool=pool.name,
                    model=view.model.name,
                    role=pool.role.value,
                    desired=plan.desired if plan is not None and known else pool.replicas,
                    serving=counted[pool.name, "ready"],
                    starting=max(starting, plan.starting) if plan is not None else starting,
                    forecast=None if plan is None or plan.forecast is None else _forecast(plan.forecast),
                )
            )
    return sizes


def _forecast(seen: PoolForecast) -> SizeForecast:
    return SizeForecast(seen.load, seen.expected, seen.upper, list(seen.because))


def _worker(view: WorkerView, now: float) -> dict[str, Any]:
    """Return what the encoder makes an object of: it encodes dataclasses much faster than `asdict` copies
    them."""
    identity = view.identity
    return {
        "worker_id": view.worker_id,
        "address": view.address,
        "pool": view.pool,
        "state": view.state,
        "reason": view.reason,
        "in_flight": view.in_flight,
        "model": None if identity is None else identity.model,
        "role": None if identity is None else identity.role,
        "assigned": view.assigned,
        "engine": None if identity is None else f"{identity.engine} {identity.engine_version}",
        "hardware": None if identity is None else identity.hardware,
        "locality": None if identity is None else identity.locality,
        "model_parameters": None if identity is None else identity.model_parameters,
        "model_bytes": None if identity is None else identity.model_bytes,
        "kv_layout": None if identity is None else identity.kv,
        "model_work": None if identity is None else identity.work,
        "max_model_len": None if identity is None else identity.max_model_len,
        "epoch": None if identity is None else identity.epoch,
        "load": view.load,
        "kv": None if view.kv is None else _kv(view.kv, now),
        "health": view.health,
        "adapters": view.adapters,
    }


def _kv(kv: KvStatus, now: float) -> dict[str, Any]:
    """Return a KvStatus as a dict, with `for_s` in place of `since_s`, whose clock the client does not
    share."""
    shown = {name: getattr(kv, name) for name in _SHOWN_OF_KV}
    shown["for_s"] = max(0.0, now - kv.since_s)
    return shown
