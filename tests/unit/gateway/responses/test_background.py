"""A background response answers its client once: when it has begun, or with its end if that comes first."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.kit.gateway.api_answers import RecordingWire, exchange_on, received

from kvasir.config.spec.edge import ResponsesSpec
from kvasir.core.errors import CapacityError
from kvasir.ports.responses import StoredResponse
from kvasir_platform.gateway.responses.background import BackgroundRun
from kvasir_platform.gateway.responses.memory_store import MemoryResponses


class Background:
    """One background response, its client and what is stored of it."""

    def __init__(self) -> None:
        self.wire = RecordingWire()
        self.store = MemoryResponses(ResponsesSpec(), lambda: 0.0)
        self.running: Counter[str] = Counter()
        self.run = BackgroundRun(
            exchange_on(self.wire), self.store, self.running, tenant="t", name="a", items=b"[]"
        )

    def stored(self) -> StoredResponse | None:
        found: list[StoredResponse | None] = []
        self.store.find("t", "a", found.append)
        return found[0]


async def test_a_response_that_goes_on_answers_when_it_has_begun_and_is_stored_at_its_end() -> None:
    background = Background()
    background.run.begun(b'"queued"')
    assert not background.wire.sent
    await asyncio.sleep(0)
    assert received(background.wire.sent).body == b'"queued"'
    assert background.stored() == StoredResponse("t", "a", b'"queued"', b"[]", "running")
    background.run.ended(b'"done"')
    assert received(background.wire.sent).body == b'"queued"'
    assert background.stored() == StoredResponse("t", "a", b'"done"', b"[]")
    assert not background.running


async def test_a_response_that_ends_in_the_turn_in_which_it_began_is_the_answer() -> None:
    background = Background()
    background.run.begun(b'"queued"')
    background.run.ended(b'"done"')
    await asyncio.sleep(0)
    assert received(background.wire.sent).body == b'"done"'
    assert background.stored() == StoredResponse("t", "a", b'"done"', b"[]")
    assert not background.running


async def test_a_response_that_is_refused_after_it_began_is_an_error_and_not_stored() -> None:
    background = Background()
    background.run.begun(b'"queued"')
    background.run.exchange.fail(CapacityError("full"))
    await asyncio.sleep(0)
    assert received(background.wire.sent).status == 503
    assert background.stored() is None
    assert not background.running
