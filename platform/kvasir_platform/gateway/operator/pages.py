"""Read-only endpoints for all callers: models and health."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import unquote

import msgspec

from kvasir.core.errors import CapacityError
from kvasir.ports.router import RequestPort
from kvasir_platform.gateway.anthropic.answers import ModelInfo, ModelInfos
from kvasir_platform.gateway.anthropic.endpoints import wants_anthropic
from kvasir_platform.gateway.catalog.models import ModelTable, Served
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.answers import HealthResponse, Model, Models
from kvasir_platform.gateway.tenants.caller import Caller

MODELS = "/v1/models"


class Pages:
    """Read-only endpoints. `created` is the Unix time that models are listed with."""

    def __init__(
        self,
        models: ModelTable,
        router: RequestPort,
        *,
        created: int,
    ) -> None:
        self._router = router
        self._table = models
        self._created = created
        self._models = {name: model_object(name, models.find(name), created) for name in models.names}
        self.draining = False

    def models(self, caller: Caller, exchange: Exchange) -> None:
        """GET /v1/models: the models that the caller may use, in the form of the client's API."""
        shown = [self._shown(name) for name in self._table.listed() if caller.may_use(name)]
        _json(exchange, model_infos(shown) if _of_anthropic(exchange) else Models("list", shown))

    def model(self, caller: Caller, exchange: Exchange) -> None:
        """GET /v1/models/{id}."""
        name = unquote(exchange.request.path[len(MODELS) + 1 :])
        caller.check_model(name)
        shown = self._shown(name)
        _json(exchange, model_info(shown) if _of_anthropic(exchange) else shown)

    def _shown(self, name: str) -> Model:
        """Return the model of that name. Raise RequestError 404 if there is none."""
        return self._models.get(name) or model_object(name, self._table.find(name), self._created)

    def live(self, exchange: Exchange) -> None:
        """GET /health/live: liveness of the process."""
        _json(exchange, HealthResponse("live"))

    def ready(self, exchange: Exchange) -> None:
        """GET /health/ready: 200 from the first time that requests could be served until the gateway stops,
        else 503 with the reason. What is missing later is at /status."""
        if self.draining:
            raise CapacityError("The server is stopping.", code="shutting_down")
        reason = self._router.refusing_reason()
        if reason is not None:
            raise CapacityError(f"Not ready: {reason}.", code="not_ready")
        _json(exchange, HealthResponse("ready"))


def model_object(name: str, served: Served, created: int) -> Model:
    """A model or adapter as GET /v1/models lists it; `created` is Unix time."""
    model = served.model
    is_adapter = served.adapter is not None
    return Model(
        id=name,
        object="model",
        created=created,
        owned_by="kvasir",
        max_model_len=model.context,
        task="generate" if model.capabilities.generates else "embed",
        root=name if is_adapter else None,
        parent=model.name if is_adapter else None,
    )


def model_info(model: Model) -> ModelInfo:
    """Return a model in Anthropic's form."""
    created = datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    length = model.max_model_len
    return ModelInfo(model.id, model.id, created, "active", max_input_tokens=length, max_tokens=length)


def model_infos(models: Sequence[Model]) -> ModelInfos:
    """Return models in Anthropic's form."""
    first, last = (models[0].id, models[-1].id) if models else (None, None)
    return ModelInfos([model_info(model) for model in models], False, first, last)


def _of_anthropic(exchange: Exchange) -> bool:
    return wants_anthropic(exchange.request.path, exchange.request.headers)


def _json(exchange: Exchange, value: msgspec.Struct) -> None:
    exchange.respond(200, msgspec.json.encode(value))
