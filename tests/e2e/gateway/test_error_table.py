"""The table of errors: each code is provoked and returned with its status and remedy."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.gateway.test_error_causes import OF_ENGINES

from kvasir.core.errors import CapacityError, KvasirError, UpstreamError
from kvasir.telemetry.reasons import REASONS

ROOT = Path(__file__).parents[3]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
MAX_BODY = 65536


def post(path: str, body: Any, headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def get(path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: t\r\n{headers}\r\n".encode()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "kvasir-tiny", "messages": USER, **fields}


BEARER = "Authorization: Bearer secret\r\n"
PART = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}

#: What clients send, by what they hear.
CAUSED: dict[str, bytes] = {
    "invalid_json": post(CHAT, b"{", BEARER),
    "invalid_type": post(CHAT, chat(n="two"), BEARER),
    "invalid_value": post(CHAT, chat(n=0), BEARER),
    "missing_parameter": post(CHAT, {"model": "kvasir-tiny"}, BEARER),
    "unknown_parameter": post(CHAT, chat(temprature=1), BEARER),
    "unsupported_parameter": post(CHAT, chat(use_beam_search=True), BEARER),
    "unsupported_modality": post(CHAT, chat(messages=[{"role": "user", "content": [PART]}]), BEARER),
    "unsupported_task": post("/v1/embeddings", {"model": "kvasir-tiny", "input": "x"}, BEARER),
    "context_length_exceeded": post(CHAT, chat(max_tokens=100_000), BEARER),
    "body_too_complex": post(CHAT, b"[" * 40_000, BEARER),
    "grammar_too_costly": post(CHAT, chat(guided_regex="((a*)*)*"), BEARER),
    "unknown_slo_class": post(CHAT, chat(), BEARER + "x-kvasir-slo: never\r\n"),
    "malformed_http": b"GET / HTTP/1.1\r\nHost t\r\n\r\n",
    "missing_host": b"GET / HTTP/1.1\r\n\r\n",
    "invalid_api_key": get("/v1/models"),
    "model_not_found": post(CHAT, chat(model="gpt-9"), BEARER),
    "not_found": get("/nowhere", BEARER),
    "decision_not_found": get("/decisions/x", BEARER),
    "method_not_allowed": get(CHAT, BEARER),
    "body_too_large": post(CHAT, b" " * (MAX_BODY + 1), BEARER),
    "target_too_long": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: t\r\n\r\n",
    "unsupported_media_type": post(CHAT, chat(), BEARER + "Content-Encoding: gzip\r\n"),
    "expectation_failed": post(CHAT, chat(), BEARER + "Expect: a miracle\r\n"),
    "headers_too_large": get("/", "X: a\r\n" * 200),
    "unsupported_transfer_encoding": (
        b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
    ),
    "http_version_not_supported": b"GET / HTTP/2.0\r\nHost: t\r\n\r\n",
}

#: The same, of a gateway that asks for no key and holds one connection of a client.
CAUSED_OPEN = {"origin_not_allowed", "too_many_client_connections"}
FROM_ELSEWHERE = get("/v1/models", "Origin: https://elsewhere.example\r\n")

#: What the router or a worker says of a request: whatever a client sends, it may hear these. Here they are
#: said by a scripted router; what can be caused without a real engine is, in the file named below.
PASSED_ON = frozenset(
    code for code, reason in REASONS.items() if reason.status >= 500 and code not in CAUSED
) | {"tenant_queue_full", "tenant_over_share", "request_too_large", "invalid_request"}

#: Walked by tests of their own, because they take a deployment, a pace or a state of their own.
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(
        (*OF_ENGINES, "no_workers", "queue_full", "tenant_queue_full"),
        "tests/e2e/gateway/test_error_causes.py",
    ),
    "header_timeout": "tests/e2e/gateway/test_hostile_clients.py",
    "body_timeout": "tests/e2e/gateway/test_hostile_clients.py",
    "slow_reader": "tests/e2e/gateway/test_hostile_clients.py",
    "content_filter": "tests/e2e/gateway/test_filters.py",
    "invalid_image": "tests/e2e/gateway/test_images.py",
    "image_too_large": "tests/e2e/gateway/test_images.py",
    "too_many_images": "tests/e2e/gateway/test_images.py",
    "image_url_refused": "tests/e2e/gateway/test_images.py",
    "image_fetch_failed": "tests/unit/gateway/media/test_fetch.py",
    **dict.fromkeys(
        ("invalid_media", "media_too_large", "too_many_media", "media_url_refused", "media_fetch_failed"),
        "tests/e2e/gateway/test_media.py",
    ),
    "data_residency": "tests/e2e/gateway/test_regions.py",
    "client_closed": "tests/e2e/gateway/test_openai_client.py",
    "tls_failed": "tests/security/test_http_tls.py",
    "worker_not_found": "tests/e2e/gateway/test_drains.py",
    "adapter_unreadable": "tests/unit/workers/test_adapter_files.py",
    "adapter_too_large": "tests/unit/workers/test_adapter_files.py",
    "adapter_rank_too_large": "tests/unit/workers/test_adapter_files.py",
    "adapter_base_mismatch": "tests/unit/workers/test_adapter_files.py",
    "adapter_refused": "tests/unit/vllm_engine/test_loaded_adapters.py",
    "adapter_changed": "tests/unit/workers/test_adapter_host.py",
    "adapter_loading_disabled": "tests/simulation/test_loaded_adapters.py",
    "adapter_source_not_allowed": "tests/simulation/test_loaded_adapters.py",
    "adapter_not_found": "tests/simulation/test_loaded_adapters.py",
    "adapter_exists": "tests/simulation/test_loaded_adapters.py",
    "adapter_limit": "tests/simulation/test_loaded_adapters.py",
    "api_key_expired": "tests/e2e/gateway/test_tenants.py",
    "response_not_found": "tests/e2e/gateway/test_responses.py",
    "previous_response_not_found": "tests/e2e/gateway/test_responses.py",
    "background_limit": "tests/e2e/gateway/test_responses.py",
    "operator_only": "tests/e2e/gateway/test_tenants.py",
    "output_limit_exceeded": "tests/e2e/gateway/test_tenants.py",
    "token_limit_too_small": "tests/e2e/gateway/test_tenants.py",
    "rate_limit_requests": "tests/e2e/gateway/test_tenants.py",
    "rate_limit_tokens": "tests/e2e/gateway/test_tenants.py",
    "rate_limit_bytes": "tests/security/test_http_edge.py",
    "concurrency_limit": "tests/e2e/gateway/test_tenants.py",
    "budget_exceeded": "tests/e2e/gateway/test_costs.py",
    "costs_disabled": "tests/e2e/gateway/test_costs.py",
    "insufficient_scope": "tests/e2e/gateway/test_identity.py",
    "no_tenant": "tests/e2e/gateway/test_identity.py",
    "invalid_token": "tests/e2e/gateway/test_identity.py",
    "token_expired": "tests/e2e/gateway/test_identity.py",
    "batch_limit": "tests/e2e/gateway/test_batches.py",
    "batch_not_found": "tests/e2e/gateway/test_batches.py",
    "batches_disabled": "tests/e2e/gateway/test_batches.py",
    "duplicate_custom_id": "tests/e2e/gateway/test_batches.py",
    "file_in_use": "tests/e2e/gateway/test_batches.py",
    "file_limit": "tests/e2e/gateway/test_batches.py",
    "file_not_found": "tests/e2e/gateway/test_batches.py",
    "rollout_not_found": "tests/unit/gateway/traffic/test_routes.py",
    "rollout_state": "tests/unit/gateway/traffic/test_routes.py",
}


@pytest.fixture
def secured(tmp_path: Path) -> dict[str, Any]:
    """A gateway's spec with one key, `secret`, and small bounds."""
    keys = tmp_path / "keys"
    keys.write_text(hashlib.sha256(b"secret").hexdigest() + "\n")
    return {"api_keys_file": str(keys), "max_body_bytes": MAX_BODY}


