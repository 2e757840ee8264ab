"""The classifier's filter: its requests, the effect of verdicts, and failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.kit.gateway.classifier_server import ClassifierServer, classifier_server, status

from kvasir.clock import MonotonicClock
from kvasir.config.spec.filters import ClassifierFilterSpec
from kvasir.ports.output_filter import AnswerPart, FilterAction, FilterSubject
from kvasir_platform.gateway.filters.classifier import ClassifierFilter, ClassifierJudge

SUBJECT = FilterSubject("m", AnswerPart.CONTENT, "acme")
PATIENCE_S = 30.0


class Text:
    """One text under a classifier's filter, and the rulings on it."""

    def __init__(self, under: ClassifierFilter, before: str = "") -> None:
        self.rulings: list[tuple[int, FilterAction]] = []
        self._changed = asyncio.Event()
        self.judge: ClassifierJudge = under.judge(SUBJECT, self._rule, before)

    def _rule(self, until: int, act: FilterAction) -> None:
        self.rulings.append((until, act))
        self._changed.set()

    async def ruled(self, count: int = 1) -> list[tuple[int, FilterAction]]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.rulings) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.rulings


class Filtered:
    def __init__(self, server: ClassifierServer, **fields: Any) -> None:
        spec = {
            "name": "f",
            "url": server.url,
            "private_address": True,
            "window_chars": 16,
            "overlap_chars": 4,
            "timeout_s": PATIENCE_S,
            "window_s": 60.0,
        }
        self.counts: list[str] = []
        self.server = server
        self.filter = ClassifierFilter.of(
            ClassifierFilterSpec.model_validate(spec | fields),
            self.counts.append,
            now=MonotonicClock().now,
            rng=random.Random(1),
        )

    def text(self, before: str = "") -> Text:
        return Text(self.filter, before)


def _same(said: object, asked: dict[str, Any]) -> object:
    return said


@asynccontextmanager
async def filtered(**fields: Any) -> AsyncIterator[Filtered]:
    async with classifier_server() as server:
        made = Filtered(server, **fields)
        try:
            yield made
        finally:
            await made.filter.close()


async def test_windows_overlap_and_their_end_waits_for_the_next() -> None:
    async with filtered() as bench:
        text = bench.text()
        text.judge.feed("0123456789")
        text.judge.feed("abcdef")
        assert await text.ruled() == [(12, FilterAction.PASS)]
        text.judge.feed("ghi")
        text.judge.finish()
        assert await text.ruled(2) == [(12, FilterAction.PASS), (19, FilterAction.PASS)]
        assert bench.server.asked == [
            {
                "text": "0123456789abcdef",
                "new_from": 0,
                "final": False,
                "part": "content",
                "model": "m",
                "tenant": "acme",
            },
            {
                "text": "cdefghi",
                "new_from": 4,
                "final": True,
                "part": "content",
                "model": "m",
                "tenant": "acme",
            },
        ]
        assert bench.server.connections == 1


async def test_what_is_flagged_ends_the_choice_before_what_had_not_gone_out() -> None:
    async with filtered() as bench:
        bench.server.reply = lambda asked: {"flagged": "bad" in asked["text"]}
        text = bench.text()
        text.judge.feed("0123456789abcdba")
        await text.ruled()
        text.judge.feed("d and more of it")
        assert await text.ruled(2) == [(12, FilterAction.PASS), (12, FilterAction.END)]
        assert bench.counts == ["ended"]


async def test_spans_are_redacted_and_the_rest_of_their_window_passes() -> None:
    async with filtered(act="redact") as bench:
        bench.server.reply = lambda _: {"flagged": True, "spans": [[8, 10], [2, 4]]}
        text = bench.text()
        text.judge.feed("0123456789abc")
        text.judge.finish()
        assert await text.ruled(5) == [
            (2, FilterAction.PASS),
            (4, FilterAction.REDACT),
            (8, FilterAction.PASS),
            (10, FilterAction.REDACT),
            (13, FilterAction.PASS),
        ]
        assert bench.counts == ["redacted"]


async def test_without_spans_the_whole_window_is_redacted() -> None:
    async with filtered(act="redact") as bench:
        bench.server.reply = lambda _: {"flagged": True}
        text = bench.text()
        text.judge.feed("0123")
        text.judge.finish()
        assert await text.ruled() == [(4, FilterAction.REDACT)]


async def test_a_moderations_endpoint_is_asked_in_its_own_words() -> None:
    async with filtered(protocol="moderations", model="guard") as bench:
        bench.server.reply = lambda asked: {"id": "x", "results": [{"flagged": "bad" in asked["input"]}]}
        good, bad = bench.text(), bench.text()
        good.judge.feed("good")
        good.judge.finish()
        assert await good.ruled() == [(4, FilterAction.PASS)]
        bad.judge.feed("bad")
        bad.judge.finish()
        assert await bad.ruled() == [(0, FilterAction.END)]
        assert bench.server.asked[0] == {"input": "good", "model": "guard"}


