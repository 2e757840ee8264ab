"""Formats decisions for `kvasir explain scaling`."""

from __future__ import annotations

from kvasir.core.demand import PoolForecast, PoolPlan
from kvasir_platform.planner.planner import Decision


def sentence(each: Decision) -> str:
    """Return why a pool should have its size."""
    if each.capacity is None:
        parts = [f"{each.have} replicas"]
    else:
        parts = [
            f"{each.load:.1f} busy, up to {each.upper:.1f} predicted within {each.horizon_s:.0f} s by "
            f"{each.predictor}"
        ]
    return "; ".join((*parts, *each.because))


def forecast_of(each: Decision) -> PoolForecast:
    """Return what routers show of a decision."""
    return PoolForecast(each.load, each.expected, each.upper, each.because)


def to_dict(each: Decision, plan: PoolPlan | None) -> dict[str, object]:
    capacity = each.capacity
    return {
        "pool": each.pool,
        "role": each.role.value,
        "serving": plan.serving if plan else each.have,
        "starting": plan.starting if plan else 0,
        "size": each.size,
        "applied": plan.applied if plan else False,
        "load": each.load,
        "expected": each.expected,
        "upper": each.upper,
        "predictor": each.predictor,
        "margin": each.margin,
        "need": each.need,
        "horizon_s": each.horizon_s,
        "because": list(each.because),
        "why": sentence(each),
        "capacity": None
        if capacity is None
        else {
            "prompt_tokens_s": capacity.prompt_tokens_s,
            "output_tokens_s": capacity.output_tokens_s,
            "streams": capacity.streams,
            "spare": capacity.spare,
            "full_by": capacity.by,
        },
    }
