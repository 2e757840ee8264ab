"""How a routing decision is asked for, and what it answers.

A policy sees values only: the request, and what the router knows of the places that could serve it
(prefix hits, accounted load, measured rates). It touches neither clock nor network, so the same policy
decides in production, in tests under virtual time, and in a trace replay. Places come as columns, one row
each, since a fleet of hundreds is scored in the time that building an object for each would take.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvasir.core.requests import DEFAULT_SLO, SloClass

IntColumn = NDArray[np.int64]
FloatColumn = NDArray[np.float64]
BoolColumn = NDArray[np.bool_]

LOWER_TIERS = 3
"""CPU memory, disk and remote: the media below the device (kvasir.core.kv.Medium)."""


SCORE = "score"
"""The unit of terms of which the largest sum is best; in every other unit it is the smallest."""


class RoutingTarget(NamedTuple):
    """One data-parallel rank of one worker: the finest place that a request can be sent to."""

    worker_id: str
    rank: int = 0


class RateColumns(NamedTuple):
    """What work costs at each place, as `fixed + per unit`, in seconds: prefill per uncached prompt token,
    one decode step per running stream, transfer per byte received from another worker, and load per byte
    from each lower tier (shape rows x LOWER_TIERS)."""

    prefill_fixed_s: FloatColumn
    prefill_token_s: FloatColumn
    step_fixed_s: FloatColumn
    step_stream_s: FloatColumn
    transfer_fixed_s: FloatColumn
    transfer_byte_s: FloatColumn
    tier_fixed_s: FloatColumn
    tier_byte_s: FloatColumn


@dataclass(slots=True, eq=False)
class Candidates:
    """Places as known at this instant; row i of every column is of `targets[i]`. Valid during one decision
    only, and not to be changed: that nothing enforces it makes one in a third of the time.

    `worker` numbers workers: ranks of one share it. `prefills` and `decodes` are what the role allows.
    `cached_tokens` is how much of this request's prompt is on the device or about to be; `tier_tokens`
    (rows x LOWER_TIERS) how much more of it each lower tier adds. `queued_prefill_tokens` are uncached
    prompt tokens that were sent there and are not computed yet, `waiting` the requests that they belong
    to, `streams` the sequences that decode there. These and `reserved_kv_tokens` count what the router
    has sent and has not seen end, and what the worker reports beyond that. `held_tokens` is what the
    index believes is cached there in all, of a capacity of `kv_tokens`. `kv_token_bytes` is the KV of one
    token, `block_size` in tokens.
    """

    targets: tuple[RoutingTarget, ...]
    worker: IntColumn
    prefills: BoolColumn
    decodes: BoolColumn
    cached_tokens: IntColumn
    tier_tokens: IntColumn
    queued_prefill_tokens: IntColumn
    waiting: IntColumn
    streams: IntColumn
    reserved_kv_tokens: IntColumn
    held_tokens: IntColumn
    kv_tokens: IntColumn
    kv_token_bytes: FloatColumn
    block_size: IntColumn
    rates: RateColumns

    def __len__(self) -> int:
        return len(self.targets)


def no_names() -> array[int]:
    """No block names, as array('Q')."""
    return array("Q")


@dataclass(slots=True)
class RequestView:
    """What a policy may know of a request; not to be changed, as Candidates. `output_tokens` is an
    expectation, per choice. `block_hashes` are the prompt's whole blocks by name, as array('Q'). `session`
    is the client's own name for what belongs together, "" for none. `single_worker`: it has to run on one
    worker, as one with several choices does."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    choices: int = 1
    block_hashes: array[int] = field(default_factory=no_names)
    priority: int = 0
    slo: SloClass = DEFAULT_SLO
    session: str = ""
    single_worker: bool = False

    @property
    def whole(self) -> bool:
        """Whether it has to run on one worker."""
        return self.single_worker or self.choices > 1


@dataclass(frozen=True, slots=True, eq=False)
class TermTable:
    """What a policy computed for one part of a request (`prefill`, `decode` or `whole`), for people and
    for replays: `values[i, j]` is the term `names[j]` of the place `targets[rows[i]]` of the candidates, in
    `unit`. A policy's choice is the row with the smallest sum (the largest where the unit is SCORE), or it
    says otherwise in its reason."""

    part: str
    unit: str
    rows: IntColumn
    names: tuple[str, ...]
    values: FloatColumn


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request runs. `prefill` None means that `decode` does both.

    `predicted_cached_tokens` is the hit expected where the prompt is prefilled, `predicted_tier_tokens` the
    part of it that is to come from each lower tier, `predicted_ttft_s` the seconds until the first token, 0
    from a policy that does not know. `reason` is a stable word.
    """

    prefill: RoutingTarget | None
    decode: RoutingTarget
    reason: str
    predicted_cached_tokens: int = 0
    predicted_ttft_s: float = 0.0
    tables: tuple[TermTable, ...] = field(default=(), compare=False, repr=False)
    predicted_tier_tokens: tuple[int, ...] = (0,) * LOWER_TIERS

    @property
    def mode(self) -> str:
        """`aggregated` or `disaggregated`."""
        return "aggregated" if self.prefill is None else "disaggregated"

    @property
    def prefill_target(self) -> RoutingTarget:
        """Where the prompt is computed, in either mode."""
        return self.decode if self.prefill is None else self.prefill


class RoutingPolicy(Protocol):
    """Obligations: deterministic for the same state, Rng and arguments; never raises for any load;
    bounded work per candidate; names only targets that it was given."""

    @property
    def name(self) -> str:
        """The word that the deployment spec and metrics use."""
        ...

    def decide(self, request: RequestView, candidates: Candidates, now: float) -> Plan | None:
        """Choose. None means that no candidate (or pair of them) may serve this request, so that it
        has to wait. `now` is the router clock in seconds."""
        ...

    def missing(self, prefills: Sequence[bool], decodes: Sequence[bool], worker: Sequence[int]) -> str | None:
        """Which role is lacking to serve an ordinary request, in words, given those columns of the places
        that are ready; None when nothing is."""
        ...
