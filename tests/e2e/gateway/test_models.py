"""Several models behind one gateway, each with its own name and capabilities."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio

from kvasir.config.spec.deployment import FurtherModelSpec, LoraSpec, PoolSpec
from kvasir.core.errors import CapacityError, UpstreamError
from kvasir.core.requests import Role, Task
from kvasir.ports.router import BrownoutView

Start = Callable[..., Awaitable[Any]]
DEPLOYED = {
    "disaggregation": "never",
    "models": (
        FurtherModelSpec(
            name="org/second-7B", max_model_len=64, lora=(LoraSpec(name="parrot", path="adapters/parrot"),)
        ),
        FurtherModelSpec(name="vectors", max_model_len=32),
        FurtherModelSpec(name="nested-vectors", matryoshka=True),
    ),
    "pools": (
        PoolSpec(name="both", role=Role.BOTH),
        PoolSpec(name="second", role=Role.BOTH, model="org/second-7B"),
        PoolSpec(name="vectors", role=Role.EMBED, model="vectors"),
        PoolSpec(name="nested", role=Role.EMBED, model="nested-vectors"),
    ),
}
VECTOR = (0.6, 0.0, 0.8, 0.0)


@pytest_asyncio.fixture
async def edge(start: Start) -> AsyncIterator[Any]:
    """A gateway of four models."""
    yield await start(deployed=DEPLOYED)


def embed_all(stream: Any) -> None:
    """Each input's vector tells its length."""
    length = len(stream.request.tokens)
    stream.embed((float(length), 0.0, 0.0, float(length)))


async def refused(edge: Any, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    reply = await edge.post(path, json.dumps(body).encode())
    return reply.status, json.loads(reply.body)["error"]


async def test_models_and_their_adapters_are_listed_with_their_parents(edge: Any) -> None:
    client = await edge.client()
    listed = {model.id: model.model_dump() for model in (await client.models.list()).data}
    assert list(listed) == [
        "kvasir-tiny", "org/second-7B", "vectors", "nested-vectors", "pirate", "parrot",
    ]  # fmt: skip
    assert (listed["parrot"]["parent"], listed["parrot"]["max_model_len"]) == ("org/second-7B", 64)
    assert (listed["pirate"]["parent"], listed["pirate"]["max_model_len"]) == ("kvasir-tiny", 4096)
    assert "parent" not in listed["org/second-7B"]
    assert (await client.models.retrieve("org/second-7B")).id == "org/second-7B"
    assert {name for name, model in listed.items() if model["task"] == "embed"} == {
        "vectors",
        "nested-vectors",
    }


@pytest.mark.parametrize(
    ("named", "model", "adapter"),
    [
        ("kvasir-tiny", "kvasir-tiny", None),
        ("org/second-7B", "org/second-7B", None),
        ("parrot", "org/second-7B", "parrot"),
    ],
)
async def test_a_request_goes_to_the_model_it_names(
    edge: Any, named: str, model: str, adapter: str | None
) -> None:
    def script(stream: Any) -> None:
        stream.emit("a")
        stream.finish()

    edge.router.script = script
    client = await edge.client()
    answer = await client.completions.create(model=named, prompt="Hello")
    assert answer.model == named
    request = edge.router.streams[0].request
    assert (request.model, request.adapter, request.task) == (model, adapter, Task.GENERATE)
    shown = (await edge.get("/metrics")).body.decode()
    assert f'kvasir_requests_total{{model="{model}",outcome="ok"}} 1.0' in shown


async def test_each_model_has_its_own_context(edge: Any) -> None:
    body = {"model": "org/second-7B", "prompt": list(range(100, 170))}
    status, error = await refused(edge, "/v1/completions", body)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "64" in error["message"]


async def test_a_model_is_asked_only_for_what_it_can(edge: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    status, error = await refused(edge, "/v1/chat/completions", {"model": "vectors", **chat})
    assert (status, error["code"], error["param"]) == (400, "unsupported_task", "model")
    status, error = await refused(edge, "/v1/embeddings", {"model": "kvasir-tiny", "input": "hi"})
    assert (status, error["code"], error["param"]) == (400, "unsupported_task", "model")
    status, error = await refused(edge, "/v1/embeddings", {"model": "nobody", "input": "hi"})
    assert (status, error["code"]) == (404, "model_not_found")


async def test_status_tells_which_model_is_not_ready(edge: Any) -> None:
    edge.router.reasons = {"kvasir-tiny": None, "vectors": "no worker that embeds"}
    status = json.loads((await edge.get("/status")).body)
    assert status["readiness"] == {
        "kvasir-tiny": {"ready": True, "reason": None},
        "vectors": {"ready": False, "reason": "no worker that embeds"},
    }


@pytest.mark.parametrize("encoding", ["float", "base64", None])
async def test_embeddings_as_openai_reads_them(edge: Any, encoding: Any) -> None:
    edge.router.script = lambda stream: stream.embed(VECTOR)
    client = await edge.client()
    options = {} if encoding is None else {"encoding_format": encoding}
    answer = await client.embeddings.create(model="vectors", input="Hello world", **options)
    found = answer.data[0].embedding
    if encoding == "base64":
        found = np.frombuffer(base64.b64decode(str(found)), dtype="<f4").tolist()
    assert found == pytest.approx(VECTOR)
    assert (answer.object, answer.model, answer.data[0].index) == ("list", "vectors", 0)
    request = edge.router.streams[0].request
    assert request.task is Task.EMBED
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == len(request.tokens) > 0


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ("Hello", [None]),
        (["Hello", "Hello world, once more"], [None, None]),
        ([5, 6, 7], [3]),
        ([[5], [6, 7]], [1, 2]),
    ],
)
async def test_inputs_of_every_form_are_answered_in_their_order(
    edge: Any, given: Any, lengths: list[int | None]
) -> None:
    waiting: list[Any] = []

    def script(stream: Any) -> None:
        waiting.append(stream)
        if len(waiting) == len(lengths):
            for each in reversed(waiting):
                embed_all(each)

    edge.router.script = script
    client = await edge.client()
    answer = await client.embeddings.create(model="vectors", input=given, encoding_format="float")
    assert [each.index for each in answer.data] == list(range(len(lengths)))
    sent = [len(stream.request.tokens) for stream in edge.router.streams]
    assert [each.embedding[0] for each in answer.data] == sent
    assert all(length in (None, tokens) for length, tokens in zip(lengths, sent, strict=True))
    assert answer.usage.prompt_tokens == sum(sent)


