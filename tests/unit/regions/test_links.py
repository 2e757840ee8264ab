"""Both ends of a link between cells, against a scripted other end: what is sent together, and what an end
does with messages that no cell of this release sends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from tests.kit.sim.cells import CellLinks, LinkEnd

from kvasir.core.errors import CapacityError, KvasirError, ProtocolError
from kvasir.core.requests import Delta, Request, token_ids
from kvasir.ports.router import RequestSummary
from kvasir.ports.session import ConnectionLost
from kvasir_platform.regions import session
from kvasir_platform.regions.connections import CellConnection
from kvasir_platform.regions.frames import (
    MAX_TOKENS,
    VERSION,
    CellHello,
    CellWelcome,
    SentRequest,
    ToOrigin,
    ToServing,
    decode_to_origin,
    decode_to_serving,
    encode_message,
)
from kvasir_platform.regions.peer import PeerCell
from kvasir_platform.regions.residency import Residency
from kvasir_platform.regions.session import CellSession, ServingParts
from kvasir_platform.regions.streams import CellStream
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_platform.sim.stories import simulate, small_deployment

HELLO = CellHello(VERSION, "eu", "r")
WELCOME = CellWelcome(VERSION, "us", 1.0)
PATIENCE_S = 20.0
"""Virtual seconds in which a story ends."""


def request(name: str, tokens: int = 4, model: str = "m") -> Request:
    """A request of so many tokens."""
    return Request(name, model, token_ids(range(tokens)))


@dataclass
class Heard:
    """`AwaySink` that keeps what it hears; `fails` when its cell is lost."""

    fails: bool = False
    lost: list[str] = field(default_factory=list)

    def on_delta(self, delta: Delta) -> None: ...

    def on_finish(self, summary: RequestSummary) -> None: ...

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None: ...

    def on_lost(self, reason: str) -> None:
        if self.fails:
            raise RuntimeError("a sink with a fault")
        self.lost.append(reason)


def as_origin(
    story: Callable[[PeerCell, list[ToServing], CellLinks], Awaitable[None]],
    welcome: CellWelcome = WELCOME,
    why: str = "",
) -> None:
    """Play a story with a link to a cell that sends a `welcome` and one beat, once no request can be sent
    there for the reason `why`; the list has what it got."""

    async def main() -> None:
        clock = VirtualClock()
        links, got, beats = CellLinks(clock), list[ToServing](), count(1)

        async def serve(connection: CellConnection, _: str | None) -> None:
            await connection.send(encode_message(ToOrigin(welcome=welcome, beat=next(beats))))
            try:
                while True:
                    got.append(decode_to_serving(await connection.receive()))
            except ConnectionLost:
                pass

        class Dialer:
            async def dial(self) -> CellConnection:
                return await links.dial("eu", "us")

        links.listening["us"] = serve
        peer = PeerCell(
            "us",
            HELLO,
            Dialer(),
            clock,
            lease_s=1.0,
            max_requests=100,
            on_report=lambda report: None,
            on_allotted=lambda cell, answer: None,
            on_slots=lambda cell, answer: None,
            on_spending=lambda cell, said: None,
        )
        running = asyncio.ensure_future(peer.run())
        async with asyncio.timeout(PATIENCE_S):
            while peer.why != why:
                await clock.sleep(0.01)
            await story(peer, got, links)
        running.cancel()
        await asyncio.wait([running])

    run_virtual(main())


def test_prompts_that_are_large_together_are_sent_one_after_the_other() -> None:
    async def story(peer: PeerCell, got: list[ToServing], links: CellLinks) -> None:
        sizes = [MAX_TOKENS // 2, MAX_TOKENS // 2, 1, 2 * MAX_TOKENS, 5, 6]
        for number, tokens in enumerate(sizes):
            peer.submit(request(f"r{number}", tokens), Heard())
        peer.cancel("r1")
        await asyncio.sleep(0.1)
        sent = [[each.request.request_id for each in message.submits] for message in got if message.submits]
        assert sent == [["r0", "r1"], ["r2"], ["r3"], ["r4", "r5"]]
        assert [message.cancels for message in got if message.cancels] == [["r1"]]
        assert got[-1].cancels == ["r1"]

    as_origin(story)


def test_a_sink_that_fails_as_its_cell_is_lost_keeps_nothing_from_going_on() -> None:
    async def story(peer: PeerCell, got: list[ToServing], links: CellLinks) -> None:
        sound = Heard()
        peer.submit(request("r0"), Heard(fails=True))
        peer.submit(request("r1"), sound)
        (far,) = (end for _, end in links.ends[1:])
        await far.close()
        while not sound.lost:
            await asyncio.sleep(0.1)
        while peer.why:
            await asyncio.sleep(0.1)

    as_origin(story)


@pytest.mark.parametrize(
    ("welcome", "why"),
    [
        (
            CellWelcome(VERSION, "us", 2.0),
            "its regions.lost_after_s is 2, and here it is 1; set the same value in all cells",
        ),
        (CellWelcome(VERSION, "ap", 1.0), "it is cell 'ap', and not 'us'"),
    ],
    ids=["another lease", "another cell"],
)
def test_a_cell_that_is_not_as_agreed_gets_no_requests(welcome: CellWelcome, why: str) -> None:
    async def story(peer: PeerCell, got: list[ToServing], links: CellLinks) -> None:
        with pytest.raises(CapacityError, match=why):
            peer.submit(request("r"), Heard())

    as_origin(story, welcome, why)


@dataclass
class Link:
    """The origin's end of a link to `session`, whose run is `running`."""

    near: LinkEnd
    session: CellSession
    running: asyncio.Task[None]

    async def say(self, message: ToServing) -> None:
        await self.near.send(encode_message(message))


