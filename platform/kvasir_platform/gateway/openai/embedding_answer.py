"""The response to an embeddings call. Each vector is encoded on arrival: a call may have thousands, and
encoding all of them at the end would block the event loop."""

from __future__ import annotations

import base64
from array import array
from typing import cast

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


class EmbeddingAnswer:
    """One response, sent after its last vector has arrived."""

    def __init__(self, exchange: Exchange, call: EmbeddingCall, inputs: int, created: int) -> None:
        self._exchange = exchange
        self._call = call
        self._created = created
        self._data = [msgspec.Raw()] * inputs

    def take(self, index: int, embedding: array[float]) -> None:
        """Add the vector of an input. Raise RequestError if it has fewer dimensions than requested."""
        vector = cut(embedding, self._call.dimensions)
        shown: str | list[float]
        if self._call.base64:
            shown = base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
        else:
            shown = vector.tolist()
        self._data[index] = msgspec.Raw(_encode(Embedding("embedding", index, shown)))

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send the response."""
        body = Embeddings(
            id=f"embd-{self._exchange.request_id}",
            object="list",
            created=self._created,
            model=self._call.model,
            # Vectors are encoded on arrival; msgspec writes Raw unchanged.
            data=cast("list[Embedding]", self._data),
            usage=EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens),
        )
        self._exchange.respond(200, _encode(body), headers=timing)

    def fail(self, error: KvasirError) -> None:
        """Send the error instead."""
        self._exchange.fail(error)
