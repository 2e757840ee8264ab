"""A calibrated profile: the coefficients of engines as measured on their hardware, in a versioned JSON file.

`kvasir calibrate` writes it. Where its hardware and model match, it takes the place of data-sheet figures.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from kvasir.core.errors import ConfigError
from kvasir.core.identity import WorkerIdentity
from kvasir.performance.coefficients import DATA_SHEET, Coefficients

FORMAT = "kvasir-profile/1"


class ProfileResidual(msgspec.Struct, frozen=True):
    """How far the fit is from one kind of measurement: the mean absolute error as a fraction, and the number
    of measurements."""

    kind: str
    error: float
    samples: int


class EngineProfile(msgspec.Struct, frozen=True):
    """The engines of one pool: what they ran on, and their coefficients. `device` is the driver's name;
    `parameters` and `model_bytes` are the model's. `coefficients` are by the names of
    kvasir.performance.coefficients.Coefficients."""

    pool: str
    role: str
    device: str
    devices: int
    parameters: int
    model_bytes: int
    max_num_batched_tokens: int
    max_num_seqs: int
    coefficients: dict[str, float]
    residuals: tuple[ProfileResidual, ...] = ()


class CalibratedProfile(msgspec.Struct, frozen=True):
    """The engines of one model of a deployment, and the transfer between them: fixed seconds and seconds of a
    byte, 0 without transfers. `versions` are those of Kvasir, the engine and torch; `measured` is the date in
    ISO 8601."""

    format: str
    model: str
    measured: str
    versions: dict[str, str]
    engines: tuple[EngineProfile, ...]
    transfer_fixed_s: float = 0.0
    transfer_byte_s: float = 0.0

    def engine_for(
        self, *, device: str, devices: int, parameters: int, model_bytes: int, role: str
    ) -> EngineProfile | None:
        """Return the measured engine of this model, as stored, on this hardware, that of the same role if
        there are several; None if there is none."""
        wanted = (device, devices, parameters, model_bytes)
        alike = [
            each
            for each in self.engines
            if (each.device, each.devices, each.parameters, each.model_bytes) == wanted
        ]
        return next((each for each in alike if each.role == role), alike[0] if alike else None)

    def coefficients_of(self, engine: EngineProfile) -> Coefficients:
        """Return the coefficients of one of its engines."""
        return replace(DATA_SHEET, **engine.coefficients, source=f"profile of {self.measured}")

    def for_worker(self, identity: WorkerIdentity) -> Coefficients | None:
        """Return the coefficients measured for such a worker, None if its model or hardware is another."""
        hardware = identity.hardware
        found = self.engine_for(
            device=hardware.device,
            devices=hardware.devices,
            parameters=identity.model_parameters,
            model_bytes=identity.model_bytes,
            role=identity.role.value,
        )
        return None if found is None else self.coefficients_of(found)


def encode_profile(profile: CalibratedProfile) -> bytes:
    """Return the profile's file."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def decode_profile(content: bytes, name: str) -> CalibratedProfile:
    """Return the profile in a file's content. Raises ConfigError, which calls the file `name`."""
    try:
        profile = msgspec.json.decode(content, type=CalibratedProfile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} is no profile: {error}; make one with `kvasir calibrate`") from error
    if profile.format != FORMAT:
        raise ConfigError(f"{name} has the format {profile.format}, and this version reads {FORMAT}")
    names = set(Coefficients.__slots__) - {"source"}
    for engine in profile.engines:
        if unknown := sorted(set(engine.coefficients) - names):
            raise ConfigError(f"{name} has unknown coefficients: {', '.join(unknown)}")
        if bad := [key for key, value in engine.coefficients.items() if not 0 <= value < float("inf")]:
            raise ConfigError(f"{name}: {bad[0]} of pool {engine.pool} is no number of 0 or more")
        if any(engine.coefficients.get(key, 1.0) == 0.0 for key in _DIVISORS):
            raise ConfigError(f"{name}: {', '.join(_DIVISORS)} of pool {engine.pool} are above 0")
    return profile


_DIVISORS = ("arithmetic", "attention", "bandwidth", "link")
