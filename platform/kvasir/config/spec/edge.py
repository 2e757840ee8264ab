"""The part of the deployment spec for the edge: HTTP, API options, tokenizers, and telemetry."""

from __future__ import annotations

import ipaddress
import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from kvasir.config.spec.base import Spec, is_loopback
from kvasir.config.spec.media.inputs import AudioSpec, ImagesSpec, VideosSpec
from kvasir.config.spec.redis import LeaseRedisSpec, S3ServerSpec, bucket_of
from kvasir.config.spec.tenants import TokenIssuerSpec

_COLLECTOR = re.compile(
    r"(?:https?://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[-A-Za-z0-9._]*[A-Za-z0-9])?):(\d{1,5})"
)
_ORIGIN = re.compile(r"[a-z][-a-z0-9+.]*://(?:\[[0-9a-f:.]+\]|[-a-z0-9._]+)(?::\d{1,5})?")


class EdgeTlsSpec(Spec):
    """HTTPS on the gateway. Changed files are loaded without closing connections."""

    cert_file: str | None = None
    """PEM certificate chain, with the gateway's own certificate first. Unset: plain HTTP."""
    key_file: str | None = None
    """PEM private key of the certificate, without a passphrase. It can be the same file."""
    client_ca_file: str | None = None
    """PEM certificates of authorities. If set, clients must present a certificate from one of them."""
    operator_cert_file: str | None = None
    """PEM client certificate and private key that the command `kvasir` on this machine uses if client_ca_file
    is set. Unset: `kvasir up` creates one for its run, which its gateway accepts as well."""
    minimum: Literal["1.2", "1.3"] = "1.2"
    """Minimum TLS version."""
    handshake_timeout_s: float = Field(default=8.0, gt=0, le=60)
    """Timeout of the TLS handshake, from the accept of the connection."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together; set both, or neither for plain HTTP")
        if self.client_ca_file is not None and self.cert_file is None:
            raise ValueError("client_ca_file requires HTTPS; set cert_file and key_file")
        if self.operator_cert_file is not None and self.client_ca_file is None:
            raise ValueError("operator_cert_file has no effect without client_ca_file; set client_ca_file")
        return self


class CorsSpec(Spec):
    """CORS: web pages that may call the API from a browser. Default: none."""

    origins: tuple[str, ...] = Field(default=(), max_length=256)
    """Allowed origins, each `scheme://host` or `scheme://host:port`, or `*` for all."""
    credentials: bool = False
    """Allow pages to send cookies and client certificates. API keys in a header do not need it."""
    max_age_s: int = Field(default=600, ge=0, le=86_400)
    """How long a browser may cache the answer to a preflight request."""

    @field_validator("origins")
    @classmethod
    def _spelled_as_browsers_do(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin; write scheme://host or scheme://host:port in lower case, "
                    "without a path, as in https://chat.example.com"
                )
        return value

    @model_validator(mode="after")
    def _never_everybody_with_credentials(self) -> Self:
        if self.credentials and "*" in self.origins:
            raise ValueError("credentials cannot be combined with the origin *; list the allowed origins")
        return self


class ConsoleSpec(Spec):
    """A listener of its own for the web console."""

    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the console, which serves what the gateway's port does too, for its playground; the gateway's
    port then has no console. Limits on connections and bodies apply to each of them. Unset: the console is
    at the gateway's port."""
    host: str = "127.0.0.1"
    """Address to bind. For an address other than loopback, API keys or issuers of tokens are required."""


class ResponsesSpec(Spec):
    """The Responses API: what the router keeps of responses, in its memory. Several routers do not share
    it."""

    max_responses: int = Field(default=4096, ge=0, le=1_000_000)
    """Maximum number of stored responses. 0: none is stored, so that `previous_response_id` and `background`
    are refused."""
    max_bytes: int = Field(default=64 << 20, ge=1 << 10, le=64 << 30)
    """Maximum bytes of stored responses, with the conversations that led to them. Beyond it, the least
    recently used response of the tenant that has the most bytes is dropped."""
    ttl_s: float = Field(default=3600.0, gt=0, le=30 * 86_400)
    """How long a response is stored."""
    max_background: int = Field(default=16, ge=0, le=100_000)
    """Maximum running background responses of a tenant, in each process that serves HTTP. 0: `background` is
    refused."""


