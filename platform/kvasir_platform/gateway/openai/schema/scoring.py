"""Bodies and answers of `/v1/rerank`, `/v1/score` and `/v1/classify`, in the formats of Jina, Cohere and
vLLM."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvasir_platform.gateway.openai.schema.answers import EmbeddingUsage
from kvasir_platform.gateway.openai.schema.limits import (
    MAX_INPUTS,
    Hint,
    Long,
    ModelName,
    NotServed,
    TokenId,
)

Truncated = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]


class TextDocument(Struct, forbid_unknown_fields=True, frozen=True):
    """A document as an object."""

    text: str


Document = str | TextDocument
Documents = Document | Annotated[list[Document], Meta(min_length=1, max_length=MAX_INPUTS)]


class ScoringFields(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """What both bodies have."""

    model: ModelName
    truncate_prompt_tokens: Truncated | None = None
    priority: Long | None = None
    user: Hint | None = None
    #: Accepted if true: scores are not returned without their activation.
    use_activation: bool | None = None

    chat_template_kwargs: NotServed = None
    instruction: NotServed = None
    max_tokens_per_doc: NotServed = None
    max_tokens_per_query: NotServed = None
    mm_processor_kwargs: NotServed = None
    request_id: NotServed = None


class RerankBody(ScoringFields, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/rerank: orders `documents` by their relevance to `query`, and returns the first `top_n`, 0 for
    all."""

    query: Document
    documents: Annotated[list[Document], Meta(min_length=1, max_length=MAX_INPUTS - 1)]
    top_n: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    return_documents: bool | None = None


class ScoreBody(ScoringFields, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/score: the relevance of each text of one list to one text, or of pairs of two lists of the
    same length. The lists have one of four pairs of names."""

    text_1: Documents | None = None
    text_2: Documents | None = None
    queries: Documents | None = None
    documents: Documents | None = None
    items: Documents | None = None
    data_1: Documents | None = None
    data_2: Documents | None = None


_Ids = Annotated[list[TokenId], Meta(min_length=1)]


class ClassifyBody(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/classify: the probabilities of classes for each text of `input`."""

    model: ModelName
    input: str | Annotated[list[str | TokenId | _Ids], Meta(min_length=1)]
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncated | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Long | None = None
    user: Hint | None = None
    #: Accepted if true: probabilities are not returned without their activation.
    use_activation: bool | None = None

    messages: NotServed = None
    request_id: NotServed = None


class RerankedDocument(Struct, omit_defaults=True):
    """A document of a result."""

    text: str


class RerankResult(Struct, omit_defaults=True):
    """A document by its place in the call."""

    index: int
    relevance_score: float
    document: RerankedDocument | None = None


class Reranked(Struct):
    """Documents, the most relevant first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class Score(Struct):
    """The score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class Scores(Struct):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class Classified(Struct):
    """The class of an input: the likeliest, and the probabilities of all in the order of the model's output,
    as `id2label` of its config.json names them. A model with one output has one number between 0 and 1."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classification(Struct):
    """Classes in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classified]
    usage: EmbeddingUsage
