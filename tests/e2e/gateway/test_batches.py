"""OpenAI's client uploads files and runs batches, against the gateway on a real socket."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.kit.gateway.http_edge import Edge, serving
from tests.kit.gateway.scripted_router import ScriptedStream

from kvasir.config.spec.edge import BatchesSpec, GatewaySpec
from kvasir.core.errors import CapacityError, UpstreamError
from kvasir.core.requests import FinishReason, Task

CHAT = "/v1/chat/completions"
FINAL = ("completed", "failed", "expired", "cancelled")


def answer(stream: ScriptedStream) -> None:
    """Answer a request for text, or for an embedding."""
    if stream.request.task is Task.EMBED:
        stream.embed([1.0, 0.0])
        return
    stream.emit("Hello")
    stream.emit("", finish=FinishReason.STOP)
    stream.finish(cached=1)


@asynccontextmanager
async def client_of(edge: Edge, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    base = f"http://{edge.host}:{edge.port}/v1"
    options = {"api_key": "secret", "max_retries": 0, **options}
    async with openai.AsyncOpenAI(base_url=base, **options) as client:
        yield client


@asynccontextmanager
async def batching(
    folder: Path, limits: Mapping[str, object] | None = None, **parts: Any
) -> AsyncIterator[tuple[Edge, openai.AsyncOpenAI]]:
    """A gateway with a folder for batches, and a client of it."""
    batches = BatchesSpec.model_validate({"storage": str(folder), **(limits or {})})
    spec = GatewaySpec(port=0, drain_timeout_s=0.0, batches=batches)
    async with serving(spec, **parts) as edge, client_of(edge) as client:
        edge.router.script = answer
        yield edge, client


def chat_body(**fields: object) -> dict[str, object]:
    return {
        "model": "kvasir-tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        **fields,
    }


def line(number: int, url: str = CHAT, body: Mapping[str, object] | None = None) -> dict[str, object]:
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": url,
        "body": chat_body() if body is None else body,
    }


def jsonl(rows: Iterable[object]) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


async def submitted(
    client: openai.AsyncOpenAI, rows: Iterable[object], endpoint: Any = CHAT, **more: Any
) -> Any:
    file = await client.files.create(file=("lines.jsonl", jsonl(rows)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, **{"completion_window": "24h", **more}
    )


async def submitted_again(client: openai.AsyncOpenAI, file: str) -> Any:
    return await client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")


async def ended(client: openai.AsyncOpenAI, name: str) -> Any:
    """The batch once it has ended."""
    while (batch := await client.batches.retrieve(name)).status not in FINAL:
        pass
    return batch


async def rows_of(client: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    content = await client.files.content(file)
    return [json.loads(row) for row in content.text.splitlines()]


async def test_a_batch_of_chats_has_one_answer_for_each_line(tmp_path: Path) -> None:
    async with batching(tmp_path) as (edge, client):
        batch = await submitted(client, map(line, range(40)), metadata={"for": "test"})
        assert batch.object == "batch"
        assert batch.status == "validating"
        done = await ended(client, batch.id)
        assert done.status == "completed"
        assert done.metadata == {"for": "test"}
        assert done.request_counts is not None
        assert (done.request_counts.total, done.request_counts.completed) == (40, 40)
        assert done.error_file_id is None
        rows = await rows_of(client, done.output_file_id)
        assert Counter(row["custom_id"] for row in rows) == {f"line-{i}": 1 for i in range(40)}
        assert all(row["response"]["status_code"] == 200 and row["error"] is None for row in rows)
        assert rows[0]["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
        assert done.usage is not None
        assert done.usage.output_tokens == 80
        assert done.usage.total_tokens == done.usage.input_tokens + 80
        assert len(edge.router.streams) == 40


async def test_lines_are_in_a_class_behind_all_others_and_count_in_no_limit(tmp_path: Path) -> None:
    tenants = [{"name": "default", "requests_per_min": 20, "operator": True}]
    async with batching(tmp_path, tenancy={"tenants": tenants}) as (edge, client):
        await ended(client, (await submitted(client, map(line, range(30)))).id)
        requests = [stream.request for stream in edge.router.streams]
        assert {request.priority for request in requests} == {3000}
        assert {request.slo.name for request in requests} == {"batch"}
        await client.chat.completions.create(
            model="kvasir-tiny", messages=[{"role": "user", "content": "Hi"}]
        )


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"model": "kvasir-tiny", "prompt": "Hi", "max_tokens": 4}),
        ("/v1/responses", {"model": "kvasir-tiny", "input": "Hi"}),
        ("/v1/embeddings", {"model": "kvasir-tiny", "input": "Hi"}),
    ],
)
async def test_batches_call_each_endpoint(tmp_path: Path, endpoint: str, body: dict[str, object]) -> None:
    async with batching(tmp_path) as (_, client):
        batch = await submitted(client, [line(0, endpoint, body)], endpoint)
        done = await ended(client, batch.id)
        assert done.status == "completed"
        if endpoint == "/v1/embeddings":
            # The default model generates: its refusal is the line's result.
            (row,) = await rows_of(client, done.error_file_id)
            assert row["response"]["body"]["error"]["code"] == "unsupported_task"
        else:
            (row,) = await rows_of(client, done.output_file_id)
            assert row["response"]["status_code"] == 200


async def test_a_line_that_fails_is_in_the_error_file(tmp_path: Path) -> None:
    async with batching(tmp_path) as (_, client):
        rows = [line(0), line(1, body=chat_body(max_tokens=-1))]
        done = await ended(client, (await submitted(client, rows)).id)
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
        (row,) = await rows_of(client, done.error_file_id)
        assert row["custom_id"] == "line-1"
        assert row["response"]["status_code"] == 400
        assert row["response"]["body"]["error"]["param"] == "max_tokens"


async def test_lines_without_capacity_are_sent_again_and_executed_once(tmp_path: Path) -> None:
    executed: Counter[str] = Counter()
    refusals = 3

    def script(stream: ScriptedStream) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            stream.fail(CapacityError("later", code="no_spare_capacity"))
        else:
            executed[stream.request.request_id] += 1
            answer(stream)

    async with batching(tmp_path) as (edge, client):
        edge.router.script = script
        done = await ended(client, (await submitted(client, map(line, range(10)))).id)
        assert done.request_counts is not None
        assert done.request_counts.completed == 10
        assert sum(executed.values()) == 10


async def test_a_line_whose_worker_fails_again_and_again_is_an_error(tmp_path: Path) -> None:
    async with batching(tmp_path) as (edge, client):
        edge.router.script = lambda stream: stream.fail(UpstreamError("lost"))
        done = await ended(client, (await submitted(client, [line(0)])).id)
        (row,) = await rows_of(client, done.error_file_id)
        assert row["response"]["status_code"] == 502
        assert len(edge.router.streams) == 3


@pytest.mark.parametrize(
    ("rows", "code", "number"),
    [
        ([], "empty_file", None),
        ([line(0), line(0)], "duplicate_custom_id", 2),
        ([line(0, "/v1/completions")], "invalid_value", 1),
        ([line(0, body=chat_body(stream=True))], "unsupported_parameter", 1),
        ([{"custom_id": "a"}], "missing_parameter", 1),
        ([line(0), line(1), line(2), line(3)], "too_many_lines", None),
    ],
)
async def test_a_file_that_is_no_batch_fails_with_the_line(
    tmp_path: Path, rows: list[object], code: str, number: int | None
) -> None:
    async with batching(tmp_path, {"max_lines": 3}) as (edge, client):
        failed = await ended(client, (await submitted(client, rows)).id)
        assert failed.status == "failed"
        assert failed.errors is not None
        assert failed.errors.data is not None
        assert (failed.errors.data[0].code, failed.errors.data[0].line) == (code, number)
        assert edge.router.streams == []


async def test_a_cancelled_batch_keeps_the_results_that_it_has(tmp_path: Path) -> None:
    async with batching(tmp_path, {"concurrency": 1}) as (edge, client):
        edge.router.script = None
        batch = await submitted(client, map(line, range(400)))
        first = await edge.router.submitted()
        cancelling = await client.batches.cancel(batch.id)
        assert cancelling.status == "cancelling"
        # The line that runs goes on to its end.
        edge.router.script = answer
        answer(first)
        done = await ended(client, batch.id)
        assert done.status == "cancelled"
        assert done.cancelled_at is not None
        executed = await rows_of(client, done.output_file_id)
        assert executed[0]["custom_id"] == "line-0"
        left = await rows_of(client, done.error_file_id)
        assert len(executed) + len(left) == 400
        assert {row["error"]["code"] for row in left} == {"batch_cancelled"}
        assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_a_restarted_gateway_goes_on_and_repeats_no_line(tmp_path: Path) -> None:
    executed: Counter[str] = Counter()

    def some(stream: ScriptedStream) -> None:
        # The rest stays unanswered: the process ends in mid-batch.
        if sum(executed.values()) < 10:
            executed[stream.request.request_id] += 1
            answer(stream)

    async with batching(tmp_path, {"concurrency": 4}) as (edge, client):
        edge.router.script = some
        batch = await submitted(client, map(line, range(25)))
        await edge.router.submitted(14)
    async with batching(tmp_path) as (edge, client):
        done = await ended(client, batch.id)
        assert done.request_counts is not None
        assert done.request_counts.completed == 25
        rows = await rows_of(client, done.output_file_id)
        assert Counter(row["custom_id"] for row in rows) == {f"line-{i}": 1 for i in range(25)}
        assert len(edge.router.streams) == 15


async def test_two_gateways_with_one_folder_share_batches(tmp_path: Path) -> None:
    async with batching(tmp_path) as (one, client), batching(tmp_path) as (other, second):
        batches = [await submitted(client, map(line, range(5))) for _ in range(4)]
        for batch in batches:
            assert (await ended(second, batch.id)).status == "completed"
        assert len(one.router.streams) + len(other.router.streams) == 20


async def test_files_are_listed_shown_and_deleted(tmp_path: Path) -> None:
    async with batching(tmp_path) as (_, client):
        names = [
            (await client.files.create(file=(f"{i}.jsonl", jsonl([line(i)])), purpose="batch")).id
            for i in range(3)
        ]
        listed = [file.id async for file in client.files.list(limit=2, order="asc")]
        assert listed == sorted(names)
        shown = await client.files.retrieve(names[1])
        assert (shown.filename, shown.purpose, shown.bytes) == ("1.jsonl", "batch", len(jsonl([line(1)])))
        assert (await client.files.delete(names[1])).deleted
        with pytest.raises(openai.NotFoundError) as missing:
            await client.files.content(names[1])
        assert missing.value.code == "file_not_found"


async def test_batches_are_listed_the_newest_first(tmp_path: Path) -> None:
    async with batching(tmp_path) as (_, client):
        names = {(await submitted(client, [line(0)])).id for _ in range(3)}
        listed = [batch.id async for batch in client.batches.list(limit=2)]
        assert set(listed) == names
        assert listed == sorted(names, reverse=True)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.batches.retrieve("batch_of_nobody")
        assert missing.value.code == "batch_not_found"


async def test_a_list_goes_on_behind_an_item_that_was_deleted(tmp_path: Path) -> None:
    async with batching(tmp_path) as (_, client):
        made = [
            await client.files.create(file=("a.jsonl", jsonl([line(0)])), purpose="batch") for _ in range(3)
        ]
        oldest, middle, newest = sorted(each.id for each in made)
        await client.files.delete(middle)
        assert [each.id async for each in client.files.list(after=middle)] == [oldest]
        assert [each.id async for each in client.files.list(after=middle, order="asc")] == [newest]


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("files", {"order": "up"}, "order"),
        ("files", {"limit": "10001"}, "limit"),
        ("batches", {"limit": "0"}, "limit"),
        ("batches", {"limit": "1" * 5000}, "limit"),
        ("batches", {"limit": "٣"}, "limit"),
        ("batches", {"after": "batch_of_nobody"}, None),
        ("files", {"after": "batch_of_nobody"}, "id"),
        ("batches", {"purpose": "batch"}, "purpose"),
    ],
)
async def test_a_list_refuses_a_query_that_it_cannot_follow(
    tmp_path: Path, path: str, query: dict[str, str], param: str | None
) -> None:
    async with batching(tmp_path) as (_, client):
        with pytest.raises(openai.APIStatusError) as refused:
            await client.get(f"/{path}", cast_to=object, options={"params": query})
        assert refused.value.status_code in (400, 404)
        assert refused.value.param == param


async def test_a_file_that_a_batch_reads_is_not_deleted(tmp_path: Path) -> None:
    async with batching(tmp_path) as (edge, client):
        edge.router.script = None
        batch = await submitted(client, [line(0)])
        with pytest.raises(openai.ConflictError) as refused:
            await client.files.delete(batch.input_file_id)
        assert refused.value.code == "file_in_use"


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"max_files": 1}, "file_limit"),
        ({"max_bytes": 1024}, "file_limit"),
        ({"max_file_bytes": 1024}, "invalid_value"),
    ],
)
async def test_uploads_are_limited(tmp_path: Path, limits: Mapping[str, object], code: str) -> None:
    async with batching(tmp_path, limits) as (_, client):
        await client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.create(file=("a.jsonl", b"x" * 2048), purpose="batch")
        assert refused.value.code == code


@pytest.mark.parametrize("size", [40 << 10, 9 << 20])
async def test_an_upload_may_be_larger_than_other_bodies_and_full_of_brackets(
    tmp_path: Path, size: int
) -> None:
    large = b"[" * size
    async with batching(tmp_path) as (_, client):
        file = await client.files.create(file=("large.jsonl", large), purpose="batch")
        assert (await client.files.content(file.id)).content == large


async def test_open_batches_are_limited(tmp_path: Path) -> None:
    async with batching(tmp_path, {"max_batches": 1}) as (edge, client):
        edge.router.script = None
        await submitted(client, [line(0)])
        with pytest.raises(openai.RateLimitError) as refused:
            await submitted(client, [line(0)])
        assert refused.value.code == "batch_limit"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "99d"}, "completion_window"),
        ({"metadata": {"note": "x" * 513}}, "metadata"),
    ],
)
async def test_a_batch_that_cannot_be_is_refused(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with batching(tmp_path) as (_, client):
        with pytest.raises(openai.BadRequestError) as refused:
            await submitted(client, [line(0)], **fields)
        assert refused.value.param == param


async def test_a_purpose_other_than_batch_is_refused(tmp_path: Path) -> None:
    async with batching(tmp_path) as (_, client):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.create(file=("a.jsonl", b"{}"), purpose="assistants")
        assert refused.value.param == "purpose"


async def test_tenants_see_their_own_files_and_batches_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    names = {"one": "a", "other": "b"}
    keys.write_text("".join(f"{sha256(key.encode()).hexdigest()} tenant={t}\n" for t, key in names.items()))
    spec = GatewaySpec(
        port=0,
        drain_timeout_s=0.0,
        api_keys_file=str(keys),
        batches=BatchesSpec(storage=str(tmp_path / "batches")),
    )
    tenancy = {"tenants": [{"name": name} for name in names]}
    async with (
        serving(spec, tenancy=tenancy) as edge,
        client_of(edge, api_key="a") as one,
        client_of(edge, api_key="b") as other,
    ):
        edge.router.script = answer
        batch = await ended(one, (await submitted(one, [line(0)])).id)
        assert {stream.request.tenant for stream in edge.router.streams} == {"one"}
        assert (await other.files.list()).data == (await other.batches.list()).data == []
        for call in (
            lambda: other.files.content(batch.output_file_id),
            lambda: other.files.delete(batch.input_file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: submitted_again(other, batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call()


async def test_a_key_creates_batches_of_its_scopes_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{sha256(b'a').hexdigest()} scopes=embeddings\n")
    batches = BatchesSpec(storage=str(tmp_path / "batches"))
    spec = GatewaySpec(port=0, drain_timeout_s=0.0, api_keys_file=str(keys), batches=batches)
    async with serving(spec) as edge, client_of(edge, api_key="a") as client:
        file = await client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await submitted_again(client, file.id)
        assert refused.value.code == "insufficient_scope"


async def test_without_a_folder_the_endpoints_say_so() -> None:
    async with serving() as edge, client_of(edge) as client:
        with pytest.raises(openai.NotFoundError) as refused:
            await client.files.list()
        assert refused.value.code == "batches_disabled"


FORM = (
    " HTTP/1.1\r\nHost: t\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 9000000\r\n\r\n"
)


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("begin", ["GET /health/live", "OPTIONS /v1/files", "GET /v1/files"])
async def test_only_an_upload_may_be_larger_than_other_bodies(
    start: Any, tmp_path: Path, begin: str, folder: bool
) -> None:
    edge = await start(batches=BatchesSpec(storage=str(tmp_path) if folder else None))
    reply = await edge.raw(f"{begin}{FORM}".encode())
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (413, "body_too_large")


async def test_without_a_folder_an_upload_is_refused_before_it_is_sent(edge: Any) -> None:
    reply = await edge.raw(f"POST /v1/files{FORM}".encode())
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (404, "batches_disabled")


@pytest.mark.parametrize("name", ["file-..%2f..%2fsecret", "../x", "file-0"])
async def test_an_id_never_leaves_the_tenants_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("secret")
    async with batching(tmp_path) as (_, client):
        with pytest.raises(openai.NotFoundError):
            await client.files.content(name)
