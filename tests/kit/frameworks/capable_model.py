"""A model that follows instructions, as far as clients' own test suites ask: it calls the tools that a user
speaks of, reads their results, and answers in the JSON that a schema describes.

It stands in for the engine, so that these suites prove the gateway and not a model. It reads the rendered
prompt, as a model does, and knows nothing else of the request but the tools and rules that an engine gets.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.kit.gateway.scripted_router import ScriptedStream

from kvasir.core.requests import Constraint, FinishReason, OutputParsing, Request, ToolCallDelta

Schema = Mapping[str, Any]

_TURN = re.compile(r"<\|(system|user|assistant|tool|end)\|>")
_PIECE = 6
"""Characters of a token."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_QUOTED = re.compile(r"\"([^\"]+)\"|'([^']+)'|“([^”]+)”")
_NAMED = re.compile(r"\b(?:in|named|for|of|about|called)\s+([A-Z\d][\w-]*(?:,? [A-Z][\w-]*)*)")
_KEYS = re.compile(r"[`'](\w+)[`']")
_FILLERS = {"get", "the", "a", "tool", "fetch", "look", "up", "of"}
_DEPTH = 8
_BRACES = 64
_JSON = json.JSONDecoder()


class CapableModel:
    """A script of a ScriptedRouter. `decode` returns the text of a prompt, with its control tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._calls = itertools.count()

    def __call__(self, stream: ScriptedStream) -> None:
        """Answer a request."""
        request = stream.request
        turns = turns_of(self._decode(request.tokens))
        called = calls(request.parsing, turns)
        for choice in range(request.sampling.n):
            if called:
                self._call(stream, choice, called)
            else:
                self._say(stream, choice, text_of(request, turns))
        stream.finish()

    def _say(self, stream: ScriptedStream, choice: int, text: str) -> None:
        budget = stream.request.sampling.max_tokens
        pieces = list(_pieces(text))
        for number, piece in enumerate(pieces):
            if budget is not None and number + 1 == budget and number + 1 < len(pieces):
                stream.emit(piece, index=choice, finish=FinishReason.LENGTH)
                return
            stopped = next((stop for stop in stream.request.sampling.stop if stop in text), None)
            if stopped is not None:
                stream.emit(text.partition(stopped)[0], index=choice)
                stream.emit("", index=choice, finish=FinishReason.STOP, stop_reason=stopped)
                return
            stream.emit(piece, index=choice)
        stream.emit("", index=choice, finish=FinishReason.STOP)

    def _call(self, stream: ScriptedStream, choice: int, called: Sequence[tuple[str, str]]) -> None:
        for index, (name, arguments) in enumerate(called):
            call_id = f"call_{next(self._calls)}"
            stream.emit("", index=choice, tool_calls=(ToolCallDelta(index, call_id, name),))
            for piece in _pieces(arguments):
                stream.emit("", index=choice, tool_calls=(ToolCallDelta(index, arguments=piece),))
        stream.emit("", index=choice, finish=FinishReason.STOP)


def turns_of(prompt: str) -> list[tuple[str, str]]:
    """Return the roles and texts of a prompt of kvasir-tiny's template, without the turn that is to come."""
    _, *parts = _TURN.split(prompt)
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [(role, text) for role, text in turns if role != "end" and (role, text) != ("assistant", "")]


