"""The API server's client: bounded in time and size, verified, with the current token."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import AddrInfoType
from tests.kit.cluster import api_server as helper
from tests.kit.cluster.api_server import SLICES, Fault
from tests.kit.cluster.api_wire import certificate_for
from tests.kit.cluster.slices import Pod, endpoint_slice

from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.kubernetes import api as kubernetes_api
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.api import GONE, PAGE_ITEMS, ApiError, ApiServer

Server = helper.ApiServer


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with helper.api_server(tmp_path) as made:
        made.write_credentials(tmp_path / "account")
        yield made


@pytest.fixture
def api(server: Server, tmp_path: Path) -> ApiServer:
    return client(server, tmp_path)


def client(server: Server, tmp_path: Path, *, timeout_s: float = 10.0) -> ApiServer:
    access = Access.in_cluster(tmp_path / "account", server.environment())
    return ApiServer(access, timeout_s=timeout_s)


async def the_error(api: ApiServer) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await api.list(SLICES, {})
    return raised.value


async def test_a_list_is_whole_however_many_pages_it_comes_in(server: Server, api: ApiServer) -> None:
    names = {f"s{number}" for number in range(2 * PAGE_ITEMS + 1)}
    for name in names:
        server.put(SLICES, endpoint_slice("decode", [], name=name))
    listing = await api.list(SLICES, {"labelSelector": "kvasir.dev/pool=decode"})
    assert set(listing.items) == names
    assert listing.version == str(server.version)
    assert len(server.asked) == 3
    assert (await api.list(SLICES, {"labelSelector": "kvasir.dev/pool=prefill"})).items == {}


async def test_a_watch_tells_changes_and_bookmarks_and_ends_in_time(server: Server, api: ApiServer) -> None:
    since = str(server.version)
    server.put(SLICES, endpoint_slice("decode", [], name="one"))
    server.delete(SLICES, "one")
    async with aclosing(api.watch(SLICES, {}, since, 0.5)) as events:
        told = [(event.kind, event.name, event.version) async for event in events]
    assert told == [("ADDED", "one", "101"), ("DELETED", "one", "102"), ("BOOKMARK", "", "102")]


async def test_a_forgotten_version_is_gone_whether_by_status_or_by_event(
    server: Server, api: ApiServer
) -> None:
    for fault in (Fault("watch", status=GONE), Fault("watch", gone=True)):
        server.faults.append(fault)
        with pytest.raises(ApiError) as raised:
            await anext(api.watch(SLICES, {}, "100", 1.0))
        assert raised.value.status == GONE


async def test_a_refusal_says_what_the_server_said_and_when_to_come_again(
    server: Server, api: ApiServer
) -> None:
    server.faults.append(Fault("list", status=429, retry_after=7))
    error = await the_error(api)
    assert (error.status, error.retry_after_s, error.message) == (429, 7.0, "made to fail: 429")
    server.faults.append(Fault("list", status=503, retry_after=86_400))
    assert (await the_error(api)).retry_after_s == kubernetes_api.MAX_RETRY_AFTER_S


async def test_the_token_is_that_of_the_moment(server: Server, api: ApiServer, tmp_path: Path) -> None:
    await api.list(SLICES, {})
    server.tokens = {"token-2": "system:serviceaccount:default:router"}
    assert (await the_error(api)).status == 401
    server.write_credentials(tmp_path / "account", "token-2")
    await api.list(SLICES, {})


@pytest.mark.parametrize("token", [b"", b"two words", b"line\nline", b"\xff\xff"])
async def test_a_file_that_holds_no_token_is_not_sent(
    server: Server, api: ApiServer, tmp_path: Path, token: bytes
) -> None:
    (tmp_path / "account" / "token").write_bytes(token)
    assert "does not hold one token" in (await the_error(api)).message
    assert server.asked == []


async def test_a_server_of_another_authority_hears_nothing(
    server: Server, api: ApiServer, tmp_path: Path
) -> None:
    ca, _ = certificate_for(server.host)
    (tmp_path / "account" / "ca.crt").write_bytes(ca)
    assert "certificate is not signed by the cluster's authority" in (await the_error(api)).message
    assert server.asked == []
    (tmp_path / "account" / "ca.crt").unlink()
    assert "ca.crt: No such file" in (await the_error(api)).message


async def test_a_server_that_does_not_answer_is_left_in_time(server: Server, tmp_path: Path) -> None:
    server.faults.append(Fault("list", mute=True))
    assert "did not answer within 0.5 s" in (await the_error(client(server, tmp_path, timeout_s=0.5))).message


async def test_a_watch_that_never_ends_is_left_in_time(server: Server, tmp_path: Path) -> None:
    server.faults.append(Fault("watch", mute=True))
    with pytest.raises(ApiError, match="did not end when it should"):
        await anext(client(server, tmp_path, timeout_s=0.5).watch(SLICES, {}, "100", 0.1))


async def test_a_watch_that_is_cancelled_closes_its_connection(server: Server, api: ApiServer) -> None:
    async def follow() -> None:
        async with aclosing(api.watch(SLICES, {}, "100", 60.0)) as events:
            async for _ in events:
                pass

    following = asyncio.create_task(follow())
    await server.until(lambda: "watch" in server.verbs())
    following.cancel()
    await asyncio.wait({following})
    server.put(SLICES, endpoint_slice("decode", [], name="one"))
    async with asyncio.timeout(5.0):
        await server.ended()


async def test_a_dead_connection_is_found_and_no_proxy_of_the_environment_is_used(
    server: Server, api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, kept = kubernetes_api._socket, list[int]()

    def spy(address: AddrInfoType) -> socket.socket:
        made = make(address)
        kept.append(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE))
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        return made

    monkeypatch.setattr(kubernetes_api, "_socket", spy)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    await api.list(SLICES, {})
    assert (server.verbs(), kept) == (["list"], [15])


async def test_a_watch_that_breaks_off_in_an_event_tells_only_whole_ones(
    server: Server, api: ApiServer
) -> None:
    server.faults.append(Fault("watch", cut_after=1))
    for name in ("one", "two"):
        server.put(SLICES, endpoint_slice("decode", [], name=name))
    events = api.watch(SLICES, {}, "100", 5.0)
    assert (await anext(events)).name == "one"
    with pytest.raises(ApiError, match="connection was closed"):
        await anext(events)


async def test_an_answer_that_is_too_large_is_not_read_to_its_end(
    server: Server, api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "MAX_OBJECT_BYTES", 4096)
    server.put(SLICES, endpoint_slice("decode", [Pod(f"pod-{n}", "10.0.0.1") for n in range(2000)]))
    assert "too large" in (await the_error(api)).message
    with pytest.raises(ApiError, match="too large"):
        await anext(api.watch(SLICES, {}, "100", 1.0))


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n[1,2]",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnull",
        b"HTTP/1.1 200 OK\r\ncontent-length: 40\r\n\r\n{",
        b"HTTP/1.1 302 Found\r\nlocation: https://other/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + 100_000 * b"x",
        b"HTTP/1.1 200 OK\r\n" + 2000 * b"x: 0123456789\r\n" + b"\r\n",
        b"",
    ],
)
async def test_what_is_no_answer_of_an_api_server_is_an_error_of_its_own(
    tmp_path: Path, answer: bytes
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await helper.start_server(tmp_path)
    server.stop()
    server.write_credentials(tmp_path / "account")
    listening = await asyncio.start_server(serve, server.host, server.port, ssl=server.context)
    await the_error(client(server, tmp_path))
    listening.close()


async def test_an_answer_that_stops_in_its_middle_is_left_in_time(tmp_path: Path) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 40\r\n\r\n{")

    server = await helper.start_server(tmp_path)
    server.stop()
    server.write_credentials(tmp_path / "account")
    listening = await asyncio.start_server(serve, server.host, server.port, ssl=server.context)
    assert "did not answer within 0.5 s" in (await the_error(client(server, tmp_path, timeout_s=0.5))).message
    listening.close()
    for writer in writers:
        writer.close()


def test_outside_a_cluster_it_says_so(tmp_path: Path) -> None:
    for environ in ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "x"}):
        with pytest.raises(ConfigError, match="inside a cluster only"):
            Access.in_cluster(tmp_path, environ)
    with pytest.raises(ConfigError, match=r"set discovery\.kubernetes\.namespace"):
        Access("h", 1, tmp_path).namespace()


async def test_it_speaks_to_an_api_server_over_ipv6(tmp_path: Path) -> None:
    async with helper.api_server(tmp_path, "::1") as server:
        server.write_credentials(tmp_path / "account")
        assert (await client(server, tmp_path).list(SLICES, {})).items == {}


def test_certificates_are_always_verified(tmp_path: Path) -> None:
    ca, _ = certificate_for("127.0.0.1")
    (tmp_path / "ca.crt").write_bytes(ca)
    context = Access("h", 1, tmp_path).context()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert len(context.get_ca_certs()) == 1


async def test_objects_come_as_they_were_sent(server: Server, api: ApiServer) -> None:
    made = server.put(SLICES, endpoint_slice("decode", [Pod("ä", "10.0.0.1")], name="one"))
    listing = await api.list(SLICES, {})
    assert json.loads(listing.items["one"]) == made
