"""Keys with scopes and tokens of a provider over HTTP, in the errors of each protocol."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tests.kit.identity.oidc_server import AUDIENCE, JWKS, OidcServer, oidc_server

from kvasir.config.spec.tenants import TenancySpec, TenantSpec, TokenIssuerSpec
from kvasir.core.requests import FinishReason
from kvasir_platform.cli.main import main

Start = Callable[..., Awaitable[Any]]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TENANTS = TenancySpec(tenants=(TenantSpec(name="shop"), TenantSpec(name="root", operator=True)))
KEYS = {
    "text": "tenant=root scopes=inference",
    "vectors": "tenant=root scopes=embeddings",
    "reader": "tenant=root scopes=operator:read",
    "runner": "tenant=root scopes=operator",
    "shopper": "tenant=shop scopes=operator+operator:read",
    "old": "tenant=shop expires=2020-01-01T00:00:00Z",
    "all": "tenant=root",
}


@pytest.fixture
async def provider() -> AsyncIterator[OidcServer]:
    async with oidc_server() as server:
        yield server


@pytest.fixture
async def edge(start: Start, tmp_path: Path, provider: OidcServer) -> Any:
    """A gateway that takes keys and tokens, whose router answers each request with one token."""
    lines = [f"{hashlib.sha256(key.encode()).hexdigest()} {entry}\n" for key, entry in KEYS.items()]
    (tmp_path / "keys").write_text("".join(lines))
    issuer = TokenIssuerSpec(issuer=provider.issuer, audience=(AUDIENCE,), private_address=True)
    edge = await start(
        api_keys_file=str(tmp_path / "keys"), token_issuers=(issuer,), deployed={"tenancy": TENANTS}
    )
    edge.router.script = answered
    return edge


def answered(stream: Any) -> None:
    stream.emit("Ahoy", finish=FinishReason.STOP)
    stream.finish()


def token(provider: OidcServer, **claims: Any) -> str:
    return provider.token({"exp": time.time() + 600, "tenant": "shop", **claims})


async def status(edge: Any, key: str, method: str, path: str) -> tuple[int, str]:
    """The status of a request without a body, and its code where it is an error."""
    head = f"{method} {path} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {key}\r\n"
    reply = await edge.raw(f"{head}Content-Length: 0\r\n\r\n".encode())
    try:
        return reply.status, str(json.loads(reply.body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return reply.status, ""


async def test_scopes_open_the_paths_that_they_are_for_and_no_others(edge: Any) -> None:
    refused = (403, "insufficient_scope")
    paths = [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_x"),
        ("POST", "/v1/embeddings"),
        ("POST", "/tokenize"),
        ("GET", "/metrics"),
        ("GET", "/status"),
        ("POST", "/workers/none/drain"),
        ("POST", "/v1/load_lora_adapter"),
        ("GET", "/v1/models"),
    ]
    opened = {
        key: [path for method, path in paths if await status(edge, key, method, path) != refused]
        for key in ("text", "vectors", "reader", "runner", "all")
    }
    text = ["/v1/chat/completions", "/v1/responses", "/v1/responses/resp_x"]
    steered = ["/workers/none/drain", "/v1/load_lora_adapter"]
    assert opened == {
        "text": [*text, "/tokenize", "/v1/models"],
        "vectors": ["/v1/embeddings", "/tokenize", "/v1/models"],
        "reader": ["/metrics", "/status", "/v1/models"],
        "runner": ["/metrics", "/status", *steered, "/v1/models"],
        "all": [path for _, path in paths],
    }
    assert await status(edge, "shopper", "GET", "/metrics") == (403, "operator_only")


async def test_a_lacking_scope_is_said_in_the_form_of_each_protocol(edge: Any) -> None:
    client = await edge.client(api_key="vectors")
    with pytest.raises(openai.PermissionDeniedError) as refused:
        await client.chat.completions.create(model="kvasir-tiny", messages=MESSAGES)
    assert refused.value.code == "insufficient_scope"
    assert refused.value.type == "permission_error"
    challenge = refused.value.response.headers["www-authenticate"]
    assert challenge == 'Bearer realm="kvasir", error="insufficient_scope"'
    async with anthropics(edge, api_key="vectors") as claude:
        with pytest.raises(anthropic.PermissionDeniedError) as denied:
            await claude.messages.create(model="kvasir-tiny", messages=MESSAGES, max_tokens=4)
    body: Any = denied.value.body
    assert body["error"]["type"] == "permission_error"
    assert body["error"]["details"]["error_code"] == "insufficient_scope"


async def test_both_protocols_take_tokens_and_say_what_is_wrong_with_one(
    edge: Any, provider: OidcServer
) -> None:
    good, bad, late = token(provider), token(provider, aud="x"), token(provider, exp=time.time() - 60)
    client = await edge.client(api_key=good)
    await client.chat.completions.create(model="kvasir-tiny", messages=MESSAGES, max_tokens=4)
    async with anthropics(edge, auth_token=good) as claude:
        await claude.messages.create(model="kvasir-tiny", messages=MESSAGES, max_tokens=4)
    assert [stream.request.tenant for stream in edge.router.streams] == ["shop", "shop"]
    for wrong, code in ((bad, "invalid_token"), (late, "token_expired"), ("a.b.c", "invalid_token")):
        client = await edge.client(api_key=wrong)
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.chat.completions.create(model="kvasir-tiny", messages=MESSAGES)
        assert refused.value.code == code
        assert 'error="invalid_token"' in refused.value.response.headers["www-authenticate"]
        async with anthropics(edge, auth_token=wrong) as claude:
            with pytest.raises(anthropic.AuthenticationError) as denied:
                await claude.messages.create(model="kvasir-tiny", messages=MESSAGES, max_tokens=4)
        assert denied.value.body["error"]["details"]["error_code"] == code  # type: ignore[index]
    assert await status(edge, token(provider, tenant="nobody"), "GET", "/v1/models") == (403, "no_tenant")


async def test_a_call_waits_for_the_first_signing_keys_and_a_long_one_is_told_to_come_back(
    start: Start, provider: OidcServer
) -> None:
    provider.gate.clear()
    issuer = TokenIssuerSpec(issuer=provider.issuer, audience=(AUDIENCE,), private_address=True)
    edge = await start(token_issuers=(issuer,), deployed={"tenancy": TENANTS})
    edge.router.script = answered
    client = await edge.client(api_key=token(provider))
    call = asyncio.ensure_future(
        client.chat.completions.create(model="kvasir-tiny", messages=MESSAGES, max_tokens=4)
    )
    long = f"Authorization: Bearer {token(provider)}\r\n"
    early = await edge.post("/v1/chat/completions", b" " * (100 << 10), long)
    assert (early.status, json.loads(early.body)["error"]["code"]) == (503, "signing_keys_unavailable")
    assert "retry-after" in early.headers
    assert not call.done()
    provider.gate.set()
    assert (await call).choices[0].message.content == "Ahoy"


async def test_a_provider_that_fails_while_calls_wait_answers_them(
    start: Start, provider: OidcServer
) -> None:
    provider.replies[JWKS] = (500, b"")
    issuer = TokenIssuerSpec(issuer=provider.issuer, audience=(AUDIENCE,), private_address=True)
    edge = await start(token_issuers=(issuer,), deployed={"tenancy": TENANTS})
    assert await status(edge, token(provider), "GET", "/v1/models") == (503, "signing_keys_unavailable")
    assert await status(edge, "no-token", "GET", "/v1/models") == (401, "invalid_api_key")


async def test_a_created_key_is_accepted_and_a_revoked_one_refused_without_a_restart(
    edge: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "kvasir.yaml"
    spec.write_text(
        f"gateway: {{api_keys_file: {tmp_path / 'keys'}}}\ntenancy: {{tenants: [{{name: shop}}]}}\n"
    )

    def keys(*arguments: str) -> Any:
        assert main(["-o", "json", "keys", *arguments, "-f", str(spec)]) == 0
        return json.loads(capsys.readouterr().out)

    async def answers(key: str, wanted: int) -> None:
        async with asyncio.timeout(30):
            while (await status(edge, key, "GET", "/v1/models"))[0] != wanted:
                await asyncio.sleep(0.01)

    made = keys("create", "--tenant", "shop", "--scopes", "inference")
    await answers(made["key"], 200)
    keys("revoke", made["id"])
    await answers(made["key"], 401)


@asynccontextmanager
async def anthropics(edge: Any, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = f"http://{edge.host}:{edge.port}"
    async with anthropic.AsyncAnthropic(base_url=url, max_retries=0, **options) as client:
        yield client
