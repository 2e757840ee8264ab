"""One choice of an answer on its way past filters: what waits, what may go out, and in which order.

Pure: deltas and rulings in, deltas out. The parts of a choice are texts of their own, and a text ends where
another part follows it, so that nothing goes out before what the model wrote earlier. A part that is taken up
again is judged with the end of what it had said, since its client reads the two as one.
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
"""Parts of one choice of which is known what they said: the calls of an answer may be many."""
_OPAQUE = re.compile(r"(?:(?:chatcmpl-tool-|call_(?:\d+_)?)?[0-9a-f-]{8,40}|[0-9A-Za-z]{9})?")
"""Ids of calls that parsers draw by lot. Some are what the model wrote."""

_end_of = itemgetter(0)


@dataclass(slots=True)
class _Pieces:
    """What goes out in one delta."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)


class HoldBack:
    """One choice. `lag` None: the client is shown neither token ids nor logprobs; else see `HeldTokens`.
    `functions` are names that the client knows, which are not judged where tools are called by them. `ruled`
    is called when a ruling comes at any time but within `take`, `expire` and `settle`; `release` then has
    what it frees. With `hides_reasoning` the client is not shown any."""

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
        # One more, so that a filter can tell where a part began.
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
        """Whether its end has gone out."""
        self.cut = False
        """Whether a filter has ended it."""

    @property
    def waits(self) -> bool:
        """Whether any text waits."""
        return bool(self._arrivals)

    def take(self, delta: Delta, now: float) -> Delta | None:
        """The choice goes on by `delta`; returns what may go out, None for nothing. `now` in seconds."""
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
        """No more deltas come, whether or not one said so."""
        if self._last is None and not self.over:
            self._busy = True
            self._last = replace(self._latest, token_ids=(), logprobs=(), prompt_logprobs=())
            self._finish_text()
            self._busy = False
        return self.release()

    def release(self, delta: Delta | None = None) -> Delta | None:
        """What may go out, with what else `delta` brought; None for nothing."""
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
            # Only an engine counts them well, and this one was not let come to its end.
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
        """When text will have waited for as long as a filter allows; None while none waits."""
        if not self._arrivals:
            return None
        due = [
            self._arrived(position) + self._filters[number].max_held_s
            for text in self._texts
            for number, position in text.undecided()
        ]
        return min(due, default=None)

    def expire(self, now: float) -> Delta | None:
        """Have the filters rule for which text has waited for too long; returns what may go out."""
        self._busy = True
        for text in self._texts:
            for number, position in text.undecided():
                if self._arrived(position) + self._filters[number].max_held_s <= now:
                    text.expire(number)
        self._busy = False
        return self.release()

    def close(self) -> None:
        """Nothing more is wanted of it."""
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
        """Judge what the model may have put into the name and the id of a call."""
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
        """`delta` itself where nothing waited, and nothing of it has to."""
        if self._tokens is not None or delta.finish is not None or self._cut is not None:
            return None
        if len(self._texts) > 1 or (self._texts and not self._texts[0].passes(begin)):
            return None
        self._arrivals.clear()
        return delta

    def _limit(self, decided: int) -> int:
        """How far text may go out."""
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
        """When the character at `position`, which has not gone out, came."""
        return self._arrivals[bisect_right(self._arrivals, position, key=_end_of)][1]


def _counts(call: ToolCallDelta) -> bool:
    """Whether the id says no more than the name and a number, as that of some models does."""
    return re.fullmatch(rf"(?:functions\.)?{re.escape(call.name)}:\d{{1,6}}", call.call_id) is not None
