"""Generates the OpenAPI document of the gateway from the types that decode the bodies.

Client generators and fuzzers rely on it. Bodies come from the structs of `schema`, errors from `reasons`.
Refused fields are listed under `x-not-served` only. Run this module to print the document as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from kvasir.telemetry.reasons import REASONS
from kvasir_platform.gateway.anthropic.errors import MessagesError, messages_error_type
from kvasir_platform.gateway.anthropic.schema import CountTokensBody, MessagesBody
from kvasir_platform.gateway.batches.schema import CreateBatchBody
from kvasir_platform.gateway.catalog.slo_classes import MAX_HINT, SESSION_HEADER, SLO_HEADER, TIMING_HEADER
from kvasir_platform.gateway.http.errors import ErrorDetail, ErrorResponse, error_type
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.chat import ChatBody
from kvasir_platform.gateway.openai.schema.decode import not_served
from kvasir_platform.gateway.openai.schema.sampling import StreamOptions
from kvasir_platform.gateway.openai.schema.scoring import ClassifyBody, RerankBody, ScoreBody
from kvasir_platform.gateway.openai.schema.structured import StructuredOutputs
from kvasir_platform.gateway.openai.schema.texts import CompletionBody, EmbeddingBody, TokenizeBody
from kvasir_platform.gateway.openapi.operation import Operation
from kvasir_platform.gateway.openapi.operations import OPERATIONS
from kvasir_platform.gateway.responses.body import (
    InputItem,
    InputPart,
    ReasoningOptions,
    ResponsesBody,
    ResponseTool,
    TextOptions,
)

Json = dict[str, Any]

_SCHEMAS = "#/components/schemas/"
_GENERATED_ON_WORKERS = frozenset(("config_error", "start_failed", "drain_timeout"))
"""Codes of the command line and of logs, which no response has."""
_TEXT = {"type": "string"}
_WHOLE = {"type": "integer", "minimum": 0}
_HINTS = ("RequestId", "TraceParent", "TraceState")
_STEERING = (*_HINTS, "SessionId", "SloClass", "ServerTimingWish")


def openapi_page(exchange: Exchange) -> None:
    """GET /openapi.json."""
    exchange.respond(200, _bytes())


def openapi_document() -> Json:
    """Return the whole document, OpenAPI 3.1."""
    schemas = _schemas()
    paths: Json = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kvasir",
            "version": "v1",
            "summary": "OpenAI's API with vLLM's additional fields, and Anthropic's Messages API.",
            "description": "docs/API.md tells what differs from these APIs, docs/errors.md what each error "
            "code means and what to do.",
        },
        "security": [{"key": []}, {}],
        "tags": [
            {"name": "API", "description": "Inference endpoints for clients."},
            {"name": "Operation", "description": "Endpoints for operators and their tools."},
        ],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "parameters": _parameters(),
            "headers": _headers(),
            "responses": {
                **{f"Error{status}": _error(status) for status in _statuses()},
                **{f"MessagesError{status}": _messages_error(status) for status in _statuses()},
            },
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "API key, if the deployment requires one.",
                },
                "anthropicKey": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-api-key",
                    "description": "The same key, where Anthropic's clients send it.",
                },
            },
        },
    }


@cache
def _bytes() -> bytes:
    return msgspec.json.encode(openapi_document())


_REFUSING = (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    TokenizeBody,
    StreamOptions,
    StructuredOutputs,
    ResponsesBody,
    InputPart,
    InputItem,
    ResponseTool,
    TextOptions,
    ReasoningOptions,
    MessagesBody,
    CountTokensBody,
    CreateBatchBody,
    ClassifyBody,
    RerankBody,
    ScoreBody,
)
"""Bodies, and parts of them, that declare fields which are refused by name."""


def _operation(operation: Operation) -> Json:
    shown: Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": [_ref("parameters", name) for name in _STEERING if operation.chunks or name in _HINTS],
    }
    for part in operation.path.split("/"):
        if part.startswith("{"):
            shown["parameters"].append({"name": part[1:-1], "in": "path", "required": True, "schema": _TEXT})
    for name, schema, description in operation.query:
        shown["parameters"].append(
            {"name": name, "in": "query", "description": description, "schema": schema}
        )
    if not operation.key:
        shown["security"] = []
    elif operation.anthropic or operation.anthropic_answer is not None:
        shown["security"] = [{"key": []}, {"anthropicKey": []}, {}]
    if operation.body is not None:
        shown["requestBody"] = {
            "required": operation.body_required,
            "content": {"application/json": {"schema": {"$ref": _SCHEMAS + operation.body.__name__}}},
        }
    if operation.form:
        fields = {name: {**_TEXT, "description": text} for name, text in operation.form}
        form = {"type": "object", "required": list(fields), "properties": fields}
        shown["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    errors = "MessagesError" if operation.anthropic else "Error"
    shown["responses"] = {
        str(operation.status): _good(operation),
        **{str(status): _ref("responses", f"{errors}{status}") for status in _statuses()},
    }
    return shown


def _good(operation: Operation) -> Json:
    headers = ["x-request-id", "traceparent", *(["request-id"] if operation.anthropic else [])]
    if operation.body is not None and operation.tag == "API":
        headers += ["server-timing", *_LIMIT_HEADERS, "x-kvasir-brownout"]
    content: Json = {}
    if isinstance(operation.answer, str):
        content[operation.answer] = {"schema": {"type": "object"} if "json" in operation.answer else _TEXT}
    else:
        answer = _any_of(operation.answer, operation.anthropic_answer)
        content["application/json"] = {"schema": answer}
    description = "Done."
    if operation.chunks:
        description = "The whole response, or server-sent events with `stream: true`."
        error = MessagesError.__name__ if operation.anthropic else "Error"
        names = [*(chunk.__name__ for chunk in operation.chunks), error]
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": operation.events,
            },
            "x-event": {"oneOf": [{"$ref": _SCHEMAS + name} for name in names]},
        }
    return {
        "description": description,
        "headers": {name: _ref("headers", name) for name in headers},
        "content": content,
    }


def _any_of(*answers: type[msgspec.Struct] | None) -> Json:
    shown = [{"$ref": _SCHEMAS + answer.__name__} for answer in answers if answer is not None]
    return shown[0] if len(shown) == 1 else {"anyOf": shown}


def _schemas() -> Json:
    kinds = [
        kind
        for operation in OPERATIONS
        for kind in (operation.body, operation.answer, operation.anthropic_answer, *operation.chunks)
        if isinstance(kind, type)
    ]
    kinds.append(MessagesError)
    _, found = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS + "{name}")
    for kind in _REFUSING:
        schema = found[kind.__name__]
        schema["x-not-served"] = sorted(not_served(kind))
    for schema in found.values():
        _without_refused(schema)
    found["Error"] = _error_schema()
    return dict(sorted(found.items()))


def _without_refused(schema: Json) -> None:
    """Remove fields that are declared only to be refused, and defaults that only mean "optional"."""
    properties = schema.get("properties", {})
    for name in [name for name, shape in properties.items() if set(shape) <= {"default"}]:
        del properties[name]
    for shape in properties.values():
        if shape.get("default", 0) is None:
            del shape["default"]


def _error_schema() -> Json:
    _, found = msgspec.json.schema_components([ErrorResponse])
    detail = found[ErrorDetail.__name__]
    fields = detail["properties"]
    fields["type"] = {"enum": sorted({error_type(status) for status in _statuses()})}
    fields["message"] = {**_TEXT, **fields["message"]}
    fields["param"] = {"type": ["string", "null"], "description": fields["param"]["description"]}
    fields["code"] = {"enum": sorted(code for status in _statuses() for code in _codes(status))}
    error = {"type": "object", "required": detail["required"], "properties": fields}
    return {
        "title": "Error",
        "type": "object",
        "required": found[ErrorResponse.__name__]["required"],
        "additionalProperties": found[ErrorResponse.__name__]["additionalProperties"],
        "properties": {"error": error},
    }


def _error(status: int) -> Json:
    lines = [f"- `{code}`: {REASONS[code].meaning} {REASONS[code].remedy}" for code in _codes(status)]
    names = ["x-request-id", *(["retry-after", "retry-after-ms"] if status in (429, 503) else [])]
    if status >= 500:
        names.append("x-should-retry")
    if status == 429:
        names += _LIMIT_HEADERS
    return {
        "description": "\n".join(lines),
        "headers": {name: _ref("headers", name) for name in names},
        "content": {
            "application/json": {
                "schema": {
                    "allOf": [
                        {"$ref": _SCHEMAS + "Error"},
                        {"properties": {"error": {"properties": {"code": {"enum": list(_codes(status))}}}}},
                    ]
                }
            }
        },
    }


def _messages_error(status: int) -> Json:
    """Return an error in Anthropic's form: that of OpenAI with another body and one more header."""
    shown = _error(status)
    shown["headers"]["request-id"] = _ref("headers", "request-id")
    detail = {
        "type": {"const": messages_error_type(status)},
        "details": {"properties": {"error_code": {"enum": list(_codes(status))}}},
    }
    shown["content"] = {
        "application/json": {
            "schema": {
                "allOf": [
                    {"$ref": _SCHEMAS + MessagesError.__name__},
                    {"properties": {"error": {"properties": detail}}},
                ]
            }
        }
    }
    return shown


