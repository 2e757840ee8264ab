"""Decodes request bodies strictly, with errors that name the invalid field.

msgspec decodes and checks types and ranges in one pass, several times cheaper than parsing followed by
validation. Fields of OpenAI or vLLM that this server does not support are declared too, so that the error
says "not supported" instead of "unknown".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.openai.schema.adapters import LoadAdapterBody, UnloadAdapterBody
from kvasir_platform.gateway.openai.schema.chat import ChatBody, ContentPart, Message
from kvasir_platform.gateway.openai.schema.limits import bad, missing, unsupported
from kvasir_platform.gateway.openai.schema.sampling import SamplingFields
from kvasir_platform.gateway.openai.schema.texts import (
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)

_MODALITIES = ("image_url", "video_url", "audio_url", "input_audio", "file")
_PARTS: dict[str, str] = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_EMPTY: tuple[Any, ...] = (False, [], {}, "")
#: Default values of unsupported fields, other than empty ones; they are accepted.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "context": ("auto",),
    "detokenize": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "length_penalty": (1.0,),
    "mm_payload": ("tensors", "none"),
    "modalities": (["text"],),
    "mode": ("standard",),
    "service_tier": ("auto", "default"),
    "speed": ("standard",),
    "verbosity": ("medium",),
}
_MISSING = re.compile(r"missing required field `(.+?)`")
_UNKNOWN = re.compile(r"contains unknown field `(.+?)`")
_TYPE_ERROR = re.compile(r"^Expected `[^`]*`, got `")

_Body = TypeVar("_Body", bound=Struct)


def not_served(kind: type[Struct]) -> tuple[str, ...]:
    """The fields of a body that are declared only to be refused by name."""
    annotations = [a for base in reversed(kind.__mro__) for a in getattr(base, "__annotations__", {}).items()]
    return tuple(name for name, annotation in annotations if annotation == "NotServed")


def _values(names: tuple[str, ...]) -> Callable[[Struct], tuple[Any, ...]]:
    """Reads all of those fields of a struct in one call, which is many times cheaper than one by one."""
    read = attrgetter(*names)
    return read if len(names) > 1 else lambda struct: (read(struct),)


@cache
def _refused(kind: type[Struct]) -> tuple[tuple[str, ...], Callable[[Struct], tuple[Any, ...]]]:
    names = not_served(kind)
    return names, _values(names)


_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)
_EMBEDDING = msgspec.json.Decoder(EmbeddingBody)
_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
_LOAD_ADAPTER = msgspec.json.Decoder(LoadAdapterBody)
_UNLOAD_ADAPTER = msgspec.json.Decoder(UnloadAdapterBody)
_ASSISTANTS = ("tool_calls", "function_call", "reasoning", "reasoning_content", "refusal")
_ASSISTANTS_VALUES = _values(_ASSISTANTS)
_MODALITIES_VALUES = _values(_MODALITIES)


def decode_chat(body: bytes) -> ChatBody:
    """Decode and check a chat request. Raise RequestError with `param` and a code."""
    chat = decode_body(_CHAT, body)
    refuse_not_served(chat)
    _check_options(chat)
    for i, message in enumerate(chat.messages):
        _check_message(message, i)
    if chat.top_logprobs and not chat.logprobs:
        raise bad("top_logprobs needs logprobs: true.", "top_logprobs")
    return chat


def decode_completion(body: bytes) -> CompletionBody:
    """Decode and check a completion request. Raise RequestError with `param` and a code."""
    completion = decode_body(_COMPLETION, body)
    refuse_not_served(completion)
    _check_options(completion)
    return completion


def decode_embedding(body: bytes) -> EmbeddingBody:
    """Decode and check an embeddings request. Raise RequestError with `param` and a code."""
    return decode_served(_EMBEDDING, body)


def decode_tokenize(body: bytes) -> TokenizeBody:
    """Decode and check a tokenize request. Raise RequestError with `param` and a code."""
    tokenize = decode_served(_TOKENIZE, body)
    if tokenize.prompt is None and tokenize.messages is None:
        raise missing("prompt")
    if tokenize.prompt is not None and tokenize.messages is not None:
        raise bad("Send prompt or messages, not both.", "messages")
    for i, message in enumerate(tokenize.messages or ()):
        _check_message(message, i)
    return tokenize


def decode_detokenize(body: bytes) -> DetokenizeBody:
    """Decode a detokenize request. Raise RequestError with `param` and a code."""
    return decode_body(_DETOKENIZE, body)


def decode_load_adapter(body: bytes) -> LoadAdapterBody:
    """Decode a request to load an adapter. Raise RequestError with `param` and a code."""
    return decode_served(_LOAD_ADAPTER, body)


def decode_unload_adapter(body: bytes) -> UnloadAdapterBody:
    """Decode a request to unload an adapter. Raise RequestError with `param` and a code."""
    return decode_served(_UNLOAD_ADAPTER, body)


def decode_body(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    """Decode a body. Raise RequestError with `param` and a code."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _validation(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def decode_served(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    """Decode a body, and refuse the fields that are declared only for that. Raise RequestError with `param`
    and a code."""
    decoded = decode_body(decoder, body)
    refuse_not_served(decoded)
    return decoded


def _validation(text: str) -> RequestError:
    """Convert msgspec's message to a code and the invalid field."""
    what, _, at = text.partition(" - at `")
    path = at.rstrip("`").lstrip("$").lstrip(".").replace("[...]", "")
    if found := _MISSING.search(what):
        return missing(_joined(path, found[1]))
    if unknown := _UNKNOWN.search(what):
        param = _joined(path, unknown[1])
        return RequestError(f"Unknown parameter: {param}.", code="unknown_parameter", param=param)
    code = "invalid_type" if _TYPE_ERROR.match(what) else "invalid_value"
    return RequestError(f"{path or 'The body'}: {what}.", code=code, param=path or None)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def refuse_not_served(body: Struct, at: str = "") -> None:
    """Raise RequestError if `body`, which has fields that are declared only to be refused, sets one of them.
    `at` is its path in the request's body."""
    names, read = _refused(type(body))
    values = read(body)
    if values.count(None) == len(values):
        return
    for name, value in zip(names, values, strict=True):
        if value is None or value in _EMPTY or value in _HARMLESS.get(name, ()):
            continue
        if name in ("modalities", "audio"):
            raise RequestError("Only text is supported.", code="unsupported_modality", param=name)
        raise unsupported(_joined(at, name))


