"""Output filter that sends text to a classifier over HTTP.

A text is sent in windows, one at a time and in order; the next window fills during a request. The end of a
window that passed is held until the next one, which begins with it, so that text across a boundary is whole
in at least one window.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvasir.config.checks.outbound import parse_url
from kvasir.config.spec.filters import ClassifierFilterSpec
from kvasir.ports.output_filter import FilterAction, FilterSubject, RulingCallback
from kvasir_platform.gateway.filters.regex import Count
from kvasir_platform.gateway.filters.scope import FilterScope
from kvasir_platform.gateway.http.outbound import Resolve, client_context, system_resolve
from kvasir_platform.gateway.http.outbound_client import OutboundClient, OutboundEndpoint, OutboundError

_log = logging.getLogger(__name__)
_FIRST_WAIT_S = 0.02
_TELL_AGAIN_S = 10.0
"""Seconds between two log lines about one classifier that does not answer."""


class _Verdict(msgspec.Struct):
    flagged: bool
    spans: list[tuple[int, int]] = []


class _Result(msgspec.Struct):
    flagged: bool


class _Moderations(msgspec.Struct):
    results: list[_Result]


@dataclass(frozen=True, slots=True)
class ClassifierWindow:
    """The text of one classifier request. The first `new_from` characters were in the window before; `final`:
    the text ends with this window."""

    text: str
    new_from: int
    final: bool
    subject: FilterSubject


class ClassifierFilter:
    """`OutputFilter` that uses a classifier. `count` is called for each text that it changes or ends, and for
    each window without a verdict."""

    def __init__(
        self,
        spec: ClassifierFilterSpec,
        poster: OutboundClient,
        count: Count,
        *,
        now: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.name = spec.name
        self.replacement = spec.replacement
        self.max_held_chars = spec.max_held_chars
        self.max_held_s = spec.max_held_s
        self.spec = spec
        self.count = count
        self._poster = poster
        self._scope = FilterScope(spec)
        self._now = now
        self._rng = rng
        self._warned_s: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def of(
        cls,
        spec: ClassifierFilterSpec,
        count: Count,
        *,
        now: Callable[[], float],
        rng: random.Random,
        resolve: Resolve = system_resolve,
    ) -> ClassifierFilter:
        """Return the filter with its own connection pool. Raise OSError for a `ca_file` that cannot be
        read."""
        target = parse_url(spec.url)
        context = client_context(spec.ca_file) if target.scheme == "https" else None
        endpoint = OutboundEndpoint(target, spec.private_address, context, spec.token_file)
        poster = OutboundClient(endpoint, connections=spec.max_connections, now=now, resolve=resolve)
        return cls(spec, poster, count, now=now, rng=rng)

    def applies(self, subject: FilterSubject) -> bool:
        """Return whether the spec names the model, tenant and part."""
        return self._scope.has(subject)

    def judge(self, subject: FilterSubject, rule: RulingCallback, before: str = "") -> ClassifierJudge:
        """Begin a text."""
        overlap = self.spec.overlap_chars
        return ClassifierJudge(self, subject, rule, before[-overlap:] if overlap else "")

    def ask(
        self, window: ClassifierWindow, then: Callable[[list[tuple[int, int]] | None], None]
    ) -> asyncio.Task[None]:
        """Classify a window. `then` receives the flagged spans, or None if there is no verdict. Cancel the
        task to suppress the callback."""

        async def asked() -> None:
            then(await self._verdict(window))

        task = asyncio.get_running_loop().create_task(asked())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel all requests and close the connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._poster.close()

    async def _verdict(self, window: ClassifierWindow) -> list[tuple[int, int]] | None:
        problem = "it did not answer in time"
        try:
            body = self._body(window)
            async with asyncio.timeout(self.spec.timeout_s):
                for number in range(self.spec.retries + 1):
                    if number:
                        await asyncio.sleep(_FIRST_WAIT_S * 2**number * (0.5 + self._rng.random()))
                    try:
                        return self._read(await self._poster.post(body), len(window.text))
                    except OutboundError as error:
                        problem = str(error)
                        if not error.again:
                            break
                    except (msgspec.DecodeError, ValueError, RecursionError):
                        problem = "its answer is no verdict"
                        break
        except TimeoutError:
            pass
        except UnicodeEncodeError:
            problem = "the text has halves of characters, and cannot be sent"
        self._tell(problem)
        return None

    def _body(self, window: ClassifierWindow) -> bytes:
        spec, subject = self.spec, window.subject
        if spec.protocol == "moderations":
            asked = {"input": window.text}
            return msgspec.json.encode(asked if spec.model is None else asked | {"model": spec.model})
        return msgspec.json.encode(
            {
                "text": window.text,
                "new_from": window.new_from,
                "final": window.final,
                "part": subject.part.value,
                "model": subject.model,
                "tenant": subject.tenant,
            }
        )

    def _read(self, body: bytes, length: int) -> list[tuple[int, int]]:
        """Return the flagged spans of a response. Raise ValueError or msgspec.DecodeError if it is no
        verdict."""
        whole = [(0, length)]
        if self.spec.protocol == "moderations":
            results = msgspec.json.decode(body, type=_Moderations).results
            if not results:
                raise ValueError("no result")
            return whole if any(each.flagged for each in results) else []
        verdict = msgspec.json.decode(body, type=_Verdict)
        if not verdict.flagged:
            return []
        for begin, end in verdict.spans:
            if not 0 <= begin < end <= length:
                raise ValueError("a span lies outside the text")
        return sorted(verdict.spans) or whole

    def _tell(self, problem: str) -> None:
        now = self._now()
        if self._warned_s is None or now - self._warned_s >= _TELL_AGAIN_S:
            self._warned_s = now
            _log.warning("the output filter %s has no verdict of its classifier: %s", self.name, problem)


class ClassifierJudge:
    """One text, which begins after `before`. `ruled`, `judged` and `end` count the characters of both: what
    has been ruled on, what has been in a window that was sent, and all there are."""

    def __init__(
        self, judged_by: ClassifierFilter, subject: FilterSubject, rule: RulingCallback, before: str
    ) -> None:
        self._filter = judged_by
        self._spec = judged_by.spec
        self._subject = subject
        self._rule = rule
        self._kept = before
        """The text from `_kept_from` on: what windows to come may need."""
        self._kept_from = 0
        self._base = len(before)
        self._ruled = self._base
        self._judged = self._base
        self._end = self._base
        self._whole = False
        self._over = False
        self._redacts = False
        self._asked: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, text: str) -> None:
        """Add text."""
        if self._over:
            return
        self._kept += text
        self._end += len(text)
        self._go_on()
        if self._end - self._ruled > self._spec.max_held_chars:
            self.expire()
        # A window is never longer than what may wait: what has been let through is not asked of without end.
        spare = len(self._kept) - self._spec.max_held_chars
        if spare > 0:
            self._kept = self._kept[spare:]
            self._kept_from += spare

    def finish(self) -> None:
        """Classify the rest of the text."""
        self._whole = True
        if not self._over:
            self._go_on()

    def expire(self) -> None:
        """Release the held text or end the choice, as the spec says. Windows are still classified."""
        if self._over or self._ruled >= self._end:
            return
        if self._spec.at_bound == "end":
            self._finish_with("ended_at_bound")
        else:
            self._filter.count("released_at_bound")
            self._advance(self._end, FilterAction.PASS)

    def close(self) -> None:
        """Send no more rulings and no more requests."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._asked is not None:
            self._asked.cancel()

    def _go_on(self, *, at_once: bool = False) -> None:
        """Send the next window if it is full, its wait is over, or the text has ended."""
        if self._asked is not None:
            return
        fresh = self._end - self._judged
        if not fresh:
            if self._whole:
                self._advance(self._end, FilterAction.PASS)
            return
        if fresh < self._spec.window_chars and not (self._whole or at_once):
            if self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self._spec.window_s, self._waited)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        begin = max(self._kept_from, self._judged - self._spec.overlap_chars)
        end = self._end
        window = ClassifierWindow(
            self._kept[begin - self._kept_from :],
            max(0, self._judged - begin),
            self._whole,
            self._subject,
        )
        self._judged = end
        self._asked = self._filter.ask(window, lambda spans: self._heard(begin, end, spans))

    def _waited(self) -> None:
        self._timer = None
        if not self._over:
            self._go_on(at_once=True)

    def _heard(self, begin: int, end: int, spans: list[tuple[int, int]] | None) -> None:
        self._asked = None
        if self._over:
            return
        if spans is None:
            closed = self._spec.on_failure == "closed"
            if closed:
                self._finish_with("failed_closed")
                return
            self._filter.count("failed_open")
            spans = []
        if spans and self._spec.act == "end":
            self._finish_with("ended", max(self._ruled, begin + spans[0][0]))
            return
        for first, last in spans:
            self._advance(begin + first, FilterAction.PASS)
            self._advance(begin + last, FilterAction.REDACT)
        last_one = self._whole and end == self._end
        self._advance(end if last_one else end - self._spec.overlap_chars, FilterAction.PASS)
        keep = max(self._kept_from, end - self._spec.overlap_chars)
        self._kept = self._kept[keep - self._kept_from :]
        self._kept_from = keep
        if not self._over:
            self._go_on()

    def _advance(self, until: int, act: FilterAction) -> None:
        if until > self._ruled and not self._over:
            if act is FilterAction.REDACT and not self._redacts:
                self._redacts = True
                self._filter.count("redacted")
            self._ruled = until
            self._rule(until - self._base, act)

    def _finish_with(self, what: str, until: int | None = None) -> None:
        self.close()
        self._filter.count(what)
        self._rule((self._ruled if until is None else until) - self._base, FilterAction.END)