async def test_a_window_that_does_not_fill_is_sent_after_a_while() -> None:
    async with filtered(window_s=0.01) as bench:
        text = bench.text()
        text.judge.feed("12345")
        assert await text.ruled() == [(1, FilterAction.PASS)]
        assert bench.server.asked[0]["final"] is False


BAD = {
    "an error": status(500),
    "a refusal": status(403),
    "a redirect": status(302, b"location: http://127.0.0.1:1/\r\n"),
    "no JSON": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi",
    "no verdict": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "a span outside": b'HTTP/1.1 200 OK\r\ncontent-length: 35\r\n\r\n{"flagged": true,"spans": [[0,99]]}',
    "no HTTP": b"SSH-2.0-OpenSSH\r\n",
    "half a body": None,
    "no end of headers": b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 20_000 + b"\r\n\r\n",
    "two answers": b'HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n{"flagged":false}' + status(200),
    "a deep one": b'HTTP/1.1 200 OK\r\ncontent-length: 200016\r\n\r\n{"flagged":true,"x":' + b"[" * 199_996,
    "a huge body": b"HTTP/1.1 200 OK\r\ncontent-length: 300000\r\n\r\n" + b" " * 300_000,
}


@pytest.mark.parametrize("what", list(BAD))
@pytest.mark.parametrize(
    ("on_failure", "act", "count"),
    [("closed", FilterAction.END, "failed_closed"), ("open", FilterAction.PASS, "failed_open")],
)
async def test_without_a_verdict_the_spec_decides(
    what: str, on_failure: str, act: FilterAction, count: str
) -> None:
    async with filtered(on_failure=on_failure) as bench:
        bench.server.reply = lambda _: BAD[what]
        text = bench.text()
        text.judge.feed("12345")
        text.judge.finish()
        assert await text.ruled() == [(5 if act is FilterAction.PASS else 0, act)]
        assert bench.counts == [count]


@pytest.mark.parametrize(("code", "tries"), [(500, 3), (503, 3), (429, 3), (408, 3), (400, 1), (307, 1)])
async def test_only_what_may_go_better_is_tried_again_and_only_so_often(code: int, tries: int) -> None:
    async with filtered(retries=2) as bench:
        bench.server.reply = lambda _: status(code)
        text = bench.text()
        text.judge.feed("12345")
        text.judge.finish()
        assert await text.ruled() == [(0, FilterAction.END)]
        assert len(bench.server.asked) == tries


async def test_a_further_try_that_goes_well_is_the_verdict() -> None:
    async with filtered() as bench:
        replies: list[object] = [{"flagged": False}, status(503)]
        bench.server.reply = lambda _: replies.pop()
        text = bench.text()
        text.judge.feed("12345")
        text.judge.finish()
        assert await text.ruled() == [(5, FilterAction.PASS)]


async def test_a_classifier_that_says_nothing_is_waited_for_no_longer_than_the_spec_says() -> None:
    async with filtered(timeout_s=0.05) as bench:
        bench.server.gate.clear()
        text = bench.text()
        text.judge.feed("12345")
        text.judge.finish()
        assert await text.ruled() == [(0, FilterAction.END)]


async def test_an_early_hint_is_no_answer() -> None:
    async with filtered() as bench:
        said = b'HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n{"flagged":true}'
        bench.server.reply = lambda _: b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + said
        text = bench.text()
        text.judge.feed("12345")
        text.judge.finish()
        assert await text.ruled() == [(0, FilterAction.END)]
        assert bench.counts == ["ended"]


async def test_text_that_is_no_unicode_has_no_verdict() -> None:
    async with filtered() as bench:
        text = bench.text()
        text.judge.feed("half \ud83d of it")
        text.judge.finish()
        assert await text.ruled() == [(0, FilterAction.END)]
        assert bench.counts == ["failed_closed"]


async def test_a_window_is_never_longer_than_what_may_wait() -> None:
    async with filtered(max_held_chars=20, at_bound="release") as bench:
        bench.server.gate.clear()
        text = bench.text()
        text.judge.feed("0123456789abcdef")
        await bench.server.met.wait()
        for _ in range(100):
            text.judge.feed("0123456789")
        bench.server.gate.set()
        text.judge.finish()
        while text.rulings[-1][0] < 1016:
            await text.ruled(len(text.rulings) + 1)
        other = bench.text()
        other.judge.feed("12345")
        other.judge.finish()
        await other.ruled()
        assert max(len(each["text"]) for each in bench.server.asked) <= 20
        assert text.rulings[-1][0] == 1016


