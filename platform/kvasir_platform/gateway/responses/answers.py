"""Answers of the Responses API: whole, streamed as events, or kept for a client that asks later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, Usage
from kvasir.native import StreamGaps
from kvasir.ports.router import Lane
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.answer import Answer, AnswerHead
from kvasir_platform.gateway.openai.event_stream import EventStream
from kvasir_platform.gateway.responses.body import ResponsesBody
from kvasir_platform.gateway.responses.output_items import TEXT_DELTAS, Event, OutputItems
from kvasir_platform.gateway.responses.response_object import (
    IN_PROGRESS,
    INCOMPLETE,
    QUEUED,
    Response,
    ResponseEnd,
    response_object,
)

_encode = msgspec.json.Encoder().encode


class ResponseRecord:
    """One response while it is made: its output so far, and the response object at any time. `keep` gets the
    JSON of the response when it has ended, None if it is not stored. `wall` is Unix time in seconds."""

    def __init__(
        self,
        asked: ResponsesBody,
        head: AnswerHead,
        keep: Callable[[bytes], None] | None,
        wall: Callable[[], float],
    ) -> None:
        self.output = OutputItems(head.id.removeprefix("resp_"), head)
        self._asked = asked
        self._head = head
        self._keep = keep
        self._wall = wall

    def begun(self, status: str = IN_PROGRESS) -> bytes:
        """Return the response before its output, as JSON."""
        return _encode(self._object(None, status))

    def ended(self, usage: Usage | None = None, error: KvasirError | None = None) -> tuple[str, bytes]:
        """Close the output. Return the status of the response at its end, and the response as JSON, which is
        kept."""
        self.output.end()
        made = self._object(ResponseEnd(int(self._wall()), usage, error))
        shown = _encode(made)
        if self._keep is not None:
            self._keep(shown)
        return str(made["status"]), shown

    def _object(self, end: ResponseEnd | None, status: str = IN_PROGRESS) -> Response:
        return response_object(
            self._asked, self._head, self.output, end, stored=self._keep is not None, status=status
        )


class _UnsentResponse:
    """A response of which nothing is sent while it is made."""

    def __init__(self, record: ResponseRecord) -> None:
        self._record = record

    def delta(self, index: int, delta: Delta) -> None:
        """Add what a step added."""
        self._record.output.add(delta)

    def lane(self, index: int, gaps: StreamGaps) -> Lane | None:
        """Return None: nothing is sent."""
        return None


class WholeResponse(_UnsentResponse):
    """A response that is sent when it is complete."""

    def __init__(self, exchange: Exchange, record: ResponseRecord) -> None:
        super().__init__(record)
        self._exchange = exchange

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send the response."""
        self._exchange.respond(200, self._record.ended(usage)[1], headers=timing)

    def fail(self, error: KvasirError) -> None:
        """Send the error instead."""
        self._exchange.fail(error)


class StreamedResponse:
    """A response that is sent as numbered events. There is no fast path: every event has a number."""

    def __init__(self, exchange: Exchange, record: ResponseRecord, timing: Callable[[], bytes]) -> None:
        self._stream = EventStream(exchange, timing)
        self._record = record
        self._number = 0
        self._last: list[Event] = []
        """Events of the last delta, which are sent together with the end."""

    def delta(self, index: int, delta: Delta) -> None:
        """Send what a step added."""
        events = self._record.output.add(delta)
        if delta.finish is not None:
            self._last = events
        elif events:
            self._send(events)

    def lane(self, index: int, gaps: StreamGaps) -> Lane | None:
        """See Answer.lane."""
        return None

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send the ends of all items, and the whole response."""
        events = [*self._last, *self._record.output.end()]
        status, response = self._record.ended(usage)
        kind = "response.incomplete" if status == INCOMPLETE else "response.completed"
        self._stream.let_go()
        frames = self._opening() + self._frames(events) + self._frame(_lifecycle(kind, response))
        self._stream.end(frames, timing)

    def fail(self, error: KvasirError) -> None:
        """Send the failed response as an event if the stream has begun, else an error response."""
        if not self._stream.begun:
            self._stream.fail(b"", error)
            return
        self._stream.let_go()
        _, response = self._record.ended(error=error)
        self._stream.cut(self._frames(self._last) + self._frame(_lifecycle("response.failed", response)))

    def _send(self, events: Sequence[Event]) -> None:
        event = events[0]
        if len(events) == 1 and event["type"] in TEXT_DELTAS and not event.get("logprobs"):
            self._stream.joined((event["type"], event["item_id"]), event["delta"], self._piece(event))
            return
        self._stream.let_go()
        self._stream.send(self._opening() + self._frames(events))

    def _piece(self, event: Event) -> Callable[[str], bytes]:
        """Return what makes the frame of such a delta of a text: its number is known when it is sent."""
        return lambda text: self._frame({**event, "delta": text})

    def _opening(self) -> bytes:
        if self._stream.begun:
            return b""
        begun = self._record.begun()
        return self._frames(
            [_lifecycle("response.created", begun), _lifecycle("response.in_progress", begun)]
        )

    def _frames(self, events: Sequence[Event]) -> bytes:
        return b"".join(map(self._frame, events))

    def _frame(self, event: Event) -> bytes:
        kind = event["type"]
        shown = _encode({**event, "sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), shown)


class BackgroundResponse(_UnsentResponse):
    """A response that nobody waits for: it is stored at its end."""

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Store the response."""
        self._record.ended(usage)

    def fail(self, error: KvasirError) -> None:
        """Store the failed response."""
        self._record.ended(error=error)


class ResponsesFormat:
    """`AnswerFormat` of one call. `name` is the id of the response, and `keep` as for ResponseRecord."""

    prompt_param = "input"
    fits_output = False

    def __init__(
        self,
        asked: ResponsesBody,
        name: str,
        keep: Callable[[bytes], None] | None,
        wall: Callable[[], float],
    ) -> None:
        self._asked = asked
        self._name = name
        self._keep = keep
        self._wall = wall

    def answer_id(self, request_id: str) -> str:
        """Return the id of the response: a client may send the id of a request twice."""
        return self._name

    def streamed(self, exchange: Exchange, head: AnswerHead, timing: Callable[[], bytes]) -> Answer:
        """See AnswerFormat."""
        return StreamedResponse(exchange, self._record(head), timing)

    def whole(self, exchange: Exchange, head: AnswerHead) -> Answer:
        """See AnswerFormat."""
        return WholeResponse(exchange, self._record(head))

    def _record(self, head: AnswerHead) -> ResponseRecord:
        return ResponseRecord(self._asked, head, self._keep, self._wall)


class BackgroundFormat(ResponsesFormat):
    """The same for a background response. `begun` gets the response when its call has passed all checks."""

    def __init__(
        self,
        asked: ResponsesBody,
        name: str,
        keep: Callable[[bytes], None],
        wall: Callable[[], float],
        begun: Callable[[bytes], None],
    ) -> None:
        super().__init__(asked, name, keep, wall)
        self._begun = begun

    def whole(self, exchange: Exchange, head: AnswerHead) -> Answer:
        """See AnswerFormat."""
        record = self._record(head)
        self._begun(record.begun(QUEUED))
        return BackgroundResponse(record)


def _lifecycle(kind: str, response: bytes) -> dict[str, Any]:
    return {"type": kind, "response": msgspec.Raw(response)}
