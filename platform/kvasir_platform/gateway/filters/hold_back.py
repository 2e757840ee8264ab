"""One choice of an answer on its way past filters: what waits, what may go out, and in which order.

Pure: deltas and rulings in, deltas out. The parts of a choice are texts of their own, and a text ends where
another part follows it, so that nothing goes out before what the model wrote earlier.

What has no text of its own (token ids, logprobs) would tell what is redacted. Where a client is shown them,
they wait until the text that they stand for has been ruled on, together with it, and are left out where it is
redacted. An engine's text comes later than its tokens by an incomplete character or the length of a stop
string: `lag`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvasir.core.requests import Delta, FinishReason, PositionLogprobs, ToolCallDelta
from kvasir.ports.output_filter import Act, Judge, OutputFilter, Part, Subject


@dataclass(slots=True)
class _Text:
    """One text. Positions count characters of the whole choice; `base` is its first. `ruled` says for each
    filter how far it has ruled; `marks` are what is to be redacted, with the replacement."""

    part: Part
    call: int
    base: int
    end: int
    out: int
    judges: list[Judge | None] = field(default_factory=list)
    ruled: list[int] = field(default_factory=list)
    waiting: str = ""
    """The text from `out` on."""
    marks: list[tuple[int, int, str]] = field(default_factory=list)
    redacted: int = -1
    """Where the last redaction that went out ends."""
    headers: list[ToolCallDelta] = field(default_factory=list)
    """What begins a call, which goes out before its arguments."""
    whole: bool = False

    def decided(self) -> int:
        """How far all filters have ruled."""
        return min((min(each, self.end) for each in self.ruled), default=self.end)


@dataclass(slots=True)
class _Tokens:
    """Tokens of a step, whose text lies from `begin` to `lag` beyond `end`."""

    begin: int
    end: int
    ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(slots=True)
class _Pieces:
    """What goes out in one delta."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)


