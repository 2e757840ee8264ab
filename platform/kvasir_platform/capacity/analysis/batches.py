"""Throughput, bottleneck and price of decoding by batch, for each kind of hardware and precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvasir.performance.step import PromptChunk, StepTime, StepWork
from kvasir_platform.capacity.analysis.memory import smallest
from kvasir_platform.capacity.engines import EngineOption, HardwareChoice, engine_option
from kvasir_platform.capacity.search import PlanRequest

_BATCHES = (1, 4, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A step of one engine. `batch` streams are decoded, or, if it is 0, a chunk of a prompt is computed.
    `intensity` is operations per byte; `of_peak` and `of_bandwidth` are the parts of nominal rates that are
    used; `dollars` are for a million tokens at this batch, None without a price."""

    option: EngineOption
    batch: int
    seconds: float
    tokens_per_s: float
    limit: str
    intensity: float
    of_peak: float
    of_bandwidth: float
    dollars: float | None


def batch_rows(request: PlanRequest) -> tuple[BatchRow, ...]:
    """Return the rows of the smallest engine that fits on each kind of hardware, as stored, and in FP8 where
    the hardware computes it."""
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
    plain = option.shape.quantization == "none" and option.model.config.quantization is None
    if hardware.device.fp8 and plain:
        shape = replace(option.shape, quantization="fp8")
        yield engine_option(option.model, hardware, shape, cores=option.devices)


def _rows(option: EngineOption, request: PlanRequest) -> Iterator[BatchRow]:
    traffic, engine = request.traffic, option.engine
    tokens = max(1, min(round(traffic.computed), option.shape.max_num_batched_tokens))
    chunk = StepWork((PromptChunk(tokens, round(traffic.cached)),))
    operations = engine.work.linear_flops(tokens, 1) + engine.work.prompt_flops(tokens, traffic.cached)
    yield _row(option, 0, tokens, operations, engine.step(chunk))
    if traffic.embeds:
        return
    seats = option.seats(traffic.context)
    for batch in _BATCHES:
        if batch > seats:
            return
        operations = engine.work.linear_flops(batch, batch) + batch * engine.work.attention_flops(
            1, traffic.context
        )
        yield _row(option, batch, batch, operations, engine.decode(batch, traffic.context))


def _row(option: EngineOption, batch: int, tokens: int, operations: float, step: StepTime) -> BatchRow:
    engine, ranks = option.engine, option.shape.tensor * option.shape.data
    bandwidth = ranks * engine.device.bytes_per_s
    moved = step.memory_s * bandwidth * engine.coefficients.bandwidth
    rate = tokens / step.seconds
    price = option.hardware.device.dollars_per_hour
    return BatchRow(
        option=option,
        batch=batch,
        seconds=step.seconds,
        tokens_per_s=rate,
        limit=step.limit.value,
        intensity=operations / moved if moved else 0.0,
        of_peak=operations / step.seconds / (ranks * engine.device.peak(engine.compute_dtype)),
        of_bandwidth=moved / step.seconds / bandwidth,
        dollars=None if price is None else option.dollars_per_hour / 3600 / rate * 1e6,
    )
