"""One text of a choice while filters judge it: how far each filter has ruled, and what can be shown."""

from __future__ import annotations

import json
from bisect import insort
from collections.abc import Callable, Sequence

from kvasir.core.requests import ToolCallDelta
from kvasir.ports.output_filter import AnswerPart, FilterAction, FilterSubject, Judge, OutputFilter

_NOT_JUDGED = 1 << 62

Ruled = Callable[[int, int, FilterAction], None]
"""`ruled(begin, end, act)`: a filter has ruled on this range of the choice; with END the choice ends at
`end`."""


class HeldText:
    """Positions count characters of the whole choice; `base` is the first, `out` the first that was not sent.
    `before` is the end of the earlier text of the same part. `opening` is the delta that begins a tool call;
    the text is then only the part of it to judge.

    A ruling is stored and reported to `ruled`; it has no other effect until `show`.
    """

    __slots__ = (
        "_judges",
        "_marks",
        "_redacted",
        "_ruled",
        "_waiting",
        "base",
        "call",
        "end",
        "opening",
        "out",
        "part",
        "said",
        "whole",
    )

    def __init__(
        self,
        part: AnswerPart,
        call: int,
        base: int,
        *,
        before: str = "",
        opening: ToolCallDelta | None = None,
    ) -> None:
        self.part = part
        self.call = call
        self.base = base
        self.end = base
        self.out = base
        self.said = before
        self.opening = opening
        self.whole = False
        self._waiting = ""
        self._judges: list[Judge | None] = []
        self._ruled: list[int] = []
        self._marks: list[tuple[int, int, str]] = []
        self._redacted = -1

    def begin(self, filters: Sequence[OutputFilter], subject: FilterSubject, ruled: Ruled) -> None:
        """Start the filters of `filters` that apply."""
        for number, each in enumerate(filters):
            if each.applies(subject):
                self._ruled.append(self.base)
                self._judges.append(
                    each.judge(subject, self._rule_of(number, each.replacement, ruled), self.said)
                )
            else:
                self._ruled.append(_NOT_JUDGED)
                self._judges.append(None)

    def feed(self, more: str, keep: int) -> None:
        """Add text; the last `keep` characters of the whole text are kept."""
        self.end += len(more)
        self._waiting += more
        self.said = (self.said + more)[-keep:]
        for judge in self._judges:
            if judge is not None:
                judge.feed(more)

    def finish(self) -> None:
        """End the text."""
        if not self.whole:
            self.whole = True
            for judge in self._judges:
                if judge is not None:
                    judge.finish()

    def expire(self, number: int) -> None:
        """Have filter `number` rule on the text that it holds."""
        judge = self._judges[number]
        if judge is not None and self._ruled[number] < self.end:
            judge.expire()

    def close(self) -> None:
        """Accept no more rulings."""
        for judge in self._judges:
            if judge is not None:
                judge.close()

    def decided(self) -> int:
        """Return the position up to which all filters have ruled."""
        decided = self.end
        for each in self._ruled:
            decided = min(decided, each)
        return decided

    def undecided(self) -> list[tuple[int, int]]:
        """Return, for each filter that holds text, its number and the position where that text begins."""
        return [(number, at) for number, at in enumerate(self._ruled) if at < self.end]

    def passes(self, begin: int) -> bool:
        """Return whether all text from `begin` on, and none before it, can be sent unchanged; if so, mark it
        as sent."""
        if self.out != begin or self._marks or self.opening is not None or self.decided() < self.end:
            return False
        self.out = self.end
        self._waiting = ""
        return True

    def show(self, stop: int) -> str:
        """Return the text up to `stop`, with replacements for redacted ranges, and mark it as sent."""
        begin, at, shown, count = self.out, self.out, [], 0
        for first, end, replacement in self._marks:
            if first >= stop:
                break
            count += 1
            if end <= at:
                continue
            if first > at:
                shown.append(self._waiting[at - begin : first - begin])
                at = first
            if self._redacted != at:
                shown.append(replacement)
            at = self._redacted = min(end, stop)
        shown.append(self._waiting[at - begin : stop - begin])
        self._marks[:count] = [mark for mark in self._marks[:count] if mark[1] > stop]
        self._waiting = self._waiting[stop - begin :]
        self.out = stop
        return "".join(shown)

    def opened(self, opening: ToolCallDelta) -> ToolCallDelta:
        """Return the delta that begins the call: `opening`, or one with neither name nor id of the model if
        any of it was redacted."""
        self.out = self.end
        if not self._marks:
            return opening
        return ToolCallDelta(self.call, call_id=f"call_{self.call}", name=self._marks[0][2])

    def _rule_of(self, number: int, replacement: str, ruled: Ruled) -> Callable[[int, FilterAction], None]:
        if self.part is AnswerPart.TOOLS and self.opening is None:
            # Inside a JSON string, where most matches in arguments are.
            replacement = json.dumps(replacement)[1:-1]

        def rule(until: int, act: FilterAction) -> None:
            begin, end = self._ruled[number], self.base + until
            if act is FilterAction.REDACT:
                insort(self._marks, (begin, end, replacement))
            self._ruled[number] = end
            ruled(begin, end, act)

        return rule
