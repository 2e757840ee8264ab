"""Every parallel layout of a model on one kind of hardware, and why it is taken or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvasir.sizing.shape import EngineShape
from kvasir_platform.capacity.engines import (
    MOST_SEQUENCES,
    EngineOption,
    HardwareChoice,
    engine_option,
    layout_shapes,
)
from kvasir_platform.capacity.pools import Mode, ServiceTarget, SizedEngine, aggregated, embedding
from kvasir_platform.capacity.search import PlanRequest, SearchResult
from kvasir_platform.capacity.sizes import single_pool

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """One layout: seconds of a decode step with one stream, the part of a step at the peak's batch that
    devices exchange data for, and what decides. `dollars` are those of an hour at the peak, with one pool,
    None if there is no such plan."""

    option: EngineOption
    step_s: float
    communication: float
    reason: str
    dollars: float | None


def layout_rows(result: SearchResult) -> tuple[LayoutRow, ...]:
    """Return the layouts on the hardware of the cheapest plan, or on the first kind if there is none."""
    best = result.best
    request = result.request
    names = best.hardware if best is not None else tuple(each.name for each in request.hardware[:1])
    kinds = [each for each in request.hardware if each.name in names]
    return tuple(row for hardware in kinds for row in _rows(request, hardware))


def _rows(request: PlanRequest, hardware: HardwareChoice) -> Iterator[LayoutRow]:
    precision = request.precisions[0]
    base = EngineShape(
        max_model_len=request.max_model_len,
        max_num_seqs=MOST_SEQUENCES,
        quantization=precision.quantization,
        kv_dtype=precision.kv_dtype,
    )
    for shape, cores in layout_shapes(request.model, hardware, base):
        yield _row(request, engine_option(request.model, hardware, shape, cores=cores))


def _row(request: PlanRequest, option: EngineOption) -> LayoutRow:
    context = request.traffic.context
    one = option.engine.decode(1, context)
    batch = option.engine.decode(max(1, round(min(64.0, option.seats(context)))), context)
    reason, dollars = _decided(request, option)
    return LayoutRow(option, one.seconds, batch.communication_s / batch.seconds, reason, dollars)


def _decided(request: PlanRequest, option: EngineOption) -> tuple[str, float | None]:
    if not option.fits:
        return f"does not fit by {option.fit.missing / _GIB:.1f} GiB on each device", None
    if option.hardware.count is not None and option.devices > option.hardware.count:
        return f"takes {option.devices} devices, and there are {option.hardware.count}", None
    mode = Mode.EMBEDDING if request.traffic.embeds else Mode.AGGREGATED
    engine = SizedEngine(option, request.traffic, request.speculation)
    replicas = single_pool(mode, engine, request.traffic.peak, request.target)
    if replicas is None:
        return _missed(engine, request.target), None
    found = f"{replicas} replica{'s' if replicas > 1 else ''}, {replicas * option.devices} devices"
    return found, replicas * option.dollars_per_hour


def _missed(engine: SizedEngine, target: ServiceTarget) -> str:
    """Return what an idle replica misses; if nothing, there are too few devices."""
    see = embedding if engine.traffic.embeds else aggregated
    idle = see(engine, 1, 1e-6, target)
    if idle.ttft_s > target.ttft_s:
        return f"TTFT {idle.ttft_s * 1e3:,.0f} ms even without load"
    if idle.itl_s > target.itl_s:
        return f"ITL {idle.itl_s * 1e3:,.1f} ms even without load"
    return "not enough devices for the SLO at this load"


def cheapest_first(rows: tuple[LayoutRow, ...]) -> tuple[LayoutRow, ...]:
    """Return the rows by cost, those without a plan last."""
    return tuple(sorted(rows, key=lambda row: (row.dollars is None, row.dollars or 0.0, row.option.devices)))
