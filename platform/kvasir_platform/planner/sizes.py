"""Numbers of replicas for the forecast work of a model's pools. Pure arithmetic.

Pools of the same role are filled in the order of the file: the first up to its maximum, then the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.core.requests import Role
from kvasir_platform.planner.capacity import Capacity

_WHOLE = 1e-6


@dataclass(frozen=True, slots=True)
class TokenLoad:
    """Prompt tokens to compute and tokens to generate, per second."""

    prompt_tokens_s: float
    output_tokens_s: float

    def times(self, factor: float) -> TokenLoad:
        """Return this work times a factor."""
        return TokenLoad(factor * self.prompt_tokens_s, factor * self.output_tokens_s)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one pool, from the deployment spec."""

    name: str
    role: Role
    least: int
    most: int


def busy(work: TokenLoad, each: Capacity, role: Role) -> float:
    """Return how many replicas of a role the work keeps busy; one of both roles alternates between them."""
    prefill = work.prompt_tokens_s / each.prompt_tokens_s
    decode = work.output_tokens_s / each.output_tokens_s
    return {Role.PREFILL: prefill, Role.EMBED: prefill, Role.DECODE: decode}.get(role, prefill + decode)


def needs(work: TokenLoad, pools: Sequence[tuple[Bounds, Capacity]]) -> dict[str, float]:
    """Return the fractional number of replicas of each pool, with the spare ones that keep waits within the
    slack; bounds only limit what the next pool takes over."""
    left = dict.fromkeys(Role, 1.0)
    found: dict[str, float] = {}
    for bounds, each in pools:
        share = left[bounds.role]
        need = share * busy(work, each, bounds.role)
        need += each.spare if need > 0.0 else 0.0
        found[bounds.name] = need
        if need > bounds.most:
            left[bounds.role] = share * (need - bounds.most) / need
        else:
            left[bounds.role] = 0.0
    return found


def whole(need: float) -> int:
    """Return whole replicas for a fractional need."""
    return math.ceil(need - _WHOLE)
