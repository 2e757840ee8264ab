"""What a plan costs: dollars for an hour and a day, and for a million tokens of each kind.

The cost of an hour is divided among tokens by the time that they take on the hardware they run on. A computed
prompt token takes its share of a prefill, an output token its share of a decode step, and a cached prompt
token what it adds to the prefill of the tokens behind it. So the three prices are not those of one kind of
request alone, and together they give the whole cost, idle time included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvasir_platform.capacity.pools import SizedEngine

_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Dollars for a million tokens; None for a kind that the load does not have."""

    input: float
    cached_input: float | None
    output: float | None


@dataclass(frozen=True, slots=True)
class CostDay:
    """A day with this load: replica-hours and dollars with autoscaling, and with the size of the peak."""

    scaled_hours: float
    fixed_hours: float
    scaled_dollars: float
    fixed_dollars: float
    sizes: tuple[tuple[int, ...], ...]

    @property
    def saving(self) -> float:
        """The part of the cost that autoscaling saves, of replica-hours where there is no price."""
        if self.fixed_dollars:
            return 1.0 - self.scaled_dollars / self.fixed_dollars
        return 1.0 - self.scaled_hours / self.fixed_hours if self.fixed_hours else 0.0


def day_of(sizes: Sequence[tuple[int, ...]], prices: Sequence[float]) -> CostDay:
    """Return the day in which pools with these `prices` per replica have these sizes, hour by hour. A replica
    takes time to start, so that an hour has the sizes of the next one if they are larger."""
    ahead = [tuple(map(max, now, soon)) for now, soon in zip(sizes, [*sizes[1:], sizes[0]], strict=True)]
    most = tuple(max(hour[pool] for hour in ahead) for pool in range(len(prices)))
    dollars = [sum(count * price for count, price in zip(hour, prices, strict=True)) for hour in ahead]
    fixed = sum(count * price for count, price in zip(most, prices, strict=True))
    return CostDay(
        scaled_hours=float(sum(map(sum, ahead))),
        fixed_hours=float(sum(most) * len(ahead)),
        scaled_dollars=sum(dollars),
        fixed_dollars=fixed * len(ahead),
        sizes=tuple(ahead),
    )


def token_prices(
    dollars_per_s: float, rate: float, prefill: SizedEngine, decode: SizedEngine, streams: float
) -> TokenPrices:
    """Return the prices at `rate` requests per second for `dollars_per_s` in total. `streams` run at once on
    a replica of `decode`, which is `prefill` itself if replicas do both parts."""
    traffic = prefill.traffic
    computed_s = fmean(prefill.curve.alone_s) / traffic.computed
    cached = traffic.cached
    cached_s = _cached_s(prefill) / cached if cached >= 1.0 else 0.0
    computed_s -= cached_s * cached / traffic.computed
    output_s = decode.curve.decode(streams + 1.0) / max(1.0, streams) / decode.tokens_per_step
    weights = {
        "input": traffic.computed * max(0.0, computed_s) * _price(prefill),
        "cached": cached * max(0.0, cached_s) * _price(prefill),
        "output": traffic.output * output_s * _price(decode),
    }
    whole, a_request = sum(weights.values()), dollars_per_s / rate if rate else 0.0

    def each(kind: str, tokens: float) -> float | None:
        return a_request * weights[kind] / whole / tokens * _MILLION if tokens >= 1e-9 and whole else None

    return TokenPrices(
        input=each("input", traffic.computed) or 0.0,
        cached_input=each("cached", cached),
        output=each("output", traffic.output),
    )


def _price(engine: SizedEngine) -> float:
    # Without prices, devices count alike.
    return engine.option.dollars_per_hour or float(engine.option.devices)


def _cached_s(engine: SizedEngine) -> float:
    """Return the seconds that the cached part of a mean prompt adds to the prefill of the rest."""
    traffic, model = engine.traffic, engine.option.engine
    beside = model.prefill_s(round(traffic.prompt), round(traffic.cached))
    return beside - model.prefill_s(max(1, round(traffic.computed)))
