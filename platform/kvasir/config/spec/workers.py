"""The part of the deployment spec for workers: session servers, KV transfer, and TLS with routers."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec.base import Spec

_PULL_SHARE = 0.8
_FILES = ("ca_file", "cert_file", "key_file")

TrustDomain = Annotated[
    str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", max_length=100)
]


class LinkSpec(Spec):
    """What is expected of transfers over one class of link until they are measured. Unset fields have the
    default of the class."""

    bytes_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth between two workers."""
    latency_s: float | None = Field(default=None, ge=0)
    """Time of a transfer without bytes."""


class LinksSpec(Spec):
    """The classes of links between two workers, from near to far. A pair has the first class that the zone,
    rack, NVLink domain and node of both show."""

    nvlink: LinkSpec = LinkSpec()
    """Both in one NVLink domain. Default: 400 GB/s, 3 ms."""
    node: LinkSpec = LinkSpec()
    """On one node. Default: 25 GB/s, 3 ms."""
    rack: LinkSpec = LinkSpec()
    """In one rack. Default: four fifths of the rate of the worker's NIC, 10 GB/s if that is unknown; 3 ms."""
    zone: LinkSpec = LinkSpec()
    """In one zone. Default: half of the default of `rack`, 3 ms."""
    cross_zone: LinkSpec = LinkSpec()
    """In two zones. Default: 600 MB/s, 6 ms."""


class NixlSpec(Spec):
    """Transfers of kind `nixl`."""

    unauthenticated_tcp: bool = False
    """Allow UCX to use TCP between machines. Whoever reaches its ports can then read and write the memory of
    the engine's process, without a ticket."""


class TransferSpec(Spec):
    """KV transfer from prefill to decode workers."""

    kind: Literal["auto", "nixl", "nccl"] = "auto"
    """`nixl` reads the memory of the prefill worker: by the kernel on one machine, over RDMA between
    machines. `nccl` sends between pairs of workers that prove their tickets, with NCCL between GPUs and
    sockets for KV in host memory. `auto`: `nixl` if `host` is a loopback address or the machine has RDMA
    devices, otherwise `nccl`."""
    nixl: NixlSpec = NixlSpec()
    """Options of `nixl`."""
    host: str = "127.0.0.1"
    """Address that the transfer agent of a prefill worker binds and advertises. `pod`: see `worker.host`."""
    checksum: bool = True
    """Verify the checksum of each received block. A pull fails if one differs."""
    overlap: Literal["auto", "always", "never"] = "auto"
    """Start the pull of a prompt with several chunks after its first chunk is computed instead of its last.
    `auto`: on GPUs only; on CPUs, a waiting engine takes time from the computing one."""
    lease_s: float = Field(default=20.0, gt=0, le=600)
    """How long a prefill worker keeps blocks that are not pulled."""
    timeout_s: float = Field(default=5.0, gt=0, le=600)
    """Maximum delay by a hanging pull. The pull fails after four fifths of this time without progress; the
    rest is left for recomputing the prompt."""
    on_failure: Literal["recompute", "fail"] = "recompute"
    """What the decode worker does if a pull fails."""
    links: LinksSpec = LinksSpec()
    """Bandwidths and latencies from which the routing policy `cost` starts."""

    @model_validator(mode="after")
    def _pulled_while_leased(self) -> Self:
        if self.timeout_s > self.lease_s:
            raise ValueError(
                f"timeout_s {self.timeout_s:g} exceeds lease_s {self.lease_s:g}: the lease would expire "
                "during a pull; lower timeout_s or raise lease_s"
            )
        return self

    @property
    def stall_timeout_s(self) -> float:
        """Timeout of a pull without progress."""
        return _PULL_SHARE * self.timeout_s


