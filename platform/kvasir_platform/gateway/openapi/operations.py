"""The operations of the gateway: each path and method, with its body and its answer."""

from __future__ import annotations

from kvasir_platform.gateway.anthropic.answers import (
    MESSAGE_EVENTS,
    MessageAnswer,
    ModelInfo,
    ModelInfos,
    TokensCount,
)
from kvasir_platform.gateway.anthropic.endpoints import COUNT_TOKENS, MESSAGES
from kvasir_platform.gateway.anthropic.schema import CountTokensBody, MessagesBody
from kvasir_platform.gateway.openai.schema import answers
from kvasir_platform.gateway.openai.schema.adapters import LoadAdapterBody, UnloadAdapterBody
from kvasir_platform.gateway.openai.schema.chat import ChatBody
from kvasir_platform.gateway.openai.schema.costs import CostsAsked, CostsPage
from kvasir_platform.gateway.openai.schema.operation import RequestsPage, RolloutOrdered, RolloutsPage
from kvasir_platform.gateway.openai.schema.scoring import (
    Classification,
    ClassifyBody,
    RerankBody,
    Reranked,
    ScoreBody,
    Scores,
)
from kvasir_platform.gateway.openai.schema.texts import (
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from kvasir_platform.gateway.openapi.batch_operations import BATCH_OPERATIONS
from kvasir_platform.gateway.openapi.operation import Operation
from kvasir_platform.gateway.responses.body import ResponsesBody
from kvasir_platform.gateway.responses.objects import (
    InputItemsPage,
    ResponseDeleted,
    ResponseEvent,
    ResponseObject,
)

OPENAPI = "/openapi.json"
_RESPONSE_EVENTS = (
    "Each event is `event: ` and its type, then `data: ` and one JSON object. The last is "
    "`response.completed`, `response.incomplete` or, after an error in mid-stream, `response.failed`."
)
_MESSAGE_EVENTS = (
    "Each event is `event: ` and its type, then `data: ` and one JSON object. The last is `message_stop` or, "
    "after an error in mid-stream, `error`."
)

RERANK = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE = ("/v1/score", "/score")
CLASSIFY = ("/v1/classify", "/classify")
TOKENIZE, DETOKENIZE = ("/v1/tokenize", "/tokenize"), ("/v1/detokenize", "/detokenize")
"""Paths of one operation: clients of other servers use each of them."""


def _named(name: str, path: str) -> str:
    """Return a name that is unique among the paths of an operation."""
    return {"v1": name, "v2": f"{name}V2"}.get(path.split("/")[1], f"{name}Unversioned")


OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "post",
        "createChatCompletion",
        "Create a chat completion.",
        answers.ChatCompletion,
        ChatBody,
        (answers.ChatChunk,),
    ),
    Operation(
        "/v1/completions",
        "post",
        "createCompletion",
        "Create completions of one or several prompts.",
        answers.CompletionResponse,
        CompletionBody,
        (answers.CompletionResponse,),
    ),
    Operation(
        MESSAGES,
        "post",
        "createMessage",
        "Create a message, as in Anthropic's API.",
        MessageAnswer,
        MessagesBody,
        MESSAGE_EVENTS,
        events=_MESSAGE_EVENTS,
        anthropic=True,
    ),
    Operation(
        COUNT_TOKENS,
        "post",
        "countMessageTokens",
        "Count the tokens of a message's prompt, as in Anthropic's API.",
        TokensCount,
        CountTokensBody,
        anthropic=True,
    ),
    Operation(
        "/v1/responses",
        "post",
        "createResponse",
        "Create a response.",
        ResponseObject,
        ResponsesBody,
        (ResponseEvent,),
        events=_RESPONSE_EVENTS,
    ),
    Operation(
        "/v1/responses/{response_id}", "get", "retrieveResponse", "Show a stored response.", ResponseObject
    ),
    Operation(
        "/v1/responses/{response_id}", "delete", "deleteResponse", "Forget a response.", ResponseDeleted
    ),
    Operation(
        "/v1/responses/{response_id}/cancel",
        "post",
        "cancelResponse",
        "Cancel a background response.",
        ResponseObject,
    ),
    Operation(
        "/v1/responses/{response_id}/input_items",
        "get",
        "listInputItems",
        "List the items that a response was made from.",
        InputItemsPage,
        query=(
            ("after", {"type": "string"}, "Id of the last item of the page before."),
            ("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "Items of a page, 20 by default."),
            ("order", {"enum": ["asc", "desc"]}, "`desc` by default: the newest first."),
        ),
    ),
    Operation(
        "/v1/embeddings",
        "post",
        "createEmbedding",
        "Create embeddings.",
        answers.Embeddings,
        EmbeddingBody,
    ),
    *(
        Operation(path, "post", _named("rerank", path), "Order documents.", Reranked, RerankBody)
        for path in RERANK
    ),
    *(
        Operation(path, "post", _named("score", path), "Score pairs of texts.", Scores, ScoreBody)
        for path in SCORE
    ),
    *(
        Operation(
            path,
            "post",
            _named("classify", path),
            "Compute the probabilities of classes.",
            Classification,
            ClassifyBody,
        )
        for path in CLASSIFY
    ),
    *(
        Operation(
            path, "post", _named("tokenize", path), "Tokenize a text or a chat.", answers.Tokens, TokenizeBody
        )
        for path in TOKENIZE
    ),
    *(
        Operation(
            path, "post", _named("detokenize", path), "Convert ids to text.", answers.Text, DetokenizeBody
        )
        for path in DETOKENIZE
    ),
    Operation(
        "/v1/models",
        "get",
        "listModels",
        "List models and adapters.",
        answers.Models,
        anthropic_answer=ModelInfos,
    ),
    Operation(
        "/v1/models/{model}",
        "get",
        "retrieveModel",
        "Show a model or an adapter.",
        answers.Model,
        anthropic_answer=ModelInfo,
    ),
    Operation("/", "get", "about", "What this server is.", "text/html", key=False, tag="Operation"),
    Operation("/version", "get", "version", "The version.", answers.VersionResponse, tag="Operation"),
    *(
        Operation(path, method, name, "As /health/ready.", answers.HealthResponse, key=False, tag="Operation")
        for path, method, name in (
            ("/health", "get", "health"),
            ("/ping", "get", "ping"),
            ("/ping", "post", "pingByPost"),
        )
    ),
    Operation(
        "/health/live", "get", "live", "Liveness check.", answers.HealthResponse, key=False, tag="Operation"
    ),
    Operation(
        "/health/ready",
        "get",
        "ready",
        "Readiness check: whether a request can be served.",
        answers.HealthResponse,
        key=False,
        tag="Operation",
    ),
    Operation(
        "/status",
        "get",
        "status",
        "Show the deployment and its workers.",
        answers.StatusResponse,
        tag="Operation",
    ),
    Operation(
        "/metrics", "get", "metrics", "Metrics in the Prometheus text format.", "text/plain", tag="Operation"
    ),
    Operation(
        "/decisions",
        "get",
        "regret",
        "Sum the regret of routing decisions by cause.",
        answers.RegretPage,
        tag="Operation",
    ),
    Operation(
        "/decisions/{request_id}",
        "get",
        "explain",
        "Explain the routing decisions of a call.",
        answers.Decisions,
        tag="Operation",
    ),
    Operation(
        "/requests",
        "get",
        "requests",
        "List the requests that run, and the slowest and newest of those that ended.",
        RequestsPage,
        tag="Operation",
    ),
    Operation(
        "/costs",
        "post",
        "costs",
        "Show what tenants, keys and models cost.",
        CostsPage,
        CostsAsked,
        tag="Operation",
    ),
    Operation(
        "/recordings/{reader}",
        "post",
        "readRecording",
        "Read what was recorded of requests that ended; the first call begins the recording.",
        answers.RecordingPage,
        answers.RecordingRead,
        tag="Operation",
    ),
    Operation(
        "/rollouts",
        "get",
        "listRollouts",
        "List the rollouts of canaries.",
        RolloutsPage,
        tag="Operation",
    ),
    Operation(
        "/rollouts/{route}/{action}",
        "post",
        "orderRollout",
        "Start, pause, promote, abort or undo a rollout.",
        RolloutOrdered,
        tag="Operation",
    ),
    Operation(
        "/workers/{worker_id}/drain",
        "post",
        "drainWorker",
        "Take a worker out of service.",
        answers.Drained,
        answers.DrainRequest,
        status=202,
        tag="Operation",
        body_required=False,
    ),
    Operation(
        "/workers/{worker_id}/undrain",
        "post",
        "undrainWorker",
        "Put a worker back into service.",
        answers.Drained,
        answers.DrainRequest,
        status=202,
        tag="Operation",
        body_required=False,
    ),
    Operation(
        "/v1/load_lora_adapter",
        "post",
        "loadLoraAdapter",
        "Load a LoRA adapter, which is then served as a model.",
        answers.AdapterResult,
        LoadAdapterBody,
        tag="Operation",
    ),
    Operation(
        "/v1/unload_lora_adapter",
        "post",
        "unloadLoraAdapter",
        "Unload a LoRA adapter when the requests that use it have ended.",
        answers.AdapterResult,
        UnloadAdapterBody,
        tag="Operation",
    ),
    *BATCH_OPERATIONS,
    Operation(OPENAPI, "get", "openapi", "This document.", "application/json", key=False, tag="Operation"),
)
