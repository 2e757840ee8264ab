"""`kvasir logs`: the log of a worker, of a pool's newest worker, or of the router."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from kvasir.core.errors import UpstreamError
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.common.running import chosen_one
from kvasir_platform.cli.live.log_files import appended, find_log, last_lines
from kvasir_platform.cli.record.command import stop_on_signals

_LINES = 200


@dataclass(frozen=True, slots=True)
class LogArguments:
    """What the command line asks for. `lines` None: 200, or all since `since_s` seconds ago if that is
    given."""

    source: str
    name: str | None = None
    follow: bool = False
    since_s: float | None = None
    lines: int | None = None

    @property
    def most(self) -> int | None:
        """The number of earlier lines; None for no bound."""
        return _LINES if self.lines is None and self.since_s is None else self.lines


def logs(wanted: LogArguments, output: CommandOutput) -> int:
    """Print the log. Raises ConfigError for a name that has none, UpstreamError if nothing runs here."""
    found = chosen_one(wanted.name)
    if found is not None:
        stop = stop_on_signals() if wanted.follow else threading.Event()
        return local_logs(wanted, Path(found[1].logs), output, stop, now=lambda: datetime.now().astimezone())
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return asyncio.run(_pod_logs(wanted, output))
    called = f" under the name {wanted.name}" if wanted.name else ""
    raise UpstreamError(
        f"nothing runs here{called}. In a cluster: kubectl exec deploy/NAME-router -- kvasir logs WORKER, or "
        "kubectl logs POD, where POD is what stands before the @ in the worker's name",
        code="not_ready",
    )


def local_logs(
    wanted: LogArguments,
    folder: Path,
    output: CommandOutput,
    stop: threading.Event,
    *,
    now: Callable[[], datetime],
) -> int:
    """Print a log of the folder, and follow it until `stop` if that is wanted."""
    path = find_log(folder, wanted.source)
    since = None if wanted.since_s is None else now() - timedelta(seconds=wanted.since_s)
    for line in last_lines(path, wanted.most, since):
        _print(line, output)
    for line in appended(path, stop) if wanted.follow else ():
        _print(line, output)
    return 0


def _print(line: str, output: CommandOutput) -> None:
    output.data({"line": line})
    output.text(line)


async def _pod_logs(wanted: LogArguments, output: CommandOutput) -> int:
    # The Kubernetes client costs half a second.
    from kvasir.config.spec.cluster import KubernetesDiscoverySpec
    from kvasir_platform.cluster.kubernetes.access import Access
    from kvasir_platform.cluster.kubernetes.pod_logs import PodLogQuery, pod_log

    access = Access.in_cluster(Path(KubernetesDiscoverySpec().credentials_dir), os.environ)
    query = PodLogQuery(wanted.source, follow=wanted.follow, since_s=wanted.since_s, lines=wanted.most)
    async with aclosing(pod_log(access, query, os.environ.get("HOSTNAME", ""))) as lines:
        async for line in lines:
            _print(line, output)
    return 0
