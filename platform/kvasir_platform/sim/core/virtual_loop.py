"""An asyncio event loop under virtual time.

The loop never waits: when nothing is ready, time jumps to the next timer. An hour of sleep costs only the
work done in it, two runs give the same trace, and a deadlocked program ends with an error that names the
waiting tasks instead of hanging. There is no I/O and there are no threads in virtual time, because both would
make the order of events depend on the machine's speed.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Args = TypeVarTuple("Args")

_NS = 1_000_000_000
# Beyond this, floats lose nanoseconds, and timers could fail to fire.
_HORIZON_S = 90 * 24 * 3600


class VirtualDeadlock(RuntimeError):
    """Every task waits and no timer is set: no event can ever occur."""


class _NeverWaits(selectors.SelectSelector):
    """Turns the loop's wait into a jump of its time."""

    def __init__(self, jump: Callable[[float], None], deadlock: Callable[[], NoReturn]) -> None:
        super().__init__()
        self._jump = jump
        self._deadlock = deadlock

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self.get_map():
            # The first registration is the loop's own wake-up pipe.
            raise RuntimeError("there is no I/O in virtual time: use an in-memory transport")
        return super().register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            self._deadlock()
        elif timeout > 0:
            self._jump(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` starts at 0 and moves only when nothing is ready.

    Time has a grid of one nanosecond, so that ten sleeps of 0.1 s end at 1.0 exactly. A loop serves one
    simulation of at most 90 days.
    """

    def __init__(self) -> None:
        self._now_ns = 0
        super().__init__(_NeverWaits(self._jump, self._raise_deadlock))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_ns / _NS

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        if when > _HORIZON_S:
            raise OverflowError(f"a timer at {when} s is beyond the {_HORIZON_S} s of a simulation")
        return super().call_at(round(when * _NS) / _NS, callback, *args, context=context)

    def _jump(self, seconds: float) -> None:
        self._now_ns = round(self._now_ns + seconds * _NS)

    def _raise_deadlock(self) -> NoReturn:
        waiting = sorted(_where(task) for task in asyncio.all_tasks(self))
        raise VirtualDeadlock(
            f"at {self.time():.9f} s every task waits and no timer is set:\n  " + "\n  ".join(waiting)
        )

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Args]], T], *args: *Args
    ) -> asyncio.Future[T]:
        """Refused: a thread runs in real time."""
        raise RuntimeError("there are no threads in virtual time")


def _where(task: asyncio.Task[Any]) -> str:
    stack = task.get_stack(limit=1)
    if not stack:
        return f"{task.get_name()}: not started"
    frame = stack[-1]
    return f"{task.get_name()}: {frame.f_code.co_qualname} line {frame.f_lineno}"


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` under virtual time and return its result; tasks that it leaves are cancelled.

    Raises what `main` raises, and VirtualDeadlock when it can never end.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class VirtualClock:
    """`kvasir.ports.clock.Clock` over the running VirtualTimeLoop.

    Under any other loop it raises RuntimeError: a test that mixes real and virtual time proves nothing.
    """

    def now(self) -> float:
        """Virtual seconds since the loop was made."""
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualTimeLoop):
            raise RuntimeError("VirtualClock runs only inside run_virtual")
        return loop.time()

    async def sleep(self, seconds: float) -> None:
        """Return `seconds` of virtual time later; yields once when that is zero or less."""
        self.now()
        await asyncio.sleep(seconds)