class WorkerSpec(Spec):
    """The session server of workers."""

    host: str = "127.0.0.1"
    """Address to bind. For an address other than loopback, `session_token_file` is required. `pod`: the
    address of the worker's pod, from the environment variable KVASIR_POD_IP."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the session server on `host`. 0: a free port, which routers learn from discovery. Kubernetes
    discovery requires a fixed port, which one worker per address can use."""
    session_token_file: str | None = None
    """File with the shared secret of routers and workers. The option `--token-file` of their processes takes
    precedence. Unset: `kvasir up` creates one."""
    health_port: int | None = Field(default=None, ge=1, le=65535)
    """Port on `host` that serves only gRPC health checks, without TLS, because Kubernetes probes have no
    certificate. One worker per address can use it. Unset: only the session port serves them."""
    resume_window_s: float = Field(default=10.0, gt=0, le=300)
    """How long a broken session is kept so that its router can resume it."""
    tail_messages: int = Field(default=4096, ge=64, le=1_000_000)
    """Maximum unacknowledged step batches retained per session."""
    drain_s: float = Field(default=20.0, ge=0, le=3600)
    """How long a stopping worker waits for its streams to end."""
    heartbeat_s: float = Field(default=0.5, gt=0, le=60)
    """The longest time in which a worker sends nothing, so that routers can tell an idle one from a frozen
    one. A load that has not changed is sent with every fourth heartbeat."""
    liveness_timeout_s: float = Field(default=1.5, gt=0, le=300)
    """After this time without a message or heartbeat, a worker receives no new requests and its router
    reconnects."""
    migrate_s: float = Field(default=0.5, ge=0, le=300)
    """How long requests on a broken connection wait for it to resume before failover to another worker."""
    compile_cache_dir: str | None = None
    """Folder in which engines keep compiled code between starts. Other users must not be able to write to it:
    engines execute its contents. Default: `.cache/kvasir/compiled` in the worker's home folder."""
    compile_cache_bytes: int = Field(default=16 << 30, ge=1 << 20)
    """Maximum size of that folder. Beyond it, compiled code that no worker uses is removed at the start of a
    worker, the least recently used first."""

    @model_validator(mode="after")
    def _heartbeats_fit_the_timeout(self) -> Self:
        if self.heartbeat_s * 2 > self.liveness_timeout_s:
            raise ValueError(
                f"liveness_timeout_s {self.liveness_timeout_s:g} is less than two heartbeats of "
                f"{self.heartbeat_s:g} s, so idle workers would look frozen; raise liveness_timeout_s or "
                "lower heartbeat_s"
            )
        return self


class TlsSpec(Spec):
    """Mutual TLS between routers and workers. A router's certificate carries the URI
    `spiffe://TRUST_DOMAIN/DEPLOYMENT/router`; a worker's carries
    `spiffe://TRUST_DOMAIN/DEPLOYMENT/worker/POOL` and the DNS name `POOL.worker.DEPLOYMENT.TRUST_DOMAIN`.
    Changed files are loaded without ending sessions."""

    mode: Literal["auto", "files", "off"] = "auto"
    """`auto` uses the configured files. Without them, `kvasir up` creates and renews certificates; a router
    or worker started on its own uses plain text on loopback and refuses to start on any other address.
    `files` requires TLS; `off` disables it."""
    directory: str | None = None
    """Folder with `ca.pem`, `router.pem` and a `worker-POOL.pem` for each pool; the last two hold a private
    key and its certificate chain. Replaces the three files below."""
    ca_file: str | None = None
    """PEM certificates of the authorities that are trusted to certify peers. During a rotation, include the
    old and the next authority."""
    cert_file: str | None = None
    """PEM certificate chain of the process, with its own certificate first."""
    key_file: str | None = None
    """PEM private key of the certificate, without a passphrase."""
    trust_domain: TrustDomain = "kvasir.local"
    """Trust domain in the names of certificates."""
    rotate_h: float = Field(default=24.0, ge=0.1, le=8760)
    """Validity of certificates from `kvasir up`, in hours. They are renewed after two thirds of it."""

    @property
    def named(self) -> bool:
        """Whether certificate files are configured."""
        return self.directory is not None or self.cert_file is not None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        given = [field for field in _FILES if getattr(self, field) is not None]
        if self.mode == "off" and (given or self.directory):
            raise ValueError("mode off uses no certificates; remove the files, or set mode: files")
        if self.directory is not None and given:
            raise ValueError(f"directory replaces the single files; remove it, or {', '.join(given)}")
        if given and len(given) < len(_FILES):
            lacking = [field for field in _FILES if field not in given]
            raise ValueError(
                f"{lacking[0]} is missing; set {' and '.join(lacking)} in addition to {given[0]}"
            )
        if self.mode == "files" and not self.named:
            raise ValueError("mode files requires directory, or ca_file, cert_file and key_file; set them")
        return self
