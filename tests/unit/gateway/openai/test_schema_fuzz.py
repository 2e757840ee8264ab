"""Any input is a call or a refusal with a known code, and never an internal error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.core.errors import RequestError
from kvasir.telemetry.reasons import REASONS
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities
from kvasir_platform.gateway.openai.calls import chat_call, completion_call, fit_context
from kvasir_platform.gateway.openai.schema.chat import ChatBody, Message
from kvasir_platform.gateway.openai.schema.decode import (
    decode_chat,
    decode_completion,
    decode_detokenize,
    decode_embedding,
    decode_tokenize,
)
from kvasir_platform.gateway.openai.schema.texts import (
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from kvasir_platform.gateway.openai.side_calls import detokenize_ids, embedding_call, tokenize_call
from kvasir_platform.gateway.prompt.chat_template import ChatTemplate

ALL = ModelCapabilities(embeds=True, tools=True, reasoning=True, client_templates=True)
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ documents }}", {}
)
VOCABULARY = 100

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([2**31, -(2**63), 2**64, 0.5, -1.0])
    | st.sampled_from(["", "auto", "function", "text", "json_object", "user", "assistant", "tool", "{}", "["])
    | st.text(max_size=6)
)
keys = st.sampled_from(
    [
        "type",
        "function",
        "name",
        "parameters",
        "json_schema",
        "schema",
        "role",
        "content",
        "text",
        "id",
        "arguments",
    ]
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "function", "developer"])},
    optional={name: values for name in Message.__struct_fields__ if name != "role"},
)


def bodies(kind: type[msgspec.Struct], **known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies with a few of the fields of `kind`, of any value, and those in `known`."""
    names = [name for name in kind.__struct_fields__ if name not in known]
    few = st.dictionaries(st.sampled_from(names), values, max_size=4)
    return st.builds(lambda rest, sure: {**rest, **sure}, few, st.fixed_dictionaries(known))


def refusal(make: Callable[[bytes], None], body: bytes) -> RequestError | None:
    try:
        make(body)
    except RequestError as error:
        return error
    return None


def holds(make: Callable[[bytes], None], body: dict[str, Any]) -> None:
    error = refusal(make, msgspec.json.encode(body))
    assert error is None or (error.code in REASONS and error.status == 400 and error.message)


def chat(body: bytes) -> None:
    call = chat_call(decode_chat(body), TEMPLATE, VOCABULARY, ALL)
    fit_context(call.sampling, 10, 100, 16, "messages")


def text(body: bytes) -> None:
    call = completion_call(decode_completion(body), VOCABULARY, ALL)
    fit_context(call.sampling, 10, 100, 16, "prompt")


def embedding(body: bytes) -> None:
    embedding_call(decode_embedding(body), VOCABULARY, ALL)


def tokenize(body: bytes) -> None:
    tokenize_call(decode_tokenize(body), "m", TEMPLATE, ALL)


def detokenize(body: bytes) -> None:
    detokenize_ids(decode_detokenize(body), VOCABULARY)


model = st.just("m")
told = st.lists(messages, min_size=1, max_size=3)


@settings(deadline=None)
@given(bodies(ChatBody, model=model, messages=told))
def test_any_chat(body: dict[str, Any]) -> None:
    holds(chat, body)


@settings(deadline=None)
@given(bodies(CompletionBody, model=model, prompt=values))
def test_any_completion(body: dict[str, Any]) -> None:
    holds(text, body)


@settings(deadline=None)
@given(bodies(EmbeddingBody, model=model, input=values))
def test_any_embedding(body: dict[str, Any]) -> None:
    holds(embedding, body)


@settings(deadline=None)
@given(bodies(TokenizeBody), bodies(DetokenizeBody))
def test_any_text_to_tokenize_and_back(first: dict[str, Any], second: dict[str, Any]) -> None:
    holds(tokenize, first)
    holds(detokenize, second)


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes(body: bytes) -> None:
    for make in (chat, text, embedding, tokenize, detokenize):
        error = refusal(make, body)
        assert error is None or error.code in REASONS
