"""The deployment spec's part about workers: their session server and how KV moves between them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec.base import Spec

_PULL_SHARE = 0.8


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
