"""Tenants over HTTP: permissions, cost and isolation follow from the caller."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from kvasir.config.spec.deployment import PoolSpec
from kvasir.config.spec.tenants import TenancySpec, TenantSpec
from kvasir.core.errors import CapacityError
from kvasir.core.requests import FinishReason, Role

Start = Callable[..., Awaitable[Any]]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TENANTS = (
    TenantSpec(name="free"),
    TenantSpec(name="few", requests_per_min=2),
    TenantSpec(name="small", tokens_per_min=400),
    TenantSpec(name="single", concurrency=1),
    TenantSpec(name="short", max_context_tokens=64, max_output_tokens=16),
    TenantSpec(name="narrow", models=("pirate",)),
    TenantSpec(name="late", priority="batch"),
    TenantSpec(name="root", operator=True),
)

REFILLED = range(100)
"""What may have grown back meanwhile of 400 tokens a minute; what is left otherwise is 300 apart."""


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    """A gateway where each tenant's key is its name."""
    lines = [f"{hashlib.sha256(each.name.encode()).hexdigest()} tenant={each.name}\n" for each in TENANTS]
    lines.append(f"{hashlib.sha256(b'old').hexdigest()} tenant=free expires=2020-01-01T00:00:00Z\n")
    keys = tmp_path / "keys"
    keys.write_text("".join(lines))
    return {"api_keys_file": str(keys), "deployed": {"tenancy": TenancySpec(tenants=TENANTS)}}


@pytest.fixture
async def edge(start: Start, spec: dict[str, Any]) -> Any:
    """A gateway whose router answers each request with one token."""
    edge = await start(**spec)
    edge.router.script = answered
    return edge


def answered(stream: Any) -> None:
    stream.emit("Ahoy", finish=FinishReason.STOP)
    stream.finish()


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


async def chat(edge: Any, key: str, **fields: Any) -> Any:
    client = await edge.client(api_key=key)
    return await client.chat.completions.create(
        **{"model": "kvasir-tiny", "messages": MESSAGES, "max_tokens": 8, **fields}
    )


async def headers_of(edge: Any, key: str) -> Any:
    client = await edge.client(api_key=key)
    raw = await client.chat.completions.with_raw_response.create(
        model="kvasir-tiny", messages=MESSAGES, max_tokens=8
    )
    return raw.headers


async def code_of(refused: Awaitable[Any], kind: type[openai.APIStatusError]) -> str:
    with pytest.raises(kind) as raised:
        await refused
    assert raised.value.code is not None
    return str(raised.value.code)


async def test_a_request_is_its_tenants_and_finds_nothing_in_anothers_cache(edge: Any) -> None:
    for key in ("free", "late", "free"):
        await chat(edge, key, extra_body={"cache_salt": "mine", "session_id": "s", "priority": 3})
    first, late, again = (stream.request for stream in edge.router.streams)
    assert [first.tenant, late.tenant, again.tenant] == ["free", "late", "free"]
    assert first.salt == again.salt != late.salt
    assert "mine" not in first.salt + late.salt
    assert first.session == again.session != late.session
    # `standard` before `batch`, whatever a client asks for within its class.
    assert (first.priority, late.priority) == (1003, 2003)


async def test_a_tenants_own_salt_parts_its_cache(edge: Any) -> None:
    for salt in ("a", "b", ""):
        await chat(edge, "free", extra_body={"cache_salt": salt} if salt else {})
    assert len({stream.request.salt for stream in edge.router.streams}) == 3


async def test_an_expired_key_is_told_so(edge: Any) -> None:
    assert await code_of(chat(edge, "old"), openai.AuthenticationError) == "api_key_expired"


async def test_requests_beyond_the_limit_are_told_when_to_come_back(edge: Any) -> None:
    first = await headers_of(edge, "few")
    assert (first["x-ratelimit-limit-requests"], first["x-ratelimit-remaining-requests"]) == ("2", "1")
    await chat(edge, "few")
    with pytest.raises(openai.RateLimitError) as refused:
        await chat(edge, "few")
    assert refused.value.code == "rate_limit_requests"
    headers = refused.value.response.headers
    assert 0 < int(headers["retry-after"]) <= 30
    assert headers["x-ratelimit-remaining-requests"] == "0"
    await chat(edge, "free")
    assert len(edge.router.streams) == 3


