"""What is sent to a server, and what is made of its answers, over real HTTP with a scripted server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.openai_server import TEMPLATE_TOKENS, OpenAiScript, ScriptedAnswer, serving_openai

from kvasir.core.errors import UpstreamError
from kvasir_platform.bench.client.answers import AnswerEvents, BrokenAnswerError
from kvasir_platform.bench.client.dialect import Dialect
from kvasir_platform.bench.client.endpoint import BenchCall, CallResult
from kvasir_platform.bench.client.http_endpoint import HttpConnections, HttpEndpoint, HttpTarget
from kvasir_platform.bench.client.probe import BenchModel, chosen_model, probe_server
from kvasir_platform.bench.client.prompts import PromptMaker, TokenScale, fitted
from kvasir_platform.workload.generate import generate
from kvasir_platform.workload.shapes import PRESETS, reshaped


class SteppedClock:
    """A clock that a scripted server moves, after the client has read it for the chunk before."""

    def __init__(self) -> None:
        self.at = 0.0
        self._read = asyncio.Event()

    def now(self) -> float:
        self._read.set()
        return self.at

    async def move(self, seconds: float) -> None:
        self._read.clear()
        await self._read.wait()
        self.at += seconds


def connections(
    url: str, now: Any = None, key: str | None = None, timeout_s: float = 20.0
) -> HttpConnections:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return HttpConnections(HttpTarget(url, headers), 64, timeout_s, now or (lambda: 0.0))


async def sent(script: OpenAiScript, dialect: Dialect, call: BenchCall | None = None) -> CallResult:
    async with serving_openai(script) as url, connections(url) as connected:
        endpoint = HttpEndpoint(connected, "scripted", dialect, {"temperature": 0})
        return await endpoint.send(call or BenchCall("one two three", 4))


async def test_chunks_have_the_times_at_which_they_came() -> None:
    clock = SteppedClock()

    async def wait(place: int, _: int) -> None:
        # The role of a chat's first chunk is no output, but it is read, as each chunk is.
        await clock.move(0.25 if place == 0 else 0.01)

    async with (
        serving_openai(OpenAiScript(wait=wait)) as url,
        connections(url, clock.now) as connected,
    ):
        result = await HttpEndpoint(connected, "scripted", Dialect("chat"), {}).send(BenchCall("a b", 4))
    assert result.started_s == 0.0
    assert list(result.chunks) == pytest.approx([0.25, 0.26, 0.27, 0.28])
    assert result.ended_s == pytest.approx(0.28)
    assert (result.prompt_tokens, result.output_tokens) == (2 + TEMPLATE_TOKENS, 4)
    assert result.error == ""


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_a_call_asks_for_its_tokens_and_their_count(api: Any) -> None:
    script = OpenAiScript()
    result = await sent(script, Dialect(api))
    body = script.bodies[0]
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (4, True, 0)
    assert body["stream_options"] == {"include_usage": True}
    assert len(result.chunks) == result.output_tokens == 4


async def test_an_embedding_is_a_whole_answer() -> None:
    script = OpenAiScript()
    result = await sent(script, Dialect("embeddings"), BenchCall("one two", 0, embeds=True))
    assert (result.error, result.prompt_tokens, len(result.chunks)) == ("", 2 + TEMPLATE_TOKENS, 0)
    assert script.bodies == [{"model": "scripted", "input": "one two", "temperature": 0}]


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (ScriptedAnswer(429, "too many"), "http_429", "too many"),
        (ScriptedAnswer(500, "oh no"), "http_500", "oh no"),
        (ScriptedAnswer(breaks_at=2), "disconnected", ""),
        (ScriptedAnswer(error_event=True), "stream_error", "the worker was lost"),
        (ScriptedAnswer(ends=False), "stream_broken", "the stream ended without [DONE]"),
    ],
)
async def test_errors_are_told_apart(answer: ScriptedAnswer, kind: str, detail: str) -> None:
    result = await sent(OpenAiScript(answer=lambda _: answer), Dialect("chat"))
    assert result.error == kind
    assert detail in result.detail


async def test_a_stream_without_output_is_an_error() -> None:
    result = await sent(OpenAiScript(), Dialect("chat", limit="no_limit"), BenchCall("a", 0))
    assert result.error == ""
    body = OpenAiScript(wait=None)
    empty = await sent(body, Dialect("completions"), BenchCall("a", -1))
    assert empty.error == "no_output"


async def test_a_server_that_does_not_answer_in_time_is_a_timeout() -> None:
    async def never(_: int, __: int) -> None:
        await asyncio.Event().wait()

    async with (
        serving_openai(OpenAiScript(wait=never)) as url,
        connections(url, timeout_s=0.05) as connected,
    ):
        result = await HttpEndpoint(connected, "scripted", Dialect("chat"), {}).send(BenchCall("a", 1))
    assert (result.error, result.detail) == ("timeout", "no end within 0.05 s")


async def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    async with serving_openai(OpenAiScript()) as url:
        pass
    async with connections(url) as connected:
        result = await HttpEndpoint(connected, "scripted", Dialect("chat"), {}).send(BenchCall("a", 1))
        assert result.error == "connection"
        with pytest.raises(UpstreamError, match="does not answer"):
            await connected.models()


async def test_the_key_goes_with_every_request() -> None:
    async with serving_openai(OpenAiScript(key="s3cret")) as url:
        async with connections(url, key="s3cret") as connected:
            assert [each["id"] for each in await connected.models()] == ["scripted"]
        async with connections(url) as connected:
            with pytest.raises(UpstreamError, match="answered 401: a key is missing"):
                await connected.models()


async def test_a_long_list_of_models_is_read_whole() -> None:
    names = tuple(f"model-{number:05}-{'x' * 200}" for number in range(2_000))
    async with serving_openai(OpenAiScript(models=names)) as url, connections(url) as connected:
        assert len(await connected.models()) == 2_000


async def probed(script: OpenAiScript, api: Any = "chat", context: int | None = 4096) -> Any:
    async with serving_openai(script) as url, connections(url) as connected:
        return await probe_server(connected, BenchModel("scripted", context), Dialect(api), {}, salt=7)


async def test_a_probe_learns_what_words_and_templates_cost() -> None:
    found = await probed(OpenAiScript())
    assert found.counts_tokens
    assert (found.scale.per_word, found.scale.fixed) == (1.0, TEMPLATE_TOKENS)
    assert found.dialect == Dialect("chat")


async def test_fields_that_a_server_refuses_are_left_out() -> None:
    found = await probed(OpenAiScript(refused=frozenset({"ignore_eos", "max_tokens"})))
    assert found.dialect == Dialect("chat", ignore_eos=False, limit="max_completion_tokens")
    assert len(found.dialect.left_out()) == 2
    assert found.counts_tokens


async def test_without_counts_lengths_are_estimates() -> None:
    assert not (await probed(OpenAiScript(counts=False))).counts_tokens
    assert not (await probed(OpenAiScript(refused=frozenset({"stream_options"})))).counts_tokens


async def test_a_probe_fits_a_short_context() -> None:
    script = OpenAiScript()
    await probed(script, context=600)
    assert max(len(body["messages"][0]["content"].split()) for body in script.bodies) == 150


async def test_a_server_that_refuses_everything_is_an_error() -> None:
    with pytest.raises(UpstreamError, match="refused a probe: http_400: no such model"):
        await probed(OpenAiScript(answer=lambda _: ScriptedAnswer(400, "no such model")))


def test_the_model_is_the_first_or_the_named_one() -> None:
    listed: list[Mapping[str, Any]] = [{"id": "a", "max_model_len": 512}, {"id": "b"}]
    said: list[str] = []
    assert chosen_model(listed, None, said.append) == BenchModel("a", 512)
    assert said == ["model a, the first of 2; --model names another"]
    assert chosen_model(listed, "b", said.append) == BenchModel("b", None)
    with pytest.raises(UpstreamError, match="--model c: the server lists a, b"):
        chosen_model(listed, "c", said.append)
    with pytest.raises(UpstreamError, match="lists no models"):
        chosen_model([], None, said.append)


@given(st.lists(st.integers(1, 60), max_size=8), st.integers(0, 3))
def test_a_stream_is_read_alike_however_it_is_cut(cuts: list[int], output: int) -> None:
    lines = [b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n']
    lines += [b'data: {"choices":[{"delta":{"content":"x"}}]}\r\n\r\n'] * output
    lines += [
        b": a comment\n\n",
        b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n',
        b"data: [DONE]\n\n",
    ]
    data = b"".join(lines)
    places = sorted({0, len(data), *(cut * 7 % len(data) for cut in cuts)})
    result = CallResult(0.0)
    stream = AnswerEvents(result)
    for start, end in pairwise(places):
        stream.feed(data[start:end], 1.0)
    assert stream.ended
    assert (len(result.chunks), result.prompt_tokens) == (output, 3)


def test_an_event_that_is_no_json_breaks_a_stream() -> None:
    with pytest.raises(BrokenAnswerError, match="no JSON: oops"):
        AnswerEvents(CallResult(0.0)).feed(b"data: oops\n", 1.0)


@given(st.floats(0.8, 4.0), st.integers(0, 40), st.integers(0, 2**32))
def test_prompts_have_the_tokens_that_were_asked_for(per_word: float, fixed: int, seed: int) -> None:
    shape = reshaped(PRESETS["chat"].shape, duration=10.0)
    workload = generate(shape, Random(seed))
    maker = PromptMaker(TokenScale(per_word, fixed), workload.block_tokens, seed)
    for each in workload.requests:
        words = len(maker.prompt(each).split())
        assert words * per_word + fixed == pytest.approx(each.prompt_tokens, abs=per_word + 1)


def test_prompts_share_the_words_of_the_blocks_that_they_share() -> None:
    shape = reshaped(PRESETS["chat"].shape, duration=60.0, prefixes=1)
    workload = generate(shape, Random(1))
    maker = PromptMaker(TokenScale(1.0, 5.0), workload.block_tokens, 1)
    made = [maker.prompt(each).split() for each in workload.requests]
    for (one, first), (other, second) in pairwise(zip(workload.requests, made, strict=True)):
        blocks = sum(a == b for a, b in zip(one.names, other.names, strict=False))
        shorter = min(len(first), len(second))
        alike = next((i for i in range(shorter) if first[i] != second[i]), shorter)
        assert min(blocks * 16, shorter) <= alike <= blocks * 16 + 5


def test_a_renewed_maker_makes_other_prompts() -> None:
    request = generate(reshaped(PRESETS["synthetic"].shape, requests=1), Random(1)).requests[0]
    maker = PromptMaker(TokenScale(), 16, 1)
    before = maker.prompt(request)
    maker.renew(2)
    assert maker.prompt(request)[:40] != before[:40]


def test_a_scale_needs_prompts_that_grow() -> None:
    assert fitted([(10, 18), (110, 168)]) == TokenScale(1.5, 3.0)
    with pytest.raises(ValueError, match="10 words are 5 tokens"):
        fitted([(10, 5), (20, 5)])
