"""For each field that a client can send, the values that cost most, and the work that they cause.

Fields are found by walking the types that bodies are decoded to, so that a new field is among them. Work is
counted in bytecode instructions, of which a processor runs some tens of millions in a second: a count is the
same on every machine, unlike a time. What is not bytecode is in proportion to bytes, arrays, objects and
values, which the count of a body bounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import msgspec
from msgspec import Struct, inspect
from tests.kit.models.tiny_tokens import VOCABULARY

from kvasir.config.load.model_files import resolve_model
from kvasir_platform.gateway.anthropic.decode import decode_messages
from kvasir_platform.gateway.anthropic.schema import MessagesBody
from kvasir_platform.gateway.anthropic.translation import chat_body as messages_chat
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities
from kvasir_platform.gateway.http.body import Body
from kvasir_platform.gateway.openai.calls import chat_call, completion_call
from kvasir_platform.gateway.openai.schema.chat import ChatBody, ContentPart, Message
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
from kvasir_platform.gateway.prompt.control_tokens import control_tokens
from kvasir_platform.gateway.responses.body import InputItem, InputPart, ResponsesBody
from kvasir_platform.gateway.responses.decode import decode_responses
from kvasir_platform.gateway.responses.references import next_reference
from kvasir_platform.gateway.responses.translation import MAX_INLINE_BYTES, translated
from kvasir_platform.gateway.serving.generate_api import renders_in_thread

PIECE = 256 << 10
"""What the event loop reads at once."""
LONG = 128 << 10
MANY = 32_000
VALUES = 140_000
DEEP = 60
ALL = ModelCapabilities(embeds=True, tools=True, reasoning=True)
TEMPLATE = ChatTemplate.from_folder(resolve_model("kvasir-tiny"))
CONTROL = control_tokens((resolve_model("kvasir-tiny") / "tokenizer.json").read_bytes())
KINDS = (
    ChatBody,
    CompletionBody,
    ResponsesBody,
    MessagesBody,
    EmbeddingBody,
    TokenizeBody,
    DetokenizeBody,
)

Value = tuple[str, Any]
"""What the value is, and the value."""
Seen = set[tuple[str, str]]
"""Fields that have been walked, by name and type."""
_NEEDED: dict[type, dict[str, str]] = {
    Message: {"content": "hi"},
    InputItem: {"role": "user", "content": "hi"},
    InputPart: {"type": "input_text", "text": "hi"},
    ContentPart: {"type": "text", "text": "hi"},
}


class OverBudgetError(Exception):
    """More work than is allowed."""


def work(run: Callable[[], object], limit: int) -> int:
    """Return the number of instructions that `run` takes. Raise OverBudgetError beyond `limit`."""
    count = 0

    def count_one(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count += 1
            if count > limit:
                raise OverBudgetError
        return count_one

    before = sys.gettrace()
    sys.settrace(count_one)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def chat_of(kind: type[Struct], whole: bytes) -> ChatBody | None:
    """Return the chat that a body means; None if a thread finds out."""
    if kind is ChatBody:
        return decode_chat(whole)
    if kind is MessagesBody:
        return messages_chat(decode_messages(whole), reasoning=True)
    asked = decode_responses(whole)
    next_reference(asked, {})
    if len(whole) > MAX_INLINE_BYTES:
        return None
    return translated(asked, None, key="", default_output=1, stores=True)[0]


def handled(kind: type[Struct], data: bytes) -> None:
    """What the event loop does with a body, from its first byte to the texts to be tokenized."""
    body = Body()
    for at in range(0, len(data), PIECE):
        body.add(data[at : at + PIECE])
    whole = body.take()
    if kind in (ChatBody, ResponsesBody, MessagesBody):
        chat = chat_of(kind, whole)
        if chat is not None and not renders_in_thread(chat, CONTROL, whole):
            chat_call(chat, TEMPLATE, VOCABULARY, ALL, control=CONTROL)
    elif kind is CompletionBody:
        completion_call(decode_completion(whole), VOCABULARY, ALL, control=CONTROL)
    elif kind is EmbeddingBody:
        embedding_call(decode_embedding(whole), VOCABULARY, ALL, CONTROL)
    elif kind is TokenizeBody:
        tokenize = decode_tokenize(whole)
        if not renders_in_thread(tokenize, CONTROL, whole):
            tokenize_call(tokenize, "m", TEMPLATE, ALL, (CONTROL, CONTROL))
    else:
        detokenize_ids(decode_detokenize(whole), VOCABULARY)


def bodies() -> Iterator[tuple[str, type[Struct], bytes]]:
    """Yield a body for each costly value of each field, with the name of both. Fields that bodies share
    are in the first only."""
    seen: Seen = set()
    for kind in KINDS:
        info = inspect.type_info(kind)
        if not isinstance(info, inspect.StructType):
            raise TypeError(kind)
        for field in info.fields:
            same = (field.encode_name, repr(field.type))
            if same in seen and kind is not TokenizeBody:
                continue
            seen.add(same)
            # The blocks of messages and items have many fields in common.
            once: Seen | None = set() if kind in (ResponsesBody, MessagesBody) else None
            for what, value in _values(field.type, once):
                body = _least(info) | {field.encode_name: value}
                if kind is TokenizeBody:
                    body.setdefault("messages" if field.encode_name != "prompt" else "model", "m")
                name = f"{kind.__name__}.{field.encode_name}: {what}"
                yield name, kind, msgspec.json.encode(body)


def _least(info: inspect.StructType) -> dict[str, Any]:
    """Return a valid value of a struct with nothing more than it needs."""
    made = {field.encode_name: _plain(field.type) for field in info.fields if field.required}
    if info.tag_field is not None:
        made[info.tag_field] = info.tag
    # A message needs something said, and a part a text.
    made |= {name: text for name, text in _NEEDED.get(info.cls, {}).items() if name not in made}
    return made


def _plain(kind: inspect.Type) -> Any:  # noqa: PLR0911 - one for each kind
    match kind:
        case inspect.StructType():
            return _least(kind)
        case inspect.LiteralType(values):
            return "assistant" if "assistant" in values else values[0]
        case inspect.ListType(item):
            return [_plain(item)]
        case inspect.UnionType(types):
            return _plain(next(each for each in types if not isinstance(each, inspect.NoneType)))
        case inspect.IntType() | inspect.FloatType():
            return 1
        case inspect.DictType() | inspect.AnyType():
            return {}
        case _:
            return "text" if not isinstance(kind, inspect.BoolType) else True


def _values(kind: inspect.Type, once: Seen | None) -> Iterator[Value]:  # noqa: C901 - one branch for each kind
    """Yield the costly values of a type; with `once`, those of a field that occurs in several places for the
    first of them."""
    if isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _values(each, once)
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            same = (field.encode_name, repr(field.type))
            if once is not None and same in once:
                continue
            if once is not None:
                once.add(same)
            for what, value in _values(field.type, once):
                yield f"{field.encode_name}, {what}", _least(kind) | {field.encode_name: value}
    elif isinstance(kind, inspect.ListType):
        yield from _lists(kind.item_type, kind.max_length, once)
    elif isinstance(kind, inspect.AnyType):
        # Any JSON value is declared only to be refused by name.
        yield "many arrays", [[]] * MANY
    elif isinstance(kind, inspect.DictType):
        yield from _objects(kind.max_length)
    elif isinstance(kind, inspect.StrType):
        yield from _texts(kind.max_length)
    elif not isinstance(kind, inspect.NoneType):
        yield "plain", _plain(kind)


def _lists(item: inspect.Type, limit: int | None, once: Seen | None) -> Iterator[Value]:
    most = min(limit or VALUES, VALUES)
    plain = _plain(item)
    many = most if not isinstance(plain, dict | list) else min(most, MANY // 2)
    yield f"{many} items", [plain] * many
    for what, value in _values(item, once):
        size = len(msgspec.json.encode(value))
        times = min(most, max(1, LONG // size), MANY)
        yield f"{times} items, {what}", [value] * times


def _texts(limit: int | None) -> Iterator[Value]:
    for what, text in (
        ("letters", "word " * (LONG // 5)),
        ("control tokens", "<|end|>" * (LONG // 8)),
        ("some control tokens", "<|end|>" * 1000),
        ("JSON text", '{"a":[' + "[]," * (MANY - 3) + "[]]}"),
        ("an ambiguous pattern", "((a*)*)*"),
        ("a large pattern", "[a-z](b|c)" * 300),
        ("circles", "\n".join(f'root{i} ::= "a" root{(i * 7) % 900} | "b"' for i in range(900))),
    ):
        yield what, text if limit is None else text[:limit]


def _objects(keys: int | None) -> Iterator[Value]:
    deep: Any = {}
    for _ in range(DEEP):
        deep = {"a": [deep], "pattern": "[a-z]*"}
    wide: dict[str, Any] = {f"k{i}": {} for i in range(min(keys or MANY, MANY))}
    yield "many objects", wide
    yield "many arrays", {"enum": [[]] * MANY}
    yield "many values", {"enum": [0] * VALUES}
    yield "values and a control token", {"enum": [0] * 3_900, "title": "<|end|>"}
    yield "texts and control tokens", {"enum": ["<|end|>"] * 790}
    yield "many strings", {"enum": ["a"] * (VALUES // 2)}
    yield "depth", deep
    yield "depth many times", {"anyOf": [deep] * (MANY // (2 * DEEP))}
    yield "patterns", {"anyOf": [{"pattern": "[a-z]{1,20}(-[0-9]+)*"}] * 1000}
    yield "a long text", {"description": "word " * (LONG // 5)}
