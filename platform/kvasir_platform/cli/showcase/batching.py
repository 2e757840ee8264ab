"""Experiments 1, 2 and 6: static batching, continuous batching, and the breaking point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvasir_platform.cli.showcase.bench import SLO, ShowcaseResult, Trial, play, sweep
from kvasir_platform.cli.sim.report import seconds
from kvasir_platform.reports.charts import LineChart, PlottedLine, bar_chart, line_chart
from kvasir_platform.sim.engine.options import Batching, BatchOptions
from kvasir_platform.sim.server.results import ServerResult

_CHATS = "chat:rate={rate},duration=30,turns=1"
_SIZES = (4, 16, 64)
_RATES = (2.0, 8.0, 16.0, 32.0)
_CLIMB = (4.0, 16.0, 28.0, 36.0, 44.0, 52.0)
_TTFT_MOST = 20.0
"""Seconds above which a curve is cut."""


def static_batching() -> ShowcaseResult:
    """A batch that waits for its longest output."""
    rate = 8.0
    named = [
        (f"static, {size}", play(Trial(_CHATS.format(rate=rate), batch=BatchOptions(Batching.STATIC, size))))
        for size in _SIZES
    ]
    named.append(("continuous", play(Trial(_CHATS.format(rate=rate)))))
    ttft = [_ttft(result, 2) for _, result in named]
    worst = named[0][1]
    finding = (
        f"At {rate:g} requests/s, a static batch of {_SIZES[0]} leaves {1 - worst.attainment:.0%} of "
        f"requests beyond "
        f"the SLO: a request waits for the longest output of the batch before, TTFT p99 is "
        f"{seconds(ttft[0])}. A "
        f"larger batch of {_SIZES[-1]} still takes {seconds(ttft[-2])}, continuous batching "
        f"{seconds(ttft[-1])}."
    )
    return ShowcaseResult(
        "static",
        "1. Static batching suffers",
        "What does it cost to run a batch until its longest output has ended?",
        finding,
        ("batching", "TTFT p50", "TTFT p99", "end to end p99", "met the SLO"),
        tuple(
            (name, seconds(_ttft(r, 0)), seconds(_ttft(r, 2)), seconds(_e2e(r, 2)), f"{r.attainment:.1%}")
            for name, r in named
        ),
        (bar_chart("TTFT p99 by batching", "s", [name for name, _ in named], [("TTFT p99", ttft)]),),
        {"ttft_p99_s": dict(zip([name for name, _ in named], ttft, strict=True))},
    )


def continuous_batching() -> ShowcaseResult:
    """The same load under three kinds of batching."""
    kinds = {
        "static": BatchOptions(Batching.STATIC, 64),
        "dynamic": BatchOptions(Batching.DYNAMIC, 64, wait_s=0.5),
        "continuous": BatchOptions(Batching.CONTINUOUS, 64),
    }
    runs = {name: sweep(_CHATS, _RATES, batch=batch) for name, batch in kinds.items()}
    goodput = {name: max(r.goodput for r in results) for name, results in runs.items()}
    others = max(goodput["static"], goodput["dynamic"])
    finding = (
        f"With 64 seats, continuous batching serves {goodput['continuous']:.1f} requests/s within the SLO, "
        f"static "
        f"batching {goodput['static']:.1f} and dynamic batching {goodput['dynamic']:.1f}: "
        f"{goodput['continuous'] / max(others, 0.1):.1f} times as many as the better of the two."
    )
    rows = [
        (
            f"{rate:g}",
            *(f"{runs[name][i].goodput:.1f}" for name in kinds),
            *(seconds(_ttft(runs[name][i], 2)) for name in kinds),
        )
        for i, rate in enumerate(_RATES)
    ]
    return ShowcaseResult(
        "continuous",
        "2. Continuous batching",
        "How much more does an engine serve when requests join and leave at every step?",
        finding,
        ("requests/s", *(f"goodput, {name}" for name in kinds), *(f"TTFT p99, {name}" for name in kinds)),
        tuple(rows),
        (
            _over_rates("Goodput", "requests/s within the SLO", runs, lambda r: r.goodput),
            _over_rates("TTFT p99", "s", runs, lambda r: _ttft(r, 2), most=_TTFT_MOST),
        ),
        {"goodput": goodput},
    )


def breaking_point() -> ShowcaseResult:
    """A rate that climbs until the SLO breaks."""
    results = sweep("chat:rate={rate},duration=30", _CLIMB)
    held = [rate for rate, r in zip(_CLIMB, results, strict=True) if r.attainment >= 0.9]
    broken = [rate for rate in _CLIMB if rate not in held]
    after = results[_CLIMB.index(broken[0])] if broken else results[-1]
    finding = (
        f"One H100 with an 8B model holds the SLO for 90 % of requests up to {max(held, default=0.0):g} "
        f"requests/s. At "
        f"{broken[0] if broken else _CLIMB[-1]:g}, {after.attainment:.0%} are within it: beyond the breaking "
        f"point a "
        "queue grows for as long as the load lasts, and goodput falls instead of levelling off."
    )
    rows = [
        (f"{rate:g}", f"{r.goodput:.1f}", f"{r.attainment:.1%}", seconds(_ttft(r, 2)), seconds(_tpot(r, 2)))
        for rate, r in zip(_CLIMB, results, strict=True)
    ]
    goodput = PlottedLine("goodput", tuple((x, r.goodput) for x, r in zip(_CLIMB, results, strict=True)))
    tpot = PlottedLine(
        "TPOT p99", tuple((x, 1e3 * _tpot(r, 2)) for x, r in zip(_CLIMB, results, strict=True))
    )
    offered, promised = tuple((x, x) for x in _CLIMB), tuple((x, 1e3 * SLO.itl_s) for x in _CLIMB)
    return ShowcaseResult(
        "breaking",
        "6. The breaking point",
        "At which rate does one worker break its SLO?",
        finding,
        ("requests/s", "goodput", "met the SLO", "TTFT p99", "TPOT p99"),
        tuple(rows),
        (
            _chart("Goodput", "requests/s within the SLO", goodput, PlottedLine("offered", offered)),
            _chart("Time per token, p99", "ms", tpot, PlottedLine("SLO", promised)),
        ),
        {"holds": max(held, default=0.0)},
    )


def _over_rates(
    title: str,
    unit: str,
    runs: Mapping[str, Sequence[ServerResult]],
    value: Callable[[ServerResult], float],
    most: float | None = None,
) -> str:
    lines = (
        PlottedLine(name, tuple((rate, value(r)) for rate, r in zip(_RATES, results, strict=True)))
        for name, results in runs.items()
    )
    return _chart(title, unit, *lines, most=most)


def _chart(title: str, unit: str, *lines: PlottedLine, most: float | None = None) -> str:
    return line_chart(LineChart(title, "requests/s offered", unit, lines, most=most))


def _ttft(result: ServerResult, part: int) -> float:
    return result.quantiles(result.times.ttft_s)[part]


def _tpot(result: ServerResult, part: int) -> float:
    return result.quantiles(result.times.tpot_s)[part]


def _e2e(result: ServerResult, part: int) -> float:
    return result.quantiles(result.times.e2e_s)[part]
