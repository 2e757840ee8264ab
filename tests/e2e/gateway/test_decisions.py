"""Routing hints of clients, and the decision records that they can request."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from kvasir.config.spec.deployment import SloSpec
from kvasir.core.kv import KvState, KvStatus
from kvasir.core.requests import DEFAULT_SLO, SloClass
from kvasir.ports.router import DecisionRecord, RegretView, WorkerView

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "kvasir-tiny", "messages": [{"role": "user", "content": "hi"}]}
CLASSES = (SloSpec(name="chat", ttft_s=1.0, itl_s=0.05), SloSpec(name="batch", ttft_s=60.0, itl_s=1.0))
RECORD = DecisionRecord(
    request_id="?",
    policy="cost",
    reason="load",
    mode="aggregated",
    decided_s=1.0,
    decided_in_s=1e-5,
    attempt=1,
    prompt_tokens=3,
    expected_output_tokens=8,
    slo="default",
    prefill_worker=None,
    decode_worker="d-0",
    predicted_cached_tokens=0,
    predicted_ttft_s=0.01,
    parts=(),
)


def answered_and_recorded(edge: Any) -> None:
    """The router answers each request, and keeps a record of it."""

    def script(stream: Any) -> None:
        name = stream.request.request_id
        edge.router.records[name] = replace(RECORD, request_id=name)
        stream.emit("a")
        stream.finish()

    edge.router.script = script


async def chat(edge: Any, headers: str = "", **fields: Any) -> Any:
    return await edge.post(CHAT, json.dumps(BODY | fields).encode(), headers)


async def test_a_decision_is_found_by_the_id_that_the_answer_carried(edge: Any) -> None:
    answered_and_recorded(edge)
    reply = await chat(edge)
    name = reply.headers["x-request-id"]
    routed = edge.router.streams[0].request.request_id
    for asked in (name, json.loads(reply.body)["id"], routed):
        found = await edge.get(f"/decisions/{asked}")
        assert found.status == 200
        assert found.headers["x-request-id"]
        body = json.loads(found.body)
        assert body["request_id"] == asked
        assert [record["request_id"] for record in body["decisions"]] == [routed]
        assert body["decisions"][0]["decode_worker"] == "d-0"


async def test_an_id_that_the_client_chose_means_its_latest_call(edge: Any) -> None:
    answered_and_recorded(edge)
    for _ in range(2):
        reply = await chat(edge, "X-Request-Id: mine:1\r\n")
        assert reply.headers["x-request-id"] == "mine:1"
    body = json.loads((await edge.get("/decisions/mine%3A1")).body)
    assert [record["request_id"] for record in body["decisions"]] == [
        edge.router.streams[1].request.request_id
    ]


async def test_each_prompt_of_a_call_has_its_decision(edge: Any) -> None:
    answered_and_recorded(edge)
    call = json.dumps({"model": "kvasir-tiny", "prompt": ["a", "b", "c"]}).encode()
    reply = await edge.post("/v1/completions", call)
    body = json.loads((await edge.get(f"/decisions/{reply.headers['x-request-id']}")).body)
    assert [record["request_id"][-2:] for record in body["decisions"]] == ["-0", "-1", "-2"]


async def test_of_an_unknown_id_it_is_said_what_is_kept(edge: Any) -> None:
    reply = await edge.get("/decisions/nobody")
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["code"]) == (404, "decision_not_found")
    assert "'nobody'" in error["message"]
    assert "newest 4096" in error["message"]


async def test_ids_are_remembered_as_long_as_decisions_are_kept(start: Any) -> None:
    edge = await start(decision_records=2)
    answered_and_recorded(edge)
    names = [(await chat(edge)).headers["x-request-id"] for _ in range(3)]
    assert [(await edge.get(f"/decisions/{name}")).status for name in names] == [404, 200, 200]


async def test_a_router_that_keeps_nothing_says_which_field_to_raise(start: Any) -> None:
    edge = await start(decision_records=0)
    answered_and_recorded(edge)
    name = (await chat(edge)).headers["x-request-id"]
    error = json.loads((await edge.get(f"/decisions/{name}")).body)["error"]
    assert "routing.decision_records is 0" in error["message"]


async def test_a_request_without_a_class_gets_the_first(start: Any) -> None:
    edge = await start(slo=CLASSES)
    answered_and_recorded(edge)
    await chat(edge)
    assert edge.router.streams[0].request.slo == SloClass("chat", ttft_s=1.0, itl_s=0.05)


async def test_a_class_is_asked_for_by_header(start: Any) -> None:
    edge = await start(slo=CLASSES)
    answered_and_recorded(edge)
    await chat(edge, "x-kvasir-slo: batch\r\n")
    assert edge.router.streams[0].request.slo == SloClass("batch", ttft_s=60.0, itl_s=1.0)
    shown = (await edge.get("/metrics")).body.decode()
    assert 'kvasir_slo_requests_total{met="yes",model="kvasir-tiny",slo="batch"} 1.0' in shown


@pytest.mark.parametrize("name", ["gold", "", "chat,batch", "\xff" * 300])
async def test_an_unknown_class_is_refused_with_those_there_are(start: Any, name: str) -> None:
    edge = await start(slo=CLASSES)
    answered_and_recorded(edge)
    reply = await chat(edge, f"x-kvasir-slo: {name}\r\n")
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "unknown_slo_class", "x-kvasir-slo")
    assert error["message"].endswith("the classes are: chat, batch.")
    assert not edge.router.streams


async def test_the_embedded_default_has_one_class(edge: Any) -> None:
    answered_and_recorded(edge)
    await chat(edge, "x-kvasir-slo: default\r\n")
    assert edge.router.streams[0].request.slo == DEFAULT_SLO


@pytest.mark.parametrize(
    ("headers", "user", "session"),
    [
        ("", None, ""),
        ("", "alice", "alice"),
        ("x-session-id: tab-1\r\n", None, "tab-1"),
        ("x-session-id: tab-1\r\n", "alice", "tab-1"),
    ],
    ids=["none", "the body's user", "the header", "the header before the user"],
)
async def test_a_session_is_what_the_client_calls_it(
    edge: Any, headers: str, user: str | None, session: str
) -> None:
    answered_and_recorded(edge)
    await chat(edge, headers, **({} if user is None else {"user": user}))
    assert edge.router.streams[0].request.session == session


async def test_a_session_name_is_bounded(edge: Any) -> None:
    answered_and_recorded(edge)
    for reply, param in (
        (await chat(edge, f"x-session-id: {'s' * 1025}\r\n"), "x-session-id"),
        (await chat(edge, user="s" * 1025), "user"),
    ):
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["code"], error["param"]) == (400, "invalid_value", param)


async def test_every_answer_carries_a_request_id(edge: Any) -> None:
    answered_and_recorded(edge)
    for reply in (
        await chat(edge),
        await chat(edge, stream=True),
        await chat(edge, "x-kvasir-slo: gold\r\n"),
        await edge.get("/nowhere"),
        await edge.get("/status"),
        await edge.raw(b"GET / HTTP/1.1\r\n\r\n"),
    ):
        assert reply.headers["x-request-id"]


async def test_status_tells_how_well_each_workers_cache_is_known(edge: Any) -> None:
    kv = KvStatus(KvState.PREDICTED, "it reports nothing", since_s=0.0, predicted_blocks=7)
    edge.router.views = [
        WorkerView("d-0", "a", "decode", "ready", kv=kv),
        WorkerView("d-1", "b", "decode", "x"),
    ]
    first, second = json.loads((await edge.get("/status")).body)["workers"]
    assert (first["kv"]["state"], first["kv"]["reason"]) == ("predicted", "it reports nothing")
    assert first["kv"]["predicted_blocks"] == 7
    assert first["kv"]["for_s"] > 0
    assert "since_s" not in first["kv"]
    assert second["kv"] is None


async def test_the_regret_of_all_decisions_is_summed_by_model_and_cause(edge: Any) -> None:
    edge.router.regrets = {"kvasir-tiny": RegretView(3, 1, {"queue": 0.5, "index": 0.25})}
    body = json.loads((await edge.get("/decisions")).body)
    shown = {"judged": 3, "regretted": 1, "seconds": 0.75, "causes": {"queue": 0.5, "index": 0.25}}
    assert body == {"models": {"kvasir-tiny": shown}}


async def test_a_request_for_a_worker_that_does_not_exist_is_refused_with_those_that_do(product: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="decode-2, decode-3, prefill-0") as refused:
        await product.ask(**{"x-kvasir-worker": "decode-9"})
    assert refused.value.code == "worker_not_found"
    assert product.cluster.router.in_flight == 0
