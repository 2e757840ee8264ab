"""An answer past filters: it stands around another one, and where no filter applies there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, OutputParsing, Usage
from kvasir.native import StreamGaps
from kvasir.ports.output_filter import AnswerPart, FilterSubject, OutputFilter
from kvasir.ports.router import Lane
from kvasir_platform.gateway.filters.hold_back import HoldBack
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.answer import Answer
from kvasir_platform.gateway.openai.calls import Call


class _Function(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    function: _Function


class Timer(Protocol):
    """What `Timers` gives."""

    def cancel(self) -> None:
        """Do not call."""
        ...


Timers = Callable[[float, Callable[[], None]], Timer]
"""`timers(seconds, call)`: calls once, so much later. An event loop's `call_later` is one."""


@dataclass(frozen=True, slots=True)
class FilteredChoice:
    """What filters need to know of a call. `model` is what the client sent; `choices` how many there are;
    `lag` None where the client is shown neither token ids nor logprobs, else how many characters the
    engine's text may come later than its tokens; `functions` the names of those that the client offers to be
    called. What is hidden from the client is not judged."""

    model: str
    choices: int
    tenant: str = ""
    lag: float | None = None
    functions: frozenset[str] = frozenset()
    hides_reasoning: bool = False


def watched_by(call: Call, choices: int, tenant: str) -> FilteredChoice:
    """What filters need to know of `call`."""
    parsing = call.parsing
    shows_tokens = call.return_token_ids or call.answer_logprobs is not None
    return FilteredChoice(
        call.model,
        choices,
        tenant,
        _text_lag(call) if shows_tokens else None,
        _offered_functions(parsing),
        parsing is not None and not parsing.reasoning,
    )


def _text_lag(call: Call) -> float:
    """How many characters an engine's text may come later than its tokens: those of an incomplete one, and
    what may be the beginning of a stop string. Parsers may keep text for as long as they like."""
    return max([1, *map(len, call.sampling.stop)]) if call.parsing is None else math.inf


def _offered_functions(parsing: OutputParsing | None) -> frozenset[str]:
    if parsing is None or not parsing.tools:
        return frozenset()
    return frozenset(each.function.name for each in msgspec.json.decode(parsing.tools, type=list[_Tool]))


class FilteredAnswer:
    """`Answer` around `answer`. `bind` it to its generation before that starts, and `follow` the exchange
    after."""

    def __init__(
        self,
        answer: Answer,
        filters: Sequence[OutputFilter],
        watched: FilteredChoice,
        *,
        now: Callable[[], float],
        timers: Callable[[], Timers],
    ) -> None:
        self._answer = answer
        self._now = now
        self._timers = timers
        self._timer: Timer | None = None
        self._due_s = 0.0
        self._least_held_s = min(each.max_held_s for each in filters)
        self._finish: tuple[Usage, bytes] | None = None
        self._over = False
        self._end_choice: Callable[[int], None] = _nothing
        self._broken: Callable[[Exception], None] = _nothing

        def subject(part: AnswerPart) -> FilterSubject:
            return FilterSubject(watched.model, part, watched.tenant)

        self._choices = [
            HoldBack(
                filters,
                subject,
                ruled=partial(self._ruled, index),
                lag=watched.lag,
                functions=watched.functions,
                hides_reasoning=watched.hides_reasoning,
            )
            for index in range(watched.choices)
        ]

    def bind(self, end_choice: Callable[[int], None], broken: Callable[[Exception], None]) -> None:
        """`end_choice` and `broken` of the generation."""
        self._end_choice = end_choice
        self._broken = broken

    def follow(self, exchange: Exchange) -> None:
        """Stop when the client of `exchange` is gone."""
        before = exchange.on_gone

        def gone(code: str) -> None:
            self.close()
            if before is not None:
                before(code)

        exchange.on_gone = gone

    def delta(self, index: int, delta: Delta) -> None:
        """Pass on what may go out."""
        held = self._choices[index]
        if self._over or held.over:
            return
        now = self._now()
        shown = held.take(delta, now)
        if shown is not None:
            self._pass_on(index, held, shown)
        if delta.finish is not None and any(each.cut for each in self._choices):
            # A choice that ended by itself may have been the last one that its leg was still running for.
            self._end_choice(index)
        # What has come now is not due before what was waited for already.
        if held.waits and (self._timer is None or self._due_s > now + self._least_held_s):
            self._arm(held)

    def lane(self, index: int, gaps: StreamGaps) -> Lane | None:
        """None: the filters have to see all of it."""
        return None

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Pass it on when everything has been ruled on."""
        if self._over:
            return
        self._finish = (usage, timing)
        for index, held in enumerate(self._choices):
            shown = held.settle()
            if shown is not None:
                self._pass_on(index, held, shown)
        self._complete()
        self._arm(*self._choices)

    def fail(self, error: KvasirError) -> None:
        """Pass it on. What waits does not go out."""
        if not self._over:
            self.close()
            self._answer.fail(error)

    def close(self) -> None:
        """The client is gone: judge nothing more."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for held in self._choices:
            held.close()

    def _pass_on(self, index: int, held: HoldBack, shown: Delta) -> None:
        self._answer.delta(index, shown)
        if held.cut:
            self._end_choice(index)

    def _ruled(self, index: int) -> None:
        """A ruling has come by itself."""
        try:
            held = self._choices[index]
            shown = held.release()
            if shown is not None:
                self._pass_on(index, held, shown)
            self._complete()
            self._arm(held)
        # It comes from a filter, which has nothing to do with how answers are written.
        except Exception as error:  # noqa: BLE001
            self._fault(error)

    def _complete(self) -> None:
        if self._finish is not None and not self._over and all(held.over for held in self._choices):
            usage, timing = self._finish
            self.close()
            self._answer.finish(usage, timing)

    def _arm(self, *choices: HoldBack) -> None:
        """Be called when text of any of these will have waited for too long."""
        due = min((s for held in choices if (s := held.due_s()) is not None), default=None)
        if due is None or self._over:
            return
        if self._timer is not None:
            if self._due_s <= due:
                return
            self._timer.cancel()
        self._due_s = due
        self._timer = self._timers()(max(0.0, due - self._now()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        try:
            now = self._now()
            for index, held in enumerate(self._choices):
                shown = None if held.over else held.expire(now)
                if shown is not None:
                    self._pass_on(index, held, shown)
            self._complete()
            self._arm(*self._choices)
        # As in `_ruled`: nobody else would hear of it.
        except Exception as error:  # noqa: BLE001
            self._fault(error)

    def _fault(self, error: Exception) -> None:
        self._broken(error)
        if not self._over:
            # The generation had ended already, and only the filters were waited for.
            self.fail(KvasirError("Internal error; the log has the details under this request id."))


def _nothing(_: object) -> None:
    """Nobody is bound yet."""
