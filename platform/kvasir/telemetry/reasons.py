"""The closed vocabulary of outcomes: every code that a client, a metric or a log line can carry.

Clients branch on codes and dashboards group by them, so every code is defined in `codes` with its HTTP
status, its meaning and its remedy. docs/errors.md has this table. Run `make pages` after a change; as a
program, this module copies a page from stdin to stdout with the table updated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType

from kvasir.core.errors import CapacityError, KvasirError, RequestError, TransferError, UpstreamError
from kvasir.telemetry.codes.access import ACCESS_REASONS
from kvasir.telemetry.codes.failures import FAILURE_REASONS
from kvasir.telemetry.codes.limits import LIMIT_REASONS
from kvasir.telemetry.codes.reason import Reason
from kvasir.telemetry.codes.requests import REQUEST_REASONS

OK = "ok"
CLIENT_CLOSED = "client_closed"
SLOW_READER = "slow_reader"
TLS_FAILED = "tls_failed"
CONTENT_FILTER = "content_filter"
OTHER = "other"

_TABLE = (
    *REQUEST_REASONS,
    *ACCESS_REASONS,
    *LIMIT_REASONS,
    *FAILURE_REASONS,
    Reason(CLIENT_CLOSED, 0, "The client closed the connection; the request was aborted.", "Nothing."),
    Reason(TLS_FAILED, 0, "A TLS handshake failed or timed out.", "Use TLS 1.2 or newer."),
    Reason(SLOW_READER, 0, "The client read too slowly; its stream was aborted.", "Read faster."),
    Reason(
        CONTENT_FILTER,
        0,
        "An output filter ended the answer, whose finish_reason says so.",
        "Change the request; operators know the filters.",
    ),
)

REASONS: Mapping[str, Reason] = MappingProxyType({reason.code: reason for reason in _TABLE})

_STATUS_OF_CLASS: tuple[tuple[type[KvasirError], int], ...] = (
    (CapacityError, 503),
    (UpstreamError, 502),
    (TransferError, 502),
)


def http_status(error: KvasirError) -> int:
    """Return the HTTP status of an error: its own, that of its code, or that of its class."""
    if isinstance(error, RequestError):
        return error.status
    reason = REASONS.get(error.code)
    if reason is not None and reason.status:
        return reason.status
    for kind, status in _STATUS_OF_CLASS:
        if isinstance(error, kind):
            return status
    return 500


def outcome_label(code: str) -> str:
    """Return `code` if it is in the vocabulary, else `other`, so that label cardinality is bounded."""
    return code if code == OK or code in REASONS else OTHER


def markdown_table() -> str:
    """Return the table for docs/errors.md."""
    rows = ["| status | code | meaning | what to do |", "|---|---|---|---|"]
    rows += [f"| {r.status or '–'} | `{r.code}` | {r.meaning} | {r.remedy} |" for r in _TABLE]
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """Return `page` with its table of errors updated. Raises ValueError if it has none."""
    lines = page.splitlines(keepends=True)
    head = markdown_table().splitlines(keepends=True)[0]
    begin = lines.index(head)
    end = next((at for at in range(begin, len(lines)) if not lines[at].startswith("|")), len(lines))
    return "".join((*lines[:begin], markdown_table(), *lines[end:]))


if __name__ == "__main__":
    sys.stdout.write(with_table(sys.stdin.read()))
