"""The response to an embeddings call, and what that to a classify call shares with it: a list with an object
for each input. Each is encoded on arrival: a call may have thousands, and encoding all of them at the end
would block the event loop."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from array import array
from typing import Any

import msgspec
import numpy as np

from kvasir.core.errors import KvasirError, RequestError
from kvasir.core.requests import Usage
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.answers import Embedding, Embeddings, EmbeddingUsage
from kvasir_platform.gateway.openai.side_calls import EmbeddingCall

_encode = msgspec.json.Encoder().encode


def cut(embedding: array[float], dimensions: int | None) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return a float32 vector cut to `dimensions` and normalized to length 1. Raise RequestError if it has
    fewer dimensions."""
    vector = np.frombuffer(embedding, dtype=np.float32)
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise RequestError(
            f"dimensions: the model's embeddings have {len(vector)} dimensions, fewer than {dimensions}.",
            code="invalid_value",
            param="dimensions",
        )
    shorter = vector[:dimensions]
    norm = np.linalg.norm(shorter)
    return shorter / norm if norm > 0 else shorter


class ListAnswer(ABC):
    """One response, sent after the vector of its last input has arrived."""

    def __init__(self, exchange: Exchange, call: EmbeddingCall, inputs: int, created: int) -> None:
        self._exchange = exchange
        self._call = call
        self._created = created
        self._data = [msgspec.Raw()] * inputs

    def take(self, index: int, embedding: array[float]) -> None:
        """Add the vector of an input. Raise KvasirError if it is not what was asked for."""
        self._data[index] = msgspec.Raw(_encode(self._shown(index, embedding)))

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send the response."""
        used = EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens)
        self._exchange.respond(200, _encode(self._body(self._data, used)), headers=timing)

    def fail(self, error: KvasirError) -> None:
        """Send the error instead."""
        self._exchange.fail(error)

    @abstractmethod
    def _shown(self, index: int, embedding: array[float]) -> msgspec.Struct:
        """Return the object of an input."""

    @abstractmethod
    def _body(self, data: list[Any], usage: EmbeddingUsage) -> msgspec.Struct:
        """Return the body. `data` are the objects in the order of the inputs, encoded: msgspec writes them
        unchanged."""


class EmbeddingAnswer(ListAnswer):
    """The vectors, as numbers or in base64. Raise RequestError for more dimensions than they have."""

    def _shown(self, index: int, embedding: array[float]) -> Embedding:
        vector = cut(embedding, self._call.dimensions)
        shown: str | list[float]
        if self._call.base64:
            shown = base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
        else:
            shown = vector.tolist()
        return Embedding("embedding", index, shown)

    def _body(self, data: list[Any], usage: EmbeddingUsage) -> Embeddings:
        return Embeddings(
            id=f"embd-{self._exchange.request_id}",
            object="list",
            created=self._created,
            model=self._call.model,
            data=data,
            usage=usage,
        )
