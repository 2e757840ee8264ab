"""From the claims of a verified token to an identity: times, issuer, audience, tenant and scopes.

Checks and their order follow RFC 7519 (section 4.1) and RFC 9068 (section 4). Everything here is pure.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

from kvasir.config.spec.tenants import Scope, TokenIssuerSpec
from kvasir.core.errors import RequestError
from kvasir_platform.gateway.identity.identities import SCOPES, Identity, unauthorized
from kvasir_platform.gateway.identity.json_web_tokens import TokenRefused

_MAX_VALUES = 1000


def identity_of(
    claims: Mapping[str, Any], issuer: TokenIssuerSpec, tenants: Container[str], now_s: float
) -> Identity:
    """Return whom the claims name. `now_s` is Unix time. Raise TokenRefused for claims that are not for this
    deployment, RequestError 401 for a token that has expired, and 403 for one that belongs to no tenant."""
    if claims.get("iss") != issuer.issuer:
        raise TokenRefused("it is of another issuer")
    if not set(_texts(claims.get("aud"))) & set(issuer.audience):
        raise TokenRefused("it is for another audience")
    expires_s = _moment(claims, "exp")
    if expires_s is None:
        raise TokenRefused("it has no expiry")
    if expires_s + issuer.clock_skew_s <= now_s:
        raise unauthorized("The token has expired.", "token_expired")
    for name in ("nbf", "iat"):
        begins_s = _moment(claims, name)
        if begins_s is not None and begins_s - issuer.clock_skew_s > now_s:
            raise TokenRefused("it is not valid yet; compare the clocks")
    return Identity(
        _tenant(claims, issuer, tenants), expires_s + issuer.clock_skew_s, _scopes(claims, issuer)
    )


def _tenant(claims: Mapping[str, Any], issuer: TokenIssuerSpec, tenants: Container[str]) -> str:
    values = _texts(_claim(claims, issuer.tenant_claim))
    if issuer.tenants is not None:
        named = next((tenant for value, tenant in issuer.tenants.items() if value in values), None)
    else:
        named = next((value for value in values if value in tenants), None)
    tenant = issuer.default_tenant if named is None else named
    if tenant is None:
        raise RequestError(
            f"The token belongs to no tenant: its claim {issuer.tenant_claim} names none.",
            status=403,
            code="no_tenant",
        )
    return tenant


def _scopes(claims: Mapping[str, Any], issuer: TokenIssuerSpec) -> frozenset[Scope]:
    claim = _claim(claims, issuer.scope_claim)
    values = claim.split() if isinstance(claim, str) else _texts(claim)
    if issuer.scopes is not None:
        held = frozenset(scope for value in values for scope in issuer.scopes.get(value, ()))
    else:
        held = frozenset(SCOPES[value] for value in values if value in SCOPES)
    return held or frozenset(issuer.default_scopes)


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [each for each in value[:_MAX_VALUES] if isinstance(each, str)]
    return []


def _moment(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TokenRefused(f"its {name} is no time")
    return float(value)