async def test_a_model_trained_for_it_gives_fewer_dimensions_of_length_one(edge: Any) -> None:
    edge.router.script = lambda stream: stream.embed(VECTOR)
    client = await edge.client()
    answer = await client.embeddings.create(model="nested-vectors", input="Hello", dimensions=2)
    assert answer.data[0].embedding == pytest.approx([1.0, 0.0])
    body = {"model": "nested-vectors", "input": "Hello", "dimensions": 5}
    status, error = await refused(edge, "/v1/embeddings", body)
    assert (status, error["code"], error["param"]) == (400, "invalid_value", "dimensions")
    status, error = await refused(edge, "/v1/embeddings", {**body, "model": "vectors"})
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", "dimensions")


async def test_an_input_beyond_the_context_is_named_or_cut(edge: Any) -> None:
    edge.router.script = embed_all
    long = list(range(100, 140))
    body: dict[str, Any] = {"model": "vectors", "input": [[5], long]}
    status, error = await refused(edge, "/v1/embeddings", body)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "input[1]")
    assert edge.router.streams == []
    reply = await edge.post("/v1/embeddings", json.dumps({**body, "truncate_prompt_tokens": -1}).encode())
    assert reply.status == 200
    assert [stream.request.tokens.tolist() for stream in edge.router.streams] == [[5], long[:32]]


async def test_a_large_call_takes_turns_and_is_answered_whole(edge: Any) -> None:
    live: set[str] = set()
    most = 0

    def script(stream: Any) -> None:
        embed_all(stream)
        live.discard(stream.request.request_id)

    submit = edge.router.submit

    def counted(request: Any, sink: Any) -> None:
        nonlocal most
        live.add(request.request_id)
        most = max(most, len(live))
        submit(request, sink)

    edge.router.submit = counted
    edge.router.script = script
    client = await edge.client()
    inputs = [[5] * (1 + number % 7) for number in range(2048)]
    answer = await client.embeddings.create(model="vectors", input=inputs, encoding_format="float")
    assert [int(each.embedding[0]) for each in answer.data] == [len(each) for each in inputs]
    assert answer.usage.prompt_tokens == sum(map(len, inputs))
    assert most <= 256
    assert len({stream.request.request_id for stream in edge.router.streams}) == 2048


async def test_a_router_that_fills_up_meanwhile_makes_a_large_call_slower_and_not_fail(edge: Any) -> None:
    submit, live = edge.router.submit, 0

    def bounded(request: Any, sink: Any) -> None:
        nonlocal live
        if live == 3:
            raise CapacityError("full", code="queue_full")
        live += 1
        submit(request, sink)

    def script(stream: Any) -> None:
        nonlocal live
        live -= 1
        embed_all(stream)

    edge.router.submit = bounded
    edge.router.script = script
    client = await edge.client()
    answer = await client.embeddings.create(model="vectors", input=[[5]] * 20)
    assert len(answer.data) == 20


async def test_a_large_call_that_has_vectors_waits_out_a_time_without_room(edge: Any) -> None:
    submit, submitted, refusals = edge.router.submit, 0, [0.02, 0.01]

    def bounded(request: Any, sink: Any) -> None:
        nonlocal submitted
        idle = all(not stream.live for stream in edge.router.streams)
        if submitted == 2 and refusals:
            raise CapacityError("late", code="wait_too_long", retry_after_s=refusals.pop() if idle else 9.0)
        submitted += 1
        submit(request, sink)

    edge.router.submit = bounded
    edge.router.script = embed_all
    client = await edge.client()
    answer = await client.embeddings.create(model="vectors", input=[[5]] * 9)
    assert len(answer.data) == 9
    assert refusals == []


