"""Selects the one output constraint of a body from the several fields that may hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from kvasir.core.errors import RequestError
from kvasir.core.requests import Constraint, StructuredOutput
from kvasir_platform.gateway.grammars.checks import (
    judge_grammar,
    judge_regex,
    judge_schema,
    judge_tag,
    new_meter,
)
from kvasir_platform.gateway.grammars.nodes import Meter, TooCostlyError
from kvasir_platform.gateway.openai.schema.limits import (
    MAX_DEPTH,
    MAX_SCHEMA_BYTES,
    MAX_TAG_DEPTH,
    bad,
    check_depth,
    check_references,
    check_size,
    missing,
)
from kvasir_platform.gateway.openai.schema.sampling import SamplingFields
from kvasir_platform.gateway.openai.schema.structured import (
    GUIDED,
    RULES,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
    TextFormat,
)

T = TypeVar("T")


def structured(body: SamplingFields) -> tuple[StructuredOutput, str] | None:
    """Return the constraint of `body` and its field, None for none. Raise RequestError for two constraints,
    and for one that is too large, too deeply nested, too costly to match or invalid JSON."""
    found = list(_rules(body))
    if not found:
        return None
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise bad(f"{first} and {second} both constrain the output; send one.", second)
    (param, rule, value) = found[0]
    return _MAKERS[rule](value, param), param


def _rules(body: SamplingFields) -> Iterator[tuple[str, str, Any]]:
    """Yield each constraint that is set: its field, kind and value."""
    shape = body.response_format
    if shape is not None and not isinstance(shape, TextFormat):
        yield _of_format(shape)
    outputs = body.structured_outputs
    if outputs is not None:
        rules = [rule for rule in RULES if getattr(outputs, rule) not in (None, False)]
        if not rules:
            raise bad(
                f"structured_outputs sets no constraint; send one of {', '.join(RULES)}.",
                "structured_outputs",
            )
        for rule in rules:
            yield f"structured_outputs.{rule}", rule, getattr(outputs, rule)
    for name, rule in GUIDED.items():
        if (value := getattr(body, name)) is not None:
            yield name, rule, value


def _of_format(shape: JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat) -> tuple[str, str, Any]:
    if isinstance(shape, JsonObjectFormat):
        return "response_format", "json_object", True
    if isinstance(shape, JsonSchemaFormat):
        if shape.json_schema.schema is None:
            raise missing("response_format.json_schema.schema")
        return "response_format.json_schema.schema", "json", shape.json_schema.schema
    if shape.format is None and (shape.structures is None or shape.triggers is None):
        raise missing("response_format.format")
    return "response_format", "structural_tag", msgspec.to_builtins(shape)


def _json_object(value: object, param: str) -> StructuredOutput:
    return StructuredOutput(Constraint.JSON_OBJECT)


def _json_schema(value: str | dict[str, Any], param: str) -> StructuredOutput:
    return StructuredOutput(Constraint.JSON_SCHEMA, _json_text(value, param, MAX_DEPTH, judge_schema))


def _structural_tag(value: str | dict[str, Any], param: str) -> StructuredOutput:
    return StructuredOutput(Constraint.STRUCTURAL_TAG, _json_text(value, param, MAX_TAG_DEPTH, judge_tag))


def _regex(value: str, param: str) -> StructuredOutput:
    check_cost(judge_regex, value, new_meter(), param)
    return StructuredOutput(Constraint.REGEX, value)


def _grammar(value: str, param: str) -> StructuredOutput:
    check_size(value, MAX_SCHEMA_BYTES, param)
    check_cost(judge_grammar, value, new_meter(), param)
    return StructuredOutput(Constraint.GRAMMAR, value)


def _choice(value: list[str], param: str) -> StructuredOutput:
    text = msgspec.json.encode(value)
    check_size(text, MAX_SCHEMA_BYTES, param)
    return StructuredOutput(Constraint.CHOICE, text.decode())


def _json_text(
    value: str | dict[str, Any], param: str, levels: int, judge: Callable[[object, Meter], None]
) -> str:
    """Return compact JSON, so that equal schemas are equal keys in the engine's grammar cache."""
    if isinstance(value, str):
        check_size(value, MAX_SCHEMA_BYTES, param)
        value = _object(value, param)
    check_depth(value, param, levels)
    text = msgspec.json.encode(value)
    check_size(text, MAX_SCHEMA_BYTES, param)
    check_references(value, param)
    check_cost(judge, value, new_meter(), param)
    return text.decode()


def check_cost(judge: Callable[[T, Meter], None], value: T, meter: Meter, param: str) -> None:
    """Raise RequestError if `judge` finds `value` too costly to match."""
    try:
        judge(value, meter)
    except TooCostlyError as error:
        raise RequestError(
            f"{param} is too costly to match: {error}.", code="grammar_too_costly", param=param
        ) from None


def _object(text: str, param: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestError(f"{param}: {error}.", code="invalid_value", param=param) from None


_MAKERS: dict[str, Callable[[Any, str], StructuredOutput]] = {
    "json": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
