"""Clients that violate HTTP or stall are disconnected at a limit, and do not affect others."""

from __future__ import annotations

import asyncio
import json
import select
import socket
from typing import Any

import openai
import pytest

BODY = b'{"model":"kvasir-tiny","messages":[{"role":"user","content":"hi"}]}'
STREAM = BODY[:-1] + b',"stream":true}'
UPLOAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 9000000\r\n\r\n"
PATIENCE_S = 5.0


def post(body: bytes, headers: str = "") -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "malformed_http"),
        (b"GET / HTTP/9.9\r\nHost: t\r\n\r\n", 400, "malformed_http"),
        (b"GET / HTTP/1.1\nHost: t\n\n", 400, "malformed_http"),
        (b"GET / HTTP/1.1\r\nHost : t\r\n\r\n", 400, "malformed_http"),
        (b"GET / HTTP/1.1\r\nHost: t\r\nX: a\r\n b\r\n\r\n", 400, "malformed_http"),
        (b"GET / HTTP/1.1\r\nHost: t\r\nX: \x00\r\n\r\n", 400, "malformed_http"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "missing_host"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "missing_host"),
        (b"GET / HTTP/1.1\r\nHost: a b/c\r\n\r\n", 400, "missing_host"),
        (
            b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            "malformed_http",
        ),
        (
            b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
            400,
            "malformed_http",
        ),
        (b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: -1\r\n\r\n", 400, "malformed_http"),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            400,
            "malformed_http",
        ),
        (
            b"POST / HTTP/1.1\r\nHost: t\r\nExpect: magic\r\nContent-Length: 1\r\n\r\n",
            417,
            "expectation_failed",
        ),
        (b"GET / HTTP/1.1\r\nHost: t\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: t\r\n\r\n", 414, "target_too_long"),
        (b"GET / HTTP/1.1\r\nHost: t\r\n" + b"X: a\r\n" * 200 + b"\r\n", 431, "headers_too_large"),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 9000000\r\n\r\n",
            413,
            "body_too_large",
        ),
    ],
)
async def test_malformed_http_is_refused_and_the_connection_ends(
    edge: Any, data: bytes, status: int, code: str
) -> None:
    reader, writer = await edge.connect()
    writer.write(data)
    reply = await edge.read(reader)
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (status, code)
    assert reply.headers["connection"] == "close"
    assert reply.headers["x-request-id"]
    assert await reader.read() == b""


async def test_endless_headers_are_cut_before_they_end(edge: Any) -> None:
    reader, writer = await edge.connect()
    writer.write(b"GET / HTTP/1.1\r\nHost: t\r\nX: ")
    reading = asyncio.create_task(edge.read(reader))
    while not reading.done():
        writer.write(b"a" * 4096)
        await asyncio.sleep(0)
    assert (await reading).status == 431


async def test_a_body_that_grows_beyond_the_cap_is_refused_readably(start: Any) -> None:
    edge = await start(max_body_bytes=65536)
    reader, writer = await edge.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(20):
        writer.write(b"1000\r\n" + b"a" * 4096 + b"\r\n")
    assert (await edge.read(reader)).status == 413


async def test_a_body_that_is_all_framing_is_refused(start: Any) -> None:
    edge = await start(max_body_bytes=65536)
    reader, writer = await edge.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(40):
        writer.write(b"1;" + b"x" * 4000 + b"\r\na\r\n")
    assert (await edge.read(reader)).status in {400, 413}


async def test_slow_headers_are_cut_at_their_deadline(start: Any) -> None:
    edge = await start(header_timeout_s=0.2)
    reader, writer = await edge.connect()
    writer.write(b"GET / HTTP/1.1\r\nHost: t\r\n")
    trickle = asyncio.create_task(_trickle(writer, b"X: y\r\n"))
    reply = await asyncio.wait_for(edge.read(reader), PATIENCE_S)
    trickle.cancel()
    assert reply.status == 408
    assert json.loads(reply.body)["error"]["code"] == "header_timeout"


