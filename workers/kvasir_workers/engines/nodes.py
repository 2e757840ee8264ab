"""The place of a process in an engine that is spread over several nodes.

The first node's process is the worker: it schedules, serves sessions, and has the first ranks as children.
The other nodes' processes only have ranks.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from kvasir_workers.engines.signing.signed_tcp import make_key


@dataclass(frozen=True, slots=True)
class NodePlace:
    """One node's place. `rank` counts nodes from 0, the leader; `address` is this node's own; all ranks
    connect at `leader` and `port`, and engine cores of data-parallel ranks at `leader` and `rpc_port`. With
    `key` they sign these connections (kvasir_workers.engines.signing). `transfer` is the kind of KV transfer
    that the leader uses, "" if it does not say."""

    rank: int
    address: str
    leader: str
    port: int
    rpc_port: int
    key: str = field(default="", repr=False)
    transfer: str = ""


def leading(address: str) -> NodePlace:
    """Return the place of the leading node, at `address`, with ports that are free at the moment, and a new
    key. Raise OSError for an address that is not this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as ranks, socket.socket(family) as cores:
        for probe in (ranks, cores):
            probe.bind((address, 0))
        port, rpc_port = (int(probe.getsockname()[1]) for probe in (ranks, cores))
        return NodePlace(0, address, address, port, rpc_port, key=make_key())
