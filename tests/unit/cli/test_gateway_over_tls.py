"""Commands to a gateway that serves HTTPS: which certificates they trust, and their errors."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.kit.gateway.http_edge import Edge, serving

from kvasir.config.spec.deployment import Deployment, GatewaySpec
from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.apps.up_app import with_operator_certificate
from kvasir_platform.cli.common.gateway_client import get, missing_to_serve
from kvasir_platform.cli.common.gateway_site import Site, reachable, read_address
from kvasir_platform.cli.main import main
from kvasir_platform.cluster.certificates import Authority
from kvasir_platform.cluster.local.runtime_dir import DeploymentState, RuntimeDir

DAY_S = 86_400.0
NAME = "localhost"
OURS = Authority.make("ours", time.time() - DAY_S, time.time() + DAY_S)
THEIRS = Authority.make("theirs", time.time() - DAY_S, time.time() + DAY_S)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVASIR_API_KEY", raising=False)
    return tmp_path / "home"


def issue(path: Path, *, name: str = NAME, ends_s: float = DAY_S, by: Authority = OURS) -> Path:
    now = time.time()
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(by.certify("spiffe://x/y", name, now - 2 * DAY_S, now + ends_s))
    fresh.replace(path)
    return path


def authority(folder: Path, of: Authority = OURS) -> str:
    file = folder / "authority.pem"
    file.write_bytes(of.pem)
    return str(file)


@asynccontextmanager
async def gateway(cert: Path | None, **tls: str) -> AsyncIterator[Edge]:
    fields = {} if cert is None else {"cert_file": str(cert), "key_file": str(cert)} | tls
    async with serving(
        GatewaySpec.model_validate({"port": 0, "drain_timeout_s": 0.0, "tls": fields})
    ) as edge:
        yield edge


async def ask(site: Site, pause: Callable[[float], None] = time.sleep) -> int:
    """The status of a page, or what asking for it raises."""
    status, _ = await asyncio.to_thread(get, site, "/v1/models", pause)
    return status


async def complaint(site: Site) -> str:
    with pytest.raises(UpstreamError) as raised:
        await ask(site, lambda _: None)
    assert raised.value.message.startswith(f"the gateway at {site.authority} ")
    return raised.value.message


def running(home: Path, edge: Edge, cert: Path, operator: Path) -> None:
    """Leave on disk what `kvasir up` does of its gateway."""
    runtime = RuntimeDir(home, "kvasir")
    runtime.create()
    lock = runtime.lock()
    assert lock is not None
    lock.close()
    runtime.write(
        DeploymentState(
            "kvasir", "0", os.getpid(), "ready", 0.0, "m", "spec", "logs", "temp", 1.0,
            address=f"127.0.0.1:{edge.port}", certificate=str(cert), operator_certificate=str(operator),
        )
    )  # fmt: skip


async def command(*arguments: str) -> int:
    return await asyncio.to_thread(main, arguments)


async def test_a_gateway_of_another_machine_is_believed_by_its_name_and_authority(tmp_path: Path) -> None:
    async with gateway(issue(tmp_path / "own.pem")) as edge:
        ca_file = authority(tmp_path)
        assert await ask(Site(f"{NAME}:{edge.port}", "https", ca_file=ca_file)) == 200
        by_address = await complaint(Site(f"127.0.0.1:{edge.port}", "https", ca_file=ca_file))
        assert "of another name; name the gateway in --address as its certificate does" in by_address
        unknown = await complaint(Site(f"{NAME}:{edge.port}", "https"))
        assert "of no authority that the system trusts" in unknown
        assert "--cacert FILE" in unknown
        wrong = await complaint(Site(f"{NAME}:{edge.port}", "https", ca_file=authority(tmp_path, THEIRS)))
        assert f"of no authority that {tmp_path / 'authority.pem'} holds" in wrong


async def test_the_own_gateway_is_believed_by_its_certificate_alone(tmp_path: Path) -> None:
    own = issue(tmp_path / "own.pem", name="api.example.com")
    async with gateway(own) as edge:
        site = Site(f"127.0.0.1:{edge.port}", "https", pinned=str(own))
        assert await ask(site) == 200
        other = issue(tmp_path / "other.pem", name="api.example.com")
        told = await complaint(replace(site, pinned=str(other)))
        assert f"shows another certificate than {other} holds" in told


async def test_somebody_else_never_hears_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(100))
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issue(tmp_path / "theirs.pem", by=THEIRS))
    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setenv("KVASIR_API_KEY", "secret")
    pinned = Site(f"127.0.0.1:{port}", "https", pinned=str(issue(tmp_path / "own.pem")))
    with pytest.raises(UpstreamError, match="another certificate"):
        await ask(pinned, lambda _: None)
    with pytest.raises(UpstreamError, match="of no authority"):
        await ask(Site(f"{NAME}:{port}", "https", ca_file=authority(tmp_path)))
    server.close()
    await server.wait_closed()
    assert set(heard) <= {b""}


async def test_a_certificate_that_is_being_replaced_is_waited_for(tmp_path: Path) -> None:
    own, next_one = issue(tmp_path / "own.pem"), issue(tmp_path / "next.pem")
    paused: list[float] = []
    async with gateway(own) as edge:
        site = Site(f"127.0.0.1:{edge.port}", "https", pinned=str(tmp_path / "seen.pem"))
        (tmp_path / "seen.pem").write_bytes(next_one.read_bytes())

        def take_over(seconds: float) -> None:
            paused.append(seconds)
            (tmp_path / "seen.pem").write_bytes(own.read_bytes())

        assert await ask(site, take_over) == 200
    assert len(paused) == 1


async def test_an_expired_certificate_is_told_apart(tmp_path: Path) -> None:
    # The gateway refuses to start with one, and goes on showing one that expires while it serves.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issue(tmp_path / "old.pem", ends_s=-60.0))
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    told = await complaint(Site(f"{NAME}:{port}", "https", ca_file=authority(tmp_path)))
    server.close()
    assert "shows a certificate that has expired; renew its gateway.tls.cert_file" in told


async def test_http_to_https_and_the_reverse_say_what_to_name(tmp_path: Path) -> None:
    async with gateway(issue(tmp_path / "own.pem")) as edge:
        told = await complaint(Site(f"127.0.0.1:{edge.port}"))
        assert f"if it serves HTTPS, name it https://127.0.0.1:{edge.port}" in told
    async with gateway(None) as edge:
        told = await complaint(Site(f"127.0.0.1:{edge.port}", "https"))
        assert f"speaks no TLS; if it serves plain HTTP, name it http://127.0.0.1:{edge.port}" in told


async def test_a_gateway_that_is_not_there_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "does not answer: [Errno 111]" in await complaint(Site(f"127.0.0.1:{port}", "https"))


@pytest.mark.parametrize("minimum", ["1.2", "1.3"])
async def test_a_client_certificate_is_brought_where_one_is_asked_for(tmp_path: Path, minimum: str) -> None:
    own, mine = issue(tmp_path / "own.pem"), issue(tmp_path / "mine.pem")
    clients = authority(tmp_path)
    async with gateway(own, client_ca_file=clients, minimum=minimum) as edge:
        site = Site(f"127.0.0.1:{edge.port}", "https", pinned=str(own))
        assert "name yours with --cert FILE" in await complaint(site)
        assert await ask(replace(site, cert_file=str(mine))) == 200
        assert await ask(replace(site, cert_file=str(mine), key_file=str(mine))) == 200
        stranger = issue(tmp_path / "stranger.pem", by=THEIRS)
        told = await complaint(replace(site, cert_file=str(stranger)))
        assert f"may not accept the certificate in {stranger}" in told


async def test_up_makes_a_certificate_that_its_gateway_accepts_and_no_other(
    tmp_path: Path, home: Path
) -> None:
    own = issue(tmp_path / "own.pem")
    runtime = RuntimeDir(home, "kvasir")
    runtime.create()
    tls = {"cert_file": str(own), "key_file": str(own), "client_ca_file": authority(tmp_path, THEIRS)}
    plain = Deployment.model_validate({"gateway": {"tls": tls}})
    made = with_operator_certificate(plain, runtime, time.time()).gateway.tls
    assert made.operator_cert_file == str(runtime.operator_file)
    assert runtime.operator_file.stat().st_mode & 0o077 == 0
    copied = tmp_path / "earlier.pem"
    copied.write_bytes(runtime.operator_file.read_bytes())
    with_operator_certificate(plain, runtime, time.time())
    async with gateway(
        own, client_ca_file=tls["client_ca_file"], operator_cert_file=made.operator_cert_file
    ) as edge:
        site = Site(f"127.0.0.1:{edge.port}", "https", pinned=str(own), cert_file=str(runtime.operator_file))
        assert await ask(site) == 200
        assert await missing_to_serve(site) is None
        assert "may not accept" in await complaint(replace(site, cert_file=str(copied)))
        certified = issue(tmp_path / "client.pem", by=THEIRS)
        assert await ask(replace(site, cert_file=str(certified))) == 200


def test_a_certificate_of_the_operators_own_is_kept(tmp_path: Path, home: Path) -> None:
    runtime = RuntimeDir(home, "kvasir")
    files = dict.fromkeys(("cert_file", "key_file", "client_ca_file", "operator_cert_file"), "/some.pem")
    for tls in ({}, files):
        deployment = Deployment.model_validate({"gateway": {"tls": tls}})
        assert with_operator_certificate(deployment, runtime, time.time()) is deployment


async def test_every_command_of_this_machine_reaches_its_gateway(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, mine = issue(tmp_path / "own.pem", name="api.example.com"), issue(tmp_path / "mine.pem")
    async with gateway(own, client_ca_file=authority(tmp_path)) as edge:
        running(home, edge, own, mine)
        assert await command("-o", "json", "get", "workers") == 0
        assert await command("get", "workers", "--address", f"127.0.0.1:{edge.port}") == 0
        assert await command("get", "workers", "--address", f"https://127.0.0.1:{edge.port}/") == 0
        assert await command("explain", "unknown") == 1
        assert "No decision is kept for 'unknown'" in capsys.readouterr().err
        assert await command("drain", "decode-0", "--no-wait") == 0
        assert "decode-0 asked to drain" in capsys.readouterr().out
        assert await command("get", "workers", "--address", f"http://127.0.0.1:{edge.port}") == 1
        assert "name it https://" in capsys.readouterr().err


async def test_options_name_what_the_gateway_of_another_machine_needs(tmp_path: Path) -> None:
    own, mine = issue(tmp_path / "own.pem"), issue(tmp_path / "mine.pem")
    ca_file = authority(tmp_path)
    async with gateway(own, client_ca_file=ca_file) as edge:
        where = ("get", "workers", "--address", f"https://{NAME}:{edge.port}")
        assert await command(*where, "--cacert", ca_file, "--cert", str(mine), "--key", str(mine)) == 0
        assert await command(*where, "--cacert", ca_file, "--cert", str(mine)) == 0
        assert await command(*where, "--cacert", ca_file) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--address", "h:1", "--cacert", "ca.pem"], "are for HTTPS, and http://h:1 is plain HTTP"),
        (["--address", "h:1", "--cert", "c.pem"], "name the gateway --address https://h:1"),
        (["--address", "https://h:1", "--key", "k.pem"], "--key needs --cert"),
        (["--address", "https://h:1", "--cacert", "/none"], "--cacert /none cannot be used: No such file"),
        (["--address", "https://h:1", "--cert", "/none"], "certificate /none cannot be used: No such file"),
        (["--address", "ftp://h:1"], "name HOST:PORT, http://HOST:PORT or https://HOST:PORT"),
    ],
)
def test_options_that_do_not_fit_end_with_2_and_say_why(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["get", "workers", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "site"),
    [
        ("h:81", Site("h:81")),
        ("http://h", Site("h:80")),
        ("https://h", Site("h:443", "https")),
        ("https://gw.example.com:8443/", Site("gw.example.com:8443", "https")),
        ("https://[::1]:8000", Site("[::1]:8000", "https")),
    ],
)
def test_an_address_may_name_its_scheme(address: str, site: Site) -> None:
    assert read_address(address) == site


@pytest.mark.parametrize(
    "address", ["", "h:99999", "h:0", "https://h/v1", "https://", "u@h:1", "h:1?x", "::1:80"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="name HOST:PORT"):
        read_address(address)


@pytest.mark.parametrize(
    ("bound", "asked"),
    [
        ("0.0.0.0:80", "127.0.0.1:80"),
        (":::80", "[::1]:80"),
        ("[::]:80", "[::1]:80"),
        ("::1:80", "[::1]:80"),
        ("10.0.0.1:80", "10.0.0.1:80"),
    ],
)
def test_a_gateway_is_asked_at_an_address_that_clients_can_use(bound: str, asked: str) -> None:
    assert reachable(bound) == asked


async def test_readiness_is_told_over_https_and_so_is_what_is_in_its_way(tmp_path: Path) -> None:
    own = issue(tmp_path / "own.pem")
    async with gateway(own) as edge:
        site = Site(f"127.0.0.1:{edge.port}", "https", pinned=str(own))
        assert await missing_to_serve(site) is None
        edge.router.reason = "no worker yet"
        assert await missing_to_serve(site) == "Not ready: no worker yet."
        own.write_text("nothing")
        assert "holds no whole PEM certificate" in str(await missing_to_serve(site))


def test_an_operators_certificate_where_none_is_asked_for_is_refused() -> None:
    tls = dict.fromkeys(("cert_file", "key_file", "operator_cert_file"), "/some.pem")
    with pytest.raises(ValueError, match="operator_cert_file has no effect without client_ca_file"):
        GatewaySpec.model_validate({"tls": tls})
