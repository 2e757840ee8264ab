"""The console's files over HTTP: open to everyone, bounded, and a build of the committed sources."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.kit.processes import free_port

import kvasir_platform.gateway.console
from kvasir.core.errors import CapacityError, ConfigError
from kvasir_platform.gateway.console.shared_page import KEPT_S, MOST_WAITING, SharedPage
from kvasir_platform.gateway.console.site_files import read_site
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.http.inner_exchange import InnerExchange

CONSOLE = Path(kvasir_platform.gateway.console.__file__).parent
GZIP = "Accept-Encoding: br, gzip\r\n"
MOST_SENT = 300_000


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


async def guarded(start: Any, tmp_path: Path) -> Any:
    """A gateway that asks for keys: `good` is an operator's."""
    keys = tmp_path / "keys"
    keys.write_text(hashlib.sha256(b"good").hexdigest())
    return await start(api_keys_file=str(keys))


def test_the_committed_build_is_one_of_the_committed_sources() -> None:
    web = CONSOLE / "web"
    digest = hashlib.sha256()
    for path in sorted(web.rglob("*"), key=lambda path: path.relative_to(web).as_posix().encode()):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(web).as_posix()}\n{len(content)}\n".encode() + content)
    recorded = json.loads((CONSOLE / "site" / "build.json").read_text())["sources"]
    assert recorded == digest.hexdigest(), "the console is not built from its sources: run `make console`"


def test_no_file_names_another_host() -> None:
    for path in [*(CONSOLE / "site").iterdir(), CONSOLE / "web" / "package-lock.json"]:
        hosts = set(re.findall(r"https?://([^/\"'\s`)]+)", path.read_text(encoding="utf-8")))
        if path.name == "package-lock.json":
            assert "resolved" not in path.read_text(encoding="utf-8")
        else:
            # Names of XML namespaces, which are never asked.
            assert hosts <= {"www.w3.org"}, path.name


def test_the_licences_of_all_that_is_bundled_ship_with_it() -> None:
    bundled = json.loads((CONSOLE / "web" / "package.json").read_text())["dependencies"]
    licences = read_site()["licenses.txt"].plain.decode()
    assert set(re.findall(r"^## (\S+) - ", licences, re.MULTILINE)) == set(bundled)
    assert licences.count("Copyright (c)") == len(bundled)


async def test_everyone_gets_the_page_and_only_operators_its_data(start: Any, tmp_path: Path) -> None:
    edge = await guarded(start, tmp_path)
    page = await edge.get("/console/")
    assert page.status == 200
    for name in read_site():
        assert (await edge.get(f"/console/{name}")).status == 200
    for data in ("status", "requests", "prefixes", "metrics", "costs", "live"):
        reply = await edge.get(f"/console/{data}")
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (401, "invalid_api_key")
        if data != "live":
            assert (await edge.get(f"/console/{data}", bearer("good"))).status == 200


async def test_a_viewer_gets_the_pages_as_events(edge: Any) -> None:
    reader, writer = await edge.connect()
    writer.write(b"GET /console/live HTTP/1.1\r\nHost: t\r\n\r\n")
    assert b"content-type: text/event-stream" in await reader.readuntil(b"\r\n\r\n")
    for name in (b"status", b"requests"):
        await reader.readuntil(b"event: " + name + b"\ndata: ")
        assert "in_flight" in json.loads(await reader.readuntil(b"\n\n"))


async def test_a_viewer_gets_the_page_that_its_view_shows(edge: Any) -> None:
    reader, writer = await edge.connect()
    writer.write(b"GET /console/live?pages=status HTTP/1.1\r\nHost: t\r\n\r\n")
    for _ in range(2):
        shown = await reader.readuntil(b"event: status\ndata: ")
        assert b"event: requests" not in shown
        assert "in_flight" in json.loads(await reader.readuntil(b"\n\n"))


async def test_the_page_may_load_nothing_from_outside_and_run_nothing_inline(edge: Any) -> None:
    page = await edge.get("/console/")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    text = page.body.decode()
    assert re.findall(r"<script(?![^>]*\bsrc=)|\bstyle=|\bon\w+=", text) == []
    assert all(address.startswith("./") for address in re.findall(r'(?:src|href)="([^"]*)"', text))