async def test_tokenizing_costs_a_request_and_no_tokens(edge: Any) -> None:
    body = json.dumps({"model": "kvasir-tiny", "prompt": "x"}).encode()
    for left in ("1", "0"):
        reply = await edge.post("/tokenize", body, bearer("few"))
        assert (reply.status, reply.headers["x-ratelimit-remaining-requests"]) == (200, left)
    reply = await edge.post("/detokenize", b'{"model":"kvasir-tiny","tokens":[1]}', bearer("few"))
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (429, "rate_limit_requests")


async def test_tokens_that_were_not_used_are_given_back(edge: Any) -> None:
    prompt = len((await chat(edge, "free"), edge.router.streams[-1])[1].request.tokens)
    await chat(edge, "small", max_tokens=300)
    left = int((await headers_of(edge, "small"))["x-ratelimit-remaining-tokens"])
    # The first cost its prompt and one token of the 300; the second is charged all that it may use.
    assert left - (400 - (prompt + 1) - (prompt + 8)) in REFILLED
    edge.router.script = None
    holding = asyncio.create_task(chat(edge, "small", max_tokens=300))
    running = await edge.router.submitted(len(edge.router.streams) + 1)
    assert await code_of(chat(edge, "small", max_tokens=300), openai.RateLimitError) == "rate_limit_tokens"
    answered(running)
    await holding


async def test_a_request_that_could_never_fit_is_refused_for_good(edge: Any) -> None:
    refused = chat(edge, "small", max_tokens=500)
    assert await code_of(refused, openai.BadRequestError) == "token_limit_too_small"


async def test_what_the_router_refuses_costs_nothing(edge: Any) -> None:
    edge.router.refusal = CapacityError("Full.", code="queue_full", retry_after_s=1.0)
    for _ in range(3):
        assert await code_of(chat(edge, "few"), openai.InternalServerError) == "queue_full"
    edge.router.refusal = None
    assert (await headers_of(edge, "few"))["x-ratelimit-remaining-requests"] == "1"


async def test_a_place_is_free_again_when_its_request_ends_and_when_its_client_leaves(edge: Any) -> None:
    edge.router.script = None
    client = await edge.client(api_key="single")

    async def begun(number: int) -> Any:
        asking = asyncio.create_task(
            client.chat.completions.create(model="kvasir-tiny", messages=MESSAGES, stream=True)
        )
        running = await edge.router.submitted(number)
        running.emit("Ahoy")
        return running, await asking

    running, stream = await begun(1)
    assert await code_of(chat(edge, "single"), openai.RateLimitError) == "concurrency_limit"
    running.emit("!", finish=FinishReason.STOP)
    running.finish()
    assert [chunk async for chunk in stream]
    _, stream = await begun(2)
    await stream.close()
    await edge.router.cancels()
    edge.router.script = answered
    await chat(edge, "single")


async def test_a_client_that_leaves_is_charged_for_what_it_had(edge: Any) -> None:
    edge.router.script = None
    client = await edge.client(api_key="small")
    asking = asyncio.create_task(
        client.chat.completions.create(model="kvasir-tiny", messages=MESSAGES, max_tokens=300, stream=True)
    )
    running = await edge.router.submitted()
    for _ in range(3):
        running.emit("Ahoy")
    await (await asking).close()
    await edge.router.cancels()
    edge.router.script = answered
    left = int((await headers_of(edge, "small"))["x-ratelimit-remaining-tokens"])
    prompt = len(running.request.tokens)
    assert left - (400 - (prompt + 3) - (prompt + 8)) in REFILLED
    page = (await edge.get("/metrics", bearer("root"))).body.decode()
    used = [line for line in page.splitlines() if 'tenant="small"' in line and 'kind="output"' in line]
    assert [line.rpartition(" ")[2] for line in used] == ["4.0"]


