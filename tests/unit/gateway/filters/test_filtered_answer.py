"""Filters on answers of a real call: what the client reads, and what workers receive."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.kit.gateway.api_answers import (
    FIRST_TIMING,
    Received,
    RecordingWire,
    exchange_on,
    ids,
    joined,
    received,
)
from tests.kit.gateway.classifier_server import classifier_server
from tests.kit.gateway.scripted_router import ScriptedRouter, ScriptedStream

from kvasir.clock import MonotonicClock
from kvasir.config.spec.filters import OutputFiltersSpec
from kvasir.core.errors import UpstreamError
from kvasir.core.requests import FinishReason, OutputParsing, Request, Sampling, ToolCallDelta
from kvasir.telemetry.metrics import Metrics
from kvasir_platform.gateway.filters.build import output_filters
from kvasir_platform.gateway.filters.filtered_answer import FilteredAnswer
from kvasir_platform.gateway.openai.answer import AnswerHead, Prompt
from kvasir_platform.gateway.openai.calls import Call as ApiCall
from kvasir_platform.gateway.openai.streamed_answer import ChatShape, StreamedAnswer
from kvasir_platform.gateway.openai.whole_answer import WholeAnswer
from kvasir_platform.gateway.serving.generation import Generation

PATIENCE_S = 30.0


def regex(**fields: Any) -> dict[str, Any]:
    return {"name": "words", "patterns": ["secret"], **fields}


class Call:
    """A call of one prompt past the filters of a spec."""

    def __init__(
        self,
        spec: dict[str, Any],
        *,
        n: int = 1,
        stream: bool = True,
        shows_tokens: bool = False,
        stop: tuple[str, ...] = (),
        parsing: OutputParsing | None = None,
        tenant: str = "",
    ) -> None:
        self.wire = RecordingWire()
        self.exchange = exchange_on(self.wire)
        self.clock = MonotonicClock()
        self.router = ScriptedRouter(self.clock)
        self.metrics = Metrics(CollectorRegistry(), ["m"])
        sampling = Sampling(n=n, stop=stop)
        asked = ApiCall(
            "m",
            (ids(1, 2),),
            sampling,
            stream=stream,
            include_usage=True,
            add_special_tokens=False,
            salt="",
            parsing=parsing,
            return_token_ids=shows_tokens,
        )
        head = AnswerHead("a", 1, "m", n, include_usage=True, parsing=parsing)
        if shows_tokens:
            head = replace(head, logprobs=0, return_token_ids=True, prompts=(Prompt(ids(1, 2)),))
        plain = (
            StreamedAnswer(self.exchange, head, ChatShape(), lambda: FIRST_TIMING)
            if stream
            else WholeAnswer(self.exchange, head, chat=True)
        )
        filters = output_filters(
            OutputFiltersSpec.model_validate(spec), self.metrics, now=self.clock.now, rng=random.Random(1)
        )
        self.filters = filters
        self.filtered = filters.around(plain, asked, choices=n, tenant=tenant)
        self.answer = self.filtered or plain
        self.generation = Generation(
            self.exchange,
            self.answer,
            router=self.router,
            metrics=self.metrics,
            spans=None,
            clock=self.clock,
            on_end=lambda _: None,
        )
        if self.filtered is not None:
            self.filtered.bind(self.generation.end_choice, self.generation.broken)
        self.generation.start([Request("r", "m", ids(1, 2), sampling)])
        if self.filtered is not None:
            self.filtered.follow(self.exchange)

    @property
    def engine(self) -> ScriptedStream:
        return self.router.streams[0]

    @property
    def got(self) -> Received:
        return received(self.wire.sent)

    async def answered(self) -> dict[str, Any]:
        """The whole answer, or what a client makes of the stream."""
        async with asyncio.timeout(PATIENCE_S):
            while self.wire.closed is None:
                await asyncio.sleep(0)
        if self.got.headers["content-type"] == "application/json":
            return dict(self.got.json)
        return joined(self.got.events)

    def counted(self, act: str) -> float:
        line = f'kvasir_output_filter_acts_total{{act="{act}",filter="words"}} '
        return float(self.metrics.render().decode().partition(line)[2].partition("\n")[0] or 0)


both = pytest.mark.parametrize("stream", [True, False])


@both
async def test_a_choice_ends_with_content_filter_and_its_worker_is_freed(stream: bool) -> None:
    call = Call({"regex": [regex()]}, stream=stream)
    for piece in ("my sec", "ret is", " never"):
        call.engine.emit(piece)
    answer = await call.answered()
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("my ", "content_filter")
    assert call.router.cancelled == ["r"]
    assert answer["usage"]["completion_tokens"] == 3
    assert call.counted("ended") == 1


@both
async def test_redacted_streamed_and_whole_are_the_same(stream: bool) -> None:
    call = Call({"regex": [regex(act="redact")]}, stream=stream)
    for piece in ("my sec", "ret is a secret", "."):
        call.engine.emit(piece)
    call.engine.emit("", finish=FinishReason.STOP)
    call.engine.finish()
    choice = (await call.answered())["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (
        "my [redacted] is a [redacted].",
        "stop",
    )
    assert call.counted("redacted") == 1
    assert call.router.cancelled == []


@both
async def test_one_choice_of_several_ends_and_the_others_go_on(stream: bool) -> None:
    call = Call({"regex": [regex()]}, n=2, stream=stream)
    call.engine.emit("a secret", index=0)
    call.engine.emit("fine", index=1)
    await asyncio.sleep(0)
    assert call.router.cancelled == []
    call.engine.emit("not shown", index=0)
    call.engine.emit(" too", index=1, finish=FinishReason.STOP)
    choices = (await call.answered())["choices"]
    assert [(each["message"]["content"], each["finish_reason"]) for each in choices] == [
        ("a ", "content_filter"),
        ("fine too", "stop"),
    ]
    # Nothing more was wanted of the choice that had been ended.
    assert call.router.cancelled == ["r"]


@both
async def test_token_ids_and_logprobs_wait_with_their_text(stream: bool) -> None:
    call = Call({"regex": [regex()]}, stream=stream, shows_tokens=True)
    for piece in ("a", "b", " sec", "ret"):
        call.engine.emit(piece)
    choice = (await call.answered())["choices"][0]
    assert choice["message"]["content"] == "ab "
    assert choice.get("token_ids") == [0, 1]


async def test_where_no_filter_applies_there_is_none() -> None:
    assert Call({}).filtered is None
    assert Call({"regex": [regex(models=["other"])]}).filtered is None
    assert Call({"regex": [regex(tenants=["acme"])]}).filtered is None
    assert Call({"regex": [regex(tenants=["acme"])]}, tenant="acme").filtered is not None


async def test_an_error_is_passed_on_and_what_waits_is_not() -> None:
    call = Call({"regex": [regex()]})
    call.engine.emit("my sec")
    call.engine.fail(UpstreamError("gone"))
    body = call.got.body.decode()
    assert "worker_failed" in body
    assert "sec" not in body


async def test_text_that_waits_for_too_long_is_let_through_by_the_clock() -> None:
    call = Call({"regex": [regex(max_held_s=0.01)]})
    call.engine.emit("my sec")
    async with asyncio.timeout(PATIENCE_S):
        while b'"sec"' not in call.wire.sent:
            await asyncio.sleep(0)
    assert call.counted("released_at_bound") == 1
    call.engine.emit("ret")
    assert (await call.answered())["choices"][0]["finish_reason"] == "content_filter"


async def test_the_filter_that_waits_least_is_the_first_to_be_asked_to_rule() -> None:
    late = regex(patterns=["later"], name="late", max_held_s=600.0)
    call = Call({"regex": [late, regex(max_held_s=0.01)]})
    call.engine.emit("late")
    call.engine.emit("st sec")
    async with asyncio.timeout(PATIENCE_S):
        while b'"sec"' not in call.wire.sent:
            await asyncio.sleep(0)
    assert call.counted("released_at_bound") == 1


async def test_a_classifier_is_waited_for_after_the_engine_has_ended() -> None:
    async with classifier_server() as server:
        server.gate.clear()
        call = Call({"classifier": [{"name": "words", "url": server.url, "private_address": True}]})
        call.engine.emit("all is well", finish=FinishReason.STOP)
        call.engine.finish()
        await server.met.wait()
        assert call.wire.closed is None
        assert b"well" not in call.wire.sent
        server.gate.set()
        answer = await call.answered()
        assert answer["choices"][0]["message"]["content"] == "all is well"
        assert answer["usage"]["completion_tokens"] == 1
        await call.filters.close()


async def test_a_verdict_that_comes_while_the_engine_runs_frees_it() -> None:
    async with classifier_server(lambda _: {"flagged": True}) as server:
        call = Call(
            {
                "classifier": [
                    {"name": "words", "url": server.url, "private_address": True, "window_chars": 16}
                ]
            }
        )
        call.engine.emit("this is all quite bad")
        answer = await call.answered()
        assert answer["choices"][0]["finish_reason"] == "content_filter"
        assert call.router.cancelled == ["r"]
        await call.filters.close()


async def test_a_client_that_leaves_is_judged_no_more() -> None:
    async with classifier_server() as server:
        server.gate.clear()
        call = Call({"classifier": [{"name": "words", "url": server.url, "private_address": True}]})
        call.engine.emit("all is well", finish=FinishReason.STOP)
        await server.met.wait()
        call.exchange.gone("client_closed")
        assert call.router.cancelled == ["r"]
        async with asyncio.timeout(PATIENCE_S):
            server.gate.set()
            # A connection is kept unless its question was given up.
            while server.open:
                await asyncio.sleep(0)
        assert b"well" not in call.wire.sent
        await call.filters.close()


async def test_a_fault_while_an_answer_is_written_for_a_ruling_fails_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with classifier_server() as server:
        call = Call({"classifier": [{"name": "words", "url": server.url, "private_address": True}]})
        assert isinstance(call.filtered, FilteredAnswer)

        call.engine.emit("all is well", finish=FinishReason.STOP)
        monkeypatch.setattr(call.filtered, "_answer", BrokenAnswer(call.filtered._answer))
        async with asyncio.timeout(PATIENCE_S):
            while call.wire.closed is None:
                await asyncio.sleep(0)
        assert b"Internal error" in call.wire.sent
        await call.filters.close()


class BrokenAnswer:
    """An answer that cannot write."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._answer, name)

    def delta(self, index: int, delta: object) -> None:
        """Fail."""
        raise RuntimeError("broken")


