"""The control process: a private Ray head and the pools on it, while a deployment runs.

It is the only process of a deployment that is a Ray driver. Progress goes to standard output, one JSON object
per line, for the parent to show; commands arrive over a Unix socket; SIGTERM drains the pools and removes
everything.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvasir.clock import MonotonicClock
from kvasir.config.load.loader import load
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError, KvasirError
from kvasir.ports.clock import Clock
from kvasir_platform.apps.common.reporter import Reporter
from kvasir_platform.apps.common.session_token import session_token
from kvasir_platform.apps.common.spec_file import SpecFile
from kvasir_platform.apps.common.stopping import Stop, stop_on_signals
from kvasir_platform.apps.follower_node import NODES
from kvasir_platform.apps.sizing import Sizing
from kvasir_platform.apps.worker_node import start_node
from kvasir_platform.cluster.local.commands import CommandClient, ControlCommand, listening, socket_path
from kvasir_platform.cluster.preflight.devices import gpu_devices
from kvasir_platform.cluster.ray.engine_resources import head_gpus
from kvasir_platform.cluster.ray.head import RayHead, ray_environment
from kvasir_platform.cluster.ray.head_keeper import HeadKeeper
from kvasir_platform.cluster.ray.pool_commands import PoolCommands
from kvasir_platform.cluster.ray.pools import RayPools, head_cpus

STATUS_PERIOD_S = 0.5
STEADY_PERIOD_S = 2.0
KEEP_PERIOD_S = 0.25


def run(
    deployment: Deployment, temp_dir: Path, logs: Path, token: str, stop: Stop, *, planner_port: int = 0
) -> None:
    """Start everything, report until a stop is requested, then stop everything.

    RAY_AUTH_TOKEN must be in the environment: the head's processes inherit it, and the router needs the same
    token to read membership.
    """
    reporter, clock = Reporter(sys.stdout), MonotonicClock()
    ray_token = os.environ["RAY_AUTH_TOKEN"]
    os.environ.update(ray_environment(ray_token))
    head = RayHead.start(
        temp_dir=temp_dir / "ray",
        token=ray_token,
        cpus=head_cpus(deployment),
        gpus=head_gpus(deployment, len(gpu_devices(os.environ))),
        log=logs / "ray.log",
        redis_url=deployment.ray.head_redis_url,
        redis_ca=deployment.ray.head_redis_ca_file,
    )
    try:
        reporter.event("ray", address=head.address)
        pools = RayPools(deployment, head.address)
        with listening(socket_path(temp_dir)) as commands, _kept(head, clock) as keeper:
            pools.connect()
            # Ray's driver replaces the signal handlers of its process by one that aborts.
            stop_on_signals(stop)
            sizing = None
            try:
                pools.deploy(start_node, clock, token, NODES)
                if deployment.scales:
                    bind = f"127.0.0.1:{planner_port}"
                    sizing = Sizing(deployment, pools, clock, reporter.event, bind=bind, token=token)
                    reporter.event("planner", address=sizing.address)
                start_s, drain_s = deployment.scaling.start_timeout_s, deployment.worker.drain_s
                work = PoolCommands(pools, clock, start_s=start_s, drain_s=drain_s, sizes=sizing)
                look_at = clock.now()
                while not stop.requested:
                    asked = commands.wait(STATUS_PERIOD_S)
                    if sizing is not None and head.gcs_alive and not work.busy and sizing.step():
                        look_at = clock.now()
                    # A query costs Serve's controller more than this process: poll rarely without changes.
                    if asked is None and keeper.failure is None and clock.now() < look_at:
                        continue
                    steady = turn(asked, work, pools, reporter, there=head.gcs_alive, failure=keeper.failure)
                    look_at = clock.now() + (STEADY_PERIOD_S if steady else 0.0)
            finally:
                reporter.event("stopping")
                if sizing is not None:
                    sizing.close()
                if head.gcs_alive:
                    pools.shutdown()
    finally:
        head.stop()
        reporter.event("stopped")


def turn(
    asked: tuple[ControlCommand, CommandClient] | None,
    work: PoolCommands,
    pools: RayPools,
    reporter: Reporter,
    *,
    there: bool,
    failure: str | None,
) -> bool:
    """Report once, and run commands. Return whether every pool is ready and no work is in progress. `there`:
    Ray's head answers. If the head cannot be kept, for the reason `failure`, nothing more is done: the parent
    stops this process after the running requests have ended."""
    if failure is None and there:
        if asked is not None:
            work.take(*asked)
        status = pools.status()
        reporter.pools(status)
        work.step(status)
        return not work.busy and all(pool.ready for pool in status)
    if failure is not None:
        reporter.lost(failure)
    if asked is not None:
        asked[1].tell("refused", message=failure or "Ray's head is restarting; retry")
    return False


@contextlib.contextmanager
def _kept(head: RayHead, clock: Clock) -> Iterator[HeadKeeper]:
    """Run the head's keeper on a thread of its own, because calls to Ray block while the head is away."""
    keeper, ended = HeadKeeper(head), threading.Event()

    def keep() -> None:
        while not ended.wait(KEEP_PERIOD_S):
            keeper.step(clock.now())

    thread = threading.Thread(target=keep, name="keeper of Ray's head", daemon=True)
    thread.start()
    try:
        yield keeper
    finally:
        ended.set()
        thread.join()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvasir-control", description=__doc__)
    parser.add_argument("--deployment", type=Path, required=True, help="kvasir.yaml of the deployment")
    parser.add_argument("--temp-dir", type=Path, required=True, help="short path for Ray's session folder")
    parser.add_argument("--logs", type=Path, help="folder for ray.log; without --cluster")
    parser.add_argument("--token-file", type=Path, help="shared secret of sessions")
    parser.add_argument("--cluster", action="store_true", help="run in the head pod of a RayCluster")
    parser.add_argument("--tls-dir", type=Path, help="folder of certificates in every pod; with --cluster")
    parser.add_argument("--pods-file", type=Path, help="the chart's desired pods; with --cluster")
    parser.add_argument(
        "--planner-port", type=int, default=0, help="port for routers' load reports; 0: a free one"
    )
    parser.add_argument("--failed-starts", type=Path, help="keep failed starts in this file; with --cluster")
    parser.add_argument("--redis-password-file", type=Path, help="of Ray's Redis; with --cluster")
    args = parser.parse_args(argv)
    stop = Stop()
    stop_on_signals(stop)
    try:
        if args.cluster:
            from kvasir_platform.apps.cluster_control import ClusterControl
            from kvasir_platform.apps.common.pods_file import PodsFile

            spec_file = SpecFile(args.deployment, args.tls_dir)
            token = _token(spec_file.deployment, args.token_file)
            pods_file = PodsFile(args.pods_file)
            control = ClusterControl(
                spec_file,
                pods_file,
                token,
                args.temp_dir,
                args.redis_password_file,
                planner_port=args.planner_port,
                failed_starts=args.failed_starts,
            )
            return control.run(stop)
        if args.logs is None:
            raise ConfigError("--logs, the folder for ray.log, is required without --cluster")
        deployment = load(args.deployment)
        token = _token(deployment, args.token_file)
        run(deployment, args.temp_dir, args.logs, token, stop, planner_port=args.planner_port)
    except KvasirError as error:
        Reporter(sys.stdout).event("failed", code=error.code, message=error.message)
        return 1
    return 0


def _token(deployment: Deployment, token_file: Path | None) -> str:
    token = session_token(deployment.worker, token_file)
    if token is None:
        raise ConfigError("pools on Ray need a session token: pass --token-file")
    return token


if __name__ == "__main__":
    sys.exit(main())
