"""Limits of one connection on size and time. Without a limit, some client exhausts the resource.

A separate module, because the listener and the handshake use the same limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kvasir.config.spec.edge import GatewaySpec

_FORM_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one connection; bytes and seconds."""

    header_bytes: int = 64 << 10
    header_fields: int = 128
    target_bytes: int = 8 << 10
    body_bytes: int = 8 << 20
    upload_bytes: int = 8 << 20
    """Of the form that a file is uploaded in."""
    body_rate: int = 1024
    header_s: float = 8.0
    body_s: float = 30.0
    idle_s: float = 75.0
    linger_s: float = 2.0
    stream_buffer_bytes: int = 256 << 10

    @classmethod
    def of(cls, spec: GatewaySpec) -> Self:
        """Return the limits of a deployment."""
        return cls(
            header_bytes=spec.max_header_bytes,
            header_fields=spec.max_header_fields,
            target_bytes=spec.max_target_bytes,
            body_bytes=spec.max_body_bytes,
            upload_bytes=max(spec.max_body_bytes, spec.batches.max_file_bytes + _FORM_BYTES),
            body_rate=spec.min_body_bytes_per_s,
            header_s=spec.header_timeout_s,
            body_s=spec.body_timeout_s,
            idle_s=spec.idle_timeout_s,
            stream_buffer_bytes=spec.stream_buffer_bytes,
        )
