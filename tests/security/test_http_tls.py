"""HTTPS on the gateway: client certificates, ciphers, timeouts, and certificate changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from load_tests.scenarios.scorecard.clients.http_cases import CASES, canary, read_answer
from tests.kit.gateway.http_edge import Edge, serving
from tests.kit.gateway.scripted_router import ScriptedStream

from kvasir.config.spec.deployment import GatewaySpec
from kvasir.core.errors import ConfigError
from kvasir.core.messages import WorkerFrame
from kvasir.core.requests import Delta, StepBatch
from kvasir.native import IS_NATIVE, Fan, StreamTokens
from kvasir.ports.router import Lane
from kvasir.wire.codec import encode_to_router
from kvasir_platform.cluster.certificates import Authority
from kvasir_platform.edge.address import shared

NAME = "api.example.com"
PATIENCE_S = 10.0
BODY = b'{"model":"kvasir-tiny","messages":[{"role":"user","content":"hi"}]}'
STREAM = BODY[:-1] + b',"stream":true}'
DAY_S = 86_400.0
SERIES = "kvasir_gateway_certificate_expiry_timestamp_seconds"
OURS = Authority.make("ours", time.time() - DAY_S, time.time() + DAY_S)
THEIRS = Authority.make("theirs", time.time() - DAY_S, time.time() + DAY_S)

Server = tuple[Edge, "Certificates"]


def post(body: bytes) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Certificates:
    """The gateway's files, and contexts for its clients."""

    def __init__(self, folder: Path) -> None:
        self.own, self.clients = folder / "own.pem", folder / "clients.pem"
        self.clients.write_bytes(OURS.pem)
        self.issue()

    def issue(self, begins_s: float = -3600.0, ends_s: float = 3600.0) -> None:
        """Put a certificate in place, valid between these moments from now."""
        now = time.time()
        self.swap(OURS.certify("spiffe://x/gateway", NAME, now + begins_s, now + ends_s))

    def swap(self, content: bytes) -> None:
        fresh = self.own.with_suffix(".fresh")
        fresh.write_bytes(content)
        fresh.replace(self.own)

    def trusting(self, client: bytes | None = None) -> ssl.SSLContext:
        """A client's context, with a certificate of its own if one is given."""
        context = ssl.create_default_context(cadata=OURS.pem.decode())
        context.set_alpn_protocols(["h2", "http/1.1"])
        if client is not None:
            file = self.own.with_name("client.pem")
            file.write_bytes(client)
            context.load_cert_chain(file)
        return context


@asynccontextmanager
async def secure(folder: Path, tls: dict[str, Any] | None = None, **limits: Any) -> AsyncIterator[Server]:
    files = Certificates(folder)
    fields = {"cert_file": str(files.own), "key_file": str(files.own)} | (tls or {})
    spec = GatewaySpec.model_validate({"port": 0, "drain_timeout_s": 0.0, "tls": fields} | limits)
    async with serving(spec) as edge:
        yield edge, files


