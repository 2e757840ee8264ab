"""How many replicas each pool of a model should have for the work that is foreseen. Pure arithmetic.

Pools that do the same part of the work are filled in the order of the file: the first up to its most, then
the next.
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
    """Prompt tokens to compute and tokens to generate, both a second."""

    prompt_tokens_s: float
    output_tokens_s: float

    def times(self, factor: float) -> TokenLoad:
        """So many times as much."""
        return TokenLoad(factor * self.prompt_tokens_s, factor * self.output_tokens_s)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one pool, from the deployment spec."""

    name: str
    role: Role
    least: int
    most: int


def busy(work: TokenLoad, each: Capacity, role: Role) -> float:
    """How many replicas of a role the work keeps busy; one that does both parts does them in turn."""
    prefill = work.prompt_tokens_s / each.prompt_tokens_s
    decode = work.output_tokens_s / each.output_tokens_s
    return {Role.PREFILL: prefill, Role.EMBED: prefill, Role.DECODE: decode}.get(role, prefill + decode)


def needs(work: TokenLoad, pools: Sequence[tuple[Bounds, Capacity]]) -> dict[str, float]:
    """Replicas for each pool, in parts of one, with what keeps waits within the slack; bounds apply to what
    goes over to the next pool only."""
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
    """Replicas for a need in parts of one."""
    return math.ceil(need - _WHOLE)
