"""A router with several HTTP processes: clients and operators see one deployment whichever process they
reach, and nothing leaks when one exits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.kit.lab import gateway
from tests.kit.lab.fleet import Fleet, Layout
from tests.kit.lab.stream import Ask, Outcome, Stream, open_stream

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment, EngineSpec, GatewaySpec, PoolSpec, SimSpec
from kvasir.config.spec.edge import EdgeTlsSpec
from kvasir.config.spec.tenants import TenancySpec, TenantSpec
from kvasir.core.errors import StartError
from kvasir.core.requests import Role

pytestmark = pytest.mark.slow

EDGES = 2
PATIENCE_S = 60.0
CLOCK = MonotonicClock()
STEP_S = 0.02


def deployment(gateway_spec: GatewaySpec | None = None, **fields: Any) -> Deployment:
    timing = SimSpec(prefill_tokens_per_s=1e6, decode_step_s=STEP_S, decode_step_per_seq_s=0.0)
    engine = EngineSpec(kind="sim", block_size=32, kv_cache_bytes=64 << 20, sim=timing)
    return Deployment(
        name="edges",
        disaggregation="never",
        pools=(PoolSpec(name="both", role=Role.BOTH, engine=engine),),
        gateway=gateway_spec or GatewaySpec(edges=EDGES, drain_timeout_s=20.0),
        **fields,
    )


@asynccontextmanager
async def fleet(folder: Path, spec: Deployment) -> AsyncIterator[Fleet]:
    async with Fleet(folder, spec, Layout({"both": 1}), clock=CLOCK) as made:
        yield made


def edges(of: Fleet) -> list[psutil.Process]:
    """The edge processes of the first router."""
    return psutil.Process(of.routers[0].process.pid).children()


async def streams(of: Fleet, count: int, tokens: int = 8) -> list[Stream]:
    """Streams on connections of their own, each with a first token when this returns."""
    asks = [Ask((i + 1, 7, 9, 11), tokens) for i in range(count)]
    opened = [await open_stream(of.address, ask, CLOCK) for ask in asks]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(stream.begun.wait() for stream in opened))
    return opened


async def outcomes(opened: Sequence[Stream]) -> list[Outcome]:
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(stream.ended.wait() for stream in opened))
    return [stream.outcome for stream in opened]


async def until(what: str, condition: Any, within_s: float = PATIENCE_S) -> None:
    await gateway.until(condition, within_s, what, CLOCK, 0.05)


async def test_all_edges_are_one_gateway_and_one_that_is_killed_is_replaced(tmp_path: Path) -> None:
    async with fleet(tmp_path, deployment()) as made:
        assert len(edges(made)) == EDGES
        first = await outcomes(await streams(made, 24))
        assert all(outcome.exact for outcome in first)

        async def counted(series: str, **labels: str) -> float:
            return gateway.metric(await gateway.metrics(made.address), series, **labels)

        # Whichever edge is asked, it shows what all of them did, and knows every request.
        for _ in range(8):
            assert await counted("kvasir_requests_total", outcome="ok") == 24
            assert await counted("kvasir_output_tokens_total") == 24 * 8
            assert await counted("kvasir_time_to_first_token_seconds_count") == 24
            page = await gateway.decision(made.address, first[0].request_id)
            assert page["decisions"][0]["outcome"] == "ok"
            assert len((await gateway.status(made.address))["workers"]) == 1

        opened = await streams(made, 24, tokens=150)
        victim, survivor = edges(made)
        assert (await gateway.status(made.address))["in_flight"] == 24
        victim.kill()
        ended = await outcomes(opened)
        cut = [outcome for outcome in ended if not outcome.exact]
        assert 0 < len(cut) < 24
        assert {outcome.error for outcome in cut} <= {"cut", "reset"}

        async def quiet() -> bool:
            status = await gateway.status(made.address)
            return not status["in_flight"] and not status["workers"][0]["in_flight"]

        await until("what the killed edge ran is freed", quiet)
        assert await counted("kvasir_requests_total", outcome="ok") == 48 - len(cut)

        async def back() -> bool:
            return len(edges(made)) == EDGES

        await until("another edge has taken its place", back)
        assert survivor.is_running()
        assert all(outcome.exact for outcome in await outcomes(await streams(made, 8)))
        assert await counted("kvasir_requests_total", outcome="ok") == 56 - len(cut)


async def test_a_limit_is_counted_once_and_a_drain_lets_all_edges_end_in_good_order(tmp_path: Path) -> None:
    limited = TenancySpec(tenants=(TenantSpec(name="default", requests_per_min=20, operator=True),))
    async with fleet(tmp_path, deployment(tenancy=limited)) as made:
        opened = await streams(made, 2, tokens=400)
        ended = await outcomes(await streams(made, 38, tokens=2))
        passed = len(opened) + sum(outcome.exact for outcome in ended)
        assert 20 <= passed <= 24, "two edges that count alone would let 40 in"
        refused = [outcome for outcome in ended if not outcome.exact]
        assert {outcome.error for outcome in refused} == {"rate_limit_requests"}
        assert {outcome.status for outcome in refused} == {429}
        assert all(outcome.retry_after_s for outcome in refused)
        refusals = gateway.metric(await gateway.metrics(made.address), "kvasir_tenant_refused_total")
        assert refusals == len(refused)
        assert (await gateway.status(made.address))["in_flight"] == len(opened)
        running = edges(made)
        await made.routers[0].process.terminate(grace_s=PATIENCE_S)
        assert all(outcome.exact for outcome in await outcomes(opened))
        assert not any(process.is_running() for process in running)


async def test_without_its_core_every_stream_ends_with_a_clean_error_and_no_edge_stays(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, deployment()) as made:
        opened = await streams(made, 16, tokens=400)
        running = edges(made)
        await made.routers[0].process.kill()
        ended = await outcomes(opened)
        assert {outcome.error for outcome in ended} == {"router_lost"}
        _, alive = await asyncio.to_thread(psutil.wait_procs, running, timeout=PATIENCE_S)
        assert alive == []


async def test_what_keeps_an_edge_from_starting_is_what_the_router_says(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("this is no certificate")
    tls = EdgeTlsSpec(cert_file=str(tmp_path / "cert.pem"), key_file=str(tmp_path / "cert.pem"))
    spec = deployment(GatewaySpec(edges=EDGES, tls=tls))
    with pytest.raises(StartError, match=r"config_error.*cert\.pem"):
        async with fleet(tmp_path, spec):
            pass
