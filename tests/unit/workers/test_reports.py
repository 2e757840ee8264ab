"""How often a worker reports, depending on its other messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvasir.core.messages import WorkerMessage
from kvasir.core.requests import EngineLoad, StepBatch
from kvasir.core.session_link import LinkLimits
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_workers.server.reports import report
from kvasir_workers.server.session import RouterSession


class Reporting:
    """A session with its reports, and when each came; None is a heartbeat without any."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.session = RouterSession("s", "r", LinkLimits(tail_messages=10))
        self.load = EngineLoad()
        self.said: list[tuple[float, EngineLoad | None]] = []

    async def run(self, seconds: float) -> None:
        reports = asyncio.ensure_future(
            report(
                self.session,
                lambda: self.load,
                self.push,
                self.beat,
                self.clock,
                interval_s=0.2,
                heartbeat_s=0.5,
            )
        )
        await self.clock.sleep(seconds)
        reports.cancel()

    def push(self, session: RouterSession, message: WorkerMessage) -> None:
        assert isinstance(message, StepBatch)
        session.said_s = self.clock.now()
        self.said.append((round(self.clock.now(), 3), message.load))

    def beat(self, session: RouterSession) -> None:
        session.beat_s = self.clock.now()
        self.said.append((round(self.clock.now(), 3), None))

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, act)


def test_an_unchanged_load_is_said_once_and_again_with_every_fourth_heartbeat() -> None:
    async def main() -> None:
        reporting = Reporting()
        await reporting.run(4.1)
        said = [(0.5 * at, EngineLoad() if at % 4 == 0 else None) for at in range(9)]
        assert reporting.said == said

    run_virtual(main())


def test_a_changed_load_is_said_at_the_next_look() -> None:
    async def main() -> None:
        reporting = Reporting()
        busy = EngineLoad(running=3)
        reporting.later(0.65, lambda: setattr(reporting, "load", busy))
        await reporting.run(1.25)
        assert reporting.said == [(0.0, EngineLoad()), (0.5, None), (0.7, busy), (1.2, None)]

    run_virtual(main())


def test_whatever_else_is_said_stands_for_a_heartbeat() -> None:
    async def main() -> None:
        reporting = Reporting()

        def speak() -> None:
            reporting.session.said_s = reporting.clock.now()

        reporting.later(0.3, speak)
        await reporting.run(1.4)
        assert reporting.said == [(0.0, EngineLoad()), (0.8, EngineLoad()), (1.3, None)], (
            "it may have changed"
        )

    run_virtual(main())


def test_a_router_with_much_to_read_gets_no_heartbeats_but_learns_of_changes() -> None:
    async def main() -> None:
        reporting = Reporting()
        for _ in range(6):
            reporting.session.link.push(StepBatch(), 1)
        reporting.later(1.5, lambda: setattr(reporting, "load", EngineLoad(running=1)))
        await reporting.run(5.0)
        assert [load for _, load in reporting.said] == [EngineLoad(), EngineLoad(running=1)]

    run_virtual(main())
