"""Connections are reused after complete responses, for one minute."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.kit.gateway.classifier_server import ClassifierServer, classifier_server

from kvasir.config.checks.outbound import parse_url
from kvasir_platform.cluster.certificates import Authority
from kvasir_platform.gateway.http.outbound import client_context
from kvasir_platform.gateway.http.outbound_client import (
    MAX_BODY_BYTES,
    OutboundClient,
    OutboundEndpoint,
    OutboundError,
)

PATIENCE_S = 30.0
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Clock:
    now_s = 0.0

    def now(self) -> float:
        return self.now_s


@asynccontextmanager
async def posting(reply: bytes) -> AsyncIterator[tuple[OutboundClient, ClassifierServer, Clock]]:
    clock = Clock()
    async with classifier_server(lambda _: reply) as server:
        poster = OutboundClient(
            OutboundEndpoint(parse_url(server.url), private=True), connections=1, now=clock.now
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield poster, server, clock
        finally:
            await poster.close()


@pytest.mark.parametrize(
    ("reply", "body"),
    [
        (LENGTH, b"{}"),
        (CHUNKED + b"3;x=y\r\n{\n\n\r\n2\r\n}\n\r\n0\r\n\r\n", b"{\n\n}\n"),
        (CHUNKED + b"2\r\n{}\r\n0\r\nx: y\r\n\r\n", b"{}"),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + LENGTH, b"{}"),
    ],
)
async def test_a_connection_is_reused_after_a_whole_response(reply: bytes, body: bytes) -> None:
    async with posting(reply) as (poster, server, _):
        assert [await poster.post(b"{}") for _ in range(3)] == [body] * 3
        assert server.connections == 1


@pytest.mark.parametrize("reply", [LENGTH, CHUNKED + b"2\r\n{}\r\n0\r\n\r\n"])
@pytest.mark.parametrize("more", [b"x", b"\r\n", LENGTH])
async def test_what_follows_a_response_is_an_error_and_never_the_next_response(
    reply: bytes, more: bytes
) -> None:
    async with posting(reply + more) as (poster, server, _):
        for _ in range(2):
            with pytest.raises(OutboundError) as error:
                await poster.post(b"{}")
            assert not error.value.again
        assert server.connections == 2


@pytest.mark.parametrize(
    "reply",
    [
        CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (MAX_BODY_BYTES * 3, b"x" * MAX_BODY_BYTES * 3),
        CHUNKED + b"1;" + b"y" * (MAX_BODY_BYTES * 3),
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1),
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000 + LENGTH,
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
)
async def test_a_response_beyond_a_bound_is_refused_and_its_connection_is_closed(reply: bytes) -> None:
    async with posting(reply) as (poster, server, _):
        for _ in range(2):
            with pytest.raises(OutboundError) as error:
                await poster.post(b"{}")
            assert not error.value.again
        assert server.connections == 2


async def test_a_chunked_body_has_the_same_bound_as_another() -> None:
    for size in (MAX_BODY_BYTES, MAX_BODY_BYTES + 1):
        async with posting(CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"x" * size)) as (poster, _, _):
            if size == MAX_BODY_BYTES:
                assert len(await poster.post(b"{}")) == size
            else:
                with pytest.raises(OutboundError, match="too large"):
                    await poster.post(b"{}")


async def test_a_connection_is_not_reused_after_a_minute() -> None:
    async with posting(LENGTH) as (poster, server, clock):
        for now_s, connections in ((0.0, 1), (59.0, 1), (60.0, 2), (119.0, 2), (120.0, 3)):
            clock.now_s = now_s
            await poster.post(b"{}")
            assert server.connections == connections


async def test_a_cancelled_request_gives_its_place_in_the_pool_back() -> None:
    async with posting(LENGTH) as (poster, server, _):
        server.gate.clear()
        asked = [asyncio.ensure_future(poster.post(b"{}")) for _ in range(3)]
        await server.met.wait()
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        server.gate.set()
        assert await poster.post(b"{}") == b"{}"


async def test_https_is_posted_to_the_verified_name_only(tmp_path: Path) -> None:
    now = time.time()
    authority = Authority.make("ours", now - 60, now + 3600)
    own, trusted = tmp_path / "own.pem", tmp_path / "trusted.pem"
    own.write_bytes(authority.certify("spiffe://x/judge", "judge.example.com", now - 60, now + 3600))
    trusted.write_bytes(authority.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own)
    server = ClassifierServer(reply=lambda _: LENGTH)
    server.gate.set()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    port = listening.sockets[0].getsockname()[1]

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    def poster(host: str) -> OutboundClient:
        url = parse_url(f"https://{host}:{port}/judge")
        endpoint = OutboundEndpoint(url, private=True, context=client_context(str(trusted)))
        return OutboundClient(endpoint, connections=1, now=time.monotonic, resolve=resolve)

    good, bad = poster("judge.example.com"), poster("other.example.com")
    assert [await good.post(b"{}") for _ in range(2)] == [b"{}"] * 2
    with pytest.raises(OutboundError, match="no connection"):
        await bad.post(b"{}")
    assert (server.connections, len(server.asked)) == (1, 2)
    assert f"host: judge.example.com:{port}\r\n" in server.heads[0].lower()
    await good.close()
    listening.close()
