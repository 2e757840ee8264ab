"""Fits of learned rates: a line through measurements with decaying weights."""

from __future__ import annotations

FORGETTING = 0.97
PRIOR_WEIGHT = 0.25

Line = tuple[float, float]
"""Seconds without a unit, and seconds per unit."""


def differ(one: Line, other: Line, scale: float, part: float) -> bool:
    """Return whether two lines differ by more than this fraction of the latter, for few or for many units."""
    for units in (scale / 8, scale):
        seconds = other[0] + units * other[1]
        most = part * seconds
        if not -most <= one[0] + units * one[1] - seconds <= most:
            return True
    return False


class LinearFit:
    """Exponentially weighted least squares of two non-negative numbers. Where the best line would begin below
    zero, as costs that grow with the square have it, it is the line from zero with the right total: one of
    least squares would follow the largest measurements, and say too much of all others.

    `scale` is a typical number of units, which makes the two numbers comparable, both in seconds. The prior
    counts as much as `weight` measurements. `line` is the current estimate, of `fixed_s` and `per_unit_s`.
    """

    line: Line

    def __init__(self, fixed_s: float, per_unit_s: float, scale: float, weight: float = PRIOR_WEIGHT) -> None:
        self._scale = scale
        self._weight = weight
        self._n = self._sx = self._sxx = self._sy = self._sxy = 0.0
        self.draw_to(fixed_s, per_unit_s)

    def draw_to(self, fixed_s: float, per_unit_s: float) -> None:
        """Set another prior."""
        self._prior = (fixed_s, per_unit_s * self._scale)
        if self._n:
            self._solve()
        else:
            self.fixed_s, self.per_unit_s = self.line = (fixed_s, per_unit_s)

    @property
    def used(self) -> bool:
        """Whether there is any measurement."""
        return self._n > 0.0

    @property
    def measured(self) -> bool:
        """Whether measurements count more than the prior."""
        return self._n > self._weight

    def fade(self, factor: float) -> None:
        """Let the measurements count less, by this factor."""
        self._n *= factor
        self._sx *= factor
        self._sxx *= factor
        self._sy *= factor
        self._sxy *= factor

    def observe(self, units: float, seconds: float, drawn_to: LinearFit | None = None) -> None:
        """Add a measurement, non-negative in both numbers. With `drawn_to`, set that as the prior first."""
        if drawn_to is not None:
            self._prior = (drawn_to.fixed_s, drawn_to.per_unit_s * self._scale)
        x = units / self._scale
        self._n = self._n * FORGETTING + 1.0
        self._sx = self._sx * FORGETTING + x
        self._sxx = self._sxx * FORGETTING + x * x
        self._sy = self._sy * FORGETTING + seconds
        self._sxy = self._sxy * FORGETTING + x * seconds
        self._solve()

    def _solve(self) -> None:
        fixed_prior, slope_prior = self._prior
        weight = self._weight
        a, b, c = self._n + weight, self._sx, self._sxx + weight
        p, q = self._sy + weight * fixed_prior, self._sxy + weight * slope_prior
        # The weights on the diagonal keep it positive definite.
        determinant = a * c - b * b
        fixed, slope = (p * c - b * q) / determinant, (a * q - b * p) / determinant
        if fixed < 0.0:
            fixed, slope = 0.0, max(0.0, (self._sy * (self._sxx / b) + weight * slope_prior) / c)
        elif slope < 0.0:
            fixed, slope = max(0.0, p / a), 0.0
        self.fixed_s, self.per_unit_s = self.line = (fixed, slope / self._scale)
