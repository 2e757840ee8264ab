"""Where errors of the gateway's steps become answers, and are counted."""

from __future__ import annotations

import logging

from kvasir.core.errors import KvasirError
from kvasir.telemetry.metrics import Metrics
from kvasir_platform.gateway.http.errors import error_headers, error_status
from kvasir_platform.gateway.http.exchange import Exchange

_log = logging.getLogger(__name__)


class ErrorAnswers:
    """Answers an exchange with an error, in OpenAI's form."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def answer(self, exchange: Exchange, error: BaseException) -> None:
        """Fail the exchange. What is no KvasirError is a fault of the gateway: a 500, and a log line. What is
        no Exception (a cancellation) is raised."""
        if not isinstance(error, Exception):
            raise error
        if isinstance(error, KvasirError):
            self.refused(error.code, exchange.model)
            exchange.fail(error_status(error), error, error_headers(error))
            return
        _log.error("a request failed", extra={"request_id": exchange.request_id}, exc_info=error)
        self.refused("internal_error", exchange.model)
        exchange.fail(500, error)

    def refused(self, code: str, model: str | None = None) -> None:
        """Count a call that was answered with `code`, or that its client left."""
        self._metrics.request_refused(code, model)
