"""What a router says of its decisions: why a request ran where it did, and what would have cost less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CandidateRecord:
    """One candidate in one part of a decision. `facts` are its known properties (tokens, counts), `terms` the
    policy's terms in the unit of the table. `link` is the class of the link from the chosen place that
    prefills, "" if the policy does not use it."""

    worker_id: str
    rank: int
    pool: str
    kv_state: str
    facts: dict[str, float]
    terms: dict[str, float]
    total: float
    chosen: bool
    link: str = ""


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """The candidates of one part of a request (`prefill`, `decode` or `whole`), best first."""

    part: str
    unit: str
    places: tuple[CandidateRecord, ...]


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """The reasons of a placement, and its outcome. Times as in RequestSummary. `attempt` counts decisions for
    this request from 1; only the last is kept. `queued_s` is the time from arrival to decision;
    `predicted_ttft_s` counts from the decision, `actual_ttft_s` from arrival. `actual_itl_s` is the mean ITL.
    Tier tokens are the part of the cached tokens that comes from tiers. Actual values are None until they are
    known; `omitted` counts candidates that are left out of the parts to keep records small. `regret_s` is
    None for a decision that is not judged (see kvasir_router.decide.regret), `regret_causes` has the causes
    with a part of it; `better` are the part and worker of what would have cost less, with the TTFT from the
    decision that it would have had. `rates` says where the costs of the chosen workers began, before
    measurements."""

    request_id: str
    policy: str
    reason: str
    mode: str
    decided_s: float
    decided_in_s: float
    attempt: int
    prompt_tokens: int
    expected_output_tokens: int
    slo: str
    prefill_worker: str | None
    decode_worker: str
    predicted_cached_tokens: int
    predicted_ttft_s: float
    parts: tuple[PhaseRecord, ...]
    omitted: int = 0
    queued_s: float = 0.0
    slo_ttft_s: float = 0.0
    slo_itl_s: float = 0.0
    outcome: str | None = None
    actual_cached_tokens: int | None = None
    actual_ttft_s: float | None = None
    actual_itl_s: float | None = None
    predicted_tier_tokens: int = 0
    actual_tier_tokens: int | None = None
    slo_met: bool | None = None
    regret_s: float | None = None
    regret_causes: dict[str, float] = field(default_factory=dict)
    better: tuple[str, ...] = ()
    better_ttft_s: float | None = None
    rates: str = ""


@dataclass(frozen=True, slots=True)
class RegretView:
    """The regret of a router's decisions for one model: how many were judged, how many had any, and the sum
    in seconds by cause. The counts only grow."""

    judged: int = 0
    regretted: int = 0
    causes: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The sum over all causes."""
        return sum(self.causes.values())
