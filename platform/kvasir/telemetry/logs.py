"""Logs as one JSON line per event, so that they can be searched by field: what happened, and requests that
ended."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING

import msgspec

from kvasir.telemetry.reasons import OK

if TYPE_CHECKING:
    from kvasir.ports.router import RequestSummary

FAILED_PER_S = 20
"""Requests that failed whose lines are written in one second."""
_requests = logging.getLogger("kvasir.requests")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: ts, level, logger, message, then the fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD:
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def configure_logging(level: str, stream: IO[str] | None = None) -> None:
    """Send every record of at least `level` to `stream` (stderr by default), one JSON line each."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class RequestLog:
    """One line for each request that failed, and with `every` for each that ended, with its ids and figures
    and without any content. Of failed ones, FAILED_PER_S are written in a second; the next line after it says
    how many were left out."""

    def __init__(self, *, every: bool = False) -> None:
        self._every = every
        self._second = 0
        self._written = 0
        self._omitted = 0

    def ended(self, summary: RequestSummary) -> None:
        """Write the line of a request that has ended, if it has one."""
        if summary.outcome == OK or summary.slo_met is None:
            if self._every:
                _requests.info("a request ended", extra=_figures(summary))
            return
        second = int(summary.finished_s)
        if second != self._second:
            self._second, self._written = second, 0
        if self._written >= FAILED_PER_S and not self._every:
            self._omitted += 1
            return
        self._written += 1
        omitted, self._omitted = self._omitted, 0
        more = {"omitted": omitted} if omitted else {}
        _requests.warning("a request failed", extra=_figures(summary) | more)


def _figures(summary: RequestSummary) -> dict[str, object]:
    routed, usage = summary.routed_s, summary.usage
    return {
        "request_id": summary.request_id,
        "trace_id": summary.trace_context[3:35],
        "tenant": summary.tenant,
        "model": summary.model,
        "slo": summary.slo.name,
        "outcome": summary.outcome,
        "queued_s": None if routed is None else round(routed - summary.arrival_s, 6),
        "ttft_s": None if summary.ttft_s is None else round(summary.ttft_s, 6),
        "e2e_s": round(summary.finished_s - summary.arrival_s, 6),
        "prompt_tokens": summary.prompt_tokens or usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": max(usage.output_tokens, summary.sent_tokens),
        "prefill_worker": summary.prefill_worker,
        "decode_worker": summary.decode_worker,
        "retries": summary.retries,
        "migrations": summary.migrations,
    }
