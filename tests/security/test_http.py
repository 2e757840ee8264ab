"""Requests that violate HTTP are refused, and no two parties disagree about where a message ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from load_tests.scenarios.haproxy import haproxy
from load_tests.scenarios.scorecard.clients.http_cases import CASES, Case, send
from tests.kit.gateway.http_edge import Edge, serving

NOTHING = Case("nothing", b"", (), closes=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge() -> AsyncIterator[Edge]:
    async with serving() as edge:
        yield edge


def test_there_are_many_cases_with_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_each_case_is_answered_as_it_must_be(edge: Edge, case: Case) -> None:
    seen = await send(edge.host, edge.port, case, "canary")
    assert tuple(answer.status for answer in seen.answers) == case.statuses
    assert (seen.closed, seen.canary) == (case.closes, None if case.closes else True)
    if case.code:
        assert json.loads(seen.answers[-1].body)["error"]["code"] == case.code
    if case.head:
        assert seen.answers[-1].body == b""
    assert (await send(edge.host, edge.port, NOTHING, "after")).canary
    assert not edge.router.streams


@pytest.mark.slow
async def test_no_case_makes_a_proxy_and_the_gateway_disagree(tmp_path: Path) -> None:
    async with serving() as edge, haproxy(edge.host, edge.port, tmp_path) as (host, port):
        for case in CASES:
            await send(host, port, case, "attacker", 20.0)  # the proxy refuses some itself, and mends others
            for victim in range(3):
                outcome = await send(host, port, NOTHING, f"victim-{victim}")
                assert outcome.canary, f"after {case.name!r} a victim got {outcome.answers}"
        ours = [c for c in psutil.Process().net_connections("tcp") if c.laddr.port == edge.port]
        assert len([c for c in ours if c.status == psutil.CONN_ESTABLISHED]) <= 1
