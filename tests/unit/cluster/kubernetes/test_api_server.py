"""The in-test API server answers an independent client as the real one does."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.kit.cluster.api_server import SLICES, ApiServer, Fault, api_server
from tests.kit.cluster.slices import Pod, endpoint_slice
from tests.kit.gateway.api_requests import Refused, Rule, matches

PATIENCE_S = 20.0


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    async with api_server(tmp_path) as made:
        yield made


@asynccontextmanager
async def client_of(server: ApiServer, token: str = "token-1") -> AsyncIterator[httpx.AsyncClient]:
    context = ssl.create_default_context(cadata=server.ca.decode())
    headers = {"authorization": f"Bearer {token}"}
    url = f"https://{server.host}:{server.port}"
    async with (
        asyncio.timeout(PATIENCE_S),
        httpx.AsyncClient(base_url=url, verify=context, headers=headers, trust_env=False) as client,
    ):
        yield client


@pytest_asyncio.fixture
async def client(server: ApiServer) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(server) as made:
        yield made


@asynccontextmanager
async def watching(client: httpx.AsyncClient, path: str, **params: str) -> AsyncIterator[AsyncIterator[Any]]:
    async with client.stream("GET", path, params={"watch": "1", **params}) as answer:
        assert answer.status_code == 200

        async def events() -> AsyncIterator[Any]:
            async for line in answer.aiter_lines():
                yield json.loads(line)

        yield events()


def pod_slice(name: str, **labels: str) -> dict[str, Any]:
    made = endpoint_slice("decode", [Pod("a", "10.0.0.1")], name=name)
    made["metadata"]["labels"] |= labels
    return made


async def test_who_has_no_token_is_not_let_in_and_who_has_one_only_as_far_as_his_role_goes(
    server: ApiServer,
) -> None:
    server.put(SLICES, pod_slice("one"))
    role = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}
    server.rules["system:serviceaccount:default:router"] = Rule.of_role(
        {"kind": "Role", "metadata": {"namespace": "default"}, "rules": [role]}
    )
    async with client_of(server, "wrong") as stranger:
        assert (await stranger.get(SLICES)).status_code == 401
    async with client_of(server) as client:
        assert (await client.get(SLICES)).status_code == 200
        refused = await client.get(SLICES, params={"watch": "1"})
        assert refused.status_code == 403
        assert refused.json()["message"] == (
            'endpointslices.discovery.k8s.io is forbidden: User "system:serviceaccount:default:router" '
            'cannot watch resource "endpointslices" in API group "discovery.k8s.io" '
            'in the namespace "default"'
        )
        for elsewhere in ("/api/v1/namespaces/default/pods", SLICES.replace("default", "other")):
            assert (await client.get(elsewhere)).status_code == 403


async def test_a_list_comes_in_pages_of_one_moment_whose_rest_can_be_forgotten(
    server: ApiServer, client: httpx.AsyncClient
) -> None:
    for number in range(5):
        server.put(SLICES, pod_slice(f"s{number}"))
    first = (await client.get(SLICES, params={"limit": "2"})).json()
    server.put(SLICES, pod_slice("s9"))
    token = first["metadata"]["continue"]
    second = (await client.get(SLICES, params={"limit": "2", "continue": token})).json()
    assert [each["metadata"]["name"] for each in second["items"]] == ["s2", "s3"]
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"] == "105"
    server.expire()
    rest = await client.get(SLICES, params={"limit": "2", "continue": second["metadata"]["continue"]})
    assert (rest.status_code, rest.json()["reason"]) == (410, "Expired")


async def test_a_watch_goes_on_from_a_version_and_tells_each_change_once(
    server: ApiServer, client: httpx.AsyncClient
) -> None:
    server.put(SLICES, pod_slice("one"))
    since = str(server.version)
    server.put(SLICES, pod_slice("two"))
    async with watching(client, SLICES, resourceVersion=since, allowWatchBookmarks="true") as events:
        added = await anext(events)
        server.put(SLICES, pod_slice("two"))
        server.delete(SLICES, "one")
        kinds = [added["type"], *[(await anext(events))["type"] for _ in range(2)]]
        server.bookmark()
        bookmark = await anext(events)
    assert kinds == ["ADDED", "MODIFIED", "DELETED"]
    assert bookmark["object"]["metadata"]["resourceVersion"] == str(server.version)


async def test_a_watch_from_nowhere_begins_with_what_there_is(
    server: ApiServer, client: httpx.AsyncClient
) -> None:
    server.put(SLICES, pod_slice("one"))
    async with watching(client, SLICES, resourceVersion="0") as events:
        assert (await anext(events))["object"]["metadata"]["name"] == "one"
        server.put(SLICES, pod_slice("two"))
        assert (await anext(events))["object"]["metadata"]["name"] == "two"


async def test_what_a_watch_does_not_select_any_more_is_deleted_for_it(
    server: ApiServer, client: httpx.AsyncClient
) -> None:
    since = str(server.version)
    server.put(SLICES, pod_slice("one", colour="red"))
    server.put(SLICES, pod_slice("one", colour="blue"))
    server.put(SLICES, pod_slice("one", colour="red"))
    async with watching(client, SLICES, resourceVersion=since, labelSelector="colour in (red)") as events:
        assert [(await anext(events))["type"] for _ in range(3)] == ["ADDED", "DELETED", "ADDED"]


async def test_a_version_that_is_forgotten_is_gone_and_a_watch_ends_in_time_with_a_bookmark(
    server: ApiServer, client: httpx.AsyncClient
) -> None:
    server.put(SLICES, pod_slice("one"))
    server.expire()
    async with watching(client, SLICES, resourceVersion="100") as events:
        gone = await anext(events)
    assert (gone["type"], gone["object"]["code"]) == ("ERROR", 410)
    limits = {"timeoutSeconds": "0.05", "allowWatchBookmarks": "1", "resourceVersion": str(server.version)}
    async with watching(client, SLICES, **limits) as events:
        assert [each["type"] async for each in events] == ["BOOKMARK"]


async def test_a_stale_write_is_a_conflict_and_so_is_a_name_that_is_taken(
    server: ApiServer, client: httpx.AsyncClient
) -> None:
    leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
    made = (await client.post(leases, json={"metadata": {"name": "l"}, "spec": {"holder": "a"}})).json()
    assert (await client.post(leases, json={"metadata": {"name": "l"}})).status_code == 409
    changed = await client.put(f"{leases}/l", json={**made, "spec": {"holder": "b"}})
    assert changed.status_code == 200
    assert (await client.put(f"{leases}/l", json={**made, "spec": {"holder": "c"}})).status_code == 409
    patched = await client.patch(f"{leases}/l", json={"spec": {"holder": None, "term": 1}})
    assert patched.json()["spec"] == {"term": 1}
    assert (await client.get(f"{leases}/l")).json()["spec"] == {"term": 1}
    assert (await client.delete(f"{leases}/l")).status_code == 200
    assert (await client.get(f"{leases}/l")).status_code == 404


async def test_faults_meet_the_next_requests_of_their_verb_only(
    server: ApiServer, client: httpx.AsyncClient
) -> None:
    server.faults += [Fault("list", status=429, retry_after=7), Fault("watch", cut_after=1)]
    busy = await client.get(SLICES)
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "7")
    assert (await client.get(SLICES)).status_code == 200
    since = str(server.version)
    for name in ("one", "two"):
        server.put(SLICES, pod_slice(name))
    async with watching(client, SLICES, resourceVersion=since) as events:
        assert (await anext(events))["object"]["metadata"]["name"] == "one"
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(events)
    assert server.faults == []


@pytest.mark.parametrize(
    ("selector", "fits"),
    [
        ("", True),
        ("a=1", True),
        ("a==1,b", True),
        ("a!=1", False),
        ("!c", True),
        ("!a", False),
        ("c!=1", True),
        ("a in (2, 1),b=2", True),
        ("a notin (1)", False),
        ("a=1,b in (3)", False),
    ],
)
def test_selectors_read_as_the_real_ones(selector: str, fits: bool) -> None:
    assert matches(selector, {"a": "1", "b": "2"}) is fits


def test_a_selector_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(Refused):
        matches("a in 1)(", {})
