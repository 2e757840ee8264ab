"""The control process in the head pod of a RayCluster: the pools belong to the cluster, and outlive it.

KubeRay creates the pods; this process starts Ray in its own and requests the pools from Serve, whose replicas
take a pod each. If Ray's head keeps its state in Redis, this pod may be replaced while every worker serves:
the next control process takes over the replicas. So SIGTERM does not stop the pools. They drain in their own
pods, when those are stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import is_loopback
from kvasir.core.errors import ConfigError
from kvasir.core.membership import host_port
from kvasir.ports.clock import Clock
from kvasir.telemetry.logs import configure_logging
from kvasir_platform.apps.common.failed_starts import FailedStartsFile
from kvasir_platform.apps.common.pod import POD, pod_ip
from kvasir_platform.apps.common.pods_file import PodsFile
from kvasir_platform.apps.common.reporter import Reporter
from kvasir_platform.apps.common.spec_file import SpecFile
from kvasir_platform.apps.common.stopping import Stop, stop_on_signals
from kvasir_platform.apps.control_app import STATUS_PERIOD_S, STEADY_PERIOD_S, turn
from kvasir_platform.apps.follower_node import NODES
from kvasir_platform.apps.sizing import Sizing
from kvasir_platform.apps.worker_node import start_node
from kvasir_platform.cluster.local.commands import listening, socket_path
from kvasir_platform.cluster.ray.command import DEFAULT_PORT, option, ray_start, require_token
from kvasir_platform.cluster.ray.head import ray_settings
from kvasir_platform.cluster.ray.membership import is_there
from kvasir_platform.cluster.ray.node import RayNode
from kvasir_platform.cluster.ray.pool_commands import PoolCommands
from kvasir_platform.cluster.ray.pool_rolls import PoolRolls
from kvasir_platform.cluster.ray.pools import RayPools

log = logging.getLogger(__name__)

# Redis may take long to answer, and it holds the state of a whole cluster.
HEAD_START_S = 120.0
# No call to Ray takes this long. The next control process takes over the pools.
STUCK_S = 120.0
# Calls to Ray may block; workers that outlive this process need nothing of its end.
LEAVE_S = 3.0
LOOK_S = 0.25
REDIS = "RAY_REDIS_ADDRESS"


class ClusterControl:
    """One run. `pods_file` holds the chart's desired worker pods. `temp_dir` holds the command socket, and
    Ray's own folder if KubeRay's command names none. Why pools do not start is kept in `failed_starts`, if it
    is named. `command` starts Ray's head, `address` is where it then listens. Raises ConfigError for errors
    that the chart should exclude."""

    def __init__(
        self,
        spec_file: SpecFile,
        pods_file: PodsFile,
        token: str,
        temp_dir: Path,
        redis_password: Path | None,
        *,
        planner_port: int = 0,
        failed_starts: Path | None = None,
    ) -> None:
        deployment = spec_file.deployment
        if deployment.worker.host != POD and is_loopback(deployment.worker.host):
            raise ConfigError(
                f"worker.host: {deployment.worker.host} cannot be reached from other pods; set it to pod"
            )
        if deployment.worker.port == 0:
            raise ConfigError("worker.port: routers find workers in pods at a fixed port; set one")
        self._spec_file = spec_file
        self._pods_file = pods_file
        self._token = token
        self._planner_port = planner_port
        self._temp_dir = temp_dir
        self._reporter = Reporter(sys.stdout)
        self._tell = self._reporter.event
        if failed_starts is not None:
            self._tell = FailedStartsFile(failed_starts).noting(self._reporter.event)
        require_token(os.environ)
        os.environ.update(ray_settings())
        self.command = ray_start(os.environ, "head")
        port = int(option(self.command, "--port") or DEFAULT_PORT)
        self.address = host_port(pod_ip(os.environ), port)
        if option(self.command, "--temp-dir") is None:
            self.command.append(f"--temp-dir={temp_dir / 'ray'}")
        if redis_password is not None:
            self.command.append(f"--redis-password={_secret(redis_password)}")
        self._outlived = outlived(os.environ)
        self._turned_s = 0.0

    def run(self, stop: Stop) -> int:
        """Start Ray and the pools, and keep them until a stop is requested or Ray's head ends. Return the
        exit status."""
        configure_logging(self._spec_file.deployment.telemetry.log_level)
        self._temp_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Left by a process that was killed in this pod.
        socket_path(self._temp_dir).unlink(missing_ok=True)
        if not self._outlived:
            log.warning("%s is not set: all workers of the deployment end with this pod", REDIS)
        node = RayNode.start(self.command, os.environ)
        clock = MonotonicClock()
        try:
            if not self._comes_up(node, clock, stop):
                return 0 if stop.requested else self._lost(node)
            self._reporter.event("ray", address=self.address)
            with self._watched(node, clock, stop):
                self._keep(clock, stop)
            return 0
        finally:
            node.stop()
            self._reporter.event("stopped")

    def _comes_up(self, node: RayNode, clock: Clock, stop: Stop) -> bool:
        """Wait until Ray accepts drivers."""
        deadline = clock.now() + HEAD_START_S
        while node.status is None and not stop.requested and clock.now() < deadline:
            if is_there(self.address, pod_ip(os.environ)):
                return True
            threading.Event().wait(LOOK_S)
        return False

    @contextlib.contextmanager
    def _watched(self, node: RayNode, clock: Clock, stop: Stop) -> Iterator[None]:
        """End this process with the head, or if the head does not answer, also to a requested stop: calls to
        Ray block forever, and KubeRay restarts the pod only when its process has ended."""
        ended = threading.Event()
        self._turned_s = clock.now()

        def watch() -> None:
            asked_s: float | None = None
            while not ended.wait(LOOK_S):
                now = clock.now()
                if asked_s is None and stop.requested and self._outlived:
                    asked_s = now
                late = asked_s is not None and now - asked_s > LEAVE_S
                if late or node.status is not None or now - self._turned_s > STUCK_S:
                    status = 0 if stop.requested else self._lost(node)
                    node.stop()
                    os._exit(status)

        thread = threading.Thread(target=watch, name="watcher of Ray's head", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _keep(self, clock: Clock, stop: Stop) -> None:
        pools = RayPools(self._spec_file.deployment, self.address, in_pods=True, pods=self._pods_file.pods)
        with listening(socket_path(self._temp_dir)) as commands:
            pools.connect()
            # Ray's driver replaces the signal handlers of its process by one that aborts.
            stop_on_signals(stop)
            try:
                pools.deploy(start_node, clock, self._token, NODES)
                sizing = self._sizing(pools, clock)
                work, rolls = self._watches(pools, clock, sizing)
                look_at = clock.now()
                while not stop.requested:
                    self._turned_s = clock.now()
                    asked = commands.wait(STATUS_PERIOD_S)
                    if sizing is not None and not work.busy and sizing.step():
                        look_at = clock.now()
                    if asked is None and clock.now() < look_at:
                        continue
                    if not work.busy and self._changed():
                        pools.adopt(self._spec_file.deployment, self._pods_file.pods)
                        sizing = self._renewed(sizing, pools, clock)
                        work, rolls = self._watches(pools, clock, sizing)
                        self._reporter.event("adopted")
                    steady = turn(asked, work, pools, self._reporter, there=True, failure=None)
                    rolls.step(busy=work.busy, steady=steady)
                    look_at = clock.now() + (STEADY_PERIOD_S if steady else 0.0)
            finally:
                self._reporter.event("stopping")
                if self._outlived:
                    pools.leave()
                else:
                    pools.shutdown()

    def _sizing(self, pools: RayPools, clock: Clock) -> Sizing | None:
        deployment = self._spec_file.deployment
        if not deployment.scales:
            return None
        bind = host_port(pod_ip(os.environ), self._planner_port)
        sizing = Sizing(deployment, pools, clock, self._reporter.event, bind=bind, token=self._token)
        self._reporter.event("planner", address=sizing.address)
        return sizing

    def _renewed(self, sizing: Sizing | None, pools: RayPools, clock: Clock) -> Sizing | None:
        """Return the planner for the current spec."""
        if sizing is None:
            return self._sizing(pools, clock)
        if self._spec_file.deployment.scales:
            sizing.renew(self._spec_file.deployment)
            return sizing
        sizing.close()
        return None

    def _watches(
        self, pools: RayPools, clock: Clock, sizing: Sizing | None
    ) -> tuple[PoolCommands, PoolRolls]:
        deployment = self._spec_file.deployment
        drain_s, start_s = deployment.worker.drain_s, deployment.scaling.start_timeout_s
        pods = self._pods_file
        rolls = PoolRolls(pools, clock, self._tell, drain_s=drain_s, revision=lambda: pods.revision)
        failed = rolls.failed_start
        work = PoolCommands(pools, clock, start_s=start_s, drain_s=drain_s, sizes=sizing, failed_start=failed)
        return work, rolls

    def _changed(self) -> bool:
        """Whether the spec or the desired pods have changed. The kubelet changes both files at once. If it
        does so between the two reads, the pods change first, and none of them starts before the spec is read.
        """
        spec = self._spec_file.changed() is not None
        return self._pods_file.changed() or spec

    def _lost(self, node: RayNode) -> int:
        how = "does not answer" if node.status is None else f"ended ({node.status})"
        self._reporter.lost(f"Ray's head in this pod {how}; its output says why")
        return 1


def outlived(environ: Mapping[str, str]) -> bool:
    """Whether Ray's head keeps its state outside of this pod, so that the workers outlive it."""
    return bool(environ.get(REDIS))


def _secret(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of Redis' password {path} cannot be read: {error}") from error
