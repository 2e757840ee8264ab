"""Secrets of clients (keys, salts, prompts) never appear where others can read them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from load_tests.scenarios.scorecard.clients.http_cases import Answer, read_answer
from tests.kit.gateway.http_edge import Edge, serving

from kvasir.config.spec.deployment import GatewaySpec
from kvasir.core.errors import CapacityError, KvasirError, RequestError, TransferError, UpstreamError

KEY, UNKNOWN_KEY = "sk-canary-Key-0123456789abcdef", "sk-canary-Unknown-fedcba9876543210"
PROMPT, SALT, USER = "canary-prompt-77xyz", "canary-salt-77xyz", "canary-user-77xyz"
SECRETS = (KEY, UNKNOWN_KEY, PROMPT, SALT, USER, hashlib.sha256(KEY.encode()).hexdigest())

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": PROMPT}]
GOOD: dict[str, Any] = {"model": "kvasir-tiny", "messages": MESSAGES, "cache_salt": SALT, "user": USER}

BAD_BODIES: dict[str, bytes] = {
    "not JSON": b'{"model": "kvasir-tiny", "messages": [{"role": "user", "content": "'
    + PROMPT.encode()
    + b'"',
    "not UTF-8": json.dumps(GOOD).encode() + b"\xff",
    "not an object": json.dumps([PROMPT, SALT]).encode(),
    "a wrong type": json.dumps(GOOD | {"temperature": PROMPT}).encode(),
    "a wrong role": json.dumps(GOOD | {"messages": [{"role": 5, "content": PROMPT}]}).encode(),
    "a content of a wrong type": json.dumps(
        GOOD | {"messages": [{"role": "user", "content": {PROMPT: 1}}]}
    ).encode(),
    "an unknown field": json.dumps(GOOD | {"made_up": PROMPT}).encode(),
    "a value out of range": json.dumps(GOOD | {"temperature": -5}).encode(),
    "an image": json.dumps(
        GOOD
        | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PROMPT}}]}]}
    ).encode(),
    "too long": json.dumps(
        GOOD | {"messages": [{"role": "user", "content": (PROMPT + " ") * 3000}]}
    ).encode(),
    "a salt of a wrong type": json.dumps(GOOD | {"cache_salt": [SALT]}).encode(),
    "an unknown model": json.dumps(GOOD | {"model": "no-such-model"}).encode(),
    "nested too deep": b'{"model": "' + PROMPT.encode() + b'", "messages": ' + b"[" * 5000,
}

FAULTS: list[KvasirError] = [
    CapacityError("There is no room."),
    UpstreamError("The worker died."),
    TransferError("The KV did not arrive."),
    RequestError("Not so."),
]


def request(key: str, body: bytes, path: str = CHAT, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {key}\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def raw_refusals() -> list[bytes]:
    """Requests that are refused before anything handles them, with secrets in their heads."""
    auth = f"Authorization: Bearer {KEY}\r\n".encode()
    return [
        b"GET /v1/models HTTP/1.1\r\n" + auth + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: t\r\n" + auth + auth + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: t\r\n" + auth + b" folded\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: t\r\n" + auth + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /v1/models HTTP/9.9\r\nHost: t\r\n" + auth + b"\r\n",
        b"GET /nowhere?api_key=" + KEY.encode() + b" HTTP/1.1\r\nHost: t\r\n" + auth + b"\r\n",
        b"DELETE /v1/models HTTP/1.1\r\nHost: t\r\n" + auth + b"\r\n",
        request(KEY, b"", CHAT, "Content-Type: text/plain\r\n"),
        request(KEY, b"", CHAT, "Expect: magic\r\n"),
        request(UNKNOWN_KEY, json.dumps(GOOD).encode()),
        request(KEY, json.dumps(GOOD).encode(), headers="x-kvasir-slo: none-such\r\n"),
        request(KEY, json.dumps(GOOD).encode()).replace(b"Bearer", b"Basic"),
    ]


@pytest.fixture
def keyed(tmp_path: Path) -> GatewaySpec:
    file = tmp_path / "keys"
    file.write_text(hashlib.sha256(KEY.encode()).hexdigest() + "\n")
    return GatewaySpec(port=0, drain_timeout_s=0.0, api_keys_file=str(file))


async def ask(edge: Edge, data: bytes) -> Answer:
    reader, writer = await asyncio.open_connection(edge.host, edge.port)
    try:
        writer.write(data)
        return await read_answer(reader)
    finally:
        writer.close()


def found_in(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


def logged(caplog: pytest.LogCaptureFixture) -> str:
    return caplog.text + "".join(repr(record.__dict__) for record in caplog.records)


async def test_no_error_tells_a_secret(keyed: GatewaySpec, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(keyed) as edge:
        answers = [await ask(edge, request(KEY, body)) for body in BAD_BODIES.values()]
        answers += [await ask(edge, data) for data in raw_refusals()]
        for fault in FAULTS:
            edge.router.refusal = fault
            answers.append(await ask(edge, request(KEY, json.dumps(GOOD).encode())))
        edge.router.refusal = None
        for fault in FAULTS:
            edge.router.script = lambda stream, fault=fault: stream.fail(fault)
            for extra in ({}, {"stream": True}):
                answers.append(await ask(edge, request(KEY, json.dumps(GOOD | extra).encode())))
    assert {answer.status for answer in answers if answer.status != 200} >= {
        400,
        401,
        404,
        405,
        415,
        417,
        431,
        502,
        503,
    }
    assert [found_in(answer.body.decode()) for answer in answers] == [[]] * len(answers)
    assert found_in(logged(caplog)) == []


async def test_a_fault_of_ours_tells_a_secret_to_nobody(
    keyed: GatewaySpec, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(keyed) as edge:

        def broken(_request: object, _sink: object) -> None:
            raise RuntimeError("a fault in the router")

        monkeypatch.setattr(edge.router, "submit", broken)
        answer = await ask(edge, request(KEY, json.dumps(GOOD).encode()))
    assert answer.status == 500
    assert json.loads(answer.body)["error"]["code"] == "internal_error"
    assert "a fault in the router" not in answer.body.decode()
    assert found_in(answer.body.decode()) == []
    assert caplog.records
    assert found_in(logged(caplog)) == []


async def test_no_page_shows_a_secret(keyed: GatewaySpec) -> None:
    async with serving(keyed) as edge:

        def answer(stream: Any) -> None:
            stream.emit("a")
            stream.finish()

        edge.router.script = answer
        for extra in ({}, {"stream": True}):
            assert (await ask(edge, request(KEY, json.dumps(GOOD | extra).encode()))).status == 200
        await ask(edge, request(UNKNOWN_KEY, json.dumps(GOOD).encode()))
        pages = [
            await ask(edge, f"GET {path} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
            for path in ("/status", "/metrics", "/v1/models", "/health/ready")
        ]
    assert [page.status for page in pages] == [200] * len(pages)
    assert [found_in(page.body.decode()) for page in pages] == [[]] * len(pages)
