"""The response to a classify call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from kvasir.core.errors import KvasirError, UpstreamError
from kvasir.core.requests import Usage
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.answers import EmbeddingUsage
from kvasir_platform.gateway.openai.schema.scoring import Classification, Classified
from kvasir_platform.gateway.openai.side_calls import EmbeddingCall

_encode = msgspec.json.Encoder().encode


class ClassAnswer:
    """One response, sent after the probabilities of its last input have arrived. `labels` names the numbers
    of the model's output."""

    def __init__(
        self, exchange: Exchange, call: EmbeddingCall, labels: Sequence[str], inputs: int, created: int
    ) -> None:
        self._exchange = exchange
        self._call = call
        self._labels = labels
        self._created = created
        self._found: dict[int, Classified] = {}
        self._inputs = inputs

    def take(self, index: int, embedding: array[float]) -> None:
        """Add the probabilities of an input. Raise UpstreamError if there are not as many as labels."""
        if len(embedding) != len(self._labels):
            raise UpstreamError(
                f"a worker answered {len(embedding)} probabilities for {len(self._labels)} classes",
                code="protocol_error",
            )
        likeliest = max(range(len(embedding)), key=embedding.__getitem__)
        self._found[index] = Classified(index, self._labels[likeliest], list(embedding), len(embedding))

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send the response."""
        body = Classification(
            id=f"classify-{self._exchange.request_id}",
            object="list",
            created=self._created,
            model=self._call.model,
            data=[self._found[index] for index in range(self._inputs)],
            usage=EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens),
        )
        self._exchange.respond(200, _encode(body), headers=timing)

    def fail(self, error: KvasirError) -> None:
        """Send the error instead."""
        self._exchange.fail(error)
