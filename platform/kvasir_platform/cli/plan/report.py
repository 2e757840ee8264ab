"""The report of `kvasir plan` as tables of text, and as data for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvasir_platform.capacity.analysis.advice import HardwareAdvice, why_layout
from kvasir_platform.capacity.analysis.batches import BatchRow
from kvasir_platform.capacity.analysis.layouts import LayoutRow
from kvasir_platform.capacity.analysis.memory import MemoryBudget
from kvasir_platform.capacity.analysis.optimisations import Optimisation
from kvasir_platform.capacity.analysis.too_big import remedies_for
from kvasir_platform.capacity.analysis.uncertainty import BoundedValue, ErrorBars
from kvasir_platform.capacity.pools import Mode, decode_limit
from kvasir_platform.capacity.search import CapacityPlan, SearchResult
from kvasir_platform.cli.common.output import table

_GIB = 1 << 30
_MARKS = {True: "yes", False: "NO", None: "-"}
MEMORY_HEAD = (
    "HARDWARE", "LAYOUT", "WEIGHTS", "ACTIVATIONS", "GRAPHS", "LIBRARIES", "KV", "OF", "BATCH", "USERS",
    "LONGEST", "FP8: USERS", "LONGEST",
)  # fmt: skip
PLAN_HEAD = (
    "", "PLAN", "TTFT", "ITL", "MET", "$/H PEAK", "$/H DAY", "$/M IN", "CACHED", "OUT",
)  # fmt: skip
ADVICE_HEAD = ("HARDWARE", "VERDICT", "STAGE", "OK", "WHY")
LAYOUT_HEAD = ("HARDWARE", "LAYOUT", "DEVICES", "ONE STREAM", "EXCHANGE", "$/H PEAK", "WHY")
BATCH_HEAD = (
    "ENGINE", "BATCH", "STEP", "TOKENS/S", "LIMIT", "OPS/BYTE", "OF PEAK", "OF BANDWIDTH", "$/M", "ITL",
)  # fmt: skip
SHEET_HEAD = ("OPTIMISATION", "PAYS", "WHY", "FIELD")


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All that a report may show. `plans` are the cheapest, each with its error bars."""

    result: SearchResult
    plans: tuple[tuple[CapacityPlan, ErrorBars], ...]
    memory: tuple[MemoryBudget, ...]
    advice: tuple[HardwareAdvice, ...]
    layouts: tuple[LayoutRow, ...]
    sheet: tuple[Optimisation, ...]
    arithmetic: tuple[str, ...]
    batches: tuple[BatchRow, ...]

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Where the coefficients of each kind of hardware come from."""
        return tuple(f"{each.name}: {each.coefficients.source}" for each in self.result.request.hardware)


def summary(report: PlanReport) -> Iterator[str]:
    """Yield the lines of the report without advice and arithmetic."""
    request = report.result.request
    traffic, target, model = request.traffic, request.target, request.model
    counted = " (weights counted from config.json)" if model.estimated else ""
    yield f"{model.name}: {model.work.parameters / 1e9:.1f} billion parameters{counted}"
    output = "" if traffic.embeds else f", {traffic.output:,.0f} output tokens"
    yield (
        f"load: {traffic.rate:.3g} requests/s, {traffic.peak:.3g} at the peak; {traffic.prompt:,.0f} prompt "
        f"tokens, {traffic.cached:,.0f} of them cached{output}"
    )
    itl = "" if traffic.embeds else f", ITL within {target.itl_s * 1e3:g} ms"
    yield f"SLO: TTFT within {target.ttft_s:g} s{itl}, for {target.attainment:.0%} of requests"
    yield ""
    yield (
        f"memory of one device in GiB; users have {report.memory[0].context:,} tokens"
        if report.memory
        else ""
    )
    yield table(MEMORY_HEAD, [memory_row(each) for each in report.memory], range(2, len(MEMORY_HEAD)))
    yield ""
    if not report.plans:
        yield from _nothing(report)
        return
    yield "the cheapest plans; TTFT and ITL at the peak"
    rows = [plan_row(number, *each) for number, each in enumerate(report.plans, 1)]
    yield table(PLAN_HEAD, rows, range(5, len(PLAN_HEAD)))
    for number, (plan, _) in enumerate(report.plans, 1):
        yield ""
        yield from plan_notes(number, plan, report)
    yield ""
    yield f"coefficients: {'; '.join(sorted(set(source_texts(report))))}"


def source_texts(report: PlanReport) -> Iterator[str]:
    """Yield the sources of the coefficients of the plans' hardware."""
    for plan, _ in report.plans:
        for pool in plan.pools:
            hardware = pool.engine.option.hardware
            yield f"{hardware.name} {hardware.coefficients.source}"


