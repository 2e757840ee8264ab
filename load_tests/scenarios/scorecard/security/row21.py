"""Server-side request forgery: URLs in requests, and URLs of a configured service, that would make the
platform connect where callers cannot. None is fetched, however it is spelled and whatever its name resolves
to.

A trap listens on loopback and counts connections. Clients that follow a URL do reach the trap, and so do
allowed connections, which proves that the trap works.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from pydantic import ValidationError
from tests.kit.lab.fleet import Layout

from kvasir.config.checks.outbound import OutboundRefused, parse_url
from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.filters import ClassifierFilterSpec
from kvasir_platform.gateway.http.outbound_client import OutboundClient, OutboundEndpoint, OutboundError
from load_tests.scenarios.scorecard import real_engines
from load_tests.scenarios.scorecard.clients.http_cases import read_answer
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial, exercise, whole
from load_tests.scenarios.scorecard.security.ssrf_vectors import (
    LURES,
    METADATA,
    Lure,
    Sent,
    requests,
    schema_requests,
)

PROMISE = "denied after resolution"
_CANARY = "what-lies-behind-the-wall"
_PATIENCE_S = 30.0
_REDIRECTS = (301, 302, 303, 307, 308)
_ENDPOINTS = ("http://{at}", "unix:/run/docker.sock:1", "dns://{at}/worker:1", "user@{at}", "ipv4:{at}",
              "169.254.169.254:80", "[fe80::1]:80", "{at}/path:1")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """`real`: send schemas to a real engine instead of a simulated one, which accepts all of them.
    `linger_s`: how long after the last request a connection may still arrive."""

    real: bool = True
    linger_s: float = 1.0


@dataclass(slots=True)
class Trap:
    """Listens on loopback, on one port of IPv4 and IPv6, and counts connections. `answer` is its response."""

    port: int = 0
    met: int = 0
    heard: list[str] = field(default_factory=list)
    answer: bytes = b""

    def url(self, host: str) -> str:
        """The trap's URL at a host, in any spelling."""
        return f"http://{host}:{self.port}/trap"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Count and answer one connection."""
        self.met += 1
        try:
            async with asyncio.timeout(_PATIENCE_S):
                first = await reader.readline()
                self.heard.append(first.decode("latin-1").strip()[:80])
                writer.write(self.answer)
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            self.heard.append("nothing")
        finally:
            writer.close()


@asynccontextmanager
async def trap(answer: bytes = b"") -> AsyncIterator[Trap]:
    """A trap that listens until the context ends."""
    body = json.dumps({"flagged": False, "canary": _CANARY}).encode()
    made = Trap(answer=answer or b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    servers = [await asyncio.start_server(made.serve, "127.0.0.1", 0)]
    made.port = servers[0].sockets[0].getsockname()[1]
    if _has_ipv6():
        servers.append(await asyncio.start_server(made.serve, "::1", made.port))
    try:
        yield made
    finally:
        for server in servers:
            server.close()


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    file = trial.folder / "secret"
    file.write_text(_CANARY)
    let_in: list[str] = []
    async with trap() as caught:
        believed = await _believed(caught)
        before = caught.met
        let_in += [lure.name for lure in LURES if not await _denied(lure, caught)]
        let_in += _accepted_endpoints(caught)
        tricks = await _tricks(caught)
        async with exercise(trial, whole(), Layout({"both": 1})) as fleet:
            sent = requests(caught.url, file.as_uri())
            schemas = schema_requests(caught.url("127.0.0.1"), file.as_uri())
            if not size.real:
                sent += [replace(each, refused=False) for each in schemas]
            let_in += await _send(fleet.address, sent)
            await trial.clock.sleep(size.linger_s)
        if size.real:
            trial.say("a real engine is starting")
            async with real_engines.stage(trial.folder, real_engines.together(), ("both",)) as stage:
                let_in += await _send(stage.address, schemas)
                await trial.clock.sleep(size.linger_s)
            sent += schemas
        met = caught.met - before
        await _reached(caught)
    vectors = len(LURES) + len(_ENDPOINTS) + len(tricks) + len(sent)
    let_in += [name for name, held in tricks.items() if not held]
    return [
        Figure("vectors", vectors, "vectors", "higher", 30.0,
               f"{len(sent)} in requests, {len(LURES)} URLs and {len(tricks)} tricks of a service to call, "
               f"{len(_ENDPOINTS)} addresses of workers; {believed} of the URLs lead a client that follows "
               "them into the trap"),
        Figure("connections into the trap", met, "connections", "lower", 0.0,
               ", ".join(caught.heard[before : before + met])[:200]),
        Figure("vectors that were not denied as they must be", len(let_in), "vectors", "lower", 0.0,
               ", ".join(let_in)[:300]),
    ]  # fmt: skip


async def _believed(caught: Trap) -> int:
    """Count the URLs that lead a client that follows them into the trap. Raise NotProven if one does not that
    should."""
    count = 0
    for lure in LURES:
        if not lure.reaches or (_of_ipv6(lure) and not _has_ipv6()):
            continue
        before = caught.met
        await asyncio.to_thread(_believe, lure.url.format(port=caught.port), lure.addresses)
        if caught.met == before:
            raise NotProven(f"{lure.name} does not lead into the trap, so not connecting proves nothing")
        count += 1
    return count


def _believe(url: str, addresses: Sequence[str]) -> None:
    """Follow the URL as the machine's own resolver reads it; wait for the answer."""
    parts = urlsplit(url)
    host = addresses[0] if addresses else str(parts.hostname)
    with socket.create_connection((host, parts.port), _PATIENCE_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        connection.recv(1 << 10)


async def _denied(lure: Lure, caught: Trap) -> bool:
    """Whether a classifier at this URL is neither accepted in the spec nor called."""
    url = lure.url.format(port=caught.port)
    try:
        ClassifierFilterSpec(name="judge", url=url)
    except ValidationError:
        pass
    else:
        if not lure.addresses:
            return False
    asked = list[str]()

    async def resolve(host: str, _port: int) -> list[str]:
        asked.append(host)
        return list(lure.addresses)

    try:
        poster = OutboundClient(
            OutboundEndpoint(parse_url(url)), connections=1, now=lambda: 0.0, resolve=resolve
        )
        await poster.post(b"{}")
    except OutboundRefused:
        return True
    except OutboundError as error:
        # Refused after resolution, not merely unanswered.
        return isinstance(error.__cause__, OutboundRefused)
    return False


def _accepted_endpoints(caught: Trap) -> list[str]:
    """Worker addresses that a spec accepts although they are not exactly a host and a port, or are
    unspecified addresses."""
    taken = []
    for template in _ENDPOINTS:
        text = template.format(at=f"127.0.0.1:{caught.port}")
        spec = whole().model_dump(mode="json")
        spec["discovery"] = {"kind": "static", "endpoints": [f"both={text}"]}
        try:
            Deployment.model_validate(spec)
        except ValidationError:
            continue
        taken.append(f"worker address {text}")
    return taken


async def _tricks(caught: Trap) -> dict[str, bool]:
    """Each attempt with a service that may be called, and whether it failed."""
    held = {}
    location = f"location: {caught.url('127.0.0.1')}\r\n"
    for status in _REDIRECTS:
        moved = f"HTTP/1.1 {status} Moved\r\n{location}content-length: 0\r\n\r\n"
        async with trap(moved.encode()) as service:
            said = await _post(service, ["127.0.0.1"])
            held[f"a redirect {status}"] = said == f"it answered with status {status}"
            if not service.met:
                raise NotProven("a service that may be called was not called")
    # First an allowed address where nothing listens, then the trap.
    turns = [["127.0.0.9"], ["127.0.0.1"], ["127.0.0.1"]]
    held["a name that changes its mind"] = await _post(caught, *turns) is not None
    held["a name that changes its mind to metadata"] = "metadata" in str(
        await _post(caught, ["169.254.169.254"], ["127.0.0.1"])
    )
    proxy = {f"{kind}_proxy": caught.url("127.0.0.1") for kind in ("http", "https", "all")}
    async with trap() as service:
        with _environment(proxy):
            if not {"http", "https", "all"} <= getproxies().keys():
                raise NotProven("the environment names no proxy")
            held["a proxy in the environment"] = await _post(service, ["127.0.0.1"]) is None and bool(
                service.met
            )
    return held


async def _post(service: Trap, *answers: list[str]) -> str | None:
    """Call a service by a name that may be private and that resolves to each of `answers` in turn. Return the
    error, or None if the service answered."""
    turns = iter(answers)

    async def resolve(_host: str, _port: int) -> list[str]:
        return next(turns)

    target = parse_url(f"http://judge.example.com:{service.port}/judge")
    poster = OutboundClient(
        OutboundEndpoint(target, private=True), connections=1, now=lambda: 0.0, resolve=resolve
    )
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await poster.post(b"{}")
    except OutboundError as error:
        return str(error)
    finally:
        await poster.close()
    return None


async def _send(address: str, sent: Iterable[Sent]) -> list[str]:
    """Send the requests to the gateway; return the names of those that were not answered as required."""
    host, _, port = address.rpartition(":")
    wrong = []
    for one in sent:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.timeout(_PATIENCE_S):
                writer.write(one.data(address))
                answer = await read_answer(reader)
        except (EOFError, ConnectionError):
            # No answer counts as denied. The next request shows whether the gateway still runs.
            continue
        finally:
            writer.close()
        text = answer.body.decode(errors="replace")
        code = _code(text)
        denied = 400 <= answer.status < 500 or answer.status == 501
        if (one.refused and not denied) or answer.status >= 502 or (one.codes and code not in one.codes):
            wrong.append(f"{one.name}: {answer.status} {code}".rstrip())
        if _CANARY in text or (METADATA in text and answer.status == 200):
            wrong.append(f"{one.name}: shown")
    return wrong


def _code(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


async def _reached(caught: Trap) -> None:
    """Raise NotProven unless allowed connections still reach the trap, by address and by name."""
    before = caught.met
    problem = await _post(caught, ["127.0.0.1"])
    target = parse_url(caught.url("127.0.0.1"))
    poster = OutboundClient(OutboundEndpoint(target, private=True), connections=1, now=lambda: 0.0)
    await poster.post(b"{}")
    await poster.close()
    if problem is not None or caught.met != before + 2:
        raise NotProven(f"allowed connections do not reach the trap: {problem}")


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set these environment variables until the context ends."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _of_ipv6(lure: Lure) -> bool:
    return any("::1" in each or "[::]" in each or ":0:1]" in each for each in (lure.url, *lure.addresses))


def _has_ipv6() -> bool:
    return Path("/proc/net/if_inet6").exists() and bool(Path("/proc/net/if_inet6").read_text().strip())