def as_serving(story: Callable[[Link, Cluster], Awaitable[None]]) -> None:
    """Play a story with the origin's end of a link to a simulated cell."""

    async def main(cluster: Cluster) -> None:
        near, far = LinkEnd(0.0), LinkEnd(0.0)
        near.other, far.other = far, near
        parts = ServingParts(
            cell="us",
            router=cluster.router,
            clock=cluster.clock,
            residency=Residency({"bank": ("eu",)}),
            report=bytes,
            allot=lambda cell, ask, then: None,
            grant=lambda cell, ask, then: None,
            spending=lambda: None,
            cells={"eu": "eu"},
            tokenizers={},
            lease_s=1.0,
            max_requests=8,
        )
        serving = CellSession(parts, far, "eu")
        link = Link(near, serving, asyncio.ensure_future(serving.run()))
        async with asyncio.timeout(PATIENCE_S):
            await story(link, cluster)
        serving.cut("the test has ended")
        await asyncio.wait([link.running])

    simulate(small_deployment(0, 0, 1, disaggregation="never"), main)


def test_a_request_that_is_sent_twice_ends_the_link_and_both() -> None:
    async def story(link: Link, cluster: Cluster) -> None:
        once = SentRequest(request("r", 64, cluster.deployment.model.name))
        await link.say(ToServing(hello=HELLO, submits=[once]))
        await asyncio.sleep(0.01)
        assert link.session.in_flight == 1
        await link.say(ToServing(submits=[once]))
        await link.running
        assert link.session.in_flight == 0
        assert cluster.router.running(8) == []

    as_serving(story)


def test_an_origin_that_reads_no_answers_loses_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_WAITING_ANSWERS", 3)

    async def story(link: Link, cluster: Cluster) -> None:
        stays = replace(request("r"), tenant="bank")
        refused = [SentRequest(replace(stays, request_id=f"r{number}")) for number in range(8)]
        await link.say(ToServing(hello=HELLO, submits=refused[:3]))
        await asyncio.sleep(0.01)
        assert len(decode_to_origin(await link.near.receive()).ends) == 3
        await link.say(ToServing(submits=refused[3:]))
        await link.running

    as_serving(story)


@pytest.mark.parametrize("data", [b"", b"no message", encode_message(ToOrigin(beat=1))[:-1]])
def test_a_message_that_cannot_be_read_ends_the_link(data: bytes) -> None:
    async def story(link: Link, cluster: Cluster) -> None:
        await link.say(ToServing(hello=HELLO))
        await link.near.send(data)
        await link.running
        assert link.session.in_flight == 0

    as_serving(story)


def test_a_link_that_begins_without_a_hello_is_refused() -> None:
    async def story(link: Link, cluster: Cluster) -> None:
        await link.say(ToServing(beat=1))
        with pytest.raises(ProtocolError, match="speaks version 1 of the link, the caller nothing"):
            await link.running

    as_serving(story)


@dataclass
class Broken:
    """`StreamRouter` that keeps why streams were broken."""

    home: str = "eu"
    errors: list[str] = field(default_factory=list)

    def ended(self, stream: CellStream, *, answered: bool = True) -> None: ...

    def lost(self, stream: CellStream) -> None: ...

    def moved(self, stream: CellStream, error: KvasirError, summary: RequestSummary | None) -> bool:
        return False

    def explained(self, stream: CellStream, error: KvasirError) -> KvasirError:
        return error

    def broken(self, stream: CellStream, error: KvasirError) -> None:
        self.errors.append(error.message)

    def now(self) -> float:
        return 0.0


@pytest.mark.parametrize("index", [-1, 1])
def test_a_choice_that_was_not_asked_for_breaks_the_stream(index: int) -> None:
    async def main() -> None:
        router, client = Broken(), ClientStream(request("r"))
        stream = CellStream(client.request, client, router)
        stream.cell = "us"
        stream.follow()
        stream.on_delta(Delta("r", 0, (1,), "a", index=index))
        assert router.errors == [f"Cell us broke the stream: choice {index} came of 1."]
        assert client.tokens == [[]]

    run_virtual(main())
