"""What a visitor gets: the page at `/`, the version, and the health checks of other servers."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
from pathlib import Path
from typing import Any

import pytest
from tests.kit.gateway.http_edge import Edge, serving

from kvasir.config.spec.edge import GatewaySpec


def answered(edge: Edge, method: str, path: str, key: str = "") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection(edge.host, edge.port, timeout=10)
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        return response.status, response.headers.get("content-security-policy", ""), response.read()
    finally:
        connection.close()


async def asked(edge: Edge, method: str, path: str, key: str = "") -> tuple[int, str, bytes]:
    return await asyncio.to_thread(answered, edge, method, path, key)


async def test_the_page_says_how_to_call_the_server() -> None:
    async with serving() as edge:
        status, policy, page = await asked(edge, "GET", "/")
        assert status == 200
        assert f"http://127.0.0.1:{edge.port}/v1/chat/completions".encode() in page
        assert b"kvasir-tiny" in page
        assert "default-src 'none'" in policy


async def test_where_keys_are_required_the_page_names_no_model_and_the_version_needs_a_key(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(hashlib.sha256(b"secret").hexdigest() + "\n")
    async with serving(GatewaySpec(port=0, drain_timeout_s=0.0, api_keys_file=str(keys))) as edge:
        status, _, page = await asked(edge, "GET", "/")
        assert (status, b"kvasir-tiny" in page, b"Bearer KEY" in page) == (200, False, True)
        assert (await asked(edge, "GET", "/version"))[0] == 401
        assert (await asked(edge, "GET", "/version", "secret"))[0] == 200


async def test_the_page_names_the_host_that_was_asked() -> None:
    async with serving() as edge:
        reader, writer = await asyncio.open_connection(edge.host, edge.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: [::1]\r\nconnection: close\r\n\r\n")
        page = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert b"http://[::1]/v1" in page


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")])
async def test_health_checks_of_other_servers_say_whether_it_serves(method: str, path: str) -> None:
    async with serving() as edge:
        assert (await asked(edge, method, path))[0] == 200
        edge.router.reason = "no workers"
        assert (await asked(edge, method, path))[0] == 503


async def test_the_version_is_that_of_kvasir() -> None:
    async with serving() as edge:
        body: Any = json.loads((await asked(edge, "GET", "/version"))[2])
        assert set(body) == {"version"}
