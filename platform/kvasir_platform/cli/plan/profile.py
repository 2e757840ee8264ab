"""Puts what a profile measured in the place of data-sheet coefficients, on the hardware it was made on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from kvasir.core.errors import ConfigError
from kvasir.hardware.gpus import gpu_of_device
from kvasir.performance.profile import CalibratedProfile, EngineProfile
from kvasir_platform.calibrate.files import read_profile
from kvasir_platform.capacity.assumed import AssumedCoefficients, measured
from kvasir_platform.capacity.engines import CPU, HardwareChoice, MeasuredTransfer, measured_cpu
from kvasir_platform.capacity.models import PlannedModel


def with_profile(
    hardware: Sequence[HardwareChoice], path: Path, model: PlannedModel
) -> tuple[HardwareChoice, ...]:
    """Return `hardware` with what the profile in `path` measured on it. Raises ConfigError if the profile
    cannot be read, or was made on other hardware."""
    profile = read_profile(path)
    found = {
        each.name: engine
        for each in hardware
        if (engine := _engine_on(profile, each.name, model)) is not None
    }
    if not found:
        made = ", ".join(sorted({_name(engine) for engine in profile.engines})) or "nothing"
        raise ConfigError(f"--profile {path} was made on {made}; choose that hardware, or leave it out")
    transfer = None
    if profile.transfer_byte_s:
        transfer = MeasuredTransfer(profile.transfer_fixed_s, profile.transfer_byte_s)
    return tuple(
        replace(_measured(each, _assumed(profile, found[each.name])), transfer=transfer)
        if each.name in found
        else each
        for each in hardware
    )


def _name(engine: EngineProfile) -> str:
    gpu = gpu_of_device(engine.device)
    return CPU if gpu is None else gpu.name


def _engine_on(profile: CalibratedProfile, name: str, model: PlannedModel) -> EngineProfile | None:
    """Return the engine on such hardware whose model is nearest in size."""
    alike = [engine for engine in profile.engines if _name(engine) == name]
    return min(alike, key=lambda each: abs(each.parameters - model.work.parameters), default=None)


def _assumed(profile: CalibratedProfile, engine: EngineProfile) -> AssumedCoefficients:
    errors = [residual.error for residual in engine.residuals]
    return measured(profile.coefficients_of(engine), fmean(errors) if errors else 0.0)


def _measured(hardware: HardwareChoice, assumed: AssumedCoefficients) -> HardwareChoice:
    if hardware.offered is None:
        return measured_cpu(hardware.count, assumed)
    return replace(hardware, assumed=assumed)
