"""Holds back the output of one choice until filters have ruled on it, and releases it in order.

Pure: deltas and rulings in, deltas out. Each part of a choice is a separate text that ends when another part
follows, so output is released in the order in which the model wrote it. A part that resumes is judged
together with the end of its earlier text, since the client reads both as one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from kvasir.core.requests import Delta, FinishReason, PositionLogprobs, ToolCallDelta
from kvasir.ports.output_filter import AnswerPart, FilterAction, FilterSubject, OutputFilter
from kvasir_platform.gateway.filters.held_text import HeldText
from kvasir_platform.gateway.filters.held_tokens import HeldTokens

_MAX_SAID = 256
"""Maximum number of parts of one choice whose earlier text is kept: an answer may have many tool calls."""
_OPAQUE = re.compile(r"(?:(?:chatcmpl-tool-|call_(?:\d+_)?)?[0-9a-f-]{8,40}|[0-9A-Za-z]{9})?")
"""Tool call ids that parsers generate at random. Any other id is text of the model."""

_end_of = itemgetter(0)


@dataclass(slots=True)
class _Pieces:
    """The contents of one outgoing delta."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)


class HoldBack:
    """One choice. `lag` is None if the client gets neither token ids nor logprobs; otherwise see
    `HeldTokens`. `functions` are the function names that the request declares; calls to them are not judged
    by name. `ruled` is called for a ruling outside `take`, `expire` and `settle`; `release` then returns what
    it releases. With `hides_reasoning` the client gets no reasoning."""

    def __init__(
        self,
        filters: Sequence[OutputFilter],
        subject: Callable[[AnswerPart], FilterSubject],
        *,
        ruled: Callable[[], None],
        lag: float | None = None,
        functions: Container[str] = (),
        hides_reasoning: bool = False,
    ) -> None:
        self._filters = filters
        self._subject = subject
        self._ruled = ruled
        self._functions = functions
        self._hides_reasoning = hides_reasoning
        self._tokens = None if lag is None else HeldTokens(lag)
        # One more, so that a filter can detect the beginning of a part.
        self._keep = 1 + max(each.max_held_chars for each in filters)
        self._said: dict[tuple[AnswerPart, int], str] = {}
        self._texts: deque[HeldText] = deque()
        self._end = 0
        self._cut: int | None = None
        self._arrivals: list[tuple[int, float]] = []
        self._last: Delta | None = None
        self._latest = Delta("", 0)
        self._reasoning_tokens = 0
        self._busy = False
        self.over = False
        """Whether the final delta was returned."""
        self.cut = False
        """Whether a filter ended the choice."""

    @property
    def waits(self) -> bool:
        """Whether any text is held."""
        return bool(self._arrivals)

    def take(self, delta: Delta, now: float) -> Delta | None:
        """Add a delta of the choice; return what can be sent, None for nothing. `now` is in seconds."""
        if self.over or self._last is not None:
            return None
        self._latest = delta
        begin = self._end
        self._busy = True
        self._feed_all(delta)
        if delta.finish is not None:
            self._last = delta
            self._finish_text()
        self._busy = False
        if self._end > begin:
            self._arrivals.append((self._end, now))
        if self._tokens is not None:
            self._tokens.add(delta, begin, self._end)
        return self._untouched(delta, begin) or self.release(delta)

    def settle(self) -> Delta | None:
        """End the choice: no more deltas follow, even if none had a finish reason."""
        if self._last is None and not self.over:
            self._busy = True
            self._last = replace(self._latest, token_ids=(), logprobs=(), prompt_logprobs=())
            self._finish_text()
            self._busy = False
        return self.release()

    def release(self, delta: Delta | None = None) -> Delta | None:
        """Return what can be sent, with the other fields of `delta`; None for nothing."""
        if self.over:
            return None
        pieces = _Pieces()
        decided = self._decided()
        limit = self._limit(decided)
        self._send(pieces, limit)
        ids = () if delta is None else delta.token_ids
        logprobs: tuple[PositionLogprobs, ...] = ()
        if self._tokens is not None:
            whole = self._last is not None and self._cut is None and limit == self._end
            ids, logprobs = self._tokens.take(decided, self._cut, whole=whole)
            self._tokens.forget(limit)
        del self._arrivals[: bisect_right(self._arrivals, limit, key=_end_of)]
        shown = Delta(
            request_id=self._latest.request_id,
            offset=self._latest.offset,
            index=self._latest.index,
            token_ids=ids,
            logprobs=logprobs,
            text="".join(pieces.content),
            reasoning="".join(pieces.reasoning),
            tool_calls=tuple(pieces.calls),
            prompt_logprobs=() if delta is None else delta.prompt_logprobs,
            raw_length=None if delta is None else delta.raw_length,
        )
        if self._cut is not None:
            self.cut = True
            self.close()
            # Only an engine counts reasoning tokens exactly, and this one was cut off.
            reasoned = self._reasoning_tokens
            return replace(shown, finish=FinishReason.CONTENT_FILTER, reasoning_tokens=reasoned)
        if self._last is not None and not self._texts:
            last = self._last
            self.close()
            return replace(
                shown,
                finish=last.finish,
                stop_reason=last.stop_reason,
                last=last.last,
                usage=last.usage,
                timings=last.timings,
                reasoning_tokens=last.reasoning_tokens,
            )
        if delta is None and not (shown.text or shown.reasoning or shown.tool_calls or ids or logprobs):
            return None
        return shown

    def due_s(self) -> float | None:
        """Return when the first held text exceeds its filter's limit; None while none is held."""
        if not self._arrivals:
            return None
        due = [
            self._arrived(position) + self._filters[number].max_held_s
            for text in self._texts
            for number, position in text.undecided()
        ]
        return min(due, default=None)

    def expire(self, now: float) -> Delta | None:
        """Make the filters rule on text held beyond their limits; return what can be sent."""
        self._busy = True
        for text in self._texts:
            for number, position in text.undecided():
                if self._arrived(position) + self._filters[number].max_held_s <= now:
                    text.expire(number)
        self._busy = False
        return self.release()

    def close(self) -> None:
        """Discard all held text and accept nothing further."""
        self.over = True
        for text in self._texts:
            text.close()
        self._texts.clear()
        self._arrivals.clear()
        self._said.clear()
        if self._tokens is not None:
            self._tokens.clear()

    def _feed_all(self, delta: Delta) -> None:
        if delta.reasoning:
            if not self._hides_reasoning:
                self._feed(AnswerPart.REASONING, 0, delta.reasoning)
            if not delta.text and not delta.tool_calls:
                self._reasoning_tokens += len(delta.token_ids)
        if delta.text:
            self._feed(AnswerPart.CONTENT, 0, delta.text)
        for call in delta.tool_calls:
            if call.name or call.call_id:
                self._open_call(call)
            if call.arguments:
                self._feed(AnswerPart.TOOLS, call.index, call.arguments)

    def _feed(self, part: AnswerPart, call: int, more: str) -> None:
        texts = self._texts
        if not texts or texts[-1].whole or texts[-1].part is not part or texts[-1].call != call:
            self._finish_text()
            text = HeldText(part, call, self._end, before=self._said.get((part, call), ""))
            self._begin(text)
        self._end += len(more)
        texts[-1].feed(more, self._keep)

    def _open_call(self, call: ToolCallDelta) -> None:
        """Judge the name and the id of a call where the model may have written text into them."""
        self._finish_text()
        opening = HeldText(AnswerPart.TOOLS, call.index, self._end, opening=replace(call, arguments=""))
        known = not call.name or call.name in self._functions
        if known and (_OPAQUE.fullmatch(call.call_id) or _counts(call)):
            self._texts.append(opening)
        else:
            self._begin(opening)
            text = call.name if _OPAQUE.fullmatch(call.call_id) else f"{call.name} {call.call_id}"
            self._end += len(text)
            opening.feed(text, self._keep)
        opening.finish()

    def _begin(self, text: HeldText) -> None:
        self._texts.append(text)

        def ruled(begin: int, end: int, act: FilterAction) -> None:
            if self.over:
                return
            if act is FilterAction.END:
                self._cut = end if self._cut is None else min(end, self._cut)
            elif act is FilterAction.REDACT and self._tokens is not None:
                self._tokens.redact(begin, end)
            if not self._busy:
                self._ruled()

        text.begin(self._filters, self._subject(text.part), ruled)

    def _finish_text(self) -> None:
        if self._texts and not self._texts[-1].whole:
            text = self._texts[-1]
            text.finish()
            key = (text.part, text.call)
            if key in self._said or len(self._said) < _MAX_SAID:
                self._said[key] = text.said

    def _untouched(self, delta: Delta, begin: int) -> Delta | None:
        """Return `delta` unchanged if nothing was held and nothing of it must be held."""
        if self._tokens is not None or delta.finish is not None or self._cut is not None:
            return None
        if len(self._texts) > 1 or (self._texts and not self._texts[0].passes(begin)):
            return None
        self._arrivals.clear()
        return delta

    def _limit(self, decided: int) -> int:
        """Return the position up to which text can be sent."""
        if self._cut is not None:
            return min(decided, self._cut)
        if self._tokens is None or (self._last is not None and decided == self._end):
            return decided
        return self._tokens.limit(decided)

    def _decided(self) -> int:
        for text in self._texts:
            decided = text.decided()
            if decided < text.end:
                return decided
        return self._end

    def _send(self, pieces: _Pieces, limit: int) -> None:
        texts = self._texts
        while texts:
            text = texts[0]
            if self._cut is not None and text.base >= self._cut:
                return
            if text.opening is not None:
                if limit < text.end:
                    return
                pieces.calls.append(text.opened(text.opening))
            elif (stop := min(limit, text.end)) > text.out:
                self._send_part(pieces, text, text.show(stop))
            if not text.whole or text.out < text.end:
                return
            texts.popleft()

    def _send_part(self, pieces: _Pieces, text: HeldText, shown: str) -> None:
        if not shown:
            return
        if text.part is AnswerPart.CONTENT:
            pieces.content.append(shown)
        elif text.part is AnswerPart.REASONING:
            pieces.reasoning.append(shown)
        else:
            pieces.calls.append(ToolCallDelta(text.call, arguments=shown))

    def _arrived(self, position: int) -> float:
        """Return the arrival time of the character at `position`, which was not sent."""
        return self._arrivals[bisect_right(self._arrivals, position, key=_end_of)][1]


def _counts(call: ToolCallDelta) -> bool:
    """Return whether the id consists only of the name and a number, as with some models."""
    return re.fullmatch(rf"(?:functions\.)?{re.escape(call.name)}:\d{{1,6}}", call.call_id) is not None
