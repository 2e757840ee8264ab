"""Operations: health, status, metrics, keys, and the graceful shutdown."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from kvasir.core.requests import EngineLoad
from kvasir.ports.router import WorkerView

BODY = b'{"model":"kvasir-tiny","messages":[{"role":"user","content":"hi"}]}'
STREAM = BODY[:-1] + b',"stream":true}'
CHAT = "/v1/chat/completions"


async def test_readiness_follows_the_router_and_says_what_is_missing(edge: Any) -> None:
    assert (await edge.get("/health/ready")).status == 200
    edge.router.reason = "pool decode has no ready worker"
    reply = await edge.get("/health/ready")
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["code"]) == (503, "not_ready")
    assert "pool decode has no ready worker" in error["message"]
    assert (await edge.get("/health/live")).status == 200


async def test_a_gateway_that_was_ready_stays_in_service_and_status_says_what_is_missing(edge: Any) -> None:
    edge.router.was_ready = True
    edge.router.reason = "no worker that decodes"
    assert (await edge.get("/health/ready")).status == 200
    status = json.loads((await edge.get("/status")).body)
    assert (status["ready"], status["reason"]) == (False, "no worker that decodes")


async def test_status_shows_the_workers(edge: Any) -> None:
    edge.router.views = [
        WorkerView("d-0", "127.0.0.1:1", "decode", "ready", load=EngineLoad(running=3), in_flight=2)
    ]
    status = json.loads((await edge.get("/status")).body)
    assert status["ready"]
    assert status["models"] == ["kvasir-tiny", "pirate"]
    assert status["workers"][0]["worker_id"] == "d-0"
    assert status["workers"][0]["load"]["running"] == 3
    assert status["workers"][0]["health"]["state"] == "healthy"


async def test_metrics_count_a_request_and_drop_a_gone_worker(edge: Any) -> None:
    def script(stream: Any) -> None:
        for text in "abc":
            stream.emit(text)
        stream.finish(cached=2)

    edge.router.script = script
    edge.router.views = [WorkerView("d-0", "a", "decode", "ready", load=EngineLoad(kv_usage=0.5))]
    assert (await edge.post(CHAT, STREAM)).status == 200
    shown = (await edge.get("/metrics")).body.decode()
    assert 'kvasir_requests_total{model="kvasir-tiny",outcome="ok"} 1.0' in shown
    assert 'kvasir_output_tokens_total{model="kvasir-tiny"} 3.0' in shown
    assert 'kvasir_cached_tokens_total{model="kvasir-tiny"} 2.0' in shown
    assert 'kvasir_inter_token_latency_seconds_count{model="kvasir-tiny"} 2.0' in shown
    assert 'kvasir_time_to_first_token_seconds_count{model="kvasir-tiny"} 1.0' in shown
    assert 'kvasir_worker_kv_usage_ratio{pool="decode",worker="d-0"} 0.5' in shown
    edge.router.views = []
    assert "d-0" not in (await edge.get("/metrics")).body.decode()


async def test_a_clients_model_name_never_becomes_a_label(edge: Any) -> None:
    await edge.post(CHAT, BODY.replace(b"kvasir-tiny", b"made-up"))
    shown = (await edge.get("/metrics")).body.decode()
    assert "made-up" not in shown
    assert 'outcome="model_not_found"} 1.0' in shown


async def test_a_whole_answer_tells_where_the_time_went(edge: Any) -> None:
    def script(stream: Any) -> None:
        stream.emit("a")
        stream.finish()

    edge.router.script = script
    whole = (await edge.post(CHAT, BODY)).headers["server-timing"]
    assert [part.split(";")[0] for part in whole.split(", ")] == [
        "admit", "queue", "route", "prefill", "ttft", "decode", "total",
    ]  # fmt: skip
    streamed = (await edge.post(CHAT, STREAM)).headers["server-timing"]
    assert [part.split(";")[0] for part in streamed.split(", ")] == ["admit", "ttft"]


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


async def test_keys_guard_everything_but_health(start: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# team\n{hashlib.sha256(b'good').hexdigest()}  # alice\n")
    edge = await start(api_keys_file=str(keys))
    for path in ("/v1/models", "/status", "/metrics"):
        for headers in ("", bearer("bad"), "Authorization: Basic good\r\n"):
            reply = await edge.get(path, headers)
            error = json.loads(reply.body)["error"]
            assert (reply.status, error["code"], error["type"]) == (
                401, "invalid_api_key", "authentication_error",
            )  # fmt: skip
        assert (await edge.get(path, bearer("good"))).status == 200
    assert (await edge.post(CHAT, BODY)).status == 401
    assert (await edge.get("/health/live")).status == 200
    assert not edge.router.streams


async def test_a_stopping_gateway_finishes_streams_and_takes_no_more(start: Any) -> None:
    edge = await start(drain_timeout_s=30.0)
    idle, _ = await edge.connect()
    reader, writer = await edge.connect()
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(STREAM)}\r\n\r\n".encode() + STREAM
    )
    stream = await edge.router.submitted()
    stream.emit("a")
    edge.gateway.stop()
    assert await idle.read() == b""
    stream.emit("b")
    stream.finish()
    reply = await edge.read(reader)
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert await reader.read() == b""
    await edge.serving


async def test_streams_that_outlast_the_drain_are_told_and_cancelled(start: Any) -> None:
    edge = await start(drain_timeout_s=0.05)
    reader, writer = await edge.connect()
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(STREAM)}\r\n\r\n".encode() + STREAM
    )
    stream = await edge.router.submitted()
    stream.emit("a")
    edge.gateway.stop()
    reply = await edge.read(reader)
    assert b'"code":"shutting_down"' in reply.body
    await edge.serving
    assert edge.router.cancelled == [stream.request.request_id]


async def test_two_prompts_of_very_different_length_do_not_wait_for_each_other(edge: Any) -> None:
    edge.router.script = lambda stream: stream.finish()
    long = json.dumps({"model": "kvasir-tiny", "prompt": "word " * 200_000}).encode()
    slow = asyncio.create_task(edge.post("/v1/completions", long))
    await asyncio.sleep(0)
    while not slow.done():
        assert (await edge.post(CHAT, BODY)).status == 200
        if len(edge.router.streams) >= 3:
            break
    assert len(edge.router.streams) >= 3
    assert (await slow).status == 400


async def test_a_changed_key_file_is_taken_over(start: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(hashlib.sha256(b"old").hexdigest())
    edge = await start(api_keys_file=str(keys))
    assert (await edge.get("/v1/models", bearer("old"))).status == 200
    keys.write_text(hashlib.sha256(b"new").hexdigest() + "\n")
    os.utime(keys, ns=(1, 1))
    while (await edge.get("/v1/models", bearer("new"))).status != 200:
        await asyncio.sleep(0.05)
    assert (await edge.get("/v1/models", bearer("old"))).status == 401
