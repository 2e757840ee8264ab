"""The console's files: HTML, a script and a style sheet that `make console` builds from `web`.

They are the same for everyone and hold no data, so they need no key; what the page then asks for does.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.http.exchange import Exchange

CONSOLE = "/console"
CONSOLE_FILES = CONSOLE + "/"
INDEX = "index.html"
MOST_BYTES = 1 << 20
"""The most that the files of the console may have together."""

_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    b"trusted-types 'none'"
)
"""Nothing inline, nothing from other hosts, no frames, and no text that becomes markup."""
_HEADERS = (
    b"content-security-policy: %b\r\n"
    b"referrer-policy: no-referrer\r\n"
    b"x-frame-options: DENY\r\n"
    b"cross-origin-opener-policy: same-origin\r\n"
    b"cross-origin-resource-policy: same-origin\r\n"
    b"cache-control: no-cache\r\n"
    b"vary: accept-encoding\r\n"
) % POLICY


@dataclass(frozen=True, slots=True)
class SiteFile:
    """One file as it is sent, plain and compressed, with an entity tag for each."""

    content_type: bytes
    plain: bytes
    packed: bytes
    digest: bytes

    @classmethod
    def of(cls, name: str, content: bytes) -> SiteFile:
        """Compress a file. The name tells its type."""
        suffix = name[name.rfind(".") :]
        digest = hashlib.sha256(content).hexdigest()[:32].encode()
        return cls(_TYPES[suffix], content, gzip.compress(content, mtime=0), digest)


def read_site() -> dict[str, SiteFile]:
    """Return the files by name. Raise ValueError if they have more than MOST_BYTES."""
    folder = files("kvasir_platform.gateway.console") / "site"
    found = {
        each.name: each.read_bytes()
        for each in folder.iterdir()
        if each.name[each.name.rfind(".") :] in _TYPES
    }
    if sum(map(len, found.values())) > MOST_BYTES:
        raise ValueError(f"the files of the console have more than {MOST_BYTES} bytes")
    return {name: SiteFile.of(name, content) for name, content in found.items()}


class ConsoleSite:
    """GET /console and the files below it. They are read at the first request."""

    def __init__(self) -> None:
        self._files: Mapping[str, SiteFile] | None = None

    def serve(self, exchange: Exchange) -> None:
        """Send a file, or 304 to a browser that has it. Raise RequestError 404 for a name that is none."""
        path = exchange.request.path
        if path == CONSOLE:
            # Relative, for a proxy that serves the gateway below a path of its own.
            exchange.file(308, b"", b"location: console/\r\n" + _HEADERS)
            return
        if self._files is None:
            self._files = read_site()
        # A look-up in a table: no path of the client's reaches the file system.
        found = self._files.get(path.removeprefix(CONSOLE_FILES) or INDEX)
        if found is None:
            raise RequestError(f"The console has no {path[:256]!r}.", status=404, code="not_found")
        headers = exchange.request.headers
        packed = _takes_gzip(headers.get(b"accept-encoding", b""))
        tag = b'"%b%b"' % (found.digest, b"-gzip" if packed else b"")
        lines = b"etag: %b\r\ncontent-type: %b\r\n%b" % (tag, found.content_type, _HEADERS)
        if tag in headers.get(b"if-none-match", b""):
            exchange.file(304, b"", lines)
        elif packed:
            exchange.file(200, found.packed, b"content-encoding: gzip\r\n" + lines)
        else:
            exchange.file(200, found.plain, lines)


def _takes_gzip(accepted: bytes) -> bool:
    """Return whether an Accept-Encoding header names gzip, without refusing it by a weight of 0."""
    for each in accepted.lower().split(b","):
        coding, _, weight = each.partition(b";")
        if coding.strip() == b"gzip":
            return weight.replace(b" ", b"").rstrip(b"0").rstrip(b".") not in (b"q=", b"q=0")
    return False
