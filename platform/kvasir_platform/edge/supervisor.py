"""Starts, monitors, restarts and stops the edges of a core.

Each edge is a child with one end of a socket pair, which needs no name, access control or discovery, and by
which each side detects the loss of the other immediately. The edge receives its configuration through that
pair: the deployment as the core read it, even if the file has changed since.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.core.errors import KvasirError, StartError
from kvasir.ports.clock import Clock
from kvasir_platform.edge.core_endpoint import CoreEndpoint, CoreParts
from kvasir_platform.edge.core_status import TELL_S, core_status_of
from kvasir_platform.edge.frames import EdgeWelcome, ErrorNote, error_of

log = logging.getLogger(__name__)

_STDERR = 2
_BEAT_S = 1.0
_KILLED_S = 10.0
"""Far longer than the kernel takes to end a killed process."""


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Time limits. An edge must listen within `start_s` of its start. An edge that leaves `silent_beats`
    heartbeats unanswered (one per second) is killed. An edge that exits is restarted after `pause_s`, which
    doubles up to `longest_pause_s` until an edge has served for `steady_s`."""

    start_s: float = 120.0
    silent_beats: int = 30
    pause_s: float = 0.5
    longest_pause_s: float = 15.0
    steady_s: float = 60.0


class Edge:
    """One process with its link. `address` resolves to the address where it listens, or to the error."""

    def __init__(self, name: str, core: CoreParts, began_s: float) -> None:
        self.name = name
        self.began_s = began_s
        self.address: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        self.end = CoreEndpoint(
            name, core, on_started=self._started, on_failed=self._failed, on_lost=self._unlinked
        )
        self._gone = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._unwanted = False

    @property
    def listens(self) -> bool:
        """Whether it listens."""
        return self.address.done() and self.address.exception() is None

    async def run(self, command: Sequence[str], welcome: EdgeWelcome) -> int:
        """Start the process, wait until it has exited and its resources are released, and return its exit
        status. Raise OSError if it cannot be started."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.enter_context(ours)
            with theirs:
                link = theirs.fileno()
                self._process = process = await asyncio.create_subprocess_exec(
                    *command,
                    "--link-fd",
                    str(link),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=_STDERR,
                    pass_fds=(link,),
                )
            stack.pop_all()
        if self._unwanted:
            self.kill()
        await self.end.connect(ours, welcome)
        try:
            status = await process.wait()
        finally:
            self.end.abort()
        await self._gone.wait()
        self.fail(StartError(f"{self.name} exited with status {status} before it listened"))
        return status

    def kill(self) -> None:
        """Kill the process, now or as soon as it has started. Idempotent."""
        self._unwanted = True
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _started(self, host: str, port: int) -> None:
        if not self.address.done():
            self.address.set_result((host, port))

    def _failed(self, note: ErrorNote) -> None:
        self.fail(error_of(note))

    def fail(self, error: KvasirError) -> None:
        """Fail the start, unless it already listens. Idempotent."""
        if not self.address.done():
            self.address.set_exception(error)
            # Retrieve the exception, because asyncio logs one that nobody retrieves.
            self.address.exception()

    def _unlinked(self) -> None:
        self._gone.set()


class EdgeSupervisor:
    """`count` edges of one core. `command` starts one, given the descriptor of its link as `--link-fd`, and
    `welcome` is sent to each. Call `start`, then `drain`, and `close` in any case."""

    def __init__(
        self,
        count: int,
        core: CoreParts,
        command: Sequence[str],
        welcome: EdgeWelcome,
        *,
        clock: Clock,
        patience: RestartLimits | None = None,
    ) -> None:
        self._core = core
        self._command = command
        self._welcome = welcome
        self._clock = clock
        self._patience = patience or RestartLimits()
        self.edges = [self._make(slot, 1) for slot in range(count)]
        """The current edges, by slot."""
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None
        self._ending = False
        self.broken = asyncio.Event()
        """Set when edges are not restarted any more because of an internal error, which is logged."""

    async def start(self) -> tuple[str, int]:
        """Start all edges, and return the address of the first when all listen. Raise KvasirError if one does
        not."""
        addresses = [asyncio.shield(edge.address) for edge in self.edges]
        self._watching = asyncio.create_task(self._watch(), name="edges")
        self._tasks = [
            asyncio.create_task(self._keep(slot), name=edge.name) for slot, edge in enumerate(self.edges)
        ]
        for task in (*self._tasks, self._watching):
            task.add_done_callback(self._over)
        return (await asyncio.gather(*addresses))[0]

    async def drain(self, within_s: float) -> None:
        """Drain all edges; kill those that exceed the timeout."""
        self._ending = True
        for edge in self.edges:
            if edge.listens:
                edge.end.drain()
            else:
                edge.kill()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)

    async def close(self) -> None:
        """Kill the remaining edges. Idempotent."""
        self._ending = True
        for edge in self.edges:
            edge.kill()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_KILLED_S)
        for task in (*self._tasks, self._watching):
            if task is not None:
                task.cancel()

    def in_flight(self) -> int:
        """Return the number of running requests of all edges."""
        return sum(edge.end.in_flight for edge in self.edges)

    def _over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the supervision of %s failed: %s", task.get_name(), error, exc_info=error)
            self.broken.set()

    def _make(self, slot: int, life: int) -> Edge:
        name = f"edge-{slot}" if life == 1 else f"edge-{slot}.{life}"
        return Edge(name, self._core, self._clock.now())

    async def _keep(self, slot: int) -> None:
        patience = self._patience
        pause = patience.pause_s
        for life in itertools.count(2):
            edge = self.edges[slot]
            try:
                ended = f"with status {await edge.run(self._command, self._welcome)}"
            except OSError as error:
                edge.fail(StartError(f"{edge.name} cannot be started: {error}"))
                ended = f"before its start: {error}"
            if self._ending or (life == 2 and not edge.listens):
                return
            if self._clock.now() - edge.began_s >= patience.steady_s:
                pause = patience.pause_s
            why = "" if edge.listens else f" ({edge.address.exception()})"
            log.error("%s exited %s%s; restarting it in %g s", edge.name, ended, why, pause)
            await self._clock.sleep(pause)
            if self._ending:
                return
            pause = min(2 * pause, patience.longest_pause_s)
            self.edges[slot] = self._make(slot, life)

    async def _watch(self) -> None:
        """Push the status to edges, and check their heartbeats."""
        beats = itertools.count(1)
        beat_s = self._clock.now()
        while True:
            core_status = core_status_of(self._core.router, self._core.shares())
            for edge in self.edges:
                edge.end.send_status(core_status)
            if self._clock.now() >= beat_s:
                beat_s = self._clock.now() + _BEAT_S
                number = next(beats)
                for edge in self.edges:
                    self._see(edge, number)
            await self._clock.sleep(TELL_S)

    def _see(self, edge: Edge, number: int) -> None:
        patience = self._patience
        if edge.listens:
            edge.end.beat(number)
            stuck = edge.end.unheard > patience.silent_beats
        else:
            stuck = self._clock.now() - edge.began_s > patience.start_s
        if stuck:
            log.error("%s does not respond; killing it", edge.name)
            edge.kill()
