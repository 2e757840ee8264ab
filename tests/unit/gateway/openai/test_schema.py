"""Bodies are parsed strictly: errors name the field, bounds hold, and fields without effect are accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities
from kvasir_platform.gateway.openai.calls import chat_call, completion_call
from kvasir_platform.gateway.openai.schema.decode import (
    decode_chat,
    decode_completion,
    decode_detokenize,
    decode_embedding,
    decode_tokenize,
)
from kvasir_platform.gateway.openai.side_calls import detokenize_ids, embedding_call
from kvasir_platform.gateway.prompt.chat_template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]
ALL = ModelCapabilities(embeds=True, tools=True, reasoning=True)
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}{{ documents }}", {})
VOCABULARY = 100


def nested(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(levels - 1):
        made = {"x": made}
    return made


def function(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def shape(kind: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


def json_schema(schema: Any) -> dict[str, Any]:
    return shape("json_schema", json_schema={"name": "x", "schema": schema})


def call(call_id: str = "c", **fields: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}


def chat(body: dict[str, Any]) -> None:
    whole = {"model": "m", "messages": USER, **body}
    chat_call(decode_chat(json.dumps(whole).encode()), TEMPLATE, VOCABULARY, ALL)


def text(body: dict[str, Any]) -> None:
    whole = {"model": "m", "prompt": "hi", **body}
    completion_call(decode_completion(json.dumps(whole).encode()), VOCABULARY, ALL)


def embedding(body: dict[str, Any]) -> None:
    whole = {"model": "m", "input": "hi", **body}
    embedding_call(decode_embedding(json.dumps(whole).encode()), VOCABULARY, ALL)


def messages(*told: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*USER, *told]}


def tools(*told: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"tools": list(told), **fields}


CHAT: list[tuple[dict[str, Any], str, str | None]] = [
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    (shape("json_schema"), "missing_parameter", "response_format.json_schema"),
    (shape("json_schema", json_schema={"name": "x"}), "missing_parameter",
     "response_format.json_schema.schema"),
    (json_schema([]), "invalid_type", "response_format.json_schema.schema"),
    (json_schema(nested(65)), "invalid_value", "response_format.json_schema.schema"),
    (json_schema({"description": "x" * 65536}), "invalid_value", "response_format.json_schema.schema"),
    (shape("structural_tag"), "missing_parameter", "response_format.format"),
    (shape("structural_tag", structures=[{"begin": "<", "end": ">"}]), "missing_parameter",
     "response_format.format"),
    ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_value", "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "invalid_value", "structured_outputs.json"),
    ({"structured_outputs": {"json": "[]"}}, "invalid_value", "structured_outputs.json"),
    ({"structured_outputs": {"json": "[" * 9000}}, "invalid_value", "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": json.dumps(nested(81))}}, "invalid_value",
     "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": ""}}, "invalid_value", "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 4097}}, "invalid_value", "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "invalid_value", "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"] * 1025}}, "invalid_value", "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a" * 4096] * 20}}, "invalid_value", "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "ä" * 40000}}, "invalid_value", "structured_outputs.grammar"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "unsupported_parameter",
     "structured_outputs.whitespace_pattern"),
    ({"guided_regex": "a", "guided_json": {}}, "invalid_value", "guided_regex"),
    ({"guided_choice": ["a"], **shape("json_object")}, "invalid_value", "guided_choice"),
    (tools({"type": "custom", "function": {"name": "f"}}), "invalid_value", "tools[0].type"),
    (tools({"type": "function"}), "missing_parameter", "tools[0].function"),
    (tools(function("two words")), "invalid_value", "tools[0].function.name"),
    (tools(function(""), ), "invalid_value", "tools[0].function.name"),
    (tools(function("f"), function("f")), "invalid_value", "tools[1].function.name"),
    (tools(function("f", parameters=nested(65))), "invalid_value", "tools[0].function.parameters"),
    (tools(function("f", parameters={"$defs": {"a": {"$ref": "file:///a"}}})), "invalid_value",
     "tools[0].function.parameters"),
    (json_schema({"items": [{"$ref": "https://a.example/b.json"}]}), "invalid_value",
     "response_format.json_schema.schema"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": {"url": "u"}}]}]},
     "invalid_value", "messages[0].content[0].image_url"),
    (messages({"role": "user", "content": [{"type": "image_url"}]}), "missing_parameter",
     "messages[1].content[0].image_url"),
    (messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}, "text": "x"}]}),
     "invalid_value", "messages[1].content[0]"),
    (messages({"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}),
     "invalid_value", "messages[1].content[0].type"),
    (tools(function("f", description="x" * 65536)), "invalid_value", "tools[0].function"),
    (tools(*(function(f"f{i}") for i in range(129))), "invalid_value", "tools"),
    (tools(function("f"), tool_choice="sometimes"), "invalid_value", "tool_choice"),
    (tools(function("f"), tool_choice=function("g")), "invalid_value", "tool_choice"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tool_choice": function("f")}, "invalid_value", "tool_choice"),
    (tools(function("f"), tool_choice="required", **shape("json_object")), "invalid_value",
     "response_format"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "invalid_value", "function_call"),
    ({"functions": [{"name": "f"}, {"name": "f"}]}, "invalid_value", "functions[1].name"),
    (tools(function("f"), functions=[{"name": "f"}]), "invalid_value", "functions"),
    (messages({"role": "assistant"}), "missing_parameter", "messages[1].content"),
    (messages({"role": "tool", "content": "x"}), "missing_parameter", "messages[1].tool_call_id"),
    (messages({"role": "tool", "tool_call_id": "c"}), "missing_parameter", "messages[1].content"),
    (messages({"role": "function", "content": "x"}), "missing_parameter", "messages[1].name"),
    (messages({"role": "user", "content": "x", "tool_calls": [call()]}), "invalid_value",
     "messages[1].tool_calls"),
    (messages({"role": "user", "content": "x", "reasoning": "y"}), "invalid_value", "messages[1].reasoning"),
    (messages({"role": "user", "content": "x", "tool_call_id": "c"}), "invalid_value",
     "messages[1].tool_call_id"),
    (messages({"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}), "missing_parameter",
     "messages[1].tool_calls[0].function"),
    (messages({"role": "assistant", "content": "", "tool_calls": [call()] * 129}), "invalid_value",
     "messages[1].tool_calls"),
    (messages({"role": "assistant", "tool_calls": [
        {"id": "c", "function": {"name": "f", "arguments": nested(65)}}]}), "invalid_value",
     "messages[1].tool_calls[0].function.arguments"),
    (messages({"role": "assistant", "content": "", "audio": {"id": "a"}}), "unsupported_parameter",
     "messages[1].audio"),
    (messages({"role": "assistant", "content": [{"type": "refusal"}]}), "missing_parameter",
     "messages[1].content[0].refusal"),
    ({"chat_template": "{{ 1 }}"}, "unsupported_parameter", "chat_template"),
    ({"chat_template_kwargs": {"x": nested(64)}}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template_kwargs": {str(i): 1 for i in range(33)}}, "invalid_value", "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "invalid_value",
     "continue_final_message"),
    ({"documents": [{"title": 1}]}, "invalid_type", "documents[0]"),
    ({"documents": [{}] * 257}, "invalid_value", "documents"),
    ({"reasoning_effort": "extreme"}, "invalid_value", "reasoning_effort"),
    ({"thinking_token_budget": -2}, "invalid_value", "thinking_token_budget"),
    ({"max_completion_tokens": 0}, "invalid_value", "max_completion_tokens"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"bad_words": [" "]}, "invalid_value", "bad_words[0]"),
    ({"bad_words": ["a"] * 65}, "invalid_value", "bad_words"),
    ({"allowed_token_ids": []}, "invalid_value", "allowed_token_ids"),
    ({"allowed_token_ids": [VOCABULARY]}, "invalid_value", "allowed_token_ids"),
    ({"truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "invalid_value", "truncation_side"),
    ({"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
    ({"stream_options": {}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "unsupported_parameter",
     "stream_options.include_obfuscation"),
    ({"metadata": {"k": "x" * 513}}, "invalid_value", "metadata"),
    ({"metadata": {str(i): "" for i in range(17)}}, "invalid_value", "metadata"),
    ({"store": True}, "unsupported_parameter", "store"),
    ({"service_tier": "flex"}, "unsupported_parameter", "service_tier"),
    ({"use_beam_search": True}, "unsupported_parameter", "use_beam_search"),
    ({"length_penalty": 0.5}, "unsupported_parameter", "length_penalty"),
    ({"best_of": 2}, "unsupported_parameter", "best_of"),
    ({"echo": True}, "unsupported_parameter", "echo"),
    ({"modalities": ["audio"]}, "unsupported_modality", "modalities"),
    ({"audio": {"voice": "x"}}, "unsupported_modality", "audio"),
    ({"web_search_options": {"x": 1}}, "unsupported_parameter", "web_search_options"),
    ({"priority": 2**63}, "invalid_value", "priority"),
]  # fmt: skip

TEXT: list[tuple[dict[str, Any], str, str | None]] = [
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"suffix": "x"}, "unsupported_parameter", "suffix"),
    ({"prompt_embeds": "x"}, "unsupported_parameter", "prompt_embeds"),
    ({"prompt": [[]]}, "invalid_value", "prompt[0]"),
    ({"echo": True, "max_tokens": 0, "min_tokens": 2}, "invalid_value", "min_tokens"),
    ({"tools": []}, "unknown_parameter", "tools"),
]

EMBEDDING: list[tuple[dict[str, Any], str, str | None]] = [
    ({"input": ""}, "invalid_value", "input"),
    ({"input": ["a", ""]}, "invalid_value", "input[1]"),
    ({"input": []}, "invalid_value", "input"),
    ({"input": ["a"] * 2049}, "invalid_value", "input"),
    ({"input": [VOCABULARY]}, "invalid_value", "input"),
    ({"input": [[1], [VOCABULARY]]}, "invalid_value", "input[1]"),
    ({"input": ["a", 1]}, "invalid_type", "input"),
    ({"encoding_format": "hex"}, "invalid_value", "encoding_format"),
    ({"dimensions": 0}, "invalid_value", "dimensions"),
    ({"truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
    ({"messages": USER}, "unsupported_parameter", "messages"),
]


@pytest.mark.parametrize(
    ("make", "body", "code", "param"),
    [(chat, *case) for case in CHAT]
    + [(text, *case) for case in TEXT]
    + [(embedding, *case) for case in EMBEDDING],
)
def test_what_cannot_be_served_is_named(
    make: Any, body: dict[str, Any], code: str, param: str | None
) -> None:
    with pytest.raises(RequestError) as caught:
        make(body)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        {name: value}
        for name, values in {
            "store": (None, False),
            "service_tier": ("auto", "default"),
            "metadata": ({}, {"k": "v"}),
            "modalities": (["text"], []),
            "response_format": ({"type": "text"}, None),
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "parallel_tool_calls": (False,),
            "function_call": ("none",),
            "use_beam_search": (False,),
            "length_penalty": (1, 1.0),
            "best_of": (1,),
            "prediction": ({"type": "content", "content": "x"},),
            "prompt_cache_retention": ("24h",),
            "verbosity": ("medium",),
            "stream_interval": (4,),
            "guided_decoding_backend": ("xgrammar",),
            "echo": (False,),
            "documents": ([],),
            "thinking_token_budget": (-1,),
        }.items()
        for value in values
    ],
)
def test_what_asks_for_nothing_passes(body: dict[str, Any]) -> None:
    chat(body)


def test_schemas_may_refer_to_themselves_and_name_a_field_like_a_reference() -> None:
    chat(json_schema({"$defs": {"a": {"type": "null"}}, "items": {"$ref": "#/$defs/a"}}))
    chat(json_schema({"properties": {"$ref": {"type": "string"}}}))


@pytest.mark.parametrize("levels", [1, 64])
def test_schemas_nest_as_deep_as_the_engine_takes_them(levels: int) -> None:
    chat(json_schema(nested(levels)))
    chat(tools(function("f", parameters=nested(levels))))


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{}", "missing_parameter", "prompt"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": ""}]}', "invalid_value", "messages"),
        (b'{"prompt": 1}', "invalid_type", "prompt"),
        (b'{"messages": [{"role": "user"}]}', "missing_parameter", "messages[0].content"),
        (b'{"prompt": "a", "n": 1}', "unknown_parameter", "n"),
    ],
)
def test_tokenize_takes_a_text_or_a_chat(body: bytes, code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode_tokenize(body)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_detokenize_knows_its_vocabulary() -> None:
    assert list(detokenize_ids(decode_detokenize(b'{"tokens": [0, 99]}'), VOCABULARY)) == [0, 99]
    with pytest.raises(RequestError) as caught:
        detokenize_ids(decode_detokenize(b'{"tokens": [100]}'), VOCABULARY)
    assert caught.value.param == "tokens"
