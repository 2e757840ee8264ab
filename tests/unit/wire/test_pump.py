"""Acknowledgements: with other messages, otherwise soon, and at once if many are pending."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from kvasir.core.errors import ProtocolError
from kvasir.core.messages import Abort, EncodedStep, RouterFrame, RouterMessage, WorkerFrame, WorkerMessage
from kvasir.core.requests import StepBatch
from kvasir.core.session_link import LinkLimits, SessionLink
from kvasir.ports.session import ConnectionLost
from kvasir.wire.pump import SessionPump
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual

LIMITS = LinkLimits(ack_every=3, ack_delay_s=1.0)


class CountingClock(VirtualClock):
    """Counts what is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeps = 0

    async def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        await super().sleep(seconds)


class Pipe:
    """A router's connection: `incoming` is read, what is sent is kept with its time."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[WorkerFrame] = asyncio.Queue()
        self.sent: list[tuple[float, RouterFrame]] = []
        self.clock = CountingClock()

    async def send(self, frame: RouterFrame) -> None:
        self.sent.append((self.clock.now(), frame))

    async def receive(self) -> WorkerFrame:
        return await self.incoming.get()


class Rig:
    """A pump in motion."""

    def __init__(self) -> None:
        self.pipe = Pipe()
        self.link: SessionLink[RouterMessage] = SessionLink(LIMITS)
        self.got: list[WorkerMessage | EncodedStep] = []
        self.pump: SessionPump[RouterMessage, WorkerMessage | EncodedStep, RouterFrame] = SessionPump(
            self.pipe,
            self.link,
            frame=RouterFrame,
            process=self.got.append,
            clock=self.pipe.clock,
        )
        self.running = asyncio.ensure_future(self.pump.run())

    def feed(self, *seqs: int) -> None:
        for seq in seqs:
            self.pipe.incoming.put_nowait(WorkerFrame(seq, 0, StepBatch()))

    async def stop(self) -> None:
        self.pump.stop()
        with pytest.raises(ConnectionLost, match="stopped"):
            await self.running


def virtual(main: Coroutine[Any, Any, None]) -> None:
    run_virtual(main)


def test_a_lone_payload_is_acknowledged_after_the_delay_and_only_once() -> None:
    async def main() -> None:
        rig = Rig()
        rig.feed(1)
        await asyncio.sleep(30)
        assert rig.pipe.sent == [(1.0, RouterFrame(0, 1))]
        assert rig.pipe.clock.sleeps == 1, "idle sessions wake up no more than they have to"
        await rig.stop()

    virtual(main())


def test_many_payloads_are_acknowledged_at_once() -> None:
    async def main() -> None:
        rig = Rig()
        await asyncio.sleep(0.1)
        rig.feed(1, 2, 3)
        await asyncio.sleep(0.5)
        assert rig.pipe.sent == [(0.1, RouterFrame(0, 3))]
        await rig.stop()

    virtual(main())


def test_after_one_that_rode_the_next_is_sent_after_its_own_delay() -> None:
    async def main() -> None:
        rig = Rig()
        rig.feed(1)
        await asyncio.sleep(0.7)
        rig.link.push(Abort(("r",)), 1)
        rig.pump.wake()
        await asyncio.sleep(0.1)
        rig.feed(2)
        await asyncio.sleep(30)
        (_, ridden), (late_s, last) = rig.pipe.sent
        assert ridden == RouterFrame(1, 1, Abort(("r",)))
        assert late_s == pytest.approx(1.8, abs=1e-5)
        assert last == RouterFrame(1, 2)
        await rig.stop()

    virtual(main())


def test_a_heartbeat_is_a_frame_with_nothing_to_acknowledge_unless_one_is_sent_anyway() -> None:
    async def main() -> None:
        rig = Rig()
        rig.pump.beat()
        await asyncio.sleep(0.5)
        rig.link.push(Abort(("r",)), 1)
        rig.pump.beat()
        await asyncio.sleep(0.5)
        rig.pipe.incoming.put_nowait(WorkerFrame(0, 1))
        await asyncio.sleep(30)
        assert rig.pipe.sent == [(0.0, RouterFrame(0, 0)), (0.5, RouterFrame(1, 0, Abort(("r",))))]
        assert rig.got == []
        assert rig.pump.last_received_s == 1.0
        await rig.stop()

    virtual(main())


def test_an_acknowledgement_rides_on_what_is_sent_anyway() -> None:
    async def main() -> None:
        rig = Rig()
        rig.feed(1)
        await asyncio.sleep(0.5)
        rig.link.push(Abort(("r",)), 1)
        rig.pump.wake()
        await asyncio.sleep(30)
        assert rig.pipe.sent == [(0.5, RouterFrame(1, 1, Abort(("r",))))]
        await rig.stop()

    virtual(main())


def test_a_peer_that_breaks_the_contract_ends_the_pump_with_what_it_did() -> None:
    async def main() -> None:
        rig = Rig()
        rig.feed(1, 3)
        with pytest.raises(ProtocolError, match="gap: expected frame 2, got 3"):
            await rig.running
        assert len(rig.got) == 1

    virtual(main())


def test_a_stopped_pump_touches_the_link_no_more() -> None:
    async def main() -> None:
        rig = Rig()
        rig.feed(1)
        await asyncio.sleep(0.1)
        rig.feed(2)
        rig.link.push(Abort(("r",)), 1)
        rig.pump.wake()
        await rig.stop()
        await asyncio.sleep(5)
        assert rig.link.received_seq == 1
        assert rig.link.sent_seq == 0
        assert rig.pipe.sent == []

    virtual(main())
