"""Which model answers a request to a route: a pure choice, the same in every process that serves HTTP.

Arms are chosen by weighted rendezvous hashing (Schindelhauer and Schomaker 2005, "Weighted distributed hash
tables", the logarithmic method): a key stays with its arm while weights change, but for the keys that the
change moves. As the share of a canary grows, sessions move to it and none moves back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvasir.config.spec.deployment import SloSpec
from kvasir.config.spec.traffic.route_checks import arm_of
from kvasir.config.spec.traffic.routes import RouteRuleSpec, RouteSpec, ShadowSpec
from kvasir.core.requests import SloClass

Shares = Callable[[], Mapping[str, float]]
"""The share of each canary, by route."""

_SPAN = float(1 << 64)


@dataclass(frozen=True, slots=True)
class RoutedTo:
    """The choice for one request. `chain` are models and adapters in the order in which they are tried, the
    first of them the arm; `policy` is "" for that of the deployment."""

    route: str
    chain: tuple[str, ...]
    slo: SloClass | None = None
    policy: str = ""
    shadow: ShadowSpec | None = None


@dataclass(frozen=True, slots=True)
class RouteKey:
    """What a request is matched and assigned by. `session` is the client's name for a group of requests, ""
    for none; `request` is unique. `prompt_chars` measures the prompt."""

    tenant: str
    headers: Mapping[bytes, bytes]
    session: str
    request: str
    prompt_chars: Callable[[], int]


class RouteTable:
    """The routes of a deployment, by the names that clients send. `shares` returns the current share of each
    canary."""

    def __init__(self, routes: Sequence[RouteSpec], slos: Sequence[SloSpec], shares: Shares) -> None:
        self._routes = {route.name: route for route in routes}
        self._slos = {each.name: SloClass(each.name, each.ttft_s, each.itl_s) for each in slos}
        self._shares = shares
        self._fallbacks = {name: tuple(self._flat(name, set())) for name in self._routes}

    def __contains__(self, name: str) -> bool:
        return name in self._routes

    def choose(self, name: str, key: RouteKey) -> RoutedTo:
        """Return which models answer a request to a route. Raise KeyError for an unknown one."""
        route = self._routes[name]
        while route.model in self._routes:
            route = self._routes[route.model]
        rule = next((each for each in route.rules if matches(each, key)), None)
        first = self._arms(route, key) if rule is None or rule.model is None else (rule.model,)
        chain = tuple(dict.fromkeys((*first, *self._fallbacks[name])))
        slo = None if rule is None or rule.slo is None else self._slos[rule.slo]
        policy = "" if rule is None or rule.policy is None else rule.policy
        return RoutedTo(route.name, chain, slo, policy, route.shadow)

    def _arms(self, route: RouteSpec, key: RouteKey) -> tuple[str, ...]:
        """Return the arm; behind a canary, the model that it is compared with, so that no request fails with
        a canary before its first token."""
        named = affinity_key(route.affinity, key)
        if route.model is None:
            return (chosen(route.name, named, [(arm.model, arm.weight) for arm in route.arms]),)
        share = 0.0 if route.canary is None else self._shares().get(route.name, 0.0)
        if route.canary is None or share <= 0.0:
            return (route.model,)
        tried = route.canary.model
        arm = chosen(route.name, named, [(route.model, 1.0 - share), (tried, share)])
        return (arm,) if arm == route.model else (tried, route.model)

    def _flat(self, name: str, seen: set[str]) -> Iterator[str]:
        """Yield the models of the fallbacks behind a name, in order. `seen` are routes that were looked at:
        many paths may lead to one."""
        route = self._routes.get(name)
        if route is None or name in seen:
            return
        seen.add(name)
        for target in route.fallbacks:
            yield arm_of(target, self._routes)
            yield from self._flat(target, seen)
        if route.model is not None:
            yield from self._flat(route.model, seen)


def matches(rule: RouteRuleSpec, key: RouteKey) -> bool:
    """Return whether a request meets all conditions of a rule."""
    if rule.tenants and key.tenant not in rule.tenants:
        return False
    for name, value in rule.headers.items():
        sent = key.headers.get(name.encode())
        if sent is None or sent.strip() != value.encode():
            return False
    if not rule.measures_prompts:
        return True
    chars, low, high = key.prompt_chars(), rule.min_prompt_chars, rule.max_prompt_chars
    return (low is None or chars >= low) and (high is None or chars <= high)


def affinity_key(affinity: str, key: RouteKey) -> str:
    """Return what a request is assigned by. Equal names of two tenants are different keys."""
    if affinity == "tenant":
        return f"{key.tenant}\n"
    if affinity == "session":
        named = key.session
    else:
        header = key.headers.get(affinity.removeprefix("header:").encode()) if ":" in affinity else None
        named = "" if header is None else header[:1024].decode("latin-1")
    return f"{key.tenant}\n{named}" if named else key.request


def chosen(route: str, key: str, arms: Sequence[tuple[str, float]]) -> str:
    """Return the arm of a key: over many keys, each gets a share that is proportional to its weight."""
    return min(arms, key=lambda arm: _distance(route, key, *arm))[0]


def uniform(*parts: str) -> float:
    """Return a number from 0 to 1 that depends on the texts only, evenly distributed."""
    digest = blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / _SPAN


def _distance(route: str, key: str, arm: str, weight: float) -> float:
    return math.inf if weight <= 0.0 else -math.log(uniform(route, key, arm)) / weight


def primary_models(routes: Sequence[RouteSpec]) -> dict[str, str]:
    """Return the model behind each route, for what is asked about a name and not generated."""
    by_name = {route.name: route for route in routes}
    return {name: arm_of(name, by_name) for name in by_name}
