"""Searches the plans at which the SLO is met, cheapest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvasir.core.requests import Role
from kvasir.performance.speculation import Speculation
from kvasir_platform.capacity.costs import CostDay, TokenPrices, day_of, token_prices
from kvasir_platform.capacity.engines import (
    CHUNKS,
    EngineOption,
    HardwareChoice,
    PrecisionChoice,
    engine_option,
    engine_options,
)
from kvasir_platform.capacity.models import PlannedModel
from kvasir_platform.capacity.pools import (
    Experience,
    Mode,
    Pair,
    ServiceTarget,
    SizedEngine,
    aggregated,
    disaggregated,
    embedding,
)
from kvasir_platform.capacity.precisions import precisions_on
from kvasir_platform.capacity.sizes import pair_of_pools, single_pool
from kvasir_platform.capacity.traffic import TrafficProfile

_SHORTLIST = 12
_PER_HARDWARE = 3


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked for. `modes` and `precisions` are those that plans may have."""

    model: PlannedModel
    hardware: tuple[HardwareChoice, ...]
    traffic: TrafficProfile
    target: ServiceTarget
    max_model_len: int
    modes: tuple[Mode, ...] = (Mode.AGGREGATED, Mode.DISAGGREGATED)
    precisions: tuple[PrecisionChoice, ...] = (PrecisionChoice(),)
    speculation: Speculation | None = None
    link_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """One pool: `replicas` at the peak, and `usual` at the mean rate."""

    role: Role
    engine: SizedEngine
    replicas: int
    usual: int

    @property
    def devices(self) -> int:
        """Devices at the peak."""
        return self.replicas * self.engine.option.devices

    @property
    def dollars_per_hour(self) -> float:
        """Price at the peak."""
        return self.replicas * self.engine.option.dollars_per_hour


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """A way to serve the load: pools, what requests see at the peak and at the mean rate, and the cost."""

    mode: Mode
    pools: tuple[PlannedPool, ...]
    pair: Pair | None
    peak: Experience
    usual: Experience
    day: CostDay
    prices: TokenPrices

    @property
    def dollars_per_hour(self) -> float:
        """Of the replicas for the peak."""
        return sum(pool.dollars_per_hour for pool in self.pools)

    @property
    def mean_dollars_per_hour(self) -> float:
        """Over a day with autoscaling."""
        return self.day.scaled_dollars / len(self.day.sizes)

    @property
    def priced(self) -> bool:
        """Whether all of its hardware has a price."""
        return all(pool.engine.option.hardware.device.dollars_per_hour is not None for pool in self.pools)

    @property
    def hardware(self) -> tuple[str, ...]:
        """The names of its hardware, in the order of its pools."""
        return tuple(pool.engine.option.hardware.name for pool in self.pools)

    @property
    def title(self) -> str:
        """One line: mode, replicas and engines."""
        return " + ".join(
            f"{pool.replicas} {pool.role.value} ({pool.engine.option.title})" for pool in self.pools
        )


