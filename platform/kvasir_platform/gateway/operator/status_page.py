"""Operator pages: metrics, and the status of the deployment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import msgspec

from kvasir.config.spec.deployment import Deployment
from kvasir.core.kv import KvStatus
from kvasir.ports.clock import Clock
from kvasir.ports.router import RouterPort, WorkerView
from kvasir.telemetry.metrics import CONTENT_TYPE, Metrics
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.answers import Readiness, StatusResponse


class StatusPages:
    """GET /metrics and /status. `models` returns the names that clients may use, `clock` is the router's
    clock, `in_flight` returns the number of running calls, and `draining` whether the gateway is stopping."""

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
    ) -> None:
        self._deployment = deployment
        self._models = models
        self._router = router
        self._metrics = metrics
        self._clock = clock
        self._in_flight = in_flight
        self._draining = draining

    def metrics(self, exchange: Exchange) -> None:
        """GET /metrics, in Prometheus' text format."""
        exchange.respond(200, self.figures(), CONTENT_TYPE)

    def figures(self) -> bytes:
        """Return the metrics of this process."""
        self._metrics.workers(self._router.workers())
        return self._metrics.render()

    def status(self, exchange: Exchange) -> None:
        """GET /status: the output of `kvasir status`."""
        reason = "draining" if self._draining() else self._router.not_ready_reason()
        shown = StatusResponse(
            deployment=self._deployment.name,
            ready=reason is None,
            reason=reason,
            disaggregation=self._deployment.disaggregation,
            models=list(self._models()),
            readiness={
                name: Readiness(missing is None, missing)
                for name, missing in self._router.not_ready_models().items()
            },
            in_flight=self._in_flight(),
            workers=[self._worker(view) for view in self._router.workers()],
        )
        exchange.respond(200, msgspec.json.encode(shown))

    def _worker(self, worker: WorkerView) -> dict[str, Any]:
        batches = {
            pool.name: {
                "max_num_batched_tokens": pool.engine.max_num_batched_tokens,
                "max_num_seqs": pool.engine.max_num_seqs,
            }
            for view in self._deployment.views()
            for pool in view.pools
        }
        return _worker(worker, self._clock.now()) | {"batch": batches.get(worker.pool)}


def _worker(view: WorkerView, now: float) -> dict[str, Any]:
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
        "hardware": None if identity is None else asdict(identity.hardware),
        "locality": None if identity is None else asdict(identity.locality),
        "model_parameters": None if identity is None else identity.model_parameters,
        "model_bytes": None if identity is None else identity.model_bytes,
        "kv_layout": None if identity is None else asdict(identity.kv),
        "model_work": None if identity is None or identity.work is None else asdict(identity.work),
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
    shown = asdict(kv)
    return shown | {"for_s": max(0.0, now - shown.pop("since_s"))}
