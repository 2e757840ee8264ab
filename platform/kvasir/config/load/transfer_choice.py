"""Which transfer moves KV between workers where the spec leaves it open, and which one is refused.

Over UCX's TCP transport, whoever reaches the port of an engine reads and writes the memory of its process,
with no ticket. So NIXL is chosen where UCX opens no such port: on one machine, over shared memory, and
between machines with RDMA devices. Elsewhere KV moves over NCCL and sockets, whose ports ask for tickets.
"""

from __future__ import annotations

from typing import Literal

from kvasir.config.spec.base import is_loopback
from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.workers import TransferSpec
from kvasir.core.errors import ConfigError

TransferKind = Literal["nixl", "nccl"]

UCX_TRANSPORTS = "UCX_TLS"
"""The environment variable with the transports that UCX may use."""

NEEDS_RDMA = (
    "transfer.kind: nixl between machines needs RDMA devices, and there is none: over TCP, UCX lets whoever "
    "reaches its port read and write the memory of the engine"
)
ASK_FOR_TICKETS = "set transfer.kind: auto or nccl, whose ports ask for tickets"
ACCEPT = "where nobody else reaches the network, accept it with transfer.nixl.unauthenticated_tcp: true"


def chosen_kind(transfer: TransferSpec, *, rdma: bool) -> TransferKind:
    """Return the transfer that `kind` stands for. `rdma`: whether the machine has RDMA devices."""
    if transfer.kind != "auto":
        return transfer.kind
    return "nixl" if rdma or is_loopback(transfer.host) else "nccl"


def refused_transfer(transfer: TransferSpec, *, rdma: bool, ucx_tls: str | None = None) -> str | None:
    """Return why this transfer may not run between machines, with the remedy; None if it may. `ucx_tls` is
    the value of UCX_TRANSPORTS, None if it is not set."""
    guarded = chosen_kind(transfer, rdma=rdma) != "nixl" or is_loopback(transfer.host)
    if guarded or transfer.nixl.unauthenticated_tcp:
        return None
    if not rdma:
        return f"{NEEDS_RDMA}; {ASK_FOR_TICKETS}, or, {ACCEPT}"
    if ucx_tls is not None and allows_tcp(ucx_tls):
        return (
            f"{UCX_TRANSPORTS} is {ucx_tls!r}, which allows TCP: whoever reaches UCX's port could read and "
            f"write the memory of the engine; remove the variable or tcp from it, or, {ACCEPT}"
        )
    return None


def allows_tcp(ucx_tls: str) -> bool:
    """Return whether UCX may use its TCP transport with this value of UCX_TRANSPORTS."""
    excluding = ucx_tls.startswith("^")
    names = {name.strip() for name in ucx_tls.removeprefix("^").split(",")}
    return "tcp" not in names if excluding else not names.isdisjoint({"all", "tcp"})


def with_transfer(view: Deployment, *, rdma: bool, ucx_tls: str | None) -> Deployment:
    """Return `view` with the transfer that a worker on this machine uses. Raise ConfigError if it is refused;
    the other arguments are those of `refused_transfer`."""
    if view.embeds or not view.disaggregated:
        return view
    if reason := refused_transfer(view.transfer, rdma=rdma, ucx_tls=ucx_tls):
        raise ConfigError(reason)
    chosen = view.transfer.model_copy(update={"kind": chosen_kind(view.transfer, rdma=rdma)})
    return view.model_copy(update={"transfer": chosen})
