"""The form in which the Messages API answers."""

from __future__ import annotations

from collections.abc import Callable

from kvasir_platform.gateway.anthropic.streamed_message import StreamedMessage
from kvasir_platform.gateway.anthropic.whole_message import WholeMessage
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.answer import Answer, AnswerHead
from kvasir_platform.gateway.openai.answer_formats import AnswerFormat


class MessagesFormat:
    """POST /v1/messages. Its clients ask for more output than models of a smaller context have room for, and
    read from the `stop_reason` that the context was the limit."""

    prompt_param = "messages"
    fits_output = True

    def answer_id(self, request_id: str) -> str:
        return f"msg_{request_id}"

    def streamed(self, exchange: Exchange, head: AnswerHead, timing: Callable[[], bytes]) -> Answer:
        return StreamedMessage(exchange, head, timing)

    def whole(self, exchange: Exchange, head: AnswerHead) -> Answer:
        return WholeMessage(exchange, head)


MESSAGES_FORMAT: AnswerFormat = MessagesFormat()
