"""Restricts the URLs and addresses to which Kvasir connects (protection against SSRF).

A URL that a server fetches can address what only the server reaches: its loopback, its network, the cloud's
metadata service. Parsing is strict, because attacks exploit unusual spellings on which the parser that checks
and the one that connects disagree; any spelling other than the plain one is refused.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_URL_CHARS = 2048
_PLAIN = re.compile(r"[!#-;=?-Z\[\]_a-z~]*")
"""The characters of RFC 3986 except the quote; no space, control character, backslash or non-ASCII."""
_URL = re.compile(r"(https?)://([^/?#]*)(/[^?#]*)?(\?[^#]*)?")
_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?")
_NUMERIC = re.compile(r"\d+|0x[0-9a-f]*")
_PORTS = {"http": 80, "https": 443}

_LOCAL_NAMES = ("localhost", "local", "internal", "localdomain", "home.arpa", "lan", "intranet")

_ALWAYS_REFUSED = tuple(
    ipaddress.ip_network(each)
    for each in (
        "0.0.0.0/8",
        "169.254.0.0/16",
        "224.0.0.0/4",
        "255.255.255.255/32",
        "100.100.100.200/32",
        "168.63.129.16/32",
        "192.0.0.192/32",
        "::/128",
        "fe80::/10",
        "ff00::/8",
        "fd00:ec2::/32",
        "fd20:ce::/32",
    )
)
"""Unspecified, broadcast, multicast and link-local addresses, and metadata services of clouds."""

_EMBEDDING = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),
    (ipaddress.IPv6Network("2002::/16"), 80),
    (ipaddress.IPv6Network("::/96"), 0),
)
"""IPv6 networks that embed an IPv4 address, and its offset in bits from the right."""
_REFUSED_V6 = (
    ipaddress.IPv6Network("64:ff9b:1::/48"),
    ipaddress.IPv6Network("2001::/23"),
    ipaddress.IPv6Network("5f00::/16"),
    ipaddress.IPv6Network("::/96"),
    ipaddress.IPv6Network("::ffff:0:0:0/96"),
)


class OutboundRefused(ValueError):
    """The URL or address is not allowed. The message says why, and contains no part of the URL but its
    host."""


@dataclass(frozen=True, slots=True)
class OutboundTarget:
    """A parsed URL. `host` is a name in lower case or an address without brackets; `address` is that address,
    None for a name; `path` includes the query."""

    scheme: str
    host: str
    port: int
    path: str
    address: Address | None = None

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(url: str) -> OutboundTarget:
    """Parse `url`. Raises OutboundRefused unless it is http(s), absolute, plainly spelled, and without user
    information and fragment."""
    if len(url) > MAX_URL_CHARS:
        raise OutboundRefused(f"a URL has at most {MAX_URL_CHARS} characters")
    if not _PLAIN.fullmatch(url):
        raise OutboundRefused("the URL has characters that must be percent-encoded, or punycode in a host")
    found = _URL.fullmatch(url)
    if found is None:
        raise OutboundRefused("the URL is not of the form https://host/path, without a fragment")
    scheme, authority, path, query = found.groups()
    if "@" in authority:
        raise OutboundRefused("the URL carries user information; keep credentials out of URLs")
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        raise OutboundRefused("the URL's host is not plainly spelled")
    port = int(parts[2]) if parts[2] else _PORTS[scheme]
    if not 0 < port < 65536:
        raise OutboundRefused("the URL's port is not from 1 to 65535")
    host, address = _host(parts[1].lower())
    return OutboundTarget(scheme, host, port, (path or "/") + (query or ""), address)


def check_target(target: OutboundTarget, *, private: bool) -> None:
    """Raise OutboundRefused if the URL by itself shows that the target is not allowed."""
    if target.address is not None:
        check_address(target.address, private=private)
        return
    local = any(target.host == name or target.host.endswith("." + name) for name in _LOCAL_NAMES)
    if not private and (local or "." not in target.host):
        raise OutboundRefused(f"{target.host} is a name of a private network, which is not allowed here")


def check_address(address: Address, *, private: bool) -> None:
    """Raise OutboundRefused unless `address` is public, or private with `private` set. Link-local and
    multicast addresses and metadata services are always refused."""
    for each in (address, *_embedded(address)):
        if any(each in network for network in _ALWAYS_REFUSED if network.version == each.version):
            raise OutboundRefused(f"{address} is of a link, a group or a metadata service")
        if not private and not _public(each):
            raise OutboundRefused(f"{address} is not a public address")


def _public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and any(address in each for each in _REFUSED_V6):
        return False
    # Networks that embed IPv4 addresses are checked by the embedded address.
    carries = isinstance(address, ipaddress.IPv6Address) and bool(_embedded(address))
    return carries or (address.is_global and not address.is_multicast and not address.is_reserved)


def _embedded(address: Address) -> tuple[ipaddress.IPv4Address, ...]:
    # ::1 is loopback, not an IPv4-compatible address.
    if isinstance(address, ipaddress.IPv4Address) or int(address) <= 1:
        return ()
    return tuple(
        ipaddress.IPv4Address(int(address) >> shift & 0xFFFFFFFF)
        for network, shift in _EMBEDDING
        if address in network
    )


def _host(host: str) -> tuple[str, Address | None]:
    if host.startswith("["):
        try:
            address: Address = ipaddress.IPv6Address(host[1:-1])
        except ValueError as error:
            raise OutboundRefused("the URL's host is no IPv6 address") from error
        return str(address), address
    labels = host.split(".")
    if _NUMERIC.fullmatch(labels[-1]):
        # Other parsers accept 127.1, 0x7f000001, 2130706433 and 0177.0.0.1 as addresses.
        try:
            address = ipaddress.IPv4Address(host)
        except ValueError as error:
            raise OutboundRefused("the URL's host is no IPv4 address of four decimal numbers") from error
        return host, address
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise OutboundRefused("the URL's host is no DNS name; it has no dot at its end, and no empty label")
    return host, None