async def test_a_text_that_goes_on_is_asked_of_with_its_end_before_and_only_the_rest_is_ruled_on() -> None:
    async with filtered(act="redact") as bench:
        bench.server.reply = lambda _: {"flagged": True, "spans": [[2, 7]]}
        text = bench.text(before="long ago sec")
        text.judge.feed("ret or not")
        text.judge.finish()
        assert await text.ruled(2) == [(3, FilterAction.REDACT), (10, FilterAction.PASS)]
        assert bench.server.asked[0]["text"] == " secret or not"
        assert bench.server.asked[0]["new_from"] == 4


async def test_no_connection_is_opened_without_the_token(tmp_path: Path) -> None:
    async with filtered(token_file=str(tmp_path / "missing")) as bench:
        text = bench.text()
        text.judge.feed("12345")
        text.judge.finish()
        assert await text.ruled() == [(0, FilterAction.END)]
        assert bench.server.connections == 0


async def test_nobody_listening_is_a_failure_like_others() -> None:
    async with classifier_server() as server:
        server.port = 1
        bench = Filtered(server, on_failure="open", retries=0)
        text = bench.text()
        text.judge.feed("12345")
        text.judge.finish()
        assert await text.ruled() == [(5, FilterAction.PASS)]


async def test_a_connection_that_was_closed_while_idle_costs_no_try() -> None:
    async with filtered(retries=0) as bench:
        close = b'HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n{"flagged":false}'
        bench.server.reply = lambda _: close
        first = bench.text()
        first.judge.feed("12345")
        first.judge.finish()
        await first.ruled()
        # The next request on the same connection is answered by closing it, as idle ones are.
        replies: list[object] = [close, None]
        bench.server.reply = lambda _: replies.pop()
        second = bench.text()
        second.judge.feed("12345")
        second.judge.finish()
        assert await second.ruled() == [(5, FilterAction.PASS)]
        assert bench.server.connections == 2


async def test_no_more_connections_are_open_than_the_spec_allows() -> None:
    async with filtered(max_connections=2) as bench:
        texts = [bench.text() for _ in range(8)]
        for text in texts:
            text.judge.feed("12345")
            text.judge.finish()
        for text in texts:
            await text.ruled()
        assert bench.server.most_open == 2


async def test_the_token_is_read_anew_for_a_new_connection(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    async with filtered(token_file=str(token)) as bench:
        for value in ("first", "second"):
            token.write_text(f"{value}\n")
            closing = b'HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 17\r\n\r\n{"flagged":false}'
            bench.server.reply = partial(_same, closing)
            text = bench.text()
            text.judge.feed("12345")
            text.judge.finish()
            await text.ruled()
            assert f"authorization: Bearer {value}\r\n" in bench.server.heads[-1]


async def test_text_beyond_the_bound_is_let_through_or_ends_the_choice() -> None:
    for at_bound, ruling in (("release", (26, FilterAction.PASS)), ("end", (0, FilterAction.END))):
        async with filtered(max_held_chars=20, at_bound=at_bound) as bench:
            bench.server.gate.clear()
            text = bench.text()
            text.judge.feed("0123456789abcdef")
            text.judge.feed("0123456789")
            assert text.rulings == [ruling]


async def test_what_is_flagged_after_it_was_let_through_still_ends_the_choice() -> None:
    async with filtered(at_bound="release") as bench:
        bench.server.reply = lambda _: {"flagged": True}
        bench.server.gate.clear()
        text = bench.text()
        text.judge.feed("0123456789abcdef")
        text.judge.expire()
        bench.server.gate.set()
        assert await text.ruled(2) == [(16, FilterAction.PASS), (16, FilterAction.END)]


async def test_a_closed_judge_asks_and_says_nothing_more() -> None:
    async with filtered() as bench:
        bench.server.gate.clear()
        text = bench.text()
        text.judge.feed("0123456789abcdef")
        await bench.server.met.wait()
        text.judge.close()
        bench.server.gate.set()
        other = bench.text()
        other.judge.feed("12345")
        other.judge.finish()
        await other.ruled()
        assert text.rulings == []


async def test_a_classifier_on_a_private_address_needs_leave() -> None:
    async with classifier_server() as server:
        bench = Filtered(server)
        spec = bench.filter.spec.model_copy(update={"private_address": False, "url": "http://a.example.com/"})

        async def inside(host: str, port: int) -> list[str]:
            return ["127.0.0.1"]

        made = ClassifierFilter.of(
            spec, bench.counts.append, now=MonotonicClock().now, rng=random.Random(1), resolve=inside
        )
        text = Text(made)
        text.judge.feed("12345")
        text.judge.finish()
        assert await text.ruled() == [(0, FilterAction.END)]
        assert server.connections == 0
        await made.close()
