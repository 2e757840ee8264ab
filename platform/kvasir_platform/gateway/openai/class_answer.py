"""The response to a classify call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kvasir.core.errors import UpstreamError
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.embedding_answer import ListAnswer
from kvasir_platform.gateway.openai.schema.answers import EmbeddingUsage
from kvasir_platform.gateway.openai.schema.scoring import Classification, Classified
from kvasir_platform.gateway.openai.side_calls import EmbeddingCall


class ClassAnswer(ListAnswer):
    """The probabilities. `labels` names the numbers of the model's output. Raise UpstreamError if there are
    not as many as labels."""

    def __init__(
        self, exchange: Exchange, call: EmbeddingCall, labels: Sequence[str], inputs: int, created: int
    ) -> None:
        super().__init__(exchange, call, inputs, created)
        self._labels = labels

    def _shown(self, index: int, embedding: array[float]) -> Classified:
        if len(embedding) != len(self._labels):
            raise UpstreamError(
                f"a worker answered {len(embedding)} probabilities for {len(self._labels)} classes",
                code="protocol_error",
            )
        likeliest = max(range(len(embedding)), key=embedding.__getitem__)
        return Classified(index, self._labels[likeliest], list(embedding), len(embedding))

    def _body(self, data: list[Any], usage: EmbeddingUsage) -> Classification:
        return Classification(
            id=f"classify-{self._exchange.request_id}",
            object="list",
            created=self._created,
            model=self._call.model,
            data=data,
            usage=usage,
        )
