"""The port of routing policies: input and output of a routing decision.

A policy sees values only: the request, and the router's data on the candidate targets (prefix hits, accounted
load, measured rates). It uses neither clock nor network, so the same policy runs in production, in tests
under virtual time, and in trace replays. Targets are columns with one row each, because hundreds of them are
scored in the time that building an object for each would take.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvasir.core.locality import KNOWN_LINKS
from kvasir.core.requests import DEFAULT_SLO, SloClass
from kvasir.core.values import value

IntColumn = NDArray[np.int64]
FloatColumn = NDArray[np.float64]
BoolColumn = NDArray[np.bool_]

LOWER_TIERS = 3
"""CPU memory, disk and remote: the media below the device (kvasir.core.kv.Medium)."""


LINKS = len(KNOWN_LINKS)
"""The number of known classes of links."""

LinkGrid = NDArray[np.uint8]
"""The LinkClass of each pair: sources x receivers."""

CROSS_ROLE = "cross_role"
"""The reason of a plan that runs a request whole, because no worker of the right role serves."""

SCORE = "score"
"""The unit in which the largest sum of terms is best; in every other unit the smallest is."""


class RoutingTarget(NamedTuple):
    """One data-parallel rank of one worker: the smallest unit that a request can be routed to."""

    worker_id: str
    rank: int = 0


class RateColumns(NamedTuple):
    """The cost of work on each target, as `fixed + per unit`, in seconds: prefill per uncached prompt token,
    decode step per running stream, transfer per byte received from another worker, and load per byte from
    each lower tier (shape rows x LOWER_TIERS)."""

    prefill_fixed_s: FloatColumn
    prefill_token_s: FloatColumn
    step_fixed_s: FloatColumn
    step_stream_s: FloatColumn
    transfer_fixed_s: FloatColumn
    transfer_byte_s: FloatColumn
    tier_fixed_s: FloatColumn
    tier_byte_s: FloatColumn


@value
class LinkColumns:
    """The links between targets, where any are known. `grid` has the class of each pair of places of the
    fleet, `places` the place of each target; None: the places are the targets. A target receives over each
    known class in `fixed_s + byte_s * bytes` seconds; both have the shape LINKS x rows."""

    grid: LinkGrid
    places: IntColumn | None
    fixed_s: FloatColumn
    byte_s: FloatColumn

    def between(self, sources: IntColumn, receivers: IntColumn) -> LinkGrid:
        """Return the class of the link from each of some rows to each of others."""
        if self.places is not None:
            sources, receivers = self.places[sources], self.places[receivers]
        classes: LinkGrid = self.grid.take(sources, 0).take(receivers, 1)
        return classes

    def nearest(self, sources: IntColumn) -> LinkGrid:
        """Return the class of the link to each target from the one of some rows that is nearest to it."""
        if self.places is not None:
            sources = self.places[sources]
        nearest: LinkGrid = self.grid.take(sources, 0).min(axis=0)
        return nearest if self.places is None else nearest[self.places]


@value
class Candidates:
    """Targets at the time of one decision; row i of every column describes `targets[i]`. Valid during that
    decision only. Policies must not change its columns, which nothing enforces.

    `worker` numbers workers; ranks of one worker share a number. `prefills` and `decodes`: whether the role
    allows it. `cached_tokens` is the part of this request's prompt that is on the device or will be soon;
    `tier_tokens` (rows x LOWER_TIERS) what each lower tier adds. `queued_prefill_tokens` are uncached prompt
    tokens that are not computed yet, `waiting` their requests, `streams` the decoding sequences. These and
    `reserved_kv_tokens` count the router's requests that have not ended, plus what the worker reports beyond
    that. `held_tokens` is the total that the index has for the target, of a capacity of `kv_tokens`.
    `kv_token_bytes` is the KV size of one token; `block_size` is in tokens. `links` is None if nothing is
    known of the link of any pair; transfers over links of the class UNKNOWN cost what `rates` says.
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
    links: LinkColumns | None = None

    def __len__(self) -> int:
        return len(self.targets)


def no_names() -> array[int]:
    """Return an empty array('Q') of block names."""
    return array("Q")


@value
class RequestView:
    """A policy's view of a request, whose hashes must not be changed. `output_tokens` is the expected
    output per choice. `block_hashes` are the names of the prompt's whole blocks as array('Q'). `session` is
    the client's name for a group of requests, "" for none. `single_worker`: whether it must run on one
    worker, as requests with several choices do."""

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
        """Whether the request must run on one worker."""
        return self.single_worker or self.choices > 1


@value
class TermTable:
    """The terms that a policy computed for one part of a request (`prefill`, `decode` or `whole`), for people
    and replays: `values[i, j]` is the term `names[j]` of the candidate `targets[rows[i]]`, in `unit`. The
    policy chooses the row with the smallest sum (the largest if the unit is SCORE), or gives another
    reason. `links[i]` is the class of the link from the place that prefills, None if the policy uses
    none."""

    part: str
    unit: str
    rows: IntColumn
    names: tuple[str, ...]
    values: FloatColumn
    links: LinkGrid | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request runs. With `prefill` None, `decode` runs both parts.

    `predicted_cached_tokens` is the predicted prefix hit on the prefilling target, `predicted_tier_tokens`
    the part of it from each lower tier, `predicted_ttft_s` the predicted TTFT, 0 from policies that do not
    predict it. `reason` is a stable word.
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
        """The target that computes the prompt, in either mode."""
        return self.decode if self.prefill is None else self.prefill


class RoutingPolicy(Protocol):
    """Obligations: deterministic for the same state, Rng and arguments; never raises for any load; bounded
    work per candidate; returns only targets from the candidates."""

    @property
    def name(self) -> str:
        """The name in the deployment spec and in metrics."""
        ...

    def decide(self, request: RequestView, candidates: Candidates, now: float) -> Plan | None:
        """Return the placement, or None if no candidate (or pair of candidates) can serve the request, which
        then waits. `now` is a reading of the router's clock in seconds."""
        ...

    def missing(self, prefills: Sequence[bool], decodes: Sequence[bool], worker: Sequence[int]) -> str | None:
        """Return which role is missing to serve an ordinary request, in words, given these columns of the
        ready targets; None if none is missing."""
        ...
