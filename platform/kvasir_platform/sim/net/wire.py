"""One connection in memory: two directions, two ends that learn of a break separately, and the network
conditions between them. Its timers are the event loop's own, so that under virtual time a slow line costs
nothing."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvasir.core.messages import Hello, RouterFrame, Welcome, WorkerFrame
from kvasir.ports.clock import Rng
from kvasir.ports.session import ConnectionLost

T = TypeVar("T")


class LinkConditions:
    """Network conditions to a worker. Change them by `set`, which notifies the connections.

    While it is not `up`, nothing passes, not even the end of a connection: sent data is held, and arrives
    when it is up again. Frames take `delay_s` and up to `jitter_s` more, drawn from `rng`, and keep their
    order; each occupies the line for its size over `bytes_per_s`.
    """

    def __init__(self) -> None:
        self.up = True
        self.delay_s = 0.0
        self.jitter_s = 0.0
        self.bytes_per_s = math.inf
        self.rng: Rng | None = None
        self._watchers: dict[Callable[[], None], None] = {}

    def set(
        self,
        *,
        up: bool = True,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        bytes_per_s: float = math.inf,
        rng: Rng | None = None,
    ) -> None:
        """Set the conditions; without arguments, an undisturbed line. Raises ValueError for jitter without an
        `rng`."""
        if jitter_s and rng is None:
            raise ValueError("jitter is drawn: give an rng")
        self.up, self.delay_s, self.jitter_s = up, delay_s, jitter_s
        self.bytes_per_s, self.rng = bytes_per_s, rng
        for watcher in list(self._watchers):
            watcher()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` after each change, until `unwatch`."""
        self._watchers[watcher] = None

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """No effect for a watcher that is not registered."""
        self._watchers.pop(watcher, None)

    @property
    def calm(self) -> bool:
        """Whether frames arrive as they are sent."""
        return not self.delay_s and not self.jitter_s and self.bytes_per_s == math.inf

    def lag_s(self) -> float:
        """Return the transit time of the next frame."""
        jitter = self.jitter_s * self.rng.random() if self.rng is not None else 0.0
        return self.delay_s + jitter

    async def wait_up(self) -> None:
        """Return when traffic can pass."""
        changed = asyncio.Event()
        self.watch(changed.set)
        try:
            while not self.up:
                changed.clear()
                await changed.wait()
        finally:
            self.unwatch(changed.set)


class SimPipe(Generic[T]):
    """One direction of a connection, holding at most `capacity` frames. Its two ends break separately.
    `keeps`: frames put before the break can still be read."""

    def __init__(self, capacity: int, weathers: tuple[LinkConditions, ...], *, keeps: bool = False) -> None:
        self._capacity = capacity
        self._weathers = weathers
        self._keeps = keeps
        self._frames: deque[T] = deque()
        # The number of frames that have arrived, from the first on.
        self._arrived = 0
        self._sender_broken: str | None = None
        self._receiver_broken: str | None = None
        self._changed = asyncio.Event()
        self._line_free_s = 0.0
        self._last_due_s = 0.0

    def break_sender(self, reason: str) -> None:
        """Break the sender's end."""
        self._sender_broken = self._sender_broken or reason
        self._changed.set()

    def break_receiver(self, reason: str) -> None:
        """Break the receiver's end; unread frames are lost."""
        self._receiver_broken = self._receiver_broken or reason
        if not self._keeps:
            self._frames.clear()
            self._arrived = 0
        self._changed.set()

    def look(self) -> None:
        """Handle changed network conditions."""
        self._changed.set()

    async def put(self, frame: T, size: int = 0) -> None:
        """Hand over a frame of `size` bytes. Raises ConnectionLost."""
        while self._sender_broken is None and len(self._frames) >= self._capacity:
            await self._change()
        if self._sender_broken is not None:
            raise ConnectionLost(self._sender_broken)
        if self._receiver_broken is None:
            self._frames.append(frame)
            self._travel(size)

    async def get(self) -> T:
        """Return the next frame that has arrived. Raises ConnectionLost."""
        while True:
            if self._arrived and all(weather.up for weather in self._weathers):
                self._arrived -= 1
                self._changed.set()
                return self._frames.popleft()
            if self._receiver_broken is not None:
                raise ConnectionLost(self._receiver_broken)
            await self._change()

    def _travel(self, size: int) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._last_due_s <= now and all(weather.calm for weather in self._weathers):
            self._arrive()
            return
        slowest = min(weather.bytes_per_s for weather in self._weathers)
        self._line_free_s = max(now, self._line_free_s) + size / slowest
        lag_s = sum(weather.lag_s() for weather in self._weathers)
        self._last_due_s = max(self._last_due_s, self._line_free_s + lag_s)
        loop.call_at(self._last_due_s, self._arrive)

    def _arrive(self) -> None:
        if self._frames and self._arrived < len(self._frames):
            self._arrived += 1
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class SimWire:
    """State that the two ends of one connection share."""

    def __init__(
        self, address: str, hello: Hello, capacity: int, weathers: tuple[LinkConditions, ...]
    ) -> None:
        self.address = address
        self.hello = hello
        self.to_worker: SimPipe[RouterFrame] = SimPipe(capacity, weathers)
        self.to_router: SimPipe[WorkerFrame] = SimPipe(capacity, weathers)
        self.answer: SimPipe[Welcome] = SimPipe(1, weathers, keeps=True)
        self.refusal: str | None = None
        self.router_left = False
        self._weathers = weathers
        self._held: list[Callable[[], None]] = []
        for weather in weathers:
            weather.watch(self._look)

    @property
    def up(self) -> bool:
        """Whether traffic passes."""
        return all(weather.up for weather in self._weathers)

    async def wait_up(self) -> None:
        """Return when traffic can pass."""
        while not self.up:
            for weather in self._weathers:
                await weather.wait_up()

    def lag_s(self) -> float:
        """Return the transit time."""
        return sum(weather.lag_s() for weather in self._weathers)

    def cut(self, reason: str) -> None:
        """Break both ends, and lose data in transit."""
        self._break_router(reason)
        self._break_worker(reason)

    def leave_router(self, reason: str) -> None:
        """Close the router's end; the worker is notified once traffic passes."""
        self.router_left = True
        self._break_router(reason)
        self._tell(lambda: self._break_worker(reason))

    def leave_worker(self, reason: str) -> None:
        """Close the worker's end; the router is notified once traffic passes."""
        self._break_worker(reason)
        self._tell(lambda: self._break_router(reason))

    def forget(self) -> None:
        """Close the worker's end for good: once the router is notified, conditions do not matter."""
        if self._held:
            self._held.append(self.forget)
            return
        for weather in self._weathers:
            weather.unwatch(self._look)

    def _break_router(self, reason: str) -> None:
        self.to_router.break_receiver(reason)
        self.answer.break_receiver(reason)
        self.to_worker.break_sender(reason)

    def _break_worker(self, reason: str) -> None:
        self.to_worker.break_receiver(reason)
        self.to_router.break_sender(reason)
        self.answer.break_sender(reason)

    def _tell(self, news: Callable[[], None]) -> None:
        if self.up:
            news()
        else:
            self._held.append(news)

    def _look(self) -> None:
        if self.up:
            held, self._held = self._held, []
            for news in held:
                news()
        for pipe in (self.to_worker, self.to_router, self.answer):
            pipe.look()
