"""Assembles the planner for the control process: Ray's pools, a port for routers, and the loop."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import UpstreamError
from kvasir.ports.clock import Clock
from kvasir_platform.cluster.ray.pools import RayPools
from kvasir_platform.cluster.ray.scaler import RayScaler
from kvasir_platform.planner.loop import ScalingLoop
from kvasir_platform.planner.rpc import PlannerServer

log = logging.getLogger(__name__)


class Sizing:
    """The planner of one deployment. `renew` it when the spec has changed; `step` it a few times a second."""

    def __init__(
        self,
        deployment: Deployment,
        pools: RayPools,
        clock: Clock,
        tell: Callable[..., None],
        *,
        bind: str,
        token: str,
    ) -> None:
        self._pools = pools
        self._clock = clock
        self._tell = tell
        self._epoch = secrets.token_hex(8)
        self._scaler = RayScaler(pools, clock, pools.failures)
        self._loop = self._made(deployment)
        self._server = PlannerServer(bind, token, lambda report: self._loop.take(report, clock.now()))

    @property
    def address(self) -> str:
        """The address to which routers report their load."""
        return self._server.address

    def renew(self, deployment: Deployment) -> None:
        """Plan by another spec of the same deployment, and keep what was learned of the load."""
        self._loop = self._made(deployment, self._loop)

    def step(self) -> bool:
        """Run what is due. Return whether replicas are starting."""
        try:
            self._scaler.follow()
            return self._loop.step(self._clock.now())
        except UpstreamError as error:
            log.warning("pool sizes stay as they are: %s", error.message)
            return True

    def pin(self, pool: str, size: int | None) -> None:
        """See ScalingLoop."""
        self._loop.pin(pool, size)

    def plans(self, pool: str) -> bool:
        """See ScalingLoop."""
        return self._loop.plans(pool)

    def explain(self, now: float) -> dict[str, object]:
        """See ScalingLoop."""
        return self._loop.explain(now)

    def close(self) -> None:
        """Close the port for routers. Idempotent."""
        self._server.close()

    def _made(self, deployment: Deployment, before: ScalingLoop | None = None) -> ScalingLoop:
        pools = self._pools
        return ScalingLoop(
            deployment,
            self._scaler,
            epoch=self._epoch,
            before=before,
            tell=self._tell,
            rolling=lambda pool: pools.record(pool).before is not None,
            pins=pools.pins(),
        )
