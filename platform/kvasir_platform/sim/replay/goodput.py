"""Goodput: the highest speed-up of a trace at which enough of its requests meet the SLO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvasir.ports.routing import RoutingPolicy
from kvasir_platform.sim.replay.replay import Setting, TraceReplay

_WIDEST = 4096.0


@dataclass(frozen=True, slots=True)
class Search:
    """`met` is the share of requests that must meet the SLO; the result is at most `precision` (relative)
    below the true limit. `start` is the first speed-up tried, and `step` the factor to the next."""

    met: float = 0.9
    precision: float = 0.02
    start: float = 1.0
    step: float = 1.25


def goodput(setting: Setting, make_policy: Callable[[], RoutingPolicy], search: Search) -> float:
    """Return the highest speed-up found at which the SLO was met, by bisection; `setting.speed_up` is not
    used. Raise ValueError if no speed-up is low or high enough."""
    most_misses = int((1.0 - search.met) * len(setting.trace.requests))

    def meets(speed_up: float) -> bool:
        replay = TraceReplay(replace(setting, speed_up=speed_up), make_policy())
        return replay.run(most_misses=most_misses).misses <= most_misses

    low = high = search.start
    step = search.step
    if meets(search.start):
        high = low * step
        while meets(high):
            step *= step
            low, high = high, high * step
            if high > search.start * _WIDEST:
                raise ValueError(f"the SLO is met at any speed-up up to {low:g}")
    else:
        low = high / step
        while not meets(low):
            step *= step
            low, high = low / step, low
            if low < search.start / _WIDEST:
                raise ValueError(f"the SLO is missed at any speed-up down to {high:g}")
    while high > low * (1.0 + search.precision):
        middle = (low * high) ** 0.5
        if meets(middle):
            low = middle
        else:
            high = middle
    return low
