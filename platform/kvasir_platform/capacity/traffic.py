"""The load that is planned for: rates, lengths, what prompts share, and how a day goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean

_SAMPLES = 32
_STRIDE = 13
"""Pairs lengths of prompts with those of outputs so that they are independent: coprime to _SAMPLES."""
_P95 = NormalDist().inv_cdf(0.95)
HOURS = 24


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """One request, in tokens. `cached` of the prompt's are in a cache that forgets nothing."""

    prompt: float
    cached: float
    output: float

    @property
    def computed(self) -> float:
        """Tokens of the prompt that are computed: at least the last one."""
        return max(1.0, self.prompt - self.cached)


@dataclass(frozen=True, slots=True)
class TrafficProfile:
    """`rate` requests per second on average and `peak` in the busiest minutes; `lengths` are equally likely.
    `burstiness` is the squared coefficient of variation of the gaps between arrivals, 1 for a Poisson
    process. `embeds`: requests have no output."""

    name: str
    rate: float
    peak: float
    lengths: tuple[RequestLengths, ...]
    burstiness: float = 1.0
    embeds: bool = False

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return fmean(each.prompt for each in self.lengths)

    @property
    def cached(self) -> float:
        """Mean tokens of a prompt that are cached."""
        return self.prompt - self.computed

    @property
    def computed(self) -> float:
        """Mean tokens of a prompt that are computed."""
        return fmean(each.computed for each in self.lengths)

    @property
    def output(self) -> float:
        """Mean tokens of an output."""
        return fmean(each.output for each in self.lengths)

    @property
    def context(self) -> float:
        """Mean tokens of a running stream, over its life: one of many tokens lives longer."""
        spent = sum(each.output for each in self.lengths)
        if not spent:
            return self.prompt
        return sum((each.prompt + each.output / 2) * each.output for each in self.lengths) / spent

    @property
    def longest(self) -> int:
        """The most tokens of prompt and output together."""
        return math.ceil(max(each.prompt + each.output for each in self.lengths))

    def hourly(self) -> tuple[float, ...]:
        """Return the rate in each hour of a day with this mean and peak: e to the power of a sine, of which
        the mean and the peak are what they are for any ratio of the two up to HOURS."""
        if self.rate <= 0.0 or self.peak <= self.rate:
            return (self.rate,) * HOURS
        low, high = 0.0, 100.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _ratio(middle) < self.peak / self.rate else (low, middle)
        shape = _day(high)
        return tuple(self.rate * each / fmean(shape) for each in shape)


def _day(steepness: float) -> list[float]:
    # The busiest hour is 14.
    return [math.exp(steepness * (math.cos(2 * math.pi * (hour - 14) / HOURS) - 1)) for hour in range(HOURS)]


def _ratio(steepness: float) -> float:
    return 1.0 / fmean(_day(steepness))


@dataclass(frozen=True, slots=True)
class LengthSpread:
    """A length: always `median`, or lognormal with this median and 95th percentile."""

    median: float
    p95: float

    def quantiles(self) -> list[float]:
        """Return _SAMPLES equally likely values."""
        if self.p95 <= self.median:
            return [self.median] * _SAMPLES
        sigma = math.log(self.p95 / self.median) / _P95
        points = ((at + 0.5) / _SAMPLES for at in range(_SAMPLES))
        return [max(1.0, self.median * math.exp(sigma * NormalDist().inv_cdf(point))) for point in points]


def stated_traffic(
    *,
    rate: float,
    peak: float,
    prompt: LengthSpread,
    output: LengthSpread | None,
    prefix_share: float,
    burstiness: float = 1.0,
) -> TrafficProfile:
    """Return the load that its parameters describe; `prefix_share` of each prompt is cached. Without
    `output`, requests are for embeddings."""
    prompts = prompt.quantiles()
    outputs = [0.0] * _SAMPLES if output is None else output.quantiles()
    lengths = tuple(
        RequestLengths(each, each * prefix_share, outputs[(at * _STRIDE + 5) % _SAMPLES])
        for at, each in enumerate(prompts)
    )
    if len(set(lengths)) == 1:
        lengths = lengths[:1]
    return TrafficProfile("stated", rate, peak, lengths, burstiness, embeds=output is None)


_MOST_LENGTHS = 128
_BIN_S = 60.0
_LEAST_BINS = 10


def observed_traffic(
    name: str, arrivals: Sequence[float], lengths: Sequence[RequestLengths], *, embeds: bool = False
) -> TrafficProfile:
    """Return the load of a trace: `arrivals` in seconds, ascending, and the lengths of each request. The peak
    is the highest rate within a minute, or a tenth of a trace that is shorter than ten."""
    span = max(arrivals[-1] - arrivals[0], 1e-9)
    rate = len(arrivals) / span if len(arrivals) > 1 else 0.0
    bins = max(_LEAST_BINS, int(span / _BIN_S))
    width = span / bins
    counts: dict[int, int] = {}
    for at in arrivals:
        place = min(int((at - arrivals[0]) / width), bins - 1)
        counts[place] = counts.get(place, 0) + 1
    peak = max(counts.values()) / width if counts else rate
    step = max(1, len(lengths) // _MOST_LENGTHS)
    sample = tuple(lengths[::step][:_MOST_LENGTHS])
    return TrafficProfile(name, rate, max(rate, peak), sample, _burstiness(arrivals, width), embeds)


def _burstiness(arrivals: Sequence[float], width: float) -> float:
    """The squared variation of gaps within `width` seconds, between bounds beyond which the formulas of
    queues say little."""
    squares = weights = 0.0
    for gaps in _gaps(arrivals, width):
        mean = fmean(gaps)
        if mean > 0.0:
            squares += sum((gap / mean - 1.0) ** 2 for gap in gaps)
            weights += len(gaps) - 1
    return min(10.0, max(0.1, squares / weights)) if weights else 1.0


def _gaps(arrivals: Sequence[float], width: float) -> Iterable[list[float]]:
    found: list[float] = []
    start = arrivals[0]
    for earlier, later in pairwise(arrivals):
        if earlier - start > width:
            if len(found) > 2:
                yield found
            found, start = [], earlier
        found.append(later - earlier)
    if len(found) > 2:
        yield found
