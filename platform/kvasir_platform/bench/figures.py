"""The figures of a run, from what was tallied. Pure.

Definitions: TTFT is from just before a request is sent to its first chunk with output; ITL are the gaps
between chunks; TPOT is the time from the first chunk to the last over the tokens after the first; E2E is to
the end of the answer. Rates are over the time from the first request's start to the last answer's end.
Goodput is the rate of requests that succeeded and met the SLO."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvasir.core.quantiles import quantile
from kvasir_platform.bench.slo import BenchSlo
from kvasir_platform.bench.tally import BenchTally, GapCounts

_QUANTILES = (0.5, 0.9, 0.95, 0.99)
_LATE_S = 0.01
_LATE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class BenchPercentiles:
    """A distribution in its own unit; zeros without values."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


@dataclass(frozen=True, slots=True)
class BenchFigures:
    """The figures of a run: times in seconds, rates per second. `slo_share` is the share of all requests that
    met the SLO; those with errors did not."""

    requests: int
    succeeded: int
    elapsed_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    goodput_per_s: float
    slo_share: float
    ttft: BenchPercentiles
    itl: BenchPercentiles
    tpot: BenchPercentiles
    e2e: BenchPercentiles
    prompt_tokens: BenchPercentiles
    output_tokens: BenchPercentiles
    prompt_token_error: float
    cached_share: float
    lateness: BenchPercentiles
    errors: Mapping[str, int] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)

    @property
    def client_was_late(self) -> bool:
        """Whether the load generator could not keep its times: the figures are then those of the client."""
        return self.lateness.p95 > max(_LATE_S, _LATE_SHARE * self.ttft.p50)


def figures_of(tally: BenchTally, slo: BenchSlo) -> BenchFigures:
    """The figures of what was tallied so far."""
    elapsed = max(0.0, tally.last_end - tally.first_start)
    e2e = [end - start for start, end in zip(tally.started, tally.ended, strict=True)]
    met = sum(map(slo.met, tally.ttft, tally.tpot, e2e))
    ended = tally.succeeded + tally.failed

    def rate(count: float) -> float:
        return count / elapsed if elapsed > 0.0 else 0.0

    prompts = sum(tally.prompt_tokens)
    requested = sum(tally.requested_prompt)
    return BenchFigures(
        requests=ended,
        succeeded=tally.succeeded,
        elapsed_s=elapsed,
        requests_per_s=rate(tally.succeeded),
        output_tokens_per_s=rate(sum(tally.output_tokens)),
        prompt_tokens_per_s=rate(prompts),
        goodput_per_s=rate(met),
        slo_share=met / ended if ended else 0.0,
        ttft=percentiles(tally.ttft),
        itl=_gap_percentiles(tally.gaps),
        tpot=percentiles(each for each in tally.tpot if not math.isnan(each)),
        e2e=percentiles(e2e),
        prompt_tokens=percentiles(tally.prompt_tokens),
        output_tokens=percentiles(tally.output_tokens),
        prompt_token_error=prompts / requested - 1.0 if requested else 0.0,
        cached_share=tally.cached_tokens / prompts if prompts else 0.0,
        lateness=percentiles(tally.lateness),
        errors=dict(tally.errors),
        details=dict(tally.details),
    )


def percentiles(values: Iterable[float]) -> BenchPercentiles:
    """The percentiles of values."""
    ordered = sorted(values)
    if not ordered:
        return BenchPercentiles()
    p50, p90, p95, p99 = (float(quantile(ordered, q)) for q in _QUANTILES)
    mean = math.fsum(ordered) / len(ordered)
    return BenchPercentiles(len(ordered), mean, p50, p90, p95, p99, float(ordered[-1]))


def _gap_percentiles(gaps: GapCounts) -> BenchPercentiles:
    if not gaps.count:
        return BenchPercentiles()
    p50, p90, p95, p99 = (gaps.quantile(q) for q in _QUANTILES)
    return BenchPercentiles(gaps.count, gaps.total_s / gaps.count, p50, p90, p95, p99, gaps.longest_s)
