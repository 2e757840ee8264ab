"""Which part of an engine a process runs, where one engine is spread over several nodes.

The first node's process is the worker: it schedules, answers sessions, and has the first ranks below it. The
others' have ranks below them and nothing else.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodePlace:
    """One node's. `rank` counts nodes from 0, which leads; `address` is this node's own; all ranks meet at
    `leader` and `port`."""

    rank: int
    address: str
    leader: str
    port: int


def leading(address: str) -> NodePlace:
    """The place of the node that leads, at `address`, with a port that is free there at this moment. Raises
    OSError for an address that is not this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return NodePlace(0, address, address, int(probe.getsockname()[1]))
