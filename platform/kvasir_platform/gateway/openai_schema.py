"""The bodies of OpenAI's API, decoded strictly and with the field at fault named.

msgspec decodes and checks types and ranges in one pass, several times cheaper than a parse followed by a
validation. A field that OpenAI or vLLM has and this server does not serve is declared all the same, so
that the refusal can say "not served" instead of "unknown".
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvasir.core.errors import RequestError

MAX_CHOICES = 128
MAX_PROMPTS = 64
MAX_STOP = 16
MAX_LOGPROBS = 20
MAX_HINT = 1024
_INT64 = 1 << 63

Count = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Hint = Annotated[str, Meta(max_length=MAX_HINT)]

#: Any JSON at all: declared only to be refused by name.
NotServed = Any


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None


class SamplingFields(Struct, kw_only=True, frozen=True):
    """What both APIs share: the model, vLLM's sampling fields, and how to answer."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Unit | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=1024)] | None
    ) = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    user: Hint | None = None
    safety_identifier: Hint | None = None

    # Served neither here nor by the workers; `None` and empty values pass.
    allowed_token_ids: NotServed = None
    bad_words: NotServed = None
    best_of: NotServed = None
    detokenize: NotServed = None
    guided_choice: NotServed = None
    guided_grammar: NotServed = None
    guided_json: NotServed = None
    guided_regex: NotServed = None
    kv_transfer_params: NotServed = None
    length_penalty: NotServed = None
    metadata: NotServed = None
    priority: NotServed = None
    prompt_cache_key: NotServed = None
    prompt_cache_retention: NotServed = None
    prompt_logprobs: NotServed = None
    response_format: NotServed = None
    return_token_ids: NotServed = None
    service_tier: NotServed = None
    spaces_between_special_tokens: NotServed = None
    store: NotServed = None
    structured_outputs: NotServed = None
    truncate_prompt_tokens: NotServed = None
    use_beam_search: NotServed = None


class ContentPart(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One part of a message's content. Only `text` is served."""

    type: str
    text: str | None = None
    audio_url: NotServed = None
    file: NotServed = None
    image_url: NotServed = None
    input_audio: NotServed = None
    refusal: NotServed = None
    video_url: NotServed = None


class Message(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None
    name: Hint | None = None
    audio: NotServed = None
    function_call: NotServed = None
    reasoning: NotServed = None
    reasoning_content: NotServed = None
    refusal: NotServed = None
    tool_call_id: NotServed = None
    tool_calls: NotServed = None


class ChatBody(SamplingFields, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=8192)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=32)] | None = None

    add_generation_prompt: NotServed = None
    add_special_tokens: NotServed = None
    audio: NotServed = None
    chat_template: NotServed = None
    continue_final_message: NotServed = None
    documents: NotServed = None
    echo: NotServed = None
    function_call: NotServed = None
    functions: NotServed = None
    include_reasoning: NotServed = None
    modalities: NotServed = None
    parallel_tool_calls: NotServed = None
    prediction: NotServed = None
    reasoning_effort: NotServed = None
    tool_choice: NotServed = None
    tools: NotServed = None
    verbosity: NotServed = None
    web_search_options: NotServed = None


class CompletionBody(SamplingFields, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[
            list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
            Meta(min_length=1),
        ]
    )
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    echo: NotServed = None
    prompt_embeds: NotServed = None
    suffix: NotServed = None


_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)
_SERVED_MESSAGE_FIELDS = frozenset(("role", "content", "name"))
_MODALITIES = frozenset(("audio_url", "file", "image_url", "input_audio", "video_url"))
_EMPTY: tuple[Any, ...] = (False, [], {}, "")
#: Values that ask for nothing beyond what is served, where they are other than empty ones.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "best_of": (1,),
    "add_generation_prompt": (True,),
    "include_reasoning": (True, False),
}
_MISSING = re.compile(r"missing required field `(.+?)`")
_UNKNOWN = re.compile(r"contains unknown field `(.+?)`")
_TYPE_ERROR = re.compile(r"^Expected `[^`]*`, got `")

_Body = TypeVar("_Body", ChatBody, CompletionBody)


def _not_served(kind: type[Struct]) -> tuple[str, ...]:
    annotations = [a for base in reversed(kind.__mro__) for a in getattr(base, "__annotations__", {}).items()]
    return tuple(name for name, annotation in annotations if annotation == "NotServed")


_CHAT_NOT_SERVED = _not_served(ChatBody)
_COMPLETION_NOT_SERVED = _not_served(CompletionBody)


def decode_chat(body: bytes) -> ChatBody:
    """Decode and check a chat request. Raises RequestError with `param` and a code."""
    chat = _decode(_CHAT, body)
    _refuse_not_served(chat, _CHAT_NOT_SERVED)
    for i, message in enumerate(chat.messages):
        _check_message(message, f"messages[{i}]")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise _bad("top_logprobs needs logprobs: true.", "top_logprobs")
    return chat


def decode_completion(body: bytes) -> CompletionBody:
    """Decode and check a completion request. Raises RequestError with `param` and a code."""
    completion = _decode(_COMPLETION, body)
    _refuse_not_served(completion, _COMPLETION_NOT_SERVED)
    return completion


def _decode(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _validation(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def _validation(text: str) -> RequestError:
    """msgspec's message, as a code and the field at fault."""
    what, _, at = text.partition(" - at `")
    path = at.rstrip("`").lstrip("$").lstrip(".").replace("[...]", "")
    if missing := _MISSING.search(what):
        param = _joined(path, missing[1])
        return RequestError(f"Missing required parameter: {param}.", code="missing_parameter", param=param)
    if unknown := _UNKNOWN.search(what):
        param = _joined(path, unknown[1])
        return RequestError(f"Unknown parameter: {param}.", code="unknown_parameter", param=param)
    code = "invalid_type" if _TYPE_ERROR.match(what) else "invalid_value"
    return RequestError(f"{path or 'The body'}: {what}.", code=code, param=path or None)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse_not_served(body: Struct, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(body, name)
        if value is None or value in _HARMLESS.get(name, _EMPTY):
            continue
        if name in ("modalities", "audio"):
            raise RequestError("Only text is served.", code="unsupported_modality", param=name)
        raise _unsupported(name)


def _check_message(message: Message, path: str) -> None:
    for name in message.__struct_fields__:
        if name not in _SERVED_MESSAGE_FIELDS and getattr(message, name):
            raise _unsupported(f"{path}.{name}")
    content = message.content
    if content is None:
        raise RequestError(
            f"Missing required parameter: {path}.content.", code="missing_parameter", param=f"{path}.content"
        )
    if isinstance(content, str):
        return
    for i, part in enumerate(content):
        where = f"{path}.content[{i}]"
        if part.type in _MODALITIES:
            raise RequestError(
                f"Only text is served, not {part.type}.", code="unsupported_modality", param=f"{where}.type"
            )
        if part.type != "text":
            raise _bad(f"Unknown content part {part.type!r}.", f"{where}.type")
        if part.text is None:
            raise RequestError(
                f"Missing required parameter: {where}.text.", code="missing_parameter", param=f"{where}.text"
            )


def _unsupported(param: str) -> RequestError:
    return RequestError(
        f"{param} is not supported by this server.", code="unsupported_parameter", param=param
    )


def _bad(message: str, param: str) -> RequestError:
    return RequestError(message, code="invalid_value", param=param)
