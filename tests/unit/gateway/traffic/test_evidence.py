"""The evidence that a canary is worse: its bound on false alarms, and how soon it finds a difference."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from kvasir_platform.gateway.traffic.evidence import log_evidence


def exact(worse: int, better: int) -> float:
    """The same as a ratio of integers: twice the integral of p^worse (1-p)^better from 1/2 to 1, by parts."""
    n = worse + better
    total = sum(Fraction(math.comb(n + 1, k), 2 ** (n + 1)) for k in range(worse + 1)) * Fraction(
        math.factorial(worse) * math.factorial(better), math.factorial(n + 1)
    )
    return math.log(total * 2 ** (n + 1))


@pytest.mark.parametrize("worse", [0, 1, 2, 9, 30])
@pytest.mark.parametrize("better", [0, 1, 3, 10, 41])
def test_it_is_the_ratio_of_the_two_likelihoods(worse: int, better: int) -> None:
    assert log_evidence(worse, better) == pytest.approx(exact(worse, better), abs=1e-9)


def test_it_starts_at_nothing_and_one_pair_more_keeps_its_mean() -> None:
    assert log_evidence(0, 0) == 0.0
    for worse, better in [(0, 0), (3, 1), (10, 40), (200, 180)]:
        now = math.exp(log_evidence(worse, better))
        later = [math.exp(log_evidence(worse + 1, better)), math.exp(log_evidence(worse, better + 1))]
        assert sum(later) / 2 == pytest.approx(now)


def test_large_counts_are_finite_and_ordered() -> None:
    assert log_evidence(500_000, 500_000) < 0 < log_evidence(502_500, 497_500)
    assert log_evidence(1_000_000, 0) == pytest.approx(1_000_000 * math.log(2), rel=0.01)


def test_an_equal_canary_reaches_the_threshold_as_rarely_as_promised() -> None:
    alpha, below, alarms = 0.05, {0: 1.0}, 0.0
    for pairs in range(1, 301):
        after: dict[int, float] = {}
        for worse, mass in below.items():
            for more in (0, 1):
                after[worse + more] = after.get(worse + more, 0.0) + mass / 2
        over = {w for w in after if log_evidence(w, pairs - w) >= math.log(1 / alpha)}
        alarms += sum(after.pop(worse) for worse in over)
        below = after
    assert 0.01 < alarms <= alpha


def test_nine_failures_in_a_row_are_enough() -> None:
    threshold = math.log(4 / 0.05)
    assert next(n for n in range(20) if log_evidence(n, 0) >= threshold) == 9
