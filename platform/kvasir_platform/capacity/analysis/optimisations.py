"""Which optimisation pays for this load, each with the arithmetic that says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvasir.performance.speculation import Speculation, best_lookahead, speculation_gain
from kvasir.performance.step import PromptChunk, StepWork
from kvasir_platform.capacity.engines import PrecisionChoice
from kvasir_platform.capacity.pools import Mode, SizedEngine
from kvasir_platform.capacity.precisions import computes_int8, eight_bits, int8_problem
from kvasir_platform.capacity.search import CapacityPlan, SearchResult, search

_ACCEPTANCE = 0.7
_FOUR_BITS = 4.5 / 8
_HOST_LINK = 0.8
"""Of PCIe's rate, which loads from host memory reach."""
_NAMES = {"fp8": "FP8", "int8": "int8"}
_WORTH = 0.02
"""A part of the cost below which nothing is gained."""


@dataclass(frozen=True, slots=True)
class Optimisation:
    """One optimisation: whether it pays here, the reason, and the field of kvasir.yaml."""

    name: str
    pays: bool
    reason: str
    field: str


def optimisations(result: SearchResult, *, acceptance: float = _ACCEPTANCE) -> tuple[Optimisation, ...]:
    """Return the list for the cheapest plan; empty if there is none. `acceptance` is the chance that a
    proposal of speculation is accepted."""
    plan = result.best
    if plan is None:
        return ()
    if plan.mode is Mode.EMBEDDING:
        return tuple(_for_all(result, plan))
    return (
        *_batching(plan),
        *_for_all(result, plan),
        _prefix_caching(plan),
        _speculation(plan, acceptance),
        _kv_precision(result, plan),
        _four_bits(plan),
        _tiers(plan),
        _disaggregation(result),
        _two_kinds(result),
    )


def _for_all(result: SearchResult, plan: CapacityPlan) -> Iterator[Optimisation]:
    yield _weights_precision(result, plan)
    saved = plan.day.saving
    yield Optimisation(
        "autoscaling",
        saved > _WORTH,
        f"{plan.day.scaled_hours:,.0f} replica-hours a day in place of {plan.day.fixed_hours:,.0f}: "
        f"{saved:.0%} less",
        "pools[].scaling",
    )


def _batching(plan: CapacityPlan) -> Iterator[Optimisation]:
    engine, streams = plan.pools[-1].engine, max(1.0, plan.peak.streams)
    alone, batch = engine.curve.decode(1.0), engine.curve.decode(streams)
    yield Optimisation(
        "continuous batching",
        streams > 1.0,
        f"{streams:.0f} streams a step take {batch * 1e3:.1f} ms and one {alone * 1e3:.1f} ms: "
        f"{streams * alone / batch:.1f} times the tokens",
        "engine.max_num_seqs",
    )
    first = plan.pools[0].engine
    chunk = first.option.shape.max_num_batched_tokens
    whole, part = _stall(first, round(first.traffic.computed)), _stall(first, chunk)
    stopped = plan.mode is Mode.AGGREGATED and first.traffic.computed > chunk
    yield Optimisation(
        "chunked prefill",
        stopped,
        f"a prompt stops streams for {min(whole, part) * 1e3:.0f} ms at a time"
        + (f" in place of {whole * 1e3:.0f} ms" if stopped else "; most prompts are one chunk")
        if plan.mode is Mode.AGGREGATED
        else "no streams beside prompts: they are on other workers",
        "engine.max_num_batched_tokens",
    )


def _stall(engine: SizedEngine, tokens: int) -> float:
    return engine.option.engine.step(StepWork((PromptChunk(max(1, tokens)),))).seconds


def _prefix_caching(plan: CapacityPlan) -> Optimisation:
    engine = plan.pools[0].engine
    traffic, model = engine.traffic, engine.option.engine
    cold, warm = (
        model.prefill_s(round(traffic.prompt)),
        model.prefill_s(round(traffic.prompt), round(traffic.cached)),
    )
    return Optimisation(
        "prefix caching",
        cold > warm * (1 + _WORTH),
        f"{traffic.cached / traffic.prompt:.0%} of a prompt is shared: {warm * 1e3:.0f} ms in place of "
        f"{cold * 1e3:.0f} ms",
        "engine.prefix_caching, routing",
    )


