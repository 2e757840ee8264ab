"""The core router as the edge sees it: submit tokens, get deltas, never know about workers.

The edge may live in the same process or another one; nothing here assumes which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvasir.core.errors import KvasirError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import Delta, EngineLoad, Request, Usage


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """What happened to a finished request: metrics, spans, `Server-Timing` and decision records are
    all made from this one value.

    Times are readings of the router's clock in seconds; None where the request never got there.
    `transfer_s` is the decode worker's measured wait for KV. `outcome` is "ok" or a stable error code.
    """

    request_id: str
    model: str
    outcome: str
    arrival_s: float
    finished_s: float
    routed_s: float | None = None
    prefill_done_s: float | None = None
    first_token_s: float | None = None
    transfer_s: float = 0.0
    prefill_worker: str | None = None
    decode_worker: str | None = None
    reason: str = ""
    predicted_cached_tokens: int = 0
    retries: int = 0
    usage: Usage = Usage()
    trace_context: str = ""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the router sees it. `state`: connecting, ready, interrupted, draining, refused.
    `reason` says why it is not ready."""

    worker_id: str
    address: str
    pool: str
    state: str
    reason: str = ""
    identity: WorkerIdentity | None = None
    load: EngineLoad | None = None
    in_flight: int = 0


class StreamSink(Protocol):
    """Receives one request's output on the router's event loop; must not block or raise.

    Any number of `on_delta`, then exactly one of `on_finish` and `on_error`.
    """

    def on_delta(self, delta: Delta) -> None: ...

    def on_finish(self, summary: RequestSummary) -> None: ...

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None: ...


class RouterPort(Protocol):
    """Obligations: every accepted request ends in exactly one on_finish or on_error; after
    `cancel` (which frees it on every worker) nothing more reaches its sink."""

    def submit(self, request: Request, sink: StreamSink) -> None:
        """Accept a request. Raises CapacityError when the system is full."""
        ...

    def cancel(self, request_id: str) -> None:
        """The client is gone; unknown or finished ids are ignored."""
        ...

    def workers(self) -> list[WorkerView]:
        """All known workers, by pool and id."""
        ...

    def not_ready_reason(self) -> str | None:
        """None when a request could be served at once, else what is missing."""
        ...
