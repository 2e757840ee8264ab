"""HTTP answers as a client sees them: parsed bytes, and the joined chunks of a stream."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvasir.core.requests import Delta, Usage
from kvasir.native import StreamGaps
from kvasir_platform.gateway.http.exchange import Exchange, HttpRequest
from kvasir_platform.gateway.openai.answer import AnswerHead
from kvasir_platform.gateway.openai.streamed_answer import ChatShape, CompletionShape, StreamedAnswer
from kvasir_platform.gateway.openai.whole_answer import WholeAnswer

FIRST_TIMING = b"server-timing: admit;dur=1.00\r\n"
TIMING = b"server-timing: total;dur=2.00\r\n"


class RecordingWire:
    """Records what is written."""

    def __init__(self) -> None:
        self.sent = b""
        self.writes = 0
        self.closed: bool | None = None
        self.lagging = False

    def write(self, data: bytes) -> None:
        self.sent += data
        self.writes += 1

    def lane(self, before: bytes, after: bytes, *, chunked: bool, gaps: StreamGaps) -> None:
        """There is no lane: the fast path is not used."""

    def answered(self, *, close: bool) -> None:
        self.closed = close

    def date(self) -> bytes:
        return b""


@dataclass
class Received:
    """One answer as a client sees it. `events` are the decoded events of a stream, without the last,
    `[DONE]`."""

    status: int
    headers: dict[str, str]
    body: bytes
    trailers: dict[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def events(self) -> list[Any]:
        lines = [line for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        shown = [line.removeprefix("data: ") for line in lines]
        return [msgspec.json.decode(each) for each in shown if each != "[DONE]"]


def exchange_on(
    wire: RecordingWire, headers: dict[bytes, bytes] | None = None, *, query: bytes = b""
) -> Exchange:
    """An exchange whose answer is written to `wire`."""
    request = HttpRequest("POST", "/", headers or {}, b"", keep_alive=True, chunked=True, query=query)
    return Exchange(request, "r", 0.0, wire)


def received(sent: bytes) -> Received:
    """Parse `sent` as one answer. Raise ValueError if it is malformed."""
    head, _, rest = sent.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = _headers(lines)
    if headers.get("transfer-encoding") != "chunked":
        if len(rest) != int(headers["content-length"]):
            raise ValueError(f"{len(rest)} bytes, and {headers['content-length']} were promised")
        return Received(int(first.split()[1]), headers, rest)
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            break
        body, end, rest = body + rest[:length], rest[length : length + 2], rest[length + 2 :]
        if end != b"\r\n":
            raise ValueError(f"a chunk of {length} bytes ends with {end!r}")
    if not rest.endswith(b"\r\n"):
        raise ValueError(f"the answer ends with {rest!r}")
    return Received(int(first.split()[1]), headers, body, _headers(rest.decode().split("\r\n")))


def _headers(lines: list[str]) -> dict[str, str]:
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}


def streamed(
    head: AnswerHead,
    deltas: list[Delta],
    usage: Usage | None = None,
    *,
    chat: bool = True,
    headers: dict[bytes, bytes] | None = None,
    lags: dict[int, bool] | None = None,
) -> Received:
    """The stream of `deltas`. Before delta number i the client begins to lag if `lags[i]` is true, and has
    caught up if it is false."""
    wire = RecordingWire()
    exchange = exchange_on(wire, headers)
    answer = StreamedAnswer(exchange, head, ChatShape() if chat else CompletionShape(), lambda: FIRST_TIMING)
    for i, delta in enumerate(deltas):
        if lags is not None and i in lags:
            notify = exchange.on_lagging if lags[i] else exchange.on_caught_up
            if notify is not None:
                notify()
        answer.delta(delta.index, delta)
    answer.finish(usage or Usage(), TIMING)
    return received(wire.sent)


def whole(
    head: AnswerHead, deltas: list[Delta], usage: Usage | None = None, *, chat: bool = True
) -> Received:
    """The whole answer of `deltas`."""
    wire = RecordingWire()
    answer = WholeAnswer(exchange_on(wire), head, chat=chat)
    for delta in deltas:
        answer.delta(delta.index, delta)
    answer.finish(usage or Usage(), TIMING)
    return received(wire.sent)


def joined(events: list[Any], *, chat: bool = True) -> dict[str, Any]:
    """The answer that a client builds from a stream's chunks, in the shape of a whole answer. Empty logprobs
    are None and empty lists of ids are missing, in both."""
    choices: dict[int, dict[str, Any]] = {}
    made: dict[str, Any] = {}
    for event in events:
        for chunk in event["choices"]:
            choice = choices.setdefault(chunk["index"], {"index": chunk["index"], "logprobs": None})
            if chat:
                _join_message(
                    choice.setdefault("message", {"content": None, "refusal": None}), chunk["delta"]
                )
            else:
                choice["text"] = choice.get("text", "") + chunk["text"]
            _join_logprobs(choice, chunk.get("logprobs"))
            for name in ("prompt_token_ids", "prompt_logprobs", "stop_reason"):
                if name in chunk:
                    choice[name] = chunk[name]
            if chunk.get("token_ids"):
                choice.setdefault("token_ids", []).extend(chunk["token_ids"])
            choice["finish_reason"] = chunk["finish_reason"] or choice.get("finish_reason")
        for name in ("prompt_token_ids", "prompt_logprobs", "usage"):
            if event.get(name) is not None:
                made[name] = event[name]
    kind = "chat.completion" if chat else "text_completion"
    first = events[0]
    identity = {"id": first["id"], "created": first["created"], "model": first["model"], "object": kind}
    return {**identity, **made, "choices": [choices[index] for index in sorted(choices)]}


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    """A whole answer without the differences that a stream cannot represent."""
    for choice in answer["choices"]:
        shown = choice.get("logprobs") or {}
        if not (shown.get("content") or shown.get("tokens")):
            choice["logprobs"] = None
        if choice.get("token_ids") == []:
            del choice["token_ids"]
    return answer


def _join_message(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            for piece in value:
                _join_call(message.setdefault("tool_calls", []), piece)
        elif name == "function_call":
            call = message.setdefault("function_call", {"arguments": ""})
            call["arguments"] += value["arguments"]
            call.setdefault("name", value.get("name"))
        elif name == "role":
            message["role"] = value
        elif value is not None:
            message[name] = (message.get(name) or "") + value


def _join_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    if piece["index"] == len(calls):
        function = {"name": piece["function"]["name"], "arguments": ""}
        calls.append({"id": piece["id"], "type": piece["type"], "function": function})
    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


def _join_logprobs(choice: dict[str, Any], shown: dict[str, Any] | None) -> None:
    if shown is None:
        return
    if choice["logprobs"] is None:
        choice["logprobs"] = shown
        return
    for name, values in shown.items():
        if values is not None:
            choice["logprobs"][name] += values


def ids(*tokens: int) -> array[int]:
    """A prompt."""
    return array("I", tokens)