def _speculation(plan: CapacityPlan, acceptance: float) -> Optimisation:
    engine, context = plan.pools[-1].engine.option.engine, plan.pools[-1].engine.traffic.context
    streams = max(1, round(plan.peak.streams))
    asked = Speculation(acceptance, 4)
    best = best_lookahead(engine, asked, streams, context)
    gain = speculation_gain(engine, replace(asked, lookahead=best or 4), streams, context)
    alone = speculation_gain(engine, asked, 1, context)
    return Optimisation(
        "speculation (look-up)",
        best > 0,
        f"if {acceptance:.0%} of proposals are accepted, {best or 4} of them give {gain.tokens:.2f} tokens a "
        f"round: {gain.speed_up:.2f} times the pace with {streams} streams, {alone.speed_up:.2f} with one",
        "engine.speculative",
    )


def _compared(
    result: SearchResult, plan: CapacityPlan, precision: PrecisionChoice
) -> tuple[float, str] | None:
    """Return the part of the cost that another precision saves, with the figures; None if nothing fits."""
    request = replace(result.request, precisions=(precision,), modes=(plan.mode,))
    names = set(plan.hardware)
    kinds = tuple(each for each in request.hardware if each.name in names)
    other = search(replace(request, hardware=kinds)).best
    if other is None:
        return None
    return 1 - _cost(other) / _cost(plan), f"{_cost_text(other)} in place of {_cost_text(plan)}"


def _cost(plan: CapacityPlan) -> float:
    """Dollars for an hour, or devices where there is no price."""
    return plan.mean_dollars_per_hour if plan.priced else float(sum(pool.devices for pool in plan.pools))


def _cost_text(plan: CapacityPlan) -> str:
    return f"${_cost(plan):,.2f}/h" if plan.priced else f"{_cost(plan):.0f} devices"


def _weights_precision(result: SearchResult, plan: CapacityPlan) -> Optimisation:
    option = plan.pools[0].engine.option
    kinds = {pool.engine.option.hardware.name: pool.engine.option.hardware for pool in plan.pools}
    ways = [eight_bits(option.model, each) for each in kinds.values()]
    way = "int8" if "int8" in ways else "fp8"
    name, field = f"{_NAMES[way]} weights", f"model.quantization: {way}"
    if option.model.config.quantization is not None:
        return Optimisation(name, False, "the checkpoint is quantized already", field)
    if option.shape.quantization != "none":
        return Optimisation(name, True, "the plan has them", field)
    if None in ways:
        lacking = next(each for each, found in zip(kinds.values(), ways, strict=True) if found is None)
        reason = int8_problem(option.model) or "vLLM has no int8 kernels for it"
        return Optimisation(name, False, f"{lacking.name} computes no FP8; no int8 either: {reason}", field)
    if way == "int8" and not all(computes_int8(each) for each in kinds.values()):
        return Optimisation(name, False, f"{' and '.join(kinds)} have no format of 8 bits in common", field)
    precision = PrecisionChoice(way, option.shape.kv_dtype)
    return _precision(name, field, _compared(result, plan, precision))


def _kv_precision(result: SearchResult, plan: CapacityPlan) -> Optimisation:
    name, field = "FP8 KV", "engine.kv_dtype: fp8"
    option = plan.pools[-1].engine.option
    if option.shape.kv_dtype != "auto":
        return Optimisation(name, True, "the plan has it", field)
    if not all(pool.engine.option.hardware.device.fp8 for pool in plan.pools):
        return Optimisation(name, False, f"{option.hardware.name} computes no FP8", field)
    precision = PrecisionChoice(option.shape.quantization, "fp8")
    return _precision(name, field, _compared(result, plan, precision))


