"""The state of one request for an embedding: one leg at a time, and no output that the client has."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvasir.core.errors import KvasirError, RequestError
from kvasir.core.requests import Request, Usage
from kvasir.ports.router import LostAttempt, RequestSummary, RunningView
from kvasir_router.admission import AdmissionTicket

_REASON = "fewest_tokens"


@dataclass(slots=True)
class EmbeddingRequestState:
    """A request, which either waits, until `queued_until` at most, or runs in a leg on a worker. `order` is
    its place in the order of arrival."""

    request: Request
    ticket: AdmissionTicket
    order: int
    queued_until: float | None = None
    worker_id: str | None = None
    leg_id: str = ""
    starts: int = 0
    retries: int = 0
    migrations: int = 0
    brownout: str = ""
    started_s: float = 0.0
    routed_s: float | None = None
    done_s: float | None = None
    usage: Usage = field(default_factory=Usage)
    avoid: set[str] = field(default_factory=set)
    last_error: KvasirError | None = None
    lost: tuple[LostAttempt, ...] = ()

    @property
    def waits(self) -> bool:
        return self.queued_until is not None

    @property
    def tokens(self) -> int:
        return len(self.request.tokens)

    def overdue(self, now: float) -> RequestError:
        """Return the error of a request whose deadline has passed."""
        took = now - self.request.arrival_s
        message = f"the input was not embedded after {took:.1f} s"
        return RequestError(message, status=504, code="request_timeout")

    def summary(self, outcome: str, now: float) -> RequestSummary:
        """Return the summary as of now. The vector counts as the first token."""
        request = self.request
        return RequestSummary(
            request_id=request.request_id,
            model=request.model,
            outcome=outcome,
            arrival_s=request.arrival_s,
            finished_s=now,
            routed_s=self.routed_s,
            prefill_done_s=self.done_s,
            first_token_s=self.done_s,
            prefill_worker=self.worker_id,
            reason="" if self.worker_id is None else _REASON,
            retries=self.retries,
            migrations=self.migrations,
            usage=self.usage,
            trace_context=request.trace_context,
            slo=request.slo,
            brownout=self.brownout,
            tenant=request.tenant,
            route_arm=request.route_arm,
            key=request.key,
            started_s=self.started_s,
            prompt_tokens=len(request.tokens),
            lost=self.lost,
        )

    def view(self, now: float) -> RunningView:
        """Return the request as of now. Its vector comes as a whole."""
        return RunningView("queued" if self.waits else "prefilling", self.tokens, 0, self.summary("", now))
