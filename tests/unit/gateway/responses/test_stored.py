"""What is kept of responses is bounded, is its tenant's own, and does not last."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvasir.config.spec.edge import ResponsesSpec
from kvasir.core.errors import RequestError
from kvasir.ports.responses import StoredResponse
from kvasir_platform.gateway.responses.memory_store import MemoryResponses
from kvasir_platform.gateway.responses.stored_items import items_page, shown_response


class Kept:
    """A store with a clock of the test's own."""

    def __init__(self, **spec: Any) -> None:
        self.now = 0.0
        self.store = MemoryResponses(ResponsesSpec(**spec), lambda: self.now)

    def put(self, name: str, tenant: str = "t", size: int = 100, **fields: Any) -> None:
        self.store.put(StoredResponse(tenant, name, b"x" * size, b"", **fields))

    def find(self, name: str, tenant: str = "t") -> StoredResponse | None:
        found: list[StoredResponse | None] = []
        self.store.find(tenant, name, found.append)
        return found[0]


def test_a_tenant_finds_its_own_responses_only() -> None:
    kept = Kept()
    kept.put("a")
    assert kept.find("a") is not None
    assert kept.find("a", "other") is None
    assert kept.find("b") is None


def test_the_least_recently_used_leaves_first() -> None:
    kept = Kept(max_responses=2)
    kept.put("a")
    kept.put("b")
    kept.find("a")
    kept.put("c")
    assert [name for name in "abc" if kept.find(name)] == ["a", "c"]


def test_bytes_are_bounded_and_a_tenant_pays_for_its_own() -> None:
    kept = Kept(max_bytes=10_000)
    kept.put("small", "other")
    for number in range(50):
        kept.put(f"r{number}", size=1000)
        assert kept.store.sizes[1] <= 10_000
    assert kept.find("small", "other") is not None
    assert kept.find("r49") is not None
    kept.put("huge", size=20_000)
    assert kept.find("huge") is None


def test_a_response_is_found_until_its_time_is_over() -> None:
    kept = Kept(ttl_s=10)
    kept.put("a")
    kept.now = 9.0
    assert kept.find("a") is not None
    kept.now = 10.0
    assert kept.find("a") is None
    assert kept.store.sizes == (0, 0)


def test_responses_whose_time_is_over_leave_memory_with_any_call_and_a_bounded_number_at_once() -> None:
    kept = Kept(ttl_s=10)
    for number in range(40):
        kept.put(f"r{number}", f"t{number % 3}")
        kept.find("r0", "t0")
    kept.now = 5.0
    kept.put("late")
    kept.now = 10.0
    left = []
    for _ in range(3):
        kept.find("none")
        left.append(kept.store.sizes[0])
    assert left == [25, 9, 1]
    assert kept.find("late") is not None
    kept.now = 15.0
    kept.put("new")
    assert kept.store.sizes == (1, kept.store.sizes[1])
    assert kept.find("late") is None


def test_a_response_that_is_put_again_lives_from_then_on() -> None:
    kept = Kept(ttl_s=10)
    for _ in range(20):
        kept.put("a", status="running")
        for number in range(20):
            kept.put(f"r{number}")
        kept.now += 10.0
        kept.put("a")
        kept.now += 9.0
        assert kept.find("a") is not None
    kept.now += 1.0
    assert [kept.find("a"), kept.find("a"), kept.store.sizes] == [None, None, (0, 0)]


def test_a_cancelled_response_stays_cancelled_and_its_run_hears_of_it_once() -> None:
    kept = Kept()
    stops: list[str] = []
    running = StoredResponse("t", "a", b"{}", b"", "running")
    kept.store.put(running, lambda: stops.append("a"))
    found: list[StoredResponse | None] = []
    for _ in range(2):
        kept.store.cancel("t", "a", found.append)
    kept.put("a")
    assert stops == ["a"]
    assert [each.status for each in found if each] == ["cancelled"] * 2
    assert json.loads(shown_response(found[0] or running))["status"] == "cancelled"
    assert kept.find("a") == found[0]
    kept.store.put(StoredResponse("t", "b", b"{}", b"", "running"), lambda: stops.append("b"))
    kept.store.remove("t", "b", found.append)
    assert stops == ["a", "b"]


def test_items_come_in_pages() -> None:
    items = json.dumps([{"id": str(number)} for number in range(5)]).encode()

    def page(query: bytes) -> tuple[list[str], bool]:
        shown = json.loads(items_page(items, query))
        return [item["id"] for item in shown["data"]], shown["has_more"]

    assert page(b"") == (["4", "3", "2", "1", "0"], False)
    assert page(b"order=asc&limit=2") == (["0", "1"], True)
    assert page(b"order=asc&limit=2&after=2") == (["3", "4"], False)
    for query in (b"order=up", b"limit=0", b"limit=101", b"limit=x", b"after=9"):
        with pytest.raises(RequestError):
            page(query)
