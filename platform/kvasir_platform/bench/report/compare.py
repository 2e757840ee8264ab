"""Whether one benchmark is faster than another, and how sure that is.

The confidence of a difference comes from a bootstrap (Efron, 1979): both runs' requests are drawn again with
replacement, many times, and the middle 95 % of the differences is the interval. It is that of chance between
requests; what differs from run to run of the same server (another machine, another hour) it cannot know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

RESAMPLES = 1_000
_STATISTICS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda drawn: np.mean(drawn, axis=1),
    "p50": lambda drawn: np.quantile(drawn, 0.5, axis=1),
    "p95": lambda drawn: np.quantile(drawn, 0.95, axis=1),
    "p99": lambda drawn: np.quantile(drawn, 0.99, axis=1),
}
_TIMES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E"))
_RATES = (
    ("requests_per_s", "requests/s"),
    ("output_tokens_per_s", "output tokens/s"),
    ("goodput_per_s", "goodput/s"),
)
_CHUNK = 50
Verdict = Literal["better", "worse", "same", "unknown"]


@dataclass(frozen=True, slots=True)
class BenchDifference:
    """One figure of two runs. `change` is relative: 0.1 is ten percent more. `low` and `high` bound it with a
    confidence of 95 %; None for rates, of which a run has one value only."""

    name: str
    unit: str
    before: float
    after: float
    better: Literal["lower", "higher"]
    low: float | None = None
    high: float | None = None

    @property
    def change(self) -> float:
        """As above; 0 if there was nothing before."""
        return self.after / self.before - 1.0 if self.before else 0.0

    @property
    def verdict(self) -> Verdict:
        """What the interval says."""
        if self.low is None or self.high is None:
            return "unknown"
        if self.low <= 0.0 <= self.high:
            return "same"
        return "better" if (self.high < 0.0) == (self.better == "lower") else "worse"

    def worse_than(self, share: float) -> bool:
        """Whether it is worse by more than this share: with 95 % confidence for times, as measured for
        rates."""
        if self.better == "higher":
            return self.change < -share
        return (self.change if self.low is None else self.low) > share


def differences(before: Mapping[str, Any], after: Mapping[str, Any], seed: int = 1) -> list[BenchDifference]:
    """All figures of two results in JSON. Raises ValueError if one has no requests."""
    rng = np.random.default_rng(seed)
    found = []
    for key, name in _TIMES:
        old, new = (np.asarray(each["samples"].get(key, ()), dtype=float) for each in (before, after))
        if len(old) and len(new):
            found += _times(name, old, new, rng)
    if not found:
        raise ValueError("a run without a request that succeeded has nothing to compare")
    for key, name in _RATES:
        rate, other = (float(each["figures"][key]) for each in (before, after))
        found.append(BenchDifference(name, "", rate, other, "higher"))
    return found


def unlike(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """In what two runs differ beside their results, in words."""
    keys = ("model", "api", "workload", "mode", "slo")
    return [
        f"{key}: {before.get(key)} before, {after.get(key)} after"
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _times(name: str, old: np.ndarray, new: np.ndarray, rng: np.random.Generator) -> list[BenchDifference]:
    changes: dict[str, list[np.ndarray]] = {statistic: [] for statistic in _STATISTICS}
    for _ in range(0, RESAMPLES, _CHUNK):
        drawn = _drawn(old, rng), _drawn(new, rng)
        for statistic, of in _STATISTICS.items():
            changes[statistic].append(of(drawn[1]) / of(drawn[0]) - 1.0)
    return [
        BenchDifference(
            f"{name} {statistic}",
            "s",
            float(of(old[np.newaxis])[0]),
            float(of(new[np.newaxis])[0]),
            "lower",
            *_middle(changes[statistic]),
        )
        for statistic, of in _STATISTICS.items()
    ]


def _drawn(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.asarray(values[rng.integers(0, len(values), (_CHUNK, len(values)))])


def _middle(changes: Sequence[np.ndarray]) -> tuple[float, float]:
    low, high = np.quantile(np.concatenate(changes), (0.025, 0.975))
    return float(low), float(high)
