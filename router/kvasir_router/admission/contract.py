"""What admission decides by, and what it knows of a request that waits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class BrownoutStep:
    """One thing that is done under pressure; exactly one field is set. `shed` is the number of a priority
    class: requests of it, and of those less urgent, are refused; `shed_name` is what people call it."""

    cap_max_tokens: int | None = None
    fallback_model: str | None = None
    shed: int | None = None
    shed_name: str = ""

    def __str__(self) -> str:
        if self.cap_max_tokens is not None:
            return f"cap_max_tokens={self.cap_max_tokens}"
        if self.fallback_model is not None:
            return f"fallback_model={self.fallback_model}"
        return f"shed={self.shed_name or self.shed}"


@dataclass(frozen=True, slots=True)
class BrownoutRules:
    """See kvasir.config.spec.admission. Pressure is the wait of a typical request over the time to first
    token that it was promised."""

    steps: tuple[BrownoutStep, ...] = ()
    enter: float = 0.25
    leave: float = 0.05
    enter_s: float = 1.0
    leave_s: float = 10.0


def _nobody() -> Mapping[str, float]:
    return MappingProxyType({})


def _unlimited() -> Mapping[str, int]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """See kvasir.config.spec.admission; the defaults limit nothing. `weights` are by tenant, 1 for one that
    is not named; by pool, `seats` are the sequences that an engine of it runs at once, and `step_tokens` the
    tokens that it computes in a step. `disaggregation` as in the spec: always, auto or never."""

    max_queue: int = 1024
    max_queue_tokens: int = 1 << 40
    max_tenant_queue: int | None = None
    headroom: float = 0.0
    spare: float = 0.0
    ahead_s: float = math.inf
    ahead_shared_s: float = math.inf
    patience: float = 0.0
    itl_slack: float = 0.0
    long_tokens: int = 1 << 40
    long_share: float = 1.0
    ageing_s: float = 30.0
    class_span: int = 1000
    class_factor: float | None = None
    weights: Mapping[str, float] = field(default_factory=_nobody)
    seats: Mapping[str, int] = field(default_factory=_unlimited)
    step_tokens: Mapping[str, int] = field(default_factory=dict)
    disaggregation: str = "auto"
    brownout: BrownoutRules = BrownoutRules()

    def level(self, priority: int) -> int:
        """The number of a request's priority class."""
        return max(0, priority) // self.class_span

    def holder(self, level: int, tenant: str) -> tuple[int, str]:
        """In whose share a request counts: its tenant's, in its class, or in all where classes are not
        strict."""
        return (0 if self.class_factor else level), tenant

    def urgency(self, priority: int, now: float) -> float:
        """Ticket.urgency of a request that comes now."""
        return now + self.ageing_s * max(0, priority) / self.class_span


UNLIMITED = AdmissionRules()


@dataclass(slots=True, eq=False)
class AdmissionTicket:
    """A request as admission sees it.

    `cost` is what it takes of everybody's capacity, prompt and expected output in tokens. `kv_least` is the
    KV that it takes wherever it goes, in tokens: at first its output only, since the prompt may be cached.
    `fresh_tokens` is the part of a long prompt that is cached nowhere. `level` is its priority class and
    `urgency` the time at which it would have to arrive, without priority, to be as urgent.
    """

    request_id: str
    tenant: str
    weight: float
    level: int
    urgency: float
    cost: int
    prompt_tokens: int
    kv_least: int
    choices: int
    whole: bool
    itl_s: float
    ttft_s: float
    deadline_s: float | None
    long: bool = False
    fresh_tokens: int = 0
    waiting: bool = False
    holds: bool = False
