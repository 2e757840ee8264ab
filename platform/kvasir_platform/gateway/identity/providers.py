"""Reads the signing keys of an OpenID Connect provider, and keeps them current.

Keys are read at the start, at intervals, and when a token names an unknown one; requests with such a token
wait for that. Every read goes over vetted connections (`http.outbound`) with a timeout and a bound on its
size. While the provider is unreachable, the keys that were read last stay in use for a bounded time.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvasir.config.checks.outbound import OutboundRefused, check_target, parse_url
from kvasir.config.spec.base import is_loopback
from kvasir.config.spec.tenants import TokenIssuerSpec
from kvasir.core.errors import CapacityError
from kvasir.ports.clock import Clock
from kvasir_platform.gateway.http.outbound_client import OutboundClient, OutboundEndpoint, OutboundError
from kvasir_platform.gateway.identity.json_web_tokens import KeyName, SigningKeys, TokenRefused, read_keys
from kvasir_platform.gateway.identity.key_lookups import KeyLookup, KeyLookups

_log = logging.getLogger(__name__)

MAX_WAITING = 256
"""Requests that wait for keys; others are answered with 503, which clients retry."""
_DISCOVERY = "/.well-known/openid-configuration"


class KeysPending(CapacityError):
    """The key of a token is not known yet. `then` calls back once the keys have been read, on the event loop;
    None: this request is not to wait."""

    code = "signing_keys_unavailable"

    def __init__(self, retry_after_s: float, then: Callable[[Callable[[], None]], None] | None) -> None:
        super().__init__(
            "The signing keys of the token's issuer are being read. Try again.", retry_after_s=retry_after_s
        )
        self.then = then


class TokenProvider:
    """The signing keys of one issuer. `run` must run; all calls come from its event loop. `changed` is called
    after other keys came into use."""

    def __init__(
        self,
        spec: TokenIssuerSpec,
        clock: Clock,
        context: ssl.SSLContext,
        changed: Callable[[], None],
    ) -> None:
        self.spec = spec
        self._clock = clock
        self._context = context
        self._changed = changed
        self._lookups = KeyLookups(spec.refresh_s)
        self._keys: SigningKeys | None = None
        self._document = b""
        self._read_s = 0.0
        self._waiting: list[Callable[[], None]] = []
        self._wanted: list[KeyName] = []
        self._wake = asyncio.Event()
        self._trouble = ""

    def claims(self, token: bytes, key: KeyName) -> Mapping[str, Any]:
        """Return the claims of a token that says to be signed with `key`. Raise TokenRefused, or
        KeysPending."""
        if key[1] not in self.spec.algorithms:
            raise TokenRefused("its algorithm is not accepted")
        now = self._clock.now()
        keys = self._keys
        if keys is not None and now - self._read_s <= self.spec.max_stale_s:
            name = keys.name_of(key)
            if name is not None:
                return keys.claims(token, name)
        lookup = self._lookups.unknown(key, now)
        if lookup is KeyLookup.REFUSE:
            raise TokenRefused("its issuer has no such signing key")
        if lookup is KeyLookup.LATER or len(self._waiting) >= MAX_WAITING:
            raise KeysPending(self._lookups.retry_after_s(now), None)
        raise KeysPending(1.0, lambda resume: self._wait(key, resume))

    async def run(self) -> None:
        """Read the keys whenever they are due, until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                timer = loop.call_later(max(0.0, self._lookups.due_s - self._clock.now()), self._wake.set)
                try:
                    await self._wake.wait()
                finally:
                    timer.cancel()
                self._wake.clear()
                await self._refresh()
        finally:
            self._resume()

    def _wait(self, key: KeyName, resume: Callable[[], None]) -> None:
        self._waiting.append(resume)
        self._wanted.append(key)
        self._wake.set()

    def _resume(self) -> None:
        waiting, self._waiting, self._wanted = self._waiting, [], []
        for resume in waiting:
            resume()

    async def _refresh(self) -> None:
        self._lookups.reading(self._clock.now())
        try:
            async with asyncio.timeout(self.spec.timeout_s):
                document = await self._get(self.spec.jwks_url or await self._discovered())
            keys = read_keys(document, self.spec.algorithms)
        except (OutboundError, OutboundRefused, OSError, ValueError) as error:
            self._lookups.failed(self._clock.now())
            self._failed(str(error) or f"no answer within {self.spec.timeout_s:g} s")
        else:
            self._use(document, keys)
        self._resume()

    def _use(self, document: bytes, keys: SigningKeys) -> None:
        changed = document != self._document
        self._keys, self._document, self._read_s = keys, document, self._clock.now()
        self._lookups.read([key for key in self._wanted if keys.name_of(key) is None], self._read_s)
        self._trouble = ""
        if changed:
            _log.info("signing keys read", extra={"issuer": self.spec.issuer, "keys": len(keys)})
            self._changed()

    def _failed(self, reason: str) -> None:
        if reason != self._trouble:
            self._trouble = reason
            kept = (
                "the previous ones stay in use" if self._keys is not None else "its tokens are not accepted"
            )
            _log.error(
                "signing keys cannot be read; %s", kept, extra={"issuer": self.spec.issuer, "reason": reason}
            )

    async def _discovered(self) -> str:
        """Return the URL of the keys by the provider's discovery document (OpenID Connect Discovery 1.0,
        section 4)."""
        try:
            document = msgspec.json.decode(
                await self._get(self.spec.issuer.rstrip("/") + _DISCOVERY), type=dict[str, Any]
            )
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError("the provider's discovery document is no JSON object") from error
        if document.get("issuer") != self.spec.issuer:
            raise ValueError("the provider's discovery document is of another issuer")
        if not isinstance(url := document.get("jwks_uri"), str):
            raise ValueError("the provider's discovery document has no jwks_uri")
        return url

    async def _get(self, url: str) -> bytes:
        target, private = parse_url(url), self.spec.private_address
        check_target(target, private=private)
        if target.scheme != "https" and not is_loopback(target.host):
            raise OutboundRefused("signing keys are read over HTTPS only")
        endpoint = OutboundEndpoint(target, private, self._context)
        client = OutboundClient(endpoint, connections=1, now=self._clock.now)
        try:
            return await client.get()
        finally:
            await client.close()
