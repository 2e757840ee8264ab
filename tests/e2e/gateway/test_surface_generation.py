"""Text of real vLLM, with separate prefill and decode, as OpenAI's client receives it: every sampling field
has vLLM's effect, streamed and whole answers are equal, and usage is exact.

What is said is held against vLLM alone (tests/kit/engines/vllm_reference.py).
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from tests.kit.engines.vllm_reference import Reference
from tests.kit.gateway.completions import of_vllm, put_together, sent_before_the_end, trailers, whole
from tests.kit.gateway.sampling_cases import CASES, DRAWN, GREEDY, HELLO, PSALM, Case
from tests.kit.stack import CONTEXT

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = pytest.mark.slow
StartStack = Callable[..., AbstractContextManager["Stack"]]

MODEL = "kvasir-tiny"
USER: Any = [{"role": "user", "content": "Hello"}]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def completion(client: openai.OpenAI, **fields: Any) -> Any:
    """A completion, with fields that OpenAI's client does not know."""
    known = {"prompt", "max_tokens", "temperature", "stream", "stream_options", "n", "stop", "seed", "echo"}
    extra = {name: value for name, value in fields.items() if name not in known and name != "model"}
    own = {name: value for name, value in fields.items() if name not in extra}
    return client.completions.create(**{"model": MODEL, "prompt": PSALM, **own}, extra_body=extra)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_sampling_field_has_vllms_effect(client: openai.OpenAI, alone: Reference, case: Case) -> None:
    expected = of_vllm(alone.generate(case.prompt, **case.sampling))
    beside = of_vllm(alone.generate(case.prompt, **Case("", {}, case.beside).sampling))
    assert (expected != beside) == case.shows
    fields = {**case.body, "prompt": case.prompt, "return_token_ids": True}
    answer = completion(client, **fields)
    assert whole(answer) == expected
    assert answer.usage.prompt_tokens == len(case.prompt)
    assert answer.usage.completion_tokens == sum(len(choice["token_ids"]) for choice in expected)
    chunks = list(completion(client, **fields, stream=True, stream_options={"include_usage": True}))
    assert put_together(chunks) == expected
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
        answer.usage.total_tokens,
    )


def test_logprobs_are_vllms(client: openai.OpenAI, alone: Reference) -> None:
    (output,) = alone.generate(PSALM, **GREEDY, logprobs=3).outputs
    sampled = [at[token].logprob for token, at in zip(output.token_ids, output.logprobs, strict=True)]
    best = [
        sorted((each.logprob for each in at.values() if each.rank <= 3), reverse=True)
        for at in output.logprobs
    ]
    answer = completion(client, **GREEDY, logprobs=3)
    shown = answer.choices[0].logprobs
    named = [at[token].decoded_token for token, at in zip(output.token_ids, output.logprobs, strict=True)]
    assert shown.tokens == named
    assert "".join(shown.tokens) == answer.choices[0].text
    assert shown.token_logprobs == pytest.approx(sampled, abs=1e-3)
    for position, expected in zip(shown.top_logprobs, best, strict=True):
        assert sorted(position.values(), reverse=True)[:3] == pytest.approx(expected, abs=1e-3)
    streamed = put_together(list(completion(client, **GREEDY, logprobs=3, stream=True)))
    assert streamed[0]["logprobs"] == pytest.approx(sampled, abs=1e-3)


def test_a_chats_logprobs_have_bytes_and_the_best(client: openai.OpenAI) -> None:
    fields: Any = {
        "model": MODEL, "messages": USER, "logprobs": True, "top_logprobs": 2, "temperature": 0,
        "max_tokens": 8,
    }  # fmt: skip
    (choice,) = client.chat.completions.create(**fields).choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert b"".join(bytes(each.bytes or []) for each in content).decode() == choice.message.content
    assert all(len(each.top_logprobs) == 2 for each in content)
    assert all(each.logprob == each.top_logprobs[0].logprob for each in content)
    streamed = [
        each
        for chunk in client.chat.completions.create(**fields, stream=True)
        for part in chunk.choices
        for each in (part.logprobs.content if part.logprobs else None) or []
    ]
    assert [each.token for each in streamed] == [each.token for each in content]


