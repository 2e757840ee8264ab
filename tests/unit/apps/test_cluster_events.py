"""Failed starts of pools become events of the RayCluster, each once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.kit.cluster.api_server import ApiServer, api_server
from tests.kit.gateway.api_requests import Rule

from kvasir.core.errors import ConfigError
from kvasir_platform.apps.cluster_events import AGAIN_S, LOOK_S, REASON, FailedStartEvents
from kvasir_platform.apps.common.failed_starts import (
    MOST_CHARACTERS,
    FailedPool,
    FailedStartsFile,
    read_failed_starts,
)
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.events import ClusterEvents

CLUSTERS, EVENTS = "/apis/ray.io/v1/namespaces/default/rayclusters", "/api/v1/namespaces/default/events"
RIGHTS = Rule.of_role(
    {
        "kind": "Role",
        "metadata": {},
        "rules": [
            {
                "apiGroups": ["ray.io"],
                "resources": ["rayclusters"],
                "verbs": ["get"],
                "resourceNames": ["llm"],
            },
            {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
        ],
    }
)
FAILED = {
    "pool": "decode",
    "attempt": 1,
    "next_at": "2026-11-26T08:00:05+00:00",
    "message": "no  room\nat all",
}


def test_a_failed_start_is_told_as_before_and_kept_for_another_container(tmp_path: Path) -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    path = tmp_path / "failed.json"
    tell = FailedStartsFile(path).noting(lambda name, **details: told.append((name, details)))
    tell("adopted")
    assert not path.exists()
    tell("start_failed", **FAILED)
    tell("start_failed", **{**FAILED, "pool": "prefill", "message": "x" * 5000})
    tell("start_failed", **{**FAILED, "attempt": 2})
    assert [name for name, _ in told] == ["adopted", *["start_failed"] * 3]
    assert told[1][1] == FAILED
    decode, prefill = read_failed_starts(path)
    assert decode == FailedPool("decode", 2, "2026-11-26T08:00:05+00:00", "no room at all")
    assert prefill.message == "x" * MOST_CHARACTERS


def test_a_folder_that_cannot_be_written_keeps_nothing_from_being_told(tmp_path: Path) -> None:
    told: list[str] = []
    FailedStartsFile(tmp_path / "no" / "f").noting(lambda name, **_: told.append(name))(
        "start_failed", **FAILED
    )
    assert told == ["start_failed"]


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '[{"pool": "a"}]', '{"a": 1}', '[{"pool": "a", "attempt": "x"}]']
)
def test_what_is_no_such_file_has_no_failed_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "f").write_text(text)
    assert read_failed_starts(tmp_path / "f") == ()
    assert read_failed_starts(tmp_path / "none") == ()


@dataclass
class Written:
    away: bool = False
    said: list[str] = field(default_factory=list)

    def warn(self, reason: str, message: str) -> None:
        assert reason == REASON
        if self.away:
            raise ConfigError("the API server does not answer")
        self.said.append(message)


def test_each_failed_start_is_written_once_and_after_the_api_server_was_away() -> None:
    found, events = [FailedPool("decode", 1, "08:00", "no room")], Written(away=True)
    loop = FailedStartEvents(lambda: found, events)
    assert loop.step() == AGAIN_S
    events.away = False
    assert loop.step() == LOOK_S
    assert loop.step() == LOOK_S
    assert events.said == ["pool decode does not start (attempt 1, the next one at 08:00): no room"]
    found[:] = [FailedPool("decode", 2, "08:05", "no room")]
    loop.step()
    assert len(events.said) == 2


@asynccontextmanager
async def writing(folder: Path, rules: tuple[Rule, ...]) -> AsyncIterator[tuple[ApiServer, ClusterEvents]]:
    async with api_server(folder) as server:
        server.put(CLUSTERS, {"metadata": {"name": "llm"}})
        (user,) = set(server.tokens.values())
        server.rules[user] = rules
        access = Access.in_cluster(server.write_credentials(folder / "account"), server.environment())
        yield server, ClusterEvents(access, "llm", lambda: datetime(2026, 11, 26, 8, 0, tzinfo=UTC))


async def test_an_event_is_of_this_raycluster_and_written_once(tmp_path: Path) -> None:
    async with writing(tmp_path, RIGHTS) as (server, events):
        for _ in range(2):
            await asyncio.to_thread(events.warn, REASON, "no room " + "ä" * 2000)
        (event,) = (each for (where, _), each in server._objects.items() if where == EVENTS)
        cluster = server._objects[CLUSTERS, "llm"]
    about = event["involvedObject"]
    assert (about["apiVersion"], about["kind"], about["name"]) == ("ray.io/v1", "RayCluster", "llm")
    assert about["uid"] == cluster["metadata"]["uid"]
    assert (event["type"], event["reason"]) == ("Warning", REASON)
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-11-26T08:00:00Z"
    assert len(event["message"].encode()) <= 1024
    assert event["message"].startswith("no room ä")


async def test_a_missing_right_is_named(tmp_path: Path) -> None:
    async with writing(tmp_path, RIGHTS[:1]) as (_, events):
        with pytest.raises(ConfigError, match="refused to create an event of the RayCluster llm"):
            await asyncio.to_thread(events.warn, REASON, "no room")
