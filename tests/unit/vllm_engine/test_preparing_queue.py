"""Legs that wait for preparation do not block each other, and none is lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvasir.core.media.prompts import PromptMedia
from kvasir.core.requests import (
    Constraint,
    EngineRequest,
    Leg,
    OutputParsing,
    Sampling,
    StructuredOutput,
    token_ids,
)
from kvasir_workers.engines.vllm.output.preparing_queue import Busy, Preparing
from kvasir_workers.engines.vllm.output.stream import LegStream


@dataclass
class Ready:
    """The result of a preparer."""

    name: str
    parsers: tuple[Any, ...] = ()


@dataclass
class Preparer:
    """Returns what is in `known` at once. For the rest it waits for `gate` and raises its error in `faults`,
    if any."""

    known: set[str] = field(default_factory=set)
    faults: dict[str, Exception] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False

    def at_once(self, request: EngineRequest) -> Ready | None:
        return Ready(request.request_id) if request.request_id in self.known else None

    async def prepare(self, request: EngineRequest) -> Ready:
        await self.gate.wait()
        if request.request_id in self.faults:
            raise self.faults[request.request_id]
        return Ready(request.request_id)

    def close(self) -> None:
        self.closed = True


class Queue:
    """Both ends of a Preparing."""

    def __init__(self, preparer: Preparer) -> None:
        self.ready: list[str] = []
        self.failed: list[tuple[str, str, str]] = []
        self.preparing = Preparing(
            lambda stream: self.ready.append(stream.request.request_id),
            lambda stream, code, message: self.failed.append((stream.request.request_id, code, message)),
        )
        self.preparing.start(preparer, (ValueError,))

    def begin(self, name: str, *images: PromptMedia) -> LegStream:
        parsing = None if images else OutputParsing()
        stream = LegStream(EngineRequest(name, token_ids([1]), Sampling(), parsing=parsing, media=images))
        self.preparing.begin(stream)
        return stream


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_is_known_keeps_its_place_and_does_not_wait_for_what_is_not() -> None:
    preparer = Preparer(known={"a", "c"})
    queue = Queue(preparer)
    queue.begin("a")
    slow = queue.begin("b")
    queue.begin("c")
    assert queue.ready == ["a", "c"]
    preparer.gate.set()
    await turn()
    assert queue.ready == ["a", "c", "b"]
    assert slow.prepared == Ready("b")


async def test_what_cannot_be_prepared_fails_with_the_reason() -> None:
    preparer = Preparer(
        faults={
            "bad": ValueError("no such type"),
            "slow": TimeoutError(),
            "late": Busy("others first"),
            "odd": KeyError("tokenizer"),
        }
    )
    queue = Queue(preparer)
    for name in preparer.faults:
        queue.begin(name)
    preparer.gate.set()
    await turn()
    assert queue.ready == []
    assert queue.failed[0] == ("bad", "invalid_value", "no such type")
    assert queue.failed[1][:2] == ("slow", "invalid_value")
    assert queue.failed[2] == ("late", "worker_overloaded", "others first")
    assert queue.failed[3] == ("odd", "worker_failed", "KeyError: 'tokenizer'")


async def test_slow_images_are_not_called_slow_rules() -> None:
    preparer = Preparer(faults={"rule": TimeoutError(), "image": TimeoutError()})
    queue = Queue(preparer)
    queue.begin("rule")
    assert queue.begin("image", PromptMedia(0, 1, b"digest", b"data")).wants_preparing
    preparer.gate.set()
    await turn()
    assert [("schema" in message, "images" in message) for _, _, message in queue.failed] == [
        (True, False),
        (False, True),
    ]


async def test_a_leg_that_ended_meanwhile_is_forgotten() -> None:
    preparer = Preparer(faults={"bad": ValueError("late")})
    queue = Queue(preparer)
    for name in ("good", "bad"):
        queue.begin(name).abort()
    preparer.gate.set()
    await turn()
    assert (queue.ready, queue.failed) == ([], [])


async def test_stopping_forgets_all_that_wait() -> None:
    preparer = Preparer()
    queue = Queue(preparer)
    queue.begin("a")
    await queue.preparing.stop()
    preparer.gate.set()
    await turn()
    assert (queue.ready, queue.failed, preparer.closed) == ([], [], True)
    await queue.preparing.stop()


@pytest.mark.parametrize(
    ("leg", "parsing", "structured", "wants"),
    [
        (Leg.FULL, None, None, False),
        (Leg.FULL, OutputParsing(), None, True),
        (Leg.DECODE, None, StructuredOutput(Constraint.REGEX, "a"), True),
        (Leg.PREFILL, OutputParsing(), StructuredOutput(Constraint.REGEX, "a"), False),
    ],
)
def test_only_legs_that_generate_want_preparing(
    leg: Leg, parsing: OutputParsing | None, structured: StructuredOutput | None, wants: bool
) -> None:
    request = EngineRequest("r", token_ids([1]), Sampling(structured=structured), leg=leg, parsing=parsing)
    assert LegStream(request).wants_preparing is wants
