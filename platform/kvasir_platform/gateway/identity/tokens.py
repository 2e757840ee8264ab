"""The tokens in use: each is verified once, and then found by its hash like an API key."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence

from kvasir.config.spec.tenants import TokenIssuerSpec
from kvasir.core.errors import ConfigError
from kvasir.ports.clock import Clock
from kvasir_platform.gateway.http.outbound import client_context
from kvasir_platform.gateway.identity.claims import identity_of
from kvasir_platform.gateway.identity.identities import Identity, unauthorized
from kvasir_platform.gateway.identity.json_web_tokens import TokenRefused, read_token
from kvasir_platform.gateway.identity.providers import TokenProvider

MAX_VERIFIED = 10_000


class TokenIdentities:
    """Tokens of these issuers for these tenants. `wall` is Unix time in seconds. `run` must run. Raise
    ConfigError for authorities that cannot be read."""

    def __init__(
        self,
        issuers: Sequence[TokenIssuerSpec],
        tenants: frozenset[str],
        clock: Clock,
        wall: Callable[[], float],
    ) -> None:
        self._tenants = tenants
        self._wall = wall
        self._verified: dict[bytes, Identity] = {}
        self._providers = {
            spec.issuer: TokenProvider(spec, clock, _context(spec), self._verified.clear) for spec in issuers
        }

    def identity(self, token: bytes, digest: bytes) -> Identity:
        """Return whom a token names; `digest` is a hash of it that nobody else can predict. Raise
        RequestError 401 or 403, or KeysPending."""
        known = self._verified.get(digest)
        if known is not None:
            if known.expires_s > self._wall():
                return known
            del self._verified[digest]
        try:
            found = self._verify(token)
        except TokenRefused as error:
            raise unauthorized(f"The token is refused: {error}.", "invalid_token") from None
        if len(self._verified) >= MAX_VERIFIED:
            del self._verified[next(iter(self._verified))]
        self._verified[digest] = found
        return found

    async def run(self) -> None:
        """Keep the keys of all issuers current, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for provider in self._providers.values():
                tasks.create_task(provider.run(), name="signing keys")

    def _verify(self, token: bytes) -> Identity:
        said = read_token(token)
        provider = self._providers.get(said.issuer)
        if provider is None:
            raise TokenRefused("it is of another issuer")
        claims = provider.claims(token, said.key)
        return identity_of(claims, provider.spec, self._tenants, self._wall())


def _context(spec: TokenIssuerSpec) -> ssl.SSLContext:
    try:
        return client_context(spec.ca_file)
    except OSError as error:
        raise ConfigError(f"gateway.token_issuers: ca_file {spec.ca_file}: {error}") from error
