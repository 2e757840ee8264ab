"""The port through which `kvasir up` starts the processes of a deployment.

The supervisor does the ordering, waiting, progress and clean-up; a Launcher only starts each part. One exists
for Ray; tests use one of cheap processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import StartError

ReplicaState = Literal["pending", "starting", "ready", "failed"]


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica of one pool. `detail` says what it waits for, or why it failed; `log` is the path of its
    output, "" if unknown; `remedy` says what to change, "" if that is unknown; `is_root`: `detail` is a root
    error that every start has."""

    pool: str
    replica_id: str
    state: ReplicaState
    detail: str = ""
    log: str = ""
    remedy: str = ""
    is_root: bool = False


@dataclass(frozen=True, slots=True)
class LaunchSession:
    """The inputs of one run of `kvasir up`.

    `env` is the whole environment for child processes; it has the marker by which the janitor finds remaining
    processes, so every process must be started with it. `temp_dir` is a short path (Unix socket paths are
    limited) that is removed after the stop; `logs` is kept. `spec_file` holds the deployment as JSON, for
    `--deployment FILE`.
    """

    deployment_id: str
    logs: Path
    temp_dir: Path
    spec_file: Path
    env: Mapping[str, str]


class Launcher(Protocol):
    """Starts and stops the parts of one deployment. Methods are called on the supervisor's event loop
    in this order, the starting ones once; `pool_status` and `wait_failed` often.

    Obligations: no method blocks the loop; none installs signal handlers or writes to the terminal;
    each raises StartError, with the log to look at and a remedy, when its part cannot come up; each
    may be cancelled at any await, after which only `stop` is called.
    """

    async def start_cluster(self) -> None:
        """Start what runs the pools; returns when it accepts requests for replicas."""
        ...

    async def start_pools(self) -> None:
        """Request the replicas of every pool; returns when the request is accepted, not when they serve."""
        ...

    async def pool_status(self) -> list[ReplicaStatus]:
        """Return every replica that exists or is starting, over all pools."""
        ...

    async def start_router(self) -> str:
        """Start router and gateway; returns `host:port` once it listens."""
        ...

    async def wait_failed(self) -> StartError:
        """Wait until a part ends that is not restarted, and return why."""
        ...

    async def stop(self) -> None:
        """Stop everything that was started, in order, and wait for it. Idempotent, and valid in any state.
        The janitor kills what remains."""
        ...


LauncherFactory = Callable[[Deployment, LaunchSession], Launcher]