async def test_files_are_compressed_and_a_browser_that_has_them_is_told_so(edge: Any) -> None:
    sent = 0
    for name, known in read_site().items():
        packed = await edge.get(f"/console/{name}", GZIP)
        assert packed.headers["content-encoding"] == "gzip"
        assert gzip.decompress(packed.body) == known.plain
        assert packed.headers["vary"] == "accept-encoding"
        sent += len(packed.body)
        tag = packed.headers["etag"]
        reader, writer = await edge.connect()
        head = f"GET /console/{name} HTTP/1.1\r\nHost: t\r\n{GZIP}If-None-Match: {tag}\r\n\r\n"
        writer.write(head.encode())
        again = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert again.startswith("HTTP/1.1 304 ")
        assert f"etag: {tag}" in again
        plain = await edge.get(f"/console/{name}")
        assert plain.body == known.plain
        assert plain.headers["etag"] != tag
    assert sent < MOST_SENT


async def test_only_the_console_s_own_files_can_be_read(edge: Any) -> None:
    for path in (
        "../__init__.py", "..%2f__init__.py", "%2e%2e/site_files.py", "build.json", "./index.html",
        "/etc/passwd", "web/package.json", "index.html/", "x" * 4000,
    ):  # fmt: skip
        reply = await edge.get(f"/console/{path}")
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (404, "not_found"), path
    moved = await edge.get("/console")
    assert (moved.status, moved.headers["location"]) == (308, "console/")
    assert (await edge.post("/console/", b"{}")).status == 405


class Time:
    """A clock that is set."""

    now_s = 0.0

    def now(self) -> float:
        return self.now_s


def viewer(seen: list[bytes]) -> Exchange:
    return InnerExchange("GET", "/console/status", b"", lambda status, body, *_: seen.append(body))


def test_any_number_of_viewers_costs_one_page_a_second() -> None:
    time, seen, rendered = Time(), list[bytes](), list[str]()

    def show(exchange: Exchange) -> None:
        rendered.append(exchange.request.path)
        exchange.respond(200, b"page %d" % len(rendered))

    page = SharedPage("/status", show, time.now)
    for _ in range(100):
        page.serve(viewer(seen))
    assert rendered == ["/status"]
    assert seen == [b"page 1"] * 100
    time.now_s = KEPT_S
    page.serve(viewer(seen))
    assert seen[-1] == b"page 2"


def test_viewers_wait_together_for_a_page_of_another_process_and_not_too_many() -> None:
    time, seen, asked = Time(), list[bytes](), list[Exchange]()
    page = SharedPage("/status", asked.append, time.now)
    for _ in range(MOST_WAITING):
        page.serve(viewer(seen))
    with pytest.raises(CapacityError):
        page.serve(viewer(seen))
    assert len(asked) == 1
    asked[0].respond(200, b"page")
    assert seen == [b"page"] * MOST_WAITING


def test_an_error_is_not_kept_for_the_next_viewer() -> None:
    seen: list[bytes] = []
    answers = [CapacityError("no core", code="shutting_down"), None]

    def show(exchange: Exchange) -> None:
        if (error := answers.pop(0)) is not None:
            raise error
        exchange.respond(200, b"page")

    page = SharedPage("/status", show, Time().now)
    with pytest.raises(CapacityError):
        page.serve(viewer(seen))
    page.serve(viewer(seen))
    assert seen == [b"page"]


async def test_a_console_with_a_port_of_its_own_is_at_no_other(start: Any) -> None:
    port = free_port()
    edge = await start(console={"port": port})
    for path in ("/console", "/console/", "/console/status"):
        assert (await edge.get(path)).status == 404, path
    assert (await edge.get("/status")).status == 200
    edge.port = port
    for path in ("/console/", "/console/status", "/status", "/v1/models"):
        assert (await edge.get(path)).status == 200, path


async def test_a_port_of_the_console_that_is_taken_is_named(start: Any) -> None:
    edge = await start()
    with pytest.raises(ConfigError, match=rf"gateway.console: cannot listen on 127.0.0.1:{edge.port}: .*use"):
        await start(console={"port": edge.port})
