"""What a verified credential says: the tenant, and what it may be used for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvasir.config.spec.tenants import Scope
from kvasir.core.errors import RequestError

SCOPES: Mapping[str, Scope] = {scope.value: scope for scope in Scope}
"""All scopes by name."""
TEXT_SCOPES = frozenset((Scope.INFERENCE,))
EMBEDDING_SCOPES = frozenset((Scope.EMBEDDINGS,))
TOKENIZE_SCOPES = TEXT_SCOPES | EMBEDDING_SCOPES
READ_SCOPES = frozenset((Scope.OPERATOR_READ, Scope.OPERATOR))
OPERATE_SCOPES = frozenset((Scope.OPERATOR,))


class Identity(NamedTuple):
    """The holder of a credential. `expires_s` is in Unix seconds, infinite for never. `key` identifies an API
    key: the begin of its hash, which reveals nothing of it; "" for other credentials."""

    tenant: str
    expires_s: float
    scopes: frozenset[Scope]
    key: str = ""


def check_scopes(held: frozenset[Scope], accepted: frozenset[Scope]) -> None:
    """Raise RequestError 403 unless one of the scopes that an endpoint accepts is held."""
    if held.isdisjoint(accepted):
        needed = " or ".join(sorted(accepted))
        has = ", ".join(sorted(held)) or "none"
        raise RequestError(
            f"This needs the scope {needed}; the credential's scopes are: {has}.",
            status=403,
            code="insufficient_scope",
        )


def unauthorized(message: str, code: str) -> RequestError:
    """Return the error of a credential that is missing or of no use."""
    return RequestError(message, status=401, code=code)
