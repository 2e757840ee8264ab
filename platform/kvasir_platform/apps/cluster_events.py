"""Makes events of the RayCluster of what its control process could not start.

    python -m kvasir_platform.apps.cluster_events --cluster NAME --failed-starts FILE --credentials FOLDER

It runs beside Ray's autoscaler, in the one container of the head's pod that has a token of the API server, so
that the control process needs none. It reads a small file, and sends nothing else.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from kvasir.core.errors import ConfigError
from kvasir.telemetry.logs import configure_logging
from kvasir_platform.apps.common.failed_starts import FailedPool, read_failed_starts
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.events import ClusterEvents

log = logging.getLogger(__name__)

REASON = "PoolStartFailed"
LOOK_S = 2.0
AGAIN_S = 30.0
"""After the API server has refused or not answered."""


class Warnings(Protocol):
    """Where events are written. Raises ConfigError."""

    def warn(self, reason: str, message: str) -> None:
        """Write one."""
        ...


class FailedStartEvents:
    """Writes an event for each failed start that `read` returns, once."""

    def __init__(self, read: Callable[[], Sequence[FailedPool]], events: Warnings) -> None:
        self._read = read
        self._events = events
        self._written: dict[str, FailedPool] = {}

    def step(self) -> float:
        """Write what is new. Return after how many seconds to look again."""
        for failed in self._read():
            if self._written.get(failed.pool) == failed:
                continue
            try:
                self._events.warn(REASON, _message(failed))
            except ConfigError as error:
                log.warning("no event of a failed start: %s", error.message)
                return AGAIN_S
            self._written[failed.pool] = failed
        return LOOK_S


def _message(failed: FailedPool) -> str:
    when = f"attempt {failed.attempt}, the next one at {failed.next_at}"
    return f"pool {failed.pool} does not start ({when}): {failed.message}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvasir-cluster-events", description="Write events of a RayCluster."
    )
    parser.add_argument("--cluster", required=True, help="name of the RayCluster")
    parser.add_argument("--failed-starts", type=Path, required=True, help="file of the control process")
    parser.add_argument("--credentials", type=Path, required=True, help="folder of the service account")
    args = parser.parse_args(argv)
    configure_logging("info")
    try:
        access = Access.in_cluster(args.credentials, os.environ)
        events = ClusterEvents(access, args.cluster, lambda: datetime.now(UTC))
    except ConfigError as error:
        log.error("no events of failed starts: %s", error.message)
        return 1
    loop = FailedStartEvents(lambda: read_failed_starts(args.failed_starts), events)
    # It holds nothing, so that a signal may end it at any time.
    while True:
        time.sleep(loop.step())


if __name__ == "__main__":
    raise SystemExit(main())
