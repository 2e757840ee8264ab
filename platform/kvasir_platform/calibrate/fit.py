"""Fits the coefficients of an engine to samples: least squares of relative errors, without negative values.

A step takes the longer of two kinds of work, twice (see kvasir.performance.step). Which is the longer
depends on the coefficients, so the fit alternates: it takes the longer ones by the coefficients so far, then
fits what is linear, until nothing changes. Where samples leave a coefficient open, as the share of reading
weights in the fixed time of a step, a weak prior decides: the data sheet's figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvasir.performance.coefficients import DATA_SHEET, NOMINAL, Coefficients
from kvasir.performance.profile import ProfileResidual
from kvasir.performance.step import EngineModel, StepWork, StepWorkTimes
from kvasir_platform.calibrate.samples import BusySample, StepSample, TransferTimes

_FRACTIONS = ("arithmetic", "attention", "bandwidth")
"""Fitted by their inverse: seconds for each second at the nominal rate."""
_SECONDS = ("step_s", "mixed_s", "stream_s", "prompt_s", "request_s")
_PRIOR_WEIGHT = 1e-4
"""Weight of the prior of each coefficient, in samples."""
_PRIOR_SCALE_S = 5e-3
"""What a prior of 0 seconds counts in."""
_ROUNDS = 30
_STARTS = ((1.0,) * len(_FRACTIONS), *itertools.product((0.4, 2.5), repeat=len(_FRACTIONS)))
"""Factors of the prior from which the fit begins: alternating can end at a local optimum."""
_SMALLEST = 1e-3
"""Least and, inverted, greatest fraction of a nominal rate."""

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EngineFit:
    """Fitted coefficients, and how far they are from each kind of sample."""

    coefficients: Coefficients
    residuals: tuple[ProfileResidual, ...]


def fit_engine(
    engine: EngineModel, samples: Sequence[StepSample], *, prior: Coefficients = DATA_SHEET
) -> EngineFit:
    """Return the coefficients with which `engine` explains `samples`. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples")
    nominal = replace(engine, coefficients=NOMINAL)
    rows = [_Row.of(nominal, sample) for sample in samples]
    start = np.array(
        [1 / getattr(prior, name) for name in _FRACTIONS] + [getattr(prior, n) for n in _SECONDS]
    )
    tries = [
        _alternated(rows, start * np.array([*factors, *[1.0] * len(_SECONDS)]), start) for factors in _STARTS
    ]
    best = min(tries, key=lambda found: _loss(rows, found))
    values = {
        name: min(1 / _SMALLEST, 1.0 / max(_SMALLEST, each))
        for name, each in zip(_FRACTIONS, best, strict=False)
    }
    values |= {name: float(each) for name, each in zip(_SECONDS, best[len(_FRACTIONS) :], strict=True)}
    return EngineFit(replace(prior, **values, source="fit"), _residuals(rows, best))


def busy_request_s(engine: EngineModel, samples: Sequence[BusySample], *, waits: bool) -> float:
    """Return what a request takes before its first step while steps run, by an engine with fitted
    coefficients: what its time leaves beside its own step and, if it `waits` for one, half of the step that
    runs when it comes. Not less than on an idle engine; 0 without samples."""
    if not samples:
        return 0.0
    left = []
    for each in samples:
        streams = each.streams if waits else 0
        own = engine.step(StepWork((each.chunk,), streams, each.context)).seconds
        wait = engine.decode(streams, each.context).seconds / 2 if streams else 0.0
        left.append(each.seconds - (own + wait) * (1.0 + engine.coefficients.shared))
    return max(engine.coefficients.request_s, float(np.median(left)))


def fit_line(transfers: Sequence[TransferTimes]) -> tuple[float, float]:
    """Return the fixed seconds of a transfer and those of each byte; zeros without transfers."""
    timed = [each for each in transfers if each.seconds > 0.0]
    if not timed:
        return 0.0, 0.0
    seconds = np.array([each.seconds for each in timed])
    table = np.array([[1.0, float(each.moved_bytes)] for each in timed])
    fixed_s, byte_s = non_negative(table / seconds[:, None], np.ones(len(timed)))
    return float(fixed_s), float(byte_s)