def test_prompt_logprobs_are_vllms(client: openai.OpenAI, alone: Reference) -> None:
    done = alone.generate(PSALM, temperature=0.0, max_tokens=1, prompt_logprobs=2)
    answer = completion(client, temperature=0, max_tokens=1, prompt_logprobs=2)
    shown = answer.choices[0].prompt_logprobs
    assert shown[0] is None
    assert len(shown) == len(PSALM)
    for position, expected in zip(shown[1:], done.prompt_logprobs[1:], strict=True):
        assert {int(token): each["logprob"] for token, each in position.items()} == pytest.approx(
            {token: each.logprob for token, each in expected.items()}, abs=1e-3
        )


def test_an_echo_is_the_prompt_and_what_follows(client: openai.OpenAI) -> None:
    text = "And it came to pass"
    plain = completion(client, prompt=text, **GREEDY).choices[0].text
    for stream in (False, True):
        answer = completion(client, prompt=text, **GREEDY, echo=True, stream=stream)
        shown = put_together(list(answer)) if stream else whole(answer)
        assert shown[0]["text"] == text + plain
    scored = completion(client, prompt=text, max_tokens=0, echo=True, logprobs=0)
    assert scored.choices[0].text == text
    assert scored.usage.completion_tokens == 0
    first, *others = scored.choices[0].logprobs.token_logprobs
    assert first is None
    assert len(others) == scored.usage.prompt_tokens - 1
    assert all(each < 0 for each in others)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, slice(-4, None)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, slice(4)),
        ({"truncate_prompt_tokens": -1, "max_tokens": CONTEXT - 3}, slice(-3, None)),
    ],
)
def test_a_prompt_is_cut_as_asked(
    client: openai.OpenAI, alone: Reference, fields: dict[str, Any], kept: slice
) -> None:
    (expected,) = alone.generate(PSALM[kept], **{**GREEDY, "stop": ["."]}).outputs
    answer = completion(client, **{**GREEDY, "stop": ["."], **fields})
    assert answer.usage.prompt_tokens == len(PSALM[kept])
    assert answer.choices[0].text.startswith(expected.text)


def test_a_prompt_begins_with_special_tokens_unless_told_not_to(client: openai.OpenAI) -> None:
    with_them = completion(client, prompt="And it came", max_tokens=1, return_token_ids=True)
    without = completion(
        client, prompt="And it came", max_tokens=1, return_token_ids=True, add_special_tokens=False
    )
    assert with_them.choices[0].prompt_token_ids == [0, *without.choices[0].prompt_token_ids]
    named = completion(client, **GREEDY, logprobs=0, return_tokens_as_token_ids=True).choices[0]
    assert all(re.fullmatch(r"token_id:\d+", token) for token in named.logprobs.tokens)