async def test_a_slow_body_is_cut_at_its_deadline(start: Any) -> None:
    edge = await start(body_timeout_s=0.2)
    reader, writer = await edge.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 100000\r\n\r\n")
    trickle = asyncio.create_task(_trickle(writer, b"a"))
    reply = await asyncio.wait_for(edge.read(reader), PATIENCE_S)
    trickle.cancel()
    assert reply.status == 408
    assert json.loads(reply.body)["error"]["code"] == "body_timeout"


async def _trickle(writer: asyncio.StreamWriter, data: bytes) -> None:
    while not writer.is_closing():
        writer.write(data)
        await asyncio.sleep(0.02)


async def test_silent_and_idle_connections_are_closed(start: Any) -> None:
    edge = await start(header_timeout_s=0.2, idle_timeout_s=0.2)
    silent, _ = await edge.connect()
    idle, writer = await edge.connect()
    writer.write(b"GET /health/live HTTP/1.1\r\nHost: t\r\n\r\n")
    assert (await edge.read(idle)).status == 200
    assert await asyncio.wait_for(silent.read(), PATIENCE_S) == b""
    assert await asyncio.wait_for(idle.read(), PATIENCE_S) == b""


async def test_a_long_stream_outlives_all_read_deadlines(start: Any) -> None:
    edge = await start(header_timeout_s=0.05, body_timeout_s=0.05, idle_timeout_s=0.05)
    reader, writer = await edge.connect()
    writer.write(post(STREAM))
    stream = await edge.router.submitted()
    stream.emit("a")
    await asyncio.sleep(0.3)
    stream.emit("b")
    stream.finish()
    reply = await edge.read(reader)
    assert reply.body.count(b'"content":"b"') == 1
    assert reply.body.endswith(b"data: [DONE]\n\n")


async def test_more_connections_than_allowed_are_told_so(start: Any) -> None:
    edge = await start(max_connections=2)
    for _ in range(2):
        reader, writer = await edge.connect()
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: t\r\n\r\n")
        assert (await edge.read(reader)).status == 200
    reader, _ = await edge.connect()
    reply = await edge.read(reader)
    assert reply.status == 503
    assert json.loads(reply.body)["error"]["code"] == "too_many_connections"


async def test_a_client_that_does_not_read_is_cut_and_others_are_not(start: Any) -> None:
    edge = await start(stream_buffer_bytes=8192)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (edge.host, edge.port))
    await asyncio.get_running_loop().sock_sendall(sock, post(STREAM))
    slow = await edge.router.submitted(1)
    reader, writer = await edge.connect()
    writer.write(post(STREAM))
    quick = await edge.router.submitted(2)
    reading = asyncio.create_task(edge.read(reader))
    emitted = 0
    while not edge.router.cancelled:
        slow.emit("x" * 1000)
        quick.emit("y")
        emitted += 1
        assert emitted < 5000, "the stream of a client that does not read grows without bound"
        await asyncio.sleep(0)
    quick.finish()
    reply = await reading
    sock.close()
    assert edge.router.cancelled == [slow.request.request_id]
    assert reply.body.count(b'"content":"y"') == emitted
    assert b'outcome="slow_reader"} 1.0' in edge.metrics.render()


def read_until(sock: socket.socket, end: bytes) -> bytes:
    """Everything up to `end`, or to the end of the connection."""
    got = bytearray()
    while not got.endswith(end) and (data := sock.recv(65536)):
        got += data
    return bytes(got)


@pytest.mark.parametrize("headers", ["", "Connection: close\r\n"])
async def test_a_client_that_pauses_within_the_bound_loses_nothing(edge: Any, headers: str) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(PATIENCE_S)
        await asyncio.to_thread(sock.connect, (edge.host, edge.port))
        await asyncio.to_thread(sock.sendall, post(STREAM, headers))
        stream = await edge.router.submitted(1)
        for _ in range(150):
            stream.emit("Z" * 1000)
            await asyncio.sleep(0)
        stream.finish()
        await asyncio.sleep(0)
        answer = await asyncio.to_thread(read_until, sock, b"0\r\n\r\n")
        assert answer.count(b"Z") == 150_000
        assert b"data: [DONE]" in answer[-40:]
        if headers:
            assert await asyncio.to_thread(sock.recv, 1000) == b""
        else:
            await asyncio.to_thread(sock.sendall, b"GET /health/live HTTP/1.1\r\nHost: t\r\n\r\n")
            assert (await asyncio.to_thread(sock.recv, 1000)).startswith(b"HTTP/1.1 200")


