"""The answer to a call for embeddings. Each vector is encoded when it comes: a call may have thousands, and
encoding all of them at the end would hold up every stream of this process."""

from __future__ import annotations

import base64
from array import array
from typing import cast

import msgspec
import numpy as np

from kvasir.core.errors import KvasirError, RequestError
from kvasir.core.requests import Usage
from kvasir_platform.gateway.http.errors import error_headers, error_status
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.answers import Embedding, Embeddings, EmbeddingUsage
from kvasir_platform.gateway.openai.side_calls import EmbeddingCall

_encode = msgspec.json.Encoder().encode


def cut(embedding: array[float], dimensions: int | None) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """A vector of float32, cut to `dimensions` and of length 1 again. Raises RequestError where it has not as
    many."""
    vector = np.frombuffer(embedding, dtype=np.float32)
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise RequestError(
            f"dimensions: the model's embeddings have {len(vector)}, and {dimensions} were asked for.",
            code="invalid_value",
            param="dimensions",
        )
    shorter = vector[:dimensions]
    norm = np.linalg.norm(shorter)
    return shorter / norm if norm > 0 else shorter


class EmbeddingAnswer:
    """One answer, sent when its last vector has come."""

    def __init__(self, exchange: Exchange, call: EmbeddingCall, inputs: int, created: int) -> None:
        self._exchange = exchange
        self._call = call
        self._created = created
        self._data = [msgspec.Raw()] * inputs

    def take(self, index: int, embedding: array[float]) -> None:
        """The vector of an input has come. Raises RequestError where it is shorter than was asked for."""
        vector = cut(embedding, self._call.dimensions)
        shown: str | list[float]
        if self._call.base64:
            shown = base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
        else:
            shown = vector.tolist()
        self._data[index] = msgspec.Raw(_encode(Embedding("embedding", index, shown)))

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send the answer."""
        body = Embeddings(
            id=f"embd-{self._exchange.request_id}",
            object="list",
            created=self._created,
            model=self._call.model,
            # Encoded when they came; msgspec writes Raw as it is.
            data=cast("list[Embedding]", self._data),
            usage=EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens),
        )
        self._exchange.respond(200, _encode(body), headers=timing)

    def fail(self, error: KvasirError) -> None:
        """Send the error instead."""
        self._exchange.fail(error_status(error), error, error_headers(error))
