"""Throughput, bottleneck and price of decoding by batch, for each kind of hardware and precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvasir.performance.coefficients import NOMINAL
from kvasir.performance.step import PromptChunk, StepWork
from kvasir_platform.capacity.analysis.memory import smallest
from kvasir_platform.capacity.engines import EngineOption, HardwareChoice, engine_option
from kvasir_platform.capacity.precisions import eight_bits
from kvasir_platform.capacity.search import PlanRequest

_BATCHES = (1, 4, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A step of one engine. `batch` streams are decoded, or, if it is 0, a chunk of a prompt is computed.
    `intensity` is operations per byte; `of_peak` and `of_bandwidth` are the parts of nominal rates that are
    used; `dollars` are for a million tokens at this batch, None without a price. `within_itl` says whether
    the step is as short as the ITL that is promised, None for prompts."""

    option: EngineOption
    batch: int
    seconds: float
    tokens_per_s: float
    limit: str
    intensity: float
    of_peak: float
    of_bandwidth: float
    dollars: float | None
    within_itl: bool | None


def batch_rows(request: PlanRequest) -> tuple[BatchRow, ...]:
    """Return the rows of the smallest engine that fits on each kind of hardware, as stored, and in 8 bits
    where they are quantized at load."""
    return tuple(
        row
        for hardware in request.hardware
        for option in _options(request, hardware)
        for row in _rows(option, request)
    )


def _options(request: PlanRequest, hardware: HardwareChoice) -> Iterator[EngineOption]:
    option = smallest(request, hardware)
    if option is None:
        return
    yield option
    quantization = eight_bits(option.model, hardware)
    if quantization is not None and option.shape.quantization == "none":
        shape = replace(option.shape, quantization=quantization)
        yield engine_option(option.model, hardware, shape, cores=option.devices)


def _rows(option: EngineOption, request: PlanRequest) -> Iterator[BatchRow]:
    traffic = request.traffic
    tokens = max(1, min(round(traffic.computed), option.shape.max_num_batched_tokens))
    yield _row(option, request, tokens, StepWork((PromptChunk(tokens, round(traffic.cached)),)))
    if traffic.embeds:
        return
    seats = option.seats(traffic.context)
    for batch in _BATCHES:
        if batch > seats:
            return
        yield _row(option, request, batch, StepWork(streams=batch, context=traffic.context))


def _row(option: EngineOption, request: PlanRequest, tokens: int, work: StepWork) -> BatchRow:
    engine = option.engine
    step = engine.step(work)
    # What arithmetic and memory alone would take at nominal rates.
    nominal = replace(engine, coefficients=NOMINAL).step(work)
    rate = tokens / step.seconds
    itl_s = request.target.itl_s
    price = option.hardware.device.dollars_per_hour
    ridge = engine.device.ridge(engine.compute_dtype)
    return BatchRow(
        option=option,
        batch=work.streams,
        seconds=step.seconds,
        tokens_per_s=rate,
        limit=step.limit.value,
        intensity=ridge * nominal.compute_s / nominal.memory_s if nominal.memory_s else 0.0,
        of_peak=nominal.compute_s / step.seconds,
        of_bandwidth=nominal.memory_s / step.seconds,
        dollars=None if price is None else option.dollars_per_hour / 3600 / rate * 1e6,
        within_itl=step.seconds <= itl_s if work.streams else None,
    )
