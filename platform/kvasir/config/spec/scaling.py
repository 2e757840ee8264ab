"""The part of the deployment spec for scaling: bounds of pools, and settings of the planner."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec.base import Spec


class PoolScalingSpec(Spec):
    """Bounds within which the planner sizes a pool. `replicas` is the initial size."""

    min: int = Field(default=1, ge=0, le=1000)
    """Minimum replicas. 0: the model scales to zero when it is not used, which requires 0 for all of its
    pools. The first request then waits for a start, or is answered with 503 and the time that a start
    takes."""
    max: int = Field(ge=1, le=1000)
    """Maximum replicas."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}; lower it")
        return self


class ScalingSpec(Spec):
    """How the planner sizes pools that have `scaling`."""

    mode: Literal["auto", "advise", "manual"] = "auto"
    """`auto` applies the plan. `advise` only reports it in `kvasir explain scaling` and metrics. `manual`:
    sizes are set with `kvasir scale`."""
    attainment: float = Field(default=0.99, gt=0.5, lt=1)
    """Target fraction of requests that meet their SLO class. Higher values need more replicas."""
    interval_s: float = Field(default=10.0, ge=1, le=300)
    """Interval between decisions. A request for a model without a worker triggers a decision at once."""
    window_s: float | None = Field(default=None, ge=0, le=3600)
    """Replicas are removed only after fewer were desired for half of this time. Default: the time of two
    starts. If removed replicas are repeatedly desired again, the whole of three times this value is
    required."""
    idle_s: float = Field(default=300.0, ge=1)
    """Time after the last request of a model until its pools with `min` 0 scale to zero."""
    stale_s: float = Field(default=15.0, ge=2)
    """No size is changed while a router has not reported for this long."""
    start_s: float = Field(default=120.0, gt=0)
    """Assumed duration of a start until one is measured."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """A replica that does not serve after this time is not counted, and no more replicas are requested while
    there is one. `kvasir up` gives up a start after this time, and `kvasir restart` after as much for each
    replica."""
    flips: bool = True
    """Allow workers of a prefill and a decode pool with equal engine settings to change roles, instead of
    starting a replica in one pool and stopping one in the other."""
