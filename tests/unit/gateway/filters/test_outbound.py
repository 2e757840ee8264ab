"""No spelling of an address and no name resolution leads a connection to a forbidden address."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvasir.config.checks.outbound import OutboundRefused, check_address, check_target, parse_url
from kvasir_platform.cluster.certificates import Authority
from kvasir_platform.gateway.http.outbound import checked_addresses, client_context, connect

SPELLINGS = (
    "http://127.0.0.1/",
    "http://127.1/",
    "http://127.0.1/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0x7f.0.0.1/",
    "http://0177.0.0.1/",
    "http://017700000001/",
    "http://127.0.0.1./",
    "http://127.0.0.01/",
    "http://0/",
    "http://0.0.0.0/",
    "http://[::1]/",
    "http://[::]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[0:0:0:0:0:ffff:7f00:1]/",
    "http://[::127.0.0.1]/",
    "http://[::ffff:0:127.0.0.1]/",
    "http://[64:ff9b::127.0.0.1]/",
    "http://[64:ff9b:1::7f00:1]/",
    "http://[2002:7f00:1::]/",
    "http://[2001:0:7f00:1::]/",
    "http://[fe80::1]/",
    "http://[fe80::1%25eth0]/",
    "http://[fc00::1]/",
    "http://[fd00:ec2::254]/",
    "http://[ff02::1]/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::ffff:169.254.169.254]/",
    "http://[64:ff9b::a9fe:a9fe]/",
    "http://2852039166/",
    "http://100.100.100.200/",
    "http://168.63.129.16/",
    "http://192.0.0.192/",
    "http://10.0.0.1/",
    "http://172.16.0.1/",
    "http://192.168.1.1/",
    "http://100.64.0.1/",
    "http://198.18.0.1/",
    "http://224.0.0.1/",
    "http://240.0.0.1/",
    "http://255.255.255.255/",
    "http://localhost/",
    "http://LOCALHOST/",
    "http://a.localhost/",
    "http://localhost./",
    "http://metadata.google.internal/",
    "http://printer.local/",
    "http://intranet/",
    "http://\u2460\u2461\u2466.0.0.1/",
    "http://\uff11\uff12\uff17.0.0.1/",
    "http://127\u30020\u30020\u30021/",
    "http://\u24db\u24de\u24d2\u24d0lhost/",
    "http://%31%32%37.0.0.1/",
    "http://127.0.0.1%00.example.com/",
    "http://user@example.com/",
    "http://example.com@127.0.0.1/",
    "http://example.com:80@127.0.0.1/",
    "http://example.com\\@127.0.0.1/",
    "http://127.0.0.1#@example.com/",
    "http://example.com#frag",
    "http://example.com /",
    "http://exam\tple.com/",
    "http://example.com\r\nhost: x/",
    "http:///example.com/",
    "http://",
    "http:example.com",
    "//example.com/",
    "http://example..com/",
    "http://.example.com/",
    "http://-a.example.com/",
    "http://example.com:0/",
    "http://example.com:65536/",
    "http://example.com:80:80/",
    "http://[::1/",
    "http://[gg::1]/",
    "http://1.2.3.4.5/",
    "http://256.1.1.1/",
    "http://example.0x7f/",
    "http://" + "a" * 64 + ".com/",
    "http://example.com/" + "a" * 2048,
    "file:///etc/passwd",
    "gopher://example.com/",
    "ftp://example.com/",
    "dict://example.com:11211/",
    "unix:///run/docker.sock",
    "data:text/plain,hi",
    "jar:http://example.com!/",
    "HTTP://127.0.0.1/",
)
RESOLVED = (
    "127.0.0.1",
    "10.1.2.3",
    "169.254.169.254",
    "100.64.1.1",
    "0.0.0.0",
    "::1",
    "::ffff:10.0.0.1",
    "64:ff9b::a00:1",
    "fd12::1",
    "fe80::1",
    "fe80::1%eth0",
    "not an address",
)
FOREVER = ("169.254.169.254", "fe80::1", "fd00:ec2::254", "224.0.0.1", "::ffff:169.254.169.254", "0.0.0.0")


async def answers(addresses: list[str]) -> list[str]:
    return addresses


@pytest.mark.parametrize("url", SPELLINGS)
def test_a_url_that_leads_inside_or_is_oddly_spelled_is_refused(url: str) -> None:
    with pytest.raises(OutboundRefused):
        check_target(parse_url(url), private=False)


@pytest.mark.parametrize("address", RESOLVED)
@pytest.mark.parametrize("beside", [[], ["93.184.216.34"]])
async def test_a_name_of_which_any_address_lies_inside_is_refused(address: str, beside: list[str]) -> None:
    with pytest.raises(OutboundRefused):
        await checked_addresses(
            parse_url("https://example.com/"), private=False, resolve=lambda *_: answers([*beside, address])
        )


@pytest.mark.parametrize("address", FOREVER)
def test_links_groups_and_metadata_are_refused_where_private_addresses_are_allowed(address: str) -> None:
    with pytest.raises(OutboundRefused):
        check_address(ipaddress.ip_address(address), private=True)


@pytest.mark.parametrize("address", ["10.0.0.7", "127.0.0.1", "::1", "fd12::1", "93.184.216.34"])
def test_private_addresses_are_open_to_who_asks_for_them(address: str) -> None:
    check_address(ipaddress.ip_address(address), private=True)


@pytest.mark.parametrize(
    ("url", "authority", "path", "port"),
    [
        ("https://Example.com", "example.com", "/", 443),
        ("http://example.com:8080/a/b?c=d%20e", "example.com:8080", "/a/b?c=d%20e", 8080),
        ("https://xn--bcher-kva.example/", "xn--bcher-kva.example", "/", 443),
        ("http://93.184.216.34/", "93.184.216.34", "/", 80),
        (
            "http://[2606:2800:220:1:248:1893:25c8:1946]:81",
            "[2606:2800:220:1:248:1893:25c8:1946]:81",
            "/",
            81,
        ),
        ("http://[2002:5db8:d822::]/", "[2002:5db8:d822::]", "/", 80),
        ("https://example.com?x", "example.com", "/?x", 443),
    ],
)
def test_plain_urls_are_taken_apart(url: str, authority: str, path: str, port: int) -> None:
    target = parse_url(url)
    check_target(target, private=False)
    assert (target.authority, target.path, target.port) == (authority, path, port)


class Server:
    """Takes connections, and says whether it had any."""

    def __init__(self) -> None:
        self.met = 0
        self.port = 0

    def met_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.met += 1
        writer.close()


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.met_one, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    yield made
    listening.close()
    await listening.wait_closed()


async def test_a_name_that_is_rebound_after_it_was_judged_gains_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name is public when it is asked for, and loopback from then on."""
    told = iter([["93.184.216.34"], ["127.0.0.1"]])
    connected: list[str] = []

    async def refusing(host: str, port: int, **_: object) -> None:
        connected.append(host)
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", refusing)
    target = parse_url("http://rebind.example.com/")

    async def attempt() -> None:
        await connect(target, private=False, context=None, resolve=lambda *_: answers(next(told)))

    with pytest.raises(ConnectionRefusedError):
        await attempt()
    with pytest.raises(OutboundRefused):
        await attempt()
    assert connected == ["93.184.216.34"]


