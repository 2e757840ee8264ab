"""Ray's view of a pod's own node, for the pod's process, without a Ray driver.

A node that is about to stop is announced to Ray first: Ray then places nothing on it, and Serve starts a
successor of each of its replicas at once, not when the replica has ended.
"""

from __future__ import annotations

import logging
import socket

from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, without stubs
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.core.generated.gcs_pb2 import GcsNodeInfo

log = logging.getLogger(__name__)

ASK_S = 2.0
NO_DEADLINE_MS = 0


def is_there(address: str, ip: str) -> bool:
    """Whether the head at `address` answers and has a living node at `ip`."""
    try:
        # Ray's client would retry for 30 s.
        with socket.create_connection(_pair(address), timeout=ASK_S):
            pass
        return bool(_nodes(GcsClient(address=address), ip))
    except Exception:  # noqa: BLE001 - Ray raises several private types, all of which mean that it does not answer
        return False


def leave_cluster(address: str, ip: str, why: str, until_s: float) -> bool:
    """Announce to the head at `address` that the nodes at `ip` stop by `until_s` (Unix time, seconds). Return
    False on failure, which is logged: Serve then replaces replicas once they have ended."""
    try:
        gcs = GcsClient(address=address)
        here = _nodes(gcs, ip)
        for node in here:
            # Ray ignores a node id given as bytes, without an error.
            _drain(gcs, node.node_id.hex(), why, int(until_s * 1000))
    except Exception as error:  # noqa: BLE001 - Ray raises several private types; the pod ends all the same
        log.warning("cannot announce to Ray's head at %s that this node stops: %s", address, error)
        return False
    return bool(here)


def drain_node(address: str, node_id: str, why: str) -> bool:
    """Announce to the head at `address` that nothing may be placed on a node, which leaves the cluster once
    it is empty. Return False on failure, which is logged."""
    try:
        _drain(GcsClient(address=address), node_id, why, NO_DEADLINE_MS)
    except Exception as error:  # noqa: BLE001 - Ray raises several private types; the next step tries again
        log.warning("cannot announce to Ray's head at %s that a node leaves: %s", address, error)
        return False
    return True


def _drain(gcs: GcsClient, node_id: str, why: str, until_ms: int) -> None:
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    gcs.drain_node(node_id, reason, why, until_ms, timeout=ASK_S)


def _nodes(gcs: GcsClient, ip: str) -> list[GcsNodeInfo]:
    nodes = gcs.get_all_node_info(timeout=ASK_S, state_filter=GcsNodeInfo.GcsNodeState.ALIVE)
    return [node for node in nodes.values() if node.node_manager_address == ip]


def _pair(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
