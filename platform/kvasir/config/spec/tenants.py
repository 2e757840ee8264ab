"""The part of the deployment spec for tenants: limits, priorities, cache isolation, issuers of tokens, and
what they cost."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvasir.config.checks.outbound import OutboundRefused, check_target, parse_url
from kvasir.config.spec.base import Name, Spec, is_loopback
from kvasir.config.spec.redis import CostRedisSpec, LimitsRedisSpec
from kvasir.hardware.gpus import Gpu, gpu_named, gpu_names

DEFAULT_TENANT = "default"
PRIORITY_SPAN = 1000
"""Requests of class i, with 0 as the most urgent, have priorities from i × PRIORITY_SPAN on."""

_CACHE = re.compile(r"own|shared:[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")

PerMinute = Annotated[int, Field(ge=1, le=10**12)]
Claim = Annotated[str, Field(min_length=1, max_length=200)]
TokenAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
"""Signature algorithms of RFC 7518 and RFC 8037 with a public key. Algorithms with a shared secret, and
`none`, do not exist here: an issuer's public key must never verify as one."""


class Scope(StrEnum):
    """What an API key or a token may be used for, within what its tenant may do."""

    INFERENCE = "inference"
    EMBEDDINGS = "embeddings"
    OPERATOR_READ = "operator:read"
    OPERATOR = "operator"


ALL_SCOPES = frozenset(Scope)
Amount = Annotated[float, Field(gt=0, le=1e12)]
CPU = "cpu"
"""The name under which `cost.prices` has the price of a CPU core."""


class BudgetSpec(Spec):
    """What a tenant may cost in each period, in `cost.currency`. A budget needs cost accounting."""

    period: Literal["day", "month"] = "month"
    """Calendar day or month in UTC, at whose begin the budget is renewed."""
    soft: Amount | None = None
    """From this cost on, responses have the header `x-kvasir-budget`, and a warning is logged once."""
    hard: Amount | None = None
    """From this cost on, requests are refused with 429 until the budget is renewed."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.soft is None and self.hard is None:
            raise ValueError("budget: neither soft nor hard is set; set one of them, or remove budget")
        if self.soft is not None and self.hard is not None and self.soft > self.hard:
            raise ValueError(f"budget: soft {self.soft:g} exceeds hard {self.hard:g}; lower soft")
        return self


class CostSpec(Spec):
    """Cost accounting: how the time of workers is divided among requests, and at what price."""

    enabled: bool = True
    currency: str = Field(default="USD", pattern=r"^[A-Z]{3}$")
    """Currency of prices and budgets, by ISO 4217. The catalogue's prices are in USD; with another currency,
    list those of your GPUs in `prices`."""
    prices: dict[str, Annotated[float, Field(ge=0, le=1e6)]] = Field(default={}, max_length=64)
    """Price of one hour of one GPU, by its name in the catalogue such as `H100`, and of one CPU core of a
    pool without GPUs as `cpu`. Default: list prices of the catalogue."""
    file: str | None = None
    """SQLite file in which one router keeps what was used. Unset: `kvasir up` keeps one with the deployment's
    files; a router started on its own keeps it in memory, until it stops."""
    redis: CostRedisSpec | None = None
    """Redis server in which several routers keep what was used, in place of a file."""
    retention_days: int = Field(default=92, ge=31, le=3660)
    """Days after which what was used is forgotten."""

    @model_validator(mode="after")
    def _kept_in_one_place(self) -> Self:
        if self.file is not None and self.redis is not None:
            raise ValueError("file and redis are both set; keep costs in one of them")
        return self

    @model_validator(mode="after")
    def _known_names(self) -> Self:
        for name in self.prices:
            if name != CPU and gpu_named(name) is None:
                raise ValueError(
                    f"prices: {name} is not in the catalogue; choose one of: {CPU}, {gpu_names()}"
                )
        return self

    def price_of(self, gpu: Gpu) -> float | None:
        """Return the stated price of one GPU for an hour, None for none."""
        return next((price for name, price in self.prices.items() if gpu_named(name) is gpu), None)


class TenantSpec(Spec):
    """A tenant. Unset limits do not apply."""

    name: Name
    requests_per_min: PerMinute | None = None
    """Requests per minute. A full minute's amount can be used at once and is refilled at a constant rate."""
    tokens_per_min: PerMinute | None = None
    """Tokens of prompt and output per minute, refilled likewise. A request is charged for its prompt and its
    maximum output; the unused part is returned when it ends."""
    body_bytes_per_min: PerMinute | None = None
    """Bytes of request bodies per minute, refilled likewise and counted by each process that serves HTTP. A
    body beyond them is refused before it is read or decoded."""
    concurrency: int | None = Field(default=None, ge=1, le=1_000_000)
    """Maximum concurrent requests."""
    max_context_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of prompt and output of one request, if lower than that of the model."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Maximum output tokens of each choice of a request."""
    weight: float = Field(default=1.0, ge=0.01, le=1000)
    """Weight of the tenant's share of capacity among tenants that wait in the same priority class."""
    priority: Name = "standard"
    """Priority class, one of tenancy.priorities."""
    models: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of models and LoRA adapters that the tenant can use; others are answered as not found. Unset:
    all."""
    slo: tuple[Name, ...] | None = Field(default=None, min_length=1)
    """SLO classes that the tenant can use, its default first. Unset: all, in the order of `slo`."""
    cache: str = "own"
    """`own`: the KV cache of the tenant is isolated from all others. `shared:GROUP`: tenants of the group
    share cached prompts, and can infer from timing which prompts others have sent."""
    budget: BudgetSpec | None = None
    """What the tenant may cost. Unset: no bound."""
    operator: bool = False
    """Allow the keys of the tenant to use /metrics, /status, decisions and drains, which show requests of all
    tenants."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if _CACHE.fullmatch(self.cache) is None:
            raise ValueError(
                f"cache: {self.cache!r} is neither `own` nor `shared:GROUP`, as in shared:research"
            )
        return self


