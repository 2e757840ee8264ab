"""The deployment spec's part about tenants: who may use how much of it, how urgently, and next to whom."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from kvasir.config.spec.base import Name, Spec
from kvasir.config.spec.redis import LimitsRedisSpec

DEFAULT_TENANT = "default"
PRIORITY_SPAN = 1000
"""Requests of class number i, the most urgent being 0, have priorities from i × PRIORITY_SPAN on."""

_CACHE = re.compile(r"own|shared:[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")

PerMinute = Annotated[int, Field(ge=1, le=10**12)]


class TenantSpec(Spec):
    """One tenant. What is unset is not limited."""

    name: Name
    requests_per_min: PerMinute | None = None
    """A minute's worth may come at once; it grows back evenly."""
    tokens_per_min: PerMinute | None = None
    """Prompt and output together, in the same way. A request is charged its prompt and all that it may
    generate, and what it did not use is given back when it ends."""
    concurrency: int | None = Field(default=None, ge=1, le=1_000_000)
    """Requests at the same time."""
    max_context_tokens: int | None = Field(default=None, ge=1)
    """Prompt and output of one request together, where the model would allow more."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """What one request may ask for, each choice by itself."""
    weight: float = Field(default=1.0, ge=0.01, le=1000)
    """Share of the capacity, against the weights of others who wait in the same priority class."""
    priority: Name = "standard"
    """Priority class, one of tenancy.priorities."""
    models: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of models and LoRA adapters that it may use; for others it is told that they do not exist.
    Unset: all."""
    slo: tuple[Name, ...] | None = Field(default=None, min_length=1)
    """SLO classes that it may ask for, its default first. Unset: all of them, as `slo` lists them."""
    cache: str = "own"
    """`own`: nobody else's prompts are found in its KV cache, nor its in theirs. `shared:GROUP`: tenants of
    the same group find each other's prompts, and by their timing whether there are any."""
    operator: bool = False
    """Whether its keys open /metrics, /status, decisions and drains, which show all tenants' requests."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if _CACHE.fullmatch(self.cache) is None:
            raise ValueError(
                f"cache: {self.cache!r} is neither `own` nor `shared:GROUP`, as in shared:research"
            )
        return self


class TenancySpec(Spec):
    """Tenants and what is common to them.

    API keys belong to tenants (see gateway.api_keys_file). The tenant `default` has the keys that name none
    and, where no keys are asked for, everybody. Where it is not listed, it has no limits and is an operator.
    """

    tenants: tuple[TenantSpec, ...] = Field(default=(), max_length=1000)
    priorities: tuple[Name, ...] = Field(
        default=("interactive", "standard", "batch"), min_length=1, max_length=16
    )
    """Priority classes, the most urgent first. Within its class a request may put itself behind others with
    the field `priority`, up to 999."""
    cache_secret_file: str | None = None
    """File with a long random secret from which, with the tenant, the salts of KV caches are made. All
    routers need the same. Unset: `kvasir up` makes one and keeps it; another router makes one for its own
    life."""
    redis: LimitsRedisSpec | None = None
    """Where several routers count together. Unset: each counts what it lets in itself."""

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        for what, names in (
            ("tenants", [tenant.name for tenant in self.tenants]),
            ("priorities", list(self.priorities)),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"{what}: names must differ, found {names}; rename one")
        return self

    @model_validator(mode="after")
    def _ranked(self) -> Self:
        for tenant in self.tenants:
            if tenant.priority not in self.priorities:
                raise ValueError(
                    f"tenants: {tenant.name} has priority {tenant.priority!r}, and the classes are "
                    f"{', '.join(self.priorities)}; name one of them"
                )
        return self

    def all_tenants(self) -> tuple[TenantSpec, ...]:
        """Those listed, and the default one."""
        if any(tenant.name == DEFAULT_TENANT for tenant in self.tenants):
            return self.tenants
        usual = "standard" if "standard" in self.priorities else self.priorities[0]
        return (*self.tenants, TenantSpec(name=DEFAULT_TENANT, priority=usual, operator=True))

    def weights(self) -> Mapping[str, float]:
        """Every tenant's weight by its name."""
        return {tenant.name: tenant.weight for tenant in self.all_tenants()}

    def unknown_name(self, models: Container[str], slos: Container[str]) -> str | None:
        """What is wrong where a tenant is allowed a model or an SLO class that does not exist."""
        for tenant in self.tenants:
            for field, names, known in (("models", tenant.models, models), ("slo", tenant.slo, slos)):
                for name in names or ():
                    if name not in known:
                        return (
                            f"tenancy: tenant {tenant.name} is allowed {name!r} in {field}, which is not "
                            "there; correct the name or remove it"
                        )
        return None
