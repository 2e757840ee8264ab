"""The endpoint picker protocol of the Gateway API Inference Extension, over gRPC as a gateway speaks it."""

from __future__ import annotations

from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.kit.traffic.ext_proc_client import (
    FULL_DUPLEX,
    destination,
    header_map,
    metadata,
    picking,
    refusal,
)

from kvasir.wire.ext_proc import ext_proc_pb2 as ext
from kvasir_platform.picker.endpoints import PickerLimits
from kvasir_platform.picker.ext_proc_server import ServerBounds

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello " * 400}]}


@pytest.mark.parametrize("mode", [FULL_DUPLEX, ext.BUFFERED, ext.BUFFERED_PARTIAL])
async def test_the_endpoint_is_named_in_the_header_and_in_the_metadata(mode: Any) -> None:
    async with picking(A) as made:
        request = made.request()
        response = await request.ask(CHAT, mode=mode)
        assert destination(response) == [A]
        kind = response.WhichOneof("response")
        assert kind == ("request_headers" if mode == FULL_DUPLEX else "request_body")
        assert getattr(response, kind).response.clear_route_cache


async def test_what_a_client_sends_as_destination_is_overwritten() -> None:
    async with picking(A) as made:
        response = await made.request().ask(CHAT, headers={"x-gateway-destination-endpoint": "6.6.6.6:1"})
        assert destination(response) == [A]


async def test_a_streamed_body_is_passed_on_unchanged_in_chunks_after_the_headers() -> None:
    async with picking(A) as made:
        request, body = made.request(), b'{"prompt": "' + b"x" * 150_000 + b'"}'
        await request.send(
            request_headers=ext.HttpHeaders(headers=header_map({":method": "POST"})),
            protocol_config=ext.ProtocolConfiguration(request_body_mode=FULL_DUPLEX),
        )
        await request.send(request_body=ext.HttpBody(body=body[:90_000]))
        await request.send(request_body=ext.HttpBody(body=body[90_000:], end_of_stream=True))
        headers = await request.receive()
        assert destination(headers) == [A]
        length = headers.request_headers.response.header_mutation.set_headers[1].header
        assert (length.key, length.raw_value) == ("content-length", str(len(body)).encode())
        parts: list[Any] = []
        while not parts or not parts[-1].end_of_stream:
            response = await request.receive()
            parts.append(response.request_body.response.body_mutation.streamed_response)
        assert b"".join(part.body for part in parts) == body
        assert max(len(part.body) for part in parts) < 64 << 10
        assert [part.end_of_stream for part in parts] == [False, False, True]


async def test_a_body_that_trailers_end_is_passed_on_too() -> None:
    async with picking(A) as made:
        request = made.request()
        await request.send(request_headers=ext.HttpHeaders(headers=header_map({":method": "POST"})))
        await request.send(request_body=ext.HttpBody(body=b'{"model": "m"}'))
        await request.send(request_trailers=ext.HttpTrailers())
        assert destination(await request.receive()) == [A]
        body = (await request.receive()).request_body.response.body_mutation.streamed_response
        assert (body.body, body.end_of_stream) == (b'{"model": "m"}', False)
        assert (await request.receive()).HasField("request_trailers")


async def test_a_request_without_a_body_is_routed_by_its_headers() -> None:
    async with picking(A) as made:
        request = made.request()
        await request.send(
            request_headers=ext.HttpHeaders(headers=header_map({":method": "GET"}), end_of_stream=True)
        )
        assert destination(await request.receive()) == [A]


async def test_where_the_body_is_not_sent_the_headers_have_to_do() -> None:
    async with picking(A) as made:
        request = made.request()
        await request.send(
            request_headers=ext.HttpHeaders(headers=header_map({":method": "POST"})),
            protocol_config=ext.ProtocolConfiguration(request_body_mode=ext.NONE),
        )
        assert destination(await request.receive()) == [A]


@pytest.mark.parametrize("subset", [[B], [B, "9.9.9.9:1"], f"{B}, 9.9.9.9:1"])
async def test_only_endpoints_of_the_subset_are_picked(subset: Any) -> None:
    async with picking(A, B, C) as made:
        for _ in range(3):
            assert destination(await made.request().ask(CHAT, subset=subset)) == [B]


@pytest.mark.parametrize("subset", [[], ["9.9.9.9:1"]])
async def test_an_empty_subset_and_one_without_a_known_endpoint_are_answered_with_503(
    subset: list[str],
) -> None:
    async with picking(A) as made:
        assert refusal(await made.request().ask(CHAT, subset=subset)) == (503, "no_workers")


async def test_a_pool_without_ready_endpoints_is_answered_with_503() -> None:
    async with picking() as made:
        response = await made.request().ask(CHAT)
        assert refusal(response) == (503, "no_workers")
        keys = [each.header.key for each in response.immediate_response.headers.set_headers]
        assert keys == ["content-type", "retry-after"]


async def test_a_pool_in_which_all_have_enough_is_answered_with_429_and_takes_requests_again() -> None:
    async with picking(A, B, limits=PickerLimits(max_requests=1)) as made:
        first, second = made.request(), made.request()
        taken = {destination(await each.ask(CHAT))[0] for each in (first, second)}
        assert taken == {A, B}
        assert refusal(await made.request().ask(CHAT)) == (429, "no_capacity")
        assert refusal(await made.request().ask(CHAT, subset=[A])) == (429, "no_capacity")
        await first.receive()
        await first.end()
        assert len(destination(await made.request().ask(CHAT))) == 1


