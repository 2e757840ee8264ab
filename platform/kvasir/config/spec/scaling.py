"""The deployment spec's part about sizes: what the planner may do, and how careful it is."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec.base import Spec


class PoolScalingSpec(Spec):
    """Between which sizes the planner keeps a pool. `replicas` is what it begins with."""

    min: int = Field(default=1, ge=0, le=1000)
    """Replicas at the least. 0: none while nobody asks for the model, which all of its pools must agree on;
    the first request then waits for a start, or is answered 503 with the time that one takes."""
    max: int = Field(ge=1, le=1000)
    """Replicas at most."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}; make it at most that")
        return self


class ScalingSpec(Spec):
    """How pools with `scaling` are sized."""

    mode: Literal["auto", "advise", "manual"] = "auto"
    """`auto` does what is planned; `advise` plans and says what it would do, for `kvasir explain scaling` and
    metrics; `manual` leaves sizes to `kvasir scale`."""
    attainment: float = Field(default=0.99, gt=0.5, lt=1)
    """The part of the requests that is to get its service level. Replicas are what it costs."""
    interval_s: float = Field(default=10.0, ge=1, le=300)
    """Between two decisions. A model that is asked for and has no worker is seen to at once."""
    window_s: float | None = Field(default=None, ge=0, le=3600)
    """For half of this time fewer replicas must have been wanted before any goes; by default it is as long as
    two starts. Where replicas that went are wanted back again and again, all of three times that counts."""
    idle_s: float = Field(default=300.0, ge=1)
    """So long after a model's last request its pools with `min` 0 have no replica left."""
    stale_s: float = Field(default=15.0, ge=2)
    """When a router has said nothing for so long, no size is changed."""
    start_s: float = Field(default=120.0, gt=0)
    """What a start is taken to last until one has been measured."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """A replica that does not serve after so long is not counted on, and no more are asked for while there
    is one."""
    flips: bool = True
    """Let workers of a prefill and of a decode pool do each other's work where their engines are alike,
    instead of starting one here and ending one there."""
