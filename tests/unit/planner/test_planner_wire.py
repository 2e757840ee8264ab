"""Routers and the planner over real gRPC: the token is required, and nothing counts twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from kvasir.core.demand import DemandReport, PlannerReply, PoolForecast, PoolPlan, Traffic
from kvasir.core.errors import ConfigError, UpstreamError
from kvasir.core.requests import Role
from kvasir_platform.planner.rpc import METHOD, SERVICE, PlannerClient, PlannerServer

FORECAST = PoolForecast(0.5, 1.25, 1.5, ("the forecast needs 2", "max is 4"))
WORD = PlannerReply(
    "life", True, {"w-1": Role.DECODE}, {"tiny": 4.5}, {"decode": PoolPlan(2, 1, 1, True, FORECAST)}
)


class Planner:
    def __init__(self) -> None:
        self.heard: list[DemandReport] = []

    def take(self, report: DemandReport) -> PlannerReply:
        self.heard.append(report)
        return WORD


@contextmanager
def listening(token: str = "secret") -> Iterator[tuple[Planner, str]]:
    planner = Planner()
    server = PlannerServer("127.0.0.1:0", token, planner.take)
    try:
        yield planner, server.address
    finally:
        server.close()


async def _tell(address: str, token: str, report: DemandReport) -> PlannerReply:
    client = PlannerClient(address, token)
    try:
        return await client.tell(report)
    finally:
        await client.close()


REPORT = DemandReport("router-1", "life", 3, {"tiny": Traffic(arrived=5, computed_squares=1 << 60)})


def test_a_report_arrives_whole_and_so_does_the_answer() -> None:
    with listening() as (planner, address):
        assert asyncio.run(_tell(address, "secret", REPORT)) == WORD
    assert planner.heard == [REPORT]


def test_who_has_another_token_is_not_heard_and_is_told_so() -> None:
    refused = pytest.raises(UpstreamError, match="session token of the peer differs")
    with listening() as (planner, address), refused:
        asyncio.run(_tell(address, "guessed", REPORT))
    assert planner.heard == []


def test_an_answer_is_believed_only_with_the_token_and_to_its_own_report() -> None:
    with listening("theirs") as (planner, address), grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/{METHOD}", request_serializer=None, response_deserializer=None
        )
        for forged in (b"", b"x" * 31, b"\0" * 32 + b"{}"):
            with pytest.raises(grpc.RpcError) as refused:
                call(forged, timeout=5)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert planner.heard == []


def test_nobody_listening_is_an_upstream_error() -> None:
    with listening() as (_, address):
        pass
    with pytest.raises(UpstreamError, match="does not respond"):
        asyncio.run(_tell(address, "secret", REPORT))


def test_a_taken_port_is_said_to_be_taken() -> None:
    with listening() as (planner, address), pytest.raises(ConfigError, match="free the port"):
        PlannerServer(address, "secret", planner.take)
