"""The endpoints of Anthropic's Messages API. A message is a chat in another form: this translates its body,
and all else is what chats do."""

from __future__ import annotations

from array import array

from kvasir_platform.gateway.anthropic.answers import TokensCount
from kvasir_platform.gateway.anthropic.decode import decode_count, decode_messages
from kvasir_platform.gateway.anthropic.message_format import MESSAGES_FORMAT
from kvasir_platform.gateway.anthropic.translation import chat_body, counted_chat
from kvasir_platform.gateway.catalog.models import EdgeModel
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.calls import chat_call
from kvasir_platform.gateway.openai.schema.chat import ChatBody
from kvasir_platform.gateway.openai.side_calls import TokenizeCall
from kvasir_platform.gateway.serving.context import GatewayContext
from kvasir_platform.gateway.serving.generate_api import GenerateApi, renders_in_thread
from kvasir_platform.gateway.serving.tokenize_api import TokenizeTextCall
from kvasir_platform.gateway.tenants.caller import Caller


class MessagesApi:
    """POST /v1/messages and /v1/messages/count_tokens."""

    def __init__(self, context: GatewayContext, generate: GenerateApi) -> None:
        self._context = context
        self._generate = generate

    def create(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/messages."""
        body = decode_messages(exchange.request.body)
        chat = chat_body(body, reasoning=self._model(caller, body.model).capabilities.reasoning)
        self._generate.start(caller, exchange, chat, MESSAGES_FORMAT)

    def count(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/messages/count_tokens: the tokens of the prompt that a message would have."""
        body = decode_count(exchange.request.body)
        model = self._model(caller, body.model)
        exchange.model = model.name
        chat = counted_chat(body, reasoning=model.capabilities.reasoning)

        def render() -> TokenizeCall:
            return _prompt(chat, model)

        caller.admit(
            0,
            TokenizeTextCall(
                self._context,
                caller,
                exchange,
                model,
                render=render,
                shown=_count,
                threaded=renders_in_thread(chat, model.control_in_chats, exchange.request.body),
            ),
        )

    def _model(self, caller: Caller, name: str) -> EdgeModel:
        caller.check_model(name)
        return self._context.models.find(name).model


def _prompt(chat: ChatBody, model: EdgeModel) -> TokenizeCall:
    """Return the prompt of a chat, checked as the chat is. Raise RequestError."""
    tokenizer = model.tokenizer
    call = chat_call(
        chat,
        tokenizer.template,
        tokenizer.vocabulary,
        model.capabilities,
        model.defaults,
        control=model.control_in_chats,
    )
    text = call.prompts[0]
    if not isinstance(text, str):
        raise AssertionError("a chat has a prompt that is no text")
    return TokenizeCall(text, call.add_special_tokens, False, call.media)


def _count(_call: TokenizeCall, tokens: array[int]) -> TokensCount:
    return TokensCount(len(tokens))
