"""The deployment spec's part about admission: what is begun, what waits, what is refused, and what is done
under pressure."""

from __future__ import annotations

from collections.abc import Container
from typing import Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec.base import Name, Spec


class BrownoutStepSpec(Spec):
    """One thing that is done under pressure: exactly one of the fields is set."""

    cap_max_tokens: int | None = Field(default=None, ge=1)
    """Requests that begin are cut off after so many tokens."""
    fallback_model: str | None = Field(default=None, min_length=1)
    """Another model of this deployment answers requests that come for this one."""
    shed: Name | None = None
    """Requests of this priority class (see tenancy.priorities), and of those less urgent, are refused."""

    @model_validator(mode="after")
    def _one_thing(self) -> Self:
        fields = (self.cap_max_tokens, self.fallback_model, self.shed)
        if sum(value is not None for value in fields) != 1:
            raise ValueError("a step is one of cap_max_tokens, fallback_model and shed")
        return self


class BrownoutSpec(Spec):
    """Doing less for everybody before anybody is refused. Pressure is the time for which a typical request
    waits, over the time to first token that its SLO class promises."""

    steps: tuple[BrownoutStepSpec, ...] = Field(default=(), max_length=16)
    """In the order in which they are entered, one at a time, and left again in reverse."""
    enter: float = Field(default=0.25, gt=0)
    """The next step is entered when pressure has been at least this for `enter_s`."""
    leave: float = Field(default=0.05, ge=0)
    """The last step is left when pressure has been at most this for `leave_s`."""
    enter_s: float = Field(default=1.0, ge=0)
    leave_s: float = Field(default=10.0, gt=0)
    """Doubles, up to sixteen times, when a step has to be entered again soon after it was left."""

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.leave >= self.enter:
            raise ValueError("leave must be less than enter, or a step would be entered and left in turns")
        return self


class AdmissionSpec(Spec):
    """When a request begins, waits for a worker, or is refused.

    What waits lies in one queue (see routing.max_queue and routing.queue_timeout_s), ordered by priority
    class, and within a class shared among tenants by their weights (see tenancy).
    """

    kv_headroom: float = Field(default=0.02, ge=0, lt=1)
    """Part of each worker's KV cache that is never reserved: outputs may be longer than is expected."""
    spare: float = Field(default=0.05, ge=0, lt=1)
    """Part of the KV cache and of the places in a batch that tenants above their share leave to others."""
    prefill_ahead_s: float = Field(default=0.1, gt=0)
    """A worker is sent another prompt when it has less than this left to compute. The larger, the larger an
    engine's batches; the smaller, the more of the order is the router's to choose."""
    shared_ahead_s: float = Field(default=0.01, gt=0)
    """The same for a tenant above its share, while others want something too."""
    patience: float = Field(default=0.5, ge=0)
    """A request that would not begin within so many times the time to first token that its SLO class promises
    is refused at once. 0: it waits, up to routing.queue_timeout_s."""
    itl_slack: float = Field(default=2.0, ge=0)
    """Streams are added to a worker until its time between tokens is so many times what the request's SLO
    class promises. 0: up to engine.max_num_seqs."""
    tenant_queue: float = Field(default=0.5, gt=0, le=1)
    """Part of routing.max_queue that one tenant of several may take."""
    max_queue_tokens: int = Field(default=8_000_000, ge=1)
    """Prompt tokens that may wait, in all; 12 bytes of memory each."""
    long_prompt_tokens: int = Field(default=16_384, ge=1)
    """Prompts from this length on are long."""
    long_share: float = Field(default=0.25, gt=0, le=1)
    """Part of the workers that compute prompts, and of the KV cache, that long prompts may take at a time;
    but one always may."""
    priorities: Literal["strict", "weighted"] = "strict"
    """`strict`: a less urgent class begins when no more urgent one waits, or by age. `weighted`: each class
    gets `class_factor` times what the next one gets."""
    class_factor: float = Field(default=4.0, gt=1)
    ageing_s: float = Field(default=10.0, gt=0)
    """A request that has waited this long is as urgent as one of the next class that has just come."""
    brownout: BrownoutSpec = BrownoutSpec()

    def unknown_name(self, models: Container[str], priorities: Container[str]) -> str | None:
        """What is wrong where a step of the brown-out names a model or a priority class that does not
        exist."""
        for step in self.brownout.steps:
            for field, name, known in (
                ("fallback_model", step.fallback_model, models),
                ("shed", step.shed, priorities),
            ):
                if name is not None and name not in known:
                    return f"admission: brownout: {field} names {name!r}, which is not there; correct it"
        return None