def test_a_seed_draws_the_same_again_and_none_draws_anew(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": USER, "max_tokens": 16, "temperature": 1.5, "top_p": 1.0}
    drawn = [client.chat.completions.create(**fields, seed=11).choices[0].message.content for _ in range(2)]
    assert drawn[0] == drawn[1]
    fields |= {"n": 2, "seed": 11}
    several = client.chat.completions.create(**fields).choices
    assert several[0].message.content == drawn[0] != several[1].message.content
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == [choice.message.content for choice in several]
    fields |= {"n": 1, "seed": None}
    free = {client.chat.completions.create(**fields).choices[0].message.content for _ in range(4)}
    assert len(free) > 1


def test_a_chat_is_the_template_and_the_limit_has_two_names(client: openai.OpenAI, alone: Reference) -> None:
    (expected,) = alone.generate(HELLO, **GREEDY).outputs
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, temperature=0, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason == "stop"
    assert answer.model_extra is not None
    assert answer.model_extra["prompt_token_ids"] == HELLO
    for name in ("max_tokens", "max_completion_tokens"):
        limit: dict[str, Any] = {name: 5}
        short = client.chat.completions.create(model=MODEL, messages=USER, temperature=0, **limit)
        assert short.usage is not None
        assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (5, "length")


def test_several_prompts_are_answered_in_their_order(client: openai.OpenAI, alone: Reference) -> None:
    prompts = [HELLO, PSALM, PSALM[:3]]
    expected = [
        choice
        for first, prompt in zip((3, 5, 7), prompts, strict=True)
        for choice in of_vllm(alone.generate(prompt, **{**DRAWN, "n": 2, "seed": first}))
    ]
    answer = completion(client, prompt=prompts, n=2, **DRAWN, return_token_ids=True)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert whole(answer) == expected
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    chunks = list(completion(client, prompt=prompts, n=2, **DRAWN, return_token_ids=True, stream=True))
    assert put_together(chunks) == expected


def test_an_adapter_is_a_model_of_its_own(client: openai.OpenAI, alone: Reference) -> None:
    (expected,) = alone.generate(HELLO, **GREEDY, adapted=True).outputs
    (plain,) = alone.generate(HELLO, **GREEDY).outputs
    assert expected.text != plain.text
    for name, output in (("pirate", expected), (MODEL, plain)):
        answer = client.chat.completions.create(model=name, messages=USER, temperature=0, max_tokens=24)
        assert answer.model == name
        assert answer.choices[0].message.content == output.text
    listed = {model.id: model.model_dump() for model in client.models.list()}
    assert listed.keys() >= {MODEL, "pirate"}
    assert listed["pirate"]["parent"] == MODEL
    assert client.models.retrieve("pirate").id == "pirate"


def test_many_at_once_and_asynchronously_say_what_each_says_alone(
    stack: Stack, client: openai.OpenAI
) -> None:
    questions = ["Hello", "Who are you?", "What is the capital of Norway?", "Count to five", "Thank you"]

    def fields(question: str) -> Any:
        return {
            "model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0,
            "max_tokens": 40,
        }  # fmt: skip

    alone = [client.chat.completions.create(**fields(each)).choices[0].message.content for each in questions]

    async def streamed(made: openai.AsyncOpenAI, question: str) -> str:
        stream = await made.chat.completions.create(**fields(question), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def all_at_once() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as made:
            answers = [made.chat.completions.create(**fields(each)) for each in questions]
            streams = [streamed(made, each) for each in questions]
            return [
                each if isinstance(each, str) else each.choices[0].message.content
                for each in await asyncio.gather(*answers, *streams)
            ]

    assert asyncio.run(all_at_once()) == alone * 2


def test_the_streaming_helper_puts_together_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 40}
    answer = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert said == final.choices[0].message.content == answer.choices[0].message.content
    assert final.choices[0].finish_reason == answer.choices[0].finish_reason
    assert final.usage is not None
    assert answer.usage is not None
    assert final.usage.completion_tokens == answer.usage.completion_tokens


def test_continuous_usage_counts_up_to_the_last(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(completion(client, **GREEDY, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 24
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {len(PSALM)}
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in completion(client, **GREEDY, stream=True))


def test_tokens_found_in_a_cache_are_in_the_usage(client: openai.OpenAI) -> None:
    prompt = [8 + secrets.randbelow(4000) for _ in range(300)]
    first, second = (completion(client, prompt=prompt, max_tokens=2).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens >= 256


def test_text_to_tokens_and_back(stack: Stack, client: openai.OpenAI) -> None:
    text = "Grüße, 世界! \N{SQUARED OK}\n\tand it came to pass"
    asked = {"model": MODEL, "prompt": text, "return_token_strs": True}
    found = httpx.post(f"{stack.url}/tokenize", json=asked).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == CONTEXT
    answer = completion(client, prompt=text, max_tokens=1, return_token_ids=True)
    assert answer.choices[0].prompt_token_ids == found["tokens"]
    back = httpx.post(f"{stack.url}/detokenize", json={"tokens": found["tokens"]}).json()
    assert back["prompt"] == "<|bos|>" + text
    chat = httpx.post(f"{stack.url}/tokenize", json={"messages": USER}).json()
    assert chat["tokens"] == HELLO


@pytest.mark.parametrize(
    ("fields", "choices"),
    [({}, 1), ({"n": 3}, 3), ({"prompt": [PSALM, HELLO]}, 2)],
    ids=["one", "n", "prompts"],
)
def test_what_a_client_used_before_it_left_is_counted(
    stack: Stack, fields: dict[str, Any], choices: int
) -> None:
    body = {
        "model": MODEL, "prompt": PSALM, "max_tokens": 900, "ignore_eos": True, "stream": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip
    names = ("kvasir_prompt_tokens_total", "kvasir_output_tokens_total")
    before = [stack.metric(name) for name in names]
    events = sent_before_the_end(stack.address, body, 12)
    stack.wait_until(stack.idle, 10.0, "the engines to have stopped")
    prompt, output = (stack.metric(name) - was for name, was in zip(names, before, strict=True))
    sent = sum(len(choice["token_ids"]) for event in events for choice in event["choices"])
    # A step that comes while the connection is being closed is not sent any more.
    assert 0 <= output - sent <= choices
    assert 12 <= sent < 900
    assert prompt == len(PSALM) + (len(HELLO) if "prompt" in fields else 0)


def test_an_answer_says_how_long_each_part_took(client: openai.OpenAI, stack: Stack) -> None:
    fields: Any = {"model": MODEL, "messages": USER, "max_tokens": 4}
    headers = client.chat.completions.with_raw_response.create(**fields).headers
    parts = dict(re.findall(r"(\w+);dur=([\d.]+)", headers["server-timing"]))
    assert {"admit", "queue", "route", "prefill", "transfer", "ttft", "decode", "total"} <= parts.keys()
    assert re.search(r'transfer;dur=[\d.]+;desc="[1-9]\d* bytes"', headers["server-timing"])
    spent = sum(float(parts[name]) for name in ("admit", "queue", "prefill", "decode"))
    assert 0 < spent <= float(parts["total"]) + 0.1
    streamed = httpx.post(
        f"{stack.url}/v1/chat/completions",
        json={**fields, "stream": True},
        headers={"x-kvasir-server-timing": "comment"},
    )
    assert {"admit", "ttft"} == set(re.findall(r"(\w+);dur=", streamed.headers["server-timing"]))
    assert re.search(r"^: server-timing: .*decode;dur=", streamed.text, re.MULTILINE)
    behind = trailers(stack.address, "/v1/chat/completions", {**fields, "stream": True})
    assert re.match(r"server-timing: .*transfer;dur=.*decode;dur=", behind)


def test_a_request_keeps_its_name_and_its_trace(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": USER, "max_tokens": 2}
    named = client.chat.completions.with_raw_response.create(
        **fields,
        extra_headers={"x-request-id": "my-own-name.7", "traceparent": f"00-{TRACE}-{SPAN}-01"},
    )
    assert named.headers["x-request-id"] == "my-own-name.7"
    assert named.parse().id == "chatcmpl-my-own-name.7"
    version, trace, _, flags = named.headers["traceparent"].split("-")
    assert (version, trace, flags) == ("00", TRACE, "01")
    plain = client.chat.completions.with_raw_response.create(**fields)
    assert re.fullmatch(r"[0-9a-f]{24}", plain.headers["x-request-id"])
    assert plain.headers["traceparent"].split("-")[1] != TRACE


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"n": 2, "temperature": 0}, "n", "invalid_value"),
        ({"max_tokens": 5000}, "messages", "context_length_exceeded"),
        ({"extra_body": {"tempature": 1}}, "tempature", "unknown_parameter"),
        ({"extra_body": {"store": True}}, "store", "unsupported_parameter"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
        ({"extra_body": {"guided_regex": "(unclosed"}}, None, "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type", "unsupported_modality"),
    ],
)  # fmt: skip
def test_a_fault_of_the_clients_is_its_exception_and_names_the_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None, code: str
) -> None:
    for stream in (False, True):
        asked: Any = {"model": MODEL, "messages": USER, "stream": stream, **fields}
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**asked)
        assert (caught.value.code, caught.value.type) == (code, "invalid_request_error")
        if param is not None:
            assert caught.value.param == param
        assert caught.value.request_id
