"""Contract of output filters: patterns, and a classifier over real HTTP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from tests.kit.gateway.classifier_server import classifier_server

from kvasir.clock import MonotonicClock
from kvasir.config.spec.filters import ClassifierFilterSpec, RegexFilterSpec
from kvasir.ports.output_filter import AnswerPart, FilterAction, FilterSubject, Judge, OutputFilter
from kvasir_platform.gateway.filters.classifier import ClassifierFilter
from kvasir_platform.gateway.filters.regex import RegexFilter

PATIENCE_S = 30.0
HELD = 64
SUBJECT = FilterSubject("m", AnswerPart.CONTENT, "acme")

Make = Callable[..., OutputFilter]
"""Makes a filter that finds `bad`, with fields of its spec."""


@dataclass
class Text:
    """A text under a filter, whose rulings are checked as they come."""

    fed: str = ""
    ruled: int = 0
    shown: str = ""
    ended: bool = False
    closed: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    judge: Judge = field(init=False)

    def begin(self, under: OutputFilter, before: str = "") -> Text:
        self.judge = under.judge(SUBJECT, self.rule, before)
        return self

    def rule(self, until: int, act: FilterAction) -> None:
        assert not self.ended
        assert not self.closed
        assert self.ruled <= until <= len(self.fed)
        assert act is FilterAction.END or until > self.ruled
        self.shown += "#" if act is FilterAction.REDACT else self.fed[self.ruled : until]
        self.ruled = until
        self.ended = act is FilterAction.END
        self.changed.set()

    def feed(self, text: str) -> None:
        # The judge may rule on it at once.
        self.fed += text
        self.judge.feed(text)

    async def decided(self) -> Text:
        self.judge.finish()
        async with asyncio.timeout(PATIENCE_S):
            while not self.ended and self.ruled < len(self.fed):
                self.changed.clear()
                await self.changed.wait()
        return self


@pytest_asyncio.fixture(params=["regex", "classifier"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    made: list[OutputFilter] = []

    def regex(**fields: Any) -> OutputFilter:
        spec = {"name": "f", "patterns": ["bad", "ba.*bad"], "max_held_chars": HELD, **fields}
        return RegexFilter(RegexFilterSpec.model_validate(spec), lambda _: None)

    async with classifier_server(spotted) as server:

        def classifier(**fields: Any) -> OutputFilter:
            spec = {
                "name": "f",
                "url": server.url,
                "private_address": True,
                "window_chars": 16,
                "overlap_chars": 4,
                "max_held_chars": HELD,
                "timeout_s": PATIENCE_S,
                **fields,
            }
            return ClassifierFilter.of(
                ClassifierFilterSpec.model_validate(spec),
                lambda _: None,
                now=MonotonicClock().now,
                rng=random.Random(1),
            )

        kinds: dict[str, Make] = {"regex": regex, "classifier": classifier}

        def keep(**fields: Any) -> OutputFilter:
            made.append(kinds[request.param](**fields))
            return made[-1]

        yield keep
        for each in made:
            await each.close()


def spotted(asked: dict[str, Any]) -> dict[str, Any]:
    at = asked["text"].find("bad")
    return {"flagged": at >= 0, "spans": [[at, at + 3]] if at >= 0 else []}


async def test_text_in_which_nothing_is_found_passes_whole(make: Make) -> None:
    text = Text().begin(make())
    for piece in ("all ", "is wel", "l, and ", "so it goes on", " to its end b"):
        text.feed(piece)
    assert (await text.decided()).shown == text.fed


async def test_what_is_found_is_redacted_and_the_rest_passes(make: Make) -> None:
    text = Text().begin(make(act="redact"))
    text.feed("this is b")
    text.feed("ad, you know")
    assert (await text.decided()).shown == "this is #, you know"


async def test_the_choice_ends_before_what_is_found(make: Make) -> None:
    text = Text().begin(make(act="end"))
    text.feed("this is b")
    text.feed("ad, you know")
    await text.decided()
    assert text.ended
    assert text.shown == "this is "


async def test_what_begins_before_an_interruption_is_found_after_it(make: Make) -> None:
    for before in ("so b", "x" * (HELD + 8) + "b"):
        text = Text().begin(make(act="redact"), before)
        text.feed("ad, you")
        text.feed(" know")
        assert (await text.decided()).shown == "#, you know"
        ended = Text().begin(make(act="end"), before)
        ended.feed("ad, you know")
        assert (await ended.decided()).ended
        assert ended.shown == ""


async def test_no_more_waits_than_the_bound(make: Make) -> None:
    text = Text().begin(make(at_bound="release"))
    for _ in range(50):
        text.feed("ba and so on ")
        assert len(text.fed) - text.ruled <= HELD


async def test_what_has_waited_for_too_long_is_ruled_on_at_once(make: Make) -> None:
    text = Text().begin(make(at_bound="release"))
    text.feed("ba")
    text.judge.expire()
    assert (text.ruled, text.ended) == (2, False)
    ending = Text().begin(make(at_bound="end"))
    ending.feed("ba")
    ending.judge.expire()
    assert (ending.shown, ending.ended) == ("", True)


async def test_nothing_is_ruled_after_it_was_closed(make: Make) -> None:
    text = Text().begin(make())
    text.feed("this is ba")
    text.judge.close()
    text.closed = True
    text.judge.feed("d")
    text.judge.expire()
    text.judge.finish()
    text.judge.close()


async def test_an_empty_text_needs_no_ruling(make: Make) -> None:
    text = Text().begin(make())
    await text.decided()
    assert (text.ruled, text.ended) == (0, False)


async def test_texts_are_judged_apart(make: Make) -> None:
    under = make(act="end")
    texts = [Text().begin(under) for _ in range(4)]
    for number, text in enumerate(texts):
        text.feed("this is b")
        text.feed("ad" if number == 2 else "ig")
    for number, text in enumerate(texts):
        assert (await text.decided()).ended is (number == 2)


async def test_it_applies_where_its_spec_says_and_nowhere_else(make: Make) -> None:
    under = make(models=("m",), tenants=("acme",), parts=("content",))
    assert under.applies(SUBJECT)
    assert not under.applies(FilterSubject("other", AnswerPart.CONTENT, "acme"))
    assert not under.applies(FilterSubject("m", AnswerPart.REASONING, "acme"))
    assert not under.applies(FilterSubject("m", AnswerPart.CONTENT))
