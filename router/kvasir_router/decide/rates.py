"""What work costs on each worker, learned from what workers measure.

Prefill, transfer and decode step each follow `seconds = fixed + per unit * units`. The two numbers are
fitted by least squares in which older measurements weigh exponentially less, drawn towards the prior:
with no measurements it is the prior, with measurements of one size only the line goes through them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import Timings, Usage
from kvasir.ports.routing import LOWER_TIERS, FloatColumn, RateColumns
from kvasir_router.decide.roofline import Rates, rates_of

FORGETTING = 0.97
PRIOR_WEIGHT = 0.25
PREFILL_SCALE_TOKENS = 1024.0
TRANSFER_SCALE_BYTES = float(16 << 20)
STEP_SCALE_STREAMS = 16.0
CHUNK_TOKENS = 2048
"""Prompt tokens that an engine computes in one step, beside the streams that decode (chunked prefill):
the default of vLLM's max_num_batched_tokens on servers."""

LARGEST_STALL = 0.9
"""The part of a stream's decode that may be put down to prompts computed beside it."""

RATE_ROWS = 6 + 2 * LOWER_TIERS
"""Numbers that make up one worker's rates: the fields of RateColumns in order, tiers one by one."""


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
    prior: Rates
    prefill: LinearFit
    step: LinearFit
    transfer: LinearFit

    @classmethod
    def drawn_to(cls, prior: Rates) -> _Fits:
        return cls(
            prior=prior,
            prefill=LinearFit(prior.prefill_fixed_s, prior.prefill_token_s, PREFILL_SCALE_TOKENS),
            step=LinearFit(prior.step_fixed_s, prior.step_stream_s, STEP_SCALE_STREAMS),
            transfer=LinearFit(prior.transfer_fixed_s, prior.transfer_byte_s, TRANSFER_SCALE_BYTES),
        )

    def rates(self) -> Rates:
        return self.prior._replace(
            prefill_fixed_s=self.prefill.fixed_s,
            prefill_token_s=self.prefill.per_unit_s,
            step_fixed_s=self.step.fixed_s,
            step_stream_s=self.step.per_unit_s,
            transfer_fixed_s=self.transfer.fixed_s,
            transfer_byte_s=self.transfer.per_unit_s,
        )


class RateBook:
    """The rates of every worker that is known; bounded by `forget`. `priors(identity)` is where a worker
    begins, by default at the roofline of its hardware."""

    def __init__(self, priors: Callable[[WorkerIdentity], Rates] = rates_of) -> None:
        self._priors = priors
        self._fits: dict[str, _Fits] = {}
        self._rates: dict[str, Rates] = {}

    def join(self, worker_id: str, identity: WorkerIdentity) -> Rates:
        """A worker of which nothing has been measured, under the id of its session."""
        fits = _Fits.drawn_to(self._priors(identity))
        self._fits[worker_id] = fits
        self._rates[worker_id] = fits.prior
        return fits.prior

    def rates(self, worker_id: str) -> Rates:
        """The present estimate for a worker that has joined. Raises KeyError for another."""
        return self._rates[worker_id]

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self._fits.pop(worker_id, None)
        self._rates.pop(worker_id, None)

    def observe(
        self, worker_id: str, usage: Usage, timings: Timings, *, streams: int, beside_tokens: int = 0
    ) -> Rates:
        """Learn from a leg that ended well while `streams` were decoding on its worker, itself included
        if it decoded, and `beside_tokens` of other prompts were computed there during its decode.
        Returns the new estimate. Raises KeyError for a worker that has not joined."""
        fits, known = self._fits[worker_id], self._rates[worker_id]
        computed = usage.prompt_tokens - usage.cached_tokens - usage.transferred_tokens
        if timings.prefill_s > 0.0 and computed > 0:
            beside = streams - (usage.output_tokens > 1)
            fits.prefill.observe(computed, timings.prefill_s / contention(known, beside))
        if timings.transfer_s > 0.0 and usage.transferred_bytes > 0:
            fits.transfer.observe(usage.transferred_bytes, timings.transfer_s)
        if timings.decode_s > 0.0 and usage.output_tokens > 1:
            stalled = min(beside_tokens * known.prefill_token_s, LARGEST_STALL * timings.decode_s)
            fits.step.observe(streams, (timings.decode_s - stalled) / (usage.output_tokens - 1))
        rates = self._rates[worker_id] = fits.rates()
        return rates


def contention(rates: Rates, streams: int) -> float:
    """How many times longer a prompt takes while `streams` decode on the same worker: each chunk of it
    shares its step with one token of every stream."""
    alone = rates.prefill_token_s * CHUNK_TOKENS
    if streams <= 0 or alone <= 0.0:
        return 1.0
    return 1.0 + (rates.step_fixed_s + streams * rates.step_stream_s) / alone


def write_rates(table: FloatColumn, rows: slice, rates: Rates) -> None:
    """Put one worker's rates into some columns of a table of shape RATE_ROWS x places."""
    values = (*rates[:6], *rates.tier_fixed_s, *rates.tier_byte_s)
    for row, value in enumerate(values):
        table[row, rows] = value


def rate_columns(table: FloatColumn) -> RateColumns:
    """A table of shape RATE_ROWS x places as columns, without a copy."""
    tiers = 6 + LOWER_TIERS
    prefill_fixed, prefill_token, step_fixed, step_stream, transfer_fixed, transfer_byte = table[:6]
    return RateColumns(
        prefill_fixed_s=prefill_fixed,
        prefill_token_s=prefill_token,
        step_fixed_s=step_fixed,
        step_stream_s=step_stream,
        transfer_fixed_s=transfer_fixed,
        transfer_byte_s=transfer_byte,
        tier_fixed_s=table[6:tiers].T,
        tier_byte_s=table[tiers:RATE_ROWS].T,
    )
