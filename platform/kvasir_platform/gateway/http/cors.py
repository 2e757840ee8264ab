"""CORS: which web pages may call the API, and protection of gateways without API keys.

An API key in a header does not rely on cookies, so pages of other origins are harmless to a gateway with
keys. A gateway without keys is reachable by every page that a person on its machine opens; there, a request
that a browser marks with a foreign origin is refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

from kvasir.config.spec.edge import CorsSpec
from kvasir.core.errors import RequestError
from kvasir_platform.gateway.http.request_head import METHODS

_METHODS = METHODS.encode()
_EXPOSED = (
    b"x-request-id, request-id, retry-after, retry-after-ms, x-should-retry, server-timing, traceparent, "
    b"x-kvasir-brownout, x-ratelimit-limit-requests, x-ratelimit-limit-tokens, "
    b"x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, "
    b"x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
_FIELDS = re.compile(rb"[A-Za-z0-9-]{1,64}(?: ?, ?[A-Za-z0-9-]{1,64}){0,63}")
_REQUESTED = b"access-control-request-headers"


class Cors:
    """Responds to browsers as the spec says. `open_to_all`: no API key is required."""

    def __init__(self, spec: CorsSpec, *, open_to_all: bool = False) -> None:
        self._origins = frozenset(origin.encode() for origin in spec.origins)
        self._any = b"*" in self._origins
        self._max_age_s = spec.max_age_s
        self._credentials = b"access-control-allow-credentials: true\r\n" if spec.credentials else b""
        self._open_to_all = open_to_all
        self.enabled = bool(spec.origins)
        """Whether any origin is listed."""

    def lines(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the header lines of the response to a request with `headers`."""
        if not self.enabled:
            return b""
        allowed = self._allowed(headers)
        if not allowed:
            return b"vary: origin\r\n"
        return b"%b%baccess-control-expose-headers: %b\r\n" % (allowed, self._credentials, _EXPOSED)

    def preflight(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the header lines of the response to a preflight request, in addition to `lines`; None if it
        is not one. Raise RequestError 403 for an origin that is not listed."""
        if b"origin" not in headers or b"access-control-request-method" not in headers:
            return None
        if not self._allowed(headers):
            raise _foreign()
        lines = b"access-control-allow-methods: %b\r\naccess-control-max-age: %d\r\n" % (
            _METHODS,
            self._max_age_s,
        )
        # Clients send headers of their own kind (x-stainless-…): the origin is what is trusted, not the list.
        requested = headers.get(_REQUESTED, b"")
        if _FIELDS.fullmatch(requested):
            lines += b"access-control-allow-headers: %b\r\nvary: %b\r\n" % (requested, _REQUESTED)
        return lines

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise RequestError 403 if no key is required and a browser sends the request for a page of a
        foreign origin, or under a host name that DNS rebinding may have pointed here."""
        origin = headers.get(b"origin")
        if origin is None or not self._open_to_all or self._allowed(headers):
            return
        host = headers.get(b"host", b"").strip().lower()
        if origin.strip().lower().partition(b"://")[2] != host or not _own_address(host):
            raise _foreign()

    def _allowed(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the lines that allow the request's origin; empty if it is not listed."""
        if self._any:
            return b"access-control-allow-origin: *\r\n"
        origin = headers.get(b"origin", b"").strip()
        if origin not in self._origins:
            return b""
        return b"access-control-allow-origin: %b\r\nvary: origin\r\n" % origin


def _own_address(host: bytes) -> bool:
    """Return whether a Host header holds an IP address or localhost, rather than a DNS name."""
    name = host.decode("latin-1")
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _foreign() -> RequestError:
    return RequestError(
        "Pages of this origin may not call the API; gateway.cors.origins lists those that may.",
        status=403,
        code="origin_not_allowed",
    )
