"""Tokens of an OpenID Connect provider: whose they are, which are refused, and how its keys are read."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.kit.identity.oidc_server import AUDIENCE, DISCOVERY, JWKS, OidcServer, oidc_server, public_jwk

from kvasir.config.spec.tenants import Scope, TokenIssuerSpec
from kvasir.core.errors import KvasirError, RequestError
from kvasir_platform.gateway.identity import key_lookups, providers
from kvasir_platform.gateway.identity.json_web_tokens import read_keys
from kvasir_platform.gateway.identity.providers import KeysPending
from kvasir_platform.gateway.identity.tokens import TokenIdentities

PATIENCE_S = 30.0
NOW_S = 1_800_000_000.0
LASTS = {"exp": NOW_S + 600}
TENANTS = frozenset({"default", "red", "blue"})


class Clock:
    """Two clocks that are set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.wall_s = NOW_S

    def now(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.wall_s

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing of it sleeps")


class Verifier:
    """The tokens of one provider, with requests that wait as the gateway's do."""

    def __init__(self, server: OidcServer, clock: Clock, **spec: Any) -> None:
        self.server = server
        self.clock = clock
        fields = {"issuer": server.issuer, "audience": (AUDIENCE,), "private_address": True, **spec}
        self.tokens = TokenIdentities([TokenIssuerSpec(**fields)], TENANTS, clock, clock.wall)

    async def identity(self, token: str) -> Any:
        try:
            return self._now(token)
        except KeysPending as pending:
            if pending.then is None:
                raise
            read = asyncio.Event()
            pending.then(read.set)
            async with asyncio.timeout(PATIENCE_S):
                await read.wait()
            return self._now(token)

    async def code(self, token: str) -> str:
        with pytest.raises(KvasirError) as caught:
            await self.identity(token)
        assert token not in caught.value.message
        return caught.value.code

    async def tenant(self, claims: dict[str, Any]) -> str:
        return str((await self.identity(self.server.token(LASTS | claims))).tenant)

    def _now(self, token: str) -> Any:
        return self.tokens.identity(token.encode(), token.encode())


@asynccontextmanager
async def verifying(**spec: Any) -> AsyncIterator[Verifier]:
    clock = Clock()
    async with oidc_server() as server:
        made = Verifier(server, clock, **spec)
        running = asyncio.create_task(made.tokens.run())
        try:
            yield made
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def encoded(part: Any) -> str:
    text = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


async def test_a_token_is_of_the_tenant_and_the_scopes_that_its_claims_name() -> None:
    async with verifying() as verifier:
        token = verifier.server.token(LASTS | {"tenant": "red", "scope": "openid embeddings operator:read"})
        found = await verifier.identity(token)
        assert (found.tenant, found.scopes) == ("red", {Scope.EMBEDDINGS, Scope.OPERATOR_READ})
        assert await verifier.identity(token) is found
        assert verifier.server.asked == [DISCOVERY, JWKS]


async def test_claims_are_mapped_and_the_first_entry_of_the_spec_counts() -> None:
    mapping: dict[str, Any] = {
        "tenant_claim": "realm_access.roles",
        "tenants": {"admins": "red", "staff": "blue"},
        "scope_claim": "https://example.com/use",
        "scopes": {"ask": ("inference",), "run": ("operator", "operator:read")},
        "default_scopes": (),
    }
    async with verifying(**mapping) as verifier:
        assert await verifier.tenant({"realm_access": {"roles": ["staff", "admins"]}}) == "red"
        assert await verifier.tenant({"realm_access.roles": "staff"}) == "blue"
        no_tenant = verifier.server.token(LASTS | {"tenant": "red", "realm_access": {"roles": [7, None]}})
        assert await verifier.code(no_tenant) == "no_tenant"
        claims = {"realm_access.roles": "staff", "https://example.com/use": ["run", "other"]}
        found = await verifier.identity(verifier.server.token(LASTS | claims))
        assert found.scopes == {Scope.OPERATOR, Scope.OPERATOR_READ}
        found = await verifier.identity(verifier.server.token(LASTS | {"realm_access.roles": "staff"}))
        assert found.scopes == frozenset()


async def test_a_token_of_no_tenant_can_have_a_default_and_has_no_operators_scope() -> None:
    async with verifying(default_tenant="blue") as verifier:
        found = await verifier.identity(verifier.server.token(LASTS | {"tenant": "nobody"}))
        assert (found.tenant, found.scopes) == ("blue", {Scope.INFERENCE, Scope.EMBEDDINGS})


@pytest.mark.parametrize(
    ("claims", "code"),
    [
        ({"aud": "another"}, "invalid_token"),
        ({"aud": ["another", "more"]}, "invalid_token"),
        ({"aud": {}}, "invalid_token"),
        ({"iss": "http://127.0.0.1:1"}, "invalid_token"),
        ({"iss": 7}, "invalid_token"),
        ({"exp": None}, "invalid_token"),
        ({"exp": "2030"}, "invalid_token"),
        ({"exp": True}, "invalid_token"),
        ({"exp": NOW_S - 31}, "token_expired"),
        ({"nbf": NOW_S + 31}, "invalid_token"),
        ({"iat": NOW_S + 31}, "invalid_token"),
        ({"nbf": "now"}, "invalid_token"),
    ],
)
async def test_claims_that_do_not_fit_are_refused(claims: dict[str, Any], code: str) -> None:
    async with verifying(default_tenant="red") as verifier:
        assert await verifier.code(verifier.server.token(LASTS | claims)) == code


async def test_clocks_may_differ_by_the_skew() -> None:
    async with verifying(default_tenant="red") as verifier:
        for claims in ({"exp": NOW_S - 29}, {"exp": NOW_S + 60, "nbf": NOW_S + 29, "iat": NOW_S + 29}):
            assert await verifier.tenant(claims) == "red"
        one_of = {"exp": NOW_S + 60, "aud": ["another", AUDIENCE]}
        assert await verifier.tenant(one_of) == "red"


async def test_a_verified_token_is_refused_once_it_has_expired() -> None:
    async with verifying(default_tenant="red") as verifier:
        token = verifier.server.token(LASTS)
        await verifier.identity(token)
        verifier.clock.wall_s = NOW_S + 629
        await verifier.identity(token)
        verifier.clock.wall_s = NOW_S + 630
        assert await verifier.code(token) == "token_expired"


async def test_only_signatures_by_the_accepted_algorithms_count() -> None:
    async with verifying(default_tenant="red", algorithms=("ES256",)) as verifier:
        server = verifier.server
        server.keys = {"first": "ES256", "strong": "RS256"}
        good = server.token(LASTS, kid="first")
        head, body, signature = good.split(".")
        claims = LASTS | {"iss": server.issuer, "aud": AUDIENCE}
        mixed_up = f"{encoded({'alg': 'HS256', 'kid': 'first'})}.{body}"
        public = json.dumps(public_jwk("ES256", "first")).encode()
        forged = [
            f"{head}.{body}.",
            f"{head}.{encoded(claims | {'tenant': 'blue'})}.{signature}",
            f"{encoded({'alg': 'none', 'kid': 'first'})}.{body}.",
            f"{mixed_up}.{encoded(hmac.digest(public, mixed_up.encode(), 'sha256'))}",
            server.token(LASTS, kid="strong"),
            server.token(LASTS, kid="first", crit=["exp"]),
            "a.b.c",
            "..",
            f"{encoded([])}.{body}.{signature}",
            f"{head}.{encoded([])}.{signature}",
            f"{head}.{encoded(b'[' * 5000)}.{signature}",
            f"{head}.{encoded({**claims, 'x': 'y' * 20_000})}.{signature}",
        ]
        assert (await verifier.identity(good)).tenant == "red"
        assert [await verifier.code(each) for each in forged] == ["invalid_token"] * len(forged)


async def test_a_rotated_key_is_read_when_its_first_token_comes_and_the_old_one_ends() -> None:
    async with verifying(default_tenant="red") as verifier:
        old = verifier.server.token(LASTS)
        await verifier.identity(old)
        verifier.clock.now_s += key_lookups.MIN_PAUSE_S
        verifier.server.rotate("second")
        assert (await verifier.identity(verifier.server.token(LASTS))).tenant == "red"
        verifier.clock.now_s += key_lookups.MIN_PAUSE_S
        assert await verifier.code(old) == "invalid_token"


async def test_made_up_keys_make_it_read_once_in_a_while_and_are_remembered() -> None:
    async with verifying(default_tenant="red") as verifier:
        await verifier.identity(verifier.server.token(LASTS))
        verifier.clock.now_s += key_lookups.MIN_PAUSE_S
        reads = len(verifier.server.asked)
        made_up = [verifier.server.token(LASTS, kid=f"made-up-{number}") for number in range(20)]
        codes = [await verifier.code(token) for token in made_up]
        assert codes == ["invalid_token"] + ["signing_keys_unavailable"] * 19
        assert len(verifier.server.asked) == reads + 2
        verifier.clock.now_s += key_lookups.MIN_PAUSE_S
        assert await verifier.code(made_up[0]) == "invalid_token"
        assert len(verifier.server.asked) == reads + 2
        with pytest.raises(KeysPending) as caught:
            verifier.tokens.identity(made_up[1].encode(), b"")
        assert caught.value.then is not None


async def test_requests_that_wait_for_keys_are_bounded_and_all_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "MAX_WAITING", 3)
    async with verifying(default_tenant="red") as verifier:
        verifier.server.gate.clear()
        tokens = [verifier.server.token(LASTS | {"jti": str(number)}) for number in range(4)]
        waiting = [asyncio.ensure_future(verifier.identity(token)) for token in tokens[:3]]
        await asyncio.sleep(0)
        assert await verifier.code(tokens[3]) == "signing_keys_unavailable"
        verifier.server.gate.set()
        assert [found.tenant for found in await asyncio.gather(*waiting)] == ["red"] * 3


