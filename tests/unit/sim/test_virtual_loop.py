"""Virtual time: the guarantees for tests and the simulator."""

from __future__ import annotations

import asyncio
import random
import socket
import time

import pytest

from kvasir.clock import MonotonicClock
from kvasir_platform.sim.core.virtual_loop import VirtualClock, VirtualDeadlock, run_virtual


def test_an_hour_of_sleeping_takes_milliseconds() -> None:
    async def sleep_an_hour() -> float:
        clock = VirtualClock()
        for _ in range(3600):
            await clock.sleep(1.0)
        return clock.now()

    started = time.perf_counter()
    assert run_virtual(sleep_an_hour()) == 3600.0
    assert time.perf_counter() - started < 2.0


def test_time_has_no_rounding_drift() -> None:
    async def ten_tenths() -> float:
        clock = VirtualClock()
        for _ in range(10):
            await clock.sleep(0.1)
        return clock.now()

    assert run_virtual(ten_tenths()) == 1.0


def test_time_stands_still_while_something_is_ready() -> None:
    async def busy() -> float:
        clock = VirtualClock()
        for _ in range(1000):
            await clock.sleep(0)
        return clock.now()

    assert run_virtual(busy()) == 0.0


def test_sleepers_wake_in_the_order_of_their_deadlines() -> None:
    woken: list[tuple[float, int]] = []

    async def sleeper(seconds: int) -> None:
        clock = VirtualClock()
        await clock.sleep(seconds)
        woken.append((clock.now(), seconds))

    async def all_of_them() -> None:
        await asyncio.gather(*(sleeper(s) for s in (5, 1, 4, 2, 3)))

    run_virtual(all_of_them())
    assert woken == [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4), (5.0, 5)]


def test_a_cancelled_sleeper_ends_at_once_and_its_timer_costs_no_time() -> None:
    async def cancel_after_one_second() -> float:
        clock = VirtualClock()
        task = asyncio.create_task(clock.sleep(1000))
        await clock.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return clock.now()

    assert run_virtual(cancel_after_one_second()) == 1.0


def test_a_timeout_fires_in_virtual_time() -> None:
    async def time_out() -> float:
        clock = VirtualClock()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return clock.now()

    assert run_virtual(time_out()) == 30.0


def test_a_deadlock_names_the_waiting_tasks_instead_of_hanging() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(stuck(), name="the-stuck-one")

    with pytest.raises(VirtualDeadlock, match=r"the-stuck-one: .*stuck line \d+"):
        run_virtual(main())


def test_tasks_left_behind_are_cancelled() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        return task

    assert run_virtual(main()).cancelled()
    assert ended == ["cancelled"]


def test_the_exception_of_the_main_coroutine_comes_out() -> None:
    async def broken() -> None:
        await asyncio.sleep(1)
        raise LookupError("broken")

    with pytest.raises(LookupError, match="broken"):
        run_virtual(broken())


def _trace(seed: int) -> list[tuple[float, int]]:
    rng = random.Random(seed)
    seen: list[tuple[float, int]] = []

    async def worker(number: int) -> None:
        clock = VirtualClock()
        for _ in range(20):
            await clock.sleep(rng.random())
            seen.append((clock.now(), number))

    async def main() -> None:
        await asyncio.gather(*(worker(n) for n in range(10)))

    run_virtual(main())
    return seen


def test_the_same_seed_gives_the_same_trace() -> None:
    assert _trace(7) == _trace(7)
    assert _trace(7) != _trace(8)


def test_threads_and_sockets_are_refused() -> None:
    async def thread() -> None:
        await asyncio.to_thread(int)

    async def sockets() -> None:
        near, far = socket.socketpair()
        with near, far:
            asyncio.get_running_loop().add_reader(near, int)

    with pytest.raises(RuntimeError, match="no threads in virtual time"):
        run_virtual(thread())
    with pytest.raises(RuntimeError, match="virtual time"):
        run_virtual(sockets())


def test_a_timer_beyond_the_horizon_is_refused() -> None:
    with pytest.raises(OverflowError, match="beyond"):
        run_virtual(asyncio.sleep(1e9))


async def test_a_virtual_clock_refuses_a_real_loop() -> None:
    with pytest.raises(RuntimeError, match="only inside run_virtual"):
        VirtualClock().now()


async def test_the_real_clock_sleeps_at_least_as_long_as_asked() -> None:
    clock = MonotonicClock()
    before = clock.now()
    await clock.sleep(0.002)
    assert clock.now() - before >= 0.002
