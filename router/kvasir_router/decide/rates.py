"""What work costs on each worker, learned from what workers measure.

Prefill, transfer and decode step each follow `seconds = fixed + per unit * units`. The two numbers are
fitted by least squares in which older measurements weigh exponentially less, drawn towards the prior:
with no measurements it is the prior, with measurements of one size only the line goes through them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.core.requests import Timings, Usage
from kvasir.ports.routing import Rates

FORGETTING = 0.97
PRIOR_WEIGHT = 0.25
PREFILL_SCALE_TOKENS = 1024.0
TRANSFER_SCALE_BYTES = float(16 << 20)
STEP_SCALE_STREAMS = 16.0


class LinearFit:
    """Exponentially weighted least squares of two non-negative numbers.

    `scale` is a typical number of units: it makes the two numbers comparable, both in seconds.
    """

    def __init__(self, fixed_s: float, per_unit_s: float, scale: float) -> None:
        self._scale = scale
        self._prior = (fixed_s, per_unit_s * scale)
        self._n = self._sx = self._sxx = self._sy = self._sxy = 0.0
        self.fixed_s = fixed_s
        self.per_unit_s = per_unit_s

    def observe(self, units: float, seconds: float) -> None:
        """One measurement. Both are non-negative."""
        x = units / self._scale
        self._n = self._n * FORGETTING + 1.0
        self._sx = self._sx * FORGETTING + x
        self._sxx = self._sxx * FORGETTING + x * x
        self._sy = self._sy * FORGETTING + seconds
        self._sxy = self._sxy * FORGETTING + x * seconds
        self._solve()

    def _solve(self) -> None:
        fixed_prior, slope_prior = self._prior
        a, b, c = self._n + PRIOR_WEIGHT, self._sx, self._sxx + PRIOR_WEIGHT
        p, q = self._sy + PRIOR_WEIGHT * fixed_prior, self._sxy + PRIOR_WEIGHT * slope_prior
        # The weights on the diagonal keep it positive definite.
        determinant = a * c - b * b
        fixed, slope = (p * c - b * q) / determinant, (a * q - b * p) / determinant
        if fixed < 0.0:
            fixed, slope = 0.0, max(0.0, q / c)
        elif slope < 0.0:
            fixed, slope = max(0.0, p / a), 0.0
        self.fixed_s, self.per_unit_s = fixed, slope / self._scale


@dataclass(slots=True)
class _Fits:
    prefill: LinearFit
    step: LinearFit
    transfer: LinearFit


class RateBook:
    """The rates of every worker that is known; bounded by `forget`."""

    def __init__(self, priors: Rates) -> None:
        self._priors = priors
        self._fits: dict[str, _Fits] = {}
        self._rates: dict[str, Rates] = {}

    def rates(self, worker_id: str) -> Rates:
        """The present estimate, or the priors."""
        return self._rates.get(worker_id, self._priors)

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self._fits.pop(worker_id, None)
        self._rates.pop(worker_id, None)

    def observe(self, worker_id: str, usage: Usage, timings: Timings, streams: int) -> None:
        """Learn from a leg that ended well while `streams` were running on its worker."""
        fits = self._fits.setdefault(worker_id, self._new())
        computed = usage.prompt_tokens - usage.cached_tokens - usage.transferred_tokens
        if timings.prefill_s > 0.0 and computed > 0:
            fits.prefill.observe(computed, timings.prefill_s)
        if timings.transfer_s > 0.0 and usage.transferred_bytes > 0:
            fits.transfer.observe(usage.transferred_bytes, timings.transfer_s)
        if timings.decode_s > 0.0 and usage.output_tokens > 1:
            fits.step.observe(streams, timings.decode_s / (usage.output_tokens - 1))
        self._rates[worker_id] = Rates(
            prefill_fixed_s=fits.prefill.fixed_s,
            prefill_token_s=fits.prefill.per_unit_s,
            step_fixed_s=fits.step.fixed_s,
            step_stream_s=fits.step.per_unit_s,
            transfer_fixed_s=fits.transfer.fixed_s,
            transfer_byte_s=fits.transfer.per_unit_s,
        )

    def _new(self) -> _Fits:
        p = self._priors
        return _Fits(
            prefill=LinearFit(p.prefill_fixed_s, p.prefill_token_s, PREFILL_SCALE_TOKENS),
            step=LinearFit(p.step_fixed_s, p.step_stream_s, STEP_SCALE_STREAMS),
            transfer=LinearFit(p.transfer_fixed_s, p.transfer_byte_s, TRANSFER_SCALE_BYTES),
        )
