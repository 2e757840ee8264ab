"""Reranking and scores, as in vLLM: by an embedding model the cosine of the vectors of query and document, by
a cross-encoder its output for both."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from kvasir.core.errors import KvasirError, RequestError, UpstreamError
from kvasir.core.requests import Usage
from kvasir_platform.gateway.catalog.capabilities import check_embeds
from kvasir_platform.gateway.catalog.models import EdgeModel
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.calls import Truncation, prompts_of
from kvasir_platform.gateway.openai.schema.answers import EmbeddingUsage
from kvasir_platform.gateway.openai.schema.decode import decode_served
from kvasir_platform.gateway.openai.schema.limits import MAX_INPUTS, bad, missing, unsupported
from kvasir_platform.gateway.openai.schema.scoring import (
    ClassifyBody,
    Document,
    Documents,
    RerankBody,
    Reranked,
    RerankedDocument,
    RerankResult,
    Score,
    ScoreBody,
    Scores,
    ScoringFields,
)
from kvasir_platform.gateway.openai.side_calls import EmbeddingCall
from kvasir_platform.gateway.prompt.pairs import pair_texts

_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
_CLASSIFY = msgspec.json.Decoder(ClassifyBody)
_RERANK = msgspec.json.Decoder(RerankBody)
_SCORE = msgspec.json.Decoder(ScoreBody)
_Body = TypeVar("_Body", RerankBody, ScoreBody, ClassifyBody)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ScoringCall(EmbeddingCall):
    """Inputs of which the first `queries` are compared with those behind them: one with each, or each with
    its own; or, with 0 `queries`, inputs that are both texts. `names` are the fields of both. `top_n` is how
    many documents a ranking has at most, 0 for scores without one. `texts` are the documents that an answer
    shows, None for none."""

    queries: int
    names: tuple[str, str]
    top_n: int
    texts: tuple[str, ...] | None

    def param(self, index: int) -> str:
        """See EmbeddingCall."""
        if index < self.queries:
            return self.names[0] if self.queries == 1 else f"{self.names[0]}[{index}]"
        return f"{self.names[1]}[{index - self.queries}]"


def decode_rerank(body: bytes) -> RerankBody:
    """Decode and check a call to rerank. Raise RequestError with `param` and a code."""
    return _activated(decode_served(_RERANK, body))


def decode_score(body: bytes) -> ScoreBody:
    """Decode and check a call for scores. Raise RequestError with `param` and a code."""
    return _activated(decode_served(_SCORE, body))


def decode_classify(body: bytes) -> ClassifyBody:
    """Decode and check a classify request. Raise RequestError with `param` and a code."""
    return _activated(decode_served(_CLASSIFY, body))


def _activated(body: _Body) -> _Body:
    if body.use_activation is False:
        raise unsupported("use_activation")
    return body


def rerank_call(body: RerankBody, model: EdgeModel) -> ScoringCall:
    """Return the call for a body. Raise RequestError."""
    texts = _texts(body.documents)
    return _call(
        body,
        model,
        ([_text(body.query)], texts),
        ("query", "documents"),
        top_n=body.top_n or len(texts),
        shown=None if body.return_documents is False else tuple(texts),
    )


def score_call(body: ScoreBody, model: EdgeModel) -> ScoringCall:
    """Return the call for a body. Raise RequestError."""
    named = {name for pair in _PAIRS for name in pair if getattr(body, name) is not None}
    names = next((pair for pair in _PAIRS if named == set(pair)), None)
    if names is None:
        if not named:
            raise missing("text_1")
        known = ", ".join(" and ".join(pair) for pair in _PAIRS)
        raise bad(f"Send one of these pairs: {known}.", sorted(named)[0])
    first, second = (_texts(getattr(body, name)) for name in names)
    if len(first) not in (1, len(second)):
        raise bad(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}: send one, or as many.", names[0]
        )
    if len(first) + len(second) > MAX_INPUTS:
        raise bad(f"The lists have more than {MAX_INPUTS} texts together.", names[1])
    return _call(body, model, (first, second), names)


def _call(
    body: ScoringFields,
    model: EdgeModel,
    texts: tuple[Sequence[str], Sequence[str]],
    names: tuple[str, str],
    *,
    top_n: int = 0,
    shown: tuple[str, ...] | None = None,
) -> ScoringCall:
    classifier = model.classifier
    if classifier is None:
        check_embeds(model.capabilities, body.model)
    elif not classifier.classes.scores:
        raise RequestError(
            f"The model {body.model!r} computes {len(classifier.classes.labels)} classes, and no score of "
            "two texts; use /v1/classify.",
            code="unsupported_task",
            param="model",
        )
    for name, column in zip(names, texts, strict=True):
        if not all(column):
            raise bad("A text is empty.", name)
    limit = body.truncate_prompt_tokens
    if limit == 0:
        raise bad("truncate_prompt_tokens 0 would leave no text.", "truncate_prompt_tokens")
    inputs: Sequence[str | array[int]]
    if classifier is not None and classifier.pairs is None:
        inputs = pair_texts(texts, classifier.template, model.control_in_prompts)
        queries = 0
    else:
        inputs = prompts_of([*texts[0], *texts[1]], 0, names[1], MAX_INPUTS, model.control_in_prompts)
        queries = len(texts[0])
    return ScoringCall(
        model=body.model,
        inputs=tuple(inputs),
        base64=False,
        dimensions=None,
        # Those of a pair are put around both texts.
        add_special_tokens=classifier is None or not queries,
        truncation=None if limit is None else Truncation(limit, keep_start=True),
        priority=body.priority or 0,
        queries=queries,
        names=names,
        top_n=top_n,
        texts=shown,
    )


def _texts(documents: Documents) -> list[str]:
    return list(map(_text, documents)) if isinstance(documents, list) else [_text(documents)]


def _text(document: Document) -> str:
    return document if isinstance(document, str) else document.text


class PairAnswer:
    """One response, sent after the last score of a cross-encoder has arrived."""

    def __init__(self, exchange: Exchange, call: ScoringCall, inputs: int, created: int) -> None:
        self._exchange = exchange
        self._call = call
        self._created = created
        self._vectors: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = [np.empty(0, np.float32)] * inputs

    def take(self, index: int, embedding: array[float]) -> None:
        """Add the output for an input. Raise UpstreamError if it is not one number."""
        if len(embedding) != 1:
            raise UpstreamError(
                f"a worker answered {len(embedding)} numbers to two texts, and not one", code="protocol_error"
            )
        self._vectors[index] = np.frombuffer(embedding, dtype=np.float32)

    def scores(self) -> list[float]:
        """Return the score of each pair."""
        return [float(vector[0]) for vector in self._vectors]

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send the response."""
        call, scores = self._call, self.scores()
        used = EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens)
        name = self._exchange.request_id
        body: Reranked | Scores
        if call.top_n:
            order = sorted(range(len(scores)), key=lambda index: -scores[index])[: call.top_n]
            body = Reranked(f"rerank-{name}", call.model, used, [self._result(i, scores[i]) for i in order])
        else:
            data = [Score(index, "score", score) for index, score in enumerate(scores)]
            body = Scores(f"score-{name}", "list", self._created, call.model, data, used)
        self._exchange.respond(200, _encode(body), headers=timing)

    def fail(self, error: KvasirError) -> None:
        """Send the error instead."""
        self._exchange.fail(error)

    def _result(self, index: int, score: float) -> RerankResult:
        texts = self._call.texts
        return RerankResult(index, score, None if texts is None else RerankedDocument(texts[index]))


class CosineAnswer(PairAnswer):
    """One response, sent after the last vector of an embedding model has arrived."""

    def take(self, index: int, embedding: array[float]) -> None:
        """Add the vector of an input, with length 1."""
        vector = np.frombuffer(embedding, dtype=np.float32)
        norm = np.linalg.norm(vector)
        self._vectors[index] = vector / norm if norm > 0 else vector

    def scores(self) -> list[float]:
        """Return the cosine of each pair."""
        queries, documents = self._vectors[: self._call.queries], self._vectors[self._call.queries :]
        if len(queries) == 1:
            queries *= len(documents)
        return [float(np.dot(one, other)) for one, other in zip(queries, documents, strict=True)]
