"""How a routing decision is asked for, and what it answers.

A policy sees values only: the request, and for each place that could serve it what the router knows of
that place (predicted prefix hit, accounted load, measured rates). It touches neither clock nor network,
so the same policy decides in production, in tests under virtual time, and in a trace replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvasir.core.requests import Role


class Target(NamedTuple):
    """One data-parallel rank of one worker: the finest place that a request can be sent to."""

    worker_id: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """What work costs on one worker, each as `fixed + per unit`, in seconds.

    Prefill per uncached token, one decode step per running stream, transfer per byte received.
    The defaults are priors for a small model; measurements replace them within a few requests.
    """

    prefill_fixed_s: float = 0.005
    prefill_token_s: float = 1 / 20_000
    step_fixed_s: float = 0.005
    step_stream_s: float = 0.0003
    transfer_fixed_s: float = 0.003
    transfer_byte_s: float = 1 / 2e9

    def prefill_s(self, tokens: int) -> float:
        """Seconds of engine time for `tokens` uncached prompt tokens; none for none."""
        return self.prefill_fixed_s + tokens * self.prefill_token_s if tokens > 0 else 0.0

    def step_s(self, streams: int) -> float:
        """Seconds of one decode step of a batch of `streams`: their inter-token latency."""
        return self.step_fixed_s + streams * self.step_stream_s

    def transfer_s(self, size: float) -> float:
        """Seconds until `size` bytes of KV have arrived; none for none."""
        return self.transfer_fixed_s + size * self.transfer_byte_s if size > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request. `output_tokens` is an expectation, per choice."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    choices: int = 1
    block_hashes: tuple[int, ...] = ()
    priority: int = 0


class Candidate(NamedTuple):
    """One target, as known at this instant.

    `cached_tokens` is the predicted prefix hit of this request there. `queued_prefill_tokens`,
    `streams` and `reserved_kv_tokens` count what the router has sent and has not seen end, and what
    the worker reports beyond that. `held_tokens` is what the index believes is cached there.
    `kv_tokens` is the capacity; `kv_token_bytes` the bytes of KV that one token has.
    """

    target: Target
    pool: str
    role: Role
    rates: Rates
    cached_tokens: int = 0
    queued_prefill_tokens: int = 0
    streams: int = 0
    reserved_kv_tokens: int = 0
    held_tokens: int = 0
    kv_tokens: int = 1
    kv_token_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request runs. `prefill` None means that `decode` does both.

    `predicted_cached_tokens` is the hit expected where the prompt is prefilled. `terms` name the parts
    of the choice in the policy's own unit (seconds for the cost model). `reason` is a stable word.
    """

    prefill: Target | None
    decode: Target
    reason: str
    predicted_cached_tokens: int = 0
    terms: tuple[tuple[str, float], ...] = ()

    @property
    def mode(self) -> str:
        """`aggregated` or `disaggregated`."""
        return "aggregated" if self.prefill is None else "disaggregated"

    @property
    def prefill_target(self) -> Target:
        """Where the prompt is computed, in either mode."""
        return self.decode if self.prefill is None else self.prefill


class RoutingPolicy(Protocol):
    """Obligations: deterministic for the same state, Rng and arguments; never raises for any load;
    bounded work per candidate; names only targets that it was given."""

    @property
    def name(self) -> str:
        """The word that the deployment spec and metrics use."""
        ...

    def decide(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Plan | None:
        """Choose. None means that no candidate (or pair of them) may serve this request, so that it
        has to wait. `now` is the router clock in seconds."""
        ...

    def missing(self, candidates: Sequence[Candidate]) -> str | None:
        """Which role is lacking to serve an ordinary request, in words; None when nothing is."""
        ...
