"""What a generated workload is like, and the presets of it.

A preset is a starting point with round figures, made to show one pattern of traffic; its parameters are there
to be replaced by what is known of one's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Literal, get_args

from kvasir_platform.workload.arrivals import (
    ArrivalProcess,
    ConstantArrivals,
    DiurnalArrivals,
    GammaArrivals,
    OnOffArrivals,
    PoissonArrivals,
    RampArrivals,
)
from kvasir_platform.workload.distributions import FixedLength, LengthDistribution, LogNormalLength
from kvasir_platform.workload.requests import MOST_REQUESTS

ArrivalKind = Literal["constant", "poisson", "gamma", "burst", "diurnal", "ramp"]
ARRIVAL_KINDS: tuple[str, ...] = get_args(ArrivalKind)


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """Rates per second, times in seconds, lengths in tokens. Raises ValueError, naming the field, for values
    that fit no workload.

    A request begins with one of `prefixes` shared prefixes of `prefix` tokens, number k of them with a weight
    of 1/(k + 1)^zipf, and `prompt` tokens of its own. A conversation has `turns` requests on average
    (geometric), each at least `think` after the one before on average (exponential), and each begins with all
    that was said before; it ends before it is longer than `context`. The rate is that of requests.
    """

    rate: float = 2.0
    duration: float = 120.0
    requests: int = MOST_REQUESTS
    arrivals: ArrivalKind = "poisson"
    cv: float = 2.0
    peak: float = 4.0
    period: float = 60.0
    share: float = 0.1
    last: float = 8.0
    prompt: LengthDistribution = FixedLength(512)
    output: LengthDistribution = FixedLength(128)
    prefixes: int = 0
    prefix: int = 0
    zipf: float = 1.0
    turns: float = 1.0
    think: float = 15.0
    context: int = 32_768
    tenants: int = 1
    block: int = 16
    embeds: bool = False

    def __post_init__(self) -> None:
        for name, least, most in _BOUNDS:
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name}: from {least:,} to {most:,}")
        for problem in self._contradictions():
            raise ValueError(problem)

    def _contradictions(self) -> Iterator[str]:
        if self.arrivals not in ARRIVAL_KINDS:
            yield f"arrivals: one of {', '.join(ARRIVAL_KINDS)}"
        if self.arrivals == "burst" and self.peak * self.share > 1.0:
            yield "peak: times share at most 1, or the bursts alone are above the rate"
        if self.arrivals == "diurnal" and not 1.0 <= self.peak <= 2.0:
            yield "peak: from 1 to 2 for diurnal arrivals, whose wave is symmetric"
        if self.context < self.prefix + 2:
            yield "context: at least two tokens more than prefix"
        expected = self.mean_rate * self.duration
        if min(expected, self.requests) > MOST_REQUESTS / 2:
            yield (
                f"duration: about {expected:,.0f} requests at this rate; at most {MOST_REQUESTS // 2:,}, or "
                "limit requests"
            )

    @property
    def mean_rate(self) -> float:
        """Requests per second over the whole duration."""
        if self.arrivals != "ramp":
            return self.rate
        return (self.rate + self.last) / 2

    def process(self) -> ArrivalProcess:
        """The process that draws the arrivals."""
        made: Mapping[str, ArrivalProcess] = {
            "constant": ConstantArrivals(self.rate),
            "poisson": PoissonArrivals(self.rate),
            "gamma": GammaArrivals(self.rate, self.cv),
            "burst": OnOffArrivals(self.rate, self.peak, self.period, self.share),
            "diurnal": DiurnalArrivals(self.rate, self.peak, self.period),
            "ramp": RampArrivals(self.rate, self.last, self.duration),
        }
        return made[self.arrivals]


_BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("rate", 1e-6, 1e6),
    ("duration", 1e-3, 1e8),
    ("requests", 1, MOST_REQUESTS),
    ("cv", 0.01, 100),
    ("peak", 0.01, 1_000),
    ("period", 1e-3, 1e8),
    ("share", 1e-4, 0.9999),
    ("last", 1e-6, 1e6),
    ("prefixes", 0, 1_000_000),
    ("prefix", 0, 10_000_000),
    ("zipf", 0, 10),
    ("turns", 1, 10_000),
    ("think", 0, 1e8),
    ("context", 2, 20_000_000),
    ("tenants", 1, 1_000_000),
    ("block", 1, 65_536),
)


@dataclass(frozen=True, slots=True)
class Preset:
    """A shape with a name, and what it shows."""

    shows: str
    shape: WorkloadShape


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "synthetic": Preset("prompts that share nothing, all of one length", WorkloadShape()),
        "chat": Preset(
            "conversations behind a few system prompts; each turn repeats what was said before",
            WorkloadShape(
                prompt=LogNormalLength(60, 300),
                output=LogNormalLength(150, 500),
                prefixes=3,
                prefix=400,
                turns=5.0,
                context=8_192,
            ),
        ),
        "rag": Preset(
            "short questions about documents, of which a few are asked about most",
            WorkloadShape(
                prompt=LogNormalLength(40, 120),
                output=LogNormalLength(150, 400),
                prefixes=500,
                prefix=2_048,
            ),
        ),
        "agents": Preset(
            "many quick turns behind long descriptions of tools, with short outputs",
            WorkloadShape(
                rate=4.0,
                prompt=LogNormalLength(200, 1_200),
                output=LogNormalLength(80, 300),
                prefixes=4,
                prefix=2_500,
                turns=10.0,
                think=1.0,
            ),
        ),
        "embeddings": Preset(
            "texts to embed, without output tokens",
            WorkloadShape(rate=20.0, prompt=LogNormalLength(200, 500), embeds=True),
        ),
        "burst": Preset(
            "a burst of eight times the rate for 6 s of every minute",
            WorkloadShape(
                duration=300.0,
                arrivals="burst",
                peak=8.0,
                prompt=LogNormalLength(500, 2_000),
                output=LogNormalLength(150, 500),
            ),
        ),
        "diurnal": Preset(
            "a day whose evening has 1.8 times the mean rate, and whose night nearly none",
            WorkloadShape(
                rate=1.0,
                duration=86_400.0,
                arrivals="diurnal",
                peak=1.8,
                period=86_400.0,
                prompt=LogNormalLength(500, 2_000),
                output=LogNormalLength(150, 500),
            ),
        ),
    }
)
FIELDS: frozenset[str] = frozenset(each.name for each in fields(WorkloadShape)) - {"embeds"}


def reshaped(shape: WorkloadShape, **values: object) -> WorkloadShape:
    """The shape with some fields replaced. Raises ValueError as the shape does."""
    return replace(shape, **values)  # type: ignore[arg-type]
