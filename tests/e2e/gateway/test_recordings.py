"""The page through which recordings are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvasir.core.errors import CapacityError
from kvasir.ports.recordings import RecordingBatch, RecordingQuery

SALT = "ab" * 16


async def read(edge: Any, body: Any, reader: str = "me") -> Any:
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await edge.post(f"/recordings/{reader}", encoded)


async def test_a_reader_gets_the_next_records(edge: Any) -> None:
    row = {"arrival_s": 1.5, "prefix_hashes": [1, 2]}
    edge.router.recordings.batch = RecordingBatch("r/1", 2.0, (row,), 7, 3, 4, True, 64)
    reply = await read(edge, {"salt": SALT, "after": 6, "block_tokens": 32, "names": True, "closing": True})
    assert reply.status == 200
    assert json.loads(reply.body) == {
        "opened": "r/1", "elapsed_s": 2.0, "records": [row], "last": 7, "dropped": 3, "running": 4,
        "more": True, "block_tokens": 64,
    }  # fmt: skip
    query = RecordingQuery(bytes.fromhex(SALT), 6, 32, names=True, closing=True)
    assert edge.router.recordings.queries == [("me", query)]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        ({}, "invalid_type"),
        ({"salt": 5}, "invalid_type"),
        ({"salt": SALT, "when": 1}, "invalid_type"),
        ({"salt": "short"}, "invalid_value"),
        ({"salt": SALT + "a"}, "invalid_value"),
        ({"salt": SALT, "after": -1}, "invalid_value"),
        ({"salt": SALT, "block_tokens": 0}, "invalid_value"),
        ({"salt": SALT, "block_tokens": 1 << 20}, "invalid_value"),
    ],
    ids=str,
)
async def test_an_invalid_body_is_refused(edge: Any, body: Any, code: str) -> None:
    reply = await read(edge, body)
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (400, code)
    assert not edge.router.recordings.queries


async def test_a_readers_name_is_bounded(edge: Any) -> None:
    for name in ("", "a" * 65, "a%2Fb", "a b"):
        reply = await read(edge, {"salt": SALT}, name.replace(" ", "%20"))
        assert json.loads(reply.body)["error"]["code"] == "invalid_value", name


async def test_too_many_readers_are_told_when_to_come_back(
    edge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(reader: str, query: RecordingQuery) -> RecordingBatch:
        raise CapacityError("full", code="too_many_recordings", retry_after_s=30.0)

    monkeypatch.setattr(edge.router.recordings, "read", full)
    reply = await read(edge, {"salt": SALT})
    assert (reply.status, reply.headers["retry-after"]) == (503, "30")
