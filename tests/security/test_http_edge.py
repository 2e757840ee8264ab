"""Access control and headers of the whole gateway."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from load_tests.scenarios.scorecard.clients.http_cases import CASES
from tests.kit.gateway.http_edge import Edge, serving

from kvasir.config.spec.deployment import GatewaySpec
from kvasir.core.errors import CapacityError

CHAT = "https://chat.example.com"
BODY = b'{"model":"kvasir-tiny","messages":[{"role":"user","content":"hi"}]}'
STREAM = BODY[:-1] + b',"stream":true}'


def spec(**fields: Any) -> GatewaySpec:
    return GatewaySpec.model_validate({"port": 0, "drain_timeout_s": 0.0} | fields)


def post(body: bytes, headers: str = "", path: str = "/v1/chat/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: t\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def get(path: str, headers: str = "", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: t\r\n{headers}\r\n".encode()


class Reply:
    """Status, headers and the body up to its announced length."""

    def __init__(self, head: bytes, body: bytes) -> None:
        first, *lines = head.decode().strip().split("\r\n")
        self.status = int(first.split()[1])
        self.lines = [line.partition(": ")[::2] for line in lines]
        self.headers = dict(self.lines)
        self.body = body

    @property
    def code(self) -> str:
        """Of an error."""
        return str(json.loads(self.body)["error"]["code"])


async def ask(edge: Edge, data: bytes, local: str = "127.0.0.1") -> Reply:
    async with asyncio.timeout(20.0):
        reader, writer = await asyncio.open_connection(edge.host, edge.port, local_addr=(local, 0))
        try:
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            reply = Reply(head, b"")
            reply.body = await reader.readexactly(int(reply.headers.get("content-length", "0")))
            return reply
        finally:
            writer.close()


async def test_every_answer_forbids_caching_and_guessing_its_type() -> None:
    async with serving() as edge:
        edge.router.script = lambda stream: stream.finish()
        replies = [
            await ask(edge, data)
            for data in (
                get("/v1/models"),
                post(BODY),
                post(STREAM),
                post(b"{"),
                get("/nowhere"),
                CASES[0].data,
            )
        ]
    for reply in replies:
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert [value for name, value in reply.lines if name == "cache-control"] == ["no-store"]
        assert reply.headers["x-request-id"]
        assert "server" not in reply.headers


async def test_one_client_cannot_take_all_connections() -> None:
    async with serving(spec(max_connections_per_client=2, trusted_proxies=())) as edge:
        held = [
            await asyncio.open_connection(edge.host, edge.port, local_addr=("127.0.0.5", 0)) for _ in "ab"
        ]
        for _, writer in held:
            writer.write(get("/health/live"))
        for reader, _ in held:
            await reader.readuntil(b"\r\n\r\n")
        refused = await ask(edge, get("/health/live"), "127.0.0.5")
        assert (refused.status, refused.code) == (429, "too_many_client_connections")
        assert refused.headers["retry-after"] == "1"
        assert (await ask(edge, get("/health/live"), "127.0.0.6")).status == 200
        for _, writer in held:
            writer.close()
        while (await ask(edge, get("/health/live"), "127.0.0.5")).status != 200:
            await asyncio.sleep(0)


async def test_a_full_table_of_connections_still_tells_this_machine_of_its_health() -> None:
    async with serving(spec(max_connections=2)) as edge:
        held = [await asyncio.open_connection(edge.host, edge.port) for _ in "ab"]
        for reader, writer in held:
            writer.write(get("/health/live"))
            await reader.readuntil(b"\r\n\r\n")
        for path in ("/health/live", "/health/ready"):
            reply = await ask(edge, get(path))
            assert (reply.status, reply.headers["connection"]) == (200, "close")
        for data in (get("/v1/models"), post(BODY)):
            reply = await ask(edge, data)
            assert (reply.status, reply.code) == (503, "too_many_connections")
        silent = [await asyncio.open_connection(edge.host, edge.port) for _ in range(20)]
        answers = await asyncio.gather(*(_until_closed(reader) for reader, _ in silent))
        assert all(answer.startswith(b"HTTP/1.1 503 ") for answer in answers), "they are told too"
        for _, writer in [*held, *silent]:
            writer.transport.abort()


async def test_beyond_all_connections_and_refusals_the_rest_is_cut_without_a_word() -> None:
    async with serving(spec(max_connections=1)) as edge:
        first = await asyncio.open_connection(edge.host, edge.port)
        first[1].write(get("/health/live"))
        await first[0].readuntil(b"\r\n\r\n")
        many = [await asyncio.open_connection(edge.host, edge.port) for _ in range(300)]
        answers = await asyncio.gather(*(_until_closed(reader) for reader, _ in many))
        told = [answer for answer in answers if answer]
        assert all(answer.startswith(b"HTTP/1.1 503 ") for answer in told)
        assert 200 <= len(told) <= 260
        for _, writer in [first, *many]:
            writer.transport.abort()


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), 20.0)
    except ConnectionError:
        return b""


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(CapacityError("full", retry_after_s=2.5), 503), (CapacityError("x", code="no_workers"), 503)],
)
async def test_want_of_capacity_says_when_to_come_back(refusal: CapacityError, status: int) -> None:
    async with serving() as edge:
        edge.router.refusal = refusal
        reply = await ask(edge, post(BODY))
    assert reply.status == status
    assert int(reply.headers["retry-after"]) >= refusal.retry_after_s
    assert float(reply.headers["retry-after-ms"]) == refusal.retry_after_s * 1e3


async def test_without_a_key_not_even_a_body_is_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(hashlib.sha256(b"good").hexdigest())
    async with serving(spec(api_keys_file=str(file))) as edge:
        reader, writer = await asyncio.open_connection(edge.host, edge.port)
        writer.write(post(b"x" * 5_000_000, "Authorization: Bearer bad\r\n")[:1000])
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        reply = Reply(head, b"")
        assert reply.status == 401
        assert reply.headers["www-authenticate"] == 'Bearer realm="kvasir"'
        assert reply.headers["connection"] == "close"
        edge.router.script = lambda stream: stream.finish()
        assert (await ask(edge, post(BODY, "Authorization: Bearer good\r\n"))).status == 200


async def test_a_body_beyond_its_tenants_bytes_is_refused_before_it_is_read() -> None:
    tenancy = {"tenants": [{"name": "default", "body_bytes_per_min": 200_000}]}
    async with serving(tenancy=tenancy) as edge:
        assert (await ask(edge, post(b"x" * 150_000))).code == "invalid_json"
        refused = await ask(edge, post(b"x" * 150_000)[:1000])
        assert (refused.status, refused.code) == (429, "rate_limit_bytes")
        assert 20 <= int(refused.headers["retry-after"]) <= 30
        small = await ask(edge, post(b"x" * 60_000))
        assert (small.status, small.code) == (429, "rate_limit_bytes")
        assert (await ask(edge, post(b"x" * 20_000))).code == "invalid_json"
        large = await ask(edge, post(b"x" * 200_001)[:1000])
        assert (large.status, large.code) == (413, "body_too_large")
        edge.router.script = lambda stream: stream.finish()
        assert (await ask(edge, post(BODY))).status == 200


async def test_a_page_of_a_listed_origin_is_answered_with_errors_too(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(hashlib.sha256(b"good").hexdigest())
    preflight = f"Origin: {CHAT}\r\nAccess-Control-Request-Method: POST\r\n"
    wanted = "Access-Control-Request-Headers: authorization, content-type\r\n"
    async with serving(spec(api_keys_file=str(file), cors={"origins": [CHAT]})) as edge:
        edge.router.script = lambda stream: stream.finish()
        allowed = await ask(edge, get("/v1/chat/completions", preflight + wanted, "OPTIONS"))
        keyed = f"Origin: {CHAT}\r\nAuthorization: Bearer good\r\n"
        replies = [
            await ask(edge, data)
            for data in (
                post(BODY, keyed),
                post(STREAM, keyed),
                post(b"{", keyed),
                post(BODY, f"Origin: {CHAT}\r\n"),
                get("/v1/models", f"{keyed}Transfer-Encoding: x\r\n"),
            )
        ]
        foreign = await ask(
            edge, post(BODY, "Origin: https://evil.example\r\nAuthorization: Bearer good\r\n")
        )
        refused = await ask(edge, get("/", preflight.replace("chat", "evil"), "OPTIONS"))
    assert (allowed.status, allowed.headers["access-control-allow-headers"]) == (
        204,
        "authorization, content-type",
    )
    assert "content-length" not in allowed.headers
    assert [reply.status for reply in replies] == [200, 200, 400, 401, 501]
    for reply in (allowed, *replies):
        assert reply.headers["access-control-allow-origin"] == CHAT
        assert ("vary", "origin") in reply.lines
    assert foreign.status == 200
    assert "access-control-allow-origin" not in foreign.headers
    assert foreign.headers["vary"] == "origin"
    assert refused.status in {403, 404}


async def test_a_foreign_page_cannot_use_a_gateway_that_asks_for_no_key() -> None:
    async with serving() as edge:
        edge.router.script = lambda stream: stream.finish()
        foreign = await ask(edge, post(BODY, "Origin: https://evil.example\r\n"))
        assert (foreign.status, foreign.code) == (403, "origin_not_allowed")
        assert not edge.router.streams
        assert (await ask(edge, post(BODY))).status == 200


async def test_options_tells_the_methods_of_a_path() -> None:
    async with serving() as edge:
        replies = [
            await ask(edge, get(path, method="OPTIONS"))
            for path in ("/v1/models", "/v1/chat/completions", "*", "/nowhere")
        ]
    assert [reply.status for reply in replies] == [204, 204, 204, 404]
    assert [reply.headers["allow"] for reply in replies[:3]] == [
        "GET, HEAD, OPTIONS",
        "POST, OPTIONS",
        "GET, HEAD, POST, DELETE, OPTIONS",
    ]