@asynccontextmanager
async def connected(
    server: Server, context: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    edge, files = server
    reader, writer = await asyncio.open_connection(
        edge.host, edge.port, ssl=context or files.trusting(), server_hostname=NAME, **options
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def lane_of(stream: ScriptedStream) -> tuple[Fan, Lane]:
    """The stream's lane, and a worker's lanes of which it is the only one, as `leg`."""
    lane = stream.sink.lane(stream.request.request_id)
    assert lane is not None
    fan = Fan()
    fan.add("w", "leg", StreamTokens(), lane)
    return fan, lane


def message(offset: int, text: str) -> bytes:
    return encode_to_router(WorkerFrame(1, 0, StepBatch((Delta("leg", offset, (7,), text),))))


def serial(writer: asyncio.StreamWriter) -> str:
    return str(writer.get_extra_info("peercert")["serialNumber"])


async def test_requests_are_served_over_tls_with_http_1_1_agreed(tmp_path: Path) -> None:
    async with secure(tmp_path) as server, connected(server) as (reader, writer):
        agreed = writer.get_extra_info("ssl_object")
        assert (agreed.selected_alpn_protocol(), agreed.version()) == ("http/1.1", "TLSv1.3")
        for turn in ("first", "second"):
            writer.write(canary(turn))
            answer = await read_answer(reader)
            assert (answer.status, answer.request_id) == (200, turn)


@pytest.mark.parametrize(("minimum", "welcome"), [("1.2", True), ("1.3", False)])
async def test_older_versions_of_tls_are_refused(tmp_path: Path, minimum: str, welcome: bool) -> None:
    async with secure(tmp_path, {"minimum": minimum}) as server:
        context = server[1].trusting()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        try:
            async with connected(server, context) as (_, writer):
                cipher = writer.get_extra_info("cipher")[0]
                assert welcome
                assert cipher.startswith("ECDHE")
        except (ssl.SSLError, ConnectionError):
            assert not welcome


@pytest.mark.skipif(not IS_NATIVE, reason="the twin opens no lane")
async def test_what_a_lane_sends_over_tls_arrives_in_order(tmp_path: Path) -> None:
    async with secure(tmp_path) as server, connected(server) as (reader, writer):
        writer.write(post(STREAM))
        stream = await server[0].router.submitted(1)
        stream.emit("a")
        fan, lane = lane_of(stream)
        assert fan.take("w", message(0, "b"), 1.0)[0] == []
        assert lane.open
        stream.emit("c")
        stream.finish()
        answer = await read_answer(reader)
        assert re.findall(rb'"content":"(\w)"', answer.body) == [b"a", b"b", b"c"]


@pytest.mark.skipif(not IS_NATIVE, reason="the twin opens no lane")
async def test_a_client_over_tls_that_does_not_read_gets_no_more_from_its_lane(tmp_path: Path) -> None:
    async with (
        secure(tmp_path, stream_buffer_bytes=8192) as server,
        connected(server, limit=1) as (_, writer),
    ):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post(STREAM))
        stream = await server[0].router.submitted(1)
        stream.emit("a")
        (fan, lane), sent = lane_of(stream), 0
        while fan.take("w", message(sent, "x" * 1000), 1.0)[0] == []:
            sent += 1
            assert sent < 20_000, "the lane of a client that does not read grows without bound"
            await asyncio.sleep(0)
        assert not lane.open


async def test_a_stream_over_tls_is_whole_and_its_client_leaving_is_noticed(tmp_path: Path) -> None:
    async with secure(tmp_path) as server:
        router = server[0].router
        async with connected(server) as (reader, writer):
            writer.write(post(STREAM))
            stream = await router.submitted(1)
            for _ in range(200):
                stream.emit("Z" * 1000)
                await asyncio.sleep(0)
            stream.finish()
            answer = await read_answer(reader)
            assert answer.body.count(b"Z") == 200_000
            writer.write(post(STREAM))
            second = await router.submitted(2)
            second.emit("a")
        assert await router.cancels() == [second.request.request_id]


async def test_a_client_over_tls_that_does_not_read_is_cut(tmp_path: Path) -> None:
    async with (
        secure(tmp_path, stream_buffer_bytes=8192) as server,
        connected(server, limit=1) as (_, writer),
    ):
        router = server[0].router
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post(STREAM))
        stream = await router.submitted(1)
        emitted = 0
        while not router.cancelled:
            stream.emit("x" * 1000)
            emitted += 1
            assert emitted < 20_000, "the stream of a client that does not read grows without bound"
            await asyncio.sleep(0)


@pytest.mark.parametrize("case", [c for c in CASES if len(c.data) > 5000 or c.code == "missing_host"][:6],
                         ids=lambda case: case.name)  # fmt: skip
async def test_refusals_can_be_read_over_tls(tmp_path: Path, case: Any) -> None:
    async with secure(tmp_path) as server, connected(server) as (reader, writer):
        writer.write(case.data)
        answer = await read_answer(reader, head=case.head)
        assert (answer.status,) == case.statuses
        assert json.loads(answer.body)["error"]["code"] == case.code


async def test_a_changed_certificate_is_taken_up_and_no_stream_ends(tmp_path: Path) -> None:
    async with secure(tmp_path) as server, connected(server) as (reader, writer):
        before = serial(writer)
        writer.write(post(STREAM))
        stream = await server[0].router.submitted()
        server[1].issue()
        while True:
            async with connected(server) as (_, other):
                if serial(other) != before:
                    break
            await asyncio.sleep(0.05)
        stream.emit("still here")
        stream.finish()
        assert b"still here" in (await read_answer(reader)).body


async def test_the_metrics_say_when_the_shown_certificate_expires(tmp_path: Path) -> None:
    async with secure(tmp_path) as server:
        first = expiry(server[0])
        assert 3500.0 < first - time.time() <= 3600.0
        server[1].issue(ends_s=7200.0)
        while expiry(server[0]) == first:
            async with connected(server):
                await asyncio.sleep(0.05)
        assert 7100.0 < expiry(server[0]) - time.time() <= 7200.0
    async with serving(GatewaySpec(port=0, drain_timeout_s=0.0)) as plain:
        assert SERIES.encode() not in plain.metrics.render()


def expiry(edge: Edge) -> float:
    """When the certificate expires, in seconds since the epoch."""
    (line,) = [line for line in edge.metrics.render().decode().splitlines() if line.startswith(SERIES)]
    return float(line.split()[1])


