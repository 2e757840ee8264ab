"""TTFT, ITL and throughput of a deployment by the number of concurrent streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from kvasir.core.quantiles import quantile
from kvasir_platform.bench.client.endpoint import CallResult


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """The measurements of `streams` concurrent streams: percentiles in seconds, and rates per second."""

    streams: int
    requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    tokens_per_s: float
    requests_per_s: float


def measure_point(
    stream: Callable[[int], CallResult],
    streams: int,
    requests: int,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadPoint:
    """Run `requests` streams, `streams` at a time; `stream(number)` runs one. Raises what it raises."""
    began = clock()
    with ThreadPoolExecutor(streams) as threads:
        done = list(threads.map(stream, range(requests)))
    return point_of(done, streams, clock() - began)


def point_of(done: Sequence[CallResult], streams: int, elapsed_s: float) -> LoadPoint:
    """Summarize streams that ran `streams` at a time and took `elapsed_s` seconds together."""
    first = [each.ttft_s for each in done]
    gaps = [after - before for each in done for before, after in pairwise(each.chunks)] or [0.0]
    return LoadPoint(
        streams=streams,
        requests=len(done),
        ttft_p50_s=quantile(first, 0.5),
        ttft_p99_s=quantile(first, 0.99),
        itl_p50_s=quantile(gaps, 0.5),
        itl_p99_s=quantile(gaps, 0.99),
        tokens_per_s=sum(each.output_tokens or 0 for each in done) / elapsed_s,
        requests_per_s=len(done) / elapsed_s,
    )
