"""The rules of admission, and the ticket that stands for a request in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class BrownoutStep:
    """One step of the brown-out; exactly one field is set. `shed` is the number of a priority class: requests
    of it, and of less urgent classes, are refused. `shed_name` is the name of that class."""

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
    """See kvasir.config.spec.admission. Pressure is the wait of a typical request divided by its promised
    time to first token."""

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
    """See kvasir.config.spec.admission; the defaults limit nothing. `weights` are by tenant, with a default
    of 1. By pool, `seats` is the number of sequences that an engine runs at once, and `step_tokens` the
    number of tokens that it computes in a step. `disaggregation` is always, auto or never, as in the spec.
    Requests of the class `spare_level` and of less urgent ones run only in capacity that others leave: up to
    `spare_share` of a place's KV and sequences, all that runs there included."""

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
    spare_level: int | None = None
    spare_share: float = 0.5

    def level(self, priority: int) -> int:
        """Return the number of a request's priority class."""
        return max(0, priority) // self.class_span

    def holder(self, level: int, tenant: str) -> tuple[int, str]:
        """Return the share in which a request counts: its tenant's in its class, or in all classes if they
        are weighted."""
        return (0 if self.class_factor else level), tenant

    def urgency(self, priority: int, now: float) -> float:
        """Return `AdmissionTicket.urgency` of a request that arrives now."""
        return now + self.ageing_s * max(0, priority) / self.class_span


UNLIMITED = AdmissionRules()


@dataclass(slots=True, eq=False, init=False)
class AdmissionTicket:
    """A request as admission sees it.

    `cost` is prompt and expected output, in tokens. `kv_least` is the KV that the request takes on any
    worker, in tokens: at first only its output, since the prompt may be cached. `fresh_tokens` is the part of
    a long prompt that no worker has cached. `level` is the priority class. `urgency` is the arrival time that
    a request without priority would need to be as urgent.
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
    long: bool
    fresh_tokens: int
    waiting: bool
    holds: bool
    spare: bool

    def __init__(
        self,
        *,
        request_id: str,
        tenant: str,
        weight: float,
        level: int,
        urgency: float,
        cost: int,
        prompt_tokens: int,
        kv_least: int,
        choices: int,
        whole: bool,
        itl_s: float,
        ttft_s: float,
        deadline_s: float | None,
        long: bool = False,
        spare: bool = False,
    ) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.weight = weight
        self.level = level
        self.urgency = urgency
        self.cost = cost
        self.prompt_tokens = prompt_tokens
        self.kv_least = kv_least
        self.choices = choices
        self.whole = whole
        self.itl_s = itl_s
        self.ttft_s = ttft_s
        self.deadline_s = deadline_s
        self.long = long
        self.fresh_tokens = 0
        self.waiting = self.holds = False
        self.spare = spare