@dataclass(frozen=True, slots=True)
class _Sized:
    """A candidate with its sizes at the peak."""

    mode: Mode
    engines: tuple[SizedEngine, ...]
    pair: Pair | None
    replicas: tuple[int, ...]

    @property
    def cost(self) -> tuple[float, int]:
        """Dollars for an hour, then devices, for hardware without prices."""
        options = [engine.option for engine in self.engines]
        counted = list(zip(options, self.replicas, strict=True))
        dollars = sum(option.dollars_per_hour * count for option, count in counted)
        return dollars, sum(option.devices * count for option, count in counted)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`plans` by cost. `options` has every engine that fits, whether or not it meets the SLO."""

    request: PlanRequest
    plans: tuple[CapacityPlan, ...]
    options: tuple[EngineOption, ...]

    @property
    def best(self) -> CapacityPlan | None:
        """The cheapest."""
        return self.plans[0] if self.plans else None

    def cheapest(self, count: int = 3) -> tuple[CapacityPlan, ...]:
        """Return the cheapest plans that differ in hardware or mode, and then in anything."""
        chosen: list[CapacityPlan] = []
        for plan in self.plans:
            if len(chosen) < count and all(
                (plan.mode, plan.hardware) != (other.mode, other.hardware) for other in chosen
            ):
                chosen.append(plan)
        rest = (plan for plan in self.plans if plan not in chosen)
        return tuple(chosen + [plan for plan, _ in zip(rest, range(count - len(chosen)), strict=False)])


def search(request: PlanRequest) -> SearchResult:
    """Return all plans worth a look."""
    options = tuple(_options(request))
    found = sorted(_candidates(request, options), key=lambda each: each.cost)
    plans = sorted(
        (planned(request, each) for each in _shortlist(found)),
        key=lambda plan: (not plan.priced, plan.day.scaled_dollars, sum(pool.devices for pool in plan.pools)),
    )
    # Plans that differ in the size of their chunks alone look alike.
    first = {plan.title: plan for plan in reversed(plans)}
    return SearchResult(request, tuple(plan for plan in plans if first[plan.title] is plan), options)


def _shortlist(found: Sequence[_Sized]) -> list[_Sized]:
    """The cheapest, and the cheapest of each kind."""
    kept = list(found[:_SHORTLIST])
    kinds = {_kind(each) for each in kept}
    for each in found[_SHORTLIST:]:
        if _kind(each) not in kinds:
            kinds.add(_kind(each))
            kept.append(each)
    return kept


def _kind(sized: _Sized) -> tuple[object, ...]:
    names = {engine.option.hardware.name for engine in sized.engines}
    return sized.mode, tuple(sorted(names)) if len(names) == 1 else ()


def _options(request: PlanRequest) -> Iterator[EngineOption]:
    for hardware in request.hardware:
        for precision in precisions_on(request.model, hardware, request.precisions):
            for chunk in CHUNKS:
                yield from engine_options(
                    request.model,
                    hardware,
                    max_model_len=request.max_model_len,
                    precision=precision,
                    chunk=chunk,
                )


def _candidates(request: PlanRequest, options: Sequence[EngineOption]) -> Iterator[_Sized]:
    traffic, target = request.traffic, request.target
    engines = [SizedEngine(option, traffic, request.speculation) for option in options]
    for mode in request.modes:
        if mode is Mode.DISAGGREGATED:
            yield from _pairs(request, engines)
            continue
        for engine in engines:
            replicas = single_pool(mode, engine, traffic.peak, target)
            if replicas is not None:
                yield _Sized(mode, (engine,), None, (replicas,))


def _pairs(request: PlanRequest, engines: Sequence[SizedEngine]) -> Iterator[_Sized]:
    """Pairs of the engines that compute most prompts, and of those that decode most tokens, for a dollar."""
    usable = [
        moving
        for each in engines
        if each.option.shape.pipeline == 1
        and each.option.shape.data == 1
        and (moving := _moving(each)).option.fits
    ]
    prefills = _best_of(usable, request, prefill=True)
    decodes = _best_of(usable, request, prefill=False)
    for prefill in prefills:
        for decode in decodes:
            if not _exchange(prefill.option, decode.option):
                continue
            # Prompts are computed without proposals.
            pair = Pair(replace(prefill, speculation=None), decode, request.link_bytes_per_s)
            sizes = pair_of_pools(pair, request.traffic.peak, request.target)
            if sizes is not None and _enough(pair, sizes):
                yield _Sized(Mode.DISAGGREGATED, (pair.prefill, pair.decode), pair, sizes)


def _moving(engine: SizedEngine) -> SizedEngine:
    """Return the engine as its KV can be moved: then layers with a window keep every token."""
    option = engine.option
    if not any(each.window for each in option.engine.work.attention):
        return engine
    shape = replace(option.shape, keeps_windows=False)
    moving = engine_option(option.model, option.hardware, shape, cores=option.devices)
    return replace(engine, option=moving)


def _exchange(prefill: EngineOption, decode: EngineOption) -> bool:
    """Whether engines can be in one deployment, which has one quantization, and can read each other's KV:
    equal numbers, and layouts that divide each other."""
    if prefill.shape.quantization != decode.shape.quantization:
        return False
    fewer, more = sorted((prefill.shape.tensor, decode.shape.tensor))
    cpu = (prefill.hardware.offered is None) == (decode.hardware.offered is None)
    return cpu and prefill.shape.kv_dtype == decode.shape.kv_dtype and more % fewer == 0


def _enough(pair: Pair, sizes: tuple[int, int]) -> bool:
    """Whether there is hardware for both, which may be of one kind."""
    first, second = pair.prefill.option, pair.decode.option
    if first.hardware.name != second.hardware.name or first.hardware.count is None:
        return True
    return sizes[0] * first.devices + sizes[1] * second.devices <= first.hardware.count


def _best_of(engines: Sequence[SizedEngine], request: PlanRequest, *, prefill: bool) -> list[SizedEngine]:
    chosen = []
    for name in {each.option.hardware.name for each in engines}:
        of_kind = [each for each in engines if each.option.hardware.name == name]
        of_kind.sort(key=lambda each: _prompt_cost(each) if prefill else _token_cost(each, request.target))
        chosen += of_kind[:_PER_HARDWARE]
    return sorted(chosen, key=lambda each: each.option.title)


def _price(option: EngineOption) -> float:
    return option.dollars_per_hour or float(option.devices)


def _prompt_cost(engine: SizedEngine) -> float:
    return sum(engine.curve.alone_s) * _price(engine.option)


def _token_cost(engine: SizedEngine, target: ServiceTarget) -> float:
    """Return the price of a token at the largest batch that memory and ITL allow."""
    streams = min(engine.seats, float(engine.option.shape.max_num_seqs))
    while streams > 1.0 and engine.curve.decode(streams) / engine.tokens_per_step > target.itl_s:
        streams /= 2
    if streams < 1.0:
        return math.inf
    return engine.curve.decode(streams) / streams * _price(engine.option)


def planned(request: PlanRequest, sized: _Sized) -> CapacityPlan:
    """Return the plan of a candidate, with its day and cost."""
    traffic, target = request.traffic, request.target
    known: dict[float, tuple[int, ...]] = {}

    def at(rate: float) -> tuple[int, ...]:
        if rate not in known:
            known[rate] = _sizes_at(sized, rate, target) or sized.replicas
        return known[rate]

    usual = at(traffic.rate)
    hours = [tuple(map(min, at(round(rate, 6)), sized.replicas)) for rate in traffic.hourly()]
    prices = [engine.option.dollars_per_hour for engine in sized.engines]
    day = day_of(hours, prices)
    roles = _ROLES[sized.mode]
    pools = tuple(
        PlannedPool(role, engine, count, fewer)
        for role, engine, count, fewer in zip(roles, sized.engines, sized.replicas, usual, strict=True)
    )
    seen = experience(pools, sized.pair, usual, traffic.rate, target)
    dollars_per_s = day.scaled_dollars / len(hours) / 3600
    costs = token_prices(dollars_per_s, traffic.rate, sized.engines[0], sized.engines[-1], seen.streams)
    peak = experience(pools, sized.pair, sized.replicas, traffic.peak, target)
    return CapacityPlan(sized.mode, pools, sized.pair, peak, seen, day, costs)


_ROLES = {
    Mode.AGGREGATED: (Role.BOTH,),
    Mode.DISAGGREGATED: (Role.PREFILL, Role.DECODE),
    Mode.EMBEDDING: (Role.EMBED,),
}


def _sizes_at(sized: _Sized, rate: float, target: ServiceTarget) -> tuple[int, ...] | None:
    if sized.pair is not None:
        return pair_of_pools(sized.pair, rate, target)
    found = single_pool(sized.mode, sized.engines[0], rate, target)
    return None if found is None else (found,)


def experience(
    pools: Sequence[PlannedPool],
    pair: Pair | None,
    replicas: tuple[int, ...],
    rate: float,
    target: ServiceTarget,
) -> Experience:
    """Return what requests see of these pools, with so many replicas each, at `rate`."""
    if pair is not None:
        return disaggregated(pair, (replicas[0], replicas[1]), rate, target)
    see = embedding if pools[0].role is Role.EMBED else aggregated
    return see(pools[0].engine, replicas[0], rate, target)
