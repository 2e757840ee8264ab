"""The members of an InferencePool, and what of a request a decision needs."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from kvasir.core.errors import CapacityError, ConfigError, RequestError
from kvasir_platform.cluster.kubernetes.api import ApiError, Listing
from kvasir_platform.picker.endpoints import EndpointPicker, PickerLimits
from kvasir_platform.picker.pool_members import PoolMembers
from kvasir_platform.picker.prompts import picked_for


class Server:
    """The API server: `answers` are objects by collection."""

    def __init__(self, **pool: Any) -> None:
        spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}], **pool}
        self.pools: dict[str, Any] = {"llama": {"spec": spec}}
        self.pods: dict[str, Any] = {}
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        self.down = False

    async def list(self, collection: str, params: Mapping[str, str]) -> Listing:
        self.asked.append((collection, params))
        if self.down:
            raise ApiError("no answer")
        found = self.pools if collection.endswith("inferencepools") else self.pods
        return Listing("1", {name: json.dumps(value).encode() for name, value in found.items()})


def pod(address: str, ready: str = "True", **meta: str) -> dict[str, Any]:
    status = {"podIP": address, "conditions": [{"type": "Ready", "status": ready}]}
    return {"metadata": {"name": "p", **meta}, "status": status}


async def test_members_are_the_ready_pods_at_each_port_of_the_pool() -> None:
    server = Server(targetPorts=[{"number": 8000}, {"number": 8001}])
    server.pods = {
        "a": pod("10.0.0.1"),
        "b": pod("10.0.0.2", ready="False"),
        "c": pod("10.0.0.3", deletionTimestamp="2026-11-25T00:00:00Z"),
        "d": {"metadata": {"name": "d"}, "status": {}},
        "e": pod("fd00::1"),
    }
    found = await PoolMembers(server, "prod", "llama").read()
    assert set(found or ()) == {"10.0.0.1:8000", "10.0.0.1:8001", "[fd00::1]:8000", "[fd00::1]:8001"}
    assert server.asked == [
        (
            "/apis/inference.networking.k8s.io/v1/namespaces/prod/inferencepools",
            {"fieldSelector": "metadata.name=llama"},
        ),
        ("/api/v1/namespaces/prod/pods", {"labelSelector": "app=vllm"}),
    ]


async def test_without_an_answer_or_a_pool_nothing_is_told() -> None:
    server = Server()
    server.down = True
    assert await PoolMembers(server, "prod", "llama").read() is None
    server.down = False
    assert await PoolMembers(server, "prod", "other").read() is None


@pytest.mark.parametrize("pool", [{"selector": {"matchLabels": {}}}, {"targetPorts": []}])
async def test_a_pool_that_selects_everything_or_has_no_port_is_an_error(pool: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs selector"):
        await PoolMembers(Server(**pool), "prod", "llama").read()


def test_equal_beginnings_of_any_api_are_found_and_limits_are_read() -> None:
    chat = picked_for({}, b'{"model": "m", "max_tokens": 7, "messages": [{"content": "a"}], "user": "u"}')
    assert (chat.model, chat.prompt, chat.max_tokens, chat.session) == ("m", b'[{"content": "a"}]', 7, "u")
    responses = picked_for(
        {"x-session-id": "s"}, b'{"input": "a", "instructions": "i", "max_output_tokens": 0}'
    )
    assert (responses.prompt, responses.max_tokens, responses.session) == (b'"i""a"', 1, "s")
    assert picked_for({}, b"").prompt == b""
    with pytest.raises(RequestError):
        picked_for({}, b'{"model": 5}')


def test_an_endpoint_that_leaves_takes_its_requests_along_and_may_come_back() -> None:
    picker = EndpointPicker(PickerLimits(max_requests=1), random.Random(3))
    asked = picked_for({}, b'{"model": "m", "prompt": "Hello"}')
    picker.update(["a:1"], 0.0)
    picked = picker.pick(asked, None, 1.0)
    picker.update([], 2.0)
    picker.answers(picked, 3.0)
    picker.ended(picked, 3.0)
    with pytest.raises(CapacityError):
        picker.pick(asked, None, 4.0)
    picker.update(["a:1"], 5.0)
    assert picker.pick(asked, None, 6.0).endpoints == ("a:1",)
    assert picker.in_flight("a:1") == 1


def test_an_endpoint_that_keeps_failing_is_avoided_for_a_while() -> None:
    picker = EndpointPicker(PickerLimits(), random.Random(3))
    picker.update(["a:1", "b:1"], 0.0)
    asked = picked_for({}, b'{"model": "m", "prompt": "Hello"}')
    for number in range(5):
        picker.ended(picker.pick(asked, ["a:1"], 60.0 + number), 60.0 + number, failed=True)
    picker.tick(65.0)
    assert picker.pick(asked, None, 65.0).endpoints[0] == "b:1"
    # If it is the only one that the gateway allows, it is tried all the same.
    assert picker.pick(asked, ["a:1"], 65.0).endpoints == ("a:1",)