def _nothing(report: PlanReport) -> Iterator[str]:
    if not report.result.options:
        yield "the model fits on none of this hardware, in no layout"
        yield from remedies_for(report.result.request)
        return
    yield "no plan meets the SLO at this load with this hardware"
    yield "--advice says at which stage each fails; relax --slo, name other or more GPUs, or allow 8 bits"


def memory_row(budget: MemoryBudget) -> tuple[str, ...]:
    """Return the cells of one kind of hardware."""
    option = budget.option
    held = [f"{size / _GIB:.1f}" for _, size in budget.rows]
    total = f"{option.fit.memory.budget / _GIB:.1f}"
    if budget.missing:
        return (
            option.hardware.name, f"short by {budget.missing / _GIB:.1f}", *held, total, *["-"] * 5,
        )  # fmt: skip
    rooms = [(_count(room.batch), _count(room.users), f"{room.longest:,}") for room in budget.rooms] or [
        ("-", "-", "-")
    ] * 2
    cells = (*rooms[0], *rooms[1][1:])
    layout = option.layout if option.shape.ranks > 1 else option.title.partition(",")[0]
    return option.hardware.name, layout, *held, total, *cells


def _count(value: float) -> str:
    return "-" if math.isinf(value) else f"{value:,.0f}"


def plan_row(number: int, plan: CapacityPlan, bars: ErrorBars) -> tuple[str, ...]:
    """Return the cells of one plan."""
    prices, itl = plan.prices, "-" if plan.mode is Mode.EMBEDDING else milliseconds(bars.itl_s)
    money = (
        (f"{plan.dollars_per_hour:,.2f}", f"{plan.mean_dollars_per_hour:,.2f}", _price(prices.input),
         _price(prices.cached_input), _price(prices.output))
        if plan.priced
        else ("-",) * 5
    )  # fmt: skip
    return (str(number), plan.title, milliseconds(bars.ttft_s), itl, f"{plan.peak.met:.1%}", *money)


def milliseconds(interval: BoundedValue) -> str:
    """Return a time with its bounds."""
    return f"{_ms(interval.value)} ms ({_ms(interval.low)}-{_ms(interval.high)})"


def _ms(seconds: float) -> str:
    if math.isinf(seconds):
        return "overload"
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


def _price(dollars: float | None) -> str:
    return "-" if dollars is None else f"{dollars:.3f}"


def plan_notes(number: int, plan: CapacityPlan, report: PlanReport) -> Iterator[str]:
    """Yield what speaks for and against a plan."""
    bars = next(found for each, found in report.plans if each is plan)
    for pool in plan.pools:
        why = why_layout(pool.engine, plan.peak.streams)
        yield f"{number}. {pool.role.value}: {pool.engine.option.title}: {why}"
    yield f"   {_bottleneck(plan)}"
    peak = report.result.request.traffic.peak
    yield (
        f"   goodput {bars.goodput.value:.3g} of {peak:.3g} requests/s at the peak "
        f"({bars.goodput.low:.3g}-{bars.goodput.high:.3g} with the worst and the best coefficients)"
    )
    usual = " + ".join(str(pool.usual) for pool in plan.pools)
    yield (
        f"   replicas: {usual} for the mean; a day takes {plan.day.scaled_hours:,.0f} replica-hours with "
        f"autoscaling, {plan.day.fixed_hours:,.0f} without"
    )
    if number > 1 and plan.priced:
        yield f"   {_trade(plan, report.plans[0][0])}"


def _bottleneck(plan: CapacityPlan) -> str:
    pool = plan.pools[-1]
    if plan.mode is Mode.EMBEDDING:
        return f"bottleneck: arithmetic of prompts; a replica is {plan.peak.busy:.0%} busy"
    limit = decode_limit(pool.engine, plan.peak.streams).value
    seats = pool.engine.seats
    return (
        f"at the peak a replica computes prompts for {plan.peak.busy:.0%} of the time and decodes "
        f"{plan.peak.streams:.0f} streams of {seats:,.0f}; its decode steps are limited by {limit}"
    )


