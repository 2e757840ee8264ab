"""Routes over the real gateway: names, rules, fallbacks, shadows, and the pages that show them."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.kit.clocks import StillClock
from tests.kit.gateway.http_edge import models_of
from tests.kit.gateway.scripted_router import ScriptedRouter
from tests.kit.traffic.canary import Engine, RoutedEdge, routed

from kvasir.config.spec.deployment import Deployment, GatewaySpec
from kvasir.core.errors import CapacityError, RequestError
from kvasir.core.requests import FinishReason
from kvasir.ports.router import BrownoutView
from kvasir_platform.gateway.start import make_metrics
from kvasir_platform.gateway.traffic.setup import traffic_parts

ALIAS: dict[str, Any] = {"name": "chat", "model": "second"}
SHADOW: dict[str, Any] = {
    "name": "chat",
    "model": "kvasir-tiny",
    "shadow": {
        "model": "second",
        "share": 1.0,
        "max_concurrency": 2,
        "max_body_bytes": 4096,
        "max_tokens": 4,
    },
}


def copies(edge: RoutedEdge) -> dict[str, int]:
    """Copies for the shadow of `chat` by outcome."""
    found = {}
    for line in edge.metrics.render().decode().splitlines():
        if line.startswith("kvasir_shadow_requests_total{"):
            found[line.partition('outcome="')[2].partition('"')[0]] = int(float(line.rpartition(" ")[2]))
    return found


def test_a_gateway_without_routes_has_nothing_to_ask_about_a_request() -> None:
    models, clock = models_of(Deployment()), StillClock()
    router, metrics = ScriptedRouter(clock), make_metrics(Deployment())
    made = traffic_parts(Deployment(), models, router, dict, str, metrics=metrics, clock=clock)
    assert (made, models.routes) == (None, {})


async def test_an_alias_is_listed_and_the_answer_names_the_model_that_gave_it() -> None:
    async with routed(ALIAS) as edge:
        listed = (await edge.client.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["kvasir-tiny", "second", "chat"]
        assert (await edge.chat()).json()["model"] == "second"
        streamed = await edge.chat(stream=True)
        assert '"model":"second"' in streamed.text
        tokens = await edge.client.post("/tokenize", json={"model": "chat", "prompt": "Hello"})
        assert tokens.status_code == 200
        assert edge.router.streams[0].request.route_arm == ("chat", "second")
        # Who names the model gets no route.
        await edge.chat(model="second")
        assert edge.router.streams[-1].request.route_arm is None
        assert (await edge.chat(model="unknown")).status_code == 404


async def test_a_split_shares_requests_and_the_status_and_metrics_show_its_arms() -> None:
    arms = [{"model": "kvasir-tiny", "weight": 3}, {"model": "second", "weight": 1}]
    async with routed({"name": "chat", "arms": arms}) as edge:
        await edge.chats(60)
        served = Counter(edge.served)
        assert served["kvasir-tiny"] > served["second"] > 5
        status = (await edge.client.get("/status")).json()["routes"]
        assert status == [
            {"route": "chat", "arms": ["kvasir-tiny", "second"], "fallbacks": [], "rollout": None}
        ]
        shown = edge.metrics.render().decode()
        line = f'kvasir_route_requests_total{{arm="second",outcome="ok",route="chat"}} {served["second"]}.0'
        assert line in shown
        assert 'kvasir_route_time_to_first_token_seconds_count{arm="second",route="chat"}' in shown


async def test_rules_choose_model_slo_class_and_policy_by_header_and_length() -> None:
    rules = [
        {"headers": {"x-plan": "pro"}, "model": "second", "slo": "fast"},
        {"min_prompt_chars": 100, "slo": "fast", "policy": "least_loaded"},
    ]
    async with routed({"name": "chat", "model": "kvasir-tiny", "rules": rules}) as edge:
        await edge.chat(headers={"x-plan": "pro"})
        await edge.chat(messages=[{"role": "user", "content": "x" * 100}])
        await edge.chat(headers={"x-kvasir-slo": "default"})
        chosen = [
            (each.request.model, each.request.slo.name, each.request.policy) for each in edge.router.streams
        ]
        assert chosen == [
            ("second", "fast", ""),
            ("kvasir-tiny", "fast", "least_loaded"),
            ("kvasir-tiny", "default", ""),
        ]


async def test_a_tenant_may_use_a_route_without_its_models_and_no_other(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{hashlib.sha256(b'k-acme').hexdigest()} tenant=acme")
    tenancy = {"tenants": [{"name": "acme", "models": ["chat"]}]}
    gateway = GatewaySpec(port=0, drain_timeout_s=0.0, edges=0, api_keys_file=str(keys))
    rules = [{"tenants": ["acme"], "model": "kvasir-tiny"}]
    async with routed({**ALIAS, "rules": rules}, tenancy=tenancy, gateway=gateway) as edge:
        headers = {"authorization": "Bearer k-acme"}
        assert (await edge.chat(headers=headers)).json()["model"] == "kvasir-tiny"
        assert (await edge.chat(model="second", headers=headers)).status_code == 404


FALLBACK: dict[str, Any] = {"name": "chat", "model": "kvasir-tiny", "fallbacks": ["second"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_refuses_or_fails_before_a_token_is_replaced_and_charged_once(
    stream: bool,
) -> None:
    full = CapacityError("the queue is full")
    async with routed(FALLBACK, engines={"kvasir-tiny": Engine(fails=1.0, error=full)}) as edge:
        answer = await edge.chat(stream=stream)
        assert answer.status_code == 200
        assert edge.served == ["kvasir-tiny", "second"]
        edge.router.refusals["kvasir-tiny"] = full
        again = await edge.chat(stream=stream)
        assert again.status_code == 200
        assert edge.served[2:] == ["second"]
        shown = edge.metrics.render().decode()
        assert 'kvasir_tenant_tokens_total{kind="output",tenant="default"} 16.0' in shown
        assert again.headers.get_list("x-request-id") == [again.headers["x-request-id"]]


async def test_a_model_without_workers_is_passed_over() -> None:
    async with routed(FALLBACK) as edge:
        edge.router.reasons = {"kvasir-tiny": "no worker", "second": None}
        assert (await edge.chat()).json()["model"] == "second"
        # Without any that can answer, the request waits for the first, as one without a route does.
        edge.router.reasons["second"] = "no worker"
        assert (await edge.chat()).json()["model"] == "kvasir-tiny"


async def test_the_last_failure_and_an_error_of_the_request_are_answers() -> None:
    async with routed(FALLBACK) as edge:
        edge.router.refusals = dict.fromkeys(("kvasir-tiny", "second"), CapacityError("the queue is full"))
        assert (await edge.chat()).status_code == 503
        edge.router.refusals = {"kvasir-tiny": RequestError("no", code="invalid_value")}
        assert (await edge.chat()).status_code == 400


async def test_after_the_first_token_a_failure_is_not_hidden() -> None:
    async with routed(FALLBACK) as edge:

        def fail_late(stream: Any) -> None:
            stream.emit("Hello")
            stream.fail(CapacityError("gone"))

        edge.router.script = fail_late
        assert '"error"' in (await edge.chat(stream=True)).text
        assert edge.served == ["kvasir-tiny"]


async def test_a_shadow_is_compared_and_never_returned_nor_billed() -> None:
    async with routed(SHADOW, engines={"second": Engine(text="Goodbye", tokens=4)}) as edge:
        different = await edge.chat(temperature=0)
        edge.engines["second"].text = "Hello"
        await edge.chat(temperature=0)
        await edge.chat(temperature=1)
        assert different.json()["choices"][0]["message"]["content"] == "Hello" * 8
        assert "Goodbye" not in different.text
        assert edge.served == ["kvasir-tiny", "second"] * 3
        copy = edge.router.streams[1].request
        assert (copy.tenant, copy.session, copy.route_arm, copy.sampling.max_tokens) == ("", "", None, 4)
        assert copy.priority == 2999
        assert copies(edge) == {"different": 1, "equal": 1, "sampled": 1}
        shown = edge.metrics.render().decode()
        assert 'kvasir_tenant_tokens_total{kind="output",tenant="default"} 24.0' in shown
        assert 'kvasir_requests_total{model="second"' not in shown


async def test_what_the_model_of_the_shadow_answers_itself_is_not_copied() -> None:
    rules = [{"headers": {"x-plan": "pro"}, "model": "second"}]
    async with routed({**SHADOW, "rules": rules}) as edge:
        await edge.chat(headers={"x-plan": "pro"})
        await edge.chat()
        assert edge.served == ["second", "kvasir-tiny", "second"]


async def test_a_shadow_is_bounded_and_dropped_first() -> None:
    async with routed(SHADOW) as edge:
        answer = edge.router.script

        def only_the_model(stream: Any) -> None:
            if stream.request.model == "kvasir-tiny":
                edge.answer(stream)

        edge.router.script = only_the_model
        for response in await edge.chats(5):
            assert response.status_code == 200
        assert Counter(edge.served) == {"kvasir-tiny": 5, "second": 2}
        assert copies(edge) == {"dropped": 3}
        for stream in edge.router.streams:
            if stream.request.model == "second":
                stream.emit("x", finish=FinishReason.STOP)
                stream.finish()
        edge.router.script = answer
        await edge.chat(messages=[{"role": "user", "content": "x" * 5000}])
        assert edge.served[-1] == "kvasir-tiny"
        edge.router.browned_out = BrownoutView(1, "1; cap_max_tokens=256")
        await edge.chat()
        edge.router.browned_out = BrownoutView()
        edge.router.refusals["second"] = CapacityError("the queue is full")
        await edge.chats(2)
        del edge.router.refusals["second"]
        await edge.chat()
        assert edge.served.count("second") == 2
        edge.clock.at += 1.1
        await edge.chat()
        assert edge.served.count("second") == 3


async def test_a_copy_ends_also_if_its_request_is_left_or_answered_by_another_model() -> None:
    async with routed({**SHADOW, "fallbacks": ["second"]}) as edge:
        answer = edge.router.script

        def only_the_shadow(stream: Any) -> None:
            if stream.request.model == "second":
                edge.answer(stream)

        edge.router.script = only_the_shadow
        sending = asyncio.create_task(edge.chat(temperature=0))
        await edge.router.submitted(2)
        sending.cancel()
        await edge.router.cancels(1)
        sending = asyncio.create_task(edge.chat(temperature=0))
        await edge.router.submitted(4)
        edge.router.streams[2].fail(CapacityError("the queue is full"))
        assert (await sending).json()["model"] == "second"
        edge.router.script = answer
        await edge.chat(temperature=0)
        await edge.chat(temperature=0)
        assert copies(edge) == {"unmatched": 2, "equal": 2}


async def test_operators_see_and_order_rollouts_over_http() -> None:
    canary = {"name": "chat", "model": "kvasir-tiny", "canary": {"model": "second"}}
    async with routed(canary) as edge:
        started = (await edge.client.post("/rollouts/chat/start", json={})).json()
        assert (started["phase"], started["share"], started["shared"]) == ("running", 0.05, False)
        (listed,) = (await edge.client.get("/rollouts")).json()["rollouts"]
        assert listed == started
        assert (await edge.client.get("/status")).json()["routes"][0]["rollout"]["phase"] == "running"
        refused = await edge.client.post("/rollouts/chat/start", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "rollout_state")
        missing = await edge.client.post("/rollouts/other/start", json={})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "rollout_not_found")
        assert (await edge.client.post("/rollouts/chat/explode", json={})).status_code == 404


async def test_the_timeline_of_a_request_names_its_route_and_arm() -> None:
    async with routed(ALIAS) as edge:
        edge.router.script = None
        sending = asyncio.create_task(edge.chat(headers={"x-request-id": "mine"}))
        stream = await edge.router.submitted()
        (timeline,) = (await edge.client.get("/decisions/mine")).json()["timelines"]
        assert (timeline["route"], timeline["arm"], timeline["model"]) == ("chat", "second", "second")
        edge.answer(stream)
        assert (await sending).status_code == 200


async def test_a_client_that_leaves_between_two_models_is_not_served() -> None:
    async with routed(FALLBACK) as edge:
        edge.router.script = None
        sending = asyncio.create_task(edge.chat())
        stream = await edge.router.submitted()
        stream.fail(CapacityError("the queue is full"))
        await edge.router.submitted(2)
        sending.cancel()
        await edge.router.cancels(1)
        assert edge.router.cancelled == [edge.router.streams[1].request.request_id]