async def test_a_tenants_context_and_output_are_bounded(edge: Any) -> None:
    refused = chat(edge, "short", max_tokens=17)
    assert await code_of(refused, openai.BadRequestError) == "output_limit_exceeded"
    long = [{"role": "user", "content": "word " * 200}]
    refused = chat(edge, "short", messages=long, max_tokens=openai.omit)
    assert await code_of(refused, openai.BadRequestError) == "context_length_exceeded"
    await chat(edge, "short", max_tokens=openai.omit)
    assert edge.router.streams[-1].request.sampling.max_tokens == 16


async def test_models_that_are_not_for_a_tenant_do_not_exist_for_it(edge: Any) -> None:
    client = await edge.client(api_key="narrow")
    assert [model.id for model in (await client.models.list()).data] == ["pirate"]
    for asked in (
        chat(edge, "narrow"),
        client.models.retrieve("kvasir-tiny"),
        client.post("../tokenize", body={"model": "kvasir-tiny", "prompt": "x"}, cast_to=object),
    ):
        assert await code_of(asked, openai.NotFoundError) == "model_not_found"
    await chat(edge, "narrow", model="pirate")


@pytest.mark.parametrize("path", ["/metrics", "/status", "/decisions", "/decisions/x"])
async def test_only_operators_see_the_deployment(edge: Any, path: str) -> None:
    reply = await edge.get(path, bearer("free"))
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (403, "operator_only")
    assert (await edge.get(path, bearer("root"))).status in (200, 404)
    assert (await edge.get(path)).status == 401


async def test_only_operators_drain_workers(edge: Any) -> None:
    for key, status in (("free", 403), ("root", 202)):
        assert (await edge.post("/workers/w/drain", b"{}", bearer(key))).status == status
    assert [worker for worker, *_ in edge.router.drains] == ["w"]


async def test_only_operators_record(edge: Any) -> None:
    body = json.dumps({"salt": "ab" * 16}).encode()
    for key, status in (("free", 403), ("root", 200)):
        assert (await edge.post("/recordings/me", body, bearer(key))).status == status
    assert len(edge.router.recordings.queries) == 1


async def test_embeddings_are_charged_and_salted_too(start: Start, spec: dict[str, Any]) -> None:
    pools = (PoolSpec(name="vectors", role=Role.EMBED),)
    spec["deployed"] |= {"pools": pools, "disaggregation": "never"}
    edge = await start(**spec)
    edge.router.script = lambda stream: stream.embed((0.6, 0.8))
    client = await edge.client(api_key="small")
    inputs = ["one two three", "four"]
    raw = await client.embeddings.with_raw_response.create(
        model="kvasir-tiny", input=inputs, encoding_format="float"
    )
    used = raw.parse().usage.prompt_tokens
    assert int(raw.headers["x-ratelimit-remaining-tokens"]) - (400 - used) in REFILLED
    assert {stream.request.tenant for stream in edge.router.streams} == {"small"}
    assert all(stream.request.salt for stream in edge.router.streams)
    refused = client.embeddings.create(model="kvasir-tiny", input=[[1] * 500])
    assert await code_of(refused, openai.BadRequestError) == "token_limit_too_small"


async def test_only_operators_choose_the_worker_and_the_policy_of_a_request(edge: Any) -> None:
    for headers in ({"x-kvasir-worker": "decode-2"}, {"x-kvasir-policy": "round_robin"}):
        refused = chat(edge, "free", extra_headers=headers)
        assert await code_of(refused, openai.PermissionDeniedError) == "operator_only"
    assert edge.router.streams == []
    await chat(edge, "root", extra_headers={"x-kvasir-worker": "decode-2", "x-kvasir-policy": "round_robin"})
    await chat(edge, "root")
    asked, plain = (stream.request for stream in edge.router.streams)
    assert (asked.worker, asked.policy) == ("decode-2", "round_robin")
    assert (plain.worker, plain.policy) == ("", "")


@pytest.mark.parametrize("headers", [{"x-kvasir-policy": "best"}, {"x-kvasir-worker": "w" * 257}])
async def test_a_place_that_cannot_exist_is_refused(edge: Any, headers: dict[str, str]) -> None:
    refused = chat(edge, "root", extra_headers=headers)
    assert await code_of(refused, openai.BadRequestError) == "invalid_value"
