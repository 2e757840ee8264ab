"""Routing policies: pure decisions behind the RoutingPolicy port."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from kvasir.core.errors import ConfigError
from kvasir.ports.clock import Rng
from kvasir.ports.routing import RoutingPolicy
from kvasir_router.decide.classic import LeastLoaded, RoundRobin
from kvasir_router.decide.cost import CostPolicy, CostWeights
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers import PEERS
from kvasir_router.decide.rates import RateBook
from kvasir_router.decide.roofline import CostRates, WorkerPriors, rates_of

__all__ = [
    "POLICIES",
    "CostPolicy",
    "CostRates",
    "CostWeights",
    "Disaggregation",
    "LeastLoaded",
    "NamedPolicies",
    "RateBook",
    "RoundRobin",
    "WorkerPriors",
    "make_policy",
    "rates_of",
]

POLICIES: Mapping[str, Callable[[Disaggregation, Rng], RoutingPolicy]] = MappingProxyType(
    {"cost": CostPolicy, "round_robin": RoundRobin, "least_loaded": LeastLoaded, **PEERS}
)
"""By the names that routing.policy takes."""


def make_policy(name: str, disaggregation: str, rng: Rng) -> RoutingPolicy:
    """Return the policy with this name. Raises ConfigError, listing the names, for an unknown one."""
    if name not in POLICIES:
        raise ConfigError(f"routing policy {name!r} is none of {', '.join(POLICIES)}")
    return POLICIES[name](Disaggregation(disaggregation), rng)


class NamedPolicies(Mapping[str, RoutingPolicy]):
    """The policies that rules of routes and operators name, each made when a request first names it."""

    def __init__(self, disaggregation: str, rng: Rng) -> None:
        self._disaggregation = disaggregation
        self._rng = rng
        self._made: dict[str, RoutingPolicy] = {}

    def __getitem__(self, name: str) -> RoutingPolicy:
        if name not in self._made and name in POLICIES:
            self._made[name] = make_policy(name, self._disaggregation, self._rng)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(POLICIES)

    def __len__(self) -> int:
        return len(POLICIES)