def _check_options(body: SamplingFields) -> None:
    if body.stream_options is not None:
        refuse_not_served(body.stream_options, "stream_options")
        if not body.stream:
            raise bad("stream_options needs stream: true.", "stream_options")
    if body.structured_outputs is not None:
        refuse_not_served(body.structured_outputs, "structured_outputs")
    if body.stream and body.prompt_logprobs is not None:
        raise bad("prompt_logprobs cannot be streamed: omit stream.", "prompt_logprobs")


def _check_message(message: Message, number: int) -> None:
    if message.audio:
        raise unsupported(f"messages[{number}].audio")
    if message.role != "assistant":
        _refuse_assistants_fields(message, number)
    if message.role == "tool" and message.tool_call_id is None:
        raise missing(f"messages[{number}].tool_call_id")
    if message.role == "function" and message.name is None:
        raise missing(f"messages[{number}].name")
    content = message.content
    if content is None:
        if not _speaks_otherwise(message):
            raise missing(f"messages[{number}].content")
    elif not isinstance(content, str):
        for i, part in enumerate(content):
            _check_part(part, f"messages[{number}].content[{i}]", message.role)


def _refuse_assistants_fields(message: Message, number: int) -> None:
    values = _ASSISTANTS_VALUES(message)
    if any(values):
        name = _named(_ASSISTANTS, values)
        raise bad(f"{name} is allowed in assistant messages only.", f"messages[{number}].{name}")
    if message.tool_call_id and message.role != "tool":
        raise bad("tool_call_id is allowed in tool messages only.", f"messages[{number}].tool_call_id")


def _named(names: Sequence[str], values: Sequence[object]) -> str:
    """Return the first parameter that is set."""
    return next(name for name, value in zip(names, values, strict=True) if value)


def _speaks_otherwise(message: Message) -> bool:
    """Return whether an assistant's message without content has other output."""
    return bool(
        message.tool_calls
        or message.function_call
        or message.refusal
        or message.reasoning
        or message.reasoning_content
    )


def _check_media(part: ContentPart, where: str, role: str) -> None:
    """Check a part that is no text, or has a field of one that is not."""
    kind = part.type
    values = dict(zip(_MODALITIES, _MODALITIES_VALUES(part), strict=True))
    named = next((name for name, value in values.items() if value is not None and name != kind), None)
    if "file" in (kind, named):
        raise RequestError(
            "Text, images, videos and audio are supported, not file.",
            code="unsupported_modality",
            param=f"{where}.{'type' if kind == 'file' else 'file'}",
        )
    if named is not None:
        raise bad(f"{named} is allowed in parts of type {named} only.", f"{where}.{named}")
    if values[kind] is None:
        raise missing(f"{where}.{kind}")
    if part.text is not None or part.refusal is not None:
        raise bad("A part has one content: send the text as a part of its own.", where)
    if role != "user":
        sent = "Images" if kind == "image_url" else "Videos" if kind == "video_url" else "Audio files"
        raise bad(f"{sent} are allowed in messages of the user only.", f"{where}.type")


def _check_part(part: ContentPart, where: str, role: str) -> None:
    kind = part.type
    if kind in _MODALITIES or any(_MODALITIES_VALUES(part)):
        _check_media(part, where, role)
        return
    field = _PARTS.get(kind)
    if field is None:
        raise bad(f"Unknown content part {kind!r}.", f"{where}.type")
    if (part.text if field == "text" else part.refusal) is None:
        raise missing(f"{where}.{field}")
