"""OpenAI's client against the gateway: streams, counts, timeouts and cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from tests.kit.gateway.scripted_router import ScriptedStream

from kvasir.core.errors import CapacityError, KvasirError, UpstreamError
from kvasir.core.requests import FinishReason, PositionLogprobs, TokenLogprob

USER: Any = [{"role": "user", "content": "Who is there?"}]
CANCEL_BOUND_S = 0.2


def echo(stream: ScriptedStream) -> None:
    """Answer every choice with `Hello, wörld`, then stop; two cached tokens."""
    n = stream.request.sampling.n
    for text in ("Hello", ", ", "wör", "ld"):
        for index in range(n):
            stream.emit(text, index=index)
    for index in range(n):
        stream.emit("", index=index, finish=FinishReason.STOP)
    stream.finish(cached=2)


async def test_a_chat_answer_has_text_usage_and_a_reason(edge: Any) -> None:
    edge.router.script = echo
    client = await edge.client()
    answer = await client.chat.completions.create(model="kvasir-tiny", messages=USER)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == "Hello, wörld"
    assert answer.choices[0].finish_reason == "stop"
    request = edge.router.streams[0].request
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.tokens)
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == len(request.tokens) + 5
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_a_streamed_chat_equals_the_whole_one(edge: Any) -> None:
    edge.router.script = echo
    client = await edge.client()
    stream = await client.chat.completions.create(
        model="kvasir-tiny", messages=USER, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == "Hello, wörld"
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completions_take_text_lists_and_token_ids(edge: Any) -> None:
    edge.router.script = echo
    client = await edge.client()
    for prompt, legs in (("one", 1), (["one", "two", "three"], 3), ([5, 6, 7], 1), ([[5, 6], [7]], 2)):
        edge.router.streams.clear()
        answer = await client.completions.create(model="kvasir-tiny", prompt=prompt, max_tokens=8)
        assert [choice.text for choice in answer.choices] == ["Hello, wörld"] * legs
        assert [choice.index for choice in answer.choices] == list(range(legs))
        assert len(edge.router.streams) == legs
    assert [list(stream.request.tokens) for stream in edge.router.streams] == [[5, 6], [7]]


async def test_a_streamed_completion_numbers_choices_over_prompts(edge: Any) -> None:
    edge.router.script = echo
    client = await edge.client()
    texts: dict[int, str] = {}
    async for chunk in await client.completions.create(
        model="kvasir-tiny", prompt=["a", "b"], n=2, max_tokens=8, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == dict.fromkeys(range(4), "Hello, wörld")


def with_logprobs(stream: ScriptedStream) -> None:
    """Two tokens with three alternatives each."""
    for number, text in enumerate(("Hé", "y")):
        top = tuple(TokenLogprob(i, f"{text}{i}", -0.5 - i) for i in range(3))
        position = PositionLogprobs(TokenLogprob(number, text, -0.25), top)
        stream.emit(text, logprobs=(position,), finish=FinishReason.LENGTH if number else None)
    stream.finish()


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_logprobs_have_bytes_and_alternatives(edge: Any, streamed: bool) -> None:
    edge.router.script = with_logprobs
    client = await edge.client()
    asked: Any = {"model": "kvasir-tiny", "messages": USER, "logprobs": True, "top_logprobs": 2}
    if streamed:
        chunks = [c async for c in await client.chat.completions.create(**asked, stream=True)]
        shown = [p for c in chunks if c.choices[0].logprobs for p in c.choices[0].logprobs.content]
    else:
        shown = (await client.chat.completions.create(**asked)).choices[0].logprobs.content
    assert [position.token for position in shown] == ["Hé", "y"]
    assert shown[0].bytes == list("Hé".encode())
    assert [alternative.token for alternative in shown[0].top_logprobs] == ["Hé0", "Hé1"]
    assert edge.router.streams[0].request.sampling.logprobs == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_completion_logprobs_have_offsets_and_maps(edge: Any, streamed: bool) -> None:
    edge.router.script = with_logprobs
    client = await edge.client()
    asked: Any = {"model": "kvasir-tiny", "prompt": "x", "logprobs": 1}
    if streamed:
        parts = [c.choices[0].logprobs async for c in await client.completions.create(**asked, stream=True)]
    else:
        parts = [(await client.completions.create(**asked)).choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == ["Hé", "y"]
    assert [offset for part in parts for offset in part.text_offset] == [0, 2]
    assert [logprob for part in parts for logprob in part.token_logprobs] == [-0.25, -0.25]
    assert parts[0].top_logprobs[0] == {"Hé0": -0.5, "Hé": -0.25}


async def test_all_sampling_fields_reach_the_router(edge: Any) -> None:
    edge.router.script = echo
    client = await edge.client()
    await client.chat.completions.create(
        model="pirate",
        messages=USER,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=-7,
        stop=["a", "b"],
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": 2},
        extra_body={
            "top_k": -1,
            "min_p": 0.1,
            "min_tokens": 3,
            "stop_token_ids": [4],
            "ignore_eos": True,
            "repetition_penalty": 1.5,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "cache_salt": "s",
        },
    )
    request = edge.router.streams[0].request
    sampling = request.sampling
    assert (request.model, request.adapter, request.salt) == ("kvasir-tiny", "pirate", "s")
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (9, 3, -7)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.stop, sampling.stop_token_ids) == (("a", "b"), (4,))
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, ((5, 2.0),))
    assert sampling.ignore_eos
    assert sampling.include_stop_str_in_output
    assert not sampling.skip_special_tokens


async def test_models_lists_the_model_and_its_adapters(edge: Any) -> None:
    client = await edge.client()
    assert [model.id async for model in client.models.list()] == ["kvasir-tiny", "pirate"]
    assert (await client.models.retrieve("pirate")).id == "pirate"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("parrot")
    assert caught.value.code == "model_not_found"


async def test_a_client_that_times_out_has_its_request_cancelled(edge: Any) -> None:
    client = await edge.client(timeout=0.05)
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model="kvasir-tiny", messages=USER)
    assert await edge.router.cancels() == [edge.router.streams[0].request.request_id]


async def test_a_closed_stream_is_cancelled_within_200_ms(edge: Any) -> None:
    client = await edge.client()
    asking = asyncio.create_task(
        client.chat.completions.create(model="kvasir-tiny", messages=USER, stream=True)
    )
    scripted = await edge.router.submitted()
    scripted.emit("Hello")
    stream = await asking
    assert (await anext(stream)).choices[0].delta.role == "assistant"
    began = asyncio.get_running_loop().time()
    await stream.close()
    await edge.router.cancels()
    assert asyncio.get_running_loop().time() - began < CANCEL_BOUND_S
    assert b'outcome="client_closed"} 1.0' in edge.metrics.render()


async def test_all_prompts_of_a_call_are_cancelled_with_it(edge: Any) -> None:
    client = await edge.client(timeout=0.05)
    with pytest.raises(openai.APITimeoutError):
        await client.completions.create(model="kvasir-tiny", prompt=["a", "b", "c"])
    cancelled = await edge.router.cancels(3)
    assert cancelled == [stream.request.request_id for stream in edge.router.streams]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (CapacityError("full", code="queue_full", retry_after_s=2.5), 503, "queue_full"),
        (KvasirError("too long", code="request_timeout"), 504, "request_timeout"),
        (UpstreamError("died"), 502, "worker_failed"),
        (UpstreamError("odd", code="never_heard_of"), 502, "never_heard_of"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_error_before_the_first_token_has_a_status(
    edge: Any, error: KvasirError, status: int, code: str, streamed: bool
) -> None:
    edge.router.script = lambda stream: stream.fail(error)
    client = await edge.client()
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="kvasir-tiny", messages=USER, stream=streamed)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    if isinstance(error, CapacityError):
        assert caught.value.response.headers["retry-after"] == "3"


async def test_a_refused_submit_is_answered_and_counted(edge: Any) -> None:
    edge.router.refusal = CapacityError("full", code="queue_full")
    client = await edge.client()
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="kvasir-tiny", messages=USER, stream=True)
    assert b'outcome="queue_full"} 1.0' in edge.metrics.render()


async def test_an_error_in_mid_stream_is_an_event_and_ends_the_connection(edge: Any) -> None:
    client = await edge.client()

    def script(stream: ScriptedStream) -> None:
        stream.emit("Hel")
        stream.fail(UpstreamError("the worker died"))

    edge.router.script = script
    stream = await client.chat.completions.create(model="kvasir-tiny", messages=USER, stream=True)
    with pytest.raises(openai.APIError, match="the worker died") as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "worker_failed"


async def test_one_failed_prompt_ends_the_call_and_cancels_the_others(edge: Any) -> None:
    client = await edge.client()

    def script(stream: ScriptedStream) -> None:
        if len(edge.router.streams) == 2 and stream is edge.router.streams[1]:
            stream.fail(UpstreamError("died"))

    edge.router.script = script
    with pytest.raises(openai.InternalServerError):
        await client.completions.create(model="kvasir-tiny", prompt=["a", "b"])
    assert await edge.router.cancels() == [edge.router.streams[0].request.request_id]
