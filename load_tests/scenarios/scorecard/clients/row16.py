"""A hundred clients stop reading: each is disconnected at a limit, and other clients are not
affected."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, replace

from tests.kit.lab import gateway
from tests.kit.lab.fleet import Fleet, Layout
from tests.kit.lab.gateway import until
from tests.kit.lab.load import OpenLoop, asks, quantile
from tests.kit.lab.processes import resident_bytes
from tests.kit.lab.stream import Outcome, Stream, open_stream

from load_tests.scenarios.scorecard.common import (
    Figure,
    NotProven,
    Trial,
    engine,
    exactness,
    exercise,
    whole,
)

PROMISE = "bounded buffers"
KERNEL_BYTES = 4096
BOUND_KIB = 256.0
CUT_S = 90.0


@dataclass(frozen=True, slots=True)
class Size:
    """`slow` clients that do not read beside other clients at `rate` requests per second, then as many that
    read, `pairs` times. Their tokens carry logprobs, so that an answer is larger than all buffers between
    engine and client."""

    workers: int = 4
    slow: int = 100
    slow_tokens: int = 2000
    rate: float = 10.0
    tokens: int = 30
    pairs: int = 3
    window_s: float = 20.0
    step_s: float = 0.06


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    # Steps take the same time whatever the batch, so that windows differ only in whether the clients read.
    spec = engine(sim={"decode_step_s": size.step_s, "decode_step_per_seq_s": 0.0})
    async with exercise(trial, whole(spec), Layout({"both": size.workers})) as fleet:
        outcomes: list[Outcome] = []
        changes: list[float] = []
        peaks: list[float] = []
        for pair in range(size.pairs):
            ordinary, brisk, _ = await _window(trial, fleet, size, 2 * pair + 1)
            others, beside, peak = await _window(trial, fleet, size, 2 * pair + 2, cut=(pair + 1) * size.slow)
            outcomes += [*ordinary, *others]
            changes.append((beside / brisk - 1.0) * 100)
            peaks.append(peak / 1024)
            trial.say(
                f"p99 of gaps {brisk * 1e3:.1f} ms while all read, {beside * 1e3:.1f} ms while "
                f"{size.slow} do not; {peaks[-1]:.0f} KiB a stream"
            )
    return [
        Figure(
            "memory of the router for a stream that is not read", max(peaks), "KiB", "lower", BOUND_KIB,
            f"growth of its resident memory at the peak, over {size.slow} streams, all cut as slow_reader",
        ),
        Figure("change of the others' p99 gap", statistics.median(changes), "%", "lower", 5.0,
               f"median of {size.pairs} pairs of windows: "
               + ", ".join(f"{change:+.1f} %" for change in changes)),
        exactness(outcomes, "of the others"),
    ]  # fmt: skip


async def _window(
    trial: Trial, fleet: Fleet, size: Size, salt: int, cut: int = 0
) -> tuple[list[Outcome], float, float]:
    """Return the other clients' outcomes, the p99 of all their gaps, and the router's memory growth per large
    stream. With `cut`, the large streams are not read until the router has disconnected that many."""
    pid = fleet.routers[0].process.pid
    small, fat = asks(trial.rng(salt), 64, size.tokens), asks(trial.rng(10 + salt), 64, size.slow_tokens)
    load = OpenLoop([fleet.address], small, size.rate, clock=trial.clock, rng=trial.rng(20 + salt))
    load.start()
    streams: list[Stream] = []
    for _ in range(size.slow):
        ask = replace(next(fat), logprobs=20)
        buffer = KERNEL_BYTES if cut else None
        streams.append(await open_stream(fleet.address, ask, trial.clock, receive_buffer=buffer))
    await asyncio.gather(*(stream.begun.wait() for stream in streams))
    before = peak = resident_bytes(pid)
    for stream in streams:
        if cut:
            stream.stop_reading()
        stream.discard = True
    start = trial.clock.now()
    while trial.clock.now() < start + size.window_s:
        peak = max(peak, resident_bytes(pid))
        await trial.clock.sleep(0.05)
    if cut:
        peak = max(peak, await _all_cut(trial, fleet, cut))
    for stream in streams:
        stream.disconnect()
    outcomes = await load.stop()
    end = start + size.window_s
    gaps = [gap for outcome in outcomes for gap in outcome.gaps_s(start, end)]
    return outcomes, quantile(gaps, 0.99), (peak - before) / size.slow


async def _all_cut(trial: Trial, fleet: Fleet, wanted: int) -> int:
    """Wait until that many slow readers are disconnected; return the router's peak resident memory."""
    peak = 0

    async def all_cut() -> bool:
        nonlocal peak
        peak = max(peak, resident_bytes(fleet.routers[0].process.pid))
        series = await gateway.metrics(fleet.address)
        return gateway.metric(series, "kvasir_requests_total", outcome="slow_reader") >= wanted

    try:
        await until(all_cut, CUT_S, "all slow readers are cut", trial.clock, 0.1)
    except TimeoutError as error:
        raise NotProven(str(error)) from error
    return peak