def calls(parsing: OutputParsing | None, turns: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the names and arguments of the calls to make: those that a choice forces, or else those tools
    that the user speaks of and whose results have not come."""
    if parsing is None or not parsing.tools or parsing.tool_choice == "none" or not turns:
        return []
    tools = [tool["function"] for tool in json.loads(parsing.tools)]
    asked = next((text for role, text in reversed(turns) if role == "user"), "")
    if parsing.tool_choice == "function":
        chosen = [tool for tool in tools if tool["name"] == parsing.function]
    else:
        chosen = [] if turns[-1][0] == "tool" else [tool for tool in tools if _spoken_of(tool["name"], asked)]
        if parsing.tool_choice == "required" and not chosen:
            chosen = tools[:1]
    if not parsing.parallel_tool_calls:
        chosen = chosen[:1]
    return [
        (tool["name"], json.dumps(sample(tool.get("parameters") or {}, asked), ensure_ascii=False))
        for tool in chosen
    ]


def text_of(request: Request, turns: Sequence[tuple[str, str]]) -> str:
    """Return the text of an answer without calls."""
    rule = request.sampling.structured
    asked = next((text for role, text in reversed(turns) if role == "user"), "")
    if rule is not None and rule.constraint is Constraint.JSON_SCHEMA:
        return json.dumps(sample(json.loads(rule.spec), asked), ensure_ascii=False)
    described = next(filter(None, (_schema_in(text) for role, text in turns if role != "tool")), None)
    if described is not None:
        return json.dumps(sample(described, asked), ensure_ascii=False)
    if rule is not None:
        return json.dumps({key: f"some {key}" for key in _KEYS.findall(asked) or ["answer"]})
    results = list(itertools.takewhile(lambda turn: turn[0] == "tool", reversed(turns)))
    if results:
        return "The result is " + " and ".join(text for _, text in reversed(results)) + "."
    return "Hello! I am here to help you with this."


def _schema_in(text: str) -> Schema | None:
    """Return the JSON schema of an object that a text spells out, None without one."""
    read = 0
    for start in (match.start() for match in itertools.islice(re.finditer(r"\{", text), _BRACES)):
        if start < read:
            # Within a value that is no schema, such as a tool.
            continue
        try:
            found, read = _JSON.raw_decode(text, start)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("properties"), dict):
            return found
    return None


def sample(schema: Schema, asked: str) -> Any:
    """Return a value of a schema, with the numbers, quotations and names that the user wrote."""
    return _Sampler(schema, asked).value(schema, "value", 0)


class _Sampler:
    def __init__(self, root: Schema, asked: str) -> None:
        self._root = root
        self._asked = asked
        self._numbers = iter([float(each) for each in _NUMBER.findall(asked)])
        quoted = ["".join(groups) for groups in _QUOTED.findall(asked)]
        self._names = iter([*quoted, *_NAMED.findall(asked)])

    def value(self, schema: Schema, name: str, depth: int) -> Any:
        """Return a value."""
        if "$ref" in schema:
            return self.value(self._defined(schema["$ref"]), name, depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return next((each for each in schema["enum"] if str(each) in self._asked), schema["enum"][0])
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                options = [each for each in schema[key] if each.get("type") != "null"]
                return self.value(options[0], name, depth) if options else None
        kind = schema.get("type", "object" if "properties" in schema else "string")
        kind = next((each for each in kind if each != "null"), "null") if isinstance(kind, list) else kind
        return self._plain(kind, schema, name, depth)

    def _plain(self, kind: str, schema: Schema, name: str, depth: int) -> Any:
        if kind == "object":
            properties = schema.get("properties", {})
            required = schema.get("required", ())
            kept = properties if depth < _DEPTH else {key: properties[key] for key in required}
            wanted = [key for key in kept if key in required or "default" not in kept[key]]
            return {key: self.value(kept[key], key, depth + 1) for key in wanted}
        if kind == "array":
            return [self.value(schema.get("items", {}), name, depth + 1)]
        if kind in ("integer", "number"):
            number = next(self._numbers, 1.0)
            return int(number) if kind == "integer" or number.is_integer() else number
        if kind == "boolean":
            return True
        return None if kind == "null" else next(self._names, f"some {name}")

    def _defined(self, reference: str) -> Schema:
        found: Any = self._root
        for part in reference.removeprefix("#").strip("/").split("/"):
            found = found[part] if part else found
        return found if isinstance(found, dict) else {}


def _spoken_of(name: str, text: str) -> bool:
    words = [word for word in re.split(r"[_\W]+|(?<=[a-z])(?=[A-Z])", name) if word]
    lowered = text.lower()
    meant = [word.lower() for word in words if word.lower() not in _FILLERS]
    return name in text or (bool(meant) and all(word in lowered for word in meant))


def _pieces(text: str) -> Iterator[str]:
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
