"""The committed OpenAPI document is up to date, consistent, and agrees with the code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from kvasir.telemetry.reasons import REASONS
from kvasir_platform.gateway.openai.schema.chat import ChatBody
from kvasir_platform.gateway.openai.schema.decode import not_served
from kvasir_platform.gateway.openai.schema.texts import (
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from kvasir_platform.gateway.openapi.document import document_text, openapi_document
from kvasir_platform.gateway.responses.body import ResponsesBody

ROOT = Path(__file__).parents[4]
BODIES = (ChatBody, CompletionBody, EmbeddingBody, TokenizeBody, DetokenizeBody, ResponsesBody)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return openapi_document()


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "$ref":
                yield each
            else:
                yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_the_committed_document_is_the_one_that_is_made() -> None:
    committed = (ROOT / "docs" / "openapi.json").read_text(encoding="utf-8")
    assert committed == document_text(), "run `make pages`"


def test_every_reference_is_there(document: dict[str, Any]) -> None:
    found = set(references(document))
    assert found
    for reference in found:
        at: Any = document
        for part in reference.removeprefix("#/").split("/"):
            at = at[part]


def test_every_schema_is_one(document: dict[str, Any]) -> None:
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_operation_has_a_name_of_its_own(document: dict[str, Any]) -> None:
    names = [each["operationId"] for path in document["paths"].values() for each in path.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("body", BODIES, ids=lambda kind: kind.__name__)
def test_a_body_has_the_fields_that_are_served_and_no_others(document: dict[str, Any], body: Any) -> None:
    schema = document["components"]["schemas"][body.__name__]
    refused = set(not_served(body))
    assert set(schema["properties"]) == set(body.__struct_fields__) - refused
    assert schema["additionalProperties"] is False
    assert set(schema.get("x-not-served", ())) == refused


def test_every_code_that_an_answer_carries_is_told_at_its_status(document: dict[str, Any]) -> None:
    responses = document["components"]["responses"]
    told = {
        (int(name.removeprefix("Error")), code)
        for name, response in responses.items()
        if name.startswith("Error")
        for code in response["content"]["application/json"]["schema"]["allOf"][1]["properties"]["error"][
            "properties"
        ]["code"]["enum"]
    }
    answered = {(reason.status, code) for code, reason in REASONS.items() if reason.status}
    logged = {"config_error", "start_failed", "drain_timeout"}
    assert {each for each in answered if each[1] not in logged} == told
    for path in document["paths"].values():
        for operation in path.values():
            assert {f"{status}" for status, _ in told} <= set(operation["responses"])


@pytest.mark.parametrize(
    ("name", "body", "fits"),
    [
        ("ChatBody", {"model": "m", "messages": [{"role": "user", "content": "x"}]}, True),
        ("ChatBody", {"model": "m", "messages": []}, False),
        ("ChatBody", {"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 0}, False),
        ("ChatBody", {"model": "m", "messages": [{"role": "user", "content": "x"}], "suffix": "x"}, False),
        (
            "ChatBody",
            {
                "model": "m",
                "messages": [{"role": "user", "content": "x"}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            True,
        ),
        ("CompletionBody", {"model": "m", "prompt": [[1, 2], [3]], "max_tokens": 0, "echo": True}, True),
        ("CompletionBody", {"model": "m", "prompt": [-1]}, False),
        ("EmbeddingBody", {"model": "m", "input": ["a"], "encoding_format": "base64"}, True),
        ("EmbeddingBody", {"model": "m", "input": ["a"], "encoding_format": "hex"}, False),
        ("DetokenizeBody", {"tokens": [1]}, True),
    ],
)
def test_bodies_fit_the_document_as_they_fit_the_code(
    document: dict[str, Any], name: str, body: dict[str, Any], fits: bool
) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) is fits
    kind = {each.__name__: each for each in BODIES}[name]
    try:
        msgspec.json.decode(json.dumps(body), type=kind)
    except msgspec.ValidationError:
        assert not fits
    else:
        assert fits
