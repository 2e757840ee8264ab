"""What a benchmark leaves: figures, samples to compare it by, and its course. As JSON: `kvasir-bench/1`."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvasir.core.errors import ConfigError
from kvasir.core.quantiles import quantile
from kvasir_platform.bench.figures import BenchFigures
from kvasir_platform.bench.ramp import BenchRamp
from kvasir_platform.bench.slo import BenchSlo
from kvasir_platform.bench.tally import BenchTally
from kvasir_platform.reports.files import read_json

FORMAT = "kvasir-bench/1"
MOST_SAMPLES = 5_000
_MOST_INTERVALS = 120
_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class BenchInterval:
    """One part of a run from `at_s` on: requests that began in it, their TTFT, tokens per second of the
    answers that ended in it, and the requests that ran at its end."""

    at_s: float
    begun: int
    ttft_p50_s: float
    ttft_p95_s: float
    output_tokens_per_s: float
    running: int


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One benchmark. `samples` are values in seconds of requests that succeeded: `ttft`, `tpot`, `e2e`.
    `notes` say what limits the figures. With `ramp`, figures are those at the knee."""

    url: str
    model: str
    api: str
    workload: str
    mode: str
    began: str
    slo: BenchSlo
    figures: BenchFigures
    samples: dict[str, list[float]] = field(default_factory=dict)
    course: tuple[BenchInterval, ...] = ()
    notes: tuple[str, ...] = ()
    ramp: BenchRamp | None = None
    interrupted: bool = False


def samples_of(tally: BenchTally) -> dict[str, list[float]]:
    """At most MOST_SAMPLES values of each kind, spread evenly over the run."""
    e2e = [end - start for start, end in zip(tally.started, tally.ended, strict=True)]
    found = {"ttft": list(tally.ttft), "tpot": [x for x in tally.tpot if not math.isnan(x)], "e2e": e2e}
    return {
        name: [round(each, 7) for each in values[:: max(1, math.ceil(len(values) / MOST_SAMPLES))]]
        for name, values in found.items()
    }


def course_of(tally: BenchTally) -> tuple[BenchInterval, ...]:
    """The course of a run, in at most _MOST_INTERVALS parts of a second or more."""
    if not tally.succeeded:
        return ()
    elapsed = tally.last_end - tally.first_start
    width = max(1.0, elapsed / _MOST_INTERVALS)
    count = max(1, math.ceil(elapsed / width))
    begun: list[list[float]] = [[] for _ in range(count)]
    tokens = [0] * count
    for start, end, ttft, output in zip(
        tally.started, tally.ended, tally.ttft, tally.output_tokens, strict=True
    ):
        begun[_place(start - tally.first_start, width, count)].append(ttft)
        tokens[_place(end - tally.first_start, width, count)] += output
    starts, ends = sorted(tally.started), sorted(tally.ended)
    return tuple(
        BenchInterval(
            at_s=number * width,
            begun=len(values),
            ttft_p50_s=quantile(values, 0.5) if values else 0.0,
            ttft_p95_s=quantile(values, 0.95) if values else 0.0,
            output_tokens_per_s=tokens[number] / width,
            running=_until(starts, tally, number, width) - _until(ends, tally, number, width),
        )
        for number, values in enumerate(begun)
    )


def as_json(result: BenchResult) -> dict[str, Any]:
    """The result as JSON values; a time without a limit is null."""
    shown: dict[str, Any] = {"format": FORMAT} | asdict(result)
    if result.ramp is not None:
        shown["ramp"] |= {"knee": result.ramp.knee, "broken": result.ramp.broken}
    shown["figures"]["client_was_late"] = result.figures.client_was_late
    slo = shown["slo"]
    shown["slo"] = {key: None if value == math.inf else value for key, value in slo.items()}
    return shown


def read_result(path: Path) -> dict[str, Any]:
    """The JSON of a result. Raises ConfigError that says what is wrong with the file."""
    value = read_json(path, _FILE_BYTES, str(path))
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ConfigError(f"{path}: no benchmark; name a file that `kvasir bench --json FILE` wrote")
    return value


def _place(at_s: float, width: float, count: int) -> int:
    return min(int(at_s / width), count - 1)


def _until(times: Sequence[float], tally: BenchTally, number: int, width: float) -> int:
    """How many of the times are before the end of an interval."""
    return bisect_right(times, tally.first_start + (number + 1) * width)
