"""The part of the deployment spec for admission: when requests start, wait or are refused, and brown-out."""

from __future__ import annotations

from collections.abc import Container
from typing import Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec.base import Name, Spec


class BrownoutStepSpec(Spec):
    """One brown-out action. Exactly one of the fields is set."""

    cap_max_tokens: int | None = Field(default=None, ge=1)
    """Output limit of requests that start."""
    fallback_model: str | None = Field(default=None, min_length=1)
    """Model of this deployment that answers new requests instead."""
    shed: Name | None = None
    """Refuse requests of this priority class (see tenancy.priorities) and of less urgent ones."""

    @model_validator(mode="after")
    def _one_thing(self) -> Self:
        fields = (self.cap_max_tokens, self.fallback_model, self.shed)
        if sum(value is not None for value in fields) != 1:
            raise ValueError("a step must set exactly one of cap_max_tokens, fallback_model and shed")
        return self


class BrownoutSpec(Spec):
    """Ordered steps of degraded service before requests are refused. Pressure is the expected wait of a
    typical request divided by the TTFT of its SLO class."""

    steps: tuple[BrownoutStepSpec, ...] = Field(default=(), max_length=16)
    """Steps in the order in which they are entered, one at a time; they are left in reverse order."""
    enter: float = Field(default=0.25, gt=0)
    """The next step is entered when pressure is at least this for `enter_s`."""
    leave: float = Field(default=0.05, ge=0)
    """The last step is left when pressure is at most this for `leave_s`."""
    enter_s: float = Field(default=1.0, ge=0)
    leave_s: float = Field(default=10.0, gt=0)
    """Doubles, up to sixteen times its value, when a step is entered again soon after it was left."""

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.leave >= self.enter:
            raise ValueError("leave must be less than enter, so that steps do not oscillate")
        return self


class AdmissionSpec(Spec):
    """When a request starts, waits for a worker, or is refused.

    Waiting requests are in one queue (see routing.max_queue and routing.queue_timeout_s), ordered by priority
    class. Within a class, tenants share capacity by their weights (see tenancy).
    """

    kv_headroom: float = Field(default=0.02, ge=0, lt=1)
    """Fraction of each worker's KV cache that is never reserved, because outputs can be longer than
    expected."""
    spare: float = Field(default=0.05, ge=0, lt=1)
    """Fraction of the KV cache and of batch slots that tenants above their share cannot use."""
    spare_share: float = Field(default=0.5, gt=0, le=1)
    """Fraction of the KV cache and of batch slots of a worker up to which lines of batches (see
    gateway.batches) start, with all that runs there. They never wait in the queue, and a line starts only
    while more than 1 - spare_share / 2 of the workers have no prompt to compute, so that others find such a
    worker."""
    prefill_ahead_s: float = Field(default=0.1, gt=0)
    """A worker receives another prompt when it has less than this left to compute. Larger values give larger
    batches; smaller values leave more of the order to the router."""
    shared_ahead_s: float = Field(default=0.01, gt=0)
    """The same for a tenant above its share while other tenants wait."""
    patience: float = Field(default=0.5, ge=0)
    """A request whose expected wait exceeds this multiple of the TTFT of its SLO class is refused at once. 0:
    it waits, up to routing.queue_timeout_s."""
    itl_slack: float = Field(default=2.0, ge=0)
    """Streams are added to a worker until its ITL reaches this multiple of the ITL of the request's SLO
    class. 0: up to engine.max_num_seqs."""
    tenant_queue: float = Field(default=0.5, gt=0, le=1)
    """Fraction of routing.max_queue that one tenant of several can use."""
    max_queue_tokens: int = Field(default=8_000_000, ge=1)
    """Maximum prompt tokens in the queue; 12 bytes of memory each."""
    long_prompt_tokens: int = Field(default=16_384, ge=1)
    """Minimum length of a long prompt."""
    long_share: float = Field(default=0.25, gt=0, le=1)
    """Fraction of the prefilling workers, and of the KV cache, that long prompts can use at a time. One long
    prompt is always allowed."""
    priorities: Literal["strict", "weighted"] = "strict"
    """`strict`: a less urgent class starts when no more urgent one waits, or by age. `weighted`: each class
    gets `class_factor` times the capacity of the next one."""
    class_factor: float = Field(default=4.0, gt=1)
    ageing_s: float = Field(default=10.0, gt=0)
    """A request that has waited this long is as urgent as a new request of the next more urgent class."""
    brownout: BrownoutSpec = BrownoutSpec()

    def unknown_name(self, models: Container[str], priorities: Container[str]) -> str | None:
        """Return an error text if a brown-out step names an unknown model or priority class, else None."""
        for step in self.brownout.steps:
            for field, name, known in (
                ("fallback_model", step.fallback_model, models),
                ("shed", step.shed, priorities),
            ):
                if name is not None and name not in known:
                    return f"admission: brownout: {field} names unknown {name!r}; correct it"
        return None
