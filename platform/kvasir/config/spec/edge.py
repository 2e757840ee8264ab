"""The deployment spec's part about the edge: HTTP, what clients may send, tokenizers, and telemetry."""

from __future__ import annotations

import ipaddress
import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from kvasir.config.spec.base import Spec, is_loopback

_COLLECTOR = re.compile(
    r"(?:https?://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[-A-Za-z0-9._]*[A-Za-z0-9])?):(\d{1,5})"
)
_ORIGIN = re.compile(r"[a-z][-a-z0-9+.]*://(?:\[[0-9a-f:.]+\]|[-a-z0-9._]+)(?::\d{1,5})?")


class EdgeTlsSpec(Spec):
    """HTTPS on the gateway. Files are read again when they change, and no connection ends for it."""

    cert_file: str | None = None
    """PEM certificate chain, the gateway's own certificate first. Unset: plain HTTP."""
    key_file: str | None = None
    """PEM private key of that certificate, without a passphrase. It may be the same file."""
    client_ca_file: str | None = None
    """PEM certificates of authorities. With it, only clients that one of them has certified may connect."""
    operator_cert_file: str | None = None
    """PEM certificate of a client, and its private key, by which `kvasir` on this machine connects where
    client_ca_file is set. Unset: `kvasir up` makes one for its run, which its gateway accepts too."""
    minimum: Literal["1.2", "1.3"] = "1.2"
    """The oldest version of TLS that is spoken."""
    handshake_timeout_s: float = Field(default=8.0, gt=0, le=60)
    """A handshake must be complete this long after the connection was accepted."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together: name both, or neither for plain HTTP")
        if self.client_ca_file is not None and self.cert_file is None:
            raise ValueError("client_ca_file needs HTTPS: name cert_file and key_file too")
        if self.operator_cert_file is not None and self.client_ca_file is None:
            raise ValueError("operator_cert_file is for gateways that ask for one: name client_ca_file too")
        return self


class CorsSpec(Spec):
    """Which web pages may call the API from a browser. By default none may."""

    origins: tuple[str, ...] = Field(default=(), max_length=256)
    """Each `scheme://host` or `scheme://host:port`; `*` is every origin."""
    credentials: bool = False
    """Let pages send cookies and client certificates. API keys in a header do not need it."""
    max_age_s: int = Field(default=600, ge=0, le=86_400)
    """How long a browser may remember what it was told."""

    @field_validator("origins")
    @classmethod
    def _spelled_as_browsers_do(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin: scheme://host or scheme://host:port in lower case, without a "
                    "path, as in https://chat.example.com"
                )
        return value

    @model_validator(mode="after")
    def _never_everybody_with_credentials(self) -> Self:
        if self.credentials and "*" in self.origins:
            raise ValueError("credentials cannot go with the origin *: list the origins that may send them")
        return self


class GatewaySpec(Spec):
    """The HTTP edge."""

    host: str = "127.0.0.1"
    """Address to bind. Beyond loopback, API keys are required."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free port."""
    api_keys_file: str | None = None
    """One SHA-256 (hex) of an API key a line, then what is known of it: `tenant=NAME`, and
    `expires=2030-01-31T00:00:00Z`; `#` starts a comment. `kvasir keys new` makes such lines. A tenant may
    have several keys. Changes take effect within two seconds. Where no source of keys is named, no key is
    asked for."""
    api_keys_dir: str | None = None
    """Folder of such files, as a Kubernetes secret is mounted. A file's name is the tenant of those of its
    lines that name none."""
    api_keys_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable of the router that holds such lines, ended by line ends or commas."""
    edges: int | None = Field(default=None, ge=0, le=64)
    """How many processes of the router speak HTTP, beside the one that routes. 0: that one does it itself.
    Unset: 0 on fewer than four usable CPUs, else one less than there are, at most 8. Bounds on connections
    and bodies are each process's own."""
    tls: EdgeTlsSpec = EdgeTlsSpec()
    cors: CorsSpec = CorsSpec()
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    max_bodies_bytes: int = Field(default=512 << 20, ge=1024)
    """Bodies that are being received or wait for their turn, of all connections together."""
    max_header_bytes: int = Field(default=64 << 10, ge=1024)
    """Request line, headers and trailers of one request."""
    max_header_fields: int = Field(default=128, ge=8, le=10_000)
    max_target_bytes: int = Field(default=8 << 10, ge=256)
    """Path and query."""
    header_timeout_s: float = Field(default=8.0, gt=0)
    """Request line and headers must be complete this long after their first byte."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """The body must be complete this long after the headers."""
    min_body_bytes_per_s: int = Field(default=1024, ge=0)
    """A body that comes more slowly, judged each half of `header_timeout_s`, is cut before its time."""
    idle_timeout_s: float = Field(default=75.0, gt=0)
    """How long a connection without a request is kept."""
    max_connections: int = Field(default=4096, ge=1)
    """More are answered 503 and closed."""
    max_connections_per_client: int = Field(default=1024, ge=1)
    """Of one address, or of one /64 network for IPv6; more are answered 429 and closed."""
    trusted_proxies: tuple[str, ...] = Field(default=("127.0.0.0/8", "::1/128"), max_length=256)
    """Addresses and networks that stand for many clients; the bound of one client is not theirs."""
    stream_buffer_bytes: int = Field(default=256 << 10, ge=4096)
    """Output that may wait for a slow client; a stream that exceeds it is cut."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """How long requests in flight may go on when the gateway stops."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """A request that takes longer in all is ended with 504."""
    default_max_tokens: int = Field(default=256, ge=1)
    """Output limit of a request that names none."""

    @property
    def asks_for_keys(self) -> bool:
        """Whether callers need an API key."""
        return any((self.api_keys_file, self.api_keys_dir, self.api_keys_env))

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"an address or a network, as in 10.0.0.0/8: {error}") from error
        return value

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if not is_loopback(self.host) and not self.asks_for_keys:
            raise ValueError(
                f"host {self.host} is open to the network: name an api_keys_file, or bind 127.0.0.1"
            )
        return self


class TokenizerSpec(Spec):
    """The edge's tokenizers, one for each model."""

    fast: Literal["auto", "never"] = "auto"
    """`auto` uses a tokenizer many times faster wherever it was proven at start to give the same tokens as
    Hugging Face's, which serves otherwise."""
    prefix_cache_bytes: int = Field(default=16 << 20, ge=0, le=64 << 30)
    """What each model's tokens of earlier turns may take, so that a conversation's next turn tokenizes only
    what is new. 0 keeps none."""


class ApiSpec(Spec):
    """What the API takes from its clients."""

    trust_chat_templates: bool = False
    """Let clients send a `chat_template` of their own. A template is code: it runs in a sandbox and reaches
    nothing outside it, but it can run for ever and holds the gateway while it does."""


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
