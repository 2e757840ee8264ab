"""Faults as a command line names them: `crash@60:0:30`, `slow@20:1`, `drain@90`."""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.core.errors import ConfigError
from kvasir_platform.sim.server.setting import FleetFault, FleetFaultKind

MOST_FAULTS = 1000
_FORM = "KIND@SECONDS[:WORKER[:LASTS[:FACTOR]]] with KIND crash, slow or drain"


def read_faults(texts: Sequence[str]) -> tuple[FleetFault, ...]:
    """Return the faults in the order of their times. Raises ConfigError."""
    faults = [_fault(part) for text in texts for part in text.split(",")]
    if len(faults) > MOST_FAULTS:
        raise ConfigError(f"--faults: {len(faults)} are more than {MOST_FAULTS}")
    return tuple(sorted(faults, key=lambda each: each.at_s))


def _fault(text: str) -> FleetFault:
    kind, at, rest = text.partition("@")
    if not at or kind not in tuple(FleetFaultKind):
        raise ConfigError(f"--faults {text}: {_FORM}")
    try:
        seconds, *more = rest.split(":")
        values = [float(each) for each in more]
        worker = int(values[0]) if values else 0
        lasts_s = values[1] if len(values) > 1 else 60.0
        factor = values[2] if len(values) > 2 else 3.0
        found = FleetFault(float(seconds), FleetFaultKind(kind), worker, lasts_s, factor)
    except ValueError as error:
        raise ConfigError(f"--faults {text}: {_FORM}") from error
    if len(values) > 3 or min(found.at_s, worker, lasts_s) < 0 or factor < 0.1:
        raise ConfigError(f"--faults {text}: {_FORM}, numbers from 0 on and FACTOR from 0.1 on")
    return found