async def test_a_socket_that_others_share_is_listened_on(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    spec = GatewaySpec.model_validate(
        {"port": 0, "drain_timeout_s": 0.0, "tls": {"cert_file": str(files.own), "key_file": str(files.own)}}
    )
    async with (
        serving(spec, listen=shared("127.0.0.1", 0)) as edge,
        connected((edge, files)) as (reader, writer),
    ):
        writer.write(canary("shared"))
        assert (await read_answer(reader)).request_id == "shared"


SPOILT: dict[str, Callable[[Certificates], None]] = {
    "half a file": lambda files: files.swap(files.own.read_bytes()[:200]),
    "expired": lambda files: files.issue(-7200.0, -3600.0),
    "gone": lambda files: files.own.unlink(),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
async def test_the_last_good_certificate_stays_when_a_bad_one_comes(
    tmp_path: Path, spoil: Callable[[Certificates], None], caplog: pytest.LogCaptureFixture
) -> None:
    async with secure(tmp_path) as server:
        async with connected(server) as (_, writer):
            before = serial(writer)
        spoil(server[1])
        async with asyncio.timeout(PATIENCE_S):
            while not (told := [each for each in caplog.records if "last valid" in each.getMessage()]):
                async with connected(server) as (_, writer):
                    assert serial(writer) == before
                await asyncio.sleep(0.05)
        async with connected(server) as (_, writer):
            assert serial(writer) == before
        assert len(told) == 1


async def test_a_handshake_that_dawdles_is_cut_and_was_counted(tmp_path: Path) -> None:
    async with secure(tmp_path, {"handshake_timeout_s": 0.3}, max_connections=1) as server:
        edge = server[0]
        with socket.create_connection((edge.host, edge.port)) as silent:
            silent.setblocking(False)
            with pytest.raises((ssl.SSLError, ConnectionError)):
                async with connected(server):
                    pass
            loop = asyncio.get_running_loop()
            assert await asyncio.wait_for(_end(loop, silent), PATIENCE_S)
        async with connected(server) as (reader, writer):
            writer.write(canary("after"))
            assert (await read_answer(reader)).request_id == "after"
        assert b'outcome="tls_failed"} 1.0' in edge.metrics.render()


async def _end(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bool:
    try:
        return await loop.sock_recv(sock, 10) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: t\r\n\r\n", os.urandom(300), b"\x16\x03\x01\x40\x00"]
)
async def test_what_is_not_tls_is_cut_and_others_are_served(tmp_path: Path, data: bytes) -> None:
    async with secure(tmp_path, {"handshake_timeout_s": 0.5}) as server:
        edge = server[0]
        reader, writer = await asyncio.open_connection(edge.host, edge.port)
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            assert b"HTTP/1.1" not in await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.transport.abort()
        async with connected(server) as (reader, writer):
            writer.write(canary("other"))
            assert (await read_answer(reader)).status == 200


@pytest.mark.parametrize(
    ("authority", "welcome"), [(OURS, True), (THEIRS, False), (None, False)], ids=["ours", "theirs", "none"]
)
async def test_with_an_authority_for_clients_only_its_own_may_connect(
    tmp_path: Path, authority: Authority | None, welcome: bool
) -> None:
    now = time.time()
    client = (
        None if authority is None else authority.certify("spiffe://x/client", "client", now - 60, now + 3600)
    )
    async with secure(tmp_path, {"client_ca_file": str(tmp_path / "clients.pem")}) as server:
        try:
            async with connected(server, server[1].trusting(client)) as (reader, writer):
                writer.write(canary("mine"))
                assert (await read_answer(reader)).status == 200
                assert welcome
        except (ssl.SSLError, ConnectionError, EOFError):
            assert not welcome


async def test_a_bad_operators_certificate_stops_the_start_with_the_reason(tmp_path: Path) -> None:
    operator = tmp_path / "operator.pem"
    operator.write_text("nothing")
    tls = {"client_ca_file": str(tmp_path / "clients.pem"), "operator_cert_file": str(operator)}
    with pytest.raises(ConfigError, match=r"operator\.pem holds no whole PEM certificate"):
        async with secure(tmp_path, tls):
            pass


async def test_a_certificate_that_cannot_serve_stops_the_start_with_the_reason(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    files.issue(-7200.0, -3600.0)
    spec = GatewaySpec.model_validate(
        {"port": 0, "tls": {"cert_file": str(files.own), "key_file": str(files.own)}}
    )
    with pytest.raises(ConfigError, match=r"own\.pem expired at .*; renew it"):
        async with serving(spec):
            pass
