"""Endpoints that take a worker out of service and put it back."""

from __future__ import annotations

from urllib.parse import unquote

import msgspec

from kvasir.core.errors import RequestError
from kvasir.ports.router import RouterPort
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.answers import Drained

WORKERS = "/workers/"
DRAIN = "/drain"
UNDRAIN = "/undrain"
_REASON_LIMIT = 200


class DrainPages:
    """POST /workers/{id}/drain and /workers/{id}/undrain. The body may be empty, or `{"reason": TEXT}`, which
    `kvasir get workers` shows.

    The response is 202: the request was sent to the worker. GET /status shows when the worker confirms.
    """

    def __init__(self, router: RouterPort) -> None:
        self._router = router

    def drain(self, exchange: Exchange) -> None:
        """Raise RequestError for an invalid body or an unknown worker, UpstreamError for one that is not
        reachable."""
        self._ask(exchange, DRAIN, True)

    def undrain(self, exchange: Exchange) -> None:
        """End a drain; raises as `drain`."""
        self._ask(exchange, UNDRAIN, False)

    def _ask(self, exchange: Exchange, ending: str, draining: bool) -> None:
        worker_id = unquote(exchange.request.path[len(WORKERS) : -len(ending)])
        reason = _reason(exchange.request.body)
        self._router.drain(worker_id, draining, reason)
        exchange.respond(202, msgspec.json.encode(Drained(worker_id, draining)))


def _reason(body: bytes) -> str:
    if not body:
        return ""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError('Send an object such as {"reason": "kernel update"}.', code="invalid_type")
    for name in value:
        if name != "reason":
            raise RequestError(
                f"Unknown parameter: {name[:256]}.", code="unknown_parameter", param=name[:256]
            )
    reason = value.get("reason", "")
    if not isinstance(reason, str):
        raise RequestError("reason: expected text.", code="invalid_type", param="reason")
    if len(reason) > _REASON_LIMIT or not reason.isprintable():
        raise RequestError(
            f"reason: send at most {_REASON_LIMIT} printable characters.",
            code="invalid_value",
            param="reason",
        )
    return reason