async def test_a_large_call_does_not_wait_for_room_beyond_its_deadline(edge: Any) -> None:
    submit = edge.router.submit

    def bounded(request: Any, sink: Any) -> None:
        if len(edge.router.streams) == 2:
            raise CapacityError("late", code="wait_too_long", retry_after_s=1e6)
        submit(request, sink)

    edge.router.submit = bounded
    edge.router.script = embed_all
    status, error = await refused(edge, "/v1/embeddings", {"model": "vectors", "input": [[5]] * 9})
    assert (status, error["code"]) == (503, "wait_too_long")
    assert json.loads((await edge.get("/status")).body)["in_flight"] == 0


async def test_vectors_come_with_what_is_done_under_pressure(edge: Any) -> None:
    edge.router.script = embed_all
    edge.router.browned_out = BrownoutView(1, "1; shed=batch")
    reply = await edge.post("/v1/embeddings", b'{"model":"vectors","input":"a"}')
    assert (reply.status, reply.headers["x-kvasir-brownout"]) == (200, "1; shed=batch")


async def test_a_full_router_refuses_and_nothing_is_left(edge: Any) -> None:
    edge.router.refusal = CapacityError("full", code="queue_full", retry_after_s=2.0)
    reply = await edge.post("/v1/embeddings", b'{"model":"vectors","input":["a","b"]}')
    assert (reply.status, reply.headers["retry-after"]) == (503, "2")
    status = json.loads((await edge.get("/status")).body)
    assert status["in_flight"] == 0


async def test_a_failed_input_fails_the_call_and_frees_the_others(edge: Any) -> None:
    def script(stream: Any) -> None:
        if len(edge.router.streams) == 3 and stream is edge.router.streams[0]:
            stream.fail(UpstreamError("the worker died", code="engine_dead"))

    edge.router.script = script
    client = await edge.client()
    with pytest.raises(openai.InternalServerError) as caught:
        await client.embeddings.create(model="vectors", input=["a", "b", "c"])
    assert caught.value.code == "engine_dead"
    assert len(await edge.router.cancels(2)) == 2
    shown = (await edge.get("/metrics")).body.decode()
    assert 'kvasir_requests_total{model="vectors",outcome="engine_dead"} 3.0' in shown


async def test_a_client_that_leaves_frees_its_inputs(edge: Any) -> None:
    _, writer = await edge.connect()
    body = b'{"model":"vectors","input":["a","b"]}'
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    await edge.router.submitted(2)
    writer.close()
    assert len(await edge.router.cancels(2)) == 2


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"model": "vectors"}, "missing_parameter", "input"),
        ({"model": "vectors", "input": ""}, "invalid_value", "input"),
        ({"model": "vectors", "input": ["a", ""]}, "invalid_value", "input[1]"),
        ({"model": "vectors", "input": ["a", 5]}, "invalid_type", "input"),
        ({"model": "vectors", "input": [1 << 30]}, "invalid_value", "input"),
        ({"model": "vectors", "input": ["a"] * 2049}, "invalid_value", "input"),
        ({"model": "vectors", "input": "a", "encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"model": "vectors", "input": "a", "colour": "red"}, "unknown_parameter", "colour"),
    ],
)
async def test_a_bad_request_for_embeddings_names_its_field(
    edge: Any, body: dict[str, Any], code: str, param: str
) -> None:
    status, error = await refused(edge, "/v1/embeddings", body)
    assert (status, error["code"], error["param"]) == (400, code, param)


async def test_text_becomes_tokens_and_text_again(edge: Any) -> None:
    text = "Hello world, it is  late."
    reply = await edge.post("/tokenize", json.dumps({"prompt": text, "return_token_strs": True}).encode())
    told = json.loads(reply.body)
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"]) > 0
    assert told["max_model_len"] == 4096
    reply = await edge.post("/detokenize", json.dumps({"tokens": told["tokens"]}).encode())
    assert text in json.loads(reply.body)["prompt"]


async def test_a_chat_is_tokenized_as_it_would_be_served(edge: Any) -> None:
    chat = {"model": "org/second-7B", "messages": [{"role": "user", "content": "hi"}]}
    told = json.loads((await edge.post("/tokenize", json.dumps(chat).encode())).body)
    assert told["max_model_len"] == 64
    client = await edge.client()
    edge.router.script = lambda stream: stream.finish()
    await client.chat.completions.create(**chat)
    assert edge.router.streams[0].request.tokens.tolist() == told["tokens"]


async def test_a_long_list_of_tokens_is_detokenized_off_the_loop(edge: Any) -> None:
    tokens = [100 + number % 900 for number in range(50_000)]
    reply = await edge.post("/detokenize", json.dumps({"tokens": tokens}).encode())
    assert reply.status == 200
    status, error = await refused(edge, "/detokenize", {"tokens": [1 << 30]})
    assert (status, error["code"], error["param"]) == (400, "invalid_value", "tokens")
    status, error = await refused(edge, "/tokenize", {"model": "nobody", "prompt": "a"})
    assert (status, error["code"]) == (404, "model_not_found")
