"""The deployment spec's part about the edge: HTTP, telemetry, and how workers are found."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from kvasir.config.spec_base import Spec, is_loopback

_COLLECTOR = re.compile(
    r"(?:https?://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[-A-Za-z0-9._]*[A-Za-z0-9])?):(\d{1,5})"
)


class GatewaySpec(Spec):
    """The HTTP edge."""

    host: str = "127.0.0.1"
    """Address to bind. Beyond loopback, `api_keys_file` is required."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free port."""
    api_keys_file: str | None = None
    """One SHA-256 (hex) of an API key a line; `#` starts a comment. Unset: no key is asked for."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    max_header_bytes: int = Field(default=64 << 10, ge=1024)
    header_timeout_s: float = Field(default=10.0, gt=0)
    """Request line and headers must be complete this long after their first byte."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """The body must be complete this long after the headers."""
    idle_timeout_s: float = Field(default=75.0, gt=0)
    """How long a connection without a request is kept."""
    max_connections: int = Field(default=4096, ge=1)
    """More are answered 503 and closed."""
    stream_buffer_bytes: int = Field(default=256 << 10, ge=4096)
    """Output that may wait for a slow client; a stream that exceeds it is cut."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """How long requests in flight may go on when the gateway stops."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """A request that takes longer in all is ended with 504."""
    default_max_tokens: int = Field(default=256, ge=1)
    """Output limit of a request that names none."""

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if not is_loopback(self.host) and self.api_keys_file is None:
            raise ValueError(
                f"host {self.host} is open to the network: name an api_keys_file, or bind 127.0.0.1"
            )
        return self


class TelemetrySpec(Spec):
    """Metrics are always served on the gateway at /metrics; traces are off by default."""

    otlp_endpoint: str | None = None
    """gRPC address of an OpenTelemetry collector, `host:port` or `http(s)://host:port`. Unset: no spans
    are made."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("otlp_endpoint")
    @classmethod
    def _reachable(cls, value: str | None) -> str | None:
        if value is None:
            return None
        address = _COLLECTOR.fullmatch(value)
        if address is None or not 0 < int(address[1]) <= 65535:
            raise ValueError("host:port, http://host:port or https://host:port, as in localhost:4317")
        return value


class DiscoverySpec(Spec):
    """How the router finds workers."""

    kind: Literal["ray", "static"] = "ray"
    endpoints: tuple[str, ...] = ()
    """For `static`: `pool=host:port`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind == "static" and not self.endpoints:
            raise ValueError("static discovery needs endpoints, each `pool=host:port`")
        for endpoint in self.endpoints:
            pool, eq, address = endpoint.partition("=")
            host, colon, port = address.rpartition(":")
            if not (pool and eq and host and colon and port.isdigit()):
                raise ValueError(f"endpoint {endpoint!r} is not `pool=host:port`")
        return self