@pytest.mark.parametrize(
    ("path", "reply"),
    [
        (DISCOVERY, (404, b"")),
        (DISCOVERY, (302, b"")),
        (DISCOVERY, (200, b"<html>")),
        (DISCOVERY, (200, b"[]")),
        (DISCOVERY, (200, b'{"issuer": "https://another.example.com", "jwks_uri": "https://a.example.com"}')),
        (DISCOVERY, (200, b"{}")),
        (JWKS, (500, b"")),
        (JWKS, (200, b'{"keys": []}')),
        (JWKS, (200, b'{"keys": 7}')),
        (JWKS, (200, b"[" * 5000)),
        (JWKS, (200, b'{"keys": [' + b"1," * 100 + b"1]}")),
        (JWKS, (200, b" " * (300 << 10))),
    ],
)
async def test_a_provider_that_answers_nonsense_is_said_once_and_asked_again(
    path: str, reply: tuple[int, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async with verifying(default_tenant="red") as verifier:
        verifier.server.replies[path] = reply
        assert await verifier.code(verifier.server.token(LASTS)) == "signing_keys_unavailable"
        verifier.server.replies.clear()
        verifier.clock.now_s += key_lookups.MIN_PAUSE_S
        assert await verifier.tenant({}) == "red"
        assert caplog.text.count("signing keys cannot be read") == 1


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1/keys", "http://169.254.169.254/keys", "ftp://x/keys", "http://example.com/keys"]
)
async def test_a_discovery_document_cannot_send_the_router_elsewhere(url: str) -> None:
    async with verifying(default_tenant="red") as verifier:
        server = verifier.server
        server.replies[DISCOVERY] = (200, json.dumps({"issuer": server.issuer, "jwks_uri": url}).encode())
        assert await verifier.code(server.token(LASTS)) == "signing_keys_unavailable"
        assert server.asked == [DISCOVERY]


async def test_keys_of_an_unreachable_provider_stay_in_use_for_a_bounded_time() -> None:
    async with verifying(default_tenant="red", max_stale_s=60) as verifier:
        await verifier.identity(verifier.server.token(LASTS))
        verifier.server.replies[JWKS] = (500, b"")
        verifier.clock.now_s += 60
        assert await verifier.tenant({"jti": "1"}) == "red"
        verifier.clock.now_s += 1
        assert await verifier.code(verifier.server.token(LASTS | {"jti": "2"})) == "signing_keys_unavailable"


async def test_the_url_of_the_keys_can_be_named() -> None:
    async with oidc_server() as server:
        clock = Clock()
        verifier = Verifier(server, clock, default_tenant="red", jwks_url=server.issuer + JWKS)
        running = asyncio.create_task(verifier.tokens.run())
        assert await verifier.tenant({}) == "red"
        assert server.asked == [JWKS]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_keys_that_are_for_something_else_are_left_out() -> None:
    good = public_jwk("ES256", "good")
    weak = {"kty": "RSA", "n": encoded(b"\xff" * 128), "e": "AQAB", "kid": "weak"}
    listed = [
        good,
        {**public_jwk("ES256", "sealed"), "use": "enc"},
        {**public_jwk("ES256", "other"), "alg": "ES384"},
        {**public_jwk("ES256", "leaked"), "d": "AAAA"},
        {"kty": "oct", "k": "c2VjcmV0", "kid": "shared", "alg": "HS256"},
        {"kty": "EC", "crv": "P-256", "kid": "broken"},
        weak,
        "text",
    ]
    keys = read_keys(json.dumps({"keys": listed}).encode(), ("ES256", "RS256"))
    assert len(keys) == 1
    assert keys.name_of(("good", "ES256")) == ("good", "ES256")
    assert keys.name_of(("", "ES256")) == ("good", "ES256")
    assert keys.name_of(("", "RS256")) is None


async def test_tokens_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir_platform.gateway.identity.tokens.MAX_VERIFIED", 2)
    async with verifying(default_tenant="red") as verifier:
        for number in range(5):
            assert await verifier.tenant({"jti": str(number)}) == "red"
        assert len(verifier.tokens._verified) == 2


async def test_errors_are_those_of_a_client() -> None:
    async with verifying() as verifier:
        with pytest.raises(RequestError) as caught:
            await verifier.identity(verifier.server.token(LASTS))
        assert (caught.value.status, caught.value.code) == (403, "no_tenant")
