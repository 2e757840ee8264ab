"""The endpoints that only tell: models, health, metrics, status."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from urllib.parse import unquote

import msgspec

from kvasir.config.spec import Deployment
from kvasir.core.errors import CapacityError
from kvasir.core.kv import KvStatus
from kvasir.ports.clock import Clock
from kvasir.ports.router import RouterPort, WorkerView
from kvasir.telemetry.metrics import CONTENT_TYPE, Metrics
from kvasir_platform.gateway.http import Exchange
from kvasir_platform.gateway.models import ModelTable, no_such_model
from kvasir_platform.gateway.tenants.caller import Caller

MODELS = "/v1/models"


class Pages:
    """Read-only endpoints. `clock` is the router's; `created` is the Unix time that models are listed
    with."""

    def __init__(
        self,
        deployment: Deployment,
        models: ModelTable,
        router: RouterPort,
        metrics: Metrics,
        clock: Clock,
        *,
        created: int,
        in_flight: Callable[[], int],
    ) -> None:
        self._deployment = deployment
        self._router = router
        self._metrics = metrics
        self._clock = clock
        self._models = models.objects(created)
        self._in_flight = in_flight
        self.draining = False

    def models(self, caller: Caller, exchange: Exchange) -> None:
        """GET /v1/models: those that the caller may use."""
        shown = [model for name, model in self._models.items() if caller.may_use(name)]
        _json(exchange, {"object": "list", "data": shown})

    def model(self, caller: Caller, exchange: Exchange) -> None:
        """GET /v1/models/{id}."""
        name = unquote(exchange.request.path[len(MODELS) + 1 :])
        caller.check_model(name)
        found = self._models.get(name)
        if found is None:
            raise no_such_model(name)
        _json(exchange, found)

    def live(self, exchange: Exchange) -> None:
        """GET /health/live: the process answers."""
        _json(exchange, {"status": "live"})

    def ready(self, exchange: Exchange) -> None:
        """GET /health/ready: a request could be served at once; else 503 with what is missing."""
        if self.draining:
            raise CapacityError("The server is stopping.", code="shutting_down")
        reason = self._router.not_ready_reason()
        if reason is not None:
            raise CapacityError(f"Not ready: {reason}.", code="not_ready")
        _json(exchange, {"status": "ready"})

    def metrics(self, exchange: Exchange) -> None:
        """GET /metrics, in Prometheus' text format."""
        self._metrics.workers(self._router.workers())
        exchange.respond(200, self._metrics.render(), CONTENT_TYPE)

    def status(self, exchange: Exchange) -> None:
        """GET /status: what `kvasir status` shows."""
        reason = "draining" if self.draining else self._router.not_ready_reason()
        _json(
            exchange,
            {
                "deployment": self._deployment.name,
                "ready": reason is None,
                "reason": reason,
                "disaggregation": self._deployment.disaggregation,
                "models": list(self._models),
                "readiness": {
                    name: {"ready": missing is None, "reason": missing}
                    for name, missing in self._router.not_ready_models().items()
                },
                "in_flight": self._in_flight(),
                "workers": [_worker(view, self._clock.now()) for view in self._router.workers()],
            },
        )


def _worker(view: WorkerView, now: float) -> dict[str, Any]:
    identity = view.identity
    return {
        "worker_id": view.worker_id,
        "address": view.address,
        "pool": view.pool,
        "state": view.state,
        "reason": view.reason,
        "in_flight": view.in_flight,
        "role": None if identity is None else identity.role,
        "engine": None if identity is None else f"{identity.engine} {identity.engine_version}",
        "epoch": None if identity is None else identity.epoch,
        "load": view.load,
        "kv": None if view.kv is None else _kv(view.kv, now),
        "health": view.health,
    }


def _kv(kv: KvStatus, now: float) -> dict[str, Any]:
    """As KvStatus; `for_s` in place of a reading of a clock that the client does not have."""
    shown = asdict(kv)
    return shown | {"for_s": max(0.0, now - shown.pop("since_s"))}


def _json(exchange: Exchange, value: Any) -> None:
    exchange.respond(200, msgspec.json.encode(value))
