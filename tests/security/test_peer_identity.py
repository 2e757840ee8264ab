"""Peers without a valid identity get no session and no KV block, and rotation costs no stream."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from load_tests.scenarios.scorecard.security.tls_trials import (
    LIMITS,
    NAMES,
    POOL,
    TOKEN,
    Counts,
    Issuers,
    Unchecked,
    Worker,
    impostors,
    rotation,
    router_tls,
    worker_tls,
)

from kvasir.core.errors import ProtocolError
from kvasir.core.messages import Hello
from kvasir.ports.session import WorkerConnection
from kvasir.wire.codec import SERVICE
from kvasir_router.sessions.grpc_transport import DialTls, GrpcDialer
from kvasir_workers.server.grpc_server import GrpcServer


async def test_no_impostor_has_a_session_or_a_snapshot_and_each_is_told_why() -> None:
    counts = Counts()
    await impostors(counts)
    assert counts.accepted == 0
    assert counts.attempts == len(counts.refusals) + 1 == 34
    refusals = counts.refusals
    other, ours = "spiffe://kvasir.local/other/router", "spiffe://kvasir.local/shop/router"
    assert f"certificate is of {other}, but only {ours} may call" in refusals["router of another deployment"]
    assert "shop/worker/decode, but only" in refusals["worker posing as a router, snapshot"]
    assert "closed the connection in the handshake" in refusals["router with an expired certificate"]
    assert "certificate has expired; renew it" in refusals["worker with an expired certificate"]
    assert "not yet valid" in refusals["worker with a certificate of tomorrow, snapshot"]
    assert "an authority that the router trusts has signed it" in refusals["worker of a foreign authority"]
    assert "has no certificate of decode.worker.shop.kvasir.local" in refusals["worker of another pool"]
    assert "'prefill', and its certificate is of pool 'decode'" in refusals["worker that claims another pool"]
    assert "uses plain text" in refusals["worker in plain text"]


async def test_streams_outlive_changes_of_certificates_and_authorities(tmp_path: Path) -> None:
    counts = Counts()
    await rotation(counts, tmp_path / "tls")
    assert (counts.streams, counts.dropped, counts.rotations, counts.connections) == (16, 0, 5, 10)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tls").iterdir()}
    assert modes == {0o600}


async def test_a_router_whose_own_certificate_has_expired_says_so_before_it_dials() -> None:
    class Expired(Unchecked):
        def invalid(self) -> str:
            return "router.pem expired at noon; renew it"

    issuers = Issuers(time.time())
    tls = DialTls(Expired(issuers.ours.pem, issuers.router(age_h=3)), NAMES, POOL)
    with pytest.raises(ProtocolError, match=r"cannot prove its identity: router\.pem expired at noon"):
        await GrpcDialer(TOKEN, LIMITS, tls=tls).dial("127.0.0.1:1", Hello("r", "", 0))


async def test_probes_without_a_certificate_reach_health_on_its_own_port_and_nothing_else() -> None:
    async def nobody(_connection: WorkerConnection) -> None:
        raise AssertionError("a session began")

    issuers = Issuers(time.time())
    tls = worker_tls(issuers.ours.pem, issuers.worker())
    async with Worker.serve(None) as other:
        free = other.address
    server = GrpcServer(nobody, bind="127.0.0.1:0", token=TOKEN, tls=tls, health_bind=free)
    port = await server.start()
    await server.set_serving(True)
    request = health_pb2.HealthCheckRequest()
    async with grpc.aio.insecure_channel(free) as probe:
        answer = await health_pb2_grpc.HealthStub(probe).Check(request)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        call = probe.stream_stream(f"/{SERVICE}/Session", None, None)(
            None, metadata=(("authorization", f"Bearer {TOKEN}"),)
        )
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as probe:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(probe).Check(request)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


async def test_an_honest_pair_meets_over_tls() -> None:
    issuers = Issuers(time.time())
    async with Worker.serve(worker_tls(issuers.ours.pem, issuers.worker())) as worker:
        dialer = GrpcDialer(TOKEN, LIMITS, tls=router_tls(issuers.ours.pem, issuers.router()))
        connection = await dialer.dial(worker.address, Hello("router", "", 0))
        assert connection.welcome.identity.pool == POOL
        await connection.close()
