"""How a command line names a workload: `chat:rate=4,duration=300`, or a file as `trace.jsonl:speed=2`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvasir.core.errors import ConfigError
from kvasir_platform.workload.distributions import FixedLength, LengthDistribution, LogNormalLength
from kvasir_platform.workload.shapes import ARRIVAL_KINDS, PRESETS, WorkloadShape, reshaped

_MOST_LENGTH = 10_000_000


@dataclass(frozen=True, slots=True)
class GeneratedSource:
    """A workload to generate; `lengths` is a file to sample lengths of own prompts and outputs from."""

    name: str
    shape: WorkloadShape
    lengths: Path | None = None


@dataclass(frozen=True, slots=True)
class FileSource:
    """A workload in a file: what arrives in `duration_s` seconds from `start_s` on, at `speed` times its
    pace, at most `requests`."""

    path: Path
    speed: float = 1.0
    start_s: float = 0.0
    duration_s: float = float("inf")
    requests: int | None = None


def parse_workload(text: str) -> GeneratedSource | FileSource:
    """Parse what a command line says. Raises ConfigError that names what is wrong, and what there is."""
    name, _, rest = text.partition(":")
    if name in PRESETS:
        return _generated(name, _values(text, rest, SHAPE_PARAMETERS))
    if "." in name or "/" in name:
        values = _values(text, rest, FILE_PARAMETERS)
        return FileSource(
            Path(name),
            values.get("speed", 1.0),
            values.get("start", 0.0),
            values.get("duration", float("inf")),
            values.get("requests"),
        )
    raise ConfigError(
        f"workload {text}: {name or 'nothing'} is no preset ({', '.join(PRESETS)}), and no file: a file has "
        f"a / or a . in its name"
    )


def _generated(name: str, values: dict[str, Any]) -> GeneratedSource:
    lengths = values.pop("lengths", None)
    try:
        return GeneratedSource(name, reshaped(PRESETS[name].shape, **values), lengths)
    except ValueError as error:
        raise ConfigError(f"workload {name}: {error}") from error


def _values(text: str, rest: str, known: Mapping[str, Parameter]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in rest.split(",") if rest else ():
        key, equals, value = each.partition("=")
        if not equals:
            raise ConfigError(f"workload {text}: {each!r} is not of the form key=value")
        if key not in known:
            raise ConfigError(f"workload {text}: no parameter {key!r}; there are {', '.join(known)}")
        if key in found:
            raise ConfigError(f"workload {text}: {key} is given twice")
        try:
            found[key] = known[key].parse(value)
        except ValueError:
            raise ConfigError(f"workload {text}: {key}={value}: {key} is {known[key].meaning}") from None
    return found


def _number(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value == 0.0:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _length(text: str) -> LengthDistribution:
    median, slash, p95 = text.partition("/")
    if not 1 <= _count(median) <= _MOST_LENGTH:
        raise ValueError(text)
    if not slash or p95 == median:
        return FixedLength(int(median))
    if not int(median) < _count(p95) <= _MOST_LENGTH:
        raise ValueError(text)
    return LogNormalLength(int(median), int(p95))


def _kind(text: str) -> str:
    if text not in ARRIVAL_KINDS:
        raise ValueError(text)
    return text


@dataclass(frozen=True, slots=True)
class Parameter:
    """How the value of a parameter is read, and what it means."""

    parse: Callable[[str], object]
    meaning: str


SHAPE_PARAMETERS: Mapping[str, Parameter] = MappingProxyType(
    {
        "rate": Parameter(_positive, "requests per second, on average"),
        "duration": Parameter(_positive, "seconds in which they arrive"),
        "requests": Parameter(_count, "the most requests, a whole number"),
        "arrivals": Parameter(_kind, f"one of {', '.join(ARRIVAL_KINDS)}"),
        "cv": Parameter(_positive, "the coefficient of variation of gamma arrivals"),
        "peak": Parameter(_positive, "the rate in a burst, or on top of a diurnal wave, over the mean"),
        "period": Parameter(_positive, "seconds from burst to burst, or of a day"),
        "share": Parameter(_positive, "the part of a period that is a burst"),
        "last": Parameter(_positive, "the rate at which a ramp that begins at `rate` ends"),
        "prompt": Parameter(_length, "a request's own prompt tokens: N, or MEDIAN/P95 of a lognormal"),
        "output": Parameter(_length, "output tokens: N, or MEDIAN/P95 of a lognormal"),
        "lengths": Parameter(Path, "a trace to sample prompt and output lengths from"),
        "prefixes": Parameter(_count, "how many shared prefixes there are, a whole number"),
        "prefix": Parameter(_count, "tokens of a shared prefix, a whole number"),
        "zipf": Parameter(_number, "how unequal their use is; 0: equal"),
        "turns": Parameter(_positive, "requests of a conversation, on average"),
        "think": Parameter(_number, "seconds from turn to turn, on average"),
        "context": Parameter(_count, "the most tokens of prompt and output, a whole number"),
        "tenants": Parameter(_count, "how many tenants send, a whole number"),
        "block": Parameter(_count, "tokens of the blocks that prefixes are shared by, a whole number"),
    }
)
FILE_PARAMETERS: Mapping[str, Parameter] = MappingProxyType(
    {
        "speed": Parameter(_positive, "what the time between arrivals is divided by"),
        "start": Parameter(_number, "seconds of the file to leave out"),
        "duration": Parameter(_positive, "seconds of the file to take"),
        "requests": Parameter(_count, "the most requests, a whole number"),
    }
)


def workload_help() -> str:
    """What `--help` says of workloads, as lines of at most 110 characters."""
    lines = ["workloads: PRESET[:KEY=VALUE,…] or FILE[:KEY=VALUE,…]", "", "presets:"]
    lines += [f"  {name:<11} {preset.shows}" for name, preset in PRESETS.items()]
    lines += ["", "parameters of a preset:"]
    lines += [f"  {name:<11} {each.meaning}" for name, each in SHAPE_PARAMETERS.items()]
    lines += ["", "parameters of a file (Mooncake's JSONL, Azure's CSV, or a recording):"]
    lines += [f"  {name:<11} {each.meaning}" for name, each in FILE_PARAMETERS.items()]
    return "\n".join(lines)
