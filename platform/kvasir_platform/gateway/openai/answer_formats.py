"""The form in which an endpoint answers.

Every endpoint that generates text takes one path: its body becomes a chat or completion body, and its answer
is filled with the same deltas. What differs is here: ids, the field that errors name, and the bytes of
streamed and whole answers. Errors before an answer have the form of the exchange (`ErrorFormat`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.answer import Answer, AnswerHead
from kvasir_platform.gateway.openai.streamed_answer import ChatShape, CompletionShape, StreamedAnswer
from kvasir_platform.gateway.openai.whole_answer import WholeAnswer


class AnswerFormat(Protocol):
    """One endpoint's form. A constant, or an object per call that holds what its answer repeats of the body.

    `prompt_param` is the field that errors name as the prompt. With `fits_output`, a `max_tokens` for which
    the context has no room is lowered to that room instead of refused, and the answer's head says so.
    """

    prompt_param: str
    fits_output: bool

    def answer_id(self, request_id: str) -> str:
        """Return the id of the answer to a request."""
        ...

    def streamed(self, exchange: Exchange, head: AnswerHead, timing: Callable[[], bytes]) -> Answer:
        """Return an answer that is sent as it is generated. `timing` returns the Server-Timing header line
        of its beginning."""
        ...

    def whole(self, exchange: Exchange, head: AnswerHead) -> Answer:
        """Return an answer that is sent when it is complete."""
        ...


class ChatFormat:
    """POST /v1/chat/completions."""

    prompt_param = "messages"
    fits_output = False

    def answer_id(self, request_id: str) -> str:
        return f"chatcmpl-{request_id}"

    def streamed(self, exchange: Exchange, head: AnswerHead, timing: Callable[[], bytes]) -> Answer:
        return StreamedAnswer(exchange, head, ChatShape(), timing)

    def whole(self, exchange: Exchange, head: AnswerHead) -> Answer:
        return WholeAnswer(exchange, head, chat=True)


class CompletionFormat:
    """POST /v1/completions."""

    prompt_param = "prompt"
    fits_output = False

    def answer_id(self, request_id: str) -> str:
        return f"cmpl-{request_id}"

    def streamed(self, exchange: Exchange, head: AnswerHead, timing: Callable[[], bytes]) -> Answer:
        return StreamedAnswer(exchange, head, CompletionShape(), timing)

    def whole(self, exchange: Exchange, head: AnswerHead) -> Answer:
        return WholeAnswer(exchange, head, chat=False)


CHAT: AnswerFormat = ChatFormat()
COMPLETION: AnswerFormat = CompletionFormat()