async def test_a_whole_answer_that_nobody_reads_is_dropped_at_a_deadline(start: Any) -> None:
    edge = await start(stream_buffer_bytes=4096, body_timeout_s=0.3)

    def script(stream: Any) -> None:
        stream.emit("x" * (8 << 20))
        stream.finish()

    edge.router.script = script
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (edge.host, edge.port))
        await loop.sock_sendall(sock, post(BODY))
        poll = select.poll()
        poll.register(sock, 0)
        cut = await asyncio.to_thread(poll.poll, PATIENCE_S * 1000)
    assert [event & select.POLLHUP for _, event in cut] == [select.POLLHUP]


async def test_a_client_that_sends_all_before_it_reads_can_read_the_refusal(edge: Any) -> None:
    client = await edge.client()
    with pytest.raises(openai.APIStatusError) as caught:
        await client.completions.create(model="kvasir-tiny", prompt="x" * (9 << 20))
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


async def test_pipelined_requests_are_answered_in_order(edge: Any) -> None:
    edge.router.script = lambda stream: stream.finish()
    reader, writer = await edge.connect()
    live = b"GET /health/live HTTP/1.1\r\nHost: t\r\n\r\n"
    writer.write(post(BODY) + live + post(BODY) + live)
    kinds = [json.loads((await edge.read(reader)).body).get("object", "live") for _ in range(4)]
    assert kinds == ["chat.completion", "live"] * 2


async def test_a_flood_of_pipelined_requests_is_cut(edge: Any) -> None:
    reader, writer = await edge.connect()
    writer.write(post(BODY) * 20)
    assert await edge.router.cancels() == [edge.router.streams[0].request.request_id]
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await edge.read(reader)


async def test_nothing_is_served_after_a_request_that_closes(edge: Any) -> None:
    reader, writer = await edge.connect()
    live = b"GET /health/live HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"
    writer.write(live + live)
    assert (await edge.read(reader)).status == 200
    assert await reader.read() == b""


async def test_expect_100_continue_is_answered_before_the_body(edge: Any) -> None:
    edge.router.script = lambda stream: stream.finish()
    reader, writer = await edge.connect()
    data = post(BODY, "Expect: 100-continue\r\n")
    writer.write(data[: -len(BODY)])
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(BODY)
    assert (await edge.read(reader)).status == 200


async def test_http_1_0_streams_until_the_connection_closes(edge: Any) -> None:
    def script(stream: Any) -> None:
        stream.emit("a")
        stream.finish()

    edge.router.script = script
    reader, writer = await edge.connect()
    writer.write(post(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0"))
    answer = await reader.read()
    assert b"transfer-encoding" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_head_has_the_length_and_no_body(edge: Any) -> None:
    reader, writer = await edge.connect()
    writer.write(b"HEAD /health/live HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    assert b"content-length: 17\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-DEF_1.2:3", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("<script>", False)],
)
async def test_a_sane_request_id_is_kept(edge: Any, given: str, kept: bool) -> None:
    reply = await edge.get("/health/live", f"X-Request-Id: {given}\r\n")
    assert (reply.headers["x-request-id"] == given) is kept


async def test_the_same_request_id_twice_makes_two_requests(edge: Any) -> None:
    edge.router.script = lambda stream: stream.finish()
    for _ in range(2):
        await edge.raw(post(BODY, "X-Request-Id: mine\r\n"))
    first, second = (stream.request.request_id for stream in edge.router.streams)
    assert first != second
    assert first.startswith("mine-")


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", True),
        ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", False),
        ("ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", False),
        ("nonsense", False),
    ],
)
async def test_a_valid_traceparent_travels_with_the_request(edge: Any, header: str, kept: bool) -> None:
    edge.router.script = lambda stream: stream.finish()
    await edge.raw(post(BODY, f"traceparent: {header}\r\n"))
    assert edge.router.streams[0].request.trace_context == (header if kept else "")
