"""The event stream of an answer with one choice, in any API's events.

It begins with its first frame, so that an earlier error has an HTTP status.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir.core.errors import KvasirError
from kvasir.native import StreamGaps
from kvasir.ports.router import Lane
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.lagging_text import LaggingText
from kvasir_platform.gateway.openai.streamed_answer import takes_trailers, wants_comment


class EventStream:
    """Frames on one exchange. `timing` makes the Server-Timing line of the head; the final one follows as a
    trailer if the client accepts trailers, or as a comment if it requests one."""

    def __init__(self, exchange: Exchange, timing: Callable[[], bytes]) -> None:
        self._exchange = exchange
        self._timing = timing
        self._trailers = takes_trailers(exchange.request)
        self._lags = False
        self._held = LaggingText()

    @property
    def begun(self) -> bool:
        """Whether a frame has been sent."""
        return self._exchange.streaming

    def send(self, frames: bytes) -> None:
        """Send whole events, not empty, after the text that is held."""
        exchange = self._exchange
        if exchange.streaming:
            self.let_go()
            exchange.frame(frames)
            return
        exchange.on_lagging = self._lagging
        exchange.on_caught_up = self._caught_up
        exchange.begin(frames, self._timing() + (b"trailer: server-timing\r\n" if self._trailers else b""))

    def text(self, before: bytes, text: str, after: bytes) -> None:
        """Send an event that is `text`, as a JSON string, between two constants. The stream has begun."""
        if not self._lags:
            self._exchange.piece(before, text, after)
            return
        self._held.hold(0, (before, after), text, lambda held: self._exchange.piece(before, held, after))

    def joined(self, part: tuple[str, ...], text: str, frame: Callable[[str], bytes]) -> None:
        """Send the event that `frame` makes of a text. While the client lags, it is called once for all
        consecutive texts of one `part`. The stream has begun."""
        if self._lags:
            self._held.hold(0, part, text, lambda held: self._exchange.frame(frame(held)))
        else:
            self._exchange.frame(frame(text))

    def lane(self, before: bytes, after: bytes, gaps: StreamGaps) -> Lane | None:
        """Return a fast path for such events; None while the client lags. See Answer.lane."""
        return None if self._lags else self._exchange.lane(before, after, gaps)

    def end(self, frames: bytes, timing: bytes) -> None:
        """Send the last events. `timing` is a Server-Timing header line or empty."""
        exchange = self._exchange
        if not exchange.streaming:
            exchange.begin(b"", timing)
            exchange.end(frames)
            return
        self.let_go()
        if timing and not self._trailers and wants_comment(exchange.request):
            frames = b": %b\n\n%b" % (timing.strip(), frames)
        exchange.end(frames, trailers=timing if self._trailers else b"")

    def fail(self, frames: bytes, error: KvasirError) -> None:
        """Send `frames` and the error as an event if the stream has begun, else an error response."""
        exchange = self._exchange
        if not exchange.streaming:
            exchange.fail(error)
            return
        self.let_go()
        exchange.end(frames + exchange.errors.event(error, exchange.request_id), close=True)

    def cut(self, frames: bytes) -> None:
        """Send `frames` as the last ones of a stream that has begun and failed."""
        self.let_go()
        self._exchange.end(frames, close=True)

    def let_go(self) -> None:
        """Send the held text."""
        self._held.let_go()

    def _lagging(self) -> None:
        self._lags = True

    def _caught_up(self) -> None:
        self._lags = False
        # A write may report that the client lags again; the rest is then queued at the connection.
        self.let_go()
