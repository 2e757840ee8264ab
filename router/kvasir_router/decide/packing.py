"""The decisions of ended requests as they are packed (kvasir.ports.views.packed).

msgspec decodes these classes by their annotations, which compiled classes do not keep, so this module is not
compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvasir.core.requests import SloClass
from kvasir.ports.routing import RoutingTarget

TableHead = tuple[str, str, tuple[str, ...], int, bool]
"""A TermTable without its figures: part, unit, names, the number of rows, and whether it has links."""


class Decided(NamedTuple):
    """Arrival and decision of a request on the router's clock, and the duration of the decision in seconds of
    the stopwatch. `policy` is the one that the request named, "" for that of the deployment."""

    arrival_s: float
    now_s: float
    took_s: float
    policy: str = ""


class PackedDecision(NamedTuple):
    """A decision without its places and its outcome. `slo` is None if it is that of the outcome."""

    prompt_tokens: int
    output_tokens: int
    choices: int
    slo: SloClass | None
    decided: Decided
    attempt: int
    prefill: RoutingTarget | None
    decode: RoutingTarget
    reason: str
    cached_tokens: int
    ttft_s: float
    tier_tokens: tuple[int, ...]
    figures: bytes
    omitted: int


PackedPlaces = tuple[tuple[RoutingTarget, ...], tuple[tuple[str, str], ...], tuple[TableHead, ...]]
"""Places, what is said about each of them, and heads of tables."""

_DECISIONS = msgspec.msgpack.Decoder(PackedDecision)
_PLACES: msgspec.msgpack.Decoder[PackedPlaces] = msgspec.msgpack.Decoder(PackedPlaces)


def decision_of(packed: msgspec.Raw) -> PackedDecision:
    """Return a decision from its bytes."""
    return _DECISIONS.decode(packed)


def places_of(packed: bytes) -> PackedPlaces:
    """Return places and heads from their bytes."""
    return _PLACES.decode(packed)
