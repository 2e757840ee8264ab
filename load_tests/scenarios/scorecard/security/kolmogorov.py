"""The exact two-sample Kolmogorov–Smirnov test: whether two samples have the same distribution.

Under the null hypothesis all orders of the pooled sample are equally likely. Each order is a path through a
lattice; the paths whose distance stays below the observed one are counted with integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import comb


@dataclass(frozen=True, slots=True)
class Verdict:
    """`distance` is the maximum distance between the two empirical distributions, from 0 to 1; `p` is the
    probability of a distance at least as large if both samples have one continuous distribution."""

    distance: float
    p: float


def compare(one: Sequence[float], other: Sequence[float]) -> Verdict:
    """Test two samples with at least one value each. Equal values make `p` larger than it is, never smaller.
    Takes `len(one) * len(other)` steps. Raise ValueError for an empty sample."""
    n, m = len(one), len(other)
    if not n or not m:
        raise ValueError("a sample without values")
    furthest = _furthest(one, other)
    inside = _paths(n, m, furthest)
    return Verdict(furthest / (n * m), float(1 - Fraction(inside, comb(n + m, n))))


def _furthest(one: Sequence[float], other: Sequence[float]) -> int:
    """The maximum distance of the distributions, multiplied by both sizes."""
    n, m = len(one), len(other)
    steps = sorted([(value, m) for value in one] + [(value, -n) for value in other])
    height = furthest = 0
    for (value, step), (following, _) in pairwise([*steps, (float("inf"), 0)]):
        height += step
        # Compare only after all equal values are counted.
        if following != value:
            furthest = max(furthest, abs(height))
    return furthest


def _paths(n: int, m: int, furthest: int) -> int:
    """Count the paths from corner to corner of an n x m lattice that stay closer to the diagonal than
    `furthest`."""
    row = [1 if j * n < furthest else 0 for j in range(m + 1)]
    for j in range(1, m + 1):
        row[j] = row[j] and row[j - 1]
    for i in range(1, n + 1):
        left = 0
        for j in range(m + 1):
            left = row[j] + left if abs(i * m - j * n) < furthest else 0
            row[j] = left
    return row[m]
