"""Operators take workers out of service over HTTP."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kvasir.core.errors import RequestError, UpstreamError


def error_of(reply: Any) -> tuple[int, str]:
    return reply.status, json.loads(reply.body)["error"]["code"]


async def test_a_drain_and_its_end_reach_the_router_with_the_reason(edge: Any) -> None:
    reply = await edge.post("/workers/decode%2F7f/drain", b'{"reason": "kernel update"}')
    assert reply.status == 202
    assert json.loads(reply.body) == {"worker_id": "decode/7f", "draining": True}
    reply = await edge.post("/workers/d-0/undrain", b"")
    assert json.loads(reply.body) == {"worker_id": "d-0", "draining": False}
    assert edge.router.drains == [("decode/7f", True, "kernel update"), ("d-0", False, "")]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"\xff", "invalid_json"),
        (b"[]", "invalid_type"),
        (b'{"reason": 1}', "invalid_type"),
        (b'{"why": "x"}', "unknown_parameter"),
        (b'{"reason": "a\\nb"}', "invalid_value"),
        (json.dumps({"reason": "x" * 201}).encode(), "invalid_value"),
    ],
)
async def test_a_bad_body_drains_nothing(edge: Any, body: bytes, code: str) -> None:
    assert error_of(await edge.post("/workers/d-0/drain", body)) == (400, code)
    assert edge.router.drains == []


async def test_what_the_router_says_of_the_worker_is_the_answer(edge: Any) -> None:
    edge.router.refusal = RequestError("There is no worker 'x' here.", status=404, code="worker_not_found")
    assert error_of(await edge.post("/workers/x/drain", b"")) == (404, "worker_not_found")
    edge.router.refusal = UpstreamError("no session", code="session_lost")
    assert error_of(await edge.post("/workers/x/drain", b"")) == (502, "session_lost")


async def test_reading_the_path_drains_nothing(edge: Any) -> None:
    assert error_of(await edge.get("/workers/d-0/drain")) == (405, "method_not_allowed")
    assert error_of(await edge.post("/workers/d-0/other", b"")) == (404, "not_found")
    assert edge.router.drains == []


async def test_a_drain_needs_a_key_where_keys_are_needed(start: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(hashlib.sha256(b"good").hexdigest() + "\n")
    edge = await start(api_keys_file=str(keys))
    assert error_of(await edge.post("/workers/d-0/drain", b"")) == (401, "invalid_api_key")
    assert edge.router.drains == []
    reply = await edge.post("/workers/d-0/drain", b"", "Authorization: Bearer good\r\n")
    assert reply.status == 202
