"""The control process: a private Ray head and the pools on it, for the life of a deployment.

It is the only process of a deployment that is a Ray driver. Progress goes to standard output as one
JSON object a line, so that whoever started it can show how far it is; commands come in over a Unix socket;
SIGTERM drains the pools and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from kvasir.clock import MonotonicClock
from kvasir.config.loader import load
from kvasir.config.spec import Deployment
from kvasir.core.errors import ConfigError, KvasirError
from kvasir.ports.clock import Clock
from kvasir_platform.apps.session_token import session_token
from kvasir_platform.apps.worker_node import start_node
from kvasir_platform.control.commands import Ask, Caller, listening, socket_path
from kvasir_platform.control.head_keeper import HeadKeeper
from kvasir_platform.control.pool_commands import PoolCommands
from kvasir_platform.control.ray_head import RayHead, ray_environment
from kvasir_platform.control.ray_pools import PoolStatus, RayPools, head_cpus

STATUS_PERIOD_S = 0.5
STEADY_PERIOD_S = 2.0
KEEP_PERIOD_S = 0.25


class Stop:
    """Whether a stop was asked for. A plain flag: signals may arrive one inside the other, and an Event
    that is set from a handler deadlocks on its own lock."""

    requested = False


class Reporter:
    """One JSON object a line for whoever started the process."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last: Sequence[PoolStatus] | None = None
        self._lost = False

    def event(self, name: str, **details: object) -> None:
        # Whoever listened may have been killed; what is left to do is to stop in good order all the same.
        with contextlib.suppress(BrokenPipeError):
            self._out.write(json.dumps({"event": name, **details}) + "\n")
            self._out.flush()

    def pools(self, status: Sequence[PoolStatus]) -> None:
        if status == self._last:
            return
        self._last = status
        self.event("pools", pools=[asdict(pool) | {"failed": pool.failed} for pool in status])

    def lost(self, message: str) -> None:
        """The head cannot be kept; said once."""
        if not self._lost:
            self._lost = True
            self.event("failed", code="ray_head_lost", message=message)


def run(deployment: Deployment, temp_dir: Path, logs: Path, token: str, stop: Stop) -> None:
    """Start everything, report until a stop is requested, then take everything down.

    RAY_AUTH_TOKEN must be in the environment: the processes of the head inherit it, and the router
    needs the same one to read membership.
    """
    reporter, clock = Reporter(sys.stdout), MonotonicClock()
    ray_token = os.environ["RAY_AUTH_TOKEN"]
    os.environ.update(ray_environment(ray_token))
    head = RayHead.start(
        temp_dir=temp_dir / "ray",
        token=ray_token,
        cpus=head_cpus(deployment),
        gpus=round(sum(pool.gpus * pool.replicas for pool in deployment.pools)),
        log=logs / "ray.log",
        redis_url=deployment.ray.head_redis_url,
    )
    try:
        reporter.event("ray", address=head.address)
        pools = RayPools(deployment, head.address)
        with listening(socket_path(temp_dir)) as commands, _kept(head, clock) as keeper:
            pools.connect()
            # Ray's driver replaces the handlers of the process it is in by one that aborts.
            stop_on_signals(stop)
            try:
                pools.deploy(start_node, clock, token)
                work = PoolCommands(pools, clock, drain_s=deployment.worker.drain_s)
                look_at = clock.now()
                while not stop.requested:
                    asked = commands.wait(STATUS_PERIOD_S)
                    # Asking Serve costs its controller more than us; while nothing changes, seldom is enough.
                    if asked is None and keeper.failure is None and clock.now() < look_at:
                        continue
                    steady = _turn(asked, work, pools, reporter, head=head, keeper=keeper)
                    look_at = clock.now() + (STEADY_PERIOD_S if steady else 0.0)
            finally:
                reporter.event("stopping")
                if head.gcs_alive:
                    pools.shutdown()
    finally:
        head.stop()
        reporter.event("stopped")


def _turn(
    asked: tuple[Ask, Caller] | None,
    work: PoolCommands,
    pools: RayPools,
    reporter: Reporter,
    *,
    head: RayHead,
    keeper: HeadKeeper,
) -> bool:
    """Report once, and do what was asked; returns whether all is as it should be and nothing is being done.
    With a head that cannot be kept there is nothing left to do: whoever started this stops it, after letting
    the running requests end."""
    if keeper.failure is None and head.gcs_alive:
        if asked is not None:
            work.take(*asked)
        status = pools.status()
        reporter.pools(status)
        work.step(status)
        return not work.busy and all(pool.ready for pool in status)
    if keeper.failure is not None:
        reporter.lost(keeper.failure)
    if asked is not None:
        asked[1].tell("refused", message=keeper.failure or "Ray's head is being started again; ask once more")
    return False


@contextlib.contextmanager
def _kept(head: RayHead, clock: Clock) -> Iterator[HeadKeeper]:
    """A keeper of the head on a thread of its own, because whoever asks Ray anything waits while the head
    is away."""
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


def stop_on_signals(stop: Stop) -> None:
    """Let SIGTERM and SIGINT ask for an orderly stop."""

    def request(_signum: int, _frame: object) -> None:
        stop.requested = True

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, request)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvasir-control", description=__doc__)
    parser.add_argument("--deployment", type=Path, required=True, help="kvasir.yaml of the deployment")
    parser.add_argument("--temp-dir", type=Path, required=True, help="short path for Ray's session folder")
    parser.add_argument("--logs", type=Path, required=True, help="folder for ray.log")
    parser.add_argument("--token-file", type=Path, help="shared secret of sessions")
    args = parser.parse_args(argv)
    stop = Stop()
    stop_on_signals(stop)
    try:
        deployment = load(args.deployment)
        token = session_token(deployment.worker, args.token_file)
        if token is None:
            raise ConfigError("pools on Ray need a session token: pass --token-file")
        run(deployment, args.temp_dir, args.logs, token, stop)
    except KvasirError as error:
        Reporter(sys.stdout).event("failed", code=error.code, message=error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
