"""The errors that operators get for adapters."""

from __future__ import annotations

from collections.abc import Mapping

from kvasir.core.errors import RequestError
from kvasir.core.messages import LoadAdapter, UnloadAdapter


def in_use(name: str) -> RequestError:
    """Return the error for a name that clients use already."""
    return RequestError(
        f"The name {name!r} is in use; GET /v1/models and `kvasir lora list` show which are. Choose another "
        "one, or unload the adapter first.",
        status=409,
        code="adapter_exists",
        param="lora_name",
    )


def disabled() -> RequestError:
    """Return the error for a model for which no adapters can be loaded."""
    return RequestError(
        "Adapters cannot be loaded at run time here: list the allowed sources in lora_loading.allow in "
        "kvasir.yaml and start the deployment anew.",
        status=403,
        code="adapter_loading_disabled",
    )


def not_loaded(name: str) -> RequestError:
    """Return the error for an adapter that was not loaded at run time."""
    return RequestError(
        f"No adapter {name[:256]!r} is loaded; `kvasir lora list` shows those that are. Adapters in `lora` "
        "of kvasir.yaml are removed there.",
        status=404,
        code="adapter_not_found",
        param="lora_name",
    )


def unknown_model(model: str | None, models: Mapping[str, object]) -> RequestError:
    """Return the error for an adapter of a model that is not served."""
    return RequestError(
        f"The model {str(model)[:256]!r} does not exist here; the models are {', '.join(models)}.",
        status=404,
        code="model_not_found",
        param="model",
    )


def partly_loaded(name: str, loaded: int, failures: Mapping[str, str], retry_s: float) -> RequestError:
    """Return the error for an adapter that only some of its workers hold."""
    reasons = "; ".join(f"{worker_id}: {message}" for worker_id, message in failures.items())
    return RequestError(
        f"The adapter {name!r} is on {loaded} workers, and {len(failures)} failed to load it and are asked "
        f"again every {retry_s:.0f} s: {reasons}",
        status=502,
        code="adapter_load_failed",
    )


def too_late(worker_id: str, order: LoadAdapter | UnloadAdapter, timeout_s: float) -> RequestError:
    """Return the error for an order whose answer takes too long."""
    doing = "loading" if isinstance(order, LoadAdapter) else "waiting for requests that use"
    return RequestError(
        f"{worker_id} is still {doing} the adapter {order.name!r} after {timeout_s:g} s "
        "(lora_loading.timeout_s) and continues; `kvasir lora list` shows when it is done.",
        status=504,
        code="adapter_timeout",
    )