def _trade(plan: CapacityPlan, best: CapacityPlan) -> str:
    more = plan.mean_dollars_per_hour / best.mean_dollars_per_hour - 1 if best.mean_dollars_per_hour else 0.0
    changes = [f"{more:+.0%} cost"]
    for name, ours, theirs in (
        ("TTFT", plan.peak.ttft_s, best.peak.ttft_s),
        ("ITL", plan.peak.itl_s, best.peak.itl_s),
    ):
        if theirs > 0.0 and math.isfinite(ours) and math.isfinite(theirs):
            changes.append(f"{ours / theirs - 1:+.0%} {name}")
    devices = sum(pool.devices for pool in plan.pools), sum(pool.devices for pool in best.pools)
    changes.append(f"{devices[0]} devices in place of {devices[1]}")
    return f"against 1: {', '.join(changes)}"


def advice_lines(report: PlanReport) -> Iterator[str]:
    """Yield the decision by stages, and the list of optimisations."""
    rows = []
    for each in report.advice:
        name, verdict = each.hardware.name, each.verdict
        for stage in each.stages:
            rows.append((name, verdict, stage.question, _MARKS[stage.passed], stage.answer))
            name = verdict = ""
    yield "which hardware, in stages"
    yield table(ADVICE_HEAD, rows)
    yield ""
    yield "which layout, if replicas do both parts of the work"
    yield table(LAYOUT_HEAD, [layout_cells(each) for each in report.layouts], range(2, 6))
    if report.sheet:
        yield ""
        yield "which optimisation pays, for plan 1"
        yield table(
            SHEET_HEAD, [(each.name, _MARKS[each.pays], each.reason, each.field) for each in report.sheet]
        )


def layout_cells(row: LayoutRow) -> tuple[str, ...]:
    """Return the cells of one layout."""
    option = row.option
    return (
        option.hardware.name,
        option.layout,
        str(option.devices),
        f"{_ms(row.step_s)} ms",
        f"{row.communication:.0%}",
        "-" if row.dollars is None or not option.hardware.price else f"{row.dollars:,.2f}",
        row.reason,
    )


def batch_cells(row: BatchRow) -> tuple[str, ...]:
    """Return the cells of one batch."""
    return (
        row.option.title,
        str(row.batch) if row.batch else "prompt",
        f"{_ms(row.seconds)} ms",
        f"{row.tokens_per_s:,.0f}",
        row.limit,
        f"{row.intensity:,.1f}",
        f"{row.of_peak:.1%}",
        f"{row.of_bandwidth:.0%}",
        _price(row.dollars),
        _MARKS[row.within_itl],
    )


def batch_lines(report: PlanReport) -> Iterator[str]:
    """Yield the table of batches, with the ridge of each kind of hardware."""
    yield "steps of the smallest engine that fits: a prompt, and streams by batch"
    yield table(BATCH_HEAD, [batch_cells(each) for each in report.batches], (1, 2, 3, 5, 6, 7, 8))
    yield from _largest(report)
    for engine in {row.option.hardware.name: row.option.engine for row in report.batches}.values():
        device = engine.device
        yield (
            f"{device.name}: memory limits below {device.ridge('bfloat16'):.0f} operations per byte in 16 "
            f"bits" + (f", {device.ridge('fp8'):.0f} in FP8" if device.fp8 else "")
        )


def _largest(report: PlanReport) -> Iterator[str]:
    """Yield the largest batch of each engine whose steps keep the promised ITL."""
    streams = [row for row in report.batches if row.batch]
    kept = {row.option.title: row.batch for row in streams if row.within_itl}
    if titles := dict.fromkeys(row.option.title for row in streams):
        found = "; ".join(f"{title}: {kept.get(title) or 'none'}" for title in titles)
        promised = report.result.request.target.itl_s * 1e3
        yield f"largest batch here with ITL within {promised:g} ms, without prompts beside it: {found}"


def arithmetic_lines(report: PlanReport) -> Iterator[str]:
    """Yield the arithmetic of plan 1, indented under its parts."""
    for line in report.arithmetic:
        yield line if line.endswith(":") else f"  {line}"
