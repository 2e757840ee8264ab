"""Faults of a simulated cluster, named as in a real one.

A fault is started, and ended by its counterpart. No method waits for the platform to detect it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvasir.core.kv import TierLoad
    from kvasir_platform.sim.cluster import Cluster
    from kvasir_platform.sim.worker import SimWorker


class Faults:
    """The faults of one cluster. A method raises KeyError for a worker that does not live."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def freeze(self, worker_id: str) -> None:
        """SIGSTOP: nothing is computed, sent, read or pulled, and connections stay open."""
        self._cluster.workers[worker_id].process.freeze()
        self._cluster.fabric.stalled.add(worker_id)

    def thaw(self, worker_id: str) -> None:
        """SIGCONT."""
        self._cluster.workers[worker_id].process.thaw()
        self._cluster.fabric.stalled.discard(worker_id)

    def partition(self, worker_id: str, router_id: str | None = None) -> None:
        """Block all traffic between the worker and the others, or one router; sent data is held."""
        self._cluster.network.weather(self._address(worker_id), router_id).set(up=False)
        if router_id is None:
            self._cluster.fabric.stalled.add(worker_id)

    def heal(self, worker_id: str, router_id: str | None = None) -> None:
        """End a partition, or a slow line."""
        self._cluster.network.weather(self._address(worker_id), router_id).set()
        if router_id is None:
            self._cluster.fabric.stalled.discard(worker_id)

    def cut(self, worker_id: str, router_id: str | None = None) -> int:
        """Reset connections, which may be opened again at once. Return their number."""
        return self._cluster.network.cut(self._address(worker_id), router_id=router_id)

    def slow(self, worker_id: str, times: float) -> None:
        """Make the engine `times` as slow; 1 is normal."""
        self._cluster.workers[worker_id].engine_clock.slowness = times

    def fail(self, worker_id: str, code: str | None) -> None:
        """Make the engine answer every leg with this error; None ends that."""
        self._cluster.workers[worker_id].faults.failing = code

    def stale(self, worker_id: str, stale: bool) -> None:
        """Freeze the worker's reported load, although tokens flow."""
        self._cluster.workers[worker_id].faults.stale = stale

    def trouble(self, worker_id: str, tier: TierLoad | None) -> None:
        """Make the worker report a tier in this state, where it finds what is cached; None ends that."""
        self._cluster.workers[worker_id].faults.tiers = () if tier is None else (tier,)

    def fill(self, worker_id: str, full: bool) -> None:
        """Make the engine report that KV memory is full and that requests wait for it."""
        self._cluster.workers[worker_id].faults.full = full

    def forget(self, worker_id: str, cold: bool) -> None:
        """Make the engine find little of what it has reported to be in its cache."""
        self._cluster.workers[worker_id].faults.cold = cold

    async def restart(self, worker_id: str, grace_s: float, reason: str = "upgrade") -> SimWorker:
        """Restart the worker as planned: it drains for at most `grace_s`, leaves, and starts again at its
        address."""
        worker = await self._cluster.stop(worker_id, reason, grace_s)
        return await self._cluster.revive(worker.endpoint, worker.epoch + 1)

    def _address(self, worker_id: str) -> str:
        for endpoint in self._cluster.discovery.endpoints:
            if endpoint.worker_id == worker_id:
                return endpoint.address
        raise KeyError(worker_id)
