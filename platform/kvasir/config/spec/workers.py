"""The deployment spec's part about workers: session servers, KV transfer, and TLS with routers."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec.base import Spec

_PULL_SHARE = 0.8
_FILES = ("ca_file", "cert_file", "key_file")

TrustDomain = Annotated[
    str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", max_length=100)
]


class TransferSpec(Spec):
    """How KV moves from prefill to decode."""

    kind: Literal["nixl", "nccl"] = "nixl"
    """`nixl` reads the prefill worker's memory: RDMA where the nodes have it, shared memory or TCP elsewhere.
    `nccl` sends between pairs of workers: NCCL between GPUs, gloo where the KV is in host memory."""
    host: str = "127.0.0.1"
    """Address that the transfer agent of a prefill worker binds and tells; `pod` as in `worker.host`."""
    checksum: bool = True
    """Compare what arrived with what was sent, block by block; a difference is a failed pull."""
    overlap: Literal["auto", "always", "never"] = "auto"
    """Begin to pull a prompt of several chunks when its first chunk is computed, and not its last. `auto`:
    where engines compute on GPUs; on CPUs, an engine that waits takes time from the one that computes."""
    lease_s: float = Field(default=20.0, gt=0, le=600)
    """How long a prefill worker keeps blocks that nobody pulled."""
    timeout_s: float = Field(default=5.0, gt=0, le=600)
    """What a pull that hangs may cost: it has failed after four fifths of this without progress, and the rest
    is for computing the prompt instead."""
    on_failure: Literal["recompute", "fail"] = "recompute"
    """What the decode worker does when KV did not arrive."""

    @model_validator(mode="after")
    def _pulled_while_leased(self) -> Self:
        if self.timeout_s > self.lease_s:
            raise ValueError(
                f"timeout_s {self.timeout_s:g} exceeds lease_s {self.lease_s:g}: the blocks would be given "
                "up while they are being pulled; lower timeout_s or raise lease_s"
            )
        return self

    @property
    def stall_timeout_s(self) -> float:
        """How long a pull may make no progress."""
        return _PULL_SHARE * self.timeout_s


class WorkerSpec(Spec):
    """The workers' session server."""

    host: str = "127.0.0.1"
    """Address to bind. Beyond loopback, a worker does not start without `session_token_file`. `pod`: the
    address of the pod that it runs in, which the variable KVASIR_POD_IP says."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port on `host` of the session server. 0: any that is free, which discovery tells routers. Kubernetes'
    discovery needs a fixed one, and one worker of each address can have it."""
    session_token_file: str | None = None
    """Shared secret of routers and workers. `--token-file` of their processes wins over it, and `kvasir
    up` makes one when it is unset."""
    health_port: int | None = Field(default=None, ge=1, le=65535)
    """Port on `host` that answers gRPC health checks, and nothing else, in plain text: probes of Kubernetes
    have no certificate. One worker of each address can have it. Unset: the session port alone answers."""
    resume_window_s: float = Field(default=10.0, gt=0, le=300)
    """How long a broken session is kept for its router to return."""
    tail_messages: int = Field(default=4096, ge=64, le=1_000_000)
    """Unacknowledged step batches kept per session."""
    drain_s: float = Field(default=20.0, ge=0, le=3600)
    """How long a worker that is being stopped lets its streams come to their end."""
    heartbeat_s: float = Field(default=0.5, gt=0, le=60)
    """How often a worker that has nothing to say reports its load all the same, so that routers can tell
    an idle worker from a frozen one."""
    liveness_timeout_s: float = Field(default=1.5, gt=0, le=300)
    """A worker that says nothing for so long is given nothing new, and its connection is made anew."""
    migrate_s: float = Field(default=0.5, ge=0, le=300)
    """How long requests on a broken connection wait for it to come back before they go on elsewhere."""

    @model_validator(mode="after")
    def _heartbeats_fit_the_timeout(self) -> Self:
        if self.heartbeat_s * 2 > self.liveness_timeout_s:
            raise ValueError(
                f"liveness_timeout_s {self.liveness_timeout_s:g} is less than two heartbeats of "
                f"{self.heartbeat_s:g} s: idle workers would be taken for frozen ones; raise "
                "liveness_timeout_s or lower heartbeat_s"
            )
        return self


class TlsSpec(Spec):
    """Mutual TLS between routers and workers. A router's certificate carries the URI
    `spiffe://TRUST_DOMAIN/DEPLOYMENT/router`; a worker's carries
    `spiffe://TRUST_DOMAIN/DEPLOYMENT/worker/POOL` and the DNS name `POOL.worker.DEPLOYMENT.TRUST_DOMAIN`.
    Files are read again when they change, and no session ends for it."""

    mode: Literal["auto", "files", "off"] = "auto"
    """`auto` uses the files that are named. Where none is, `kvasir up` makes certificates and renews
    them, and a router or worker that is started by itself speaks plain text on loopback and does not start
    beyond it. `files` never speaks plain text; `off` always does."""
    directory: str | None = None
    """Folder with `ca.pem`, `router.pem` and a `worker-POOL.pem` for each pool; the last two hold a private
    key and its certificate chain. It stands in place of the three files below."""
    ca_file: str | None = None
    """PEM certificates of the authorities that peers may be certified by. While authorities change, name
    the old and the next one."""
    cert_file: str | None = None
    """PEM certificate chain of the process that reads this, its own certificate first."""
    key_file: str | None = None
    """PEM private key of that certificate, without a passphrase."""
    trust_domain: TrustDomain = "kvasir.local"
    """What the names in certificates begin or end with."""
    rotate_h: float = Field(default=24.0, ge=0.1, le=8760)
    """How long certificates that `kvasir up` makes are valid; they are renewed after two thirds of it."""

    @property
    def named(self) -> bool:
        """Whether the spec says where the certificates are."""
        return self.directory is not None or self.cert_file is not None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        given = [field for field in _FILES if getattr(self, field) is not None]
        if self.mode == "off" and (given or self.directory):
            raise ValueError("mode off uses no certificates: remove the files, or set mode: files")
        if self.directory is not None and given:
            raise ValueError(f"directory holds all certificates already: remove it, or {', '.join(given)}")
        if given and len(given) < len(_FILES):
            lacking = [field for field in _FILES if field not in given]
            raise ValueError(f"{lacking[0]} is missing: name {' and '.join(lacking)} beside {given[0]}")
        if self.mode == "files" and not self.named:
            raise ValueError("mode files needs directory, or ca_file, cert_file and key_file; name them")
        return self
