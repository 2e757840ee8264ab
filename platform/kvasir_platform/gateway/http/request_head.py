"""Checks of the request head beyond those of the parser.

Request smuggling exploits two parties that read one message differently, so every ambiguous message is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.http.errors import MethodNotAllowed

HEALTH_LIVE, HEALTH_READY = "/health/live", "/health/ready"
"""The probes, which are answered while other connections are refused."""
METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
"""All that any target takes, as the Allow header lists them."""

_HOST = re.compile(rb"[A-Za-z0-9._:\[\]-]{1,255}")
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]*)(.*)")


def check_version(version: str) -> bool:
    """Return whether the request is HTTP/1.1 rather than 1.0. Raise RequestError 505 for other versions."""
    if version == "1.1":
        return True
    if version != "1.0":
        raise RequestError(f"HTTP/{version} is not supported.", status=505, code="http_version_not_supported")
    return False


def check_host(host: bytes | None, *, http11: bool) -> None:
    """Raise RequestError if a required Host header is missing or does not name a host."""
    if host is None:
        if http11:
            raise RequestError("The Host header is missing.", code="missing_host")
    elif not _HOST.fullmatch(host.strip()):
        raise RequestError("The Host header is not a host name.", code="missing_host")


def target_path(url: bytes, method: str) -> str:
    """Return the path of a request target, percent-encoded as sent, in origin form, absolute form
    (`http://host/path`), or `*` for OPTIONS. Raise RequestError for others."""
    if method == "CONNECT":
        raise MethodNotAllowed("This server, which is no proxy,", METHODS)
    if url[:1] != b"/":
        absolute = _ABSOLUTE.fullmatch(url)
        if absolute is not None and _HOST.fullmatch(absolute[1]):
            url = absolute[2] if absolute[2][:1] == b"/" else b"/" + absolute[2]
        elif url != b"*" or method != "OPTIONS":
            raise RequestError("The request's target is not a path.", code="malformed_http")
    return url.partition(b"?")[0].decode("latin-1")


def check_coding(coding: bytes | None, *, http11: bool) -> None:
    """Raise RequestError for a Transfer-Encoding other than `chunked`, or in HTTP/1.0."""
    if coding is None:
        return
    if not http11:
        raise RequestError("HTTP/1.0 has no Transfer-Encoding.", code="malformed_http")
    if coding.strip().lower() != b"chunked":
        raise RequestError(
            "Only Transfer-Encoding: chunked is understood.",
            status=501,
            code="unsupported_transfer_encoding",
        )


def expects_continue(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether the client waits for 100 Continue before it sends the body. Raise RequestError 417 for
    other expectations."""
    expect = headers.get(b"expect")
    if expect is None:
        return False
    if expect.strip().lower() != b"100-continue":
        raise RequestError("Only Expect: 100-continue is understood.", status=417, code="expectation_failed")
    return True


def check_media_type(headers: Mapping[bytes, bytes], *, form: bool) -> None:
    """Raise RequestError 415 for a body that is not JSON, or no form with a file where that is expected."""
    kind = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    wanted = b"multipart/form-data" if form else b"application/json"
    if kind != wanted or encoding != b"identity":
        raise RequestError(
            f"Send the body as plain {wanted.decode()}.", status=415, code="unsupported_media_type"
        )


def head_without_upgrade(method: str, url: bytes, version: str, headers: Mapping[bytes, bytes]) -> bytes:
    """Return the head of the same request without its offer to upgrade the protocol."""
    lines = [b"%b: %b\r\n" % (name, value) for name, value in headers.items() if name != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method.encode(), url, version.encode(), b"".join(lines))
