"""W3C trace context at the edge: taken only when well formed, since it travels to every worker."""

from __future__ import annotations

import re

_TRACE_PARENT = re.compile(rb"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def trace_parent(header: bytes | None) -> str:
    """The `traceparent` header if it is valid, else ""."""
    if header is None or not _TRACE_PARENT.fullmatch(header) or header.startswith(b"ff"):
        return ""
    return header.decode("ascii")
