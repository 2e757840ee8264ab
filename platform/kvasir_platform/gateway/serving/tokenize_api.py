"""POST /tokenize and /detokenize: what the models' tokenizers make of a text, for clients that count."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from kvasir_platform.gateway.catalog.models import EdgeModel, ModelTable
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.decode import decode_detokenize, decode_tokenize
from kvasir_platform.gateway.openai.side_calls import detokenize_ids, tokenize_call
from kvasir_platform.gateway.serving.context import Guard, raised
from kvasir_platform.gateway.tenants.caller import Caller, Charge


class TextApi:
    """Both endpoints, in vLLM's shapes. No worker is asked: the edge's tokens are the workers' own."""

    def __init__(self, models: ModelTable, guard: Guard) -> None:
        self._models = models
        self._guard = guard

    def tokenize(self, caller: Caller, exchange: Exchange) -> None:
        """POST /tokenize: the ids of a text, or of a chat as the model's template shows it."""
        body = decode_tokenize(exchange.request.body)
        model = self._model(caller, exchange, body.model)
        call = tokenize_call(body, model.name, model.tokenizer.template, model.capabilities)
        strings = call.show_strings

        def encode() -> None:
            model.tokenizers.encode(
                [call.text],
                add_special_tokens=call.add_special_tokens,
                salt=caller.salt(""),
                then=lambda ids: self._guard(exchange, lambda: _answer_ids(exchange, model, ids[0], strings)),
                failed=lambda error: self._guard(exchange, lambda: raised(error)),
            )

        self._charge(caller, exchange, encode)

    def detokenize(self, caller: Caller, exchange: Exchange) -> None:
        """POST /detokenize: the text of ids, special tokens and all."""
        body = decode_detokenize(exchange.request.body)
        model = self._model(caller, exchange, body.model)
        ids = detokenize_ids(body, model.tokenizer.vocabulary)

        def decode() -> None:
            model.tokenizers.decode(
                ids,
                then=lambda text: self._guard(exchange, lambda: _json(exchange, {"prompt": text})),
                failed=lambda error: self._guard(exchange, lambda: raised(error)),
            )

        self._charge(caller, exchange, decode)

    def _charge(self, caller: Caller, exchange: Exchange, work: Callable[[], None]) -> None:
        """Do what costs the tenant a request and no tokens."""

        def admitted(charge: Charge) -> None:
            charge.settle(0, 0)
            exchange.lines += charge.header_lines
            self._guard(exchange, work)

        caller.admit(0, then=admitted, failed=lambda error: self._guard(exchange, lambda: raised(error)))

    def _model(self, caller: Caller, exchange: Exchange, name: str | None) -> EdgeModel:
        caller.check_model(self._models.first.name if name is None else name)
        model = self._models.find(name).model
        exchange.model = model.name
        return model


def _answer_ids(exchange: Exchange, model: EdgeModel, ids: array[int], strings: bool) -> None:
    body = {"count": len(ids), "max_model_len": model.context, "tokens": ids.tolist()}
    _json(exchange, body | ({"token_strs": model.tokenizer.names(ids)} if strings else {}))


def _json(exchange: Exchange, value: dict[str, Any]) -> None:
    exchange.respond(200, msgspec.json.encode(value))
