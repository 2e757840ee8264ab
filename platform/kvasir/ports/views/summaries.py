"""What a router says of a request: while it runs, and when it has ended."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.core.requests import DEFAULT_SLO, RouteArm, SloClass, Usage
from kvasir.core.values import value

NOT_JUDGED = frozenset(("client_closed", "slow_reader", "content_filter"))
"""Outcomes of requests that a client or an output filter ended, which neither met nor missed their SLO."""


@value
class LostAttempt:
    """An attempt of a request that ended before the request did, on these workers of the router. It computed
    at most `prompt_tokens` tokens of the prompt, and `repeated_tokens` of output that another attempt
    repeats."""

    prefill_worker: str | None
    decode_worker: str
    begin_s: float
    end_s: float
    prompt_tokens: int
    repeated_tokens: int = 0


@value
class RequestSummary:
    """The summary of a finished request, from which metrics, spans, `Server-Timing` and decision records are
    made.

    Times are readings of the router's clock in seconds; None for stages that the request did not reach.
    `route_s` is the duration of the last decision, `tier_s` the wait for KV from tiers, and `transfer_s` the
    decode worker's measured wait for KV, of which `pulled_s` is without the time in which the prompt was
    still being computed. By the workers' measure, the request waited `waited_s` for their engines, and its
    prompt was computed in `computed_s`. `finish` is the finish reason of the last choice, "" without one.
    `retries` counts starts after a failure before the first token, `migrations` failovers after the loss of a
    worker; `started_s` is when the last attempt began, and `lost` are those before it. The client has been
    sent `sent_tokens` in all of its `choices`, for a prompt of `prompt_tokens`, and its API key is known as
    `key`. `outcome` is "ok" or a stable error code. `brownout` is BrownoutView.text at arrival. `refused`:
    the request was not accepted, as if `submit` had raised; set only by a router in another process.
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
    migrations: int = 0
    usage: Usage = Usage()
    trace_context: str = ""
    slo: SloClass = DEFAULT_SLO
    brownout: str = ""
    route_s: float = 0.0
    tier_s: float = 0.0
    refused: bool = False
    waited_s: float = 0.0
    computed_s: float = 0.0
    pulled_s: float = 0.0
    finish: str = ""
    tenant: str = ""
    route_arm: RouteArm | None = None
    key: str = ""
    started_s: float = 0.0
    prompt_tokens: int = 0
    sent_tokens: int = 0
    choices: int = 1
    lost: tuple[LostAttempt, ...] = ()

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token; None without one."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between two tokens; None for fewer than two tokens or if the request failed."""
        if self.first_token_s is None or self.outcome != "ok" or self.usage.output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.usage.output_tokens - 1)

    @property
    def slo_met(self) -> bool | None:
        """Whether the request succeeded within the TTFT and mean ITL of its SLO class. None if the client or
        an output filter ended the request."""
        # Almost all requests end well, so this is asked first.
        if self.outcome == "ok":
            ttft, itl, slo = self.ttft_s, self.itl_s, self.slo
            return (ttft is None or ttft <= slo.ttft_s) and (itl is None or itl <= slo.itl_s)
        return None if self.outcome in NOT_JUDGED else False


@dataclass(frozen=True, slots=True)
class RunningView:
    """A request that has not ended. `phase`: queued, prefilling, decoding. `so_far` is its summary as of the
    moment, without an outcome; `output_tokens` is what its client has been sent, over all choices."""

    phase: str
    prompt_tokens: int
    output_tokens: int
    so_far: RequestSummary
