"""Converts exceptions of the gateway to error responses, and counts them."""

from __future__ import annotations

import logging

from kvasir.core.errors import KvasirError
from kvasir.telemetry.metrics import Metrics
from kvasir_platform.gateway.http.exchange import Exchange

_log = logging.getLogger(__name__)


class ErrorAnswers:
    """Responds to an exchange with an error in the form of its API."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def answer(self, exchange: Exchange, error: BaseException) -> None:
        """Fail the exchange. An exception other than KvasirError is a bug of the gateway: it is logged and
        answered with 500. A BaseException such as a cancellation is raised again."""
        if not isinstance(error, Exception):
            raise error
        if isinstance(error, KvasirError):
            self.refused(error.code, exchange.model)
            exchange.fail(error)
            return
        _log.error("a request failed", extra={"request_id": exchange.request_id}, exc_info=error)
        self.refused("internal_error", exchange.model)
        exchange.fail(error)

    def refused(self, code: str, model: str | None = None) -> None:
        """Count a call that ended with `code`, including calls that the client abandoned."""
        self._metrics.request_refused(code, model)
