"""The policies that are compared, at their published defaults and at the best point of a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from types import MappingProxyType
from typing import Any

from kvasir.ports.clock import Rng
from kvasir.ports.routing import RoutingPolicy
from kvasir_router.decide import POLICIES as ROUTED
from kvasir_router.decide import Disaggregation
from kvasir_router.decide.peers.dynamo import PREFILL_LOAD_SCALE, Dynamo
from kvasir_router.decide.peers.llm_d import PREFIX_WEIGHT, QUEUE_WEIGHT, LlmD
from kvasir_router.decide.peers.mooncake import BALANCING_THRESHOLD, Mooncake
from kvasir_router.decide.peers.sglang import (
    BALANCE_ABS_THRESHOLD,
    BALANCE_REL_THRESHOLD,
    CACHE_THRESHOLD,
    SglangCacheAware,
)

OURS = "cost"
TUNED = "_tuned"
"""The end of the name of a policy at the best point of its grid."""

Point = tuple[tuple[str, float], ...]
"""Parameters and their values, those at the default included; () is the default of all."""


def _without_transfer(disaggregation: Disaggregation, rng: Rng) -> RoutingPolicy:
    """What it does without the transfers between prefill workers that it assumes: there are none here."""
    return Mooncake(disaggregation, rng, migrates=False)


POLICIES: Mapping[str, Callable[..., RoutingPolicy]] = MappingProxyType(
    {**ROUTED, "mooncake_no_transfer": _without_transfer}
)
GRIDS: Mapping[str, Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
        Dynamo.name: {
            "prefill_load_scale": (PREFILL_LOAD_SCALE, 0.5, 2.0, 4.0, 10.0),
            "temperature": (0.0, 0.1),
        },
        LlmD.name: {"prefix_weight": (PREFIX_WEIGHT, 1.0, 6.0), "queue_weight": (QUEUE_WEIGHT, 1.0, 4.0)},
        SglangCacheAware.name: {
            "cache_threshold": (CACHE_THRESHOLD, 0.1),
            "balance_abs_threshold": (BALANCE_ABS_THRESHOLD, 8, 24),
            "balance_rel_threshold": (BALANCE_REL_THRESHOLD, 1.1),
        },
        Mooncake.name: {"kvcache_balancing_threshold": (BALANCING_THRESHOLD, 1.2, 4.0, 16.0)},
    }
)
"""The main parameters of each system, the published default first."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy with the parameters that it is given."""

    name: str
    policy: str
    point: Point = ()

    def make(self, disaggregation: Disaggregation, seed: int) -> RoutingPolicy:
        """A new policy, which has learned nothing."""
        parameters: dict[str, Any] = dict(self.point)
        return POLICIES[self.policy](disaggregation, Random(seed), **parameters)

    @property
    def tuned(self) -> bool:
        """Whether it is at the best point of a grid."""
        return self.name.endswith(TUNED)

    @property
    def parameters(self) -> str:
        """The point, for people."""
        return describe(self.point)


def describe(point: Point) -> str:
    """The parameters of a point, for people."""
    return " ".join(f"{name}={value:g}" for name, value in point) or "published defaults"


def defaults(names: Iterable[str]) -> tuple[Contender, ...]:
    """The policies as they are published."""
    return tuple(Contender(name, name) for name in names)


def points(grid: Mapping[str, Sequence[float]]) -> tuple[Point, ...]:
    """All combinations of values, that of the defaults first."""
    return tuple(tuple(zip(grid, values, strict=True)) for values in product(*grid.values()))


def chosen(policy: str, speeds: Mapping[Point, float]) -> Contender:
    """The policy at the point with the highest goodput; of equal ones the first."""
    default, *_ = speeds
    best = max(speeds, key=speeds.__getitem__)
    return Contender(policy + TUNED, policy, () if best == default else best)
