"""Constraints on the output: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from kvasir_platform.gateway.openai.schema.limits import MAX_OPTIONS, MAX_REGEX, Hint, JsonObject, NotServed

Regex = Annotated[str, Meta(min_length=1, max_length=MAX_REGEX)]
Grammar = Annotated[str, Meta(min_length=1)]
Options = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=MAX_OPTIONS)
]


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True, frozen=True):
    """Any text: no constraint."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True, frozen=True):
    """Any JSON object."""


class NamedSchema(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A named JSON schema. It is always enforced, regardless of `strict`."""

    name: Hint
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True, frozen=True):
    """JSON output that follows a schema."""

    json_schema: NamedSchema


class TagStructure(Struct, forbid_unknown_fields=True, frozen=True):
    """JSON output between two texts."""

    begin: str
    end: str
    schema: JsonObject | None = None


class StructuralTagFormat(
    Struct,
    tag_field="type",
    tag="structural_tag",
    forbid_unknown_fields=True,
    frozen=True,
    omit_defaults=True,
):
    """xgrammar's structural tags: `format`, or the older `structures` with `triggers`."""

    format: JsonObject | None = None
    structures: Annotated[list[TagStructure], Meta(min_length=1, max_length=128)] | None = None
    triggers: Annotated[list[str], Meta(min_length=1, max_length=128)] | None = None


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """vLLM's `structured_outputs`: exactly one constraint. `json` is a schema, or its text."""

    json: JsonObject | str | None = None
    regex: Regex | None = None
    choice: Options | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None
    structural_tag: Annotated[str, Meta(min_length=1)] | None = None

    disable_additional_properties: NotServed = None
    disable_any_whitespace: NotServed = None
    whitespace_pattern: NotServed = None


#: The constraints of `structured_outputs`, and the older fields for some of them.
RULES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
GUIDED: dict[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