def non_negative(table: Vector, wanted: Vector) -> Vector:
    """Return x >= 0 that minimizes |table x - wanted| (Lawson and Hanson, Solving Least Squares Problems,
    1974, chapter 23). `table` has shape samples x coefficients."""
    scale = np.linalg.norm(table, axis=0)
    scale[scale == 0.0] = 1.0
    scaled = table / scale
    count = scaled.shape[1]
    found, active = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        slope = scaled.T @ (wanted - scaled @ found)
        slope[active] = -np.inf
        if active.all() or slope.max() <= 1e-10:
            break
        active[int(slope.argmax())] = True
        found = _feasible(scaled, wanted, found, active)
    result: Vector = found / scale
    return result


def _feasible(table: Vector, wanted: Vector, found: Vector, active: npt.NDArray[np.bool_]) -> Vector:
    """Solve for the active coefficients, and give up those that would be negative. Changes `active`."""
    while True:
        solved = np.zeros_like(found)
        solved[active] = np.linalg.lstsq(table[:, active], wanted, rcond=None)[0]
        negative = active & (solved <= 0.0)
        if not negative.any():
            return solved
        steps = found[negative] / (found[negative] - solved[negative])
        found = found + float(steps.min()) * (solved - found)
        active &= found > 1e-12
        found = np.where(active, found, 0.0)
        if not active.any():
            return found


@dataclass(frozen=True, slots=True)
class _Row:
    """A sample, with the parts of its steps at nominal rates."""

    sample: StepSample
    steps: tuple[tuple[StepWorkTimes, float], ...]
    fixed: tuple[float, ...]
    links_s: float

    @classmethod
    def of(cls, nominal: EngineModel, sample: StepSample) -> _Row:
        steps = tuple((nominal.parts(work), times) for work, times in sample.steps)
        fixed = (
            sum(times for _, times in sample.steps),
            sum(times for work, times in sample.steps if work.mixed),
            sum(times * work.streams for work, times in sample.steps),
            sum(times * len(work.prompts) for work, times in sample.steps),
            sample.requests,
        )
        links = sum(times * nominal.step(work).communication_s for work, times in sample.steps)
        return cls(sample, steps, fixed, links)

    def features(self, believed: Vector) -> Vector:
        """Return what each coefficient is multiplied by, with the longer kinds of work by `believed`."""
        arithmetic, attention, bandwidth = believed[:3]
        linear = attended = moved = 0.0
        for parts, times in self.steps:
            if parts.linear_s * arithmetic >= parts.weights_s * bandwidth:
                linear += times * parts.linear_s
            else:
                moved += times * parts.weights_s
            if parts.attention_s * attention >= parts.kv_s * bandwidth:
                attended += times * parts.attention_s
            else:
                moved += times * parts.kv_s
        return np.array([linear, attended, moved, *self.fixed])

    def error(self, found: Vector) -> float:
        """Return how far the fit is off, as a fraction of what was measured."""
        return (float(self.features(found) @ found) + self.links_s) / self.sample.seconds - 1.0


def _alternated(rows: Sequence[_Row], start: Vector, prior: Vector) -> Vector:
    """Return the best coefficients that alternating from `start` comes across."""
    found = best = start
    for _ in range(_ROUNDS):
        before, found = found, _fitted(rows, found, prior)
        if _loss(rows, found) < _loss(rows, best):
            best = found
        if np.allclose(found, before, rtol=1e-6, atol=1e-12):
            break
    return best


def _loss(rows: Sequence[_Row], found: Vector) -> float:
    return float(np.mean([row.error(found) ** 2 for row in rows]))


def _fitted(rows: Sequence[_Row], believed: Vector, prior: Vector) -> Vector:
    table = np.array([row.features(believed) / row.sample.seconds for row in rows])
    wanted = np.array([1.0 - row.links_s / row.sample.seconds for row in rows])
    drawn = np.sqrt(_PRIOR_WEIGHT)
    scale = np.where(prior > 0.0, prior, _PRIOR_SCALE_S)
    return non_negative(
        np.vstack([table, drawn * np.diag(1.0 / scale)]),
        np.concatenate([wanted, drawn * prior / scale]),
    )


def _residuals(rows: Sequence[_Row], found: Vector) -> tuple[ProfileResidual, ...]:
    kinds: dict[str, list[float]] = {}
    for row in rows:
        kinds.setdefault(row.sample.kind, []).append(abs(row.error(found)))
    return tuple(ProfileResidual(kind, float(np.mean(errors)), len(errors)) for kind, errors in kinds.items())
