"""POST /tokenize and /detokenize, and what every endpoint that counts tokens does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvasir_platform.gateway.catalog.models import EdgeModel
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.answers import Text, Tokens
from kvasir_platform.gateway.openai.schema.decode import decode_detokenize, decode_tokenize
from kvasir_platform.gateway.openai.schema.media_parts import with_media
from kvasir_platform.gateway.openai.side_calls import TokenizeCall, detokenize_ids, tokenize_call
from kvasir_platform.gateway.serving.context import GatewayContext
from kvasir_platform.gateway.serving.generate_api import renders_in_thread
from kvasir_platform.gateway.tenants.caller import Caller, Charge


class TextApi:
    """Both endpoints, in vLLM's format. They need no worker: the edge uses the same tokenizer."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    def tokenize(self, caller: Caller, exchange: Exchange) -> None:
        """POST /tokenize: the ids of a text, or of a chat as the model's template shows it."""
        body = decode_tokenize(exchange.request.body)
        model = self._model(caller, exchange, body.model)
        in_chats = model.control_in_chats
        render = partial(
            tokenize_call,
            body,
            model.name,
            model.tokenizer.template,
            model.capabilities,
            (model.control_in_prompts, in_chats),
        )

        def shown(call: TokenizeCall, tokens: array[int]) -> Tokens:
            strings = model.tokenizer.names(tokens) if call.show_strings else None
            return Tokens(len(tokens), model.context, tokens.tolist(), strings)

        threaded = renders_in_thread(body, in_chats, exchange.request.body)
        caller.admit(
            0,
            TokenizeTextCall(
                self._context, caller, exchange, model, render=render, shown=shown, threaded=threaded
            ),
        )

    def detokenize(self, caller: Caller, exchange: Exchange) -> None:
        """POST /detokenize: the text of ids, special tokens and all."""
        body = decode_detokenize(exchange.request.body)
        model = self._model(caller, exchange, body.model)
        ids = detokenize_ids(body, model.tokenizer.vocabulary)
        caller.admit(0, DetokenizeCall(self._context, caller, exchange, model, ids=ids))

    def _model(self, caller: Caller, exchange: Exchange, name: str | None) -> EdgeModel:
        models = self._context.models
        caller.check_model(models.first.name if name is None else name)
        model = models.find(name).model
        exchange.model = model.name
        return model


class _TextCall(ABC):
    """A call that is charged as one request and no tokens. See ChargeReceiver and EncodingReceiver."""

    __slots__ = ("_caller", "_errors", "_exchange", "_model")

    def __init__(self, context: GatewayContext, caller: Caller, exchange: Exchange, model: EdgeModel) -> None:
        self._errors = context.errors
        self._caller = caller
        self._exchange = exchange
        self._model = model

    def admitted(self, charge: Charge) -> None:
        """Continue after the tenant's limits admitted the call."""
        charge.settle(0, 0)
        self._exchange.lines += charge.header_lines
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - it is this call's answer, not the rate limiter's
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Respond with an error."""
        self._errors.answer(self._exchange, error)

    @abstractmethod
    def _work(self) -> None:
        """Start the tokenizer, which calls back with the result."""

    def _respond(self, value: msgspec.Struct) -> None:
        self._exchange.respond(200, msgspec.json.encode(value))


class TokenizeTextCall(_TextCall):
    """One call that tokenizes the text which `render` makes, in a thread if `threaded`, and answers with what
    `shown` makes of its ids."""

    __slots__ = ("_call", "_render", "_shown", "_threaded")

    def __init__(
        self,
        context: GatewayContext,
        caller: Caller,
        exchange: Exchange,
        model: EdgeModel,
        *,
        render: Callable[[], TokenizeCall],
        shown: Callable[[TokenizeCall, array[int]], msgspec.Struct],
        threaded: bool,
    ) -> None:
        super().__init__(context, caller, exchange, model)
        self._render = render
        self._shown = shown
        self._threaded = threaded
        self._call: TokenizeCall

    def encoded(self, ids: list[array[int]]) -> None:
        """Respond with what is shown of the token ids."""
        tokens, media, inputs = ids[0], self._call.media, self._model.capabilities.media
        if media and inputs is not None:
            tokens, _ = with_media(tokens, media, inputs)
        self._respond(self._shown(self._call, tokens))

    def _work(self) -> None:
        if self._threaded:
            self._model.tokenizers.later(self._render, self._rendered, self.failed)
        else:
            self._rendered(self._render())

    def _rendered(self, call: TokenizeCall) -> None:
        self._call = call
        self._model.tokenizers.encode(
            [call.text],
            self,
            add_special_tokens=call.add_special_tokens,
            salt=self._caller.salt(""),
        )


class DetokenizeCall(_TextCall):
    """One call to /detokenize."""

    __slots__ = ("_ids",)

    def __init__(
        self,
        context: GatewayContext,
        caller: Caller,
        exchange: Exchange,
        model: EdgeModel,
        *,
        ids: Sequence[int],
    ) -> None:
        super().__init__(context, caller, exchange, model)
        self._ids = ids

    def decoded(self, text: str) -> None:
        """Respond with the text."""
        self._respond(Text(text))

    def _work(self) -> None:
        self._model.tokenizers.decode(self._ids, self)
