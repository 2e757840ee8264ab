"""Response bodies of endpoints that generate nothing, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest
from tests.e2e.gateway.test_decisions import RECORD

from kvasir.config.spec.deployment import PoolSpec
from kvasir.core.errors import CapacityError, RequestError
from kvasir.core.requests import Role

Start = Callable[..., Awaitable[Any]]
MODEL = (
    b'{"id":"kvasir-tiny","object":"model","created":N,"owned_by":"kvasir","max_model_len":4096,'
    b'"task":"generate"}'
)
ADAPTER = (
    b'{"id":"pirate","object":"model","created":N,"owned_by":"kvasir","max_model_len":4096,'
    b'"task":"generate","root":"pirate","parent":"kvasir-tiny"}'
)
GET = {
    "/v1/models": b'{"object":"list","data":[%b,%b]}' % (MODEL, ADAPTER),
    "/v1/models/kvasir-tiny": MODEL,
    "/v1/models/pirate": ADAPTER,
    "/health/live": b'{"status":"live"}',
    "/health/ready": b'{"status":"ready"}',
    "/status": b'{"deployment":"kvasir","ready":true,"reason":null,"disaggregation":"always",'
    b'"models":["kvasir-tiny","pirate"],"readiness":{"kvasir-tiny":{"ready":true,"reason":null},'
    b'"x":{"ready":false,"reason":"no worker"}},"in_flight":0,"workers":[],"pools":['
    b'{"pool":"prefill","model":"kvasir-tiny","role":"prefill","desired":1,"serving":0,"starting":0,"forecast":null},'
    b'{"pool":"decode","model":"kvasir-tiny","role":"decode","desired":1,"serving":0,"starting":0,"forecast":null}],'
    b'"queues":{},"verdict":V}',
}
POST = {
    ("/tokenize", '{"prompt": "Once upon"}'): b'{"count":4,"max_model_len":4096,"tokens":[N,N,N,N]}',
    ("/tokenize", '{"prompt": "Once", "return_token_strs": true}'): b'{"count":3,"max_model_len":4096,'
    b'"tokens":[N,N,N],"token_strs":["<|bos|>","On","ce"]}',
    ("/tokenize", '{"prompt": "", "add_special_tokens": false, "return_token_strs": true}'): b'{"count":0,'
    b'"max_model_len":4096,"tokens":[],"token_strs":[]}',
    ("/detokenize", '{"tokens": []}'): b'{"prompt":""}',
    ("/workers/d-0/drain", ""): b'{"worker_id":"d-0","draining":true}',
    ("/workers/d-0/undrain", ""): b'{"worker_id":"d-0","draining":false}',
}


def without_numbers(body: bytes) -> bytes:
    """With N for each number that depends on the time or on the vocabulary, and V for the verdict, whose
    texts have tests of their own."""
    body = re.sub(rb'"verdict":\{.*\}', b'"verdict":V}', body)
    body = re.sub(rb'"created":\d+', b'"created":N', body)
    return re.sub(rb'(?<="tokens":\[)[\d,]+', lambda ids: re.sub(rb"\d+", b"N", ids[0]), body)


@pytest.mark.parametrize("path", list(GET))
async def test_what_is_read_is_answered_with_these_bytes(edge: Any, path: str) -> None:
    edge.router.reasons = {"kvasir-tiny": None, "x": "no worker"}
    assert without_numbers((await edge.get(path)).body) == GET[path]


@pytest.mark.parametrize(("path", "body"), list(POST))
async def test_what_is_posted_is_answered_with_these_bytes(edge: Any, path: str, body: str) -> None:
    assert without_numbers((await edge.post(path, body.encode())).body) == POST[path, body]


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("float", b"[0.5,-1.0,0.0,0.10000000149011612]"), ("base64", b'"AAAAPwAAgL8AAAAAzczMPQ=="')],
)
async def test_embeddings_are_answered_with_these_bytes(start: Start, encoding: str, shown: bytes) -> None:
    edge = await start(deployed={"disaggregation": "never", "pools": (PoolSpec(name="e", role=Role.EMBED),)})
    edge.router.script = lambda stream: stream.embed((0.5, -1.0, 0.0, 0.1))
    body = {"model": "kvasir-tiny", "input": ["Once", "upon"], "encoding_format": encoding}
    reply = await edge.post("/v1/embeddings", json.dumps(body).encode(), 'x-request-id: a"b\r\n')
    item = b'{"object":"embedding","index":%d,"embedding":%b}'
    data = b",".join(item % (index, shown) for index in range(2))
    name = reply.headers["x-request-id"].encode()
    assert without_numbers(reply.body) == (
        b'{"id":"embd-%b","object":"list","created":N,"model":"kvasir-tiny","data":[%b],'
        b'"usage":{"prompt_tokens":5,"total_tokens":5}}' % (name, data)
    )


async def test_decisions_are_answered_with_these_bytes(edge: Any) -> None:
    edge.router.records["r"] = record = replace(RECORD, request_id="r")
    reply = await edge.get("/decisions/r")
    assert reply.body == b'{"request_id":"r","decisions":[%b],"timelines":[]}' % msgspec.json.encode(
        asdict(record)
    )


async def test_errors_are_answered_with_these_bytes(edge: Any) -> None:
    edge.router.refusal = RequestError('No "ß".', status=404, code="worker_not_found", param="a[0]")
    assert (await edge.post("/workers/x/drain", b"")).body == (
        '{"error":{"message":"No \\"ß\\".","type":"invalid_request_error","param":"a[0]",'
        '"code":"worker_not_found"}}'
    ).encode()
    edge.router.refusal = CapacityError("Full.", code="queue_full")
    assert (await edge.post("/workers/x/drain", b"")).body == (
        b'{"error":{"message":"Full.","type":"server_error","param":null,"code":"queue_full"}}'
    )
    edge.router.refusal = ZeroDivisionError("inside")
    assert (await edge.post("/workers/x/drain", b"")).body == (
        b'{"error":{"message":"Internal error; the log has the details under this request id.",'
        b'"type":"server_error","param":null,"code":"internal_error"}}'
    )
