"""The process of a worker pod in a cluster: runs Ray, and drains on SIGTERM.

    python -m kvasir_platform.apps.worker_pod --grace-s 90

Ray Serve places one engine replica here and watches it, but does not see that Kubernetes is about to stop the
pod. So this process runs Ray's part of the pod. On SIGTERM it announces to Ray that nothing may be placed
here, so that a successor starts on another pod at once; lets the replica drain; and stops Ray last.

If Ray removes this node from the cluster, the process ends by itself, so that KubeRay creates another pod, of
the current template.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvasir.clock import MonotonicClock
from kvasir.core.errors import ConfigError, KvasirError
from kvasir.ports.clock import Clock
from kvasir.telemetry.logs import configure_logging
from kvasir_platform.apps.common.pod import pod_ip
from kvasir_platform.apps.common.reporter import Reporter
from kvasir_platform.apps.common.stopping import Stop, stop_on_signals
from kvasir_platform.apps.common.worker_logs import WorkerLogs
from kvasir_platform.cluster.ray.command import option, ray_start, require_token
from kvasir_platform.cluster.ray.head import ray_settings
from kvasir_platform.cluster.ray.node import RayNode, ask_to_end
from kvasir_workers.pool.output_log import LOGS_VARIABLE

log = logging.getLogger(__name__)

LOOK_S = 0.25
DEFAULT_GRACE_S = 90.0


def drain(node: RayNode, address: str, ip: str, grace_s: float, clock: Clock, *, logs: WorkerLogs) -> None:
    """Have Ray place nothing more here, and let running replicas end within `grace_s` seconds. Copies `logs`
    meanwhile."""
    # Ray takes 100 MB, which only the end needs.
    from kvasir_platform.cluster.ray.membership import leave_cluster

    deadline = clock.now() + grace_s
    leave_cluster(address, ip, "the pod is being stopped", time.time() + grace_s)
    asked: set[int] = set()
    while (replicas := node.replicas()) and clock.now() < deadline and node.status is None:
        # A replica that was being placed meanwhile may start after the others were asked to stop.
        ask_to_end([each for each in replicas if each.pid not in asked])
        asked |= {each.pid for each in replicas}
        logs.step()
        pause(LOOK_S)
    if node.replicas():
        log.warning("some streams did not end within %.0f s and are aborted", grace_s)


def run(grace_s: float, stop: Stop, reporter: Reporter) -> int:
    """Run Ray in this pod until a stop is requested or it ends by itself. Return the exit status."""
    require_token(os.environ)
    os.environ.update(ray_settings())
    ip, command = pod_ip(os.environ), ray_start(os.environ, "worker")
    address = option(command, "--address")
    if address is None:
        raise ConfigError("Ray's command has no address of a head")
    os.environ[LOGS_VARIABLE] = tempfile.mkdtemp(prefix="kvasir-logs-")
    logs = WorkerLogs(Path(os.environ[LOGS_VARIABLE]), sys.stderr.buffer)
    node = RayNode.start(command, os.environ)
    try:
        reporter.event("ray", address=address)
        while not stop.requested:
            logs.step()
            if (status := node.status) == 0:
                reporter.event("left")
                return 0
            if status is not None:
                reporter.event("failed", code="ray_node_lost", message=f"Ray ended in this pod ({status})")
                return 1
            pause(LOOK_S)
        reporter.event("draining")
        drain(node, address, ip, grace_s, MonotonicClock(), logs=logs)
    finally:
        node.stop()
        logs.step()
        reporter.event("stopped")
    return 0


def pause(seconds: float) -> None:
    """Wait, and handle signals meanwhile."""
    threading.Event().wait(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvasir-worker-pod", description="Run Ray in a worker pod.")
    parser.add_argument(
        "--grace-s",
        type=float,
        default=DEFAULT_GRACE_S,
        help="seconds for streams to end after SIGTERM: more than worker.drain_s, and at least 20 less than "
        "the pod's terminationGracePeriodSeconds",
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    args = parser.parse_args(argv)
    configure_logging(args.log_level)
    stop, reporter = Stop(), Reporter(sys.stdout)
    stop_on_signals(stop)
    try:
        return run(args.grace_s, stop, reporter)
    except KvasirError as error:
        reporter.event("failed", code=error.code, message=error.message)
        return 1


if __name__ == "__main__":
    sys.exit(main())
