"""The cells of a result's tables, for a terminal and for a page."""

from __future__ import annotations

from kvasir_platform.bench.figures import BenchFigures, BenchPercentiles
from kvasir_platform.bench.ramp import BenchRamp
from kvasir_platform.bench.report.compare import BenchDifference

FIGURES_HEAD = ("", "MEAN", "P50", "P90", "P95", "P99", "MAX")
RAMP_HEAD = ("REQUESTS/S", "SLO MET", "GOODPUT/S", "SERVED/S", "TTFT P50", "P95", "TPOT P95", "ERRORS")
DIFFERENCE_HEAD = ("", "BEFORE", "AFTER", "CHANGE", "95 % CONFIDENCE", "")


def figure_rows(figures: BenchFigures) -> list[tuple[str, ...]]:
    """One row for each distribution that has values, times in ms."""
    shown = [
        ("TTFT, ms", figures.ttft, 1e3),
        ("ITL, ms", figures.itl, 1e3),
        ("TPOT, ms", figures.tpot, 1e3),
        ("E2E, ms", figures.e2e, 1e3),
        ("prompt tokens", figures.prompt_tokens, 1.0),
        ("output tokens", figures.output_tokens, 1.0),
        ("own lateness, ms", figures.lateness, 1e3),
    ]
    return [(name, *_cells(values, scale)) for name, values, scale in shown if values.count]


def rate_lines(figures: BenchFigures) -> list[str]:
    """Rates and shares, a line each."""
    lines = [
        f"{figures.succeeded:,} of {figures.requests:,} requests in {figures.elapsed_s:.1f} s: "
        f"{figures.requests_per_s:.2f} requests/s",
        f"{figures.output_tokens_per_s:,.0f} output tokens/s, {figures.prompt_tokens_per_s:,.0f} prompt "
        "tokens/s",
        f"goodput {figures.goodput_per_s:.2f} requests/s: {figures.slo_share:.1%} met the SLO",
    ]
    if figures.cached_share:
        lines.append(f"{figures.cached_share:.1%} of the prompt tokens came from a cache")
    return lines


def error_rows(figures: BenchFigures) -> list[tuple[str, ...]]:
    """Each kind of error, the most frequent first."""
    ordered = sorted(figures.errors.items(), key=lambda each: -each[1])
    return [(kind, f"{count:,}", figures.details.get(kind, "")[:100]) for kind, count in ordered]


def ramp_rows(ramp: BenchRamp) -> list[tuple[str, ...]]:
    """One row for each rate; times in ms."""
    return [
        (
            f"{each.rate:.3g}",
            f"{each.figures.slo_share:.1%}{'' if each.held else ' *'}",
            f"{each.figures.goodput_per_s:.2f}",
            f"{each.figures.requests_per_s:.2f}",
            f"{each.figures.ttft.p50 * 1e3:,.1f}",
            f"{each.figures.ttft.p95 * 1e3:,.1f}",
            f"{each.figures.tpot.p95 * 1e3:,.1f}",
            f"{sum(each.figures.errors.values())}",
        )
        for each in ramp.points
    ]


def knee_line(ramp: BenchRamp) -> str:
    """Where the server breaks, in words."""
    met = f"{ramp.plan.met:.0%} of the requests meet the SLO"
    if not ramp.knee:
        return f"at no rate that was tried {met}"
    if ramp.broken is None:
        return f"{met} up to {ramp.knee:.3g} requests/s, the highest rate that was tried"
    return f"{met} up to {ramp.knee:.3g} requests/s, and no longer at {ramp.broken:.3g}"


def difference_rows(found: list[BenchDifference]) -> list[tuple[str, ...]]:
    """One row for each figure; times in ms."""
    rows: list[tuple[str, ...]] = []
    for each in found:
        scale = 1e3 if each.unit == "s" else 1.0
        bounds = "-" if each.low is None or each.high is None else f"{each.low:+.1%} to {each.high:+.1%}"
        verdict = "" if each.verdict == "unknown" else each.verdict
        name = f"{each.name}, ms" if each.unit == "s" else each.name
        rows.append(
            (
                name,
                f"{each.before * scale:,.2f}",
                f"{each.after * scale:,.2f}",
                f"{each.change:+.1%}",
                bounds,
                verdict,
            )
        )
    return rows


def _cells(values: BenchPercentiles, scale: float) -> tuple[str, ...]:
    shown = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
    return tuple(f"{each * scale:,.1f}" for each in shown)