@both
async def test_tokens_wait_for_as_long_as_a_stop_string_may_keep_their_text(stream: bool) -> None:
    """The engine keeps what may be the beginning of a stop string; its token came before."""
    call = Call({"regex": [regex()]}, stream=stream, shows_tokens=True, stop=("se", "secret!"))
    for piece in ("fine ", "", "secret"):
        call.engine.emit(piece)
    choice = (await call.answered())["choices"][0]
    assert choice["message"]["content"] == "fine "
    assert not choice.get("token_ids")


CALLS = OutputParsing(tools='[{"type":"function","function":{"name":"find"}}]', tool_choice="auto")


@both
async def test_reasoning_content_and_calls_are_judged_apart_and_answered_together(stream: bool) -> None:
    call = Call({"regex": [regex(act="redact")]}, stream=stream, parsing=CALLS)
    call.engine.emit("", reasoning="no sec")
    call.engine.emit("ret, but a sec")
    call.engine.emit("ret. ")
    call.engine.emit("", tool_calls=(ToolCallDelta(0, "call_12345678", "find"),))
    call.engine.emit("", tool_calls=(ToolCallDelta(0, arguments='{"q": "sec'),))
    call.engine.emit("", tool_calls=(ToolCallDelta(0, arguments='ret"}'),))
    call.engine.emit("", finish=FinishReason.STOP, reasoning_tokens=1)
    call.engine.finish()
    answer = await call.answered()
    choice = answer["choices"][0]
    message = choice["message"]
    assert message["reasoning"] == "no sec"
    assert message["content"] == "ret, but a [redacted]. "
    assert message["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"q": "[redacted]"}'}
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


@both
async def test_a_call_with_a_name_that_the_client_does_not_know_is_judged(stream: bool) -> None:
    call = Call({"regex": [regex()]}, stream=stream, parsing=CALLS)
    call.engine.emit("so: ")
    call.engine.emit("", tool_calls=(ToolCallDelta(0, "call_12345678", "tell_secret"),))
    choice = (await call.answered())["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("so: ", "content_filter")
    assert not choice["message"].get("tool_calls")


@both
async def test_where_a_filter_ends_a_choice_usage_counts_what_was_generated(stream: bool) -> None:
    call = Call({"regex": [regex()]}, n=2, stream=stream, parsing=CALLS)
    call.engine.emit("", reasoning="hm", index=0)
    call.engine.emit("secret", index=0)
    # The engine knows nothing of that yet, and what it generates is paid for.
    call.engine.emit("more", index=0)
    call.engine.emit("secret", index=1)
    answer = await call.answered()
    assert [each["finish_reason"] for each in answer["choices"]] == ["content_filter"] * 2
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 4, 6)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert call.router.cancelled == ["r"]


@both
async def test_reasoning_that_is_hidden_ends_nothing(stream: bool) -> None:
    call = Call({"regex": [regex()]}, stream=stream, parsing=OutputParsing(reasoning=False))
    call.engine.emit("", reasoning="a secret")
    call.engine.emit("well", finish=FinishReason.STOP)
    call.engine.finish()
    choice = (await call.answered())["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("well", "stop")
    assert "secret" not in call.got.body.decode()


@both
async def test_parsed_text_does_not_wait_for_its_tokens_and_they_tell_nothing(stream: bool) -> None:
    call = Call({"regex": [regex()]}, stream=stream, shows_tokens=True, parsing=CALLS)
    call.engine.emit("well, ")
    call.engine.emit("")
    assert not stream or b"well, " in call.wire.sent
    call.engine.emit("", tool_calls=(ToolCallDelta(0, "call_12345678", "find", '{"q": "secret"}'),))
    choice = (await call.answered())["choices"][0]
    assert choice["message"]["content"] == "well, "
    assert not choice.get("token_ids")