async def test_another_endpoint_is_named_for_the_case_that_the_first_one_fails() -> None:
    async with picking(A, B, C) as made:
        named = destination(await made.request().ask(CHAT))
        assert len(named) == len(set(named)) == 2
        only = destination(await made.request().ask(CHAT, subset=[C]))
        assert only == [C]


async def test_an_equal_prompt_goes_where_the_first_one_went() -> None:
    async with picking(A, B, C) as made:
        chosen = []
        for _ in range(4):
            request = made.request()
            chosen.append(destination(await request.ask(CHAT))[0])
            await answer(request)
        assert len(set(chosen)) == 1
        # A prompt of its own, or the same one for another model or salt, has no reason to.
        held = made.request()
        await held.ask(CHAT)
        for other in ({**CHAT, "model": "n"}, {**CHAT, "cache_salt": "s"}):
            assert destination(await made.request().ask(other))[0] != chosen[0]


async def answer(request: Any, *, served: str | None = None, status: str = "200") -> None:
    """Play the model server's answer to the picker."""
    await request.receive()
    await request.send(
        response_headers=ext.HttpHeaders(headers=header_map({":status": status})),
        metadata_context=metadata("envoy.lb", "x-gateway-destination-endpoint-served", served),
    )
    assert (await request.receive()).HasField("response_headers")
    await request.send(response_body=ext.HttpBody(body=b"data: 1\n\n"))
    first = (await request.receive()).response_body.response.body_mutation.streamed_response
    assert (first.body, first.end_of_stream) == (b"data: 1\n\n", False)
    await request.send(response_body=ext.HttpBody(body=b"data: [DONE]\n\n", end_of_stream=True))
    assert (await request.receive()).response_body.response.body_mutation.streamed_response.end_of_stream
    await request.end()


async def test_the_answer_is_passed_on_as_it_streams_and_its_end_frees_the_endpoint() -> None:
    async with picking(A) as made:
        request = made.request()
        await request.ask(CHAT)
        assert made.picker.in_flight(A) == 1
        await answer(request)
        assert made.picker.in_flight(A) == 0


async def test_a_gateway_that_ends_a_request_early_frees_the_endpoint() -> None:
    async with picking(A) as made:
        request = made.request()
        await request.ask(CHAT)
        request.call.cancel()
        later = made.request()
        await later.ask(CHAT)
        await later.receive()
        await later.end()
        assert made.picker.in_flight(A) == 0


async def test_an_endpoint_that_another_had_to_answer_for_is_avoided_after_a_while() -> None:
    async with picking(A, B) as made:
        failures = 0
        for number in range(40):
            request = made.request()
            named = destination(await request.ask({"model": "m", "prompt": f"{number} " * 100}))
            failures += named[0] == A
            await answer(request, served=B)
            if failures == 5:
                break
        made.picker.tick(made.clock.now())
        assert failures == 5
        for _ in range(4):
            assert destination(await made.request().ask({"model": "m", "prompt": "other"}))[0] == B


async def test_a_body_beyond_the_bound_and_one_that_is_no_json_are_refused() -> None:
    async with picking(A, bounds=ServerBounds(max_body_bytes=100)) as made:
        assert refusal(await made.request().ask(CHAT)) == (413, "body_too_large")
        assert refusal(await made.request().ask(b"not json")) == (400, "invalid_json")
        assert made.picker.in_flight(A) == 0


async def test_a_gateway_that_only_watches_gets_no_response() -> None:
    async with picking(A) as made:
        request = made.request()
        await request.send(
            request_headers=ext.HttpHeaders(headers=header_map({":method": "GET"}), end_of_stream=True),
            observability_mode=True,
        )
        await request.end()
        assert made.picker.in_flight(A) == 0


async def test_the_conformance_header_selects_endpoints_only_where_it_is_enabled() -> None:
    headers = {"test-epp-endpoint-selection": "10.0.0.3"}
    async with picking(A, B, C, test_headers=True) as made:
        request = made.request()
        assert destination(await request.ask(CHAT, headers=headers)) == [C]
        await request.receive()
        await request.send(
            response_headers=ext.HttpHeaders(headers=header_map({":status": "200"})),
            metadata_context=metadata("envoy.lb", "x-gateway-destination-endpoint-served", C),
        )
        shown = (await request.receive()).response_headers.response.header_mutation.set_headers[0].header
        assert (shown.key, shown.raw_value) == ("x-conformance-test-served-endpoint", C.encode())
        unknown = {"test-epp-endpoint-selection": "10.0.0.9"}
        assert refusal(await made.request().ask(CHAT, headers=unknown)) == (503, "no_workers")
    async with picking(A, B, C) as made:
        assert {destination(await made.request().ask(CHAT, headers=headers))[0] for _ in range(3)} != {C}


async def test_health_is_told_by_the_names_of_the_protocol() -> None:
    async with picking() as made:
        stub = health_pb2_grpc.HealthStub(made.channel)

        async def health(service: str) -> int:
            answered = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            return int(answered.status)

        serving, not_serving = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        service = "envoy.service.ext_proc.v3.ExternalProcessor"
        assert [await health(each) for each in ("liveness", "readiness", service)] == [
            serving,
            not_serving,
            not_serving,
        ]
        await made.server.set_ready(ready=True)
        assert [await health(each) for each in ("readiness", service, "")] == [serving] * 3