async def test_the_connection_goes_to_the_judged_address_without_asking_again(server: Server) -> None:
    asked: list[str] = []

    async def once(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    target = parse_url(f"http://does-not-exist.example.com:{server.port}/")
    reader, writer = await connect(target, private=True, context=None, resolve=once)
    assert await reader.read() == b""
    writer.close()
    assert asked == ["does-not-exist.example.com"]
    assert server.met == 1


async def test_the_next_address_is_tried_where_one_takes_no_connection(server: Server) -> None:
    target = parse_url(f"http://both.example.com:{server.port}/")
    _, writer = await connect(
        target, private=True, context=None, resolve=lambda *_: answers(["127.0.0.9", "127.0.0.1"])
    )
    writer.close()
    assert writer.get_extra_info("peername")[0] == "127.0.0.1"


async def test_https_is_verified_against_the_name_and_the_given_authority(tmp_path: Path) -> None:
    now = time.time()
    ours = Authority.make("ours", now - 60, now + 3600)
    theirs = Authority.make("theirs", now - 60, now + 3600)
    own = tmp_path / "own.pem"
    own.write_bytes(ours.certify("spiffe://x/judge", "judge.example.com", now - 60, now + 3600))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own)
    listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = listening.sockets[0].getsockname()[1]

    async def to(host: str, authority: Authority) -> None:
        trusted = tmp_path / "trusted.pem"
        trusted.write_bytes(authority.pem)
        _, writer = await connect(
            parse_url(f"https://{host}:{port}/"),
            private=True,
            context=client_context(str(trusted)),
            resolve=lambda *_: answers(["127.0.0.1"]),
        )
        writer.transport.abort()

    await to("judge.example.com", ours)
    with pytest.raises(ssl.SSLCertVerificationError):
        await to("other.example.com", ours)
    with pytest.raises(ssl.SSLCertVerificationError):
        await to("judge.example.com", theirs)
    listening.close()
