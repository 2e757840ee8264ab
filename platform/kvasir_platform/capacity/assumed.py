"""The coefficients that a plan assumes, with the slowest and the fastest that are likely.

Those of the data sheet are fractions that engines were seen to reach on other models and hardware; the bounds
are those that the publications named at `Coefficients` report. A profile was measured, and its bounds are the
errors of its fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvasir.performance.coefficients import DATA_SHEET, Coefficients

_SLOWEST = replace(
    DATA_SHEET, arithmetic=0.4, attention=0.25, bandwidth=0.6, link=0.5,
    step_s=0.003, stream_s=3e-5, request_s=0.01, collective_s=2e-5,
)  # fmt: skip
_FASTEST = replace(
    DATA_SHEET, arithmetic=0.65, attention=0.5, bandwidth=0.8, link=0.85,
    step_s=0.001, stream_s=1e-5, request_s=0.003, collective_s=5e-6,
)  # fmt: skip
_LEAST_ERROR = 0.05
"""Of a profile: loads differ from those that it was measured with."""


@dataclass(frozen=True, slots=True)
class AssumedCoefficients:
    """What plans are sized with, and the bounds that error bars show."""

    value: Coefficients
    slow: Coefficients
    fast: Coefficients


FROM_DATA_SHEET = AssumedCoefficients(DATA_SHEET, _SLOWEST, _FASTEST)


def measured(coefficients: Coefficients, error: float) -> AssumedCoefficients:
    """Return measured coefficients, whose predictions are off by the fraction `error`."""
    part = 1.0 + max(_LEAST_ERROR, error)
    return AssumedCoefficients(coefficients, _slowed(coefficients, part), _slowed(coefficients, 1.0 / part))


def cautious(assumed: AssumedCoefficients) -> AssumedCoefficients:
    """Return the same bounds, of which plans are sized with the slow one."""
    source = f"{assumed.value.source}, slowest"
    return replace(assumed, value=replace(assumed.slow, source=source))


def _slowed(found: Coefficients, factor: float) -> Coefficients:
    return replace(
        found,
        arithmetic=found.arithmetic / factor,
        attention=found.attention / factor,
        bandwidth=found.bandwidth / factor,
        link=found.link / factor,
        step_s=found.step_s * factor,
        stream_s=found.stream_s * factor,
        prompt_s=found.prompt_s * factor,
        mixed_s=found.mixed_s * factor,
        request_s=found.request_s * factor,
        collective_s=found.collective_s * factor,
    )