def _statuses() -> Iterator[int]:
    """Return every status of an error, in order."""
    yield from sorted({reason.status for reason in REASONS.values() if reason.status} - {0})


def _codes(status: int) -> Iterator[str]:
    for code, reason in REASONS.items():
        if reason.status == status and code not in _GENERATED_ON_WORKERS:
            yield code


def _parameters() -> Json:
    def header(name: str, description: str, **schema: Any) -> Json:
        return {"name": name, "in": "header", "description": description, "schema": {**_TEXT, **schema}}

    return {
        "RequestId": header(
            "x-request-id",
            "Request id chosen by the client. If it does not match the pattern, the gateway generates one.",
            pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        ),
        "TraceParent": header("traceparent", "W3C trace context of the parent span."),
        "TraceState": header("tracestate", "W3C trace state, forwarded."),
        "SessionId": header(
            SESSION_HEADER,
            "Session of related requests, routed to the worker that caches their prefix.",
            maxLength=MAX_HINT,
        ),
        "SloClass": header(SLO_HEADER, "SLO class of the request, as configured in the deployment."),
        "ServerTimingWish": header(
            TIMING_HEADER, "`comment`: end a stream with its final Server-Timing as a comment."
        ),
    }


_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


def _headers() -> Json:
    def shown(description: str, schema: Json) -> Json:
        return {"description": description, "schema": schema}

    limits: dict[str, tuple[str, Json]] = {
        "limit": ("Limit per minute of the tenant.", _WHOLE),
        "remaining": ("Remaining quota.", _WHOLE),
        "reset": ("Time until the quota is full again, as in `1m30s`.", _TEXT),
    }
    return {
        "x-request-id": shown("Id of the request in logs, traces and /decisions.", _TEXT),
        "request-id": shown("The same id, where Anthropic's clients read it.", _TEXT),
        "traceparent": shown("The gateway's span of the request, if it is traced.", _TEXT),
        "retry-after": shown("Seconds to wait before a retry.", {"type": "integer", "minimum": 1}),
        "retry-after-ms": shown("The same in milliseconds.", {"type": "integer", "minimum": 1}),
        "x-should-retry": shown("`false` if a retry would fail again or add to an overload.", _TEXT),
        "x-kvasir-brownout": shown("Brown-out level and its actions, as in `1; cap_max_tokens=256`.", _TEXT),
        "server-timing": shown("Time per phase in milliseconds, as known when the header is sent.", _TEXT),
        **{name: shown(*limits[name.split("-")[2]]) for name in _LIMIT_HEADERS},
    }


def _ref(kind: str, name: str) -> Json:
    return {"$ref": f"#/components/{kind}/{name}"}


def document_text() -> str:
    """Return the document as docs/openapi.json has it."""
    return json.dumps(openapi_document(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document_text())
