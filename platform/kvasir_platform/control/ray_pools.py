"""Pools as Ray Serve applications: one application of one deployment per pool.

No Serve proxy is started: Serve keeps replicas alive, and sessions carry the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from kvasir.config.spec import Deployment, PoolSpec
from kvasir.ports.clock import Clock
from kvasir_workers.pool.replica import NodeFactory, PoolReplica

RUNNING = str(ApplicationStatus.RUNNING.value)
DEPLOY_FAILED = str(ApplicationStatus.DEPLOY_FAILED.value)
HEALTH_PERIOD_S = 1.0
HEALTH_TIMEOUT_S = 10.0
STOP_MARGIN_S = 5.0
CONSTRUCTOR_RETRIES = 2


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """One pool as Ray Serve sees it. `state` is Serve's word; `message` says why, if not running."""

    pool: str
    state: str
    wanted: int
    running: int
    message: str = ""

    @property
    def ready(self) -> bool:
        return self.state == RUNNING and self.running >= self.wanted

    @property
    def failed(self) -> bool:
        return self.state == DEPLOY_FAILED


def application_name(deployment: Deployment, pool: PoolSpec) -> str:
    """The name of a pool's application in Serve."""
    return f"{deployment.name}-{pool.name}"


class RayPools:
    """All pools of one deployment, through a driver of the given Ray head."""

    def __init__(self, deployment: Deployment, address: str) -> None:
        self._deployment = deployment
        self._address = address

    def connect(self) -> None:
        ray.init(
            address=self._address,
            namespace="kvasir",
            log_to_driver=False,
            configure_logging=False,
        )
        serve.start(proxy_location="Disabled")

    def deploy(self, start_node: NodeFactory, clock: Clock, token: str) -> None:
        """Ask Serve for every pool's replicas; returns at once."""
        spec = self._deployment.model_dump_json()
        targets = []
        for pool in self._deployment.pools:
            replica = serve.deployment(
                PoolReplica,
                name=pool.name,
                num_replicas=pool.replicas,
                health_check_period_s=HEALTH_PERIOD_S,
                health_check_timeout_s=HEALTH_TIMEOUT_S,
                graceful_shutdown_timeout_s=self._deployment.worker.drain_s + STOP_MARGIN_S,
                graceful_shutdown_wait_loop_s=0.1,
                max_constructor_retry_count=CONSTRUCTOR_RETRIES,
                ray_actor_options={"num_cpus": pool.cpus, "num_gpus": pool.gpus},
            )
            targets.append(
                serve.RunTarget(
                    replica.bind(start_node, clock, spec, pool.name, token),
                    name=application_name(self._deployment, pool),
                    route_prefix=None,
                )
            )
        serve.run_many(
            targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )

    def status(self) -> Sequence[PoolStatus]:
        """What Serve says of each pool, in the spec's order."""
        applications = serve.status().applications
        found = []
        for pool in self._deployment.pools:
            application = applications.get(application_name(self._deployment, pool))
            if application is None:
                found.append(PoolStatus(pool.name, "NOT_STARTED", pool.replicas, 0))
                continue
            overview = application.deployments.get(pool.name)
            running = overview.replica_states.get("RUNNING", 0) if overview else 0
            message = (overview.message if overview else "") or application.message
            found.append(PoolStatus(pool.name, application.status.value, pool.replicas, running, message))
        return found

    def shutdown(self) -> None:
        """Drain and delete every application, then leave Ray."""
        serve.shutdown()
        ray.shutdown()
