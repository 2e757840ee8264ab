"""What one worker of a pool costs an hour, and how many GPUs it has."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.config.spec.tenants import CPU, CostSpec
from kvasir.core.identity import WorkerIdentity
from kvasir.hardware.gpus import gpu_named, gpu_of_device
from kvasir.hardware.offers import CPU_CORE_HOUR, OFFERS, UNKNOWN


@dataclass(frozen=True, slots=True)
class WorkerPrice:
    """`per_hour` of one worker with `gpus` GPUs, 0 for a worker without. `known` is false for a GPU without a
    price, which then costs nothing."""

    gpus: float
    per_hour: float
    known: bool = True


class Prices:
    """The prices of the spec, and of the catalogue for what it does not list."""

    def __init__(self, deployment: Deployment) -> None:
        self._spec = deployment.cost
        self._pools = {pool.name: pool for view in deployment.views() for pool in view.pools}

    def of(self, pool: str, identity: WorkerIdentity | None) -> WorkerPrice:
        """Return the price of a worker. The spec names the GPU of its pool, or the worker does."""
        spec = self._pools.get(pool)
        if spec is None:
            return WorkerPrice(0.0, 0.0, known=False)
        nodes = spec.engine.nodes
        gpus = spec.reserved_gpus * nodes
        if spec.gpus == "auto" and not gpus and identity is not None:
            # A worker of its own, which has looked at its machine.
            gpus = float(identity.hardware.devices) if gpu_of_device(identity.hardware.device) else 0.0
        if not gpus:
            return WorkerPrice(0.0, spec.cpus * nodes * self._spec.prices.get(CPU, CPU_CORE_HOUR))
        each = _gpu_price(self._spec, spec, identity)
        return WorkerPrice(gpus, gpus * (each or 0.0), known=each is not None)


def _gpu_price(cost: CostSpec, pool: PoolSpec, identity: WorkerIdentity | None) -> float | None:
    """Return the price of one GPU of a pool for an hour; None if it is unknown."""
    if pool.gpu is not None:
        gpu = gpu_named(pool.gpu)
    else:
        gpu = None if identity is None else gpu_of_device(identity.hardware.device)
    if gpu is None:
        return None
    stated = cost.price_of(gpu)
    return OFFERS.get(gpu.name, UNKNOWN).dollars_per_hour if stated is None else stated
