"""The result of a run as tables and as data."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvasir_platform.cli.common.output import table
from kvasir_platform.sim.server.compare import PolicyComparison
from kvasir_platform.sim.server.results import QUANTILES, ServerResult

TIMES_HEAD = ("", *(f"p{part * 100:g}" for part in QUANTILES))
POOL_HEAD = ("pool", "workers", "utilization", "prompt tokens/s", "output tokens/s", "preemptions", "cost")
RANK_HEAD = ("policy", "requests/s", "of the bound", "hit rate", "utilization", "TTFT p99", "TPOT p99")


def time_rows(result: ServerResult) -> list[tuple[str, ...]]:
    """Return the quantiles of each time."""
    times = result.times
    named = (
        ("TTFT", result.quantiles(times.ttft_s)),
        ("TPOT, mean of a request", result.quantiles(times.tpot_s)),
        ("ITL, each token", result.itl_quantiles()),
        ("end to end", result.quantiles(times.e2e_s)),
    )
    return [(name, *map(seconds, values)) for name, values in named]


def pool_rows(result: ServerResult) -> list[tuple[str, ...]]:
    """Return what each pool did."""
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys(each.pool for each in result.workers):
        own = [each for each in result.workers if each.pool == name]
        exists = sum(each.exists_s for each in own)
        busy = sum(each.totals.busy_s for each in own)
        known = [each.dollars for each in own if each.dollars is not None]
        rows.append(
            (
                name,
                f"{exists / result.virtual_s:.1f}" if result.virtual_s else "-",
                f"{busy / exists:.1%}" if exists else "-",
                f"{sum(each.totals.prefilled_tokens for each in own) / max(result.virtual_s, 1e-9):,.0f}",
                f"{sum(each.totals.generated_tokens for each in own) / max(result.virtual_s, 1e-9):,.0f}",
                f"{sum(each.totals.preemptions for each in own):,}",
                f"${sum(known):.2f}" if len(known) == len(own) else "no price",
            )
        )
    return rows


def cards_of(result: ServerResult) -> list[tuple[str, str]]:
    """Return the figures that matter most."""
    ttft, itl = result.quantiles(result.times.ttft_s), result.itl_quantiles()
    million = result.dollars_per_million
    return [
        ("requests", f"{result.requests:,}"),
        ("met the SLO", f"{result.attainment:.1%}"),
        ("goodput, requests/s", f"{result.goodput:.2f}"),
        ("TTFT p50, p99", f"{seconds(ttft[0])}, {seconds(ttft[2])}"),
        ("ITL p50, p99", f"{seconds(itl[0])}, {seconds(itl[2])}"),
        ("hits of an infinite cache's", f"{result.hit_rate:.1%}" if result.infinite_hits else "none"),
        ("utilization", f"{result.utilization:.1%}"),
        ("per million output tokens", "no price" if million is None else f"${million:.2f}"),
    ]


def lines_of(result: ServerResult) -> list[str]:
    """Return the report for a terminal."""
    lines = [
        f"{result.requests:,} requests in {result.virtual_s:,.0f} s: {result.attainment:.1%} met the SLO, "
        f"goodput {result.goodput:.2f} requests/s",
        "",
        table(TIMES_HEAD, time_rows(result), range(1, 4)),
        "",
        table(POOL_HEAD, pool_rows(result), range(1, 7)),
        "",
        f"hit rate {result.hit_rate:.1%} of an infinite cache's; {result.failovers:,} failovers; refused: "
        + (", ".join(f"{count:,} {code}" for code, count in sorted(result.refused.items())) or "none"),
    ]
    million = result.dollars_per_million
    if million is not None:
        lines.append(f"${result.dollars:,.2f} in all, ${million:.2f} for a million output tokens")
    lines.append(f"{result.speed:,.0f} times faster than real time, {result.decisions:,} decisions")
    return lines


def as_data(result: ServerResult, about: str) -> dict[str, object]:
    """Return the result for programs. Times are in seconds."""
    times = result.times
    quantiles = {
        "ttft_s": result.quantiles(times.ttft_s),
        "tpot_s": result.quantiles(times.tpot_s),
        "itl_s": result.itl_quantiles(),
        "e2e_s": result.quantiles(times.e2e_s),
    }
    return {
        "format": "kvasir-sim/1",
        "about": about,
        "requests": result.requests,
        "virtual_s": result.virtual_s,
        "met_slo": result.attainment,
        "goodput": result.goodput,
        "slo": {"ttft_s": result.slo.ttft_s, "itl_s": result.slo.itl_s},
        **{name: _named(values) for name, values in quantiles.items()},
        "utilization": result.utilization,
        "hit_rate": result.hit_rate,
        "infinite_hit_tokens": result.infinite_hits,
        "output_tokens": result.output_tokens,
        "dollars": result.dollars,
        "dollars_per_million_output_tokens": result.dollars_per_million,
        "refused": result.refused,
        "failovers": result.failovers,
        "preemptions": result.preemptions,
        "starts": result.starts,
        "pools": [dict(zip(POOL_HEAD, row, strict=True)) for row in pool_rows(result)],
        "times_real_time": result.speed,
    }


def rank_rows(found: PolicyComparison) -> list[tuple[str, ...]]:
    """Return the ranks, the best first."""
    rows: list[tuple[str, ...]] = []
    for each in found.ranks:
        result = each.result
        rest = ("-",) * 4
        if result is not None:
            rest = (
                f"{result.hit_rate:.1%}",
                f"{result.utilization:.1%}",
                seconds(result.quantiles(result.times.ttft_s)[2]),
                seconds(result.quantiles(result.times.tpot_s)[2]),
            )
        rows.append((each.policy, f"{each.goodput:.2f}", f"{each.of_bound:.1%}", *rest))
    return rows


def rank_lines(found: PolicyComparison) -> list[str]:
    """Return the comparison for a terminal."""
    return [table(RANK_HEAD, rank_rows(found), range(1, 7)), "", bound_line(found)]


def bound_line(found: PolicyComparison) -> str:
    """Return the bound in words."""
    bound = found.bound
    streams = ", ".join(f"{count} of {name}" for name, count in bound.streams.items())
    return (
        f"The bound is {bound.requests_per_s:.2f} requests/s: {bound.computed_tokens:,.0f} of "
        f"{bound.prompt_tokens:,.0f} prompt tokens computed, work even, streams up to {streams}."
    )


def rank_data(found: PolicyComparison, about: str) -> dict[str, object]:
    """Return the comparison for programs."""
    bound = found.bound
    return {
        "format": "kvasir-sim-compare/1",
        "about": about,
        "bound": {
            "requests_per_s": bound.requests_per_s,
            "by_pool": bound.by_pool,
            "computed_tokens": bound.computed_tokens,
            "prompt_tokens": bound.prompt_tokens,
            "output_tokens": bound.output_tokens,
            "streams": bound.streams,
        },
        "policies": [
            {"policy": each.policy, "goodput": each.goodput, "of_bound": each.of_bound}
            | ({} if each.result is None else {"hit_rate": each.result.hit_rate})
            for each in found.ranks
        ],
    }


def seconds(value: float) -> str:
    """Format a time."""
    if math.isnan(value):
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 1.0 else f"{value:.2f} s"


def _named(values: Sequence[float]) -> dict[str, float | None]:
    return {
        f"p{part * 100:g}": None if math.isnan(value) else value
        for part, value in zip(QUANTILES, values, strict=True)
    }