class SharedPrefixSpec(Spec):
    """A system prompt whose KV tenants share, while all that follows it stays separate.

    The blocks that hold only tokens of this prompt, and of the chat template around it, are cached once for
    all of its tenants; who sends it can infer from timing whether another tenant has sent it lately, and
    nothing of what others wrote after it. It applies to requests that begin with it, have no `cache_salt` of
    their own, and no tools where the template puts tools before or into the system prompt.
    """

    name: Name
    text: str | None = Field(default=None, min_length=1, max_length=1 << 20)
    """The system prompt, exactly as clients send it."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """SHA-256 (hex) of the system prompt in UTF-8, in place of the text. The router takes the text from the
    first request of one of the tenants that has it."""
    tenants: tuple[Name, ...] | None = Field(default=None, min_length=1, max_length=1000)
    """Tenants that share it. Unset: all."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.text is None) == (self.sha256 is None):
            raise ValueError(f"shared_prefixes: {self.name} needs text or sha256, one of them")
        return self


class TenancySpec(Spec):
    """Tenants and their shared settings.

    API keys belong to tenants (see gateway.api_keys_file). The tenant `default` has all keys without a tenant
    and, if no keys are required, all requests. If it is not listed, it has no limits and is an operator.
    """

    tenants: tuple[TenantSpec, ...] = Field(default=(), max_length=1000)
    priorities: tuple[Name, ...] = Field(
        default=("interactive", "standard", "batch"), min_length=1, max_length=16
    )
    """Priority classes, the most urgent first. A request can lower its priority within its class with the
    field `priority`, up to 999."""
    cache_secret_file: str | None = None
    """File with a long random secret from which the KV cache salts of tenants are derived. All routers need
    the same secret. Unset: `kvasir up` creates and keeps one; a router started on its own creates one for the
    life of its process."""
    shared_prefixes: tuple[SharedPrefixSpec, ...] = Field(default=(), max_length=16)
    """System prompts whose KV tenants share although their caches are separate. Default: none."""
    redis: LimitsRedisSpec | None = None
    """Redis server in which routers share counters. Unset: each router counts its own requests."""

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        for what, names in (
            ("tenants", [tenant.name for tenant in self.tenants]),
            ("priorities", list(self.priorities)),
            ("shared_prefixes", [prefix.name for prefix in self.shared_prefixes]),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"{what}: names must differ, found {names}; rename one")
        return self

    @model_validator(mode="after")
    def _shared_by_tenants(self) -> Self:
        known = {tenant.name for tenant in self.all_tenants()}
        for prefix in self.shared_prefixes:
            for name in prefix.tenants or ():
                if name not in known:
                    raise ValueError(
                        f"shared_prefixes: {prefix.name} names unknown tenant {name!r}; list it in "
                        "tenants or correct the name"
                    )
        return self

    @model_validator(mode="after")
    def _ranked(self) -> Self:
        for tenant in self.tenants:
            if tenant.priority not in self.priorities:
                raise ValueError(
                    f"tenants: {tenant.name} has unknown priority {tenant.priority!r}; the classes are "
                    f"{', '.join(self.priorities)}; name one of them"
                )
        return self

    def all_tenants(self) -> tuple[TenantSpec, ...]:
        """The listed tenants and the default tenant."""
        if any(tenant.name == DEFAULT_TENANT for tenant in self.tenants):
            return self.tenants
        usual = "standard" if "standard" in self.priorities else self.priorities[0]
        return (*self.tenants, TenantSpec(name=DEFAULT_TENANT, priority=usual, operator=True))

    def weights(self) -> Mapping[str, float]:
        """The weight of each tenant, by name."""
        return {tenant.name: tenant.weight for tenant in self.all_tenants()}

    def uncounted_budget(self, cost: CostSpec) -> str | None:
        """Return an error text if a tenant has a budget and costs are not counted, else None."""
        for tenant in self.tenants:
            if tenant.budget is not None and not cost.enabled:
                return (
                    f"tenancy: tenant {tenant.name} has a budget, and cost.enabled is false; set it to true, "
                    "or remove the budget"
                )
        return None

    def unknown_name(self, models: Container[str], slos: Container[str]) -> str | None:
        """Return an error text if a tenant names an unknown model or SLO class, else None."""
        for tenant in self.tenants:
            for field, names, known in (("models", tenant.models, models), ("slo", tenant.slo, slos)):
                for name in names or ():
                    if name not in known:
                        return (
                            f"tenancy: tenant {tenant.name} names unknown {name!r} in {field}; correct the "
                            "name or remove it"
                        )
        return None


