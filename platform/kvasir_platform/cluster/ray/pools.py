"""Pools as Ray Serve applications: one application of one deployment per pool.

No Serve proxy runs: Serve keeps replicas alive, and sessions carry the requests. A replica drains when it is
stopped (kvasir_workers.pool.replica), and Serve waits for that.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import ray
from ray import serve
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)
from ray.serve._private.common import DeploymentID, ReplicaState
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.errors import ConfigError, ProtocolError
from kvasir.core.membership import NAMESPACE, MemberRecord, leave_key, member_prefix
from kvasir.ports.clock import Clock
from kvasir_platform.cluster.ray.engine_resources import bundles, preloaded, shares
from kvasir_platform.cluster.ray.membership import drain_node
from kvasir_platform.cluster.ray.pod_templates import (
    PodRow,
    PodTemplate,
    follower_resource,
    pods_of,
    pool_resource,
    template_resource,
)
from kvasir_platform.cluster.ray.pool_records import PoolRecord, record_key, resumed
from kvasir_platform.cluster.ray.pool_status import PoolStatus, ReplicaRow, pool_status
from kvasir_workers.pool.failures import forget_failure, read_failure
from kvasir_workers.pool.followers import NodePlan
from kvasir_workers.pool.replica import NodeFactory, PoolReplica

log = logging.getLogger(__name__)

HEALTH_PERIOD_S = 1.0
HEALTH_TIMEOUT_S = 5.0
STOP_MARGIN_S = 5.0
CONSTRUCTOR_RETRIES = 2
ASK_TIMEOUT_S = 10.0
# Percent of the pool: one replica at a time for pools of up to 100.
SURGE_PERCENT = 1


def application_name(deployment: Deployment, pool: PoolSpec) -> str:
    """Return the name of a pool's application in Serve."""
    return f"{deployment.name}-{pool.name}"


def head_cpus(deployment: Deployment) -> int:
    """Return the CPU cores that Ray must count: those of every replica and of one more, which a restart
    starts beside the one that it replaces."""
    pools = deployment.pools
    each = [pool.cpus * pool.engine.nodes for pool in pools]
    return math.ceil(sum(cpus * pool.most for cpus, pool in zip(each, pools, strict=True)) + max(each))


