"""Ray in this pod, as a child of the process that the pod runs.

The pod's own process has to be ours: KubeRay's would end Ray at once where Kubernetes asks a pod to stop, and
every stream with it. As the first process of a container it also inherits what Ray's processes leave behind.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from kvasir_platform.cluster.ray.head import runs

OPEN_FILES = 65536
KILL_AFTER_S = 10.0
# `ray start` looks each second whether what it has started has failed.
TELL_S = 10.0
# As Ray calls the processes of replicas, and of kvasir_workers.pool.followers.
ENGINES = ("ray::ServeReplica:", "ray::EngineFollower")
# Ray would wait for its node to be empty when it is asked to end; here it is asked last.
AT_ONCE = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}


@dataclass(slots=True)
class RayNode:
    """A `ray start --block` that runs. Its output goes where ours goes to, as errors."""

    process: psutil.Popen
    _raylet: psutil.Process | None = None

    @classmethod
    def start(cls, command: list[str], environ: Mapping[str, str]) -> RayNode:
        """Start it; returns at once."""
        more_open_files()
        # A session of its own: who stops this process stops Ray after it, and not beside it.
        process = psutil.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            env={**environ, **AT_ONCE},
            start_new_session=True,
        )
        return cls(process)

    @property
    def status(self) -> int | None:
        """With what it has ended; None while it runs. 0: Ray has taken this node out of the cluster."""
        if os.getpid() == 1:
            _reap(except_for=self.process.pid)
        status: int | None = self.process.poll()
        if status is None and self._left():
            # `ray start` ends with a node that fails, and goes on without one that was asked to leave.
            with suppress(psutil.TimeoutExpired):
                return int(self.process.wait(TELL_S))
            return 0
        return status

    def replicas(self) -> list[psutil.Process]:
        """The processes in this pod that serve, or are a further node of an engine that does."""
        found = []
        for process in self._below():
            with suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(ENGINES):
                    found.append(process)
        return found

    def stop(self) -> None:
        """End it with every process under it. Idempotent."""
        below = self._below()
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(psutil.TimeoutExpired):
                self.process.wait(KILL_AFTER_S)
        for process in [self.process, *below]:
            with suppress(psutil.Error):
                process.kill()
        with suppress(psutil.TimeoutExpired):
            self.process.wait(KILL_AFTER_S)

    def _left(self) -> bool:
        """Whether the process that makes this a node of the cluster was there and is not any more."""
        if self._raylet is not None:
            return not runs(self._raylet)
        with suppress(psutil.Error):
            named = (each for each in self.process.children() if each.name() == "raylet")
            self._raylet = next(named, None)
        return False

    def _below(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return list(self.process.children(recursive=True))
        return []


def more_open_files() -> None:
    """Let this process and its children open as many files as Ray needs, or as many as is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _reap(*, except_for: int) -> None:
    """Take leave of ended orphans, which nobody else does where we are the first process."""
    for process in psutil.Process().children():
        with suppress(psutil.Error, ChildProcessError):
            if process.pid != except_for and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def ask_to_end(processes: list[psutil.Process]) -> None:
    """SIGTERM to each that still runs."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
