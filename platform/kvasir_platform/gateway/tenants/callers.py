"""The tenants of a deployment: from the identity of a request to what it may do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from kvasir.config.spec.deployment import Deployment, SloSpec
from kvasir.config.spec.edge import GatewaySpec
from kvasir.config.spec.redis import LimitsRedisSpec
from kvasir.config.spec.tenants import DEFAULT_TENANT, Scope, TenantSpec
from kvasir.ports.clock import Clock, Rng
from kvasir.ports.limits import RateLimits, SharedRateLimits
from kvasir.telemetry.tenant_series import RateLimitStats, TenantStats, added
from kvasir_platform.gateway.catalog.slo_classes import SloClasses
from kvasir_platform.gateway.identity.authenticator import Authenticator
from kvasir_platform.gateway.identity.identities import check_scopes
from kvasir_platform.gateway.identity.key_ring import KeyRing
from kvasir_platform.gateway.identity.keys import KeyText, read_sources
from kvasir_platform.gateway.identity.tokens import TokenIdentities
from kvasir_platform.gateway.tenants.caller import Caller
from kvasir_platform.gateway.tenants.memory_limits import MemoryLimits
from kvasir_platform.gateway.tenants.salts import CacheScope, Open

_BATCH_TTFT_S = 3600.0
LimitsOver = Callable[[RateLimits], RateLimits]
"""Returns limits that count beyond this router, over those that it counts alone."""

if TYPE_CHECKING:
    from kvasir_platform.gateway.tenants.redis_keys import RedisKeySource


class Callers:
    """The tenants of a deployment. Without `authenticator` no credential is required, and all requests are of
    the default tenant. `batches` are the same tenants as callers of the lines of their batches."""

    def __init__(
        self,
        callers: Mapping[str, Caller],
        authenticator: Authenticator | None,
        limits: RateLimits,
        batches: Mapping[str, Caller],
    ) -> None:
        self._callers = callers
        self._batches = batches
        self._default = callers[DEFAULT_TENANT]
        self._authenticator = authenticator
        self._limits = limits

    def of(self, headers: Mapping[bytes, bytes], scopes: frozenset[Scope] | None = None) -> Caller:
        """Return the caller of a request, by its headers (names in lower case). `scopes` are those that its
        endpoint accepts, None for any. Raise RequestError 401 or 403, or KeysPending."""
        return self.identified(headers, scopes)[0]

    def identified(
        self, headers: Mapping[bytes, bytes], scopes: frozenset[Scope] | None = None
    ) -> tuple[Caller, str]:
        """Return also the name of its API key, "" without one."""
        if self._authenticator is None:
            return self._default, ""
        identity = self._authenticator.identity(headers.get(b"authorization"))
        if scopes is not None:
            check_scopes(identity.scopes, scopes)
        return self._callers[identity.tenant], identity.key

    @property
    def tenants(self) -> tuple[str, ...]:
        """The names of all tenants."""
        return tuple(self._callers)

    def of_batches(self, tenant: str) -> Caller:
        """Return a tenant as the caller of the lines of its batches: in a class of its own behind all others,
        and without limits per minute, as it gets only capacity that others leave."""
        return self._batches[tenant]

    def figures(self) -> TenantStats:
        """Return the usage of all tenants, batches included."""
        uses = tuple(added(caller.use, self._batches[name].use) for name, caller in self._callers.items())
        return TenantStats(uses, limits_state(self._limits))

    async def run(self) -> None:
        """Keep keys current and the limits running, until cancelled or while there is background work."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._limits.run(), name="rate limits")
            if self._authenticator is not None:
                tasks.create_task(self._authenticator.run(), name="identity")


def make_callers(
    deployment: Deployment,
    clock: Clock,
    wall: Callable[[], float],
    rng: Rng,
    environment: Mapping[str, str],
    *,
    secret: bytes,
    limits: RateLimits | None = None,
) -> Callers:
    """Return the callers of the spec, counted by `limits` if given, with salts derived from `secret` (see
    `cache_secret`). `wall` is Unix time in seconds; `rng` names this router among those that share limits.
    Raise ConfigError for keys that cannot be read."""
    tenancy, gateway = deployment.tenancy, deployment.gateway
    tenants = {spec.name: spec for spec in tenancy.all_tenants()}
    authenticator = None
    if gateway.authenticates:
        names = frozenset(tenants)
        followed = _keys_in_redis(deployment, clock)
        keys = KeyRing(partial(_key_texts, gateway, environment, followed), names)
        issuers = gateway.token_issuers
        tokens = TokenIdentities(issuers, names, clock, wall) if issuers else None
        authenticator = Authenticator(keys, tokens, clock, wall, followed)
    limits = make_limits(tenancy.redis, clock, rng) if limits is None else limits

    def caller(spec: TenantSpec, rank: int, slo: SloClasses) -> Caller:
        scope = CacheScope(secret, spec.cache, spec.name) if secret else Open()
        return Caller(spec, rank, slo, scope, limits, now=clock.now)

    callers = {
        name: caller(spec, tenancy.priorities.index(spec.priority), _slo_classes(deployment.slo, spec.slo))
        for name, spec in tenants.items()
    }
    # Others' time between tokens is not to suffer more than they themselves would let it.
    slo = SloClasses(
        [SloSpec(name="batch", ttft_s=_BATCH_TTFT_S, itl_s=min(s.itl_s for s in deployment.slo))]
    )
    unlimited: dict[str, object] = {"requests_per_min": None, "tokens_per_min": None, "concurrency": None}
    batches = {
        name: caller(spec.model_copy(update=unlimited), len(tenancy.priorities), slo)
        for name, spec in tenants.items()
    }
    return Callers(callers, authenticator, limits, batches)


def _key_texts(
    gateway: GatewaySpec, environment: Mapping[str, str], followed: RedisKeySource | None
) -> list[KeyText]:
    texts = read_sources(gateway, environment)
    return texts if followed is None else [*texts, followed.text()]


def _keys_in_redis(deployment: Deployment, clock: Clock) -> RedisKeySource | None:
    redis = deployment.tenancy.redis
    if redis is None or not deployment.gateway.api_keys_redis:
        return None
    from kvasir_platform.gateway.tenants.redis_keys import RedisKeySource

    return RedisKeySource(redis, clock)


def unchanged(limits: RateLimits) -> RateLimits:
    """Return the limits themselves."""
    return limits


def make_limits(redis: LimitsRedisSpec | None, clock: Clock, rng: Rng) -> RateLimits:
    """Return the rate limits of the spec. `rng` names this router among those that share limits."""
    if redis is None:
        return MemoryLimits(clock.now)
    # The Redis client takes megabytes that only those who use it are to pay.
    from kvasir_platform.gateway.tenants.redis_limits import RedisLimits

    return RedisLimits(redis, clock, f"{rng.getrandbits(64):016x}")


def limits_state(limits: RateLimits) -> RateLimitStats | None:
    """Return the state of shared rate limits; None if they are not shared."""
    return (
        RateLimitStats(limits.shared, limits.local_decisions)
        if isinstance(limits, SharedRateLimits)
        else None
    )


def _slo_classes(there_are: tuple[SloSpec, ...], allowed: tuple[str, ...] | None) -> SloClasses:
    if allowed is None:
        return SloClasses(there_are)
    by_name = {slo.name: slo for slo in there_are}
    return SloClasses([by_name[name] for name in allowed])
