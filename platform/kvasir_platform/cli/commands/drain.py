"""`kvasir drain WORKER`: takes a worker out of service without losing a stream, and puts it back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvasir.core.errors import UpstreamError
from kvasir_platform.cli.common.gateway_client import ask_drain, workers
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput, duration

_DRAIN_S = 300.0
_UNDO_S = 10.0
_POLL_S = 0.5
_QUIET_POLLS = 2
"""Consecutive empty reports that end a drain: one may be older than the last stream of another router."""


@dataclass(frozen=True, slots=True)
class DrainArguments:
    """The arguments of the command. `timeout_s` None means the default."""

    worker_id: str
    undo: bool = False
    reason: str = ""
    wait: bool = True
    timeout_s: float | None = None


def drain(
    desired: DrainArguments,
    site: Site,
    output: CommandOutput,
    *,
    pause: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> int:
    """Request the drain, and wait for its end. Raises RequestError for an unknown worker, and UpstreamError
    if the gateway does not answer or (`drain_timeout`) the time is over."""
    ask_drain(site, desired.worker_id, not desired.undo, desired.reason)
    if not desired.wait:
        what = "serve again" if desired.undo else "drain"
        _done(output, desired.worker_id, "asked", f"asked to {what}; watch it with: kvasir get workers")
        return 0
    timeout_s = desired.timeout_s
    if timeout_s is None:
        timeout_s = _UNDO_S if desired.undo else _DRAIN_S
    watch = _Watch(desired.worker_id, output)
    step = watch.serves if desired.undo else watch.is_empty
    began = now()
    while not step(_find(site, desired.worker_id)):
        if now() - began >= timeout_s:
            watch.clear()
            raise UpstreamError(watch.too_late(desired, timeout_s), code="drain_timeout")
        pause(_POLL_S)
    return 0


class _Watch:
    """Follows one worker, and shows its changes."""

    def __init__(self, worker_id: str, output: CommandOutput) -> None:
        self._worker_id = worker_id
        self._output = output
        self._shown = ""
        self._quiet = 0
        self._drained_before = False
        self._left = 0
        self._state = ""
        self._reason = ""

    def is_empty(self, worker: dict[str, Any] | None) -> bool:
        """Whether nothing runs there any more. Raises UpstreamError if the drain was undone."""
        if worker is None:
            self._finish("gone", "has left; the wait ends")
            return True
        drains = self._take(worker)
        if self._drained_before and self._state == "connecting":
            self._finish("gone", "has stopped; the wait ends")
            return True
        if self._drained_before and self._state == "ready":
            self.clear()
            raise UpstreamError(
                f"{self._worker_id} serves again: its drain was undone. To drain it again: "
                f"kvasir drain {self._worker_id}"
            )
        self._drained_before = self._drained_before or drains
        self._quiet = self._quiet + 1 if drains and not self._left else 0
        if self._quiet >= _QUIET_POLLS:
            self._finish("drained", "is drained: no streams run on it, and it can be stopped")
            return True
        self._show(f"{self._state}, {_streams(self._left)} left")
        return False

    def serves(self, worker: dict[str, Any] | None) -> bool:
        """Whether it takes requests again. Raises UpstreamError if it has left."""
        if worker is None:
            raise UpstreamError(f"{self._worker_id} has left; list the workers with: kvasir get workers")
        self._take(worker)
        if self._state == "ready":
            self._finish("ready", "serves again")
            return True
        self._show(self._state)
        return False

    def too_late(self, desired: DrainArguments, timeout_s: float) -> str:
        """Return the error at the end of the wait, with what to do."""
        after = f"after {duration(timeout_s)}"
        why = f" ({self._reason})" if self._reason else ""
        if desired.undo:
            return (
                f"{self._worker_id} is {self._state}{why} {after}. An unreachable worker receives the "
                "request when it reconnects; a worker that is being stopped or has left keeps draining: see "
                "kvasir get workers"
            )
        return (
            f"{self._worker_id} is {self._state}{why} with {_streams(self._left)} {after}; the drain "
            f"continues. Continue waiting with: kvasir drain {self._worker_id}, or undo it with: "
            f"kvasir drain {self._worker_id} --undo"
        )

    def clear(self) -> None:
        """Clear the live line."""
        if self._shown and self._output.is_terminal:
            self._output.redraw("")

    def _take(self, worker: dict[str, Any]) -> bool:
        """Take a report. Return whether it says that the worker drains."""
        load = worker.get("load") or {}
        of_all = int(load.get("running") or 0) + int(load.get("waiting") or 0)
        self._left = max(int(worker.get("in_flight") or 0), of_all)
        self._state = str(worker.get("state"))
        self._reason = str(worker.get("reason") or "")
        return self._state == "draining"

    def _show(self, text: str) -> None:
        if text == self._shown:
            return
        self._shown = text
        line = f"{self._worker_id}: {text}"
        if self._output.is_terminal:
            self._output.redraw(line)
        else:
            self._output.text(line)

    def _finish(self, state: str, text: str) -> None:
        self.clear()
        _done(self._output, self._worker_id, state, text)


def _done(output: CommandOutput, worker_id: str, state: str, text: str) -> None:
    output.text(f"{worker_id} {text}")
    output.data({"worker_id": worker_id, "state": state})


def _find(site: Site, worker_id: str) -> dict[str, Any] | None:
    return next((worker for worker in workers(site) if worker.get("worker_id") == worker_id), None)


def _streams(count: int) -> str:
    return f"{count:,} stream{'' if count == 1 else 's'}"