class BatchesSpec(Spec):
    """The Batch API: files of requests, which run in capacity that other requests leave (see
    admission.spare_share)."""

    storage: str | None = Field(default=None, min_length=1, max_length=1024)
    """Folder where files and batches are kept, or `s3://BUCKET/PREFIX`. All routers need the same. Unset:
    `kvasir up` keeps them in its own folder; a router started on its own serves no files and no batches."""
    s3: S3ServerSpec = S3ServerSpec()
    """The server of an `s3://` storage."""
    redis: LeaseRedisSpec | None = None
    """Redis server by which routers agree who works on a batch. Unset: by locks of files in the folder, or by
    conditional writes of the S3 server."""
    max_file_bytes: int = Field(default=64 << 20, ge=1024, le=1 << 30)
    """Maximum bytes of an uploaded file; such a body may be larger than `max_body_bytes`."""
    max_lines: int = Field(default=50_000, ge=1, le=10_000_000)
    """Maximum lines of a batch."""
    max_files: int = Field(default=1000, ge=1, le=1_000_000)
    """Maximum files of a tenant. Results are stored beyond it, and count for the next upload."""
    max_bytes: int = Field(default=4 << 30, ge=1024)
    """Maximum bytes of a tenant's files. Results are stored beyond it, and count for the next upload."""
    max_batches: int = Field(default=32, ge=1, le=100_000)
    """Maximum batches of a tenant that have not ended."""
    concurrency: int = Field(default=64, ge=1, le=100_000)
    """Maximum lines that run at a time, in each process that serves HTTP."""
    retention_s: float = Field(default=30 * 86_400.0, ge=3600, le=3650 * 86_400)
    """How long files, and batches that have ended, are kept. A completion window is at most this."""

    @property
    def in_objects(self) -> bool:
        """Whether files are in object storage rather than in a folder."""
        return self.storage is not None and "://" in self.storage

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.storage is not None and self.in_objects:
            try:
                bucket_of(self.storage)
            except ValueError as error:
                raise ValueError(f"batches.storage is a folder, or {error}") from error
        elif self.s3 != S3ServerSpec():
            raise ValueError(
                "batches.s3 has no effect on a folder; set batches.storage to s3://BUCKET/PREFIX"
            )
        return self


class GatewaySpec(Spec):
    """The HTTP gateway."""

    host: str = "127.0.0.1"
    """Address to bind. For an address other than loopback, API keys or issuers of tokens are required."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0: a free port."""
    api_keys_file: str | None = None
    """File with API keys. Each line has the SHA-256 (hex) of a key, optionally followed by `tenant=NAME`,
    `expires=2030-01-31T00:00:00Z` and `scopes=inference+embeddings`; `#` starts a comment. `kvasir keys
    create` adds such lines, `kvasir keys new` prints them. A tenant can have several keys. Changes take
    effect within two seconds. Without any source of keys or issuer of tokens, no key is required."""
    api_keys_dir: str | None = None
    """Folder with such files, such as a mounted Kubernetes secret. Lines without a tenant belong to the
    tenant with the name of the file."""
    api_keys_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable of the router with such lines, separated by newlines or commas."""
    api_keys_redis: bool = False
    """Keep API keys in the Redis of `tenancy.redis` too, where `kvasir keys` changes them: a change takes
    effect in all routers within two seconds."""
    token_issuers: tuple[TokenIssuerSpec, ...] = Field(default=(), max_length=8)
    """OpenID Connect providers whose tokens are accepted beside API keys."""
    edges: int | None = Field(default=None, ge=0, le=64)
    """Number of edge processes that serve HTTP, in addition to the core process. 0: the core process serves
    HTTP. Unset: 0 with fewer than four usable CPUs, else one less than the number of CPUs, at most 8. Limits
    on connections and bodies apply to each process."""
    tls: EdgeTlsSpec = EdgeTlsSpec()
    cors: CorsSpec = CorsSpec()
    console: ConsoleSpec = ConsoleSpec()
    responses: ResponsesSpec = ResponsesSpec()
    batches: BatchesSpec = BatchesSpec()
    image_inputs: ImagesSpec = ImagesSpec()
    video_inputs: VideosSpec = VideosSpec()
    audio_inputs: AudioSpec = AudioSpec()
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    max_bodies_bytes: int = Field(default=512 << 20, ge=1024)
    """Maximum bytes of bodies that are received or queued, over all connections."""
    max_header_bytes: int = Field(default=64 << 10, ge=1024)
    """Maximum bytes of request line, headers and trailers of a request."""
    max_header_fields: int = Field(default=128, ge=8, le=10_000)
    max_target_bytes: int = Field(default=8 << 10, ge=256)
    """Maximum bytes of path and query."""
    header_timeout_s: float = Field(default=8.0, gt=0)
    """Timeout of request line and headers, from their first byte."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """Timeout of the body, from the end of the headers."""
    min_body_bytes_per_s: int = Field(default=1024, ge=0)
    """Minimum rate of a body, checked every half of `header_timeout_s`. Slower bodies time out early."""
    idle_timeout_s: float = Field(default=75.0, gt=0)
    """How long an idle connection is kept open."""
    max_connections: int = Field(default=4096, ge=1)
    """Maximum connections. Further ones are answered with 503 and closed."""
    max_connections_per_client: int = Field(default=1024, ge=1)
    """Maximum connections of one address, or of one /64 network for IPv6. Further ones are answered with 429
    and closed."""
    trusted_proxies: tuple[str, ...] = Field(default=("127.0.0.0/8", "::1/128"), max_length=256)
    """Addresses and networks of proxies, which are exempt from `max_connections_per_client`."""
    stream_buffer_bytes: int = Field(default=256 << 10, ge=4096)
    """Maximum output buffered for a slow client. A stream that exceeds it is aborted."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """How long a stopping gateway waits for requests in flight."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Timeout of a whole request; then the answer is 504."""
    default_max_tokens: int = Field(default=256, ge=1)
    """Output limit of a request that does not set one."""

    @property
    def authenticates(self) -> bool:
        """Whether callers must present an API key or a token."""
        return bool(
            self.api_keys_file
            or self.api_keys_dir
            or self.api_keys_env
            or self.api_keys_redis
            or self.token_issuers
        )

    @model_validator(mode="after")
    def _issuers_differ(self) -> Self:
        issuers = [each.issuer for each in self.token_issuers]
        if len(set(issuers)) != len(issuers):
            raise ValueError(f"token_issuers: issuers must differ, found {issuers}; remove one")
        return self

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
        shown = {"host": self.host}
        if self.console.port is not None:
            shown["console.host"] = self.console.host
        for name, host in shown.items():
            if not is_loopback(host) and not self.authenticates:
                raise ValueError(
                    f"{name} {host} is reachable from the network; set api_keys_file or token_issuers, "
                    "or bind 127.0.0.1"
                )
        if self.console.port is not None and self.console.port == self.port:
            raise ValueError(f"console.port {self.port} is the port of the gateway; choose another one")
        return self