class RayPools:
    """All pools of one deployment, through a driver of the given Ray head. Calls of Serve's controller block
    while Ray's head is away. `in_pods`: a replica takes a pod of its pool (`pool_resource`) instead of a part
    of this machine, and the pools outlive this process. `pods` are the desired pods by pool."""

    def __init__(
        self,
        deployment: Deployment,
        address: str,
        *,
        in_pods: bool = False,
        pods: Mapping[str, PodTemplate] | None = None,
    ) -> None:
        self._deployment = deployment
        self._address = address
        self._in_pods = in_pods
        self._desired = dict(pods or {})
        self._records: dict[str, PoolRecord] = {}
        # Pools in which no replica started beside those that it was to replace.
        self._crowded: set[str] = set()
        self._start: tuple[NodeFactory, Clock, str, NodePlan] | None = None

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """The exceptions that calls raise while Ray's head does not answer."""
        return (RayError, TimeoutError, ConnectionError)

    def connect(self) -> None:
        """Connect to Ray as a driver, and start Serve if it does not run."""
        ray.init(
            address=self._address,
            namespace="kvasir",
            log_to_driver=False,
            configure_logging=False,
        )
        serve.start(proxy_location="Disabled")

    def deploy(self, start_node: NodeFactory, clock: Clock, token: str, nodes: NodePlan) -> None:
        """Request every pool's replicas from Serve; returns at once. Replicas of an earlier control process
        of this deployment are kept, unless their part of the spec has changed."""
        self._start = (start_node, clock, token, nodes)
        self.adopt(self._deployment, self._desired)

    def adopt(self, deployment: Deployment, pods: Mapping[str, PodTemplate]) -> None:
        """Apply another spec of the same deployment, and other pods; returns at once. Replicas whose part has
        changed are replaced one by one; pools that are not in the spec are drained and deleted."""
        self._deployment = deployment
        self._desired = dict(pods)
        self._run([self._renewed(pool) for pool in deployment.pools])
        kept = {application_name(deployment, pool) for pool in deployment.pools}
        for application in serve.status().applications.keys() - kept:
            pool_name = application.removeprefix(f"{deployment.name}-")
            serve.delete(application, _blocking=False)
            self._records.pop(pool_name, None)
            _internal_kv_del(record_key(deployment.name, pool_name), namespace=NAMESPACE)

    def retry(self, pool: str) -> None:
        """Apply the desired spec and pods again, after an earlier attempt was settled."""
        self._run([self._renewed(self._pool(pool))])

    def names(self) -> Sequence[str]:
        """Return the name of every pool, in the spec's order."""
        return [pool.name for pool in self._deployment.pools]

    def record(self, pool: str) -> PoolRecord:
        """Return the record of a pool that exists."""
        return self._records[pool]

    def desired(self, pool: str) -> str:
        """Return the digest of the desired template of the pool's pods, "" if any will do."""
        desired = self._desired.get(pool)
        return "" if desired is None else desired.template

    def wanted(self, pool: str) -> int:
        """Return the requested number of replicas. Raises ConfigError for a pool that does not exist."""
        self._pool(pool)
        return self._records[pool].wanted

    def restart(self, pool: str) -> bool:
        """Replace the pool's replicas one by one; returns at once. True: each new replica starts beside the
        one that it replaces, which drains only when the new one serves. False: Ray has no free GPU for that,
        and each is stopped first. If new replicas do not start, Serve gives up and keeps the old ones that
        still serve; see `settle`. Raise ConfigError if the only replica would be stopped."""
        spec, record = self._pool(pool), self._records[pool]
        if record.of_other_pods:
            raise ConfigError(f"{pool} is being moved to other pods; retry when that is done")
        beside = self._free(spec)
        if not beside and record.wanted < 2:
            what = "pod" if self._in_pods else "GPU"
            raise ConfigError(
                f"{pool} has one replica, and no {what} is free for a second one beside it: a restart would "
                f"stop serving. Add one (pools.{pool}.replicas), or stop the deployment and start it again"
            )
        self._keep(pool, record.follow())
        self._run([self._target(spec, surge=beside)])
        return beside

    def settle(self, pool: str) -> bool:
        """After a failed restart, return to the previous replicas and their spec. Without this, Serve would
        not replace any of them that fails later. False if there were none before."""
        record = self._records[pool]
        if record.before is None:
            return False
        self._crowded.discard(pool)
        self._keep(pool, replace(record.before, wanted=record.wanted))
        self._run([self._target(self._pool(pool), surge=True)])
        return True

    def confirm(self, pool: str) -> None:
        """Forget the previous replicas of a completed restart."""
        self._crowded.discard(pool)
        self._keep(pool, replace(self._records[pool], before=None))

    def start_again(self, pool: str) -> None:
        """Start the replicas of a pool again for which Serve has given up."""
        record = self._records[pool]
        # Serve leaves a version alone once it has failed.
        self._keep(pool, replace(record, version=record.version + 1))
        self._run([self._target(self._pool(pool), surge=True)])

    def stop_first(self, pool: str) -> bool:
        """Continue a roll by stopping each replica before its successor starts. False if it does so already,
        or the pool has only one."""
        spec = self._pool(pool)
        if self._records[pool].wanted < 2 or not self._beside(spec):
            return False
        self._crowded.add(pool)
        self._run([self._target(spec, surge=False)])
        return True

    def scale(self, pool: str, replicas: int) -> None:
        """Request another number of replicas; only surplus ones drain. Raise ConfigError for an unknown pool,
        a negative number, and growth beyond `scaling.max`; a size above it may shrink in steps."""
        spec = self._pool(pool)
        if replicas < 0:
            raise ConfigError(f"{pool} cannot have {replicas} replicas; ask for 0 or more")
        if spec.scaling is not None and replicas > max(spec.scaling.max, self._records[pool].wanted):
            raise ConfigError(f"{pool} can have {spec.scaling.max} replicas at most (scaling.max)")
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        deployment = DeploymentID(name=pool, app_name=application_name(self._deployment, spec))
        ray.get(controller.update_deployment_replicas.remote(deployment, replicas), timeout=ASK_TIMEOUT_S)
        self._keep(pool, replace(self._records[pool], wanted=replicas))

    def pin(self, pool: str, replicas: int | None) -> None:
        """Record the size that a user requested in place of the planner's; None removes it."""
        self._keep(pool, replace(self._records[pool], pinned=replicas))

    def pins(self) -> dict[str, int]:
        """Return the pools that have a size requested by a user."""
        return {name: each.pinned for name, each in self._records.items() if each.pinned is not None}

    def members(self) -> dict[str, MemberRecord]:
        """Return the records of this deployment's workers, by Serve's name of each replica."""
        found = {}
        for key in _internal_kv_list(member_prefix(self._deployment.name), namespace=NAMESPACE):
            raw = _internal_kv_get(key, namespace=NAMESPACE)
            # A record may be deleted between the two calls.
            with contextlib.suppress(ProtocolError):
                record = MemberRecord.decode(raw or b"")
                found[record.replica] = record
        return found

    def ask_to_leave(self, worker_id: str, reason: str) -> None:
        """Make a worker drain and stop."""
        key = leave_key(self._deployment.name, worker_id).encode()
        _internal_kv_put(key, reason.encode(), overwrite=True, namespace=NAMESPACE)

    def status(self) -> Sequence[PoolStatus]:
        """Return Serve's status of each pool, in the spec's order."""
        applications = serve.status().applications
        found = []
        for pool in self._deployment.pools:
            application = applications.get(application_name(self._deployment, pool))
            status = pool_status(pool.name, self._records[pool.name].wanted, application)
            if not status.ready and (failure := read_failure(self._deployment.name, pool.name)) is not None:
                status = status.failing(failure)
            found.append(status)
        return found

    def replicas(self, pool: str) -> list[ReplicaRow]:
        """Return every replica of a pool that exists, starting and draining ones included."""
        name = application_name(self._deployment, self._pool(pool))
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        details: dict[str, Any] = ray.get(
            controller.get_serve_instance_details.remote(), timeout=ASK_TIMEOUT_S
        )
        deployment = details["applications"].get(name, {}).get("deployments", {}).get(pool, {})
        return [
            ReplicaRow(str(row["replica_id"]), ReplicaState(row["state"]).value, row.get("pid"))
            for row in deployment.get("replicas", [])
        ]

    def pods(self) -> list[PodRow]:
        """Return the living pods of all pools."""
        return pods_of(ray.nodes(), available_resources_per_node())

    def let_go(self, pod: PodRow) -> bool:
        """Release a pod in which nothing runs. False if Ray could not be reached, which is logged."""
        return drain_node(self._address, pod.node_id, "its pod template is not the desired one")

    def shutdown(self) -> None:
        """Drain and delete every application, then disconnect from Ray."""
        serve.shutdown()
        self.leave()

    def leave(self) -> None:
        """Disconnect from Ray; the pools continue."""
        ray.shutdown()

    def _free(self, pool: PoolSpec) -> bool:
        """Whether the resources for one more replica are free."""
        free = ray.available_resources()
        nodes = pool.engine.nodes
        places = {pool_resource(pool.name): 1, follower_resource(pool.name): nodes - 1}
        if template := self._records[pool.name].template:
            places[template_resource(template)] = nodes
        if self._in_pods and any(free.get(name, 0.0) < count for name, count in places.items()):
            return False
        return pool.reserved_gpus == 0 or free.get("GPU", 0.0) >= pool.reserved_gpus * nodes

    def _beside(self, pool: PoolSpec) -> bool:
        """Whether a changed replica starts beside the one that it replaces. The only replica is never stopped
        first: its successor waits for resources. With other pods, a further pod is needed."""
        record = self._records[pool.name]
        if record.wanted < 2:
            return True
        if pool.name in self._crowded:
            return False
        if record.of_other_pods:
            desired = self._desired.get(pool.name)
            return desired is not None and desired.pods > record.wanted
        return self._free(pool)

    def _renewed(self, pool: PoolSpec) -> serve.RunTarget:
        """Return the desired target of the pool, and store its record."""
        record = resumed(
            self._records.get(pool.name) or self._read(pool.name),
            self._deployment,
            pool,
            self.desired(pool.name),
        )
        self._keep(pool.name, record)
        return self._target(pool, surge=record.before is None or self._beside(pool))

    def _read(self, pool: str) -> PoolRecord | None:
        raw = _internal_kv_get(record_key(self._deployment.name, pool), namespace=NAMESPACE)
        if raw is None:
            return None
        try:
            return PoolRecord.decode(raw)
        except msgspec.DecodeError as error:
            log.warning("the record of pool %s by an earlier control process cannot be read: %s", pool, error)
            return None

    def _keep(self, pool: str, record: PoolRecord) -> None:
        key = record_key(self._deployment.name, pool)
        _internal_kv_put(key, record.encode(), overwrite=True, namespace=NAMESPACE)
        self._records[pool] = record

    def _pool(self, name: str) -> PoolSpec:
        try:
            return self._deployment.pool(name)
        except KeyError:
            names = ", ".join(pool.name for pool in self._deployment.pools)
            raise ConfigError(f"there is no pool {name!r}; there are: {names}") from None

    def _target(self, pool: PoolSpec, *, surge: bool) -> serve.RunTarget:
        if self._start is None:
            raise ConfigError("the pools have not been deployed")
        start_node, clock, token, nodes = self._start
        record = self._records[pool.name]
        reserved = shares(_recorded_pool(record, pool), record.template if self._in_pods else None)
        replica = serve.deployment(
            PoolReplica,
            name=pool.name,
            num_replicas=record.wanted,
            health_check_period_s=HEALTH_PERIOD_S,
            health_check_timeout_s=HEALTH_TIMEOUT_S,
            graceful_shutdown_timeout_s=self._deployment.worker.drain_s + STOP_MARGIN_S,
            graceful_shutdown_wait_loop_s=0.1,
            max_constructor_retry_count=CONSTRUCTOR_RETRIES,
            max_surge_percent=SURGE_PERCENT if surge else 0,
            rolling_update_percentage=SURGE_PERCENT / 100,
            ray_actor_options=reserved[0] | preloaded(pool.engine),
            placement_group_bundles=bundles(reserved),
        )
        # Without a version, Serve would invent one at each call, and never return to an earlier one.
        replica = replica.options(version=str(record.version), _internal=True)
        return serve.RunTarget(
            replica.bind(start_node, clock, record.spec, pool.name, token, nodes=nodes),
            name=application_name(self._deployment, pool),
            route_prefix=None,
            external_scaler_enabled=True,
        )

    def _run(self, targets: list[serve.RunTarget]) -> None:
        for target in targets:
            forget_failure(self._deployment.name, target.name.removeprefix(f"{self._deployment.name}-"))
        serve.run_many(
            targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )


def _recorded_pool(record: PoolRecord, pool: PoolSpec) -> PoolSpec:
    """Return the pool as its replicas were given it: Ray's reservations for them must not change, or Serve
    would replace them. Return `pool` if another version wrote a record that cannot be read."""
    try:
        return Deployment.model_validate_json(record.spec).pool(pool.name)
    except (ValueError, KeyError):
        return pool
