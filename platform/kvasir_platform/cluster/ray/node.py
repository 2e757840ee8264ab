"""Ray in this pod, as a child of the pod's own process.

KubeRay's process would end Ray, and every stream, as soon as Kubernetes stops the pod; ours drains first. As
the first process of a container it also reaps the orphans of Ray's processes.
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
KILL_AFTER_S = 4.0
# `ray start` checks once a second whether a process that it started has failed.
TELL_S = 10.0
# The process titles that Ray gives replicas and kvasir_workers.pool.followers.
ENGINES = ("ray::ServeReplica:", "ray::EngineFollower")
# Asked to stop, Ray would wait for its node to be empty; here it is stopped last.
AT_ONCE = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}


@dataclass(slots=True)
class RayNode:
    """A running `ray start --block`. Its output goes to our standard error."""

    process: psutil.Popen
    _raylet: psutil.Process | None = None

    @classmethod
    def start(cls, command: list[str], environ: Mapping[str, str]) -> RayNode:
        """Start it; returns at once."""
        more_open_files()
        # A session of its own, so that a signal to this process stops Ray after it, and not at the same time.
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
        """Return its exit status; None while it runs. 0: Ray has removed this node from the cluster."""
        if os.getpid() == 1:
            _reap(except_for=self.process.pid)
        status: int | None = self.process.poll()
        if status is None and self._left():
            # `ray start` ends when a node fails, but not when a node was asked to leave.
            with suppress(psutil.TimeoutExpired):
                return int(self.process.wait(TELL_S))
            return 0
        return status

    def replicas(self) -> list[psutil.Process]:
        """Return the processes in this pod that serve, or that are a further node of an engine that does."""
        found = []
        for process in self._below():
            with suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(ENGINES):
                    found.append(process)
        return found

    def stop(self) -> None:
        """Stop it with every process under it. Idempotent."""
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
        """Whether the raylet, which makes this a node of the cluster, was running and has ended."""
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
    """Raise the limit of open files for this process and its children to what Ray needs, or to the hard
    limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _reap(*, except_for: int) -> None:
    """Reap ended orphans, which no other process does if we are the first one."""
    for process in psutil.Process().children():
        with suppress(psutil.Error, ChildProcessError):
            if process.pid != except_for and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def ask_to_end(processes: list[psutil.Process]) -> None:
    """Send SIGTERM to each that still runs."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
