"""The figures of a day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from load_tests.scenarios.regions.cell import Work
from load_tests.scenarios.regions.day import RegionDay
from load_tests.scenarios.regions.world import PROMISED_ITL_S, PROMISED_TTFT_S


@dataclass(frozen=True, slots=True)
class DayFigures:
    """Of the requests that their tenant's limit admitted: those that met the promise, failed, and ran in
    another region; percentiles of the TTFT in seconds, of those that were served. `outage_p99_s` is of
    requests that came in the first ten minutes of an outage. A wait is the TTFT without the time in which the
    prompt is computed: network, queue, and what failed before."""

    dollars: float
    requests: int
    p50_s: float
    p99_s: float
    outage_p99_s: float
    wait_p99_s: float
    met: float
    failed: int
    cross: float
    violations: int
    doubles: int
    repeated: int
    unheard: int
    worst_hour: float
    alone_hour: float
    excess: float
    replicas: tuple[int, ...]


def figures_of(day: RegionDay) -> DayFigures:
    """Return the figures of a day that was run."""
    admitted = [work for work in day.works if work.outcome != "limited"]
    served = [work for work in admitted if work.outcome == "ok"]
    starts = [each.begin_s for each in day.world.outages if each.begin_s < day.world.length_s]
    hard = [work for work in served if any(start <= work.at_s < start + 600.0 for start in starts)]
    counts = day.counts
    return DayFigures(
        dollars=day.dollars,
        requests=len(admitted),
        p50_s=_percentile(served, 50),
        p99_s=_percentile(served, 99),
        outage_p99_s=_percentile(hard, 99),
        wait_p99_s=_quantile([work.first_s - work.at_s - work.prefill_s for work in served], 99),
        met=sum(map(_met, served)) / max(1, len(admitted)),
        failed=len(admitted) - len(served),
        cross=counts.cross / max(1, counts.executions),
        violations=counts.violations,
        doubles=counts.doubles,
        repeated=counts.repeated,
        unheard=counts.unheard,
        worst_hour=day.metered.worst_hour(),
        alone_hour=day.metered.worst_hour(alone=True),
        excess=day.metered.excess(),
        replicas=tuple(counts.replicas[cell.number] for cell in day.cells),
    )


def _percentile(works: Sequence[Work], part: float) -> float:
    return _quantile([work.first_s - work.at_s for work in works], part)


def _quantile(seconds: Sequence[float], part: float) -> float:
    return float(np.percentile(seconds, part)) if seconds else 0.0


def _met(work: Work) -> bool:
    itl_s = (work.ended_s - work.first_s) / max(1, work.output - 1)
    return work.first_s - work.at_s <= PROMISED_TTFT_S and itl_s <= PROMISED_ITL_S