def test_every_code_is_walked_somewhere() -> None:
    walked = {*CAUSED, *CAUSED_OPEN, *PASSED_ON, *ELSEWHERE}
    assert walked == set(REASONS)


@pytest.mark.parametrize("code", ELSEWHERE)
def test_what_is_walked_elsewhere_is_walked_there(code: str) -> None:
    source = (ROOT / ELSEWHERE[code]).read_text(encoding="utf-8")
    assert re.search(rf"""["']{code}["']""", source)


async def test_what_a_client_causes_is_answered_as_the_table_says(
    start: Callable[..., Any], secured: dict[str, Any]
) -> None:
    edge = await start(**secured)
    for code, data in CAUSED.items():
        reply = await edge.raw(data)
        error = json.loads(reply.body)["error"]
        assert (code, reply.status) == (error["code"], REASONS[code].status)
        assert error["message"], code
        assert reply.headers["x-request-id"], code
        assert ("param" in error, b"secret" in reply.body) == (True, False), code


async def test_what_an_open_gateway_and_a_full_one_refuse_is_answered_as_the_table_says(
    start: Callable[..., Any],
) -> None:
    edge = await start(max_connections_per_client=1, trusted_proxies=())
    # The first connection stays open.
    replies = {"origin_not_allowed": await edge.raw(FROM_ELSEWHERE)}
    reader, _ = await edge.connect()
    replies["too_many_client_connections"] = await edge.read(reader)
    assert set(replies) == CAUSED_OPEN
    for code, reply in replies.items():
        assert (json.loads(reply.body)["error"]["code"], reply.status) == (code, REASONS[code].status)


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_router_and_workers_say_is_answered_as_the_table_says(edge: Any, streamed: bool) -> None:
    body = json.dumps(chat(stream=streamed)).encode()
    for code in sorted(PASSED_ON):
        kind: type[KvasirError] = CapacityError if REASONS[code].status in (429, 503) else UpstreamError
        said = kind("It is so.", code=code)
        edge.router.refusal = said
        refused = await edge.post(CHAT, body)
        edge.router.refusal = None
        edge.router.script = lambda stream, said=said: stream.fail(said)
        failed = await edge.post(CHAT, body)
        for reply in (refused, failed):
            error = json.loads(reply.body)["error"]
            assert (reply.status, error["code"]) == (REASONS[code].status, code)
            assert (kind is CapacityError) is ("retry-after" in reply.headers), code
