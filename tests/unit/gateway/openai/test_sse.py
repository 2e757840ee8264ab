"""A streamed response is well-formed HTTP, whatever the first delta."""

from __future__ import annotations

import pytest
from tests.kit.gateway.api_answers import RecordingWire, exchange_on

from kvasir.core.requests import Delta, FinishReason, Usage
from kvasir_platform.gateway.openai.answer import AnswerHead
from kvasir_platform.gateway.openai.streamed_answer import ChatShape, CompletionShape, StreamedAnswer


def answer(shape: ChatShape | CompletionShape, choices: int = 1) -> tuple[StreamedAnswer, RecordingWire]:
    wire = RecordingWire()
    head = AnswerHead(id="a", created=1, model="m", choices=choices)
    return StreamedAnswer(exchange_on(wire), head, shape, lambda: b""), wire


@pytest.mark.parametrize("shape", [ChatShape(), CompletionShape()])
def test_the_headers_come_first_when_the_first_token_has_no_text(shape: ChatShape | CompletionShape) -> None:
    streamed, wire = answer(shape)
    streamed.delta(0, Delta("r", 0, (1,), ""))
    streamed.delta(0, Delta("r", 1, (7,), " word"))
    streamed.delta(0, Delta("r", 2, (8,), " end", finish=FinishReason.LENGTH))
    streamed.finish(Usage(), b"")
    assert wire.sent.startswith(b"HTTP/1.1 200 ")
    assert wire.sent.count(b"HTTP/1.1") == 1
    assert wire.sent.index(b" word") < wire.sent.index(b" end") < wire.sent.index(b"[DONE]")
    assert wire.sent.endswith(b"0\r\n\r\n")


def test_the_headers_come_first_when_another_choice_has_the_first_text() -> None:
    streamed, wire = answer(CompletionShape(), choices=2)
    streamed.delta(0, Delta("r", 0, (1,), ""))
    streamed.delta(1, Delta("r", 0, (7,), " word", index=1))
    streamed.delta(0, Delta("r", 1, (8,), " other"))
    assert wire.sent.startswith(b"HTTP/1.1 200 ")
    assert wire.sent.count(b"HTTP/1.1") == 1


def test_an_answer_without_any_text_is_one_too() -> None:
    streamed, wire = answer(CompletionShape())
    streamed.delta(0, Delta("r", 0, (1,), ""))
    streamed.finish(Usage(), b"")
    assert wire.sent.startswith(b"HTTP/1.1 200 ")
    assert wire.sent.endswith(b"0\r\n\r\n")