class TokenizerSpec(Spec):
    """Tokenizers of the gateway, one per model."""

    fast: Literal["auto", "never"] = "auto"
    """`auto` uses the fast tokenizer for each model for which it is verified at start to produce the same
    tokens as the Hugging Face tokenizer, and that one otherwise."""
    prefix_cache_bytes: int = Field(default=16 << 20, ge=0, le=64 << 30)
    """Memory per model for the token cache: tokens of earlier turns, so that the next turn of a conversation
    tokenizes only its new text. 0 disables it."""


class ApiSpec(Spec):
    """Options of the API."""

    trust_chat_templates: bool = False
    """Allow clients to send a `chat_template`. A template is code: it runs in a sandbox without access to
    anything outside, but it can run forever and block the gateway."""


class TelemetrySpec(Spec):
    """Traces and logs. Metrics are always served by the gateway at /metrics."""

    otlp_endpoint: str | None = None
    """gRPC address of an OpenTelemetry collector, `host:port` or `http(s)://host:port`. Unset: no traces."""
    trace_share: float = Field(default=1.0, ge=0, le=1)
    """Fraction of traces begun here that are recorded whole, within `traces_per_s`. Of the others, calls that
    fail or miss their SLO are recorded when they have ended. A client's own trace is recorded as the client
    says."""
    traces_per_s: int = Field(default=10, ge=0, le=100_000)
    """Traces that are begun each second by one process of a gateway and recorded whole, at most."""
    exemplars: bool = False
    """Show ids of traces at latencies, to a Prometheus that asks /metrics for OpenMetrics. Only without edge
    processes (`gateway.edges: 0`)."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    request_logs: Literal["none", "failed", "all"] = "failed"
    """Requests that get a line in the router's log when they end: ids of request and trace, tenant, workers,
    times and counts of tokens, and no content. Of those that failed, at most 20 a second, unless `all` get
    one."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _reachable(cls, value: str | None) -> str | None:
        if value is None:
            return None
        address = _COLLECTOR.fullmatch(value)
        if address is None or not 0 < int(address[1]) <= 65535:
            raise ValueError("host:port, http://host:port or https://host:port, as in localhost:4317")
        return value