def _precision(name: str, field: str, compared: tuple[float, str] | None) -> Optimisation:
    if compared is None:
        return Optimisation(name, False, "no plan with it meets the SLO", field)
    saved, figures = compared
    warning = "; check the answers with `kvasir verify --quality-baseline`" if saved > _WORTH else ""
    return Optimisation(name, saved > _WORTH, figures + warning, field)


def _four_bits(plan: CapacityPlan) -> Optimisation:
    pool = plan.pools[-1].engine
    engine, streams = pool.option.engine, max(1, round(plan.peak.streams))
    name, field = "4-bit weights", "a checkpoint in AWQ, GPTQ or MXFP4"
    if engine.weight_bytes <= 1.0 or (engine.expert_bytes and engine.expert_bytes <= 1.0):
        return Optimisation(name, False, "the checkpoint has 8 bits or fewer already", field)
    packed = replace(engine, weight_bytes=_FOUR_BITS, expert_bytes=_FOUR_BITS)
    before = engine.decode(streams, pool.traffic.context).seconds
    after = packed.decode(streams, pool.traffic.context).seconds
    return Optimisation(
        name,
        after < before * (1 - _WORTH),
        f"a step with {streams} streams takes {after * 1e3:.1f} ms in place of {before * 1e3:.1f} ms; "
        "prompts are computed in 16 bits as before",
        field,
    )


def _tiers(plan: CapacityPlan) -> Optimisation:
    engine = plan.pools[0].engine
    option, traffic = engine.option, engine.traffic
    tokens = max(1, round(traffic.cached or traffic.prompt))
    link = option.hardware.offer.pcie_bytes_per_s * option.devices * _HOST_LINK
    load, compute = option.engine.transfer_s(tokens, link), option.engine.prefill_s(tokens)
    shared = traffic.cached >= 1.0
    return Optimisation(
        "KV in host memory",
        shared and load < compute,
        f"{tokens:,} tokens load in {load * 1e3:.1f} ms and are computed in {compute * 1e3:.0f} ms"
        + ("" if shared else ", but prompts share nothing"),
        "tiers.cpu",
    )


def _disaggregation(result: SearchResult) -> Optimisation:
    name, field = "prefill and decode apart", "disaggregation"
    apart, together = (
        next((plan for plan in result.plans if plan.mode is mode), None)
        for mode in (Mode.DISAGGREGATED, Mode.AGGREGATED)
    )
    if apart is None or together is None:
        missing = "apart" if apart is None else "together"
        return Optimisation(
            name, together is None and apart is not None, f"no plan with both {missing}", field
        )
    ratio = f"{apart.pools[0].replicas}:{apart.pools[1].replicas}"
    saved = 1 - _cost(apart) / _cost(together)
    return Optimisation(
        name,
        saved > _WORTH,
        f"{_cost_text(apart)} with P:D {ratio} against {_cost_text(together)}; "
        f"the KV of a prompt moves in {_moved(apart) * 1e3:.0f} ms",
        field,
    )


def _moved(plan: CapacityPlan) -> float:
    return sum(plan.pair.transfer_s) / len(plan.pair.transfer_s) if plan.pair is not None else 0.0


def _two_kinds(result: SearchResult) -> Optimisation:
    name, field = "different hardware for both", "pools[].gpu"
    apart = [plan for plan in result.plans if plan.mode is Mode.DISAGGREGATED]
    mixed = next((plan for plan in apart if len(set(plan.hardware)) > 1), None)
    equal = next((plan for plan in result.plans if len(set(plan.hardware)) == 1), None)
    if mixed is None or equal is None:
        return Optimisation(name, False, "no such plan is among the cheapest", field)
    saved = 1 - _cost(mixed) / _cost(equal)
    return Optimisation(
        name,
        saved > _WORTH,
        f"prefill on {mixed.hardware[0]} and decode on {mixed.hardware[1]}: "
        f"{_cost_text(mixed)} against {_cost_text(equal)}",
        field,
    )