class HoldBack:
    """One choice. `lag` None: the client is shown neither token ids nor logprobs. `ruled` is called when a
    ruling comes at any time but within `take`, `expire` and `settle`; `release` then has what it frees."""

    def __init__(
        self,
        filters: Sequence[OutputFilter],
        subject: Callable[[Part], Subject],
        *,
        ruled: Callable[[], None],
        lag: int | None = None,
    ) -> None:
        self._filters = filters
        self._subject = subject
        self._ruled = ruled
        self._lag = lag
        self._texts: deque[_Text] = deque()
        self._end = 0
        self._cut: int | None = None
        self._tokens: deque[_Tokens] = deque()
        self._redacted: deque[tuple[int, int]] = deque()
        self._arrivals: deque[tuple[int, float]] = deque()
        self._last: Delta | None = None
        self._told = Delta("", 0)
        self._busy = False
        self.over = False
        """Whether its end has gone out."""
        self.cut = False
        """Whether a filter has ended it."""

    @property
    def finished(self) -> bool:
        """Whether the model has ended it."""
        return self._last is not None

    def take(self, delta: Delta, now: float) -> Delta | None:
        """The choice goes on by `delta`; returns what may go out, None for nothing. `now` in seconds."""
        if self.over or self._last is not None:
            return None
        self._told = delta
        begin = self._end
        self._busy = True
        if delta.reasoning:
            self._feed(Part.REASONING, 0, delta.reasoning)
        if delta.text:
            self._feed(Part.CONTENT, 0, delta.text)
        for call in delta.tool_calls:
            self._feed_call(call)
        if delta.finish is not None:
            self._last = delta
            self._finish_text()
        self._busy = False
        if self._end > begin:
            self._arrivals.append((self._end, now))
        if self._lag is not None and (delta.token_ids or delta.logprobs):
            self._tokens.append(_Tokens(begin, self._end, delta.token_ids, delta.logprobs))
        return self._untouched(delta, begin) or self.release(delta)

    def settle(self) -> Delta | None:
        """No more deltas come, whether or not one said so."""
        if self._last is None and not self.over:
            self._busy = True
            self._last = replace(self._told, token_ids=(), logprobs=(), prompt_logprobs=())
            self._finish_text()
            self._busy = False
        return self.release()

    def release(self, delta: Delta | None = None) -> Delta | None:
        """What may go out, with what else `delta` brought; None for nothing."""
        if self.over:
            return None
        pieces = _Pieces()
        limit = self._limit()
        self._send(pieces, limit)
        ids, logprobs = self._send_tokens(limit) if self._lag is not None else ((), ())
        self._forget(limit)
        shown = Delta(
            request_id=self._told.request_id,
            offset=self._told.offset,
            index=self._told.index,
            token_ids=ids if delta is None or self._lag is not None else delta.token_ids,
            logprobs=logprobs,
            text="".join(pieces.content),
            reasoning="".join(pieces.reasoning),
            tool_calls=tuple(pieces.calls),
            prompt_logprobs=() if delta is None else delta.prompt_logprobs,
            raw_length=None if delta is None else delta.raw_length,
        )
        if self._cut is not None:
            self.cut = True
            self._close()
            return replace(shown, finish=FinishReason.CONTENT_FILTER)
        if self._last is not None and not self._texts:
            last = self._last
            self._close()
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
            arrived + self._filters[number].max_held_s
            for number, position in self._positions()
            if (arrived := self._arrived(position)) is not None
        ]
        return min(due, default=None)

    def expire(self, now: float) -> Delta | None:
        """Have the filters rule for which text has waited for too long; returns what may go out."""
        late = {
            number
            for number, position in self._positions()
            if (arrived := self._arrived(position)) is not None
            and arrived + self._filters[number].max_held_s <= now
        }
        self._busy = True
        for text in self._texts:
            for number in late:
                judge = text.judges[number]
                if judge is not None and text.ruled[number] < text.end:
                    judge.expire()
        self._busy = False
        return self.release()

    def close(self) -> None:
        """Nothing more is wanted of it."""
        self._close()

    def _feed(self, part: Part, call: int, more: str) -> None:
        text = self._text(part, call)
        text.end += len(more)
        self._end += len(more)
        text.waiting += more
        for judge in text.judges:
            if judge is not None:
                judge.feed(more)

    def _feed_call(self, call: ToolCallDelta) -> None:
        text = self._text(Part.TOOLS, call.index)
        if call.name or call.call_id:
            text.headers.append(replace(call, arguments=""))
        if call.arguments:
            self._feed(Part.TOOLS, call.index, call.arguments)

    def _text(self, part: Part, call: int) -> _Text:
        """The text that goes on, or a new one where another part begins."""
        texts = self._texts
        if texts and not texts[-1].whole:
            if texts[-1].part is part and texts[-1].call == call:
                return texts[-1]
            self._finish_text()
        text = _Text(part, call, self._end, self._end, self._end)
        texts.append(text)
        subject = self._subject(part)
        for number, each in enumerate(self._filters):
            if each.applies(subject):
                text.ruled.append(self._end)
                text.judges.append(each.judge(subject, self._rule_of(text, number)))
            else:
                text.ruled.append(1 << 62)
                text.judges.append(None)
        return text

    def _finish_text(self) -> None:
        if self._texts and not self._texts[-1].whole:
            text = self._texts[-1]
            text.whole = True
            for judge in text.judges:
                if judge is not None:
                    judge.finish()

    def _rule_of(self, text: _Text, number: int) -> Callable[[int, Act], None]:
        replacement = self._filters[number].replacement
        if text.part is Part.TOOLS:
            # Within JSON's quotes, where most of what is found in arguments stands.
            replacement = json.dumps(replacement)[1:-1]

        def rule(until: int, act: Act) -> None:
            if self.over:
                return
            at = text.base + until
            if act is Act.END:
                self._cut = at if self._cut is None else min(at, self._cut)
            elif act is Act.REDACT:
                text.marks.append((text.ruled[number], at, replacement))
            text.ruled[number] = at
            if not self._busy:
                self._ruled()

        return rule

    def _untouched(self, delta: Delta, begin: int) -> Delta | None:
        """`delta` itself where nothing waited, and nothing of it has to."""
        if self._lag is not None or delta.finish is not None or self._cut is not None or len(self._texts) > 1:
            return None
        if self._texts:
            text = self._texts[0]
            if text.out != begin or text.marks or text.decided() < text.end:
                return None
            text.out = text.end
            text.waiting = ""
            text.headers.clear()
        self._arrivals.clear()
        return delta

    def _limit(self) -> int:
        """How far text may go out."""
        decided = self._decided()
        if self._cut is not None:
            decided = min(decided, self._cut)
        if self._lag is None:
            return decided
        if self._last is not None and decided == self._end:
            return decided
        # Text goes out with its tokens, or not at all.
        limit = 0
        for tokens in self._tokens:
            if tokens.end + self._lag > decided:
                return max(limit, tokens.begin) if self._cut is None else decided
            limit = tokens.end
        return decided

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
            pieces.calls.extend(text.headers)
            text.headers.clear()
            stop = min(limit, text.end)
            if stop > text.out:
                self._send_part(pieces, text, stop)
            if not text.whole or text.out < text.end:
                return
            texts.popleft()

    def _send_part(self, pieces: _Pieces, text: _Text, stop: int) -> None:
        begin, at, shown = text.out, text.out, []
        for first, end, replacement in sorted(text.marks):
            if end <= at or first >= stop:
                continue
            if first > at:
                shown.append(text.waiting[at - begin : first - begin])
                at = first
            if text.redacted != at:
                shown.append(replacement)
            at = text.redacted = min(end, stop)
            self._redacted.append((first, at))
        shown.append(text.waiting[at - begin : stop - begin])
        text.marks = [mark for mark in text.marks if mark[1] > stop]
        text.waiting = text.waiting[stop - begin :]
        text.out = stop
        joined = "".join(shown)
        if not joined:
            return
        if text.part is Part.CONTENT:
            pieces.content.append(joined)
        elif text.part is Part.REASONING:
            pieces.reasoning.append(joined)
        else:
            pieces.calls.append(ToolCallDelta(text.call, arguments=joined))

    def _send_tokens(self, limit: int) -> tuple[tuple[int, ...], tuple[PositionLogprobs, ...]]:
        """Those whose text has been ruled on, but for those of which some was redacted or cut off."""
        ids: list[int] = []
        logprobs: list[PositionLogprobs] = []
        lag = self._lag or 0
        whole = self._last is not None and self._cut is None and limit == self._end
        decided = self._decided()
        while self._tokens:
            tokens = self._tokens[0]
            reach = tokens.end + lag
            if not whole and (reach > decided or (self._cut is not None and reach > self._cut)):
                break
            self._tokens.popleft()
            marked = self._redacted_within(tokens.begin, reach)
            if not marked:
                ids.extend(tokens.ids)
                logprobs.extend(tokens.logprobs)
        return tuple(ids), tuple(logprobs)

    def _redacted_within(self, begin: int, end: int) -> bool:
        """Whether anything in there was redacted, or is to be."""
        if any(first < end and last > begin for first, last in self._redacted):
            return True
        return any(first < end and last > begin for text in self._texts for first, last, _ in text.marks)

    def _forget(self, limit: int) -> None:
        while self._arrivals and self._arrivals[0][0] <= limit:
            self._arrivals.popleft()
        needed = self._tokens[0].begin if self._tokens else limit
        while self._redacted and self._redacted[0][1] <= needed:
            self._redacted.popleft()

    def _positions(self) -> list[tuple[int, int]]:
        """For each filter that lets text wait, its number and where that begins."""
        return [
            (number, text.ruled[number])
            for text in self._texts
            for number, judge in enumerate(text.judges)
            if judge is not None and text.ruled[number] < text.end
        ]

    def _arrived(self, position: int) -> float | None:
        """When the character at `position` came."""
        for end, at in self._arrivals:
            if end > position:
                return at
        return None

    def _close(self) -> None:
        self.over = True
        for text in self._texts:
            for judge in text.judges:
                if judge is not None:
                    judge.close()
        self._texts.clear()
        self._tokens.clear()
        self._arrivals.clear()
        self._redacted.clear()