class TokenIssuerSpec(Spec):
    """An OpenID Connect provider whose JSON Web Tokens are accepted beside API keys."""

    issuer: str = Field(max_length=2048)
    """URL of the provider, exactly as in the claim `iss` of its tokens."""
    audience: tuple[Claim, ...] = Field(min_length=1, max_length=16)
    """Accepted values of the claim `aud`: the names under which the provider knows this deployment."""
    algorithms: tuple[TokenAlgorithm, ...] = Field(default=("RS256", "ES256"), min_length=1)
    """Accepted signature algorithms."""
    jwks_url: str | None = Field(default=None, max_length=2048)
    """URL of the provider's signing keys. Unset: read from the document at
    `issuer`/.well-known/openid-configuration."""
    private_address: bool = False
    """Allow a provider with a private address, such as a service in the same cluster. Link-local addresses
    and metadata services are always refused."""
    ca_file: str | None = None
    """PEM certificates of the authorities that certify the provider. Unset: those of the system."""
    clock_skew_s: float = Field(default=30.0, ge=0, le=300)
    """Tolerated difference between the clocks of the provider and the router."""
    refresh_s: float = Field(default=300.0, ge=10, le=86_400)
    """How often signing keys are read again. A token with an unknown key makes the router read them at once,
    at most every ten seconds."""
    max_stale_s: float = Field(default=86_400.0, ge=60, le=30 * 86_400)
    """How long the last signing keys stay in use while the provider cannot be reached."""
    timeout_s: float = Field(default=5.0, gt=0, le=60)
    """Timeout of reading the keys."""
    tenant_claim: Claim = "tenant"
    """Claim with the tenant: a text, or a list of texts. Dots name a claim within another, as in
    realm_access.roles, unless the whole name is a claim."""
    tenants: dict[Claim, Name] | None = Field(default=None, min_length=1, max_length=1000)
    """Tenants by value of `tenant_claim`. The first entry that the token has counts. Unset: the value is the
    name of the tenant."""
    default_tenant: Name | None = None
    """Tenant of tokens from whose claim none follows. Unset: they are refused."""
    scope_claim: Claim = "scope"
    """Claim with the scopes: a text with spaces between them, or a list."""
    scopes: dict[Claim, tuple[Scope, ...]] | None = Field(default=None, min_length=1, max_length=256)
    """Scopes by value of `scope_claim`. Unset: the values are names of scopes; others are ignored."""
    default_scopes: tuple[Scope, ...] = (Scope.INFERENCE, Scope.EMBEDDINGS)
    """Scopes of tokens whose claim names none."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        for field, url in (("issuer", self.issuer), ("jwks_url", self.jwks_url)):
            if url is None:
                continue
            try:
                target = parse_url(url)
                check_target(target, private=self.private_address)
            except OutboundRefused as error:
                hint = (
                    "" if self.private_address else "; for a provider of your own set private_address: true"
                )
                raise ValueError(f"{field}: {error}{hint}") from error
            if target.scheme != "https" and not is_loopback(target.host):
                raise ValueError(f"{field}: signing keys are read over HTTPS; use https://{target.authority}")
        if "?" in self.issuer:
            raise ValueError("issuer: a provider's URL has no query; write it as in the claim iss")
        return self

    def unknown_tenant(self, tenants: Container[str]) -> str | None:
        """Return an error text if the issuer maps to an unknown tenant, else None."""
        named = [*(self.tenants or {}).values(), *([self.default_tenant] if self.default_tenant else [])]
        for name in named:
            if name not in tenants:
                return (
                    f"gateway.token_issuers: {self.issuer} maps to unknown tenant {name!r}; list it in "
                    "tenancy.tenants or correct the name"
                )
        return None
