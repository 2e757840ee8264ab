"""The least number of replicas at which the SLO is met."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvasir_platform.capacity.pools import (
    MOST_REPLICAS,
    Mode,
    Pair,
    ServiceTarget,
    SizedEngine,
    aggregated,
    disaggregated,
    embedding,
)


def least(meets: Callable[[int], bool], limit: int, start: int = 1) -> int | None:
    """Return the least number from `start` to `limit` for which `meets` holds, which holds for more as well;
    None if it does not hold for `limit`."""
    if start > limit:
        return None
    step, low, high = 1, start - 1, start
    while not meets(high):
        if high >= limit:
            return None
        low, step = high, step * 2
        high = min(limit, high + step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def single_pool(mode: Mode, engine: SizedEngine, rate: float, target: ServiceTarget) -> int | None:
    """Return the replicas of one pool, None if no number that there is hardware for is enough."""
    see = embedding if mode is Mode.EMBEDDING else aggregated

    def meets(replicas: int) -> bool:
        return see(engine, replicas, rate, target).meets

    busy = rate * sum(engine.curve.alone_s) / len(engine.curve.alone_s)
    if not see(engine, MOST_REPLICAS * 10, rate, target).meets:
        return None
    return least(meets, engine.limit, max(1, int(busy)))


def pair_of_pools(pair: Pair, rate: float, target: ServiceTarget) -> tuple[int, int] | None:
    """Return the replicas for prefill and for decode. Decode gets as many as ITL and memory take, each with
    half of what may miss the SLO."""
    half = 1.0 - (1.0 - target.attainment) / 2
    decode = least(partial(_decodes, pair, rate, target.itl_s, half), pair.decode.limit)
    if decode is None:
        return None

    def meets(replicas: int) -> bool:
        return disaggregated(pair, (replicas, decode), rate, target).meets

    busy = rate * sum(pair.prefill.curve.alone_s) / len(pair.prefill.curve.alone_s)
    prefill = least(meets, pair.prefill.limit, max(1, int(busy)))
    return None if prefill is None else (prefill, decode)


def _decodes(pair: Pair, rate: float, itl_s: float, part: float, replicas: int) -> bool:
    state, room = pair.decoding(replicas, rate)
    return room and state.within(itl_s) >= part
