"""Engines with the coefficients of a profile, ready to be played or planned with."""

from __future__ import annotations

from dataclasses import replace

from kvasir.performance.batching import EnginesApart
from kvasir.performance.profile import CalibratedProfile
from kvasir.performance.step import EngineModel


def with_profile(engine: EngineModel, profile: CalibratedProfile, pool: str) -> EngineModel:
    """Return `engine` with what the profile measured of that pool. Raises KeyError for a pool that it
    does not have."""
    for each in profile.engines:
        if each.pool == pool:
            return replace(engine, coefficients=profile.coefficients_of(each))
    raise KeyError(pool)


def apart_with_profile(
    prefill: EngineModel, decode: EngineModel, profile: CalibratedProfile, *, together: bool
) -> EnginesApart:
    """Return engines, with their profile's coefficients already, and the transfer between them as measured.
    `together`: they share a device."""
    return EnginesApart(prefill, decode, profile.transfer_fixed_s, profile.transfer_byte_s, together)
