"""The arithmetic of a plan, step by step, as a person would write it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvasir.core.requests import Role
from kvasir.performance.coefficients import NOMINAL
from kvasir.performance.step import EngineModel
from kvasir.sizing.dimensions import dimensions
from kvasir_platform.capacity.models import PlannedModel
from kvasir_platform.capacity.pools import Mode
from kvasir_platform.capacity.search import CapacityPlan, PlannedPool, PlanRequest

_GIB = 1 << 30


def arithmetic(plan: CapacityPlan, request: PlanRequest) -> tuple[str, ...]:
    """Return the lines; those that begin a part end with a colon."""
    return tuple(
        line
        for part in (
            _load(request),
            *(_engine(pool) for pool in plan.pools),
            _prompts(plan, request),
            _streams(plan, request),
            _sizes(plan, request),
            _money(plan, request),
        )
        for line in part
    )


def _load(request: PlanRequest) -> Iterator[str]:
    traffic = request.traffic
    yield "load:"
    yield (
        f"{traffic.rate:g} requests/s, {traffic.peak:g} at the peak; prompts of {traffic.prompt:,.0f} "
        f"tokens, of which {traffic.cached:,.0f} are cached; outputs of {traffic.output:,.0f}"
    )
    yield (
        f"at the peak {traffic.peak:g} x {traffic.computed:,.0f} = {traffic.peak * traffic.computed:,.0f} "
        f"prompt tokens/s to compute and {traffic.peak:g} x {traffic.output:,.0f} = "
        f"{traffic.peak * traffic.output:,.0f} output tokens/s"
    )


def _engine(pool: PlannedPool) -> Iterator[str]:
    option = pool.engine.option
    engine, work, found = option.engine, option.engine.work, option.fit
    device, reached = engine.device, engine.coefficients
    yield f"{pool.role.value} engine ({option.title}; coefficients: {reached.source}):"
    yield (
        f"weights: {work.parameters / 1e9:.2f} billion parameters x {engine.weight_bytes:.2f} bytes"
        + (f" ({engine.expert_bytes:.2f} in experts)" if work.experts and engine.expert_bytes else "")
        + f"; {found.weights / _GIB:.1f} GiB on each device"
    )
    working = option.need.working
    yield (
        f"memory: {found.memory.utilization:g} x {found.memory.total / _GIB:.1f} = "
        f"{found.memory.budget / _GIB:.1f} GiB - {found.weights / _GIB:.1f} weights - "
        f"{working.activations / _GIB:.1f} activations - "
        f"{working.graphs / _GIB:.1f} graphs - {working.libraries / _GIB:.1f} libraries = "
        f"{found.free / _GIB:.1f} GiB for KV"
    )
    token = engine.kv_token_bytes()
    if token:
        context = pool.engine.traffic.context
        yield (
            f"KV: {token:,.0f} bytes a token; {context:,.0f} tokens of a stream are "
            f"{engine.context_bytes(context) / 1e9:.2f} GB; room for {option.requests(context):,.0f} of them"
        )
        yield from _grouped(option.engine, option.model, context)
    if pool.role is not Role.EMBED and option.shape.data == 1:
        yield _ceiling(pool)
    dtype = engine.compute_dtype
    yield (
        f"ridge: {device.peak(dtype) / 1e12:,.0f} TFLOP/s / {device.bytes_per_s / 1e12:.2f} TB/s = "
        f"{device.ridge(dtype):.0f} operations per byte in {dtype}"
    )


def _grouped(engine: EngineModel, model: PlannedModel, context: float) -> Iterator[str]:
    """Yield what queries that share KV heads (GQA) save against a KV head for each (MHA)."""
    sizes, attention = dimensions(model.config), engine.work.attention
    # A latent (MLA) is no head.
    if sizes.latent or not any(0 < each.kv_heads < sizes.heads for each in attention):
        return
    whole = replace(
        engine.work,
        attention=tuple(
            replace(each, elements=each.elements * sizes.heads / each.kv_heads) for each in attention
        ),
    )
    apart = replace(engine, work=whole)
    yield (
        f"KV heads: {sizes.kv_heads} for {sizes.heads} query heads (GQA); with one for each (MHA) "
        f"{apart.kv_token_bytes():,.0f} bytes a token, and {apart.context_bytes(context) / 1e9:.2f} GB"
    )


def _ceiling(pool: PlannedPool) -> str:
    """What the bandwidth alone allows. Stages read their weights one after the other."""
    option = pool.engine.option
    device, readers = option.engine.device, option.shape.tensor
    seconds = replace(option.engine, coefficients=NOMINAL).decode(1, 0).memory_s
    read = seconds * readers * device.bytes_per_s
    unit = "tokens" if pool.engine.speculation is None else "steps"
    return (
        f"bandwidth: {read / 1e9:.1f} GB of weights / ({readers} x {device.bytes_per_s / 1e12:.2f} TB/s) = "
        f"{seconds * 1e3:.2f} ms: at most {1 / seconds:,.1f} {unit}/s for one stream"
    )


def _prompts(plan: CapacityPlan, request: PlanRequest) -> Iterator[str]:
    pool, traffic = plan.pools[0], request.traffic
    option, curve = pool.engine.option, pool.engine.curve
    engine, reached = option.engine, option.engine.coefficients
    peak = (
        option.shape.tensor
        * option.shape.data
        * engine.device.peak(engine.compute_dtype)
        * reached.arithmetic
    )
    flops = engine.work.linear_flops(traffic.computed, 1)
    yield "prompts:"
    yield (
        f"{flops / 1e12:.2f} TFLOP of linear layers at {peak / 1e12:,.0f} TFLOP/s "
        f"({reached.arithmetic:.2f} of the peak) = {flops / peak * 1e3:.1f} ms; with attention, steps of "
        f"{option.shape.max_num_batched_tokens:,} tokens and fixed costs "
        f"{sum(curve.alone_s) / len(curve.alone_s) * 1e3:.1f} ms"
    )
    state = plan.peak.prefill
    if state is None:
        return
    service = sum(state.service_s) / len(state.service_s)
    if plan.mode is Mode.AGGREGATED:
        yield f"beside {plan.peak.streams:.0f} streams a prompt takes {service * 1e3:.1f} ms"
    yield (
        f"{traffic.peak:g} / {pool.replicas} x {service * 1e3:.1f} ms = {state.busy:.0%} busy; a wait "
        f"has a chance of {state.wait.chance:.2f} (Erlang C), a mean of {state.wait.mean_s * 1e3:.0f} ms"
    )
    if plan.pair is not None:
        moved = plan.pair.moved_bytes
        mean = sum(moved) / len(moved)
        yield (
            f"hand-off: {mean / 1e6:,.0f} MB at {plan.pair.link_bytes_per_s / 1e9:.1f} GB/s = "
            f"{mean / plan.pair.link_bytes_per_s * 1e3:.0f} ms"
        )
    yield (
        f"TTFT: {plan.peak.ttft_mean_s * 1e3:.0f} ms on average, {plan.peak.ttft_s * 1e3:.0f} ms for "
        f"{request.target.attainment:.0%} of requests, against {request.target.ttft_s * 1e3:.0f} ms"
    )


def _streams(plan: CapacityPlan, request: PlanRequest) -> Iterator[str]:
    if plan.mode is Mode.EMBEDDING:
        return
    pool, traffic = plan.pools[-1], request.traffic
    option, streams = pool.engine.option, plan.peak.streams
    step = option.engine.decode(max(1, round(streams + 1)), traffic.context)
    yield "streams:"
    yield (
        f"{traffic.peak:g} / {pool.replicas} x {max(0.0, traffic.output - 1):,.0f} tokens x "
        f"{plan.peak.itl_mean_s * 1e3:.1f} ms = {streams:.0f} at once (Little's law); there is room for "
        f"{pool.engine.seats:,.0f}"
    )
    yield (
        f"a decode step: {step.device_s * 1e3:.1f} ms on the device (arithmetic "
        f"{step.compute_s * 1e3:.1f}, memory {step.memory_s * 1e3:.1f}) + "
        f"{step.communication_s * 1e3:.1f} communication + {step.overhead_s * 1e3:.1f} fixed = "
        f"{step.seconds * 1e3:.1f} ms, limited by {step.limit.value}"
    )
    if plan.mode is Mode.AGGREGATED:
        yield f"for {plan.peak.busy:.0%} of the time its steps hold a chunk of a prompt as well"
    yield (
        f"ITL: {plan.peak.itl_mean_s * 1e3:.1f} ms on average, {plan.peak.itl_s * 1e3:.1f} ms for "
        f"{request.target.attainment:.0%} of requests, against {request.target.itl_s * 1e3:.0f} ms"
    )


def _sizes(plan: CapacityPlan, request: PlanRequest) -> Iterator[str]:
    yield "replicas:"
    for pool in plan.pools:
        yield f"{pool.role.value}: {pool.replicas} for the peak, {pool.usual} for the mean"
    yield (
        f"a day with {request.traffic.rate:g} requests/s on average: {plan.day.scaled_hours:,.0f} "
        f"replica-hours with autoscaling, {plan.day.fixed_hours:,.0f} without"
    )


def _money(plan: CapacityPlan, request: PlanRequest) -> Iterator[str]:
    yield "cost:"
    if not plan.priced:
        yield "no price is known for some of the hardware; name one with --catalogue"
        return
    for pool in plan.pools:
        option = pool.engine.option
        yield (
            f"{pool.replicas} x {option.devices} x {option.hardware.offer.price_text} = "
            f"${pool.dollars_per_hour:,.2f}/h"
        )
    prices, traffic = plan.prices, request.traffic
    hour = plan.mean_dollars_per_hour
    yield f"${hour:,.2f}/h over the day for {traffic.rate * 3600:,.0f} requests an hour"
    parts = [f"{traffic.computed:,.0f} computed at ${prices.input:.3f}"]
    if prices.cached_input is not None:
        parts.append(f"{traffic.cached:,.0f} cached at ${prices.cached_input:.3f}")
    if prices.output is not None:
        parts.append(f"{traffic.output:,.0f} output at ${prices.output:.3f}")
    yield f"a request has {', '.join(parts)} per million tokens: ${hour / traffic.rate / 3600:.6f}"
